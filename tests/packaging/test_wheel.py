"""What is shipped: sdist and wheel hold every module; the wheel runs in an empty environment."""

import configparser
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import hsfs

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
LIMIT_S = 600


def run(*argv, cwd, env=None):
    done = subprocess.run(
        [os.fspath(a) for a in argv],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{argv}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def modules_below(root):
    """Every module as it has to be imported; the symlinks make hsfs/ hold all of them."""
    found = set()
    for folder, folders, names in os.walk(root / "hsfs", followlinks=True):
        folders[:] = [f for f in folders if f != "__pycache__"]
        found |= {os.path.relpath(Path(folder, n), root) for n in names if n.endswith(".py")}
    return found


@pytest.fixture(scope="module")
def dists(tmp_path_factory):
    """The wheel made from the sdist made from a copy of the tree: (sdist, wheel, modules)."""
    work = tmp_path_factory.mktemp("dist")
    source = work / "source"
    source.mkdir()
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        timeout=60,
    ).stdout.split(b"\0")
    for name in filter(None, listed):
        old, new = ROOT / os.fsdecode(name), source / os.fsdecode(name)
        if not old.is_symlink() and not old.exists():
            continue
        new.parent.mkdir(parents=True, exist_ok=True)
        if old.is_symlink():
            new.symlink_to(old.readlink())
        else:
            new.write_bytes(old.read_bytes())
    # Without isolation: the locked setuptools, and no registry in the gate.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", work / "out", source, cwd=work)
    (sdist,) = (work / "out").glob("*.tar.gz")
    (wheel,) = (work / "out").glob("*.whl")
    return sdist, wheel, modules_below(source)


def test_names_and_versions(dists):
    sdist, wheel, _ = dists
    assert sdist.name == f"hsfs_fs-{hsfs.__version__}.tar.gz"
    assert wheel.name == f"hsfs_fs-{hsfs.__version__}-py3-none-any.whl"


def test_both_hold_every_module_and_nothing_else(dists):
    sdist, wheel, want = dists
    assert len(want) >= 12
    with zipfile.ZipFile(wheel) as z:
        names = z.namelist()
        assert {n for n in names if n.endswith(".py")} == want
        assert "hsfs/py.typed" in names
        assert any(n.endswith("licenses/LICENSE") for n in names)
        tops = {n.split("/")[0] for n in names}
        assert tops == {"hsfs", f"hsfs_fs-{hsfs.__version__}.dist-info"}
        (entry_points,) = (n for n in names if n.endswith("entry_points.txt"))
        parsed = configparser.ConfigParser()
        parsed.read_string(z.read(entry_points).decode())
        assert dict(parsed["console_scripts"]) == project()["scripts"]
    with tarfile.open(sdist) as t:
        inside = {n.partition("/")[2] for n in t.getnames()}
        assert want <= inside
        assert not any(n.startswith("tests/") for n in inside)


def test_wheel_runs_in_an_empty_environment(dists, tmp_path):
    _, wheel, modules = dists
    uv = BIN / "uv"
    venv = tmp_path / "venv"
    run(uv, "venv", "--quiet", "--python", sys.executable, venv, cwd=tmp_path)
    python = venv / "bin/python"
    run(
        *(uv, "pip", "install", "--quiet", "--offline", "--no-deps", "--no-index"),
        *("--python", python, wheel),
        cwd=tmp_path,
    )
    # What it depends on comes from here, so that the test needs no registry; hsfs itself does not:
    # the editable install works by a .pth file, which is not read from a folder on PYTHONPATH.
    site = next(Path(p) for p in sys.path if p.endswith("site-packages"))
    env = {"PYTHONPATH": os.fspath(site), "PYTHONDONTWRITEBYTECODE": "1"}
    origin = run(python, "-c", "import hsfs; print(hsfs.__file__)", cwd=tmp_path, env=env)
    assert Path(origin.strip()).is_relative_to(venv), origin
    shown = run(venv / "bin/hsfs", "--version", cwd=tmp_path, env=env)
    assert hsfs.__version__ in shown
    assert (venv / "bin/mount.hsfs").exists()
    # Each module imports: what a wheel forgot shows here.
    names = sorted(
        m.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for m in modules
        if not m.endswith("__main__.py")
    )
    run(python, "-c", f"import {', '.join(names)}", cwd=tmp_path, env=env)


def project():
    with (ROOT / "pyproject.toml").open("rb") as f:
        return tomllib.load(f)["project"]


def test_lock_names_no_host_and_covers_the_dependencies():
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    assert not [line for line in lines if "://" in line or line.startswith("-")]
    locked = {line.split("==")[0].lower() for line in lines if "==" in line}
    extra = project()["optional-dependencies"]["dev"]
    for requirement in [*project()["dependencies"], *extra]:
        name = requirement.split(">=")[0].split("[")[0]
        assert name.lower() in locked, requirement
