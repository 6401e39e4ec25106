"""A changed file under old and new handles, read and mapped, on the real kernel: never a mix."""

import contextlib
import mmap
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from tests.mount.mounted import mounted

SIZE = 8 * 1024 * 1024
PAGE = 4096


def content(letter: bytes) -> bytes:
    return letter * SIZE


def replace(path: Path, letter: bytes) -> None:
    """New content under the same inode, as an editor that truncates would."""
    with path.open("r+b") as file:
        file.write(content(letter))
        file.truncate()
    # Versions are (fileid, size, mtime, ctime): make sure that this one differs.
    os.utime(path, ns=(time.time_ns(), time.time_ns()))


def opened_anew(path: Path, letter: bytes, timeout_s: float = 30.0) -> int:
    """A handle of the new content. Until the push came the old content is allowed, and ESTALE: a
    read under way may have met, and made known, the source in the middle of its rewriting."""
    deadline = time.monotonic() + timeout_s
    while True:
        handle = os.open(path, os.O_RDONLY)
        if letters(handle, 0) == {letter}:
            return handle
        close_old(handle)
        assert time.monotonic() < deadline
        time.sleep(0.02)


def letters(handle: int, offset: int) -> set[bytes]:
    try:
        return {bytes([value]) for value in os.pread(handle, PAGE, offset)}
    except OSError:
        return set()


def close_old(handle: int) -> None:
    """The kernel answers EIO to the close of a handle whose inode it marked bad."""
    with contextlib.suppress(OSError):
        os.close(handle)


MAPPED = textwrap.dedent("""
    import mmap, os, sys
    handle = os.open(sys.argv[1], os.O_RDONLY)
    view = mmap.mmap(handle, 0, mmap.MAP_SHARED, mmap.PROT_READ)
    seen = {view[0:1]}
    print("mapped", flush=True)
    for line in sys.stdin:
        offset = int(line)
        seen.add(view[offset : offset + 1])  # may die of SIGBUS: allowed
        print(b"".join(sorted(seen)).decode(), flush=True)
""")


def test_old_and_new_handles_never_mix(tmp_path):
    file = tmp_path / "f"
    file.write_bytes(content(b"A"))
    with mounted(tmp_path) as mount:
        path = mount.mountpoint / "f"
        old = os.open(path, os.O_RDONLY)
        assert os.pread(old, PAGE, 0) == b"A" * PAGE
        reader = subprocess.Popen(
            [sys.executable, "-c", MAPPED, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert reader.stdout.readline() == "mapped\n"
            replace(file, b"B")
            mount.do("assimilate")
            new = opened_anew(path, b"B")
            mapped = mmap.mmap(new, 0, mmap.MAP_SHARED, mmap.PROT_READ)
            seen_old: set[bytes] = set()
            for number in range(0, SIZE // PAGE, 61):
                offset = number * PAGE
                seen_old |= letters(old, offset)
                assert letters(new, offset) == {b"B"}
                assert mapped[offset : offset + 1] == b"B"
                if reader.poll() is None:
                    try:
                        reader.stdin.write(f"{offset}\n")
                        reader.stdin.flush()
                    except BrokenPipeError:
                        continue
                    answer = reader.stdout.readline()
                    assert answer in ("A\n", "")
            assert seen_old <= {b"A"}
            mapped.close()
            os.close(new)
        finally:
            with contextlib.suppress(BrokenPipeError):
                reader.stdin.close()
            reader.wait(30)
            reader.stdout.close()
        close_old(old)
        # Content that flips back is a new version again.
        replace(file, b"A")
        mount.do("assimilate")
        third = opened_anew(path, b"A")
        assert os.pread(third, SIZE, 0) == content(b"A")
        os.close(third)


def test_stat_follows_the_content(tmp_path):
    file = tmp_path / "f"
    file.write_bytes(b"short")
    with mounted(tmp_path) as mount:
        path = mount.mountpoint / "f"
        assert path.read_bytes() == b"short"
        assert path.stat().st_size == 5
        file.write_bytes(b"much longer")
        mount.do("assimilate")
        deadline = time.monotonic() + 30
        while path.stat().st_size != 11:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert path.read_bytes() == b"much longer"


def test_a_source_changed_behind_our_back_is_estale_then_new(tmp_path):
    file = tmp_path / "f"
    file.write_bytes(content(b"A"))
    with mounted(tmp_path) as mount:
        path = mount.mountpoint / "f"
        old = os.open(path, os.O_RDONLY)
        assert letters(old, 0) == {b"A"}
        replace(file, b"B")
        # Nobody was told: the read meets the new version at the source.
        seen = set()
        for offset in range(SIZE - PAGE, 0, -PAGE * 97):
            seen |= letters(old, offset)
        assert seen <= {b"A"}
        assert mount.stats()["stale"] >= 1
        new = opened_anew(path, b"B")
        assert letters(new, SIZE - PAGE) == {b"B"}
        os.close(new)
        close_old(old)


def test_a_deleted_source_never_reads_as_zeros(tmp_path):
    (tmp_path / "f").write_bytes(content(b"A"))
    with mounted(tmp_path) as mount:
        path = mount.mountpoint / "f"
        old = os.open(path, os.O_RDONLY)
        assert letters(old, 0) == {b"A"}
        (tmp_path / "f").unlink()
        for offset in range(SIZE - PAGE, 0, -PAGE * 97):
            assert letters(old, offset) <= {b"A"}
        close_old(old)
        mount.do("assimilate")
        deadline = time.monotonic() + 30
        while path.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with pytest.raises(FileNotFoundError):
            path.open("rb")


def test_a_file_replaced_by_a_directory(tmp_path):
    (tmp_path / "f").write_bytes(b"file")
    with mounted(tmp_path) as mount:
        path = mount.mountpoint / "f"
        before = path.stat().st_ino
        assert path.read_bytes() == b"file"
        (tmp_path / "f").unlink()
        (tmp_path / "f").mkdir()
        (tmp_path / "f" / "inside").write_bytes(b"x")
        mount.do("assimilate")
        deadline = time.monotonic() + 30
        while not path.is_dir():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert path.stat().st_ino != before
        assert os.listdir(path) == ["inside"]


def test_readers_of_files_that_keep_changing_see_one_version_at_a_time(tmp_path):
    """Every file is one letter repeated; whatever a reader gets is of one letter."""
    names = [f"f{number}" for number in range(6)]
    sizes = [700, 200_000, 1_500_000]
    for number, name in enumerate(names):
        (tmp_path / name).write_bytes(b"A" * sizes[number % 3])
    stop = threading.Event()
    mixed: list[str] = []
    whole = 0

    def change() -> None:
        letter = 0
        while not stop.is_set():
            letter = (letter + 1) % 26
            for number, name in enumerate(names):
                path = tmp_path / name
                fresh = path.with_suffix(".new")
                fresh.write_bytes(bytes([65 + letter]) * (sizes[number % 3] + letter))
                fresh.rename(path)
            stop.wait(0.03)

    with mounted(tmp_path, ttl_s=0.2) as mount:

        def read(seed: int) -> None:
            nonlocal whole
            rng = random.Random(seed)
            while not stop.is_set():
                try:
                    handle = os.open(mount.mountpoint / rng.choice(names), os.O_RDONLY)
                except OSError:
                    continue
                pieces = b""
                try:
                    for _ in range(4):
                        offset = rng.randrange(1_600_000)
                        pieces += os.pread(handle, 40_000, offset)
                    pieces += os.pread(handle, 2_000_000, 0)
                except OSError:
                    pass
                finally:
                    close_old(handle)
                if len(set(pieces)) > 1:
                    mixed.append(f"{sorted(set(pieces))}")
                whole += bool(pieces)

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
        threads.append(threading.Thread(target=change))
        for thread in threads:
            thread.start()
        try:
            deadline = time.monotonic() + 60
            until = time.monotonic() + 3
            while time.monotonic() < until or (whole < 20 and time.monotonic() < deadline):
                # A rename may take a name away between a listing and its stat.
                with contextlib.suppress(AssertionError):
                    mount.do("assimilate")
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert not mixed
    assert whole >= 20
