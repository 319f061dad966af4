"""Step folders: what a kill, a full disk or a flipped bit can and cannot do to them."""

import errno
import hashlib
import json
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trainer import checkpoint
from trainer.checkpoint import (
    checkpoint_step,
    load_tensors,
    newest_valid,
    prune,
    read_json,
    resolve_weights,
    save_tensors,
    step_folders,
    verify,
    write_checkpoint,
    write_json,
)


def files_of(step: int) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        save_tensors(folder / "model.safetensors", {"weight": torch.arange(6.0) + step})
        write_json(folder / "state.json", {"step": step})

    return write


def commit(run_dir: Path, step: int) -> Path:
    return write_checkpoint(run_dir, step, files_of(step), {"seed": 42}, lambda: None)


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in run_dir.iterdir())


def in_child(action: Callable[[], None]) -> int:
    """Run it in a forked process; 0, its exception's errno, or minus the signal that killed it."""
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        except OSError as error:
            os._exit(error.errno or 1)
        except BaseException:
            os._exit(255)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def seal(folder: Path, manifest: dict) -> None:
    """Write a manifest whose own checksum is right, whatever it says."""
    manifest.pop("checksum", None)
    text = json.dumps(manifest, sort_keys=True)
    (folder / "manifest.json").write_text(
        json.dumps(manifest | {"checksum": hashlib.sha256(text.encode()).hexdigest()})
    )


def test_a_checkpoint_holds_its_files_and_a_manifest_that_sha256sum_agrees_with(tmp_path: Path):
    folder = commit(tmp_path, 100)
    assert names(tmp_path) == ["step_00000100"]
    assert names(folder) == ["manifest.json", "model.safetensors", "state.json"]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["fingerprint"] == {"seed": 42}
    for name in ("model.safetensors", "state.json"):
        content = (folder / name).read_bytes()
        assert manifest["files"][name] == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert verify(folder) == []
    assert torch.equal(load_tensors(folder / "model.safetensors")["weight"], torch.arange(6.0) + 100)


def test_a_kill_at_any_moment_of_a_save_leaves_the_older_or_the_newer_checkpoint(tmp_path: Path):
    moments = 0
    while True:
        run_dir = tmp_path / str(moments)
        run_dir.mkdir()
        commit(run_dir, 100)
        calls = 0

        def count_and_die(real: Callable, die_at: int) -> Callable:
            def call(*arguments: object) -> object:
                nonlocal calls
                calls += 1
                if calls == die_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments)

            return call

        def save(run_dir: Path = run_dir, die_at: int = moments + 1) -> None:
            for call in ("mkdir", "open", "fsync", "rename", "replace"):
                setattr(os, call, count_and_die(getattr(os, call), die_at))
            commit(run_dir, 200)

        outcome = in_child(save)
        newest = newest_valid(run_dir, owner=True)
        assert newest is not None
        assert newest.name in ("step_00000100", "step_00000200")
        assert names(run_dir) == ["step_00000100"] + ["step_00000200"] * (newest.name == "step_00000200")
        if outcome == 0:
            break
        assert outcome == -signal.SIGKILL
        moments += 1
    assert newest.name == "step_00000200"
    assert moments > 8


def test_only_the_owner_removes_what_a_killed_save_left(tmp_path: Path):
    commit(tmp_path, 100)
    killed = in_child(lambda: write_checkpoint(tmp_path, 200, files_of(200), {}, lambda: os.kill(os.getpid(), 9)))
    assert killed == -signal.SIGKILL
    left = names(tmp_path)
    assert len(left) == 2
    assert newest_valid(tmp_path, owner=False) == tmp_path / "step_00000100"
    assert names(tmp_path) == left
    assert newest_valid(tmp_path, owner=True) == tmp_path / "step_00000100"
    assert names(tmp_path) == ["step_00000100"]


def test_a_commit_that_is_refused_leaves_nothing(tmp_path: Path):
    def refuse() -> None:
        raise RuntimeError("taken over")

    with pytest.raises(RuntimeError, match="taken over"):
        write_checkpoint(tmp_path, 100, files_of(100), {}, refuse)
    assert names(tmp_path) == []


def test_a_disk_that_takes_no_more_is_an_oserror_and_harms_no_older_checkpoint(tmp_path: Path):
    commit(tmp_path, 100)

    def save_over_the_limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))  # a write beyond it fails as on a full disk
        big = {"weight": torch.zeros(10_000)}
        write_checkpoint(tmp_path, 200, lambda folder: save_tensors(folder / "a.safetensors", big), {}, lambda: None)

    assert in_child(save_over_the_limit) == errno.EFBIG
    assert names(tmp_path) == ["step_00000100"]
    assert newest_valid(tmp_path, owner=True) == tmp_path / "step_00000100"


def test_a_step_that_is_written_again_replaces_the_old_one(tmp_path: Path):
    commit(tmp_path, 100)
    write_checkpoint(tmp_path, 100, files_of(7), {}, lambda: None)
    assert names(tmp_path) == ["step_00000100"]
    assert read_json(tmp_path / "step_00000100" / "state.json") == {"step": 7}
    assert verify(tmp_path / "step_00000100") == []


def replace_by(make: Callable[[Path], None], name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).rename(folder.parent / "kept")
        make(folder / name)

    return damage


def list_a_path(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["../kept"] = manifest["files"]["state.json"]
    (folder.parent / "kept").write_bytes((folder / "state.json").read_bytes())
    seal(folder, manifest)


def of_another_step(folder: Path) -> None:
    seal(folder, json.loads((folder / "manifest.json").read_text()) | {"step": 100})


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "manifest.json: missing"),
    "empty manifest": (lambda f: (f / "manifest.json").write_text(""), "manifest.json: "),
    "half a manifest": (lambda f: os.truncate(f / "manifest.json", 60), "manifest.json: "),
    "a list": (lambda f: (f / "manifest.json").write_text("[]"), "manifest.json: not the manifest"),
    "deep nesting": (lambda f: (f / "manifest.json").write_text("[" * 100_000), "manifest.json: "),
    "nothing listed": (lambda f: seal(f, {"step": 200, "fingerprint": {}, "files": {}}), "manifest.json: "),
    "another step": (of_another_step, "is of step 100"),
    "a path in a name": (list_a_path, "'../kept', which is not a plain file name"),
    "a missing file": (lambda f: (f / "state.json").unlink(), "state.json: missing"),
    "a longer file": (lambda f: (f / "state.json").write_text('{"step": 200, "more": 1}'), "state.json has 24 bytes"),
    "a shorter file": (lambda f: os.truncate(f / "model.safetensors", 50), "model.safetensors has 50 bytes"),
    "a link": (replace_by(lambda p: p.symlink_to("../kept"), "state.json"), "state.json: not a regular file"),
    "a pipe": (replace_by(os.mkfifo, "state.json"), "state.json: not a regular file"),
    "a pipe as manifest": (replace_by(os.mkfifo, "manifest.json"), "manifest.json: not a regular file"),
    "a folder": (replace_by(os.mkdir, "state.json"), "state.json: not a regular file"),
    "a linked folder": (lambda f: (f.rename(f.parent / "kept"), f.symlink_to("kept")), "is not a folder"),
    "a file as folder": (lambda f: (f.rename(f.parent / "kept"), f.write_text("")), "is not a folder"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_set_aside_aloud_and_the_one_before_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
):
    commit(tmp_path, 100)
    inflict, complaint = DAMAGES[damage]
    inflict(commit(tmp_path, 200))
    assert newest_valid(tmp_path, owner=False) == tmp_path / "step_00000100"
    assert os.path.lexists(tmp_path / "step_00000200")
    assert newest_valid(tmp_path, owner=True) == tmp_path / "step_00000100"
    assert not os.path.lexists(tmp_path / "step_00000200")
    assert os.path.lexists(tmp_path / "step_00000200.damaged")
    assert caplog.records[-1].levelname == "WARNING"
    assert complaint in caplog.messages[-1]
    assert "step_00000200.damaged" in caplog.messages[-1]


def test_no_changed_byte_goes_unnoticed(tmp_path: Path):
    folder = commit(tmp_path, 100)
    for file in folder.iterdir():
        content = file.read_bytes()
        for place in range(len(content)):
            file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            assert verify(folder), f"{file.name}, byte {place}"
        file.write_bytes(content)
    assert verify(folder) == []


def test_a_step_damaged_twice_is_kept_twice(tmp_path: Path):
    for _ in range(3):
        (commit(tmp_path, 100) / "state.json").unlink()
        assert newest_valid(tmp_path, owner=True) is None
    assert names(tmp_path) == ["step_00000100.damaged", "step_00000100.damaged-2", "step_00000100.damaged-3"]


def test_steps_are_ordered_by_number_and_other_names_are_left_alone(tmp_path: Path):
    for step in (100_000_000, 99_999_999, 100, 90):
        commit(tmp_path, step)
    for other in ("step_1", "step_000000100", "step_00000100.damaged", "step_0000010x", "notes"):
        (tmp_path / other).mkdir()
    assert [checkpoint_step(folder) for folder in step_folders(tmp_path)] == [90, 100, 99_999_999, 100_000_000]
    assert newest_valid(tmp_path, owner=True) == tmp_path / "step_100000000"
    assert step_folders(tmp_path / "absent") == []
    assert newest_valid(tmp_path / "absent", owner=True) is None
    with pytest.raises(ValueError, match="not a step folder"):
        checkpoint_step(tmp_path / "step_1")


def test_a_run_without_a_checkpoint_says_how_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run = Path("out/pretrain")
    run.mkdir(parents=True)
    (run / "events.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"^--from_weight out/pretrain: the run has no checkpoint; train it first$"):
        resolve_weights("out/pretrain")
    write_json(run / "exit.json", {"code": 78, "reason": "no such data\nand more"})
    with pytest.raises(ValueError, match=r"has no checkpoint \(it ended with code 78: no such data\); train it first$"):
        resolve_weights("out/pretrain")
    (run / "exit.json").write_text("[]")
    with pytest.raises(ValueError, match=r"has no checkpoint; train it first$"):
        resolve_weights("out/pretrain")
    commit(run, 5)
    assert resolve_weights("out/pretrain") == run / "step_00000005"


def test_a_folder_that_is_not_there_is_guessed_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("out/quickstart/sft").mkdir(parents=True)
    Path("out/mine").mkdir()
    for given, meant in (("mine", "out/mine"), ("out/sft", "out/quickstart/sft"), ("sft", "out/quickstart/sft")):
        with pytest.raises(ValueError, match=rf"{given}: no such folder .*; did you mean {meant}\?$"):
            resolve_weights(given)
    with pytest.raises(ValueError, match=r"; give a run's, a checkpoint's or a transformers folder$"):
        resolve_weights("out/lora")


def test_pruning_keeps_the_newest_and_the_pinned(tmp_path: Path):
    for step in range(1, 7):
        commit(tmp_path, step)
    prune(tmp_path, keep=2, pinned=[3])
    assert [checkpoint_step(folder) for folder in step_folders(tmp_path)] == [3, 5, 6]
    assert len(names(tmp_path)) == 3
    with pytest.raises(ValueError, match="keep is 0"):
        prune(tmp_path, keep=0, pinned=[])


def test_a_checkpoint_half_deleted_by_a_kill_has_no_steps_name(tmp_path: Path):
    for step in (1, 2):
        commit(tmp_path, step)

    def die_in_rmtree() -> None:
        checkpoint.shutil.rmtree = lambda path: os.kill(os.getpid(), signal.SIGKILL)
        prune(tmp_path, keep=1, pinned=[])

    assert in_child(die_in_rmtree) == -signal.SIGKILL
    assert [checkpoint_step(folder) for folder in step_folders(tmp_path)] == [2]
    newest_valid(tmp_path, owner=True)
    assert names(tmp_path) == ["step_00000002"]


def test_tensors_come_back_bit_for_bit_whatever_their_layout(tmp_path: Path):
    table = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    saved = {
        "transposed": table.T,
        "half": table.to(torch.bfloat16),
        "step": torch.tensor(7.0),
        "not a number": torch.tensor([float("nan"), -0.0]),
        "empty": torch.zeros(0),
        "needs grad": torch.ones(2, requires_grad=True),
    }
    save_tensors(tmp_path / "a.safetensors", saved)
    loaded = load_tensors(tmp_path / "a.safetensors")

    def bits(tensor: torch.Tensor) -> list[int]:
        return tensor.detach().reshape(-1).view(torch.uint8).tolist()

    assert loaded.keys() == saved.keys()
    for name, tensor in saved.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert bits(loaded[name]) == bits(tensor)


def test_what_is_no_safetensors_or_json_file_is_an_error_that_names_it(tmp_path: Path):
    for name, read in (("a.safetensors", load_tensors), ("a.json", read_json)):
        (tmp_path / name).write_text("not this")
        with pytest.raises(ValueError, match=name):
            read(tmp_path / name)
    (tmp_path / "a.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"a\.json is not valid JSON"):
        read_json(tmp_path / "a.json")


def test_a_json_file_survives_a_failed_write_and_keeps_any_text(tmp_path: Path):
    file = tmp_path / "options.json"
    write_json(file, {"path": "数据 \udcff", "rate": 5e-4})
    with pytest.raises(TypeError):
        write_json(file, {"rate": object()})
    assert read_json(file) == {"path": "数据 \udcff", "rate": 5e-4}
    assert names(tmp_path) == ["options.json"]
