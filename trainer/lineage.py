"""What a checkpoint remembers of the run that wrote it, and how a resumed run compares itself with that."""

import dataclasses
import platform
from pathlib import Path

import torch

from trainer.checkpoint import read_json, write_json
from trainer.ddp import Ranks
from trainer.guard import Watch

# Options that may change over the life of a run and change its result: said aloud. Those of the fingerprint are
# refused, and all others (logging, saving, workers, ...) are nobody's business.
CHANGED_ALOUD = (
    "learning_rate", "base_batch_size", "lr_scaling", "lr_schedule", "warmup_steps", "weight_decay", "grad_clip",
    "epochs", "max_steps", "val_path", "spike_threshold",
)  # fmt: skip

BIT_CHANGING_OPTIONS = (
    "batch_size",
    "gradient_accumulation_steps",
    "dtype",
    "compile",
    "activation_checkpointing",
    "deterministic",
    "find_unused_parameters",
    "ddp_bucket_cap_mb",
)


@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that resume needs beside weights and optimizer."""

    step: int = 0  # optimizer steps done, so also the number of the next one
    tokens: int = 0  # target tokens trained on
    skipped_updates: int = 0  # steps whose update was not finite
    skipped: tuple[int, ...] = ()  # data steps that are left out, ascending
    rollbacks: int = 0  # by the loss guard
    watch: Watch = dataclasses.field(default_factory=Watch)  # the loss guard's memory
    validated_step: int = -1  # the last step that was validated; 0: the weights it was given
    best_step: int | None = None  # committed checkpoint of the lowest validation loss
    best_val_loss: float | None = None
    best_val_set: str | None = None  # fingerprint of the samples that it was measured on
    general_val_loss: float | None = None  # the first validation's on the first of several sources
    general_val_set: str | None = None


@dataclasses.dataclass(frozen=True)
class Saved:
    """Contents of state.json, with the fingerprint of manifest.json."""

    state: TrainState
    fingerprint: dict[str, object]
    options: dict[str, object]
    environment: dict[str, object]
    step_seconds: float
    save_seconds: float


def environment(ranks: Ranks, options: dict[str, object]) -> dict[str, object]:
    """Everything that can change the bits of a result though data, model and seed are the same."""
    on_gpu = ranks.device.type == "cuda"
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(ranks.device) if on_gpu else ranks.device.type,
        "kernels": f"CUDA {torch.version.cuda}" if on_gpu else torch.backends.cpu.get_cpu_capability(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "world_size": ranks.world_size,
        **{name: options[name] for name in BIT_CHANGING_OPTIONS},
    }


def _processor() -> str:
    """Model of the CPU: the same instruction set on two models need not mean the same kernels."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def write_saved(folder: Path, saved: Saved) -> None:
    """Write state.json into a checkpoint being built; the fingerprint goes into the manifest."""
    record = dataclasses.asdict(saved)
    del record["fingerprint"]
    write_json(folder / "state.json", record)


def read_saved(folder: Path) -> Saved:
    """Read a checkpoint's record. Raises ValueError where a field is missing or unknown."""
    record = read_json(folder / "state.json")
    try:
        state = record.pop("state")
        watch = state.pop("watch", {"recent": (), "suspects": ()})
        watch |= {name: tuple(watch[name]) for name in ("recent", "suspects")}
        state = TrainState(**state | {"skipped": tuple(state.get("skipped", ())), "watch": Watch(**watch)})
        return Saved(state, read_json(folder / "manifest.json")["fingerprint"], **record)
    except (TypeError, KeyError) as problem:
        raise ValueError(f"{folder}/state.json was written by another version of this project: {problem}") from problem


def refuse_changes(saved: Saved, given: dict[str, object], options: dict[str, object], folder: Path) -> None:
    """Raise one ValueError naming every part of the fingerprint that differs, with saved and given value."""
    different = _differences(saved.fingerprint, given)
    differences = [f"{name}: {_short(was)} there, {_short(now)} here" for name, was, now in different]
    if any(name.split(".")[0] == "data" for name, _, _ in different):
        was, now = saved.options.get("data_path"), options.get("data_path")
        same = "the content of the files, or how they are read, has changed"
        differences.append(same if was == now else f"--data_path: {was} there, {now} here")
    if differences:
        raise ValueError(
            f"{folder} belongs to another run than this command asks for: {'; '.join(differences)}. Give the saved "
            "values (the global batch is batch_size x ranks x accumulation; with those two as they were, any number of "
            "ranks shares the saved one), another --out_dir, or "
            "--resume_from_checkpoint false to set the folder aside and start anew"
        )


def global_batch(saved: Saved, options: dict[str, object], given: int) -> int:
    """The global batch to go on with: the saved one, where nothing but the number of ranks makes the difference."""
    same = all(saved.options.get(name) == options[name] for name in ("batch_size", "gradient_accumulation_steps"))
    return int(saved.fingerprint["global_batch"]) if same else given


def _short(value: object) -> str:
    """A value for a message; of a SHA-256 the first digits are enough to tell two apart."""
    return f"{value[:10]}..." if isinstance(value, str) and len(value) == 64 else repr(value)


def _differences(
    saved: dict[str, object], given: dict[str, object], prefix: str = ""
) -> list[tuple[str, object, object]]:
    found = []
    for name in sorted(saved.keys() | given.keys()):
        was, now = saved.get(name), given.get(name)
        if isinstance(was, dict) and isinstance(now, dict):
            found += _differences(was, now, f"{prefix}{name}.")
        elif was != now:
            found.append((prefix + name, was, now))
    return found


def changes_to_mention(saved: Saved, options: dict[str, object], now: dict[str, object]) -> list[str]:
    """Lines for what changed since the checkpoint: options with an effect, and whatever ends bit-exactness."""
    lines = [
        f"--{name} changed from {saved.options.get(name)} to {options.get(name)} at step {saved.state.step}"
        for name in CHANGED_ALOUD
        if saved.options.get(name) != options.get(name)
    ]
    if saved.options.get("from_weight") != options.get("from_weight"):
        lines.append(
            f"--from_weight {options.get('from_weight')} has no effect: the run goes on from its own checkpoint"
        )
    changed = [f"{name} {was} -> {is_now}" for name, was, is_now in _differences(saved.environment, now)]
    if changed:
        lines.append(f"not bit-exact with the run so far: {', '.join(changed)}")
    return lines
