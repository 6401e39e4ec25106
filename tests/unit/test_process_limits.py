import subprocess
import sys

import pytest

from hsfs.cli import process_limits
from hsfs.cli.mount_order import MountOrder, decode_order, encode_order, read_report
from hsfs.core.config import volume_from_backends
from hsfs.core.errors import ConfigError, HsfsError, Unavailable


@pytest.mark.parametrize(
    ("limit", "wanted", "files"),
    [
        (256, None, 102),
        (1024, None, 691),
        (1024, 4096, 896),
        (1024, 64, 32),
        (65536, None, 8192),
        (40, None, 32),
    ],
)
def test_cache_files_within_the_limit(limit, wanted, files):
    assert process_limits.cache_fds(limit, wanted) == files


def test_the_soft_limit_is_lifted():
    script = (
        "import resource as r; from hsfs.cli.process_limits import raise_fd_limit as f\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (100, 300)); print(f(), r.getrlimit(r.RLIMIT_NOFILE)[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["300", "300"]


def test_resident_memory():
    assert 1 << 20 < process_limits.resident_bytes() < 1 << 36


def test_an_order_survives_the_way_to_the_process():
    volume = volume_from_backends("/mnt/x", ["/a=s3://bucket", "/b=/srv"])
    order = MountOrder("/mnt/x", options=("noexec",), fsname="a,b", strict=True)
    assert decode_order(encode_order(order, volume)) == (order, volume)
    with pytest.raises(ConfigError):
        decode_order(b"[]")


def test_what_the_process_says_back():
    lines = [b'{"warning": "slow"}', b"noise", b'{"ready": true}', b'{"warning": "late"}']
    assert list(read_report(iter(lines))) == ["slow"]
    error = b'{"error": {"code": "Unavailable", "what": "w", "why": "y", "next": "n"}}'
    with pytest.raises(Unavailable, match="w: y; n"):
        list(read_report(iter([error])))
    with pytest.raises(HsfsError, match="ended while starting"):
        list(read_report(iter([])))


def test_refusals_are_notes():
    script = "from hsfs.cli.process_limits import protect; print(all(map(str.strip, protect())))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "True\n"
