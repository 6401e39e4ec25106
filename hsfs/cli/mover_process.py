"""The mover's process: composition root. `run` is `hsfs mover`; `main` is the child of `hsfs mds`,
which ends with its parent (its stdin ends then)."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence

import trio

from hsfs.backends.registry import open_backend
from hsfs.core.errors import HsfsError, Unavailable
from hsfs.mover.runner import Mover
from hsfs.rpc.address import Address, find_token, parse_address
from hsfs.rpc.client import connect
from hsfs.telemetry.logs import set_up_logging

_END_WITHIN_S = 5.0
_FIRST_CONNECTION_S = 30.0


async def run(address: Address, *, patient: bool = False) -> None:
    """Work for the server at `address` until SIGTERM or SIGINT. `patient`: wait for it to start.

    Raises what the first connection raises.
    """
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_until_signal, nursery.cancel_scope)
        token = find_token(address)
        give_up_s = trio.current_time() + (_FIRST_CONNECTION_S if patient else 0.0)
        while True:
            try:
                async with connect(address, kind="mover", token=token) as client:
                    await Mover(client, open_backend).run()
            except Unavailable:
                if trio.current_time() >= give_up_s:
                    raise
                await trio.sleep(0.2)


async def _until_signal(scope: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as received:
        async for _ in received:
            _end_soon()
            scope.cancel()


def _end_soon() -> None:
    """A backend that hangs in a thread must not hold the process."""
    timer = threading.Timer(_END_WITHIN_S, os._exit, (0,))
    timer.daemon = True
    timer.start()


async def _child(address: Address) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_until_orphaned, nursery.cancel_scope)
        await run(address, patient=True)
        nursery.cancel_scope.cancel()


async def _until_orphaned(scope: trio.CancelScope) -> None:
    os.set_blocking(0, False)
    while True:
        await trio.lowlevel.wait_readable(0)
        try:
            if not os.read(0, 4096):
                break
        except BlockingIOError:
            continue
        except OSError:
            break
    _end_soon()
    scope.cancel()


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: ended as asked; 1: no server, or a bug."""
    parser = argparse.ArgumentParser(prog="hsfs.cli.mover_process")
    parser.add_argument("--address", required=True)
    parser.add_argument("--child", action="store_true")
    arguments = parser.parse_args(argv)
    set_up_logging("mover")
    try:
        address = parse_address(arguments.address)
        trio.run(_child if arguments.child else run, address)
    except BaseExceptionGroup as group:
        _, rest = group.split(HsfsError)
        if rest is not None:
            raise
        sys.stderr.write(f"hsfs mover: {group.exceptions[0]}\n")
        return 1
    except HsfsError as error:
        sys.stderr.write(f"hsfs mover: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
