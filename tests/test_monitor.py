"""Numbers over time: full precision, cut back on resume, and never a reason for a run to die."""

import json
import resource
from pathlib import Path

import pytest

from trainer.monitor import Jsonl, Monitor, cut_metrics


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

    def write(self, step: int, values: dict[str, float]) -> None:
        raise ConnectionError("unreachable")

    def close(self) -> None:
        raise ConnectionError("unreachable")


def test_a_sink_that_fails_is_dropped_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitor = Monitor(tmp_path)
    good = Jsonl(tmp_path / "metrics.jsonl")
    monitor.sinks = [Broken(), good]
    for step in (1, 2):
        monitor.write(step, {"loss": 1.0})
    assert monitor.sinks == [good]
    assert [record.message for record in caplog.records].count(caplog.records[0].message) == 1
    assert "Broken failed" in caplog.text
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_sink_that_cannot_close_does_not_end_the_run(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path)
    monitor.sinks = [Broken()]
    monitor.close()
    assert monitor.sinks == []


def test_an_undeclared_metric_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        Monitor(tmp_path).write(1, {"lossy": 1.0})


def test_events_are_a_history_and_only_the_first_rank_writes_it(tmp_path: Path) -> None:
    Monitor(tmp_path).event("started", step=0)
    Monitor(tmp_path).event("ended", code=0)
    Monitor(None).event("ended", code=1)
    kinds = [json.loads(line)["event"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert kinds == ["started", "ended"]
