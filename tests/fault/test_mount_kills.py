"""kill -9 of the mount, the metadata server and the mover at random moments under readers: pauses
and errors, never wrong bytes; afterwards the same names, inode numbers and bytes, and what was
cached is used again."""

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.mount.command import Answer, Hsfs, end, eventually
from tests.mount.sources import Bucket, Folder, content

KINDS = ("file", "nfs", "s3")
SIZES = (0, 10, 5_000, 200_000, 3_000_000)
KILLS = 6
PAUSES = {"EIO", "ETIMEDOUT", "ESTALE"}
DEAD = {"ENOTCONN", "ECONNABORTED", "ENOENT"}  # the mount is dead, or out of the tree


class Load:
    """A thread with a reading child: files of all kinds in random order, until stopped. It collects
    what should not have been."""

    def __init__(self, hsfs, mnt, want, seed):
        self._reader = hsfs.reader()
        self._mnt, self._want = mnt, want
        self._random = random.Random(repr(seed))
        self._stop = threading.Event()
        self.wrong = []
        self.right = 0
        self.errors = {}
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        names = list(self._want)
        try:
            while not self._stop.is_set():
                name = self._random.choice(names)
                said = self._reader.read(self._mnt / name, 120).which(right=self._want[name])
                if said == "right":
                    self.right += 1
                else:
                    self.errors[said] = self.errors.get(said, 0) + 1
                    time.sleep(0.02)
        except Exception as error:
            self.wrong.append(error)

    def stop(self):
        self._stop.set()
        self._thread.join(150)
        assert not self._thread.is_alive(), "a reader hangs"
        assert self.wrong == []


class Place:
    def __init__(self, nas, lake, name):
        self.hsfs = Hsfs(lake.env)
        self.mnt = self.hsfs.mountpoint()
        export = Path(nas.export, name)
        self.sources = {
            "file": Folder(self.hsfs.root / "src", "/file"),
            "nfs": Folder(export, "/nfs"),
            "s3": Bucket(lake, name, "/s3"),
        }
        self.want = {}
        for kind, source in self.sources.items():
            for number in range(25):
                path = f"d{number % 3}/{number:02}"
                data = content((kind, number), SIZES[number % len(SIZES)])
                source.put(path, data)
                self.want[f"{kind}/{path}"] = data
        urls = {
            "file": f"file://{self.hsfs.root / 'src'}",
            "nfs": nas.url_of(str(export)),
            "s3": f"s3://{name}?endpoint={lake.endpoint}",
        }
        self.volume = self.hsfs.volume(
            *({"name": k, "url": urls[k], "at": f"/{k}", "freshness": "1s"} for k in KINDS),
            mount={"readahead": "1M"},
        )
        self.reader = self.hsfs.reader()
        self.hsfs.mount(self.volume, self.mnt)

    def check_all(self):
        """Every file is right, in the end, and nothing else is there."""
        for name, data in self.want.items():
            self.hsfs.seen(lambda name=name: self.reader.read(self.mnt / name, 120), data)
        for kind in KINDS:
            assert self.reader.list(self.mnt / kind) == ["d0", "d1", "d2"]

    def inos(self):
        return {name: self.reader.ino(self.mnt / name) for name in self.want}

    def alive(self, number):
        """A change at each source shows: all the parts work together again."""
        for kind, source in self.sources.items():
            data = content((kind, "new", number), 4321)
            source.put("d1/new", data)
            path = self.mnt / kind / "d1/new"
            self.hsfs.seen(lambda path=path: self.reader.read(path, 120), data)
        for source in self.sources.values():
            source.delete("d1/new")

    def remount(self):
        self.hsfs.umount(self.mnt, "--force")
        assert not self.hsfs.mounted(self.mnt)
        self.hsfs.mount(self.volume, self.mnt)

    def close(self):
        self.hsfs.clean()
        self.sources["s3"].close()


@pytest.fixture(scope="module")
def place(nas, lake):
    place = Place(nas, lake, f"kills{os.getpid()}")
    yield place
    place.close()


@pytest.fixture(autouse=True)
def logs(place):
    yield
    print(place.hsfs.logs(60))


def kill(hsfs, mnt, victim):
    """SIGKILL, and wait until it is gone; the pid."""
    if victim == "mount":
        pid = hsfs.mount_pid(mnt)
    elif victim == "mds":
        pid = hsfs.mds_pid()
    else:
        pid = eventually(hsfs.mover_pid, "a mover")
    end(pid, signal.SIGKILL)
    return pid


@pytest.mark.parametrize("victim", ["mount", "mds", "mover"])
def test_killed_under_load(place, victim):
    hsfs, mnt = place.hsfs, place.mnt
    place.check_all()
    before = place.inos()
    moments = random.Random(victim)
    loads = [Load(hsfs, mnt, place.want, (victim, n)) for n in range(3)]
    try:
        for _ in range(KILLS):
            time.sleep(moments.uniform(0.0, 0.6))  # a moment, not a wait for something
            pid = kill(hsfs, mnt, victim)
            if victim == "mount":
                place.remount()
            elif victim == "mds":
                eventually(lambda pid=pid: hsfs.mds_pid() != pid, "another metadata server")
            else:
                eventually(lambda pid=pid: hsfs.mover_pid() not in (0, pid), "another mover")
            rights = [load.right for load in loads]
            eventually(
                lambda rights=rights: all(
                    load.right > right or load.wrong
                    for load, right in zip(loads, rights, strict=True)
                ),
                lambda: [(load.right, load.errors, load.wrong) for load in loads],
                90,
            )
            hsfs.note_pids()
    finally:
        for load in loads:
            load.stop()
    for load in loads:
        assert set(load.errors) <= (PAUSES | DEAD if victim == "mount" else PAUSES), load.errors
        assert load.right
    place.alive(victim)
    place.check_all()
    assert place.inos() == before
    eventually(lambda: hsfs.status(mnt)["state"] == "ok", lambda: hsfs.status(mnt))


def test_all_three_killed_at_once(place):
    hsfs, mnt = place.hsfs, place.mnt
    place.check_all()
    before = place.inos()
    load = Load(hsfs, mnt, place.want, 7)
    for victim in ("mover", "mds", "mount"):
        kill(hsfs, mnt, victim)
    assert hsfs.json("status", check=3)["mounts"][0]["state"] == "dead"
    place.remount()
    eventually(lambda: hsfs.status(mnt)["state"] == "ok", lambda: hsfs.status(mnt))
    load.stop()
    place.alive("all")
    place.check_all()
    assert place.inos() == before


def test_the_cache_survives_the_kill(place):
    """What had been cached for a while is not fetched again, and is right."""
    hsfs, mnt, reader = place.hsfs, place.mnt, place.reader
    place.check_all()
    big = {name: data for name, data in place.want.items() if len(data) == max(SIZES)}
    for pause_s in (1.5, 3, 6, 12):
        for name, data in big.items():
            assert reader.read(mnt / name).is_(data)
        time.sleep(pause_s)  # the index is written twice a second
        kill(hsfs, mnt, "mount")
        place.remount()
        for name, data in big.items():
            hsfs.seen(lambda name=name: reader.read(mnt / name), data)
        fetched = sum(hsfs.stats(mnt)["backend_bytes"].values())
        if fetched == 0:
            break
    assert fetched == 0, (pause_s, fetched)


def test_an_open_handle_outlives_metadata_server_and_mover(place):
    hsfs, mnt, reader = place.hsfs, place.mnt, place.reader
    data = {kind: content((kind, "long"), 8 << 20) for kind in KINDS}
    for kind, source in place.sources.items():
        source.put("d0/long", data[kind])
        hsfs.refresh(mnt / kind / "d0")
        eventually(lambda kind=kind: reader.open(mnt / kind / "d0/long", kind) == "", kind)
        assert reader.pread(kind, 0, 4096).is_(data[kind][:4096])
    kill(hsfs, mnt, "mover")
    kill(hsfs, mnt, "mds")
    for kind in KINDS:
        for offset in range(0, 8 << 20, 1 << 20):
            right = data[kind][offset : offset + 65536]
            eventually(
                lambda kind=kind, offset=offset, right=right: (
                    Answer(reader.do("pread", 120, name=kind, offset=offset, size=65536)).which(
                        right=right
                    )
                    == "right"
                ),
                (kind, offset),
            )
        reader.do("close", name=kind)
    for source in place.sources.values():
        source.delete("d0/long")
    hsfs.note_pids()


def test_killed_while_it_starts(place):
    """A mount command that is killed, or whose processes are, leaves nothing in the way."""
    hsfs, mnt = place.hsfs, place.mnt
    hsfs.umount(mnt)
    moments = random.Random(11)
    for _ in range(4):
        timer = threading.Timer(moments.uniform(0.2, 1.2), _kill_one, (hsfs, moments))
        timer.start()
        done = hsfs.run("mount", place.volume, mnt, check=None)
        timer.join()
        hsfs.note_pids()
        if done.returncode:
            assert done.returncode == 32, done.stderr
            assert done.stderr.startswith("hsfs: "), done.stderr
            assert "Traceback" not in done.stderr
        hsfs.run("umount", mnt, "--force", check=0)
        assert not hsfs.mounted(mnt)
        assert os.listdir(mnt) == []
    hsfs.mount(place.volume, mnt)
    place.check_all()


def _kill_one(hsfs, moments):
    """Whatever runs of this volume, at random."""
    hsfs.note_pids()
    pids = [pid for pid in hsfs.pids if hsfs.ours(pid)]
    if pids:
        end(moments.choice(pids), signal.SIGKILL)
