"""The NFSv3 client against NFS-Ganesha: the common suite and what only NFS has."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from hsfs.backends.nfs_backend import NfsBackend, open_nfs
from hsfs.core.types import DeviceId
from tests.conformance.backend_suite import Subject, case_id, cases
from tests.conformance.native_tree import NativeTree
from tests.servers.ganesha import Ganesha


@pytest.fixture(scope="module")
def ganesha():
    folder = Path(tempfile.mkdtemp(prefix="hsfs-nfs-test-", dir="/var/tmp"))
    try:
        with Ganesha(folder) as server:
            yield server
    finally:
        shutil.rmtree(folder)


@contextlib.asynccontextmanager
async def nfs_subject(ganesha: Ganesha, **options):
    """A backend over an empty directory of the export."""
    folder = Path(tempfile.mkdtemp(prefix="case", dir=ganesha.export))
    backend = await open_nfs(
        DeviceId(1), ganesha.url_of(os.fspath(folder)), {"timeout": 60.0, **options}
    )
    try:
        yield Subject(backend, NativeTree(folder))
    finally:
        await backend.aclose()


@pytest.mark.parametrize("case", cases(flat=False), ids=case_id)
async def test_suite(case, ganesha):
    async with nfs_subject(ganesha) as subject:
        assert isinstance(subject.backend, NfsBackend)
        await case(subject)
