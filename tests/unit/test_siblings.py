from hsfs.vfs.counters import Counters
from hsfs.vfs.inodes import Inode, Run
from hsfs.vfs.siblings import Siblings

PAGE = 100


def directory(count: int) -> tuple[list[Run], list[Inode]]:
    runs, inodes = [], []
    after = b""
    for start in range(0, count, PAGE):
        names = [b"%06d" % n for n in range(start, min(count, start + PAGE))]
        inos = [1000 + int(name) for name in names]
        run = Run(7, after, names, inos, start + PAGE < count, 1e9)
        after = run.last
        runs.append(run)
        for position, ino in enumerate(inos):
            inode = Inode(ino)
            inode.run, inode.position = run, position
            inodes.append(inode)
    return runs, inodes


def make(runs: list[Run], counters: Counters | None = None, depth: int = 32) -> Siblings:
    by_after = {run.after: run for run in runs}
    return Siblings(
        depth, counters or Counters(), lambda run: by_after.get(run.last) if run.more else None
    )


def test_opens_in_order_are_run_ahead_of_without_gaps_or_repeats():
    runs, inodes = directory(1000)
    siblings = make(runs)
    wanted: list[int] = []
    for number, inode in enumerate(inodes):
        wanted.extend(siblings.opened(inode).inos)
        assert all(ino <= inode.ino + 33 for ino in wanted)
        if number > 3:
            assert inode.ino in wanted
    assert wanted == sorted(set(wanted))
    assert wanted[-1] == inodes[-1].ino


def test_two_opens_prove_nothing():
    runs, inodes = directory(100)
    siblings = make(runs)
    assert siblings.opened(inodes[0]).inos == ()
    assert siblings.opened(inodes[1]).inos == ()
    assert siblings.opened(inodes[2]).inos != ()


def test_opens_out_of_order_fetch_nothing():
    runs, inodes = directory(1000)
    siblings = make(runs)
    for number in range(0, 1000, 37):
        assert siblings.opened(inodes[(number * 7) % 1000]).inos == ()


def test_a_missing_page_is_asked_for_before_it_is_reached():
    runs, inodes = directory(200)
    siblings = make(runs[:1])
    asked = [n for n in range(100) if siblings.opened(inodes[n]).page is runs[0]]
    assert asked
    assert asked[0] < 80


def test_guessing_stops_when_it_is_not_used():
    counters = Counters()
    runs, inodes = directory(1000)
    siblings = make(runs, counters)
    for inode in inodes[:10]:
        siblings.opened(inode)
    counters.siblings_unused = 500
    assert all(siblings.opened(inode).inos == () for inode in inodes[10:300])


def test_inodes_that_were_never_listed_are_left_alone():
    siblings = make([])
    assert siblings.opened(Inode(5)).inos == ()
