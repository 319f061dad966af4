"""The README is true: its commands parse and run, its table is the parsers', and the Chinese sister says the same."""

import argparse
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import train_pretrain
from scripts import launch
from tests.conftest import ROOT
from trainer.options import parse_options

ENGLISH, CHINESE = "README.md", "README_zh.md"
SCRIPTS = sorted(path.name for path in ROOT.glob("train_*.py"))

# Data that the reader brings along.
THEIRS = {
    "../shared/data/pretrain_real.jsonl",
    "../shared/data/sft_real.jsonl",
    "../shared/data/domain_real.jsonl",
    "dataset/pretrain_hq.jsonl",
    "dataset/pretrain_t2t_mini.jsonl",
    "big.jsonl",
    "mine.jsonl",
    "chats.jsonl",
    "general.jsonl",
    "domain.jsonl",
    "more/",
    "books/*.txt.gz",
}

SMALL_RUN = "python train_pretrain.py --hidden_size 128"
MINIMIND_RUN = "torchrun --nproc_per_node 2 train_pretrain.py --ddp"
# Commands that the last two tests run, cut short, ("..." stands for any end), ...
RUN = {f"{SMALL_RUN} ...", f"{MINIMIND_RUN} ..."}
# ... and those that they do not, with the reason. Parsed are all of them.
NOT_RUN = {
    "bash scripts/quickstart.sh ...": "tests/test_quickstart.py runs it, cut short",
    "bash scripts/quickstart.sh": "tests/test_quickstart.py runs it",
    "rm -r out/quickstart": "it deletes the reader's runs",
    "bash scripts/test.sh ...": "it is what runs this test",
    "source .venv/bin/activate": "for the reader's own shell",
    "python train_pretrain.py": "7.5 GB of memory; the same with a smaller model is run",
    "python train_pretrain.py --dry_run ...": "tests/test_dry_run.py makes dry runs",
    "python train_pretrain.py --help": "parsing the others builds it",
    "python -m scripts.launch": "part of a command",
    "python -m scripts.launch --nproc_per_node 8 train_pretrain.py": "eight processes; tests/test_survival.py runs two",
    "torchrun --nproc_per_node 8 train_pretrain.py": "eight processes",
    "python -m scripts.launch --nproc_per_node 2 train_pretrain.py ...": "26 minutes, and the reader's data",
    "python -m scripts.chat": "needs a trained model; tests/test_chat.py talks to one",
    "python -m scripts.chat --load_from ...": "needs a trained model; tests/test_chat.py talks to one",
    "python train_sft.py ...": "the reader's data; tests/test_train_sft.py trains",
    "python train_lora.py ...": "needs a trained model; tests/test_train_lora.py trains",
    "python -m scripts.evaluate ...": "needs a trained model; tests/test_evaluate.py measures one",
    "python -m scripts.export ...": "needs a trained model; tests/test_export.py exports one",
    "python train_pretrain.py --data_path mine.jsonl ...": "the reader's data; tests/test_records.py reads such files",
    "/usr/bin/time -v python train_pretrain.py ...": "needs a file of 1 GB",
    "python -m scripts.launch --nproc_per_node 2 train_sft.py ...": "7 minutes, and the reader's data",
    "python -m scripts.launch --nproc_per_node 2 train_lora.py ...": "3 minutes, and the reader's data",
    "python -m scripts.benchmark_packing ...": "minutes, and its numbers are the machine's",
    "python -m scripts.benchmark_train ...": "minutes, and its numbers are the machine's",
    "python -m scripts.benchmark_data ...": "minutes, and its numbers are the machine's",
    "python -m scripts.drill ...": "minutes and hours; tests/test_drill.py runs a slice",
    "python -m scripts.train_tokenizer ...": "tests/test_tokenizer.py trains one",
    "sbatch ...": "needs a cluster; tests/test_slurm.py makes one",
    "kubectl apply -f scripts/k8s/multi_node.yaml": "needs a cluster; tests/test_k8s.py runs the pods' commands",
}


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return [
        body for kind, body in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE) if kind == language
    ]


def commands_in(block: str) -> list[str]:
    """The command lines of a bash block, continued lines joined, comments and superfluous blanks left out."""
    lines = [shlex.split(line, comments=True) for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.join(words) for words in lines if words]


def prose(text: str) -> str:
    """The text without its blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[str]:
    """Every command of the bash blocks, and those that stand in a sentence."""
    inline = re.findall(r"`((?:bash scripts/|python |torchrun )[^`]*)`", prose(text))
    return [command for block in [*blocks(text, "bash"), *inline] for command in commands_in(block)]


def check(command: str) -> None:
    """Every option of a command exists, and everything that it starts is there. Raises or exits where not."""
    words = shlex.split(command.removeprefix("/usr/bin/time -v "))
    if words[0] == "bash":
        assert (ROOT / words[1]).is_file(), command
        missing = [word for word in words[2:] if word.endswith(".py") and not (ROOT / word).is_file()]
        assert not missing, command
    elif words[0] in ("python", "torchrun") and any(word in SCRIPTS for word in words):
        at = next(index for index, word in enumerate(words) if word in SCRIPTS)
        assert words[1:at] in ([], ["-m", "scripts.launch", *words[3:at]]) or words[0] == "torchrun", command
        if at > 1:
            launch.parse(words[1 if words[0] == "torchrun" else 3 :], [])
        if words[at + 1 :] != ["--help"]:
            parse_options(importlib.import_module(words[at][:-3]).options(), words[at + 1 :])
    elif words[0] == "sbatch":
        at = next(index for index, word in enumerate(words) if word.endswith(".sbatch"))
        assert (ROOT / words[at]).is_file(), command
        parse_options(train_pretrain.options(), words[at + 1 :])
    elif words[:3] == ["kubectl", "apply", "-f"]:
        assert (ROOT / words[3]).is_file(), command
    elif words[:2] == ["python", "-m"]:
        answer = subprocess.run([sys.executable, "-m", words[2], "--help"], cwd=ROOT, capture_output=True, text=True)
        assert answer.returncode == 0, command
        unknown = [word for word in words[3:] if word.startswith("--") and word not in answer.stdout]
        assert not unknown, command
    else:
        known = ("source .venv/bin/activate", "rm -r out/quickstart")
        assert command in known, f"{command}: of a kind that this test does not know"


@pytest.mark.parametrize("command", sorted(set(commands(text_of(ENGLISH)))))
def test_every_command_parses(command: str) -> None:
    try:
        check(command)
    except SystemExit as problem:
        pytest.fail(f"{command}: {problem}")


def test_what_a_command_or_a_link_names_is_there() -> None:
    text = text_of(ENGLISH)
    words = {word.removeprefix("./") for command in commands(text) for word in command.split()}
    files = {word for word in words if re.search(r"\.(py|sh|jsonl)$", word)}
    files |= {link for link in re.findall(r"\]\(([^)]+)\)", prose(text)) if not link.startswith("http")}
    assert {name for name in files - THEIRS if not (ROOT / name).exists()} == set()


def test_every_command_is_run_or_left_out_for_a_reason() -> None:
    known = {start: re.escape(start).replace(r"\ \.\.\.", ".*") for start in [*RUN, *NOT_RUN]}
    used = {
        command: [start for start in known if re.fullmatch(known[start], command)]
        for command in commands(text_of(ENGLISH))
    }
    assert [command for command, starts in used.items() if not starts] == [], "decide whether to run these"
    assert known.keys() - {start for starts in used.values() for start in starts} == set(), "no command is like these"


def test_the_tree_names_every_module() -> None:
    for name in (ENGLISH, CHINESE):
        (tree,) = [block for block in blocks(text_of(name), "") if "trainer/" in block]
        for folder in ("model", "trainer", "dataset", "scripts"):
            for path in [*(ROOT / folder).glob("*.py"), *(ROOT / folder).glob("*.sh")]:
                assert path.name == "__init__.py" or path.name in tree, f"{name}: {path}"


def table_rows(text: str) -> list[list[str]]:
    """Cells of every table row, the rules under the headings left out."""
    rows = [line.strip().strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows if set("".join(row)) - set("-: ")]


def option_table(text: str) -> dict[tuple[str, ...], str]:
    """Names of an option -> its default, as the README writes it."""
    (section,) = [part for part in text.split("\n## ") if "| `--tie_word_embeddings` |" in part]
    rows = [row for row in table_rows(section) if row[0].startswith("`--")]
    return {tuple(re.findall(r"`(--\w+)`", row[0])): row[1].strip("`") for row in rows}


def visible_options(script: str) -> list[argparse.Action]:
    parser = importlib.import_module(script[:-3]).options()
    return [action for action in parser._actions if action.help != argparse.SUPPRESS and action.dest != "help"]


def default_of(action: argparse.Action, written: str) -> object:
    """What the option's own type makes of a default as it is written in the table."""
    if not written:
        return None
    read = action.type or str
    return [read(word) for word in written.split()] if action.nargs == "+" else read(written)


def other_defaults(text: str) -> dict[str, dict[str, str]]:
    """Script -> option -> its default there, from the table of those that differ from train_pretrain.py's."""
    rows = table_rows(text)
    (heading,) = [row for row in rows if row[0] == "default"]
    scripts = [cell.strip("`") for cell in heading[1:]]
    found: dict[str, dict[str, str]] = {script: {} for script in scripts}
    for name, *cells in [row for row in rows if row[0].startswith("of `--")]:
        for script, cell in zip(scripts, cells, strict=True):
            found[script][name.removeprefix("of ").strip("`")] = cell.strip("`") if "`" in cell else ""
    return found


@pytest.mark.parametrize("language", [ENGLISH, CHINESE])
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_table_of_options_is_the_parsers(script: str, language: str) -> None:
    table, others = option_table(text_of(language)), other_defaults(text_of(language)).get(script, {})
    for action in visible_options(script):
        names = tuple(action.option_strings)
        assert names in table, f"{script}: {names} is not in the table"
        assert default_of(action, others.get(names[0], table[names])) == action.default, names
    assert others.keys() <= {action.option_strings[0] for action in visible_options(script)}


def test_the_table_has_no_option_that_no_parser_has() -> None:
    real = {tuple(action.option_strings) for script in SCRIPTS for action in visible_options(script)}
    assert set(option_table(text_of(ENGLISH))) <= real


@pytest.mark.parametrize("language", ["bash", "python", "text"])
def test_both_languages_give_the_same_commands(language: str) -> None:
    ours, theirs = blocks(text_of(ENGLISH), language), blocks(text_of(CHINESE), language)
    if language == "bash":
        ours, theirs = [commands_in(block) for block in ours], [commands_in(block) for block in theirs]
    assert theirs == ours


def test_both_languages_have_the_same_options_and_defaults() -> None:
    assert list(option_table(text_of(CHINESE)).items()) == list(option_table(text_of(ENGLISH)).items())


def numbers(text: str) -> Counter[str]:
    return Counter(re.findall(r"(?<![A-Za-z0-9_.,])\d+(?:,\d{3})*(?:\.\d+)?", text))


def test_both_languages_give_the_same_numbers_section_by_section() -> None:
    ours, theirs = text_of(ENGLISH).split("\n## "), text_of(CHINESE).split("\n## ")
    assert len(theirs) == len(ours)
    for english, chinese in zip(ours, theirs, strict=True):
        assert numbers(chinese) == numbers(english), english.splitlines()[0]
        rows = [[numbers(cell) for cell in row] for row in table_rows(english)]
        assert [[numbers(cell) for cell in row] for row in table_rows(chinese)] == rows, english.splitlines()[0]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy of the tree, with the starter text under the name of MiniMind's file."""
    folder = tmp_path / "clone"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".git", ".venv", "out", "__pycache__", ".*_cache"))
    shutil.copy(folder / "dataset/starter/pretrain.jsonl", folder / "dataset/pretrain_hq.jsonl")
    return folder


def run(clone: Path, command: list[str]) -> subprocess.CompletedProcess:
    """Run a command of the README in the clone, with this environment's programs first."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    result = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    return result


@pytest.mark.integration
def test_the_small_run_and_the_look_at_it(clone: Path) -> None:
    text = text_of(ENGLISH)
    (command,) = [shlex.split(command) for command in commands(text) if command.startswith(SMALL_RUN)]
    run(clone, [*command, "--max_steps", "20"])
    (look,) = [block for block in blocks(text, "python") if "from_pretrained" in block]
    assert "The sun" in run(clone, ["python", "-c", look]).stdout


@pytest.mark.integration
def test_minimind_command_line_trains(clone: Path) -> None:
    (command,) = [shlex.split(line) for line in commands(text_of(ENGLISH)) if line.startswith(MINIMIND_RUN)]
    tiny = ["--max_steps", "2", "--batch_size", "1", "--dim", "64", "--n_layers", "2", "--num_workers", "0"]
    assert "all 2 steps are done" in run(clone, [*command, *tiny]).stderr
