"""What every front may rely on: names, attributes, files. `vfs` fixtures run on trio."""

from __future__ import annotations

import random

import pytest
import trio

from hsfs.core.errors import (
    IsADirectory,
    NameTooLong,
    NoAttribute,
    NotADirectory,
    NotFound,
    StaleHandle,
    StaleVersion,
)
from hsfs.core.types import ROOT_INO, FileType, Ino, Name

MIB = 1 << 20
BIG = random.Random(3).randbytes(9 * MIB + 12345)
SMALL = b"small content"


class VfsSuite:
    """Needs the fixtures `vfs` (running) and `source` (write, remove, tell)."""

    async def ino(self, vfs, path: bytes) -> Ino:
        return Ino((await vfs.resolve(path)).attributes.ino)

    async def whole(self, vfs, path: bytes) -> bytes:
        fh = (await vfs.files.open(await self.ino(vfs, path))).fh
        try:
            data, offset = b"", 0
            while piece := bytes(await vfs.files.read_soon(fh, offset, MIB)):
                data += piece
                offset += len(piece)
            return data
        finally:
            vfs.files.release(fh)

    async def test_names(self, vfs, source):
        node = await vfs.names.lookup(ROOT_INO, Name(b"d"))
        assert node.attributes.type is FileType.DIRECTORY
        below = await vfs.names.lookup(Ino(node.attributes.ino), Name(b"small"))
        assert below.attributes.size == len(SMALL)
        with pytest.raises(NotFound):
            await vfs.names.lookup(ROOT_INO, Name(b"absent"))
        with pytest.raises(NotFound):
            vfs.names.lookup_now(ROOT_INO, Name(b"absent"))
        with pytest.raises(NotADirectory):
            await vfs.resolve(b"d/small/x")
        with pytest.raises(NameTooLong):
            await vfs.names.lookup(ROOT_INO, Name(b"n" * 256))

    async def test_what_was_asked_is_known(self, vfs, source):
        node = await vfs.names.lookup(ROOT_INO, Name(b"big"))
        again = vfs.names.lookup_now(ROOT_INO, Name(b"big"))
        assert again is not None
        assert again.attributes == node.attributes
        assert vfs.attrs.getattr_now(Ino(node.attributes.ino)) is not None

    async def test_listing_pages_in_order_and_without_repeats(self, vfs, source):
        ino = await self.ino(vfs, b"many")
        names: list[bytes] = []
        after = b""
        while True:
            page = await vfs.names.page(ino, after)
            assert len(page.names) == len(page.nodes)
            names.extend(page.names)
            if not page.more:
                break
            after = page.names[-1]
        assert names == [b"f%04d" % n for n in range(600)]
        # What the listing showed needs no further question.
        assert vfs.names.lookup_now(ino, Name(b"f0599")) is not None
        assert vfs.names.page_now(ino, b"") is not None

    async def test_whole_files(self, vfs, source):
        assert await self.whole(vfs, b"big") == BIG
        assert await self.whole(vfs, b"d/small") == SMALL
        assert await self.whole(vfs, b"empty") == b""
        assert await self.whole(vfs, b"big") == BIG

    async def test_ranges(self, vfs, source):
        fh = (await vfs.files.open(await self.ino(vfs, b"big"))).fh
        rng = random.Random(4)
        for _ in range(60):
            offset = rng.randrange(0, len(BIG) + 1000)
            size = rng.choice((1, 100, 4096, 131072, 300_000, MIB))
            data = await vfs.files.read_soon(fh, offset, size)
            assert data == BIG[offset : offset + size]
        vfs.files.release(fh)

    async def test_many_readers_of_one_file(self, vfs, source):
        ino = await self.ino(vfs, b"big")

        async def reader(seed: int) -> None:
            rng = random.Random(seed)
            fh = (await vfs.files.open(ino)).fh
            for _ in range(20):
                offset = rng.randrange(0, len(BIG))
                data = await vfs.files.read_soon(fh, offset, 200_000)
                assert data == BIG[offset : offset + 200_000]
            vfs.files.release(fh)

        async with trio.open_nursery() as nursery:
            for seed in range(8):
                nursery.start_soon(reader, seed)
        assert vfs.stats()["now"]["handles"] == 0

    async def test_many_small_files_in_order(self, vfs, source):
        ino = await self.ino(vfs, b"many")
        after = b""
        while (page := await vfs.names.page(ino, after)).more:
            after = page.names[-1]
        for number in range(600):
            name = b"many/f%04d" % number
            assert await self.whole(vfs, name) == name
        stats = vfs.stats()
        assert stats["siblings_used"] > 300
        # Ahead of the reader, but not past what is there, and never the same bytes twice.
        assert sum(stats["fetched"].values()) <= 600 * len(b"many/f0000")

    async def test_opens_of_what_is_no_file(self, vfs, source):
        with pytest.raises(IsADirectory):
            await vfs.files.open(ROOT_INO)
        with pytest.raises(StaleHandle):
            vfs.files.read(12345, 0, 1, lambda outcome: None)
        vfs.files.release(12345)

    async def test_a_changed_source_is_never_mixed(self, vfs, source):
        ino = await self.ino(vfs, b"big")
        fh = (await vfs.files.open(ino)).fh
        assert await vfs.files.read_soon(fh, 0, 4096) == BIG[:4096]
        changed = BIG[::-1]
        source.write(b"big", changed)
        for offset in range(2 * MIB, len(BIG), MIB):
            try:
                data = await vfs.files.read_soon(fh, offset, 4096)
            except StaleVersion:
                continue
            assert data == BIG[offset : offset + 4096]
        with pytest.raises(StaleVersion):
            await vfs.files.read_soon(fh, 6 * MIB, 4096)
        vfs.files.release(fh)
        assert await self.whole(vfs, b"big") == changed

    async def test_a_shortened_source_is_stale_not_zeros(self, vfs, source):
        fh = (await vfs.files.open(await self.ino(vfs, b"big"))).fh
        source.write(b"big", BIG[: 5 * MIB])
        with pytest.raises(StaleVersion):
            await vfs.files.read_soon(fh, 8 * MIB, 4096)
        vfs.files.release(fh)

    async def test_a_deleted_source_is_stale(self, vfs, source):
        fh = (await vfs.files.open(await self.ino(vfs, b"big"))).fh
        source.remove(b"big")
        with pytest.raises(StaleVersion):
            await vfs.files.read_soon(fh, 8 * MIB, 4096)
        vfs.files.release(fh)

    async def test_pushes_are_applied_to_our_own_knowledge_and_passed_on(self, vfs, source, told):
        ino = await self.ino(vfs, b"d/small")
        vfs.inodes.enter(await vfs.resolve(b"d/small"))
        source.write(b"d/small", b"another content")
        await source.tell()
        with trio.fail_after(30):
            while (ino, b"") not in told:  # noqa: ASYNC110 - a list is all there is
                await trio.sleep(0.01)
        # The front was told of another content: it has to look the name up again.
        with pytest.raises(StaleHandle):
            await vfs.files.open(ino)
        vfs.inodes.enter(await vfs.resolve(b"d/small"))
        assert await self.whole(vfs, b"d/small") == b"another content"

    async def test_xattrs(self, vfs, source):
        ino = await self.ino(vfs, b"d/small")
        node = await vfs.resolve(b"d/small")
        assert await vfs.attrs.xattr(ino, b"user.hsfs.version") == node.version
        assert await vfs.attrs.xattr(ino, b"user.hsfs.ino") == b"%d" % ino
        assert b'"backend": "source"' in await vfs.attrs.xattr(ino, b"user.hsfs.replicas")
        assert float(await vfs.attrs.xattr(ino, b"user.hsfs.as_of")) > 0
        for name in (b"security.capability", b"user.hsfs.nonsense", b"user.other"):
            with pytest.raises(NoAttribute):
                await vfs.attrs.xattr(ino, name)

    async def test_space(self, vfs, source):
        space = await vfs.attrs.space()
        assert space.total > 0

    async def test_warm_evict_and_counters(self, vfs, source):
        seen = []
        warmed = await vfs.warm(b"", lambda so_far: seen.append(so_far.files))
        assert (warmed.files, warmed.failed) == (603, 0)
        assert warmed.bytes >= len(BIG) + len(SMALL)
        assert seen
        node = await vfs.resolve(b"big")
        assert vfs.attrs.cached_bytes(node) == len(BIG)
        fetched = sum(vfs.stats()["fetched"].values())
        assert await self.whole(vfs, b"big") == BIG
        assert sum(vfs.stats()["fetched"].values()) == fetched
        assert await vfs.evict(b"big") > 0
        assert vfs.attrs.cached_bytes(node) == 0
        with pytest.raises(NotFound):
            await vfs.warm(b"absent")

    async def test_random_reads_fetch_what_they_need(self, vfs, source):
        fh = (await vfs.files.open(await self.ino(vfs, b"big"))).fh
        rng = random.Random(5)
        pages = rng.sample(range(256, len(BIG) // 4096), 10)
        for page in pages:
            await vfs.files.read_soon(fh, page * 4096, 4096)
        vfs.files.release(fh)
        assert sum(vfs.stats()["fetched"].values()) <= 32 * 10 * 4096


def fill(write) -> None:
    """The tree that the suite expects, through `write(key, data)`."""
    write(b"big", BIG)
    write(b"empty", b"")
    write(b"d/small", SMALL)
    for number in range(600):
        name = b"many/f%04d" % number
        write(name, name)
