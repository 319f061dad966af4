"""What several test files need: a tiny model's options, texts of unequal length, runs on one and on N ranks."""

import json
import multiprocessing
import os
import random
import signal
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

import train_pretrain
from trainer.checkpoint import step_folders
from trainer.ddp import Ranks
from trainer.options import parse_options
from trainer.recovery import STOP_SIGNALS

ROOT = Path(__file__).parent.parent
SHARED_DATA = ROOT.parent / "shared" / "data"

TINY = [
    "--hidden_size", "64", "--num_hidden_layers", "2", "--num_attention_heads", "4", "--num_key_value_heads", "2",
    "--max_seq_len", "32", "--batch_size", "2", "--num_workers", "0", "--device", "cpu", "--log_interval", "1",
    "--learning_rate", "1e-3", "--lr_scaling", "none",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores and several ranks: more threads only make the tests slower, and sums depend on their number."""
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(ROOT)


def lively(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """The model with weights large enough for logits around 5, and norms that are not one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.2 * noise if weight.dim() == 1 else 0.15 * noise)
    return model


def write_texts(path: Path, count: int, seed: int = 0) -> Path:
    """A JSONL file of `count` texts of 3 to 60 words; each begins with its own number."""
    draw = random.Random(seed)
    words = ["river", "stone", "green", "seven", "under", "山", "水", "the", "of", "bread", "人民", "window", "quick"]
    lines = [
        {"text": f"line{number} " + " ".join(draw.choices(words, k=draw.randint(3, 60)))} for number in range(count)
    ]
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """64 texts of very unequal length, about 100 sequences of 32 tokens."""
    return write_texts(tmp_path / "texts.jsonl", 64)


def train(*arguments: object, script: ModuleType = train_pretrain) -> int:
    """Run a training script in this process; return its exit code."""
    handlers = {number: signal.getsignal(number) for number in (signal.Signals[name] for name in STOP_SIGNALS)}
    try:
        script.main(parse_options(script.options(), [str(argument) for argument in arguments]))
    except SystemExit as end:
        return end.code or 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return 0


def curve(run_dir: Path) -> list[tuple]:
    """(step, loss, grad norm, rate) of every logged step, at full precision."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "loss", "grad_norm", "learning_rate")
    return [tuple(line[name] for name in names) for line in lines if "loss" in line]


def final_bytes(run_dir: Path) -> tuple[bytes, bytes]:
    """Weights and optimizer state of the last checkpoint, as they stand on the disk."""
    folder = step_folders(run_dir)[-1]
    return (folder / "model.safetensors").read_bytes(), (folder / "optimizer.safetensors").read_bytes()


def free_port() -> int:
    """A port that nobody uses at this moment, below those that the system gives to outgoing connections."""
    draw = random.Random()
    while True:
        port = draw.randint(20_000, 32_000)
        with socket.socket() as one:
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


class Peers:
    """What a test function that runs on every rank gets: its rank, the world size, and a way to meet the others."""

    def __init__(self, rank: int, world_size: int, barrier: object, port: object) -> None:
        self.rank, self.world_size, self._barrier, self._port = rank, world_size, barrier, port

    def meet(self) -> None:
        """Wait for the other ranks."""
        self._barrier.wait(timeout=120)

    def new_group(self) -> None:
        """Make the next process group start on a port of its own."""
        self.meet()
        if self.rank == 0:
            self._port.value = free_port()
        self.meet()
        os.environ["MASTER_PORT"] = str(self._port.value)

    def connect(self) -> Ranks:
        """Join a process group of one's own; `disconnect` leaves it."""
        self.new_group()
        ranks = Ranks(self.rank, self.rank, self.world_size, torch.device("cpu"))
        ranks.connect(60)
        return ranks


def _on_rank(rank: int, world_size: int, barrier: object, port: object, errors: object, function, arguments) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }
    torch.set_num_threads(1)
    try:
        function(Peers(rank, world_size, barrier, port), *arguments)
    except BaseException:
        errors.put(f"rank {rank}:\n{traceback.format_exc()}")
        barrier.abort()
        raise


def on_ranks(world_size: int, function: Callable, *arguments: object) -> None:
    """Run function(peers, *arguments) in `world_size` processes at once; fail with their tracebacks."""
    context = multiprocessing.get_context("spawn")
    barrier, errors, port = context.Barrier(world_size), context.Queue(), context.Value("i", 0)
    processes = [
        context.Process(target=_on_rank, args=(rank, world_size, barrier, port, errors, function, arguments))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 300
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        for process in processes:
            process.join(timeout=0.05)
        if any(process.exitcode for process in processes):
            # The others may wait for the dead one inside a collective.
            deadline = min(deadline, time.monotonic() + 5)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    messages = []
    while not errors.empty():
        messages.append(errors.get())
    assert codes == [0] * world_size, f"exit codes {codes}\n" + "\n".join(messages)
