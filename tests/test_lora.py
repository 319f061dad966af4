"""model/lora.py: adapters against the base, against the formula, against PEFT; what is refused; and merging."""

import copy
import json
import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.gpt import GPT, GPTConfig
from model.lora import (
    PREFIX,
    TARGETS,
    LoRAConfig,
    LoRALinear,
    attach_lora,
    base_fingerprint,
    find_base,
    load_adapter,
    lora_parameters,
    lora_state,
    merge_lora,
    open_model,
    read_adapter,
    save_adapter,
)
from model.weights import load_model_folder, save_model_folder
from tests.conftest import Peers, lively, on_ranks
from trainer.backends import Step, build_backend
from trainer.optim import adamw

TINY = GPTConfig(
    vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=160,
)  # fmt: skip
LORA = LoRAConfig(rank=4, alpha=10.0)
IDS = torch.randint(0, 97, (2, 40), generator=torch.Generator().manual_seed(1))


def base_model(config: GPTConfig = TINY) -> GPT:
    return lively(GPT(config)).eval()


def adapted(lora: LoRAConfig = LORA, config: GPTConfig = TINY) -> GPT:
    """A base with updates that matter, as after some training."""
    model = base_model(config)
    attach_lora(model, lora)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in lora_parameters(model):
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model(IDS)


def save(folder: Path, model: GPT, lora: LoRAConfig = LORA, **changes: object) -> Path:
    options = {"base": "the/base", "base_fingerprint": base_fingerprint(model), "state": model.state_dict()} | changes
    save_adapter(folder, model, lora, **options)
    return folder


def share(difference: Tensor, of: Tensor) -> float:
    return (difference.abs().max() / of.abs().max()).item()


@pytest.mark.parametrize("targets", [TARGETS, ("q_proj",), ("k_proj", "down_proj")])
def test_before_training_the_outputs_are_those_of_the_base_bit_for_bit(targets):
    model = base_model()
    wanted, names = logits(model), set(model.state_dict())
    attach_lora(model, LoRAConfig(rank=4, dropout=0.5, targets=targets))
    assert torch.equal(logits(model), wanted)
    assert torch.equal(model.train()(IDS), wanted)
    added = {re.fullmatch(r".*\.(\w+)\.lora_[AB]\.weight", name)[1] for name in set(model.state_dict()) - names}
    assert added == set(targets)


def test_a_layer_computes_the_formula_also_where_it_is_not_square():
    model = adapted()
    layers = [module for module in model.modules() if isinstance(module, LoRALinear)]
    assert {(layer.in_features, layer.out_features) for layer in layers} == {(64, 64), (64, 32), (64, 160), (160, 64)}
    assert len(layers) == 7 * TINY.num_hidden_layers
    for layer in layers:
        x = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(3))
        full = layer.weight + 10 / 4 * layer.lora_B.weight @ layer.lora_A.weight
        assert torch.allclose(layer(x), x @ full.T, atol=1e-4)


def test_dropout_touches_the_update_only_and_only_in_training():
    layer = LoRALinear(torch.nn.Linear(1000, 1, bias=False), LoRAConfig(rank=1, alpha=1.0, dropout=0.25))
    torch.nn.init.zeros_(layer.weight)
    for part in (layer.lora_A, layer.lora_B):
        torch.nn.init.ones_(part.weight)
    x = torch.ones(1, 1000)
    assert layer.eval()(x) == 1000
    torch.manual_seed(0)
    kept = layer.train()(x).item() * 0.75
    assert kept == pytest.approx(round(kept), abs=1e-2)  # a number of inputs
    assert 700 < kept < 800
    torch.nn.init.ones_(layer.weight)
    torch.nn.init.zeros_(layer.lora_B.weight)
    assert layer(x) == 1000


def test_an_adapter_attached_for_answering_does_not_drop_out(tmp_path):
    model = adapted(lora := LoRAConfig(rank=4, dropout=0.5))
    fresh = base_model().eval()
    load_adapter(fresh, save(tmp_path, model, lora))
    assert torch.equal(logits(fresh), logits(fresh))
    assert not torch.equal(logits(fresh.train()), logits(fresh))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_and_updates_reach_the_adapter_and_nothing_else(checkpointing):
    model = base_model().train()
    attach_lora(model, LORA)
    model.activation_checkpointing = checkpointing
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = adamw(model, weight_decay=0.1)
    seen = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert seen == {id(parameter) for parameter in lora_parameters(model)}
    optimizer.param_groups[0]["lr"] = 0.01
    for _ in range(2):  # B is zero at first, so A moves from the second step on
        (model(IDS, IDS.roll(-1)) / IDS.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == set(lora_state(model))
    assert len(moved) == 2 * 7 * TINY.num_hidden_layers


def test_checkpointing_changes_no_gradient():
    gradients = []
    for checkpointing in (False, True):
        model = adapted().train()
        model.activation_checkpointing = checkpointing
        (model(IDS, IDS.roll(-1)) / IDS.numel()).backward()
        gradients.append([parameter.grad for parameter in lora_parameters(model)])
    assert all(gradient.abs().max() > 0 for gradient in gradients[1])
    assert all(torch.equal(plain, again) for plain, again in zip(*gradients, strict=True))


def reduce_the_adapter(peers: Peers) -> None:
    """Two updates on two ranks, each with a row of its own; what goes over the wire, and what each rank ends with."""
    ranks = peers.connect()
    model = base_model().train()
    torch.manual_seed(peers.rank)
    attach_lora(model, LORA)
    settings = {"dtype": "float32", "grad_clip": 1.0, "seed": 3, "compile": False, "bucket_cap_mb": 25}
    backend = build_backend("ddp", model, lambda m: adamw(m, 0.1), ranks, find_unused_parameters=False, **settings)
    adapter = lora_parameters(model)
    mine = {"input_ids": IDS[peers.rank, None], "targets": IDS.roll(-1, dims=1)[peers.rank, None]}
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        for number in range(2):
            backend.set_rate(0.01)
            for batch in backend.micro_batches(Step(number, [mine], [peers.rank], IDS.numel())):
                backend.backward(backend.loss_sum(batch) / IDS.numel())
            backend.step()
    shapes = [event.input_shapes for event in profile.events() if event.name == "gloo:all_reduce"]
    numbers = [sum(torch.Size(shape).numel() for shape in inputs) for inputs in shapes]
    assert numbers == [sum(parameter.numel() for parameter in adapter)] * 3  # one more to settle the buckets
    weights, moments = backend.save()
    if ranks.is_first:
        assert weights.keys() == lora_state(model).keys()
        assert {name.split(".", 1)[1] for name in moments} == weights.keys()
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    first = flat.clone()
    torch.distributed.broadcast(first, 0)
    assert torch.equal(flat, first)
    ranks.disconnect()


def test_ranks_reduce_the_adapter_alone_and_stay_equal() -> None:
    on_ranks(2, reduce_the_adapter)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks transformers the old way
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("lora", [LORA, LoRAConfig(rank=3, alpha=2.5, dropout=0.1, targets=("v_proj", "up_proj"))])
def test_peft_opens_the_folder_with_equal_logits(tmp_path, lora, qk_norm):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    config = replace(TINY, qk_norm=qk_norm)
    base, model = base_model(config), adapted(lora, config)
    save_model_folder(tmp_path / "base", config, base.state_dict())
    folder = save(tmp_path / "adapter", model, lora)
    foreign = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # PEFT only warns of keys that it misses or does not know
        foreign = peft.PeftModel.from_pretrained(foreign, folder).eval()
    assert foreign.peft_config["default"].r == lora.rank
    assert foreign.peft_config["default"].lora_dropout == lora.dropout
    with torch.no_grad():
        wanted = foreign(IDS).logits
        merged = foreign.merge_and_unload()(IDS).logits
    assert share(wanted - logits(base), wanted) > 0.05
    assert share(logits(model) - wanted, wanted) < 1e-5
    merge_lora(model)
    assert share(logits(model) - merged, merged) < 1e-5


def test_an_adapter_that_peft_has_written_again_is_read(tmp_path):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    save_model_folder(tmp_path / "base", TINY, base_model().state_dict())
    folder = save(tmp_path / "adapter", adapted())
    foreign = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    peft.PeftModel.from_pretrained(foreign, folder).save_pretrained(tmp_path / "again")
    ours, again = read_adapter(folder), read_adapter(tmp_path / "again")
    assert again.lora == ours.lora
    assert all(torch.equal(tensor, ours.state[name]) for name, tensor in again.state.items())


def test_names_and_shapes_in_the_file_are_those_of_peft(tmp_path):
    tensors = load_file(save(tmp_path, adapted()) / "adapter_model.safetensors")
    assert len(tensors) == 2 * 7 * TINY.num_hidden_layers
    first = "base_model.model.model.layers.0."
    assert tensors[f"{first}self_attn.q_proj.lora_A.weight"].shape == (4, 64)
    assert tensors[f"{first}self_attn.k_proj.lora_B.weight"].shape == (32, 4)
    assert tensors[f"{first}mlp.down_proj.lora_A.weight"].shape == (4, 160)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_a_saved_adapter_comes_back_whatever_wrapped_it(tmp_path, prefix):
    model = adapted()
    state = {prefix + name: tensor for name, tensor in lora_state(model).items()}
    folder = save(tmp_path, model, state=state)
    fresh = base_model()
    assert load_adapter(fresh, folder) == LORA
    assert torch.equal(logits(fresh), logits(model))
    trains = {name for name, parameter in fresh.named_parameters() if parameter.requires_grad}
    assert trains == set(lora_state(fresh))
    assert read_adapter(folder).base == "the/base"


def test_a_wrapped_model_has_its_adapter_under_plain_names():
    wrapped = torch.nn.ModuleDict({"module": adapted()})
    assert lora_state(wrapped).keys() == lora_state(adapted()).keys()


@pytest.mark.parametrize("change", ["one weight", "rope_theta", "merged"])
def test_another_base_is_refused_and_left_alone(tmp_path, change):
    folder = save(tmp_path, adapted())
    if change == "rope_theta":
        other = base_model(replace(TINY, rope_theta=1e4))
    elif change == "merged":
        load_adapter(other := base_model(), folder)
        merge_lora(other)
    else:
        other = base_model()
        with torch.no_grad():
            other.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-6
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match="was trained on another base model") as refusal:
        load_adapter(other, folder)
    assert "load it into the/base" in str(refusal.value)
    assert other.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())
    assert all(parameter.requires_grad for parameter in other.parameters())


def test_the_fingerprint_knows_the_base_with_and_without_updates_and_in_any_folder(tmp_path):
    base = base_model()
    fingerprint = base_fingerprint(base)
    save_model_folder(tmp_path, TINY, base.state_dict())
    assert base_fingerprint(load_model_folder(tmp_path)) == fingerprint
    assert base_fingerprint(base_model(replace(TINY, dropout=0.3))) == fingerprint
    assert base_fingerprint(adapted()) == fingerprint


def test_wrong_tensors_are_counted_and_named_and_nothing_is_attached(tmp_path):
    path = save(tmp_path, adapted()) / "adapter_model.safetensors"
    tensors, name = load_file(path), "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    del tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]
    tensors |= {"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64), name: torch.zeros(160, 5)}
    save_file(tensors, path, metadata={"base_fingerprint": base_fingerprint(base_model())})
    model = base_model()
    with pytest.raises(ValueError, match="the tensors do not fit the model") as refusal:
        load_adapter(model, tmp_path)
    for words in (
        "1 missing (model.layers.0.self_attn.q_proj.lora_A.weight)",
        "1 unexpected (lm_head.lora_A.weight)",
        "1 wrong-shaped (model.layers.1.mlp.up_proj.lora_B.weight (160, 5) instead of (160, 4))",
    ):
        assert words in str(refusal.value)
    assert not lora_state(model)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_saving_an_incomplete_adapter_is_refused(tmp_path):
    model = adapted()
    state = {name: tensor for name, tensor in lora_state(model).items() if ".lora_A." in name}
    with pytest.raises(ValueError, match=r"the adapter to save: .* 14 missing"):
        save(tmp_path / "adapter", model, state=state)
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), "cannot be read"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "no LoRA adapter"),
        (lambda folder: (folder / "adapter_config.json").write_text("[]"), "no LoRA adapter"),
        (lambda folder: (folder / "adapter_config.json").write_text("[" * 100_000), "no LoRA adapter"),
        (lambda folder: rewrite(folder, peft_type="IA3"), "peft_type is 'IA3'"),
        (lambda folder: rewrite(folder, use_rslora=True), "use_rslora is True"),
        (
            lambda folder: rewrite(folder, use_dora=True, fan_in_fan_out=True),
            "use_dora is True, fan_in_fan_out is True",
        ),
        (lambda folder: rewrite(folder, alpha_pattern={"q_proj": 64}), "alpha_pattern is {'q_proj': 64}"),
        (lambda folder: rewrite(folder, rank_pattern={"q_proj": 2}), "rank_pattern is {'q_proj': 2}"),
        (lambda folder: rewrite(folder, layers_to_transform=[0]), r"layers_to_transform is \[0\]"),
        (lambda folder: rewrite(folder, modules_to_save=["lm_head"]), "modules_to_save is"),
        (lambda folder: rewrite(folder, bias="all"), "bias is 'all'"),
        (lambda folder: retype(folder, torch.int32), r"1 tensors are not finite floats \(as .*k_proj.*\)"),
        (
            lambda folder: retype(folder, torch.float32, float("nan")),
            r"1 tensors are not finite floats \(as .*k_proj.*\)",
        ),
        (lambda folder: rewrite(folder, r="4"), "rank is '4'"),
        (lambda folder: rewrite(folder, lora_alpha=10**400), "int too large"),
        (lambda folder: rewrite(folder, target_modules=["c_attn"]), "targets names 'c_attn'"),
        (lambda folder: rewrite(folder, target_modules=None), "no LoRA adapter"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "missing or damaged"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"\x10" * 30), "missing or damaged"),
        (lambda folder: unsign(folder), "does not say which base model"),
    ],
)
def test_a_damaged_adapter_is_refused_in_one_sentence(tmp_path, damage, words):
    damage(save(tmp_path, adapted()))
    with pytest.raises(ValueError, match=words) as refusal:
        load_adapter(base_model(), tmp_path)
    assert str(tmp_path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def base_and_adapter(root: Path, base: str = "out/sft/step_00000002") -> tuple[Path, Path]:
    """A base and an adapter of it, as two runs below `root` leave them; the base is recorded as `base`."""
    model = adapted()
    place = root / "out" / "sft" / "step_00000002"
    save_model_folder(place, TINY, base_model().state_dict())
    return place, save(root / "out" / "lora" / "step_00000007", model, base=base)


def test_an_adapter_folder_opens_with_its_base_and_a_model_folder_by_itself(tmp_path):
    base, adapter = base_and_adapter(tmp_path, str(tmp_path / "out" / "sft" / "step_00000002"))
    assert torch.equal(logits(open_model(adapter)), logits(adapted()))
    assert torch.equal(logits(open_model(base)), logits(base_model()))


@pytest.mark.parametrize("moved", ["nothing", "the project", "the folder of runs", "the two folders"])
def test_a_base_is_found_again_from_anywhere_when_it_moved_with_its_adapter(tmp_path, monkeypatch, moved):
    base, adapter = base_and_adapter(tmp_path / "project")
    if moved == "the project":
        (tmp_path / "project").rename(tmp_path / "elsewhere")
        adapter = tmp_path / "elsewhere" / "out" / "lora" / "step_00000007"
    elif moved == "the folder of runs":
        (tmp_path / "project" / "out").rename(tmp_path / "runs")
        adapter = tmp_path / "runs" / "lora" / "step_00000007"
    elif moved == "the two folders":
        (tmp_path / "both").mkdir()
        base.rename(tmp_path / "both" / base.name)
        adapter = adapter.rename(tmp_path / "both" / "mine")
    (tmp_path / "somewhere").mkdir()
    monkeypatch.chdir(tmp_path / "somewhere")
    assert torch.equal(logits(open_model(adapter)), logits(adapted()))


def test_an_adapter_of_a_minimind_file_knows_the_number_of_heads_that_the_file_does_not(tmp_path):
    model = adapted()  # of 4 heads, where 8 is the number of all published files
    torch.save(base_model().state_dict(), tmp_path / "sft_64.pth")
    adapter = save(tmp_path / "lora", model, base=str(tmp_path / "sft_64.pth"))
    assert read_adapter(adapter).num_attention_heads == 4
    assert torch.equal(logits(open_model(adapter).eval()), logits(model))
    # An adapter from before the number was recorded.
    path = adapter / "adapter_model.safetensors"
    save_file(load_file(path), path, metadata={"base_fingerprint": base_fingerprint(model)})
    with pytest.raises(ValueError, match=r"sft_64\.pth holds other weights"):
        open_model(adapter)
    assert torch.equal(logits(open_model(adapter, num_attention_heads=4).eval()), logits(model))


def test_other_weights_at_the_recorded_place_are_passed_over(tmp_path, monkeypatch):
    base, adapter = base_and_adapter(tmp_path / "project")
    here = tmp_path / "here"
    save_model_folder(here / "out" / "sft" / "step_00000002", TINY, lively(GPT(TINY), seed=9).state_dict())
    monkeypatch.chdir(here)
    assert find_base(adapter).resolve() == base


def test_a_base_that_is_gone_is_named_with_every_place_and_its_fault(tmp_path, monkeypatch):
    base, adapter = base_and_adapter(tmp_path)
    monkeypatch.chdir(tmp_path)
    base.rename(base.with_name("step_00000003"))
    with pytest.raises(ValueError, match="needs the base model that it was trained on, out/sft/step_00000002") as gone:
        open_model(adapter)
    assert f"{base} is not there" in str(gone.value)
    assert f"{adapter.with_name(base.name)} is not there" in str(gone.value)
    assert "Put it back" in str(gone.value)
    save_model_folder(base, TINY, lively(GPT(TINY), seed=9).state_dict())
    with pytest.raises(ValueError, match="step_00000002 holds other weights"):
        open_model(adapter)
    (base / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ValueError, match="step_00000002 cannot be loaded"):
        open_model(adapter)


def rewrite(folder: Path, **changes: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def retype(folder: Path, dtype: torch.dtype, value: float = 1) -> None:
    """Give one tensor another type, or one number another value."""
    path, name = folder / "adapter_model.safetensors", f"{PREFIX}model.layers.1.self_attn.k_proj.lora_B.weight"
    tensors = load_file(path)
    tensors[name][0, 0] = value
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, path, metadata={"base_fingerprint": base_fingerprint(base_model())})


def unsign(folder: Path) -> None:
    save_file(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.safetensors")


def test_a_merged_model_is_plain_and_computes_the_same():
    model = adapted()
    wanted = logits(model)
    assert share(wanted - logits(base_model()), wanted) > 0.05
    merge_lora(model)
    assert share(logits(model) - wanted, wanted) < 1e-5
    assert model.state_dict().keys() == base_model().state_dict().keys()
    assert {type(layer) for layer in model.modules() if isinstance(layer, torch.nn.Linear)} == {torch.nn.Linear}
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_merging_or_attaching_twice_is_refused(tmp_path):
    folder = save(tmp_path, adapted())
    model = adapted()
    with pytest.raises(ValueError, match="LoRA layers already"):
        attach_lora(model, LORA)
    with pytest.raises(ValueError, match="LoRA layers already"):
        load_adapter(model, folder)
    merge_lora(model)
    with pytest.raises(ValueError, match="no LoRA layers to merge"):
        merge_lora(model)


def test_a_model_in_bfloat16_takes_and_merges_updates_of_its_own_kind():
    model = base_model().bfloat16()
    attach_lora(model, LORA)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    merge_lora(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rank": 0}, "rank is 0"),
        ({"rank": True}, "rank is True"),
        ({"alpha": 0.0}, "alpha is 0.0"),
        ({"alpha": float("nan")}, "alpha is nan"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"targets": ()}, "targets is empty"),
        ({"targets": ("q_proj", "lm_head")}, "targets names 'lm_head'; choose from q_proj"),
        ({"rank": -1, "alpha": -2.0}, "rank is -1; it must be a whole number above 0; alpha is -2.0"),
    ],
)
def test_impossible_settings_are_refused_together(values, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        LoRAConfig(**values)
