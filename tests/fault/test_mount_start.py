"""Backends that are in trouble when the mount starts: it mounts without them, says which and why,
the others work, and each comes in by itself when its trouble is over. `--strict` refuses."""

import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest

from tests.mount.command import Hsfs, eventually
from tests.servers import ports
from tests.servers.ganesha import Ganesha
from tests.servers.seaweedfs import SeaweedFS

IDENTITIES = {"owner": "owner-secret"}
FAILED = {"EIO", "ETIMEDOUT", "EACCES", "ENOENT", "ESTALE"}


def credentials(path, **secrets):
    """An AWS credentials file: profile -> secret of `owner`."""
    text = [
        f"[{profile}]\naws_access_key_id = owner\naws_secret_access_key = {secret}\n"
        for profile, secret in secrets.items()
    ]
    path.write_text("\n".join(text))


class World:
    """A volume of which only `file` works at first, and what mends each backend."""

    def __init__(self):
        self.hsfs = Hsfs()
        self.export = Path(tempfile.mkdtemp(prefix="hsfs-test-nas-", dir="/var/tmp"))
        (self.export / "here").write_bytes(b"here")
        self.src = self.hsfs.root / "src"
        self.src.mkdir()
        (self.src / "here").write_bytes(b"here")
        self.nas = Ganesha(self.export)
        self.late = Ganesha(self.export)
        self.lake = SeaweedFS(identities=IDENTITIES)
        self.dead_port = ports.free_port()
        self.secrets = self.hsfs.root / "credentials"
        credentials(self.secrets, good="owner-secret", bad="wrong")

    def __enter__(self):
        self.nas.start()
        self.lake.start()
        self.lake.create_bucket("there")
        self.lake.put_many("there", [("here", b"here")])
        self.hsfs.env.update(self.lake.env)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            del self.hsfs.env[name]
        self.hsfs.env["AWS_SHARED_CREDENTIALS_FILE"] = str(self.secrets)
        return self

    def __exit__(self, *what):
        self.hsfs.__exit__(*what)
        for server in (self.nas, self.late, self.lake):
            server.stop()
        ports.release(self.dead_port)
        shutil.rmtree(self.export, ignore_errors=True)

    def tables(self):
        bucket = {"endpoint": self.lake.endpoint, "profile": "good"}
        late = (
            f"nfs://127.0.0.1{self.export}?port={self.late.port}&mountport={self.late.mount_port}"
        )
        backends = {
            "file": {"url": f"file://{self.src}"},
            "folder": {"url": f"file://{self.hsfs.root}/later"},
            "nfs-down": {"url": late},
            "nfs-gone": {"url": self.nas.url_of(f"{self.nas.export}/later")},
            "s3-down": {
                "url": "s3://there",
                **bucket,
                "endpoint": f"http://127.0.0.1:{self.dead_port}",
            },
            "s3-gone": {"url": "s3://later", **bucket},
            "s3-refused": {"url": "s3://there", **bucket, "profile": "bad"},
        }
        return {
            name: {"name": name, "timeout": "3s", "freshness": "1s", **table}
            for name, table in backends.items()
        }

    def mend(self):
        """Ends every trouble but that of s3-down, whose port nobody will ever have."""
        for folder in (self.hsfs.root / "later", self.export / "later"):
            folder.mkdir()
            (folder / "here").write_bytes(b"here")
        self.lake.create_bucket("later")
        self.lake.put_many("later", [("here", b"here")])
        credentials(self.secrets, good="owner-secret", bad="owner-secret")
        self.late.start()


STATES = {
    "file": {"ok"},
    "folder": {"missing"},
    "nfs-down": {"unreachable"},
    # A server may say either of what it does not export to us.
    "nfs-gone": {"missing", "unauthorised"},
    "s3-down": {"unreachable"},
    "s3-gone": {"missing"},
    "s3-refused": {"unauthorised"},
}


@pytest.fixture(scope="module")
def world():
    with World() as world:
        yield world


@pytest.fixture(autouse=True)
def logs(world):
    yield
    print(world.hsfs.logs(60))


@pytest.mark.parametrize("name", [name for name in STATES if name != "file"])
def test_strict_refuses(world, name):
    hsfs = world.hsfs
    tables = world.tables()
    mnt = hsfs.mountpoint("strict")
    volume = hsfs.volume(tables["file"], tables[name], name="strict")
    volume.write_text(
        volume.read_text()
        .replace(f'"{hsfs.name}"', f'"{hsfs.name}-strict"')
        .replace(f'"{hsfs.state}"', f'"{hsfs.root}/strict-state"')
    )
    done = hsfs.mount(volume, mnt, "--strict", "--json", check=32)
    error = json.loads(done.stdout)["error"]
    assert name in error["what"], error
    assert error["why"], error
    assert not hsfs.mounted(mnt)


def test_mounts_without_them_and_takes_them_in(world):
    hsfs = world.hsfs
    mnt = hsfs.mountpoint()
    began = time.monotonic()
    done = hsfs.mount(hsfs.volume(*world.tables().values()), mnt)
    assert time.monotonic() - began < 60  # 6 s on a quiet machine
    for name in STATES:
        assert (f'backend "{name}"' in done.stderr) == (name != "file"), (name, done.stderr)
    assert "owner-secret" not in done.stderr
    assert "wrong" not in done.stderr
    found = hsfs.states(mnt)
    assert {name: found[name] for name in found if found[name] not in STATES[name]} == {}
    assert hsfs.status(mnt)["state"] == "degraded"
    assert hsfs.run("status", mnt, check=3).stdout.count("\n") > len(STATES)
    reader = hsfs.reader()
    assert reader.read(mnt / "file/here").is_(b"here")
    assert set(reader.list(mnt)) == set(STATES)
    for name in STATES:
        if name != "file":
            assert reader.read(mnt / name / "here").errno in FAILED, name
    world.mend()
    for name in STATES:
        if name == "s3-down":
            continue
        hsfs.seen(lambda name=name: reader.read(mnt / name / "here"), b"here", 90)
        assert "here" in reader.list(mnt / name)
    found = eventually(
        lambda: (
            {n for n, state in hsfs.states(mnt).items() if state == "ok"} == {*STATES} - {"s3-down"}
        ),
        lambda: hsfs.status(mnt),
        90,
    )
    assert found
    hsfs.umount(mnt)
    assert os.listdir(mnt) == []
