"""The file:// backend passes the common suite over a real directory, guarded and not."""

import pytest

from hsfs.backends import posix
from hsfs.backends.posix import open_posix
from hsfs.core.types import DeviceId
from tests.conformance.backend_suite import Subject, case_id, cases
from tests.conformance.native_tree import NativeTree


@pytest.mark.parametrize("network_mount", [False, True], ids=["local", "network"])
@pytest.mark.parametrize("case", cases(flat=False), ids=case_id)
async def test_suite(case, network_mount, tmp_path, monkeypatch):
    monkeypatch.setattr(posix, "may_hang", lambda path: network_mount)
    backend = await open_posix(DeviceId(1), tmp_path.as_uri(), {"timeout": 60.0})
    try:
        await case(Subject(backend, NativeTree(tmp_path)))
    finally:
        await backend.aclose()
