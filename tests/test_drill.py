"""The drills themselves: that they see what breaks, count what struck, and repeat by the seed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts import drill, faults_corrupt, faults_disk, faults_rehearsal, faults_save
from scripts.drill import COMES_THROUGH, Line, chosen, judge, run_case, said, summary, table
from scripts.faults import Bench, Case, Fault, Job
from scripts.faults_processes import Broken, alive, descendants, wait_for
from tests.conftest import ROOT

KEPT = "a promise"


def case(seed: int, struck: int, broken: str = "") -> Case:
    return Case(seed, struck, broken={KEPT: broken} if broken else {})


def verdicts(lines: list[Line]) -> list[str]:
    return [line.verdict for line in lines]


def test_kinds_of_faults_are_chosen_by_name_and_misspelt_ones_are_refused() -> None:
    assert chosen("all") == list(drill.FAULTS)
    assert chosen("disk,kill,disk") == ["disk", "kill"]
    for names, problem in (("kill,kil", "unknown kil; there are kill, save"), ("", "unknown names")):
        with pytest.raises(ValueError, match=problem):
            chosen(names)


def test_a_promise_is_kept_by_all_cases_or_broken_with_the_seed_that_repeats_it() -> None:
    fault = Fault((KEPT,), lambda bench, case: None)
    assert verdicts(judge("kill", fault, [case(1, 4), case(2, 3)])) == ["PASS", "PASS"]
    lines = judge("kill", fault, [case(1, 4), case(2, 3, "step 7 differs"), case(3, 1, "step 8 differs")])
    assert verdicts(lines) == ["FAIL", "PASS"]
    assert lines[0].detail == "2 of 3 cases; python -m scripts.drill --faults kill --n 1 --seed 2: step 7 differs"
    assert (lines[0].cases, lines[0].struck) == (3, 8)


def test_a_case_in_which_no_fault_struck_counts_for_nothing() -> None:
    fault = Fault((KEPT,), lambda bench, case: None)
    lines = judge("kill", fault, [case(1, 0), case(2, 3)])
    assert (lines[0].verdict, lines[0].cases, lines[0].struck) == ("PASS", 1, 3)
    lines = judge("kill", fault, [case(1, 0)])
    assert verdicts(lines) == ["FAIL", "FAIL"]
    assert lines[0].detail == "no fault struck"


def test_a_fault_that_came_too_late_is_tried_again_and_an_error_breaks_a_promise(tmp_path: Path) -> None:
    tries = []

    def late(bench: Bench, case: Case) -> None:
        tries.append(case.seed)
        if len(tries) == 3:
            case.strike("at last")

    assert run_case(Fault((KEPT,), late), Bench(tmp_path, 2), 5).struck == 1
    assert tries == [5, 5, 5]

    def stuck(bench: Bench, case: Case) -> None:
        case.strike("once")
        raise Broken("waited 9 s for step 3")

    found = run_case(Fault((KEPT,), stuck), Bench(tmp_path, 2), 5)
    assert found.struck == 1
    assert found.broken == {COMES_THROUGH: "waited 9 s for step 3"}


def test_lines_and_table_say_what_was_found() -> None:
    lines = [
        Line("kill", KEPT, "PASS", 2, 8),
        Line("save", KEPT, "FAIL", 2, 8, "1 of 2 cases; a | b"),
        Line("network", "", "SKIP", detail="needs root"),
    ]
    assert [said(line) for line in lines] == [
        "PASS kill: a promise (8 faults in 2 cases)",
        "FAIL save: a promise (8 faults in 2 cases): 1 of 2 cases; a | b",
        "SKIP network: needs root",
    ]
    text = table(lines, {"kill": "9 s"})
    assert "| save | a promise | 8 | 2 | FAIL: 1 of 2 cases; a / b |" in text
    assert text.endswith("- kill: 9 s\n")


def test_figures_are_summed_up() -> None:
    cases = [Case(1, figures={"seconds to stop": [1.0, 2.0], "kills inside a save": [1.0]})]
    cases.append(Case(2, figures={"seconds to stop": [6.0], "kills inside a save": [0.0]}))
    assert summary(cases) == "seconds to stop: median 2, at most 6; kills inside a save: 1"


def fake_run(folder: Path, losses: list[float], weights: bytes = b"weights") -> Job:
    step = folder / "step_00000005"
    step.mkdir(parents=True)
    (step / "model.safetensors").write_bytes(weights)
    (step / "optimizer.safetensors").write_bytes(b"moments")
    lines = [{"step": n, "loss": loss, "grad_norm": 1.0, "learning_rate": 0.1} for n, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Job(folder, [], {})


def test_two_runs_are_the_same_only_to_the_last_bit(tmp_path: Path) -> None:
    one = fake_run(tmp_path / "one", [2.5, 2.25])
    assert one.difference(fake_run(tmp_path / "same", [2.5, 2.25])) == ""
    assert "metrics.jsonl has (2, 2.25" in one.difference(fake_run(tmp_path / "bit", [2.5, 2.2500000000000004]))
    assert one.difference(fake_run(tmp_path / "short", [2.5])).startswith("2 steps in metrics.jsonl, 1 in that")
    other = fake_run(tmp_path / "weights", [2.5, 2.25], b"weight$")
    assert one.difference(other) == "model.safetensors differ from the undisturbed run's"
    assert one.step() == 2


def test_processes_below_a_launcher_are_found_level_by_level_and_zombies_are_none() -> None:
    command = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    parent = subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    assert descendants(parent.pid) == [[child]]
    assert parent.pid in descendants(os.getpid())[0]
    parent.kill()
    wait_for(lambda: not alive([parent.pid]), 10, "the kill")
    os.kill(child, signal.SIGKILL)
    parent.wait()
    with pytest.raises(Broken, match="waited 0 s for rain"):
        wait_for(lambda: False, 0, "rain")


def test_a_job_that_ends_too_early_is_not_waited_for(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", [sys.executable, "-c", "print('last words'); raise SystemExit(3)"], {}).start()
    began = time.monotonic()
    assert not job.reaches(lambda: False, 60, "never")
    assert time.monotonic() - began < 30
    with pytest.raises(Broken, match="ended with code 3: last words"):
        job.finish()
    job.end()


def test_a_trace_becomes_the_points_of_a_save_and_seeds_share_them_out() -> None:
    text = (
        'openat(AT_FDCWD</x>, "/run/a", O_WRONLY|O_CREAT) = 3\nmmap(NULL, 9) = 0x7f\nwrite(3</run/a>, "b", 1) = 1\n'
        'write(3</run/a>, "c", 1) = 1\nfsync(3</run/a>) = 0\n+++ exited with 0 +++\nopenat(AT_FDCWD, "/run/a", 0)\n'
    )
    points = faults_rehearsal.parse_trace(text, "writer")
    assert [(p.call, p.n) for p in points] == [("openat", 1), ("write", 1), ("write", 2), ("fsync", 1), ("openat", 2)]
    refused = [(point.call, point.n, error) for point, error in faults_disk.refusals(points)]
    assert refused == [("openat", 1, "ENOSPC"), ("write", 1, "ENOSPC"), ("write", 2, "ENOSPC"), ("fsync", 1, "EIO")]
    many = points * 40
    shares = [faults_save.share(many, seed) for seed in range(7, 7 + faults_save.STRIDE)]
    assert sum(len(part) for part in shares) == len(many)


def test_every_kind_of_damage_changes_the_checkpoint_and_is_found(tmp_path: Path) -> None:
    case = Case(3)
    faults_corrupt.corrupt(Bench(tmp_path, 2), case)
    assert case.broken == {}
    assert case.struck >= faults_corrupt.DAMAGES_PER_CASE


def test_a_checkpoint_that_is_trusted_blindly_breaks_the_promises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.checkpoint.verify", lambda folder: [])
    case = run_case(Fault((), faults_corrupt.corrupt), Bench(tmp_path, 2), 3)
    assert faults_corrupt.DETECTED in case.broken


@pytest.mark.skipif(bool(faults_disk.no_mount()), reason="mounting needs root")
def test_a_small_disk_is_filled_but_for_the_room_that_was_asked_for(tmp_path: Path) -> None:
    try:
        with faults_disk.small_disk(tmp_path / "disk") as folder:
            faults_disk.fill(folder / "filler", 1_000_000)
            assert abs(shutil.disk_usage(folder).free - 1_000_000) <= 8192  # two pages
    except subprocess.CalledProcessError:
        pytest.skip("this container may not mount")
    assert not (tmp_path / "disk").exists()


def test_case_i_of_a_seed_is_the_first_case_of_seed_plus_i(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def draw(bench: Bench, case: Case) -> None:
        case.strike("it")
        case.expect(KEPT, case.seed != 7, "seven")

    monkeypatch.setattr(drill, "FAULTS", {"draw": Fault((KEPT,), draw), "rain": Fault((KEPT,), draw, lambda: "no sky")})
    monkeypatch.setitem(drill.FAULTS, "few", Fault((), draw, enough=2))
    lines = drill.drill(["draw", "rain", "few"], Bench(tmp_path, 2), n=3, seed=5)
    assert verdicts(lines) == ["FAIL", "PASS", "SKIP", "PASS"]
    assert lines[-1].cases == 2
    record = json.loads((tmp_path / "drill.json").read_text())
    assert [case["seed"] for case in record["draw"]["cases"]] == [5, 6, 7]
    printed = capsys.readouterr().out
    assert "python -m scripts.drill --faults draw --n 1 --seed 7: seven" in printed
    assert "SKIP rain: no sky" in printed


@pytest.mark.integration
def test_a_slice_of_all_that_a_small_machine_can_drill(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.drill", "--faults", "kill,save,corrupt,disk,sigterm,owner,nan"]
    done = subprocess.run(
        [*command, "--n", "1", "--seed", "1", "--work_dir", str(tmp_path / "drill")],
        cwd=ROOT, capture_output=True, text=True, timeout=1500,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "drill" / "drill.json").read_text())
    assert {line["verdict"] for line in record["lines"]} <= {"PASS", "SKIP"}
    assert sum(case["struck"] for case in record["kill"]["cases"]) >= 3
    assert "| corrupt |" in (tmp_path / "drill" / "drill.md").read_text()
