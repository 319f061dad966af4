"""Dashboards show every step once, however often a run is killed, and never stop, delay or question it."""

import json
import math
import os
import subprocess
import sys
import termios
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlparse

import pytest

from tests.conftest import ROOT, TINY, train
from trainer.monitor import METRICS
from trainer.trackers import CLOSE_SECONDS, TensorBoard, Wandb, _rows

KEY = "a" * 40

# Runs train_pretrain.py until a dashboard took the line of a step, then waits to be killed.
STOPPING = """
import pathlib, signal, sys
import train_pretrain
from trainer.options import parse_options
from trainer.trackers import {board}

write = {board}.write
def write_and_wait(self, step, values):
    write(self, step, values)
    if step == {step} and "loss" in values:
        pathlib.Path("{mark}").touch()
        signal.pause()

{board}.write = write_and_wait
train_pretrain.main(parse_options(train_pretrain.options(), sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def _nobody_is_logged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    (tmp_path / "home").mkdir()


@pytest.fixture
def options(texts: Path, tmp_path: Path) -> list:
    return [
        *TINY, "--data_path", texts, "--cache_dir", tmp_path / "cache", "--out_dir", tmp_path / "run",
        "--checkpoint_interval", 5, "--max_steps", 12,
    ]  # fmt: skip


def kill_after(step: int, board: str, options: list, until: Callable[[], object] = lambda: True) -> None:
    """Train until the dashboard was given a step's line and `until` holds, then SIGKILL."""
    mark = options[options.index("--out_dir") + 1].parent / "reached"
    code = STOPPING.format(board=board, step=step, mark=mark)
    process = subprocess.Popen([sys.executable, "-c", code, *map(str, options)], cwd=ROOT, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not (mark.exists() and until()):
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.communicate()  # also waits for wandb's own process, which has our stderr


def losses(run_dir: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def records(run_dir: Path) -> list:
    """Everything in wandb's files of a run that fits into one block each."""
    from wandb.proto import wandb_internal_pb2 as pb

    found = []
    for path in sorted(run_dir.glob("wandb/*run-*/*.wandb")):
        data = path.read_bytes()[7:]
        while data:
            length, kind = int.from_bytes(data[4:6], "little"), data[6]
            assert kind == 1
            found.append(pb.Record.FromString(data[7 : 7 + length]))
            data = data[7 + length :]
    return found


def offline_rows(run_dir: Path) -> list[dict[str, float]]:
    return [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in records(run_dir)
        if record.HasField("history")
    ]


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", "{}"])
def test_tensorboard_writes_all_again_where_its_record_is_damaged(tmp_path: Path, damage: str) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "tensorboard.json").write_text(damage)
    sink = TensorBoard(tmp_path, first_step=2)
    sink.write(1, {"loss": 1.0})
    sink.close()
    assert points(tmp_path / "tensorboard") == {"loss": [(1, 1.0)]}


def test_steps_are_found_in_wandbs_files_over_blocks_and_in_files_that_a_kill_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = Wandb(tmp_path, project="P", name="n", mode="offline", first_step=0, total_steps=400, config={})
    for step in range(1, 401):
        sink.write(step, {"loss": 1.0, "grad_norm": 1.0})
        if step % 100 == 0:
            sink.write(step, {"val_loss": 1.0})
    sink.close()
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    whole = path.read_bytes()
    assert len(whole) > 3 * 2**15, "several blocks"
    expected = []
    for step in range(1, 401):
        expected += [{"step": step}] + ([{"val_step": step}] if step % 100 == 0 else [])
    assert list(_rows(path)) == expected
    for size in (0, 5, 7, 10, 2**15 - 3, 2**15, 2**15 + 3, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        found = list(_rows(path))
        assert found == expected[: len(found)]
    for place in range(1000, 2 * 2**15, 997):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        found = list(_rows(path))
        assert found == expected[: len(found)], "a damaged file counts up to the damage"
        assert len(found) < len(expected)


def test_offline_needs_no_account_and_puts_all_its_files_into_the_run_folder(
    options: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_MINE", "do-not-tell")
    before, hooks = sorted(os.listdir()), (sys.exit, sys.excepthook)
    offline = ["--use_wandb", "--wandb_mode", "offline", "--val_fraction", 0.2, "--eval_interval", 4]
    assert train(*options, *offline) == 0
    assert sorted(os.listdir()) == before
    assert (sys.exit, sys.excepthook) == hooks
    rows = offline_rows(tmp_path / "run")
    trained = [row for row in rows if "loss" in row]
    assert {int(row["step"]): row["loss"] for row in trained} == losses(tmp_path / "run")
    assert [row["step"] for row in rows if "val_loss" in row] == [4, 8, 12]
    assert {"grad_norm", "learning_rate", "tokens_per_second", "epoch_time"} <= trained[0].keys()
    assert trained[-1]["epoch_time"] == 0
    assert trained[0].keys() - METRICS.keys() == {"step", "_step", "_timestamp", "_runtime"}
    metrics = [record.metric for record in records(tmp_path / "run") if record.HasField("metric")]
    assert {metric.name or metric.glob_name: metric.step_metric for metric in metrics} == {
        "step": "",
        "val_step": "",
        "*": "step",
    }
    everything = b"".join(path.read_bytes() for path in (tmp_path / "run" / "wandb").rglob("*") if path.is_file())
    assert b"do-not-tell" not in everything
    assert b"hidden_size" in everything


def test_starting_anew_is_a_new_run_at_the_dashboard(options: list, tmp_path: Path) -> None:
    options += ["--use_wandb", "--wandb_mode", "offline"]
    assert train(*options, "--max_steps", 2) == 0
    assert train(*options, "--max_steps", 2, "--resume_from_checkpoint", "false") == 0
    ids = [json.loads((tmp_path / name / "wandb.json").read_text())["id"] for name in ("run.old-1", "run")]
    assert ids[0] != ids[1]
    assert [row["step"] for row in offline_rows(tmp_path / "run")] == [1, 2]


@pytest.mark.parametrize("key", [None, KEY, "no key at all"])
def test_without_a_key_or_a_server_that_answers_the_run_is_kept_offline_with_one_warning(
    options: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, key: str | None
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    if key:
        monkeypatch.setenv("WANDB_API_KEY", key)
    started = time.monotonic()
    assert train(*options, "--max_steps", 3, "--use_wandb") == 0
    assert time.monotonic() - started < 30
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1, warnings
    assert "wandb is offline (" in warnings[0]
    assert ("no API key" in warnings[0]) == (key is None)
    assert ("cannot be reached or does not take the key" in warnings[0]) == (key is not None)
    assert f"wandb sync {tmp_path / 'run'}/wandb/offline-run-*" in warnings[0]
    assert list(losses(tmp_path / "run")) == [row["step"] for row in offline_rows(tmp_path / "run")] == [1, 2, 3]


@pytest.mark.parametrize("mode", ["disabled", "offline"])
def test_wandb_mode_of_the_environment_keeps_a_run_off_the_network_and_is_mentioned(
    options: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    monkeypatch.setenv("WANDB_MODE", mode)
    assert train(*options, "--max_steps", 2, "--use_wandb") == 0
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [f"wandb is {mode}, not online: the environment has WANDB_MODE={mode}"]
    assert [row["step"] for row in offline_rows(tmp_path / "run")] == ([1, 2] if mode == "offline" else [])


class Server(ThreadingHTTPServer):
    """As much of wandb's server as a run needs: it remembers the lines of its runs' histories."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.histories: dict[str, dict[int, dict]] = defaultdict(dict)
        self.summaries: dict[str, str] = {}
        self.paths: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def reply(self, path: str, body: bytes) -> dict:
        self.paths.append(path)
        if path.endswith("/file_stream"):
            files = json.loads(body).get("files", {})
            for line in files.get("wandb-summary.json", {"content": []})["content"]:
                self.summaries[path.split("/")[-2]] = line
            history = files.get("wandb-history.jsonl", {"offset": 0, "content": []})
            for number, line in enumerate(history["content"], history["offset"]):
                self.histories[path.split("/")[-2]][number] = json.loads(line)
            return {"exitcode": None, "limits": {}}
        if path != "/graphql":
            return {}
        question = json.loads(body)
        name = question.get("variables", {}).get("name")
        answers = {
            "Viewer": {"viewer": {"id": "v", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}},
            "RunResumeStatus": {"model": self.project(name)},
            "UpsertBucket": {"upsertBucket": {"bucket": self.bucket(name), "inserted": True}},
            "CreateRunFiles": {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": []}},
        }
        return {"data": answers.get(question.get("operationName"), {})}

    def bucket(self, name: str) -> dict:
        history = self.histories.get(name)
        tail = [json.dumps(history[max(history)])] if history else []
        return {
            "id": "b", "name": name, "displayName": name, "description": "", "config": "{}",
            "summaryMetrics": self.summaries.get(name, "{}"),
            "project": {"name": "P", "entity": {"name": "me"}}, "historyLineCount": len(history or ()),
            "logLineCount": 0, "eventsLineCount": 0, "historyTail": json.dumps(tail), "eventsTail": "[]",
            "tags": [], "notes": "", "wandbConfig": '{"t": 1}',
        }  # fmt: skip

    def project(self, name: str) -> dict | None:
        known = self.histories.get(name)
        return {"id": "p", "name": "P", "entity": {"id": "e", "name": "me"}, "bucket": known and self.bucket(name)}


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        answer = json.dumps(self.server.reply(urlparse(self.path).path, body)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    running = Server()
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", running.url)
    yield running
    running.shutdown()
    running.server_close()


def shown(server: Server) -> list[dict[str, float]]:
    """The lines of the one run at the server."""
    (history,) = server.histories.values()
    return [history[number] for number in sorted(history)]


def assert_every_step_once(rows: list[dict[str, float]], run_dir: Path) -> None:
    trained = [row for row in rows if "loss" in row]
    assert [row["step"] for row in trained] == list(range(1, 13))
    assert {row["step"]: row["loss"] for row in trained} == losses(run_dir)
    assert [row["step"] for row in rows if "val_loss" in row] == [3, 6, 9, 12]


VALIDATED = ["--use_wandb", "--val_fraction", 0.2, "--eval_interval", 3]


@pytest.mark.integration
@pytest.mark.parametrize("uploaded", [False, True])
def test_a_killed_and_resumed_online_run_has_every_step_once_at_the_server(
    options: list, tmp_path: Path, server: Server, uploaded: bool
) -> None:
    options += VALIDATED
    kill_after(7, "Wandb", options, until=lambda: server.histories or not uploaded)
    assert train(*options) == 0
    rows = shown(server)
    assert_every_step_once(rows, tmp_path / "run")
    assert [row["_step"] for row in rows] == sorted({row["_step"] for row in rows}), "wandb drops what does not rise"
    assert not [path for path in server.paths if "otel" in path], "nobody asked for reports on wandb itself"


@pytest.mark.integration
@pytest.mark.parametrize("flushed", [False, True])
def test_a_killed_and_resumed_offline_run_has_every_step_once_when_it_is_sent(
    options: list, tmp_path: Path, server: Server, flushed: bool
) -> None:
    options += [*VALIDATED, "--wandb_mode", "offline"]
    kill_after(7, "Wandb", options, until=lambda: not flushed or offline_rows(tmp_path / "run"))
    assert train(*options) == 0
    assert len({record.run.run_id for record in records(tmp_path / "run") if record.HasField("run")}) == 1
    assert_every_step_once(offline_rows(tmp_path / "run"), tmp_path / "run")
    folders = sorted(map(str, (tmp_path / "run" / "wandb").glob("offline-run-*")))
    assert len(folders) == 1 + flushed
    sending = [sys.executable, "-m", "wandb", "sync", *folders]
    sent = subprocess.run(sending, cwd=tmp_path, capture_output=True, text=True)
    assert sent.returncode == 0, sent.stdout + sent.stderr
    assert_every_step_once(shown(server), tmp_path / "run")


@pytest.mark.integration
def test_a_server_that_goes_away_does_not_hold_up_the_end(tmp_path: Path, server: Server) -> None:
    sink = Wandb(tmp_path, project="P", name="n", mode="online", first_step=0, total_steps=9, config={"batch_size": 2})
    sink.write(1, {"loss": 1.0})
    server.shutdown()
    server.server_close()
    for step in range(2, 10):
        sink.write(step, {"loss": float(step)})
    started = time.monotonic()
    sink.close()
    assert time.monotonic() - started < CLOSE_SECONDS + 10


@pytest.mark.integration
def test_on_a_terminal_nothing_is_asked_and_the_bar_goes_from_the_resumed_step_to_the_end(
    options: list, tmp_path: Path
) -> None:
    def run(*more: object) -> str:
        command = [sys.executable, "train_pretrain.py", *map(str, [*options, "--use_wandb", *more])]
        ours, theirs = os.openpty()
        termios.tcsetwinsize(theirs, (24, 120))
        process = subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        shown = b""
        try:
            while piece := os.read(ours, 1 << 16):
                shown += piece
        except OSError:  # how Linux says that nobody writes to this terminal any more
            pass
        os.close(ours)
        assert process.wait() == 0, shown.decode()
        return shown.decode()

    assert " 0/12 " in run()
    shown = run("--max_steps", 20)
    assert " 12/20 " in shown
    assert " 20/20 " in shown
    assert " 11/20 " not in shown
    assert "no API key is configured" in shown
    assert "Epoch:[" not in shown


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder), {"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_takes_back_what_was_written_past_the_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    killed = TensorBoard(tmp_path, first_step=0)
    for step in range(1, 8):
        killed.write(step, {"loss": float(step)})  # killed here: nothing is closed
    killed.write(5, {"val_loss": 9.0})
    resumed = TensorBoard(tmp_path, first_step=5)
    for step in range(1, 5):
        resumed.write(step, {"loss": math.nan})  # what metrics.jsonl holds is there already
    for step in range(6, 10):
        resumed.write(step, {"loss": 10.0 + step})
    resumed.close()
    expected = [*((step, float(step)) for step in range(1, 6)), *((step, 10.0 + step) for step in range(6, 10))]
    assert points(tmp_path / "tensorboard") == {"loss": expected, "val_loss": [(5, 9.0)]}


@pytest.mark.integration
def test_a_killed_and_resumed_run_has_every_step_once_in_tensorboard(options: list, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    options += ["--use_tensorboard", "--val_fraction", 0.2, "--eval_interval", 3]
    kill_after(7, "TensorBoard", options)
    # In a process of its own: TensorBoard orders files by the second they were begun in, then by process.
    subprocess.run([sys.executable, "train_pretrain.py", *map(str, options)], cwd=ROOT, check=True)
    found = points(tmp_path / "run" / "tensorboard")
    assert [step for step, _ in found["loss"]] == list(range(1, 13))
    assert dict(found["loss"]) == pytest.approx(losses(tmp_path / "run"))
    assert [step for step, _ in found["val_loss"]] == [3, 6, 9, 12]


def test_a_dashboard_that_is_switched_on_later_has_the_whole_curve(options: list, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    assert train(*options, "--max_steps", 6) == 0
    assert train(*options, "--use_wandb", "--wandb_mode", "offline", "--use_tensorboard") == 0
    assert [row["step"] for row in offline_rows(tmp_path / "run")] == list(range(1, 13))
    assert [step for step, _ in points(tmp_path / "run" / "tensorboard")["loss"]] == list(range(1, 13))
