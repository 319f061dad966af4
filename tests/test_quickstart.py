"""The two commands of the README: what they say when something is missing, and that they do what they promise."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT

PYTHONS = ["python3", "python", "python3.14", "python3.13", "python3.12", "python3.11"]
SMALL = [
    "--hidden_size", "64", "--num_hidden_layers", "2", "--max_steps", "60", "--checkpoint_interval", "10",
    "--log_interval", "1",
]  # fmt: skip


def stub(path: Path, body: str) -> Path:
    """A shell script in the place of a program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The shell scripts and the lists of packages, without a .venv, in a folder with a space in its name."""
    folder = tmp_path / "a clone"
    for name in ("scripts/quickstart.sh", "scripts/test.sh", "scripts/venv.sh", "requirements.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / "tests").mkdir()
    shutil.copy(ROOT / "tests/requirements.txt", folder / "tests/requirements.txt")
    return folder


def run(script: Path, *arguments: str, **environment: object) -> subprocess.CompletedProcess:
    """Run a script from another folder; empty PYTHON unless given."""
    command = ["bash", str(script), *arguments]
    environment = os.environ | {"PYTHON": ""} | {name: str(value) for name, value in environment.items()}
    return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=240)


def first_in_path(folder: Path) -> str:
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def sentence(result: subprocess.CompletedProcess) -> str:
    """The one line on stderr that a failure consists of."""
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert "Traceback" not in result.stdout
    return line


@pytest.mark.parametrize("script", ["quickstart.sh", "test.sh"])
def test_a_python_that_does_not_exist_is_named(clone: Path, script: str) -> None:
    line = sentence(run(clone / "scripts" / script, PYTHON="/nonexistent"))
    assert line.startswith(f"{script}: PYTHON=/nonexistent does not exist; install Python 3.11")


def test_an_old_python_is_named_and_not_used(clone: Path) -> None:
    old = stub(clone / "old/python3", "exit 1")
    assert "older than Python 3.11" in sentence(run(clone / "scripts/quickstart.sh", PYTHON=old))


def test_only_old_pythons_in_path_are_no_python(clone: Path) -> None:
    for name in PYTHONS:
        stub(clone / "old" / name, "exit 1")
    line = sentence(run(clone / "scripts/quickstart.sh", PATH=first_in_path(clone / "old")))
    assert "found no Python 3.11 or newer" in line


def test_a_python_without_venv_names_the_package_that_has_it(clone: Path) -> None:
    body = f'case "$2" in *ensurepip*) exit 1;; esac\nexec "{sys.executable}" "$@"'
    line = sentence(run(clone / "scripts/quickstart.sh", PYTHON=stub(clone / "bare/python3", body)))
    assert "apt-get install python3-venv" in line


def test_a_full_disk_is_noticed_before_anything_is_written(clone: Path) -> None:
    stub(clone / "full/df", "echo Filesystem 1048576-blocks Used Available Capacity Mounted on; echo /d 9 8 17 9% /")
    line = sentence(run(clone / "scripts/quickstart.sh", PATH=first_in_path(clone / "full")))
    assert f"only 17 MB are free in {clone}" in line
    assert not (clone / ".venv").exists()


@pytest.mark.parametrize("half_made", [False, True], ids=["no .venv", "half-made .venv"])
def test_no_network_is_one_sentence_and_a_half_made_venv_heals(clone: Path, half_made: bool) -> None:
    if half_made:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", clone / ".venv"], check=True)
    line = sentence(run(clone / "scripts/quickstart.sh", PIP_NO_INDEX=1, PIP_FIND_LINKS="", PIP_CONFIG_FILE=os.devnull))
    assert "is the network there?" in line
    assert "torch==2.13.0" in line, "pip's own reason"
    assert subprocess.run([clone / ".venv/bin/python", "-m", "pip", "--version"], capture_output=True).returncode == 0
    assert not list((clone / ".venv").glob("installed*"))


def pip_stub(clone: Path, would_install: str) -> None:
    """A .venv whose pip only writes down what it was asked for."""
    stub(
        clone / ".venv/bin/python",
        f'echo "$@" >> "{clone}/calls"\ncase "$*" in *--dry-run*) echo "Would install {would_install}";; esac',
    )


def installations(clone: Path) -> list[str]:
    """The files that pip was really told to install, in order."""
    calls = (clone / "calls").read_text().splitlines() if (clone / "calls").exists() else []
    return [call.split()[-1] for call in calls if "pip install" in call and "--dry-run" not in call]


def install(clone: Path, *files: str, **environment: object) -> subprocess.CompletedProcess:
    lines = ["set -euo pipefail", f'cd "{clone}"', "source scripts/venv.sh", *(f"install {name}" for name in files)]
    script = clone / "install.sh"
    script.write_text("\n".join(lines))
    return run(script, **environment)


def test_each_list_of_packages_is_installed_once_until_it_changes(clone: Path) -> None:
    pip_stub(clone, "torch-2.13.0")
    assert install(clone, "requirements.txt").returncode == 0
    assert install(clone, "requirements.txt", "tests/requirements.txt", "requirements.txt").returncode == 0
    assert installations(clone) == ["requirements.txt", "tests/requirements.txt"]
    (clone / "requirements.txt").write_text("torch\n")
    assert install(clone, "requirements.txt", "tests/requirements.txt").returncode == 0
    assert installations(clone) == ["requirements.txt", "tests/requirements.txt", "requirements.txt"]


@pytest.mark.parametrize(("free", "enough"), [(9_999, False), (10_000, True)])
def test_the_cuda_build_needs_its_space_and_is_announced_where_no_gpu_is(clone: Path, free: int, enough: bool) -> None:
    pip_stub(clone, "nvidia-cublas-13.0 torch-2.13.0")
    stub(clone / "bin/df", f"echo head; echo /d 9 8 {free} 9% /")
    result = install(clone, "requirements.txt", PATH=first_in_path(clone / "bin"))
    if not enough:
        assert "only 9999 MB are free" in sentence(result)
        assert not installations(clone)
        return
    assert installations(clone) == ["requirements.txt"]
    assert ("CPU build" in result.stdout) == (shutil.which("nvidia-smi") is None)


def test_all_installs_what_the_system_lacks_and_goes_on_where_it_cannot(clone: Path) -> None:
    pip_stub(clone, "torch-2.13.0")
    for name in ("bash", "cat", "cmp", "cp", "dirname", "basename", "df", "awk", "grep", "sort", "tr"):
        (clone / "bin").mkdir(exist_ok=True)
        (clone / "bin" / name).symlink_to(shutil.which(name))
    stub(clone / "bin/id", "echo 0")
    stub(clone / "bin/apt-get", f'echo "$@" >> "{clone}/apt"; [ "$1" = update ]')
    core = run(clone / "scripts/test.sh", PATH=clone / "bin")
    assert core.returncode == 0, core.stderr
    assert not (clone / "apt").exists()
    every = run(clone / "scripts/test.sh", "--all", PATH=clone / "bin")
    assert every.returncode == 0, every.stderr
    assert "the tests that need these will be skipped" in every.stdout
    assert (clone / "apt").read_text().splitlines()[1].endswith("iproute2 munge slurm-wlm strace")


@pytest.fixture
def whole_clone(tmp_path: Path) -> Path:
    """A copy of the tree that uses the environment the tests run in, so that nothing is downloaded."""
    folder = tmp_path / "a clone"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".git", ".venv", "out", "__pycache__", ".*_cache"))
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


def processes_in(folder: Path) -> list[str]:
    """What still runs with its working directory there."""
    found = []
    for cwd in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if cwd.readlink() == folder:
                found.append((cwd.parent / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


STAGES = ("pretrain", "sft", "lora")


@pytest.mark.integration
def test_quickstart_trains_is_killed_goes_on_and_asks_its_questions(whole_clone: Path) -> None:
    result = run(whole_clone / "scripts/quickstart.sh", *SMALL)
    assert result.returncode == 0, result.stderr
    runs = whole_clone / "out/quickstart"
    stages = [line[15] for line in result.stdout.splitlines() if line.startswith("quickstart.sh: ") and "/6 " in line]
    assert stages == ["1", "2", "3", "4", "5", "6"]
    for stage in STAGES:
        events = [json.loads(line) for line in (runs / stage / "events.jsonl").read_text().splitlines()]
        starts = [(event["event"], event["step"]) for event in events if event["event"] in ("started", "resumed")]
        assert [kind for kind, _ in starts] == (["started", "resumed"] if stage == "pretrain" else ["started"])
        steps = [json.loads(line) for line in (runs / stage / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in steps] == list(range(1, 61)), "no gap, nothing twice"
        if stage == "pretrain":
            assert 0 < starts[1][1] < 60
            assert steps[-1]["loss"] < steps[0]["loss"] - 1
    answers = [line for line in result.stdout.splitlines() if "  ->  " in line]
    assert len(answers) == 10
    assert " of 10 right; " in result.stdout

    again = run(whole_clone / "scripts/quickstart.sh", *SMALL)
    assert again.returncode == 0
    assert again.stderr.count("already finished at step 60") == 3
    assert "3/6" not in again.stdout
    assert [line for line in again.stdout.splitlines() if "  ->  " in line] == answers
    assert not processes_in(whole_clone)


@pytest.mark.integration
def test_it_ends_well_after_one_step(whole_clone: Path) -> None:
    result = run(whole_clone / "scripts/quickstart.sh", *SMALL, "--max_steps", "1")
    assert result.returncode == 0, result.stderr
    assert " of 10 right; " in result.stdout


@pytest.mark.integration
@pytest.mark.parametrize("to_all", [True, False], ids=["Ctrl-C", "SIGTERM to the script alone"])
def test_stopping_it_saves_and_leaves_nothing_behind(whole_clone: Path, to_all: bool) -> None:
    command = ["bash", "scripts/quickstart.sh", *SMALL, "--max_steps", "100000", "--checkpoint_interval", "100000"]
    process = subprocess.Popen(command, cwd=whole_clone, start_new_session=True, stdout=subprocess.PIPE, text=True)
    try:
        metrics, deadline = whole_clone / "out/quickstart/pretrain/metrics.jsonl", time.monotonic() + 120
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 3):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        if to_all:
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.terminate()
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "stopped; the same command goes on from here" in output
        assert len(list((whole_clone / "out/quickstart/pretrain").glob("step_????????"))) == 1
        assert not processes_in(whole_clone)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
