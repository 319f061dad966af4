"""Give a model away: `python -m scripts.export SOURCE TARGET`

SOURCE: a run's, a checkpoint's or any transformers Llama or Qwen3 folder, a MiniMind .pth, or with --merge_lora a LoRA
adapter's folder. TARGET: a new folder for transformers with the weights, the tokenizer and its chat template, and of
the training no more than its stage, or a name ending in .pth: MiniMind's file, in float16 and under its names. What was
written is read back and compared before it gets its name.
"""

import argparse
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from dataset.tokenizer import TextTokenizer, load_tokenizer, require_matching, tokenizer_folder
from model.gpt import GPT
from model.lora import is_adapter, load_adapter, load_base, merge_lora
from model.minimind import minimind_state
from model.weights import CONFIG_FILE, load_model, save_model_folder
from scripts.chat import CHAT_STAGES, STAGE, stage_of
from trainer.checkpoint import read_json, resolve_weights, write_json
from trainer.options import new_parser

MINIMIND_SUFFIX = ".pth"
PROBE_ROWS, PROBE_TOKENS = 2, 128
# Of the largest logit: float32's rounding through some dozen layers stays below it, a wrong tensor is far above.
BOUND = 1e-4


def options() -> argparse.ArgumentParser:
    """What to export, and as what."""
    parser = new_parser(__doc__.splitlines()[0])
    parser.add_argument("source", help="a run's, checkpoint's, transformers or adapter folder, or a MiniMind .pth")
    parser.add_argument("target", help="a folder that does not exist yet, or MiniMind's file: a name ending in .pth")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default=None,
        help="of the weights (none given: float32; MiniMind's files are float16)",
    )
    # No value, unlike the other switches: bare before SOURCE, it would take that for one.
    parser.add_argument("--merge_lora", action="store_true", help="add an adapter's updates to the weights of its base")
    parser.add_argument("--base", default=None, help="base of the adapter, if not where the adapter says")
    parser.add_argument("--tokenizer_path", default=None, help="folder with tokenizer.json, if not the source's own")
    parser.add_argument(
        "--num_attention_heads", type=int, default=None, help="of a MiniMind .pth without QK-norm (none given: 8)"
    )
    return parser


def export(args: argparse.Namespace) -> str:
    """Write what the options name, whole and verified or not at all; return a sentence and how to talk to it.

    Raises ValueError or OSError.
    """
    target = Path(args.target)
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise ValueError(f"{target} is there already; give another name, nothing is overwritten")
    source = resolve_weights(args.source, "SOURCE")
    model = opened(source, args.merge_lora, args.base, args.num_attention_heads).eval()
    before = logits(model)
    write = minimind_writer(args) if target.suffix == MINIMIND_SUFFIX else folder_writer(args, source, model)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    try:
        dtype, read_back = write(temporary, model)
        round_weights(model, dtype)
        wanted = logits(model)
        difference = (read_back() - wanted).abs().max().item()
        bound = BOUND * wanted.abs().max().item()
        if not difference <= bound:  # nor if it is not a number
            raise ValueError(f"{target}: read back, its logits differ by {difference:.3g}, above {bound:.3g}; removed")
        temporary.rename(target)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        temporary.unlink(missing_ok=True)
    rounding = (before - wanted).abs().max().item()
    size = sum(parameter.numel() for parameter in model.parameters())
    return (
        f"{target}: {size / 1e6:.1f} M parameters in {str(dtype).removeprefix('torch.')} from {source}; read back, its "
        f"logits at {before[..., 0].numel()} positions differ by at most {difference:.3g} (allowed: {bound:.3g})"
        + (f"; the rounding to {str(dtype).removeprefix('torch.')} changed them by {rounding:.3g}" if rounding else "")
        + f"\n{how_to_talk(target, source, args.tokenizer_path)}"
    )


def how_to_talk(target: Path, source: Path, tokenizer_path: str | None) -> str:
    """The command that talks to what was exported."""
    command = ["python", "-m", "scripts.chat", "--load_from", str(target)]
    stage, is_file = stage_of(source), target.suffix == MINIMIND_SUFFIX
    if is_file:
        known = tokenizer_path or (str(source) if source.is_dir() else "FOLDER")
        command += ["--tokenizer_path", known]
    if stage in CHAT_STAGES:
        # MiniMind's file holds tensors alone and cannot tell.
        return f"talk to it: {shlex.join([*command, '--mode', 'chat'] if is_file else command)}"
    if stage is None:
        return f"let it continue text, or with --mode chat answer: {shlex.join(command)}"
    return f"let it continue text: {shlex.join(command)}"


def opened(source: Path, merge: bool, base: str | None, num_attention_heads: int | None) -> GPT:
    """The plain model to export, in float32. Raises ValueError where the source and the options do not go together."""
    if not is_adapter(source):
        if merge or base:
            raise ValueError(f"{source} is no adapter folder (or it is merged already); leave out --merge_lora, --base")
        return load_model(source, num_attention_heads)
    if not merge:
        raise ValueError(f"{source} is an adapter; --merge_lora adds it to its base and writes a plain model")
    model = load_base(source, resolve_weights(base, "--base") if base else None, num_attention_heads)
    load_adapter(model, source)
    merge_lora(model)
    return model


# Writes a model at a place; returns the dtype there and what reads it back to logits of the probe.
Writer = Callable[[Path, GPT], tuple[torch.dtype, Callable[[], Tensor]]]


def folder_writer(args: argparse.Namespace, source: Path, model: GPT) -> Writer:
    """For a transformers folder. Raises ValueError where the tokenizer is missing or not the model's."""
    tokenizer = load_tokenizer(tokenizer_folder(args.tokenizer_path, source))
    require_matching(tokenizer, model.config.vocab_size, source if source.is_dir() else None)
    dtype = getattr(torch, args.dtype or "float32")

    def write(folder: Path, model: GPT) -> tuple[torch.dtype, Callable[[], Tensor]]:
        write_folder(folder, model, tokenizer, dtype, stage_of(source))
        return dtype, lambda: transformers_logits(folder, model)

    return write


def minimind_writer(args: argparse.Namespace) -> Writer:
    """For MiniMind's file."""
    if args.dtype not in (None, "float16"):
        raise ValueError(f"--dtype {args.dtype}: MiniMind's files are float16; leave it out, or export a folder")

    def write(path: Path, model: GPT) -> tuple[torch.dtype, Callable[[], Tensor]]:
        torch.save(minimind_state(model.config, model.state_dict()), path)
        return torch.float16, lambda: logits(load_model(path, model.config.num_attention_heads).eval())

    return write


def write_folder(folder: Path, model: GPT, tokenizer: TextTokenizer, dtype: torch.dtype, stage: str | None) -> None:
    """Write a model and its tokenizer as transformers does, and the stage that it was trained in last.

    Raises ValueError for numbers that dtype cannot hold.
    """
    state = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    too_large = [name for name, tensor in state.items() if not tensor.isfinite().all()]
    if too_large:
        raise ValueError(f"{len(too_large)} tensors do not fit into {dtype} (as {too_large[0]}); use --dtype float32")
    ids = {"bos_id": tokenizer.bos_id, "eos_id": tokenizer.eos_id, "pad_id": tokenizer.pad_id}
    save_model_folder(folder, model.config, state, **ids)
    if stage is not None:
        # Without a manifest nothing else would tell scripts.chat whether it answers.
        write_json(folder / CONFIG_FILE, read_json(folder / CONFIG_FILE) | {STAGE: stage})
    tokenizer.save(folder)
    write_json(folder / "generation_config.json", {name.replace("_", "_token_"): token for name, token in ids.items()})


@torch.no_grad()
def round_weights(model: GPT, dtype: torch.dtype) -> None:
    """Give every weight, in place, the value that it has in dtype."""
    for parameter in model.parameters():
        parameter.copy_(parameter.to(dtype))


def probe(model: GPT) -> Tensor:
    """Ids (PROBE_ROWS, up to PROBE_TOKENS) that are always the same."""
    length = min(PROBE_TOKENS, model.config.max_position_embeddings)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.config.vocab_size, (PROBE_ROWS, length), generator=generator)


@torch.no_grad()
def logits(model: GPT) -> Tensor:
    """What the model makes of the probe, at every position: (PROBE_ROWS, tokens, vocab)."""
    return model(probe(model))


@torch.no_grad()
def transformers_logits(folder: Path, model: GPT) -> Tensor:
    """What transformers makes of the probe with a folder's weights, in float32."""
    import transformers  # takes seconds

    transformers.utils.logging.disable_progress_bar()
    foreign, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    if problems := [f"{len(names)} {kind}" for kind, names in info.items() if names]:
        raise ValueError(f"transformers does not read all of {folder}: {', '.join(problems)}; removed")
    return foreign.eval()(probe(model)).logits


def main() -> None:
    """Export what the command line names."""
    parser = options()
    args = parser.parse_args()
    try:
        print(export(args))
    except (ValueError, OSError) as problem:
        parser.error(str(problem))


if __name__ == "__main__":
    main()
