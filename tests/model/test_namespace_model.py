"""The namespace against its sources: random native changes, partial looks, late pages.

After a recursive refresh the tree is exactly what the sources hold, merged by the rules; inodes are
kept while a thing exists and never used again; and at all times a client that caches all it is told
and forgets what the journal says never holds anything that the store would answer differently.
"""

import asyncio
import contextlib
from types import SimpleNamespace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hsfs.core.errors import NotADirectory, NotFound
from hsfs.core.names import Dialect, Form, show
from hsfs.core.types import ROOT_INO, FileType, Ino, Name, Place
from hsfs.mdserver.namespace import Namespace
from hsfs.mdserver.reaper import reap
from hsfs.mdserver.store.memory import MemoryStore
from hsfs.mdserver.tree import View
from hsfs.mdserver.volume import Defaults
from tests.model.sources import FakeClock, Flat, Tree, World
from tests.model.store_invariants import check, unreachable

LONG = b"L" * 230
FLAT_SEGMENTS = [
    b"a",
    b"a",
    b"b",
    b"m",
    b"a.x",
    b"a-",
    b"",
    b".",
    b"..",
    b"%~m",
    b".hsfs",
    LONG,
    LONG + b"2",
]
TREE_NAMES = [b"a", b"b", b"c", b"a.x", b"%~o", b".hsfs", b"%~" * 100]
KEYS = st.lists(st.sampled_from(FLAT_SEGMENTS), min_size=1, max_size=3).map(b"/".join)
FLAT_KEYS = st.one_of(KEYS, KEYS.map(lambda key: key + b"/")).filter(bool)
BACKENDS = [
    SimpleNamespace(name="tree", url="file:///t", at="/m", options={"freshness": 60.0}),
    SimpleNamespace(name="flat", url="s3://b/f", at="/m", options={"freshness": 60.0}),
    SimpleNamespace(name="root", url="s3://b/r", at="/", options={"freshness": 5.0}),
]


def put_shown(tree, names, what):
    for piece in names[:-1]:
        tree = tree.setdefault(piece, ("d", {}))[1]
    tree[names[-1]] = what


def expected(places, at_root=False):
    """The merged tree: name -> ("d", children) | ("f", device, identity, version). `places`: the
    (device, source, native directory) merged here, first in order first."""
    merged = {}
    layers = []
    for device, source, key in places:
        layer = {}
        entries = source.entries(key)
        prefixes = {e.name for e in entries if e.type is FileType.DIRECTORY}
        for entry in entries:
            dialect = Dialect.FLAT if source.flat else Dialect.TREE
            form = Form.SEGMENT
            if source.flat and entry.type is not FileType.DIRECTORY:
                if not entry.name:
                    form = Form.MARKER
                elif entry.name in prefixes:
                    form = Form.BESIDE
            names = show(entry.name, form, dialect=dialect, at_root=at_root)
            if entry.type is FileType.DIRECTORY:
                put_shown(layer, names, ("D", [(device, source, entry.place.key)]))
            else:
                identity = entry.identity or entry.place.key
                put_shown(layer, names, ("f", device, identity, entry.version))
        layers.append(layer)
    merge_layers(merged, layers)
    return merged


def merge_layers(merged, layers):
    names = {name for layer in layers for name in layer}
    for name in names:
        found = [layer[name] for layer in layers if name in layer]
        pieces = [one[1] for one in found if one[0] == "d"]
        directories = [place for one in found if one[0] == "D" for place in one[1]]
        if pieces:
            merged[name] = ("d", {})
            merge_layers(merged[name][1], pieces)
        elif directories:
            merged[name] = ("d", expected(directories))
        else:
            merged[name] = found[0]


class InlineCommitter:
    """A committer without a thread: threads cost more than all else that the model does."""

    def __init__(self, store):
        self.store = store

    async def submit(self, decide):
        outcome = self.store.transact([decide])[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome.result


class NamespaceMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.runner = asyncio.Runner()
        self.clock = FakeClock()
        self.tree, self.flat, self.root = Tree(), Flat(), Flat()
        self.world = World({1: self.tree, 2: self.flat, 3: self.root}, self.clock)
        self.store = MemoryStore()
        self.committer = InlineCommitter(self.store)
        self.namespace = Namespace(
            self.store,
            self.committer,
            SimpleNamespace(backends=BACKENDS),
            self.world,
            defaults=Defaults(1, 2),
            clock=self.clock,
        )
        self.run(self.namespace.__aenter__())
        self.seq = 0
        self.cache = {}
        self.late = []
        self.inos = {}  # ino -> what it is, for ever
        self.kept = {}  # thing -> ino at the last refresh
        self.broken_keys = set()  # objects that were gone since, perhaps unseen

    def run(self, what):
        return self.runner.run(what)

    def teardown(self):
        try:
            self.everything_is_found()
            for _ in range(5):  # what is below a dropped directory has its own time to be found
                self.clock.advance(100_000)
                while self.store.transact([self.reap()])[0].result:
                    pass
            check(self.store, self.namespace._volume)
            assert not unreachable(self.store, self.namespace._volume)
        finally:
            self.run(self.namespace.__aexit__(None, None, None))
            self.runner.close()

    def reap(self, **grace):
        now_ns = self.clock.time_ns()
        return lambda view: reap(view, now_ns, **grace)

    # Native changes

    @rule(key=FLAT_KEYS, size=st.integers(0, 2), where=st.booleans())
    def put_object(self, key, size, where):
        (self.flat if where else self.root).put(key, size)

    @rule(data=st.data(), where=st.booleans())
    def delete_objects(self, data, where):
        source = self.flat if where else self.root
        if source.objects:
            key = data.draw(st.sampled_from(sorted(source.objects)))
            if data.draw(st.booleans()):  # all below its first segment
                lead = key.partition(b"/")[0] + b"/"
                keys = [one for one in source.objects if one.startswith(lead)] or [key]
            else:
                keys = [key]
            for one in keys:
                del source.objects[one]
                self.broken_keys.add((2 if where else 3, one))

    @rule(data=st.data(), name=st.sampled_from(TREE_NAMES), directory=st.booleans())
    def make_in_tree(self, data, name, directory):
        _, at = data.draw(st.sampled_from(self.tree.directories()))
        if name not in at.children:
            kind = FileType.DIRECTORY if directory else FileType.FILE
            at.children[name] = self.tree.make(kind)
            at.mtime_ns += 1

    @rule(data=st.data())
    def write_in_tree(self, data):
        files = self.tree.files()
        if files:
            at, name = data.draw(st.sampled_from(files))
            self.tree.write(at.children[name])

    @rule(data=st.data())
    def remove_in_tree(self, data):
        _, at = data.draw(st.sampled_from(self.tree.directories()))
        if at.children:
            child = at.children.pop(data.draw(st.sampled_from(sorted(at.children))))
            child.links -= 1
            at.mtime_ns += 1

    @rule(data=st.data(), name=st.sampled_from(TREE_NAMES))
    def rename_in_tree(self, data, name):
        directories = self.tree.directories()
        _, at = data.draw(st.sampled_from(directories))
        if not at.children:
            return
        old = data.draw(st.sampled_from(sorted(at.children)))
        thing = at.children[old]
        _, to = data.draw(st.sampled_from(directories))
        below = [one for _, one in Subtree(thing).directories()]
        if any(one is to for one in below):
            return
        del at.children[old]
        victim = to.children.get(name)
        if victim is not None:
            victim.links -= 1
        to.children[name] = thing
        at.mtime_ns += 1
        to.mtime_ns += 1

    @rule(data=st.data(), name=st.sampled_from(TREE_NAMES))
    def link_in_tree(self, data, name):
        files = self.tree.files()
        if files:
            at, old = data.draw(st.sampled_from(files))
            _, to = data.draw(st.sampled_from(self.tree.directories()))
            if name not in to.children:
                to.children[name] = at.children[old]
                to.children[name].links += 1

    # Looks

    @rule(seconds=st.sampled_from([0.0, 1.0, 6.0, 61.0]))
    def time_passes(self, seconds):
        self.clock.advance(seconds)

    @rule(size=st.sampled_from([1, 2, 3, 1000]), unordered=st.booleans())
    def pages_become(self, size, unordered):
        self.world.page_size = size
        self.world.unordered = unordered

    @rule(data=st.data())
    def look_around(self, data):
        """Walk down some known names, list at the end."""

        async def look():
            ino = ROOT_INO
            for _ in range(data.draw(st.integers(1, 5))):
                names = self.known_names(ino)
                if not names:
                    break
                name = data.draw(st.sampled_from(names))
                node = await self.namespace.lookup(ino, Name(name))
                self.cache[(int(ino), name)] = node.attributes.ino
                self.cache[node.attributes.ino] = (node.change, node.version)
                if node.attributes.type is not FileType.DIRECTORY:
                    await self.namespace.getattr(Ino(node.attributes.ino))
                    return
                ino = Ino(node.attributes.ino)
            await self.list_all(ino)

        with contextlib.suppress(NotFound, NotADirectory):
            self.run(look())

    @rule(data=st.data())
    def ask_again(self, data):
        known = sorted(self.inos)
        if known:
            ino = data.draw(st.sampled_from(known))
            try:
                node = self.run(self.namespace.getattr(Ino(ino)))
                self.run(self.namespace.revalidate(Ino(ino), node.version))
            except NotFound:
                pass

    @rule(data=st.data())
    def a_page_is_under_way(self, data):
        """A scan has read a directory and will report it later."""
        device = data.draw(st.sampled_from([1, 2, 3]))
        if device == 1:
            key = data.draw(st.sampled_from([key for key, _ in self.tree.directories()]))
            handle = b"h" + self.tree.find(key).fileid.to_bytes(8, "big") if key else b""
        else:
            objects = self.world.sources[device].objects
            leads = {b""} | {k[: i + 1] for k in objects for i in range(len(k)) if k[i] == 47}
            key, handle = data.draw(st.sampled_from(sorted(leads))), b""
        self.late += self.world.pages(device, Place(key, handle))

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def a_page_arrives(self, data):
        at = data.draw(st.integers(0, len(self.late) - 1))
        self.run(self.namespace.apply([self.late.pop(at)]))

    @rule()
    def garbage_goes(self):
        self.store.transact([self.reap(grace_s=1_000_000)])

    @rule()
    def everything_is_found(self):
        """The tree converges to the truth."""
        self.clock.advance(0.001)
        self.late.clear()  # a refresh overtakes them; the inode rules below count on it
        self.run(self.namespace.refresh(ROOT_INO, True))
        # A directory that moved may have been listed before it arrived.
        self.clock.advance(0.001)
        self.run(self.namespace.refresh(ROOT_INO, True))
        found = {}
        tree = self.run(self.whole(ROOT_INO, found))
        assert tree == self.truth()
        for thing, ino in found.items():
            assert self.inos.setdefault(ino, thing) == thing
            before = self.kept.get(thing)
            if before is not None and thing not in self.broken_keys:
                assert ino == before, thing
        existing = self.existing()
        for thing, ino in self.kept.items():
            if thing not in existing:  # not only hidden by another backend's name
                self.inos[ino] = ("gone", thing)
        self.kept = found
        self.broken_keys.clear()

    def truth(self):
        """What the mount shows: the third backend, and below it /m, where two others are."""
        tree = expected([(3, self.root, b"")], at_root=True)
        merged = [(1, self.tree, b""), (2, self.flat, b"")]
        if any(key.startswith(b"m/") for key in self.root.objects):
            merged.append((3, self.root, b"m/"))
        tree[b"m"] = ("d", expected(merged))
        return tree

    def existing(self):
        """All files that the sources hold, seen or hidden."""
        files = {(2, key) for key in self.flat.objects} | {(3, key) for key in self.root.objects}
        for at, name in self.tree.files():
            files.add((1, self.tree.describe(name, name, at.children[name]).identity))
        return files

    async def whole(self, ino, found):
        out = {}
        for entry in await self.list_all(ino):
            node = entry.node
            assert await self.namespace.lookup(ino, Name(entry.name)) is not None
            if node.attributes.type is FileType.DIRECTORY:
                out[entry.name] = ("d", await self.whole(Ino(node.attributes.ino), found))
                continue
            (replica,) = node.replicas
            source = self.world.sources[replica.device]
            if source.flat:
                version, identity = source.objects[replica.place.key][0], replica.place.key
            else:
                stat = source.stat(replica.place)
                version, identity = stat.version, stat.identity
            assert version == node.version == replica.version
            thing = (replica.device, identity)
            assert found.setdefault(thing, node.attributes.ino) == node.attributes.ino
            out[entry.name] = ("f", *thing, node.version)
        return out

    async def list_all(self, ino):
        out, after = [], b""
        while True:
            page = await self.namespace.list(ino, Name(after), 3)
            assert page.entries or not page.more
            out += page.entries
            if not page.more:
                break
            after = page.entries[-1].name
        names = [entry.name for entry in out]
        assert len(set(names)) == len(names)
        for entry in out:
            self.cache[(int(ino), entry.name)] = entry.node.attributes.ino
            self.cache[entry.node.attributes.ino] = (entry.node.change, entry.node.version)
        self.cache[("list", int(ino))] = sorted(names)
        return out

    def known_names(self, ino):
        with self.store.snapshot() as snapshot:
            prefix = b"D" + ino.to_bytes(8, "big")
            return [key[9:] for key, _ in snapshot.range(prefix, prefix + b"\xff" * 300)]

    @initialize()
    def begin(self):
        self.tree.root.children[b"a"] = self.tree.make(FileType.FILE)
        self.flat.put(b"a/a", 1)

    # At all times

    @invariant()
    def the_store_is_whole(self):
        check(self.store, self.namespace._volume)

    @invariant()
    def caches_hold_only_what_the_store_would_say(self):
        async def pushed():
            after = self.seq
            watching = self.namespace.watch(after)
            while after < self.store.seq:
                records = await anext(watching)
                for one in records:
                    if one.ino == 0:
                        self.cache.clear()
                    elif one.name:
                        self.cache.pop((one.ino, one.name), None)
                    else:
                        self.cache.pop(one.ino, None)
                        self.cache.pop(("list", one.ino), None)
                after = records[-1].seq
            await watching.aclose()
            return after

        self.seq = self.run(pushed())
        with self.store.snapshot() as snapshot:
            view = View(snapshot, self.namespace._volume)
            for key, value in self.cache.items():
                try:
                    if isinstance(key, int):
                        record = view.require(key)
                        view.path(key)
                        view.node(key, record, 0, 0.0)
                        now = (record.change, record.version)
                    elif key[0] == "list":
                        record = view.directory(key[1])
                        devices = view.devices(*view.owner(key[1], record)[:2])
                        now = sorted(n for n, _ in view.children(key[1], b"", b"", devices))
                    else:
                        child = view.child(*key)
                        now = None if child is None else child[0]
                except (NotFound, NotADirectory):
                    if self.below_something_gone(view, key):
                        continue
                    raise
                assert now == value, (key, value, now)

    def below_something_gone(self, view, key):
        """Whether no path leads to it: the client has lost a dentry above it."""
        ino = key if isinstance(key, int) else key[1] if key[0] == "list" else key[0]
        try:
            view.path(ino)
        except NotFound:
            return True
        return False


class Subtree(Tree):
    def __init__(self, thing):
        self.root = thing


TestNamespace = NamespaceMachine.TestCase
