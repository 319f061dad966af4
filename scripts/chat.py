"""Talk to a trained model: `python -m scripts.chat` takes the newest of out/lora, out/sft and out/pretrain.

The runs of the quick start, in out/quickstart, count too. A model that was trained on plain text only continues each
line by itself. Lines may come from a pipe; answers go to standard output, everything else to standard error. /reset
begins a new conversation, /exit leaves, and "/tool RESULT" gives what a tool that the model has called returned.
"""

import argparse
import contextlib
import io
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from dataset.chat import encode, prompt_ids
from dataset.conversations import SYSTEM, TOOL, USER, Conversation, Turn, conversation_of
from dataset.records import BadRecord
from dataset.tokenizer import TextTokenizer, load_tokenizer, require_matching, tokenizer_folder
from model.cache import KVCache
from model.generation import CONTEXT, LENGTH, LOOP, Answer, Sampling, stream
from model.gpt import GPT
from model.lora import is_adapter, open_model
from model.weights import CONFIG_FILE
from trainer.checkpoint import MANIFEST, newest_valid, read_json, resolve_weights, step_folders
from trainer.ddp import choose_device
from trainer.options import add_switch, new_parser

RUNS = ("out/lora", "out/sft", "out/pretrain", "out/quickstart/lora", "out/quickstart/sft", "out/quickstart/pretrain")
LORA = "lora"
CHAT_STAGES = ("sft", LORA)
STAGE = "training_stage"  # a field of config.json that transformers keeps and ignores
TOOL_COMMAND = "/tool "
UNKNOWN_COMMAND = re.compile(r"/[A-Za-z]+(?!\S)")  # where it is none of the others; /usr/bin is text
BROKEN = "\ufffd"  # what undecodable bytes become


def options() -> argparse.ArgumentParser:
    """The options; the sampling defaults are Sampling's."""
    parser = new_parser(__doc__.splitlines()[0])
    parser.add_argument(
        "--load_from",
        default=None,
        help="a run's, a checkpoint's, a LoRA adapter's or any transformers Llama or Qwen3 folder, or a MiniMind .pth",
    )
    parser.add_argument("--tokenizer_path", default=None, help="folder with tokenizer.json, if not the model's own")
    parser.add_argument(
        "--num_attention_heads", type=int, default=None, help="of a MiniMind .pth without QK-norm (none given: 8)"
    )
    parser.add_argument(
        "--mode",
        choices=("chat", "continue"),
        default=None,
        help="chat in turns, or continue plain text (none given: as the folder was trained)",
    )
    parser.add_argument("--prompt", default=None, help="answer this alone and leave")
    parser.add_argument("--system", default=None, help="text of a system turn before the first")
    parser.add_argument("--tools", default=None, help="JSON file with a list of tools that the model is told of")
    add_switch(parser, "--open_thinking", default=False, help="begin every answer inside a think block")
    add_switch(parser, "--empty_think", default=False, help="begin every answer after an empty think block")
    parser.add_argument("--max_new_tokens", type=int, default=Sampling.max_new_tokens, help="tokens of an answer")
    parser.add_argument(
        "--temperature", type=float, default=Sampling.temperature, help="0: always the likeliest token; 1: as trained"
    )
    parser.add_argument("--top_p", type=float, default=Sampling.top_p, help="draw from the likeliest up to this sum")
    parser.add_argument("--top_k", type=int, default=Sampling.top_k, help="draw from this many tokens; 0: from all")
    parser.add_argument(
        "--repetition_penalty",
        type=float,
        default=Sampling.repetition_penalty,
        help="above 1 makes tokens that stand in the answer already less likely",
    )
    parser.add_argument("--seed", type=int, default=None, help="the same answers every time; none given: others")
    add_switch(parser, "--loop_guard", default=True, help="end an answer that repeats the same words for ever")
    parser.add_argument("--device", default=None, help="cuda, cpu or mps (found by itself)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of the weights")
    return parser


class Session:
    """A conversation: the ids of its turns so far, and the cache of those that the model has seen.

    An answer stays in it as the ids that were generated: decoding and encoding may give others, and no cache hit.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: TextTokenizer,
        how: Sampling,
        *,
        chats: bool,
        opening: Conversation,
        header: list[int],
    ) -> None:
        """Begin with `opening`: a system turn, or tools, or neither. header: ids that every answer follows."""
        self.model, self.tokenizer, self.how, self.chats = model, tokenizer, how, chats
        self.opening, self.header = opening, header
        self.ending: str | None = None  # of the last answer
        self.turns = 0
        self.reset()

    def reset(self) -> None:
        """Forget all turns but the opening."""
        self.cache = KVCache(len(self.model.model.layers))
        [blocks] = encode([self.opening], self.tokenizer)
        self.ids = [token for block in blocks for token in block.ids] if self.chats else []

    def reply(self, text: str, role: str = USER) -> Iterator[str]:
        """Yield the answer piece by piece; left early, the turn ends there. ContextFull leaves all as it was.

        role: who says `text`, USER or TOOL.
        """
        if self.chats:
            prompt = self.ids + turn_ids(self.tokenizer, role, text) + self.header
        else:
            prompt = [self.tokenizer.bos_id, *self.tokenizer.encode_texts([text])[0]]
        limit = self.model.config.max_position_embeddings
        if len(prompt) >= limit:
            raise ContextFull(
                f"the context is full: {len(prompt)} tokens with this message, and the model takes {limit}; /reset "
                "begins a new conversation"
            )
        # Another seed for every turn: the same one would make the same question's answers alike.
        how = self.how if self.how.seed is None else replace(self.how, seed=self.how.seed + self.turns)
        answer, pieces = Answer(prompt), TextPieces(self.tokenizer.decode)
        try:
            for token in stream(self.model, answer, how, self.cache):
                if piece := pieces.add(token):
                    yield piece
            if piece := pieces.rest():
                yield piece
        finally:
            self.turns += 1
            self.ending = answer.ending
            if self.chats:
                self.ids = prompt + answer.ids + end_ids(self.tokenizer)


class ContextFull(ValueError):
    """A message that does not fit behind what was said before."""


def turn_ids(tokenizer: TextTokenizer, role: str, content: str) -> list[int]:
    """The ids of a whole turn; a marker within the content is spelled out."""
    [[block]] = encode([Conversation((Turn(role, content),))], tokenizer)
    return block.ids


def header_ids(tokenizer: TextTokenizer, open_thinking: bool = False, empty_think: bool = False) -> list[int]:
    """What an answer follows. Raises ValueError where it should begin inside a think block and after one."""
    if open_thinking and empty_think:
        raise ValueError("--open_thinking and --empty_think exclude each other; give one of them")
    return prompt_ids(Conversation((), empty_think=empty_think), tokenizer, open_thinking)


def opening_of(system: str | None, tools_file: str | None) -> Conversation:
    """What is there before the first question. Raises ValueError or OSError for a file that holds no tools."""
    tools = ()
    if tools_file:
        if not Path(tools_file).exists():
            raise ValueError(
                f"--tools {tools_file}: no such file (looked from {Path.cwd()}); give a JSON list of tool descriptions"
            )
        # Read as a training record's, so that the model is told of them as it was in training.
        turns = [{"role": role, "content": "-"} for role in ("user", "assistant")]
        try:
            tools = conversation_of({"messages": turns, "tools": read_json(Path(tools_file))}).tools
        except BadRecord as problem:
            raise ValueError(f"--tools {tools_file}: {problem}; give a JSON list of tool descriptions") from None
        if not tools:
            raise ValueError(f"--tools {tools_file}: no tool in it; give a JSON list of tool descriptions")
    return Conversation((Turn(SYSTEM, system),) if system else (), tools)


def end_ids(tokenizer: TextTokenizer) -> list[int]:
    """What follows the content of a turn."""
    return [tokenizer.eos_id, *tokenizer.encode_texts(["\n"])[0]]


class TextPieces:
    """Ids to text as they come. A character whose bytes are not all there is held back."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        # Decoded behind the piece before: some tokenizers drop the blank at a text's beginning.
        self._before: list[int] = []
        self._waiting: list[int] = []

    def add(self, token: int) -> str:
        """Return the text that this token completes, often of it alone, or ""."""
        self._waiting.append(token)
        return "" if self._text().endswith(BROKEN) else self.rest()

    def rest(self) -> str:
        """Return what is held back, bytes that make no character as U+FFFD."""
        text = self._text()
        self._before, self._waiting = self._waiting or self._before, []
        return text

    def _text(self) -> str:
        return self._decode(self._before + self._waiting)[len(self._decode(self._before)) :]


def model_folder(load_from: str | None) -> Path:
    """What to load: a run's newest valid step, the folder or file itself, or by default the last run's of RUNS."""
    if load_from is None:
        runs = [run for run in map(Path, RUNS) if step_folders(run)]
        for run in sorted(runs, key=lambda run: step_folders(run)[-1].stat().st_mtime, reverse=True):
            newest = newest_valid(run, owner=False)
            if newest and (is_adapter(newest) or (newest / CONFIG_FILE).is_file()):
                return newest
        raise ValueError(
            f"no model in any of {', '.join(RUNS)} (looked from {Path.cwd()}); train one with bash "
            "scripts/quickstart.sh, or give --load_from FOLDER"
        )
    return resolve_weights(load_from, "--load_from")


def stage_of(folder: Path) -> str | None:
    """The stage that a folder's weights were trained in last: pretrain, sft or lora; None where it does not tell.

    A checkpoint's manifest tells, or STAGE in the config.json of an export.
    """
    if is_adapter(folder):
        return LORA
    for name, keys in ((MANIFEST, ("fingerprint", "stage")), (CONFIG_FILE, (STAGE,))):
        try:
            found = json.loads((folder / name).read_text(encoding="utf-8"))
            for key in keys:
                found = found[key]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
        if isinstance(found, str):
            return found
    return None


def open_session(args: argparse.Namespace) -> Session:
    """Load what the options name; says on standard error what that is. Raises ValueError or OSError."""
    folder = model_folder(args.load_from)
    tokenizer = load_tokenizer(tokenizer_folder(args.tokenizer_path, folder))
    names = ("max_new_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "seed", "loop_guard")
    # None of the three belongs into an answer: a model that writes one has ended it or begins another turn.
    stop_ids = frozenset((tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id))
    how = Sampling(stop_ids=stop_ids, **{name: getattr(args, name) for name in names})
    device = choose_device(args.device, 0)
    opening, header = opening_of(args.system, args.tools), header_ids(tokenizer, args.open_thinking, args.empty_think)
    model = open_model(folder, args.num_attention_heads).eval()
    require_matching(tokenizer, model.config.vocab_size, folder if folder.is_dir() else None)
    try:
        model.to(device, getattr(torch, args.dtype))
    except RuntimeError as problem:
        raise ValueError(f"--device {device}: {problem}") from problem
    chats = stage_of(folder) in CHAT_STAGES if args.mode is None else args.mode == "chat"
    size = sum(weight.numel() for weight in model.parameters())
    doing = "chatting" if chats else "continuing plain text (--mode chat for a model that answers)"
    say(f"{folder}: {size / 1e6:.1f} M parameters, {doing}; /reset begins anew, /exit leaves")
    return Session(model, tokenizer, how, chats=chats, opening=opening, header=header)


def typed_lines() -> Iterator[str]:
    """Lines of standard input, asked for one by one where somebody sits there."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\r\n") for line in sys.stdin)
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives input() its arrow keys; not everywhere
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return


def talk(session: Session, lines: Iterator[str]) -> None:
    """Answer line after line until they end or one of them is /exit; see the module for the commands."""
    for line in lines:
        command = line.strip()
        if command == "/exit":
            return
        if command == "/reset":
            session.reset()
            say("a new conversation")
        elif (name := UNKNOWN_COMMAND.match(line)) and not command.startswith(TOOL_COMMAND):
            say(f"unknown command {name[0]}; /reset, /exit, /tool TEXT (begin a line with a blank to send it as text)")
        elif command.startswith(TOOL_COMMAND) and not session.chats:
            say("a model that continues plain text takes no results of tools; --mode chat")
        elif command:
            is_result = command.startswith(TOOL_COMMAND)
            try:
                answer(session, command.removeprefix(TOOL_COMMAND) if is_result else line, TOOL if is_result else USER)
            except ContextFull as problem:
                say(str(problem))


def answer(session: Session, text: str, role: str = USER) -> None:
    """Print one answer as it comes, and why it ended where that is not its own doing."""
    try:
        with contextlib.closing(session.reply(text, role)) as pieces:
            for piece in pieces:
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        print()
        return
    print(flush=True)
    limit = session.model.config.max_position_embeddings
    why = {
        LENGTH: f"cut off after --max_new_tokens {session.how.max_new_tokens}",
        CONTEXT: f"cut off: the context is full, {limit} tokens; /reset begins a new conversation",
        LOOP: "cut off: it repeats itself; --loop_guard 0 would let it go on",
    }
    if session.ending in why:
        say(why[session.ending])


def say(text: str) -> None:
    print(f"[{text}]", file=sys.stderr, flush=True)


def main() -> None:
    """Load, then answer --prompt, or lines until they end."""
    parser = options()
    args = parser.parse_args()
    for stream_, errors in ((sys.stdin, "replace"), (sys.stdout, "replace"), (sys.stderr, "backslashreplace")):
        if stream_ is not None:
            stream_.reconfigure(encoding="utf-8", errors=errors)
    sys.stdin = sys.stdin or io.StringIO()  # None where it is closed, as by <&-
    try:
        session = open_session(args)
        if args.prompt is None:
            talk(session, typed_lines())
        else:
            answer(session, args.prompt)
    except (ValueError, OSError) as problem:
        parser.error(str(problem))
    except KeyboardInterrupt:
        raise SystemExit(130) from None  # as a shell counts it


if __name__ == "__main__":
    main()
