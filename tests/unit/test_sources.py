"""Replicas, health and versions, with scripted devices in the backends' place."""

import threading
import time

import pytest

from hsfs.core.errors import (
    Corrupt,
    HsfsError,
    Interrupted,
    NotFound,
    StaleVersion,
    TimedOut,
    Unavailable,
)
from hsfs.core.types import (
    Attributes,
    Capabilities,
    DeviceId,
    FileType,
    FileVersion,
    Ino,
    Node,
    Place,
    Replica,
    Version,
)
from hsfs.vfs.contents import Content
from hsfs.vfs.counters import Counters
from hsfs.vfs.devices import Devices
from hsfs.vfs.sources import Sources

CAPS = Capabilities(True, True, True, False, True, 4, 1 << 20)


class Scripted:
    """Answers one entry of `script` per read: bytes, or an error to raise; the last one stays."""

    caps = CAPS

    def __init__(self, *script: bytes | HsfsError) -> None:
        self.script = list(script)
        self.calls = 0

    def read_into(self, place, offset, buf, /, *, expect, interrupt):
        self.calls += 1
        answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(answer, HsfsError):
            raise answer
        data = answer[offset : offset + len(buf)]
        buf[: len(data)] = data
        return len(data)


def node(version: bytes = b"v", *devices: int) -> Node:
    attributes = Attributes(5, FileType.FILE, 0o644, 0, 0, 1, 4, 0, 0, 0)
    replicas = tuple(Replica(device, Place(b"k"), version) for device in devices or (1,))
    return Node(attributes, version=version, replicas=replicas)


class World:
    def __init__(self, *backends: Scripted, now: Node | HsfsError | None = None) -> None:
        self.backends = {DeviceId(n): backend for n, backend in enumerate(backends, start=1)}
        self.now = now
        self.health: list[tuple[int, str]] = []
        self.counters = Counters()
        self.devices = Devices(self.backends, time.monotonic, lambda error: None)
        self.sources = Sources(
            devices=self.devices,
            counters=self.counters,
            revalidate=self.revalidate,
            on_health=lambda state: self.health.append((state.device, state.state)),
            clock=time.monotonic,
        )
        shown = node(b"v", *self.backends)
        self.content = Content(
            FileVersion(Ino(5), Version(b"v"), 4), shown.replicas, readahead=1 << 20
        )
        self.asked = 0

    def revalidate(self, ino: Ino, version: Version) -> Node:
        self.asked += 1
        if isinstance(self.now, HsfsError):
            raise self.now
        assert self.now is not None
        return self.now

    def read(self, since: float | None = None) -> bytes:
        buf = bytearray(4)
        at = time.monotonic() if since is None else since
        self.sources.read(self.content, self.content.replicas, 0, memoryview(buf), at)
        return bytes(buf)


def test_the_next_replica_is_read_when_one_fails():
    world = World(Scripted(Unavailable("", "down")), Scripted(b"good"))
    assert world.read() == b"good"
    assert world.health == [(1, "unreachable"), (2, "ok")]
    assert world.counters.fetched == {2: 4}
    assert not world.devices[DeviceId(1)].healthy


def test_a_device_that_is_not_open_is_passed_over():
    world = World(Scripted(b"good"), Scripted(b"good"))
    del world.backends[DeviceId(1)]
    assert world.read() == b"good"


def test_health_is_told_once_per_change():
    world = World(Scripted(b"good", Unavailable(), Unavailable(), b"good"))
    assert world.read() == b"good"
    for _ in range(2):
        with pytest.raises(Unavailable):
            world.read()
    assert world.read() == b"good"
    assert world.health == [(1, "ok"), (1, "unreachable"), (1, "ok")]


def test_bytes_broken_on_the_way_are_read_once_more():
    world = World(Scripted(Corrupt(), b"good"))
    assert world.read() == b"good"
    world = World(Scripted(Corrupt()))
    with pytest.raises(Corrupt):
        world.read()
    assert world.backends[DeviceId(1)].calls == 2


def test_another_version_is_stale_and_asked_about_once():
    world = World(Scripted(StaleVersion("", "changed")), now=node(b"other"))
    for _ in range(3):
        with pytest.raises(StaleVersion):
            world.read()
    assert world.content.stale
    assert world.asked == 1


@pytest.mark.parametrize("error", [StaleVersion(), NotFound()])
def test_a_source_that_is_gone_is_stale(error):
    world = World(Scripted(error), now=NotFound())
    with pytest.raises(StaleVersion):
        world.read()
    assert world.content.stale


def test_a_shortened_source_is_stale():
    world = World(Scripted(b"go"), now=node(b"other"))
    with pytest.raises(StaleVersion):
        world.read()


def test_the_same_version_in_another_place_is_read_there():
    world = World(Scripted(NotFound()), Scripted(b"good"), now=node(b"v", 2))
    world.content.replicas = node(b"v", 1).replicas
    assert world.read() == b"good"
    assert not world.content.stale


def test_a_source_that_keeps_lying_is_stale_in_the_end():
    world = World(Scripted(StaleVersion()), now=node(b"v"))
    with pytest.raises(StaleVersion):
        world.read()
    assert world.asked == 1


def test_who_waited_too_long_behind_a_stalled_device_fails_at_once():
    world = World(Scripted(b"good"))
    world.devices.configure(1, timeout_s=0.05, patient=False)
    state = world.devices.state(1)
    state.progress = time.monotonic() - 10
    with pytest.raises(TimedOut):
        world.read(since=time.monotonic() - 5)
    assert world.backends[DeviceId(1)].calls == 0
    assert world.read() == b"good"


def test_a_patient_device_is_waited_for():
    world = World(Scripted(TimedOut(), Unavailable(), b"good"))
    world.devices.configure(1, timeout_s=30.0, patient=True)
    assert world.read() == b"good"


def test_the_end_interrupts_who_is_patient():
    world = World(Scripted(Unavailable()))
    world.devices.configure(1, timeout_s=30.0, patient=True)
    outcome = []

    def reader() -> None:
        try:
            world.read()
        except HsfsError as error:
            outcome.append(error)

    thread = threading.Thread(target=reader)
    thread.start()
    while not world.backends[DeviceId(1)].calls:
        time.sleep(0.005)
    world.sources.close()
    thread.join(60)
    assert isinstance(outcome[0], (Interrupted, Unavailable))
