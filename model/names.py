"""Tensor names: without the prefixes of wrappers, and compared with what a model needs."""

from collections.abc import Mapping

from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]


def plain_name(name: str) -> str:
    """A name without the `module.` of DDP and the `_orig_mod.` of torch.compile, however they are nested."""
    return ".".join(part for part in name.split(".") if part not in ("module", "_orig_mod"))


def plain_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under their plain names; two that become one are a ValueError."""
    plain: dict[str, Tensor] = {}
    for name, tensor in state.items():
        short = plain_name(name)
        if short in plain:
            raise ValueError(f"two tensors are called {short!r} once wrapper prefixes are removed; keep one")
        plain[short] = tensor
    return plain


def shapes_of(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Name -> shape."""
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def require_shapes(wanted: Shapes, found: Shapes, where: str) -> None:
    """Raise one ValueError that counts and names what is missing, unexpected or of another shape."""
    wrong = {
        "missing": [name for name in wanted if name not in found],
        "unexpected": [name for name in found if name not in wanted],
        "wrong-shaped": [
            f"{name} {found[name]} instead of {wanted[name]}"
            for name in wanted
            if name in found and found[name] != wanted[name]
        ],
    }
    if any(wrong.values()):
        parts = [
            f"{len(names)} {what} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
            for what, names in wrong.items()
            if names
        ]
        raise ValueError(f"{where}: the tensors do not fit the model: {'; '.join(parts)}")
