"""The volume file: every key, and every complaint with its line and next step."""

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsfs.core import settings
from hsfs.core.config import (
    decode_volume,
    default_state,
    encode_volume,
    load_volume,
    parse_volume,
    volume_from_backends,
    volume_name,
    with_cache,
    with_mount_options,
)
from hsfs.core.errors import ConfigError

SOURCE = Path("/etc/hsfs/ai.toml")
GOOD = """\
# a volume
[volume]
name = "ai"
state = "state"

[[backend]]
name = "nas1"
url = "nfs://10.0.0.5/export/data?port=2050&mountport=2051"
at = "/datasets/"
access = "ro"
scan = "lazy"
freshness = "2m"
connections = 8
identity = "caller"

[[backend]]
name = "lake"
url = "s3://training/v1"
at = "/datasets"
endpoint = "http://127.0.0.1:9000"
timeout = "5s"
file_mode = "0640"
rate = 200
bandwidth = "100M/s"

[[backend]]
name = "local"
url = "file:///srv/data"

[cache]
dir = "/nvme/hsfs"
size = "500G"

[mount]
memory_limit = "1G"
readahead = "8M"
fd_limit = 4096

[mds]
listen = "127.0.0.1:7420"
http = "[::1]:7421"
"""


def test_a_whole_volume():
    volume = parse_volume(GOOD, SOURCE)
    assert volume.name == "ai"
    assert volume.state == Path("/etc/hsfs/state")
    assert volume.source == SOURCE
    nas, lake, local = volume.backends
    assert nas.url == "nfs://10.0.0.5/export/data?port=2050&mountport=2051"
    assert nas.at == "/datasets"
    assert nas.options["scan"] == "lazy"
    assert nas.options["freshness"] == 120.0
    assert nas.options["connections"] == 8
    assert nas.options["timeout"] == 30.0
    assert nas.options["port"] == 2050
    assert lake.options["timeout"] == 5.0
    assert lake.options["file_mode"] == 0o640
    assert lake.options["rate"] == 200
    assert lake.options["bandwidth"] == 100 << 20
    assert lake.options["endpoint"] == "http://127.0.0.1:9000"
    assert local.at == "/local"
    assert [b.options["priority"] for b in volume.backends] == [0, 1, 2]
    assert volume.cache.dir == Path("/nvme/hsfs")
    assert volume.cache.size == 500 << 30
    assert volume.mount.memory_limit == 1 << 30
    assert volume.mount.readahead == 8 << 20
    assert volume.mount.fd_limit == 4096
    assert volume.mds.listen == "127.0.0.1:7420"
    assert volume.mds.http == "[::1]:7421"


def test_origins_name_the_line():
    origins = parse_volume(GOOD, SOURCE).origins
    assert origins["volume.name"] == f"{SOURCE}:3"
    assert origins["backend.nas1.connections"] == f"{SOURCE}:13"
    assert origins["backend.lake.bandwidth"] == f"{SOURCE}:24"
    assert origins["mds.http"] == f"{SOURCE}:41"
    assert "backend.local.timeout" not in origins


def test_defaults():
    volume = parse_volume('[volume]\nname="v"\n[[backend]]\nname="b"\nurl="file:///x"', SOURCE)
    assert volume.state == default_state("v")
    assert volume.cache.dir == volume.state / "cache"
    assert volume.cache.size is None
    assert volume.mount.memory_limit == 512 << 20
    assert volume.mds.listen is None
    assert volume.backends[0].options == {
        "access": "ro",
        "scan": "full",
        "freshness": 60.0,
        "reconcile": "off",
        "timeout": 30.0,
        "on_timeout": "error",
        "file_mode": 0o644,
        "dir_mode": 0o755,
        "verify": "hash",
        "stale_ok": False,
        "priority": 0,
    }


def test_a_volume_survives_the_way_to_a_child():
    volume = parse_volume(GOOD, SOURCE)
    assert decode_volume(encode_volume(volume)) == volume
    with pytest.raises(ConfigError):
        decode_volume(b"{}")


HEAD = '[volume]\nname = "ai"\n'
BACKEND = '[[backend]]\nname = "b"\nurl = "s3://bucket"\n'

# text, line, a word of why, a word of the next step
COMPLAINTS = [
    ("[volume]\nnme = 'x'\n" + BACKEND, 2, 'unknown key "nme" in [volume]', 'did you mean "name"'),
    (HEAD + BACKEND + 'acess = "ro"\n', 6, 'unknown key "acess" in [[backend]]', '"access"'),
    (HEAD + BACKEND + '[chache]\nsize = "1G"\n', 6, '"chache"', 'did you mean "cache"'),
    ("name = 'x'\n" + BACKEND, 1, 'unknown table or key "name"', "known are"),
    ("[volume]\n" + BACKEND, 1, "has no name", "add name"),
    (BACKEND, 1, "has no name", "add name"),
    ("[volume]\nname = 3\n" + BACKEND, 2, "must be a string, not a whole number", ""),
    ("[volume]\nname = 'a/b'\n" + BACKEND, 2, "no name for a volume", ""),
    ("[volume]\nname = ''\n" + BACKEND, 2, "must not be empty", ""),
    (HEAD, 1, "has no backend", "[[backend]]"),
    (HEAD + "[backend]\nname='b'\n", 3, "list of tables", "write [[backend]]"),
    ("[[volume]]\nname='b'\n" + BACKEND, 1, "must be one table", "write [volume]"),
    (HEAD + "[[backend]]\nname = 'b'\n", 3, "has no url", "add url"),
    (HEAD + "[[backend]]\nurl = 's3://b'\n", 3, "has no name", "add name"),
    (HEAD + BACKEND + BACKEND, 7, 'two backends are named "b"', "rename"),
    (
        HEAD + BACKEND + "at='/x'\n[[backend]]\nname='c'\nurl='s3://bucket'\nat='/x/'\n",
        9,
        "the same url",
        "drop one",
    ),
    (HEAD + BACKEND + "scan = 'all'\n", 6, 'must be one of "full", "lazy"', ""),
    (HEAD + BACKEND + "scan = true\n", 6, "not a boolean", ""),
    (HEAD + BACKEND + "freshness = 60\n", 6, 'must be a duration like "30s"', ""),
    (HEAD + BACKEND + "freshness = '60'\n", 6, "not a duration", ""),
    (HEAD + BACKEND + "timeout = '10ms'\n", 6, "must lie between", ""),
    (HEAD + BACKEND + "priority = 1.5\n", 6, "must be a whole number, not a number", ""),
    (HEAD + BACKEND + "priority = true\n", 6, "not a boolean", ""),
    (HEAD + BACKEND + "uid = -1\n", 6, "must lie between", ""),
    (HEAD + BACKEND + "file_mode = 644\n", 6, "octal string", ""),
    (HEAD + BACKEND + "file_mode = '0999'\n", 6, "octal mode", ""),
    (HEAD + BACKEND + "stale_ok = 'yes'\n", 6, "must be true or false", ""),
    (HEAD + BACKEND + "bandwidth = 'fast'\n", 6, "not a size", ""),
    (HEAD + BACKEND + "rate = 'x'\n", 6, "requests per second", ""),
    (HEAD + BACKEND + "connections = 4\n", 6, "belongs to nfs:// backends", ""),
    (HEAD + "[[backend]]\nname='n'\nurl='nfs://h/e'\nidentity = 'root'\n", 6, "UID:GID", ""),
    (HEAD + "[[backend]]\nname='n'\nurl='nfs://h/e'\nregion = 'eu'\n", 6, "belongs to s3://", ""),
    (HEAD + BACKEND + "secret_key = 'x'\n", 6, "looks like a secret", "standard chain"),
    (HEAD + BACKEND + "memory_limit = '1G'\n", 6, "unknown key", "it belongs to [mount]"),
    (HEAD + BACKEND + "mirror_of = 'c'\n", 6, "a mirror is not in this version", ""),
    (HEAD + "[[backend]]\nname='b'\nurl='gs://x'\n", 5, "not in this version", "s3://"),
    (HEAD + "[[backend]]\nname='b'\nurl='s4://x'\n", 5, "unknown kind of URL s4://", "known are"),
    (HEAD + "[[backend]]\nname='b'\nurl='bucket'\n", 5, "is not a URL", "s3://"),
    (HEAD + "[[backend]]\nname='b'\nurl='s3://'\n", 5, "names no bucket", "s3://BUCKET"),
    (HEAD + "[[backend]]\nname='b'\nurl='s3://k:v@b'\n", 5, "never stand in a URL", "chain"),
    (HEAD + "[[backend]]\nname='b'\nurl='nfs://h'\n", 5, "names no export", "nfs://HOST/EXPORT"),
    (HEAD + "[[backend]]\nname='b'\nurl='nfs://h:x/e'\n", 5, "bad port", "2049"),
    (HEAD + "[[backend]]\nname='b'\nurl='file://h/x'\n", 5, "has no host", "file:///"),
    (HEAD + "[[backend]]\nname='b'\nurl='s3://b?regoin=x'\n", 5, '"regoin"', '"region"'),
    (HEAD + BACKEND.replace("bucket", "bucket?scan=lazy") + "scan='full'\n", 5, "set twice", ""),
    (HEAD + BACKEND + "at = 'x'\n", 6, "must be an absolute path", '"/x"'),
    (HEAD + BACKEND + "at = '/x/../y'\n", 6, "must not hold", ""),
    (HEAD + BACKEND + "at = '/.hsfs/x'\n", 6, "belongs to hsfs", ""),
    (HEAD + BACKEND + "[cache]\nsize = '255M'\n", 7, "too small: at least 256M", ""),
    (HEAD + BACKEND + "[cache]\nsize = 1.5\n", 7, "must be a size", ""),
    (HEAD + BACKEND + "[cache]\nencrypt = true\n", 7, "encryption of the cache is not in", ""),
    (HEAD + BACKEND + "[mount]\nmemory_limit = '1M'\n", 7, "too small", ""),
    (HEAD + BACKEND + "[mount]\nreadahead = 'some'\n", 7, "not a size", ""),
    (HEAD + BACKEND + "[mds]\nlisten = 'localhost'\n", 7, "HOST:PORT", ""),
    (HEAD + BACKEND + "[mds]\nhttp = '127.0.0.1:99999'\n", 7, "HOST:PORT", ""),
    (HEAD + BACKEND + "[mds]\ntls = 'x'\n", 7, "TLS is not in this version", ""),
    (HEAD + "store = 'postgresql://x'\n" + BACKEND, 3, "PostgreSQL", ""),
    (HEAD + "store = 'sqlite'\n" + BACKEND, 3, 'one of "lmdb"', ""),
    (HEAD + "write_to = 'c'\n" + BACKEND, 3, 'no backend named "c"', "known are: b"),
    (HEAD + "name = 'twice'\n" + BACKEND, 3, "is not TOML", ""),
    (HEAD + "x = \n" + BACKEND, 3, "is not TOML", ""),
    (HEAD + BACKEND + "region = 'never closed\n", 6, "is not TOML", ""),
    (
        HEAD + "state='/srv/st'\n[[backend]]\nname='b'\nurl='file:///srv'\n",
        6,
        "would hold hsfs's own files",
        "move",
    ),
    (HEAD + "state='/srv/st'\n" + BACKEND + "[cache]\ndir='/srv'\n", 8, "can't hold the state", ""),
]


@pytest.mark.parametrize(("text", "line", "why", "step"), COMPLAINTS)
def test_complaints_name_the_line(text, line, why, step):
    with pytest.raises(ConfigError) as caught:
        parse_volume(text, SOURCE)
    error = caught.value
    assert error.what == f"{SOURCE}:{line}", str(error)
    assert why in error.why
    assert step in error.next_step


def test_lines_are_found_behind_strings_arrays_and_inline_tables():
    text = (
        HEAD
        + 'site = """\nname = "no"\n[[backend]]\n"""\n'
        + "[[backend]]\nname = 'b' # url = 'x'\nurl = 's3://bucket'\n'region' = 'eu'\n"
        + "scan = [\n  'url = 1',\n]\n"
    )
    with pytest.raises(ConfigError) as caught:
        parse_volume(text.replace('"""\nname = "no"\n[[backend]]\n"""', "'x'"), SOURCE)
    assert caught.value.what == f"{SOURCE}:8"
    with pytest.raises(ConfigError) as caught:
        parse_volume(text, SOURCE)
    assert caught.value.what == f"{SOURCE}:3"  # a site of several lines
    with pytest.raises(ConfigError) as caught:
        parse_volume("volume = {name = 'a', nme = 1}\n" + BACKEND, SOURCE)
    assert caught.value.what == f"{SOURCE}:1"
    with pytest.raises(ConfigError) as caught:
        parse_volume("\nvolume.name = 'a'\nvolume.nme = 1\n" + BACKEND, SOURCE)
    assert caught.value.what == f"{SOURCE}:3"


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=200))
def test_garbage_is_a_config_error(text):
    with pytest.raises(ConfigError) as caught:
        parse_volume(text, SOURCE)
    assert re.match(rf"{SOURCE}:\d+$", caught.value.what)


@given(st.data())
def test_a_broken_good_file_is_a_volume_or_a_config_error(data):
    at = data.draw(st.integers(0, len(GOOD)))
    cut = data.draw(st.integers(0, 20))
    put = data.draw(st.text(alphabet="[]=\"'\n#{},. a1", max_size=5))
    try:
        parse_volume(GOOD[:at] + put + GOOD[at + cut :], SOURCE)
    except ConfigError as error:
        what = error.what
    else:
        return
    assert re.match(rf"{SOURCE}:\d+$", what)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="no such volume file"):
        load_volume(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="can't be read"):
        load_volume(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"[volume]\nname='\xe9'\n")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_volume(tmp_path / "latin.toml")


def test_state_and_local_paths_are_relative_to_the_file(tmp_path):
    path = tmp_path / "v.toml"
    path.write_text("[volume]\nname='v'\nstate='st'\n[[backend]]\nname='b'\nurl='./da%ta'\n")
    volume = load_volume(path)
    assert volume.state == tmp_path / "st"
    assert volume.backends[0].url == f"file://{tmp_path}/da%25ta"


def test_documented_keys_are_the_known_ones():
    text = (Path(__file__).parents[2] / "docs" / "config.md").read_text()
    sections = re.findall(r"^## \[+(\w+)\]+\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    documented = {
        name: set(re.findall(r"^\| `(\w+)` \|", body, re.MULTILINE)) for name, body in sections
    }
    assert documented == {name: set(keys) for name, keys in settings.TABLES.items()}


# --- --backend ------------------------------------------------------------------------------------


def test_backends_of_a_command_line():
    volume = volume_from_backends(
        "/mnt/x",
        [
            "/data=s3://bucket/p?endpoint=http://127.0.0.1:9000&path_style=false&timeout=5s",
            "/data=nfs://nas/export?port=2050&mountport=2051&freshness=1s",
            "/=file:///srv/my data",
            "/a/b=/srv/plain",
        ],
        anonymous=True,
    )
    s3, nfs, root, plain = volume.backends
    assert (s3.name, s3.at, s3.url) == ("data", "/data", "s3://bucket/p")
    assert s3.options["endpoint"] == "http://127.0.0.1:9000"
    assert s3.options["path_style"] is False
    assert s3.options["anonymous"] is True
    assert s3.options["timeout"] == 5.0
    assert (nfs.name, nfs.at) == ("data-2", "/data")
    assert nfs.url == "nfs://nas/export?port=2050&mountport=2051"
    assert "anonymous" not in nfs.options
    assert (root.name, root.at, root.url) == ("my-data", "/", "file:///srv/my data")
    assert (plain.name, plain.url) == ("b", "file:///srv/plain")
    assert volume.source is None
    assert volume.origins["backend.data.endpoint"] == "--backend"


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("s3://bucket", "is not AT=URL"),
        ("data=s3://bucket", "is not AT=URL"),
        ("/data", "is not AT=URL"),
        ("/data=", "has no URL"),
        ("/data=s3://b?nope=1", 'unknown key "nope"'),
        ("/data=s3://b?timeout=5", "not a duration"),
        ("/data=s3://b?aws_secret_access_key=x", "looks like a secret"),
        ("/data=s3://b?name=x", 'unknown key "name"'),
        ("/data=s3://b?connections=4", "belongs to nfs"),
        ("/data=bucket", "is not a URL"),
    ],
)
def test_bad_backends_of_a_command_line(spec, why):
    with pytest.raises(ConfigError) as caught:
        volume_from_backends("/mnt/x", [spec])
    assert caught.value.what.startswith("--backend ")
    assert why in caught.value.why
    assert "secret_access_key=x" not in str(caught.value)


def test_a_name_belongs_to_a_mountpoint():
    assert volume_name("/mnt/x") == volume_name("/mnt//x/")
    assert volume_name("/a/b") != volume_name("/a-b")
    assert volume_name("/") != volume_name("/root")
    assert volume_name("/mnt/x").startswith("mnt-x-")
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", volume_name("/" + "ä." * 200))


def test_state_home(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_STATE_HOME", "/home/u/st")
    assert default_state("v") == Path("/home/u/st/hsfs/v")
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/u")
    assert default_state("v") == Path("/home/u/.local/state/hsfs/v")


def test_options_of_a_mount():
    volume = parse_volume(GOOD, SOURCE)
    changed = with_cache(volume, Path("/other"), "1G", "-o")
    assert (changed.cache.dir, changed.cache.size) == (Path("/other"), 1 << 30)
    changed = with_mount_options(volume, {"memory_limit": "256M", "readahead": "auto"}, "-o")
    assert changed.mount.memory_limit == 256 << 20
    assert changed.mount.readahead is None
    assert changed.origins["mount.memory_limit"] == "-o"
    with pytest.raises(ConfigError, match="too small"):
        with_cache(volume, None, "1M", "--cache")
    with pytest.raises(ConfigError, match="would hold the cache"):
        with_cache(volume, Path("/srv/data/c"), None, "--cache")
    with pytest.raises(ConfigError, match="can't hold the state"):
        with_cache(volume, Path("/etc/hsfs"), None, "--cache")
    with pytest.raises(ConfigError, match="memory_limit"):
        with_mount_options(volume, {"memory_limit": "x"}, "-o")
