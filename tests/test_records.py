"""Files in every shape that people bring: what is read, and what is said of the rest."""

import codecs
import gzip
import hashlib
import json
import os
import random
import sys
from pathlib import Path

import pytest

from dataset import records
from dataset import tokenizer as tokenizer_module
from dataset.files import DataError, find_files, identify
from dataset.records import BadRecord, read_chunks, text_of
from dataset.tokenizer import TextTokenizer, load_tokenizer
from dataset.tokens import Reading, open_token_cache
from tests.conftest import ROOT, SHARED_DATA, Peers, on_ranks, write_texts

TEXTS = [
    "a river",
    "山水之间",
    "line one\nline two",
    "u2028 \u2028 and u0085 \x85 stay",
    'emoji 🙂 \\ "quoted"',
    "]},{[",
]
SKIP = Reading(skip_bad_lines=True)


def read(path: Path, encoding: str = "utf-8", text_key: str = "text") -> list[str]:
    """All texts of a file; a bad record raises."""
    digest, texts, seen = hashlib.sha256(), [], 0
    for chunk in read_chunks(identify(str(path), encoding), digest, [text_key]):
        texts += [text_of(record, text_key) for _, record in chunk.records(text_key) if record is not None]
        seen += chunk.read_bytes
    assert digest.digest() == hashlib.sha256(path.read_bytes()).digest()
    assert seen == path.stat().st_size
    return texts


def lines(texts: list[str], key: str = "text", **dumps) -> str:
    return "".join(json.dumps({"n": 1, key: text}, ensure_ascii=False, **dumps) + "\n" for text in texts)


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return load_tokenizer(ROOT / "model" / "tokenizer")


# One line of a JSONL file that is no record, and what is said of it.
FAULTS = {
    "null text": (b'{"text": null}', '"text" is null'),
    "empty text": (b'{"text": ""}', '"text" is empty'),
    "blank text": (b'{"text": " \\n"}', '"text" is empty'),
    "number": (b'{"text": 12345}', '"text" is a number'),
    "list": (b'{"text": ["a"]}', '"text" is a list'),
    "other key": (b'{"content": "a"}', 'no "text" key (its keys: content; --text_key names another)'),
    "no key": (b"{}", 'no "text" key (its keys: none'),
    "null": (b"null", "null, not an object"),
    "array": (b'["text", "a"]', "a list, not an object"),
    "string": (b'"just a string"', "a string, not an object"),
    "trailing comma": (b'{"text": "a",}', "not JSON"),
    "single quotes": (b"{'text': 'a'}", "not JSON"),
    "two objects": (b'{"text": "a"} {"text": "b"}', "not JSON (Extra data at column 15)"),
    "NaN": (b'{"text": NaN}', '"text" is a number'),
    "unterminated": (b'{"text": "cut', "not JSON"),
    "comment": (b"// a comment", "not JSON"),
    "open bracket": (b'[{"text": "a"}', "not JSON"),
    "control character": (b'{"text": "a\x01b"}', "not JSON (Invalid control character"),
    "raw NUL": (b'{"text": "a\x00b"}', "not JSON (Invalid control character"),
    "zeros": (b"\x00" * 600, "not JSON"),
    "escaped NUL": (b'{"text": "a\\u0000b"}', '"text" holds a NUL character'),
    "deep": (b"[" * 100_000, "nested too deeply"),
    "GBK": ('{"text": "中文"}'.encode("gbk"), "not UTF-8 (byte 0xd6 at column 11; it could be gb18030: --encoding gb"),
    "damaged UTF-8": ('{"text": "中文'.encode() + b'\xff"}', "not UTF-8 (byte 0xff at column 17)"),
    "surrogate": (b'{"text": "a \\ud800 b"}', '"text" holds a lone surrogate (\\ud800)'),
    "overlong": (b'{"text": "overlong \xc0\xaf"}', "not UTF-8"),
    "odd key": (b'{"\\ud800\\u001b[3m\\n' + b"k" * 999 + b'": 1}', "(its keys: \\ud800\\x1b[3m\\nkkkk"),
    "lone CR": (b'{"text": "a"}\r{"text": "b"}', "not JSON"),
    "conflict marker": (b"<<<<<<< HEAD", "not JSON"),
}
# And lines that change nothing.
HARMLESS = {"blank": b" \t", "CR": b"\r", "BOM": codecs.BOM_UTF8}


def with_line(path: Path, clean: bytes, line: bytes, position: int) -> Path:
    """The clean file with one more line, which becomes line `position` + 1."""
    before = clean.splitlines(keepends=True)
    path.write_bytes(b"".join([*before[:position], line + b"\n", *before[position:]]))
    return path


@pytest.fixture(scope="module")
def clean(tmp_path_factory, tokenizer) -> tuple[bytes, list[int]]:
    """A good file of 200 lines, and its tokens."""
    folder = tmp_path_factory.mktemp("clean")
    path = write_texts(folder / "clean.jsonl", 200)
    return path.read_bytes(), open_token_cache([str(path)], tokenizer, folder).train.tokens.tolist()


@pytest.mark.parametrize("position", [0, 100, 200], ids=["first", "middle", "last"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_line_is_named_or_left_out_and_the_others_stay(tmp_path, tokenizer, clean, fault, position):
    line, reason = FAULTS[fault]
    path = with_line(tmp_path / "a.jsonl", clean[0], line, position)
    with pytest.raises(DataError) as error:
        open_token_cache([str(path)], tokenizer, tmp_path / "cache")
    assert str(error.value).startswith("1 bad of 201 records: 1 ")
    assert f"{path}:{position + 1}: " in str(error.value)
    assert reason in str(error.value)
    cache = open_token_cache([str(path)], tokenizer, tmp_path / "cache", reading=SKIP)
    assert cache.train.tokens.tolist() == clean[1]
    assert sum(cache.report.bad.values()) == 1
    with pytest.raises(DataError) as again:  # the cache is there now, and remembers
        open_token_cache([str(path)], tokenizer, tmp_path / "cache")
    assert str(again.value) == str(error.value)


def _decide_on_every_rank(peers: Peers, folder: Path, cases: list[tuple[str, int]], tokens: list[int]) -> None:
    tokenizer = load_tokenizer(ROOT / "model" / "tokenizer")
    for fault, position in cases:
        path = folder / f"{fault}{position}.jsonl"
        peers.meet()
        with pytest.raises(DataError) as error:
            open_token_cache([str(path)], tokenizer, folder / "cache")
        assert f"{path}:{position + 1}: " in str(error.value)
        peers.meet()
        assert open_token_cache([str(path)], tokenizer, folder / "cache", reading=SKIP).train.tokens.tolist() == tokens


def test_two_ranks_decide_alike_on_every_fault(tmp_path, clean):
    cases = [(fault, position) for fault in FAULTS for position in (0, 100, 200)]
    for fault, position in cases:
        with_line(tmp_path / f"{fault}{position}.jsonl", clean[0], FAULTS[fault][0], position)
    on_ranks(2, _decide_on_every_rank, tmp_path, cases, clean[1])


@pytest.mark.parametrize("position", [0, 100, 200], ids=["first", "middle", "last"])
@pytest.mark.parametrize("line", HARMLESS)
def test_a_harmless_line_changes_nothing(tmp_path, tokenizer, clean, line, position):
    path = with_line(tmp_path / "a.jsonl", clean[0], HARMLESS[line], position)
    cache = open_token_cache([str(path)], tokenizer, tmp_path / "cache")
    assert cache.train.tokens.tolist() == clean[1]
    assert cache.report.blank_lines == 1


def test_a_last_line_that_was_cut_off_is_told_from_other_broken_ones(tmp_path, tokenizer, clean):
    path = tmp_path / "a.jsonl"
    for dropped in range(1, 40):  # within characters too
        path.write_bytes(clean[0] + clean[0].splitlines()[0][:-dropped])
        with pytest.raises(DataError, match=r"a.jsonl:201: not (JSON|UTF-8) \(.*; the file ends within this line: a"):
            open_token_cache([str(path)], tokenizer, tmp_path / "cache")


def test_only_the_cut_line_itself_is_called_cut(tmp_path, tokenizer):
    path = tmp_path / "a.json"
    path.write_text('{"text":\n"a"\n}\n{"text":\n"b"\n}')
    with pytest.raises(DataError) as error:
        open_token_cache([str(path)], tokenizer, tmp_path / "cache")
    assert [line.split(":")[1] for line in str(error.value).splitlines() if "ends within" in line] == ["6"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.gz", "a.data", "a.txt"])
def test_json_lines_are_known_by_their_content(tmp_path, name):
    content = lines(TEXTS).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(content[:50]) + gzip.compress(content[50:]) if name.endswith(".gz") else content)
    assert read(path) == TEXTS


@pytest.mark.parametrize("first", [b'{"text": "a",}', b"not json", b'{"text": "' + b"long " * 20_000 + b'"}'])
def test_json_lines_called_text_are_never_trained_as_text(tmp_path, tokenizer, first):
    path = tmp_path / "a.txt"
    path.write_bytes(first + b"\n" + lines(TEXTS).encode())
    cache = open_token_cache([str(path)], tokenizer, tmp_path / "cache", reading=SKIP)
    assert cache.train.documents == len(TEXTS) + (len(first) > 100)


def test_prose_that_begins_with_a_bracket_is_prose(tmp_path):
    path = tmp_path / "a.md"
    path.write_text('[![badge](a.svg)](b), a fine project\n\nSend it:\n\n    {"text": "hello"}\n')
    assert read(path) == [path.read_text().strip("\n")]


@pytest.mark.parametrize("chunk", [1, 17, 1 << 18])
@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.json.gz", "a.txt"])
@pytest.mark.parametrize("indent", [None, 0, 2])
@pytest.mark.parametrize("bom", ["", "\ufeff"])
def test_json_arrays_are_known_whatever_the_name_says(tmp_path, monkeypatch, chunk, name, indent, bom):
    monkeypatch.setattr(records, "CHUNK_BYTES", chunk)
    array = [{"n": 1.5e3, "text": text} for text in TEXTS]
    content = (bom + json.dumps(array, ensure_ascii=False, indent=indent) + "\n").encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert read(path) == TEXTS


@pytest.mark.parametrize("chunk", [3, 1 << 18])
@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        ('[\n{"text": "a"},\n{"text": "b"', 3, "it is broken|Expecting|Unterminated|ends in the middle"),
        ('[\n{"text": "a"},\n{"text": "b"}\n', 4, "it ends in the middle"),
        ('[\n{"text": "a"}\n{"text": "b"}\n]', 3, "a comma or ] expected, found '{'"),
        ('[\n{"text": "a"},\n]', 3, "Expecting value"),
        ('[\n{"text": "a"}\n]\n{"text": "b"}', 4, "something stands after its ]"),
        ('[\n{"text": "a"},\n{"text": nope}\n]', 3, "Expecting value"),
    ],
)
def test_a_broken_array_is_refused_at_its_line_even_if_bad_records_are_skipped(
    tmp_path, tokenizer, monkeypatch, chunk, content, line, reason
):
    monkeypatch.setattr(records, "CHUNK_BYTES", chunk)
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(DataError) as error:
        open_token_cache([str(path)], tokenizer, tmp_path / "cache", reading=SKIP)
    assert f"{path}:{line}: the JSON array is broken (" in str(error.value)
    assert any(part in str(error.value) for part in reason.split("|"))


def test_bad_elements_of_an_array_are_named_by_line_and_number(tmp_path, tokenizer):
    path = tmp_path / "a.json"
    path.write_text('[{"text": "a", "score": NaN}, null,\n 7, {"text": ""},\n {"text": "b"}, [], 12]')
    with pytest.raises(DataError) as error:
        open_token_cache([str(path)], tokenizer, tmp_path / "cache")
    places = [line.strip().removeprefix(f"{path}:").split(": ")[0] for line in str(error.value).splitlines()[1:]]
    numbered = [(1, 2), (2, 3), (2, 4), (3, 6), (3, 7)]
    assert places == [f"{line} (element {number})" for line, number in numbered]
    assert open_token_cache([str(path)], tokenizer, tmp_path / "cache", reading=SKIP).train.documents == 2


def test_nesting_that_one_line_may_have_an_array_may_have_too(tmp_path, tokenizer):
    record = '{"text": "deep", "x": ' + "[" * 700 + "]" * 700 + "}"
    for name, content in (("a.jsonl", record), ("b.json", f'[{record}, {{"text": "b"}}]')):
        (tmp_path / name).write_text(content)
        cache = open_token_cache([str(tmp_path / name)], tokenizer, tmp_path / "cache")
        assert cache.train.documents == 1 + (name == "b.json")


@pytest.mark.parametrize("before", [1, 130, 230, 999])
def test_the_limit_of_an_element_is_its_own_whatever_stands_around_it(tmp_path, monkeypatch, before):
    monkeypatch.setattr(records, "CHUNK_BYTES", 100)
    monkeypatch.setattr(records, "MAX_LINE_BYTES", 1000)
    texts, path = ["x" * before, "w" * 980, *["y" * 50] * 40], tmp_path / "a.json"
    path.write_text(json.dumps([{"text": text} for text in texts]))
    if before < 999:
        assert read(path) == texts
    path.write_text(json.dumps([{"text": text} for text in ("x" * before, "w" * 3000)]))
    with pytest.raises(DataError, match=r"a.json:1: an element of over 1,000 characters"):
        read(path)


def test_a_bad_byte_in_an_array_costs_one_element(tmp_path, tokenizer):
    path = tmp_path / "a.json"
    path.write_bytes('[{"text": "好"},\n {"text": "'.encode() + b'\xff"},\n {"text": "b"}]')
    with pytest.raises(DataError, match=r"a.json:2 \(element 2\): not UTF-8 \(byte 0xff at column 11"):
        open_token_cache([str(path)], tokenizer, tmp_path / "cache")
    assert open_token_cache([str(path)], tokenizer, tmp_path / "cache", reading=SKIP).train.documents == 2


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
@pytest.mark.parametrize("kind", ["a.jsonl", "a.json", "a.txt"])
def test_a_byte_order_mark_names_the_encoding(tmp_path, monkeypatch, encoding, kind):
    monkeypatch.setattr(records, "CHUNK_BYTES", 7)
    texts = TEXTS if kind != "a.txt" else ["第一行\nsecond line"]
    content = {"a.jsonl": lines(texts), "a.json": json.dumps([{"text": text} for text in texts]), "a.txt": texts[0]}
    (tmp_path / kind).write_text(content[kind], encoding=encoding)
    assert read(tmp_path / kind) == texts


@pytest.mark.parametrize("encoding", ["gb18030", "big5", "utf-16-le"])
@pytest.mark.parametrize("kind", ["a.jsonl", "a.json", "a.txt"])
def test_a_declared_encoding_is_read_and_never_garbles(tmp_path, encoding, kind):
    text = "一行中文，\n第二行"
    content = {"a.jsonl": lines([text]), "a.json": json.dumps([{"text": text}], ensure_ascii=False), "a.txt": text}
    path = tmp_path / kind
    path.write_text(content[kind], encoding=encoding, newline="\r\n")
    assert read(path, encoding) == [text]
    with pytest.raises((BadRecord, DataError)):
        read(path, "utf-8")
    path.write_text(content[kind], encoding="utf-8")
    with pytest.raises(DataError, match=f"is UTF-8 .*but --encoding {encoding} was given"):
        read(path, encoding)


def test_utf8_under_another_encoding_is_noticed_wherever_it_begins(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(lines(["a" * 300_000, "中文" * 9]), encoding="utf-8")
    with pytest.raises(DataError, match=r"is UTF-8 \(looked up to byte 300,096\), but --encoding gb18030"):
        read(path, "gb18030")
    path.write_text(lines(["plain English " * 9] * 100 + ["It’s a user’s file"]), encoding="utf-8")
    with pytest.raises(DataError, match="is UTF-8"):
        read(path, "gb18030")
    # Bytes that are valid UTF-8 by chance, as the famous two characters, do not condemn a file.
    path.write_text(lines(["联通"]), encoding="gb18030")
    assert read(path, "gb18030") == ["联通"]


def test_utf8_declared_with_a_mark_needs_none(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines(TEXTS), encoding="utf-8")
    assert read(tmp_path / "a.jsonl", "utf-8-sig") == TEXTS


@pytest.mark.parametrize("encoding", ["klingon", "rot13", "base64"])
def test_an_unknown_encoding_is_refused(tmp_path, encoding):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ValueError, match=f"--encoding {encoding}: no such text encoding"):
        read(tmp_path / "a.txt", encoding)


def test_plain_text_becomes_documents_that_end_at_blank_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "TEXT_DOCUMENT_BYTES", 20)
    monkeypatch.setattr(records, "CHUNK_BYTES", 30)
    path = tmp_path / "book.txt"
    path.write_bytes(
        b"\n\nshort\r\n\r\nand longer than twenty\r\n\r\n \nnext\n\x85 \xe2\x80\xa8".replace(b"\x85", b"\xc2\x85")
    )
    assert read(path) == ["short\n\nand longer than twenty", "next\n\x85 \u2028"]
    path.write_bytes("joined\n\ufefffiles\rof an old Mac".encode())
    assert read(path) == ["joined\nfiles\nof an old Mac"]
    monkeypatch.setattr(records, "TEXT_DOCUMENT_LIMIT", 40)
    path.write_text("a line without a blank one\n" * 4)
    assert read(path) == ["a line without a blank one\na line without a blank one"] * 2
    text = "".join(random.Random(0).choices("ab \n", k=5000))
    path.write_text(text)
    assert "\n".join(read(path)).split() == text.split()


def test_bad_bytes_in_plain_text_are_named_by_their_line(tmp_path, tokenizer):
    path = tmp_path / "a.txt"
    path.write_bytes("好的\n第二行\n".encode() + b"third \xff line\n")
    with pytest.raises(DataError, match=r"a.txt:1: not UTF-8 \(byte 0xff at column 7 of its line 3\)"):
        open_token_cache([str(path)], tokenizer, tmp_path / "cache")


def test_a_very_long_line_is_packed_whole(tmp_path, tokenizer):
    draw = random.Random(0)
    words = ["river ", "stone, ", "人民", "的", "。", "\n", "a", "7"]
    text = "".join(draw.choices(words, k=200_000))
    path = tmp_path / "a.jsonl"
    path.write_text(lines(["before", text, "after"]), encoding="utf-8")
    ids = open_token_cache([str(path)], tokenizer, tmp_path / "cache").train.tokens.tolist()
    whole = [*tokenizer.encode_texts(["before"]), tokenizer._raw.encode(text, add_special_tokens=False).ids]
    expected = [tokenizer.bos_id, *whole[0], tokenizer.eos_id, tokenizer.bos_id, *whole[1], tokenizer.eos_id]
    assert ids[: len(expected)] == expected


def test_a_mile_of_one_letter_is_cut_rather_than_run_out_of_memory(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer_module, "LONG_TEXT", 20_000)
    text = "字" * 50_000
    assert tokenizer.decode(tokenizer.encode_texts([text])[0]) == text


def test_a_line_too_long_for_memory_is_named(tmp_path, tokenizer, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text(lines(["short", "long " * 500]))
    monkeypatch.setattr(records, "CHUNK_BYTES", 50)
    monkeypatch.setattr(records, "MAX_LINE_BYTES", 1000)
    with pytest.raises(DataError, match=r"a\.jsonl:2: a line of over 1,000 bytes"):
        open_token_cache([str(path)], tokenizer, tmp_path / "cache")


def test_another_key_may_hold_the_text(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(lines(TEXTS, key="content"), encoding="utf-8")
    assert read(path, text_key="content") == TEXTS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", "is a Git-LFS pointer"),
        (b"PK\x03\x04rest", "is a zip archive"),
        (b"\x28\xb5\x2f\xfdrest", "is compressed with zstd"),
        (b"%PDF-1.7", "is a PDF"),
        (b"\n<!DOCTYPE html><p>404", "is a web page"),
        (b"\x1f\x8bnot really", "damaged gzip file"),
        (gzip.compress(lines(TEXTS * 99).encode())[:-40], "damaged gzip file"),
        (b"PAR1 and then nothing", "damaged parquet file"),
    ],
)
def test_what_is_no_data_is_named_as_what_it_is(tmp_path, tokenizer, content, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        open_token_cache([str(path)], tokenizer, tmp_path / "cache", reading=SKIP)
    assert str(path) in str(error.value)
    assert message in str(error.value)


def test_a_table_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\nhello,1\n")
    with pytest.raises(DataError, match=r'a.csv is a table \(.csv\); turn its rows into lines of \{"text"'):
        identify(str(tmp_path / "a.csv"), "utf-8")


def test_parquet_is_read_by_its_column(tmp_path, tokenizer):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.bin"
    texts = [f"text {number}" for number in range(1000)]
    parquet.write_table(pyarrow.table({"n": list(range(1000)), "body": texts}), path)
    assert read(path, text_key="body") == texts
    with pytest.raises(DataError, match=r'a.bin: no column "text"; it has n, body'):
        read(path)
    parquet.write_table(pyarrow.table({"text": ["one", None, "", "four"]}), path)
    with pytest.raises(DataError) as error:
        open_token_cache([str(path)], tokenizer, tmp_path / "cache")
    assert f'{path}:row 2: "text" is null' in str(error.value)
    assert f'{path}:row 3: "text" is empty' in str(error.value)


def test_parquet_without_pyarrow_is_one_line_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"a.parquet: reading parquet needs pyarrow; pip install pyarrow"):
        read(tmp_path / "a.parquet")


def test_folders_and_patterns_become_their_files_in_the_order_of_names(tmp_path, caplog):
    caplog.set_level("INFO")
    for name in ("b.jsonl", "a.txt", "sub/c.json.gz", ".hidden.jsonl", ".git/d.jsonl", "README.md", "e.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    folder, expected = str(tmp_path), [str(tmp_path / name) for name in ("a.txt", "b.jsonl", "sub/c.json.gz")]
    assert find_files([folder]) == expected
    assert "2 other files are left out, as" in caplog.text
    assert find_files([f"{folder}/[ab].*"]) == expected[:2]
    assert find_files([f"{folder}/**/*.gz", f"{folder}/b*"]) == [expected[2], expected[1]]
    assert find_files([folder, f"{folder}/a.txt"]) == [*expected, expected[0]]
    assert "a.txt is named 2 times" in caplog.text
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty is a folder without \.jsonl.*none\* matches no file"):
        find_files([f"{folder}/empty", f"{folder}/none*"])


def test_links_that_lead_in_a_circle_are_followed_once(tmp_path):
    (tmp_path / "a.jsonl").write_text("x")
    (tmp_path / "again").symlink_to(tmp_path)
    other = tmp_path / "data"
    other.mkdir()
    (other / "b.jsonl").write_text("x")
    (other / "up").symlink_to(tmp_path)
    assert find_files([str(tmp_path)]) == [str(tmp_path / "a.jsonl"), str(other / "b.jsonl")]


def test_a_folder_that_may_not_be_listed_is_an_error(tmp_path, monkeypatch):
    for name in ("a.jsonl", "sub/b.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("sub"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)  # root may list anything
    with pytest.raises(ValueError, match=r"sub may not be listed \(Permission denied\)"):
        find_files([str(tmp_path)])


def test_all_files_that_are_no_data_are_named_at_once(tmp_path, tokenizer):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_bytes(b"PK\x03\x04")
    with pytest.raises(DataError, match=r"a.jsonl is a zip archive.*b.jsonl is a zip archive"):
        open_token_cache([str(tmp_path)], tokenizer, tmp_path / "cache")


def test_a_file_with_brackets_in_its_name_is_no_pattern(tmp_path):
    (tmp_path / "a[1].jsonl").write_text("x")
    assert find_files([str(tmp_path / "a[1].jsonl")]) == [str(tmp_path / "a[1].jsonl")]


def test_duplicates_are_counted_and_kept(tmp_path, tokenizer, caplog):
    caplog.set_level("INFO")
    path = tmp_path / "a.jsonl"
    path.write_text(lines(["one", "two", "one", "one", "three"]))
    for _ in range(2):  # at the building and at every start after it
        caplog.clear()
        cache = open_token_cache([str(path)], tokenizer, tmp_path / "cache")
        assert (cache.train.documents, cache.report.duplicates) == (5, 2)
        assert "2 of 5 texts are duplicates" in caplog.text


ODD = SHARED_DATA / "odd"
needs_odd_files = pytest.mark.skipif(not ODD.is_dir(), reason="no ../shared/data/odd beside this checkout")


@needs_odd_files
@pytest.mark.parametrize(
    ("name", "documents", "bad", "duplicates"),
    [
        ("01_pretrain_crlf.jsonl", 58, [], 0),
        ("02_pretrain_bom.jsonl", 40, [], 0),
        ("10_pretrain.parquet", 300, [], 0),
        ("12_pretrain.jsonl.gz", 400, [], 0),
        ("15_blank_lines_no_final_newline.jsonl", 30, [], 0),
        ("16_null_text.jsonl", 10, [*range(2, 21, 2)], 0),
        ("19_broken_lines.jsonl", 14, [8, 9, 10, 11, 16, 17, 18, 22], 0),
        ("25_duplicates.jsonl", 160, [], 145),
    ],
)
def test_odd_files_give_the_records_of_their_manifest(tmp_path, tokenizer, name, documents, bad, duplicates):
    path = str(ODD / name)
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    if bad:
        with pytest.raises(DataError) as error:
            open_token_cache([path], tokenizer, tmp_path)
        assert [int(line.split(":")[1]) for line in str(error.value).splitlines()[1:]] == bad
    else:
        assert open_token_cache([path], tokenizer, tmp_path).train.documents == documents
    cache = open_token_cache([path], tokenizer, tmp_path, reading=SKIP)
    assert (cache.train.documents, sum(cache.report.bad.values()), cache.report.duplicates) == (
        documents,
        len(bad),
        duplicates,
    )
    texts = tokenizer.decode(cache.train.tokens.tolist())
    assert "\r" not in texts
    assert "\ufeff" not in texts


@needs_odd_files
def test_the_odd_gbk_file_is_read_as_declared_and_refused_otherwise(tmp_path, tokenizer):
    path = str(ODD / "03_laws_gbk.txt")
    with pytest.raises(DataError, match="it could be gb18030: --encoding gb18030"):
        open_token_cache([path], tokenizer, tmp_path)
    cache = open_token_cache([path], tokenizer, tmp_path, reading=Reading(encoding="gb18030"))
    text = tokenizer.decode(cache.train.tokens.tolist())
    assert "《中华人民共和国非物质文化遗产法》第六章" in text
    assert "\ufffd" not in text


@needs_odd_files
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("04_medical_gb18030.csv", "is a table (.csv)"),
        ("05_sharegpt_tools.json", 'no "text" key (its keys: conversations, tools'),
        ("06_sharegpt.jsonl", 'no "text" key (its keys: id, conversations'),
        ("07_alpaca.json", 'no "text" key (its keys: instruction, input, output'),
        ("08_openai_tools.jsonl", 'no "text" key (its keys: messages, tools'),
        ("11_sft_messages.parquet", 'no column "text"; it has messages'),
        ("22_excel_utf8bom.csv", "is a table (.csv)"),
    ],
)
def test_odd_files_that_are_no_pretraining_data_are_refused_by_name(tmp_path, tokenizer, name, message):
    with pytest.raises(DataError) as error:
        open_token_cache([str(ODD / name)], tokenizer, tmp_path)
    assert name in str(error.value)
    assert message in str(error.value)
