"""One owner per run folder: on one machine, between machines, after kills, on disks that misbehave."""

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.ownership import Owner, OwnershipLost, RunInUse, begin_anew, begun_by_this_launch, claim

ROOT = Path(__file__).parent.parent
fork = multiprocessing.get_context("fork")


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.005)


def record_of(run_dir: Path) -> dict:
    return json.loads((run_dir / "owner.json").read_text())


def other_machine_owns(run_dir: Path, generation: str = "theirs", heartbeat: int = 7) -> None:
    """Leave the record that a run on another machine would have written."""
    run_dir.mkdir(exist_ok=True)
    value = {"host": "node7", "machine": "another kernel", "pid": 4321, "since": "2026-01-02 03:04:05 +0000"}
    value |= {"generation": generation, "heartbeat": f"{heartbeat:012d}"}
    fresh = run_dir / "fresh"
    fresh.write_text(json.dumps(value))
    fresh.replace(run_dir / "owner.json")


def beating_owner(run_dir: Path) -> Owner:
    """An owner whose heart beats fast; the lock plays no part."""
    return Owner(run_dir, os.open(run_dir, os.O_RDONLY), heartbeat_seconds=0.01)


def test_a_second_run_is_refused_and_told_who_owns_the_folder(tmp_path: Path):
    owner = claim(tmp_path / "run")
    with pytest.raises(RunInUse, match=f"process {os.getpid()} on {socket.gethostname()}, since 2") as refusal:
        claim(tmp_path / "run", wait_seconds=0)
    assert "--out_dir" in str(refusal.value)
    owner.check()
    owner.release()


def test_a_released_folder_is_free_for_this_and_for_other_machines(tmp_path: Path):
    owner = claim(tmp_path)
    owner.release()
    owner.release()
    assert not (tmp_path / "owner.json").exists()  # another machine would watch the record it finds
    claim(tmp_path, wait_seconds=0).release()


def test_a_killed_owner_frees_the_folder_at_once(tmp_path: Path):
    receive, send = fork.Pipe()

    def own() -> None:
        claim(tmp_path)
        send.send("mine")
        signal.pause()

    process = fork.Process(target=own)
    process.start()
    assert receive.recv() == "mine"
    with pytest.raises(RunInUse, match=f"process {process.pid} "):
        claim(tmp_path, wait_seconds=0)
    process.kill()
    process.join()
    claim(tmp_path, wait_seconds=0, stale_seconds=1000).release()


def test_a_claim_waits_for_the_last_process_of_a_killed_predecessor(tmp_path: Path):
    owner, claimed = claim(tmp_path), []
    waiting = threading.Thread(target=lambda: claimed.append(claim(tmp_path, wait_seconds=20)))
    waiting.start()
    waiting.join(timeout=0.3)
    assert waiting.is_alive()
    owner.release()
    waiting.join()
    claimed[0].check()
    claimed[0].release()


def test_release_frees_the_lock_that_a_forked_worker_shares(tmp_path: Path):
    owner = claim(tmp_path)
    worker = fork.Process(target=signal.pause)
    worker.start()
    owner.release()
    claim(tmp_path, wait_seconds=0).release()
    worker.kill()
    worker.join()


def test_a_live_owner_on_another_machine_is_seen_by_its_heartbeat(tmp_path: Path):
    other_machine_owns(tmp_path)
    over = threading.Event()

    def beat() -> None:
        beats = 7
        while not over.wait(0.05):
            other_machine_owns(tmp_path, heartbeat=(beats := beats + 1))

    heart = threading.Thread(target=beat)
    heart.start()
    with pytest.raises(RunInUse, match="process 4321 on node7, since 2026-01-02"):
        claim(tmp_path, stale_seconds=20)
    over.set()
    heart.join()


def test_a_dead_owner_on_another_machine_is_replaced_when_its_heartbeat_stood_still(tmp_path: Path):
    other_machine_owns(tmp_path)
    began = time.monotonic()
    owner = claim(tmp_path, stale_seconds=0.5)
    assert time.monotonic() - began >= 0.5
    owner.check()
    owner.release()


def test_a_run_that_ends_while_it_is_watched_is_not_waited_for(tmp_path: Path):
    other_machine_owns(tmp_path)
    claimed = []
    waiting = threading.Thread(target=lambda: claimed.append(claim(tmp_path, stale_seconds=1000)))
    waiting.start()
    waiting.join(timeout=0.3)
    assert waiting.is_alive()
    (tmp_path / "owner.json").unlink()
    waiting.join(timeout=20)
    claimed[0].release()


def test_without_file_locks_the_heartbeat_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    owner = beating_owner(tmp_path)
    with pytest.raises(RunInUse):
        claim(tmp_path, stale_seconds=20)
    owner.release()
    claim(tmp_path, stale_seconds=1000).release()


def test_an_owner_that_was_taken_over_is_stopped_at_its_next_commit_and_cannot_disturb(tmp_path: Path):
    owner = beating_owner(tmp_path)
    other_machine_owns(tmp_path)
    with pytest.raises(OwnershipLost, match="taken over by process 4321 on node7"):
        owner.check()
    beats = owner._beats
    wait_for(lambda: owner._beats > beats + 3, "more heartbeats")
    owner.release()
    assert record_of(tmp_path)["generation"] == "theirs"
    (tmp_path / "owner.json").unlink()
    with pytest.raises(OwnershipLost, match="ended since"):
        owner.check()


def test_the_heart_beats_for_others_to_see(tmp_path: Path):
    owner = beating_owner(tmp_path)
    first = record_of(tmp_path)
    wait_for(lambda: record_of(tmp_path)["heartbeat"] > first["heartbeat"], "a heartbeat")
    owner.release()


def test_a_full_disk_under_the_heartbeat_is_warned_about_once_and_nothing_else_happens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    owner = beating_owner(tmp_path)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, owner._file)
    os.close(full)
    beats = owner._beats
    wait_for(lambda: owner._beats > beats + 5, "heartbeats on a full disk")
    owner.check()
    owner.release()
    warnings = [line for line in caplog.messages if "No space left" in line]
    assert len(warnings) == 1
    assert "training goes on" in warnings[0]


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/nowhere", "dangling"])
def test_a_place_that_cannot_be_a_run_folder_is_one_clear_error(tmp_path: Path, place: str):
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "dangling").symlink_to("nowhere/at/all")
    with pytest.raises(ValueError, match=r"cannot use .* as a run folder: .*; choose another --out_dir"):
        claim(tmp_path / place)
    assert (tmp_path / "file").read_text() == "not a folder"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"host": 1}', "\xff"])
def test_a_broken_record_of_a_dead_owner_does_not_block_the_folder(tmp_path: Path, text: str):
    (tmp_path / "owner.json").write_text(text, encoding="latin-1")
    claim(tmp_path, wait_seconds=0, stale_seconds=1000).release()


def test_starting_anew_keeps_every_earlier_run_under_another_name(tmp_path: Path):
    run = tmp_path / "run"
    for number in (1, 2):
        owner = claim(run)
        (run / "exit.json").write_text("of a start that failed: no run")
        assert begin_anew(owner) is owner
        (run / "metrics.jsonl").write_text(f"run {number}")
        owner = begin_anew(owner)
        owner.check()
        owner.release()
        assert not (run / "metrics.jsonl").exists()
        assert (tmp_path / f"run.old-{number}" / "metrics.jsonl").read_text() == f"run {number}"
        assert not (tmp_path / f"run.old-{number}" / "owner.json").exists()


def test_only_a_restart_by_the_same_launcher_goes_on_with_what_was_begun_anew(tmp_path: Path, monkeypatch):
    run = tmp_path / "run"
    begin_anew(claim(run)).release()
    assert not begun_by_this_launch(run), "the first start of a launch begins anew"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert begun_by_this_launch(run)
    # A restart of a rank that died before the old run was set aside finds another launch's mark, or none.
    mark = run / "owner.launch"
    mark.write_text(mark.read_text() + "0")
    assert not begun_by_this_launch(run)
    mark.unlink()
    assert not begun_by_this_launch(run)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux only")
@pytest.mark.parametrize(("elastic", "expected"), [(True, signal.SIGKILL), (False, 0)])
def test_only_a_rank_of_torch_elastic_is_tied_to_its_parent(elastic: bool, expected: int):
    # A plain `nohup python train_pretrain.py` has to outlive its shell.
    code = """
import ctypes
from trainer.ownership import die_with_parent
die_with_parent()
number = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0)  # PR_GET_PDEATHSIG
print(number.value)
"""
    environment = {k: v for k, v in os.environ.items() if k not in ("TORCHELASTIC_RUN_ID", "LAUNCH_PID")}
    environment |= {"PYTHONPATH": str(ROOT)} | ({"TORCHELASTIC_RUN_ID": "1"} if elastic else {})
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert int(ended.stdout) == expected
