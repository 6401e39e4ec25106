"""The NFSv3 client and servers of every habit: see nfs_responder for those that Ganesha lacks."""

from __future__ import annotations

import copy
import os
import random
import socket
from functools import partial

import pytest
import trio

from hsfs.backends import nfs_session
from hsfs.backends.nfs_backend import open_nfs
from hsfs.core.errors import (
    ConfigError,
    IsADirectory,
    NotFound,
    NotSupported,
    ProtocolError,
    StaleHandle,
    StaleVersion,
    Throttled,
    Unauthorised,
    Unavailable,
    UsageError,
)
from hsfs.core.types import DeviceId, FileType, Place, Version
from hsfs.proto import nfs3
from tests.conformance.backend_suite import patiently, read_blocking
from tests.nfs.nfs_responder import Behaviour, NfsResponder

DATA = random.Random(1).randbytes(700_001)
FILES = {b"big": DATA, **{b"dir/f%d" % i: b"x" * i for i in range(10)}, b"dir/sub/deep": b"deep"}
LINKS = {b"dir/link%d" % i: b"target%d" % i for i in range(4)}

HABITS = {
    "plain": Behaviour(),
    "small reads": Behaviour(read_max=65536),
    "no READDIRPLUS": Behaviour(readdirplus=False),
    "no attributes": Behaviour(attributes=False),
    "no handles in listings": Behaviour(handles=False),
    "nothing but names": Behaviour(handles=False, attributes=False, readdirplus=False),
    "fragments": Behaviour(fragment=1000, read_max=65536),
    "fragments of 7 bytes": Behaviour(fragment=7, read_max=65536),
    "a verifier": Behaviour(verifier=b"12345678"),
    "a verifier and no attributes": Behaviour(verifier=b"1234", attributes=False),
    "short reads": Behaviour(short_read=10_007, read_max=65536),
    "last come first served": Behaviour(reverse=True, read_max=65536),
    "busy at times": Behaviour(jukebox=2),
    "owners only": Behaviour(owner_only=True, read_max=65536),
}


async def opened(server, **options):
    return await open_nfs(DeviceId(1), server.url, {"timeout": 60.0, **options})


async def in_thread(function, *args, **kwargs):
    return await trio.to_thread.run_sync(lambda: function(*args, **kwargs))


@pytest.mark.parametrize("habit", HABITS)
async def test_every_habit(habit):
    with NfsResponder(FILES, links=LINKS, behaviour=copy.copy(HABITS[habit])) as server:
        for key, uid in ((b"big", 1000), (b"dir", 1001), (b"dir/f7", 1002)):
            server.chown(key, uid)
        backend = await opened(server)
        found = {e.name: e async for page in backend.scan(Place(b"dir")) for e in page.entries}
        assert set(found) == {b"f%d" % i for i in range(10)} | {b"link%d" % i for i in range(4)} | {
            b"sub"
        }
        for i in range(10):
            assert (found[b"f%d" % i].size, found[b"f%d" % i].type) == (i, FileType.FILE)
        for i in range(4):
            assert found[b"link%d" % i].target == b"target%d" % i
        assert found[b"sub"].type is FileType.DIRECTORY
        stat = await backend.stat(Place(b"big"))
        assert (stat.size, stat.uid) == (len(DATA), 1000)
        for offset, size in ((0, len(DATA)), (1, 70_000), (65_535, 3), (len(DATA) - 5, 100)):
            for expect in (None, Version(stat.version)):
                got = await in_thread(
                    read_blocking, backend, stat.place, offset, size, expect=expect
                )
                assert got == DATA[offset : offset + size]
        assert await in_thread(read_blocking, backend, found[b"f7"].place, 0, 50) == b"xxxxxxx"
        server.write(b"big", DATA[::-1], uid=1000)
        with pytest.raises(StaleVersion):
            await in_thread(
                read_blocking, backend, stat.place, 0, 200_000, expect=Version(stat.version)
            )
        assert (await backend.probe()).total == 1 << 30
        await backend.aclose()


async def test_an_owner_that_helped_is_tried_first():
    with NfsResponder(
        {b"f%d" % i: b"data" for i in range(20)}, behaviour=Behaviour(owner_only=True)
    ) as server:
        for i in range(20):
            server.chown(b"f%d" % i, 1234)
        server.chown(b"", 1234)
        backend = await opened(server)
        places = [e.place async for page in backend.scan(Place(b"")) for e in page.entries]
        server.calls.clear()
        for place in places:
            assert await in_thread(read_blocking, backend, place, 0, 10) == b"data"
        assert server.count(nfs3.READ) == 20
        assert {uid for _, uid in server.calls} == {1234}
        await backend.aclose()


@pytest.mark.parametrize(("identity", "uid"), [("4242:7", 4242), ("caller", None)])
async def test_a_fixed_identity_is_never_exchanged(identity, uid):
    with NfsResponder({b"f": b"data"}, behaviour=Behaviour(owner_only=True)) as server:
        server.chown(b"f", 77)
        server.chown(b"", os.geteuid() if uid is None else uid)
        backend = await opened(server, identity=identity)
        stat = await backend.stat(Place(b"f"))
        with pytest.raises(Unauthorised, match="no_root_squash"):
            await in_thread(read_blocking, backend, stat.place, 0, 10)
        assert {u for _, u in server.calls} == {os.geteuid() if uid is None else uid}
        await backend.aclose()


@pytest.mark.parametrize("identity", ["root", "1:", ":1", "a:b", "1:2:3", "-1:2", "4294967296:1"])
async def test_identities_that_are_none(identity):
    with pytest.raises(ConfigError):
        await open_nfs(DeviceId(1), "nfs://host/export", {"identity": identity})


@pytest.mark.parametrize(
    ("url", "options", "error"),
    [
        ("nfs:///export", {}, UsageError),
        ("http://host/export", {}, UsageError),
        ("nfs://user@host/export", {}, UsageError),
        ("nfs://host:99999/export", {}, UsageError),
        ("nfs://host/export?port=x", {}, UsageError),
        ("nfs://host/export?mountport=0", {}, UsageError),
        ("nfs://host/export", {"timeout": 0}, ConfigError),
        ("nfs://host/export", {"timeout": "soon"}, ConfigError),
        ("nfs://host/export", {"connections": 0}, ConfigError),
    ],
)
async def test_urls_and_options_that_are_none(url, options, error):
    with pytest.raises(error):
        await open_nfs(DeviceId(1), url, options)


async def test_handles_that_the_server_has_forgotten_are_looked_up_again():
    with NfsResponder(FILES) as server:
        backend = await opened(server)
        old = await backend.stat(Place(b"dir/f3"))
        server.behaviour.generation = 2
        new = await backend.stat(old.place)
        assert (new.identity, new.version) == (old.identity, old.version)
        assert new.place.handle != old.place.handle
        got = await in_thread(read_blocking, backend, old.place, 0, 10, expect=Version(old.version))
        assert got == b"xxx"
        server.behaviour.generation = 3
        names = [e.name async for p in backend.scan(Place(b"dir/sub")) for e in p.entries]
        assert names == [b"deep"]
        await backend.aclose()


async def test_a_listing_is_not_continued_in_another_directory():
    with NfsResponder(FILES) as server:
        backend = await opened(server)
        directory = (await backend.stat(Place(b"dir"))).place
        scan = backend.scan(directory)
        page = await anext(scan)
        assert page.cursor
        server.behaviour.generation = 2
        with pytest.raises(StaleHandle):
            await anext(scan)
        await backend.aclose()


async def test_a_server_that_asks_for_patience_for_ever():
    with NfsResponder(FILES, behaviour=Behaviour()) as server:
        backend = await opened(server, timeout=1.0)
        stat = await patiently(lambda: backend.stat(Place(b"big")))
        server.behaviour.jukebox = 10**9
        with pytest.raises(Throttled):
            await patiently(lambda: backend.stat(stat.place))
        read = partial(in_thread, read_blocking, backend, stat.place, 0, 10)
        with pytest.raises(Throttled):
            await patiently(read)
        server.behaviour.jukebox = 0
        assert await patiently(read) == DATA[:10]
        await backend.aclose()


async def test_listings_that_are_none():
    for behaviour in (Behaviour(endless=True), Behaviour(entry_name=b"a/b")):
        with NfsResponder(FILES, behaviour=behaviour) as server:
            backend = await opened(server)
            with pytest.raises(ProtocolError):
                async for _ in backend.scan(Place(b"dir")):
                    pass
            await backend.aclose()


async def test_a_server_of_version_4_only_is_refused_with_the_way_out():
    with NfsResponder(FILES, behaviour=Behaviour(versions=(4, 4))) as server:
        backend = await opened(server)
        with pytest.raises(NotSupported, match="file:///"):
            await backend.probe()
        await backend.aclose()


async def test_exports_that_may_not_be_mounted():
    with NfsResponder(FILES, behaviour=Behaviour(flavors=(390003,))) as server:
        backend = await opened(server)
        with pytest.raises(Unauthorised, match="sec=sys"):
            await backend.probe()
        await backend.aclose()
    with NfsResponder(FILES, behaviour=Behaviour(refuse_auth=True)) as server:
        backend = await opened(server)
        with pytest.raises(Unauthorised, match="AUTH_SYS"):
            await backend.probe()
        await backend.aclose()
    with NfsResponder(FILES) as server:
        backend = await open_nfs(
            DeviceId(1), server.url.replace("/export", "/other/place"), {"timeout": 60.0}
        )
        with pytest.raises(NotFound, match="exports /export"):
            await backend.probe()
        await backend.aclose()


async def test_a_directory_below_the_export():
    with NfsResponder(FILES) as server:
        url = server.url.replace("/export", "/export/dir/sub")
        backend = await open_nfs(DeviceId(1), url, {"timeout": 60.0})
        names = [e.name async for p in backend.scan(Place(b"")) for e in p.entries]
        assert names == [b"deep"]
        assert (await backend.stat(Place(b""))).name == b""
        await backend.aclose()
        backend = await open_nfs(
            DeviceId(1), server.url.replace("/export", "/export/nothing"), {"timeout": 60.0}
        )
        with pytest.raises(NotFound):
            await backend.probe()
        await backend.aclose()


async def test_reading_what_is_no_file():
    with NfsResponder(FILES, links=LINKS) as server:
        backend = await opened(server)
        for key, error in ((b"dir", IsADirectory), (b"", IsADirectory)):
            with pytest.raises(error):
                await in_thread(read_blocking, backend, Place(key), 0, 10)
        with pytest.raises(NotFound):
            await in_thread(read_blocking, backend, Place(b"dir/../big"), 0, 10)
        await backend.aclose()


async def test_many_tasks_share_one_connection_and_survive_cancellation():
    with NfsResponder({b"f%d" % i: b"x" * i for i in range(200)}) as server:
        backend = await opened(server)
        wrong = []

        async def one(i):
            with trio.move_on_after(0.001 * (i % 5) if i % 3 == 0 else 60):
                stat = await backend.stat(Place(b"f%d" % i))
                if stat.size != i:
                    wrong.append(i)

        async with trio.open_nursery() as nursery:
            for i in range(200):
                nursery.start_soon(one, i)
        assert not wrong
        assert (await backend.stat(Place(b"f199"))).size == 199
        await backend.aclose()


async def test_ports_are_asked_of_the_portmapper(monkeypatch):
    with NfsResponder(FILES) as server:
        monkeypatch.setattr(nfs_session, "_PORTMAP_PORT", server.port)
        backend = await open_nfs(DeviceId(1), "nfs://127.0.0.1/export", {"timeout": 60.0})
        assert (await backend.stat(Place(b"dir/f3"))).size == 3
        assert await in_thread(read_blocking, backend, Place(b"dir/f3"), 0, 9) == b"xxx"
        await backend.aclose()
        server.behaviour.registered = ()
        backend = await open_nfs(
            DeviceId(1), f"nfs://127.0.0.1:{server.port}/export", {"timeout": 60.0}
        )
        with pytest.raises(Unavailable, match="mountport"):
            await backend.probe()
        await backend.aclose()


async def test_a_server_that_moves_is_found_again(monkeypatch):
    with NfsResponder(FILES) as first:
        monkeypatch.setattr(nfs_session, "_PORTMAP_PORT", first.port)
        backend = await open_nfs(DeviceId(1), "nfs://127.0.0.1/export", {"timeout": 60.0})
        stat = await backend.stat(Place(b"big"))
    with NfsResponder(FILES) as second:
        monkeypatch.setattr(nfs_session, "_PORTMAP_PORT", second.port)
        got = await in_thread(
            read_blocking, backend, stat.place, 0, 100, expect=Version(stat.version)
        )
        assert got == DATA[:100]
        assert (await backend.stat(stat.place)).version == stat.version
        await backend.aclose()


async def test_a_name_with_an_address_where_nobody_listens(monkeypatch):
    with NfsResponder(FILES) as server:
        found = [
            (socket.AF_INET, 0, 0, "", ("127.0.0.2", 0)),  # the responder is on 127.0.0.1 only
            (socket.AF_INET, 0, 0, "", ("127.0.0.1", 0)),
        ]
        monkeypatch.setattr(nfs_session.socket, "getaddrinfo", lambda *_, **__: found)
        backend = await opened(server)
        assert (await backend.stat(Place(b"big"))).size == len(DATA)
        assert await in_thread(read_blocking, backend, Place(b"big"), 0, 100) == DATA[:100]
        await backend.aclose()


@pytest.mark.skipif(os.geteuid() != 0, reason="reserved ports are for root")
async def test_root_uses_reserved_ports_however_often_it_connects():
    with NfsResponder({b"f": b"data"}) as server:
        for _ in range(250):
            backend = await opened(server)
            assert await in_thread(read_blocking, backend, Place(b"f"), 0, 10) == b"data"
            await backend.aclose()
        assert len(server.peers) >= 500
        assert max(port for _, port in server.peers) < 1024
