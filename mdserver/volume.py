"""The backends of a volume as the namespace uses them: facts in memory, records in the store.

A backend keeps its number and its place in the order for ever under its name; one that the volume's
definition no longer names is hidden, not forgotten. Directories that lead to `at` exist whether
the backend answers or not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from hsfs.core.errors import ConfigError, NotFound
from hsfs.core.names import Dialect, Form, show
from hsfs.core.ports import Device
from hsfs.core.types import ROOT_INO, DeviceId, FileType, Ino, Space
from hsfs.core.urls import scheme_of, split_url_options
from hsfs.mdserver.draft import Draft
from hsfs.mdserver.schema import (
    SYNTHETIC,
    Binding,
    Coverage,
    DeviceRecord,
    Inode,
    after_prefix,
    decode_candidates,
    decode_coverage,
    decode_device,
    decode_inode,
    dentry_prefix,
    device_key,
    directory_inode,
    encode,
    inode_key,
)
from hsfs.mdserver.store import Changes, Snapshot

Option = str | int | float | bool

UNKNOWN_SPACE = Space(1 << 50, 1 << 50, 1 << 50, known=False)


class BackendDefinition(Protocol):
    """A backend as the volume file or the command line defines it; options are normalised
    (seconds, bytes, integers)."""

    @property
    def name(self) -> str: ...
    @property
    def url(self) -> str: ...
    @property
    def at(self) -> str: ...
    @property
    def options(self) -> Mapping[str, Option]: ...


@dataclass(frozen=True, slots=True)
class Defaults:
    """Attributes of what no backend describes: the mounter's ids."""

    uid: int = 0
    gid: int = 0
    file_mode: int = 0o644
    dir_mode: int = 0o755

    @classmethod
    def of_process(cls) -> Defaults:
        """The ids of this process: an embedded server runs as the mounter."""
        return cls(os.getuid(), os.getgid())


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What the namespace needs to know of one backend. `order`: lower wins a name."""

    id: DeviceId
    name: str
    url: str
    at: str
    ino: Ino
    order: tuple[int, int]
    options: Mapping[str, Option]
    flat: bool
    freshness_ns: int
    timeout_s: float
    stale_ok: bool
    uid: int
    gid: int
    file_mode: int
    dir_mode: int

    @property
    def dialect(self) -> Dialect:
        """How its names are shown."""
        return Dialect.FLAT if self.flat else Dialect.TREE


@dataclass(frozen=True, slots=True)
class _Health:
    state: str = "unknown"
    why: str = ""
    as_of_ns: int = 0
    scan_state: str = ""
    scanned: int = 0
    space: Space | None = None


class Volume:
    """The active backends by number. Read from any thread, changed on the loop thread only."""

    def __init__(self, defaults: Defaults) -> None:
        self.defaults = defaults
        self._facts: dict[int, DeviceFacts] = {}
        self._health: dict[int, _Health] = {}
        self._describers: dict[int, DeviceFacts] = {}
        self.active: frozenset[int] = frozenset((SYNTHETIC,))

    def set_devices(self, facts: Sequence[DeviceFacts]) -> None:
        """The backends that are shown from now on."""
        self._facts = {one.id: one for one in facts}
        self.active = frozenset((SYNTHETIC, *self._facts))
        self._describers = {one.ino: one for one in reversed(list(self)) if not one.flat}

    def get(self, device: int) -> DeviceFacts | None:
        """Facts of an active backend."""
        return self._facts.get(device)

    def device(self, device: int) -> DeviceFacts:
        """Facts of an active backend. Raises NotFound."""
        facts = self._facts.get(device)
        if facts is None:
            raise NotFound(f"backend {device}", "the volume has no such backend")
        return facts

    def describer(self, ino: int) -> DeviceFacts | None:
        """The backend whose root gives a directory its attributes: the first file system there."""
        return self._describers.get(ino)

    def __iter__(self) -> Iterator[DeviceFacts]:
        return iter(sorted(self._facts.values(), key=lambda one: one.order))

    def set_state(self, device: int, state: str, why: str, now_ns: int) -> bool:
        """The backend answered (`ok`) or did not; whether that is news."""
        old = self._health.get(device, _Health())
        if old.state == state == "ok" and now_ns - old.as_of_ns < 1_000_000_000:
            return False
        as_of_ns = now_ns if state == "ok" else old.as_of_ns
        self._health[device] = replace(old, state=state, why=why, as_of_ns=as_of_ns)
        return old.state != state

    def set_scan(self, device: int, state: str, scanned: int) -> None:
        """How far assimilation is."""
        old = self._health.get(device, _Health())
        self._health[device] = replace(old, scan_state=state, scanned=scanned)

    def set_space(self, device: int, space: Space) -> None:
        """What the backend says about room."""
        old = self._health.get(device, _Health())
        self._health[device] = replace(old, space=space)

    def state(self, device: int) -> str:
        """ok | unreachable | unauthorised | missing | unknown."""
        return self._health.get(device, _Health()).state

    def devices(self) -> list[Device]:
        """All active backends, first in order first, without secrets."""
        out = []
        for facts in self:
            health = self._health.get(facts.id, _Health())
            scan_state = health.scan_state
            if not scan_state and facts.options.get("scan") == "lazy":
                scan_state = "lazy"
            out.append(
                Device(
                    facts.id, facts.name, facts.url, facts.at, dict(facts.options),
                    health.state, health.why, health.as_of_ns, health.scanned, scan_state,
                )
            )  # fmt: skip
        return out

    def space(self) -> Space:
        """The sum of what backends report; 1 PiB, not `known`, where none does."""
        known = [
            health.space
            for device, health in self._health.items()
            if device in self._facts and health.space is not None and health.space.known
        ]
        if not known:
            return UNKNOWN_SPACE
        return Space(
            sum(one.total for one in known),
            sum(one.free for one in known),
            sum(one.available for one in known),
            sum(one.files for one in known),
            sum(one.files_free for one in known),
        )


def load_devices(
    snapshot: Snapshot,
    definitions: Sequence[BackendDefinition],
    defaults: Defaults,
    now_ns: int,
) -> Changes:
    """A transaction: gives every definition its record and its directory; the result is the list
    of DeviceFacts. Raises ConfigError for a place that can't be a directory."""
    draft = Draft(snapshot)
    if draft.get(inode_key(ROOT_INO)) is None:
        draft.put_inode(ROOT_INO, directory_inode((Binding(SYNTHETIC, 0, b""),), now_ns))
    known: dict[str, tuple[int, DeviceRecord]] = {}
    for key, value in draft.range(b"V", after_prefix(b"V")):
        record = decode_device(value)
        known[record.name] = (int.from_bytes(key[1:], "big"), record)
    facts = []
    before = {name for name in known if "\0" not in name}
    for at, definition in enumerate(definitions):
        number, old = known.get(definition.name, (0, None))
        if old is not None and old.url != definition.url:
            draft.note(0)
            if _is_flat(old.url, {}) == _is_flat(definition.url, definition.options):
                _relist(draft, number)
            else:  # another kind of names: nothing known of it holds
                retired = msgspec.structs.replace(old, name=f"{old.name}\0{number}")
                draft.put(device_key(number), encode(retired))
                known[retired.name] = (number, retired)
                old = None
        priority = definition.options.get("priority")
        if old is None:
            number = max((one for one, _ in known.values()), default=0) + 1
            order = int(priority) if priority is not None else _next_order(known, at)
        else:
            order = int(priority) if priority is not None else old.priority
        ino = _directory_at(draft, definition, now_ns)
        _bind(draft, ino, number, None if old is None or old.ino == ino else old.ino)
        record = DeviceRecord(1, definition.name, definition.url, definition.at, order, ino)
        if record != old:
            draft.put(device_key(number), encode(record))
            draft.note(0)
        known[definition.name] = (number, record)
        facts.append(device_facts(number, record, definition.options, defaults))
    if before != {definition.name for definition in definitions}:
        draft.note(0)  # something is hidden or shown again
    return draft.changes(facts, now_ns)


def device_facts(
    number: int, record: DeviceRecord, options: Mapping[str, Option], defaults: Defaults
) -> DeviceFacts:
    """Facts from a record and options."""

    def whole(name: str, default: int) -> int:
        return int(options.get(name, default))

    return DeviceFacts(
        DeviceId(number),
        record.name,
        record.url,
        record.at,
        Ino(record.ino),
        (record.priority, number),
        dict(options),
        _is_flat(record.url, options),
        int(float(options.get("freshness", 60.0)) * 1e9),
        float(options.get("timeout", 30.0)),
        bool(options.get("stale_ok", False)),
        whole("uid", defaults.uid),
        whole("gid", defaults.gid),
        whole("file_mode", defaults.file_mode),
        whole("dir_mode", defaults.dir_mode),
    )


def _is_flat(url: str, options: Mapping[str, Option]) -> bool:
    """Whether the backend has keys instead of directories."""
    scheme = scheme_of(url)
    if scheme == "memory":
        flat = {**split_url_options(url)[1], **options}.get("flat", False)
        return flat in (True, "true", 1)
    return scheme not in ("file", "nfs")


def _relist(draft: Draft, device: int) -> None:
    """Everything that is known of a backend is due: its URL names another place now."""
    for key, value in draft.range(b"L", after_prefix(b"L")):
        if key[9:] == device.to_bytes(2, "big"):
            draft.put(key, encode(Coverage(1, 0, decode_coverage(value).entries)))


def _next_order(known: Mapping[str, tuple[int, DeviceRecord]], at: int) -> int:
    return max([record.priority + 1 for _, record in known.values()], default=at)


def _directory_at(draft: Draft, definition: BackendDefinition, now_ns: int) -> int:
    ino = int(ROOT_INO)
    for part in definition.at.encode("utf-8", "surrogateescape").split(b"/"):
        if not part:
            continue
        names = show(part, Form.SEGMENT, dialect=Dialect.TREE, at_root=ino == ROOT_INO)
        if names != (part,) or part in (b".", b".."):
            raise ConfigError(f"backend {definition.name}", f"at = {definition.at!r} can't be made")
        ino = _synthetic(draft, ino, part, now_ns)
    return ino


def _synthetic(draft: Draft, parent: int, name: bytes, now_ns: int) -> int:
    """The directory `name`, which exists from now on without any backend."""
    key = dentry_prefix(parent) + name
    value = draft.get(key)
    candidates = decode_candidates(value) if value is not None else (1,)
    binding = Binding(SYNTHETIC, parent, name)
    for at in range(1, len(candidates), 3):
        if candidates[at + 2] == FileType.DIRECTORY:
            ino = candidates[at + 1]
            if SYNTHETIC not in candidates[1::3]:
                old = draft.get(inode_key(ino))
                assert old is not None, "a dentry's inode exists"
                record = decode_inode(old)
                bindings = (*record.bindings, binding)
                draft.put_inode(ino, _with_bindings(record, bindings))
                draft.put(key, encode((*candidates, SYNTHETIC, ino, int(FileType.DIRECTORY))))
            return ino
    ino = draft.new_ino()
    draft.put_inode(ino, directory_inode((binding,), now_ns))
    draft.put(key, encode((*candidates, SYNTHETIC, ino, int(FileType.DIRECTORY))))
    draft.note(parent)
    draft.note(parent, name)
    return ino


def _bind(draft: Draft, ino: int, device: int, before: int | None) -> None:
    """The directory is the root of the device from now on, and `before` no longer."""
    if before is not None:
        value = draft.get(inode_key(before))
        if value is not None:
            record = decode_inode(value)
            kept = tuple(b for b in record.bindings if (b.device, b.directory) != (device, 0))
            draft.put_inode(before, _with_bindings(record, kept))
            draft.note(0)
    value = draft.get(inode_key(ino))
    assert value is not None, "made above"
    record = decode_inode(value)
    if not any((b.device, b.directory) == (device, 0) for b in record.bindings):
        draft.put_inode(ino, _with_bindings(record, (*record.bindings, Binding(device, 0, b""))))


def _with_bindings(record: Inode, bindings: tuple[Binding, ...]) -> Inode:
    return msgspec.structs.replace(record, bindings=bindings, change=record.change + 1)
