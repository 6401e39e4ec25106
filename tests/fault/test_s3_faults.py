"""Bad networks and bad servers under the s3:// backend: a right answer, or an error in time."""

from __future__ import annotations

import contextlib
import random
import time

import pytest
import trio

from hsfs.backends.s3_backend import open_s3
from hsfs.core.errors import (
    Corrupt,
    HsfsError,
    Interrupted,
    StaleVersion,
    Throttled,
    TimedOut,
    Unavailable,
)
from hsfs.core.interruption import Interruption
from hsfs.core.types import DeviceId, Extent, Place, Version
from tests.servers.proxy import Proxy
from tests.servers.seaweedfs import SeaweedFS

BUCKET = "faults"
BIG = random.Random(1).randbytes(3 * 1024 * 1024 + 777)
SMALL = random.Random(2).randbytes(100 * 1024)
CHUNK = 1 << 20
LIMIT_S = 1.0  # of the backend in the tests that wait for it
SLACK_S = 40.0  # a loaded machine; the point is "not for ever"


@pytest.fixture(scope="module")
def server():
    with SeaweedFS() as weed:
        weed.create_bucket(BUCKET)
        weed.put_many(BUCKET, [("big", BIG), ("small", SMALL), ("d/file", b"x")])
        yield weed


@pytest.fixture(scope="module")
def running_proxy(server):
    with Proxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def proxy(running_proxy):
    running_proxy.clear()
    running_proxy.hole(False)
    running_proxy.refuse(False)
    running_proxy.forget()
    yield running_proxy
    running_proxy.clear()
    running_proxy.hole(False)
    running_proxy.refuse(False)


@pytest.fixture
def opened(server, proxy, monkeypatch):
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)

    async def run(body, timeout_s=60.0):
        options = {"endpoint": proxy.endpoint, "timeout": timeout_s}
        backend = await open_s3(DeviceId(1), f"s3://{BUCKET}", options)
        try:
            with trio.fail_after(100):
                await body(backend)
        finally:
            await backend.aclose()

    return run


@pytest.fixture
def version(opened):
    """The version of an object, by a backend with all the time that it needs."""

    async def ask(key):
        found = []

        async def body(backend):
            found.append(Version((await backend.stat(Place(key))).version))

        await opened(body)
        return found[0]

    return ask


def pieces(backend, key, size, version, *, announce=False, between=None):
    """The whole object piece by piece."""
    got = bytearray(size)
    view = memoryview(got)
    if announce:
        backend.announce(Place(key), Extent(0, size))
    for offset in range(0, size, CHUNK):
        part = view[offset : offset + CHUNK]
        n = backend.read_into(Place(key), offset, part, expect=version, interrupt=Interruption())
        assert n == len(part)
        if between is not None:
            between()
    return bytes(got)


async def read(backend, key, size, *, announce=False, offset=None, interrupt=None, version=None):
    if version is None:
        version = Version((await backend.stat(Place(key))).version)
    if offset is None:
        return await trio.to_thread.run_sync(
            lambda: pieces(backend, key, size, version, announce=announce)
        )
    buf = bytearray(size)
    n = await trio.to_thread.run_sync(
        lambda: backend.read_into(
            Place(key),
            offset,
            memoryview(buf),
            expect=version,
            interrupt=interrupt or Interruption(),
        )
    )
    return bytes(buf[:n])


async def test_an_announced_sequence_is_one_request(opened, proxy):
    async def body(backend):
        proxy.forget()
        assert await read(backend, b"big", len(BIG), announce=True) == BIG
        gets = [r for r in proxy.requests() if r.method == "GET"]
        assert [r.range for r in gets] == [f"bytes=0-{len(BIG) - 1}"]
        assert await read(backend, b"big", len(BIG)) == BIG

    await opened(body)


@pytest.mark.parametrize("announce", [False, True])
@pytest.mark.parametrize("how", ["cut", "truncate"])
@pytest.mark.parametrize("times", [1, None])
async def test_a_connection_that_ends_in_the_middle(opened, proxy, how, times, announce):
    async def body(backend):
        getattr(proxy, how)(300_000, times=times, min_body=400_000)
        assert await read(backend, b"big", len(BIG), announce=announce) == BIG
        assert proxy.counts()[f"fault_{how}"] >= 1

    await opened(body)


async def test_a_flipped_byte_in_a_small_object(opened, proxy):
    async def body(backend):
        proxy.corrupt(50_000, times=1, min_body=1000)
        assert await read(backend, b"small", len(SMALL), offset=0) == SMALL
        proxy.corrupt(50_000, min_body=1000)
        with pytest.raises(Corrupt):
            await read(backend, b"small", len(SMALL), offset=0)

    await opened(body)


async def test_a_well_formed_answer_that_is_too_short(opened, proxy, version):
    small = await version(b"small")

    async def heals(backend):
        proxy.short(1000, times=2, min_body=2000)
        assert await read(backend, b"small", len(SMALL), offset=0) == SMALL

    async def stays(backend):
        proxy.short(1000, min_body=2000)
        with pytest.raises(HsfsError):
            await read(backend, b"small", len(SMALL), offset=0, version=small)

    await opened(heals)
    await opened(stays, LIMIT_S)


async def test_an_error_document_with_status_200(opened, proxy, version):
    small = await version(b"small")

    async def heals(backend):
        proxy.error_body(times=2, min_body=1000)
        assert await read(backend, b"big", 500_000, offset=1000) == BIG[1000:501_000]
        proxy.error_body(times=1, path="list-type")
        assert len([page async for page in backend.scan(Place(b""))]) == 1

    async def stays(backend):
        proxy.error_body(min_body=1000)
        with pytest.raises(Unavailable):
            await read(backend, b"small", len(SMALL), offset=0, version=small)

    await opened(heals)
    await opened(stays, LIMIT_S)


async def test_patience_with_a_busy_server(opened, proxy):
    async def body(backend):
        proxy.status(503, retry_after_s=1, times=2)
        start = time.monotonic()
        assert (await backend.stat(Place(b"small"))).size == len(SMALL)
        assert time.monotonic() - start >= 1.9
        proxy.status(503, times=3, min_body=1000)
        assert await read(backend, b"small", len(SMALL), offset=0) == SMALL
        proxy.status(500, times=2, path="list-type")
        assert len([page async for page in backend.scan(Place(b""))]) == 1

    await opened(body)


async def test_a_storm_ends_with_the_servers_wish(opened, proxy, version):
    small = await version(b"small")

    async def body(backend):
        proxy.status(503, retry_after_s=1)
        start = time.monotonic()
        with pytest.raises(Throttled) as storm:
            await read(backend, b"small", len(SMALL), offset=0, version=small)
        assert storm.value.retry_after_s == 1
        assert time.monotonic() - start < LIMIT_S + SLACK_S

    async def afterwards(backend):
        proxy.clear()
        assert await read(backend, b"small", len(SMALL), offset=0) == SMALL

    await opened(body, LIMIT_S)
    await opened(afterwards)


async def test_a_black_hole(opened, proxy, version):
    big = await version(b"big")

    async def body(backend):
        proxy.hole()
        start = time.monotonic()
        with pytest.raises(TimedOut):
            await read(backend, b"big", CHUNK, offset=0, version=big)
        with pytest.raises(TimedOut):
            await backend.stat(Place(b"big"))
        with pytest.raises(TimedOut):
            await backend.probe()
        with pytest.raises(TimedOut):
            [page async for page in backend.scan(Place(b""))]
        assert time.monotonic() - start < 4 * LIMIT_S + SLACK_S
        proxy.hole(False)
        # On a loaded machine the server itself may need longer than this limit.
        with trio.fail_after(60):
            while True:
                with contextlib.suppress(Unavailable):
                    assert await read(backend, b"big", len(BIG)) == BIG
                    return

    await opened(body, LIMIT_S)


async def test_whoever_waits_in_a_black_hole_can_be_called_back(opened, proxy, version):
    big = await version(b"big")

    async def body(backend):
        proxy.hole()
        stop = Interruption()

        def wait():
            with pytest.raises(Interrupted):
                backend.read_into(
                    Place(b"big"), 0, memoryview(bytearray(CHUNK)), expect=big, interrupt=stop
                )

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, wait)
            await trio.sleep(0.1)
            stop.set()
        with trio.move_on_after(0.2) as scope:
            await backend.stat(Place(b"big"))
        assert scope.cancelled_caught

        def wait_until_closed():
            with pytest.raises(Unavailable):
                backend.read_into(
                    Place(b"big"),
                    0,
                    memoryview(bytearray(CHUNK)),
                    expect=big,
                    interrupt=Interruption(),
                )

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, wait_until_closed)
            await trio.sleep(0.1)
            await backend.aclose()

    await opened(body, 90.0)


async def test_a_server_that_is_gone_and_comes_back(opened, proxy):
    async def body(backend):
        assert (await backend.stat(Place(b"small"))).size == len(SMALL)
        proxy.refuse()
        with pytest.raises(Unavailable):
            await backend.probe()
        proxy.refuse(False)
        assert await read(backend, b"small", len(SMALL), offset=0) == SMALL

    await opened(body)


@pytest.mark.parametrize("announce", [False, True])
async def test_an_object_that_changes_between_two_pieces(opened, server, announce):
    async def body(backend):
        key = f"changing{announce}"
        size = 5 * CHUNK
        old, new = (random.Random(i).randbytes(size) for i in (3, 4))
        server.put_many(BUCKET, [(key, old)])
        version = Version((await backend.stat(Place(key.encode()))).version)
        left = iter([lambda: server.put_many(BUCKET, [(key, new)])])

        def change():
            next(left, lambda: None)()

        def run():
            return pieces(backend, key.encode(), size, version, announce=announce, between=change)

        # What is already on its way may still be the old one; never a mix.
        with contextlib.suppress(StaleVersion):
            assert await trio.to_thread.run_sync(run) == old
        fresh = await backend.stat(Place(key.encode()))
        assert fresh.version != version
        assert await read(backend, key.encode(), size, announce=announce) == new

    await opened(body)


async def test_a_listing_that_is_cut(opened, proxy):
    async def body(backend):
        proxy.truncate(200, times=1, path="list-type")
        assert len([page async for page in backend.scan(Place(b""))]) == 1
        proxy.short(300, path="list-type")
        with pytest.raises(HsfsError):
            [page async for page in backend.scan(Place(b""))]

    await opened(body)
