"""Text after text: tokens drawn one at a time with the keys and values of those before kept, until a row ends."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from model.cache import KVCache
from model.gpt import GPT

# Why a row ended.
STOP, LENGTH, CONTEXT, LOOP = "stop", "length", "context", "loop"

# An answer goes round in circles when its last LOOP_TOKENS or more are one stretch of at most LOOP_PERIOD tokens,
# LOOP_REPEATS times or more. A list, a poem or a table of zeros repeats less; a small model that is stuck, for ever.
LOOP_TOKENS, LOOP_PERIOD, LOOP_REPEATS = 48, 64, 4

# The segment of the tokens that only fill a row up on the left.
_PADDING = -1


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen and when a row ends.

    temperature 0 takes the likeliest token. In order: tokens that stand in the answer already have their logit divided
    (above 0) or multiplied (below) by repetition_penalty; temperature divides; the top_k likeliest stay (0: all); of
    these the fewest whose probability reaches top_p. The prompt is not penalised: it holds the ends of earlier turns,
    and an answer must be able to end. seed: row i of a batch draws with seed + i; None: another text every time.
    stop_ids end a row and are no part of it. loop_guard ends a row that repeats itself, see LOOP_TOKENS.
    """

    max_new_tokens: int = 512
    temperature: float = 0.7
    top_p: float = 0.9
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_ids: frozenset[int] = frozenset()
    loop_guard: bool = False

    def __post_init__(self) -> None:
        wrong = {
            "max_new_tokens": (self.max_new_tokens >= 1, "1 or more"),
            # Numbers beyond these are zero or infinite to float32's logits, and the probabilities are none.
            "temperature": (self.temperature == 0 or 1e-6 <= self.temperature < float("inf"), "0, or 1e-6 or more"),
            "top_p": (1e-6 <= self.top_p <= 1, "1e-6 to 1"),
            "top_k": (self.top_k >= 0, "0 (all) or more"),
            "repetition_penalty": (1e-9 <= self.repetition_penalty <= 1e9, "1e-9 to 1e9 (1: none)"),
            # Rows and turns count up from it, and torch takes seeds below 2^64.
            "seed": (self.seed is None or 0 <= self.seed < 2**63, "0 or more and below 2^63"),
        }
        problems = [f"{name} is {getattr(self, name)}; use {use}" for name, (fits, use) in wrong.items() if not fits]
        if problems:
            raise ValueError("; ".join(problems))


@dataclass
class Answer:
    """A prompt, the ids written after it so far, and why it ended (STOP, LENGTH, CONTEXT or LOOP; None: it has not)."""

    prompt: Sequence[int]
    ids: list[int] = field(default_factory=list)
    ending: str | None = None


def stream(model: GPT, answer: Answer, how: Sampling, cache: KVCache | None = None) -> Iterator[int]:
    """Yield the ids after answer.prompt as they are chosen; answer.ids and answer.ending grow alongside.

    cache: kept from one call to the next, it saves the pass over whatever the prompts share at their beginning, as
    the turns of a conversation do. Raises ValueError for an empty prompt, one that fills max_position_embeddings, a
    model in training mode, and logits that are not finite.
    """
    for _ in _steps(model, [answer], how, cache or KVCache(len(model.model.layers))):
        yield answer.ids[-1]


def generate(model: GPT, prompts: Sequence[Sequence[int]], how: Sampling) -> list[Answer]:
    """Continue prompts of any lengths side by side; each answer is what `stream` gives for it alone."""
    answers = [Answer(prompt) for prompt in prompts]
    for _ in _steps(model, answers, how, KVCache(len(model.model.layers))):
        pass
    return answers


def _steps(model: GPT, answers: list[Answer], how: Sampling, cache: KVCache) -> Iterator[None]:
    """One more token for every row that has not ended, and for at least one; then yield."""
    limit = model.config.max_position_embeddings
    _check(model, answers, limit)
    device = model.lm_head.weight.device
    choosers = [_chooser(how, row) for row in range(len(answers))]
    ids, positions, segments = (part.to(device) for part in _left_padded([answer.prompt for answer in answers]))
    if len(answers) == 1:
        # A row without padding needs no segments, and attention no mask.
        positions = segments = None
        ids = ids[:, _reusable(cache, answers[0].prompt) :]
    while True:
        logits = _next_logits(model, ids, positions, segments, cache).float().cpu()
        written = False
        for answer, row, choose in zip(answers, logits, choosers, strict=True):
            if answer.ending is None:
                written |= _write(answer, choose(row, answer.ids), how, limit)
        if written:
            yield
        if all(answer.ending for answer in answers):
            return
        # A row that has ended goes on being fed, with anything: the others do not see it.
        ids = torch.tensor([answer.ids[-1:] or [0] for answer in answers], device=device)
        if segments is not None:
            positions, segments = positions[:, -1:] + 1, segments[:, -1:]


def _check(model: GPT, answers: list[Answer], limit: int) -> None:
    if model.training:
        raise ValueError("the model is in training mode, where dropout changes its answers; call model.eval() first")
    for number, answer in enumerate(answers):
        if not 0 < len(answer.prompt) < limit:
            raise ValueError(
                f"prompt {number} has {len(answer.prompt)} tokens; the model takes 1 to {limit - 1}, as one of its "
                f"{limit} positions is for the answer"
            )


def _left_padded(prompts: list[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, positions and segments (batch, longest): every prompt ends in the last column."""
    longest = max(map(len, prompts))
    ids, positions, segments = (torch.zeros(len(prompts), longest, dtype=torch.int64) for _ in range(3))
    for row, prompt in enumerate(prompts):
        pads = longest - len(prompt)
        ids[row, pads:] = torch.tensor(prompt)
        positions[row, pads:] = torch.arange(len(prompt))
        segments[row, :pads] = _PADDING
    return ids, positions, segments


def _reusable(cache: KVCache, prompt: Sequence[int]) -> int:
    """Cut the cache down to what it shares with the prompt's beginning; how many tokens that is.

    At least the last token is left to be fed: its logits are wanted.
    """
    known = [] if cache.ids is None else cache.ids[0].tolist()
    most = min(len(known), len(prompt) - 1)
    shared = next((at for at in range(most) if known[at] != prompt[at]), most)
    cache.truncate(shared)
    return cache.length


# Not around the generator: between two yields its caller would run without gradients.
@torch.no_grad()
def _next_logits(model: GPT, ids: Tensor, positions: Tensor | None, segments: Tensor | None, cache: KVCache) -> Tensor:
    # The head for the last column only: with a large vocabulary, a prompt's logits are gigabytes.
    return model.lm_head(model.hidden(ids, positions, segments, cache)[:, -1])


def _write(answer: Answer, token: int, how: Sampling, limit: int) -> bool:
    """Add the token to the answer, unless it is its end; set the ending. True when something was added."""
    if token in how.stop_ids:
        answer.ending = STOP
        return False
    answer.ids.append(token)
    if how.loop_guard and is_loop(answer.ids):
        answer.ending = LOOP
    elif len(answer.prompt) + len(answer.ids) >= limit:
        answer.ending = CONTEXT
    elif len(answer.ids) >= how.max_new_tokens:
        answer.ending = LENGTH
    return True


def is_loop(ids: Sequence[int]) -> bool:
    """Whether the ids end in one stretch of tokens over and over; the measure is at LOOP_TOKENS."""
    for period in range(1, LOOP_PERIOD + 1):
        length = max(LOOP_TOKENS, LOOP_REPEATS * period)
        if length > len(ids):
            return False
        if ids[-1] == ids[-1 - period] and ids[-length + period :] == ids[-length:-period]:
            return True
    return False


def _chooser(how: Sampling, row: int) -> Callable[[Tensor, list[int]], int]:
    """A function from a row's logits (vocab,) and the ids it has written to its next id."""
    # On the CPU whatever the model is on: the same draws everywhere.
    generator = torch.Generator()
    if how.seed is None:
        generator.seed()
    else:
        generator.manual_seed(how.seed + row)

    def choose(logits: Tensor, written: list[int]) -> int:
        if not logits.isfinite().all():
            raise ValueError("the model's logits are not finite; its weights are damaged, or its dtype overflows")
        logits = _penalised(logits, written, how.repetition_penalty)
        if how.temperature == 0:
            return int(logits.argmax())
        return int(torch.multinomial(next_probabilities(logits, how), 1, generator=generator))

    return choose


def _penalised(logits: Tensor, written: list[int], penalty: float) -> Tensor:
    if penalty == 1 or not written:
        return logits
    seen = torch.tensor(sorted(set(written)))
    picked = logits[seen]
    return logits.index_copy(0, seen, torch.where(picked > 0, picked / penalty, picked * penalty))


def next_probabilities(logits: Tensor, how: Sampling) -> Tensor:
    """What the next token is drawn from: probabilities (vocab,) after temperature, top_k and top_p, summing to 1."""
    # The highest is taken off first: a temperature near 0 would carry the others beyond float32.
    logits = (logits - logits.max()) / how.temperature
    if 0 < how.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(how.top_k).values[-1], float("-inf"))
    probabilities = logits.softmax(dim=-1)
    if how.top_p < 1:
        ordered, order = probabilities.sort(descending=True, stable=True)
        # A token goes when those before it reach top_p by themselves; so the likeliest stays always.
        excess = ordered.cumsum(0) - ordered >= how.top_p
        probabilities = probabilities.index_fill(0, order[excess], 0.0)
        probabilities = probabilities / probabilities.sum()
    return probabilities
