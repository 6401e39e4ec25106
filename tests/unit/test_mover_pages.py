"""What movers report of listings: folded by their ranges, the pages always give the source."""

from dataclasses import dataclass

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from hsfs.core.errors import TimedOut, Unauthorised, Unavailable
from hsfs.core.types import (
    Capabilities,
    DirectoryPage,
    FileType,
    ObjectStat,
    Page,
    Place,
)
from hsfs.mover import listing, scan
from hsfs.mover.flat import FlatCutter


class Folded:
    """What a store would know after applying pages: directory key -> {sort key: entry}."""

    def __init__(self, flat: bool):
        self.flat = flat
        self.known: dict[bytes, dict[bytes, ObjectStat]] = {}

    def apply(self, page: DirectoryPage) -> None:
        there = self.known.setdefault(page.directory.key, {})
        fresh = {listing.sort_key(e, self.flat): e for e in page.entries}
        assert list(fresh) == sorted(fresh) or page.adds_only
        if not page.adds_only:
            for key in list(there):
                inside = (key > page.after or not page.after) and (
                    not page.upto or key <= page.upto
                )
                if inside and key not in fresh:
                    del there[key]
        for key in fresh:
            if not page.adds_only:
                assert key > page.after or not page.after
                assert not page.upto or key <= page.upto
        if not page.names_only:
            there.update(fresh)


def key_tree(keys):
    """The directories that a set of object keys makes: key of directory -> sort keys."""
    tree = {b"": set()}
    for key, size in keys.items():
        begin = 0
        while (slash := key.find(b"/", begin)) >= 0:
            tree.setdefault(key[:begin], set()).add(key[begin : slash + 1])
            tree.setdefault(key[: slash + 1], set())
            begin = slash + 1
        if key[begin:] or size:
            tree[key[:begin]].add(key[begin:])
    return tree


segment = st.sampled_from([b"", b"a", b"b", b"a.b", b"a0", b"\xff", b"zz"])
object_keys = st.lists(segment, min_size=1, max_size=4).map(b"/".join).filter(bool)


@given(
    st.dictionaries(object_keys, st.integers(0, 1), max_size=25),
    st.dictionaries(object_keys, st.integers(0, 1), max_size=15),
    st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=30),
)
def test_flat_keys_in_any_batches_with_any_resumes(keys, before, plan):
    folded = Folded(flat=True)
    for page in FlatCutter(1, 0).cut(_objects(before), end=True):
        folded.apply(page)  # the source has changed since
    cutter = FlatCutter(1, 5)
    rest = _objects(keys)
    for size, resume in plan:
        if size >= len(rest):
            break
        for page in cutter.cut(rest[:size], end=False):
            folded.apply(page)
        if resume:
            # What was carried over comes again, as the cursor stays before it.
            last = cutter.last_key
            cutter = FlatCutter(1, 6, last)
            rest = [e for e in _objects(keys) if e.place.key > last]
        else:
            rest = rest[size:]
    for page in cutter.cut(rest, end=True):
        folded.apply(page)
    expected = key_tree(keys)
    reachable = {b""}
    for directory in sorted(folded.known):
        if directory in reachable:
            below = folded.known[directory]
            assert set(below) == expected[directory]
            reachable |= {directory + key for key in below if key.endswith(b"/")}
    assert reachable == set(expected)


def _objects(keys):
    return [
        ObjectStat(b"", FileType.FILE, Place(key), size, version=b"v")
        for key, size in sorted(keys.items())
    ]


def test_parents_come_before_children():
    pages = FlatCutter(1, 0).cut(_objects({b"a/b/c": 1, b"a/x": 1, b"z": 1}), end=True)
    assert [page.directory.key for page in pages] == [b"", b"a/", b"a/b/"]


def test_keys_out_of_order_are_refused():
    cutter = FlatCutter(1, 0)
    with pytest.raises(Unavailable, match="order"):
        cutter.cut(list(reversed(_objects({b"a": 1, b"b": 1}))), end=True)


@dataclass
class FakeBackend:
    """A source with chosen capabilities; `tree`: key -> names (directories end with a slash)."""

    tree: dict
    ordered: bool = False
    flat: bool = False
    page: int = 3
    pause_s: float = 0.0
    refuse: tuple = ()
    device: int = 1
    listed: list = None

    @property
    def caps(self):
        return Capabilities(self.flat, self.ordered, True, False, True, 4, 1 << 20)

    async def scan(self, directory, *, after=None):
        if self.listed is not None:
            self.listed.append(directory.key)
        if directory.key in self.refuse:
            raise Unauthorised("no")
        entries = []
        for name in self.tree[directory.key]:
            is_dir = name.endswith(b"/")
            bare = name[:-1] if is_dir else name
            if self.flat:
                key = directory.key + name
            else:
                key = directory.key + b"/" + bare if directory.key else bare
            kind = FileType.DIRECTORY if is_dir else FileType.FILE
            entries.append(ObjectStat(bare, kind, Place(key), len(bare)))
        if self.ordered:
            entries.sort(key=lambda e: listing.sort_key(e, self.flat))
        for at in range(0, max(1, len(entries)), self.page):
            await trio.sleep(self.pause_s)
            last = at + self.page >= len(entries)
            yield Page(tuple(entries[at : at + self.page]), b"" if last else b"%d" % at)


names = st.lists(
    st.binary(min_size=1, max_size=3).filter(lambda n: b"/" not in n and b"\0" not in n),
    unique=True,
    max_size=12,
)


@given(names, names, st.booleans(), st.booleans(), st.sampled_from([4, 20_000]))
def test_survey_gives_the_directory(now, before, ordered, early, early_entries):
    async def main():
        folded = Folded(flat=False)
        folded.known[b"d"] = {
            name: ObjectStat(name, FileType.FILE, Place(b"d/" + name)) for name in before
        }

        async def deliver(pages):
            for page in pages:
                folded.apply(page)

        backend = FakeBackend({b"d": now}, ordered=ordered)
        seen = await listing.survey(backend, Place(b"d"), deliver, timeout_s=60)
        assert seen == len(now)
        assert set(folded.known[b"d"]) == set(now)

    old = listing.EARLY_ENTRIES, listing.EARLY_S
    listing.EARLY_ENTRIES, listing.EARLY_S = early_entries, (-1.0 if early else 60.0)
    try:
        trio.run(main)
    finally:
        listing.EARLY_ENTRIES, listing.EARLY_S = old


async def test_long_unordered_listing_shows_entries_before_its_end(monkeypatch):
    monkeypatch.setattr(listing, "EARLY_ENTRIES", 50)
    backend = FakeBackend({b"": [b"%05d" % (i * 7919 % 1000) for i in range(1000)]}, page=20)
    pages = []

    async def deliver(batch):
        pages.extend(batch)

    await listing.survey(backend, Place(b""), deliver, timeout_s=60)
    assert pages[0].adds_only
    assert len(pages[0].entries) < 100
    assert pages[-1].names_only
    assert pages[-1].upto == b""
    assert sum(len(p.entries) for p in pages if p.adds_only) == 1000


async def test_pages_fit_into_frames():
    entries = [
        ObjectStat(b"n" * 200, FileType.FILE, Place(b"%04d" % i + b"k" * 1000, b"h" * 64))
        for i in range(3000)
    ]
    parts = list(listing.pieces(entries))
    assert [e for part in parts for e in part] == entries
    for part in parts:
        page = DirectoryPage(1, Place(b"k" * 1000), tuple(part))
        assert len(msgspec.msgpack.encode(page)) < 1024 * 1024
    assert list(listing.pieces([])) == [[]]


async def test_backend_that_forgets_its_deadline():
    backend = FakeBackend({b"": [b"x"]}, pause_s=100)

    async def deliver(pages):
        raise AssertionError

    with pytest.raises(TimedOut):
        await listing.survey(backend, Place(b""), deliver, timeout_s=0.05)


class Recorder:
    """Stands for Delivery: keeps messages as (pages, cursor), in order."""

    def __init__(self, full_at: int = 3):
        self.messages = []
        self.pages = []
        self.full_at = full_at

    async def __call__(self, pages):
        self.pages.extend(pages)
        await trio.lowlevel.checkpoint()

    @property
    def full(self):
        return len(self.pages) >= self.full_at

    async def flush(self, cursor=b""):
        self.messages.append((self.pages, cursor))
        self.pages = []
        await trio.lowlevel.checkpoint()

    async def drain(self):
        await self.flush()


TREE = {
    b"": [b"b/", b"a/", b"a.txt", b"c/"],
    b"a": [b"x/", b"y", b"x.y/"],
    b"a/x": [b"1"],
    b"a/x.y": [b"2"],
    b"b": [b"deep/"],
    b"b/deep": [b"deeper/"],
    b"b/deep/deeper": [b"3"],
    b"c": [],
}


async def test_tree_scan_finds_everything_and_resumes_from_any_cursor():
    recorder = Recorder(full_at=1)
    backend = FakeBackend(TREE)
    await scan.scan(backend, b"", recorder, timeout_s=60)
    expected = {
        key: {n.removesuffix(b"/") for n in names_there} for key, names_there in TREE.items()
    }
    assert _seen(recorder.messages) == expected
    assert any(cursor for _, cursor in recorder.messages)
    for index, (_, cursor) in enumerate(recorder.messages):
        if not cursor:
            continue
        rest = Recorder()
        again = FakeBackend(TREE, listed=[])
        await scan.scan(again, cursor, rest, timeout_s=60)
        folded = _seen(recorder.messages[: index + 1]) | _seen(rest.messages)
        assert folded == expected
    assert len(again.listed) < len(TREE)


def _seen(messages):
    seen = {}
    for pages, _ in messages:
        for page in pages:
            seen.setdefault(page.directory.key, set()).update(e.name for e in page.entries)
    return seen


async def test_tree_scan_of_prefixes_with_empty_segments():
    tree = {
        b"": [b"/", b"a/", b"f"],
        b"/": [b"x"],
        b"a/": [b"/", b"g"],
        b"a//": [b"/", b"h"],
        b"a///": [b"i"],
    }
    recorder = Recorder(full_at=1)
    await scan.scan(FakeBackend(tree, ordered=True, flat=True), b"", recorder, timeout_s=60)
    assert set(_seen(recorder.messages)) == set(tree)


async def test_a_closed_directory_does_not_stop_a_scan_but_a_closed_root_does():
    recorder = Recorder()
    await scan.scan(FakeBackend(TREE, refuse=(b"a/x",)), b"", recorder, timeout_s=60)
    assert b"a/x" not in _seen(recorder.messages)
    assert b"b/deep/deeper" in _seen(recorder.messages)
    with pytest.raises(Unauthorised):
        await scan.scan(FakeBackend(TREE, refuse=(b"",)), b"", Recorder(), timeout_s=60)


@given(st.lists(st.lists(st.sampled_from([b"a", b"b", b"a.", b"\1"]), max_size=4), min_size=2))
def test_order_of_paths_keeps_subtrees_together(paths):
    keys = sorted({scan.path_of(b"/".join(path), False) for path in paths if path})
    for low in keys:
        below = [k for k in keys if k.startswith(low + b"\0")]
        if below:
            start = keys.index(below[0])
            assert keys[start : start + len(below)] == below
            assert keys.index(low) == start - 1
    for cursor in keys:
        for path in keys:
            skipped = scan.is_before(path, cursor)
            assert not (skipped and cursor.startswith(path + b"\0"))
            assert not (skipped and path >= cursor)


async def test_the_marker_of_a_prefix_alone_claims_nothing():
    """A page that ends with the empty name would claim the directory to its end."""
    entries = [
        ObjectStat(name, FileType.FILE, Place(b"p/" + name), 1) for name in (b"", b"a", b"b")
    ]

    class OneByOne(FakeBackend):
        async def scan(self, directory, *, after=None):
            for number, entry in enumerate(entries):
                yield Page((entry,), b"" if number == len(entries) - 1 else b"%d" % number)

    claims = []

    async def deliver(pages):
        claims.extend((page.after, page.upto, len(page.entries)) for page in pages)

    backend = OneByOne({}, ordered=True, flat=True)
    assert await listing.survey(backend, Place(b"p/"), deliver, timeout_s=60) == 3
    assert claims == [(b"", b"a", 2), (b"a", b"", 1)]
