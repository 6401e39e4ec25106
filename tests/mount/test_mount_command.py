"""The life of a mount as its user sees it, through the command and the real kernel."""

import errno
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.hsfs_command import BIN, Sandbox, end, eventually, gone


@pytest.fixture
def box():
    with Sandbox() as sandbox:
        yield sandbox


def touch(mountpoint, name, deadline_s=60):
    """The content of a file, read by a child that can be given up."""
    return subprocess.run(
        ["cat", str(mountpoint / name)], capture_output=True, timeout=deadline_s, check=False
    )


def test_a_whole_life(box):
    box.put("a.txt")
    big = os.urandom(3_000_000)
    box.put("sub/b.bin", big)
    box.put("sub/deep/c", b"")
    volume, mnt = box.volume(), box.mountpoint()
    value = box.json("mount", volume, mnt)
    assert value["mountpoint"] == str(mnt)
    assert not value["degraded"]
    assert sorted(os.listdir(mnt)) == ["a.txt", "sub"]
    assert touch(mnt, "a.txt").stdout == b"hello\n"
    assert touch(mnt, "sub/b.bin").stdout == big

    status = box.status(mnt)
    assert status["pid"] == value["pid"]
    assert status["state"] == "ok"
    assert {"volume", "session", "session_reason", "passthrough", "staging_bytes"} < set(status)
    assert status["cache_bytes"] >= len(big)
    assert [b["state"] for b in status["backends"]] == ["ok"]

    copied = subprocess.run(
        ["cp", str(volume), str(mnt / "new")], capture_output=True, text=True, check=False
    )
    assert copied.returncode != 0
    assert "Read-only file system" in copied.stderr

    (info,) = box.json("info", mnt / "sub/b.bin")["paths"]
    assert (info["type"], info["size"]) == ("file", len(big))
    assert info["cached_bytes"] == len(big)
    assert info["as_of"] > time.time() - 3600
    assert info["replicas"][0]["backend"] == "src"
    assert info["replicas"][0]["key"] == "sub/b.bin"
    assert info["replicas"][0]["state"] == "current"
    assert (info["dirty_bytes"], info["objective"]) == (0, None)
    assert info["ino"] == os.stat(mnt / "sub/b.bin").st_ino
    both = box.json("info", mnt / "a.txt", mnt / "nope", check=3)["paths"]
    assert "error" in both[1]
    box.run("info", mnt / "nope", check=4)

    # The kernel tells of a close when it likes: until then the file is pinned.
    def evicted():
        box.json("evict", mnt)
        return box.json("info", mnt / "sub/b.bin")["paths"][0]["cached_bytes"] == 0

    assert eventually(evicted)
    warmed = box.json("warmup", mnt)
    assert (warmed["files"], warmed["failed"]) == (3, 0)
    assert warmed["bytes"] == len(big) + 6
    assert box.json("info", mnt / "sub/b.bin")["paths"][0]["cached_bytes"] == len(big)
    stats = box.json("stats", mnt)
    assert stats["backend_bytes"]["src"] >= len(big)
    assert box.json("stats")["mountpoint"] == str(mnt)

    box.put("sub/new", b"new")
    assert box.json("refresh", mnt)["entries"] >= 4
    assert touch(mnt, "sub/new").stdout == b"new"

    pidfd = os.pidfd_open(status["pid"])
    assert box.json("umount", mnt)["unmounted"] is True
    assert gone(pidfd, 0)  # umount waits for it
    os.close(pidfd)
    assert not box.mounted(mnt)
    assert box.status(mnt) is None
    assert list((box.root / "run").iterdir()) == []
    again = box.run("umount", mnt, check=0)
    assert "nothing is mounted" in again.stderr
    assert box.json("umount", box.root / "never")["unmounted"] is False


def test_two_mounts_of_one_volume_and_one_place_twice(box):
    box.put("a.txt")
    volume, one, two = box.volume(), box.mountpoint("one"), box.mountpoint("two")
    box.mount(volume, one)
    box.mount(volume, two)
    assert touch(one, "a.txt").stdout == touch(two, "a.txt").stdout == b"hello\n"
    refused = box.mount(volume, one, check=32)
    assert "hsfs is mounted there already" in refused.stderr
    assert box.run("stats", check=2).stderr.count("several mounts") == 1
    assert len(box.json("status")["mounts"]) == 2
    box.run("umount", one, check=0)
    assert touch(two, "a.txt").stdout == b"hello\n"
    box.run("umount", two, check=0)


def test_killed_and_mounted_again(box):
    box.put("a.txt", b"x" * 300_000)
    volume, mnt = box.volume(), box.mountpoint()
    box.mount(volume, mnt)
    assert len(touch(mnt, "a.txt").stdout) == 300_000
    end(box.status(mnt)["pid"], signal.SIGKILL)
    with pytest.raises(OSError, match=os.strerror(errno.ENOTCONN)):
        os.statvfs(mnt)  # a plain stat may be answered by what the kernel still knows
    shown = box.json("status", check=3)["mounts"]
    assert [(m["mountpoint"], m["state"]) for m in shown] == [(str(mnt), "dead")]
    refused = box.mount(volume, mnt, check=32)
    assert "dead mount" in refused.stderr
    assert "umount --force" in refused.stderr
    box.run("umount", mnt, "--force", check=0)
    assert not box.mounted(mnt)
    box.mount(volume, mnt)
    assert len(touch(mnt, "a.txt").stdout) == 300_000
    box.run("umount", mnt, check=0)


@pytest.mark.parametrize("how", ["SIGTERM", "umount", "umount -l"])
def test_ended_from_outside(box, how):
    box.put("a.txt")
    volume, mnt = box.volume(), box.mountpoint()
    box.mount(volume, mnt)
    assert touch(mnt, "a.txt").stdout == b"hello\n"
    pid = box.status(mnt)["pid"]
    pidfd = os.pidfd_open(pid)
    if how == "SIGTERM":
        os.kill(pid, signal.SIGTERM)
    else:
        subprocess.run([*how.split(), str(mnt)], check=True, timeout=60)
    assert gone(pidfd, 60)
    os.close(pidfd)
    assert not box.mounted(mnt)
    assert os.listdir(mnt) == []
    assert box.status(mnt) is None
    assert "Traceback" not in box.logs()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_in_the_foreground(box, number):
    box.put("a.txt")
    volume, mnt = box.volume(), box.mountpoint()
    with subprocess.Popen(
        [str(BIN / "hsfs"), "mount", str(volume), str(mnt), "--foreground"],
        env=box.environment,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert "mounted on" in process.stderr.readline()
        assert touch(mnt, "a.txt").stdout == b"hello\n"
        assert box.status(mnt)["pid"] == process.pid
        process.send_signal(number)
        assert process.wait(60) == 0
    assert not box.mounted(mnt)


def test_files_that_are_open_keep_it_and_force_does_not_wait(box):
    box.put("a.txt")
    volume, mnt = box.volume(), box.mountpoint()
    box.mount(volume, mnt)
    with open(mnt / "a.txt", "rb") as file:
        busy = box.run("umount", mnt, check=1)
        assert "in use" in busy.stderr
        assert file.read() == b"hello\n"
        pidfd = os.pidfd_open(box.status(mnt)["pid"])
        began = time.monotonic()
        box.run("umount", mnt, "--force", check=0)
        assert time.monotonic() - began < 30  # 5 s on a quiet machine
        assert gone(pidfd, 30)
        os.close(pidfd)
    assert not box.mounted(mnt)


def test_a_daemon_that_hangs(box):
    box.put("a.txt")
    volume, mnt = box.volume(), box.mountpoint()
    box.mount(volume, mnt)
    pid = box.status(mnt)["pid"]
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    status = box.status(mnt)
    assert time.monotonic() - began < 15  # 1 s on a quiet machine
    assert (status["state"], status["pid"]) == ("hung", pid)
    refused = box.mount(volume, mnt, check=32)
    assert "does not answer" in refused.stderr
    pidfd = os.pidfd_open(pid)
    began = time.monotonic()
    box.run("umount", mnt, "--force", check=0)
    assert time.monotonic() - began < 30
    assert gone(pidfd, 30)
    os.close(pidfd)
    assert not box.mounted(mnt)


def test_degraded_and_recovering(box):
    box.put("a.txt")
    late = box.root / "late"
    volume = box.volume(
        {"name": "src", "url": f"file://{box.source}", "at": "/src"},
        {"name": "late", "url": f"file://{late}", "at": "/late", "freshness": "1s"},
        {"name": "cut", "url": "nfs://127.0.0.1/x?port=9&mountport=9", "timeout": "2s"},
    )
    mnt = box.mountpoint()
    strict = box.mount(volume, mnt, "--strict", check=32)
    assert 'backend "late"' in strict.stderr or 'backend "cut"' in strict.stderr
    assert not box.mounted(mnt)
    done = box.mount(volume, mnt)
    assert 'backend "late"' in done.stderr
    assert 'backend "cut"' in done.stderr
    assert touch(mnt, "src/a.txt").stdout == b"hello\n"
    status = box.json("status", mnt, check=3)["mounts"][0]
    states = {b["name"]: b["state"] for b in status["backends"]}
    assert states == {"src": "ok", "late": "missing", "cut": "unreachable"}
    assert status["state"] == "degraded"
    late.mkdir()
    (late / "x").write_bytes(b"here")

    def recovered():
        shown = {b["name"]: b["state"] for b in box.status(mnt)["backends"]}
        return shown["late"] == "ok" and touch(mnt, "late/x").stdout == b"here"

    assert eventually(recovered), box.logs()
    box.run("umount", mnt, check=0)


def test_without_a_file_and_without_root(box):
    box.put("a.txt")
    home = box.root / "home"
    home.mkdir()
    mnt = box.mountpoint()
    for path in (box.root, mnt, home):
        os.chown(path, 65534, 65534)
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--"]
    environment = {**box.environment, "HOME": str(home)}
    spec = f"/data=file://{box.source}"

    def run(*words, **options):
        return box.run(*words, prefix=user, env=environment, **options)

    run("mount", "--backend", spec, mnt, check=0)
    seen = subprocess.run(
        [*user, "cat", str(mnt / "data/a.txt")], capture_output=True, timeout=60, check=False
    )
    assert seen.stdout == b"hello\n", seen.stderr
    with pytest.raises(PermissionError):
        os.stat(mnt)  # root is kept out of a user's mount
    assert list((home / "hsfs").iterdir())
    value = json.loads(run("status", "--json", check=0).stdout)
    assert value["mounts"][0]["mountpoint"] == str(mnt)
    run("umount", mnt, check=0)
    assert not box.mounted(mnt)
    run("mount", "--backend", spec, mnt, "-o", "allow_other", check=0)
    assert touch(mnt, "data/a.txt").stdout == b"hello\n"
    run("umount", mnt, "--force", check=0)
    assert not box.mounted(mnt)
    theirs = box.root / "roots"
    theirs.mkdir(mode=0o755)
    refused = run("mount", "--backend", spec, theirs, check=1)
    assert "may not write to it" in refused.stderr


def test_by_mount_8(box):
    """`mount -t hsfs` finds /sbin/mount.hsfs: shown in a mount namespace of its own."""
    box.put("a.txt")
    volume, mnt = box.volume(), box.mountpoint()
    sbin = box.root / "sbin"
    sbin.mkdir()
    for name in ("mount.hsfs", "mount.fuse.hsfs"):
        (sbin / name).symlink_to(BIN / "mount.hsfs")
    script = f"""
        set -e
        mount --bind {sbin} $(readlink -f /sbin)
        for type in hsfs fuse.hsfs; do
            mount -t $type {volume} {mnt} -o ro,_netdev,nofail,x-systemd.automount,allow_other
            cat {mnt}/a.txt
            grep -c ' {mnt} fuse.hsfs ' /proc/mounts
            umount {mnt}
        done
        if mount -t hsfs {volume} {mnt} -o nonsense; then exit 99; else echo code $?; fi
        if mount -t hsfs {volume} {mnt}/absent; then exit 99; else echo code $?; fi
    """
    done = subprocess.run(
        ["unshare", "-m", "--propagation", "private", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=box.environment,
    )
    assert done.stdout == "hello\n1\nhello\n1\ncode 1\ncode 32\n", done.stderr
    assert "unknown mount option" in done.stderr


def test_a_running_server_is_joined_by_its_address(box):
    box.put("a.txt")
    volume = box.volume(extra='[mds]\nlisten = "127.0.0.1:0"\n')
    server = subprocess.Popen(
        [str(BIN / "hsfs"), "mds", str(volume), "--json"],
        env=box.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        where = json.loads(server.stdout.readline())
        mnt = box.mountpoint()
        box.mount(f"unix:{where['socket']}", mnt, "--cache-dir", box.root / "c1")
        assert touch(mnt, "a.txt").stdout == b"hello\n"
        box.run("umount", mnt, check=0)
        token = {**box.environment, "HSFS_TOKEN_FILE": str(box.state / "token")}
        tcp = f"hsfs://{where['listen']}/{box.name}"
        box.mount(tcp, mnt, "--cache-dir", box.root / "c2", env=token)
        assert touch(mnt, "a.txt").stdout == b"hello\n"
        box.run("umount", mnt, check=0)
        other = box.claim(f"{box.name}-other")
        refused = box.mount(f"hsfs://{where['listen']}/{other}", mnt, check=32, env=token)
        assert other in refused.stderr
        second = box.run("mds", volume, check=1)
        assert str(server.pid) in second.stderr
        listed = box.json("backend", "list", volume)["backends"]
        assert listed[0]["state"] == "ok"
        scanned = box.json("assimilate", volume)
        assert (scanned["entries"] >= 1, scanned["failed"]) == (True, 0)
    finally:
        server.terminate()
        assert server.wait(60) == 0
        server.stdout.close()


def test_few_file_descriptors(box):
    for number in range(300):
        box.put(f"many/{number:03}", str(number).encode() * 100)
    volume, mnt = box.volume(), box.mountpoint()
    box.mount(volume, mnt, prefix=["prlimit", "--nofile=256:256", "--"])
    seen = subprocess.run(
        ["sh", "-c", f"cat {mnt}/many/* | wc -c"],
        capture_output=True,
        timeout=120,
        check=True,
        text=True,
    )
    assert int(seen.stdout) == sum(len(str(n)) * 100 for n in range(300))
    handles = [open(mnt / f"many/{n:03}", "rb") for n in range(300)]  # noqa: SIM115
    assert [h.read(3) for h in handles[:3]] == [b"000", b"111", b"222"]
    for handle in handles:
        handle.close()
    box.run("umount", mnt, check=0)
    assert (box.state / "mount.log").exists()


def in_namespace(box, script):
    """A shell script in a mount namespace of its own."""
    return subprocess.run(
        ["unshare", "-m", "--propagation", "private", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=box.environment,
    )


def test_a_machine_that_lacks_something(box):
    mnt = box.mountpoint()
    mount = f"{BIN}/hsfs mount --backend /d=file://{box.source} {mnt}"
    done = in_namespace(
        box,
        "mount -t tmpfs none /dev; mknod /dev/null c 1 3; mknod /dev/urandom c 1 9;"
        f"{mount}; echo $?",
    )
    assert done.stdout == "32\n"
    assert "/dev/fuse: does not exist; load the module" in done.stderr
    done = in_namespace(
        box, f"setpriv --bounding-set -sys_admin --inh-caps -sys_admin {mount}; echo $?"
    )
    assert done.stdout == "32\n"
    assert "Operation not permitted" in done.stderr
    os.chown(mnt, 65534, 65534)
    os.chown(box.root, 65534, 65534)
    user = "/usr/bin/setpriv --reuid=65534 --regid=65534 --clear-groups --"
    done = in_namespace(
        box, f"mount --bind /dev/null /etc/fuse.conf; {user} {mount} -o allow_other; echo $?"
    )
    assert done.stdout == "1\n"
    assert "has no user_allow_other" in done.stderr
    done = in_namespace(box, f"PATH=/nowhere {user} {mount}; echo $?")
    assert done.stdout == "32\n"
    assert "install the package fuse3" in done.stderr


def test_a_copy_in_another_mount_namespace(box):
    """A container that started after the mount has a copy of it, which keeps the kernel's session
    alive when the mount goes: umount ends it all the same, unless the container uses it."""
    box.put("a.txt")
    volume, mnt = box.volume(), box.mountpoint()
    box.mount(volume, mnt)
    script = f"exec 3<{mnt}/a.txt; echo in; read line; exec 3<&-; echo out; read line"
    with subprocess.Popen(
        ["unshare", "-m", "--propagation", "private", "bash", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout.readline() == "in\n"
        refused = box.run("umount", mnt, check=1)
        assert "another mount namespace" in refused.stderr
        assert not box.mounted(mnt)
        other.stdin.write("\n")
        other.stdin.flush()
        assert other.stdout.readline() == "out\n"
        box.run("umount", mnt, check=0)
        assert box.status(mnt) is None
        other.stdin.close()


def test_paths_of_all_kinds(box):
    box.put("dir/file", b"x" * 100)
    box.put(b"dir/\xff\n\x1b[31m".decode(errors="surrogateescape"), b"odd")
    (box.source / "dir/rel").symlink_to("file")
    (box.source / "up").symlink_to("dir")
    (box.source / "out").symlink_to("/etc")
    mnt = box.mountpoint()
    (box.source / "abs").symlink_to(mnt / "dir")
    (box.root / "way").symlink_to(mnt / "up")
    box.mount(box.volume(), mnt)
    odd = os.fsdecode(os.fsencode(mnt) + b"/dir/\xff\n\x1b[31m")

    def info(path, **options):
        return box.json("info", path, **options)["paths"][0]

    file = info(mnt / "dir/file")
    assert file["size"] == 100
    link = info(mnt / "dir/rel")
    assert (link["type"], link["target"]) == ("symlink", "file")
    for way in (mnt / "up/file", mnt / "abs/file", box.root / "way/file", f"{mnt}/dir/../up/file"):
        assert info(way)["ino"] == file["ino"], way
    assert info("mnt/dir/file")["ino"] == file["ino"]  # relative to the working directory
    assert "leads out" in info(mnt / "out/passwd", check=4)["error"]["why"]
    assert info(mnt / "dir/file/x", check=4)["error"]["code"] == "NotADirectory"
    shown = info(odd)
    assert shown["path"] == odd
    assert shown["size"] == 3
    text = box.run("info", odd, check=0, errors="surrogateescape").stdout
    assert "\x1b" not in text
    assert "\\x1b[31m" in text
    root = info(mnt)
    assert (root["type"], root["ino"]) == ("directory", 1)
    assert box.json("refresh", mnt / "dir", "--shallow")["entries"] >= 3
    assert box.json("warmup", mnt / "dir/file", odd)["files"] == 2
    assert box.json("evict", odd)["bytes"] > 0
    assert info(mnt / "dir/file")["cached_bytes"] == 100
    box.run("umount", box.root / "mnt/.", check=0)
    assert not box.mounted(mnt)


def test_progress(box):
    for number in range(40):
        box.put(f"d/{number}", os.urandom(200_000))
    volume, mnt = box.volume(), box.mountpoint()
    box.mount(volume, mnt)
    # On a terminal a bar: `script` gives the command one.
    done = subprocess.run(
        ["script", "-qec", f"{BIN}/hsfs warmup {mnt}", "/dev/null"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**box.environment, "TERM": "xterm"},
        stdin=subprocess.DEVNULL,
    )
    assert "40 files" in done.stdout
    assert "\x1b[" in done.stdout
    box.json("evict", mnt)
    done = box.run("warmup", mnt, "--json", check=0)
    assert json.loads(done.stdout)["bytes"] == 8_000_000
    assert all(set(json.loads(line)) == {"progress"} for line in done.stderr.splitlines())
    (box.source / "d/7").unlink()
    box.json("evict", mnt)
    box.json("refresh", mnt)
    assert box.json("warmup", mnt)["files"] == 39
    live = subprocess.Popen(
        [str(BIN / "hsfs"), "stats", "-l", str(mnt)],
        env=box.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with live:
        seen = 0
        while seen < 2:
            seen += "process.cpu_s" in live.stdout.readline()
        live.send_signal(signal.SIGINT)
        assert live.wait(60) == 130
        assert "Traceback" not in live.stderr.read()
    scanned = box.json("assimilate", volume, "--restart")
    assert (scanned["failed"], scanned["backends"][0]["state"]) == (0, "done")
    assert box.run("assimilate", volume, "nope").returncode == 4
    box.run("umount", mnt, check=0)


def test_interrupted_while_starting(box):
    """Ctrl-C before it is mounted leaves nothing."""
    backends = (
        {"name": "src", "url": f"file://{box.source}", "at": "/src"},
        {"name": "hole", "url": "nfs://192.0.2.1/x?port=9&mountport=9", "at": "/hole"},
    )
    volume, mnt = box.volume(*backends), box.mountpoint()
    command = [str(BIN / "hsfs"), "mount", str(volume), str(mnt), "--strict"]
    with subprocess.Popen(command, env=box.environment, stderr=subprocess.PIPE) as process:
        assert eventually((box.state / "mds.sock").exists)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (130, 32)
        process.stderr.close()
    assert not box.mounted(mnt)
    assert eventually(lambda: "hsfs.cli.mount_process" not in commands(box)), commands(box)


def commands(box):
    """Command lines of living processes that log into the sandbox."""
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            if str(box.root) in os.readlink(f"/proc/{entry.name}/fd/2"):
                with open(f"/proc/{entry.name}/cmdline") as file:
                    found.append(file.read().replace("\0", " "))
        except OSError:
            continue
    return "\n".join(found)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may raise the kernel's readahead")
def test_reads_arrive_in_large_pieces(box):
    """The kernel's readahead is raised for good: its answer to INIT would lower it again."""
    size = 16 << 20
    box.put("big", os.urandom(size))
    volume, mnt = box.volume(), box.mountpoint()
    box.mount(volume, mnt)
    device = os.stat(mnt).st_dev
    wanted = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    assert eventually(lambda: wanted.read_text() == "4096\n")
    (path,) = mnt.rglob("big")
    path.read_bytes()
    # 1 MiB each, but for the first of a stream.
    assert box.json("stats", mnt)["front"]["reads"] < 2 * (size >> 20)
    box.run("umount", mnt, check=0)
