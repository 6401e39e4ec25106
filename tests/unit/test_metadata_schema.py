"""Stored formats: golden bytes of schema 1, and what happens to any other."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from hsfs.core.errors import Corrupt, Unsupported
from hsfs.core.types import ROOT_INO, DirectoryPage, FileType, ObjectStat, Place
from hsfs.mdserver import schema
from hsfs.mdserver.namespace import Namespace
from hsfs.mdserver.schema import (
    Binding,
    Change,
    Coverage,
    DeviceRecord,
    Inode,
    Odd,
    Span,
)
from hsfs.mdserver.store.committer import Committer
from hsfs.mdserver.store.memory import MemoryStore

GOLDEN = [
    (
        Inode(1, 1, 100_000, 1_700_000_000_123_456_789, b"etag", 3, (Binding(2, 17, b"x.jpg"),)),
        "dc00110101ce000186a0cf17979cfe3d85cd15c4046574616703919402"
        "11c405782e6a7067c40000ffffff01c400c400000000",
        schema.decode_inode,
    ),
    (
        Inode(
            1, 1, 5, 6, b"v", 7, (Binding(1, 16, b"n", b"hh"), Binding(1, 18, b"m", b"hh")),
            8, 0o644, 1000, 1001, 2, b"id", b"", 9, 2, 10,
        ),
        "dc001101010506c401760792940110c4016ec4026868940112c4016dc402686808cd01a4cd03e8cd03e902"
        "c4026964c40009020a",
        schema.decode_inode,
    ),
    (Odd(1, 20, b"a%~o", 21, 1, b"a"), "960114c40461257e6f1501c40161", schema.decode_odd),
    (
        Coverage(1, 5, 2, (Span(b"", b"m", 7),)),
        "940105029193c400c4016d07",
        schema.decode_coverage,
    ),
    (
        DeviceRecord(1, "lake", "s3://b/p", "/data", 0, 17),
        "9601a46c616b65a873333a2f2f622f70a52f646174610011",
        schema.decode_device,
    ),
    (Change(1, 9, (17, b"name", 18, b"")), "9301099411c4046e616d6512c400", schema.decode_change),
    ((1, 2, 17, 1), "9401021101", schema.decode_candidates),
]  # fmt: skip


@pytest.mark.parametrize(("value", "golden", "decode"), GOLDEN)
def test_golden_bytes(value, golden, decode):
    assert schema.encode(value).hex() == golden
    assert decode(bytes.fromhex(golden)) == value
    with pytest.raises(Corrupt):
        decode(b"\xc1")


def test_values_of_a_later_minor_format_are_read():
    """Fields are only appended: what a newer version adds is skipped."""
    longer = msgspec.msgpack.encode([1, 20, b"a%~o", 21, 1, b"a", "added later"])
    assert schema.decode_odd(longer) == Odd(1, 20, b"a%~o", 21, 1, b"a")


def test_keys_sort_as_their_numbers_and_fit_the_engine():
    assert schema.inode_key(255) < schema.inode_key(256)
    assert schema.dentry_prefix(1) + b"\xff" * 255 < schema.dentry_prefix(2)
    long = b"x" * 1024
    assert len(schema.odd_key(1, 1, long)) <= 511
    assert schema.odd_key(1, 1, long) != schema.odd_key(1, 1, long[:-1])
    assert schema.after_prefix(b"D\0\xff") == b"D\1"
    assert schema.read_orphan_key(schema.orphan_key(7, 8, 9)) == (7, 8, 9)


def test_schema_number():
    assert schema.check_schema(None)
    assert not schema.check_schema(schema.schema_value())
    with pytest.raises(Unsupported, match="schema 2"):
        schema.check_schema((2).to_bytes(4, "big"))
    with pytest.raises(Corrupt):
        schema.check_schema(b"?")


def opened(store, backends=()):
    committer = Committer(store)
    return committer, Namespace(
        store, committer, SimpleNamespace(backends=backends), SimpleNamespace()
    )


def test_a_store_of_a_newer_version_is_refused_by_name():
    async def main():
        store = MemoryStore()
        store.commit({}, {schema.SCHEMA_KEY: (99).to_bytes(4, "big")})
        committer, namespace = opened(store)
        with pytest.raises(Unsupported, match=r"schema 99.*reads up to 1"):
            async with namespace:
                pass
        committer.close()

    asyncio.run(main())


def test_a_store_of_schema_1_is_read_by_all_that_follow():
    """Fixture: written once by the version that introduced the schema; never edited."""
    fixture = msgspec.json.decode((Path(__file__).parent / "fixtures/metadata-1.json").read_bytes())

    async def main():
        store = MemoryStore()
        store.commit({}, {bytes.fromhex(k): bytes.fromhex(v) for k, v in fixture.items()})
        committer, namespace = opened(store, BACKENDS)
        async with namespace:
            assert namespace.epoch == 2
            listing = [e.name for e in (await namespace.list(ROOT_INO, b"", 10)).entries]
            assert listing == [b"data"]
            with namespace._view() as view:
                data = view.child(ROOT_INO, b"data")[0]
                ino, kind = view.child(data, b"a.bin")
                assert (ino, kind) == (17, FileType.FILE)
                record = view.require(ino)
                assert (record.size, record.version) == (7, b"etag-1")
                assert view.path(view.child(data, b"dir")[0]) == b"/data/dir"
                assert view.child(data, b"dir%~o")[1] == FileType.FILE
        committer.close()

    asyncio.run(main())


BACKENDS = (
    SimpleNamespace(name="lake", url="s3://bucket/p", at="/data", options={"freshness": 60.0}),
)


def write_fixture():
    """How the fixture was made."""

    async def main():
        store = MemoryStore()
        committer, namespace = opened(store, BACKENDS)
        async with namespace:
            entries = (
                ObjectStat(b"a.bin", FileType.FILE, Place(b"a.bin"), 7, 5, 0, b"etag-1"),
                ObjectStat(b"dir", FileType.FILE, Place(b"dir"), 8, 5, 0, b"etag-2"),
                ObjectStat(b"dir", FileType.DIRECTORY, Place(b"dir/")),
            )
            await namespace.apply([DirectoryPage(1, Place(b""), entries, b"", b"", 1000)])
        committer.close()
        with store.snapshot() as snapshot:
            return {k.hex(): v.hex() for k, v in snapshot.range(b"", b"\xff")}

    return asyncio.run(main())
