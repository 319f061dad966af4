"""Raw text in, ids out, and back; and the script that trains the vocabulary."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dataset.tokenizer import TOKENIZER_FILES, load_tokenizer, require_matching

ROOT = Path(__file__).resolve().parent.parent
COMMITTED = ROOT / "model" / "tokenizer"
STARTER = ROOT / "dataset" / "starter" / "pretrain.jsonl"
REAL_TEXT = ROOT.parent / "shared" / "data" / "pretrain_real.jsonl"

# minimind-3's ids 0-35 as published in its tokenizer_config.json, written out a second time.
MINIMIND_3 = re.findall(
    r"<[^>]+>",
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|>"
    "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>"
    "<|audio_start|> <|audio_end|> <|audio_pad|> <tts_pad> <tts_text_bos> <tts_text_eod>"
    "<tts_text_bos_single> <tool_call> </tool_call> <tool_response> </tool_response> <think> </think>"
    "<|buffer1|> <|buffer2|> <|buffer3|> <|buffer4|> <|buffer5|> <|buffer6|> <|buffer7|> <|buffer8|>"
    "<|buffer9|>",
)
AWKWARD = [
    *["", " ", "\n", "\x00", "a\x00b", "\x01\x07\x1b[0m\x7f\x85", "line\r\nline\r\n\r\n", "\r"],
    *["  indented", "trailing   ", "\t\ttabs", "e\u0301 and \u0301", "\u0301", "👩‍👩‍👧‍👦🇨🇳😀", "\ufeffBOM"],
    *["\ufffd\uffff", "한국어 العربية हिन्दी", "全角　空格，标点。", "𠀀𪚥", "It's 3.14 + 2=5, x²"],
    *["don't DON'T I’m", "\U0010ffff", "\u2028\u2029\u200b"],
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(COMMITTED)


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(COMMITTED, tmp_path / "tokenizer"))


def run_training(out, data, *more, **environment):
    command = [sys.executable, "-m", "scripts.train_tokenizer", "--data_path", data, "--out_dir", out, *more]
    environment = os.environ | environment
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def reserved_entries(folder):
    added = json.loads((folder / "tokenizer.json").read_bytes())["added_tokens"]
    return [(token["id"], token["content"], token["special"]) for token in added]


def test_committed_tokenizer_has_minimind_reserved_ids(tokenizer):
    expected = [(token_id, content, token_id < 21) for token_id, content in enumerate(MINIMIND_3)]
    assert reserved_entries(COMMITTED) == expected
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (6400, 0, 1, 2)


@pytest.mark.parametrize("reserved", MINIMIND_3)
def test_reserved_string_in_a_text_never_becomes_a_control_id(tokenizer, reserved):
    texts = [reserved, f"a{reserved}b", f"中文 {reserved} x\n", reserved * 3, "".join(MINIMIND_3) + reserved]
    encoded = tokenizer.encode_texts(texts)
    assert min(min(ids) for ids in encoded) >= len(MINIMIND_3)
    assert [tokenizer.decode(ids) for ids in encoded] == texts


def test_any_string_round_trips(tokenizer):
    draw = random.Random(0)
    anything = [*range(0xD800), *range(0xE000, 0x110000)]
    crowded = [*range(128), 0x301, 0x200D, 0xFE0F, 0xFEFF, 0x1F600, 0x4E2D]
    texts = ["".join(chr(draw.choice(anything)) for _ in range(draw.randrange(40))) for _ in range(1000)]
    texts += ["".join(chr(draw.choice(crowded)) for _ in range(draw.randrange(40))) for _ in range(1000)]
    texts += AWKWARD
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_texts(texts)] == texts


def test_control_ids_decode_to_their_names(tokenizer):
    assert tokenizer.decode(range(36)) == "".join(MINIMIND_3)


def test_every_digit_is_one_token(tokenizer):
    for text in ("2026", "3.14", "1+1=2", " 47 + 38 = 85"):
        pieces = [tokenizer.decode([token]) for token in tokenizer.encode_texts([text])[0]]
        assert all(piece.isdigit() == (len(piece) == 1 and piece in "0123456789") for piece in pieces)
        assert not any(character.isdigit() for piece in pieces if len(piece) > 1 for character in piece)


@pytest.mark.skipif(not REAL_TEXT.exists(), reason="needs the real text beside the repository")
def test_real_text_takes_no_more_tokens_than_with_minimind(tokenizer):
    texts = [json.loads(line)["text"] for line in REAL_TEXT.read_bytes().splitlines()]
    tokens = sum(len(ids) for ids in tokenizer.encode_texts(texts))
    assert sum(len(text.encode()) for text in texts) / tokens > 3.25  # MiniMind's own needs 2.86


def test_text_without_utf8_form_is_refused(tokenizer):
    with pytest.raises(ValueError, match=r"text 1 holds the lone surrogate U\+D83D at character 2"):
        tokenizer.encode_texts(["fine", "ab\ud83d"])
    with pytest.raises(ValueError, match="text 0 is NoneType"):
        tokenizer.encode_texts([None])


def test_a_broken_folder_is_one_clear_error(folder, tmp_path):
    with pytest.raises(ValueError, match="nowhere: no such folder"):
        load_tokenizer(tmp_path / "nowhere")
    config = json.loads((folder / "tokenizer_config.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "</s>"}))
    with pytest.raises(ValueError, match="eos_token is '</s>'"):
        load_tokenizer(folder)
    for name, content, reason in (
        ("tokenizer_config.json", "[]", "expected a JSON object"),
        ("tokenizer.json", '{"model": {}}', "not a usable tokenizer"),
        ("tokenizer.json", '{"model": ', "not valid JSON"),
        ("tokenizer.json", "[" * 100_000, "not valid JSON"),
        ("tokenizer.json", "\xff", "not valid JSON"),
    ):
        (folder / name).write_text(content, encoding="latin-1")
        with pytest.raises(ValueError, match=f"{name}: {reason}"):
            load_tokenizer(folder)
        shutil.copy(COMMITTED / name, folder)
    for name in TOKENIZER_FILES:
        (folder / name).unlink()
        with pytest.raises(ValueError, match=f"{name}: no such file"):
            load_tokenizer(folder)
        shutil.copy(COMMITTED / name, folder)


def test_fingerprint_follows_the_vocabulary_and_not_the_layout(folder, tokenizer):
    description = json.loads((folder / "tokenizer.json").read_bytes())
    description["model"]["merges"] = [" ".join(merge) for merge in description["model"]["merges"]]
    (folder / "tokenizer.json").write_text(json.dumps(description, indent=4))
    assert load_tokenizer(folder).fingerprint == tokenizer.fingerprint
    merges = description["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]
    (folder / "tokenizer.json").write_text(json.dumps(description))
    assert load_tokenizer(folder).fingerprint != tokenizer.fingerprint


def test_tokenizer_that_does_not_match_the_weights_is_refused(folder, tokenizer, tmp_path):
    require_matching(tokenizer, 6400)
    require_matching(tokenizer, 6400, tmp_path)
    require_matching(tokenizer, 6464, folder)
    with pytest.raises(ValueError, match=r"has 6400 entries, the weights have 6144"):
        require_matching(tokenizer, 6144, folder)
    with pytest.raises(ValueError, match=r"has 6400 entries, the weights have 6464"):
        require_matching(tokenizer, 6464, tmp_path)
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    (folder / "tokenizer.json").write_text(text.replace("<|buffer9|>", "<|buffer0|>"), encoding="utf-8")
    other = load_tokenizer(folder).fingerprint
    with pytest.raises(ValueError, match=f"{tokenizer.fingerprint[:12]}.*{other[:12]}"):
        require_matching(tokenizer, 6400, folder)


def test_training_twice_writes_the_same_bytes(tmp_path):
    written = []
    for number, threads in enumerate("14"):
        out = tmp_path / threads
        environment = {"PYTHONHASHSEED": str(number), "RAYON_NUM_THREADS": threads}
        result = run_training(out, STARTER, "--vocab_size", "700", **environment)
        assert result.returncode == 0, result.stderr
        assert "bytes per token" in result.stdout
        written.append([(out / name).read_bytes() for name in TOKENIZER_FILES])
    assert written[0] == written[1]
    assert reserved_entries(out) == reserved_entries(COMMITTED)
    assert load_tokenizer(out).vocab_size == 700


def test_training_names_file_and_line_of_a_bad_line(tmp_path):
    data = tmp_path / "data.jsonl"
    for line, reason in (
        (b'{"text": ', "not JSON (Expecting value"),
        (b'{"text": null}', '"text" is null'),
        (b'["text"]', "a list, not an object"),
        (b'{"text": "\\ud800"}', "lone surrogate"),
        (b'{"text": "\xff"}', "not UTF-8"),
    ):
        data.write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
        result = run_training(tmp_path / "out", data)
        assert result.returncode == 2
        assert f"{data}:3: " in result.stderr
        assert reason in result.stderr
        assert "Traceback" not in result.stderr


def test_training_refuses_more_entries_than_the_text_gives(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"conversations": [{"role": "user", "content": "hello hello"}]}\n')
    result = run_training(tmp_path / "out", data, "--vocab_size", "1000")
    assert result.returncode == 2
    assert "--vocab_size asks for 1000" in result.stderr


def test_transformers_opens_the_folder_and_agrees(tokenizer, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer

    other = AutoTokenizer.from_pretrained(COMMITTED)
    assert (other.bos_token_id, other.eos_token_id, other.pad_token_id, other.unk_token_id) == (1, 2, 0, 0)
    assert len(other) == 6400
    assert [other(text)["input_ids"] for text in AWKWARD] == tokenizer.encode_texts(AWKWARD)
    assert other("<|im_start|><think>")["input_ids"] == [1, 25]


@pytest.mark.skipif("MINIMIND_CHECKOUT" not in os.environ, reason="set MINIMIND_CHECKOUT to try a checkout")
def test_minimind_checkout_opens(tokenizer):
    theirs = load_tokenizer(Path(os.environ["MINIMIND_CHECKOUT"]) / "model")
    assert (theirs.vocab_size, theirs.pad_id, theirs.bos_id, theirs.eos_id) == (6400, 0, 1, 2)
    assert theirs.fingerprint != tokenizer.fingerprint
    texts = [*MINIMIND_3, *AWKWARD]
    encoded = theirs.encode_texts(texts)
    assert min(min(ids) for ids in encoded if ids) >= len(MINIMIND_3)
    assert [theirs.decode(ids) for ids in encoded] == texts


def test_a_tokenizer_saves_its_files_though_their_folder_is_gone(tmp_path):
    source, copy = tmp_path / "source", tmp_path / "copy"
    shutil.copytree(COMMITTED, source)
    tokenizer = load_tokenizer(source)
    shutil.rmtree(source)
    copy.mkdir()
    tokenizer.save(copy)
    saved, wanted = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in (copy, COMMITTED))
    assert saved == wanted
