"""Attributes, extended attributes and the space of the file system."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress

import trio

from hsfs.core.errors import HsfsError, NoAttribute, StaleHandle
from hsfs.core.ports import ChunkStore, Device, Mds
from hsfs.core.types import FileType, FileVersion, Ino, Node, Space, Version
from hsfs.vfs.inodes import Inodes
from hsfs.vfs.names import Names

PREFIX = b"user.hsfs."
_SPACE_S = 2.0
_PIB = 1 << 50
UNKNOWN_SPACE = Space(_PIB, _PIB, _PIB, 0, 0, known=False)


class Attrs:
    """See the module; `*_now` as in `Names`."""

    def __init__(
        self,
        mds: Mds,
        store: ChunkStore,
        inodes: Inodes,
        names: Names,
        devices: Mapping[int, Device],
        clock: Callable[[], float],
    ) -> None:
        self._mds = mds
        self._store = store
        self._inodes = inodes
        self._names = names
        self._devices = devices
        self._clock = clock
        self._space = UNKNOWN_SPACE
        self._space_until = 0.0

    def getattr_now(self, ino: Ino) -> Node | None:
        """Raises StaleHandle when the content is not the one that `ino` was entered with: the
        kernel then looks the name up again."""
        node = self._names.node_now(ino)
        if node is not None:
            self.check(node)
        return node

    async def getattr(self, ino: Ino) -> Node:
        """Raises NotFound, StaleHandle, Unavailable."""
        node = await self._names.node(ino)
        self.check(node)
        return node

    def check(self, node: Node) -> None:
        """Raises StaleHandle, as `getattr_now`."""
        if node.attributes.type is not FileType.FILE:
            return
        if self._inodes.moved_on(node):
            raise StaleHandle("", "the file's content was replaced")

    async def space(self) -> Space:
        """Never waits for long: what was last known, if need be."""
        if self._clock() < self._space_until:
            return self._space
        with trio.move_on_after(_SPACE_S):
            with suppress(HsfsError):
                self._space = await self._mds.space()
        self._space_until = self._clock() + _SPACE_S
        return self._space

    async def xattr(self, ino: Ino, name: bytes) -> bytes:
        """Values of `user.hsfs.*`. Raises NoAttribute, NotFound."""
        if not name.startswith(PREFIX):
            raise NoAttribute("", "no such attribute")
        node = await self._names.node(ino)
        key = name[len(PREFIX) :]
        attributes = node.attributes
        if key == b"ino":
            return b"%d" % attributes.ino
        if key == b"as_of":
            return b"%d.%09d" % divmod(node.as_of_ns, 1_000_000_000)
        if key == b"stale":
            return b"1" if node.stale else b"0"
        if attributes.type is FileType.FILE:
            if key == b"version":
                return node.version
            if key == b"cached":
                return b"%d" % self.cached_bytes(node)
            if key == b"replicas":
                return json.dumps(self.replicas(node)).encode()
        raise NoAttribute("", "no such attribute")

    def cached_bytes(self, node: Node) -> int:
        """Verified bytes of a file in Tier 0."""
        attributes = node.attributes
        return self._store.cached_bytes(
            FileVersion(Ino(attributes.ino), Version(node.version), attributes.size)
        )

    def replicas(self, node: Node) -> list[dict[str, str]]:
        """Replicas as `info` shows them."""
        shown = []
        for replica in node.replicas:
            device = self._devices.get(replica.device)
            shown.append(
                {
                    "backend": device.name if device else f"device {replica.device}",
                    "key": replica.place.key.decode(errors="surrogateescape"),
                    "version": replica.version.decode(errors="backslashreplace"),
                    "state": "proven" if replica.proven else "unproven",
                }
            )
        return shown
