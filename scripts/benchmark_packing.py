"""Packed rows against length-grouped batches: python -m scripts.benchmark_packing --data_path FILE

Trains the same model on the same conversations in two shapes, step by step in turn: packed rows as train_sft.py makes
them, and batches of conversations of about equal length, padded to the longest, which need no mask between
conversations. A step of either has about the same number of positions. Prints useful tokens/s (positions that hold a
token), which is what an epoch takes.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dataset.loader import shuffled
from dataset.packing import PADDING, PackedChats, chat_rows
from dataset.tokenizer import load_tokenizer
from dataset.tokens import Reading
from model.gpt import GPT, GPTConfig
from model.loss import IGNORE_INDEX
from trainer.backends import Backend, Step, build_backend
from trainer.ddp import Ranks, choose_device
from trainer.optim import adamw
from trainer.options import new_parser

# Conversations are sorted by length within so many batches: a whole epoch in order of length would be no shuffle.
BATCHES_PER_GROUP = 50

Batch = dict[str, Tensor]


def options() -> argparse.ArgumentParser:
    """Sizes of the measurement; the defaults are the default model and SFT's row."""
    parser = new_parser(__doc__)
    parser.add_argument("--data_path", nargs="+", default=["dataset/starter/sft.jsonl"], help="files of conversations")
    parser.add_argument("--rounds", type=int, default=15, help="counted steps of either shape")
    parser.add_argument("--batch_size", type=int, default=8, help="packed rows per step")
    parser.add_argument("--max_seq_len", type=int, default=768, help="tokens per row")
    parser.add_argument("--hidden_size", type=int, default=512, help="width of the model")
    parser.add_argument("--num_hidden_layers", type=int, default=8, help="blocks of the model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of matrix products")
    parser.add_argument("--cache_dir", default="out/cache", help="where the tokens of the data files are kept")
    parser.add_argument("--device", default=None, help="cuda or cpu (found by itself)")
    return parser


def packed(chats: PackedChats, batch_size: int) -> Iterator[Batch]:
    """Packed rows in a shuffled order."""
    order = shuffled(np.arange(len(chats)), len(chats), seed=0)
    for start in range(0, len(order) - batch_size + 1, batch_size):
        yield chats.rows(order[start : start + batch_size], np.zeros(batch_size, dtype=np.int64))


def grouped(chats: PackedChats, positions: int) -> Iterator[Batch]:
    """Batches of conversations of similar length, as many as fill about so many positions."""
    conversations = []
    for batch in packed(chats, 1):
        [ids], [targets], [segments] = batch["input_ids"], batch["targets"], batch["segments"]
        for segment in range(int(segments.max()) + 1):
            conversations.append((ids[segments == segment], targets[segments == segment]))
    order = shuffled(np.arange(len(conversations)), len(conversations), seed=1)
    mean = sum(len(ids) for ids, _ in conversations) / len(conversations)
    size = int(BATCHES_PER_GROUP * positions / mean)
    batches = []
    for start in range(0, len(order), size):
        batch, longest = [], 0
        for number in sorted(order[start : start + size], key=lambda number: len(conversations[number][0])):
            longest = max(longest, len(conversations[number][0]))
            if batch and longest * (len(batch) + 1) > positions:
                batches.append(batch)
                batch, longest = [], len(conversations[number][0])
            batch.append(number)
        batches.append(batch)
    for number in shuffled(np.arange(len(batches)), len(batches), seed=2):
        yield padded([conversations[index] for index in batches[number]])


def padded(conversations: list[tuple[Tensor, Tensor]]) -> Batch:
    """Conversations as the rows of one batch."""
    longest = max(len(ids) for ids, _ in conversations)
    input_ids = torch.zeros(len(conversations), longest, dtype=torch.int64)
    targets = torch.full_like(input_ids, IGNORE_INDEX)
    useful = 0
    for row, (ids, wanted) in enumerate(conversations):
        input_ids[row, : len(ids)], targets[row, : len(ids)] = ids, wanted
        useful += len(ids)
    return {"input_ids": input_ids, "targets": targets, "useful": torch.tensor(useful)}


def train_step(backend: Backend, batch: Batch, number: int) -> tuple[float, int, int]:
    """One optimizer step; returns its seconds, the positions that hold a token, and all positions."""
    useful = int(batch["useful"]) if "useful" in batch else int((batch["segments"] != PADDING).sum())
    batch = {name: value for name, value in batch.items() if name != "useful"}
    step = Step(number, [batch], [0], int((batch["targets"] != IGNORE_INDEX).sum()))
    began = time.perf_counter()
    backend.set_rate(1e-4)
    for part in backend.micro_batches(step):
        backend.backward(backend.loss_sum(part) / step.target_tokens)
    backend.step().item()
    return time.perf_counter() - began, useful, batch["input_ids"].numel()


def main() -> None:
    """Measure and print the table."""
    args = options().parse_args()
    tokenizer = load_tokenizer("model/tokenizer")
    chats, _ = chat_rows(
        args.data_path,
        None,
        val_fraction=0.0,
        tokenizer=tokenizer,
        max_seq_len=args.max_seq_len,
        cache_dir=Path(args.cache_dir),
        reading=Reading(),
    )
    device = choose_device(args.device, 0)
    torch.manual_seed(0)
    config = GPTConfig(hidden_size=args.hidden_size, num_hidden_layers=args.num_hidden_layers)
    backend = build_backend(
        "ddp",
        GPT(config),
        partial(adamw, weight_decay=0.1),
        Ranks(0, 0, 1, device),
        dtype=args.dtype,
        grad_clip=1.0,
        seed=0,
        compile=False,
        bucket_cap_mb=25,
        find_unused_parameters=False,
    )
    shapes = {
        "length-grouped": grouped(chats, args.batch_size * args.max_seq_len),
        "packed": packed(chats, args.batch_size),
    }
    measured: dict[str, list[tuple[float, int, int]]] = {name: [] for name in shapes}
    for number in range(args.rounds + 1):
        # The other first in every second round: a step leaves the allocator and the caches in a state of its own.
        for name, batches in sorted(shapes.items(), reverse=number % 2 == 1):
            result = train_step(backend, next(batches), number)
            if number:  # the first round warms up
                measured[name].append(result)
    print(
        f"{backend.parameter_count:,} parameters, {args.dtype}, {torch.get_num_threads()} threads, {args.rounds} rounds"
    )
    print("| batches | useful tokens/s | padding | against length-grouped |")
    print("|---|---|---|---|")
    rates = {name: sum(u for _, u, _ in steps) / sum(s for s, _, _ in steps) for name, steps in measured.items()}
    for name, steps in measured.items():
        useful, positions = (sum(step[field] for step in steps) for field in (1, 2))
        spread = [u / s for s, u, _ in steps]
        print(
            f"| {name} | {rates[name]:.0f} (median step {statistics.median(spread):.0f}) "
            f"| {1 - useful / positions:.1%} | {rates[name] / rates['length-grouped']:.2f} |"
        )


if __name__ == "__main__":
    main()
