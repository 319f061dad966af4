"""Command-line options that the training scripts share, and the checks that need no data and no device."""

import argparse
import difflib
import importlib.util
import math
import re
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NoReturn

SCHEDULES = ("cosine", "wsd", "constant", "minimind")
SCALINGS = ("linear", "sqrt", "none")
WANDB_MODES = ("online", "offline")
DTYPES = ("bfloat16", "float16", "float32")
# MiniMind's short names for the folder that a training stage wrote (COMPAT: --from_weight pretrain).
STAGE_FOLDERS = {"pretrain": "out/pretrain", "full_sft": "out/sft", "sft": "out/sft"}
# Options that are fields of the model's configuration, under the same names.
MODEL_SIZES = {
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "rope_theta",
    "qk_norm", "tie_word_embeddings", "dropout",
}  # fmt: skip
_ABSENT = object()


def yes_or_no(text: str) -> bool:
    """Read true/false, 1/0, yes/no or on/off. Raises argparse's error for anything else."""
    value = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    if text.lower() not in value:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return value[text.lower()]


def add_switch(parser: argparse.ArgumentParser, *names: str, default: bool, help: str) -> None:
    """Add an on/off option that works bare (`--compile`) and with a value (`--compile 0`, `--compile true`)."""
    parser.add_argument(*names, type=yes_or_no, nargs="?", const=True, default=default, metavar="BOOL", help=help)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """End with the one sentence that matters, not with forty lines of usage before it."""
        hint = "--help lists the options"
        unknown = re.search(r"unrecognized arguments: (--[^\s=]+)", message)
        if unknown and (close := difflib.get_close_matches(unknown[1], self._option_string_actions, n=1)):
            hint = f"did you mean {close[0]}? {hint}"
        self.exit(2, f"{self.prog}: error: {message} ({hint})\n")


def new_parser(description: str) -> argparse.ArgumentParser:
    """A parser that prints defaults in its help, never guesses at abbreviations, and is brief about mistakes."""
    return _Parser(
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )


def add_run_options(
    parser: argparse.ArgumentParser,
    *,
    out_dir: str,
    checkpoint_interval: int = 100,
    keep_checkpoints: int = 3,
    log_interval: int = 10,
    eval_interval: int = 500,
    spike_threshold: float = 0.1,
    num_workers: int = 4,
    ddp_timeout: float = 1800,
    ddp_bucket_cap_mb: float = 25,
    seed: int = 42,
    wandb_project: str = "MiniMind-Pretrain",
) -> None:
    """Declare the options that mean the same in every stage; the arguments are the defaults people edit."""
    run = parser.add_argument_group("the run")
    run.add_argument("--out_dir", default=out_dir, help="the run's own folder: checkpoints, metrics, exit code")
    run.add_argument("--save_dir", default=None, help="MiniMind's parent folder; with --save_weight W: out_dir D/W")
    run.add_argument("--save_weight", default=None, help="MiniMind's name of the run below --save_dir")
    run.add_argument("--seed", type=int, default=seed, help="seed of weights, data order and dropout")
    add_switch(
        run,
        "--resume_from_checkpoint",
        "--from_resume",
        default=True,
        help="go on from the newest valid checkpoint in out_dir; false sets a used folder aside as <out_dir>.old-N, "
        "at every start but a restart by torchrun",
    )
    run.add_argument(
        "--checkpoint_interval",
        "--save_interval",
        type=int,
        default=checkpoint_interval,
        help="optimizer steps between checkpoints",
    )
    run.add_argument(
        "--keep_checkpoints",
        type=int,
        default=keep_checkpoints,
        help="newest checkpoints to keep; besides, the one of best validation loss and one that is 10 steps old",
    )
    add_switch(
        run,
        "--async_save",
        default=False,
        help="write checkpoints in the background: a step pays for a copy in memory only",
    )
    run.add_argument(
        "--spike_threshold",
        type=float,
        default=spike_threshold,
        help="share by which the loss may exceed its recent level; above it for three steps, the run goes back to the "
        "last stable checkpoint and leaves out the data between (0: off)",
    )
    add_switch(
        run,
        "--dry_run",
        default=False,
        help="check data, tokenizer, weights, memory and disk, try a few steps, tell all problems; the run folder "
        "stays as it is (the token cache is built, for the run to use)",
    )
    run.add_argument("--log_interval", type=int, default=log_interval, help="optimizer steps between log lines")
    run.add_argument(
        "--eval_interval",
        type=int,
        default=eval_interval,
        help="optimizer steps between validations (0: only at the end)",
    )

    boards = parser.add_argument_group("dashboards")
    add_switch(boards, "--use_wandb", default=False, help="show the metrics at Weights & Biases")
    boards.add_argument("--wandb_project", default=wandb_project, help="project at Weights & Biases")
    boards.add_argument(
        "--wandb_mode",
        choices=WANDB_MODES,
        default="online",
        help="offline needs no account and no network: files in out_dir/wandb, sent later with `wandb sync`",
    )
    add_switch(
        boards,
        "--use_tensorboard",
        default=False,
        help="write out_dir/tensorboard, shown by `tensorboard --logdir out` (pip install tensorboard)",
    )

    machine = parser.add_argument_group("the machine")
    machine.add_argument("--device", default=None, help="cuda, cpu or mps (found by itself)")
    machine.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="precision of the matrix products; weights stay float32"
    )
    add_switch(machine, "--compile", "--use_compile", default=False, help="torch.compile: slower start, faster steps")
    add_switch(machine, "--deterministic", default=False, help="deterministic kernels, for bit-exact resume on CUDA")
    add_switch(
        machine,
        "--activation_checkpointing",
        default=False,
        help="recompute activations: less memory, about 30 %% more work",
    )
    machine.add_argument(
        "--num_workers", type=int, default=num_workers, help="data loader processes per rank (0: none)"
    )
    add_switch(machine, "--pin_memory", default=True, help="page-locked host batches (CUDA only)")
    machine.add_argument(
        "--ddp_timeout",
        "--timeout",
        type=float,
        default=ddp_timeout,
        help="seconds a rank waits for the others to start, save or validate, and in the first steps",
    )
    machine.add_argument(
        "--step_timeout",
        type=float,
        default=None,
        help="seconds after which a step is stuck: the rank shows where and ends (none given: 10 times the slowest "
        "step, at least 60)",
    )
    machine.add_argument(
        "--ddp_bucket_cap_mb", type=float, default=ddp_bucket_cap_mb, help="MiB of gradients per all-reduce"
    )
    add_switch(
        machine, "--find_unused_parameters", default=False, help="DDP: allow parameters that get no gradient in a step"
    )

    # Options of MiniMind that never had an effect, or that only one value of is supported here.
    parser.add_argument("--ddp", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", "--local-rank", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--use_moe", type=yes_or_no, default=False, help=argparse.SUPPRESS)


def add_rate_options(
    parser: argparse.ArgumentParser,
    *,
    base_batch_size: int = 256,
    lr_scaling: str = "linear",
    lr_schedule: str = "cosine",
) -> None:
    """Declare how the rate follows the batch and the step."""
    rate = parser.add_argument_group("the rate")
    rate.add_argument(
        "--base_batch_size",
        type=int,
        default=base_batch_size,
        help="global batch in sequences that --learning_rate is meant for",
    )
    rate.add_argument(
        "--lr_scaling", choices=SCALINGS, default=lr_scaling, help="rate = learning_rate x f(global batch / base batch)"
    )
    rate.add_argument("--lr_schedule", choices=SCHEDULES, default=lr_schedule, help="shape of the rate over the steps")


def add_chat_options(
    parser: argparse.ArgumentParser, *, system_prompt_share: float = 0.0, empty_think_share: float = 0.0
) -> None:
    """Declare what the stages that train on conversations share."""
    chats = parser.add_argument_group("chats")
    chats.add_argument(
        "--show_samples",
        type=int,
        nargs="?",
        const=3,
        default=0,
        help="print this many conversations (bare: 3), trained part in ⟦ ⟧",
    )
    chats.add_argument(
        "--system_prompt_share",
        type=float,
        default=system_prompt_share,
        help="share of conversations given a system prompt (MiniMind: 0.2)",
    )
    chats.add_argument(
        "--empty_think_share",
        type=float,
        default=empty_think_share,
        help="share of conversations whose answers begin with an empty think block (minimind-3: 0.2)",
    )


def add_model_options(
    parser: argparse.ArgumentParser,
    *,
    hidden_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    num_key_value_heads: int,
    dropout: float = 0.0,
) -> None:
    """Declare the sizes of the model; they must agree with the folder that --from_weight names, where given."""
    model = parser.add_argument_group("the model")
    model.add_argument("--hidden_size", "--dim", type=int, default=hidden_size, help="width of the residual stream")
    model.add_argument("--num_hidden_layers", "--n_layers", type=int, default=num_hidden_layers, help="blocks")
    model.add_argument("--num_attention_heads", "--n_heads", type=int, default=num_attention_heads, help="query heads")
    model.add_argument(
        "--num_key_value_heads",
        "--n_kv_heads",
        type=int,
        default=num_key_value_heads,
        help="key and value heads, shared by query heads",
    )
    model.add_argument(
        "--intermediate_size",
        "--hidden_dim",
        type=int,
        default=None,
        help="width of SwiGLU (none given: 8/3 hidden_size, rounded up to 64)",
    )
    model.add_argument("--rope_theta", type=float, default=1e6, help="base of the rotary positions")
    add_switch(model, "--qk_norm", default=False, help="RMSNorm on queries and keys (saved as Qwen3 instead of Llama)")
    add_switch(model, "--tie_word_embeddings", default=True, help="one matrix for embeddings and head")
    model.add_argument("--dropout", type=float, default=dropout, help="on embeddings and residual branches")


def named(args: argparse.Namespace, names: Collection[str]) -> dict[str, object]:
    """The options of these names as keyword arguments."""
    return {name: getattr(args, name) for name in names}


def given_options(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> set[str]:
    """Names of the options that stand on the command line, as opposed to those left at their default."""
    # argparse fills in a default only where the namespace has no such attribute yet.
    blank = argparse.Namespace(**{action.dest: _ABSENT for action in parser._actions})
    parser.parse_args(argv, namespace=blank)
    return {name for name, value in vars(blank).items() if value is not _ABSENT}


def parse_options(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse, resolve aliases and check; anything wrong ends the process as argparse does, in one message.

    Adds `given` (the names that stood on the command line) and `notes` (lines to log once the run has started).
    """
    args = parser.parse_args(argv)
    args.given = given_options(parser, argv)
    args.notes = []
    try:
        _resolve_aliases(args)
        validate(args)
    except ValueError as problem:
        parser.error(str(problem))
    args.command = " ".join(sys.argv if argv is None else argv)
    return args


def _resolve_aliases(args: argparse.Namespace) -> None:
    """Turn MiniMind's names into ours: D/W folders, stage names of weights, dead options."""
    if args.save_dir or args.save_weight:
        if "out_dir" in args.given:
            raise ValueError("--save_dir, --save_weight and --out_dir all name the run's folder; give only --out_dir")
        default = Path(args.out_dir)
        args.out_dir = str(Path(args.save_dir or default.parent) / (args.save_weight or default.name))
    from_weight = getattr(args, "from_weight", None)
    if from_weight in STAGE_FOLDERS:
        # --save_weight full_sft has made out/full_sft.
        own = Path("out") / from_weight
        args.from_weight = str(own) if own.is_dir() else STAGE_FOLDERS[from_weight]
    dead = [f"--{name}" for name in ("ddp", "local_rank") if name in args.given]
    if dead:
        args.notes.append(f"{', '.join(dead)}: has no effect here; torchrun's environment decides")
    # These have done their work; what is saved with the run are the options that mean something.
    for name in ("save_dir", "save_weight", "ddp", "local_rank"):
        delattr(args, name)


def validate(args: argparse.Namespace) -> None:
    """Check every option that can be judged alone; raise one ValueError that lists all problems."""
    problems = []

    def at_least(name: str, limit: float, why: str = "") -> None:
        value = getattr(args, name, None)
        if value is not None and not (math.isfinite(value) and value >= limit):
            problems.append(f"--{name} {value}: must be at least {limit}{why}")

    for name in (
        "max_steps", "batch_size", "gradient_accumulation_steps", "base_batch_size", "hidden_size",
        "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "checkpoint_interval",
        "keep_checkpoints", "log_interval", "ddp_timeout", "step_timeout", "lora_rank",
    ):  # fmt: skip
        at_least(name, 1)
    at_least("max_seq_len", 2)
    for name in (
        "warmup_steps",
        "weight_decay",
        "learning_rate",
        "eval_interval",
        "spike_threshold",
        "num_workers",
        "seed",
        "show_samples",
    ):
        at_least(name, 0)
    if args.epochs is not None and not 0 < args.epochs < math.inf:
        problems.append(f"--epochs {args.epochs}: must be above 0")
    if args.seed >= 2**63:
        problems.append(f"--seed {args.seed}: must be below 2^63")
    if not 0 < args.ddp_bucket_cap_mb < math.inf:
        problems.append(f"--ddp_bucket_cap_mb {args.ddp_bucket_cap_mb}: must be above 0 (25 is DDP's default)")
    if args.compile and args.ddp_bucket_cap_mb < 1:
        problems.append(
            f"--ddp_bucket_cap_mb {args.ddp_bucket_cap_mb} with --compile: use 1 or more (torch fails below)"
        )
    if not args.grad_clip > 0:
        problems.append(f"--grad_clip {args.grad_clip}: must be above 0 (use a large number for no clipping)")
    for name in ("dropout", "val_fraction", "lora_dropout"):
        value = getattr(args, name, 0.0)
        if not 0 <= value < 1:
            problems.append(f"--{name} {value}: must be at least 0 and below 1")
    for name in ("system_prompt_share", "empty_think_share"):
        value = getattr(args, name, 0.0)
        if not 0 <= value <= 1:
            problems.append(f"--{name} {value}: must be from 0 to 1")
    for name, values in (
        ("lora_alpha", [getattr(args, "lora_alpha", 1)]),
        ("data_weights", getattr(args, "data_weights", None) or []),
    ):
        problems.extend(f"--{name} {value}: must be above 0 and finite" for value in values if not 0 < value < math.inf)
    if getattr(args, "val_fraction", 0) and getattr(args, "val_path", None):
        problems.append("--val_path and --val_fraction both choose the validation texts; give one")
    for switch, package in (("use_wandb", "wandb"), ("use_tensorboard", "tensorboard")):
        if getattr(args, switch) and importlib.util.find_spec(package) is None:
            problems.append(f"--{switch}: its package is not installed; pip install {package}")
    if args.use_moe:
        problems.append("--use_moe 1: mixture-of-experts models are not supported; leave it out")
    if Path(args.out_dir).name in ("", "out"):
        problems.append(f"--out_dir {args.out_dir!r} does not name a run's own folder; give one, as out/pretrain")
    if problems:
        raise ValueError("; ".join(problems))
