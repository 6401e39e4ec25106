"""The session on the real kernel: what applications see, and what reaches the daemon."""

import errno
import hashlib
import os
import random
import signal
import stat
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests.mount.mounted import mounted

MIB = 1 << 20
BIG = random.Random(7).randbytes(24 * MIB + 777)


def fill(root: Path) -> None:
    (root / "big").write_bytes(BIG)
    (root / "small").write_bytes(b"small")
    (root / "empty").write_bytes(b"")
    os.symlink("small", root / "link")
    os.mkfifo(root / "fifo")
    (root / "d").mkdir()
    (root / "d" / "deep").mkdir()
    (root / "d" / "deep" / "file").write_bytes(b"deep")
    (root / "many").mkdir()
    for number in range(700):
        (root / "many" / f"f{number:04d}").write_bytes(b"%d" % number * 50)
    (root / os.fsdecode(b"odd \xff name\n")).write_bytes(b"odd")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    root = tmp_path_factory.mktemp("source")
    fill(root)
    return root


@pytest.fixture(scope="module")
def mount(source):
    with mounted(source) as mount:
        yield mount


def wait_for(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def fails(number: int):
    """The block raises OSError with this errno."""
    return pytest.raises(OSError, match=rf"Errno {number}\b")


def test_the_tree_is_the_source(source, mount):
    for top, directories, files in os.walk(os.fsencode(source)):
        shown = os.fsencode(mount.mountpoint) + top[len(os.fsencode(source)) :]
        assert sorted(os.listdir(shown)) == sorted(directories + files)
        for name in files:
            ours, theirs = os.lstat(shown + b"/" + name), os.lstat(top + b"/" + name)
            assert stat.S_IFMT(ours.st_mode) == stat.S_IFMT(theirs.st_mode)
            assert ours.st_mtime_ns == theirs.st_mtime_ns
            if stat.S_ISREG(ours.st_mode):
                assert ours.st_size == theirs.st_size
                with open(shown + b"/" + name, "rb") as file:
                    data = file.read()
                with open(top + b"/" + name, "rb") as file:
                    assert data == file.read()
    assert os.readlink(mount.mountpoint / "link") == "small"


def test_inode_numbers_agree_between_listing_and_stat(mount):
    with os.scandir(mount.mountpoint / "many") as entries:
        for entry in entries:
            assert entry.inode() == os.stat(entry.path).st_ino
    assert os.stat(mount.mountpoint).st_ino == 1


def test_a_listing_can_be_rewound_and_resumed(mount):
    code = (
        "import os, sys\n"
        "d = os.open(sys.argv[1], os.O_RDONLY)\n"
        "for _ in range(3):\n"
        "    os.lseek(d, 0, 0)\n"
        "    with os.scandir(d) as entries:\n"
        "        assert len({e.name for e in entries}) == 700\n"
    )
    subprocess.run(["python3", "-c", code, str(mount.mountpoint / "many")], check=True, timeout=60)
    listed = subprocess.run(
        ["ls", "-fa", str(mount.mountpoint / "many")], check=True, capture_output=True, timeout=60
    ).stdout.split()
    assert len(listed) == len(set(listed)) == 702


@pytest.mark.parametrize(
    "change",
    [
        lambda m: (m / "new").write_bytes(b"x"),
        lambda m: (m / "small").write_bytes(b"x"),
        lambda m: os.open(m / "small", os.O_RDWR),
        lambda m: os.open(m / "small", os.O_RDONLY | os.O_TRUNC),
        lambda m: (m / "small").unlink(),
        lambda m: (m / "new").mkdir(),
        lambda m: (m / "d").rmdir(),
        lambda m: (m / "small").rename(m / "other"),
        lambda m: os.symlink("x", m / "new"),
        lambda m: os.link(m / "small", m / "new"),
        lambda m: os.mkfifo(m / "new"),
        lambda m: os.chmod(m / "small", 0o600),
        lambda m: os.truncate(m / "small", 0),
        lambda m: os.utime(m / "small", (1, 1)),
        lambda m: os.setxattr(m / "small", "user.x", b"1"),
    ],
)
def test_every_change_is_refused(mount, change):
    with fails(errno.EROFS):
        change(mount.mountpoint)


def test_names_that_are_too_long(mount):
    for length in (255, 256, 1000):
        with fails(errno.ENOENT if length <= 255 else errno.ENAMETOOLONG):
            os.stat(mount.mountpoint / ("n" * length))


def test_xattrs(mount):
    path = mount.mountpoint / "small"
    assert os.listxattr(path) == []
    assert os.getxattr(path, "user.hsfs.ino") == b"%d" % path.stat().st_ino
    assert b"source" in os.getxattr(path, "user.hsfs.replicas")
    for name in ("user.nothing", "security.capability", "user.hsfs.nothing"):
        with fails(errno.ENODATA):
            os.getxattr(path, name)


def test_the_hidden_directory(mount):
    hidden = mount.mountpoint / ".hsfs"
    assert ".hsfs" not in os.listdir(mount.mountpoint)
    assert sorted(os.listdir(hidden)) == ["config", "stats"]
    assert (hidden / "config").read_bytes() == b"config of the test\n"
    assert b'"reads"' in (hidden / "stats").read_bytes()
    assert not (hidden / "other").exists()


def test_statfs(mount):
    space = os.statvfs(mount.mountpoint)
    assert space.f_blocks * space.f_frsize == 1 << 40
    assert space.f_namemax == 255


def test_warm_work_does_not_reach_the_daemon(mount):
    path = mount.mountpoint / "big"
    assert hashlib.sha256(path.read_bytes()).digest() == hashlib.sha256(BIG).digest()

    def reads_again() -> dict[str, int]:
        before = mount.stats()
        for _ in range(3):
            assert path.read_bytes() == BIG
            path.stat()
        after = mount.stats()
        # Nothing is flushed: the kernel was told once not to ask.
        assert after["ops"].get("open", 0) - before["ops"].get("open", 0) == 3
        calls = (after["calls"].get("getattr", 0), before["calls"].get("getattr", 0))
        return {"reads": after["reads"] - before["reads"], "getattr": calls[0] - calls[1]}

    # Another process may have the machine's page cache dropped: then once more.
    wait_for(lambda: reads_again() == {"reads": 0, "getattr": 0})


def test_a_listed_file_needs_no_further_question(source):
    with mounted(source) as mount:
        names = os.listdir(mount.mountpoint / "many")
        before = mount.stats()["calls"]
        for name in names:
            (mount.mountpoint / "many" / name).read_bytes()
        after = mount.stats()["calls"]
        for call in ("lookup", "getattr", "revalidate"):
            assert after.get(call, 0) == before.get(call, 0)


def test_amplification_of_random_and_sequential_reads(source):
    with mounted(source) as mount:
        path = mount.mountpoint / "big"
        rng = random.Random(9)
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_RANDOM)
        pages = rng.sample(range(512, len(BIG) // 4096), 40)
        for page in pages:
            assert os.pread(handle, 4096, page * 4096) == BIG[page * 4096 : page * 4096 + 4096]
        os.close(handle)
        fetched = mount.stats()["gate"][1]
        assert fetched <= 32 * 40 * 4096
        assert path.read_bytes() == BIG
        assert mount.stats()["gate"][1] <= 1.05 * len(BIG) + 4 * MIB
        assert sum(mount.stats()["fetched"].values()) == mount.stats()["gate"][1]


def test_sixty_four_random_readers_stay_within_memory(source):
    with mounted(source, limits={"memory_limit": 256 * MIB}) as mount:
        paths = [mount.mountpoint / "big"] + [
            mount.mountpoint / "many" / f"f{n:04d}" for n in range(0, 700, 7)
        ]
        wrong = []

        def reader(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(30):
                path = rng.choice(paths)
                with path.open("rb", buffering=0) as file:
                    size = os.fstat(file.fileno()).st_size
                    offset = rng.randrange(size)
                    data = os.pread(file.fileno(), 65536, offset)
                if path.name == "big" and data != BIG[offset : offset + 65536]:
                    wrong.append(offset)

        threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        status = Path(f"/proc/{mount.process.pid}/status").read_text()
        peak = next(int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line)
        assert peak < 256 * 1024

        def idle() -> bool:
            now = mount.stats()["now"]
            return now["handles"] == now["waiters"] == now["fetches"] == 0

        wait_for(idle)


def test_reads_go_around_a_full_cache(source):
    with mounted(source, full=True) as mount:
        assert (mount.mountpoint / "big").read_bytes() == BIG
        assert (mount.mountpoint / "small").read_bytes() == b"small"
        assert mount.stats()["read_around"] > 0


def test_a_failing_source_is_an_error_and_then_recovers(source):
    with mounted(source) as mount:
        mount.do("gate", mode="fail")
        path = mount.mountpoint / "big"
        with fails(errno.EIO):
            path.read_bytes()
        with fails(errno.EIO):
            (mount.mountpoint / "small").read_bytes()
        assert os.listdir(mount.mountpoint / "d") == ["deep"]
        mount.do("gate", mode="open")
        assert path.read_bytes() == BIG
        assert (mount.mountpoint / "small").read_bytes() == b"small"


def test_a_hanging_source_holds_up_only_those_who_wait_for_it(source):
    with mounted(source) as mount:
        assert (mount.mountpoint / "small").read_bytes() == b"small"
        mount.do("gate", mode="hang")
        path = str(mount.mountpoint / "big")
        reader = subprocess.Popen(["cat", path], stdout=subprocess.DEVNULL)
        wait_for(lambda: mount.stats()["now"]["waiters"] > 0)
        started = time.monotonic()
        assert (mount.mountpoint / "small").read_bytes() == b"small"
        assert len(os.listdir(mount.mountpoint / "many")) == 700
        assert (mount.mountpoint / "d" / "deep" / "file").stat().st_size == 4
        os.statvfs(mount.mountpoint)
        assert time.monotonic() - started < 30
        mount.do("gate", mode="open")
        assert reader.wait(60) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ends_cleanly_with_open_files_and_a_hanging_source(source, number):
    with mounted(source) as mount:
        handle = os.open(mount.mountpoint / "small", os.O_RDONLY)
        mount.do("gate", mode="hang")
        reader = subprocess.Popen(
            ["cat", str(mount.mountpoint / "big")], stdout=subprocess.DEVNULL, stderr=-3
        )
        wait_for(lambda: mount.stats()["now"]["waiters"] > 0)
        assert mount.stop(number, timeout_s=60) == 0
        assert not mount.is_mounted()
        assert reader.wait(60) != 0
        os.close(handle)


def test_ends_when_somebody_unmounts_it(source):
    with mounted(source) as mount:
        assert (mount.mountpoint / "small").read_bytes() == b"small"
        subprocess.run(["umount", str(mount.mountpoint)], check=True, timeout=60)
        assert mount.line() == {"done": True}
        assert mount.process.wait(60) == 0


def test_a_lazy_unmount_waits_for_open_files(source):
    with mounted(source) as mount:
        handle = os.open(mount.mountpoint / "big", os.O_RDONLY)
        subprocess.run(["umount", "-l", str(mount.mountpoint)], check=True, timeout=60)
        assert os.pread(handle, 4096, 5 * MIB) == BIG[5 * MIB : 5 * MIB + 4096]
        assert mount.process.poll() is None
        os.close(handle)
        assert mount.line() == {"done": True}


def test_reopening_a_cached_file_after_a_restart_reads_no_source(source, tmp_path):
    cache = tmp_path / "cache"
    with mounted(source, cache=str(cache)) as mount:
        assert (mount.mountpoint / "big").read_bytes() == BIG
    with mounted(source, cache=str(cache)) as mount:
        assert (mount.mountpoint / "big").read_bytes() == BIG
        assert mount.stats()["gate"][1] == 0


def test_lookup_counts_are_exact(source):
    with mounted(source) as mount:

        def found() -> bool:
            command = ["find", str(mount.mountpoint), "-type", "f", "-size", "+0"]
            subprocess.run(command, check=True, capture_output=True, timeout=60)
            # Another process may have the machine's caches dropped: then once more.
            return mount.stats()["now"]["held_by_kernel"] > 700

        for _ in range(3):
            wait_for(found)

        def forgotten() -> bool:
            Path("/proc/sys/vm/drop_caches").write_text("2\n")
            return mount.stats()["now"]["held_by_kernel"] == 0

        wait_for(forgotten)
        # All is found again.
        assert (mount.mountpoint / "d" / "deep" / "file").read_bytes() == b"deep"


def test_a_small_node_cache_asks_again_and_stays_right(source):
    with mounted(source, limits={"memory_limit": 1}) as mount:
        for _ in range(2):
            for number in range(0, 700, 3):
                path = mount.mountpoint / "many" / f"f{number:04d}"
                assert path.read_bytes() == b"%d" % number * 50
        assert mount.stats()["now"]["nodes"] <= 1024 + 256


def test_every_request_is_answered_after_a_burst(tmp_path):
    """Loops of a burst end when it is over. That once made pyfuse3 start loops of its own, in
    place of answering the request that it had just received."""
    fill(tmp_path)
    with mounted(tmp_path, idle_max=1) as mount:
        root = mount.mountpoint / "many"
        right = {path.name: (tmp_path / "many" / path.name).read_bytes() for path in root.iterdir()}
        for burst in range(4):
            mount.do("gate", mode="hang")
            names = sorted(right)[burst * 100 : burst * 100 + 24]
            before = mount.stats()["gate"][0]
            wrong = list(names)

            def read(name, wrong=wrong):
                if (root / name).read_bytes() == right[name]:
                    wrong.remove(name)

            readers = [threading.Thread(target=read, args=[name], daemon=True) for name in names]
            for reader in readers:
                reader.start()
            wait_for(lambda before=before: mount.stats()["gate"][0] >= before + 2)
            mount.do("gate", mode="open")
            for reader in readers:
                reader.join(60)
            assert wrong == []
