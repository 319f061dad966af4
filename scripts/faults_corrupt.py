"""Checkpoints that rot on the disk: truncated, flipped, deleted, swapped. In this process, thousands a minute."""

import logging
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from scripts.faults import Bench, Case, Fault
from trainer.checkpoint import (
    MANIFEST,
    checkpoint_step,
    load_tensors,
    newest_valid,
    save_tensors,
    step_folder,
    write_checkpoint,
    write_json,
)

DAMAGES_PER_CASE = 200
STEPS = (100, 200, 300)
DETECTED = "every damage is detected"
FALLS_BACK = "the newest whole checkpoint is used, the damaged one set aside"
RIGHT_TENSORS = "no wrong tensor is loaded"


def tensors_of(step: int) -> dict[str, Tensor]:
    """What the checkpoint of a step holds: small, and different at every step."""
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(8, 16, generator=generator) for name in ("weight", "exp_avg")}


def commit(run_dir: Path, step: int) -> None:
    """Write the checkpoint of a step, as a run does."""

    def write_files(folder: Path) -> None:
        for name, tensor in tensors_of(step).items():
            save_tensors(folder / f"{name}.safetensors", {name: tensor})
        write_json(folder / "state.json", {"step": step, "text": "x" * 300})
        (folder / "empty.txt").touch()

    write_checkpoint(run_dir, step, write_files, {"seed": 1}, lambda: None)


def truncate(draw: random.Random, folder: Path, file: Path) -> None:
    """Cut the end off."""
    os.truncate(file, draw.randrange(file.stat().st_size) if file.stat().st_size else 0)


def append(draw: random.Random, folder: Path, file: Path) -> None:
    """Add bytes to the end."""
    with open(file, "ab") as end:
        end.write(draw.randbytes(draw.randint(1, 600)))


def flip(draw: random.Random, folder: Path, file: Path) -> None:
    """Change one bit."""
    content = bytearray(file.read_bytes())
    if content:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)


def blank(draw: random.Random, folder: Path, file: Path) -> None:
    """Zero a block, as a file system does with what it had not written before a power cut."""
    content = bytearray(file.read_bytes())
    first = draw.randrange(len(content) + 1)
    length = min(draw.randint(1, 512), len(content) - first)
    content[first : first + length] = bytes(length)
    file.write_bytes(content)


def delete(draw: random.Random, folder: Path, file: Path) -> None:
    """Lose a file."""
    file.unlink()


def swap(draw: random.Random, folder: Path, file: Path) -> None:
    """Exchange two files of one checkpoint."""
    other = draw.choice(sorted(folder.iterdir()))
    content = file.read_bytes()
    file.write_bytes(other.read_bytes())
    other.write_bytes(content)


def take_from_another(draw: random.Random, folder: Path, file: Path) -> None:
    """Put in the file of the same name of another step."""
    other = step_folder(folder.parent, draw.choice(STEPS))
    if (other / file.name).exists():
        file.write_bytes((other / file.name).read_bytes())


def pass_off(draw: random.Random, folder: Path, file: Path) -> None:
    """Put another step's whole folder under this one's name."""
    other = step_folder(folder.parent, draw.choice(STEPS))
    if other != folder and other.exists():
        shutil.rmtree(folder)
        shutil.copytree(other, folder)


def link_away(draw: random.Random, folder: Path, file: Path) -> None:
    """Replace a file by a link to a copy outside."""
    outside = folder.parent / "outside"
    shutil.copy(file, outside)
    file.unlink()
    file.symlink_to(outside)


DAMAGES: list[Callable[[random.Random, Path, Path], None]] = [
    truncate, append, flip, flip, blank, delete, swap, take_from_another, pass_off, link_away,
]  # fmt: skip


def content_of(folder: Path) -> dict[str, tuple[bool, bytes]]:
    """Name -> whether it is a link, and its bytes."""
    return {path.name: (path.is_symlink(), path.read_bytes()) for path in folder.iterdir()}


def corrupt(bench: Bench, case: Case) -> None:
    """Damage one or two of three checkpoints, look for the newest, and load it; many times over."""
    draw, run_dir = random.Random(case.seed), bench.path(f"corrupt-{case.seed}")
    run_dir.mkdir()
    for step in STEPS:
        commit(run_dir, step)
    whole = bench.path(f"corrupt-{case.seed}-whole")
    shutil.copytree(run_dir, whole)
    level = logging.getLogger("trainer.checkpoint").level
    logging.getLogger("trainer.checkpoint").setLevel(logging.ERROR)  # it warns of each, rightly
    try:
        while case.struck < DAMAGES_PER_CASE:
            _damage_and_recover(draw, case, run_dir, whole)
    finally:
        logging.getLogger("trainer.checkpoint").setLevel(level)
    if not case.broken:
        shutil.rmtree(run_dir)
    shutil.rmtree(whole)
    case.note = f"{case.struck} damages"


def _damage_and_recover(draw: random.Random, case: Case, run_dir: Path, whole: Path) -> None:
    damaged, done = [], []
    for step in draw.choice([STEPS[-1:], STEPS[-1:], STEPS[-2:]]):
        folder = step_folder(run_dir, step)
        file, damage = draw.choice(sorted(folder.iterdir())), draw.choice(DAMAGES)
        before = content_of(folder)
        damage(draw, folder, file)
        if content_of(folder) != before:  # a flip in an empty file changes nothing
            case.struck += 1
            damaged.append(step)
            done.append(f"{damage.__name__} {folder.name}/{'' if damage is pass_off else file.name}")
    expected = max(step for step in STEPS if step not in damaged)
    what = f"damage {case.struck} ({', '.join(done)})"
    try:
        found = newest_valid(run_dir, owner=True)
    except Exception as problem:
        case.expect(FALLS_BACK, False, f"{what}: {type(problem).__name__}: {problem}")
        found = None
    step = checkpoint_step(found) if found else 0
    case.expect(DETECTED, step not in damaged, f"{what}: step {step} was taken as whole")
    aside = {int(path.name[5:13]) for path in run_dir.glob("step_*.damaged*")}
    newer = {step for step in damaged if step > expected}
    case.expect(FALLS_BACK, step == expected and aside == newer, f"{what}: got step {step}, set aside {aside}")
    if found:
        for name, tensor in tensors_of(step).items():
            right = torch.equal(load_tensors(found / f"{name}.safetensors")[name], tensor)
            case.expect(RIGHT_TENSORS, right, f"{what}: {name} of step {step} has other values")
    for path in [*run_dir.glob("step_*.damaged*"), *(step_folder(run_dir, step) for step in damaged)]:
        shutil.rmtree(path, ignore_errors=True)
    for step in damaged:
        shutil.copytree(step_folder(whole, step), step_folder(run_dir, step))
    assert MANIFEST in {path.name for path in step_folder(run_dir, STEPS[-1]).iterdir()}


FAULTS = {"corrupt": Fault((DETECTED, FALLS_BACK, RIGHT_TENSORS), corrupt)}
