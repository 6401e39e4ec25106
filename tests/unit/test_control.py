"""The control socket: a server in trio, callers in threads, one that hangs, strangers, garbage."""

import json
import os
import socket
import threading
import time

import pytest
import trio

from hsfs.core.errors import HsfsError, NotFound, ProtocolError, TimedOut, Unavailable
from hsfs.rpc.control import call, call_many
from hsfs.rpc.control_server import bind, serve_control


class Served:
    """A handler that shows what happened to it."""

    def __init__(self):
        self.cancelled = threading.Event()
        self.started = threading.Event()

    async def handle(self, op, args, progress):
        if op == "echo":
            return {"args": args}
        if op == "count":
            for number in range(3):
                await progress({"at": number})
            return {"done": True}
        if op == "missing":
            raise NotFound("thing", "is not there", "look elsewhere")
        if op == "bug":
            raise ZeroDivisionError("oops")
        if op == "sleep":
            self.started.set()
            try:
                await trio.sleep_forever()
            finally:
                self.cancelled.set()
        raise AssertionError(op)


@pytest.fixture
async def served(tmp_path, nursery):
    state = Served()
    listener = bind(tmp_path / "m.sock")
    nursery.start_soon(serve_control, listener, state.handle)
    return tmp_path / "m.sock", state


async def in_thread(function, *args, **kwargs):
    return await trio.to_thread.run_sync(lambda: function(*args, **kwargs))


async def test_results_progress_and_errors(served, caplog):
    path, _ = served
    assert os.stat(path).st_mode & 0o777 == 0o600
    odd = {"paths": ["a", "b\udcff\n"]}
    assert await in_thread(call, path, "echo", odd, silence_s=10) == {"args": odd}
    steps = []
    result = await in_thread(call, path, "count", {}, silence_s=10, progress=steps.append)
    assert result == {"done": True}
    assert steps == [{"at": 0}, {"at": 1}, {"at": 2}]
    with pytest.raises(NotFound) as caught:
        await in_thread(call, path, "missing", {}, silence_s=10)
    assert (caught.value.why, caught.value.next_step) == ("is not there", "look elsewhere")
    with pytest.raises(HsfsError, match="ZeroDivisionError: oops"):
        await in_thread(call, path, "bug", {}, silence_s=10)
    assert "oops" in caplog.text
    assert await in_thread(call, path, "echo", {}, silence_s=10) == {"args": {}}


async def test_a_silent_mount_is_given_up_and_its_call_cancelled(served):
    path, state = served
    with pytest.raises(TimedOut):
        await in_thread(call, path, "sleep", {}, silence_s=0.2)
    assert await in_thread(state.cancelled.wait, 30)


@pytest.mark.parametrize("garbage", [b"no json\n", b"[]\n", b"{}\n", b'{"op": 1}\n', b"\xff\n"])
async def test_garbage_is_answered_as_such(served, garbage):
    path, _ = served
    stream = await trio.open_unix_socket(path)
    async with stream:
        await stream.send_all(garbage)
        answer = await stream.receive_some()
    assert json.loads(answer)["error"]["code"] == "ProtocolError"


async def test_a_caller_that_says_nothing_or_leaves_harms_nobody(served):
    path, _ = served
    quiet = await trio.open_unix_socket(path)
    leaver = await trio.open_unix_socket(path)
    await leaver.send_all(b'{"op": "count"')
    await leaver.aclose()
    assert await in_thread(call, path, "echo", {}, silence_s=10) == {"args": {}}
    await quiet.aclose()


async def test_several_at_once_and_one_hangs(served, tmp_path):
    path, _ = served
    deaf = socket.socket(socket.AF_UNIX)  # takes connections, answers nothing
    deaf.bind(str(tmp_path / "deaf.sock"))
    deaf.listen(1)
    paths = [path, tmp_path / "deaf.sock", tmp_path / "absent.sock", path]
    began = time.monotonic()
    answers = await in_thread(call_many, paths, "echo", {"x": 1}, deadline_s=3)
    assert time.monotonic() - began < 15
    deaf.close()
    assert answers[0] == answers[3] == {"args": {"x": 1}}
    assert isinstance(answers[1], TimedOut)
    assert isinstance(answers[2], Unavailable)


async def test_a_long_path_and_an_old_socket(tmp_path, nursery):
    folder = tmp_path / ("d" * 100)
    folder.mkdir()
    path = folder / "m.sock"
    path.write_bytes(b"left by a dead mount")
    nursery.start_soon(serve_control, bind(path), Served().handle)
    assert len(str(path)) > 107
    assert await in_thread(call, path, "echo", {}, silence_s=10) == {"args": {}}


def test_nobody_listens(tmp_path):
    with pytest.raises(Unavailable):
        call(tmp_path / "absent.sock", "status", {}, silence_s=1)


def test_a_mount_that_answers_nonsense(tmp_path):
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "s"))
    server.listen(4)
    for answer, error in (
        (b"?\n", ProtocolError),
        (b"[]\n", ProtocolError),
        (b'{"x": 1}\n', ProtocolError),
        (b'{"result"', Unavailable),
        (b"", Unavailable),
    ):

        def reply(answer=answer):
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=reply)
        thread.start()
        with pytest.raises(error):
            call(tmp_path / "s", "status", {}, silence_s=10)
        thread.join()
    server.close()
