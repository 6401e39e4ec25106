import errno
import os
import subprocess
import sys
import time

import pytest

from hsfs.cli import mount_checks, mountpoints, records
from hsfs.core.errors import (
    AlreadyExists,
    NotADirectory,
    NotFound,
    NotSupported,
    PermissionDenied,
)


def test_mounts_of_this_namespace():
    root = mountpoints.mounted_at("/")
    assert root is not None
    assert mountpoints.mounted_at("/proc").fs_type == "proc"
    assert mountpoints.mounted_at("/proc/self") is None


def test_normal_path(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "link").symlink_to("a/b")
    (tmp_path / "abs").symlink_to(tmp_path / "a")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "up").symlink_to("../" + tmp_path.name + "/a")
    real = os.path.realpath(tmp_path)
    assert mountpoints.normal_path(str(tmp_path / "link")) == f"{real}/a/b"
    assert mountpoints.normal_path(str(tmp_path / "abs" / "b" / "..")) == f"{real}/a"
    assert mountpoints.normal_path(str(tmp_path / "up/b/")) == f"{real}/a/b"
    assert mountpoints.normal_path(str(tmp_path / "absent/x")) == f"{real}/absent/x"
    assert mountpoints.normal_path("/") == "/"
    with pytest.raises(Exception, match="too many levels"):
        mountpoints.normal_path(str(tmp_path / "loop"))


def test_work_in_a_child(tmp_path):
    assert mountpoints.in_child(lambda: 0, 30) == 0
    assert mountpoints.in_child(lambda: errno.ENOTCONN, 30) == errno.ENOTCONN
    assert mountpoints.answers(str(tmp_path), 30) == 0
    assert mountpoints.answers(str(tmp_path / "x"), 30) == errno.ENOENT

    def hang() -> int:
        time.sleep(600)
        return 0

    assert mountpoints.in_child(hang, 0.2) is None


def test_a_mountpoint_is_looked_at(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert mount_checks.check_mountpoint(str(empty)) == (os.path.realpath(empty), ())
    (tmp_path / "file").touch()
    path, warnings = mount_checks.check_mountpoint(str(tmp_path))
    assert path == os.path.realpath(tmp_path)
    assert "is not empty" in warnings[0]
    with pytest.raises(NotFound, match="mkdir -p"):
        mount_checks.check_mountpoint(str(tmp_path / "absent"))
    with pytest.raises(NotADirectory):
        mount_checks.check_mountpoint(str(tmp_path / "file"))


def test_a_fuse_device_that_is_not_there(tmp_path):
    with pytest.raises(NotSupported, match="does not exist"):
        mount_checks.check_fuse_device(tmp_path / "fuse")


def test_allow_other_of_users(tmp_path, monkeypatch):
    config = tmp_path / "fuse.conf"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(PermissionDenied, match="has no user_allow_other"):
        mount_checks.check_allow_other(config)
    config.write_text("#user_allow_other\nmount_max = 5\n")
    assert not mount_checks.user_allow_other(config)
    config.write_text("mount_max = 5\n  user_allow_other # yes\n")
    mount_checks.check_allow_other(config)


def test_no_fusermount(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotFound, match="install the package fuse3"):
        mount_checks.check_fusermount()
    program = tmp_path / "fusermount3"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    with pytest.raises(PermissionDenied, match="setuid"):
        mount_checks.check_fusermount()


# --- records --------------------------------------------------------------------------------------


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    monkeypatch.setenv("HSFS_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


def record(mountpoint, pid, **more):
    return records.Record(
        mountpoint=mountpoint,
        pid=pid,
        started=records.start_time(pid),
        socket=str(records.socket_path(mountpoint)),
        volume="v",
        **more,
    )


def test_records_of_the_living_and_the_dead(runtime):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mine, theirs = record("/mnt/a", os.getpid()), record("/mnt/a/b", child.pid)
    records.write(mine)
    records.write(theirs)
    assert records.find_all() == [mine, theirs]
    assert records.find("/mnt/a") == mine
    assert records.find_around("/mnt/a") == (mine, "")
    assert records.find_around("/mnt/a/x/y") == (mine, "x/y")
    assert records.find_around("/mnt/a/b/c") == (theirs, "c")
    assert records.find_around("/mnt/ab") is None
    assert not records.wait_end(theirs, 0.05)
    child.communicate()
    assert records.wait_end(theirs, 30)
    assert records.find("/mnt/a/b") is None
    assert records.find_all() == [mine]
    assert not list(runtime.glob(f"{records._stem('/mnt/a/b')}*"))
    records.remove(mine)
    assert records.find_all() == []


def test_a_pid_that_was_given_again_is_nobody(runtime):
    old = records.Record("/mnt/a", os.getpid(), 1, str(records.socket_path("/mnt/a")), "v")
    records.write(old)
    assert not records.alive(old)
    new = record("/mnt/a", os.getpid())
    records.write(new)
    records.remove(old)  # the end of the old one does not take the new one's
    assert records.find("/mnt/a") == new


def test_garbage_in_the_folder(runtime):
    path = records.runtime_dir() / "x.json"
    path.write_text("{")
    os.utime(path, (1, 1))
    (records.runtime_dir() / "y.json").write_text('{"pid": 1}')
    assert records.find_all() == []
    assert not path.exists()


def test_a_folder_of_others_is_not_trusted(runtime):
    runtime.mkdir(mode=0o777)
    runtime.chmod(0o777)
    with pytest.raises(PermissionDenied, match="private"):
        records.runtime_dir()


def test_already_mounted(tmp_path, monkeypatch):
    mounted = mountpoints.Mounted(str(tmp_path), "fuse.hsfs", "hsfs", 1, "ro")
    monkeypatch.setattr(mount_checks, "mounted_at", lambda path: mounted)
    with pytest.raises(AlreadyExists, match="hsfs umount"):
        mount_checks.check_mountpoint(str(tmp_path))
    monkeypatch.setattr(mount_checks, "answers", lambda path, s: errno.ENOTCONN)
    with pytest.raises(Exception, match=r"dead mount.*umount --force"):
        mount_checks.check_mountpoint(str(tmp_path))
    monkeypatch.setattr(mount_checks, "answers", lambda path, s: None)
    with pytest.raises(Exception, match="does not answer"):
        mount_checks.check_mountpoint(str(tmp_path))
