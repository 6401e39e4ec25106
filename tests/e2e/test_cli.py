"""The command without a mount: help, errors in text and JSON, exit codes, what is imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hsfs.cli import exits
from hsfs.cli import main as entry
from hsfs.cli.main import VERBS
from hsfs.cli.output import Output
from hsfs.core.errors import HsfsError

BIN = Path(sys.executable).parent


def run(*words, program="hsfs", **options):
    inherited = {key: value for key, value in os.environ.items() if key != "HSFS_DEBUG"}
    environment = {**inherited, **options.pop("env", {})}
    return subprocess.run(
        [str(BIN / program), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
        stdin=subprocess.DEVNULL,
        **options,
    )


@pytest.fixture(autouse=True)
def private(tmp_path, monkeypatch):
    monkeypatch.setenv("HSFS_RUNTIME_DIR", str(tmp_path / "run"))


def test_version_and_help():
    from hsfs import __version__

    assert run("--version").stdout.strip().endswith(__version__)
    done = run("--help")
    assert done.returncode == 0
    for verb in ("mount", "umount", "status", "warmup", "doctor"):
        assert f"  {verb} " in done.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb):
    done = run(verb, "--help")
    assert done.returncode == 0, done.stderr
    assert "Usage: hsfs" in done.stdout


def test_a_verb_imports_only_what_it_needs():
    script = (
        "import sys\nfrom hsfs.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print('\\n'.join(sys.modules), file=sys.stderr)\n"
    )
    for words in (["info", "--help"], ["status"], ["umount", "/nowhere"]):
        done = subprocess.run(
            [sys.executable, "-c", script, *words],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        modules = set(done.stderr.split())
        heavy = {"trio", "boto3", "botocore", "pyfuse3", "aiohttp", "obstore", "lmdb", "rich"}
        heavy |= {"uvloop", "prometheus_client", "structlog", "asyncio", "xxhash"}
        assert not modules & heavy, words
        assert len(modules) < 400


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["staus"], 2, 'hsfs: staus: there is no such verb; did you mean "status"?'),
        (["info"], 2, "hsfs: info: missing argument 'PATHS...'; see hsfs info --help"),
        (["status", "--jsn"], 2, "no such option"),
        (["config", "show", "/no/such.toml"], 2, "/no/such.toml: no such volume file"),
        (["info", "/etc/passwd"], 4, "/etc/passwd: is in no hsfs mount of yours"),
        (["stats"], 4, "nothing is mounted"),
        (["warmup", "/etc"], 4, "is in no hsfs mount"),
        (["umount", "/proc"], 2, "is no hsfs mount but proc"),
        (["umount", "/", "--timeout", "5"], 2, "is not a duration"),
        (["mds", "hsfs://h/v"], 2, "needs a volume file"),
        (["mount", "/mnt"], 1, "no SOURCE"),
        (["mount"], 1, "needs [SOURCE] MOUNTPOINT"),
        (["mount", "--nope"], 1, "no such option"),
        (["mount", "/no/such.toml", "/mnt"], 1, "no such volume file"),
        (["mount", "--backend", "s3://b", "/mnt"], 1, "is not AT=URL"),
        (["mount", "--backend", "/d=/srv", "v.toml", "/mnt"], 1, "names its own backends"),
        (["mount", "--backend", "/d=/srv", "/mnt", "-o", "nope"], 1, "unknown mount option"),
        (["mount", "--backend", "/d=/srv", "/no/dir"], 32, "there is no such directory"),
        (["mount", "--backend", "/d=/srv", "/etc/passwd"], 32, "is not a directory"),
        (["mount", "--backend", "/d=/srv", "--cache-size", "1M", "/mnt"], 1, "too small"),
        (["mount", "--backend", "/d=/srv", "--session", "kernel", "/mnt"], 1, "not in this"),
        (["mount", "--backend", "/d=/", "/mnt"], 1, "would hold"),
        (["mount", "unix:relative", "/mnt"], 1, "must be absolute"),
    ],
)
def test_errors_are_one_line_and_have_their_code(words, code, said):
    done = run(*words)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("hsfs: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    with_json = run(*words, "--json")
    assert with_json.returncode == code
    value = json.loads(with_json.stdout)
    assert value["schema"] == 1
    assert set(value["error"]) == {"code", "what", "why", "next"}


def test_live_and_json_exclude_each_other():
    done = run("stats", "-l", "--json")
    assert done.returncode == 2
    assert "exclude" in json.loads(done.stdout)["error"]["why"]


def test_no_traceback_unless_asked(tmp_path):
    done = run("config", "show", tmp_path / "absent.toml")
    assert "Traceback" not in done.stderr
    done = run("config", "show", tmp_path / "absent.toml", env={"HSFS_DEBUG": "1"})
    assert "Traceback" in done.stderr


def test_a_file_backend_around_or_in_the_mountpoint(tmp_path):
    (tmp_path / "src" / "mnt").mkdir(parents=True)
    done = run("mount", "--backend", f"/d={tmp_path}/src", tmp_path / "src" / "mnt")
    assert (done.returncode, "would hold itself" in done.stderr) == (1, True), done.stderr
    done = run("mount", "--backend", f"/d={tmp_path}/src/mnt", tmp_path / "src")
    assert (done.returncode, "would hide itself" in done.stderr) == (1, True), done.stderr


def test_config_show(tmp_path):
    path = tmp_path / "v.toml"
    path.write_text(
        '[volume]\nname = "v"\n[[backend]]\nname = "b"\nurl = "s3://bucket/x"\ntimeout = "9s"\n'
    )
    text = run("config", "show", path, "--origin").stdout
    assert f"backend.b.timeout    = 9s    # {path}:6" in text
    assert "# default" in text
    value = json.loads(run("config", "show", path, "--json").stdout)
    assert value["schema"] == 1
    assert value["config"]["backend.b.timeout"] == 9.0
    value = json.loads(run("config", "show", path, "--json", "--origin").stdout)
    assert value["config"]["volume.name"] == {"value": "v", "origin": f"{path}:2"}


def test_doctor(tmp_path):
    (tmp_path / "src").mkdir()
    done = run("doctor", "--backend", f"/d={tmp_path}/src", "--json")
    value = json.loads(done.stdout)
    checks = {check["name"]: check for check in value["checks"]}
    assert checks["backend d"]["state"] == "ok"
    assert checks["/dev/fuse"]["state"] == "ok"
    assert done.returncode == {"ok": 0, "fail": 1, "warn": 3}[value["state"]]
    done = run("doctor", "--backend", f"/d={tmp_path}/absent")
    assert done.returncode == 1
    assert "-> " in done.stdout or "absent" in done.stdout


def test_backend_test_and_list(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "x").touch()
    good, bad = f"/a={tmp_path}/src", f"/b={tmp_path}/absent"
    done = run("backend", "test", "--backend", good)
    assert done.returncode == 0, done.stderr
    assert "1 entries at the top" in done.stdout
    done = run("backend", "test", "--backend", good, "--backend", bad, "--json")
    assert done.returncode == 3, done.stderr
    a, b = json.loads(done.stdout)["backends"]
    assert (a["state"], b["state"]) == ("ok", "missing")
    assert run("backend", "test", "--backend", bad).returncode == 4
    refused = "/c=s3://bucket?endpoint=http://127.0.0.1:9&timeout=1s&anonymous"
    assert run("backend", "test", "--backend", refused).returncode == 6
    done = run("backend", "list", "--backend", good, "--json")
    assert json.loads(done.stdout)["backends"][0]["url"] == f"file://{tmp_path}/src"


def test_mount_helper_arguments(tmp_path):
    helper = "mount.hsfs"
    assert run("--help", program=helper).returncode == 0
    done = run("only-one", program=helper)
    assert (done.returncode, "needs SOURCE and MOUNTPOINT" in done.stderr) == (1, True)
    done = run("a", "b", "-q", program=helper)
    assert done.returncode == 1
    done = run("a.toml", tmp_path, "-t", "nfs", program=helper)
    assert (done.returncode, "is not hsfs" in done.stderr) == (1, True)
    done = run("a.toml", tmp_path, "-N", "/no/ns", program=helper)
    assert (done.returncode, "no such namespace" in done.stderr) == (32, True)
    path = tmp_path / "v.toml"
    path.write_text('[volume]\nname="v"\n[[backend]]\nname="b"\nurl="file:///usr"\n')
    (tmp_path / "mnt").mkdir()
    fake = ["-sfnv", "-o", "rw,_netdev,nofail,xyzzy,x-systemd.requires=a"]
    done = run(path, tmp_path / "mnt", *fake, program=helper)
    assert done.returncode == 0, done.stderr
    assert "read-only" in done.stderr
    done = run(path, tmp_path / "mnt", "-f", "-o", "xyzzy", program=helper)
    assert (done.returncode, "unknown mount option" in done.stderr) == (1, True)


ENDING = """
import atexit, os, signal, sys
from hsfs.cli.main import main
atexit.register(os.kill, os.getpid(), signal.SIGINT)
sys.argv = ["hsfs", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize(("words", "code"), [(["--version"], 0), (["mount"], 1), (["nonsense"], 2)])
def test_interrupt_after_the_exit_code_is_known(words, code):
    """Ctrl-C while the interpreter ends does not replace the exit code by a death by signal."""
    command = [sys.executable, "-c", ENDING, *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("error", [HsfsError("x", "broken", "mend it"), KeyboardInterrupt()])
def test_interrupt_while_an_error_is_told(monkeypatch, error):
    """A Ctrl-C (or the second one) that hits the telling of an error is an interrupt like any."""

    def interrupted(*_):
        raise KeyboardInterrupt

    def body():
        raise error

    monkeypatch.setattr(Output, "error", interrupted)
    monkeypatch.setattr(sys.stderr, "write", interrupted)
    with pytest.raises(SystemExit) as ended:
        entry.run("hsfs", body, [], exits.exit_code, own_process=False)
    assert ended.value.code == exits.INTERRUPTED
