"""Teach a GPT to answer (SFT): `torchrun --nproc_per_node 8 train_sft.py`, or plain `python` for one process.

Start the same command again after a crash, and it goes on where it was.
"""

import argparse
import dataclasses
from functools import partial
from pathlib import Path

from torch import Tensor

from dataset.chat import ChatEncoder
from dataset.loader import EvalLoader, StepLoader
from dataset.mixture import mixed
from dataset.packing import chat_rows
from dataset.survey import profile, survey
from dataset.tokenizer import load_tokenizer, require_matching, tokenizer_folder
from dataset.tokens import Reading
from dataset.variation import Variation
from model.weights import save_model_folder, starting_config, starting_model
from trainer.optim import adamw
from trainer.options import (
    MODEL_SIZES,
    add_chat_options,
    add_model_options,
    add_rate_options,
    add_run_options,
    add_switch,
    named,
    new_parser,
    parse_options,
)
from trainer.run import start_run


def options() -> argparse.ArgumentParser:
    """The options of this stage; edit the defaults, or give others on the command line."""
    parser = new_parser(__doc__)
    parser.add_argument(
        "--data_path",
        nargs="+",
        default=["dataset/starter/sft.jsonl"],
        help="files, folders or patterns of conversations: JSON lines or array (also .gz), parquet",
    )
    parser.add_argument(
        "--data_weights",
        nargs="+",
        type=float,
        default=None,
        help="share of the target tokens that each of --data_path gives, the general first (none given: as they lie)",
    )
    parser.add_argument("--encoding", default="utf-8", help="of files without a byte order mark, as gb18030")
    add_switch(parser, "--skip_bad_lines", default=False, help="leave bad records out and count them, or refuse them")
    parser.add_argument("--val_path", nargs="+", default=None, help="conversations to validate on, of the same kinds")
    parser.add_argument("--val_fraction", type=float, default=0.0, help="share of the conversations to hold out")
    parser.add_argument("--cache_dir", default="out/cache", help="where the tokens of the data files are kept")
    add_chat_options(parser, system_prompt_share=0.0, empty_think_share=0.0)
    parser.add_argument("--tokenizer_path", default=None, help="folder with tokenizer.json, if not that of the weights")
    parser.add_argument(
        "--from_weight",
        default="out/pretrain",
        help="start from a run's, checkpoint's or transformers folder, or a MiniMind .pth; none: from random weights",
    )
    parser.add_argument(
        "--epochs", type=float, default=None, help="passes over the data (none given: 1, or as many as make 20 steps)"
    )
    parser.add_argument("--max_steps", type=int, default=None, help="optimizer steps; wins over --epochs")
    parser.add_argument(
        "--batch_size", "--local_batch_size", type=int, default=16, help="packed rows per process and micro-batch"
    )
    parser.add_argument(
        "--gradient_accumulation_steps",
        "--accumulation_steps",
        type=int,
        default=1,
        help="micro-batches per step (4 helps on slow links)",
    )
    parser.add_argument(
        "--learning_rate", "--base_lr", type=float, default=1e-4, help="rate at a global batch of --base_batch_size"
    )
    parser.add_argument(
        "--warmup_steps",
        "--warmup_iters",
        type=int,
        default=None,
        help="steps of rising rate (none given: 3 %% of the run, at most 500)",
    )
    parser.add_argument("--weight_decay", type=float, default=0.1, help="AdamW's decay, on matrices only")
    parser.add_argument("--grad_clip", type=float, default=1.0, help="largest gradient norm")
    parser.add_argument("--max_seq_len", type=int, default=768, help="tokens per row, and of a conversation at most")
    add_model_options(parser, hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2)
    add_rate_options(parser, base_batch_size=16, lr_scaling="none", lr_schedule="cosine")
    add_run_options(parser, out_dir="out/sft", checkpoint_interval=100, wandb_project="MiniMind-Full-SFT")
    return parser


def main(args: argparse.Namespace) -> None:
    """Train until the steps are done or a signal asks to stop; raises SystemExit with the code that says which."""
    with start_run(args, stage="sft") as run:
        reading = Reading(encoding=args.encoding, skip_bad_lines=args.skip_bad_lines or args.dry_run)
        with run.part("weights"):
            start = run.starting_folder()
        with run.part("tokenizer"):
            tokenizer = load_tokenizer(tokenizer_folder(args.tokenizer_path, start))
        with run.part("model"):
            config = starting_config(
                start,
                named(args, MODEL_SIZES),
                vocab_size=tokenizer.vocab_size,
                given=MODEL_SIZES & args.given,
                max_seq_len=args.max_seq_len,
            )
            require_matching(tokenizer, config.vocab_size, start)
        with run.part("data"):
            if args.dry_run and run.first_here:
                paths = [*args.data_path, *(args.val_path or [])]
                seen = survey(
                    paths, ChatEncoder(tokenizer, args.max_seq_len, 0.0), reading, refuses=not args.skip_bad_lines
                )
                run.found(seen)
            mixture, held_out = mixed(
                partial(
                    chat_rows,
                    val_fraction=args.val_fraction,
                    tokenizer=tokenizer,
                    max_seq_len=args.max_seq_len,
                    cache_dir=Path(args.cache_dir),
                    reading=reading,
                    variation=Variation(args.seed, args.system_prompt_share, args.empty_think_share),
                    builds=run.first_here,
                ),
                args.data_path,
                args.data_weights,
                args.val_path,
                args.seed,
            )
            if args.dry_run and run.first_here:
                for source in mixture.sources:
                    run.found(profile(source.stream, tokenizer, args.max_seq_len, seen))
        run.require_parts()
        if run.ranks.is_first:
            print(*mixture.show(args.show_samples), sep="\n\n", end="")
        model = starting_model(start, config)
        share = {"rank": run.rank, "world_size": run.world_size, "batch_size": args.batch_size}
        loader = StepLoader(
            mixture,
            accumulation=args.gradient_accumulation_steps,
            num_workers=args.num_workers,
            pin_memory=args.pin_memory and run.on_gpu,
            **share,
        )

        def write_model(folder: Path, weights: dict[str, Tensor]) -> None:
            ids = {"bos_id": tokenizer.bos_id, "eos_id": tokenizer.eos_id, "pad_id": tokenizer.pad_id}
            save_model_folder(folder, model.config, weights, **ids)
            tokenizer.save(folder)

        backend = run.wrap(model, partial(adamw, weight_decay=args.weight_decay), args.grad_clip)
        state = run.resume(
            loader,
            [EvalLoader(*part, **share) for part in held_out],
            fingerprint={
                "data": mixture.data,
                "variation": [args.system_prompt_share, args.empty_think_share],
                "tokenizer": tokenizer.fingerprint,
                "model": dataclasses.asdict(model.config),
            },
            write_model=write_model,
        )
        while run.continues(state):
            step = run.next_step(state)
            rate = backend.set_rate(run.rate(state.step))
            loss = 0.0
            for batch in backend.micro_batches(step):
                loss += backend.backward(backend.loss_sum(batch) / step.target_tokens)
            grad_norm = backend.step()
            state = run.after_step(state, loss=loss, grad_norm=grad_norm, rate=rate)


if __name__ == "__main__":
    main(parse_options(options()))
