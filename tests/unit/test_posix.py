"""What only a local directory has: links that lead out, files that must not be opened, types."""

import os
import socket
import stat
import tempfile
import threading

import pytest

from hsfs.backends import posix_guard
from hsfs.backends.posix import open_posix
from hsfs.backends.posix_guard import STUCK_MAX, Guard, may_hang
from hsfs.core.errors import (
    ConfigError,
    Interrupted,
    NotADirectory,
    NotFound,
    NotSupported,
    TimedOut,
    Unauthorised,
    UsageError,
)
from hsfs.core.types import DeviceId, FileType, Place
from tests.conformance.backend_suite import Switch, read_blocking


@pytest.fixture
async def backend(tmp_path):
    backend = await open_posix(DeviceId(1), tmp_path.as_uri(), {"timeout": 60.0})
    yield backend
    await backend.aclose()


async def collect(backend, key):
    return {e.name: e async for page in backend.scan(Place(key)) for e in page.entries}


async def test_no_link_leads_out_of_the_root(tmp_path, backend):
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    os.symlink(outside, tmp_path / "way")
    os.symlink(outside / "secret", tmp_path / "file")
    (tmp_path / "dir").mkdir()
    for key in (b"way/secret", b"file", b"way"):
        with pytest.raises((NotADirectory, NotFound)):
            read_blocking(backend, Place(key), 0, 10)
    for key in (b"..", b"dir/../../x", b"../" + os.fsencode(outside.name) + b"/secret", b"dir/.."):
        with pytest.raises(NotFound):
            await backend.stat(Place(key))
        with pytest.raises(NotFound):
            read_blocking(backend, Place(key), 0, 10)
    for key in (b"a\0b", b"dir//x", b"/dir", b"dir/", b"."):
        with pytest.raises(NotFound):
            await backend.stat(Place(key))
    assert (await backend.stat(Place(b"way"))).target == os.fsencode(outside)


async def test_every_type_is_told_and_only_files_are_opened(tmp_path, backend):
    os.mkfifo(tmp_path / "fifo")
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(os.fspath(tmp_path / "sock"))
    sock.close()
    (tmp_path / "file").write_bytes(b"hello")
    (tmp_path / "file").chmod(0o640)
    os.link(tmp_path / "file", tmp_path / "again")
    wanted = {
        b"fifo": FileType.FIFO,
        b"sock": FileType.SOCKET,
        b"file": FileType.FILE,
        b"again": FileType.FILE,
    }
    if os.geteuid() == 0:
        os.mknod(tmp_path / "null", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        wanted[b"null"] = FileType.CHARACTER
    found = await collect(backend, b"")
    assert {n: e.type for n, e in found.items()} == wanted
    assert (found[b"file"].mode, found[b"file"].nlink) == (0o640, 2)
    assert found[b"file"].identity == found[b"again"].identity
    for name in wanted.keys() - {b"file", b"again"}:
        with pytest.raises(NotSupported):
            read_blocking(backend, Place(name), 0, 10)


async def test_names_of_any_bytes(tmp_path, backend):
    names = {b"\xff\xfe", b"caf\xe9", b"new\nline", b"\x01", b"x" * 255}
    for name in names:
        with open(os.path.join(os.fsencode(tmp_path), name), "wb"):  # noqa: ASYNC230
            pass
    assert set(await collect(backend, b"")) == names


async def test_reading_leaves_no_access_time(tmp_path, backend):
    path = tmp_path / "file"
    path.write_bytes(b"hello")
    os.utime(path, ns=(10**18, 2 * 10**18))
    assert read_blocking(backend, Place(b"file"), 0, 10) == b"hello"
    assert path.stat().st_atime_ns == 10**18


async def test_no_descriptor_stays_open(tmp_path, backend):
    def descriptors():
        return {
            os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if _is_open(n)
        }

    for i in range(30):
        (tmp_path / f"f{i}").write_bytes(b"x")
    await collect(backend, b"")
    read_blocking(backend, Place(b"f3"), 0, 10)
    with pytest.raises(NotFound):
        read_blocking(backend, Place(b"nothing"), 0, 10)
    assert not [path for path in descriptors() if path.startswith(os.fspath(tmp_path))]


def _is_open(number):
    return os.path.islink(f"/proc/self/fd/{number}")


async def test_a_root_that_is_missing_appears_later(tmp_path):
    root = tmp_path / "later"
    backend = await open_posix(DeviceId(1), root.as_uri(), {})
    with pytest.raises(NotFound, match="later"):
        await backend.probe()
    root.mkdir()
    assert (await backend.probe()).total > 0
    await backend.aclose()


@pytest.mark.skipif(os.geteuid() != 0, reason="has to become another user")
async def test_a_file_that_may_not_be_read_says_so():
    with tempfile.TemporaryDirectory(prefix="hsfs-posix-", dir="/var/tmp") as folder:
        os.chmod(folder, 0o755)
        path = os.path.join(folder, "file")
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0))
        backend = await open_posix(DeviceId(1), f"file://{folder}", {})
        os.seteuid(65534)
        try:
            with pytest.raises(Unauthorised, match="may read"):
                read_blocking(backend, Place(b"file"), 0, 10)
        finally:
            os.seteuid(0)
        await backend.aclose()


@pytest.mark.parametrize(
    "url", ["file://host/dir", "file:dir", "file:", "http:///dir", "file:///a%00b"]
)
async def test_urls_that_are_none(url):
    with pytest.raises(UsageError):
        await open_posix(DeviceId(1), url, {})


@pytest.mark.parametrize("value", [0, -1, "soon"])
async def test_timeouts_that_are_none(value):
    with pytest.raises(ConfigError):
        await open_posix(DeviceId(1), "file:///dir", {"timeout": value})


MOUNTS = b"""\
22 1 8:1 / / rw - ext4 /dev/sda1 rw
23 22 0:5 / /proc rw - proc proc rw
40 22 0:40 / /nas rw shared:1 - nfs4 server:/x rw
41 22 8:2 / /with\\040space rw - xfs /dev/sdb rw
42 41 0:41 / /with\\040space/deep rw - fuse.sshfs host: rw
43 22 0:43 / /over rw - nfs server:/y rw
44 22 0:44 / /over rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("path", "hangs"),
    [
        (b"/home/data", False),
        (b"/nas", True),
        (b"/nas/below", True),
        (b"/nasty", False),
        (b"/with space/x", False),
        (b"/with space", True),  # a network mount lies below
        (b"/with space/deep/er", True),
        (b"/over/x", False),  # the newer mount hides the older
        (b"/", False),
    ],
)
def test_which_mounts_may_hang(path, hangs, monkeypatch):
    monkeypatch.setattr(posix_guard.Path, "read_bytes", lambda _: MOUNTS)
    assert may_hang(path) == hangs


def test_a_guarded_call_that_hangs_is_left_behind():
    guard = Guard("dir")
    release = threading.Event()
    with pytest.raises(TimedOut):
        guard.run(lambda: release.wait(60), 0.05, Switch())
    assert guard.run(lambda: 42, 60, Switch()) == 42
    switch = Switch()
    threading.Timer(0.05, switch.set).start()
    with pytest.raises(Interrupted):
        guard.run(lambda: release.wait(60), 60, switch)
    with pytest.raises(ZeroDivisionError):
        guard.run(lambda: 1 // 0, 60, Switch())
    for _ in range(STUCK_MAX):
        with pytest.raises(TimedOut):
            guard.run(lambda: release.wait(60), 0.001, Switch())
    with pytest.raises(TimedOut, match="hang"):
        guard.run(lambda: 42, 60, Switch())
    release.set()
    answered = None
    for _ in range(6000):
        try:
            answered = guard.run(lambda: 42, 60, Switch())
            break
        except TimedOut:
            threading.Event().wait(0.01)
    assert answered == 42


def test_many_guarded_calls_at_once():
    guard = Guard("dir")
    results = []

    def work(i):
        results.extend(
            guard.run(lambda j=j: i * 1000 + j, 60, Switch()) == i * 1000 + j for j in range(50)
        )

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [True] * 400
