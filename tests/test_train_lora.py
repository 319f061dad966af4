"""train_lora.py: it begins as its base, moves the adapter alone, and goes on exactly where it was."""

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import train_lora
import train_sft
from model.gpt import GPT, GPTConfig
from model.lora import TARGETS, LoRAConfig, attach_lora, lora_state, merge_lora, open_model, read_adapter
from model.minimind import minimind_state
from model.weights import load_model_folder, save_model_folder
from tests.conftest import ROOT, TINY, Peers, curve, lively, on_ranks, train
from tests.test_resume import cut_back
from tests.test_train_sft import write_chats
from trainer.checkpoint import load_tensors, step_folders
from trainer.options import parse_options

HOPELESS = 78
CONFIG = GPTConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
IDS = torch.randint(0, 6400, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "sft" / "step_00000009"
    save_model_folder(folder, CONFIG, lively(GPT(CONFIG)).state_dict(), tokenizer_folder=ROOT / "model" / "tokenizer")
    return folder


@pytest.fixture
def options(tmp_path: Path, base: Path) -> list:
    """Six steps on conversations, in float32, with a checkpoint after each."""
    chats = write_chats(tmp_path / "chats.jsonl", 30)
    return [
        *TINY, "--max_seq_len", 128, "--data_path", chats, "--cache_dir", tmp_path / "cache", "--from_weight", base,
        "--out_dir", tmp_path / "lora", "--lora_rank", 4, "--max_steps", 6, "--dtype", "float32", "--learning_rate",
        1e-2, "--checkpoint_interval", 1, "--keep_checkpoints", 99,
    ]  # fmt: skip


def adapt(*arguments: object) -> int:
    return train(*arguments, script=train_lora)


def refused(caplog: pytest.LogCaptureFixture, *arguments: object) -> str:
    """The one sentence that the run ends with."""
    caplog.clear()
    assert adapt(*arguments) == HOPELESS
    (error,) = [record.message for record in caplog.records if record.levelname == "ERROR"]
    return error


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(IDS)


def share(difference: Tensor, of: Tensor) -> float:
    return (difference.abs().max() / of.abs().max()).item()


def final(run_dir: Path) -> dict[str, bytes]:
    """The bits of the last checkpoint's tensors by file and name; the file's own order of its metadata is a dice's."""
    return {
        f"{name} {key}": tensor.numpy().tobytes()
        for name in ("adapter_model.safetensors", "optimizer.safetensors")
        for key, tensor in load_file(step_folders(run_dir)[-1] / name).items()
    }


def val_loss(run_dir: Path) -> float:
    """The last validation of a run."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line["val_loss"] for line in lines if "val_loss" in line][-1]


def test_a_run_begins_with_the_outputs_of_its_base_bit_for_bit(options: list, base: Path, tmp_path: Path) -> None:
    assert adapt(*options, "--max_steps", 1, "--learning_rate", 0) == 0
    assert torch.equal(logits(open_model(step_folders(tmp_path / "lora")[-1])), logits(load_model_folder(base)))


def test_a_run_says_how_many_parameters_it_trains(options: list, tmp_path: Path, caplog) -> None:
    caplog.set_level(logging.INFO)
    assert adapt(*options, "--max_steps", 1) == 0
    state = load_file(step_folders(tmp_path / "lora")[-1] / "adapter_model.safetensors")
    trained = sum(tensor.numel() for tensor in state.values())
    assert (
        f"parameters, {trained:,} of them trained; a checkpoint takes about {12 * trained / 1e6:.1f} MB" in caplog.text
    )


def test_a_checkpoint_holds_the_adapter_and_nothing_of_the_base(options: list, base: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    assert adapt(*options) == 0
    assert {path.name: path.read_bytes() for path in base.iterdir()} == before
    folder = step_folders(tmp_path / "lora")[-1]
    own = {"adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"}
    tokenizer = before.keys() - {"config.json", "model.safetensors"}
    assert "tokenizer.json" in tokenizer
    assert {path.name for path in folder.iterdir()} == own | tokenizer
    attach_lora(model := GPT(CONFIG), LoRAConfig(rank=4))
    moments = {name.split(".", 1)[1] for name in load_tensors(folder / "optimizer.safetensors")}
    assert read_adapter(folder).state.keys() == moments == lora_state(model).keys()
    assert read_adapter(folder).base == str(base)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks transformers the old way
def test_a_checkpoint_opens_in_peft_and_merges_with_equal_logits(options: list, base: Path, tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    assert adapt(*options, "--lora_targets", "q_proj,k_proj,down_proj") == 0
    folder = step_folders(tmp_path / "lora")[-1]
    foreign = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), folder)
    wanted, model = foreign.eval()(IDS).logits.detach(), open_model(folder)
    assert share(wanted - logits(load_model_folder(base)), wanted) > 0.01
    assert share(logits(model) - wanted, wanted) < 1e-5
    merge_lora(model)
    assert share(logits(model) - wanted, wanted) < 1e-5


def test_validation_during_training_is_that_of_the_saved_adapter_on_its_base(options: list, tmp_path: Path) -> None:
    """So the base in memory is the one on the disk still."""
    chats = write_chats(tmp_path / "val.jsonl", 5, seed=3)
    assert adapt(*options, "--val_path", chats) == 0
    again = ["--out_dir", tmp_path / "again", "--max_steps", 1, "--learning_rate", 0]
    model = open_model(step_folders(tmp_path / "lora")[-1])
    merge_lora(model)
    save_model_folder(tmp_path / "merged", CONFIG, model.state_dict(), tokenizer_folder=ROOT / "model" / "tokenizer")
    assert adapt(*options, "--val_path", chats, *again, "--from_weight", tmp_path / "merged") == 0
    assert val_loss(tmp_path / "again") == pytest.approx(val_loss(tmp_path / "lora"), rel=1e-5)


@pytest.mark.parametrize(
    "more", [["--dtype", "bfloat16"], ["--activation_checkpointing"], ["--compile"], ["--lora_dropout", 0.5]]
)
def test_the_updates_of_all_layers_are_trained(options: list, tmp_path: Path, more: list) -> None:
    assert adapt(*options, "--max_steps", 2, *more) == 0
    first, second = (read_adapter(folder).state for folder in step_folders(tmp_path / "lora"))
    assert len(first) == 2 * 7 * CONFIG.num_hidden_layers
    for name in first:  # B is zero at first, so A moves from the second step on
        assert not torch.equal(first[name], second[name]), name


def run_on_ranks(peers: Peers, folder: Path, options: list) -> None:
    """Straight through with what goes over the wire, then again from the third step."""
    peers.new_group()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        assert adapt(*options) == 0
    shapes = [event.input_shapes for event in profile.events() if event.name == "gloo:all_reduce"]
    numbers = [sum(torch.Size(shape).numel() for shape in inputs) for inputs in shapes]
    attach_lora(model := GPT(CONFIG), LoRAConfig(rank=4))
    adapter = sum(parameter.numel() for parameter in lora_state(model).values())
    # One more to settle the buckets; all others are the few numbers that ranks agree on.
    assert sorted(numbers)[-7:] == [adapter] * 7
    assert sorted(numbers)[-8] <= 64
    if peers.rank == 0:
        cut_back(folder / "lora", folder / "resumed", 3)
    peers.new_group()
    assert adapt(*options, "--out_dir", folder / "resumed") == 0


def test_ranks_exchange_the_adapter_alone_and_resume_exactly(options: list, tmp_path: Path) -> None:
    options += ["--gradient_accumulation_steps", 2, "--lora_dropout", 0.1]
    on_ranks(2, run_on_ranks, tmp_path, options)
    assert len(curve(tmp_path / "lora")) == 6
    assert curve(tmp_path / "resumed") == curve(tmp_path / "lora")
    assert final(tmp_path / "resumed") == final(tmp_path / "lora")
    model = open_model(step_folders(tmp_path / "lora")[-1])
    assert len(lora_state(model)) == 2 * 7 * CONFIG.num_hidden_layers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_step_is_a_point_to_resume_from(options: list, tmp_path: Path, dtype: str) -> None:
    options += ["--lora_dropout", 0.1, "--dropout", 0.1, "--dtype", dtype]
    assert adapt(*options) == 0
    straight = curve(tmp_path / "lora")
    assert len(straight) == 6
    for step in range(6):
        resumed = cut_back(tmp_path / "lora", tmp_path / f"from_{step}", step)
        assert adapt(*options, "--out_dir", resumed) == 0
        assert curve(resumed) == straight, f"interrupted after step {step}"
        assert final(resumed) == final(tmp_path / "lora"), f"interrupted after step {step}"


def test_a_mixture_with_general_data_is_validated_by_source_and_resumes_exactly(options: list, tmp_path: Path) -> None:
    general, domain = (write_chats(tmp_path / f"{name}.jsonl", 20, seed=7) for name in ("general", "domain"))
    options += ["--data_path", general, domain, "--data_weights", 0.8, 0.2, "--val_path", general, domain]
    assert adapt(*options) == 0
    resumed = cut_back(tmp_path / "lora", tmp_path / "resumed", 3)
    assert adapt(*options, "--out_dir", resumed) == 0
    assert curve(resumed) == curve(tmp_path / "lora")
    assert final(resumed) == final(tmp_path / "lora")
    last = json.loads((resumed / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["val_loss/general"] > 0
    assert last["val_loss/domain"] > 0


def test_a_resumed_run_saves_the_tokenizer_though_what_it_began_with_is_deleted(options: list, tmp_path: Path) -> None:
    keep = ["--keep_checkpoints", 1]
    assert adapt(*options, "--max_steps", 2, *keep) == 0
    assert adapt(*options, *keep) == 0
    (folder,) = step_folders(tmp_path / "lora")
    assert folder.name == "step_00000006"
    assert (folder / "tokenizer.json").is_file()


def test_other_settings_on_resume_are_refused_with_saved_and_given_value(
    options: list, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert adapt(*options, "--max_steps", 1, "--lora_targets", "v_proj,q_proj") == 0
    before = final(tmp_path / "lora")
    message = refused(caplog, *options, "--lora_targets", "q_proj", "--lora_rank", 8, "--lora_alpha", 8)
    for words in (
        "lora.rank: 4 there, 8 here",
        "lora.alpha: 32.0 there, 8.0 here",
        "lora.targets: 'q_proj,v_proj' there, 'q_proj' here",
    ):
        assert words in message
    assert final(tmp_path / "lora") == before
    # What means the same is the same.
    assert adapt(*options, "--max_steps", 2, "--lora_targets", "q_proj, v_proj") == 0


def test_a_resumed_run_finds_its_base_by_its_own_record_or_says_that_it_is_gone(
    options: list, base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert adapt(*options, "--max_steps", 2) == 0
    # --from_weight names nothing any more, and the base stands where it was.
    assert adapt(*options, "--max_steps", 3, "--from_weight", tmp_path / "nothing") == 0
    aside = base.rename(tmp_path / "aside")
    message = refused(caplog, *options)
    assert f"needs the base model that it was trained on, {base}" in message
    assert "is not there" in message
    save_model_folder(base, CONFIG, lively(GPT(CONFIG), seed=5).state_dict())
    assert "holds other weights" in refused(caplog, *options)
    shutil.rmtree(base)
    aside.rename(base)
    assert adapt(*options) == 0


def test_a_run_as_base_means_its_newest_step_which_training_on_may_delete(
    options: list, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    at = options.index("--lora_rank")
    sft = [*options[:at], *options[at + 2 :], "--out_dir", tmp_path / "base_run", "--keep_checkpoints", 1]
    assert train(*sft, "--max_steps", 2, script=train_sft) == 0
    assert adapt(*options, "--from_weight", tmp_path / "base_run", "--max_steps", 2) == 0
    newest = tmp_path / "base_run" / "step_00000002"
    assert read_adapter(step_folders(tmp_path / "lora")[-1]).base == str(newest)
    assert train(*sft, "--max_steps", 4, script=train_sft) == 0
    message = refused(caplog, *options, "--from_weight", tmp_path / "base_run")
    assert f"{newest} is not there" in message
    assert "a run deletes its older checkpoints when it is trained on" in message


def test_a_minimind_file_is_a_base_also_for_a_resumed_run(options: list, tmp_path: Path) -> None:
    config = replace(CONFIG, num_attention_heads=8)
    torch.save(minimind_state(config, lively(GPT(config)).state_dict()), file := tmp_path / "full_sft_64.pth")
    options += ["--num_attention_heads", 8, "--from_weight", file, "--tokenizer_path", "model/tokenizer"]
    assert adapt(*options, "--max_steps", 2) == 0
    assert adapt(*options, "--max_steps", 3) == 0
    assert lora_state(open_model(step_folders(tmp_path / "lora")[-1]))


def test_a_base_must_be_a_trained_model_and_no_adapter(
    options: list, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert "--from_weight none" in refused(caplog, *options, "--from_weight", "none")
    assert adapt(*options, "--max_steps", 1) == 0
    other = ["--out_dir", tmp_path / "other", "--from_weight", tmp_path / "lora"]
    message = refused(caplog, *options, *other)
    assert "is an adapter" in message
    assert "--merge_lora" in message
    assert "choose from q_proj" in refused(caplog, *options, "--lora_targets", "lm_head")


@pytest.mark.parametrize("resume", [0, 1])
def test_a_base_inside_the_run_s_own_folder_is_refused_and_stays(
    options: list, base: Path, caplog: pytest.LogCaptureFixture, resume: int
) -> None:
    here = ["--out_dir", base.parent, "--from_weight", base, "--resume_from_checkpoint", resume]
    message = refused(caplog, *options, *here)
    assert f"--from_weight {base} lies in the run's own folder" in message
    assert "give another --out_dir" in message
    assert load_model_folder(base)


def test_the_defaults_and_minimind_s_names() -> None:
    args = parse_options(train_lora.options(), [])
    assert (args.lora_targets.split(","), args.from_weight, args.out_dir) == (list(TARGETS), "out/sft", "out/lora")
    args = parse_options(train_lora.options(), ["--lora_name", "lora_medical", "--from_weight", "full_sft"])
    assert (args.out_dir, args.from_weight) == ("out/lora_medical", "out/sft")
    args = parse_options(train_lora.options(), ["--save_dir", "../out", "--lora_name", "lora_medical"])
    assert args.out_dir == "../out/lora_medical"


def test_the_file_s_tensors_are_float32_whatever_the_dtype(options: list, tmp_path: Path) -> None:
    assert adapt(*options, "--max_steps", 1, "--dtype", "bfloat16") == 0
    tensors = load_file(step_folders(tmp_path / "lora")[-1] / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
