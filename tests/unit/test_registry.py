"""URLs become backends; kinds are imported when used."""

import subprocess
import sys

import pytest

from hsfs.backends.metered import Metered
from hsfs.backends.registry import open_backend, opener, schemes
from hsfs.backends.throttled import Throttled
from hsfs.core.errors import UsageError
from hsfs.core.types import DeviceId
from hsfs.core.urls import scheme_of, split_url_options


def test_options_of_a_url():
    assert split_url_options("s3://b/p") == ("s3://b/p", {})
    assert split_url_options("s3://b?endpoint=http%3A%2F%2Fh%3A9&x=1&flag=&x=2") == (
        "s3://b",
        {"endpoint": "http://h:9", "x": "2", "flag": ""},
    )
    assert scheme_of("S3://b") == "s3"
    assert scheme_of("/path") == ""


async def test_decorated_as_asked():
    plain = await open_backend(DeviceId(7), "memory:", {})
    assert isinstance(plain, Metered)
    assert plain.device == 7
    limited = await open_backend(DeviceId(7), "memory:?flat=true&concurrency=2", {"rate": 100})
    assert isinstance(limited, Throttled)
    assert limited.caps.concurrency == 2
    assert limited.caps.flat
    assert limited.caps.flat_list
    assert hasattr(limited, "list_flat")


async def test_options_beside_the_url_count_more():
    backend = await open_backend(DeviceId(1), "memory:?concurrency=2", {"concurrency": 5})
    assert backend.caps.concurrency == 5


@pytest.mark.parametrize("url", ["gopher://x", "nonsense", "gopher://x?secret=abc"])
async def test_unknown_kinds(url):
    with pytest.raises(UsageError, match="nfs://, s3://") as refused:
        await open_backend(DeviceId(1), url, {})
    assert "abc" not in str(refused.value)


@pytest.mark.parametrize("options", [{"rate": "fast"}, {"bandwidth": -1}])
async def test_bad_limits(options):
    with pytest.raises(UsageError):
        await open_backend(DeviceId(1), "memory:", options)


def test_every_kind_has_its_opener():
    for scheme in schemes():
        assert callable(opener(f"{scheme}:"))


def test_nothing_is_imported_before_it_is_used():
    code = (
        "import sys, hsfs.backends.registry\n"
        "print(*(m for m in ('boto3', 'botocore', 'obstore') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
