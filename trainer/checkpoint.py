"""Step folders: written whole or not at all, and verified before they are trusted."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 16 << 20
STEP_NAME = re.compile(r"step_([0-9]{8}|[1-9][0-9]{8,})")
LEFTOVER_NAME = re.compile(r"step_[0-9]{8,}\.tmp-.*")


def write_checkpoint(
    run_dir: Path,
    step: int,
    write_files: Callable[[Path], None],
    fingerprint: Mapping[str, Any],
    before_commit: Callable[[], None],
) -> Path:
    """Commit `run_dir/step_XXXXXXXX` with the files that `write_files(folder)` writes; return the folder.

    The folder appears under its name only when all of it is on the disk: temporary sibling, fsync, manifest,
    `before_commit()` (raise there to refuse), rename, fsync of the parent. Whatever fails is raised again
    after the temporary folder is removed; no other step is touched. A folder of the same step is replaced.
    """
    target = step_folder(run_dir, step)
    temporary = _temporary_name(target)
    temporary.mkdir()
    try:
        write_files(temporary)
        manifest = {"step": step, "fingerprint": dict(fingerprint), "files": _describe_files(temporary)}
        manifest["checksum"] = _checksum(manifest)
        write_json(temporary / MANIFEST, manifest)
        before_commit()
        _put_in_place(temporary, target)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        # safetensors wraps the errors of the file system; callers tell a full disk from a bug by OSError.
        code = re.search(r"\(os error (\d+)\)", str(error)) if isinstance(error, SafetensorError) else None
        if code:
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(target)) from error
        raise
    _sync_folder(run_dir)
    return target


def newest_valid(run_dir: Path, owner: bool) -> Path | None:
    """The step folder with the highest step that verifies; None if there is none.

    The owner of the run also cleans up: a damaged folder is renamed `step_XXXXXXXX.damaged` (then
    `.damaged-2`, ...), and what a killed save left behind is removed. Others only look.
    """
    if owner:
        _clear_leftovers(run_dir)
    for folder in reversed(step_folders(run_dir)):
        problems = verify(folder)
        if not problems:
            return folder
        if owner:
            aside = _set_aside(folder)
            log.warning("damaged checkpoint set aside as %s: %s", aside, "; ".join(problems))
        else:
            log.warning("damaged checkpoint passed over: %s", "; ".join(problems))
    return None


def verify(folder: Path) -> list[str]:
    """What is wrong with a step folder, one sentence each; empty when every listed file is as written.

    Opens regular files inside the folder only: no link is followed, and no pipe or device can make it wait.
    Files that the manifest does not list are ignored.
    """
    if folder.is_symlink() or not folder.is_dir():
        return [f"{folder} is not a folder"]
    try:
        manifest = _read_manifest(folder)
    except (OSError, ValueError, RecursionError) as error:
        return [f"{folder / MANIFEST}: {_reason(error)}"]
    problems = []
    if STEP_NAME.fullmatch(folder.name) and manifest["step"] != checkpoint_step(folder):
        problems.append(f"{folder / MANIFEST} is of step {manifest['step']!r}, not of this folder's")
    with ThreadPoolExecutor(max_workers=4) as threads:
        files = manifest["files"].items()
        found = threads.map(lambda item: _file_problem(folder, *item), files)
        problems += [problem for problem in found if problem]
    return problems


def checkpoint_step(folder: Path) -> int:
    """100 for `step_00000100`. ValueError for any other kind of name."""
    match = STEP_NAME.fullmatch(folder.name)
    if not match:
        raise ValueError(f"{folder} is not a step folder; expected a name like step_00000100")
    return int(match[1])


def step_folder(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step stands, or would."""
    return run_dir / f"step_{step:08d}"


def step_folders(run_dir: Path) -> list[Path]:
    """Everything in `run_dir` that is named as a step folder, lowest step first; damaged ones included."""
    if not run_dir.is_dir():
        return []
    return sorted((p for p in run_dir.iterdir() if STEP_NAME.fullmatch(p.name)), key=checkpoint_step)


def resolve_weights(name: str, option: str = "--from_weight") -> Path:
    """The folder or file behind --from_weight: a run folder means its newest valid step.

    Raises ValueError where there is neither, or no valid checkpoint in the folder.
    """
    folder = Path(name)
    if folder.is_file():
        return folder  # of another project: whoever reads it judges it
    if not folder.is_dir():
        # A name alone, or what the quick start calls by the same name.
        meant = [place for place in (Path("out") / name, Path("out/quickstart") / folder.name) if place.is_dir()]
        hint = f"did you mean {meant[0]}?" if meant else "give a run's, a checkpoint's or a transformers folder"
        raise ValueError(f"{option} {name}: no such folder (looked from {Path.cwd()}); {hint}")
    if not step_folders(folder):
        if (folder / "events.jsonl").is_file():  # what a run writes first
            raise ValueError(f"{option} {name}: the run has no checkpoint{_ending_of(folder)}; train it first")
        return folder
    newest = newest_valid(folder, owner=False)
    if newest is None:
        raise ValueError(f"{option} {name}: none of its checkpoints is valid; give an older copy")
    return newest


def _ending_of(run_dir: Path) -> str:
    """How a run ended, in brackets; nothing where it does not say."""
    try:
        ending = read_json(run_dir / "exit.json")
        reason = str(ending["reason"]).split("\n")[0]
        return f" (it ended with code {ending['code']}: {reason})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def prune(run_dir: Path, keep: int, pinned: Collection[int]) -> None:
    """Delete all step folders but the newest `keep` and the `pinned` steps.

    Call it right after a save, with that step pinned: it is the one that is known to be whole.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least 1 checkpoint has to stay")
    folders = step_folders(run_dir)
    discard([folder for folder in folders[:-keep] if checkpoint_step(folder) not in pinned])


def discard(folders: Sequence[Path]) -> None:
    """Delete step folders. One that cannot be deleted is warned about: cleaning up never stops a run."""
    for folder in folders:
        # A kill in the middle of the deletion must not leave half a folder under a step's name.
        gone = _temporary_name(folder)
        try:
            folder.rename(gone)
        except OSError as error:
            log.warning("cannot delete the checkpoint %s: %s", folder, error)
        else:
            _remove(gone)


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a flat name -> tensor mapping as safetensors."""
    save_file({name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}, path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file onto the CPU. ValueError when it is not one."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from error


def read_json(path: Path) -> Any:
    """Parse a JSON file. ValueError names the file when it is broken."""
    try:
        return json.loads(path.read_text(encoding="utf-8", errors="surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file that is, at every moment, absent, the old one or the new one, also after a power cut."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        # What is not UTF-8, as a file name may be, becomes JSON's own escape for it.
        with open(temporary, "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump(value, file, ensure_ascii=False, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file of a flat folder, read back after it was flushed to the disk."""

    def describe(name: str) -> dict[str, Any]:
        with _open_regular(folder / name) as file:
            os.fsync(file.fileno())
            return {"size": os.fstat(file.fileno()).st_size, "sha256": _sha256(file)}

    names = sorted(path.name for path in folder.iterdir())
    with ThreadPoolExecutor(max_workers=4) as threads:
        return dict(zip(names, threads.map(describe, names), strict=True))


def _file_problem(folder: Path, name: str, written: Any) -> str | None:
    if name in ("", ".", "..", MANIFEST) or re.search(r"[/\\\0]", name):
        return f"{folder / MANIFEST} lists {name!r}, which is not a plain file name"
    path = folder / name
    try:
        with _open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != written["size"]:
                return f"{path} has {size} bytes, but {written['size']} were written"
            if _sha256(file) != written["sha256"]:
                return f"{path} has another SHA-256 than when it was written"
    except (OSError, ValueError) as error:
        return f"{path}: {_reason(error)}"
    return None


def _sha256(file: BinaryIO) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()


def _read_manifest(folder: Path) -> dict[str, Any]:
    with _open_regular(folder / MANIFEST) as file:
        text = file.read(MAX_MANIFEST_BYTES + 1)
    if len(text) > MAX_MANIFEST_BYTES:
        raise ValueError(f"larger than {MAX_MANIFEST_BYTES} bytes")
    manifest = json.loads(text)
    kinds = {"step": int, "fingerprint": dict, "files": dict}
    if not isinstance(manifest, dict) or any(not isinstance(manifest.get(k), t) for k, t in kinds.items()):
        raise ValueError("not the manifest of a checkpoint")
    if not manifest["files"] or manifest.pop("checksum", None) != _checksum(manifest):
        raise ValueError("changed since it was written (its checksum differs)")
    return manifest


def _checksum(manifest: Mapping[str, Any]) -> str:
    # Through JSON once, so that what is written and what is read back look the same.
    plain = json.loads(json.dumps(manifest))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _open_regular(path: Path) -> BinaryIO:
    if not stat.S_ISREG(path.lstat().st_mode):
        raise ValueError("not a regular file")
    # Should the file change in between: no link is followed, and a pipe does not wait for a writer.
    return open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")


def _reason(error: Exception) -> str:
    return "missing" if isinstance(error, FileNotFoundError) else getattr(error, "strerror", "") or str(error)


def _put_in_place(temporary: Path, target: Path) -> None:
    if not os.path.lexists(target):
        temporary.rename(target)
        return
    # A run that came back to an older step writes this one again, and a rename replaces no full folder. A kill
    # between the two costs nothing: what the run came back to is still there.
    old = _temporary_name(target)
    target.rename(old)
    try:
        temporary.rename(target)
    except OSError:
        old.rename(target)
        raise
    _remove(old)


def _set_aside(folder: Path) -> Path:
    for attempt in range(1, 10_000):
        aside = folder.with_name(f"{folder.name}.damaged" + (f"-{attempt}" if attempt > 1 else ""))
        if not os.path.lexists(aside):
            folder.rename(aside)
            return aside
    raise OSError(f"{folder} cannot be set aside: 9999 damaged copies are there already; delete some")


def _clear_leftovers(run_dir: Path) -> None:
    for path in run_dir.iterdir() if run_dir.is_dir() else ():
        if LEFTOVER_NAME.fullmatch(path.name):
            log.info("removing %s, left by a save that was killed", path)
            _remove(path)


def _temporary_name(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.tmp-{os.getpid()}-{secrets.token_hex(3)}")


def _remove(path: Path) -> None:
    """Delete a folder, or whatever else has its name. Cleaning up never stops a run: a failure is a warning."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        log.warning("cannot delete %s: %s", path, error)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
