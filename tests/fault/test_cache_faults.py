"""Tier 0 when things go wrong around it: killed, damaged, full, removed, read-only, failing."""

import contextlib
import fcntl
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path

import pytest

from hsfs.cache.store import open_store
from hsfs.core.errors import CacheUnavailable, Corrupt, HsfsError, NoSpace
from hsfs.core.types import BLOCK_SIZE, CHUNK_SIZE, Extent
from tests.conformance.chunk_store_suite import Source, cached, content, file, read_all, whole
from tests.fault.tier0_filler import file_of

ROOT = Path(__file__).parents[2]
SIZE = 64 << 20
WAIT_S = 60

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts file systems")
needs_loop = pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists("/dev/loop-control"), reason="needs loop devices"
)


@pytest.fixture
def directory():
    path = Path(tempfile.mkdtemp(prefix="hsfs-tier0-", dir="/var/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def opened():
    """Opens stores that are closed at the end."""
    stores = []

    def make(path, size=SIZE, **options):
        options = {"fd_limit": 32, "flush_s": 0.02, "probe_s": 0.05, **options}
        stores.append(open_store(path, size, **options))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def wait_for(what):
    deadline = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def cache_files(directory, slot="0"):
    return sorted(p for p in (directory / slot / "data").rglob("*") if p.is_file())


def refill(store, f):
    """What the reader does about Corrupt blocks: fetches once what is missing then."""
    handle = store.create(f)
    try:
        for hole in list(handle.missing(whole(f))):
            handle.fill(hole, Source(f).read)
        with contextlib.suppress(Corrupt):
            return read_all(handle)
        for hole in list(handle.missing(whole(f))):
            handle.fill(hole, Source(f).read)
        return read_all(handle)
    finally:
        handle.release()


def start(*args):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *args]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def start_filler(directory, size, seed):
    process = start("-m", "tests.fault.tier0_filler", str(directory), str(size), str(seed))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()


# -- killed


@pytest.mark.parametrize("seed", range(5))
def test_kill_9_of_a_filling_process(directory, opened, seed):
    """What was recorded is adopted and right; what was not is gone from the disk."""
    size = 24 << 20
    chance = random.Random(seed)
    for turn in range(2):
        process = start_filler(directory, size, seed * 10 + turn)
        time.sleep(chance.uniform(0.05, 0.8))
        kill(process)
    store = opened(directory, size)
    store.flush()
    usage = store.usage()
    assert usage.trouble == ""
    assert usage.bytes <= size
    assert len(cache_files(directory)) == usage.files
    assert sum(p.stat().st_blocks * 512 for p in cache_files(directory)) <= size + (1 << 20)
    for n in range(60):
        f = file_of(n)
        handle = store.find(f)
        if handle is None:
            continue
        for at in range(0, f.size, BLOCK_SIZE):
            if handle.missing(Extent(at, 1)):
                continue
            with contextlib.suppress(Corrupt):  # written and not yet what the record says
                assert handle.read(at, BLOCK_SIZE) == content(f, at, BLOCK_SIZE)
        handle.release()
        assert refill(store, f) == content(f)


def test_what_was_recorded_survives_kill_9(directory, opened):
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from hsfs.cache.store import open_store\n"
        "from tests.conformance.chunk_store_suite import cached, file\n"
        "store = open_store(Path(sys.argv[1]), 64 << 20, fd_limit=32)\n"
        "for n in range(50): cached(store, file(n, 100_000 + n)).release()\n"
        "store.flush()\n"
        "cached(store, file(77, 5000)).release()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    process = start("-c", code, str(directory))
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    store = opened(directory)
    store.flush()
    assert store.usage().files in (50, 51)
    for n in range(50):
        f = file(n, 100_000 + n)
        handle = store.find(f)
        assert handle is not None
        assert not handle.complete, "not proven yet"
        assert list(handle.missing(whole(f))) == []
        assert handle.read_cached(0, 10) is None
        assert read_all(handle) == content(f)
        assert handle.complete, "proven by its first read"
        handle.release()


def test_blocks_written_after_the_last_record_are_given_back(directory, opened):
    """Else they would lie on the disk beyond the bound."""
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from hsfs.cache.store import open_store\n"
        "from hsfs.core.types import Extent\n"
        "from tests.conformance.chunk_store_suite import Source, file\n"
        f"store = open_store(Path(sys.argv[1]), {SIZE}, fd_limit=32, flush_s=3600)\n"
        "f = file(7, 40 << 20); handle = store.create(f); read = Source(f).read\n"
        "handle.fill(Extent(0, 1 << 20), read); handle.fill(Extent(8 << 20, 1 << 20), read)\n"
        "store.flush()\n"
        "handle.fill(Extent(4 << 20, 2 << 20), read)\n"
        "handle.fill(Extent(20 << 20, 9 << 20), read)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    process = start("-c", code, str(directory))
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    store = opened(directory)
    store.flush()
    f = file(7, 40 << 20)
    assert store.cached_bytes(f) == 2 << 20
    (path,) = cache_files(directory)
    assert path.stat().st_blocks * 512 <= store.usage().bytes + (64 << 10)
    handle = store.create(f)
    assert handle.read(8 << 20, 1 << 20) == content(f, 8 << 20, 1 << 20)
    handle.release()
    assert refill(store, f) == content(f)


def test_a_file_that_was_never_filled_leaves_no_orphan(directory, opened):
    for hold in (False, True):
        store = opened(directory)
        store.flush()
        handle = store.create(file(5 + hold, 100_000))
        if not hold:
            handle.release()
        store.close()
    store = opened(directory)
    store.flush()
    assert len(cache_files(directory)) == store.usage().files
    store.evict([])
    assert cache_files(directory) == []


# -- damaged


def tamper(path, how):
    size = path.stat().st_size
    if how == "flipped byte":
        with path.open("r+b") as f:
            f.seek(size // 2)
            old = f.read(1)
            f.seek(size // 2)
            f.write(bytes([old[0] ^ 1]))
    elif how == "truncated":
        os.truncate(path, size // 2)
    elif how == "truncated and grown":
        os.truncate(path, size // 2)
        os.truncate(path, size)
    elif how == "replaced":
        data = bytes(size)
        path.unlink()
        path.write_bytes(data)
    elif how == "removed":
        path.unlink()
    elif how == "a link to elsewhere":
        path.unlink()
        path.symlink_to("/dev/zero")


HOW = [
    "flipped byte",
    "truncated",
    "truncated and grown",
    "replaced",
    "removed",
    "a link to elsewhere",
]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("clean", [False, True], ids=["after a kill", "after a clean stop"])
def test_damage_between_runs_is_never_served(directory, opened, how, clean):
    f = file(7, 6 * BLOCK_SIZE + 17)
    if clean:
        store = opened(directory)
        cached(store, f).release()
        store.close()
    else:
        code = (
            "import os, signal, sys; from pathlib import Path\n"
            "from hsfs.cache.store import open_store\n"
            "from tests.conformance.chunk_store_suite import cached, file\n"
            f"store = open_store(Path(sys.argv[1]), {SIZE}, fd_limit=32)\n"
            f"cached(store, file(7, {f.size})).release(); store.flush()\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        process = start("-c", code, str(directory))
        process.wait()
        process.stdout.close()
    (path,) = cache_files(directory)
    tamper(path, how)
    store = opened(directory)
    store.flush()
    handle = store.find(f)
    if handle is not None:
        with pytest.raises(Corrupt):
            read_all(handle)
        assert list(handle.missing(whole(f))) != []
        handle.release()
    assert refill(store, f) == content(f)


def test_a_file_truncated_while_it_is_open(directory, opened):
    f = file(7, 3 * BLOCK_SIZE)
    store = opened(directory)
    handle = cached(store, f)
    (path,) = cache_files(directory)
    os.truncate(path, BLOCK_SIZE + 5)
    assert handle.read_cached(2 * BLOCK_SIZE, 100) is None
    with pytest.raises(Corrupt):
        handle.read(2 * BLOCK_SIZE, 100)
    with pytest.raises(Corrupt):
        read_all(handle)
    assert not handle.complete
    assert refill(store, f) == content(f)
    handle.release()


def test_a_file_cut_while_it_is_open_and_then_filled_behind_the_cut(directory, opened):
    """The write would make zeros of what was cut off."""
    f = file(7, 4 * BLOCK_SIZE)
    store = opened(directory)
    handle = store.create(f)
    handle.fill(Extent(0, 2 * BLOCK_SIZE), Source(f).read)
    (path,) = cache_files(directory)
    os.truncate(path, BLOCK_SIZE + 5)
    handle.fill(Extent(3 * BLOCK_SIZE, BLOCK_SIZE), Source(f).read)
    assert handle.read_cached(BLOCK_SIZE, BLOCK_SIZE) is None
    with pytest.raises(Corrupt):
        handle.read(BLOCK_SIZE, BLOCK_SIZE)
    assert refill(store, f) == content(f)
    handle.release()


def test_a_file_replaced_while_its_descriptor_was_closed(directory, opened):
    store = opened(directory, fd_limit=4)
    f = file(7, 2 * BLOCK_SIZE)
    handle = cached(store, f)
    (path,) = cache_files(directory)
    path.write_bytes(b"")
    path.rename(path.with_name("aside"))
    path.write_bytes(bytes(f.size))
    others = [cached(store, file(100 + n, 5000)) for n in range(10)]
    with pytest.raises(Corrupt):
        read_all(handle)
    handle.fill(whole(f), Source(f).read)
    assert read_all(handle) == content(f)
    for other in [handle, *others]:
        other.release()


def test_a_damaged_index_loses_cache_and_nothing_else(directory, opened):
    store = opened(directory)
    files = [file(n, 50_000) for n in range(40)]
    for f in files:
        cached(store, f).release()
    store.close()
    raw = bytearray((directory / "0" / "index").read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    (directory / "0" / "index").write_bytes(raw)
    store = opened(directory)
    store.flush()
    assert 0 < store.usage().files < 40
    assert len(cache_files(directory)) == store.usage().files
    for f in files:
        assert refill(store, f) == content(f)


def test_an_index_that_lost_its_tail_at_a_clean_stop_of_old(directory, opened):
    """A power cut can take all that followed the frame that says `clean`."""
    store = opened(directory)
    cached(store, file(1, 50_000)).release()
    store.close()
    old = (directory / "0" / "index").read_bytes()
    store = opened(directory)
    cached(store, file(2, 50_000)).release()
    store.close()
    (directory / "0" / "index").write_bytes(old)
    store = opened(directory)
    store.flush()
    assert len(cache_files(directory)) == store.usage().files == 1
    found = store.find(file(1, 50_000))
    assert found is not None
    assert not found.complete, "not proven yet"
    assert read_all(found) == content(file(1, 50_000))
    found.release()


def test_an_index_of_a_newer_version_is_refused_and_left_alone(directory, opened):
    opened(directory).close()
    index = directory / "0" / "index"
    raw = bytearray(index.read_bytes())
    raw[16] = 99
    index.write_bytes(raw)
    store = opened(directory)
    assert "newer version" in store.usage().trouble
    with pytest.raises(CacheUnavailable, match="newer version"):
        store.create(file(1, 10))
    assert index.read_bytes() == raw


# -- full


@contextlib.contextmanager
def mounted(kind, source, where, options):
    where.mkdir(exist_ok=True)
    command = ["mount", "-t", kind, "-o", options, source, str(where)]
    subprocess.run(command, check=True, timeout=60)
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True, timeout=60)


@needs_root
def test_a_full_disk_evicts_and_then_says_no_space(directory, opened):
    with mounted("tmpfs", "tmpfs", directory / "small", "size=24m") as small:
        store = opened(small / "cache", 200 << 20)
        for n in range(12):  # 36 MB through 24 MB
            f = file(n, 3_000_000)
            cached(store, f).release()
            found = store.find(f)
            assert found is not None
            assert read_all(found) == content(f)
            found.release()
        assert store.usage().evicted_bytes > 0
        assert store.usage().trouble == ""
        big = file(99, 40 << 20)
        handle = store.create(big)
        chunks = [Extent(at, CHUNK_SIZE) for at in range(0, big.size, CHUNK_SIZE)]
        with pytest.raises(NoSpace):
            deque((handle.fill(chunk, Source(big).read) for chunk in chunks), maxlen=0)
        assert "full" in store.usage().trouble
        assert handle.read(0, 1 << 20) == content(big, 0, 1 << 20)
        handle.release()
        cached(store, file(100, 3_000_000)).release()
        store.flush()
        store.close()


# -- removed, read-only, failing


def test_a_removed_directory_is_noticed_and_made_again(directory, opened):
    base = directory / "cache"
    store = opened(base)
    pinned, idle = file(1, 5 * BLOCK_SIZE), file(2, 100_000)
    handle = cached(store, pinned)
    partial = store.create(file(3, 3 * CHUNK_SIZE))
    cached(store, idle).release()
    store.flush()
    shutil.rmtree(base)
    assert read_all(handle) == content(pinned)
    wait_for(lambda: (base / "0" / "index").exists() and store.usage().trouble == "")
    store.flush()
    assert store.find(idle) is None
    assert read_all(handle) == content(pinned)
    partial.fill(Extent(0, CHUNK_SIZE), Source(partial.file).read)
    assert partial.read(0, 100) == content(partial.file, 0, 100)
    assert refill(store, idle) == content(idle)
    assert refill(store, pinned) == content(pinned)
    handle.release()
    partial.release()
    store.evict([])
    usage = store.usage()
    assert (usage.bytes, usage.files, usage.pinned) == (0, 0, 0)


def test_a_directory_that_can_not_be_made_again(directory, opened):
    base = directory / "cache"
    store = opened(base)
    f = file(1, 50_000)
    handle = cached(store, f)
    base.rename(directory / "aside")
    base.write_text("in the way")
    wait_for(lambda: store.usage().trouble != "")
    with pytest.raises(CacheUnavailable):
        store.create(file(2, 50_000))
    assert store.find(file(2, 50_000)) is None
    assert read_all(handle) == content(f)
    base.unlink()
    wait_for(lambda: store.usage().trouble == "")
    assert refill(store, file(2, 50_000)) == content(file(2, 50_000))
    handle.release()


def test_a_directory_that_can_not_be_made_at_all(directory, opened):
    (directory / "cache").write_text("in the way")
    store = opened(directory / "cache")
    assert store.usage().trouble != ""
    assert store.find(file(1, 10)) is None
    assert store.cached_bytes(file(1, 10)) == 0
    assert store.usage().files == 0
    with pytest.raises(CacheUnavailable):
        store.create(file(1, 10))
    (directory / "cache").unlink()
    wait_for(lambda: store.usage().trouble == "")
    assert refill(store, file(1, 10)) == content(file(1, 10))


@needs_root
def test_a_read_only_directory_at_start(directory, opened):
    f = file(1, 50_000)
    with mounted("tmpfs", "tmpfs", directory / "disk", "size=24m") as disk:
        store = opened(disk / "cache", 16 << 20)
        cached(store, f).release()
        store.close()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, timeout=60)
        store = opened(disk / "cache", 16 << 20)
        assert "read-only" in store.usage().trouble
        with pytest.raises(CacheUnavailable, match="read-only"):
            store.create(f)
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True, timeout=60)
        wait_for(lambda: store.usage().trouble == "")
        store.flush()
        assert store.cached_bytes(f) == f.size
        assert refill(store, f) == content(f)
        store.close()


@contextlib.contextmanager
def ext4(directory, options):
    image = directory / "image"
    with image.open("wb") as f:
        f.truncate(48 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True, timeout=60)
    with mounted("ext4", str(image), directory / "disk", f"loop,{options}") as disk:
        yield disk


@needs_loop
def test_a_file_system_that_turns_read_only(directory, opened):
    """What the kernel does to a cache disk with errors."""
    with ext4(directory, "errors=remount-ro") as disk:
        store = opened(disk / "cache", 16 << 20)
        f = file(1, 50_000)
        cached(store, f).release()
        device = os.path.basename(os.path.realpath(f"/sys/dev/block/{_number(disk)}"))
        Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("1")
        wait_for(lambda: _refused(store))
        assert "read-only" in store.usage().trouble
        found = store.find(f)
        assert found is not None
        assert read_all(found) == content(f)
        found.release()
        store.close()


@needs_loop
def test_a_disk_that_fails(directory, opened):
    """After a shutdown of the file system every access is an I/O error."""
    with ext4(directory, "errors=continue") as disk:
        store = opened(disk / "cache", 16 << 20)
        f, partial = file(1, 50_000), file(2, 5_000_000)
        handle = cached(store, f)
        half = store.create(partial)
        half.fill(Extent(0, 1 << 20), Source(partial).read)
        store.flush()
        fd = os.open(disk, os.O_RDONLY)
        fcntl.ioctl(fd, 0x8004587D, (2).to_bytes(4, "little"))  # EXT4_IOC_SHUTDOWN, no log flush
        os.close(fd)
        with pytest.raises(HsfsError):
            half.fill(Extent(1 << 20, 1 << 20), Source(partial).read)
        wait_for(lambda: _refused(store))
        assert "fails" in store.usage().trouble
        with contextlib.suppress(Corrupt):
            assert read_all(handle) == content(f)
        assert store.usage().trouble != ""
        handle.release()
        half.release()
        store.close()


def _number(path):
    device = os.stat(path).st_dev
    return f"{os.major(device)}:{os.minor(device)}"


def _refused(store):
    try:
        cached(store, file(1000 + int(time.monotonic() * 1000) % 1000, 200_000)).release()
    except CacheUnavailable:
        return True
    return False


@needs_root
def test_an_unmounted_cache_disk_is_not_replaced_by_the_disk_below(directory, opened):
    with mounted("tmpfs", "tmpfs", directory / "disk", "size=24m") as disk:
        store = opened(disk / "cache", 16 << 20)
        f = file(1, 50_000)
        handle = cached(store, f)
    wait_for(lambda: "no longer mounted" in store.usage().trouble)
    with pytest.raises(CacheUnavailable):
        store.create(file(2, 10))
    assert list((directory / "disk").iterdir()) == []
    assert read_all(handle) == content(f)
    handle.release()
    with mounted("tmpfs", "tmpfs", directory / "disk", "size=24m"):
        wait_for(lambda: store.usage().trouble == "")
        assert refill(store, f) == content(f)
        store.close()


# -- several processes, few descriptors


def test_a_second_process_gets_a_slot_of_its_own(directory, opened):
    process = start_filler(directory, SIZE, 1)
    try:
        store = opened(directory)
        f = file(900, 50_000)
        cached(store, f).release()
        assert len(cache_files(directory, "1")) == 1
        assert store.usage().files == 1
    finally:
        kill(process)
    third = opened(directory)
    third.flush()
    assert third.find(f) is None
    assert len(cache_files(directory, "0")) == third.usage().files


def test_1000_pinned_files_with_few_descriptors():
    """In a process of its own with RLIMIT_NOFILE 256."""
    process = start("-m", "tests.fault.test_cache_faults")
    try:
        out, _ = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == 0
    assert out.strip().endswith("all right")


def _with_few_descriptors():
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    directory = Path(tempfile.mkdtemp(prefix="hsfs-tier0-", dir="/var/tmp"))
    try:
        store = open_store(directory, 256 << 20, fd_limit=128)
        handles = [cached(store, file(n, 20_000)) for n in range(1000)]
        failures = []

        def work(seed):
            try:
                for n in random.Random(seed).choices(range(1000), k=1000):
                    handle = handles[n]
                    data = handle.read_cached(0, 20_000) or handle.read(0, 20_000)
                    assert data == content(handle.file)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == [], failures
        assert len(os.listdir("/proc/self/fd")) < 200
        # And when others have used up the process's descriptors: an error, not a wreck.
        hoard = []
        with contextlib.suppress(OSError):
            while True:
                hoard.append(os.dup(0))
        for n in range(1000, 1200):
            with contextlib.suppress(CacheUnavailable):
                cached(store, file(n, 20_000)).release()
        for fd in hoard:
            os.close(fd)
        assert store.usage().trouble == ""
        cached(store, file(2000, 20_000)).release()
        for handle in handles:
            handle.release()
        store.close()
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    _with_few_descriptors()
    print("all right")
