"""Servers that several fault modules share. Only modules with servers of their own stop or kill
them."""

import shutil
import tempfile
from pathlib import Path

import pytest

from tests.servers.ganesha import Ganesha
from tests.servers.seaweedfs import SeaweedFS


@pytest.fixture(scope="session")
def nas():
    """NFS-Ganesha over a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="hsfs-test-nas-", dir="/var/tmp"))
    with Ganesha(folder) as server:
        yield server
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def lake():
    """A SeaweedFS S3 server."""
    with SeaweedFS() as server:
        yield server
