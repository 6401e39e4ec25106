"""The metadata server's child process: started again when it dies, ended with its server."""

import asyncio
import os
import signal
import time

import pytest
import uvloop

from hsfs.mdserver.lifecycle import Child

SLEEP = ["sleep", "1000"]


async def until(condition):
    for _ in range(12_000):
        if condition():
            break
        await asyncio.sleep(0.005)
    return condition()


async def ended(task):
    """Whether a cancelled task ends: one that swallowed its cancellation would go on for ever."""
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=60)
    return bool(done)


def test_it_is_started_again():
    async def main():
        child = Child(SLEEP, lambda pid: time.monotonic(), 30.0)
        task = asyncio.create_task(child.run())
        first = await until(lambda: child.pid)
        os.kill(first, signal.SIGKILL)
        await until(lambda: child.pid not in (None, first))
        assert child.restarts == 1
        last = child.pid
        assert await ended(task)
        with pytest.raises(ProcessLookupError):
            os.kill(last, 0)

    asyncio.run(main())


@pytest.mark.parametrize("factory", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_a_child_that_dies_just_as_its_server_ends(factory):
    """As when a service manager signals all processes at once."""

    async def main():
        for number in range(40):
            child = Child(SLEEP, lambda pid: time.monotonic(), 30.0)
            task = asyncio.create_task(child.run())
            os.kill(await until(lambda child=child: child.pid), signal.SIGKILL)
            for _ in range(number * 5):  # around the moment at which its end is noticed
                await asyncio.sleep(0)
            assert await ended(task), number

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())
