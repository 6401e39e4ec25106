"""XDR (RFC 4506) as far as ONC RPC and NFS need it: big-endian words, padded opaques.

`Packer` collects into one bytearray; `Unpacker` walks over a buffer without copying it and raises
ProtocolError for anything that the buffer does not hold, so that callers never see struct.error.
"""

from __future__ import annotations

import struct

from hsfs.core.errors import ProtocolError

_U32 = struct.Struct(">I")
_U64 = struct.Struct(">Q")
_PADDING = (b"", b"\0\0\0", b"\0\0", b"\0")


def padded(length: int) -> int:
    """Bytes that an opaque of `length` takes on the wire, without its length word."""
    return (length + 3) & ~3


def opaque(data: bytes) -> bytes:
    """A variable-length opaque: length word, data, padding."""
    return _U32.pack(len(data)) + data + _PADDING[len(data) & 3]


class Packer:
    """Collects XDR values; `data` is what was packed so far."""

    __slots__ = ("data",)

    def __init__(self) -> None:
        self.data = bytearray()

    def u32(self, value: int) -> Packer:
        """An unsigned (or enum) word."""
        self.data += _U32.pack(value)
        return self

    def u64(self, value: int) -> Packer:
        """An unsigned hyper."""
        self.data += _U64.pack(value)
        return self

    def boolean(self, value: bool) -> Packer:
        """A bool word."""
        return self.u32(1 if value else 0)

    def opaque(self, data: bytes) -> Packer:
        """A variable-length opaque or string."""
        self.data += opaque(data)
        return self

    def fixed(self, data: bytes) -> Packer:
        """A fixed-length opaque: no length word."""
        self.data += data + _PADDING[len(data) & 3]
        return self

    def raw(self, data: bytes | bytearray) -> Packer:
        """Bytes that are XDR already."""
        self.data += data
        return self


class Unpacker:
    """Reads XDR values from `data`, starting at `position`."""

    __slots__ = ("data", "position")

    def __init__(self, data: bytes | bytearray | memoryview, position: int = 0) -> None:
        self.data = memoryview(data)
        self.position = position

    @property
    def left(self) -> int:
        """Bytes that were not read yet."""
        return len(self.data) - self.position

    def skip(self, length: int) -> int:
        """Step over `length` bytes (and padding); the position that they began at."""
        start = self.position
        end = start + padded(length)
        if end > len(self.data):
            raise ProtocolError("XDR", f"{length} bytes announced, {self.left} left")
        self.position = end
        return start

    def u32(self) -> int:
        """An unsigned word."""
        return int(_U32.unpack_from(self.data, self.skip(4))[0])

    def u64(self) -> int:
        """An unsigned hyper."""
        return int(_U64.unpack_from(self.data, self.skip(8))[0])

    def boolean(self) -> bool:
        """A bool word. Raises ProtocolError for anything but 0 and 1."""
        value = self.u32()
        if value > 1:
            raise ProtocolError("XDR", f"{value} where a boolean belongs")
        return value == 1

    def opaque(self, limit: int) -> bytes:
        """A copy of a variable-length opaque of at most `limit` bytes."""
        length = self.u32()
        if length > limit:
            raise ProtocolError("XDR", f"an opaque of {length} bytes where {limit} are allowed")
        start = self.skip(length)
        return bytes(self.data[start : start + length])

    def fixed(self, length: int) -> bytes:
        """A copy of a fixed-length opaque."""
        start = self.skip(length)
        return bytes(self.data[start : start + length])

    def unpack(self, layout: struct.Struct) -> tuple[int, ...]:
        """Several numbers at once (a layout of whole words)."""
        return layout.unpack_from(self.data, self.skip(layout.size))
