"""Sources that change under a mount: every read is one version or an errno, and the new version
shows within `freshness`. Over a local folder, an NFS server and a bucket at once."""

import collections
import itertools
import os
import random
import time
from pathlib import Path

import pytest

from tests.mount.command import Answer, Hsfs, eventually
from tests.mount.sources import Bucket, Folder, content

KINDS = ("file", "nfs", "s3")
MIB = 1 << 20
BIG = 16 * MIB
# What may be said of a version that is gone.
GONE = {"ESTALE", "EIO", "ENOENT", "EISDIR", "ENOTDIR"}
numbers = itertools.count()


class Place:
    """A mount with one source of each kind, `freshness = "1s"`."""

    def __init__(self, nas, lake):
        self.hsfs = Hsfs(lake.env)
        self.mnt = self.hsfs.mountpoint()
        below = f"tree{os.getpid()}"
        self.sources = {
            "file": Folder(self.hsfs.root / "src", "/file"),
            "nfs": Folder(Path(nas.export, below), "/nfs"),
            "s3": Bucket(lake, "sources", "/s3"),
        }
        for source in self.sources.values():
            source.put("here", b"here")
        self.urls = {
            "file": f"file://{self.hsfs.root / 'src'}",
            "nfs": nas.url_of(f"{nas.export}/{below}"),
            "s3": f"s3://sources?endpoint={lake.endpoint}",
        }
        self.volume = self.hsfs.volume(*map(self.backend, KINDS), mount={"readahead": "2M"})
        self.hsfs.mount(self.volume, self.mnt)
        self.reader = self.hsfs.reader()

    def backend(self, kind):
        """Its table in the volume file."""
        return {"name": kind, "url": self.urls[kind], "at": f"/{kind}", "freshness": "1s"}

    def folder(self, kind):
        """A fresh directory: its path in the mount, and its name in the source."""
        name = f"t{next(numbers)}"
        return self.mnt / kind / name, name


@pytest.fixture(scope="module")
def place(nas, lake):
    place = Place(nas, lake)
    with place.hsfs:
        yield place
    place.sources["s3"].close()


@pytest.fixture(autouse=True)
def logs(place):
    yield
    print(place.hsfs.logs(60))


def changes(source, name):
    """Change -> (how it is made at the source, the content afterwards or None)."""
    old = content((name, "old"), BIG)

    def new(size):
        return content((name, size), size)

    table = {
        "same size": (lambda f: source.put(f, new(BIG)), new(BIG)),
        "longer": (lambda f: source.put(f, new(BIG + 777)), new(BIG + 777)),
        "shorter": (lambda f: source.put(f, new(5 * MIB + 1)), new(5 * MIB + 1)),
        "truncated": (lambda f: source.truncate(f, 7 * MIB + 3), old[: 7 * MIB + 3]),
        "emptied": (lambda f: source.truncate(f, 0), b""),
        "replaced": (lambda f: source.replace(f, new(BIG - 9)), new(BIG - 9)),
        "deleted": (source.delete, None),
        "made a directory": (lambda f: source.to_directory(f, b"inside"), None),
    }
    return old, table


def settle(place, path, want, change):
    """The mount shows the new state, without any help, after `freshness`."""
    if want is None:
        gone = {"ENOENT"} if change == "deleted" else {"EISDIR"}
        eventually(
            lambda: place.reader.read(path).errno in gone,
            lambda: (change, place.reader.read(path)),
        )
    else:
        place.hsfs.seen(lambda: place.reader.read(path), want)
    if change == "made a directory":
        place.hsfs.seen(lambda: place.reader.read(path / "inside"), b"inside")
        assert place.reader.list(path) == ["inside"]


@pytest.mark.parametrize("kind", KINDS)
def test_changed_between_stat_and_read(place, kind):
    source = place.sources[kind]
    path, name = place.folder(kind)
    old, table = changes(source, name)
    for change in table:
        source.put(f"{name}/{change}", old)
    eventually(lambda: place.reader.list(path) == sorted(table), "names")
    for change in table:
        assert place.reader.do("stat", path=path / change)["size"] == BIG
    for change, (make, _) in table.items():
        make(f"{name}/{change}")
    for change, (_, want) in table.items():
        seen = place.reader.read(path / change)
        allowed = {"old": old} if want is None else {"old": old, "new": want}
        assert seen.which(**allowed) in {"new", *GONE}, change
        settle(place, path / change, want, change)


@pytest.mark.parametrize("kind", KINDS)
def test_changed_in_the_middle_of_a_read(place, kind):
    """The old handle goes on with the old version as far as it is cached, or fails."""
    source, reader = place.sources[kind], place.reader
    path, name = place.folder(kind)
    old, table = changes(source, name)
    for change in table:
        source.put(f"{name}/{change}", old)
    eventually(lambda: reader.list(path) == sorted(table), "names")
    for change in table:
        assert reader.open(path / change, change) == ""
        assert reader.pread(change, 0, MIB).is_(old[:MIB])
    for change, (make, _) in table.items():
        make(f"{name}/{change}")

    def go_on(change):
        for offset in range(0, BIG, 3 * MIB):
            answer = reader.pread(change, offset, MIB)
            assert answer.which(old=old[offset : offset + MIB]) in {"old", *GONE}, (change, offset)
        # The last bytes were never read: the source alone could give them.
        return reader.pread(change, BIG - 5000, 5000).which(old=old[-5000:])

    for change in table:
        go_on(change)
    for change, (_, want) in table.items():
        settle(place, path / change, want, change)
        assert go_on(change) in GONE, change
        reader.do("close", name=change)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mapped", [False, True], ids=["read", "mapped"])
def test_old_and_new_handles_side_by_side(place, kind, mapped):
    source, reader = place.sources[kind], place.reader
    path, name = place.folder(kind)
    versions = [content((name, n), 6 * MIB) for n in range(3)]
    file = path / "f"
    look = reader.peek if mapped else reader.pread
    for number, data in enumerate(versions):
        source.put(f"{name}/f", data)
        place.hsfs.seen(lambda: reader.read(file), data)
        handle = f"{name}{number}"
        assert reader.open(file, handle) == ""
        if mapped:
            assert reader.do("map", name=handle) == 6 * MIB
        for offset in range(0, 6 * MIB - 4096, 413 * 1024):
            for older in range(number + 1):
                answer = look(f"{name}{older}", offset, 4096)
                right = versions[older][offset : offset + 4096]
                said = answer.which(right=right)
                if older == number:
                    assert said == "right", (offset, answer)
                else:
                    assert said in {"right", "SIGBUS", *GONE}, (offset, answer)
    for number in range(3):
        reader.do("close", name=f"{name}{number}")


@pytest.mark.parametrize("kind", KINDS)
def test_names_that_come_go_and_move(place, kind):
    source, reader = place.sources[kind], place.reader
    path, name = place.folder(kind)
    for file in ("stays", "goes", "moves", "sub/x", "lost/y"):
        source.put(f"{name}/{file}", file.encode())
    eventually(lambda: reader.list(path) == ["goes", "lost", "moves", "stays", "sub"], "first")
    assert reader.read(path / "lost/y").is_(b"lost/y")
    before = {file: reader.ino(path / file) for file in ("stays", "moves", "sub", "sub/x")}
    source.put(f"{name}/new", b"new")
    source.put(f"{name}/fresh/deep/z", b"z")
    source.delete(f"{name}/goes")
    source.rename(f"{name}/moves", f"{name}/moved")
    source.remove_tree(f"{name}/lost")
    want = ["fresh", "moved", "new", "stays", "sub"]
    # SeaweedFS goes on listing a prefix that has become empty; moto (e2e/test_names) does not.
    kept = {"lost"} if kind == "s3" else set()
    eventually(lambda: sorted({*reader.list(path)} - kept) == want, lambda: reader.list(path))
    assert reader.read(path / "new").is_(b"new")
    assert reader.read(path / "fresh/deep/z").is_(b"z")
    assert reader.read(path / "moved").is_(b"moves")
    for gone in ("goes", "moves", "lost/y") if kept else ("goes", "moves", "lost", "lost/y"):
        eventually(lambda gone=gone: reader.read(path / gone).errno == "ENOENT", gone)
    after = {file: reader.ino(path / file) for file in ("stays", "sub", "sub/x")}
    assert after == {file: before[file] for file in after}
    if source.keeps_inodes:
        assert reader.ino(path / "moved") == before["moves"]
    else:
        assert reader.ino(path / "moved") != before["moves"]
    # And no rescan renumbers anything.
    everything = ("stays", "sub", "sub/x", "new", "fresh", "fresh/deep/z", "moved")
    inos = {file: reader.ino(path / file) for file in everything}
    assert len(set(inos.values())) == len(everything)
    place.hsfs.refresh(path)
    place.hsfs.refresh(place.mnt / kind)
    assert {file: reader.ino(path / file) for file in everything} == inos


@pytest.mark.parametrize("kind", ["file", "nfs"])
def test_a_directory_that_is_renamed_keeps_its_tree(place, kind):
    source, reader = place.sources[kind], place.reader
    path, name = place.folder(kind)
    source.put(f"{name}/a/b/c", b"content")
    eventually(lambda: reader.read(path / "a/b/c").is_(b"content"), "there")
    before = [reader.ino(path / "a"), reader.ino(path / "a/b"), reader.ino(path / "a/b/c")]
    source.rename(f"{name}/a", f"{name}/z")
    eventually(lambda: reader.list(path) == ["z"], "renamed")
    after = [reader.ino(path / "z"), reader.ino(path / "z/b"), reader.ino(path / "z/b/c")]
    assert after == before
    assert reader.read(path / "z/b/c").is_(b"content")
    eventually(lambda: reader.read(path / "a/b/c").errno == "ENOENT", "the old path is gone")


def test_native_hard_links_are_one_inode(place):
    reader = place.reader
    for kind in ("file", "nfs"):
        path, name = place.folder(kind)
        source = place.sources[kind]
        source.put(f"{name}/one", b"linked")
        os.link(source.folder / name / "one", source.folder / name / "two")
        eventually(lambda path=path: reader.list(path) == ["one", "two"], kind)
        assert reader.ino(path / "one") == reader.ino(path / "two")
        assert reader.read(path / "two").is_(b"linked")
        source.delete(f"{name}/one")
        eventually(lambda path=path: reader.list(path) == ["two"], kind)
        assert reader.read(path / "two").is_(b"linked")


@pytest.mark.parametrize("kind", KINDS)
def test_refresh_asks_at_once(place, kind, nas, lake):
    """With a freshness of an hour nothing is seen by itself, and `refresh` shows it."""
    source = place.sources[kind]
    _, name = place.folder(kind)
    source.put(f"{name}/a", b"one")
    with Hsfs(lake.env) as slow:
        backend = dict(place.backend(kind), freshness="1h")
        mnt = slow.mountpoint()
        slow.mount(slow.volume(backend), mnt)
        reader = slow.reader()
        path = mnt / kind / name
        assert reader.read(path / "a").is_(b"one")
        ino = reader.ino(path / "a")
        source.put(f"{name}/a", b"and two")
        source.put(f"{name}/b", b"new")
        assert slow.refresh(path)["entries"] >= 2
        assert reader.read(path / "a").is_(b"and two")
        assert reader.read(path / "b").is_(b"new")
        assert reader.ino(path / "a") == ino
        source.delete(f"{name}/b")
        if kind == "s3":
            slow.refresh(path)
        else:
            gone = slow.json("refresh", path / "b", check=4)["error"]
            assert gone["what"].endswith(f"{name}/b"), gone
        assert reader.read(path / "b").errno == "ENOENT"
        slow.umount(mnt)


def test_files_that_are_replaced_all_the_time(place):
    """Every read is one version that was there, whole, or an errno; the last one shows."""
    _, name = place.folder("file")
    versions = {kind: [] for kind in KINDS}
    moments = random.Random(name)
    names = dict.fromkeys(KINDS, f"{name}/f")

    def write(kind):
        number = len(versions[kind])
        data = content((kind, name, number), moments.choice((1_000_000, 2 * MIB, 2 * MIB + 5)))
        versions[kind].append(data)
        place.sources[kind].replace(names[kind], data)

    readers = [(kind, place.hsfs.reader()) for kind in KINDS for _ in range(2)]
    for kind in KINDS:
        write(kind)
        file = place.mnt / kind / names[kind]
        place.hsfs.seen(lambda file=file: place.reader.read(file), versions[kind][0])
    said = {kind: collections.Counter() for kind in KINDS}
    for kind, reader in readers:
        reader.begin("read", path=place.mnt / kind / names[kind])
    end_s = time.monotonic() + 6
    while time.monotonic() < end_s:
        write(moments.choice(KINDS))
        for kind, reader in readers:
            if reader.pending():
                continue
            answer = Answer(reader.end())
            known = {str(n): data for n, data in enumerate(versions[kind])}
            said[kind][answer.which(**known)] += 1
            reader.begin("read", path=place.mnt / kind / names[kind])
    for kind, reader in readers:
        known = {str(n): data for n, data in enumerate(versions[kind])}
        said[kind][Answer(reader.end()).which(**known)] += 1
    for kind in KINDS:
        errors = {word for word in said[kind] if not word.isdigit()}
        assert errors <= {"ESTALE", "EIO"}, said
        assert len(said[kind]) > len(errors), said
        file = place.mnt / kind / names[kind]
        place.hsfs.seen(lambda file=file: place.reader.read(file), versions[kind][-1])
    print(said)
