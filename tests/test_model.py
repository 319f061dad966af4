"""model/gpt.py: sizes, numerics against transformers, causality, the chunked loss, dtypes, checkpointing."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model.gpt import GPT, IGNORE_INDEX, GPTConfig, cross_entropy_sum
from tests.conftest import lively

TINY = dict(vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)


def random_ids(rows: int, time: int, vocab: int = 97, seed: int = 1) -> Tensor:
    return torch.randint(0, vocab, (rows, time), generator=torch.Generator().manual_seed(seed))


def random_targets(rows: int, time: int) -> Tensor:
    targets = random_ids(rows, time, seed=2)
    targets[0, ::3] = IGNORE_INDEX
    return targets


def gradients(model: GPT, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


def test_default_model_has_the_26m_parameters():
    assert sum(weight.numel() for weight in GPT(GPTConfig()).parameters()) == 25_829_888


def test_untied_head_adds_one_matrix_and_qk_norm_two_vectors_a_layer():
    def count(**changes) -> int:
        return sum(weight.numel() for weight in GPT(GPTConfig(**TINY, **changes)).parameters())

    assert count(tie_word_embeddings=False) - count() == 97 * 64
    assert count(qk_norm=True) - count() == 2 * 2 * 16


def test_residual_projections_start_smaller_by_the_root_of_the_branch_count():
    layer = GPT(GPTConfig(num_hidden_layers=4)).model.layers[1]
    assert layer.self_attn.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert layer.self_attn.o_proj.weight.std().item() == pytest.approx(0.02 / math.sqrt(8), rel=0.03)
    assert layer.mlp.down_proj.weight.std().item() == pytest.approx(0.02 / math.sqrt(8), rel=0.03)


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(("kv_heads", "tied", "head_dim"), [(1, True, 16), (2, False, 16), (4, True, 32)])
def test_logits_equal_transformers_at_every_position(qk_norm, kv_heads, tied, head_dim):
    transformers = pytest.importorskip("transformers")
    name = "Qwen3" if qk_norm else "Llama"
    foreign_config = getattr(transformers, f"{name}Config")(
        **TINY,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        tie_word_embeddings=tied,
        rms_norm_eps=1e-5,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 50_000.0},
        pad_token_id=0,
    )
    foreign = lively(getattr(transformers, f"{name}ForCausalLM")(foreign_config)).eval()
    config = GPTConfig(
        **TINY,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        tie_word_embeddings=tied,
        rope_theta=50_000.0,
        qk_norm=qk_norm,
    )
    ours = GPT(config).eval()
    ours.load_state_dict(foreign.state_dict())
    # 700 positions: no table of a shorter training length may be hidden anywhere.
    for ids in (random_ids(3, 40), random_ids(1, 700)):
        with torch.no_grad():
            wanted, got = foreign(ids).logits, ours(ids)
        assert wanted.abs().max() > 3
        assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_rows_longer_than_the_position_limit_are_refused():
    model = GPT(GPTConfig(**TINY, max_position_embeddings=32))
    assert model(random_ids(1, 32)).shape == (1, 32, 97)
    with pytest.raises(ValueError, match=r"33 tokens.*max_position_embeddings 32"):
        model(random_ids(1, 33))


@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_changed_token_leaves_earlier_outputs_alone(qk_norm):
    model = lively(GPT(GPTConfig(**TINY, qk_norm=qk_norm)))
    ids, changed_at = random_ids(2, 50), 29
    changed = ids.clone()
    changed[:, changed_at] = (changed[:, changed_at] + 1) % 97
    with torch.no_grad():
        before, after = model(ids), model(changed)
    assert torch.equal(before[:, :changed_at], after[:, :changed_at])
    assert (before[:, changed_at:] != after[:, changed_at:]).any(dim=-1).all()


def test_bfloat16_in_gives_bfloat16_out_and_stays_near_float32_at_far_positions():
    model = lively(GPT(GPTConfig(**TINY, rope_theta=1e4))).bfloat16()
    exact = GPT(model.config)
    exact.load_state_dict(model.state_dict())
    ids = random_ids(1, 1500)
    with torch.no_grad():
        rough, fine = model(ids), exact(ids)
        loss = model(ids, ids)
    assert (rough.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    # Frequencies rounded to bfloat16 would turn position 1400 by whole radians: errors of the logits' own size.
    errors = (rough.float() - fine).pow(2).mean(-1).sqrt()[0]
    assert errors[1400:].mean() < 0.03 * fine.std()
    assert loss.item() == pytest.approx(F.cross_entropy(rough[0].float(), ids[0], reduction="sum").item(), rel=2e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_keeps_a_float32_loss_and_float32_gradients_near_the_exact_ones(dtype):
    model = lively(GPT(GPTConfig(**TINY, qk_norm=True)))
    ids, targets = random_ids(4, 33), random_targets(4, 33)
    exact = model(ids, targets)
    wanted = gradients(model, exact / 100)
    with torch.autocast("cpu", dtype=dtype):
        assert model(ids).dtype == dtype
        loss = model(ids, targets)
    got = gradients(model, loss / 100)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=2e-2)
    for name, gradient in wanted.items():
        assert got[name].dtype == torch.float32
        assert torch.cosine_similarity(got[name].flatten(), gradient.flatten(), dim=0) > 0.99, name


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 150])
def test_chunked_loss_equals_torch_in_float64_with_its_gradients(rows):
    # A vocabulary of 66,000 leaves 64 rows to a chunk, the least there is.
    torch.manual_seed(0)
    hidden = torch.randn(rows, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(66_000, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 66_000, (rows,))
    targets[rows // 2 :: 4] = IGNORE_INDEX
    wanted = F.cross_entropy(hidden @ weight.T, targets, reduction="sum", ignore_index=IGNORE_INDEX)
    got = cross_entropy_sum(hidden, weight, targets)
    wanted_gradients = torch.autograd.grad(wanted * 3.7, (hidden, weight))
    got_gradients = torch.autograd.grad(got * 3.7, (hidden, weight))
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(got_gradients, wanted_gradients, rtol=1e-10, atol=1e-10)


def test_model_loss_is_the_sum_over_targets_that_are_not_ignored():
    model = lively(GPT(GPTConfig(**TINY)))
    ids, targets = random_ids(3, 21), random_targets(3, 21)
    counted = targets != IGNORE_INDEX
    token_losses = -model(ids).double().log_softmax(-1)[counted].gather(1, targets[counted][:, None])
    torch.testing.assert_close(model(ids, targets).double(), token_losses.sum(), rtol=1e-6, atol=0)
    with torch.no_grad():
        assert model(ids, targets).item() == pytest.approx(token_losses.sum().item(), rel=1e-6)


def test_a_batch_without_targets_has_zero_loss_and_zero_gradients():
    model = lively(GPT(GPTConfig(**TINY)))
    loss = model(random_ids(2, 9), torch.full((2, 9), IGNORE_INDEX))
    assert loss.item() == 0
    assert all((gradient == 0).all() for gradient in gradients(model, loss).values())


def test_a_large_loss_scale_does_not_overflow_half_precision_gradients():
    torch.manual_seed(0)
    hidden = torch.randn(8, 16, dtype=torch.float16, requires_grad=True)
    weight = (0.01 * torch.randn(97, 16)).requires_grad_()
    (cross_entropy_sum(hidden, weight, random_ids(1, 8)[0]) * 2**17).backward()
    exact = hidden.detach().float().requires_grad_()
    (F.cross_entropy(exact @ weight.detach().half().float().T, random_ids(1, 8)[0], reduction="sum") * 2**17).backward()
    torch.testing.assert_close(hidden.grad.float(), exact.grad, rtol=1e-2, atol=10)


def test_token_losses_of_bfloat16_logits_are_not_rounded_to_bfloat16():
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(8, 16).bfloat16(), torch.randn(97, 16).bfloat16(), random_ids(1, 8)[0]
    for row in range(8):
        logits = (hidden[row : row + 1] @ weight.T).double()
        wanted = F.cross_entropy(logits, targets[row : row + 1])
        got = cross_entropy_sum(hidden[row : row + 1], weight, targets[row : row + 1])
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-6)


def test_division_by_the_token_count_is_not_rounded_in_bfloat16():
    torch.manual_seed(0)
    hidden = torch.randn(8, 16, dtype=torch.bfloat16, requires_grad=True)
    weight, targets = torch.randn(97, 16), random_ids(1, 8)[0]
    (whole,) = torch.autograd.grad(cross_entropy_sum(hidden, weight, targets), hidden)
    (part,) = torch.autograd.grad(cross_entropy_sum(hidden, weight, targets) / 509, hidden)
    assert torch.equal(part, (whole.float() / 509).bfloat16())


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_activation_checkpointing_leaves_gradients_as_they_are(dropout):
    model = GPT(GPTConfig(**TINY, dropout=dropout))
    ids, targets = random_ids(2, 17), random_targets(2, 17)
    torch.manual_seed(5)
    plain = gradients(model, model(ids, targets))
    model.activation_checkpointing = True
    saved_elements = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal saved_elements
        saved_elements += tensor.numel()
        return tensor

    torch.manual_seed(5)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        loss = model(ids, targets)
    again = gradients(model, loss)
    assert all(torch.equal(again[name], plain[name]) for name in plain)
    # Without recomputation the two layers alone save over 100,000 numbers.
    assert saved_elements < 40_000


def test_dropout_follows_the_seed_in_training_and_is_off_in_evaluation():
    model = lively(GPT(GPTConfig(**TINY, dropout=0.3)))
    ids = random_ids(2, 12)

    def seeded(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return model(ids)

    assert torch.equal(seeded(1), seeded(1))
    assert not torch.equal(seeded(1), seeded(2))
    model.eval()
    assert torch.equal(seeded(1), seeded(2))


def test_compiled_model_gives_the_same_loss_and_gradients():
    model = lively(GPT(GPTConfig(**TINY)))
    ids, targets = random_ids(2, 19), random_targets(2, 19)
    wanted_loss = model(ids, targets)
    wanted = gradients(model, wanted_loss)
    # aot_eager runs all of torch.compile's capture without half a minute of C++ builds.
    loss = torch.compile(model, backend="aot_eager")(ids, targets)
    got = gradients(model, loss)
    torch.testing.assert_close(loss, wanted_loss)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_an_impossible_configuration_names_every_problem():
    with pytest.raises(ValueError, match="model configuration: ") as refusal:
        GPTConfig(hidden_size=100, num_attention_heads=3, num_key_value_heads=2, dropout=1.5, rope_theta=-1)
    for words in ("hidden_size 100", "num_key_value_heads 2", "head_dim 33", "dropout 1.5", "rope_theta -1"):
        assert words in str(refusal.value)
    with pytest.raises(ValueError, match=r"vocab_size is '6400'.*num_hidden_layers is 0"):
        GPTConfig(vocab_size="6400", num_hidden_layers=0)
