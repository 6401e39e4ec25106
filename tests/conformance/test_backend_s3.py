"""The s3:// backend passes the suite of all backends on three real servers.

SeaweedFS is the main one; moto keeps every key, so the odd ones are proved there; rclone is a poor
server (ranges answered with 200, conditions ignored), whose source is a folder.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
from pathlib import Path
from urllib.parse import quote_from_bytes

import pytest

from hsfs.backends.s3_backend import open_s3
from hsfs.core.errors import NotFound, Unauthorised, Unavailable
from hsfs.core.types import DeviceId, FileType, Place
from tests.conformance.backend_suite import Subject, case_id, cases, listing, pages, read
from tests.servers.certificates import make_certificates
from tests.servers.moto_server import Moto
from tests.servers.ports import free_port
from tests.servers.rclone_s3 import RcloneS3
from tests.servers.seaweedfs import SeaweedFS

BUCKET = "suite"
_NUMBERS = itertools.count()


class HttpTree:
    """Writes exactly the key it is told to, over one connection, with a signature that neither
    server looks at."""

    def __init__(self, port, prefix):
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._root = b"/" + BUCKET.encode() + b"/" + prefix

    def write(self, key, data):
        self._do("PUT", key, data)

    def remove(self, key):
        self._do("DELETE", key, None)

    def close(self):
        self._connection.close()

    def _do(self, method, key, data):
        target = quote_from_bytes(self._root + key, safe="/~")
        self._connection.request(method, target, body=data, headers={"Authorization": "AWS a:b"})
        reply = self._connection.getresponse()
        body = reply.read()
        assert reply.status < 300, (method, key, reply.status, body)


class FolderTree:
    """Writes into the folder that rclone serves."""

    def __init__(self, root, prefix):
        self._root = os.fsencode(root) + b"/" + BUCKET.encode() + b"/" + prefix

    def write(self, key, data):
        path = self._root + key
        os.makedirs(os.path.dirname(path), exist_ok=True)
        Path(os.fsdecode(path)).write_bytes(data)

    def remove(self, key):
        os.unlink(self._root + key)

    def close(self):
        pass


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("tls")), free_port()


@pytest.fixture(scope="module")
def seaweedfs(tls):
    made, port = tls
    flags = [f"-s3.port.https={port}", f"-s3.cert.file={made.certificate}"]
    with SeaweedFS(extra_args=[*flags, f"-s3.key.file={made.key}"]) as server:
        server.create_bucket(BUCKET)
        yield server


@pytest.fixture(scope="module")
def moto():
    with Moto() as server:
        server.create_bucket(BUCKET)
        yield server


@pytest.fixture(scope="module")
def rclone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rclone")
    with RcloneS3(folder) as server:
        server.create_bucket(BUCKET)
        yield server, folder


@contextlib.asynccontextmanager
async def subject_of(server, monkeypatch, tree_of=None, **options):
    """A backend over a prefix of its own."""
    for name, value in server.env.items():
        if name != "AWS_ENDPOINT_URL_S3":
            monkeypatch.setenv(name, value)
    prefix = b"case%d/" % next(_NUMBERS)
    tree = tree_of(prefix) if tree_of else HttpTree(server.port, prefix)
    url = f"s3://{BUCKET}/{prefix.decode()}"
    options = {"endpoint": server.endpoint, "timeout": 60.0, **options}
    backend = await open_s3(DeviceId(1), url, options)
    try:
        yield Subject(backend, tree)
    finally:
        await backend.aclose()
        tree.close()


# SeaweedFS turns a backslash in a key into a slash.
_PLAIN = [case for case in cases(flat=True) if case_id(case) != "names_are_bytes"]


@pytest.mark.parametrize("case", _PLAIN, ids=case_id)
async def test_seaweedfs(case, seaweedfs, monkeypatch):
    async with subject_of(seaweedfs, monkeypatch) as subject:
        await case(subject)


@pytest.mark.parametrize("case", _PLAIN, ids=case_id)
async def test_seaweedfs_over_tls(case, seaweedfs, tls, monkeypatch):
    made, port = tls
    options = {"endpoint": f"https://127.0.0.1:{port}", "ca_bundle": str(made.authority)}
    async with subject_of(seaweedfs, monkeypatch, **options) as subject:
        await case(subject)


async def test_a_stranger_with_a_certificate_is_refused(seaweedfs, tls, monkeypatch):
    endpoint = f"https://127.0.0.1:{tls[1]}"
    async with subject_of(seaweedfs, monkeypatch, endpoint=endpoint) as subject:
        with pytest.raises(Unavailable, match="certificate"):
            await subject.backend.probe()


# moto takes 3 ms per object: its pages are looked at with the listings below.
_FEW = [case for case in cases(flat=True) if "many_pages" not in case_id(case)]


@pytest.mark.parametrize("case", _FEW, ids=case_id)
async def test_moto(case, moto, monkeypatch):
    async with subject_of(moto, monkeypatch) as subject:
        await case(subject)


@pytest.mark.parametrize("case", cases(flat=True), ids=case_id)
async def test_rclone(case, rclone, monkeypatch):
    server, folder = rclone
    async with subject_of(server, monkeypatch, lambda p: FolderTree(folder, p)) as subject:
        await case(subject)


async def keys_of(backend, prefix=b"", after=None):
    """What list_flat gives: keys in their order."""
    found, cursors = [], []
    async for page in backend.list_flat(Place(prefix), after=after):
        found += [entry.place.key for entry in page.entries]
        cursors.append(page.cursor)
        assert all(e.name == b"" and e.type is FileType.FILE for e in page.entries)
    assert cursors[-1] == b""
    return found


# In the order of their bytes; a server that keeps a tree lists `x/...` before `x-1` and `x.json`.
TREE = sorted(
    [b"a-b", b"a.json", b"a/1", b"a/b-c", b"a/b.txt", b"a/b/1", b"a/b/2", b"a0"]
    + [b"train.json", b"z/only/deep/1", b"z/only/deep/2"]
    + [b"train/%04d" % i for i in range(1050)]
    + [b"with space/plus+sign", b"with space/a b", b"x+y/1", b"x y/1"]
)


@pytest.fixture(params=["seaweedfs", "moto", "rclone"])
def any_server(request):
    got = request.getfixturevalue(request.param)
    if request.param != "rclone":
        return got, None
    return got[0], lambda prefix: FolderTree(got[1], prefix)


async def test_listings_are_in_byte_order_on_every_server(any_server, monkeypatch):
    server, tree_of = any_server
    async with subject_of(server, monkeypatch, tree_of) as subject:
        for key in TREE:
            subject.tree.write(key, b"x")
        for _ in range(2):  # the second time the server's kind is known
            assert await keys_of(subject.backend) == TREE
        for after in (b"a.json", b"a/b/1", b"train/0777", b"train/1049", b"zz"):
            want = [key for key in TREE if key > after]
            assert await keys_of(subject.backend, after=after) == want
        below = [key for key in TREE if key.startswith(b"a/")]
        assert await keys_of(subject.backend, b"a/") == below
        root = list(await listing(subject, Place(b"")))
        want = {key.partition(b"/")[0] + (b"/" if b"/" in key else b"") for key in TREE}
        assert root == sorted(want)


@pytest.mark.parametrize("any_server", ["seaweedfs", "rclone"], indirect=True)
async def test_pages_of_siblings_that_sort_apart(any_server, monkeypatch):
    """`d/` among `d-...` over page ends: each once, in order, and any page can be resumed."""
    server, tree_of = any_server
    async with subject_of(server, monkeypatch, tree_of) as subject:
        names = [b"d%03d" % i for i in range(700)]
        for name in names:
            subject.tree.write(name + b"-x", b"")
            subject.tree.write(name + b"/x", b"")
        want = sorted([n + b"-x" for n in names] + [n + b"/" for n in names])
        whole = await pages(subject, Place(b""))
        got = [e.place.key for page in whole for e in page.entries]
        assert got == want
        assert len(whole) > 1
        seen = 0
        for page in whole[:-1]:
            seen += len(page.entries)
            rest = await pages(subject, Place(b""), after=page.cursor)
            assert [e.place.key for p in rest for e in p.entries] == want[seen:]


ODD = [b"//", b"//x", b"/lead", b"a//b", b"a/./b", b"a/../b", b"a/.", b"./x", b"../y", b"..", b"."]
ODD += [b"a/", b"dir/", b"c\x01d", b"tab\t\x1b", b"del\x7f", b"%41", b"a%2Fb", b"back\\slash"]
ODD += [b"+plus +", b"x/y/", "\u00fc/\u65e5".encode(), b"a&b<c>\"d'", b"trail ", b" lead", b"#?;=,"]


async def test_odd_keys_end_to_end(moto, monkeypatch):
    async with subject_of(moto, monkeypatch) as subject:
        for key in ODD:
            subject.tree.write(key, b"content of " + key)
        backend = subject.backend
        assert await keys_of(backend) == sorted(ODD)
        found, todo = {}, [b""]
        while todo:
            directory = todo.pop()
            for page in await pages(subject, Place(directory)):
                for entry in page.entries:
                    if entry.type is FileType.DIRECTORY:
                        assert entry.place.key == directory + entry.name + b"/"
                        assert (await backend.stat(entry.place)).type is FileType.DIRECTORY
                        todo.append(entry.place.key)
                    else:
                        assert entry.place.key == directory + entry.name
                        found[entry.place.key] = entry
        assert sorted(found) == sorted(ODD)
        for key, entry in found.items():
            stat = await backend.stat(entry.place)
            assert (stat.type, stat.version, stat.size) == (
                FileType.FILE,
                entry.version,
                len(b"content of " + key),
            )
            got = await read(subject, entry.place, 0, 100, expect=entry.version)
            assert got == b"content of " + key


async def test_an_empty_marker_is_its_directory(moto, monkeypatch):
    async with subject_of(moto, monkeypatch) as subject:
        subject.tree.write(b"empty/", b"")
        subject.tree.write(b"full/", b"content")
        subject.tree.write(b"full/file", b"x")
        assert (await subject.backend.stat(Place(b"empty/"))).type is FileType.DIRECTORY
        assert await listing(subject, Place(b"empty/")) == {}
        entries = [e for p in await pages(subject, Place(b"full/")) for e in p.entries]
        assert [(e.name, e.place.key, e.size) for e in entries] == [
            (b"", b"full/", 7),
            (b"file", b"full/file", 1),
        ]


async def test_probe_of_what_is_not_there(seaweedfs, monkeypatch):
    for name, value in seaweedfs.env.items():
        monkeypatch.setenv(name, value)
    backend = await open_s3(DeviceId(1), "s3://nowhere", {"endpoint": seaweedfs.endpoint})
    with pytest.raises(NotFound, match="nowhere"):
        await backend.probe()
    await backend.aclose()
    gone = {"endpoint": "http://127.0.0.1:9", "timeout": 5}
    backend = await open_s3(DeviceId(1), f"s3://{BUCKET}", gone)
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:9"):
        await backend.probe()
    await backend.aclose()


async def test_credentials_that_are_refused(monkeypatch):
    with SeaweedFS(identities={"good": "secretsecret"}) as server:
        server.create_bucket(BUCKET)
        server.put_many(BUCKET, [("file", b"hello")])
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        options = {"endpoint": server.endpoint, "timeout": 20}
        backend = await open_s3(DeviceId(1), f"s3://{BUCKET}", options)
        await backend.probe()
        assert (await backend.stat(Place(b"file"))).size == 5
        await backend.aclose()
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrongwrong")
        backend = await open_s3(DeviceId(1), f"s3://{BUCKET}", options)
        with pytest.raises(Unauthorised, match="check") as refused:
            await backend.probe()
        assert "wrongwrong" not in str(refused.value)
        await backend.aclose()
        backend = await open_s3(DeviceId(1), f"s3://{BUCKET}?anonymous=true", options)
        with pytest.raises(Unauthorised):
            await backend.stat(Place(b"file"))
        await backend.aclose()
