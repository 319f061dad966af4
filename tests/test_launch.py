"""scripts.launch and the ranks' half of its contract: real processes, rank scripts that do not import torch."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.launch import exit_code, parse

ROOT = Path(__file__).parent.parent
DEADLINE_SECONDS = 60

# Every rank writes <rank>.<attempt> with its process id, then does what the test says.
RANK = """
import os, signal, sys
from pathlib import Path
from trainer.ownership import die_with_parent, leave

folder, rank, attempt = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def ready():
    die_with_parent()
    fresh = folder / f".{rank}"
    fresh.write_text(str(os.getpid()))
    fresh.rename(folder / f"{rank}.{attempt}")

def hold_signals():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

def end(code):
    leave(code)
    sys.exit(code)
"""


def wait_for(condition: Callable[[], bool], what: str, seconds: float = DEADLINE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Launched:
    """Two ranks of a small script under scripts.launch."""

    def __init__(self, folder: Path, body: str, *options: str, before: tuple[str, ...] = (), module: str) -> None:
        self.folder = folder
        script = folder / "rank.py"
        script.write_text(RANK + body)
        environment = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "LAUNCH_PID")}
        command = [*before, sys.executable, "-m", module, "--nproc-per-node", "2", *options, str(script), str(folder)]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
            stderr=subprocess.PIPE,
            text=True,
        )

    def started(self) -> set[str]:
        """`<rank>.<attempt>` of the ranks that ran."""
        return {path.name for path in self.folder.glob("[01].[0-9]")}

    def ranks(self, attempt: int = 0) -> list[int]:
        """Process ids of both ranks, once they are ready."""
        files = [self.folder / f"{rank}.{attempt}" for rank in (0, 1)]
        wait_for(lambda: all(file.exists() for file in files) or self.process.poll() is not None, "the ranks")
        return [int(file.read_text()) for file in files]

    def end(self) -> tuple[int, str]:
        """Exit code and what the launcher said, when nothing of it is left."""
        _, said = self.process.communicate(timeout=DEADLINE_SECONDS)
        left = [int(path.read_text()) for path in self.folder.glob("[01].[0-9]")]
        wait_for(lambda: not any(is_running(pid) for pid in left), "the ranks' end", seconds=2)
        assert not list(self.folder.glob("launch-*.json*"))
        return self.process.returncode, said


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    launched = []

    def start(body: str, *options: str, module: str = "scripts.launch", before: tuple[str, ...] = ()) -> Launched:
        launched.append(Launched(tmp_path, body, *options, before=before, module=module))
        return launched[-1]

    yield start
    for one in launched:
        one.process.kill()
        one.process.communicate()
        for file in one.folder.glob("[01].[0-9]"):
            if is_running(pid := int(file.read_text())):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--nproc_per_nodes", "2", "train_pretrain.py"], ["--nproc_per_nodes", "did you mean --nproc_per_node?"]),
        (["--nproc_per_node", "2", "train_pretrian.py"], ["no such script", "did you mean train_pretrain.py?"]),
        (
            ["--nproc_per_node", "2", "nowhere/x.py"],
            ["nowhere/x.py: no such script", "looked from"],
        ),
    ],
)
def test_a_mistyped_command_is_one_line_with_what_was_meant(
    argv: list[str], parts: list[str], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        parse(argv, [])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert [part for part in parts if part not in line] == []


SAVES_WHEN_TOLD = """
hold_signals()
ready()
signal.sigwait({signal.SIGTERM})
os.mkfifo(folder / f"told{rank}")
open(folder / f"told{rank}").read()   # the test lets it go on
(folder / f"saved{rank}").touch()
end(75)
"""


def let_ranks_save(launched: Launched) -> None:
    """Once both ranks were told to stop, let their saves go on."""
    pipes = [launched.folder / f"told{rank}" for rank in (0, 1)]
    wait_for(lambda: all(pipe.exists() for pipe in pipes), "the signal at both ranks")
    for pipe in pipes:
        pipe.write_text("")


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1"])
def test_a_stop_signal_reaches_all_ranks_and_the_launcher_waits_for_their_save(launch, number: str):
    run = launch(SAVES_WHEN_TOLD, "--max-restarts", "2")
    run.ranks()
    run.process.send_signal(getattr(signal, number))
    wait_for(lambda: (run.folder / "told0").exists(), "the signal at rank 0")
    run.process.send_signal(signal.SIGTERM)  # a second one must not cut the save short
    run.process.send_signal(signal.SIGINT)
    let_ranks_save(run)
    code, said = run.end()
    assert code == 75, said
    assert run.started() == {"0.0", "1.0"}
    assert (run.folder / "saved0").exists()
    assert (run.folder / "saved1").exists()
    assert "Traceback" not in said


def test_a_run_that_is_done_when_told_to_stop_exits_0(launch):
    run = launch("hold_signals(); ready(); signal.sigwait({signal.SIGTERM}); end(0)")
    run.ranks()
    run.process.send_signal(signal.SIGTERM)
    assert run.end()[0] == 0


def test_a_rank_that_fails_while_leaving_does_not_change_the_code_that_rank_0_left(launch):
    run = launch("hold_signals(); ready(); signal.sigwait({signal.SIGTERM}); leave(75); sys.exit(rank)")
    run.ranks()
    run.process.send_signal(signal.SIGTERM)
    assert run.end()[0] == 75


NEEDS_ITS_WORKER = """
import subprocess
worker = subprocess.Popen(["sleep", "600"])
hold_signals()
ready()
signal.sigwait({signal.SIGTERM})
if worker.poll() is None:
    (folder / f"saved{rank}").touch()
worker.kill()
end(75)
"""


def test_data_loading_workers_do_not_get_the_stop_signal(launch):
    run = launch(NEEDS_ITS_WORKER)
    run.ranks()
    run.process.send_signal(signal.SIGTERM)
    assert run.end()[0] == 75
    assert (run.folder / "saved0").exists()
    assert (run.folder / "saved1").exists()


@pytest.mark.parametrize("code", [75, 78, 2])
def test_ranks_that_leave_with_a_final_code_are_not_restarted(launch, code: int):
    run = launch(f"ready(); end({code})", "--max-restarts", "3")
    ended, said = run.end()
    assert ended == code, said
    assert {name[-1] for name in run.started()} == {"0"}
    assert "Traceback" not in said


def test_a_rank_that_leaves_with_75_first_lets_the_others_save_with_their_workers(launch):
    run = launch("if rank: ready(); end(75)\n" + NEEDS_ITS_WORKER)
    assert run.end()[0] == 75
    assert (run.folder / "saved0").exists()


def test_bare_torchrun_does_not_restart_a_rank_that_leaves_with_75(launch):
    run = launch("ready(); end(75)", "--max-restarts", "3", module="torch.distributed.run")
    assert run.end()[0] == 1
    assert {name[-1] for name in run.started()} == {"0"}


def test_killed_ranks_are_restarted_and_the_finished_run_exits_0(launch):
    run = launch("ready(); rank == attempt == 0 and os.kill(os.getpid(), 9); end(0)", "--max-restarts", "1")
    code, said = run.end()
    assert code == 0, said
    assert {"0.0", "0.1", "1.1"} <= run.started()


def test_a_crash_that_restarts_do_not_cure_exits_1_and_names_the_rank(launch):
    run = launch("ready(); rank == 1 and os._exit(3); signal.pause()", "--max-restarts", "1")
    code, said = run.end()
    assert code == 1
    assert "rank 1 exited with 3" in said
    assert "1.1" in run.started()
    assert "Traceback" not in said


def test_a_signal_while_torch_is_imported_exits_75_and_starts_no_rank(launch):
    run = launch("ready()")
    status = Path(f"/proc/{run.process.pid}/status")

    def catches_sigterm() -> bool:
        caught = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt"))
        return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)

    wait_for(catches_sigterm, "the launcher's handlers")
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == (75, "")
    assert run.started() == set()


def test_a_signal_before_one_rank_has_a_handler_exits_75_and_leaves_no_orphan(launch):
    run = launch("if rank: hold_signals()\nready(); signal.pause()")  # rank 1 waits for rank 0 for ever
    run.ranks()
    run.process.send_signal(signal.SIGTERM)
    code, said = run.end()
    assert code == 75, said


def test_ranks_die_with_a_killed_launcher(launch):
    run = launch("hold_signals(); ready(); signal.pause()")
    ranks = run.ranks()
    run.process.kill()
    wait_for(lambda: not any(is_running(pid) for pid in ranks), "the ranks' end", seconds=2)


def test_a_rank_whose_launcher_died_before_it_looked_ends_too():
    code = "from trainer.ownership import die_with_parent; die_with_parent(); print('went on')"
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "1", "LAUNCH_PID": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL
    assert "launcher (process 1) is gone" in ended.stderr


def test_the_launcher_stops_its_ranks_as_process_1_of_a_container(launch):
    container = ("unshare", "--pid", "--fork", "--mount-proc")
    if not shutil.which("unshare") or subprocess.run([*container, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to make a PID namespace (unshare --pid)")
    run = launch(SAVES_WHEN_TOLD, before=container)
    files = [run.folder / "0.0", run.folder / "1.0"]
    wait_for(lambda: all(file.exists() for file in files), "the ranks")
    outside = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text().split()
    for file in files:
        file.unlink()  # process ids of the other namespace
    os.kill(int(outside[0]), signal.SIGTERM)
    let_ranks_save(run)
    code, said = run.end()
    assert code == 75, said


def test_ranks_find_the_settings_that_training_needs(launch):
    names = ["LAUNCH_PID", "OMP_NUM_THREADS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    run = launch(f"(folder / f'env{{rank}}').write_text(' '.join(os.environ[n] for n in {names})); end(0)")
    code, said = run.end()
    assert (code, said) == (0, "")
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert (run.folder / "env1").read_text() == f"{run.process.pid} {threads} 600"


def test_help_says_what_the_launcher_adds_and_lists_the_options_of_torchrun():
    command = [sys.executable, "-m", "scripts.launch", "--help"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "75 stopped and resumable" in said
    assert "--nproc-per-node" in said


@pytest.mark.parametrize(
    ("codes", "stopping", "expected"),
    [
        ([], False, 0),
        ([0, 0], True, 0),
        ([75, 75], False, 75),
        ([75, 0], True, 75),
        ([75, -15], False, 75),
        ([78, -15], False, 78),
        ([75, 78], True, 78),
        ([2, -15], False, 2),
        ([1, 75], False, 1),
        ([1, 75], True, 1),
        ([-9, -15], False, 1),
        ([-15, -15], False, 75),  # told to stop by someone else than the launcher
        ([-2], False, 75),
        ([-10, 1], False, 1),
        ([-15, -15], True, 75),
        ([1, -15], True, 75),
        ([-9, 75], True, 1),
        ([], True, 75),
    ],
)
def test_the_ranks_codes_make_the_runs_code(codes: list[int], stopping: bool, expected: int):
    assert exit_code(codes, stopping) == expected


def test_a_rank_that_torchrun_interrupts_before_training_does_not_keep_it_from_restarting(launch, tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    body = """
pipe = folder / "pipe"
if attempt:
    ready(); end(0)
if rank:
    ready(); pipe.read_bytes(); os._exit(3)
hold_signals(); ready(); pipe.write_bytes(b"")
signal.sigwait({signal.SIGTERM}); leave(75, interrupted=True); sys.exit(75)
"""
    run = launch(body, "--max-restarts", "1", module="torch.distributed.run")
    code, said = run.end()
    assert code == 0, said
    assert {"0.1", "1.1"} <= run.started()
