"""What a run says before its first step: what it will be, and warnings for what can be foreseen."""

import logging
import math
import os
import shutil
from pathlib import Path

import torch

from trainer.checkpoint import step_folders
from trainer.ddp import Ranks
from trainer.memory import WARN_SHARE
from trainer.plan import FEW_STEPS, Plan

log = logging.getLogger(__name__)

FORGETTING_SHARE = 0.05
BYTES_PER_PARAMETER = 12  # of a checkpoint: the weight and AdamW's two moments, 4 bytes each


def announce(
    run_dir: Path,
    ranks: Ranks,
    plan: Plan,
    environment: dict[str, object],
    *,
    step: int,
    parameters: int,
    trained: int,
    workers: int,
    checkpoint_interval: int,
    keep: int,
) -> None:
    """Log what the run will be and where it goes on, then what can be foreseen to go wrong.

    step: steps done already; trained: parameters that the optimizer sees; workers: loader processes per rank; keep:
    --keep_checkpoints.
    """
    group = "one process"
    if ranks.world_size > 1:
        group = f"DistributedDataParallel over {ranks.world_size} ranks ({ranks.collectives})"
    log.info("run %s: %s on %s, %s", run_dir.resolve(), group, environment["device"], environment["dtype"])
    for line in plan.lines():
        log.info("%s", line)
    size = trained * BYTES_PER_PARAMETER
    of_them = "" if trained == parameters else f", {trained:,} of them trained"
    log.info("%s parameters%s; a checkpoint takes about %.1f MB", f"{parameters:,}", of_them, size / 1e6)
    if step >= plan.total_steps:
        log.info("already finished at step %d; raise --epochs or --max_steps to go on", step)
    elif step:
        log.info("going on after step %d of %d", step, plan.total_steps)
    alone_on_gpu = ranks.device.type == "cuda" and "RANK" not in os.environ
    saves = math.ceil((plan.total_steps - step) / checkpoint_interval)
    foreseen = (
        crowded_cpus(cpus(), ranks.local_world_size, workers),
        idle_gpus(torch.cuda.device_count(), 1) if alone_on_gpu else None,
        slow_bfloat16(ranks.device.type, str(environment["dtype"]), cpu_has_bfloat16()),
        short_disk(free_disk(run_dir), size, keep, len(step_folders(run_dir)), saves),
        few_steps(plan.total_steps, plan.samples, plan.epochs, plan.global_batch) if plan.max_steps is None else None,
    )
    for line in filter(None, foreseen):
        log.warning("%s", line)


def forgetting(first: float, now: float, name: str) -> str | None:
    """A warning where the loss on the general data has risen by more than FORGETTING_SHARE since the run began."""
    if now <= first * (1 + FORGETTING_SHARE):
        return None
    return (
        f"forgetting: the validation loss on {name}, the general data, was {first:.4f} and is {now:.4f} "
        f"({now / first - 1:.1%} more); give it a larger share in --data_weights, or lower --learning_rate"
    )


def no_better_than_guessing(loss: float, vocab_size: int) -> str | None:
    """A warning where given weights predict as badly as none would."""
    if loss < math.log(vocab_size):
        return None
    return (
        f"the given weights have a loss of {loss:.3f}, no better than guessing among {vocab_size:,} tokens "
        f"({math.log(vocab_size):.3f}): does the tokenizer belong to them?"
    )


def cpus() -> int:
    """CPUs that this process may use: a scheduler or container often gives fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def crowded_cpus(cpus: int, ranks: int, workers: int) -> str | None:
    """Advice where ranks and their loader workers on this machine are more than its CPUs."""
    processes = ranks * (1 + workers)
    if processes <= cpus:
        return None
    who = f"{ranks} x (1 rank + {workers} loader workers) = {processes} processes" if workers else f"{ranks} ranks"
    if ranks <= cpus:
        return f"{who} share {cpus} CPUs; --num_workers {cpus // ranks - 1} would fit"
    fewer = f"--num_workers 0 and --nproc_per_node {cpus}" if workers else f"--nproc_per_node {cpus}"
    return f"{who} share {cpus} CPUs; {fewer} would fit; where every rank has its GPU, give them more CPUs"


def idle_gpus(gpus: int, processes: int) -> str | None:
    """Advice where a machine has more GPUs than training processes."""
    if gpus <= processes:
        return None
    return (
        f"{gpus - processes} of {gpus} GPUs are idle; to use all: python -m scripts.launch --nproc_per_node {gpus} "
        "train_...py, or hide them with CUDA_VISIBLE_DEVICES"
    )


def cpu_has_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 on this CPU (AVX512 or newer); torch has no public question for it."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def slow_bfloat16(device: str, dtype: str, has_bfloat16: bool) -> str | None:
    """Advice where the CPU has to imitate bfloat16: 400 tokens/s against 5,500 in float32, measured with AVX2 alone."""
    if device != "cpu" or dtype != "bfloat16" or has_bfloat16:
        return None
    return "this CPU has no bfloat16 and is about ten times slower in it; give --dtype float32"


def free_disk(folder: Path) -> int:
    """Bytes free where a folder lies, or will lie once it is made."""
    there = next(place for place in (folder.resolve(), *folder.resolve().parents) if place.exists())
    return shutil.disk_usage(there).free


def short_disk(free: int, size: int, keep: int, there: int, saves: int) -> str | None:
    """Advice where the checkpoints to come do not fit, in bytes.

    At the most there are `keep`, the best one besides, and the next one that is being written.
    """
    coming = max(0, min(keep + 2, there + saves) - there)
    if coming * size <= free:
        return None
    return (
        f"{free / 1e9:.1f} GB are free for the run folder, but {coming} more checkpoints of {size / 1e9:.2f} GB will "
        f"stand in it: make room, or lower --keep_checkpoints (now {keep})"
    )


def full_memory(
    share: float, what: str, batch_size: int, accumulation: int, activation_checkpointing: bool
) -> str | None:
    """Advice where more than WARN_SHARE of a memory is in use, that leaves the global batch as it is.

    share: in use, at its peak; what: whose. The proposal is the next smaller micro-batch with more accumulation, and
    from single sequences on to recompute activations.
    """
    if share <= WARN_SHARE:
        return None
    sequences = batch_size * accumulation
    smaller = max((size for size in range(1, batch_size) if sequences % size == 0), default=None)
    if smaller is not None:
        do = f"--batch_size {smaller} --gradient_accumulation_steps {sequences // smaller} keeps the global batch"
    elif not activation_checkpointing:
        do = "--activation_checkpointing keeps the batch and costs about 30 % more work"
    else:
        do = "the micro-batch is one sequence already: a smaller model or --max_seq_len is left, in a run of its own"
    return f"{share:.0%} of {what} is in use (above {WARN_SHARE:.0%} the next peak may end the run); {do}"


def few_steps(steps: int, samples: int, epochs: float, global_batch: int) -> str | None:
    """Advice where the data are too few to learn much from at this batch size."""
    if steps >= FEW_STEPS:
        return None
    return (
        f"only {steps} steps: {samples:,} sequences x {epochs:g} epochs at {global_batch} sequences a step; lower "
        "--batch_size or --gradient_accumulation_steps, or raise --epochs"
    )
