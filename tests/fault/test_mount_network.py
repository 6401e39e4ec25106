"""Networks and servers that fail under a mount: right bytes or an errno, in bounded time, and all
is well again when the fault is over.

Backends with `timeout = "3s"`: limits in here are far longer, because the machine may be busy.
"""

import itertools
import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest

from tests.mount.command import Answer, Hsfs, eventually
from tests.mount.sources import Bucket, Folder, content
from tests.servers.ganesha import Ganesha
from tests.servers.proxy import Proxy
from tests.servers.seaweedfs import SeaweedFS

KINDS = ("nfs", "s3")
SMALL, BIG = 60_000, 6 << 20
FAILED = {"EIO", "ETIMEDOUT", "ESTALE", "EACCES"}
QUICK_S = 25  # what takes a second on a quiet machine and may not wait for a backend
numbers = itertools.count()


class Place:
    """An NFS server and a bucket behind proxies. `/nfs` and `/s3` are believed for an hour, so that
    reads alone meet the fault; `/nfs-1s` and `/s3-1s` are the same places, asked again each
    second."""

    def __init__(self, nas, lake, nfs_proxy, s3_proxy):
        self.servers = {"nfs": nas, "s3": lake}
        self.proxies = {"nfs": nfs_proxy, "s3": s3_proxy}
        self.sources = {
            "nfs": Folder(Path(nas.export), "/nfs"),
            "s3": Bucket(lake, "network", "/s3"),
        }
        self.hsfs = Hsfs(lake.env)
        self.mnt = self.hsfs.mountpoint()
        self.local = Folder(self.hsfs.root / "src", "/file")
        self.local.put("here", b"here")
        tables = [
            self.backend(kind, at=f"/{kind}{suffix}", freshness=freshness)
            for kind in KINDS
            for suffix, freshness in (("", "1h"), ("-1s", "1s"))
        ]
        tables.append({"name": "file", "url": f"file://{self.local.folder}"})
        volume = self.hsfs.volume(*tables, mount={"readahead": "2M"})
        self.hsfs.mount(volume, self.mnt)
        self.reader = self.hsfs.reader()
        self.readers = {(kind, file): self.hsfs.reader() for kind in KINDS for file in "sb"}

    def backend(self, kind, *, at, timeout="3s", **keys):
        port, server = self.proxies[kind].port, self.servers[kind]
        if kind == "nfs":
            url = f"nfs://127.0.0.1{server.export}?port={port}&mountport={server.mount_port}"
        else:
            url = f"s3://network?endpoint=http://127.0.0.1:{port}"
        return {"name": at.strip("/"), "url": url, "at": at, "timeout": timeout, **keys}

    def files(self):
        """A new directory at both with a small and a big file, known to the mount and not cached:
        its name, and the content of the files."""
        name = f"t{next(numbers)}"
        data = {file: content((name, file), size) for file, size in (("s", SMALL), ("b", BIG))}
        for kind in KINDS:
            for file, body in data.items():
                self.sources[kind].put(f"{name}/{file}", body)
            self.hsfs.refresh(self.mnt / kind)
        return name, data

    def check(self, name, data, kinds=KINDS):
        """What reads of all files at once say now: kind -> {"right"} or errnos; fails on wrong
        bytes."""
        orders = [(kind, file) for kind in kinds for file in data]
        for kind, file in orders:
            self.readers[kind, file].begin("read", path=self.mnt / kind / name / file)
        said = {kind: set() for kind in kinds}
        for kind, file in orders:
            answer = Answer(self.readers[kind, file].end(120))
            said[kind].add(answer.which(right=data[file]))
            assert said[kind] <= {"right", *FAILED}, (kind, file, answer)
        return said

    def until_right(self, name, data, kinds=KINDS):
        for kind in kinds:
            eventually(lambda kind=kind: self.check(name, data, [kind])[kind] == {"right"}, kind)

    def until_ok(self):
        """`status` has nothing to complain of."""
        eventually(
            lambda: set(self.hsfs.states(self.mnt).values()) == {"ok"},
            lambda: self.hsfs.status(self.mnt),
        )


@pytest.fixture(scope="module")
def place():
    folder = Path(tempfile.mkdtemp(prefix="hsfs-test-nas-", dir="/var/tmp"))
    with (
        Ganesha(folder) as nas,
        SeaweedFS() as lake,
        Proxy(nas.port, mode="tcp") as nfs_proxy,
        Proxy(lake.port) as s3_proxy,
    ):
        place = Place(nas, lake, nfs_proxy, s3_proxy)
        with place.hsfs:
            yield place
        place.sources["s3"].close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def healthy(place):
    """No test leaves its faults to the next."""
    yield
    for proxy in place.proxies.values():
        proxy.clear()
    for server in place.servers.values():
        server.resume()
    print(place.hsfs.logs(60))


BODY = {"min_body": SMALL // 2}
# Name -> (the fault, whether reads come right while it lasts; None = they may).
S3_FAULTS = {
    "delay": (lambda p: p.delay(0.2), True),
    "cap": (lambda p: p.cap(4_000_000), True),
    "cut": (lambda p: (p.cut(30_000, path="/s"), p.cut(900_000, path="/b")), True),
    "cut thrice": (lambda p: p.cut(100, times=3, **BODY), True),
    "truncate": (lambda p: (p.truncate(30_000, path="/s"), p.truncate(900_000, path="/b")), True),
    "truncate thrice": (lambda p: p.truncate(100, times=3, **BODY), True),
    "short": (lambda p: p.short(30_000, **BODY), None),
    "short twice": (lambda p: p.short(30_000, times=2, **BODY), True),
    "error body": (lambda p: p.error_body(method="GET"), False),
    "error body twice": (lambda p: p.error_body(times=2, method="GET"), True),
    "other body": (lambda p: p.error_body("<html>sign in first</html>"), False),
    "503": (lambda p: p.status(503, retry_after_s=1), False),
    "503 storm": (lambda p: p.status(503, retry_after_s=1, times=6), True),
    "every third 500": (lambda p: p.status(500, every=3), True),
    "403": (lambda p: p.status(403), False),
    "404": (lambda p: p.status(404, method="GET"), False),
    "hole": (lambda p: p.hole(), False),
    "refuse": (lambda p: p.refuse(), False),
}
NFS_FAULTS = {
    "delay": (lambda p: (p.delay(0.05), p.drop()), True),
    "cap": (lambda p: p.cap(4_000_000), True),
    "cut": (lambda p: (p.cut(100_000), p.drop()), None),
    "cut thrice": (lambda p: (p.cut(100_000, times=3), p.drop()), True),
    "drop": (lambda p: p.drop(), True),
    "hole": (lambda p: p.hole(), False),
    "refuse": (lambda p: p.refuse(), False),
}


FAULTS = {"s3": S3_FAULTS, "nfs": NFS_FAULTS}


@pytest.mark.parametrize("fault", list({**S3_FAULTS, **NFS_FAULTS}))
def test_reads_through_a_fault(place, fault):
    name, data = place.files()
    kinds = [kind for kind in KINDS if fault in FAULTS[kind]]
    for kind in kinds:
        FAULTS[kind][fault][0](place.proxies[kind])
    said = place.check(name, data, kinds)
    for kind in kinds:
        comes_right = FAULTS[kind][fault][1]
        assert comes_right is not False or "right" not in said[kind], "the fault does nothing"
        if comes_right:
            place.until_right(name, data, [kind])
    assert place.reader.read(place.mnt / "file/here").is_(b"here")
    for kind in kinds:
        place.proxies[kind].clear()
    place.until_right(name, data)


def test_a_flipped_bit_of_a_small_object_is_caught(place):
    """The ETag of an object that was put in one piece is its MD5. Large ones: SEMANTICS.md."""
    name, data = place.files()
    file = place.mnt / "s3" / name / "s"
    place.proxies["s3"].corrupt(1234, **BODY, path="/s")
    assert place.reader.read(file).errno == "EIO"
    place.proxies["s3"].clear()
    place.hsfs.seen(lambda: place.reader.read(file), data["s"])
    name, data = place.files()
    file = place.mnt / "s3" / name / "s"
    place.proxies["s3"].corrupt(1234, **BODY, path="/s", times=1)
    place.hsfs.seen(lambda: place.reader.read(file), data["s"])


def test_names_through_a_fault(place):
    """What is due to be confirmed fails within the deadline; nothing vanishes; it comes back."""
    place.until_ok()
    name, _ = place.files()
    reader = place.reader
    known = {kind: place.mnt / f"{kind}-1s" / name for kind in KINDS}
    for kind in KINDS:
        eventually(lambda kind=kind: reader.list(known[kind]) == ["b", "s"], kind)
    place.proxies["nfs"].hole()
    place.proxies["s3"].refuse()
    time.sleep(1.1)  # older than its freshness
    for kind in KINDS:
        seen = eventually(
            lambda kind=kind: (said := reader.list(known[kind], 120)) != ["b", "s"] and said, kind
        )
        assert seen in FAILED
        for file in ("b", "absent"):
            assert reader.ino(known[kind] / file, 120) in FAILED, (kind, file)
        # This one is believed for an hour.
        assert reader.list(place.mnt / kind / name, 120) == ["b", "s"]
        place.sources[kind].put(f"{name}/c", b"new")
        place.proxies[kind].clear()
    for kind in KINDS:
        eventually(
            lambda kind=kind: reader.list(known[kind], 120) == ["b", "c", "s"],
            lambda kind=kind: reader.list(known[kind]),
        )
        assert reader.read(known[kind] / "c").is_(b"new")
        eventually(lambda kind=kind: reader.ino(known[kind] / "absent") == "ENOENT", kind)


def open_and_begin(place, name, data):
    """Big files of both, open and read a little: readers by kind."""
    readers = {kind: place.readers[kind, "b"] for kind in KINDS}
    for kind, reader in readers.items():
        assert reader.open(place.mnt / kind / name / "b", "h") == ""
        assert reader.pread("h", 0, 100_000).is_(data["b"][:100_000])
    return readers


def fail_then_go_on(readers, big, recover):
    """The second half of both files can't be read, and then it can, by the same handles."""
    half = BIG // 2
    for reader in readers.values():
        reader.begin("pread", name="h", offset=half, size=BIG - half)
    for kind, reader in readers.items():
        assert Answer(reader.end(120)).which(right=big[half:]) in FAILED, kind
    recover()
    for kind, reader in readers.items():
        eventually(
            lambda reader=reader: reader.pread("h", 0, BIG).which(right=big) == "right", kind, 120
        )
        reader.do("close", name="h")


def test_servers_that_stop_in_the_middle_of_a_read(place):
    name, data = place.files()
    readers = open_and_begin(place, name, data)
    for server in place.servers.values():
        server.pause()

    def recover():
        eventually(
            lambda: {place.hsfs.states(place.mnt)[kind] for kind in KINDS} == {"unreachable"},
            lambda: place.hsfs.states(place.mnt),
        )
        assert place.reader.read(place.mnt / "file/here").is_(b"here")
        for server in place.servers.values():
            server.resume()

    fail_then_go_on(readers, data["b"], recover)
    place.until_right(name, data)
    place.until_ok()


def test_servers_that_are_killed_and_come_back(place):
    name, data = place.files()
    readers = open_and_begin(place, name, data)
    for server in place.servers.values():
        server.kill()

    def recover():
        for kind in KINDS:
            assert place.reader.read(place.mnt / kind / name / "s", 120).errno in FAILED
        for server in place.servers.values():
            server.restart()

    fail_then_go_on(readers, data["b"], recover)
    place.until_right(name, data)


def slow_backends(place, **keys):
    """Both servers with a timeout of ten minutes: whoever waited for a backend would be seen."""
    return [place.backend(kind, at=f"/{kind}", **{"timeout": "600s", **keys}) for kind in KINDS]


def pause(place):
    for server in place.servers.values():
        server.pause()
    time.sleep(1.1)  # older than a freshness of 1 s


@pytest.mark.parametrize("force", [False, True], ids=["umount", "force"])
def test_nothing_of_hsfs_waits_for_a_stopped_server(place, force):
    name, data = place.files()
    with Hsfs(place.servers["s3"].env) as slow:
        local = {"name": "file", "url": f"file://{place.local.folder}"}
        mnt = slow.mountpoint()
        slow.mount(slow.volume(*slow_backends(place, freshness="1s"), local), mnt)
        reader = slow.reader()
        stuck = {kind: slow.reader() for kind in KINDS}
        for kind in KINDS:
            big = mnt / kind / name / "b"
            eventually(lambda big=big, kind=kind: reader.open(big, kind) == "", kind)
            assert reader.pread(kind, 0, 4096).is_(data["b"][:4096])
        pause(place)
        for kind in KINDS:
            stuck[kind].begin("read", path=mnt / kind / name / "s")

        began = time.monotonic()
        assert slow.status(mnt)["pid"]
        assert time.monotonic() - began < QUICK_S
        assert slow.stats(mnt)["mountpoint"] == str(mnt)
        assert reader.do("statvfs", QUICK_S, path=mnt) > 0
        assert reader.read(mnt / "file/here", QUICK_S).is_(b"here")
        assert reader.list(mnt, QUICK_S) == ["file", *KINDS]
        assert all(each.pending() for each in stuck.values())
        began = time.monotonic()
        if force:
            slow.umount(mnt, "--force")
            for each in stuck.values():
                assert each.end(QUICK_S)["errno"] in {"ENOTCONN", "ECONNABORTED", "EIO", "EINTR"}
        else:
            refused = slow.run("umount", mnt, check=1)
            assert "in use" in refused.stderr
            for kind in KINDS:
                reader.do("close", name=kind)
                # Its process stays until its read ends: the session can't interrupt it.
                stuck[kind].kill()
            slow.umount(mnt, "--force")
        assert time.monotonic() - began < QUICK_S
        assert not slow.mounted(mnt)
        slow.umount(mnt)
        slow.umount(mnt, "--force")
        for server in place.servers.values():
            server.resume()
    place.until_right(name, data)


def test_an_idle_mount_of_stopped_servers_unmounts(place):
    name, _ = place.files()
    with Hsfs(place.servers["s3"].env) as slow:
        mnt = slow.mountpoint()
        slow.mount(slow.volume(*slow_backends(place, freshness="1s")), mnt)
        reader = slow.reader()
        for kind in KINDS:
            path = mnt / kind / name
            eventually(lambda path=path: reader.list(path) == ["b", "s"], kind)
        pause(place)
        began = time.monotonic()
        slow.umount(mnt)
        assert time.monotonic() - began < QUICK_S
        assert os.listdir(mnt) == []
        for server in place.servers.values():
            server.resume()


@pytest.mark.soak
def test_stopped_for_a_minute_with_the_default_timeout(place):
    name, data = place.files()
    with Hsfs(place.servers["s3"].env) as slow:
        mnt = slow.mountpoint()
        volume = slow.volume(*slow_backends(place, timeout="30s"), mount={"readahead": "1M"})
        slow.mount(volume, mnt)
        readers = {kind: slow.reader() for kind in KINDS}
        for kind, reader in readers.items():
            big = mnt / kind / name / "b"
            eventually(lambda reader=reader, big=big: reader.open(big, "h") == "", kind)
            assert reader.pread("h", 0, 4096).is_(data["b"][:4096])
        pause(place)
        began = time.monotonic()

        def recover():
            assert 20 < time.monotonic() - began < 90
            time.sleep(max(0.0, 60 - (time.monotonic() - began)))
            for server in place.servers.values():
                server.resume()

        fail_then_go_on(readers, data["b"], recover)
        slow.umount(mnt)
