"""Numbers that go wrong inside a run: NaN in one gradient, weights off their way, a wall clock that jumps."""

import json
import math
import random
import re
from collections.abc import Sequence

from scripts.faults import EQUAL, OPTIONS, ROOT, STEPS, Bench, Case, Fault, Job
from trainer.checkpoint import load_tensors, step_folder

SCRIPT = ROOT / "scripts" / "faults_in_training.py"
SKIPPED = "the update is skipped on all ranks, told with its samples, and weights and moments stay as they were"
CAUGHT = "the spike is caught within 5 steps of the first bad one"
RECOVERED = "final validation loss within 1 % of the clean run's"
SAME_DECISIONS = "killed and started again, the run takes the same decisions, byte by byte"
EQUAL_BEFORE = "the curve before the fault is byte-equal to the undisturbed run's"
NAN_STEPS, SPIKE_STEPS = 20, 100
BATCH = 4  # sequences per rank and step, see faults.OPTIONS
DAY = 86_400.0


def faulty(bench: Bench, name: str, options: Sequence[object], kind: str, **fault: object) -> Job:
    """A run with a fault in it."""
    environment = {"DRILL_FAULT": json.dumps({"kind": kind, **fault})}
    return bench.job(name, options, script=SCRIPT, environment=environment)


def strikes(job: Job) -> list[str]:
    """What the fault has said of itself."""
    return re.findall(r"^drill: (.*)$", job.text(), re.MULTILINE)


def nan(bench: Bench, case: Case) -> None:
    """One rank, one step, one number that is none."""
    draw, seed = random.Random(case.seed), case.seed
    options = ["--checkpoint_interval", 1, "--keep_checkpoints", NAN_STEPS, "--max_steps", NAN_STEPS]
    straight = bench.straight(options)
    kind = draw.choice(["gradient_not_finite", "gradient_not_finite", "loss_not_finite"])
    step, rank, value = draw.randrange(1, NAN_STEPS), draw.randrange(bench.ranks), draw.choice([math.nan, math.inf])
    job = faulty(bench, f"nan-{seed}", options, kind, step=step, rank=rank, value=value).start()
    job.finish()
    said = strikes(job)
    if not said:
        return
    case.strike(f"{said[0]} in step {step + 1}")
    told = [(event["step"], bool(event["sample_ids"])) for event in job.events("skipped_update")]
    case.expect(SKIPPED, told == [(step + 1, True)], f"{case.note}: events of skipped updates {told}")
    for name in ("model.safetensors", "optimizer.safetensors"):
        before, after = ((step_folder(job.run_dir, s) / name).read_bytes() for s in (step, step + 1))
        case.expect(SKIPPED, before == after, f"{case.note}: {name} changed")
    weights = load_tensors(step_folder(job.run_dir, NAN_STEPS) / "model.safetensors")
    finite = all(tensor.isfinite().all() for tensor in weights.values())
    case.expect(SKIPPED, finite and job.step() == NAN_STEPS, f"{case.note}: the last weights are not finite")
    same = job.curve()[:step] == straight.curve()[:step]
    case.expect(EQUAL_BEFORE, same, f"{case.note}: the curve before it differs")


def spike(bench: Bench, case: Case) -> None:
    """Weights knocked off their way after one update of a run whose loss has come to rest."""
    draw, seed = random.Random(case.seed), case.seed
    options = _at_rest(bench)
    straight = bench.straight(options)
    data_step = draw.randrange(35, SPIKE_STEPS - 25)
    fault = {"data_step": data_step, "global_batch": BATCH * bench.ranks, "size": draw.uniform(0.5, 1.5), "seed": seed}
    job = faulty(bench, f"spike-{seed}", options, "weights_knocked", **fault).start()
    job.finish()
    said = strikes(job)
    if not said:
        return
    case.strike(said[0])
    events = job.events("spike")
    first_bad = data_step + 2  # steps count from 1, and a loss shows the update before it
    late = events[0]["step"] - first_bad if events else None
    case.expect(CAUGHT, late is not None and 0 <= late < 5, f"{case.note}: noticed {late} steps after the first bad")
    case.expect(CAUGHT, len(events) == 1, f"{case.note}: {len(events)} alarms")
    loss, clean = final_val_loss(job), final_val_loss(straight)
    case.expect(RECOVERED, abs(loss / clean - 1) <= 0.01, f"{case.note}: {loss:.4f} against {clean:.4f}")
    case.measure("percent between the validation losses", abs(loss / clean - 1) * 100)
    again = faulty(bench, f"spike-{seed}-killed", options, "weights_knocked", **fault).start()
    step = draw.randint(data_step - 5, SPIKE_STEPS - 5)
    if again.reaches(lambda: again.step() >= step, 120, f"step {step}"):
        again.end()
        case.strike(f"killed at step {step}")
        again.start().finish()
        difference = again.difference(job)
        case.expect(SAME_DECISIONS, not difference, f"{case.note}: {difference}")


def _at_rest(bench: Bench) -> list[object]:
    """Options of a run that begins with trained weights: only a loss at rest has a level that a spike leaves."""
    steady = ["--lr_schedule", "constant", "--eval_interval", 0, "--dropout", 0]
    trained = bench.straight([*steady, "--learning_rate", 3e-3, "--max_steps", 400, "--checkpoint_interval", 100])
    rest = ["--from_weight", trained.run_dir, "--learning_rate", 3e-4, "--warmup_steps", 5]
    return [*steady, *rest, "--max_steps", SPIKE_STEPS, "--checkpoint_interval", 10]


def final_val_loss(job: Job) -> float:
    """The last validation loss of a run."""
    return [line["val_loss"] for line in job.records("metrics.jsonl") if "val_loss" in line][-1]


def clock(bench: Bench, case: Case) -> None:
    """The wall clock of the ranks jumps by up to a year, back and forth, over a kill and a restart."""
    draw, seed = random.Random(case.seed), case.seed
    straight = bench.straight()

    def jump() -> float:
        return draw.choice([-1, 1]) * draw.choice([1.0, 3_600.0, DAY, 365 * DAY]) * draw.uniform(0.5, 1)

    jumps = {str(step): jump() for step in sorted(draw.sample(range(STEPS), 4))}
    job = faulty(bench, f"clock-{seed}", OPTIONS, "clock_jumps", start=jump(), jumps=jumps).start()
    step = draw.randint(5, STEPS - 12)
    if job.reaches(lambda: job.step() >= step, 120, f"step {step}"):
        job.end()
        job.environment["DRILL_FAULT"] = json.dumps({"kind": "clock_jumps", "start": jump(), "jumps": jumps})
        job.start()
    job.finish()
    said = strikes(job)
    if said:
        case.strike(f"{jumps}, killed at step {step}", len(said))
    difference = job.difference(straight)
    case.expect(EQUAL, not difference, f"{case.note}: {difference}")


FAULTS = {
    "nan": Fault((SKIPPED, EQUAL_BEFORE), nan),
    "spike": Fault((CAUGHT, RECOVERED, SAME_DECISIONS), spike),
    "clock": Fault((EQUAL,), clock),
}
