"""Order, wholeness and resumption of listings, over models of servers with small pages."""

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from hsfs.backends.s3_list import Listed, ListPage
from hsfs.backends.s3_scan import MARKER, Lister
from hsfs.core.errors import Unavailable
from hsfs.core.types import FileType


class ByteServer:
    """Lists in byte order. `repeats`: a common prefix comes again behind a page that ended in
    it."""

    def __init__(self, keys, size, repeats=False):
        self.keys, self.size, self.repeats = sorted(keys), size, repeats
        self.asked = 0

    def order(self, entry):
        return entry[0]

    def behind(self, entry, start):
        return entry[0] > start

    def page(self, prefix, interrupt, *, delimiter=b"", start_after=b"", token=b"", limit=1000):
        self.asked += 1
        start = token or start_after
        entries = {}
        for key in self.keys:
            if not key.startswith(prefix):
                continue
            name, slash, _ = key[len(prefix) :].partition(b"/")
            if delimiter and slash:
                entries[prefix + name + b"/"] = True
            else:
                entries[key] = False
        found = sorted(entries.items(), key=self.order)
        if start:
            found = [entry for entry in found if self.behind(entry, start)]
        size = min(self.size, limit)
        page, more = found[:size], len(found) > size
        return ListPage(
            [Listed(k, len(k), 10**9, k) for k, is_prefix in page if not is_prefix],
            [k for k, is_prefix in page if is_prefix],
            page[-1][0] if more else b"",
        )


class RepeatingServer(ByteServer):
    def behind(self, entry, start):
        return entry[0] > start or (entry[1] and entry[0] == start)

    def page(self, *arguments, **options):
        page = super().page(*arguments, **options)
        # A page that brought nothing new would go on for ever: real servers don't do that.
        start = options.get("token")
        if start and page.token == start:
            return super().page(*arguments, **{**options, "token": start + b"\x00"})
        return page


class TreeServer(ByteServer):
    """Lists as a walk through directories does: by the segments without their slashes."""

    def order(self, entry):
        return entry[0].rstrip(b"/").split(b"/")

    def behind(self, entry, start):
        return self.order(entry) > self.order((start, False))


_SEGMENT = st.sampled_from([b"a", b"b", b"a-", b"a.x", b"a!", b"ab", b"a0", b"c", b"\xc3\xa9"])
_KEYS = st.lists(st.lists(_SEGMENT, min_size=1, max_size=4).map(b"/".join), max_size=25)
_SERVERS = [ByteServer, RepeatingServer, TreeServer]


def tree_like(keys):
    """Without keys that are also directories: a tree holds no such thing."""
    keys = set(keys)
    return {k for k in keys if not any(other.startswith(k + b"/") for other in keys)}


async def level(lister, directory, after=None):
    return [page async for page in lister.level(directory, after)]


async def flat(lister, prefix, after=None):
    return [page async for page in lister.flat(prefix, after)]


def keys_of(pages):
    return [entry.place.key for page in pages for entry in page.entries]


@given(keys=_KEYS, size=st.integers(1, 5), kind=st.sampled_from(_SERVERS))
def test_levels(keys, size, kind):
    keys = tree_like(keys) if kind is TreeServer else set(keys)

    async def main():
        lister = Lister(kind([b"base/" + k for k in keys], size), b"base/", threads=2)
        for directory in (b"", b"a/", b"nothing/"):
            below = [k[len(directory) :] for k in keys if k.startswith(directory)]
            want = sorted(
                {directory + k.partition(b"/")[0] + (b"/" if b"/" in k else b"") for k in below}
            )
            whole = await level(lister, directory)
            assert keys_of(whole) == want
            assert whole[-1].cursor == b""
            seen = 0
            for page in whole[:-1]:
                assert page.cursor
                seen += len(page.entries)
                assert keys_of(await level(lister, directory, page.cursor)) == want[seen:]
        lister.close()

    trio.run(main)


@given(keys=_KEYS, size=st.integers(1, 5), kind=st.sampled_from(_SERVERS))
def test_whole_prefixes(keys, size, kind):
    keys = tree_like(keys) if kind is TreeServer else set(keys)

    async def main():
        lister = Lister(kind([b"base/" + k for k in keys], size), b"base/", threads=2)
        for prefix in (b"", b"a/", b"a", b"nothing/"):
            if kind is TreeServer and prefix == b"a":
                continue
            want = sorted(k for k in keys if k.startswith(prefix))
            try:
                whole = await flat(lister, prefix)
            except Unavailable:
                # Out of order, and no directory on the first page to tell by: it is known now.
                assert kind is TreeServer
                whole = await flat(lister, prefix)
            assert keys_of(whole) == want
            for page in whole[:-1]:
                after = page.cursor
                rest = [k for k in want if k > after]
                assert keys_of(await flat(lister, prefix, after)) == rest
        lister.close()

    trio.run(main)


def test_markers():
    async def main():
        lister = Lister(ByteServer([b"p/", b"p/x", b"q/"], 10), b"", threads=1)
        root = await level(lister, b"")
        assert [(e.name, e.type) for e in root[0].entries] == [
            (b"p", FileType.DIRECTORY),
            (b"q", FileType.DIRECTORY),
        ]
        below = await level(lister, b"p/")
        assert [(e.name, e.place.key, e.place.handle) for e in below[0].entries] == [
            (b"", b"p/", MARKER),
            (b"x", b"p/x", b""),
        ]
        lister.close()

    trio.run(main)


def test_a_level_that_comes_wildly_out_of_order_is_refused():
    class Wild(ByteServer):
        def order(self, entry):
            return entry[0][::-1]

        def behind(self, entry, start):
            return entry[0][::-1] > start[::-1]

    async def main():
        lister = Lister(Wild([b"az", b"by", b"cx", b"dw", b"ev"], 2), b"", threads=1)
        with pytest.raises(Unavailable, match="order"):
            await level(lister, b"")
        lister.close()

    trio.run(main)


def test_a_dropped_listing_is_fetched_no_further():
    async def main():
        server = ByteServer([b"%05d" % i for i in range(1000)], 10)
        lister = Lister(server, b"", threads=2)
        pages = lister.level(b"", None)
        await anext(pages)
        await pages.aclose()
        await trio.sleep(0.05)
        assert server.asked <= 5
        lister.close()
        with pytest.raises(Unavailable):
            await level(lister, b"")

    trio.run(main)
