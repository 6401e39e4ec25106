"""The driver of the request loop, with a pipe in the kernel's place."""

import os
import threading

import pytest

from hsfs.fuse.notify import Notifier
from hsfs.fuse.serving import Latch, Serving, next_request, suspended


class Kernel:
    """Requests are single bytes on a pipe; `handle` is awaited for each, answers are collected."""

    def __init__(self, handle):
        self.read_fd, self.write_fd = os.pipe()
        self.handle = handle
        self.answers = []
        self.answered = threading.Condition()
        self.ended = threading.Event()
        self.serving = Serving(self.read_fd, self.loop, self.ended.set)

    async def loop(self):
        while await next_request():
            request = os.read(self.read_fd, 1)
            if not request:
                return
            try:
                answer = await self.handle(request)
            except LookupError as error:
                answer = error
            with self.answered:
                self.answers.append((answer, threading.current_thread().name))
                self.answered.notify_all()

    def wait(self, count):
        with self.answered:
            assert self.answered.wait_for(lambda: len(self.answers) >= count, 60)
        return [answer for answer, _ in self.answers]


@pytest.fixture
def kernel():
    made = []

    def make(handle):
        kernel = Kernel(handle)
        made.append(kernel)
        kernel.serving.start()
        return kernel

    yield make
    for kernel in made:
        assert kernel.serving.close(30)
        for fd in (kernel.read_fd, kernel.write_fd):
            os.close(fd)


def test_requests_that_need_not_wait_are_answered_by_the_one_thread(kernel):
    async def handle(request):
        return request

    k = kernel(handle)
    os.write(k.write_fd, b"abcdef")
    assert k.wait(6) == [b"a", b"b", b"c", b"d", b"e", b"f"]
    assert {thread for _, thread in k.answers} == {"hsfs-fuse"}
    assert k.serving.in_flight == 0


def test_whoever_has_the_answer_replies_and_nobody_waits_for_him(kernel):
    latches = {}

    async def handle(request):
        if request.isupper():
            latch = latches[request] = Latch()
            return await suspended(latch.attach)
        return request

    k = kernel(handle)
    os.write(k.write_fd, b"ABc")
    assert k.wait(1) == [b"c"]
    assert k.serving.in_flight == 2
    thread = threading.Thread(target=latches[b"B"], args=(b"late",), name="worker")
    thread.start()
    thread.join()
    assert k.answers[1] == (b"late", "worker")
    latches[b"A"](LookupError("failed"))
    assert isinstance(k.wait(3)[2], LookupError)
    assert k.serving.in_flight == 0


def test_an_answer_that_comes_before_the_handler_waits_is_not_lost(kernel):
    async def handle(request):
        latch = Latch()
        latch(memoryview(b"at once"))
        return await suspended(latch.attach)

    k = kernel(handle)
    os.write(k.write_fd, b"a")
    assert k.wait(1) == [b"at once"]


def test_many_at_a_time_from_many_threads(kernel):
    async def handle(request):
        latch = Latch()
        threading.Thread(target=latch, args=(request,)).start()
        return await suspended(latch.attach)

    k = kernel(handle)
    os.write(k.write_fd, bytes(range(200)))
    assert sorted(k.wait(200)) == sorted(bytes([n]) for n in range(200))


def test_the_kernels_end_ends_the_thread():
    async def handle(request):
        return request

    k = Kernel(handle)
    k.serving.start()
    os.close(k.write_fd)
    assert k.ended.wait(60)
    assert k.serving.close(30)
    os.close(k.read_fd)


def test_closing_drops_who_still_waits(kernel):
    latch = Latch()

    async def handle(request):
        return await suspended(latch.attach)

    k = kernel(handle)
    os.write(k.write_fd, b"a")
    while k.serving.in_flight != 1:
        assert not k.ended.wait(0.005)
    assert k.serving.close(30)
    latch(b"too late")
    assert k.answers == []
    k.serving.close = lambda timeout_s: True


def test_notifications_are_merged_and_errors_survived():
    gate, told, last = threading.Event(), [], threading.Event()

    def tell(ino, name):
        gate.wait(60)
        told.append((ino, name))
        if name == b"last":
            last.set()
        raise FileNotFoundError(2, "the kernel knows no such name")

    notifier = Notifier(tell)
    notifier.put(2, b"first")
    for _ in range(100):
        notifier.put(2, b"again")
    notifier.put(2, b"last")
    gate.set()
    assert last.wait(60)
    assert told.count((2, b"again")) <= 2
    assert notifier.close(30)
