"""Numbers over time: full precision, cut back on resume, and never a reason for a run to die."""

import contextlib
import json
import logging
import os
import resource
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainer.monitor import Bar, Console, Jsonl, Monitor, cut_metrics, open_console


def test_lines_past_the_checkpoint_are_cut_and_the_others_keep_their_bytes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = Jsonl(path)
    for step in range(1, 6):
        sink.write(step, {"loss": 1 / 3 * step})
    sink.close()
    before = path.read_bytes().splitlines(keepends=True)
    with open(path, "a") as file:
        file.write('{"step": 6, "lo')  # a crash in the middle of a line
        file.write("\n")
    with open(path, "ab") as file:
        file.write(b"\xff\xfe no text at all\n")
    cut_metrics(path, 3, 3)
    assert path.read_bytes() == b"".join(before[:3])
    cut_metrics(tmp_path / "absent.jsonl", 3, 3)


def test_a_validation_that_the_checkpoint_does_not_know_of_is_cut(tmp_path: Path) -> None:
    sink = Jsonl(tmp_path / "metrics.jsonl")
    sink.write(4, {"val_loss": 3.0})
    sink.write(5, {"loss": 1.0})
    sink.write(5, {"val_loss": 2.0})
    sink.close()
    cut_metrics(tmp_path / "metrics.jsonl", 5, 4)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 4, "val_loss": 3.0}, {"step": 5, "loss": 1.0}]


def test_numbers_keep_full_precision_and_what_is_not_finite_is_null(tmp_path: Path) -> None:
    sink = Jsonl(tmp_path / "metrics.jsonl")
    sink.write(1, {"loss": 0.1 + 0.2, "grad_norm": float("nan")})
    sink.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line == {"step": 1, "loss": 0.1 + 0.2, "grad_norm": None}


def test_lines_that_a_full_disk_refuses_are_written_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = Jsonl(tmp_path / "metrics.jsonl")
    sink.write(1, {"loss": 1.0})
    old_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30, old_limit[1]))  # in the middle of the second line
    try:
        sink.write(2, {"loss": 2.0})
        sink.write(3, {"loss": 3.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old_limit)
    sink.write(4, {"loss": 4.0})
    sink.close()
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]
    assert caplog.text.count("cannot be written now") == 1


class Broken:
    """A dashboard that is gone."""

    def __init__(self) -> None:
        self.closed = 0

    def write(self, step: int, values: dict[str, float]) -> None:
        raise ConnectionError("unreachable")

    def close(self) -> None:
        self.closed += 1
        raise ConnectionError("unreachable")


def test_a_sink_that_fails_is_dropped_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitor = Monitor(tmp_path)
    good = Jsonl(tmp_path / "metrics.jsonl")
    monitor.sinks = [broken := Broken(), good]
    for step in (1, 2):
        monitor.write(step, {"loss": 1.0})
    assert monitor.sinks == [good]
    assert len(caplog.messages) == 1
    assert "Broken failed" in caplog.text
    assert broken.closed == 1, "else its process or file stays"
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_sink_that_cannot_close_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitor = Monitor(tmp_path)
    monitor.sinks = [broken := Broken()]
    monitor.close()
    assert monitor.sinks == []
    assert broken.closed == 1
    assert caplog.messages == ["Broken could not be closed: unreachable"]


def test_an_undeclared_metric_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        Monitor(tmp_path).write(1, {"lossy": 1.0})


def test_events_are_a_history_and_only_the_first_rank_writes_it(tmp_path: Path) -> None:
    Monitor(tmp_path).event("started", step=0)
    Monitor(tmp_path).event("ended", code=0)
    Monitor(None).event("ended", code=1)
    kinds = [json.loads(line)["event"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert kinds == ["started", "ended"]


class Recorder:
    """A dashboard that only remembers."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []

    def write(self, step: int, values: dict[str, float]) -> None:
        self.lines.append((step, values))

    def close(self) -> None:
        pass


def test_a_dashboard_that_joins_late_gets_the_curve_so_far(tmp_path: Path) -> None:
    curve = Jsonl(tmp_path / "metrics.jsonl")
    curve.write(1, {"loss": 0.1 + 0.2})
    curve.write(2, {"loss": float("nan")})
    monitor, board = Monitor(tmp_path), Recorder()
    monitor.sinks = [curve]
    monitor.join("board", lambda: board)
    monitor.write(3, {"loss": 3.0})
    assert str(board.lines) == str([(1, {"loss": 0.1 + 0.2}), (2, {"loss": float("nan")}), (3, {"loss": 3.0})])


def test_a_dashboard_that_cannot_be_opened_is_left_out_with_one_line(tmp_path: Path, caplog) -> None:
    def fail() -> None:
        raise ConnectionError("no\nnetwork")

    monitor = Monitor(tmp_path)
    monitor.join("board", fail)
    assert monitor.sinks == []
    assert [record.message for record in caplog.records] == [
        "board cannot be used, training goes on without: no network"
    ]


def test_a_dashboard_that_fails_while_it_catches_up_is_closed_and_left_out(tmp_path: Path, caplog) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    monitor, broken = Monitor(tmp_path), Broken()
    monitor.join("board", lambda: broken)
    assert monitor.sinks == []
    assert broken.closed == 1
    assert caplog.messages == ["board cannot be used, training goes on without: unreachable"]


@contextlib.contextmanager
def terminal(columns: int = 100) -> Iterator[Callable[[], str]]:
    """Make stderr a terminal; calling it gives what was written there since."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, columns))

    def read() -> str:
        # The system hands a terminal's bytes over in pieces and in its own time: read on to a mark.
        stream.write("\0")
        stream.flush()
        text = b""
        while not text.endswith(b"\0"):
            text += os.read(ours, 1 << 16)
        return text[:-1].decode()

    with os.fdopen(theirs, "w", encoding="utf-8") as stream, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        yield read
    os.close(ours)


NUMBERS = {"loss": 4.25, "grad_norm": 1.0, "learning_rate": 1e-3, "tokens_per_second": 12345.6, "step_seconds": 0.5}


def test_without_a_terminal_there_is_one_minimind_line_a_log_step(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    console = open_console(total_steps=44160, first_step=0, epoch_of=lambda step: (1, 1))
    assert isinstance(console, Console)
    console.write(100, NUMBERS)
    assert caplog.messages == [
        "Epoch:[1/1](100/44160) loss:4.250 lr:0.001000000000 epoch_Time:367.2min: grad_norm:1.000 tokens/s:12346"
    ]


def test_on_a_terminal_a_bar_moves_with_every_step_to_the_end(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path)
    with terminal() as shown:
        monitor.show(bar := open_console(total_steps=30, first_step=0, epoch_of=lambda step: (1, 2)))
        assert isinstance(bar, Bar)
        for step in range(1, 31):
            monitor.tick(step)
            if step == 10:
                monitor.write(step, NUMBERS)
        monitor.close()
        text = shown()
    for part in (" 0/30 ", " 10/30 ", " 30/30 ", "Epoch [1/2]", "loss 4.250", "tokens/s 12,346", "100%"):
        assert part in text


def test_a_terminal_without_a_width_gets_lines() -> None:
    with terminal(columns=0):
        assert isinstance(open_console(total_steps=30, first_step=0, epoch_of=lambda step: (1, 2)), Console)


def test_a_resumed_bar_starts_at_its_step_and_times_its_own_steps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    with terminal() as shown:
        bar = Bar(total_steps=1000, first_step=900, epoch_of=lambda step: (1, 1))
        assert " 900/1000 " in shown()
        for step in range(901, 911):
            now[0] += 2.0
            bar.tick(step)
        assert " 910/1000 [00:20<03:00," in shown()  # 90 steps of 2 s are left
        bar.close()


def test_log_lines_stand_above_the_bar_and_do_not_tear_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal() as shown:
        handler = logging.StreamHandler(sys.stderr)
        monkeypatch.setattr(logging.root, "handlers", [handler])
        bar = Bar(total_steps=30, first_step=0, epoch_of=lambda step: (1, 1))
        bar.tick(1)
        logging.getLogger("trainer").warning("saved step 1")
        bar.close()
        # What is visible of a line is what follows its last carriage return.
        lines = [line.split("\r")[-1].rstrip() for line in shown().replace("\r\n", "\n").split("\n")]
    assert lines[0] == "saved step 1"
    assert " 1/30 " in lines[1]
    assert logging.root.handlers == [handler]


def test_an_event_keeps_what_is_not_utf_8(tmp_path: Path) -> None:
    name = os.fsdecode("你好".encode("gbk"))
    Monitor(tmp_path).event("started", command=f"数据 {name}")
    assert json.loads((tmp_path / "events.jsonl").read_text(encoding="utf-8"))["command"] == f"数据 {name}"
