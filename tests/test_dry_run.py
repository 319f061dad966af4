"""A dry run names everything that a start would trip over, tries a few steps, and leaves the run folder as it was."""

import hashlib
import json
import logging
import os
from pathlib import Path

import pytest

import train_lora
import train_pretrain
import train_sft
from tests.conftest import SHARED_DATA, TINY, Peers, on_ranks, train
from trainer import preflight
from trainer.options import parse_options
from trainer.ownership import claim
from trainer.preflight import duration

ODD = SHARED_DATA / "odd"
SMALL_CHATS = ["--max_seq_len", 512, "--from_weight", "none"]
# Of every line of MANIFEST.tsv what a dry run has to say of that file: (script, exit code, words).
NAMED = {
    "01_pretrain_crlf.jsonl": ("pretrain", 0, ["58 records used", "58 CRLF line ends"]),
    "02_pretrain_bom.jsonl": ("pretrain", 0, ["utf-8 with a byte order mark", "40 records used"]),
    "03_laws_gbk.txt": ("pretrain", 78, ["plain text", "not UTF-8", "it could be gb18030: --encoding gb18030"]),
    "04_medical_gb18030.csv": (
        "pretrain",
        78,
        ["a table (.csv)", "encoding gb18030", "300 rows of columns department, title, ask, answer", "9 commas"],
    ),
    "05_sharegpt_tools.json": (
        "sft",
        0,
        ["JSON array", "40 ShareGPT (from, value)", "23 with tool calls", "40 with tools as a JSON string"],
    ),
    "06_sharegpt.jsonl": ("sft", 0, ["JSON lines", "50 ShareGPT (from, value)", "50 of several questions"]),
    "07_alpaca.json": (
        "sft",
        0,
        ["60 Alpaca", "50 with an empty input", "5 with a history", "5 with a system text"],
    ),
    "08_openai_tools.jsonl": (
        "sft",
        0,
        ["40 OpenAI", "40 with calls nested in function", "40 with content null", "40 with tool_call_id"],
    ),
    "10_pretrain.parquet": ("pretrain", 0, ["parquet, zstd", "text (string), source (string), score", "300 records"]),
    "11_sft_messages.parquet": ("sft", 0, ["list<element: struct<content: string, role: string>>", "120 OpenAI"]),
    "12_pretrain.jsonl.gz": ("pretrain", 0, ["JSON lines, gzip", "400 records used"]),
    "15_blank_lines_no_final_newline.jsonl": (
        "pretrain",
        0,
        ["30 records used", "20 blank lines", "1 last line without a line end"],
    ),
    "16_null_text.jsonl": (
        "pretrain",
        78,
        [
            "10 records used", "10 problems", ':2: "text" is null', ':4: "text" is empty', ':6: "text" is empty',
            ':8: "text" is a number', ':10: "text" is a list', ':12: no "text" key (its keys: content;',
            ':14: no "text" key', ":16: null, not an object", ":18: a list, not", ":20: a string, not",
        ],
    ),
    "19_broken_lines.jsonl": (
        "pretrain",
        78,
        [
            "14 records used", "8 problems",
            *[f"19_broken_lines.jsonl:{line}: not JSON" for line in (8, 9, 10, 16, 17, 18)],
            ':11: "text" is a number', ":22: not JSON", "the file ends within this line: a broken download?",
        ],
    ),
    "22_excel_utf8bom.csv": (
        "pretrain",
        78,
        ["a table (.csv)", "byte order mark", "80 rows of columns 问题, 答案", "79 cells hold line ends", "63 commas"],
    ),
    "25_duplicates.jsonl": ("pretrain", 0, ["160 records used", "145 texts that are duplicates of another"]),
}  # fmt: skip
SCRIPTS = {"pretrain": train_pretrain, "sft": train_sft, "lora": train_lora}


def odd_files() -> list[str]:
    """What the manifest lists; without it nothing."""
    manifest = ODD / "MANIFEST.tsv"
    return [line.split("\t")[0] for line in manifest.read_text().splitlines()[1:]] if manifest.exists() else []


@pytest.fixture
def options(tmp_path: Path, texts: Path) -> list[object]:
    return [
        *TINY,
        "--data_path",
        texts,
        "--cache_dir",
        tmp_path / "cache",
        "--out_dir",
        tmp_path / "run",
        "--max_steps",
        9,
    ]


@pytest.fixture(autouse=True)
def _heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def contents(folder: Path) -> dict[str, str]:
    """Hash of every file below a folder, with the time it was last written."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(p): f"{hashlib.sha256(p.read_bytes()).hexdigest()} {p.stat().st_mtime_ns}" for p in files}


@pytest.mark.skipif(not ODD.exists(), reason="needs the odd files, which are not part of the clone")
@pytest.mark.parametrize("name", odd_files())
def test_every_defect_of_the_odd_files_is_named(tmp_path: Path, name: str, caplog) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    stage, code, words = NAMED[name]
    more = SMALL_CHATS if stage == "sft" else []
    places = ["--cache_dir", tmp_path / "cache", "--out_dir", tmp_path / "run"]
    given = [*TINY, "--data_path", ODD / name, *places, *more, "--dry_run"]
    assert train(*given, script=SCRIPTS[stage]) == code
    assert [word for word in words if word not in caplog.text] == []


def test_a_dry_run_tells_plan_memory_and_time_and_writes_only_the_cache(tmp_path: Path, options: list, caplog) -> None:
    assert train(*options, "--dry_run") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "texts.jsonl"]
    for words in (
        "64 records used", "tokens of a text", "nothing is cut: ", "global batch 2 sequences = 2 per micro-batch",
        "peak rate 0.001", "memory of a rank, estimated", "memory, measured: at most",
        "the 9 steps that are left take about", "dry run: no problem found",
    ):  # fmt: skip
        assert words in caplog.text
    caplog.clear()
    assert train(*options) == 0
    assert "token cache: train" not in caplog.text  # the run uses the dry run's


def test_the_run_folder_stays_as_it_is_and_its_run_goes_on(tmp_path: Path, options: list, caplog) -> None:
    assert train(*options, "--checkpoint_interval", 3, "--keep_checkpoints", 9) == 0
    (tmp_path / "run" / "step_00000003.tmp-left").mkdir()  # what an owner would clear away
    before = contents(tmp_path / "run")
    for more in ([], ["--max_steps", 20], ["--resume_from_checkpoint", "false"]):
        caplog.clear()
        assert train(*options, *more, "--keep_checkpoints", 1, "--dry_run") == 0
        assert contents(tmp_path / "run") == before
    assert (tmp_path / "run" / "step_00000003.tmp-left").is_dir()
    assert not list(tmp_path.glob("run.old*"))


def test_a_folder_in_use_is_told_and_left_to_its_owner(tmp_path: Path, options: list, caplog) -> None:
    owner = claim(tmp_path / "run")
    assert train(*options, "--dry_run") == 0
    assert f"is in use by process {json.loads(owner.record.read_text())['pid']}" in caplog.text
    owner.check()
    owner.release()


def test_all_problems_come_in_one_list(tmp_path: Path, options: list, caplog) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "good"}\n' + "".join(f'{{"text": {n}}}\n' for n in range(30)))
    more = ["--data_path", bad, tmp_path / "absent.jsonl", "--hidden_size", 63, "--from_weight", "none"]
    assert train(*options, *more, "--dry_run") == 78
    (ending,) = [message for message in caplog.messages if message.startswith("dry run: ") and "found" in message]
    assert "hidden_size 63 is not a multiple of num_attention_heads 4" in ending
    assert all(f'bad.jsonl:{line}: "text" is a number' in ending for line in range(2, 32))
    assert "absent.jsonl does not exist" in ending
    assert "not checked, because of these: " in ending


def test_a_resume_that_would_be_refused_is_a_problem(tmp_path: Path, options: list, caplog) -> None:
    assert train(*options) == 0
    before = contents(tmp_path / "run")
    assert train(*options, "--seed", 7, "--dry_run") == 78
    assert "seed: 42 there, 7 here" in caplog.text
    assert contents(tmp_path / "run") == before


def test_the_tokenizer_of_other_weights_and_bad_data_are_told_together(tmp_path: Path, options: list, caplog) -> None:
    more = ["--tokenizer_path", tmp_path / "nowhere", "--from_weight", tmp_path / "nothing"]
    assert train(*options, *more, "--dry_run") == 78
    assert "nowhere: no such folder" in caplog.text
    assert "nothing: no such folder" in caplog.text


def test_steps_that_do_not_fit_into_memory_are_not_tried(options: list, caplog, monkeypatch) -> None:
    monkeypatch.setattr(preflight, "available_bytes", lambda device: 1 << 20)
    assert train(*options, "--dry_run") == 78
    assert "more memory than there is" in caplog.text
    assert "--batch_size 1 --gradient_accumulation_steps 2" in caplog.text
    assert "measured: " not in caplog.text


def test_a_data_file_that_changed_behind_its_cache_is_found(tmp_path: Path, options: list, caplog) -> None:
    data = Path(options[options.index("--data_path") + 1])
    big = data.with_name("big.jsonl")
    big.write_bytes(data.read_bytes() * 400)
    options[options.index(data)] = big
    assert train(*options, "--dry_run") == 0
    content, status = bytearray(big.read_bytes()), big.stat()
    place = content.index(b"line", 100_000)  # between the sampled blocks
    content[place : place + 4] = b"LINE"
    big.write_bytes(content)
    os.utime(big, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert train(*options, "--dry_run") == 78
    assert "another content than the token cache was built of" in caplog.text


def test_model_options_are_judged_before_the_data_are_read(tmp_path: Path, options: list, caplog) -> None:
    assert train(*options, "--hidden_size", 63) == 78
    assert "hidden_size 63 is not a multiple" in caplog.text
    assert not (tmp_path / "cache").exists()


def dry_run_on_two_ranks(peers: Peers, options: list[object], code: int) -> None:
    peers.new_group()
    assert train(*options, "--dry_run") == code


def test_two_ranks_check_together(tmp_path: Path, options: list, capfd) -> None:
    on_ranks(2, dry_run_on_two_ranks, options, 0)
    told = capfd.readouterr().err
    assert told.count("dry run: no problem found") == 1
    assert "global batch 4 sequences = 2 per micro-batch x 2 ranks" in told
    assert not (tmp_path / "run").exists()


def test_a_bad_record_ends_both_ranks(tmp_path: Path, options: list, capfd) -> None:
    data = Path(options[options.index("--data_path") + 1])
    data.write_text(data.read_text() + '{"text": 1}\n')
    on_ranks(2, dry_run_on_two_ranks, options, 78)
    assert capfd.readouterr().err.count(':65: "text" is a number') >= 1


@pytest.mark.parametrize(("seconds", "said"), [(12.3, "12 s"), (300, "5 min"), (7800, "2 h 10 min")])
def test_durations_are_said_as_people_do(seconds: float, said: str) -> None:
    assert duration(seconds) == said


@pytest.mark.parametrize("script", SCRIPTS.values())
def test_every_script_has_the_option_off_by_default(script) -> None:
    assert parse_options(script.options(), []).dry_run is False
