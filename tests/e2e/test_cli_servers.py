"""One tree from a real NFS server and a real S3 server through the command, and what happens when
they go away, refuse us, or come back."""

import hashlib
import os
import subprocess
import time

import pytest

from tests.e2e.hsfs_command import Sandbox, eventually
from tests.servers.ganesha import Ganesha
from tests.servers.seaweedfs import SeaweedFS


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    (folder / "sub").mkdir()
    (folder / "nas.bin").write_bytes(os.urandom(2_500_000))
    (folder / "sub" / "small").write_bytes(b"from the nas\n")
    return folder


@pytest.fixture(scope="module")
def nas(export):
    with Ganesha(export) as server:
        yield server


@pytest.fixture(scope="module")
def s3():
    with SeaweedFS(identities={"reader": "secret"}) as server:
        server.create_bucket("lake")
        server.put_many("lake", [("v1/obj.bin", os.urandom(5_000_000)), ("v1/a/small", b"s3\n")])
        yield server


@pytest.fixture
def box():
    with Sandbox() as sandbox:
        yield sandbox


def digest(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def test_one_tree_of_both(box, nas, s3, export):
    mnt = box.mountpoint()
    environment = {**box.environment, **s3.env}
    box.mount(
        "--backend",
        f"/data={nas.url}",
        "--backend",
        f"/data=s3://lake/v1?endpoint={s3.endpoint}",
        mnt,
        env=environment,
    )
    assert sorted(os.listdir(mnt / "data")) == ["a", "nas.bin", "obj.bin", "sub"]
    assert digest(mnt / "data/nas.bin") == digest(export / "nas.bin")
    assert len((mnt / "data/obj.bin").read_bytes()) == 5_000_000
    assert (mnt / "data/a/small").read_bytes() == b"s3\n"
    assert (mnt / "data/sub/small").read_bytes() == b"from the nas\n"
    infos = box.json("info", mnt / "data/nas.bin", mnt / "data/obj.bin")["paths"]
    assert [i["replicas"][0]["backend"] for i in infos] == ["data", "data-2"]
    assert infos[1]["replicas"][0]["key"] == "obj.bin"
    stats = box.json("stats", mnt)
    assert stats["backend_bytes"]["data"] >= 2_500_000
    assert stats["backend_bytes"]["data-2"] >= 5_000_000
    warmed = box.json("warmup", mnt / "data")
    assert (warmed["files"], warmed["bytes"], warmed["failed"]) == (4, 7_500_016, 0)
    box.run("umount", mnt, check=0)
    tested = box.json(
        "backend", "test", "--backend", f"/d=s3://lake/v1?endpoint={s3.endpoint}", env=environment
    )
    assert tested["backends"][0]["entries"] == 2


def test_refused_and_missing(box, nas, s3):
    bad = {"AWS_ACCESS_KEY_ID": "reader", "AWS_SECRET_ACCESS_KEY": "wrong"}
    environment = {**box.environment, **s3.env, **bad}
    mnt = box.mountpoint()
    missing = nas.url.replace(str(nas.export), str(nas.export) + "-absent")
    words = [
        *("--backend", f"/s3=s3://lake/v1?endpoint={s3.endpoint}"),
        *("--backend", f"/gone={missing}"),
        *("--backend", f"/nas={nas.url}"),
    ]
    done = box.mount(*words, mnt, env=environment)
    assert "unauthorised" in done.stderr
    assert done.stderr.count("\n") == 2, done.stderr
    assert os.listdir(mnt / "nas/sub") == ["small"]
    status = box.json("status", mnt, check=3)["mounts"][0]
    states = {b["name"]: b["state"] for b in status["backends"]}
    assert (states["s3"], states["nas"]) == ("unauthorised", "ok")
    assert states["gone"] in ("missing", "unauthorised")
    assert "wrong" not in str(status)
    box.run("umount", mnt, check=0)
    strict = box.mount(*words, mnt, "--strict", env=environment, check=32)
    assert 'backend "' in strict.stderr
    assert not box.mounted(mnt)


def test_a_dead_backend_holds_nobody(box, nas):
    """A reader waits for a stopped server; status, df and umount --force do not."""
    mnt = box.mountpoint()
    volume = box.volume(
        {"name": "nas", "url": nas.url, "at": "/", "timeout": "60s", "freshness": "1h"}
    )
    box.mount(volume, mnt)
    assert (mnt / "sub/small").read_bytes() == b"from the nas\n"
    assert os.stat(mnt / "nas.bin").st_size == 2_500_000
    nas.pause()
    try:
        reader = subprocess.Popen(
            ["cat", str(mnt / "nas.bin")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        began = time.monotonic()
        assert box.status(mnt)["volume"] == box.name
        subprocess.run(["df", str(mnt)], check=True, capture_output=True, timeout=60)
        box.run("umount", mnt, "--force", check=0)
        assert time.monotonic() - began < 45  # 6 s on a quiet machine
        assert reader.wait(30) != 0
    finally:
        nas.resume()
    assert not box.mounted(mnt)


def test_a_server_that_comes_back(box, export):
    mnt = box.mountpoint()
    with Ganesha(export) as nas:
        volume = box.volume({"name": "nas", "url": nas.url, "at": "/", "timeout": "3s"})
        nas.kill()
        done = box.mount(volume, mnt)
        assert 'backend "nas"' in done.stderr
        nas.restart()

        def read():
            seen = subprocess.run(
                ["cat", str(mnt / "sub/small")], capture_output=True, timeout=60, check=False
            )
            return seen.stdout == b"from the nas\n"

        assert eventually(read, 120), box.logs()
        assert eventually(lambda: box.status(mnt)["state"] == "ok", 60), box.status(mnt)
        box.run("umount", mnt, check=0)
