"""scripts/evaluate.py: training's own validation again, and which answers to questions count as right."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import train_lora
import train_sft
from dataset.tokenizer import load_tokenizer
from model.gpt import GPT, GPTConfig
from model.weights import save_model_folder
from scripts import evaluate
from tests.conftest import ROOT, TINY, lively, train, write_texts
from tests.test_train_sft import write_chats
from trainer.checkpoint import step_folders

CONFIG = GPTConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


def parsed(*arguments: object) -> argparse.Namespace:
    return evaluate.options().parse_args([*map(str, arguments), "--device", "cpu"])


def save(folder: Path, **changes) -> Path:
    model = lively(GPT(replace(CONFIG, **changes)))
    save_model_folder(folder, model.config, model.state_dict(), tokenizer_folder=ROOT / "model" / "tokenizer")
    return folder


def last_validation(run: Path) -> dict[str, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "val_loss" in line][-1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_texts_measure_as_the_trainings_last_validation(tmp_path: Path, texts: Path, dtype: str) -> None:
    run, held_out = tmp_path / "run", write_texts(tmp_path / "held_out.jsonl", 9, seed=5)
    where = ["--cache_dir", tmp_path / "cache", "--dtype", dtype]
    assert train(*TINY, *where, "--data_path", texts, "--val_path", held_out, "--max_steps", 4, "--out_dir", run) == 0
    found = evaluate.evaluate_folder(parsed(run, held_out, "--max_seq_len", 32, *where))
    wanted = last_validation(run)
    assert found["val_loss"] == pytest.approx(wanted["val_loss"], abs=1e-6)
    assert found["val_bits_per_byte"] == pytest.approx(wanted["val_bits_per_byte"], abs=1e-6)


def test_chats_measure_as_the_trainings_last_validation(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run, base = tmp_path / "run", save(tmp_path / "base")
    chats, held_out = write_chats(tmp_path / "chats.jsonl", 20), write_chats(tmp_path / "held_out.jsonl", 9, seed=5)
    same = ["--cache_dir", tmp_path / "cache", "--dtype", "float32", "--max_seq_len", 96]
    options = ["--data_path", chats, "--val_path", held_out, "--from_weight", base, "--max_steps", 3, "--out_dir", run]
    more = ["--batch_size", 2, "--num_workers", 0, "--device", "cpu"]
    assert train(*options, *same, *more, script=train_sft) == 0
    found = evaluate.evaluate_folder(parsed(run, held_out, *same))
    wanted = last_validation(run)
    assert found["val_loss"] == pytest.approx(wanted["val_loss"], abs=1e-6)
    assert found["val_bits_per_byte"] == pytest.approx(wanted["val_bits_per_byte"], abs=1e-6)
    assert f"loss {wanted['val_loss']:.3f}" in capsys.readouterr().out
    # A step's folder is as good as its run's.
    assert evaluate.evaluate_folder(parsed(step_folders(run)[-1], held_out, *same)) == found


@pytest.mark.parametrize(
    ("answer", "accepted", "right"),
    [
        ("共有12个。", ["12"], True),
        ("It is 12.", ["12"], True),
        ("112", ["12"], False),
        ("12.5", ["12"], False),
        ("1200 or 12,5", ["12"], False),
        ("The capital is PARIS.", ["Paris"], True),
        ("Parisian", ["Paris"], False),
        ("答案是巴黎市", ["巴黎"], True),
        ("首都是Paris。", ["巴黎", "Paris"], True),
        ("", ["Paris"], False),
        ("-12", ["12"], False),
        ("34-9=25", ["25"], True),
        ("34-9=25", ["9"], False),
        ("一46，二47，三48。45 + 2 = 48", ["47"], False),
        ("答案是１２", ["12"], True),
        ("I love CAFÉ.", ["café"], True),
        ("Zürich", ["Z"], False),
        ("答：１２。", ["12"], True),
        ("It is -12.", ["12"], False),
        ("30-12", ["12"], True),
        ("Éclair", ["clair"], False),
        ("CAFÉ!", ["café"], True),
    ],
)
def test_an_accepted_answer_stands_whole_in_a_right_one(answer: str, accepted: list[str], right: bool) -> None:
    assert evaluate.is_right(answer, accepted) is right


def test_every_question_is_shown_with_its_answer_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder, questions = save(tmp_path / "model"), tmp_path / "questions.jsonl"
    asked = ["What is the capital of France?", "1+1?", "你好"]
    lines = [{"question": text, "answers": ["\u0000"], "topic": text[0]} for text in asked]

    def write() -> None:
        questions.write_text("".join(json.dumps(line) + "\n" for line in lines))

    write()
    assert evaluate.evaluate_folder(parsed(folder, questions, "--max_new_tokens", 5)) is None
    first = capsys.readouterr().out.splitlines()
    assert [line.startswith(f"WRONG  {text}  ->  ") for line, text in zip(first, asked, strict=False)] == [True] * 3
    assert first[-1] == "0 of 3 right; 0 of 3 answers ended by themselves"
    assert first[-2] == "by topic: W 0/1, 1 0/1, 你 0/1"
    # What the model says to the last one is accepted now: batches of one answer as batches of three do.
    lines[2]["answers"] = [first[2].partition("  ->  ")[2]]
    write()
    evaluate.evaluate_folder(parsed(folder, questions, "--max_new_tokens", 5, "--batch_size", 1))
    second = capsys.readouterr().out.splitlines()
    assert second[2] == first[2].replace("WRONG", "right", 1)
    assert second[-1].startswith("1 of 3 right")


def test_a_topic_that_is_no_name_is_refused_before_anything_is_answered(tmp_path: Path) -> None:
    folder, questions = save(tmp_path / "model"), tmp_path / "questions.jsonl"
    questions.write_text('{"question": "a", "answers": ["b"]}\n{"question": "a", "answers": ["b"], "topic": ["c"]}\n')
    with pytest.raises(ValueError, match=r"questions\.jsonl:2: the topic is \['c'\]; give a string"):
        evaluate.evaluate_folder(parsed(folder, questions))


def test_an_interrupt_ends_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def interrupt(_: argparse.Namespace) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluate, "evaluate_folder", interrupt)
    monkeypatch.setattr("sys.argv", ["evaluate", "a", "b"])
    with pytest.raises(SystemExit) as end:
        evaluate.main()
    assert end.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("bad", ['{"question": "c"}', '{"question": "c", "answers": "d"}', '["c"]'])
def test_a_record_that_is_no_question_is_named(tmp_path: Path, bad: str) -> None:
    folder, questions = save(tmp_path / "model"), tmp_path / "questions.jsonl"
    questions.write_text('{"question": "a", "answers": ["b"]}\n' + bad + "\n")
    with pytest.raises(ValueError, match=r"questions\.jsonl.*2.*no question"):
        evaluate.evaluate_folder(parsed(folder, questions))


def test_an_answer_that_ends_at_its_end_token_is_counted(capsys: pytest.CaptureFixture) -> None:
    model = lively(GPT(replace(CONFIG, tie_word_embeddings=False))).eval()
    with torch.no_grad():
        model.lm_head.weight.zero_()  # every token is as likely, and the first of them is taken
    tokenizer = load_tokenizer(ROOT / "model" / "tokenizer")
    for end in (0, 5):
        evaluate.ask(model, replace(tokenizer, eos_id=end), [{"question": "1+1?", "answers": ["2"]}], 1, 3)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "WRONG  1+1?  ->  "
    assert printed[1] == "0 of 1 right; 1 of 1 answers ended by themselves"
    assert printed[3] == "0 of 1 right; 0 of 1 answers ended by themselves"


def test_an_adapter_is_measured_with_its_updates(tmp_path: Path) -> None:
    base, run = save(tmp_path / "base"), tmp_path / "lora"
    chats = write_chats(tmp_path / "chats.jsonl", 20)
    same = ["--cache_dir", tmp_path / "cache", "--dtype", "float32", "--max_seq_len", 96]
    options = ["--data_path", chats, "--val_path", chats, "--from_weight", base, "--max_steps", 3, "--out_dir", run]
    more = ["--batch_size", 2, "--num_workers", 0, "--device", "cpu", "--learning_rate", 1e-2]
    assert train(*options, *same, *more, script=train_lora) == 0
    adapted, plain = (evaluate.evaluate_folder(parsed(folder, chats, *same))["val_loss"] for folder in (run, base))
    assert adapted == pytest.approx(last_validation(run)["val_loss"], abs=1e-6)
    assert abs(adapted - plain) > 1e-3


def test_numbers_out_of_range_are_one_error_before_anything_is_opened(tmp_path: Path) -> None:
    options = ["--batch_size", -1, "--max_seq_len", 0, "--max_new_tokens", 0]
    with pytest.raises(ValueError, match="--batch_size -1: must be at least 1") as refusal:
        evaluate.evaluate_folder(parsed(tmp_path / "none", tmp_path / "none.jsonl", *options))
    for words in ("--max_seq_len 0: must be at least 2", "--max_new_tokens 0: must be at least 1"):
        assert words in str(refusal.value)


def test_rows_beyond_the_models_positions_are_refused(tmp_path: Path) -> None:
    folder, texts = save(tmp_path / "model", max_position_embeddings=64), write_texts(tmp_path / "texts.jsonl", 3)
    with pytest.raises(ValueError, match="65"):
        evaluate.evaluate_folder(parsed(folder, texts, "--max_seq_len", 65, "--cache_dir", tmp_path / "cache"))
