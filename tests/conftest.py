"""What every test shares: hypothesis profiles, the header that says what this machine can run, the
sweep of dead mounts that an aborted run left behind, and the ceiling of skips."""

import errno
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

SKIP_CEILING = 4

settings.register_profile(
    "gate",
    derandomize=True,
    deadline=None,
    max_examples=40,
    stateful_step_count=30,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile(
    "soak",
    deadline=None,
    max_examples=5000,
    stateful_step_count=100,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "gate"))


def pytest_configure() -> None:
    # A gate that runs in the background of a shell inherits an ignored SIGINT, and so would every
    # command that these tests interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the tests marked soak as well")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--soak"):
        return
    soak = [item for item in items if item.get_closest_marker("soak")]
    if soak:
        config.hook.pytest_deselected(items=soak)
        items[:] = [item for item in items if not item.get_closest_marker("soak")]


def _beside_python(name: str) -> bool:
    return (Path(sys.executable).parent / name).exists() or shutil.which(name) is not None


def pytest_report_header() -> list[str]:
    fuse = "missing"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
        fuse = "yes"
    except OSError as e:
        fuse = errno.errorcode.get(e.errno or 0, "no")
    found = {
        "root": os.geteuid() == 0,
        "fuse": fuse,
        "fusermount3": shutil.which("fusermount3") is not None,
        "ganesha": shutil.which("ganesha.nfsd") is not None,
        "rpcbind": shutil.which("rpcbind") is not None,
        "weed": _beside_python("weed"),
        "rclone": _beside_python("rclone"),
        "juicefs": _beside_python("juicefs"),
    }
    words = [f"{k}={v if isinstance(v, str) else ('yes' if v else 'no')}" for k, v in found.items()]
    return [
        f"machine: kernel={platform.release()} cpus={os.cpu_count()} {' '.join(words)}",
        f"skip ceiling: {SKIP_CEILING}; hypothesis profile: "
        f"{os.environ.get('HYPOTHESIS_PROFILE', 'gate')}",
    ]


def _dead_mounts() -> list[str]:
    """Mountpoints of FUSE mounts under our temporary folders whose daemon is gone."""
    prefixes = [f"{tempfile.gettempdir()}/hsfs-", "/tmp/hsfs-", "/var/tmp/hsfs-", "/tmp/pytest-of-"]
    dead = []
    for line in Path("/proc/self/mounts").read_text(errors="surrogateescape").splitlines():
        _, mountpoint, kind, *_ = line.split(" ")
        mountpoint = mountpoint.replace("\\040", " ")
        if not kind.startswith("fuse") or not mountpoint.startswith(tuple(prefixes)):
            continue
        try:
            os.statvfs(mountpoint)
        except OSError as e:
            if e.errno == errno.ENOTCONN:
                dead.append(mountpoint)
    return dead


def pytest_sessionstart() -> None:
    for mountpoint in reversed(_dead_mounts()):
        command = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-u", "-z"]
        subprocess.run([*command, mountpoint], check=False, timeout=30, capture_output=True)


def _skips(terminal: pytest.TerminalReporter) -> int:
    return len(terminal.stats.get("skipped", []))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and exitstatus == 0 and _skips(terminal) > SKIP_CEILING:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = _skips(terminalreporter)
    verdict = "too many: the run fails" if skipped > SKIP_CEILING else "within"
    terminalreporter.write_line(f"skips: {skipped} of at most {SKIP_CEILING} ({verdict})")
