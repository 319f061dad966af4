"""One fan-out for numbers over time: the console, metrics.jsonl, and whatever sink joins them.

A sink has `write(step, values)` and `close()`. One that fails is warned about once, closed and dropped: a dead
dashboard never kills a run.
"""

import contextlib
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

log = logging.getLogger(__name__)


NOTABLE_LAG = 0.2  # from here on the slowest rank holds the others up by what is worth a look


class Metric(NamedTuple):
    """What a number is. `reduction` says how the ranks' values became one."""

    unit: str
    reduction: str
    help: str


METRICS = {
    "loss": Metric("nats per target token", "sum over ranks", "training loss of this step"),
    "grad_norm": Metric("", "same on all ranks", "gradient norm before clipping"),
    "learning_rate": Metric("", "same on all ranks", "rate of this step"),
    "tokens": Metric("tokens", "sum over ranks", "target tokens trained on since the run began"),
    "tokens_per_second": Metric("tokens/s", "sum over ranks", "target tokens per second since the last log line"),
    "step_seconds": Metric("s", "rank 0", "mean duration of a step since the last log line"),
    "epoch_time": Metric("min", "rank 0", "time left to the end of the run; MiniMind's name, on wandb alone"),
    "skipped_updates": Metric("updates", "same on all ranks", "updates skipped for a non-finite loss or gradient"),
    "rollbacks": Metric("rollbacks", "same on all ranks", "returns of the loss guard to a stable checkpoint"),
    "failed_saves": Metric("saves", "rank 0", "checkpoints that could not be written since this start"),
    "data_wait_share": Metric("share", "largest over ranks", "of a step's time: waiting for the data loader"),
    "gpu_memory_share": Metric("share", "largest over ranks", "of the GPU: peak since the last log line"),
    "gpu_memory_now_share": Metric("share", "largest over ranks", "of the GPU: in use at this log line"),
    "resident_memory_gb": Metric("GiB", "largest over ranks", "of a rank's process, in RAM at this log line"),
    "resident_memory_peak_gb": Metric("GiB", "largest over ranks", "the same, its peak since the process began"),
    "host_memory_share": Metric("share", "largest over ranks", "of a machine's or container's memory: in use by all"),
    "slowest_rank": Metric("rank", "largest over ranks", "whose own work took longest since the last log line"),
    "slowest_rank_lag": Metric("share", "largest over ranks", "how much longer that took than the median rank's"),
    "epochs": Metric("epochs", "same on all ranks", "passes over a source of a mixture, as epochs/<source>"),
    "val_loss": Metric("nats per target token", "sum over ranks", "loss on the validation texts"),
    "val_bits_per_byte": Metric("bits per byte", "sum over ranks", "validation loss over the texts' UTF-8 bytes"),
}


class Sink(Protocol):
    """Where numbers go."""

    def write(self, step: int, values: dict[str, float]) -> None:
        """Take the metrics of one step; names as in METRICS."""
        ...

    def close(self) -> None:
        """Flush and let go."""
        ...


class Display(Sink, Protocol):
    """The sink on the console, which hears of the steps between the log lines too."""

    def tick(self, step: int) -> None:
        """A step is done; nothing of it is known yet."""
        ...


class Jsonl:
    """One JSON object a line, full precision, written at once: {"step": 10, "loss": ...}; null where not finite.

    This is the run's curve, so a full disk does not end it: lines that cannot be written wait for the next one.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._waiting, self._warned = path, b"", False
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Append one line, and those that are still waiting."""
        numbers = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._waiting += json.dumps({"step": step, **numbers}).encode() + b"\n"
        try:
            written = os.write(self._file, self._waiting)
        except OSError as problem:
            if not self._warned:
                log.warning("%s cannot be written now, its lines are kept for later: %s", self._path, problem)
            self._warned = True
        else:
            self._waiting, self._warned = self._waiting[written:], False

    def rewind(self, last_step: int, validated_step: int) -> None:
        """Take back what comes after a step that the run returns to."""
        cut_metrics(self._path, last_step, validated_step)
        os.close(self._file)
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        if self._waiting:
            log.error("%s: lines that waited for room on the disk were lost with the steps taken back", self._path)
        self._waiting = b""

    def close(self) -> None:
        """Close the file; say so if lines were lost."""
        os.close(self._file)
        if self._waiting:
            log.error("%s: the last %d lines could not be written", self._path, self._waiting.count(b"\n"))


class Console:
    """MiniMind's log line with fields appended; users paste it into issues, so its shape stays."""

    def __init__(self, total_steps: int, epoch_of: Callable[[int], tuple[int, int]]) -> None:
        self.total_steps, self.epoch_of = total_steps, epoch_of

    def write(self, step: int, values: dict[str, float]) -> None:
        """Log one line for a step, or one for a validation."""
        if "val_loss" in values:
            log_validation(step, values)
            return
        epoch, epochs = self.epoch_of(step)
        minutes = (self.total_steps - step) * values.get("step_seconds", 0.0) / 60
        lag = values.get("slowest_rank_lag", 0.0)
        slowest = f" slowest rank:{values['slowest_rank']:.0f} (+{lag:.0%})" if lag >= NOTABLE_LAG else ""
        log.info(
            "Epoch:[%d/%d](%d/%d) loss:%.3f lr:%.12f epoch_Time:%.1fmin: grad_norm:%.3f tokens/s:%.0f%s",
            epoch, epochs, step, self.total_steps, values["loss"], values["learning_rate"], minutes,
            values["grad_norm"], values.get("tokens_per_second", 0.0), slowest,
        )  # fmt: skip

    def tick(self, step: int) -> None:
        """A line per log step is enough."""

    def close(self) -> None:
        """Nothing to let go of."""


class Bar:
    """A progress bar on a terminal, in the place of the log lines; lines that others log appear above it.

    It moves at every `tick`; the numbers beside it are those of the last log step, so that none waits for the device.
    The rate is a running mean of the steps of this process, so a resumed run shows an honest time left at once.
    """

    def __init__(self, total_steps: int, first_step: int, epoch_of: Callable[[int], tuple[int, int]]) -> None:
        """first_step: steps done already. Log lines go through the bar from here to `close`."""
        self.epoch_of = epoch_of
        self._undo = contextlib.ExitStack()
        self._undo.enter_context(logging_redirect_tqdm())
        shape = {"unit": "step", "dynamic_ncols": True, "miniters": 1}
        self._bar = tqdm(total=total_steps, initial=first_step, file=sys.stderr, **shape)

    def tick(self, step: int) -> None:
        """Move to `step`; redrawn ten times a second at the most."""
        self._bar.update(step - self._bar.n)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Show a step's loss, rate of tokens and epoch; a validation becomes a line above the bar."""
        if "val_loss" in values:
            log_validation(step, values)
            return
        epoch, epochs = self.epoch_of(step)
        self._bar.set_description_str(f"Epoch [{epoch}/{epochs}]", refresh=False)
        speed = f"tokens/s {values['tokens_per_second']:,.0f}" if "tokens_per_second" in values else ""
        self._bar.set_postfix_str(f"loss {values['loss']:.3f}, {speed}")

    def close(self) -> None:
        """Leave the bar where it is, and give the log lines back."""
        self._bar.close()
        self._undo.close()


def log_validation(step: int, values: dict[str, float]) -> None:
    """The console's line for a validation."""
    extra = f" bits per byte:{values['val_bits_per_byte']:.4f}" if "val_bits_per_byte" in values else ""
    extra += "".join(f" {name}:{value:.4f}" for name, value in values.items() if name.startswith("val_loss/"))
    log.info("validation after step %d: loss:%.4f%s", step, values["val_loss"], extra)


def open_console(total_steps: int, first_step: int, epoch_of: Callable[[int], tuple[int, int]]) -> Display:
    """A bar on a terminal (that knows its size, which not every container's does), else a line per log step."""
    if sys.stderr.isatty() and all(os.get_terminal_size(sys.stderr.fileno())):
        return Bar(total_steps, first_step, epoch_of)
    return Console(total_steps, epoch_of)


class Monitor:
    """Hands values to every sink, and keeps events.jsonl, the history of what happened to the run."""

    def __init__(self, run_dir: Path | None) -> None:
        """run_dir: None on every rank but the first, which then keeps silent."""
        self.run_dir = run_dir
        self.sinks: list[Sink] = []
        self._display: Display | None = None

    def write(self, step: int, values: dict[str, float]) -> None:
        """Give one step's metrics to the sinks. Raises KeyError for a name that METRICS does not declare."""
        for name in values:
            METRICS[name.split("/")[0]]
        for sink in list(self.sinks):
            self._guarded(sink, lambda sink=sink: sink.write(step, values))

    def join(self, name: str, open_sink: Callable[[], Sink]) -> None:
        """Add a dashboard, and give it what metrics.jsonl holds already; one that cannot be opened is left out."""
        sink = None
        try:
            sink = open_sink()
            for step, values in read_metrics(self.run_dir / "metrics.jsonl"):
                sink.write(step, values)
        except Exception as problem:
            log.warning("%s cannot be used, training goes on without: %s", name, one_line(problem))
            if sink is not None:
                close_failed(sink)
        else:
            self.sinks.append(sink)

    def show(self, display: Display) -> None:
        """Add the console's sink."""
        self._display = display
        self.sinks.append(display)

    def tick(self, step: int) -> None:
        """Tell the console that a step is done: a progress bar moves."""
        if self._display in self.sinks:
            self._guarded(self._display, lambda: self._display.tick(step))

    def rewind(self, last_step: int, validated_step: int) -> None:
        """Make the curve in metrics.jsonl end at a step that the run returns to. Dashboards keep what they have."""
        for sink in list(self.sinks):
            if isinstance(sink, Jsonl):
                self._guarded(sink, lambda sink=sink: sink.rewind(last_step, validated_step))

    def event(self, kind: str, **details: object) -> None:
        """Append one line to events.jsonl: what happened, when (Unix seconds), and its details."""
        if self.run_dir is None:
            return
        try:
            # What is not UTF-8, as a file name may be, becomes JSON's own escape for it.
            with open(self.run_dir / "events.jsonl", "a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(json.dumps({"time": time.time(), "event": kind, **details}, ensure_ascii=False) + "\n")
        except OSError as problem:
            log.warning("event %s %s could not be written: %s", kind, details, problem)

    def close(self) -> None:
        """Close every sink."""
        sinks, self.sinks = self.sinks, []
        for sink in sinks:
            try:
                sink.close()
            except Exception as problem:
                log.warning("%s could not be closed: %s", type(sink).__name__, one_line(problem))

    def _guarded(self, sink: Sink, action: Callable[[], None]) -> None:
        # A sink may fail in any way it likes: it is somebody's network, disk or library.
        try:
            action()
        except Exception as problem:
            log.warning("%s failed and is switched off, training goes on: %s", type(sink).__name__, one_line(problem))
            self.sinks.remove(sink)
            close_failed(sink)


def close_failed(sink: Sink) -> None:
    """Close a sink whose failure was told already: it must leave no process or file behind."""
    with contextlib.suppress(Exception):
        sink.close()


def one_line(problem: Exception) -> str:
    """An error of somebody's library as part of one log line."""
    return " ".join(str(problem).split()) or type(problem).__name__


def read_metrics(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield (step, values) of every line, after `cut_metrics`; what was not finite comes back as NaN."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            values = json.loads(line)
            yield values.pop("step"), {name: math.nan if value is None else value for name, value in values.items()}


def sync_metrics(path: Path) -> None:
    """Put metrics.jsonl on the disk: a checkpoint must not survive a power cut that the curve up to it does not."""
    if path.exists():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def cut_metrics(path: Path, last_step: int, validated_step: int) -> None:
    """Drop the lines of metrics.jsonl past `last_step`, and validations past `validated_step`: both come again.

    A last line that a crash cut short belongs to those. Atomic; the other lines keep their bytes.
    """
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            values = json.loads(line)
            if line.endswith(b"\n") and values["step"] <= (validated_step if "val_loss" in values else last_step):
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            log.warning("%s: dropping an unreadable line: %.80r", path, line)
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
