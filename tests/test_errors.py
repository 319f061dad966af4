"""Wrong input ends with one clear sentence, a code that says "do not retry", and nothing lost."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT, TINY, curve, final_bytes, train, write_texts
from trainer.monitor import Console, Monitor

HOPELESS = 78


@pytest.fixture
def options(texts: Path, tmp_path: Path) -> list:
    return [*TINY, "--data_path", texts, "--cache_dir", tmp_path / "cache", "--out_dir", tmp_path / "run"]


def refused(caplog: pytest.LogCaptureFixture, *arguments: object) -> str:
    """The one sentence that the run ends with."""
    caplog.clear()
    assert train(*arguments) == HOPELESS
    errors = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1, errors
    return errors[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_is_refused(options: list, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    message = refused(caplog, *options, "--device", "cuda")
    assert "--device cuda" in message
    assert "--device cpu" in message
    assert not (tmp_path / "run").exists()


def test_unknown_devices_are_refused(options: list, caplog: pytest.LogCaptureFixture) -> None:
    assert "use cuda, cpu or mps" in refused(caplog, *options, "--device", "tpu9000")


def test_a_missing_data_file_is_named(options: list, caplog: pytest.LogCaptureFixture) -> None:
    assert "/no/such.jsonl" in refused(caplog, *options, "--data_path", "/no/such.jsonl")


def test_a_missing_tokenizer_is_named(options: list, caplog: pytest.LogCaptureFixture) -> None:
    assert "/no/tokenizer" in refused(caplog, *options, "--tokenizer_path", "/no/tokenizer")


def test_an_out_folder_that_is_a_file_is_refused(options: list, caplog: pytest.LogCaptureFixture, tmp_path) -> None:
    (tmp_path / "file").write_text("mine")
    assert str(tmp_path / "file") in refused(caplog, *options, "--out_dir", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_sizes_that_do_not_fit_are_told_together(options: list, caplog: pytest.LogCaptureFixture) -> None:
    message = refused(caplog, *options, "--num_attention_heads", 5, "--num_key_value_heads", 3)
    assert "num_attention_heads 5" in message
    assert "num_key_value_heads 3" in message


def test_too_little_data_is_an_error_with_the_numbers(options: list, caplog: pytest.LogCaptureFixture) -> None:
    message = refused(caplog, *options, "--batch_size", 4096)
    assert "4096" in message
    assert "--max_steps" in message


@pytest.mark.parametrize("weights", ["/no/run", "empty"])
def test_from_weight_without_weights_is_refused(options: list, caplog, tmp_path: Path, weights: str) -> None:
    (tmp_path / "empty").mkdir()
    assert weights in refused(caplog, *options, "--from_weight", tmp_path / weights)


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        (["--seed", 7], "seed: 42 there, 7 here"),
        (["--batch_size", 4], "global_batch: 2 there, 4 here"),
        (["--qk_norm"], "model.qk_norm: False there, True here"),
        (["--dropout", 0.5], "model.dropout: 0.0 there, 0.5 here"),
        (["--max_seq_len", 16], "max_seq_len: 32 there, 16 here"),
    ],
)
def test_what_must_not_change_on_resume_is_refused_with_both_values(
    options: list, caplog, tmp_path: Path, changed: list, part: str
) -> None:
    assert train(*options, "--max_steps", 4) == 0
    before = final_bytes(tmp_path / "run")
    assert part in refused(caplog, *options, "--max_steps", 8, *changed)
    assert final_bytes(tmp_path / "run") == before
    assert train(*options, "--max_steps", 8) == 0


def test_other_data_are_refused_on_resume(options: list, caplog, tmp_path: Path) -> None:
    assert train(*options, "--max_steps", 4) == 0
    other = write_texts(tmp_path / "other.jsonl", 64, seed=1)
    assert "data: " in refused(caplog, *options, "--max_steps", 8, "--data_path", other)


def test_the_rate_may_change_on_resume_but_aloud(options: list, caplog, tmp_path: Path) -> None:
    assert train(*options, "--max_steps", 4) == 0
    assert train(*options, "--max_steps", 6, "--learning_rate", 2e-3, "--log_interval", 2) == 0
    assert "--learning_rate changed from 0.001 to 0.002 at step 4" in caplog.text
    assert "--max_steps changed from 4 to 6" in caplog.text
    assert "log_interval" not in caplog.text
    assert "not bit-exact" not in caplog.text


def test_what_ends_bit_exactness_is_named_on_resume(options: list, caplog, tmp_path: Path) -> None:
    assert train(*options, "--max_steps", 4, "--dtype", "float32") == 0
    assert train(*options, "--max_steps", 6, "--dtype", "bfloat16") == 0
    assert "not bit-exact with the run so far: dtype float32 -> bfloat16" in caplog.text


def test_a_finished_run_says_so_and_exits_with_0(options: list, caplog, tmp_path: Path) -> None:
    assert train(*options, "--max_steps", 4) == 0
    before = final_bytes(tmp_path / "run")
    caplog.set_level("INFO")
    assert train(*options, "--max_steps", 4) == 0
    assert "already finished at step 4" in caplog.text
    assert final_bytes(tmp_path / "run") == before
    assert json.loads((tmp_path / "run" / "exit.json").read_text())["code"] == 0


def test_one_more_epoch_continues_a_finished_run(options: list, tmp_path: Path) -> None:
    assert train(*options, "--epochs", 1, "--lr_schedule", "constant", "--warmup_steps", 0) == 0
    done = len(curve(tmp_path / "run"))
    assert train(*options, "--epochs", 2, "--lr_schedule", "constant", "--warmup_steps", 0) == 0
    assert [point[0] for point in curve(tmp_path / "run")] == list(range(1, 2 * done + 1))


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(options: list, caplog, tmp_path: Path) -> None:
    assert train(*options, "--max_steps", 4, "--checkpoint_interval", 2) == 0
    straight = curve(tmp_path / "run"), final_bytes(tmp_path / "run")
    weights = tmp_path / "run" / "step_00000004" / "optimizer.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert train(*options, "--max_steps", 4, "--checkpoint_interval", 2) == 0
    assert "damaged checkpoint set aside" in caplog.text
    assert (tmp_path / "run" / "step_00000004.damaged").is_dir()
    assert (curve(tmp_path / "run"), final_bytes(tmp_path / "run")) == straight


def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_again_in_silence(
    options: list, caplog, tmp_path: Path
) -> None:
    assert train(*options, "--max_steps", 4, "--checkpoint_interval", 2) == 0
    before = curve(tmp_path / "run")
    for folder in (tmp_path / "run").glob("step_*"):
        (folder / "state.json").write_text("{}")
    for _ in range(2):
        assert "every checkpoint" in refused(caplog, *options, "--max_steps", 4)
        assert curve(tmp_path / "run") == before
    assert train(*options, "--max_steps", 4, "--resume_from_checkpoint", "false") == 0
    assert curve(tmp_path / "run.old-1") == curve(tmp_path / "run") == before


def test_not_resuming_sets_a_used_folder_aside(options: list, caplog, tmp_path: Path) -> None:
    for count in range(3):
        assert train(*options, "--max_steps", 2, "--resume_from_checkpoint", "false") == 0
        assert len(list(tmp_path.glob("run.old-*"))) == count
    # A start that fails for another reason moves nothing.
    refused(caplog, *options, "--data_path", "/no/such.jsonl", "--resume_from_checkpoint", "false")
    assert len(list(tmp_path.glob("run.old-*"))) == 2
    assert (tmp_path / "run.old-1" / "step_00000002").is_dir()
    assert (tmp_path / "run.old-2" / "step_00000002").is_dir()


def test_starting_weights_bring_their_architecture(options: list, caplog, tmp_path: Path) -> None:
    assert train(*options, "--max_steps", 2) == 0
    start = [*options[options.index("--max_seq_len") :], "--out_dir", tmp_path / "next", "--max_steps", 1]
    start += ["--from_weight", tmp_path / "run"]
    message = refused(caplog, *start, "--hidden_size", 128)
    assert "--hidden_size is 64 there and 128 here" in message
    assert train(*start) == 0
    (tmp_path / "run").rename(tmp_path / "moved")
    assert train(*start, "--max_steps", 2) == 0, "a resumed run needs the folder it started from no more"
    assert train(*start, "--max_steps", 3, "--from_weight", tmp_path / "moved") == 0
    assert f"--from_weight {tmp_path / 'moved'} has no effect" in caplog.text
    config = json.loads((tmp_path / "next" / "step_00000002" / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"]) == (64, 2)


def test_a_tokenizer_that_does_not_match_the_weights_is_refused(options: list, caplog, tmp_path: Path) -> None:
    assert train(*options, "--max_steps", 2) == 0
    other = tmp_path / "tokenizer"
    other.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (ROOT / "model" / "tokenizer" / name).read_text(encoding="utf-8")
        (other / name).write_text(text.replace('"<|buffer1|>"', '"<|other|>"'), encoding="utf-8")
    start = [*options, "--out_dir", tmp_path / "next", "--from_weight", tmp_path / "run", "--tokenizer_path", other]
    assert "tokenizer" in refused(caplog, *start)


def test_the_code_is_written_down_before_a_dashboard_is_waited_for(
    options: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def close(self: Console) -> None:
        seen.extend((json.loads((run / "exit.json").read_text())["code"], (run / "owner.json").exists()))

    run = tmp_path / "run"
    monkeypatch.setattr(Console, "close", close)
    assert train(*options, "--max_steps", 1) == 0
    assert seen == [0, True], "the folder is given back when nobody writes there any more"
    assert not (run / "owner.json").exists()


# train_pretrain.py whose first rank is slower than the others.
SLOW_FIRST = """
import os, time
import train_pretrain
from trainer.options import parse_options

if os.environ["RANK"] == "0":
    time.sleep(2)
train_pretrain.main(parse_options(train_pretrain.options()))
"""


@pytest.mark.integration
@pytest.mark.parametrize("option", ["--data_path", "--tokenizer_path"])
def test_the_first_rank_speaks_for_all_even_where_another_finds_the_error_first(
    options: list, tmp_path: Path, option: str
) -> None:
    (tmp_path / "slow.py").write_text(SLOW_FIRST)
    command = [sys.executable, "-m", "scripts.launch", "--nproc_per_node", 2, tmp_path / "slow.py", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    wrong = [*map(str, command), option, "/no/such"]
    ended = subprocess.run(wrong, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == HOPELESS, ended.stderr
    told = json.loads((tmp_path / "run" / "exit.json").read_text())
    assert told["code"] == HOPELESS
    assert "/no/such" in told["reason"]
    assert ended.stderr.count("/no/such") == 1, ended.stderr


@pytest.mark.parametrize(
    ("argv", "code", "part"),
    [
        (["--max_steps", "0", "--seed", "-1"], 2, "--max_steps 0"),
        (["--data_path", "/no/such.jsonl"], HOPELESS, "/no/such.jsonl"),
    ],
)
def test_the_script_itself_says_one_sentence_and_no_traceback(
    tmp_path: Path, argv: list[str], code: int, part: str
) -> None:
    command = [sys.executable, "train_pretrain.py", "--out_dir", str(tmp_path / "run"), *argv]
    ended = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert ended.returncode == code
    assert part in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("argv", "part"), [(["--vocab_size", "9"], "--vocab_size 9"), (["--data_path", "/no/such.jsonl"], "/no/such.jsonl")]
)
def test_the_tokenizers_trainer_says_one_sentence_too(tmp_path: Path, argv: list[str], part: str) -> None:
    command = [sys.executable, "-m", "scripts.train_tokenizer", "--data_path", "a", "--out_dir", str(tmp_path), *argv]
    ended = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert ended.returncode == 2
    assert part in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_files_whose_names_are_not_utf_8_can_be_trained_on_and_are_written_down(options: list, tmp_path: Path) -> None:
    data = tmp_path / os.fsdecode("你好.jsonl".encode("gbk"))
    write_texts(data, 8)
    assert train(*options, "--data_path", data, "--max_steps", 1) == 0
    run = tmp_path / "run"
    for path in [run / "options.json", *run.glob("step_*/*.json"), run / "exit.json"]:
        json.loads(path.read_text(encoding="utf-8"))
    assert json.loads((run / "options.json").read_text(encoding="utf-8"))["data_path"] == [str(data)]
    started = (run / "events.jsonl").read_text(encoding="utf-8").splitlines()[0]
    assert str(data) in json.loads(started)["command"]


def test_an_event_that_cannot_be_written_does_not_keep_the_code_from_being_written(
    options: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def event(self: Monitor, kind: str, **details: object) -> None:
        if kind == "ended":
            raise TypeError("no JSON")

    monkeypatch.setattr(Monitor, "event", event)
    with pytest.raises(TypeError):
        train(*options, "--max_steps", 1)
    assert json.loads((tmp_path / "run" / "exit.json").read_text())["code"] == 0
