"""model/minimind.py: the files of MiniMind's generations, against models of each one's shape; refusals; and back."""

import os
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.gpt import GPT, GPTConfig
from model.minimind import minimind_state, read_minimind
from model.weights import load_model, starting_config, starting_model
from tests.conftest import lively, train
from trainer.checkpoint import load_tensors, resolve_weights

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, WIDTH = 97, 64, 2, 8, 2, 192
SIZES = dict(hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2, dropout=0.1)


class Norm(nn.Module):
    """RMSNorm by its formula."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(size)), epsilon

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.epsilon).sqrt() * self.weight


def turn_pairs(x: Tensor) -> Tensor:
    """First generation: channels 2i and 2i + 1 are one complex number, turned. x: (batch, time, heads, size)."""
    turns = torch.outer(torch.arange(x.shape[1]), 1e6 ** -(torch.arange(0, x.shape[-1], 2) / x.shape[-1]))
    numbers = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(numbers * torch.polar(torch.ones_like(turns), turns)[:, None]).flatten(-2)


def turn_halves(x: Tensor) -> Tensor:
    """Later generations: channel i and i + size / 2 are the two parts of the number."""
    size = x.shape[-1] // 2
    paired = torch.stack((x[..., :size], x[..., size:]), dim=-1).flatten(-2)
    turned = turn_pairs(paired)
    return torch.cat((turned[..., 0::2], turned[..., 1::2]), dim=-1)


class Reference(nn.Module):
    """A dense MiniMind of one generation: names, pairing, norms and epsilon as its code has them."""

    def __init__(self, generation: int, head_dim: int = HIDDEN // HEADS) -> None:
        super().__init__()
        self.generation, self.head_dim = generation, head_dim
        epsilon = 1e-6 if generation == 4 else 1e-5
        q_size, kv_size = HEADS * head_dim, KV_HEADS * head_dim
        tensors = {"embedding": nn.Embedding(VOCAB, HIDDEN), "norm": Norm(HIDDEN, epsilon)}
        tensors["head"] = nn.Linear(HIDDEN, VOCAB, bias=False)
        tensors["head"].weight = tensors["embedding"].weight
        for layer in range(LAYERS):
            sizes = {"q": (HIDDEN, q_size), "k": (HIDDEN, kv_size), "v": (HIDDEN, kv_size), "o": (q_size, HIDDEN)}
            sizes |= {"gate": (HIDDEN, WIDTH), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
            tensors |= {f"{layer}_{name}": nn.Linear(*size, bias=False) for name, size in sizes.items()}
            tensors |= {f"{layer}_before": Norm(HIDDEN, epsilon), f"{layer}_between": Norm(HIDDEN, epsilon)}
            if generation == 4:
                tensors |= {f"{layer}_q_norm": Norm(head_dim, epsilon), f"{layer}_k_norm": Norm(head_dim, epsilon)}
        self.tensors = nn.ModuleDict(tensors)

    def forward(self, ids: Tensor) -> Tensor:
        get, time = self.tensors.__getitem__, ids.shape[1]
        turn = turn_pairs if self.generation == 1 else turn_halves
        x = get("embedding")(ids)
        for layer in range(LAYERS):
            normed = get(f"{layer}_before")(x)
            q, k, v = (get(f"{layer}_{name}")(normed).unflatten(-1, (-1, self.head_dim)) for name in "qkv")
            if self.generation == 4:
                q, k = get(f"{layer}_q_norm")(q), get(f"{layer}_k_norm")(k)
            q, k = turn(q), turn(k).repeat_interleave(HEADS // KV_HEADS, dim=2)
            v = v.repeat_interleave(HEADS // KV_HEADS, dim=2)
            scores = torch.einsum("bthd,bshd->bhts", q, k) / self.head_dim**0.5
            scores = scores.masked_fill(torch.ones(time, time).triu(1).bool(), -torch.inf).softmax(-1)
            x = x + get(f"{layer}_o")(torch.einsum("bhts,bshd->bthd", scores, v).flatten(-2))
            normed = get(f"{layer}_between")(x)
            x = x + get(f"{layer}_down")(F.silu(get(f"{layer}_gate")(normed)) * get(f"{layer}_up")(normed))
        return get("head")(get("norm")(x))

    def state(self) -> dict[str, Tensor]:
        """What the generation's code saves: the tied weight under both names."""
        first = {
            "embedding": "tok_embeddings", "head": "output", "norm": "norm", "before": "attention_norm",
            "between": "ffn_norm", "q": "attention.wq", "k": "attention.wk", "v": "attention.wv",
            "o": "attention.wo", "gate": "feed_forward.w1", "up": "feed_forward.w3", "down": "feed_forward.w2",
        }  # fmt: skip
        later = {
            "embedding": "model.embed_tokens", "head": "lm_head", "norm": "model.norm", "before": "input_layernorm",
            "between": "post_attention_layernorm", "q": "self_attn.q_proj", "k": "self_attn.k_proj",
            "v": "self_attn.v_proj", "o": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
            "down": "mlp.down_proj", "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
        }  # fmt: skip
        names, top = (first, "layers.") if self.generation == 1 else (later, "model.layers.")
        saved = {}
        for key, module in self.tensors.items():
            layer, _, rest = key.partition("_")
            name = f"{top}{layer}.{names[rest]}" if layer.isdigit() else names[key]
            saved[f"{name}.weight"] = module.weight.detach()
        return saved


def reference(generation: int, **sizes: int) -> Reference:
    model = Reference(generation, **sizes)
    lively(model, seed=generation)
    with torch.no_grad():
        # Channels this small make the epsilon of a norm show.
        model.tensors["embedding"].weight.mul_(0.02)
        model.tensors["norm"].weight.mul_(50)
    return model


def save(path: Path, state: object) -> Path:
    torch.save(state, path)
    return path


def imported(path: Path) -> GPT:
    return load_model(path).eval()


@torch.no_grad()
def distance(wanted: nn.Module, got: nn.Module) -> float:
    """Largest difference of two models' logits over 2 x 60 positions, as a share of the largest logit."""
    ids = torch.randint(0, VOCAB, (2, 60), generator=torch.Generator().manual_seed(1))
    logits = wanted(ids)
    assert logits.shape == (2, 60, VOCAB)
    assert logits.std() > 0.3
    return ((got(ids) - logits).abs().max() / logits.abs().max()).item()


@pytest.mark.parametrize("generation", [1, 2, 3, 4])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module."])
def test_each_generation_gives_its_own_logits_at_every_position(tmp_path, generation, prefix):
    model = reference(generation)
    state = {prefix + name: tensor for name, tensor in model.state().items()}
    ours = imported(save(tmp_path / "pretrain_64.pth", state))
    assert distance(model, ours) < 1e-5
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    config = ours.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.intermediate_size) == (8, 2, WIDTH)
    assert (config.qk_norm, config.rms_norm_eps) == ((True, 1e-6) if generation == 4 else (False, 1e-5))
    assert (config.tie_word_embeddings, config.rope_theta, config.max_position_embeddings) == (True, 1e6, 32768)


@pytest.mark.parametrize("generation", [1, 2, 4])
def test_a_half_precision_file_gives_the_logits_of_its_rounded_weights(tmp_path, generation):
    model = reference(generation).half()
    path = save(tmp_path / "full_sft_64.pth", model.state())
    ours = imported(path)
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.float32}
    assert distance(model.float(), ours) < 1e-5


def test_the_wrong_pairing_would_be_seen(tmp_path):
    ours = imported(save(tmp_path / "a.pth", reference(1).state()))
    model = reference(1)
    model.generation = 2  # the same tensors, turned as later generations do
    assert distance(model, ours) > 1e-2


def test_head_size_is_read_from_the_norm_of_the_last_generation(tmp_path):
    model = reference(4, head_dim=24)
    path = save(tmp_path / "a.pth", model.state())
    assert distance(model, imported(path)) < 1e-5
    with pytest.raises(ValueError, match="8 attention heads there and 4 asked for"):
        read_minimind(path, num_attention_heads=4)


def test_head_count_of_older_files_is_the_one_that_is_asked_for(tmp_path):
    path = save(tmp_path / "a.pth", reference(2).state())
    assert read_minimind(path, num_attention_heads=16)[0].head_dim == 4
    with pytest.raises(ValueError, match="64 query and 16 key channels do not split into 3 attention heads"):
        read_minimind(path, num_attention_heads=3)


def test_a_resume_file_counts_as_its_weights_and_stored_tables_are_left_out(tmp_path):
    model = reference(1)
    tables = {"pos_cis": torch.ones(9, 4, dtype=torch.complex64), "layers.0.attention.mask": torch.ones(1, 1, 9, 9)}
    resume = {"model": {**model.state(), **tables}, "optimizer": {"state": {}}, "epoch": 1, "wandb_id": None}
    assert distance(model, imported(save(tmp_path / "pretrain_64_resume.pth", resume))) < 1e-5


def test_an_untied_head_stays_one(tmp_path):
    state = reference(2).state()
    state["lm_head.weight"] = state["lm_head.weight"] * 2
    ours = imported(save(tmp_path / "a.pth", state))
    assert not ours.config.tie_word_embeddings
    assert torch.equal(ours.lm_head.weight, 2 * ours.model.embed_tokens.weight)


@pytest.mark.parametrize(
    ("generation", "name"),
    [
        (1, "layers.1.feed_forward.experts.0.w1.weight"),
        (1, "layers.1.feed_forward.shared_experts.w1.weight"),
        (2, "model.layers.1.mlp.shared_experts.0.up_proj.weight"),
        (4, "model.layers.0.mlp.gate.weight"),
    ],
)
def test_a_mixture_of_experts_is_refused_in_one_sentence(tmp_path, generation, name):
    path = save(tmp_path / "a_moe.pth", reference(generation).state() | {name: torch.zeros(4, HIDDEN)})
    with pytest.raises(
        ValueError, match=rf"a mixture of experts \(1 of its tensors, as {re.escape(name)}\)"
    ) as refusal:
        read_minimind(path)
    assert "\n" not in str(refusal.value)


def test_wrong_tensors_are_counted_and_named(tmp_path):
    state = reference(1).state()
    del state["layers.0.attention.wo.weight"], state["output.weight"]
    state["layers.1.ffn_norm.weight"] = torch.ones(65)
    state |= {"layers.1.attention.wq.bias": torch.zeros(64), "layers.1.attention.wz.weight": torch.zeros(64)}
    with pytest.raises(ValueError, match=r"a\.pth: the tensors do not fit") as refusal:
        read_minimind(save(tmp_path / "a.pth", state))
    for words in (
        "2 missing (model.layers.0.self_attn.o_proj.weight, lm_head.weight)",
        "2 unexpected (layers.1.attention.wq.bias, layers.1.attention.wz.weight)",
        "1 wrong-shaped (model.layers.1.post_attention_layernorm.weight (65,) instead of (64,))",
    ):
        assert words in str(refusal.value)


class Trap:
    """Runs a command when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch sprung",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"not a zip, not a pickle", r"torch\.save has not written it \(it begins with b'not '\)"),
        (b"e101", "torch.save has not written it"),
        (b"", "torch.save has not written it"),
        (b"PK\x03\x04" + b"\0" * 50, "damaged, cut off, or not a file of tensors alone"),
        (b"\x80\x02", "damaged, cut off, or not a file of tensors alone"),
        ([torch.zeros(2)], "holds no tensors by name"),
        ({}, "holds no tensors by name"),
        ({"a.weight": 3}, r"1 entries are no dense float tensors \(as a.weight\)"),
        ({"a.weight": torch.zeros(2, dtype=torch.int8)}, "1 entries are no dense float tensors"),
        ({"lm_head.weight": torch.zeros(64).expand(2**40, 64)}, "1 entries are no dense float tensors"),
        ({"a.lora.A.weight": torch.zeros(2, 2)}, "4 of 4 matrices that show the sizes are missing"),
        ({"layers.999999999.ffn_norm.weight": torch.zeros(2), **reference(1).state()}, r"missing.*1 unexpected"),
    ],
)
def test_another_file_is_refused_in_one_sentence(tmp_path, content, words):
    path = tmp_path / "a.pth"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        save(path, content)
    with pytest.raises(ValueError, match=words) as refusal:
        read_minimind(path)
    assert str(refusal.value).startswith(str(path))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_a_file_that_is_cut_off_is_said_to_be(tmp_path, share):
    path = save(tmp_path / "a.pth", reference(2).state())
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(ValueError, match=r"a\.pth: damaged, cut off, or not a file of tensors alone"):
        read_minimind(path)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"cannot be read \(No such file"):
        read_minimind(tmp_path / "a.pth")


def test_code_in_a_file_does_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "a.pth", {"model.norm.weight": Trap()})
    with pytest.raises(ValueError, match="not a file of tensors alone"):
        read_minimind(tmp_path / "a.pth")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("generation", [2, 4])
def test_tensors_go_back_to_minimind_under_the_same_names(tmp_path, generation):
    model = reference(generation).half()
    config, state = read_minimind(save(tmp_path / "a.pth", model.state()))
    trained = {f"module.{name}": parameter for name, parameter in state.items() if name != "lm_head.weight"}
    back = minimind_state(config, trained)
    assert back.keys() == model.state().keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in model.state().items())


def test_what_minimind_would_silently_compute_otherwise_is_not_exported():
    changes = dict(num_attention_heads=4, rope_theta=1e4, rms_norm_eps=1e-5, tie_word_embeddings=False)
    config = GPTConfig(qk_norm=True, **changes)
    with pytest.raises(ValueError, match="cannot be a MiniMind file") as refusal:
        minimind_state(config, {})
    for words in (
        *("rope_theta is 10000.0", "rms_norm_eps is 1e-05, MiniMind takes 1e-06", "num_attention_heads is 4"),
        "tie_word_embeddings is False, MiniMind takes True",
    ):
        assert words in str(refusal.value)


def test_export_is_strict_and_finite():
    config = GPTConfig(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=1)
    state = GPT(config).state_dict()
    with pytest.raises(ValueError, match=r"the state to export: .* 1 missing \(model.norm.weight\)"):
        minimind_state(config, {name: tensor for name, tensor in state.items() if name != "model.norm.weight"})
    state["model.norm.weight"].fill_(1e6)
    with pytest.raises(ValueError, match=r"1 tensors do not fit into float16 \(as model.norm.weight\)"):
        minimind_state(config, state)


def test_a_run_starts_from_a_file_with_its_architecture(tmp_path):
    path, wanted = save(tmp_path / "pretrain_64.pth", reference(2).state()), reference(2)
    ours = starting_model(path, starting_config(path, SIZES, vocab_size=VOCAB, given=(), max_seq_len=32))
    assert ours.config.dropout == 0.1
    assert distance(wanted, ours.eval()) < 1e-5
    sizes = SIZES | {"num_attention_heads": 16, "hidden_size": 64}
    given = ("num_attention_heads", "hidden_size")
    config = starting_config(path, sizes, vocab_size=VOCAB, given=given, max_seq_len=32)
    assert starting_model(path, config).config.head_dim == 4
    with pytest.raises(ValueError, match="hidden_size is 64 there and 512 here"):
        starting_config(path, SIZES, vocab_size=VOCAB, given=("hidden_size",), max_seq_len=32)


def test_training_goes_on_from_a_file(tmp_path, texts):
    config = GPTConfig(hidden_size=64, num_hidden_layers=2)
    model = lively(GPT(config))
    path = save(tmp_path / "pretrain_64.pth", minimind_state(config, model.state_dict()))
    assert resolve_weights(str(path)) == path
    options = ["--max_steps", 1, "--learning_rate", 1e-9, "--batch_size", 1, "--max_seq_len", 8, "--num_workers", 0]
    options += ["--device", "cpu", "--data_path", texts, "--cache_dir", tmp_path / "cache"]
    assert train("--from_weight", path, "--out_dir", tmp_path / "run", *options) == 0
    trained = load_tensors(tmp_path / "run" / "step_00000001" / "model.safetensors")
    assert trained.keys() == model.state_dict().keys() - {"lm_head.weight"}
    assert all((tensor - model.state_dict()[name]).abs().max() < 1e-3 for name, tensor in trained.items())
