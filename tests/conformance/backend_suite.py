"""What every Backend must do, as functions over one source: `await case(subject)`.

A test module of one backend is a few lines:

    @pytest.mark.parametrize("case", cases(flat=True), ids=case_id)
    async def test_s3(case, server):
        async with make_subject(server) as subject:
            await case(subject)

`Subject.tree` changes the source behind the backend's back, with the source's own tools. Every case
gets a source of its own that is empty at its start.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import pytest
import trio

from hsfs.core.errors import (
    HsfsError,
    IsADirectory,
    NotADirectory,
    NotFound,
    StaleHandle,
    StaleVersion,
    TimedOut,
    Unavailable,
)
from hsfs.core.ports import Backend
from hsfs.core.types import Cursor, FileType, ObjectStat, Page, Place, Version

T = TypeVar("T")

LIMIT_S = 120  # of any one case; a healthy one takes well under a second


class Tree(Protocol):
    """The source's own tools. Keys as in Place.key; parents are made where the source has them."""

    def write(self, key: bytes, data: bytes) -> object:
        """Make or overwrite (same identity where the source has one)."""

    def remove(self, key: bytes) -> object:
        """Remove one file."""


class HierarchicalTree(Tree, Protocol):
    """The same for sources with directories."""

    def mkdir(self, key: bytes) -> object: ...

    def symlink(self, key: bytes, target: bytes) -> object: ...

    def rename(self, old: bytes, new: bytes) -> object:
        """Replaces what is there."""


class Switch:
    """An Interrupt for tests: `set` ends the blocking call that it was given to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stop: Callable[[], None] | None = None
        self._set = False

    def attach(self, stop: Callable[[], None]) -> None:
        with self._lock:
            self._stop = stop
            if not self._set:
                return
        stop()

    def detach(self) -> None:
        with self._lock:
            self._stop = None

    @property
    def interrupted(self) -> bool:
        return self._set

    def set(self) -> None:
        with self._lock:
            self._set = True
            stop = self._stop
            if stop is not None:
                stop()


@dataclass(frozen=True, slots=True)
class Subject:
    """One backend over one empty source, and the tools that change the source."""

    backend: Backend
    tree: Tree

    def directory(self, path: bytes) -> Place:
        """The place of a directory given as `a/b` (b"" = the root)."""
        return Place(path + b"/" if self.backend.caps.flat and path else path)

    @property
    def hierarchical(self) -> HierarchicalTree:
        assert not self.backend.caps.flat
        return self.tree  # type: ignore[return-value]


Case = Callable[[Subject], Awaitable[None]]
_COMMON: list[Case] = []
_HIERARCHICAL: list[Case] = []


def cases(*, flat: bool) -> Sequence[Case]:
    """All cases for object stores, or for trees of directories."""
    return _COMMON if flat else _COMMON + _HIERARCHICAL


def case_id(case: Case) -> str:
    """The test id of a case."""
    return case.__name__  # type: ignore[attr-defined]


def _limited(case: Case) -> Case:
    async def run(subject: Subject) -> None:
        with trio.fail_after(LIMIT_S):
            await case(subject)

    run.__name__ = case.__name__  # type: ignore[attr-defined]
    run.__doc__ = case.__doc__
    return run


def _common(case: Case) -> Case:
    _COMMON.append(_limited(case))
    return case


def _with_directories(case: Case) -> Case:
    _HIERARCHICAL.append(_limited(case))
    return case


# What the cases are made of.


def read_blocking(
    backend: Backend,
    place: Place,
    offset: int,
    size: int,
    *,
    expect: Version | None = None,
    interrupt: Switch | None = None,
) -> bytes:
    """One read_into; call it in a worker thread."""
    buf = bytearray(size)
    n = backend.read_into(
        place, offset, memoryview(buf), expect=expect, interrupt=interrupt or Switch()
    )
    assert 0 <= n <= size
    return bytes(buf[:n])


async def read(
    subject: Subject, place: Place, offset: int, size: int, *, expect: bytes | None = None
) -> bytes:
    """One read_into in a worker thread."""
    version = None if expect is None else Version(expect)
    return await trio.to_thread.run_sync(
        lambda: read_blocking(subject.backend, place, offset, size, expect=version)
    )


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """The call's result, asked again while it times out: for backends whose timeout is so short
    that a busy machine may miss it."""
    while True:
        try:
            return await call()
        except TimedOut:
            await trio.sleep(0.05)


async def pages(subject: Subject, directory: Place, *, after: bytes | None = None) -> list[Page]:
    """All pages of a listing."""
    cursor = None if after is None else Cursor(after)
    return [page async for page in subject.backend.scan(directory, after=cursor)]


async def listing(subject: Subject, directory: Place) -> dict[bytes, ObjectStat]:
    """All entries of a directory by their raw names; no name comes twice."""
    entries = [e for page in await pages(subject, directory) for e in page.entries]
    found = {e.name + (b"/" if e.place.key.endswith(b"/") else b""): e for e in entries}
    assert len(found) == len(entries)
    return found


def content(size: int, seed: int = 0) -> bytes:
    """Bytes that differ everywhere, so that a shift or a mix shows."""
    import random

    return random.Random(seed * 1_000_003 + size).randbytes(size)


# Cases for all backends.


@_common
async def stat_of_a_file(subject: Subject) -> None:
    subject.tree.write(b"d/file", b"hello")
    stat = await subject.backend.stat(Place(b"d/file"))
    assert (stat.name, stat.type, stat.size) == (b"file", FileType.FILE, 5)
    assert stat.place.key == b"d/file"
    assert stat.version != b""
    assert stat.mtime_ns > 1_500_000_000 * 10**9
    again = await subject.backend.stat(stat.place)
    assert (again.version, again.identity) == (stat.version, stat.identity)
    assert (stat.mode == -1) == subject.backend.caps.flat
    assert (stat.identity == b"") == subject.backend.caps.flat
    assert (stat.place.handle != b"") == subject.backend.caps.has_handles


@_common
async def stat_of_the_root_and_of_a_directory(subject: Subject) -> None:
    subject.tree.write(b"d/e/file", b"hello")
    root = await subject.backend.stat(subject.directory(b""))
    assert (root.name, root.type, root.version) == (b"", FileType.DIRECTORY, b"")
    below = await subject.backend.stat(subject.directory(b"d/e"))
    assert (below.name, below.type, below.version) == (b"e", FileType.DIRECTORY, b"")


@_common
async def stat_of_what_is_not_there(subject: Subject) -> None:
    subject.tree.write(b"d/file", b"hello")
    for place in (Place(b"nothing"), Place(b"d/nothing"), subject.directory(b"d/nowhere")):
        with pytest.raises(NotFound):
            await subject.backend.stat(place)
    with pytest.raises((NotFound, NotADirectory)):
        await subject.backend.stat(Place(b"d/file/below"))


@_common
async def scan_of_what_is_not_there(subject: Subject) -> None:
    subject.tree.write(b"file", b"hello")
    if not subject.backend.caps.flat:  # an object store can't tell an empty prefix from none
        with pytest.raises(NotFound):
            await pages(subject, subject.directory(b"nothing"))
        with pytest.raises(NotADirectory):
            await pages(subject, subject.directory(b"file"))


@_common
async def reads_of_every_shape(subject: Subject) -> None:
    data = content(3 * 1024 * 1024 + 12345)
    subject.tree.write(b"d/big", data)
    stat = await subject.backend.stat(Place(b"d/big"))
    size = len(data)
    for offset, length in (
        (0, size),
        (0, 1),
        (size - 1, 1),
        (size - 1, 100),
        (1, 4097),
        (131071, 131074),
        (1024 * 1024 - 3, 7),
        (1024 * 1024, 2 * 1024 * 1024),
        (0, size + 5_000_000),
        (size, 10),
        (size + 1000, 10),
    ):
        for expect in (None, stat.version):
            got = await read(subject, stat.place, offset, length, expect=expect)
            assert got == data[offset : offset + length], (offset, length)


@_common
async def reads_touch_nothing_beside_their_buffer(subject: Subject) -> None:
    data = content(300_001)
    subject.tree.write(b"file", data)
    stat = await subject.backend.stat(Place(b"file"))
    frame = bytearray(b"\xaa" * (len(data) + 2000))
    with memoryview(frame) as view:
        n = await trio.to_thread.run_sync(
            lambda: subject.backend.read_into(
                stat.place,
                0,
                view[1000 : 1000 + len(data)],
                expect=Version(stat.version),
                interrupt=Switch(),
            )
        )
    assert n == len(data)
    assert frame == b"\xaa" * 1000 + data + b"\xaa" * 1000


@_common
async def empty_files(subject: Subject) -> None:
    subject.tree.write(b"d/empty", b"")
    stat = await subject.backend.stat(Place(b"d/empty"))
    assert (stat.type, stat.size) == (FileType.FILE, 0)
    assert await read(subject, stat.place, 0, 10, expect=stat.version) == b""
    assert (await listing(subject, subject.directory(b"d")))[b"empty"].size == 0


@_common
async def many_reads_at_once(subject: Subject) -> None:
    files = {b"d/f%d" % i: content(200_000 + i, seed=i) for i in range(12)}
    for key, data in files.items():
        subject.tree.write(key, data)

    async def one(key: bytes, data: bytes) -> None:
        stat = await subject.backend.stat(Place(key))
        for offset in (0, 65536, 150_000):
            got = await read(subject, stat.place, offset, 60_000, expect=stat.version)
            assert got == data[offset : offset + 60_000]

    async with trio.open_nursery() as nursery:
        for key, data in files.items():
            nursery.start_soon(one, key, data)


@_common
async def a_changed_file_is_another_version(subject: Subject) -> None:
    subject.tree.write(b"file", content(50_000, seed=1))
    old = await subject.backend.stat(Place(b"file"))
    fresh = content(50_000, seed=2)
    subject.tree.write(b"file", fresh)
    new = await subject.backend.stat(Place(b"file"))
    assert new.version != old.version
    assert new.identity == old.identity
    with pytest.raises(StaleVersion):
        await read(subject, old.place, 0, 50_000, expect=old.version)
    with pytest.raises(StaleVersion):
        await read(subject, old.place, 49_000, 1000, expect=old.version)
    assert await read(subject, new.place, 0, 50_000, expect=new.version) == fresh
    assert await read(subject, old.place, 0, 50_000) == fresh


@_common
async def a_shorter_and_a_longer_file(subject: Subject) -> None:
    subject.tree.write(b"file", content(50_000, seed=1))
    old = await subject.backend.stat(Place(b"file"))
    for size in (20_000, 90_000):
        subject.tree.write(b"file", content(size, seed=size))
        with pytest.raises(StaleVersion):
            await read(subject, old.place, 0, 50_000, expect=old.version)
        with pytest.raises(StaleVersion):
            await read(subject, old.place, 30_000, 1000, expect=old.version)
        new = await subject.backend.stat(Place(b"file"))
        assert new.size == size
        got = await read(subject, new.place, 0, 100_000, expect=new.version)
        assert got == content(size, seed=size)


@_common
async def a_removed_file(subject: Subject) -> None:
    subject.tree.write(b"d/file", b"hello")
    subject.tree.write(b"d/other", b"there")
    old = await subject.backend.stat(Place(b"d/file"))
    subject.tree.remove(b"d/file")
    with pytest.raises(NotFound):
        await subject.backend.stat(old.place)
    with pytest.raises((StaleVersion, StaleHandle)):
        await read(subject, old.place, 0, 5, expect=old.version)
    with pytest.raises(NotFound):
        await read(subject, Place(b"d/file"), 0, 5)
    assert set(await listing(subject, subject.directory(b"d"))) == {b"other"}


@_common
async def a_listing_is_one_level_and_whole(subject: Subject) -> None:
    flat = subject.backend.caps.flat
    sizes = {b"f%03d" % i: i for i in range(30)}
    for name, size in sizes.items():
        subject.tree.write(b"dir/" + name, b"x" * size)
    subject.tree.write(b"dir/sub/deep/file", b"deep")
    subject.tree.write(b"dir.txt", b"beside")
    found = await listing(subject, subject.directory(b"dir"))
    sub = b"sub/" if flat else b"sub"
    assert set(found) == {*sizes, sub}
    for name, size in sizes.items():
        entry = found[name]
        assert (entry.type, entry.size, entry.place.key) == (FileType.FILE, size, b"dir/" + name)
    assert found[sub].type is FileType.DIRECTORY
    assert found[sub].name == b"sub"
    assert found[sub].place.key == b"dir/" + sub
    root = await listing(subject, subject.directory(b""))
    assert set(root) == {b"dir/" if flat else b"dir", b"dir.txt"}


@_common
async def a_listing_says_what_a_stat_says(subject: Subject) -> None:
    for i in range(5):
        subject.tree.write(b"dir/f%d" % i, content(i * 1000, seed=i))
    found = await listing(subject, subject.directory(b"dir"))
    assert len(found) == 5
    for name, entry in found.items():
        for place in (entry.place, Place(b"dir/" + name)):
            stat = await subject.backend.stat(place)
            assert (stat.version, stat.size, stat.identity) == (
                entry.version,
                entry.size,
                entry.identity,
            )
        data = await read(subject, entry.place, 0, 10_000, expect=entry.version)
        assert len(data) == entry.size


@_common
async def a_listing_of_many_pages_and_its_resumption(subject: Subject) -> None:
    names = {b"n%05d" % (i * 7919 % 100_000) for i in range(2500)}
    for name in names:
        subject.tree.write(b"many/" + name, b"")
    whole = await pages(subject, subject.directory(b"many"))
    got = [entry.name for page in whole for entry in page.entries]
    assert len(got) == len(names)
    assert set(got) == names
    if subject.backend.caps.ordered:
        assert got == sorted(got)
    assert len(whole) > 1
    assert all(page.cursor for page in whole[:-1])
    assert whole[-1].cursor == b""
    rest = await pages(subject, subject.directory(b"many"), after=whole[0].cursor)
    assert [e.name for p in rest for e in p.entries] == got[len(whole[0].entries) :]


@_common
async def names_are_bytes(subject: Subject) -> None:
    names = [
        b"plain",
        b"with space",
        b" lead",
        "gr\u00fc\u00dfe".encode(),
        "\u65e5\u672c".encode(),
        b"quote'\"",
        b"percent%41&=+#?",
        b"semi;colon,comma",
        b"a" * 200,
        b"-dash",
        b"back\\slash",
        b"*star[x]",
    ]
    for i, name in enumerate(names):
        subject.tree.write(b"odd/" + name, b"%d" % i)
    found = await listing(subject, subject.directory(b"odd"))
    assert set(found) == set(names)
    for i, name in enumerate(names):
        stat = await subject.backend.stat(Place(b"odd/" + name))
        assert stat.name == name
        assert await read(subject, stat.place, 0, 10, expect=stat.version) == b"%d" % i


@_common
async def probe_answers(subject: Subject) -> None:
    space = await subject.backend.probe()
    assert not space.known or space.total >= space.free >= 0


@_common
async def the_power_flags_are_true(subject: Subject) -> None:
    caps = subject.backend.caps
    assert caps.concurrency >= 1
    assert caps.read_max >= 128 * 1024
    if caps.flat_list:
        for key in (b"a/1", b"a/b/2", b"a/b/c/3", b"a.txt", b"z"):
            subject.tree.write(key, b"x")
        found = [
            entry.place.key
            async for page in subject.backend.list_flat(Place(b"a/"))  # type: ignore[attr-defined]
            for entry in page.entries
        ]
        assert found == [b"a/1", b"a/b/2", b"a/b/c/3"]


@_common
async def a_cancelled_call_leaves_the_backend_in_order(subject: Subject) -> None:
    for i in range(20):
        subject.tree.write(b"dir/f%d" % i, b"x" * i)
    for delay_s in (0, 0.0005, 0.002):
        with trio.move_on_after(delay_s):
            await pages(subject, subject.directory(b"dir"))
        with trio.move_on_after(delay_s):
            await subject.backend.stat(Place(b"dir/f1"))
    assert len(await listing(subject, subject.directory(b"dir"))) == 20
    assert (await subject.backend.stat(Place(b"dir/f7"))).size == 7


@_common
async def an_interrupted_read_leaves_the_backend_in_order(subject: Subject) -> None:
    data = content(2_000_000)
    subject.tree.write(b"file", data)
    stat = await subject.backend.stat(Place(b"file"))
    switch = Switch()

    def run() -> None:
        # A read that was quicker than its interrupt may have succeeded.
        try:
            read_blocking(subject.backend, stat.place, 0, len(data), interrupt=switch)
        except HsfsError:
            assert switch.interrupted

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, run)
        switch.set()
    assert await read(subject, stat.place, 0, len(data), expect=stat.version) == data


@_common
async def a_closed_backend_is_unavailable(subject: Subject) -> None:
    subject.tree.write(b"file", b"hello")
    stat = await subject.backend.stat(Place(b"file"))
    await subject.backend.aclose()
    with pytest.raises(Unavailable):
        await subject.backend.stat(stat.place)
    with pytest.raises(Unavailable):
        await read(subject, stat.place, 0, 5, expect=stat.version)
    await subject.backend.aclose()


# Cases for sources with directories.


@_with_directories
async def reading_a_directory(subject: Subject) -> None:
    subject.hierarchical.mkdir(b"dir")
    stat = await subject.backend.stat(Place(b"dir"))
    with pytest.raises(IsADirectory):
        await read(subject, stat.place, 0, 10)


@_with_directories
async def an_empty_directory(subject: Subject) -> None:
    subject.hierarchical.mkdir(b"dir/empty")
    found = await pages(subject, Place(b"dir/empty"))
    assert [page.entries for page in found] == [()]
    assert found[0].cursor == b""


@_with_directories
async def symbolic_links_are_described_not_followed(subject: Subject) -> None:
    subject.tree.write(b"dir/file", b"hello")
    target = b"../" + os.urandom(4).hex().encode() + b"/\xff\xfe"
    for i in range(40):
        subject.hierarchical.symlink(b"dir/link%d" % i, target + b"%d" % i)
    subject.hierarchical.symlink(b"up", b"dir")
    found = await listing(subject, Place(b"dir"))
    assert len(found) == 41
    for i in range(40):
        entry = found[b"link%d" % i]
        assert (entry.type, entry.target) == (FileType.SYMLINK, target + b"%d" % i)
    stat = await subject.backend.stat(Place(b"dir/link3"))
    assert (stat.type, stat.target) == (FileType.SYMLINK, target + b"3")
    with pytest.raises((NotADirectory, NotFound)):
        await subject.backend.stat(Place(b"up/file"))
    with pytest.raises((NotADirectory, NotFound)):
        await read(subject, Place(b"up/file"), 0, 5)
    with pytest.raises((NotADirectory, NotFound)):
        await pages(subject, Place(b"up"))


@_with_directories
async def a_renamed_file_keeps_its_identity(subject: Subject) -> None:
    subject.tree.write(b"a/file", b"hello")
    old = await subject.backend.stat(Place(b"a/file"))
    subject.hierarchical.mkdir(b"b")
    subject.hierarchical.rename(b"a/file", b"b/moved")
    new = await subject.backend.stat(Place(b"b/moved"))
    assert new.identity == old.identity
    assert (await read(subject, new.place, 0, 10, expect=new.version)) == b"hello"


@_with_directories
async def a_file_replaced_by_rename(subject: Subject) -> None:
    subject.tree.write(b"file", content(10_000, seed=1))
    old = await subject.backend.stat(Place(b"file"))
    assert await read(subject, old.place, 0, 10_000, expect=old.version)
    fresh = content(10_000, seed=2)
    subject.tree.write(b"next", fresh)
    subject.hierarchical.rename(b"next", b"file")
    new = await subject.backend.stat(Place(b"file"))
    assert new.identity != old.identity
    assert new.version != old.version
    with pytest.raises((StaleVersion, StaleHandle)):
        await read(subject, old.place, 0, 10_000, expect=old.version)
    assert await read(subject, Place(b"file"), 0, 10_000, expect=new.version) == fresh


@_with_directories
async def a_file_replaced_by_a_directory(subject: Subject) -> None:
    subject.tree.write(b"thing", b"hello")
    old = await subject.backend.stat(Place(b"thing"))
    subject.tree.remove(b"thing")
    subject.hierarchical.mkdir(b"thing")
    with pytest.raises((StaleVersion, StaleHandle)):
        await read(subject, old.place, 0, 5, expect=old.version)
    new = await subject.backend.stat(Place(b"thing"))
    # File systems hand out inode numbers again: the identity may be the old one.
    assert (new.type, new.version) == (FileType.DIRECTORY, b"")
