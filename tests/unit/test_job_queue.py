"""The pure job queue: priorities, leases, tokens, turns."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hsfs.core.jobs import ATTEMPTS_MAX, JobKind, JobQueue
from hsfs.core.types import Place


@pytest.fixture
def lost():
    return []


@pytest.fixture
def queue(lost):
    return JobQueue(lost.append, lease_s=10, interactive_per_device=3)


def test_interactive_goes_before_scans(queue):
    scan = queue.add(JobKind.SCAN, 1)
    listing = queue.add(JobKind.LIST, 1, (Place(b"d"),))
    assert [job.id for job in queue.take(b"m", 1, 0)] == [listing]
    assert [job.id for job in queue.take(b"m", 9, 0)] == [scan]


def test_a_device_cannot_fill_a_mover(queue):
    for _ in range(10):
        queue.add(JobKind.STAT, 1)
    other = queue.add(JobKind.STAT, 2)
    taken = queue.take(b"m", 100, 0)
    assert sum(job.device == 1 for job in taken) == 3
    assert other in {job.id for job in taken}


def test_devices_take_turns(queue):
    for device in (1, 2, 3):
        for _ in range(2):
            queue.add(JobKind.STAT, device)
    assert [job.device for job in queue.take(b"m", 2, 0)] == [1, 2]
    assert [job.device for job in queue.take(b"m", 2, 0)] == [3, 1]


def test_a_lost_lease_gives_a_new_token(queue):
    queue.add(JobKind.SCAN, 1, (), b"c0")
    first = queue.take(b"m", 1, 0)[0]
    queue.set_cursor(first.id, b"c1")
    queue.expire(9)
    assert queue.held(first.id, first.token)
    queue.renew(b"m", 9)
    queue.expire(18)
    assert queue.held(first.id, first.token)
    queue.expire(19)
    assert queue.held(first.id, first.token) is None
    second = queue.take(b"n", 1, 20)[0]
    assert (second.id, second.cursor) == (first.id, b"c1")
    assert second.token != first.token
    assert queue.held(first.id, first.token) is None


def test_a_dead_mover_gives_its_jobs_back_in_order(queue):
    ids = [queue.add(JobKind.LIST, 1) for _ in range(3)]
    queue.take(b"m", 2, 0)
    queue.release(b"m")
    assert [job.id for job in queue.take(b"n", 3, 0)] == ids


def test_a_job_that_kills_movers_fails(queue, lost):
    job = queue.add(JobKind.LIST, 1)
    for attempt in range(ATTEMPTS_MAX):
        assert [taken.id for taken in queue.take(b"m", 1, attempt)] == [job]
        queue.release(b"m")
    assert [gone.id for gone in lost] == [job]
    assert len(queue) == 0


def test_finish_of_waiting_and_held(queue):
    one, two = queue.add(JobKind.LIST, 1), queue.add(JobKind.LIST, 1)
    queue.take(b"m", 1, 0)
    assert queue.finish(one)
    assert queue.finish(two)
    assert not queue.finish(one)
    assert len(queue) == 0


class Model(RuleBasedStateMachine):
    """No job is ever lost, given out twice at once, or accepted under an old token."""

    def __init__(self):
        super().__init__()
        self.gave_up = []
        self.queue = JobQueue(
            lambda job: self.gave_up.append(job.id), lease_s=10, interactive_per_device=2
        )
        self.open = set()
        self.holder = {}
        self.now = 0.0

    @rule(kind=st.sampled_from(list(JobKind)), device=st.integers(1, 3))
    def add(self, kind, device):
        self.open.add(self.queue.add(kind, device))

    @rule(mover=st.sampled_from([b"m", b"n"]), limit=st.integers(1, 4))
    def take(self, mover, limit):
        for job in self.queue.take(mover, limit, self.now):
            assert job.id in self.open
            assert job.id not in self.holder
            self.holder[job.id] = (mover, job.token)

    @rule(seconds=st.floats(0, 6))
    def time_passes(self, seconds):
        self.now += seconds
        self.queue.expire(self.now)
        self._sync()

    @rule(mover=st.sampled_from([b"m", b"n"]))
    def renew(self, mover):
        self.queue.renew(mover, self.now)

    @rule(mover=st.sampled_from([b"m", b"n"]))
    def die(self, mover):
        self.queue.release(mover)
        self._sync()
        assert all(who != mover for who, _ in self.holder.values())

    @precondition(lambda self: self.holder)
    @rule(data=st.data())
    def finish(self, data):
        job = data.draw(st.sampled_from(sorted(self.holder)))
        assert self.queue.held(job, self.holder[job][1])
        assert self.queue.held(job, self.holder[job][1] - 1) is None
        assert self.queue.finish(job)
        self.open.discard(job)
        del self.holder[job]

    def _sync(self):
        self.open -= set(self.gave_up)
        self.holder = {
            job: held for job, held in self.holder.items() if self.queue.held(job, held[1])
        }

    @invariant()
    def all_there(self):
        assert {job.id for job, _ in self.queue.jobs()} == self.open
        assert {job.id for job, taken in self.queue.jobs() if taken} == set(self.holder)


TestModel = Model.TestCase
