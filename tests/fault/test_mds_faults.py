"""kill -9 of the metadata server and of movers under load, paused servers, dead backends."""

import contextlib
import os
import random
import signal
import time

import pytest
import trio

from hsfs.cli.embedded import ensure_embedded
from hsfs.core.errors import HsfsError, NotFound, Unavailable
from hsfs.core.types import FileType
from hsfs.mdserver.lifecycle import lock_holder
from hsfs.rpc.client import connect
from tests.servers.mds import LIMIT_S, Mds, children, end, make_volume

SEED = 20


def build(folder, directories, files):
    expected = {}
    for d in range(directories):
        below = folder / f"d{d:03}" / "x"
        below.mkdir(parents=True)
        for f in range(files):
            path = below / f"f{f:03}"
            path.write_bytes(b"z" * (f % 7))
            expected[f"/s/d{d:03}/x/f{f:03}".encode()] = f % 7
    return expected


async def tree(client, ino, path=b""):
    """Every file below with its size."""
    found, after = {}, b""
    while True:
        listing = await client.list(ino, after, 256)
        for entry in listing.entries:
            child = path + b"/" + entry.name
            if entry.node.attributes.type is FileType.DIRECTORY:
                found |= await tree(client, entry.node.attributes.ino, child)
            else:
                found[child] = entry.node.attributes.size
        if not listing.more:
            return found
        after = listing.entries[-1].name


async def until(condition, what, limit_s=LIMIT_S):
    with trio.move_on_after(limit_s):
        while not await condition():  # noqa: ASYNC110 - nothing tells
            await trio.sleep(0.05)
        return
    pytest.fail(what)


def test_kills_at_random_points_under_load_lose_nothing(tmp_path):
    expected = build(tmp_path / "source", 40, 25)
    volume = make_volume(tmp_path / "state", {"s": f"file://{tmp_path / 'source'}"})
    rng = random.Random(SEED)
    address = ensure_embedded(volume)
    inos = {}
    answered = 0

    async def revive():
        await trio.to_thread.run_sync(ensure_embedded, volume)

    async def load(client, seed):
        nonlocal answered
        mine = random.Random(seed)
        paths = sorted(expected)
        while True:
            path = mine.choice(paths)
            try:
                node = await client.walk(path)
            except Unavailable:
                continue  # no server for a while; never NotFound
            assert node.attributes.size == expected[path]
            # An inode number that was seen once is for ever.
            assert inos.setdefault(path, node.attributes.ino) == node.attributes.ino
            answered += 1

    async def kill_now_and_then():
        for round_ in range(10):
            await trio.sleep(rng.uniform(0.05, 0.6))
            pid = lock_holder(volume.state)
            if not pid:
                continue
            victims = [pid] if round_ % 2 else children(pid)
            for victim in victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)

    async def main():
        async with connect(address, revive=revive) as client:
            async with trio.open_nursery() as nursery:
                for seed in range(3):
                    nursery.start_soon(load, client, seed)
                await kill_now_and_then()
                before = answered

                async def goes_on():
                    return answered > before + 50

                await until(goes_on, "calls do not go on after the last kill")
                nursery.cancel_scope.cancel()

            async def scanned():
                with contextlib.suppress(Unavailable):
                    (scan,) = await client.scans()
                    return scan.state == "done"

            await until(scanned, "the scan does not end")
            root = await client.walk(b"/")
            assert await tree(client, root.attributes.ino) == expected
            for path, ino in inos.items():
                assert (await client.walk(path)).attributes.ino == ino

    try:
        trio.run(main)
    finally:
        pid = lock_holder(volume.state)
        if pid:
            end(pid)


async def test_paused_server_ends_the_lease_and_comes_back(tmp_path):
    build(tmp_path / "source", 1, 3)
    volume = make_volume(tmp_path / "state", {"s": f"file://{tmp_path / 'source'}"})
    with Mds(volume, lease_s=2.0) as mds:
        async with connect(mds.address, timeout_s=4.0) as client, trio.open_nursery() as nursery:
            seen = []

            async def listen():
                async for records in client.invalidations():
                    seen.extend(records)

            node = await client.walk(b"/s/d000/x/f001")
            assert 0 < node.ttl_s <= 2.0
            nursery.start_soon(listen)
            mds.kill(signal.SIGSTOP)
            began = time.monotonic()
            with pytest.raises(Unavailable):  # TimedOut is one, too
                await client.getattr(node.attributes.ino)
            assert time.monotonic() - began >= 3.5

            async def told():
                return any(record.ino == 0 for record in seen)

            await until(told, "nobody was told of the lost lease")
            assert client.lease_left_s() == 0
            mds.kill(signal.SIGCONT)

            async def answers():
                with contextlib.suppress(Unavailable):
                    return (await client.getattr(node.attributes.ino)) is not None

            await until(answers, "the client does not come back")
            nursery.cancel_scope.cancel()


async def test_restart_within_the_lease_keeps_what_was_cached(tmp_path):
    build(tmp_path / "source", 2, 3)
    volume = make_volume(tmp_path / "state", {"s": f"file://{tmp_path / 'source'}"})
    with Mds(volume) as mds:
        mds.wait_scanned()
        async with connect(mds.address) as client, trio.open_nursery() as nursery:
            seen = []

            async def listen():
                async for records in client.invalidations():
                    seen.extend(records)

            nursery.start_soon(listen)
            node = await client.walk(b"/s/d001/x/f002")
            await trio.to_thread.run_sync(mds.kill)
            await trio.to_thread.run_sync(mds.start)
            assert (await client.getattr(node.attributes.ino)).version == node.version
            assert client.welcome.epoch == 2
            assert not [record for record in seen if record.ino == 0]
            nursery.cancel_scope.cancel()


async def test_change_at_the_source_reaches_the_other_client_by_push(tmp_path):
    build(tmp_path / "source", 1, 3)
    volume = make_volume(tmp_path / "state", {"s": f"file://{tmp_path / 'source'}"})
    with Mds(volume) as mds:
        mds.wait_scanned()
        async with (
            connect(mds.address) as one,
            connect(mds.address) as two,
            trio.open_nursery() as nursery,
        ):
            seen = []

            async def listen():
                async for records in two.invalidations():
                    seen.extend(records)

            nursery.start_soon(listen)
            folder = (await one.walk(b"/s/d000/x")).attributes.ino
            node = await two.walk(b"/s/d000/x/f001")
            (tmp_path / "source/d000/x/f001").write_bytes(b"changed, and longer")
            (tmp_path / "source/d000/x/f002").unlink()
            await one.refresh(folder, False)

            async def told():
                return {record.ino for record in seen} >= {node.attributes.ino, folder}

            await until(told, "the change was not pushed")
            fresh = await two.getattr(node.attributes.ino)
            assert fresh.attributes.size == 19
            assert fresh.version != node.version
            with pytest.raises(NotFound):
                await two.walk(b"/s/d000/x/f002")
            nursery.cancel_scope.cancel()


async def test_dead_backend_fails_its_own_calls_only(tmp_path):
    build(tmp_path / "source", 1, 3)
    volume = make_volume(
        tmp_path / "state",
        {
            "s": f"file://{tmp_path / 'source'}",
            "dead": "nfs://127.0.0.1/export?port=1&mountport=1",
        },
        'timeout = "2s"',
    )
    with Mds(volume) as mds:
        async with connect(mds.address) as client:
            failures = []

            async def ask_the_dead():
                for _ in range(5):
                    with pytest.raises(HsfsError) as caught:
                        await tree(client, (await client.walk(b"/dead")).attributes.ino)
                    failures.append(caught.value)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask_the_dead)
                for _ in range(50):
                    assert (await client.walk(b"/s/d000/x/f001")).attributes.size == 1
            assert all(isinstance(error, Unavailable) for error in failures), failures

            async def shown():
                states = {device.name: device.state for device in await client.devices()}
                return states["dead"] == "unreachable" and states["s"] == "ok"

            await until(shown, "the state of the dead backend is not shown")


async def test_killed_mover_is_replaced_within_a_call(tmp_path):
    build(tmp_path / "source", 30, 3)
    volume = make_volume(
        tmp_path / "state", {"s": f"file://{tmp_path / 'source'}"}, 'scan = "lazy"'
    )
    with Mds(volume) as mds:
        async with connect(mds.address) as client:
            for index in range(3):
                assert (await client.walk(b"/s/d%03d/x/f001" % index)).attributes.size == 1
                mover = mds.mover_pid
                assert mover
                os.kill(mover, signal.SIGKILL)
            assert (await client.walk(b"/s/d020/x/f002")).attributes.size == 2


async def test_paused_mover_is_replaced(tmp_path):
    build(tmp_path / "source", 3, 3)
    volume = make_volume(
        tmp_path / "state", {"s": f"file://{tmp_path / 'source'}"}, 'scan = "lazy"'
    )
    with Mds(volume, lease_s=4.0) as mds:
        async with connect(mds.address) as client:
            assert (await client.walk(b"/s/d000/x/f001")).attributes.size == 1
            mover = mds.mover_pid
            assert mover
            os.kill(mover, signal.SIGSTOP)
            assert (await client.walk(b"/s/d001/x/f002")).attributes.size == 2
            assert mds.mover_pid != mover
