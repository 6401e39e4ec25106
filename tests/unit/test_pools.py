import threading
import time

import pytest

from hsfs.core.interruption import Interruption
from hsfs.vfs.pools import Pool


@pytest.fixture
def errors():
    return []


@pytest.fixture
def pool(errors):
    pool = Pool("test", 3, errors.append)
    yield pool
    pool.close()


def test_all_jobs_run_and_no_more_threads_than_asked_for(pool, errors):
    lock, most, running, done = threading.Lock(), 0, 0, threading.Semaphore(0)

    def job():
        nonlocal most, running
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.001)
        with lock:
            running -= 1
        done.release()

    for _ in range(200):
        assert pool.submit(job)
    for _ in range(200):
        assert done.acquire(timeout=60)
    assert 1 <= most <= 3
    assert not errors


def test_urgent_jobs_go_first():
    pool = Pool("test", 1, lambda error: None)
    gate, order, done = threading.Event(), [], threading.Event()
    pool.submit(lambda: gate.wait(60))
    pool.submit(lambda: order.append("later"), urgent=False)
    pool.submit(done.set, urgent=False)
    pool.submit(lambda: order.append("urgent"))
    gate.set()
    assert done.wait(60)
    assert order == ["urgent", "later"]
    pool.close()


def test_a_job_that_raises_ends_no_thread(pool, errors):
    done = threading.Event()

    def job():
        raise ValueError("job")

    for _ in range(10):
        pool.submit(job)
    pool.submit(done.set)
    assert done.wait(60)
    deadline = time.monotonic() + 60
    while len(errors) < 10:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_closed_pool_takes_nothing():
    pool = Pool("test", 1, lambda error: None)
    pool.close()
    assert not pool.submit(lambda: None)


def test_stop_reaches_who_is_attached_and_who_comes_later():
    stop, calls = Interruption(), []
    stop.attach(lambda: calls.append("first"))
    stop.detach()
    assert not stop.interrupted
    stop.attach(lambda: calls.append("second"))
    stop.set()
    assert stop.interrupted
    stop.attach(lambda: calls.append("third"))
    assert calls == ["second", "third"]
