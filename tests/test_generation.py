"""Cache, sampling and packed rows: equal to the plain forward pass, to transformers, to their rules."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from model.cache import KVCache
from model.generation import (
    CONTEXT,
    LENGTH,
    LOOP,
    LOOP_TOKENS,
    STOP,
    Answer,
    Sampling,
    generate,
    is_loop,
    next_probabilities,
    stream,
)
from model.gpt import GPT, GPTConfig
from model.loss import IGNORE_INDEX
from model.weights import save_model_folder
from tests.conftest import lively

TINY = dict(
    vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, rope_theta=1e4
)
GREEDY = Sampling(max_new_tokens=60, temperature=0)


def tiny(**changes) -> GPT:
    return lively(GPT(GPTConfig(**TINY, **changes))).eval()


@pytest.mark.parametrize(
    "changes",
    [{"temperature": 1e-6}, {"temperature": 1e300}, {"top_p": 1e-6}, {"repetition_penalty": 1e-9},
     {"repetition_penalty": 1e9}],
)  # fmt: skip
def test_the_extremes_that_are_allowed_give_probabilities(changes):
    for answer in generate(tiny(), [[1, 2, 3]], Sampling(max_new_tokens=20, **changes)):
        assert len(answer.ids) == 20


def random_ids(count: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def without_cache(model: GPT, prompt: list[int], count: int = 60) -> list[int]:
    """The likeliest tokens, each from a forward pass over everything before it."""
    ids = list(prompt)
    while len(ids) < len(prompt) + count:
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def cached(model: GPT, ids: list[int]) -> KVCache:
    cache = KVCache(len(model.model.layers))
    with torch.no_grad():
        model.hidden(torch.tensor([ids]), cache=cache)
    return cache


def packed(lengths: list[int], padding: int) -> dict[str, Tensor]:
    """One row of conversations of these lengths, each with targets on its second half, and padding behind."""
    row = {"input_ids": [], "targets": [], "positions": [], "segments": []}
    for number, length in enumerate(lengths):
        row["input_ids"] += random_ids(length, seed=number)
        row["targets"] += [IGNORE_INDEX] * (length // 2) + random_ids(length - length // 2, seed=100 + number)
        row["positions"] += range(length)
        row["segments"] += [number] * length
    row["input_ids"] += [0] * padding
    row["targets"] += [IGNORE_INDEX] * padding
    row["positions"] += range(padding)
    row["segments"] += [len(lengths)] * padding
    return {name: torch.tensor([values]) for name, values in row.items()}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_packed_rows_give_the_loss_and_gradients_of_their_conversations_alone(qk_norm, checkpointing):
    model = tiny(qk_norm=qk_norm)
    model.activation_checkpointing = checkpointing
    rows = [packed([17, 1, 30, 8], padding=8), packed([2, 60], padding=2)]
    alone = torch.zeros(())
    for row in rows:
        for number in row["segments"].unique():
            here = row["segments"] == number
            alone = alone + model(row["input_ids"][here][None], row["targets"][here][None])
    wanted = torch.autograd.grad(alone, list(model.parameters()))
    together = model(**{name: torch.cat([row[name] for row in rows]) for name in rows[0]})
    assert together.item() == pytest.approx(alone.item(), rel=1e-6)
    for weight, gradient in zip(torch.autograd.grad(together, list(model.parameters())), wanted, strict=True):
        assert (weight - gradient).abs().max() <= 1e-5 * gradient.abs().max()


@pytest.mark.parametrize("qk_norm", [False, True])
def test_cached_logits_equal_transformers_at_every_position(tmp_path: Path, qk_norm):
    transformers = pytest.importorskip("transformers")
    model = tiny(qk_norm=qk_norm, num_key_value_heads=2)
    save_model_folder(tmp_path, model.config, model.state_dict())
    foreign = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.tensor([random_ids(150), random_ids(150, seed=2)])
    cache = KVCache(2)
    # Two chunks and then token by token, across the places where the cache makes more room.
    pieces = ids.split([40, 23, *[1] * 87], dim=1)
    with torch.no_grad():
        got = torch.cat([model.lm_head(model.hidden(piece, cache=cache)) for piece in pieces], dim=1)
        wanted = foreign(ids).logits
    assert wanted.abs().max() > 3
    assert ((got - wanted).abs().amax(dim=(0, 2)) <= 1e-5 * wanted.abs().max()).all()


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_greedy_output_is_the_same_with_and_without_cache(kv_heads):
    model = tiny(num_key_value_heads=kv_heads)
    prompt = random_ids(23)
    wanted = without_cache(model, prompt)
    answer = Answer(prompt)
    assert list(stream(model, answer, GREEDY)) == wanted == answer.ids
    assert answer.ending == LENGTH
    # The prompt in two chunks.
    assert list(stream(model, Answer(prompt), GREEDY, cached(model, prompt[:9]))) == wanted


def test_a_second_turn_on_the_first_ones_cache_equals_a_fresh_start():
    model, cache = tiny(), KVCache(2)
    first = random_ids(12)
    answer = list(stream(model, Answer(first), GREEDY, cache))
    assert cache.length == 12 + 59  # the last token was never fed
    second = [*first, *answer, *random_ids(7, seed=5)]
    fed = []
    model.model.embed_tokens.register_forward_pre_hook(lambda _, inputs: fed.append(inputs[0].shape[1]))
    assert list(stream(model, Answer(second), GREEDY, cache)) == without_cache(model, second)
    assert fed[0] == 1 + 7


def test_a_cache_of_another_text_is_used_as_far_as_the_texts_agree():
    model, prompt = tiny(), random_ids(20)
    other = [*prompt[:11], (prompt[11] + 1) % 97, *random_ids(30, seed=3)]
    assert list(stream(model, Answer(prompt), GREEDY, cached(model, other))) == without_cache(model, prompt)
    assert list(stream(model, Answer(prompt), GREEDY, cached(model, prompt))) == without_cache(model, prompt)


def test_left_padded_prompts_are_continued_as_each_alone():
    model = tiny(num_key_value_heads=2)
    prompts = [random_ids(count, seed=count) for count in (31, 1, 12)]
    for answer, prompt in zip(generate(model, prompts, GREEDY), prompts, strict=True):
        assert answer.ids == without_cache(model, prompt)


def test_rows_of_a_batch_end_each_by_itself():
    model, prompts = tiny(), [random_ids(5, seed=1), random_ids(9, seed=2)]
    full = [without_cache(model, prompt) for prompt in prompts]
    stop = next(token for token in full[0] if token not in full[1])
    first, second = generate(model, prompts, Sampling(max_new_tokens=60, temperature=0, stop_ids=frozenset({stop})))
    assert (first.ids, first.ending) == (full[0][: full[0].index(stop)], STOP)
    assert (second.ids, second.ending) == (full[1], LENGTH)


def test_a_stop_token_at_once_gives_an_empty_answer():
    model, prompt = tiny(), random_ids(5)
    answer = Answer(prompt)
    stop = frozenset(without_cache(model, prompt, 1))
    assert list(stream(model, answer, Sampling(temperature=0, stop_ids=stop))) == []
    assert answer.ending == STOP


def test_the_context_limit_ends_an_answer_and_refuses_a_prompt_that_fills_it():
    model = tiny(max_position_embeddings=24)
    short, long = generate(model, [random_ids(20), random_ids(23)], GREEDY)
    assert (len(short.ids), short.ending, len(long.ids), long.ending) == (4, CONTEXT, 1, CONTEXT)
    with pytest.raises(ValueError, match=r"24 tokens.*1 to 23"):
        generate(model, [random_ids(24)], GREEDY)
    with pytest.raises(ValueError, match="0 tokens"):
        generate(model, [[]], GREEDY)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0.7, 0, 1.0), (1.0, 5, 1.0), (1.3, 0, 0.6), (0.9, 20, 0.8), (1.0, 1, 0.01)]
)
def test_probabilities_are_those_of_transformers(temperature, top_k, top_p):
    transformers = pytest.importorskip("transformers")
    logits = 3 * torch.randn(97, generator=torch.Generator().manual_seed(4))
    wanted = transformers.TemperatureLogitsWarper(temperature)(None, logits[None])
    if top_k:
        wanted = transformers.TopKLogitsWarper(top_k)(None, wanted)
    wanted = transformers.TopPLogitsWarper(top_p)(None, wanted).softmax(-1)[0]
    got = next_probabilities(logits, Sampling(temperature=temperature, top_k=top_k, top_p=top_p))
    assert torch.equal(got > 0, wanted > 0)
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)


def test_a_seed_repeats_a_text_and_a_batch_draws_row_by_row():
    model, prompt = tiny(), random_ids(6)

    def drawn(seed: int) -> list[int]:
        return list(stream(model, Answer(prompt), Sampling(max_new_tokens=30, temperature=1.5, top_p=1.0, seed=seed)))

    assert drawn(3) == drawn(3) != drawn(4)
    how = Sampling(max_new_tokens=30, temperature=1.5, top_p=1.0, seed=3)
    assert [answer.ids for answer in generate(model, [prompt, prompt], how)] == [drawn(3), drawn(4)]


def test_the_repetition_penalty_is_on_the_answers_own_tokens_only():
    model, prompt = tiny(), list(range(97))
    how = Sampling(max_new_tokens=40, temperature=0, repetition_penalty=1e9)
    answer = list(stream(model, Answer(prompt), how))
    assert answer[0] == without_cache(model, prompt, 1)[0]
    assert len(set(answer)) == 40


def test_the_loop_guard_ends_what_goes_round_in_circles():
    model = tiny()
    with torch.no_grad():
        # Without layers that see more than the last token, the likeliest next one is a function of it: a cycle.
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    guarded = Sampling(max_new_tokens=500, temperature=0, loop_guard=True)
    (answer,) = generate(model, [[5]], guarded)
    assert answer.ending == LOOP
    assert LOOP_TOKENS <= len(answer.ids) < 500
    (free,) = generate(model, [[5]], Sampling(max_new_tokens=500, temperature=0))
    assert (free.ending, free.ids[: len(answer.ids)]) == (LENGTH, answer.ids)


def test_only_long_exact_repetition_is_a_loop():
    assert is_loop([1, 2, 3] + [7] * 48)
    assert is_loop([*range(64)] * 4)
    assert is_loop([9, 9, *([1, 2, 3, 4, 5] * 10)])
    assert not is_loop([7] * 47)
    assert not is_loop([*range(64)] * 3 + [*range(1, 64)])
    assert not is_loop([*range(65)] * 4)
    # A numbered list: the same words around another number every time.
    assert not is_loop([token for number in range(30) for token in (1, 2, 3, 40 + number, 4, 5)])


def test_gradients_are_off_in_the_model_and_on_again_between_two_tokens():
    model, inside = tiny(), []
    model.model.norm.register_forward_hook(lambda *_: inside.append(torch.is_grad_enabled()))
    for _ in stream(model, Answer([1, 2]), Sampling(max_new_tokens=3)):
        assert torch.is_grad_enabled()
    assert inside == [False] * 3


def test_what_cannot_give_an_answer_is_refused():
    model = tiny()
    with pytest.raises(ValueError, match=r"model.eval\(\)"):
        generate(model.train(), [[1]], GREEDY)
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        generate(model.eval(), [[1]], GREEDY)
    with pytest.raises(ValueError, match=r"temperature is -1.*top_p is 0.*top_k is -2"):
        Sampling(temperature=-1, top_p=0, top_k=-2)
    cache = cached(model, [1, 2])
    with pytest.raises(ValueError, match="segments"):
        model.hidden(torch.tensor([[1]]), segments=torch.zeros(1, 1, dtype=torch.int64), cache=cache)
