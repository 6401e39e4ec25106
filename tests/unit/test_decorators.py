"""throttled, faulty and metered keep what is below them and add what they say."""

import threading
import time

import pytest
import trio

from hsfs.backends.faulty import Fault, Faulty
from hsfs.backends.memory import MemoryBackend
from hsfs.backends.metered import Metered, counters_of
from hsfs.backends.throttled import Budget, Throttled
from hsfs.core.errors import Interrupted, NotFound, Unavailable
from hsfs.core.interruption import Interruption
from hsfs.core.types import DeviceId, Extent, Place
from tests.conformance.backend_suite import Subject, case_id, cases


def decorators(backend):
    return {
        "metered": lambda: Metered(backend),
        "throttled": lambda: Throttled(backend, rate=1e6, bandwidth=1e12, concurrency=5),
        "faulty": lambda: Faulty(backend, lambda operation, place, number: None),
        "all": lambda: Throttled(Metered(Faulty(backend, lambda *call: None)), concurrency=3),
    }


NAMES = list(decorators(None))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", cases(flat=True), ids=case_id)
async def test_flat(name, case):
    backend = MemoryBackend(DeviceId(1), flat=True)
    await case(Subject(decorators(backend)[name](), backend))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", cases(flat=False), ids=case_id)
async def test_directories(name, case):
    backend = MemoryBackend(DeviceId(1))
    decorated = decorators(backend)[name]()
    assert not decorated.caps.flat_list
    decorated.announce(Place(b"x"), Extent(0, 1))  # a hint, for whoever can use it
    await case(Subject(decorated, backend))


def read(backend, key, size, interrupt=None):
    buf = bytearray(size)
    n = backend.read_into(
        Place(key), 0, memoryview(buf), expect=None, interrupt=interrupt or Interruption()
    )
    return bytes(buf[:n])


async def test_metered_counts():
    inner = MemoryBackend(DeviceId(1), flat=True, page=2)
    for i in range(5):
        inner.write(b"d/%d" % i, b"x" * i)
    backend = Throttled(Metered(inner), rate=1e6)
    assert read(backend, b"d/4", 10) == b"xxxx"
    assert read(backend, b"d/3", 2) == b"xx"
    with pytest.raises(NotFound):
        read(backend, b"nothing", 2)
    with pytest.raises(NotFound):
        await backend.stat(Place(b"nothing"))
    assert [len(p.entries) async for p in backend.scan(Place(b"d/"))] == [2, 2, 1]
    assert [len(p.entries) async for p in backend.list_flat(Place(b""))] == [2, 2, 1]
    counters = counters_of(backend)
    assert (counters.reads, counters.read_bytes, counters.stats) == (3, 6, 1)
    assert (counters.pages, counters.entries, counters.in_flight) == (6, 10, 0)
    assert counters.errors == {"NotFound": 2}
    assert sum(counters.read_latency) == 3
    assert counters_of(inner) is None


def test_a_budget_hands_out_no_more_than_its_rate():
    now = [1000.0]
    budget = Budget(1000.0, clock=lambda: now[0])
    waits = [budget.take(100) for _ in range(20)]
    # 2000 units at 1000 per s, of which a burst of a quarter of a second is free.
    assert waits == pytest.approx([max(0.1 * i - 0.4, 0) for i in range(20)])
    now[0] += 1.6
    assert budget.take(1) == pytest.approx(0)
    budget.take(1000)
    before = budget.take(1)
    budget.give_back(500)
    assert budget.take(1) == pytest.approx(before - 0.5 + 0.001)
    assert Budget(0).take(1e9) == 0


async def test_throttled_rates():
    inner = MemoryBackend(DeviceId(1))
    inner.write(b"f", b"x" * 100_000)
    start = time.monotonic()
    slow = Throttled(inner, bandwidth=400_000)
    for _ in range(4):
        await trio.to_thread.run_sync(read, slow, b"f", 100_000)
    assert time.monotonic() - start >= 0.45  # 1 s but for the burst and the first
    start = time.monotonic()
    slow = Throttled(inner, rate=20)
    for _ in range(16):
        await slow.stat(Place(b"f"))
    assert time.monotonic() - start >= 0.3


async def test_throttled_concurrency():
    inside, most, lock = 0, 0, threading.Lock()
    everybody = threading.Event()

    def script(operation, place, number):
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        everybody.wait(0.02)
        with lock:
            inside -= 1

    inner = MemoryBackend(DeviceId(1))
    inner.write(b"f", b"x")
    backend = Throttled(Faulty(inner, script), concurrency=2)
    assert backend.caps.concurrency == 2
    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(trio.to_thread.run_sync, read, backend, b"f", 1)
    assert 1 <= most <= 2


async def test_a_throttled_read_can_be_called_back():
    inner = MemoryBackend(DeviceId(1))
    inner.write(b"f", b"x" * 1000)
    backend = Throttled(inner, bandwidth=10)
    stop = Interruption()

    def wait():
        with pytest.raises(Interrupted):
            read(backend, b"f", 1000, stop)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, wait)
        await trio.sleep(0.05)
        stop.set()


async def test_faults_by_script():
    inner = MemoryBackend(DeviceId(1), flat=True, page=1)
    inner.write(b"a", b"hello")
    inner.write(b"b", b"there")
    faults = {
        ("read", 0): Fault(error=Unavailable("once")),
        ("read", 1): Fault(keep=2),
        ("read", 2): Fault(flip=1),
        ("stat", 0): Fault(error=NotFound("gone"), delay_s=0.01),
        ("scan", 1): Fault(error=Unavailable("second page")),
        ("probe", 0): Fault(error=Unavailable("probe")),
    }
    backend = Faulty(inner, lambda operation, place, number: faults.get((operation, number)))
    with pytest.raises(Unavailable):
        read(backend, b"a", 5)
    assert read(backend, b"a", 5) == b"he"
    assert read(backend, b"a", 5) == b"h\x9allo"
    assert read(backend, b"a", 5) == b"hello"
    with pytest.raises(NotFound):
        await backend.stat(Place(b"a"))
    assert (await backend.stat(Place(b"a"))).size == 5
    pages = backend.scan(Place(b""))
    assert len((await anext(pages)).entries) == 1
    with pytest.raises(Unavailable, match="second"):
        await anext(pages)
    await pages.aclose()
    with pytest.raises(Unavailable):
        await backend.probe()
    assert backend.calls("read") == 4
