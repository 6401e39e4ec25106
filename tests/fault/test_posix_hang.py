"""A local directory whose file system stops answering: calls end, the loop runs on."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import trio

from hsfs.backends.posix import open_posix
from hsfs.core.errors import TimedOut
from hsfs.core.types import DeviceId, Place, Version
from tests.conformance.backend_suite import patiently, read_blocking
from tests.fault.hanging_fs import CONTENT


@pytest.fixture
def hanging():
    """(mountpoint, control file) of the file system; unmounted whatever happens."""
    folder = Path(tempfile.mkdtemp(prefix="hsfs-hang-", dir="/tmp"))
    mountpoint, control = folder / "mnt", folder / "stop"
    mountpoint.mkdir()
    script = Path(__file__).with_name("hanging_fs.py")
    process = subprocess.Popen(
        [sys.executable, script, mountpoint, control], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout.readline() == b"ready\n"
        yield mountpoint, control
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        command = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-u", "-z"]
        subprocess.run([*command, mountpoint], check=True, timeout=60)
        shutil.rmtree(folder)


async def test_calls_end_when_the_file_system_does_not_answer(hanging):
    mountpoint, control = hanging
    with trio.fail_after(120):
        backend = await open_posix(DeviceId(1), mountpoint.as_uri(), {"timeout": 1.0})
        stat = await patiently(lambda: backend.stat(Place(b"file")))
        version = Version(stat.version)

        async def read():
            return await trio.to_thread.run_sync(
                lambda: read_blocking(backend, stat.place, 0, 10_000, expect=version)
            )

        assert await patiently(read) == CONTENT
        control.touch()
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await trio.sleep(0.01)
                ticks += 1

        async def scan():
            async for _ in backend.scan(Place(b"")):
                pass

        async def fails(call, *args):
            with pytest.raises(TimedOut):
                await call(*args)

        async with trio.open_nursery() as outer:
            outer.start_soon(tick)
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(fails, backend.stat, stat.place)
                    nursery.start_soon(fails, read)
                nursery.start_soon(fails, scan)
                nursery.start_soon(fails, backend.probe)
            outer.cancel_scope.cancel()
        assert ticks > 5
        await backend.aclose()
