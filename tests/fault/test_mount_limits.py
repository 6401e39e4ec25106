"""Few file descriptors, little memory, many readers, several mounts: all reads are right."""

import os
import time
from pathlib import Path

import pytest

from tests.mount.command import Answer, Hsfs, eventually
from tests.mount.sources import Bucket, Folder, content

KINDS = ("file", "nfs", "s3")
MIB = 1 << 20
SMALL, BIG = 40_000, 6 * MIB


class Tree:
    """The same tree at each kind of source: 300 small files in directories, eight big ones."""

    def __init__(self, nas, lake):
        self.name = f"limits{os.getpid()}"
        export = Path(nas.export, self.name)
        self.local = export.with_name(self.name + "-local")
        self.sources = {
            "file": Folder(self.local, "/file"),
            "nfs": Folder(export, "/nfs"),
            "s3": Bucket(lake, self.name, "/s3"),
        }
        self.urls = {
            "file": f"file://{self.local}",
            "nfs": nas.url_of(str(export)),
            "s3": f"s3://{self.name}?endpoint={lake.endpoint}",
        }
        self.want = {f"d{n % 10}/{n:03}": content(n, SMALL) for n in range(300)}
        self.want.update({f"big/{n}": content(n, BIG) for n in range(8)})
        for kind in ("file", "nfs"):
            for name, data in self.want.items():
                self.sources[kind].put(name, data)
        lake.put_many(self.name, self.want.items())
        self.lake = lake

    def volume(self, hsfs, freshness="1h", **tables):
        backends = [
            {"name": kind, "url": self.urls[kind], "at": f"/{kind}", "freshness": freshness}
            for kind in KINDS
        ]
        return hsfs.volume(*backends, **tables)


@pytest.fixture(scope="module")
def tree(nas, lake):
    tree = Tree(nas, lake)
    yield tree
    tree.sources["s3"].close()


@pytest.fixture
def hsfs(lake):
    with Hsfs(lake.env) as hsfs:
        yield hsfs
        print(hsfs.logs(60))


def begin_all(readers, mnt, names):
    """Each reader reads a file; the answers are taken by `check_all`."""
    for reader, name in zip(readers, names, strict=True):
        reader.begin("read", path=mnt / name)


def check_all(readers, names, want):
    for reader, name in zip(readers, names, strict=True):
        answer = Answer(reader.end(120))
        assert answer.is_(want[name.partition("/")[2]]), (name, answer)


def test_few_file_descriptors(tree, hsfs):
    """256 for the whole mount: three backends, 64 open files, a tree of hundreds."""
    mnt = hsfs.mountpoint()
    hsfs.mount(tree.volume(hsfs), mnt, prefix=["prlimit", "--nofile=256:256", "--"])
    reader = hsfs.reader()
    opened = [f"{kind}/{name}" for kind in KINDS for name in list(tree.want)[-22:]][:64]
    for name in opened:
        assert reader.open(mnt / name, name) == "", name
    readers = [hsfs.reader() for _ in KINDS]
    for name in tree.want:
        names = [f"{kind}/{name}" for kind in KINDS]
        begin_all(readers, mnt, names)
        check_all(readers, names, tree.want)
    for name in opened:
        data = tree.want[name.partition("/")[2]]
        for offset in (0, len(data) // 2, len(data) - 1000):
            answer = reader.pread(name, offset, 1000)
            assert answer.is_(data[offset : offset + 1000]), (name, offset, answer)
    pid = hsfs.mount_pid(mnt)
    assert len(os.listdir(f"/proc/{pid}/fd")) < 256
    assert hsfs.status(mnt)["state"] == "ok"
    for name in opened:
        reader.do("close", name=name)
    hsfs.umount(mnt)


def test_many_readers_in_little_memory(tree, hsfs):
    """64 readers at once over all backends in 128 MiB."""
    mnt = hsfs.mountpoint()
    limit = 128 * MIB
    hsfs.mount(tree.volume(hsfs, mount={"memory_limit": "128M"}), mnt)
    readers = [hsfs.reader() for _ in range(64)]
    names = [f"{kind}/{name}" for name in list(tree.want)[-29:] for kind in KINDS]
    peak, pid = 0, hsfs.mount_pid(mnt)
    for start in range(0, len(names), len(readers)):
        some = names[start : start + len(readers)]
        begin_all(readers[: len(some)], mnt, some)
        while any(reader.pending() for reader in readers[: len(some)]):
            peak = max(peak, resident(pid))
            time.sleep(0.005)
        check_all(readers[: len(some)], some, tree.want)
    # All at one file, each at another place.
    for number, reader in enumerate(readers):
        kind = KINDS[number % 3]
        assert reader.open(mnt / kind / "big/7", "h") == ""
        reader.begin("pread", name="h", offset=number * 90_000, size=200_000)
    for number, reader in enumerate(readers):
        offset = number * 90_000
        right = tree.want["big/7"][offset : offset + 200_000]
        assert Answer(reader.end(120)).is_(right), number
        reader.do("close", name="h")
    print(f"at most {peak >> 20} MiB")
    assert hsfs.status(mnt)["memory_limit"] == limit
    assert peak < limit, f"{peak >> 20} MiB"
    hsfs.umount(mnt)


def resident(pid):
    """Memory of a process in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_two_mounts_of_one_volume(tree, hsfs):
    """Each has a cache of its own, a change that one learns of is pushed to the other, and the end
    of one is nothing to the other."""
    one, two = hsfs.mountpoint("one"), hsfs.mountpoint("two")
    volume = tree.volume(hsfs)
    hsfs.mount(volume, one)
    hsfs.mount(volume, two)
    reader = hsfs.reader()
    inos = {}
    for kind, source in tree.sources.items():
        source.put("shared/f", b"first")
        hsfs.refresh(one / kind)
        for mnt in (one, two):
            path = mnt / kind / "shared/f"
            hsfs.seen(lambda path=path: reader.read(path), b"first")
            inos.setdefault(kind, set()).add(reader.ino(path))
            assert reader.read(mnt / kind / "big/0").is_(tree.want["big/0"])
        assert len(inos[kind]) == 1
        source.put("shared/f", b"and second")
        assert hsfs.refresh(one / kind / "shared")["entries"] >= 1
        for mnt in (one, two):
            path = mnt / kind / "shared/f"
            # Without the push it would be believed for an hour.
            hsfs.seen(lambda path=path: reader.read(path), b"and second")
    begin = hsfs.reader()
    begin.begin("read", path=two / "s3/big/1")
    hsfs.umount(one, "--force")
    assert Answer(begin.end(120)).is_(tree.want["big/1"])
    for kind in KINDS:
        assert reader.read(two / kind / "big/2").is_(tree.want["big/2"])
    assert hsfs.status(two)["state"] == "ok"
    assert hsfs.status(one) == {}
    hsfs.mount(volume, one)
    assert reader.read(one / "nfs/big/2").is_(tree.want["big/2"])
    hsfs.umount(one)
    hsfs.umount(two)


def test_files_that_are_open_when_it_is_unmounted(tree, hsfs):
    mnt = hsfs.mountpoint()
    hsfs.mount(tree.volume(hsfs), mnt)
    reader = hsfs.reader()
    for kind in KINDS:
        assert reader.open(mnt / kind / "big/3", kind) == ""
        assert reader.pread(kind, 0, 1000).is_(tree.want["big/3"][:1000])
    refused = hsfs.run("umount", mnt, check=1)
    assert "in use" in refused.stderr
    for kind in KINDS:
        assert reader.pread(kind, BIG - 1000, 1000).is_(tree.want["big/3"][-1000:])
    hsfs.umount(mnt, "--force")
    assert not hsfs.mounted(mnt)
    for kind in KINDS:
        # What the kernel holds it may still give; it asks nobody.
        answer = reader.pread(kind, 3 * MIB, MIB)
        right = tree.want["big/3"][3 * MIB : 4 * MIB]
        assert answer.which(right=right) in {"right", "ENOTCONN", "ECONNABORTED", "EIO"}
        reader.do("close", name=kind)
    hsfs.umount(mnt)
    hsfs.umount(mnt, "--force")
    hsfs.mount(tree.volume(hsfs), mnt)
    eventually(lambda: reader.read(mnt / "s3/big/3").is_(tree.want["big/3"]), "again")
    hsfs.umount(mnt)
