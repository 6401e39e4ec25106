"""The namespace's promises, one by one, over sources in memory (the model tests their mixtures)."""

import asyncio
import contextlib
from types import SimpleNamespace

import msgspec
import pytest

from hsfs.core.errors import NotADirectory, NotFound, TimedOut, Unauthorised, Unavailable
from hsfs.core.types import ROOT_INO, DirectoryPage, FileType, Name, Place
from hsfs.mdserver.namespace import Namespace
from hsfs.mdserver.store.committer import Committer
from hsfs.mdserver.store.memory import MemoryStore
from hsfs.mdserver.volume import Defaults
from tests.model.sources import FakeClock, Flat, Tree, World
from tests.model.store_invariants import check

FILE, DIRECTORY = FileType.FILE, FileType.DIRECTORY


def backend(name, url, at="/data", **options):
    return SimpleNamespace(name=name, url=url, at=at, options={"freshness": 60.0, **options})


class Setting:
    """One namespace over a flat source (device 1) and a tree (device 2), at /data unless told."""

    def __init__(self, *backends):
        self.clock = FakeClock()
        self.flat, self.tree = Flat(), Tree()
        self.world = World({1: self.flat, 2: self.tree}, self.clock)
        self.backends = backends or (backend("lake", "s3://b/p"),)
        self.store = MemoryStore()

    @contextlib.asynccontextmanager
    async def open(self, **kwargs):
        committer = Committer(self.store)
        try:
            async with Namespace(
                self.store,
                committer,
                SimpleNamespace(backends=self.backends),
                self.world,
                defaults=Defaults(11, 12),
                clock=self.clock,
                **kwargs,
            ) as namespace:
                yield namespace
                check(self.store, namespace._volume)
        finally:
            committer.close()

    def run(self, test, **kwargs):
        async def main():
            async with self.open(**kwargs) as namespace:
                await asyncio.wait_for(test(namespace), 60)

        asyncio.run(main())


async def names(namespace, path):
    ino = (await namespace.walk(path)).attributes.ino
    out, after = [], b""
    while True:
        page = await namespace.list(ino, Name(after), 256)
        out += [entry.name for entry in page.entries]
        if not page.more:
            return out
        after = out[-1]


def test_a_directory_is_listed_at_first_use_and_then_answered_from_the_store():
    setting = Setting()
    setting.flat.put(b"x/1", 10)
    setting.flat.put(b"x/2", 20)

    async def test(namespace):
        assert setting.world.lists == []
        node = await namespace.walk(b"/data/x/2")
        assert node.attributes.size == 20
        assert node.replicas[0].place == Place(b"x/2")
        assert node.version == node.replicas[0].version
        assert 0 < node.ttl_s <= 30
        assert (node.attributes.mode, node.attributes.uid, node.attributes.gid) == (0o644, 11, 12)
        assert setting.world.lists == [(1, b""), (1, b"x/")]
        assert await names(namespace, b"/data/x") == [b"1", b"2"]
        with pytest.raises(NotFound):
            await namespace.walk(b"/data/x/3")
        with pytest.raises(NotADirectory):
            await namespace.walk(b"/data/x/1/2")
        assert len(setting.world.lists) == 2
        assert setting.world.stats == []

    setting.run(test)


def test_what_is_due_is_asked_again_together():
    setting = Setting()
    for at in range(20):
        setting.flat.put(b"f%02d" % at)

    async def test(namespace):
        first = await namespace.walk(b"/data/f00")
        setting.clock.advance(61)
        setting.flat.put(b"f01")
        del setting.flat.objects[b"f02"]
        results = await asyncio.gather(
            *(namespace.walk(b"/data/f%02d" % at) for at in range(20)), return_exceptions=True
        )
        assert len(setting.world.lists) == 2  # one listing renewed all of them
        assert isinstance(results[2], NotFound)
        assert results[0].attributes.ino == first.attributes.ino
        assert results[0].version == first.version
        assert results[1].change == 2
        assert results[1].version == setting.flat.objects[b"f01"][0]

    setting.run(test)


def test_one_name_of_a_large_directory_is_asked_by_itself():
    setting = Setting()
    for at in range(3000):
        setting.flat.put(b"f%04d" % at)

    async def test(namespace):
        assert len(await names(namespace, b"/data")) == 3000
        setting.clock.advance(61)
        setting.flat.put(b"f0007", 77)
        setting.flat.put(b"new/x")
        assert (await namespace.walk(b"/data/f0007")).attributes.size == 77
        assert (await namespace.walk(b"/data/new")).attributes.type is DIRECTORY
        with pytest.raises(NotFound):
            await namespace.walk(b"/data/absent")
        assert len(setting.world.lists) == 1
        assert setting.world.stats
        before = len(setting.world.stats)
        await namespace.walk(b"/data/f0007")  # fresh again
        assert len(setting.world.stats) == before
        for at in range(100, 120):  # many due names: the listing is cheaper
            await namespace.walk(b"/data/f%04d" % at)
        assert len(setting.world.lists) == 2

    setting.run(test)


def test_entries_appear_while_their_listing_goes_on():
    setting = Setting()
    for at in range(5000):
        setting.flat.put(b"f%04d" % at)
    gate = asyncio.Event()
    plain = setting.world.list

    async def slow(device, directory):
        number = 0
        async for page in plain(device, directory):
            yield page
            number += 1
            if number == 2:
                await gate.wait()

    setting.world.list = slow

    async def test(namespace):
        data = (await namespace.walk(b"/data")).attributes.ino
        page = await namespace.list(data, Name(b""), 256)
        assert [e.name for e in page.entries] == [b"f%04d" % at for at in range(256)]
        assert page.more
        assert (await namespace.lookup(data, Name(b"f1500"))).attributes.size == 1
        assert (await namespace.lookup(data, Name(b"f4999"))).attributes.size == 1  # by stat
        assert setting.world.stats
        gate.set()
        assert await names(namespace, b"/data") == [b"f%04d" % at for at in range(5000)]
        assert len(setting.world.lists) == 1

    setting.run(test)


def test_servers_without_order_are_listed_whole():
    setting = Setting(backend("other", "s3://b/p", "/other"), backend("nas", "nfs://h/e"))
    for name in (b"b", b"a", b"c", b"%~", b"n" * 255):
        setting.tree.root.children[name] = setting.tree.make(FILE)
    setting.world.unordered = True
    setting.world.page_size = 2

    async def test(namespace):
        listed = await names(namespace, b"/data")
        assert listed == [b"a", b"b", b"c", b"n" * 255, b"%~25%~7E"]
        del setting.tree.root.children[b"b"]
        setting.clock.advance(61)
        assert b"b" not in await names(namespace, b"/data")

    setting.run(test)


def test_the_root_of_a_file_system_has_its_own_attributes():
    setting = Setting(backend("other", "s3://b/p", "/other"), backend("nas", "nfs://h/e"))

    async def test(namespace):
        listing = await namespace.list(ROOT_INO, b"", 10)
        assert [e.node.ttl_s > 0 for e in listing.entries] == [False, True]
        node = await namespace.walk(b"/data")
        assert node.ttl_s > 0
        assert (node.attributes.mode, node.attributes.uid, node.attributes.gid) == (0o750, 7, 8)
        assert (await namespace.walk(b"/other")).attributes.mode == 0o755
        asked = len(setting.world.stats)
        assert (await namespace.getattr(node.attributes.ino)).attributes.uid == 7
        assert len(setting.world.stats) == asked
        setting.world.broken[2] = TimedOut("backend nas", "no answer")
        setting.clock.advance(61)
        assert (await namespace.walk(b"/data")).attributes.uid == 7

    setting.run(test)


def test_native_renames_and_links_keep_the_inode():
    setting = Setting(backend("other", "s3://b/p", "/other"), backend("nas", "nfs://h/e"))
    tree = setting.tree
    root = tree.root.children
    root[b"d"], root[b"e"], root[b"f"] = (
        tree.make(DIRECTORY), tree.make(DIRECTORY), tree.make(FILE),
    )  # fmt: skip
    root[b"d"].children[b"g"] = tree.make(FILE)

    async def inos(namespace, *paths):
        setting.clock.advance(61)
        return [(await namespace.walk(path)).attributes.ino for path in paths]

    async def test(namespace):
        before = await inos(namespace, b"/data/d", b"/data/d/g", b"/data/f")
        root[b"e"].children[b"d2"] = root.pop(b"d")
        root[b"f2"] = root.pop(b"f")
        assert before == await inos(namespace, b"/data/e/d2", b"/data/e/d2/g", b"/data/f2")
        for gone in (b"/data/d", b"/data/f"):
            with pytest.raises(NotFound):
                await namespace.walk(gone)
        root[b"link"] = root[b"f2"]
        root[b"f2"].links = 2
        first, second = await inos(namespace, b"/data/f2", b"/data/link")
        assert first == second == before[2]
        assert (await namespace.getattr(first)).attributes.nlink == 2
        del root[b"f2"]
        root[b"link"].links = 1
        assert await inos(namespace, b"/data/link") == [first]
        root[b"link"] = tree.make(FILE)  # replaced: another file
        assert await inos(namespace, b"/data/link") != [first]
        setting.clock.advance(61)
        with pytest.raises(NotFound):
            await namespace.getattr(first)

    setting.run(test)


def test_absence_that_was_seen_ends_an_inode_and_new_content_does_not():
    setting = Setting()
    setting.flat.put(b"k")

    async def test(namespace):
        first = await namespace.walk(b"/data/k")
        setting.flat.put(b"k", 2)
        setting.clock.advance(61)
        second = await namespace.walk(b"/data/k")
        assert second.attributes.ino == first.attributes.ino
        assert second.version != first.version
        assert second.change > first.change
        del setting.flat.objects[b"k"]
        setting.clock.advance(61)
        with pytest.raises(NotFound):
            await namespace.walk(b"/data/k")
        with pytest.raises(NotFound):
            await namespace.getattr(first.attributes.ino)
        setting.flat.put(b"k")
        setting.clock.advance(61)
        assert (await namespace.walk(b"/data/k")).attributes.ino > first.attributes.ino

    setting.run(test)


def test_merging_shows_the_first_and_keeps_the_losers():
    setting = Setting(backend("lake", "s3://b/p"), backend("nas", "nfs://h/e"))
    flat, root = setting.flat, setting.tree.root.children
    flat.put(b"both", 1)
    flat.put(b"dir/in-lake")
    flat.put(b"mixed", 3)
    root[b"both"], root[b"dir"], root[b"mixed"] = (
        setting.tree.make(FILE), setting.tree.make(DIRECTORY), setting.tree.make(DIRECTORY),
    )  # fmt: skip
    root[b"dir"].children[b"in-nas"] = setting.tree.make(FILE)

    async def test(namespace):
        winner = await namespace.walk(b"/data/both")
        assert winner.replicas[0].device == 1
        info = await namespace.info(winner.attributes.ino)
        assert info.path == b"/data/both"
        assert [loser.device for loser in info.losers] == [2]
        assert await names(namespace, b"/data/dir") == [b"in-lake", b"in-nas"]
        merged = await namespace.walk(b"/data/dir")
        assert merged.attributes.mode == 0o750  # the file system's word, the bucket has none
        assert {b.device for b in (await namespace.info(merged.attributes.ino)).bindings} == {1, 2}
        mixed = await namespace.walk(b"/data/mixed")  # a directory wins over a file
        assert mixed.attributes.type is DIRECTORY
        assert len((await namespace.info(mixed.attributes.ino)).losers) == 1
        del flat.objects[b"both"]
        del flat.objects[b"dir/in-lake"]
        setting.clock.advance(61)
        loser = await namespace.walk(b"/data/both")
        assert loser.replicas[0].device == 2
        assert loser.attributes.ino != winner.attributes.ino
        assert await names(namespace, b"/data/dir") == [b"in-nas"]
        assert (await namespace.walk(b"/data/dir")).attributes.ino == merged.attributes.ino

    setting.run(test)


def test_an_object_beside_its_prefix_is_renamed_not_replaced():
    setting = Setting()
    setting.flat.put(b"n")

    async def test(namespace):
        ino = (await namespace.walk(b"/data/n")).attributes.ino
        setting.flat.put(b"n/x")
        setting.flat.put(b"n/", 4)
        setting.clock.advance(61)
        assert await names(namespace, b"/data") == [b"n", b"n%~o"]
        assert (await namespace.walk(b"/data/n%~o")).attributes.ino == ino
        assert await names(namespace, b"/data/n") == [b"x", b"%~m"]
        marker = await namespace.walk(b"/data/n/%~m")
        assert marker.attributes.size == 4
        assert marker.replicas[0].place == Place(b"n/")
        again = await namespace.revalidate(marker.attributes.ino, marker.version)
        assert again.attributes.ino == marker.attributes.ino
        del setting.flat.objects[b"n/x"], setting.flat.objects[b"n/"]
        setting.clock.advance(61)
        assert await names(namespace, b"/data") == [b"n"]
        assert (await namespace.walk(b"/data/n")).attributes.ino == ino

    setting.run(test)


def test_names_that_nothing_has_are_not_found():
    setting = Setting()
    setting.flat.put(b"L" * 250)
    setting.flat.put(b".hsfs")

    async def test(namespace):
        assert await names(namespace, b"/data") == [b".hsfs", b"%~+" + b"L" * 200]
        piece = await namespace.walk(b"/data/%~+" + b"L" * 200)
        assert await names(namespace, b"/data/%~+" + b"L" * 200) == [b"L" * 50]
        long = await namespace.lookup(piece.attributes.ino, Name(b"L" * 50))
        assert long.replicas[0].place == Place(b"L" * 250)
        assert (await namespace.info(long.attributes.ino)).path.endswith(b"/" + b"L" * 50)
        for name in (b"%~41", b"%~", b"x%~o%~o", b"L" * 250, b"y" * 300):
            with pytest.raises(NotFound):
                await namespace.lookup((await namespace.walk(b"/data")).attributes.ino, Name(name))
        del setting.flat.objects[b"L" * 250]
        setting.clock.advance(61)
        assert await names(namespace, b"/data") == [b".hsfs"]
        with pytest.raises(NotFound):
            await namespace.getattr(piece.attributes.ino)

    setting.run(test)


def test_a_dead_backend_costs_its_first_caller_only():
    setting = Setting()
    setting.flat.put(b"k")

    async def test(namespace):
        node = await namespace.walk(b"/data/k")
        setting.world.broken[1] = TimedOut("backend lake", "no answer within 30 s")
        setting.clock.advance(61)
        for _ in range(5):
            with pytest.raises(TimedOut):
                await namespace.walk(b"/data/k")
        assert len(setting.world.lists) == 2  # asked once
        assert namespace.devices()[0].state == "unreachable"
        with pytest.raises(TimedOut):
            await namespace.getattr(node.attributes.ino)
        assert await names(namespace, b"/") == [b"data"]  # what hsfs made needs no backend
        assert len(setting.world.lists) == 2
        setting.clock.advance(4)
        with pytest.raises(TimedOut):
            await namespace.walk(b"/data/k")  # one more try
        assert len(setting.world.lists) == 3
        del setting.world.broken[1]
        setting.clock.advance(4)
        assert (await namespace.walk(b"/data/k")).attributes.ino == node.attributes.ino
        assert namespace.devices()[0].state == "ok"
        setting.clock.advance(61)
        namespace.set_state(1, "unauthorised", "the key is wrong")
        with pytest.raises(Unauthorised, match="the key is wrong"):
            await namespace.walk(b"/data/k")
        namespace.set_state(1, "ok", "")
        assert (await namespace.walk(b"/data/k")).attributes.ino == node.attributes.ino

    setting.run(test)


def test_stale_ok_lets_old_knowledge_stand():
    setting = Setting(backend("lake", "s3://b/p", stale_ok=True))
    setting.flat.put(b"k")

    async def test(namespace):
        fresh = await namespace.walk(b"/data/k")
        assert not fresh.stale
        setting.world.broken[1] = Unavailable("backend lake", "it is gone")
        setting.clock.advance(61)
        stale = await namespace.walk(b"/data/k")
        assert stale.stale
        assert 0 < stale.ttl_s <= 1.0
        assert stale.attributes == fresh.attributes
        assert (await namespace.getattr(fresh.attributes.ino)).stale
        listing = await namespace.list((await namespace.walk(b"/data")).attributes.ino, b"", 10)
        assert [(e.name, e.node.stale) for e in listing.entries] == [(b"k", True)]
        with pytest.raises(Unavailable):
            await namespace.walk(b"/data/unknown")

    setting.run(test)


def test_a_source_that_says_nothing_times_out():
    setting = Setting(backend("lake", "s3://b/p", timeout=0.2))

    async def silent(device, directory):
        await asyncio.Event().wait()
        yield

    setting.world.list = silent

    async def test(namespace):
        data = (await namespace.walk(b"/data")).attributes.ino
        with pytest.raises(TimedOut):
            await namespace.list(data, b"", 10)
        with pytest.raises(TimedOut):
            await namespace.lookup(data, b"x")

    setting.run(test)


def test_a_version_that_may_still_change_is_asked_again_soon():
    setting = Setting(backend("other", "s3://b/p", "/other"), backend("nas", "nfs://h/e"))
    tree = setting.tree
    tree.root.children[b"f"] = tree.make(FILE)
    describe = tree.describe
    strong = False
    tree.describe = lambda *a: msgspec.structs.replace(describe(*a), strong=strong)

    async def test(namespace):
        nonlocal strong
        node = await namespace.walk(b"/data/f")
        assert node.ttl_s <= 2.0
        setting.clock.advance(3)
        strong = True
        tree.write(tree.root.children[b"f"])
        later = await namespace.getattr(node.attributes.ino)
        assert later.version != node.version
        assert later.ttl_s > 2.0

    setting.run(test)


def test_revalidate_asks_unless_it_is_known_already():
    setting = Setting()
    setting.flat.put(b"k")

    async def test(namespace):
        old = await namespace.walk(b"/data/k")
        setting.flat.put(b"k", 9)
        new = await namespace.revalidate(old.attributes.ino, old.version)
        assert new.attributes.size == 9
        before = len(setting.world.stats)
        again = await namespace.revalidate(old.attributes.ino, old.version)
        assert again.version == new.version
        assert len(setting.world.stats) == before
        del setting.flat.objects[b"k"]
        with pytest.raises(NotFound):
            await namespace.revalidate(old.attributes.ino, new.version)

    setting.run(test)


def test_refresh_counts_what_it_sees():
    setting = Setting()
    for key in (b"a/1", b"a/2", b"a/b/3", b"4"):
        setting.flat.put(key)

    async def test(namespace):
        assert await namespace.refresh(ROOT_INO, recursive=False) == 0
        data = (await namespace.walk(b"/data")).attributes.ino
        assert await namespace.refresh(data, recursive=False) == 2
        assert await namespace.refresh(ROOT_INO, recursive=True) == 6
        setting.flat.put(b"a/b/5")
        assert await namespace.refresh(ROOT_INO, recursive=True) == 7
        assert await names(namespace, b"/data/a/b") == [b"3", b"5"]
        file = (await namespace.walk(b"/data/4")).attributes.ino
        assert await namespace.refresh(file, recursive=True) == 1

    setting.run(test)


def test_a_directory_that_vanished_or_became_a_file():
    setting = Setting(backend("other", "s3://b/p", "/other"), backend("nas", "nfs://h/e"))
    root = setting.tree.root.children
    root[b"d"] = setting.tree.make(DIRECTORY)
    root[b"d"].children[b"x"] = setting.tree.make(FILE)

    async def test(namespace):
        ino = (await namespace.walk(b"/data/d")).attributes.ino
        await namespace.walk(b"/data/d/x")
        root[b"d"] = setting.tree.make(FILE)
        setting.clock.advance(61)
        with pytest.raises(NotFound):
            await namespace.list(ino, b"", 10)
        assert (await namespace.walk(b"/data/d")).attributes.type is FILE

    setting.run(test)


def test_pages_of_a_scan_need_no_order_and_old_ones_change_nothing():
    setting = Setting()
    setting.flat.put(b"p/q/deep")
    setting.flat.put(b"top")

    async def test(namespace):
        deep = setting.world.pages(1, Place(b"p/q/"))
        old = setting.world.pages(1, Place(b""))
        assert await namespace.apply(deep) == 1  # its parents are not known yet
        await namespace.apply(setting.world.pages(1, Place(b"")))
        node = await namespace.walk(b"/data/p/q/deep")
        setting.flat.put(b"newer")
        await namespace.apply(setting.world.pages(1, Place(b"")))
        await namespace.apply(old)
        assert await names(namespace, b"/data") == [b"newer", b"p", b"top"]
        assert (await namespace.walk(b"/data/p/q/deep")).attributes.ino == node.attributes.ino
        unknown = DirectoryPage(9, Place(b""), (), as_of_ns=setting.clock.time_ns())
        assert await namespace.apply([unknown]) == 0

    setting.run(test)


def test_devices_keep_number_and_order_by_name():
    setting = Setting(backend("lake", "s3://b/p"), backend("nas", "nfs://h/e"))
    setting.flat.put(b"k", 1)
    setting.tree.root.children[b"k"] = setting.tree.make(FILE)

    async def test(namespace):
        assert (await namespace.walk(b"/data/k")).replicas[0].device == 1
        seq = namespace.seq
        lake, nas = setting.backends
        await namespace.reload([nas, lake])  # the order in which they were added stays
        assert [d.name for d in namespace.devices()] == ["lake", "nas"]
        assert (await namespace.walk(b"/data/k")).replicas[0].device == 1
        await namespace.reload([nas])
        assert (await namespace.walk(b"/data/k")).replicas[0].device == 2
        with namespace._view():
            assert namespace.seq > seq
        await namespace.reload([backend("lake", "s3://b/p", priority=9), nas])
        assert [d.name for d in namespace.devices()] == ["nas", "lake"]
        assert (await namespace.walk(b"/data/k")).replicas[0].device == 2
        await namespace.reload([backend("lake", "s3://b/p", "/elsewhere", priority=9), nas])
        assert await names(namespace, b"/") == [b"data", b"elsewhere"]
        assert await names(namespace, b"/elsewhere") == [b"k"]
        space = namespace.space()
        assert (space.known, space.total) == (False, 1 << 50)

    setting.run(test)


def test_a_backend_whose_url_changes_is_looked_at_anew():
    setting = Setting(backend("data", "s3://b/p"))
    setting.flat.put(b"k")

    async def test(namespace):
        node = await namespace.walk(b"/data/k")
        await namespace.reload([backend("data", "s3://b/p2")])
        setting.flat.put(b"k")
        again = await namespace.walk(b"/data/k")
        assert again.version != node.version
        assert len(setting.world.lists) == 2
        # Directories instead of keys: nothing known of it holds.
        root = setting.tree.root.children
        root[b"k"] = setting.tree.make(DIRECTORY)
        await namespace.reload([backend("data", "nfs://h/e")])
        assert [device.id for device in namespace.devices()] == [2]
        found = await namespace.walk(b"/data/k")
        assert found.attributes.type is DIRECTORY
        assert found.attributes.ino != node.attributes.ino
        seq = setting.store.seq
        await namespace.reload([backend("data", "nfs://h/e")])
        assert setting.store.seq == seq

    setting.run(test)


def test_epochs_and_small_values_survive_a_restart():
    setting = Setting()
    setting.flat.put(b"k")

    async def test(namespace):
        first = namespace.epoch
        await namespace.remember(b"cursor", b"value")
        ino = (await namespace.walk(b"/data/k")).attributes.ino

        async def again():
            async with setting.open() as later:
                assert later.epoch == first + 1
                assert later.uuid == namespace.uuid
                assert later.recall(b"cursor") == b"value"
                await later.remember(b"cursor", None)
                assert later.recall(b"cursor") is None
                assert (await later.walk(b"/data/k")).attributes.ino == ino

        return again

    async def main():
        async with setting.open() as namespace:
            again = await test(namespace)
        await again()

    asyncio.run(main())


def test_invalidations_tell_what_changed():
    setting = Setting()
    setting.flat.put(b"a")
    setting.flat.put(b"b")

    async def test(namespace):
        listed = await names(namespace, b"/data")
        data = (await namespace.walk(b"/data")).attributes.ino
        a = (await namespace.walk(b"/data/a")).attributes.ino
        b = (await namespace.walk(b"/data/b")).attributes.ino
        assert listed == [b"a", b"b"]
        after = setting.store.seq
        setting.flat.put(b"a")
        del setting.flat.objects[b"b"]
        setting.flat.put(b"c")
        setting.clock.advance(61)
        await names(namespace, b"/data")
        watching = namespace.watch(after)
        pushed = {(one.ino, one.name) for one in await anext(watching)}
        await watching.aclose()
        assert pushed == {(a, b""), (b, b""), (data, b"b"), (data, b"c"), (data, b"")}
        after = setting.store.seq
        setting.clock.advance(61)
        await names(namespace, b"/data")  # renewed, nothing to tell
        assert setting.store.seq == after

    setting.run(test)
