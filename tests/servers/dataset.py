"""Training-like data, the same bytes for the same seed: shards, small images, a parquet, odd names.

Bulk bytes are slices of one random pool with a numbered head in every block: made at memory speed,
incompressible, and no two blocks of all files are equal, so that a block at a wrong place shows.
"""

from __future__ import annotations

import os
import random
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_BLOCK = 64 << 10
_POOL_SIZE = 4 << 20
_READ = 1 << 20
_pool = b""


@dataclass(frozen=True, slots=True)
class Entry:
    """What a file has to be: its size in bytes and its xxh3-128 (hex)."""

    size: int
    xxh3_128: str


Manifest = dict[bytes, Entry]
"""Path below the root, with slashes -> what is there."""


@dataclass(frozen=True, slots=True)
class Spec:
    """How much of what; sizes in bytes."""

    shards: int = 4
    shard_size: int = 64 << 20
    small_files: int = 1000
    small_min: int = 20 << 10
    small_max: int = 150 << 10
    parquet_size: int = 24 << 20
    odd_names: bool = True
    empty_files: int = 2


ODD_NAMES: tuple[bytes, ...] = (
    b"with space",
    b" leading and trailing ",
    b"-rf",
    b"~",
    b".hidden",
    b"trailing.",
    b"quote'\"`$(x)",
    b"back\\slash",
    b"star*?[a-z]",
    b"semi;colon&pipe|",
    b"percent%41",
    b"%~41",
    b"%~25%~7E",
    b"plus+equals=",
    b"hash#question?",
    b"colon:at@",
    b"new\nline",
    b"tab\there",
    b"bell\x07",
    b"delete\x7f",
    b"not utf-8 \xff\xfe",
    "ü composed".encode(),
    "u\u0308 decomposed".encode(),
    "日本語".encode(),
    "\U0001f600".encode(),
    "\u202eright to left".encode(),
    b"CON",
    b"n" * 255,
)
"""Names that a POSIX folder holds and that break careless code."""

ODD_KEYS: tuple[str, ...] = (
    "with space",
    " leading and trailing ",
    "-rf",
    "~",
    ".hidden",
    "trailing.",
    "quote'\"`$(x)",
    "percent%41",
    "%~41",
    "plus+equals=",
    "hash#question?",
    "colon:at@",
    "ü",
    "u\u0308",
    "日本語",
    "\U0001f600",
)
"""Odd, but such that every S3 server of ours keeps them as they are."""


def content(seed: int, size: int) -> Iterator[memoryview]:
    """The bytes of one file, in pieces of 64 KiB; a view is good until the next one."""
    global _pool
    if not _pool:
        _pool = random.Random(20261130).randbytes(_POOL_SIZE + _BLOCK)
    rng = random.Random(seed)
    block = bytearray(_BLOCK)
    view = memoryview(block)
    pool = memoryview(_pool)
    for number in range(0, size, _BLOCK):
        at = rng.randrange(_POOL_SIZE)
        view[:] = pool[at : at + _BLOCK]
        struct.pack_into(">QQ", block, 0, seed & (1 << 64) - 1, number)
        yield view[: min(_BLOCK, size - number)]


def image(seed: int, size: int) -> bytes:
    """Bytes that start and end like a JPEG."""
    body = b"".join(content(seed, max(size - 22, 0)))
    jfif = b"\xff\xd8\xff\xe0\x00\x10JFIF\x00\x01\x01\x00\x00\x01\x00\x01\x00\x00"
    return (jfif + body + b"\xff\xd9")[:size]


def small_files(
    count: int, *, seed: int = 1, low: int = 20 << 10, high: int = 150 << 10
) -> Iterator[tuple[str, bytes]]:
    """Relative names such as train/n0003/img_000123.jpg and their bytes, 100 in a folder."""
    rng = random.Random(seed)
    for i in range(count):
        yield (
            f"train/n{i // 100:04d}/img_{i:06d}.jpg",
            image(seed << 32 | i, rng.randint(low, high)),
        )


def make_tree(root: Path, spec: Spec | None = None, *, seed: int = 1) -> Manifest:
    """Writes the data below `root` (made if missing) and gives what is there."""
    spec = spec or Spec()
    manifest: Manifest = {}
    for i in range(spec.shards):
        pieces = content(seed << 40 | i, spec.shard_size)
        _write(root, f"shards/shard-{i:05d}.tar".encode(), pieces, manifest)
    files = small_files(spec.small_files, seed=seed, low=spec.small_min, high=spec.small_max)
    for name, body in files:
        _write(root, name.encode(), [body], manifest)
    if spec.parquet_size:
        _write(root, b"tables/part-0.parquet", _parquet(seed, spec.parquet_size), manifest)
    for i in range(spec.empty_files):
        _write(root, b"empty/%d" % i, [], manifest)
    if spec.odd_names:
        for i, name in enumerate(ODD_NAMES):
            body = content(seed << 48 | i, 100 + 997 * i)
            _write(root, b"odd/" + name, body, manifest)
        _write(root, b"odd/" + b"/".join([b"d"] * 40) + b"/deep", [b"deep"], manifest)
        _write(root, b"odd/" + ODD_NAMES[0] + b".d/" + ODD_NAMES[20], [b"below"], manifest)
    return manifest


def digest(path: bytes | os.PathLike[str] | str) -> Entry:
    """What a file is. Raises OSError."""
    state = xxhash.xxh3_128()
    size = 0
    buffer = bytearray(_READ)
    with open(path, "rb", buffering=0) as f:
        while got := f.readinto(buffer):
            state.update(memoryview(buffer)[:got])
            size += got
    return Entry(size, state.hexdigest())


def files_below(root: Path) -> Iterator[bytes]:
    """Paths of all files below a folder, relative, sorted within each folder."""
    base = os.fsencode(root)
    for folder, folders, names in os.walk(base, onerror=_raise):
        folders.sort()
        for name in sorted(names):
            yield os.path.relpath(os.path.join(folder, name), base)


def scan(root: Path) -> Manifest:
    """The manifest of what is below a folder, by reading all of it."""
    return {path: digest(os.path.join(os.fsencode(root), path)) for path in files_below(root)}


def differences(want: Mapping[bytes, Entry], got: Mapping[bytes, Entry]) -> list[str]:
    """One line for each file that is missing, too much or other; empty = equal."""
    lines = []
    for path in sorted(want.keys() | got.keys()):
        wanted, there = want.get(path), got.get(path)
        if wanted == there:
            continue
        if there is None:
            lines.append(f"missing: {path!r}")
        elif wanted is None:
            lines.append(f"unexpected: {path!r}")
        else:
            lines.append(f"differs: {path!r}: {there} instead of {wanted}")
    return lines


def _raise(error: OSError) -> None:
    raise error


def _parquet(seed: int, size: int) -> Iterator[memoryview | bytes]:
    footer = b"\x15\x04\x19" + b"\x00" * 97
    tail = footer + struct.pack("<I", len(footer)) + b"PAR1"
    yield b"PAR1"
    yield from content(seed << 44 | 1, max(size - len(tail) - 4, 0))
    yield tail


def _write(
    root: Path,
    relative: bytes,
    pieces: Iterator[memoryview | bytes] | Iterator[memoryview] | list[bytes],
    manifest: Manifest,
) -> None:
    path = os.path.join(os.fsencode(root), relative)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    state = xxhash.xxh3_128()
    size = 0
    with open(path, "wb") as f:
        for piece in pieces:
            f.write(piece)
            state.update(piece)
            size += len(piece)
    manifest[relative] = Entry(size, state.hexdigest())
