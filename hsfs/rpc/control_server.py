"""Control socket of a mount, the serving side (trio). The protocol stands in `control`.

Only the mount's own user and root are answered (SO_PEERCRED), whatever the file modes say. A call
is cancelled when its caller closes the connection.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import trio

from hsfs.core.errors import HsfsError, PermissionDenied, ProtocolError

Json = dict[str, object]
Progress = Callable[[Json], Awaitable[None]]
Handler = Callable[[str, Json, Progress], Awaitable[Json]]

_log = logging.getLogger(__name__)
_REQUEST_MAX = 16 * 1024 * 1024
_PEER_CREDENTIALS = struct.Struct("3i")  # struct ucred of unix(7): pid, uid, gid
_CALLS_MAX = 32


def bind(path: Path) -> trio.SocketListener:
    """Listen on `path` with mode 0600, replacing a socket that a dead mount left behind. The folder
    is the caller's: private to the user."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(FileNotFoundError):
            path.unlink()
        # Through the folder's fd: the path itself may be longer than sun_path takes.
        sock.bind(f"/proc/self/fd/{folder}/{path.name}")
        path.chmod(0o600)
        sock.listen(64)
        sock.setblocking(False)
        return trio.SocketListener(trio.socket.from_stdlib_socket(sock))
    except BaseException:
        sock.close()
        raise
    finally:
        os.close(folder)


def error_json(error: HsfsError) -> Json:
    """An error as it stands in `--json` and on the control socket."""
    return {
        "code": error.code,
        "what": error.what,
        "why": error.why,
        "next": error.next_step,
    }


async def serve_control(listener: trio.SocketListener, handler: Handler) -> None:
    """Answer calls until cancelled; then the listener is closed."""
    limit = trio.CapacityLimiter(_CALLS_MAX)

    async def connection(stream: trio.SocketStream) -> None:
        async with stream:
            try:
                async with limit:
                    await _answer(stream, handler)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
            except Exception:
                _log.exception("control call failed")

    async with listener:
        await trio.serve_listeners(connection, [listener])


def _allowed(stream: trio.SocketStream) -> bool:
    raw = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    _, uid, _ = _PEER_CREDENTIALS.unpack(raw)
    return uid in (0, os.geteuid())


async def _read_line(stream: trio.SocketStream) -> bytes:
    data = bytearray()
    with trio.fail_after(10):
        while not data.endswith(b"\n"):
            piece = await stream.receive_some(65536)
            if not piece or len(data) > _REQUEST_MAX:
                return b""
            data += piece
    return bytes(data)


async def _send(stream: trio.SocketStream, message: Json) -> None:
    await stream.send_all(json.dumps(message).encode() + b"\n")


async def _answer(stream: trio.SocketStream, handler: Handler) -> None:
    if not _allowed(stream):
        refusal = PermissionDenied(
            "mount", "belongs to another user", "use the account that mounted it, or root"
        )
        await _send(stream, {"error": error_json(refusal)})
        return
    try:
        line = await _read_line(stream)
    except trio.TooSlowError:
        return
    if not line:
        return

    async def progress(step: Json) -> None:
        await _send(stream, {"progress": step})

    async def cancel_when_closed(scope: trio.CancelScope) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while await stream.receive_some(4096):
                pass
        scope.cancel()

    reply: Json | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(cancel_when_closed, nursery.cancel_scope)
        try:
            reply = {"result": await handler(*_parse(line), progress)}
        except HsfsError as e:
            reply = {"error": error_json(e)}
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the caller went away while progress was being sent
        except Exception as e:
            _log.exception("control call failed")
            internal = HsfsError("mount", f"{type(e).__name__}: {e}", "see the mount's log")
            reply = {"error": error_json(internal)}
        nursery.cancel_scope.cancel()
    if reply is not None:
        with trio.move_on_after(10):
            await _send(stream, reply)


def _parse(line: bytes) -> tuple[str, Json]:
    try:
        message = json.loads(line)
        op, args = message["op"], message.get("args", {})
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ProtocolError("control call", f"is not a request: {e}") from None
    if not isinstance(op, str) or not isinstance(args, dict):
        raise ProtocolError("control call", "is not a request")
    return op, args
