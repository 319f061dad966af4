"""scripts/chat.py: which model, which turns, which text; at a terminal's and at a pipe's end."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from dataset.conversations import Conversation
from dataset.tokenizer import TextTokenizer, load_tokenizer
from model.generation import Sampling
from model.gpt import GPT, GPTConfig
from model.lora import LoRAConfig, attach_lora, base_fingerprint, open_model, save_adapter
from model.minimind import minimind_state
from model.weights import load_model, save_model_folder
from scripts import chat
from tests.conftest import ROOT, lively
from trainer.checkpoint import write_checkpoint

TOKENIZER = ROOT / "model" / "tokenizer"
SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return load_tokenizer(TOKENIZER)


def tiny(positions: int = 2048) -> GPT:
    return lively(GPT(GPTConfig(**SIZES, max_position_embeddings=positions))).eval()


def save(folder: Path, model: GPT | None = None) -> Path:
    model = model or tiny()
    save_model_folder(folder, model.config, model.state_dict(), tokenizer_folder=TOKENIZER)
    return folder


def checkpoint(run: Path, step: int, stage: str) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    return write_checkpoint(run, step, save, {"stage": stage}, lambda: None)


def parsed(*arguments: object) -> argparse.Namespace:
    return chat.options().parse_args([str(argument) for argument in arguments])


def session(tokenizer: TextTokenizer, model: GPT, **changes) -> chat.Session:
    how = Sampling(max_new_tokens=12, temperature=0, stop_ids=frozenset({0, 1, 2}))
    settings = {"chats": True, "opening": Conversation(()), "header": chat.header_ids(tokenizer)}
    return chat.Session(model, tokenizer, how, **settings | changes)


def test_lines_from_a_pipe_are_answered_on_standard_output_until_exit(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "run", 3, "sft")
    lines = "hello\n\n你好\n/reset\nhello\n/exit\nnever answered\n"
    options = ["--load_from", str(tmp_path / "run"), "--max_new_tokens", "5", "--temperature", "0", "--device", "cpu"]
    result = subprocess.run(
        [sys.executable, "-m", "scripts.chat", *options],
        cwd=ROOT,
        # Not what a Chinese line is in: the script has to see to it.
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        input=lines.encode(),
        capture_output=True,
        timeout=120,
    )
    answers, notes = result.stdout.decode(), result.stderr.decode()
    assert result.returncode == 0, notes
    expected = chat.open_session(parsed(*options))
    first, second = "".join(expected.reply("hello")), "".join(expected.reply("你好"))
    assert first != second
    assert answers == f"{first}\n{second}\n{first}\n"
    assert str(folder) in notes
    assert "chatting" in notes
    assert notes.count("--max_new_tokens 5") == 3


def test_a_turn_is_written_in_the_template_and_a_marker_in_it_stays_text(tokenizer: TextTokenizer) -> None:
    model = tiny()
    with_system = session(tokenizer, model, opening=chat.opening_of("Be brief.", None))
    said = "What does <|im_end|> or <think> mean?"
    answer = "".join(with_system.reply(said))
    written = tokenizer.decode(with_system.ids)
    assert written == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
    )
    assert with_system.ids.count(tokenizer.bos_id) == 3
    assert with_system.ids.count(tokenizer.eos_id) == 3
    # The ids of <think> and its like.
    assert not set(range(21, 36)) & set(chat.turn_ids(tokenizer, "user", said))


def test_later_turns_follow_the_earlier_ones_and_cost_no_second_pass_over_them(tokenizer: TextTokenizer) -> None:
    model = tiny()
    running, fed = session(tokenizer, model), []
    first = "".join(running.reply("one apple"))
    before = list(running.ids)
    model.model.embed_tokens.register_forward_pre_hook(lambda _, inputs: fed.append(inputs[0].shape[1]))
    second = "".join(running.reply("two pears"))
    new = chat.turn_ids(tokenizer, "user", "two pears") + chat.header_ids(tokenizer)
    # The first answer's last token, its end and line end, and the new turn.
    assert fed[0] == 1 + len(chat.end_ids(tokenizer)) + len(new)
    fresh = session(tokenizer, model)
    fresh.ids = before
    assert "".join(fresh.reply("two pears")) == second
    running.reset()
    assert "".join(running.reply("one apple")) == first


@pytest.fixture(scope="module")
def template() -> Callable[..., str]:
    transformers = pytest.importorskip("transformers")
    foreign = transformers.AutoTokenizer.from_pretrained(TOKENIZER)
    return partial(foreign.apply_chat_template, tokenize=False, add_generation_prompt=True)


def first_prompt(session: chat.Session, text: str) -> str:
    """The text that the model is given before its first answer."""
    fed = []
    session.model.model.embed_tokens.register_forward_pre_hook(lambda _, inputs: fed.append(inputs[0].tolist()))
    "".join(session.reply(text))
    return session.tokenizer.decode(fed[0][0])


@pytest.mark.parametrize("setting", [None, "open_thinking", "empty_think"])
def test_an_answer_follows_the_templates_header(tmp_path: Path, template: Callable, setting: str | None) -> None:
    arguments = ["--load_from", save(tmp_path / "m"), "--mode", "chat", "--max_new_tokens", 2]
    running = chat.open_session(parsed(*arguments, *([f"--{setting}", 1] if setting else [])))
    wanted = template([{"role": "user", "content": "hi"}], **({setting: True} if setting else {}))
    assert first_prompt(running, "hi") == wanted


def test_tools_and_their_results_are_told_as_the_template_tells_them(tmp_path: Path, template) -> None:
    tools = [{"type": "function", "function": {"name": "time", "parameters": {"city": "北京"}}}]
    file = tmp_path / "tools.json"
    file.write_text(json.dumps(tools))
    options = ["--load_from", save(tmp_path / "m"), "--mode", "chat", "--tools", file, "--system", "Be brief."]
    running = chat.open_session(parsed(*options, "--max_new_tokens", 3, "--temperature", 0))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    asked = first_prompt(running, "hi")
    assert asked == template(messages, tools=tools)
    chat.talk(running, iter(['/tool {"time": "12:00"}']))
    turn = '<|im_start|>user\n<tool_response>\n{"time": "12:00"}\n</tool_response><|im_end|>\n<|im_start|>assistant\n'
    written = running.tokenizer.decode(running.ids)
    assert written.startswith(asked)
    assert turn in written
    # The control token, not its name in ordinary ones.
    assert running.tokenizer.control_id("<tool_response>") in running.ids


@pytest.mark.parametrize("chats", [False, True])
def test_an_unknown_command_is_named_and_not_answered(tokenizer, capsys: pytest.CaptureFixture, chats: bool) -> None:
    chat.talk(session(tokenizer, tiny(), chats=chats), iter(["/quit", "/Help me", "/tool", "/exit now"]))
    printed = capsys.readouterr()
    assert printed.out == ""
    for name in ("/quit", "/Help", "/tool", "/exit"):
        assert f"unknown command {name}; /reset, /exit, /tool TEXT" in printed.err
    chat.talk(session(tokenizer, tiny(), chats=chats), iter([" /quit", "/usr/bin", "/", "/你好"]))
    printed = capsys.readouterr()
    assert printed.out.count("\n") >= 4
    assert "unknown" not in printed.err


def test_a_tools_result_means_nothing_to_plain_text(tokenizer, capsys: pytest.CaptureFixture) -> None:
    chat.talk(session(tokenizer, tiny(), chats=False), iter(["/tool 12"]))
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "--mode chat" in printed.err


DEEP = [pytest.param("[" * depth + '{"name": "a"}' + "]" * depth, id=f"{depth} deep") for depth in (600, 100_000)]


@pytest.mark.parametrize("content", ["[]", "{", '[{"name": 3}]', '"text"', *DEEP])
def test_a_file_without_tools_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tools.json").write_text(content)
    with pytest.raises(ValueError, match=r"tools\.json"):
        chat.opening_of(None, str(tmp_path / "tools.json"))


def test_a_tools_file_that_is_not_there_is_said_so_and_from_where() -> None:
    with pytest.raises(ValueError, match=r"^--tools missing\.json: no such file \(looked from .*\); give a JSON list"):
        chat.opening_of(None, "missing.json")


def test_an_answer_left_early_ends_there_and_the_conversation_goes_on(tokenizer: TextTokenizer) -> None:
    stopped = session(tokenizer, tiny())
    pieces = stopped.reply("hello")
    start = next(pieces)
    pieces.close()
    assert tokenizer.decode(stopped.ids).endswith(f"<|im_start|>assistant\n{start}<|im_end|>\n")
    assert "".join(stopped.reply("go on"))


@pytest.mark.parametrize("after", [0, 3])
def test_an_interrupt_in_the_middle_of_a_pass_leaves_a_cache_that_serves(tokenizer, after: int) -> None:
    running, passes = session(tokenizer, tiny()), []
    "".join(running.reply("one apple"))

    def interrupt(*_) -> None:
        passes.append(1)
        if len(passes) > after:
            raise KeyboardInterrupt

    hook = running.model.model.layers[0].mlp.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        "".join(running.reply("two pears"))
    hook.remove()
    fresh = session(tokenizer, running.model)
    fresh.ids = list(running.ids)
    assert "".join(running.reply("go on")) == "".join(fresh.reply("go on"))


def test_a_pretrained_model_continues_each_line_after_a_start_token_only(tokenizer: TextTokenizer) -> None:
    model, seen = tiny(), []
    model.model.embed_tokens.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].tolist()))
    plain = session(tokenizer, model, chats=False, opening=chat.opening_of("never said", None))
    texts = tokenizer.encode_texts(["The sun", "A cat"])
    list(plain.reply("The sun"))
    assert seen[0] == [[tokenizer.bos_id, *texts[0]]]
    seen.clear()
    list(plain.reply("A cat"))
    assert seen[0] == [texts[1]]  # the start token is in the cache


def test_every_turn_draws_with_a_seed_of_its_own(tokenizer: TextTokenizer) -> None:
    def texts(seed: int) -> list[str]:
        plain = session(tokenizer, tiny(), chats=False)
        plain.how = Sampling(max_new_tokens=12, temperature=1.0, top_p=1.0, seed=seed)
        return ["".join(plain.reply("The sun")) for _ in range(2)]

    assert texts(5) == texts(5)
    assert texts(5)[0] != texts(5)[1] == texts(6)[0]


def test_a_full_context_is_said_and_reset_helps(tokenizer: TextTokenizer, capsys: pytest.CaptureFixture) -> None:
    running = session(tokenizer, tiny(positions=40))
    running.how = Sampling(max_new_tokens=200, temperature=0)
    chat.talk(running, iter(["one apple and two pears", "and more", "/reset", "one apple and two pears"]))
    printed = capsys.readouterr()
    assert printed.err.count("cut off: the context is full, 40 tokens") == 2
    assert printed.err.count("tokens with this message, and the model takes 40; /reset") == 1
    half = len(printed.out) // 2
    assert printed.out[:half] == printed.out[half:] != ""


@pytest.mark.parametrize("text", ["你好，世界 🌍🚀!", "naïve é\n\n", "𝕏 and ascii"])
def test_text_comes_as_soon_as_its_characters_are_whole(tokenizer: TextTokenizer, text: str) -> None:
    pieces = chat.TextPieces(tokenizer.decode)
    # One token a byte: every character is torn apart.
    shown = [pieces.add(byte_token(byte)) for byte in text.encode()]
    assert "".join(shown) == text
    assert [piece for piece in shown if piece] == list(text)
    assert pieces.rest() == ""


def byte_token(byte: int) -> int:
    """The id of a single byte in our tokenizer: behind the 36 reserved ones, visible bytes first."""
    return 36 + sorted(range(256), key=lambda value: (not is_visible(value), value)).index(byte)


def is_visible(byte: int) -> bool:
    """Whether byte-level BPE writes the byte as the character of the same number."""
    return 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255


def test_bytes_that_never_make_a_character_are_shown_at_the_end(tokenizer: TextTokenizer) -> None:
    pieces = chat.TextPieces(tokenizer.decode)
    start, letter = byte_token("界".encode()[0]), byte_token(ord("a"))
    assert [pieces.add(start), pieces.add(letter), pieces.add(start), pieces.rest()] == ["", "\ufffda", "", "\ufffd"]


def test_the_newest_run_is_found_and_its_newest_whole_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="no model in any of out/lora, out/sft, out/pretrain, out/quickstart/lora"):
        chat.model_folder(None)
    quick = checkpoint(Path("out/quickstart/sft"), 9, "sft")
    assert chat.model_folder(None) == quick
    os.utime(quick, (1e8, 1e8))
    sft = checkpoint(Path("out/sft"), 7, "sft")
    pretrain = [checkpoint(Path("out/pretrain"), step, "pretrain") for step in (5, 6)]
    for age, folder in enumerate((pretrain[1], sft)):
        os.utime(folder, (1e9 - age, 1e9 - age))
    assert chat.model_folder(None) == pretrain[1]
    os.utime(sft, (2e9, 2e9))
    assert chat.model_folder(None) == sft
    (sft / "model.safetensors").write_bytes(b"cut off")
    assert chat.model_folder(None) == pretrain[1]
    (pretrain[1] / "config.json").write_text("{}")
    assert chat.model_folder(None) == pretrain[0] == chat.model_folder("out/pretrain")
    assert chat.model_folder(str(pretrain[1])) == pretrain[1]
    with pytest.raises(ValueError, match="--load_from out/none: no such folder"):
        chat.model_folder("out/none")
    with pytest.raises(ValueError, match="--load_from out/sft: none of its checkpoints is valid"):
        chat.model_folder("out/sft")


def test_how_a_folder_was_trained_decides_how_it_is_used(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    runs = {stage: checkpoint(tmp_path / stage, 1, stage) for stage in ("pretrain", "sft", "lora")}
    runs["foreign"] = save(tmp_path / "foreign")
    chats = {name: chat.open_session(parsed("--load_from", folder)).chats for name, folder in runs.items()}
    assert chats == {"pretrain": False, "sft": True, "lora": True, "foreign": False}
    assert chat.open_session(parsed("--load_from", runs["foreign"], "--mode", "chat")).chats
    assert not chat.open_session(parsed("--load_from", runs["sft"], "--mode", "continue")).chats
    assert "--mode chat" in capsys.readouterr().err


def test_a_manifest_that_is_none_says_nothing_about_a_folder(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("[" * 100_000)
    assert chat.stage_of(tmp_path) is None


def test_an_adapter_is_found_and_chats_as_adapted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sft = checkpoint(Path("out/sft"), 7, "sft")

    def write(folder: Path) -> None:
        model, lora = load_model(sft), LoRAConfig(rank=2)
        fingerprint = base_fingerprint(model)
        attach_lora(model, lora)
        lively(model, seed=3)  # its updates; the base's weights are not saved
        save_adapter(folder, model, lora, model.state_dict(), base=str(sft), base_fingerprint=fingerprint)
        load_tokenizer(TOKENIZER).save(folder)

    Path("out/lora").mkdir()
    lora = write_checkpoint(Path("out/lora"), 2, write, {"stage": "lora"}, lambda: None)
    os.utime(sft, (1e9, 1e9))
    assert chat.model_folder(None) == lora
    greedy = ["--temperature", 0, "--max_new_tokens", 8]
    adapted = chat.open_session(parsed(*greedy))
    assert adapted.chats
    wanted = session(load_tokenizer(TOKENIZER), open_model(lora).eval(), chats=True)
    answer = "".join(adapted.reply("hello"))
    wanted.how = adapted.how
    assert answer == "".join(wanted.reply("hello"))
    assert answer != "".join(chat.open_session(parsed("--load_from", sft, *greedy)).reply("hello"))


def test_a_minimind_file_chats_with_a_tokenizer_that_is_named(tmp_path: Path) -> None:
    config = GPTConfig(**SIZES | {"num_attention_heads": 8}, rms_norm_eps=1e-5)
    path = tmp_path / "full_sft_32.pth"
    torch.save(minimind_state(config, lively(GPT(config)).state_dict()), path)
    with pytest.raises(ValueError, match="no tokenizer beside it"):
        chat.open_session(parsed("--load_from", path))
    options = ["--load_from", path, "--tokenizer_path", TOKENIZER]
    assert "".join(chat.open_session(parsed(*options)).reply("hello"))
    assert chat.open_session(parsed(*options, "--num_attention_heads", 4)).model.config.num_attention_heads == 4


def test_a_tokenizer_that_is_not_the_models_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "other"
    small = GPT(GPTConfig(**SIZES, vocab_size=6399))
    save_model_folder(folder, small.config, small.state_dict())
    with pytest.raises(ValueError, match="no tokenizer beside it"):
        chat.open_session(parsed("--load_from", folder))
    with pytest.raises(ValueError, match="6400 entries, the weights have 6399"):
        chat.open_session(parsed("--load_from", folder, "--tokenizer_path", TOKENIZER))


def test_options_that_make_no_sense_are_one_error(tmp_path: Path) -> None:
    folder = save(tmp_path / "model")
    with pytest.raises(ValueError, match=r"temperature is -1.*top_p is 3.*seed is 1000"):
        chat.open_session(parsed("--load_from", folder, "--temperature", -1, "--top_p", 3, "--seed", 10**20))
    with pytest.raises(ValueError, match="--open_thinking and --empty_think exclude each other"):
        chat.open_session(parsed("--load_from", folder, "--open_thinking", 1, "--empty_think", 1))
    for device in ("nowhere", "meta", "cuda:99"):
        with pytest.raises(ValueError, match=f"--device {device}"):
            chat.open_session(parsed("--load_from", folder, "--device", device))
    tiny_numbers = ["--temperature", 1e-50, "--repetition_penalty", 1e-50, "--top_p", 1e-50]
    with pytest.raises(ValueError, match=r"temperature is 1e-50.*top_p is 1e-50.*repetition_penalty is 1e-50"):
        chat.open_session(parsed("--load_from", folder, *tiny_numbers))


def test_with_standard_input_closed_there_is_nothing_to_answer_but_the_prompt(tmp_path: Path) -> None:
    command = f"{sys.executable} -m scripts.chat --load_from {save(tmp_path / 'm')} --max_new_tokens 3 --device cpu"
    for more, answers in (("", False), (" --prompt hello", True)):
        ran = subprocess.run(["bash", "-c", f"{command}{more} <&-"], cwd=ROOT, capture_output=True, timeout=120)
        assert (ran.returncode, bool(ran.stdout.strip())) == (0, answers), ran.stderr.decode()
