"""The house rules that a reader relies on: who imports whom, and what stays out of the code."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(ROOT.glob("train_*.py"))
MODULES = [
    *SCRIPTS,
    *(path for part in ("model", "dataset", "trainer", "scripts") for path in (ROOT / part).glob("*.py")),
]

# Packages of this repository that each folder may import, beside itself. Scripts may import anything.
ALLOWED = {"model": set(), "dataset": {"model"}, "trainer": set()}
MODEL_EXTERNALS = {"torch", "safetensors"}
# MiniMind's files are pickles. This module alone may open them, and only with weights_only=True.
UNPICKLER = ROOT / "model" / "minimind.py"
# run.py composes; snapshots.py and validator.py are parts of it. The others know one another only this far.
COMPOSERS = {"run.py", "preflight.py", "snapshots.py", "validator.py"}
TRAINER_MAY_KNOW = {
    f"trainer.{name}"
    for name in ("ddp", "backends", "checkpoint", "optim", "plan", "guard", "rendezvous", "profiling", "memory")
}


def imports(path: Path) -> Iterator[str]:
    """Full names of the modules that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            if node.module in ALLOWED:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_folders_import_only_what_the_design_lets_them(path: Path) -> None:
    folder, standard = path.parent.name, set(__import__("sys").stdlib_module_names)
    for name in imports(path):
        package = name.split(".")[0]
        assert not package.startswith("train_"), f"{path}: nobody imports the training scripts"
        if path in SCRIPTS or folder == "scripts":
            continue
        assert package != "scripts", f"{path} imports {name}"
        if package in ("model", "dataset", "trainer"):
            assert package == folder or package in ALLOWED[folder], f"{path} imports {name}"
        elif folder == "model":
            assert package in MODEL_EXTERNALS | standard, f"{path} imports {name}"
        if folder == "trainer" and package == "trainer" and path.name not in COMPOSERS:
            assert name in TRAINER_MAY_KNOW or name == "trainer", f"{path} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_scripts_options_and_run_touch_args(path: Path) -> None:
    if path in SCRIPTS or path.parent.name == "scripts" or path.name in ("options.py", "run.py", "preflight.py"):
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    touched = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == "args"]
    assert not touched, f"{path}:{touched[0]} touches args"


def loads_tensors_only(node: ast.AST) -> bool:
    """Whether a node is a call with weights_only=True, written out."""
    keywords = node.keywords if isinstance(node, ast.Call) else []
    return any(keyword.arg == "weights_only" and ast.unparse(keyword.value) == "True" for keyword in keywords)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_importing_does_no_work_and_nothing_unpickles(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    harmless = {node.func for node in ast.walk(tree) if path == UNPICKLER and loads_tensors_only(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{path}:{node.lineno}: bare except"
        if isinstance(node, ast.Attribute) and node not in harmless:
            assert ast.unparse(node) not in ("sys.path", "torch.load"), f"{path}:{node.lineno}"
    assert "pickle" not in {name.split(".")[0] for name in imports(path)}
    for node in tree.body:
        allowed = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign, ast.If)
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        assert docstring or isinstance(node, allowed), f"{path}:{node.lineno} does work on import"


def loop_of(source: str) -> str:
    """The training loop in a piece of code, as a syntax tree."""
    loops = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.While)]
    assert len(loops) == 1
    return ast.dump(loops[0])


def test_training_scripts_share_the_loop_that_the_readme_shows() -> None:
    blocks = (ROOT / "README.md").read_text(encoding="utf-8").split("```python\n")[1:]
    (shown,) = [block.split("```")[0] for block in blocks if "while run.continues" in block]
    for path in SCRIPTS:
        assert loop_of(path.read_text(encoding="utf-8")) == loop_of(shown), path
