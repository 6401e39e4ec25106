"""The in-memory backend passes the same suite as the real ones, flat and with directories."""

import pytest

from hsfs.backends.memory import MemoryBackend
from hsfs.core.types import DeviceId
from tests.conformance.backend_suite import Subject, case_id, cases


@pytest.mark.parametrize("case", cases(flat=False), ids=case_id)
async def test_directories(case):
    backend = MemoryBackend(DeviceId(1))
    await case(Subject(backend, backend))


@pytest.mark.parametrize("case", cases(flat=True), ids=case_id)
async def test_flat(case):
    backend = MemoryBackend(DeviceId(1), flat=True)
    await case(Subject(backend, backend))
