"""The mount process of the tests: a Vfs over the metadata double, a directory as source and a real
disk store. Takes commands as JSON lines on stdin, answers on stdout.

In a process of its own because a test that touches its own mount through mmap would hold the GIL
that the mount needs.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

import trio

from hsfs.backends.posix import open_posix
from hsfs.cache.memory import MemoryStore
from hsfs.cache.store import open_store
from hsfs.core.errors import NoSpace, Unavailable
from hsfs.core.ports import Invalidation
from hsfs.core.types import DeviceId
from hsfs.fuse import serving
from hsfs.fuse.options import MountOptions
from hsfs.fuse.pyfuse3_session import serve
from hsfs.vfs.filesystem import Vfs
from hsfs.vfs.limits import Limits
from tests.mount.mds_double import MdsDouble


class Gate:
    """The source behind a gate: open, slow, failing, or hanging until it is opened again."""

    def __init__(self, backend):
        self._backend = backend
        self.mode = "open"
        self.delay_s = 0.0
        self.reads = 0
        self.bytes = 0

    device = property(lambda self: self._backend.device)
    caps = property(lambda self: self._backend.caps)

    def read_into(self, place, offset, buf, /, *, expect, interrupt):
        self.reads += 1
        if self.delay_s:
            time.sleep(self.delay_s)
        if self.mode == "fail":
            raise Unavailable("source", "told to fail")
        if self.mode == "hang":
            stopped = threading.Event()
            interrupt.attach(stopped.set)
            while self.mode == "hang" and not stopped.wait(0.02):
                pass
            interrupt.detach()
            if stopped.is_set():
                raise Unavailable("source", "interrupted")
        count = self._backend.read_into(place, offset, buf, expect=expect, interrupt=interrupt)
        self.bytes += count
        return count

    def __getattr__(self, name):
        return getattr(self._backend, name)


class FullStore(MemoryStore):
    """Has room for nothing."""

    def create(self, file):
        raise NoSpace("cache", "full")


async def main(config):
    serving.IDLE_MAX = config.get("idle_max", serving.IDLE_MAX)
    source = await open_posix(DeviceId(1), Path(config["source"]).as_uri(), {"timeout": 5.0})
    gate = Gate(source)
    mds = MdsDouble(gate, ttl_s=config.get("ttl_s", 30.0))
    await mds.assimilate()
    if config.get("full"):
        store = FullStore(1 << 30)
    else:
        store = open_store(Path(config["cache"]), config.get("cache_size", 4 << 30), fd_limit=256)
    vfs = Vfs(
        mds=mds,
        store=store,
        backends={DeviceId(1): gate},
        limits=Limits(**config.get("limits", {})),
    )
    options = MountOptions(
        fsname="hsfs-test",
        allow_other=config.get("allow_other", False),
        config=b"config of the test\n",
    )

    def answer(value):
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()

    async def command(line):
        request = json.loads(line)
        what = request.pop("do")
        if what == "assimilate":
            return await mds.assimilate(push=request.get("push", True))
        if what == "stats":
            return {**vfs.stats(), "calls": mds.calls, "gate": [gate.reads, gate.bytes]}
        if what == "gate":
            gate.mode = request.get("mode", "open")
            gate.delay_s = request.get("delay_s", 0.0)
            return None
        if what == "push":
            await mds.push(Invalidation(request["ino"], request.get("name", "").encode()))
            return None
        if what == "warm":
            warmed = await vfs.warm(os.fsencode(request["path"]))
            return [warmed.files, warmed.bytes, warmed.failed]
        if what == "evict":
            return await vfs.evict(os.fsencode(request["path"]))
        if what == "flush":
            return await trio.to_thread.run_sync(store.flush)
        if what == "threads":
            return sorted(thread.name for thread in threading.enumerate())
        raise ValueError(what)

    async def commands():
        async with trio.lowlevel.FdStream(os.dup(0)) as stdin:
            rest = b""
            async for data in stdin:
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    try:
                        answer({"ok": await command(line)})
                    except Exception as error:
                        answer({"error": repr(error)})

    async with trio.open_nursery() as nursery:

        async def stop():
            with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                async for _ in signals:
                    nursery.cancel_scope.cancel()

        nursery.start_soon(stop)
        nursery.start_soon(commands)
        await serve(vfs, config["mountpoint"], options, ready=lambda: answer({"ready": True}))
        nursery.cancel_scope.cancel()
    store.close()
    answer({"done": True})


if __name__ == "__main__":
    logging.basicConfig(level=os.environ.get("LEVEL", "WARNING"), stream=sys.stderr)
    trio.run(main, json.loads(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # workers that hang in a dead backend are left behind, as the real process does
