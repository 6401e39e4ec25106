"""The layout rules that no linter sees."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["backends", "cache", "mdserver"])
def test_root_package_has_one_name(name):
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )
    assert done.returncode != 0
    assert f"import hsfs.{name}, not {name}" in done.stderr
    link = ROOT / "hsfs" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name


@pytest.mark.parametrize("folder", ["packaging", "tests"])
def test_folder_is_no_package(folder):
    # packaging/__init__.py would hide PyPI's `packaging` from every tool run at the root.
    assert list((ROOT / folder).rglob("__init__.py")) == []
