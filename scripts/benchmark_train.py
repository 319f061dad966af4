"""Training speed of this machine: python -m scripts.benchmark_train

Runs the training loop of train_pretrain.py, one process, on random ids, once per cell (float32, bfloat16, and with
--compile each compiled) in every round, so that a machine whose speed drifts drifts for all cells alike. Prints the
median tokens/s, the ratio to float32 round by round, and how much of the machine's own matrix product rate, measured
on the model's shapes in the same rounds, the loop reaches.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F

from model.gpt import GPT, GPTConfig
from trainer.backends import Backend, Step, build_backend
from trainer.ddp import COMPUTE_DTYPES, Ranks, choose_device
from trainer.optim import adamw
from trainer.options import add_switch, new_parser


@dataclass
class Cell:
    """One way to train, and the seconds that its steps and its bare matrix products took."""

    dtype: str
    compile: bool
    backend: Backend
    step_seconds: list[float] = field(default_factory=list)
    gemm_seconds: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        """For the table."""
        return self.dtype + (" compiled" if self.compile else "")


def matmul_shapes(config: GPTConfig) -> list[tuple[int, int, int]]:
    """(inputs, outputs, times per forward pass) of every linear layer, the head included."""
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    layers, hidden, inner = config.num_hidden_layers, config.hidden_size, config.intermediate_size
    return [
        (hidden, queries, layers),
        (hidden, keys, 2 * layers),
        (queries, hidden, layers),
        (hidden, inner, 2 * layers),
        (inner, hidden, layers),
        (hidden, config.vocab_size, 1),
    ]


def flops_per_token(config: GPTConfig, time_steps: int) -> float:
    """Model FLOPs per trained token: 6 per weight of a matrix product, and causal attention.

    Attention: scores and mixing are 2 products of 2 x heads x head_dim x T multiply-adds a token, half of them masked,
    times 3 for forward and backward: 6 x layers x heads x head_dim x T. Recomputation is not counted.
    """
    weights = sum(inputs * outputs * count for inputs, outputs, count in matmul_shapes(config))
    return 6 * weights + 6 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * time_steps


def gemms(config: GPTConfig, rows: int, dtype: torch.dtype, device: torch.device) -> Iterator[Callable[[], None]]:
    """The matrix products of one forward and backward pass, bare: x W, g W^T and g^T x of every layer."""
    for inputs, outputs, count in matmul_shapes(config):
        x = torch.randn(rows, inputs, device=device, dtype=dtype)
        grad = torch.randn(rows, outputs, device=device, dtype=dtype)
        weight = torch.randn(outputs, inputs, device=device, dtype=dtype)

        def products(x=x, grad=grad, weight=weight, count=count) -> None:
            for _ in range(count):
                F.linear(x, weight)
                grad @ weight
                grad.T @ x

        yield products


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Duration of the work, the device's part included."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    synchronize()
    began = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - began


def one_step(backend: Backend, step: Step) -> None:
    """One optimizer step, as in the training scripts."""
    backend.set_rate(1e-4)
    for batch in backend.micro_batches(step):
        backend.backward(backend.loss_sum(batch) / step.target_tokens)
    backend.step()


def measure(args: argparse.Namespace) -> list[Cell]:
    """Run all cells in every round; the first round is not counted."""
    device = choose_device(args.device, 0)
    config = GPTConfig(hidden_size=args.hidden_size, num_hidden_layers=args.num_hidden_layers)
    cells = []
    for compiled in (False, True) if args.compile else (False,):
        for dtype in ("float32", "bfloat16"):
            torch.manual_seed(0)
            backend = build_backend(
                "ddp",
                GPT(config),
                partial(adamw, weight_decay=0.1),
                Ranks(0, 0, 1, device),
                dtype=dtype,
                grad_clip=1.0,
                seed=0,
                compile=compiled,
                bucket_cap_mb=25,
                find_unused_parameters=False,
            )
            cells.append(Cell(dtype, compiled, backend))
    ids = torch.randint(config.vocab_size, (args.batch_size, args.max_seq_len + 1))
    batch = {"input_ids": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}
    rows = args.batch_size * args.max_seq_len
    products = {name: list(gemms(config, rows, COMPUTE_DTYPES[name], device)) for name in ("float32", "bfloat16")}
    for number in range(args.rounds + 1):
        for cell in cells:
            step = Step(number, [batch], [0], rows)
            took = seconds(lambda cell=cell, step=step: one_step(cell.backend, step), device)
            bare = sum(seconds(product, device) for product in products[cell.dtype])
            if number:
                cell.step_seconds.append(took)
                cell.gemm_seconds.append(bare)
    return cells


def report(cells: list[Cell], args: argparse.Namespace) -> Iterator[str]:
    """The table, line by line."""
    config = cells[0].backend.module.config
    rows = args.batch_size * args.max_seq_len
    flops = flops_per_token(config, args.max_seq_len) * rows
    product_flops = 6 * sum(i * o * n for i, o, n in matmul_shapes(config)) * rows
    yield (
        f"{cells[0].backend.parameter_count:,} parameters, {args.batch_size} x {args.max_seq_len} tokens a step, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}, {args.rounds} rounds"
    )
    yield "| cell | tokens/s | against float32 (min - max) | model GFLOP/s | GEMM GFLOP/s | share of GEMM rate |"
    yield "|---|---|---|---|---|---|"
    for cell in cells:
        step, bare = statistics.median(cell.step_seconds), statistics.median(cell.gemm_seconds)
        ratios = [base / own for base, own in zip(cells[0].step_seconds, cell.step_seconds, strict=True)]
        rate, bare_rate = flops / step / 1e9, product_flops / bare / 1e9
        yield (
            f"| {cell.name} | {rows / step:.0f} | {statistics.median(ratios):.2f} ({min(ratios):.2f} - "
            f"{max(ratios):.2f}) | {rate:.0f} | {bare_rate:.0f} | {rate / bare_rate:.0%} |"
        )


def options() -> argparse.ArgumentParser:
    """Sizes of the measurement; the defaults are the default model."""
    parser = new_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds; every cell runs one step in each")
    parser.add_argument("--batch_size", type=int, default=16, help="sequences per step")
    parser.add_argument("--max_seq_len", type=int, default=512, help="tokens per sequence")
    parser.add_argument("--hidden_size", type=int, default=512, help="width of the model")
    parser.add_argument("--num_hidden_layers", type=int, default=8, help="blocks of the model")
    parser.add_argument("--device", default=None, help="cuda, cpu or mps (found by itself)")
    add_switch(parser, "--compile", default=False, help="also measure compiled cells (a minute more)")
    return parser


if __name__ == "__main__":
    arguments = options().parse_args()
    for line in report(measure(arguments), arguments):
        print(line)
