"""What has to hold in the store between any two transactions (see mdserver/schema.py)."""

from __future__ import annotations

from hsfs.core.types import ROOT_INO, FileType
from hsfs.mdserver.freshness import sort_key
from hsfs.mdserver.schema import (
    SYNTHETIC,
    decode_candidates,
    decode_coverage,
    decode_inode,
    decode_odd,
)
from hsfs.mdserver.tree import View

_DIRECTORY = int(FileType.DIRECTORY)


def check(store, volume) -> None:
    """Raises AssertionError with what is wrong."""
    with store.snapshot() as snapshot:
        view = View(snapshot, volume)
        inodes = {
            int.from_bytes(k[1:], "big"): decode_inode(v) for k, v in snapshot.range(b"I", b"J")
        }
        garbage = {int.from_bytes(k[5:13], "big") for k, _ in snapshot.range(b"O", b"P")}
        dentries = {
            (int.from_bytes(k[1:9], "big"), k[9:]): decode_candidates(v)
            for k, v in snapshot.range(b"D", b"E")
        }
        for (parent, name), candidates in dentries.items():
            assert parent in inodes, f"dentry {name!r} in a missing directory {parent}"
            assert len(candidates) > 1
            assert len(set(zip(candidates[1::3], candidates[2::3], strict=True))) == (
                len(candidates) // 3
            )
            for at in range(1, len(candidates), 3):
                device, ino, kind = candidates[at : at + 3]
                assert ino in inodes, f"{name!r} leads to missing inode {ino}"
                record = inodes[ino]
                assert record.type == kind
                assert any(b.device == device for b in record.bindings), (name, device, record)
        counts: dict[tuple[int, int], int] = {}
        for ino, record in inodes.items():
            for binding in record.bindings:
                if not binding.directory or ino == ROOT_INO:
                    continue
                counts[(binding.directory, binding.device)] = (
                    counts.get((binding.directory, binding.device), 0) + 1
                )
                place = view.shown_at(binding, record.type)
                assert place is not None
                candidates = dentries.get(place, ())
                pairs = list(zip(candidates[1::3], candidates[2::3], strict=True))
                assert (binding.device, ino) in pairs, (ino, binding, place, candidates)
            if not record.bindings:
                assert ino in garbage or any(ino == o for o in garbage), (
                    f"inode {ino} has no place and waits for no reaper"
                )
        for key, value in snapshot.range(b"F", b"G"):
            ino = int.from_bytes(value, "big")
            assert ino in inodes, f"identity of missing inode {ino}"
            assert inodes[ino].identity == key[3:]
        for key, value in snapshot.range(b"N", b"O"):
            device, directory = int.from_bytes(key[1:3], "big"), int.from_bytes(key[3:11], "big")
            odd = decode_odd(value)
            flat = volume.device(device).flat
            assert key[11:].startswith(sort_key(odd.segment, odd.type, flat)[:400])
            candidates = dentries.get((odd.parent, odd.name), ())
            pairs = list(zip(candidates[1::3], candidates[2::3], strict=True))
            assert (device, odd.ino) in pairs, odd
            assert directory in inodes
        for key, value in snapshot.range(b"L", b"M"):
            directory, device = int.from_bytes(key[1:9], "big"), int.from_bytes(key[9:], "big")
            coverage = decode_coverage(value)
            assert directory in inodes
            if device != SYNTHETIC:
                assert coverage.entries == counts.get((directory, device), 0), (
                    directory,
                    device,
                    coverage,
                )


def unreachable(store, volume) -> set[int]:
    """Inodes that no path leads to."""
    with store.snapshot() as snapshot:
        inodes = {int.from_bytes(k[1:], "big") for k, _ in snapshot.range(b"I", b"J")}
        seen = {int(ROOT_INO)}
        todo = [int(ROOT_INO)]
        while todo:
            prefix = b"D" + todo.pop().to_bytes(8, "big")
            for _, value in snapshot.range(prefix, prefix + b"\xff" * 300):
                for ino in decode_candidates(value)[2::3]:
                    if ino not in seen:
                        seen.add(ino)
                        todo.append(ino)
        return inodes - seen
