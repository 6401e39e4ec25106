"""The job board and the scans of the server, with movers played by the test."""

import asyncio

import pytest

from hsfs.core.errors import LeaseLost, NotFound, TimedOut, Unauthorised, Unavailable
from hsfs.core.jobs import Fault, JobKind, Outcome, StatResult
from hsfs.core.ports import Device
from hsfs.core.types import DirectoryPage, FileType, ObjectStat, Place, Space
from hsfs.mdserver import jobs, scans
from hsfs.mdserver.health import Health
from hsfs.mdserver.jobs import JobBoard
from hsfs.mdserver.scans import Scans
from hsfs.proto.messages import FinishArgs, PagesArgs

LIMIT_S = 60


def stat(name: bytes) -> ObjectStat:
    return ObjectStat(name, FileType.FILE, Place(name))


def page(*names: bytes, key=b"", upto=b"") -> DirectoryPage:
    return DirectoryPage(1, Place(key), tuple(map(stat, names)), upto=upto)


class Desk:
    """A board, what it said of backends' health, and a mover's hands."""

    def __init__(self, timeout_s=30.0):
        self.heard = []
        self.board = JobBoard(lambda device: timeout_s, lambda *heard: self.heard.append(heard))

    async def take(self, mover=b"m", limit=8):
        return await self.board.take(mover, limit, LIMIT_S)

    async def one(self, mover=b"m"):
        return (await self.take(mover, 1))[0]

    async def pages(self, job, *pages, cursor=b""):
        await self.board.pages(PagesArgs(job.id, job.token, pages, cursor))

    async def finish(self, job, outcome=Outcome()):  # noqa: B008 - frozen
        await self.board.finish(FinishArgs(job.id, job.token, outcome))


def run(main):
    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


async def collect(board, place=b"d"):
    return [page async for page in board.list(1, Place(place))]


def test_a_listing_streams_page_by_page():
    async def main():
        desk = Desk()
        listing = desk.board.list(1, Place(b"d"))
        first = asyncio.ensure_future(anext(listing))
        job = await desk.one()
        assert (job.kind, job.device, job.places) == (JobKind.LIST, 1, (Place(b"d"),))
        await desk.pages(job, page(b"a"))
        assert await first == page(b"a")  # before the listing has ended
        await desk.pages(job, page(b"b"), page(b"c"))
        await desk.finish(job)
        assert [p async for p in listing] == [page(b"b"), page(b"c")]
        assert desk.heard == [(1, None, False)]
        assert desk.board.counts() == (0, 0)

    run(main)


def test_a_slow_reader_holds_the_mover_back_and_the_end_still_comes():
    async def main():
        desk = Desk()
        listing = desk.board.list(1, Place(b"d"))
        first = asyncio.ensure_future(anext(listing))
        job = await desk.one()
        sent = [asyncio.ensure_future(desk.pages(job, page(b"%02d" % i))) for i in range(30)]
        ended = asyncio.ensure_future(desk.finish(job))
        await first
        await asyncio.sleep(0)
        assert not ended.done()
        assert sum(task.done() for task in sent) < 30
        rest = [p async for p in listing]
        assert [p.entries[0].name for p in rest] == [b"%02d" % i for i in range(1, 30)]
        await asyncio.gather(*sent, ended)

    run(main)


def test_an_abandoned_listing_costs_its_mover_the_lease():
    async def main():
        desk = Desk()
        listing = desk.board.list(1, Place(b"d"))
        first = asyncio.ensure_future(anext(listing))
        job = await desk.one()
        await desk.pages(job, page(b"a"))
        await first
        await listing.aclose()
        with pytest.raises(LeaseLost):
            await desk.pages(job, page(b"b"))
        with pytest.raises(LeaseLost):
            await desk.finish(job)

    run(main)


def test_errors_of_the_source_come_through():
    async def main():
        desk = Desk()
        listing = asyncio.ensure_future(collect(desk.board))
        job = await desk.one()
        await desk.finish(job, Outcome(Fault("Unauthorised", "nas", "no export", "add it")))
        with pytest.raises(Unauthorised, match="no export"):
            await listing
        device, error, root = desk.heard[0]
        assert (device, error.code, root) == (1, "Unauthorised", False)
        stats = asyncio.ensure_future(desk.board.stat(1, [Place(b"a"), Place(b"b")]))
        job = await desk.one()
        gone = StatResult(None, Fault("NotFound", "b"))
        await desk.finish(job, Outcome(stats=(StatResult(stat(b"a")), gone)))
        found, missing = await stats
        assert found == stat(b"a")
        assert isinstance(missing, NotFound)
        assert desk.heard[-1] == (1, None, False)

    run(main)


def test_jobs_of_a_dead_mover_are_done_by_another():
    async def main():
        desk = Desk()
        probe = asyncio.ensure_future(desk.board.probe(1))
        first = await desk.one(b"m")
        desk.board.release(b"m")
        second = await desk.one(b"n")
        assert second.id == first.id
        with pytest.raises(LeaseLost):
            await desk.finish(first)
        await desk.finish(second, Outcome(space=Space(10, 5, 5)))
        assert await probe == Space(10, 5, 5)
        assert desk.heard == [(1, None, True)]

    run(main)


def test_a_waiting_mover_gets_the_job_at_once_and_a_gone_one_none():
    async def main():
        desk = Desk()
        gone = asyncio.ensure_future(desk.board.take(b"gone", 1, LIMIT_S))
        waiting = asyncio.ensure_future(desk.take(b"m"))
        await asyncio.sleep(0)
        desk.board.release(b"gone")
        with pytest.raises(asyncio.CancelledError):
            await gone
        probe = asyncio.ensure_future(desk.board.probe(1))
        (job,) = await waiting
        await desk.finish(job)
        await probe
        assert await desk.board.take(b"m", 1, 0.01) == []

    run(main)


def test_no_mover_and_no_progress_are_told_apart(monkeypatch):
    monkeypatch.setattr(jobs, "TAKEN_WITHIN_S", 0.05)
    monkeypatch.setattr(jobs, "GRACE_S", 0.1)

    async def main():
        desk = Desk(timeout_s=0.1)
        with pytest.raises(Unavailable, match="none is running"):
            await collect(desk.board)
        assert desk.heard == []
        hung = asyncio.ensure_future(collect(desk.board))
        await desk.one()
        with pytest.raises(TimedOut):
            await hung
        assert desk.heard[0][1].code == "TimedOut"
        assert desk.board.counts() == (0, 0)

    run(main)


class Shelf:
    """What scans need of the namespace."""

    def __init__(self, scan="full"):
        self.values = {}
        self.applied = []
        self.states = []
        self.scan = scan

    def devices(self):
        return (Device(1, "d", "memory://", "/d", {"scan": self.scan}),)

    async def apply(self, pages):
        self.applied += pages
        return len(pages)

    def set_scan(self, device, state, scanned):
        self.states.append((device, state, scanned))

    async def remember(self, name, value):
        self.values[name] = value

    def recall(self, name):
        return self.values.get(name)


async def settled(condition):
    while not condition():  # noqa: ASYNC110 - no event tells
        await asyncio.sleep(0.005)


def test_a_scan_is_kept_and_goes_on_where_it_was(monkeypatch):
    monkeypatch.setattr(scans, "SAVE_S", 0.0)

    async def main():
        shelf, desk = Shelf(), Desk()
        work = Scans(shelf, desk.board)
        work.start_due()
        assert work.pending()
        job = await desk.one()
        assert (job.kind, job.cursor) == (JobKind.SCAN, b"")
        await desk.pages(job, page(b"a", b"b", upto=b"b"), cursor=b"at b")
        desk.board.release(b"m")  # the mover dies
        job = await desk.one(b"n")
        assert job.cursor == b"at b"
        await desk.pages(job, page(b"c", upto=b"c"), cursor=b"at c")
        (status,) = work.status()
        assert (status.state, status.entries) == ("running", 3)
        await work.aclose()  # the server dies
        desk = Desk()
        work = Scans(shelf, desk.board)
        work.start_due()
        job = await desk.one()
        assert job.cursor == b"at c"
        await desk.pages(job, page(b"d"))
        await desk.finish(job)
        await settled(lambda: not work.pending())
        (status,) = work.status()
        assert (status.state, status.entries, status.directories) == ("done", 4, 1)
        assert shelf.states[-1] == (1, "done", 4)
        again = Scans(shelf, desk.board)
        again.start_due()  # done once: freshness on use does the rest
        assert not again.pending()
        again.start(("d",), restart=False)
        job = await desk.one()
        assert job.cursor == b""
        await desk.pages(job, page(b"a"))
        (status,) = again.status()
        assert status.eta_s >= 0
        with pytest.raises(NotFound):
            again.start(("x",), restart=False)
        await again.aclose()

    run(main)


def test_a_failed_scan_waits_and_goes_on(monkeypatch):
    monkeypatch.setattr(scans, "_RETRY_MIN_S", 0.05)

    async def main():
        shelf, desk = Shelf(), Desk()
        work = Scans(shelf, desk.board)
        work.start_due()
        job = await desk.one()
        await desk.pages(job, page(b"a", upto=b"a"), cursor=b"at a")
        await desk.finish(job, Outcome(Fault("Unavailable", "s3", "down")))
        await settled(lambda: not work.pending())
        (status,) = work.status()
        assert (status.state, status.why) == ("failed", "s3: down")
        assert shelf.states[-1] == (1, "failed", 1)
        job = await desk.one()
        assert job.cursor == b"at a"
        await desk.pages(job, page(b"b"))
        await desk.finish(job)
        await settled(lambda: work.status()[0].state == "done")
        assert work.status()[0].entries == 2
        await work.aclose()

    run(main)


def test_lazy_backends_are_scanned_on_demand_only():
    async def main():
        shelf, desk = Shelf("lazy"), Desk()
        work = Scans(shelf, desk.board)
        work.start_due()
        assert not work.pending()
        assert work.status()[0].state in ("", "lazy")
        work.start((), restart=False)
        job = await desk.one()
        await desk.finish(job)
        await settled(lambda: not work.pending())
        await work.aclose()

    run(main)


def test_health_hears_probes_and_jobs():
    class Store(Shelf):
        def __init__(self):
            super().__init__()
            self.health = {}

        def set_state(self, device, state, why):
            self.health[device] = (state, why)

        def set_space(self, device, space):
            self.space = space

    store = Store()
    health = Health(store)
    health.heard(1, NotFound("d"), False)
    assert store.health == {}  # one directory went: says nothing
    health.heard(1, Unavailable("nas", "no route"), False)
    assert store.health[1] == ("unreachable", "nas: no route")
    assert not health.well(1)
    health.heard(1, NotFound("export"), True)
    assert store.health[1][0] == "missing"
    health.heard(1, None, False)
    assert store.health[1][0] == "missing"  # a listing below may still answer from elsewhere
    health.heard(1, None, True)
    assert store.health[1] == ("ok", "")
    health.heard(1, Unauthorised("nas"), False)
    assert store.health[1][0] == "unauthorised"
