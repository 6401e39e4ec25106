"""Every kind of name end to end: odd keys on a server that keeps them (moto), odd names on NFS and
in a local folder. Each is listed, looked up and read with its own bytes, and found by no other
name."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.mount.command import Hsfs, eventually
from tests.servers.dataset import ODD_NAMES
from tests.servers.ganesha import Ganesha
from tests.servers.moto_server import Moto

LONG = b"x" * 300
LONGEST = "ü".encode() * 500  # with its prefix nearly the 1024 bytes that a key may have

# Key of the bucket (mounted at the root) -> its path in the mount.
KEYS = {
    b"plain": b"plain",
    b"a//b": b"a/%~e/b",
    b"/lead": b"%~e/lead",
    b"//": b"%~e/%~e/%~m",
    b"dots/./x": b"dots/%~d/x",
    b"dots/../x": b"dots/%~dd/x",
    b"ends/.": b"ends/%~d",
    b"ends/..": b"ends/%~dd",
    b"ends/...": b"ends/...",
    b"control/a\x01b": b"control/a\x01b",
    b"control/\x1b[31m": b"control/\x1b[31m",
    b"control/tab\there": b"control/tab\there",
    b"control/return\r": b"control/return\r",
    b"control/\x7f": b"control/\x7f",
    b"both": b"both%~o",
    b"both/inner": b"both/inner",
    b".": b"%~d",
    b"mark/": b"mark/%~m",
    b"mark/x": b"mark/x",
    b"only-mark/": b"only-mark/%~m",
    b"%~41": b"%~25%~7E41",
    b"lead%~": b"lead%~25%~7E",
    b"lead%~o": b"lead%~25%~7Eo",
    b"lead%~m/%~m": b"lead%~25%~7Em/%~25%~7Em",
    b"%41%2F": b"%41%2F",
    b"raw%~FF": b"raw\xff",
    b".hsfs": b"%~2Ehsfs",
    b"below/.hsfs": b"below/.hsfs",
    b"long/" + LONG: b"long/%~+" + b"x" * 200 + b"/" + b"x" * 100,
    b"long/" + b"y" * 200: b"long/" + b"y" * 200,
    b"long/" + LONG + b"/inside": b"long/%~+" + b"x" * 200 + b"/" + b"x" * 100 + b"/inside",
    b"deep/" + LONGEST: b"deep/" + (b"%~+" + LONGEST[:200] + b"/") * 4 + LONGEST[:200],
    b"amp&lt;<>\"'": b"amp&lt;<>\"'",
    b"plus +": b"plus +",
    b"q?#;=,": b"q?#;=,",
    b" lead and trail ": b" lead and trail ",
    b"back\\slash": b"back\\slash",
    "日本語/\U0001f600".encode(): "日本語/\U0001f600".encode(),
    "u\u0308 and ü".encode(): "u\u0308 and ü".encode(),
}
# The object beside the prefix of its name, where the name is too long as well.
KEYS[b"long/" + LONG] = b"long/%~+" + b"x" * 200 + b"/" + b"x" * 100 + b"%~o"
EMPTY_MARKER = b"empty/"

# No key has any of these names.
ABSENT = [
    b"%~41",
    b"%~2ehsfs",
    b"%~zz",
    b"%~",
    b"%~e%~o",
    b"plain%~o",
    b"%~70lain",
    b"a/%~e%~e",
    b"a/%~E/b",
    b"a/b",
    b"dots/%~2E",
    b"dots/%~2E%~2E",
    b"ends/%~d%~o",
    b"both%~o%~o",
    b"both%~m",
    b"both/%~m",
    b"mark/%~m%~o",
    b"mark/%~e",
    b"empty/%~m",
    b"lead%~",
    b"lead%~o",
    b"raw%~FF",
    b"raw%~25%~7EFF",
    b"below/%~2Ehsfs",
    b"long/" + b"x" * 255,
    b"long/%~+" + b"x" * 100,
    b"long/%~+" + b"x" * 200 + b"/" + b"x" * 99,
    b"long/%~+" + b"y" * 200,
    b"long/%~+" + b"x" * 200 + b"/%~m",
    b"control/a%~01b",
]


def body(key):
    return b"content of " + key


@pytest.fixture(scope="module")
def servers():
    folder = Path(tempfile.mkdtemp(prefix="hsfs-test-names-", dir="/var/tmp"))
    with Moto() as moto, Ganesha(folder) as nas:
        moto.create_bucket("odd")
        client = moto.client()
        for key in KEYS:
            client.put_object(Bucket="odd", Key=key.decode(), Body=body(key))
        client.put_object(Bucket="odd", Key=EMPTY_MARKER.decode(), Body=b"")
        for name in ODD_NAMES:
            (folder / os.fsdecode(name)).write_bytes(body(name))
        yield moto, nas, client
        client.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module", params=["full", "lazy"])
def world(request, servers):
    """Scanned at once, or looked at where somebody looks: other ways to the same names."""
    moto, nas, client = servers
    with Hsfs(moto.env) as hsfs:
        local = hsfs.root / "src"
        shutil.copytree(nas.export, local)
        bucket = {"name": "odd", "url": f"s3://odd?endpoint={moto.endpoint}", "at": "/"}
        tables = [
            {**bucket, "freshness": "1s"},
            {"name": "nfs", "url": nas.url, "at": "/nfs"},
            {"name": "file", "url": f"file://{local}", "at": "/file"},
        ]
        mnt = hsfs.mountpoint()
        hsfs.mount(hsfs.volume(*({**table, "scan": request.param} for table in tables)), mnt)
        yield hsfs, os.fsencode(mnt), client


@pytest.fixture(autouse=True)
def logs(world):
    yield
    print(world[0].logs(60))


def directory_of(path):
    return path.rpartition(b"/")[0]


def names_in(reader, path):
    """Names in a directory, as bytes."""
    found = reader.list(path)
    assert isinstance(found, list), (path, found)
    return {os.fsencode(name) for name in found}


def test_keys_listed_and_read(world):
    hsfs, mnt, _ = world
    reader = hsfs.reader()
    for key, path in KEYS.items():
        assert reader.read(mnt + b"/" + path).is_(body(key)), (key, path)
        assert reader.do("stat", path=mnt + b"/" + path)["size"] == len(body(key)), key
    want = {}
    for path in [*KEYS.values(), b"nfs/", b"file/", b"empty/"]:
        parts = path.rstrip(b"/").split(b"/")
        for depth in range(len(parts)):
            want.setdefault(b"/".join(parts[:depth]), set()).add(parts[depth])
    want[b"empty"] = set()
    for directory, names in want.items():
        if directory.partition(b"/")[0] not in (b"nfs", b"file"):
            assert names_in(reader, mnt + b"/" + directory) == names, directory
    inos = {reader.ino(mnt + b"/" + path) for path in KEYS.values()}
    assert len(inos) == len(KEYS)


def test_no_key_has_two_names(world):
    hsfs, mnt, _ = world
    reader = hsfs.reader()
    for path in ABSENT:
        assert reader.ino(mnt + b"/" + path) == "ENOENT", path
    assert reader.ino(mnt + b"/long/" + b"x" * 256) == "ENAMETOOLONG"
    assert reader.read(mnt + b"/plain/x").errno == "ENOTDIR"
    assert names_in(reader, mnt + b"/.hsfs") >= {b"stats", b"config"}


@pytest.mark.parametrize("kind", ["nfs", "file"])
def test_names_of_file_systems(world, kind):
    hsfs, mnt, _ = world
    reader = hsfs.reader()
    place = mnt + b"/" + kind.encode()
    shown = {name: name.replace(b"%~", b"%~25%~7E") for name in ODD_NAMES}
    for name, there in shown.items():
        assert reader.read(place + b"/" + there).is_(body(name)), name
        assert reader.do("stat", path=place + b"/" + there)["size"] == len(body(name)), name
    assert names_in(reader, place) == set(shown.values())
    for name in (b"%~41", b"%~25%~7E", b"percent%~41", b"with space%~o", b"%~e", b"%~d", b"%~dd"):
        assert reader.ino(place + b"/" + name) == "ENOENT", name
    assert reader.ino(place + b"/" + b"n" * 256) == "ENAMETOOLONG"


def test_verbs_take_any_name(world):
    hsfs, mnt, _ = world
    for name in (b"new\nline", b"not utf-8 \xff\xfe", b"-rf", b"n" * 255, b"%~25%~7E41"):
        info = hsfs.info(Path(os.fsdecode(mnt + b"/file/" + name)))
        assert info["size"] > 0, info
    info = hsfs.info(Path(os.fsdecode(mnt + b"/both%~o")))
    assert info["replicas"][0]["key"] == "both"
    info = hsfs.info(Path(os.fsdecode(mnt + b"/%~e/%~e/%~m")))
    assert info["replicas"][0]["key"] == "//"


def test_an_object_and_a_prefix_of_its_name_come_and_go(world):
    """`flip` and `flip%~o` are one inode; a prefix without keys is gone."""
    hsfs, mnt, client = world
    reader = hsfs.reader()

    def names():
        return names_in(reader, mnt) & {b"flip", b"flip%~o"}

    client.put_object(Bucket="odd", Key="flip", Body=b"object")
    eventually(lambda: names() == {b"flip"}, names)
    ino = reader.ino(mnt + b"/flip")
    assert reader.read(mnt + b"/flip").is_(b"object")
    client.put_object(Bucket="odd", Key="flip/x", Body=b"below")
    eventually(lambda: names() == {b"flip", b"flip%~o"}, names)
    assert reader.ino(mnt + b"/flip%~o") == ino
    assert reader.read(mnt + b"/flip%~o").is_(b"object")
    hsfs.seen(lambda: reader.read(mnt + b"/flip/x"), b"below")
    assert reader.ino(mnt + b"/flip") != ino
    client.delete_object(Bucket="odd", Key="flip/x")
    eventually(lambda: names() == {b"flip"}, names)
    eventually(lambda: reader.ino(mnt + b"/flip") == ino, lambda: reader.ino(mnt + b"/flip"))
    hsfs.seen(lambda: reader.read(mnt + b"/flip"), b"object")
    client.delete_object(Bucket="odd", Key="flip")
    eventually(lambda: names() == set(), names)
    eventually(lambda: reader.ino(mnt + b"/flip") == "ENOENT", "gone")
