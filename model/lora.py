"""LoRA (arXiv:2106.09685): low-rank updates of a frozen GPT's matrices, kept on disk as PEFT keeps them.

An adapter folder opens with `peft.PeftModel.from_pretrained`. Beside PEFT's fields the file of tensors carries a
fingerprint of the base model, as an update means nothing on other weights, and its number of attention heads, which
a MiniMind file does not hold.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from model.gpt import GPT
from model.names import plain_names, require_shapes, shapes_of
from model.weights import ADAPTER_FILE, FREE_FIELDS, load_model, require_regular

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIG_FILE, WEIGHTS_FILE = ADAPTER_FILE, "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every name in PEFT's file
FINGERPRINT, HEADS = "base_fingerprint", "num_attention_heads"

# PEFT's fields that make another function of the same tensors, and the values that leave it alone.
HARMLESS_VALUES = {
    **dict.fromkeys(("use_rslora", "use_dora", "use_qalora", "fan_in_fan_out", "lora_bias"), (False, None)),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), ({}, None)),
    **dict.fromkeys(("layers_to_transform", "exclude_modules", "modules_to_save", "target_parameters"), (None, [])),
    **dict.fromkeys(("layer_replication", "trainable_token_indices", "alora_invocation_tokens"), (None, [], {})),
    "bias": ("none", None),
}


@dataclass(frozen=True)
class LoRAConfig:
    """Rank, strength and place of the updates; all problems come in one ValueError.

    An update is scaled by alpha / rank. dropout: share of a layer's inputs that the update does not see in training.
    targets: last part of the names of the layers to adapt, of TARGETS.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: tuple[str, ...] = TARGETS

    def __post_init__(self) -> None:
        problems = []
        if type(self.rank) is not int or self.rank < 1:
            problems.append(f"rank is {self.rank!r}; it must be a whole number above 0")
        if type(self.alpha) not in (int, float) or not (self.alpha > 0 and math.isfinite(self.alpha)):
            problems.append(f"alpha is {self.alpha!r}; it must be a finite number above 0")
        if type(self.dropout) not in (int, float) or not 0 <= self.dropout < 1:
            problems.append(f"dropout is {self.dropout!r}; it must be in [0, 1)")
        unknown = [target for target in self.targets if target not in TARGETS]
        if unknown or not self.targets:
            named = f"names {', '.join(map(repr, unknown))}" if unknown else "is empty"
            problems.append(f"targets {named}; choose from {', '.join(TARGETS)}")
        if problems:
            raise ValueError("LoRA configuration: " + "; ".join(problems))
        # One order, so that settings that mean the same are equal.
        object.__setattr__(self, "targets", tuple(name for name in TARGETS if name in self.targets))


class LoRALinear(nn.Linear):
    """A linear layer plus a low-rank update: x W^T + alpha / rank * dropout(x) A^T B^T.

    It takes the base's weight over under its name, so the base's tensors are called the same with and without
    updates. B begins at zero: an untrained update changes no bit of the output.
    """

    def __init__(self, base: nn.Linear, lora: LoRAConfig) -> None:
        super().__init__(base.in_features, base.out_features, bias=False, device="meta")
        self.weight = base.weight
        self.scale = lora.alpha / lora.rank
        self.dropout = nn.Dropout(lora.dropout)
        place = {"bias": False, "device": base.weight.device, "dtype": base.weight.dtype}
        self.lora_A = nn.Linear(base.in_features, lora.rank, **place)
        self.lora_B = nn.Linear(lora.rank, base.out_features, **place)
        nn.init.zeros_(self.lora_B.weight)
        self.train(base.training)  # attached to a model that answers, the update must not drop out either

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) + self.scale * self.lora_B(self.lora_A(self.dropout(x)))

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """A plain layer with the update added to its weight; the product is formed in float32."""
        plain = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        update = self.scale * (self.lora_B.weight.float() @ self.lora_A.weight.float())
        plain.weight = nn.Parameter((self.weight + update).to(self.weight.dtype))
        return plain


@dataclass(frozen=True)
class Adapter:
    """What an adapter folder holds; `state` under the names of an adapted GPT, `base` as the saver called it.

    base_fingerprint, num_attention_heads: of the base; None where the writer has not recorded them.
    """

    lora: LoRAConfig
    base: str
    base_fingerprint: str | None
    num_attention_heads: int | None
    state: dict[str, Tensor]


def attach_lora(model: GPT, lora: LoRAConfig) -> None:
    """Freeze the model, then give each targeted layer an update that trains. ValueError if it has updates already."""
    if lora_state(model):
        raise ValueError("the model has LoRA layers already; merge them first, or attach to the base model")
    model.requires_grad_(False)
    for parent, name, layer in list(_layers(model, nn.Linear)):
        if name in lora.targets:
            setattr(parent, name, LoRALinear(layer, lora))


def lora_state(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter of the updates alone, without the prefixes of wrappers."""
    return _updates(dict(model.named_parameters()))


def lora_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that LoRA trains: what an optimizer should see."""
    return list(lora_state(model).values())


def merge_lora(model: GPT) -> None:
    """Add the updates to the weights, in place: a plain GPT again, all of it trainable.

    A ValueError where there is nothing to merge, as after a first merge.
    """
    layers = list(_layers(model, LoRALinear))
    if not layers:
        raise ValueError("the model has no LoRA layers to merge; they were merged already, or never attached")
    for parent, name, layer in layers:
        setattr(parent, name, layer.merged())
    model.requires_grad_(True)


def base_fingerprint(model: GPT) -> str:
    """SHA-256 of the architecture and of every weight in float32; updates that are attached do not count."""
    architecture = {name: value for name, value in asdict(model.config).items() if name not in FREE_FIELDS}
    digest = hashlib.sha256(json.dumps(architecture, sort_keys=True).encode())
    updates = lora_state(model)
    for name, weight in sorted(plain_names(dict(model.named_parameters())).items()):
        if name not in updates:
            numbers = weight.detach().float().cpu().contiguous()
            digest.update(f"{name} {tuple(weight.shape)}".encode())
            digest.update(numbers.view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def save_adapter(
    folder: Path,
    model: GPT,
    lora: LoRAConfig,
    state: Mapping[str, Tensor],
    *,
    base: str,
    base_fingerprint: str,
) -> None:
    """Write adapter_config.json and adapter_model.safetensors as PEFT does; ValueError if state is not model's.

    state: tensors by name, wrapped names allowed; those that are no updates are left out. base: where the base model
    lies, for whoever loads the adapter. Files are written in place: for an atomic save, give a temporary folder.
    """
    state = _updates(state)
    require_shapes(shapes_of(lora_state(model)), shapes_of(state), "the adapter to save")
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(lora.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_dora": False,
        "use_rslora": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    tensors = {PREFIX + name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    # In the file's metadata, because PEFT warns of fields that it does not know.
    recorded = {FINGERPRINT: base_fingerprint, HEADS: str(model.config.num_attention_heads)}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt", **recorded})


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter folder without a model; a damaged one is a ValueError."""
    path = folder / CONFIG_FILE
    try:
        require_regular(path)
        require_regular(folder / WEIGHTS_FILE)
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["peft_type"] != "LORA":
            raise ValueError(f"peft_type is {raw['peft_type']!r}, only LORA is known")
        if odd := [
            f"{name} is {raw[name]!r}" for name, fit in HARMLESS_VALUES.items() if raw.get(name, fit[0]) not in fit
        ]:
            raise ValueError(f"{', '.join(odd)}, which its layers do not have")
        lora = LoRAConfig(raw["r"], raw["lora_alpha"], raw["lora_dropout"], tuple(raw["target_modules"]))
        base = str(raw["base_model_name_or_path"])
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error}); give an adapter folder") from None
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path}: no LoRA adapter of this project's kind ({error}); save it again") from None
    try:
        with safe_open(folder / WEIGHTS_FILE, framework="pt") as tensors:
            recorded = tensors.metadata() or {}
            heads = int(recorded[HEADS]) if HEADS in recorded else None
            state = {name.removeprefix(PREFIX): tensors.get_tensor(name) for name in sorted(tensors.keys())}
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"{folder / WEIGHTS_FILE}: missing or damaged ({error}); copy or save it again") from None
    odd = [name for name, tensor in state.items() if not (tensor.is_floating_point() and tensor.isfinite().all())]
    if odd:
        raise ValueError(
            f"{folder / WEIGHTS_FILE}: {len(odd)} tensors are not finite floats (as {odd[0]}); save it again"
        )
    return Adapter(lora, base, recorded.get(FINGERPRINT), heads, state)


def is_adapter(source: Path) -> bool:
    """Whether this is an adapter folder, as opposed to a model's."""
    return (source / CONFIG_FILE).is_file()


def base_folder(start: Path | None, run_dir: Path) -> Path:
    """Where the base lies of a run that begins with `start`: there, or, where it is the run's own adapter, its base's.

    Raises ValueError where there is none, where it lies in the run's own folder, or `start` is another run's adapter.
    """
    if start is None:
        raise ValueError("--from_weight none: LoRA adapts a model that is trained already; give its folder")
    if not is_adapter(start):
        # A run deletes its older checkpoints, and is set aside by its name when it begins anew.
        if run_dir.resolve() in (start.resolve(), *start.resolve().parents):
            raise ValueError(f"--from_weight {start} lies in the run's own folder {run_dir}; give another --out_dir")
        return start
    if start.parent.resolve() != run_dir.resolve():
        raise ValueError(
            f"--from_weight {start} is an adapter; merge it into its base first, with python -m scripts.export "
            "--merge_lora, and give that folder"
        )
    return find_base(start)


def open_model(source: Path, num_attention_heads: int | None = None) -> GPT:
    """The model in a model folder, a MiniMind .pth file, or an adapter folder, there with its updates attached.

    In float32 and in training mode. Raises ValueError, also where an adapter's base is not found; see `find_base`.
    """
    if not is_adapter(source):
        return load_model(source, num_attention_heads)
    model = load_base(source, None, num_attention_heads)
    load_adapter(model, source)
    return model


def load_base(folder: Path, place: Path | None = None, num_attention_heads: int | None = None) -> GPT:
    """The base model of an adapter folder, from `place` or from where `find_base` finds it.

    num_attention_heads: of a MiniMind file, for an adapter that does not record it.
    """
    heads = read_adapter(folder).num_attention_heads if num_attention_heads is None else num_attention_heads
    return load_model(place or find_base(folder, heads), heads)


def find_base(folder: Path, num_attention_heads: int | None = None) -> Path:
    """Where the base model of an adapter folder lies now: what holds the very weights that it was trained on.

    The recorded place first, then where it would be if the folder of all runs, or the two folders, were moved
    together. Raises ValueError naming every place and what is wrong with it.
    """
    adapter = _read_signed(folder)
    recorded, above = Path(adapter.base), folder.resolve().parents  # the run, the folder of runs, the project
    moved = [parent / recorded for parent in above[2:3]]
    moved += [parent / Path(*recorded.parts[-2:]) for parent in above[1:2]] + [above[0] / recorded.name]
    problems = {}
    for place in (recorded, *moved):
        if place.resolve() in problems:
            continue
        problem = _why_not_base(place, adapter.base_fingerprint, num_attention_heads or adapter.num_attention_heads)
        if problem is None:
            return place
        problems[place.resolve()] = problem
    tried = "; ".join(f"{place} {problem}" for place, problem in problems.items())
    raise ValueError(
        f"{folder} needs the base model that it was trained on, {recorded}, and it is gone: {tried}. Put it back "
        "at one of these places (a run deletes its older checkpoints when it is trained on), or train the adapter anew"
    )


def _why_not_base(place: Path, fingerprint: str, num_attention_heads: int | None) -> str | None:
    """What is wrong with a place as the base of this fingerprint; None: nothing."""
    if not place.exists():
        return "is not there"
    if is_adapter(place):
        return "is an adapter"
    try:
        found = base_fingerprint(load_model(place, num_attention_heads))
    except ValueError as error:
        return f"cannot be loaded ({error})"
    return None if found == fingerprint else "holds other weights"


def _read_signed(folder: Path) -> Adapter:
    """As read_adapter; one that does not name its base is a ValueError."""
    adapter = read_adapter(folder)
    if adapter.base_fingerprint is None:
        raise ValueError(
            f"{folder} does not say which base model it was trained on; merge it in the program that wrote it"
        )
    return adapter


def load_adapter(model: GPT, folder: Path) -> LoRAConfig:
    """Attach the folder's updates to its base model, every tensor or none.

    Another base than the one the adapter was trained on, and missing, unexpected or wrong-shaped tensors, are a
    ValueError, and the model is left as it was.
    """
    adapter = _read_signed(folder)
    if lora_state(model):
        raise ValueError("the model has LoRA layers already; load the adapter into the base model")
    found = base_fingerprint(model)
    if found != adapter.base_fingerprint:
        raise ValueError(
            f"{folder} was trained on another base model (fingerprint {adapter.base_fingerprint[:12]}, this one has "
            f"{found[:12]}; a merged model is another one too); load it into {adapter.base}"
        )
    wanted = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name.rpartition(".")[2] in adapter.lora.targets:
            wanted[f"{name}.lora_A.weight"] = (adapter.lora.rank, layer.in_features)
            wanted[f"{name}.lora_B.weight"] = (layer.out_features, adapter.lora.rank)
    require_shapes(wanted, shapes_of(adapter.state), str(folder))
    attach_lora(model, adapter.lora)
    with torch.no_grad():
        for name, parameter in lora_state(model).items():
            parameter.copy_(adapter.state[name])
    return adapter.lora


def _updates(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in plain_names(state).items() if ".lora_A." in name or ".lora_B." in name}


def _layers(model: nn.Module, kind: type[nn.Linear]) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Every layer of a kind, with the module that holds it and its name there."""
    for parent in model.modules():
        for name, layer in parent.named_children():
            if isinstance(layer, kind):
                yield parent, name, layer
