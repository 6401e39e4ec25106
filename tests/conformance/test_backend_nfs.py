"""The NFSv3 client against NFS-Ganesha: the common suite and what only NFS has."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import socket
import stat
import tempfile
from pathlib import Path

import pytest
import trio

from hsfs.backends.nfs_backend import NfsBackend, open_nfs
from hsfs.core.errors import NotFound, NotSupported, Unauthorised
from hsfs.core.types import DeviceId, FileType, Place, Version
from tests.conformance.backend_suite import (
    Subject,
    Switch,
    case_id,
    cases,
    listing,
    read_blocking,
)
from tests.conformance.native_tree import NativeTree
from tests.servers.ganesha import Ganesha


@pytest.fixture(scope="module")
def ganesha():
    folder = Path(tempfile.mkdtemp(prefix="hsfs-nfs-test-", dir="/var/tmp"))
    try:
        with Ganesha(folder) as server:
            yield server
    finally:
        shutil.rmtree(folder)


@contextlib.asynccontextmanager
async def nfs_subject(ganesha: Ganesha, **options):
    """A backend over an empty directory of the export."""
    folder = Path(tempfile.mkdtemp(prefix="case", dir=ganesha.export))
    backend = await open_nfs(
        DeviceId(1), ganesha.url_of(os.fspath(folder)), {"timeout": 60.0, **options}
    )
    try:
        yield Subject(backend, NativeTree(folder))
    finally:
        await backend.aclose()


@pytest.mark.parametrize("case", cases(flat=False), ids=case_id)
async def test_suite(case, ganesha):
    async with nfs_subject(ganesha) as subject:
        assert isinstance(subject.backend, NfsBackend)
        await case(subject)


async def in_thread(function, *args, **kwargs):
    return await trio.to_thread.run_sync(lambda: function(*args, **kwargs))


async def test_sha_of_64_mib_over_several_lanes(ganesha):
    async with nfs_subject(ganesha, connections=4) as subject:
        size, piece = 64 << 20, 3 << 20
        data = random.Random(64).randbytes(size)
        subject.tree.write(b"big", data)
        big = await subject.backend.stat(Place(b"big"))
        got = bytearray(size)

        async def one(offset):
            view = memoryview(got)[offset : offset + piece]
            n = await in_thread(
                subject.backend.read_into,
                big.place,
                offset,
                view,
                expect=Version(big.version),
                interrupt=Switch(),
            )
            assert n == len(view)

        async with trio.open_nursery() as nursery:
            for offset in range(0, size, piece):
                nursery.start_soon(one, offset)
        assert hashlib.sha256(got).digest() == hashlib.sha256(data).digest()


async def test_every_type_is_told_and_only_files_are_read(ganesha):
    async with nfs_subject(ganesha) as subject:
        path = subject.tree.path
        os.mkfifo(path(b"fifo"))
        os.mknod(path(b"null"), stat.S_IFCHR | 0o600, os.makedev(1, 3))
        os.mknod(path(b"loop"), stat.S_IFBLK | 0o600, os.makedev(7, 200))
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(path(b"sock"))
        sock.close()
        subject.tree.write(b"file", b"hello")
        os.chown(path(b"file"), 1234, 5678)
        os.chmod(path(b"file"), 0o4751)
        os.link(path(b"file"), path(b"again"))
        found = await listing(subject, Place(b""))
        assert {n: e.type for n, e in found.items()} == {
            b"fifo": FileType.FIFO,
            b"null": FileType.CHARACTER,
            b"loop": FileType.BLOCK,
            b"sock": FileType.SOCKET,
            b"file": FileType.FILE,
            b"again": FileType.FILE,
        }
        file = found[b"file"]
        assert (file.mode, file.uid, file.gid, file.nlink) == (0o4751, 1234, 5678, 2)
        assert found[b"again"].identity == file.identity
        assert found[b"null"].rdev == os.makedev(1, 3)
        for name in (b"fifo", b"null", b"sock"):
            with pytest.raises(NotSupported):
                await in_thread(read_blocking, subject.backend, found[name].place, 0, 10)


async def test_names_of_any_bytes(ganesha):
    names = [b"\xff\xfe", b"caf\xe9", b"new\nline", b"tab\t", b"\x01", b"x" * 255]
    async with nfs_subject(ganesha) as subject:
        for i, name in enumerate(names):
            subject.tree.write(b"d/" + name, b"%d" % i)
        found = await listing(subject, Place(b"d"))
        assert set(found) == set(names)
        for i, name in enumerate(names):
            by_key = await subject.backend.stat(Place(b"d/" + name))
            assert by_key.version == found[name].version
            got = await in_thread(read_blocking, subject.backend, Place(b"d/" + name), 0, 9)
            assert got == b"%d" % i


async def test_a_handle_follows_a_native_rename(ganesha):
    async with nfs_subject(ganesha) as subject:
        subject.tree.write(b"a/file", b"hello")
        old = await subject.backend.stat(Place(b"a/file"))
        subject.tree.mkdir(b"b")
        subject.tree.rename(b"a/file", b"b/moved")
        new = await subject.backend.stat(old.place)
        assert (new.identity, new.place.handle) == (old.identity, old.place.handle)
        got = await in_thread(
            read_blocking, subject.backend, old.place, 0, 9, expect=Version(new.version)
        )
        assert got == b"hello"
        with pytest.raises(NotFound):
            await subject.backend.stat(Place(b"a/file"))


async def test_a_fresh_file_becomes_trusted(ganesha):
    async with nfs_subject(ganesha) as subject:
        subject.tree.write(b"file", b"hello")
        assert not (await subject.backend.stat(Place(b"file"))).strong
        strong = False
        with trio.fail_after(60):
            while not strong:
                await trio.sleep(0.1)
                strong = (await subject.backend.stat(Place(b"file"))).strong


async def test_a_directory_of_20_000_files(ganesha):
    async with nfs_subject(ganesha) as subject:
        root = subject.tree.root
        for i in range(20_000):
            os.close(os.open(root + b"/f%06d" % i, os.O_CREAT | os.O_WRONLY, 0o644))
        found = await listing(subject, Place(b""))
        assert len(found) == 20_000
        assert {e.size for e in found.values()} == {0}


async def test_an_export_that_squashes_root_shows_its_owners_files():
    folder = Path(tempfile.mkdtemp(prefix="hsfs-nfs-squash-", dir="/var/tmp"))
    try:
        tree = NativeTree(folder)
        tree.write(b"private/file", b"secret" * 1000)
        tree.symlink(b"private/link", b"file")
        os.chmod(tree.path(b"private/file"), 0o600)
        os.chmod(tree.path(b"private"), 0o700)
        for key in (b"private/file", b"private", b"private/link"):
            os.chown(tree.path(key), 4321, 4321, follow_symlinks=False)
        os.chmod(folder, 0o755)
        with Ganesha(folder, squash="Root_Squash", access="RO") as server:
            for identity in ("owner", "4321:4321"):
                backend = await open_nfs(
                    DeviceId(1), server.url, {"timeout": 60.0, "identity": identity}
                )
                subject = Subject(backend, tree)
                found = await listing(subject, Place(b"private"))
                assert set(found) == {b"file", b"link"}
                assert found[b"link"].target == b"file"
                place = found[b"file"].place
                assert await in_thread(read_blocking, backend, place, 0, 9000) == b"secret" * 1000
                await backend.aclose()
            backend = await open_nfs(DeviceId(1), server.url, {"timeout": 60.0, "identity": "5:5"})
            with pytest.raises(Unauthorised, match="no_root_squash"):
                await listing(Subject(backend, tree), Place(b"private"))
            await backend.aclose()
    finally:
        shutil.rmtree(folder)


async def test_an_export_that_is_not_there(ganesha):
    url = ganesha.url_of("/no/such/export")
    backend = await open_nfs(DeviceId(1), url, {"timeout": 60.0})
    with pytest.raises(NotFound, match=ganesha.export):
        await backend.probe()
    await backend.aclose()


async def test_a_server_of_version_4_only():
    folder = Path(tempfile.mkdtemp(prefix="hsfs-nfs-four-", dir="/var/tmp"))
    try:
        with Ganesha(folder, protocols="4") as server:
            backend = await open_nfs(DeviceId(1), server.url, {"timeout": 60.0})
            with pytest.raises(NotSupported, match="file:///"):
                await backend.probe()
            await backend.aclose()
    finally:
        shutil.rmtree(folder)
