"""What all failure drills share: a small run under the launcher, its processes, and the comparison of two runs.

A drill is a function of a bench and a seed: it starts a run, injures it, and says in a Case which faults really struck
and which promises held.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.faults_processes import Broken, alive, descendants, wait_for
from trainer.checkpoint import step_folders

ROOT = Path(__file__).resolve().parent.parent
STEPS, INTERVAL, EVALUATION = 60, 5, 10
SIZES = [
    "--hidden_size", 64, "--num_hidden_layers", 2, "--num_attention_heads", 4, "--num_key_value_heads", 2,
    "--max_seq_len", 32, "--device", "cpu", "--log_interval", 1, "--learning_rate", 1e-3, "--lr_scaling", "none",
]  # fmt: skip
# Dropout, accumulation, a loader worker and validations are on, because each of them can break an exact resume.
OPTIONS = [
    *SIZES, "--batch_size", 2, "--gradient_accumulation_steps", 2, "--num_workers", 1, "--dropout", 0.1,
    "--val_fraction", 0.1, "--eval_interval", EVALUATION, "--checkpoint_interval", INTERVAL,
]  # fmt: skip
CURVE = ("step", "loss", "grad_norm", "learning_rate")
EQUAL = "curve and final weights byte-equal to the undisturbed run"


@dataclass
class Case:
    """What one seed did and showed."""

    seed: int
    struck: int = 0  # faults that were really injected
    note: str = ""  # which they were
    broken: dict[str, str] = field(default_factory=dict)  # promise -> how it was broken
    figures: dict[str, list[float]] = field(default_factory=dict)  # name with unit -> measured values

    def expect(self, promise: str, holds: bool, otherwise: str) -> None:
        """Hold a promise against what was seen; the first breach is kept."""
        if not holds:
            self.broken.setdefault(promise, otherwise)

    def strike(self, what: str, count: int = 1) -> None:
        """Count faults that have struck."""
        self.struck += count
        self.note += f"{'; ' if self.note else ''}{what}"

    def measure(self, name: str, value: float) -> None:
        """Add one value to a figure."""
        self.figures.setdefault(name, []).append(value)


@dataclass(frozen=True)
class Fault:
    """A kind of fault: what it promises, what is done for a case, and what this machine lacks for it ("")."""

    promises: tuple[str, ...]
    run: Callable[["Bench", Case], None]
    lacks: Callable[[], str] = lambda: ""
    enough: int | None = None  # cases, where more would repeat them


def write_texts(path: Path, count: int) -> Path:
    """A JSONL file of `count` texts of 3 to 60 words."""
    draw = random.Random(0)
    words = ["river", "stone", "green", "seven", "under", "山", "水", "the", "of", "bread", "人民", "window", "quick"]
    texts = [f"line{number} " + " ".join(draw.choices(words, k=draw.randint(3, 60))) for number in range(count)]
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts), encoding="utf-8")
    return path


class Job:
    """One command line that trains into a run folder, started as often as needed."""

    def __init__(self, run_dir: Path, command: Sequence[object], environment: Mapping[str, str]) -> None:
        self.run_dir, self.command = run_dir, [str(part) for part in command]
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
        self.log = run_dir.with_name(f"{run_dir.name}.log")
        self.process: subprocess.Popen | None = None

    def start(self) -> "Job":
        """Start the command, its output appended to the log."""
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(self.command, cwd=ROOT, env=self.environment, stdout=log, stderr=log)
        return self

    def wait(self, seconds: float = 120) -> int:
        """Its exit code; Broken where it does not end in time."""
        try:
            return self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise Broken(f"the run did not end within {seconds:g} s; its last words: {self.last_words()}") from None

    def reaches(self, condition: Callable[[], object], seconds: float, what: str) -> bool:
        """Wait for a condition; False where the run ends before it holds."""
        wait_for(lambda: condition() or self.process.poll() is not None, seconds, what)
        return bool(condition()) and self.process.poll() is None

    def finish(self) -> None:
        """Wait for the end of a run that nothing disturbs any more; Broken unless all is well."""
        code = self.wait()
        if code != 0:
            raise Broken(f"ended with code {code}: {self.last_words()}")

    def step(self) -> int:
        """Last step in metrics.jsonl; 0 where there is none."""
        records = self.records("metrics.jsonl")
        return records[-1]["step"] if records else 0

    def records(self, name: str) -> list[dict]:
        """The complete lines of a JSONL file of the run folder."""
        try:
            lines = (self.run_dir / name).read_bytes().split(b"\n")[:-1]
        except OSError:
            return []
        return [json.loads(line) for line in lines if line]

    def events(self, kind: str) -> list[dict]:
        """The run's events of one kind."""
        return [event for event in self.records("events.jsonl") if event["event"] == kind]

    def saving(self) -> list[Path]:
        """Temporary folders of a save that is under way, or was cut off."""
        return [path for path in self.run_dir.glob("step_*") if ".tmp-" in path.name]

    def below(self) -> list[int]:
        """Every running process below the launcher."""
        return [pid for level in descendants(self.process.pid) for pid in level]

    def ranks(self) -> list[int]:
        """The launcher's children, rank 0 first."""
        return descendants(self.process.pid)[0]

    def workers(self) -> list[int]:
        """The ranks' children."""
        levels = descendants(self.process.pid)
        return levels[1] if len(levels) > 1 else []

    def last_words(self) -> str:
        """The end of the log, for a message."""
        lines = [line for line in self.text().splitlines() if line.strip() and "Epoch:[" not in line]
        return " | ".join(lines[-4:])[-600:]

    def text(self) -> str:
        """The whole log."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def end(self) -> None:
        """Kill whatever of it still runs."""
        if self.process is not None:
            for pid in [self.process.pid, *self.below()]:
                if alive([pid]):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()

    def hashes(self) -> dict[str, str]:
        """SHA-256 of the last checkpoint's weights and optimizer state."""
        folders = step_folders(self.run_dir)
        if not folders:
            raise Broken(f"no checkpoint in {self.run_dir}")
        names = ("model.safetensors", "optimizer.safetensors")
        return {name: hashlib.sha256((folders[-1] / name).read_bytes()).hexdigest() for name in names}

    def curve(self) -> list[tuple]:
        """(step, loss, grad norm, rate) of every step, at full precision."""
        return [tuple(line[name] for name in CURVE) for line in self.records("metrics.jsonl") if "loss" in line]

    def difference(self, other: "Job") -> str:
        """How the run differs from another; empty where curve and final files are the same, byte for byte."""
        mine, theirs = self.curve(), other.curve()
        if len(mine) != len(theirs):
            return f"{len(mine)} steps in metrics.jsonl, {len(theirs)} in that of the undisturbed run"
        for one, two in zip(mine, theirs, strict=True):
            if one != two:
                return f"metrics.jsonl has {one}, that of the undisturbed run {two}"
        wrong = [name for name, value in self.hashes().items() if other.hashes()[name] != value]
        return f"{', '.join(wrong)} differ from the undisturbed run's" if wrong else ""


class Bench:
    """The work folder: texts, their cache, undisturbed runs to compare with, and the runs of the cases."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder, self.ranks = folder.resolve(), ranks
        self.folder.mkdir(parents=True, exist_ok=True)
        self.texts = write_texts(self.folder / "texts.jsonl", 600)
        self.cache = self.folder / "cache"
        self.references: dict[str, Job] = {}  # undisturbed runs, by what they run
        self.made_once: dict[str, Any] = {}  # what else the cases share
        self._jobs: list[Job] = []

    def path(self, name: str) -> Path:
        """A path of the work folder that nothing of an earlier drill is left at."""
        path = self.folder / name
        shutil.rmtree(path, ignore_errors=True)
        path.with_name(f"{path.name}.log").unlink(missing_ok=True)
        return path

    def job(
        self,
        name: str,
        options: Sequence[object] = (),
        *,
        launcher: Sequence[object] = (),
        script: Path = ROOT / "train_pretrain.py",
        environment: Mapping[str, str] | None = None,
    ) -> Job:
        """A run in a fresh folder, not started. `options` win over the bench's own."""
        run_dir = self.path(name)
        command = [sys.executable, "-m", "scripts.launch", "--nproc_per_node", self.ranks, *launcher, script]
        command += [*OPTIONS, "--max_steps", STEPS, "--data_path", self.texts, "--cache_dir", self.cache]
        self._jobs.append(Job(run_dir, [*command, "--out_dir", run_dir, *options], environment or {}))
        return self._jobs[-1]

    def straight(self, options: Sequence[object] = (), script: Path = ROOT / "train_pretrain.py") -> Job:
        """The undisturbed run with these options, made once."""
        key = repr([self.ranks, *map(str, options)])
        if key not in self.references:
            name = f"straight-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
            job = self.job(name, options, script=script).start()
            job.finish()
            self.references[key] = job
        return self.references[key]

    def clean_up(self, keep: bool) -> None:
        """End the runs of a case, and delete their folders unless someone wants to look into them."""
        for job in self._jobs:
            if job not in self.references.values():
                job.end()
                if not keep:
                    shutil.rmtree(job.run_dir, ignore_errors=True)
                    job.log.unlink(missing_ok=True)
        self._jobs = []
