"""A metadata RPC server in a thread, over a tiny journal: for tests of the wire and the client."""

import asyncio
import contextlib
import threading
from pathlib import Path

from hsfs.core.errors import HsfsError, NotFound, Trimmed
from hsfs.core.ports import Invalidation, Listing
from hsfs.core.types import Attributes, FileType, Node
from hsfs.mdserver.lifecycle import bind_tcp, bind_unix
from hsfs.mdserver.server import Identity, Server
from hsfs.mdserver.sessions import Sessions
from hsfs.proto import messages as m
from hsfs.rpc.address import Address, state_address


def node(ino: int, size: int = 0, ttl_s: float = 30.0) -> Node:
    attributes = Attributes(ino, FileType.FILE, 0o644, 0, 0, 1, size, 0, 0, 0)
    return Node(attributes, b"v%d" % size, ttl_s=ttl_s)


class TinyJournal:
    """Records with consecutive seqs; `floor`: what is trimmed."""

    def __init__(self, epoch: int = 1) -> None:
        self.records: list[Invalidation] = []
        self.base = 0
        self.floor = 0
        self.epoch = epoch
        self.moved = asyncio.Event()

    @property
    def seq(self) -> int:
        return self.base + len(self.records)

    def add(self, ino: int, name: bytes = b"") -> int:
        self.records.append(Invalidation(ino, name, self.seq + 1))
        moved, self.moved = self.moved, asyncio.Event()
        moved.set()
        return self.seq

    async def watch(self, after: int):
        while True:
            if after < self.floor:
                raise Trimmed("journal")
            fresh = self.records[after - self.base :]
            if fresh:
                after = fresh[-1].seq
                yield fresh
            else:
                await self.moved.wait()


class TinyServer:
    """`with TinyServer(folder) as server:` runs it; `server.do(f)` runs f on its loop."""

    def __init__(self, state: Path, *, epoch=1, lease_s=30.0, tcp=False, records=(), store=b"s"):
        self.state = state
        self.address = state_address(state)
        self.tcp_address: Address | None = None
        self.nodes = {2: node(2, 10)}
        self.names = {(1, b"a"): 2}
        self.calls: list[str] = []
        self.before_answer: dict[int, object] = {}
        self._epoch, self._lease_s, self._tcp, self._store = epoch, lease_s, tcp, store
        self._records = records
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failed: BaseException | None = None

    # --- handlers ---

    async def _ping(self, session, args):
        self.calls.append("ping")

    async def _lookup(self, session, args):
        self.calls.append("lookup")
        ino = self.names.get((args.parent, args.name))
        answer: object = NotFound("name") if ino is None else self.nodes[ino]
        hook = self.before_answer.pop(m.Op.LOOKUP, None)
        if hook is not None:
            await hook()
        if isinstance(answer, HsfsError):
            raise answer
        return answer

    async def _getattr(self, session, args):
        self.calls.append("getattr")
        if args.ino not in self.nodes:
            raise NotFound(f"inode {args.ino}", "gone", "look again")
        if args.ino == 666:
            raise ZeroDivisionError
        return self.nodes[args.ino]

    async def _list(self, session, args):
        return Listing((), False, 1)

    async def _refresh(self, session, args):
        self.calls.append("refresh")
        await asyncio.sleep(0.3)
        return 7

    # --- life ---

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as e:
            self._failed = e
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.journal = TinyJournal(self._epoch)
        for ino, name in self._records:
            self.journal.add(ino, name)
        self.left = []
        self.server = Server(
            Identity("vol", self._store, "secret", self._lease_s, lambda: b"d"),
            self.journal,
            {
                m.Op.PING: self._ping,
                m.Op.LOOKUP: self._lookup,
                m.Op.GETATTR: self._getattr,
                m.Op.LIST: self._list,
                m.Op.REFRESH: self._refresh,
            },
            Sessions(),
            left=self.left.append,
        )
        await self.server.listen(bind_unix(self.state))
        if self._tcp:
            sock = bind_tcp("127.0.0.1", 0)
            self.tcp_address = Address(host="127.0.0.1", port=sock.getsockname()[1], volume="vol")
            await self.server.listen(sock)
        self._started.set()
        await self._stop.wait()
        await self.server.aclose()

    def do(self, function, *args):
        async def call():
            result = function(*args)
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(30)

    def push(self, ino: int, name: bytes = b"") -> int:
        return self.do(self.journal.add, ino, name)

    def drop_connections(self) -> None:
        self.do(lambda: [session.close() for session in self.server.sessions])

    def stop(self) -> None:
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(30)
            assert not self._thread.is_alive()
        if self._failed is not None:
            raise self._failed

    def __enter__(self):
        self._thread.start()
        assert self._started.wait(30)
        if self._failed is not None:
            raise self._failed
        return self

    def __exit__(self, *_):
        self.stop()
