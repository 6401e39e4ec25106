import pytest

from hsfs.core.errors import NotFound
from hsfs.core.ports import Listing
from hsfs.core.types import Attributes, Entry, FileType, Node
from hsfs.vfs.inodes import Inodes


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def inodes(clock) -> Inodes:
    return Inodes(1000, 1.0, clock)


def node(ino: int, version: bytes = b"v1", *, ttl_s: float = 10.0, change: int = 1) -> Node:
    attributes = Attributes(ino, FileType.FILE, 0o644, 0, 0, 1, 5, 0, 0, 0)
    return Node(attributes, version=version, change=change, ttl_s=ttl_s)


def test_a_node_is_fresh_for_its_ttl_from_when_it_was_asked_for(inodes, clock):
    inodes.put(node(5), clock.now - 4.0, inodes.stamp())
    assert inodes.fresh(5) is not None
    assert inodes.remaining(5) == pytest.approx(6.0)
    clock.now += 6.5
    assert inodes.fresh(5) is None
    assert inodes.remaining(5) == 0.0


def test_a_push_that_came_while_a_reply_was_under_way_wins(inodes, clock):
    stamp = inodes.stamp()
    inodes.invalidate(5)
    inodes.put(node(5), clock.now, stamp)
    assert inodes.fresh(5) is None
    inodes.put(node(5), clock.now, inodes.stamp())
    assert inodes.fresh(5) is not None


def test_a_push_about_a_directory_keeps_late_names_out(inodes, clock):
    stamp = inodes.stamp()
    inodes.invalidate_entry(1, b"a")
    inodes.put_entry(1, b"a", node(5), clock.now, stamp)
    assert inodes.entry(1, b"a") is None
    inodes.put_absent(1, b"b", clock.now, stamp)
    assert inodes.entry(1, b"b") is None


def test_dropping_everything_outlives_replies_under_way(inodes, clock):
    inodes.put_entry(1, b"a", node(5), clock.now, inodes.stamp())
    stamp = inodes.stamp()
    inodes.invalidate_all()
    assert inodes.entry(1, b"a") is None
    inodes.put(node(5), clock.now, stamp)
    assert inodes.fresh(5) is None


def test_absent_names_are_believed_briefly(inodes, clock):
    inodes.put_absent(1, b"a", clock.now, inodes.stamp())
    with pytest.raises(NotFound):
        inodes.entry(1, b"a")
    assert 0 < inodes.absent_for(1, b"a") <= 1.0
    clock.now += 1.1
    assert inodes.entry(1, b"a") is None


def test_an_older_reply_that_comes_later_is_not_kept(inodes, clock):
    inodes.put(node(5, b"v2", change=2), clock.now, inodes.stamp())
    inodes.put(node(5, b"v1", change=1), clock.now, inodes.stamp())
    assert inodes.fresh(5).version == b"v2"


def test_generations_name_versions_while_the_kernel_knows_the_inode(inodes):
    first = inodes.enter(node(5, b"v1"))
    assert inodes.enter(node(5, b"v1")) == first
    second = inodes.enter(node(5, b"v2"))
    assert second != first
    third = inodes.enter(node(5, b"v1"))
    assert third not in (first, second)
    inodes.forget([(5, 3)])
    assert inodes.known(5)
    inodes.forget([(5, 1)])
    assert not inodes.known(5)
    assert len(inodes) == 0


def test_forgetting_keeps_cached_nodes_and_dropping_nodes_keeps_known_inodes(clock):
    inodes = Inodes(16, 1.0, clock)
    inodes.enter(node(5))
    for ino in range(100, 200):
        inodes.put(node(ino), clock.now, inodes.stamp())
    assert inodes.cached <= 17
    assert inodes.known(5)
    assert len(inodes) <= 18


def test_pages_bring_names_nodes_and_the_order(inodes, clock):
    entries = tuple(Entry(b"%d" % n, node(100 + n)) for n in range(3))
    inodes.put_page(1, b"", Listing(entries, True), clock.now, inodes.stamp())
    assert inodes.entry(1, b"1").attributes.ino == 101
    run = inodes.run(1, b"")
    assert run.inos == [100, 101, 102]
    assert inodes.next_run(run) is None
    more = (Entry(b"3", node(103)),)
    inodes.put_page(1, b"2", Listing(more, False), clock.now, inodes.stamp())
    assert inodes.next_run(run).inos == [103]
    inodes.invalidate_entry(1, b"0")
    assert inodes.run(1, b"") is None


def test_pages_are_bounded(clock):
    inodes = Inodes(1024, 1.0, clock)
    for directory in range(1, 100):
        entries = (Entry(b"a", node(1000 + directory)),)
        inodes.put_page(directory, b"", Listing(entries, False), clock.now, inodes.stamp())
    kept = sum(inodes.run(directory, b"") is not None for directory in range(1, 100))
    assert 1 <= kept <= 5
    for start in range(50):
        entries = (Entry(b"%03d" % start, node(5000 + start)),)
        listing = Listing(entries, True)
        inodes.put_page(500, b"%03d" % (start - 1), listing, clock.now, inodes.stamp())
    assert inodes.run(500, b"048") is not None


def test_what_only_the_kernel_holds_is_packed_and_found_again(inodes, clock):
    for ino in range(10, 3010):
        inodes.put_entry(1, b"%d" % ino, node(ino), clock.now, inodes.stamp())
        inodes.enter(node(ino))
        inodes.enter(node(ino, b"v2"))
    assert inodes.held_by_kernel == 3000
    clock.now += 11
    assert inodes.settle() > 3000
    assert inodes.cached == 0
    assert inodes.held_by_kernel == len(inodes) == 3000
    # The same content keeps its generation, another one gets the next.
    assert not inodes.moved_on(node(77, b"v2"))
    assert inodes.moved_on(node(77, b"v1"))
    assert inodes.enter(node(77, b"v2")) == 1
    assert inodes.enter(node(78, b"v3")) == 2
    assert inodes.known(79)
    inodes.forget([(77, 3), (78, 3)] + [(ino, 2) for ino in range(79, 3010)])
    assert inodes.held_by_kernel == 67
    assert not inodes.known(79)
    inodes.settle()
    assert inodes.held_by_kernel == 67
    inodes.forget([(ino, 2) for ino in range(10, 77)])
    assert len(inodes) == 0
