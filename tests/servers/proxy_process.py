"""The process behind `tests.servers.proxy`: forwards TCP or HTTP/1.1 and makes faults on demand.

    proxy_process.py CONTROL_SOCKET LISTEN_PORT TARGET_HOST TARGET_PORT tcp|http

Threads and blocking sockets; bytes that nothing has to look at go through splice(2) and are never
seen by Python. One JSON object a line comes in on the control socket, one goes back. Standard
library only: it is started as a script, so that a start costs no imports.

A fault rule is a dict: kind, then `times` (how often, null = always), `every` (each n-th reply that
matches), `path` (part of the request's target), `method`, `min_body` (only replies with a body of
at least so many bytes), and the kind's own numbers.
"""

import collections
import contextlib
import fcntl
import json
import os
import queue
import socket
import struct
import sys
import threading
import time

CHUNK = 256 << 10
PIPE_SIZE = 1 << 20
LOG_LENGTH = 200_000
XML_ERROR = (
    b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>InternalError</Code>'
    b"<Message>We encountered an internal error. Please try again.</Message></Error>"
)


class Closed(Exception):
    """One side has closed the connection, or a fault wants it closed."""


class Limiter:
    """A token bucket for all connections together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free_at = 0.0
        self.rate = 0.0

    def set(self, rate: float) -> None:
        with self._lock:
            self.rate, self._free_at = rate, time.monotonic()

    def chunk(self) -> int:
        rate = self.rate
        return CHUNK if not rate else int(min(CHUNK, max(4096, rate / 100)))

    def take(self, n: int) -> None:
        """Waits until n more bytes fit."""
        with self._lock:
            if not self.rate:
                return
            now = time.monotonic()
            # A sleep that lasted too long is made up for, by 20 ms at most.
            self._free_at = max(self._free_at, now - 0.02) + n / self.rate
            wait_s = self._free_at - now
        if wait_s > 0:
            time.sleep(wait_s)


class State:
    """What the control socket changes and the connections look at."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.flowing = threading.Event()
        self.flowing.set()
        self.down = Limiter()
        self.up = Limiter()
        self.delay_s = 0.0
        self.rules: list[dict] = []
        self.counts = collections.Counter()
        self.log: collections.deque = collections.deque(maxlen=LOG_LENGTH)
        self.sockets: set[socket.socket] = set()

    def count(self, name: str, n: int = 1) -> None:
        with self.lock:
            self.counts[name] += n

    def rule_for(self, kinds: tuple[str, ...], method="", target="", body: int | None = None):
        """The first rule that applies to this reply, counted as used."""
        with self.lock:
            for rule in self.rules:
                if rule["kind"] not in kinds or rule["times"] == 0:
                    continue
                if rule["path"] not in target or rule["method"] not in ("", method):
                    continue
                if body is not None and body < rule["min_body"]:
                    continue
                rule["seen"] += 1
                if rule["seen"] % rule["every"]:
                    continue
                if rule["times"] is not None:
                    rule["times"] -= 1
                self.counts["fault_" + rule["kind"]] += 1
                return dict(rule)
        return None


state = State()


def reset(s: socket.socket) -> None:
    """Closes with RST."""
    with contextlib.suppress(OSError):
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    finish(s)


def finish(s: socket.socket) -> None:
    with state.lock:
        state.sockets.discard(s)
    # shutdown wakes a thread that is blocked on the socket and so holds it open; close alone does
    # not. Of the two halves only the reading one is silent on the wire: no FIN before the RST.
    with contextlib.suppress(OSError):
        lingers = struct.unpack("ii", s.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8))[0]
        s.shutdown(socket.SHUT_RD if lingers else socket.SHUT_RDWR)
    s.close()


def track(s: socket.socket) -> socket.socket:
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with state.lock:
        state.sockets.add(s)
    return s


class Pump:
    """Moves bytes from one socket to another; owns the pipe that splice needs."""

    def __init__(self, source, sink, limiter: Limiter, counter: str) -> None:
        self.source, self.sink, self.limiter, self.counter = source, sink, limiter, counter
        self._reader, self._writer = os.pipe()
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._writer, fcntl.F_SETPIPE_SZ, PIPE_SIZE)

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)

    def some(self, most: int) -> int:
        """Moves what is there, `most` bytes at most; 0 at the end of the stream."""
        state.flowing.wait()
        got = os.splice(
            self.source.fileno(), self._writer, min(most, self.limiter.chunk()), flags=1
        )
        if got:
            state.flowing.wait()
            self.limiter.take(got)
            left = got
            while left:
                left -= os.splice(self._reader, self.sink.fileno(), left, flags=1)
            state.count(self.counter, got)
        return got

    def exactly(self, n: int) -> None:
        while n:
            got = self.some(n)
            if not got:
                raise Closed
            n -= got

    def corrupted(self, n: int, at: int) -> None:
        """Moves n bytes and inverts the one at the offset."""
        before = min(max(at, 0), n)
        self.exactly(before)
        if before < n:
            byte = receive(self.source, 1)
            self.send(bytes([byte[0] ^ 0xFF]))
            self.exactly(n - before - 1)

    def send(self, data: bytes) -> None:
        state.flowing.wait()
        self.limiter.take(len(data))
        self.sink.sendall(data)
        state.count(self.counter, len(data))


def receive(s: socket.socket, n: int) -> bytes:
    data = b""
    while len(data) < n:
        more = s.recv(n - len(data))
        if not more:
            raise Closed
        data += more
    return data


# ---- TCP ----------------------------------------------------------------------------------------


def serve_tcp(client: socket.socket, target: tuple[str, int]) -> None:
    state.flowing.wait()
    server = track(socket.create_connection(target, timeout=60))
    server.settimeout(None)

    def upwards() -> None:
        pump = Pump(client, server, state.up, "bytes_up")
        try:
            while pump.some(CHUNK):
                pass
            server.shutdown(socket.SHUT_WR)
        except OSError:
            finish(server)
        finally:
            pump.close()

    threading.Thread(target=upwards, daemon=True).start()
    try:
        rule = state.rule_for(("cut", "corrupt"))
        pump = Pump(server, client, state.down, "bytes_down")
        try:
            if rule and rule["kind"] == "cut":
                pump.exactly(rule["after"])
                reset(client)
                raise Closed
            if rule:
                pump.corrupted(rule["offset"] + 1, rule["offset"])
            while True:
                if state.delay_s:
                    # A line of fixed length: replies overlap on it as they do on a long wire.
                    delayed(pump)
                    return
                if not pump.some(CHUNK):
                    return
        finally:
            pump.close()
    finally:
        finish(server)


def delayed(pump: Pump) -> None:
    line: queue.SimpleQueue = queue.SimpleQueue()

    def arrive() -> None:
        try:
            while data := pump.source.recv(CHUNK):
                line.put((time.monotonic() + state.delay_s, data))
        except OSError:
            pass
        line.put((0.0, b""))

    threading.Thread(target=arrive, daemon=True).start()
    while True:
        due, data = line.get()
        if not data:
            return
        wait_s = due - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
        pump.send(data)


# ---- HTTP ---------------------------------------------------------------------------------------


class Head:
    """The first line and the headers of a message, as they came."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        lines = raw.split(b"\r\n")
        self.first = lines[0].decode("latin-1").split(" ", 2)
        self.headers = {}
        for line in lines[1:]:
            name, _, value = line.partition(b":")
            self.headers[name.strip().lower()] = value.strip()

    @property
    def length(self) -> int | None:
        value = self.headers.get(b"content-length")
        return None if value is None else int(value)

    @property
    def chunked(self) -> bool:
        return self.headers.get(b"transfer-encoding", b"").lower() == b"chunked"

    @property
    def closes(self) -> bool:
        return self.headers.get(b"connection", b"").lower() == b"close"

    def without(self, name: bytes) -> bytes:
        lines = self.raw.split(b"\r\n")
        return b"\r\n".join(x for x in lines if not x.lower().startswith(name + b":"))


def read_head(s: socket.socket) -> Head | None:
    """Takes exactly the head off the socket, so that the body is left to splice."""
    seen = 0
    while True:
        data = s.recv(64 << 10, socket.MSG_PEEK)
        if not data:
            return None
        end = data.find(b"\r\n\r\n")
        if end >= 0:
            return Head(receive(s, end + 4))
        if len(data) == 64 << 10:
            raise Closed
        if len(data) == seen:
            time.sleep(0.001)
        seen = len(data)


def move_body(pump: Pump, head: Head, *, until_close: bool) -> int:
    """Moves one body and gives its length in bytes on the wire."""
    if head.chunked:
        return move_chunks(pump)
    if head.length is not None:
        pump.exactly(head.length)
        return head.length
    total = 0
    if until_close:
        while got := pump.some(CHUNK):
            total += got
    return total


def move_chunks(pump: Pump) -> int:
    total = 0
    while True:
        line = read_line(pump.source)
        pump.send(line)
        size = int(line.split(b";")[0], 16)
        if not size:
            break
        pump.exactly(size + 2)
        total += size
    while True:
        line = read_line(pump.source)
        pump.send(line)
        if line == b"\r\n":
            return total


def read_line(s: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\r\n"):
        line += receive(s, 1)
    return line


class HttpConnection:
    """One client connection and its own connection to the server."""

    def __init__(self, client: socket.socket, target: tuple[str, int]) -> None:
        self.client, self.target = client, target
        self.server: socket.socket | None = None
        self.up: Pump | None = None
        self.down: Pump | None = None

    def run(self) -> None:
        try:
            while self.exchange():
                pass
        finally:
            self.drop_server()

    def connect(self) -> None:
        self.drop_server()
        self.server = track(socket.create_connection(self.target, timeout=60))
        self.server.settimeout(None)
        self.up = Pump(self.client, self.server, state.up, "bytes_up")
        self.down = Pump(self.server, self.client, state.down, "bytes_down")

    def drop_server(self) -> None:
        for pump in (self.up, self.down):
            if pump is not None:
                pump.close()
        if self.server is not None:
            finish(self.server)
        self.server = self.up = self.down = None

    def exchange(self) -> bool:
        """One request and its reply; whether the connection goes on."""
        request = read_head(self.client)
        if request is None:
            return False
        state.flowing.wait()
        method, target = request.first[0], request.first[1]
        state.count("requests")
        entry = [method, target, request.headers.get(b"range", b"").decode("latin-1"), 0, 0]
        state.log.append(entry)
        raw = request.raw
        if request.headers.get(b"expect", b"").lower() == b"100-continue":
            # Answered here: else the server's two replies to one request have to be told apart.
            self.client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            raw = request.without(b"expect")
        fresh = self.server is None
        if fresh:
            self.connect()
        has_body = request.chunked or bool(request.length)
        reply = None
        try:
            self.up.send(raw)
            move_body(self.up, request, until_close=False)
            reply = read_head(self.server)
        except OSError:
            if fresh or has_body:
                raise
        if reply is None and not fresh and not has_body:
            # The server had closed an idle connection.
            self.connect()
            self.up.send(raw)
            reply = read_head(self.server)
        if reply is None:
            raise Closed
        if state.delay_s:
            time.sleep(state.delay_s)
        entry[3] = int(reply.first[1])
        again = self.answer(method, target, reply, entry)
        return again and not request.closes

    def answer(self, method: str, target: str, reply: Head, entry: list) -> bool:
        bodiless = method == "HEAD" or reply.first[1] in ("204", "304")
        length = 0 if bodiless else reply.length
        rule = state.rule_for(("status", "error_body"), method, target, length)
        if rule:
            self.replace(method, rule)
            return False
        if bodiless:
            self.down.send(reply.raw)
            return not reply.closes
        rule = None
        if length is not None:
            rule = state.rule_for(("cut", "truncate", "short", "corrupt"), method, target, length)
        if rule:
            return self.spoil(rule, reply, length)
        self.down.send(reply.raw)
        entry[4] = move_body(self.down, reply, until_close=True)
        return not reply.closes and (reply.chunked or length is not None)

    def replace(self, method: str, rule: dict) -> None:
        """Sends an answer of our own, and closes: the server's is still on its connection."""
        body = rule["body"].encode() or XML_ERROR
        words = rule["status"], {200: "OK", 503: "Slow Down"}.get(rule["status"], "Fault")
        extra = ""
        if rule["retry_after_s"] is not None:
            extra = f"Retry-After: {rule['retry_after_s']}\r\n"
        head = (
            f"HTTP/1.1 {words[0]} {words[1]}\r\nContent-Type: application/xml\r\n{extra}"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self.down.send(head.encode() + (b"" if method == "HEAD" else body))

    def spoil(self, rule: dict, reply: Head, length: int) -> bool:
        kind = rule["kind"]
        if kind == "corrupt":
            self.down.send(reply.raw)
            self.down.corrupted(length, rule["offset"])
            return not reply.closes
        n = min(rule["after"], length)
        if kind == "short":
            # As if the object were shorter: a well-formed answer with too few bytes.
            head = reply.without(b"content-length")[:-2]
            self.down.send(head + b"Content-Length: %d\r\n\r\n" % n)
        else:
            self.down.send(reply.raw)
        self.down.exactly(n)
        if kind == "cut":
            reset(self.client)
        return False


def serve_http(client: socket.socket, target: tuple[str, int]) -> None:
    HttpConnection(client, target).run()


# ---- listening and control ----------------------------------------------------------------------


class Listener:
    """Accepts while it is on; off, the port refuses."""

    def __init__(self, port: int, target: tuple[str, int], serve) -> None:
        self._port, self._target, self._serve = port, target, serve
        self._socket: socket.socket | None = None

    def open(self) -> None:
        if self._socket is not None:
            return
        s = socket.socket()
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("127.0.0.1", self._port))
        s.listen(512)
        self._socket = s
        threading.Thread(target=self._accept, args=(s,), daemon=True).start()

    def close(self) -> None:
        s, self._socket = self._socket, None
        if s is not None:
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)
            s.close()

    def _accept(self, s: socket.socket) -> None:
        while True:
            try:
                client, _ = s.accept()
            except OSError:
                return
            state.count("connections")
            track(client)
            threading.Thread(target=self._run, args=(client,), daemon=True).start()

    def _run(self, client: socket.socket) -> None:
        try:
            self._serve(client, self._target)
        except (OSError, Closed):
            pass
        except Exception as e:
            # The socket of a cut connection is closed under the feet of the other direction.
            if client.fileno() >= 0:
                print(f"proxy: {e!r}", file=sys.stderr, flush=True)
        finally:
            finish(client)


def drop_all() -> None:
    with state.lock:
        sockets = list(state.sockets)
    for s in sockets:
        with contextlib.suppress(OSError):
            s.shutdown(socket.SHUT_RDWR)


def command(order: dict, listener: Listener) -> object:
    do = order["do"]
    if do == "rule":
        with state.lock:
            state.rules.append({**order["rule"], "seen": 0})
    elif do == "clear":
        with state.lock:
            state.rules.clear()
            state.delay_s = 0.0
        state.down.set(0)
        state.up.set(0)
        state.flowing.set()
        listener.open()
    elif do == "delay":
        state.delay_s = order["s"]
    elif do == "cap":
        state.down.set(order["down"])
        state.up.set(order["up"])
    elif do == "hole":
        state.flowing.clear() if order["on"] else state.flowing.set()
    elif do == "refuse":
        if order["on"]:
            listener.close()
            drop_all()
        else:
            listener.open()
    elif do == "drop":
        drop_all()
    elif do == "counts":
        with state.lock:
            return dict(state.counts)
    elif do == "log":
        return list(state.log)
    elif do == "forget":
        with state.lock:
            state.counts.clear()
            state.log.clear()
    else:
        raise ValueError(do)
    return None


def main() -> None:
    control, port, host, target_port, mode = sys.argv[1:6]
    serve = {"tcp": serve_tcp, "http": serve_http}[mode]
    threading.stack_size(256 << 10)
    listener = Listener(int(port), (host, int(target_port)), serve)
    listener.open()
    server = socket.socket(socket.AF_UNIX)
    server.bind(control)
    server.listen(8)
    while True:
        client, _ = server.accept()
        with client, client.makefile("rwb") as lines:
            for line in lines:
                try:
                    answer = {"ok": command(json.loads(line), listener)}
                except Exception as e:
                    answer = {"error": repr(e)}
                lines.write(json.dumps(answer).encode() + b"\n")
                lines.flush()


if __name__ == "__main__":
    main()
