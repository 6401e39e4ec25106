"""`hsfs doctor`: what on this machine would keep hsfs from working well, and the next step."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import click

from hsfs.cli import exits, mount_checks, mountpoints
from hsfs.cli.output import Output, shown
from hsfs.cli.sources import find_volume
from hsfs.core.config import Volume, default_state
from hsfs.core.errors import HsfsError
from hsfs.core.settings import CACHE_SIZE_MIN
from hsfs.core.units import format_size

State = Literal["ok", "warn", "fail"]

_KERNEL_MIN = (5, 14)  # the first where a changed file's old inode turns bad instead of mixing
_FDS_MIN = 1024
_EPOCH_2024 = 1704067200.0
_MEMORY_MIN = 1024**3


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `next` is empty when all is well."""

    name: str
    state: State
    detail: str
    next: str = ""


def _raises(name: str, good: str, check: Callable[[], None], bad: State = "fail") -> Check:
    try:
        check()
    except HsfsError as e:
        return Check(name, bad, f"{e.what}: {e.why}", e.next_step)
    return Check(name, "ok", good)


def _allow_other() -> Check:
    if os.geteuid() == 0:
        return Check("allow_other", "ok", "you are root: it may be used")
    if mount_checks.user_allow_other():
        return Check("allow_other", "ok", "user_allow_other stands in /etc/fuse.conf")
    return Check(
        "allow_other",
        "warn",
        "other users will not see your mounts",
        "if they should, add the line user_allow_other to /etc/fuse.conf",
    )


def _fusermount() -> Check:
    if os.geteuid() == 0 and shutil.which("fusermount3") is None:
        return Check(
            "fusermount3",
            "warn",
            "is not installed: only root can mount",
            "install the package fuse3",
        )
    return _raises("fusermount3", "installed", mount_checks.check_fusermount)


def _kernel() -> Check:
    release = platform.release()
    match = re.match(r"(\d+)\.(\d+)", release)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if version < _KERNEL_MIN:
        need = ".".join(map(str, _KERNEL_MIN))
        return Check("kernel", "warn", f"Linux {release}", f"Linux {need} or newer is needed")
    return Check("kernel", "ok", f"Linux {release}")


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    best = max(soft, hard) if hard != resource.RLIM_INFINITY else hard
    if best != resource.RLIM_INFINITY and best < _FDS_MIN:
        return Check(
            "open files",
            "warn",
            f"limit {soft}, at most {hard}",
            f"raise RLIMIT_NOFILE to {_FDS_MIN} or more (ulimit -Hn, LimitNOFILE=)",
        )
    return Check("open files", "ok", f"limit {soft}, at most {hard}")


def _request_timeouts() -> Iterator[Check]:
    for name in ("default_request_timeout", "max_request_timeout"):
        path = Path("/proc/sys/fs/fuse") / name
        try:
            value = int(path.read_text())
        except (OSError, ValueError):
            continue  # before Linux 6.15
        if value:
            yield Check(
                f"fs.fuse.{name}",
                "warn",
                f"is {value} s: the kernel ends a whole mount when one request takes longer",
                f"sysctl fs.fuse.{name}=0",
            )
        else:
            yield Check(f"fs.fuse.{name}", "ok", "0")


def _clock() -> Check:
    if time.time() < _EPOCH_2024:
        return Check(
            "clock",
            "fail",
            time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
            "set the clock: object stores refuse requests that are minutes off",
        )
    return Check("clock", "ok", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()))


def _memory() -> Check:
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size < _MEMORY_MIN:
        return Check("memory", "warn", format_size(size), "set mount.memory_limit = 128M or so")
    return Check("memory", "ok", format_size(size))


def _mounts() -> Iterator[Check]:
    for mount in mountpoints.mounts():
        if mount.fs_type != mountpoints.FS_TYPE:
            continue
        answer = mountpoints.answers(mount.mountpoint, 1.0)
        if answer in (0, 13):
            continue
        what = "does not answer" if answer is None else os.strerror(answer)
        yield Check(
            f"mount {mount.mountpoint}",
            "fail",
            what,
            f"hsfs umount --force {mount.mountpoint}",
        )


def _cache(volume: Volume | None) -> Check:
    directory = volume.cache.dir if volume is not None else default_state("x").parent
    here = next(p for p in (directory, *directory.parents) if p.exists())
    try:
        free = shutil.disk_usage(here).free
    except OSError as e:
        return Check("cache", "fail", f"{directory}: {e.strerror}", "set cache.dir")
    if not os.access(here, os.W_OK | os.X_OK):
        return Check("cache", "fail", f"{here} can't be written by you", "set cache.dir")
    text = f"{directory}, {format_size(free)} free"
    if free < 2 * CACHE_SIZE_MIN:
        return Check("cache", "warn", text, "give it a disk with more room: cache.dir")
    wanted = volume.cache.size if volume is not None else None
    if wanted is not None and wanted > free:
        return Check("cache", "warn", f"{text}, less than cache.size", "lower cache.size")
    return Check("cache", "ok", text)


def _credentials(volume: Volume) -> Iterator[Check]:
    stores = [b for b in volume.backends if b.url.startswith("s3://")]
    if not stores:
        return
    import botocore.exceptions
    import botocore.session

    for backend in stores:
        name = f"credentials of {backend.name}"
        if backend.options.get("anonymous"):
            yield Check(name, "ok", "anonymous")
            continue
        profile = backend.options.get("profile")
        try:
            session = botocore.session.Session(profile=str(profile) if profile else None)
            found = session.get_credentials()
        except botocore.exceptions.BotoCoreError as e:
            yield Check(name, "fail", str(e), "fix profile = ... or ~/.aws/config")
            continue
        if found is None:
            yield Check(
                name,
                "fail",
                "none found",
                "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or profile = ..., "
                "or anonymous = true for a public bucket",
            )
        else:
            yield Check(name, "ok", f"found ({found.method})")


def _backends(volume: Volume) -> Iterator[Check]:
    from hsfs.cli.backend import probe
    from hsfs.cli.targets import text_of

    for result in probe(volume):
        name = f"backend {text_of(result['name'])}"
        if result["state"] == "ok":
            yield Check(name, "ok", f"{text_of(result['url'])} answers in {result['latency_s']} s")
        else:
            why = f"{text_of(result['url'])} is {result['state']}: {text_of(result['why'])}"
            yield Check(name, "fail", why, text_of(result.get("next")))


def examine(volume: Volume | None) -> Iterator[Check]:
    """All checks, cheap ones first."""
    yield Check("python", "ok", platform.python_version())
    yield _kernel()
    yield _raises("/dev/fuse", "can be opened", mount_checks.check_fuse_device)
    yield _fusermount()
    yield _allow_other()
    yield from _request_timeouts()
    yield _open_files()
    yield _memory()
    yield _clock()
    yield _cache(volume)
    yield from _mounts()
    if volume is not None:
        yield from _credentials(volume)
        yield from _backends(volume)


@click.command(help="Check this machine and, if SOURCE is given, that volume's backends.")
@click.argument("source", required=False)
@click.option("--backend", "specs", multiple=True, metavar="AT=URL", help="As for hsfs mount.")
@click.option("--anonymous", is_flag=True, help="Buckets are public: send no credentials.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(source: str | None, specs: tuple[str, ...], anonymous: bool, as_json: bool) -> int:
    """The verb. Exit code 1 when something fails, 3 when there are warnings only."""
    volume = None
    if source is not None or specs:
        volume, _ = find_volume(source, "/", specs, anonymous=anonymous)
    checks = list(examine(volume))
    width = max(len(check.name) for check in checks)
    text = []
    for check in checks:
        text.append(f"{check.state:<4}  {shown(check.name):<{width}}  {shown(check.detail)}")
        if check.next:
            text.append(f"{'':<6}{'':<{width}}  -> {shown(check.next)}")
    states = {check.state for check in checks}
    worst: State = "fail" if "fail" in states else "warn" if "warn" in states else "ok"
    Output(as_json).result({"state": worst, "checks": [asdict(check) for check in checks]}, text)
    return {"ok": exits.OK, "warn": exits.PARTIAL, "fail": exits.FAILED}[worst]
