"""scripts/export.py: what it writes is what transformers and MiniMind read, or nothing is written."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dataset.tokenizer import load_tokenizer
from model.gpt import GPT, GPTConfig
from model.lora import LoRAConfig, attach_lora, base_fingerprint, lora_parameters, open_model, save_adapter
from model.weights import load_model, load_model_folder, save_model_folder
from scripts import chat, export
from tests.conftest import ROOT, lively
from trainer.checkpoint import write_checkpoint

TOKENIZER = ROOT / "model" / "tokenizer"
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 2, "intermediate_size": 96}
TOKENIZER_FILES = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


def save(folder: Path, seed: int = 0, **changes) -> Path:
    model = lively(GPT(GPTConfig(**SIZES | {"num_attention_heads": 4} | changes)), seed)
    save_model_folder(folder, model.config, model.state_dict(), tokenizer_folder=TOKENIZER)
    return folder


def adapter(folder: Path, base: Path) -> Path:
    model, lora = load_model(base), LoRAConfig(rank=4)
    fingerprint = base_fingerprint(model)
    attach_lora(model, lora)
    with torch.no_grad():
        for number, parameter in enumerate(lora_parameters(model)):
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    save_adapter(folder, model, lora, model.state_dict(), base=str(base), base_fingerprint=fingerprint)
    load_tokenizer(TOKENIZER).save(folder)
    return folder


def exported(*arguments: object) -> str:
    return export.export(export.options().parse_args([str(argument) for argument in arguments]))


def parsed_bound(said: str) -> tuple[float, float]:
    difference, allowed = said.partition("at most ")[2].split(" (allowed: ")
    return float(difference), float(allowed.partition(")")[0])


def ids() -> torch.Tensor:
    return torch.randint(0, 6400, (2, 40), generator=torch.Generator().manual_seed(1))


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_run_becomes_a_folder_that_transformers_opens_and_nothing_else(tmp_path: Path, qk_norm: bool) -> None:
    transformers = pytest.importorskip("transformers")
    run, target = tmp_path / "run", tmp_path / "new" / "model"
    run.mkdir()

    def write(folder: Path) -> None:
        save(folder, qk_norm=qk_norm)
        (folder / "optimizer.safetensors").write_bytes(b"moments")

    step = write_checkpoint(run, 7, write, {"stage": "sft"}, lambda: None)
    said = exported(run, target)
    assert names_in(target) == {"config.json", "generation_config.json", "model.safetensors", *TOKENIZER_FILES}
    assert names_in(target.parent) == {"model"}
    difference, allowed = parsed_bound(said)
    assert difference <= allowed < 0.01
    wanted = load_model_folder(step).eval()
    foreign = transformers.AutoModelForCausalLM.from_pretrained(target).eval()
    with torch.no_grad():
        got, expected = foreign(ids()).logits, wanted(ids())
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    asked = [{"role": "user", "content": "你好"}]
    assert "你好" in tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert foreign.generation_config.eos_token_id == tokenizer.eos_token_id


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_rounded_to_the_dtype_asked_for(tmp_path: Path, dtype: str) -> None:
    pytest.importorskip("transformers")
    said = exported(save(tmp_path / "model"), tmp_path / "small", "--dtype", dtype)
    kept, small = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "small"))
    assert {str(tensor.dtype) for tensor in small.values()} == {f"torch.{dtype}"}
    assert all(torch.equal(small[name], tensor.to(getattr(torch, dtype))) for name, tensor in kept.items())
    assert json.loads((tmp_path / "small" / "config.json").read_text())["dtype"] == dtype
    assert f"the rounding to {dtype} changed them by" in said


@pytest.mark.parametrize("target", ["folder", "file.pth"])
def test_what_is_too_large_for_float16_is_refused_and_leaves_nothing(tmp_path: Path, target: str) -> None:
    source = save(tmp_path / "model", num_attention_heads=8, qk_norm=True, rms_norm_eps=1e-6)
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][0] = 1e5
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ValueError, match=r"1 tensors do not fit into .*float16 .as model\.norm\.weight"):
        exported(source, tmp_path / target, "--dtype", "float16")
    assert names_in(tmp_path) == {"model"}


def test_a_minimind_file_holds_the_same_model(tmp_path: Path) -> None:
    source = save(tmp_path / "model", num_attention_heads=8, qk_norm=True, rms_norm_eps=1e-6)
    said = exported(source, tmp_path / "full_sft_64.pth")
    assert parsed_bound(said)[0] <= parsed_bound(said)[1]
    written = torch.load(tmp_path / "full_sft_64.pth", weights_only=True)
    assert written["lm_head.weight"].dtype == torch.float16
    again = load_model(tmp_path / "full_sft_64.pth").state_dict()
    for name, tensor in load_model_folder(source).state_dict().items():
        assert torch.equal(again[name], tensor.half().float())
    # And back, with a tokenizer to go beside it.
    with pytest.raises(ValueError, match="no tokenizer beside it"):
        exported(tmp_path / "full_sft_64.pth", tmp_path / "back")
    exported(tmp_path / "full_sft_64.pth", tmp_path / "back", "--tokenizer_path", TOKENIZER)
    assert load_model_folder(tmp_path / "back").config.num_attention_heads == 8


def test_a_minimind_files_heads_are_those_that_are_named_or_the_guess_is_said(tmp_path: Path, caplog) -> None:
    pytest.importorskip("transformers")
    kept = load_model_folder(save(tmp_path / "model")).state_dict()
    torch.save({name: tensor.half() for name, tensor in kept.items()}, tmp_path / "h4.pth")
    exported(tmp_path / "h4.pth", tmp_path / "guessed", "--tokenizer_path", TOKENIZER)
    assert "h4.pth does not say how many attention heads it has: 8 are taken" in caplog.text
    caplog.clear()
    heads = ["--num_attention_heads", 4]
    exported(tmp_path / "h4.pth", tmp_path / "named", "--tokenizer_path", TOKENIZER, *heads)
    assert "attention heads" not in caplog.text
    found = [load_model_folder(tmp_path / name).config.num_attention_heads for name in ("guessed", "named")]
    assert found == [8, 4]
    with pytest.raises(ValueError, match="-1 attention heads asked for"):
        exported(tmp_path / "h4.pth", tmp_path / "none", "--num_attention_heads", -1)
    with pytest.raises(ValueError, match="guessed has 8 attention heads, and 4 are asked for"):
        exported(tmp_path / "guessed", tmp_path / "none", *heads)


def test_what_a_minimind_file_cannot_say_is_refused_in_a_line(tmp_path: Path) -> None:
    source = save(tmp_path / "model")
    with pytest.raises(ValueError, match="cannot be a MiniMind file: num_attention_heads is 4, MiniMind takes 8"):
        exported(source, tmp_path / "model.pth")
    with pytest.raises(ValueError, match="--dtype bfloat16: MiniMind's files are float16"):
        exported(source, tmp_path / "model.pth", "--dtype", "bfloat16")
    assert names_in(tmp_path) == {"model"}


def test_a_merged_adapter_is_a_plain_model_with_the_adapted_ones_logits(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    source = adapter(tmp_path / "lora", save(tmp_path / "base"))
    exported("--merge_lora", source, tmp_path / "merged")
    with torch.no_grad():
        base, wanted, got = (
            model.eval()(ids())
            for model in (load_model(tmp_path / "base"), open_model(source), load_model(tmp_path / "merged"))
        )
    assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max() < (base - wanted).abs().max()


@pytest.mark.parametrize(("stage", "chats"), [("pretrain", False), ("sft", True), ("lora", True), (None, False)])
def test_an_export_is_talked_to_as_it_was_trained(tmp_path: Path, stage: str | None, chats: bool) -> None:
    transformers = pytest.importorskip("transformers")
    run, targets = tmp_path / "run", [tmp_path / "first", tmp_path / "again"]
    run.mkdir()
    if stage is None:
        source = save(run / "foreign")
    elif stage == "lora":
        source = adapter(run / "adapter", save(tmp_path / "base"))
    else:
        source = write_checkpoint(run, 7, save, {"stage": stage}, lambda: None)
    said = exported(source, targets[0], *(["--merge_lora"] if stage == "lora" else []))
    told = f"python -m scripts.chat --load_from {targets[0]}"
    assert said.endswith(f": {told}")
    assert ("talk to it" in said) == chats
    assert ("--mode chat" in said) == (stage is None)
    exported(targets[0], targets[1])  # it stays in an export of an export
    for target in targets:
        assert chat.stage_of(target) == stage
        assert chat.open_session(chat.options().parse_args(["--load_from", str(target)])).chats == chats
    # And in what transformers makes of it.
    transformers.AutoModelForCausalLM.from_pretrained(targets[0]).save_pretrained(tmp_path / "theirs")
    assert chat.stage_of(tmp_path / "theirs") == stage


def test_a_minimind_file_cannot_tell_so_the_command_that_talks_to_it_does(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    sizes = {"num_attention_heads": 8, "qk_norm": True, "rms_norm_eps": 1e-6}
    step = write_checkpoint(run, 7, lambda folder: save(folder, **sizes) and None, {"stage": "sft"}, lambda: None)
    said = exported(run, tmp_path / "full_sft_64.pth")
    command = said.partition("talk to it: python -m scripts.chat ")[2].split()
    assert command == ["--load_from", f"{tmp_path}/full_sft_64.pth", "--tokenizer_path", str(step), "--mode", "chat"]
    assert chat.open_session(chat.options().parse_args(command)).chats


def test_an_adapter_is_merged_once_and_into_its_own_base_only(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    base, other = save(tmp_path / "base"), save(tmp_path / "other", seed=1)
    source = adapter(tmp_path / "lora", base)
    with pytest.raises(ValueError, match="is an adapter; --merge_lora adds it"):
        exported(source, tmp_path / "plain")
    with pytest.raises(ValueError, match="was trained on another base model"):
        exported(source, tmp_path / "plain", "--merge_lora", "--base", other)
    exported(source, tmp_path / "plain", "--merge_lora", "--base", base)
    with pytest.raises(ValueError, match="merged already"):
        exported(tmp_path / "plain", tmp_path / "twice", "--merge_lora")
    with pytest.raises(ValueError, match="was trained on another base model"):
        exported(source, tmp_path / "twice", "--merge_lora", "--base", tmp_path / "plain")
    assert names_in(tmp_path) == {"base", "other", "lora", "plain"}


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    source = save(tmp_path / "model")
    (tmp_path / "file.pth").write_text("mine")
    for target in (source, tmp_path / "file.pth"):
        with pytest.raises(ValueError, match="is there already"):
            exported(source, target)
    assert (tmp_path / "file.pth").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    exported(source, tmp_path / "empty")
    assert "model.safetensors" in names_in(tmp_path / "empty")


def test_what_reads_back_otherwise_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    source, write_folder = save(tmp_path / "model"), export.write_folder

    def damaged(folder: Path, *arguments: object) -> None:
        write_folder(folder, *arguments)
        tensors = load_file(folder / "model.safetensors")
        tensors["model.layers.1.mlp.up_proj.weight"][0] = 0
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(export, "write_folder", damaged)
    with pytest.raises(ValueError, match="read back, its logits differ by"):
        exported(source, tmp_path / "target")
    assert names_in(tmp_path) == {"model"}


def test_missing_and_unexpected_tensors_are_counted(tmp_path: Path) -> None:
    source = save(tmp_path / "model")
    tensors = load_file(source / "model.safetensors")
    tensors["model.extra.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ValueError, match=r"1 missing \(model.norm.weight\); 1 unexpected \(model.extra.weight\)"):
        exported(source, tmp_path / "target")
