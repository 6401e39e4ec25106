"""NFS servers and networks that stop, die, come back, cut and change: nothing hangs, no wrong byte.

Deadlines in here are the backend's own and short; the limits around them are long, because the
machine may be busy.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
import threading
from functools import partial
from pathlib import Path

import pytest
import trio

from hsfs.backends.nfs_backend import open_nfs
from hsfs.core.errors import Interrupted, StaleVersion, TimedOut, Unavailable
from hsfs.core.types import DeviceId, Place, Version
from tests.conformance.backend_suite import Switch, patiently, read_blocking
from tests.servers.ganesha import Ganesha
from tests.servers.proxy import Proxy

LIMIT_S = 120
MIB = 1 << 20


@pytest.fixture
def folder():
    path = Path(tempfile.mkdtemp(prefix="hsfs-nfs-fault-", dir="/var/tmp"))
    yield path
    shutil.rmtree(path)


@contextlib.asynccontextmanager
async def backend_at(url, **options):
    with trio.fail_after(LIMIT_S):
        backend = await open_nfs(DeviceId(1), url, {"timeout": 60.0, **options})
        try:
            yield backend
        finally:
            await backend.aclose()


@contextlib.contextmanager
def proxied(folder):
    """(server, proxy before its NFS port, URL through the proxy)."""
    with Ganesha(folder) as server, Proxy(server.port, mode="tcp") as proxy:
        yield (
            server,
            proxy,
            f"nfs://127.0.0.1{server.export}?port={proxy.port}&mountport={server.mount_port}",
        )


async def in_thread(function, *args, **kwargs):
    return await trio.to_thread.run_sync(lambda: function(*args, **kwargs))


async def eventually(predicate):
    while True:
        await trio.sleep(0.02)
        if predicate():
            return


async def collect(backend, key):
    return [e async for page in backend.scan(Place(key)) for e in page.entries]


def content(folder, name, size, seed=1):
    data = random.Random(seed).randbytes(size)
    Path(folder, name).write_bytes(data)
    return data


async def test_a_server_that_is_stopped_gives_timeouts_and_recovers(folder):
    data = content(folder, "file", 2 * MIB)
    with Ganesha(folder) as server:
        async with backend_at(server.url, timeout=2.0) as backend:
            stat = await patiently(lambda: backend.stat(Place(b"file")))
            version = Version(stat.version)
            read = partial(in_thread, read_blocking, backend, stat.place, 0, 2 * MIB)
            assert await patiently(read) == data
            server.pause()
            failed = []

            async def fails(call, *args, **kwargs):
                with pytest.raises(TimedOut):
                    await call(*args, **kwargs)
                failed.append(call)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(fails, backend.stat, stat.place)
                nursery.start_soon(fails, backend.probe)
                nursery.start_soon(fails, collect, backend, b"")
                for _ in range(6):  # more reads than lanes
                    nursery.start_soon(fails, in_thread, read_blocking, backend, stat.place, 0, MIB)
            assert len(failed) == 9
            server.resume()
            assert await patiently(partial(read, expect=version)) == data
            assert (await patiently(lambda: backend.stat(stat.place))).version == stat.version
            names = [e.name for e in await patiently(lambda: collect(backend, b""))]
            assert names == [b"file"]


async def test_a_server_that_is_killed_and_comes_back_mid_read(folder):
    data = content(folder, "file", 48 * MIB)
    with Ganesha(folder) as server:
        async with backend_at(server.url, timeout=90.0) as backend:
            stat = await backend.stat(Place(b"file"))
            done = threading.Event()
            reads = [0]

            def read_all():
                offset, rounds = 0, 0
                while rounds == 0 or not done.is_set():
                    got = read_blocking(
                        backend, stat.place, offset, 3 * MIB, expect=Version(stat.version)
                    )
                    assert got == data[offset : offset + 3 * MIB]
                    reads[0] += 1
                    offset = (offset + 3 * MIB) % len(data)
                    rounds += offset == 0

            async def stats():
                while not done.is_set():
                    assert (await backend.stat(Place(b"file"))).version == stat.version
                    await trio.sleep(0.01)

            async with trio.open_nursery() as nursery:
                for _ in range(2):
                    nursery.start_soon(trio.to_thread.run_sync, read_all)
                nursery.start_soon(stats)
                await eventually(lambda: reads[0] > 5)
                await trio.to_thread.run_sync(server.restart)
                before = reads[0]
                await eventually(lambda: reads[0] > before + 5)
                done.set()


async def test_a_file_that_changes_during_one_read(folder):
    size = 40 * MIB
    content(folder, "file", size, seed=1)
    with proxied(folder) as (_, proxy, url):
        async with backend_at(url) as backend:
            stat = await backend.stat(Place(b"file"))
            proxy.cap(16 * MIB)
            proxy.forget()
            outcome = []

            def read():
                try:
                    read_blocking(backend, stat.place, 0, size, expect=Version(stat.version))
                except StaleVersion as error:
                    outcome.append(error)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.to_thread.run_sync, read)
                await eventually(lambda: proxy.counts()["bytes_down"] > 4 * MIB)
                fd = os.open(folder / "file", os.O_WRONLY)
                os.pwrite(fd, b"changed", size - 100)
                os.close(fd)
            assert len(outcome) == 1
            proxy.clear()
            new = await backend.stat(Place(b"file"))
            assert new.version != stat.version


@pytest.mark.parametrize("after", [50, 1000, 5 * MIB + 17])
async def test_connections_that_are_cut_mid_body(folder, after):
    data = content(folder, "file", 12 * MIB)
    with proxied(folder) as (_, proxy, url):
        async with backend_at(url) as backend:
            stat = await backend.stat(Place(b"file"))
            proxy.cut(after, times=3)
            got = await in_thread(
                read_blocking, backend, stat.place, 0, 12 * MIB, expect=Version(stat.version)
            )
            assert got == data


async def test_a_dropped_connection_costs_no_metadata_call_its_answer(folder):
    for i in range(50):
        content(folder, f"f{i}", i)
    with proxied(folder) as (_, proxy, url):
        async with backend_at(url) as backend:
            done = [0]

            async def stats(i):
                for _ in range(20):
                    assert (await backend.stat(Place(b"f%d" % i))).size == i
                    done[0] += 1

            async with trio.open_nursery() as nursery:
                for i in range(50):
                    nursery.start_soon(stats, i)
                for part in (50, 300, 600):
                    await eventually(lambda part=part: done[0] >= part)
                    await trio.to_thread.run_sync(proxy.drop)
            assert done[0] == 1000


async def test_a_network_that_swallows_everything(folder):
    data = content(folder, "file", MIB)
    with proxied(folder) as (_, proxy, url):
        async with backend_at(url, timeout=2.0) as backend:
            stat = await patiently(lambda: backend.stat(Place(b"file")))
            proxy.hole()
            with pytest.raises(TimedOut):
                await backend.stat(stat.place)
            with pytest.raises(TimedOut):
                await in_thread(read_blocking, backend, stat.place, 0, MIB)
            proxy.hole(False)
            read = partial(in_thread, read_blocking, backend, stat.place, 0, MIB)
            assert await patiently(read) == data
            assert (await patiently(lambda: backend.stat(stat.place))).size == MIB


async def test_a_server_that_refuses_connections_is_waited_for(folder):
    data = content(folder, "file", MIB)
    with proxied(folder) as (_, proxy, url):
        async with backend_at(url, timeout=60.0) as backend:
            stat = await backend.stat(Place(b"file"))
            proxy.refuse()
            results = []

            async def keep(call, *args):
                results.append(await call(*args))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(keep, backend.stat, stat.place)
                nursery.start_soon(keep, in_thread, read_blocking, backend, stat.place, 0, MIB)
                await trio.sleep(0.5)
                assert not results
                await trio.to_thread.run_sync(proxy.refuse, False)
            assert {type(r) for r in results} == {bytes, type(stat)}
            assert data in results
        async with backend_at(url, timeout=1.0) as backend:
            await patiently(lambda: backend.stat(Place(b"file")))
            await trio.to_thread.run_sync(proxy.refuse)
            with pytest.raises(Unavailable):
                await backend.stat(stat.place)
            with pytest.raises(Unavailable):
                await in_thread(read_blocking, backend, stat.place, 0, MIB)


async def test_a_server_that_is_away_at_first(folder):
    content(folder, "file", 100)
    server = Ganesha(folder)
    try:
        async with backend_at(server.url) as backend:
            for _ in range(2):
                # The address answers at once that nobody listens: no reason to wait.
                with pytest.raises(Unavailable):
                    await backend.probe()
            with pytest.raises(Unavailable):
                await in_thread(read_blocking, backend, Place(b"file"), 0, 10)
            await trio.to_thread.run_sync(server.start)
            assert (await backend.probe()).total > 0
            assert (await backend.stat(Place(b"file"))).size == 100
    finally:
        server.stop()


async def test_an_interrupt_ends_a_read_that_waits(folder):
    data = content(folder, "file", MIB)
    with Ganesha(folder) as server:
        async with backend_at(server.url, timeout=1000.0, connections=2) as backend:
            stat = await backend.stat(Place(b"file"))
            await in_thread(read_blocking, backend, stat.place, 0, 10)
            server.pause()
            switches = [Switch() for _ in range(4)]  # two of them wait for a lane
            ended = []

            def read(switch):
                with pytest.raises(Interrupted):
                    read_blocking(backend, stat.place, 0, MIB, interrupt=switch)
                ended.append(switch)

            async with trio.open_nursery() as nursery:
                for switch in switches:
                    nursery.start_soon(trio.to_thread.run_sync, read, switch)
                await trio.sleep(0.3)
                for switch in switches:
                    switch.set()
            assert len(ended) == 4
            server.resume()
            assert await in_thread(read_blocking, backend, stat.place, 0, MIB) == data


async def test_closing_ends_what_waits(folder):
    content(folder, "file", MIB)
    with Ganesha(folder) as server:
        async with backend_at(server.url, timeout=1000.0) as backend:
            stat = await backend.stat(Place(b"file"))
            await in_thread(read_blocking, backend, stat.place, 0, 10)
            server.pause()
            ended = []

            def read():
                with pytest.raises(Unavailable):
                    read_blocking(backend, stat.place, 0, MIB)
                ended.append("read")

            async def ask():
                with pytest.raises(Unavailable):
                    await backend.stat(stat.place)
                ended.append("stat")

            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.to_thread.run_sync, read)
                nursery.start_soon(ask)
                await trio.sleep(0.3)
                await backend.aclose()
            assert sorted(ended) == ["read", "stat"]
            server.resume()


async def test_lanes_are_bounded_and_used_again(folder):
    data = content(folder, "file", 4 * MIB)
    with proxied(folder) as (_, proxy, url):
        async with backend_at(url, connections=3) as backend:
            stat = await backend.stat(Place(b"file"))
            proxy.forget()

            def read():
                for i in range(20):
                    offset = i * 200_000
                    got = read_blocking(backend, stat.place, offset, 150_000)
                    assert got == data[offset : offset + 150_000]

            async with trio.open_nursery() as nursery:
                for _ in range(8):
                    nursery.start_soon(trio.to_thread.run_sync, read)
            assert 1 <= proxy.counts()["connections"] <= 3
