"""model/weights.py: folders that transformers opens, folders that transformers wrote, and refusals."""

import json
import re
import shutil
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.gpt import GPT, GPTConfig
from model.names import plain_names
from model.weights import (
    load_config,
    load_model_folder,
    load_weights_into,
    save_model_folder,
    starting_config,
    starting_model,
)
from tests.conftest import lively

TINY = dict(vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)


def assert_same_logits(foreign: torch.nn.Module, ours: GPT) -> None:
    ids = torch.randint(0, 97, (2, 150), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted, got = foreign(ids).logits, ours(ids)
    assert wanted.abs().max() > 3
    assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def foreign_model(name: str, **changes) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**TINY, num_key_value_heads=2, pad_token_id=0, **changes)
    return lively(getattr(transformers, f"{name}ForCausalLM")(config)).eval()


def rewrite(path: Path, **changes) -> None:
    """Change fields of a JSON file; a field set to ... is removed."""
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in raw.items() if value is not ...}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved tiny Llama with tied embeddings."""
    config = GPTConfig(**TINY)
    save_model_folder(tmp_path / "model", config, lively(GPT(config)).state_dict())
    return tmp_path / "model"


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_saved_folder_opens_in_transformers_with_equal_logits(tmp_path, qk_norm, tied):
    transformers = pytest.importorskip("transformers")
    config = GPTConfig(**TINY, qk_norm=qk_norm, tie_word_embeddings=tied, rope_theta=70_000.0, dropout=0.2)
    model = lively(GPT(config)).eval()
    save_model_folder(tmp_path, config, model.state_dict())
    foreign, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(foreign).__name__ == ("Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLM")
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert next(foreign.parameters()).dtype == torch.float32
    assert (foreign.config.pad_token_id, foreign.config.bos_token_id, foreign.config.eos_token_id) == (
        0,
        1,
        2,
    )
    assert_same_logits(foreign.eval(), model)
    stored = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in stored) is not tied
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["rope_parameters"] == {"rope_type": "default", "rope_theta": 70_000.0}
    assert (raw["rope_theta"], raw["head_dim"], raw["dtype"]) == (70_000.0, 16, "float32")
    assert load_config(tmp_path) == config
    reloaded = load_model_folder(tmp_path)
    assert all(torch.equal(tensor, reloaded.state_dict()[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard_size", ["5GB", "60KB"])
def test_folder_written_by_transformers_loads_with_equal_logits(tmp_path, name, tied, shard_size):
    foreign = foreign_model(name, tie_word_embeddings=tied, rms_norm_eps=1e-3, head_dim=24)
    foreign.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors").exists() is (shard_size == "5GB")
    ours = load_model_folder(tmp_path)
    assert (ours.config.qk_norm, ours.config.rope_theta) == (name == "Qwen3", 10_000.0)
    assert_same_logits(foreign, ours.eval())


def test_half_precision_folder_loads_as_float32(tmp_path):
    foreign_model("Llama").bfloat16().save_pretrained(tmp_path)
    ours = load_model_folder(tmp_path)
    assert {weight.dtype for weight in ours.parameters()} == {torch.float32}
    transformers = pytest.importorskip("transformers")
    foreign = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_same_logits(foreign.eval(), ours.eval())


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": ..., "rope_theta": ...},
        {"rope_parameters": ..., "rope_theta": 3000.0, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5000}, "rope_theta": ...},
        {"head_dim": ..., "num_key_value_heads": 4, "rms_norm_eps": ..., "max_position_embeddings": ...},
        {"num_key_value_heads": ..., "tie_word_embeddings": ...},
        {"model_type": "qwen3", "num_key_value_heads": ..., "head_dim": ..., "num_attention_heads": 32},
    ],
)
def test_left_out_fields_mean_what_transformers_takes_them_for(folder, changes):
    transformers = pytest.importorskip("transformers")
    rewrite(folder / "config.json", **changes)
    wanted, got = transformers.AutoConfig.from_pretrained(folder), load_config(folder)
    assert got.rope_theta == wanted.rope_parameters["rope_theta"]
    for name in ("head_dim", "num_key_value_heads", "rms_norm_eps", "max_position_embeddings"):
        assert getattr(got, name) == getattr(wanted, name), name
    assert got.tie_word_embeddings == wanted.tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "qwen3_moe"}, "model_type is 'qwen3_moe'"),
        ({"model_type": ...}, "model_type is None"),
        ({"model_type": ["llama"]}, "model_type is ['llama']"),
        ({"num_local_experts": 4}, "num_local_experts is 4"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}}, "'yarn'"),
        ({"rope_parameters": ..., "rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "one flat object"),
        ({"rope_parameters": "default"}, "rope_parameters is 'default'"),
        ({"rope_theta": 5.0}, "rope_theta is given as"),
        ({"rope_theta": "high", "rope_parameters": ...}, "rope_theta"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"layer_types": 3}, "sliding-window"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": ..., "intermediate_size": None}, "hidden_size, intermediate_size not given"),
        ({"num_attention_heads": "4"}, "num_attention_heads is '4'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"rope_theta": 10**400, "rope_parameters": ...}, "config.json: int too large"),
    ],
)
def test_a_model_that_cannot_be_represented_is_refused_by_field(folder, changes, words):
    rewrite(folder / "config.json", **changes)
    with pytest.raises(ValueError, match=re.escape(words)) as refusal:
        load_model_folder(folder)
    assert str(refusal.value).startswith(str(folder))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json: cannot be read"),
        (lambda folder: (folder / "config.json").write_text("{"), "not valid JSON"),
        (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe{}"), "not valid JSON"),
        (lambda folder: (folder / "config.json").write_text("[1]"), "a JSON list"),
        (lambda folder: (folder / "config.json").write_text('{"a":' * 100_000), "not valid JSON"),
        (lambda folder: (folder / "model.safetensors").unlink(), "neither model.safetensors nor"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\x10" * 30), "damaged safetensors"),
    ],
)
def test_a_damaged_folder_is_refused_in_one_sentence(folder, damage, words):
    damage(folder)
    with pytest.raises(ValueError, match=words):
        load_model_folder(folder)


@pytest.mark.parametrize("shard", ["../model.safetensors", "gone.safetensors", "/etc/hostname"])
def test_an_index_may_name_only_files_of_its_own_folder(folder, shard):
    shutil.move(folder / "model.safetensors", folder.parent / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": shard}}))
    with pytest.raises(ValueError, match=r"is not a file of this folder"):
        load_model_folder(folder)


def test_wrong_tensors_are_counted_and_named_and_nothing_is_loaded(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(64)
    tensors["model.norm.weight"] = torch.ones(65)
    save_file(tensors, folder / "model.safetensors")
    model = GPT(GPTConfig(**TINY))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match="the tensors do not fit the model") as refusal:
        load_weights_into(model, folder)
    for words in (
        "1 missing (model.layers.0.mlp.up_proj.weight)",
        "1 unexpected (model.layers.1.self_attn.q_proj.bias)",
        "1 wrong-shaped (model.norm.weight (65,) instead of (64,))",
    ):
        assert words in str(refusal.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", ["num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size"])
@pytest.mark.parametrize("value", [10**7, 10**12, 2**62, 10**30])
def test_a_wild_size_is_refused_before_it_is_built(folder, name, value):
    rewrite(folder / "config.json", **{name: value * 4})
    config_of = partial(starting_config, sizes={"dropout": 0.1}, vocab_size=97, given=(), max_seq_len=8)

    def start(folder):
        return starting_model(folder, config_of(folder))

    for load in (load_model_folder, start):
        started = time.monotonic()
        with pytest.raises(ValueError, match=str(folder)) as refusal:
            load(folder)
        assert "\n" not in str(refusal.value)
        assert time.monotonic() - started < 5  # built, it takes minutes, or memory that no machine has


def test_integer_weights_are_refused(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"model.norm.weight is stored as I8"):
        load_model_folder(folder)


def test_weights_of_equal_shapes_but_another_architecture_are_refused(folder):
    with pytest.raises(ValueError, match=r"rope_theta is 1000000.0 there and 10000.0 here"):
        load_weights_into(GPT(GPTConfig(**TINY, rope_theta=1e4)), folder)
    load_weights_into(GPT(GPTConfig(**TINY, dropout=0.1, max_position_embeddings=64)), folder)


def test_a_stored_copy_of_a_tied_head_must_equal_the_embeddings(folder):
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding.clone()}, folder / "model.safetensors")
    assert torch.equal(load_model_folder(folder).lm_head.weight, embedding)
    save_file(tensors | {"lm_head.weight": embedding + 1}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head.weight differs"):
        load_model_folder(folder)


def test_saving_tensors_that_do_not_fit_the_configuration_is_refused(tmp_path):
    state = GPT(GPTConfig(**TINY)).state_dict()
    renamed = {name.replace("layers.1.mlp.", "layers.1.ffn."): tensor for name, tensor in state.items()}
    with pytest.raises(ValueError, match=r"the state to save.*3 missing .*3 unexpected"):
        save_model_folder(tmp_path, GPTConfig(**TINY), renamed)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_wrapper_prefixes_are_stripped_in_any_nesting(tmp_path, prefix):
    config = GPTConfig(**TINY)
    state = GPT(config).state_dict()
    assert plain_names({prefix + name: tensor for name, tensor in state.items()}) == state
    inner = {name.replace("layers.0.", "layers.0._orig_mod."): tensor for name, tensor in state.items()}
    save_model_folder(tmp_path, config, {prefix + name: tensor for name, tensor in inner.items()})
    assert load_file(tmp_path / "model.safetensors").keys() == state.keys() - {"lm_head.weight"}


def test_a_folder_with_wrapped_names_loads_as_one_without(folder):
    path, model = folder / "model.safetensors", load_model_folder(folder)
    prefixes = ("module.", "_orig_mod.", "module._orig_mod.", "")
    wrapped = {prefixes[n % 4] + name: tensor for n, (name, tensor) in enumerate(load_file(path).items())}
    save_file(wrapped, path)
    for name, tensor in load_model_folder(folder).state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
    save_file(wrapped | {"module.model.norm.weight": torch.zeros(64), "model.norm.weight": torch.zeros(64)}, path)
    with pytest.raises(ValueError, match=r"model\.norm\.weight is there twice, as model\.norm.* and module\.model"):
        load_model_folder(folder)


def test_two_names_that_become_one_are_refused():
    with pytest.raises(ValueError, match=r"'a.weight'"):
        plain_names({"a.weight": torch.zeros(1), "module.a.weight": torch.ones(1)})


def test_an_adapter_is_no_model_and_says_how_to_become_one(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="is a LoRA adapter; merge it first"):
        load_model_folder(tmp_path)
