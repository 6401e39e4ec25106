"""Tier 0 on disk (roomy, and with hardly any descriptors) and its double in memory."""

import shutil
import tempfile
from pathlib import Path

import pytest

from hsfs.cache.memory import MemoryStore
from hsfs.cache.store import open_store
from tests.conformance.chunk_store_suite import SIZE, case_id, cases


def on_disk(directory):
    return open_store(directory, SIZE, fd_limit=64)


def with_few_descriptors(directory):
    return open_store(directory, SIZE, fd_limit=4, flush_s=0.01)


def in_memory(_):
    return MemoryStore(SIZE)


@pytest.mark.parametrize(
    "make", [on_disk, with_few_descriptors, in_memory], ids=lambda m: m.__name__
)
@pytest.mark.parametrize("case", cases(), ids=case_id)
def test_chunk_store(case, make):
    directory = Path(tempfile.mkdtemp(prefix="hsfs-tier0-", dir="/var/tmp"))
    store = make(directory / "cache")
    try:
        case(store)
    finally:
        store.close()
        shutil.rmtree(directory)
