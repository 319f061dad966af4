"""The starter text: reproducible, large enough, varied, and free of what it keeps out."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dataset.tokenizer import load_tokenizer
from scripts import make_starter_data as starter

ROOT = Path(__file__).resolve().parent.parent
COMMITTED = ROOT / "dataset" / "starter" / "pretrain.jsonl"


@pytest.fixture(scope="module")
def texts():
    return [json.loads(line)["text"] for line in COMMITTED.read_bytes().splitlines()]


def test_committed_file_is_reproduced_byte_for_byte(tmp_path):
    out = tmp_path / "again.jsonl"
    command = [sys.executable, "-m", "scripts.make_starter_data", "--out", str(out)]
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert out.read_bytes() == COMMITTED.read_bytes()
    assert "distinct sentences" in result.stdout


def test_file_is_large_enough_for_eight_ranks_and_small_enough_for_git(texts):
    assert 1_000_000 <= COMMITTED.stat().st_size <= 1_500_000
    tokenizer = load_tokenizer(ROOT / "model" / "tokenizer")
    tokens = sum(len(ids) + 2 for ids in tokenizer.encode_texts(texts))
    assert tokens > 8 * 64 * 512  # one step of the order's command; the last window needs one token more


def test_text_is_half_chinese_varied_and_without_duplicates(texts):
    chinese = sum(len(text.encode()) for text in texts if re.search(r"[一-鿿]", text))
    assert 0.4 < chinese / sum(len(text.encode()) for text in texts) < 0.6
    assert len(set(texts)) == len(texts)
    by_template: dict[str, int] = {}
    for piece in (piece for text in starter.make_texts()[0] for piece in text):
        by_template[piece.template] = by_template.get(piece.template, 0) + len(piece.text)
    assert max(by_template.values()) < 0.05 * sum(by_template.values())
    assert not [text for text in texts if re.search(r"[{}<>|]", text) and " > " not in text]


def test_sums_are_right_and_held_out_operands_never_occur(texts):
    results = {"+": int.__add__, "-": int.__sub__, "×": int.__mul__, "÷": int.__floordiv__}
    answer = r"(?: = |=|\?\nA: | 等于多少？\n答：)(\d+)"
    found = re.findall(r"(\d+) ?([-+×÷]) ?(\d+)" + answer, "\n\n".join(texts))
    assert len(found) > 800
    for a, sign, b, result in found:
        assert results[sign](int(a), int(b)) == int(result)
        assert not starter.is_held_out({"×": "*", "÷": "/"}.get(sign, sign), int(a), int(b))
    pairs = [(a, b) for a in range(100) for b in range(a + 1)]
    assert 0.08 < sum(starter.is_held_out("+", a, b) for a, b in pairs) / len(pairs) < 0.12
    assert all(starter.is_held_out("+", a, b) == starter.is_held_out("+", b, a) for a, b in pairs)


def test_held_out_pairs_do_not_occur_in_words_either(texts):
    numbers = {starter.english(n): n for n in range(1000)} | {starter.chinese(n): n for n in range(1000)}
    assert len(numbers) == 2000
    text = "\n".join(texts)
    found = re.findall(r"\b([a-z -]+) plus ([a-z -]+) is ([a-z -]+)\.", text.lower())
    numeral = "([零一二三四五六七八九十百]+)"
    found += re.findall(f"{numeral}加{numeral}等于{numeral}。", text)
    assert len(found) > 150
    for words in found:
        a, b, result = (numbers[word] for word in words)
        assert a + b == result
        assert not starter.is_held_out("+", a, b)


@pytest.mark.parametrize(
    ("number", "chinese", "english"),
    [
        (0, "零", "zero"),
        (10, "十", "ten"),
        (15, "十五", "fifteen"),
        (20, "二十", "twenty"),
        (47, "四十七", "forty-seven"),
        (100, "一百", "one hundred"),
        (105, "一百零五", "one hundred and five"),
        (110, "一百一十", "one hundred and ten"),
        (219, "二百一十九", "two hundred and nineteen"),
    ],
)
def test_numbers_in_words(number, chinese, english):
    assert (starter.chinese(number), starter.english(number)) == (chinese, english)


def test_held_out_phrasings_never_occur(texts):
    text = "\n".join(texts)
    checked = 0
    for name in starter.FACT_FILES:
        for table in starter.read_tables(starter.FOLDER / name):
            for cells in table.rows:
                values = dict(zip(table.columns, cells, strict=True))
                for phrasing in table.phrasings["held"]:
                    checked += 1
                    assert phrasing.format_map(values) not in text
    assert checked > 500


def test_a_row_with_a_missing_cell_is_named(tmp_path):
    path = tmp_path / "facts.txt"
    path.write_text("[animal] zh en\nzh> {zh}\n猫|cat\n狗\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"facts.txt:4: 1 cells, \[animal\] has 2"):
        starter.read_tables(path)
