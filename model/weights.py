"""A transformers model folder (config.json and safetensors, Llama or Qwen3) to and from a GPT; MiniMind's files too."""

import contextlib
import json
import logging
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from model.gpt import GPT, GPTConfig
from model.minimind import read_minimind
from model.names import Shapes, plain_name, plain_names, require_shapes, shapes_of

log = logging.getLogger(__name__)

COPIED_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
ADAPTER_FILE = "adapter_config.json"
CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE = "config.json", "model.safetensors", "model.safetensors.index.json"
EMBEDDING = "model.embed_tokens.weight"

REQUIRED_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")

# What transformers assumes for a field that config.json leaves out: not our defaults, the folder is its format.
FOREIGN_DEFAULTS = {
    "llama": {"num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
}

# Fields that change the computation in a way GPT has no counterpart for, and the values that leave it alone.
HARMLESS_VALUES = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
    "num_experts": (0, 1, None),
    "num_local_experts": (0, 1, None),
    "use_moe": (False, None),
}

# These may differ between a model and the folder it takes weights from: no weight depends on them.
FREE_FIELDS = ("dropout", "max_position_embeddings")


def save_model_folder(
    folder: Path,
    config: GPTConfig,
    state: Mapping[str, Tensor],
    *,
    bos_id: int = 1,
    eos_id: int = 2,
    pad_id: int = 0,
    tokenizer_folder: Path | None = None,
) -> None:
    """Write config.json and model.safetensors so that transformers opens the folder as Llama or Qwen3.

    state: a GPT's state dict, wrapped names allowed; its dtype is kept; a tied lm_head.weight is left out.
    dropout is stored too, as an extra field that transformers ignores. Tensors that do not fit config are a
    ValueError. Files are written in place: for an atomic save, give a temporary folder.
    """
    state = {name: tensor.detach() for name, tensor in plain_names(state).items()}
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    _check_shapes(config, shapes_of(state), "the state to save")
    described = {
        "architectures": ["Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if config.qk_norm else "llama",
        **{field.name: getattr(config, field.name) for field in fields(config) if field.name != "qk_norm"},
        # Newer transformers read rope_parameters, older ones and other engines rope_theta; without either the
        # value is 10,000 in silence.
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "pad_token_id": pad_id,
        "dtype": str(state[EMBEDDING].dtype).removeprefix("torch."),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    tensors = {name: tensor.cpu().contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    if tokenizer_folder is not None:
        copy_tokenizer(tokenizer_folder, folder)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer's files that `source` has into `folder`."""
    for name in COPIED_TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)


def load_config(folder: Path) -> GPTConfig:
    """The GPTConfig of a Llama or Qwen3 folder; anything a GPT cannot represent is a ValueError naming the field."""
    path = folder / CONFIG_FILE
    if not path.exists() and (folder / ADAPTER_FILE).exists():
        raise ValueError(
            f"{folder} is a LoRA adapter; merge it first: python -m scripts.export {folder} OUT --merge_lora"
        )
    raw = _read_json(path)
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in FOREIGN_DEFAULTS:
        raise ValueError(f"{path}: model_type is {kind!r}; only dense 'llama' and 'qwen3' models can be loaded")
    missing = [name for name in REQUIRED_SIZES if raw.get(name) is None]
    if missing:
        raise ValueError(f"{path}: {', '.join(missing)} not given; the folder does not describe its model")
    for name, harmless in HARMLESS_VALUES.items():
        if raw.get(name, harmless[0]) not in harmless:
            raise ValueError(f"{path}: {name} is {raw[name]!r}, which this model does not have; use a folder without")
    _refuse_sliding_window(path, raw)
    rope_theta = _rope_theta(path, raw)
    values = {name: raw[name] for name in REQUIRED_SIZES}
    for name, default in FOREIGN_DEFAULTS[kind].items():
        values[name] = default if raw.get(name) is None else raw[name]
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = raw["num_attention_heads"]
    try:
        return GPTConfig(
            **values,
            rope_theta=rope_theta,
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            tie_word_embeddings=raw.get("tie_word_embeddings", False),
            qk_norm=kind == "qwen3",
            dropout=raw.get("dropout", 0.0),
        )
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{path}: {error}") from None


def load_model_folder(folder: Path, config: GPTConfig | None = None) -> GPT:
    """A GPT in float32, in training mode, with the folder's architecture and weights; strict, see load_weights_into.

    config: the folder's own, with other values of FREE_FIELDS.
    """
    saved = load_config(folder)
    _checked_tensors(folder, saved)  # a wild number must not build a wild model
    model = GPT(config or saved)
    load_weights_into(model, folder)
    return model


def load_model(source: Path, num_attention_heads: int | None = None) -> GPT:
    """As load_model_folder, also of a MiniMind .pth file, which may not hold the number of heads: then it is asked for.

    A ValueError where another number than the one that is there is asked for.
    """
    if not source.is_file():
        model = load_model_folder(source)
        if num_attention_heads not in (None, model.config.num_attention_heads):
            raise ValueError(
                f"{source} has {model.config.num_attention_heads} attention heads, and {num_attention_heads} are asked "
                "for; leave --num_attention_heads out"
            )
        return model
    config, state = read_minimind(source, num_attention_heads)
    if num_attention_heads is None and not config.qk_norm:
        log.warning(
            "%s does not say how many attention heads it has: %d are taken, as all published models have; "
            "--num_attention_heads for another number",
            source,
            config.num_attention_heads,
        )
    model = GPT(config)
    model.load_state_dict(state)
    return model


def starting_config(
    source: Path | None, sizes: Mapping[str, object], *, vocab_size: int, given: Collection[str], max_seq_len: int
) -> GPTConfig:
    """The architecture a run begins with, without its weights: that of `source`, a model folder or MiniMind file.

    sizes: fields of GPTConfig. given: those that the user asked for by name; one that disagrees with the source, or
    rows longer than the model has positions for, is a ValueError. Dropout is no part of the weights: sizes decides.
    """
    if source is None:
        positions = max(GPTConfig.max_position_embeddings, max_seq_len)
        return GPTConfig(vocab_size=vocab_size, max_position_embeddings=positions, **sizes)
    # No older file of MiniMind's holds the number of heads: there, what the user says is believed.
    heads = sizes["num_attention_heads"] if "num_attention_heads" in given else None
    saved = read_minimind(source, heads)[0] if source.is_file() else load_config(source)
    config = replace(saved, dropout=sizes["dropout"])
    problems = [
        f"--{name} is {getattr(config, name)} there and {sizes[name]} here"
        for name in sorted(given)
        if getattr(config, name) != sizes[name]
    ]
    if max_seq_len > config.max_position_embeddings:
        problems.append(f"it has {config.max_position_embeddings} positions, fewer than --max_seq_len {max_seq_len}")
    if problems:
        raise ValueError(f"{source} holds another model: {'; '.join(problems)}; leave these options out")
    return config


def starting_model(source: Path | None, config: GPTConfig) -> GPT:
    """The model a run begins with: random weights, or those of `source`. config: of `starting_config`."""
    if source is None:
        return GPT(config)
    if source.is_dir():
        return load_model_folder(source, config)
    model = GPT(config)
    model.load_state_dict(read_minimind(source, config.num_attention_heads)[1])
    return model


def load_weights_into(model: GPT, folder: Path) -> None:
    """Copy the folder's weights into the model, every tensor or none.

    A folder of another architecture, or with missing, unexpected or wrong-shaped tensors, is a ValueError. One
    model.safetensors or the shards of model.safetensors.index.json; numbers are cast to the model's dtype.
    """
    saved = load_config(folder)
    differing = [
        f"{field.name} is {getattr(saved, field.name)} there and {getattr(model.config, field.name)} here"
        for field in fields(saved)
        if field.name not in FREE_FIELDS and getattr(saved, field.name) != getattr(model.config, field.name)
    ]
    if differing:
        raise ValueError(f"{folder} holds another model: {'; '.join(differing)}")
    stored, spare_head = _checked_tensors(folder, saved)
    with _naming_damage(folder), torch.no_grad():
        if spare_head is not None:
            _check_tied(folder, spare_head, stored[EMBEDDING])
        for name, parameter in model.named_parameters():
            parameter.copy_(stored[name].read())


def require_regular(path: Path) -> None:
    """Raise OSError for a pipe or a device: reading one may wait for ever."""
    if path.exists() and not path.is_file():
        raise OSError("not a regular file")


def _read_json(path: Path) -> dict:
    try:
        require_regular(path)
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"{path}: cannot be read ({reason}); a transformers model folder is needed") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}); copy or save the folder again") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: holds a JSON {type(raw).__name__}, not an object; copy or save the folder again")
    return raw


def _refuse_sliding_window(path: Path, raw: dict) -> None:
    kinds = raw.get("layer_types")
    if kinds is None:
        windowed = raw.get("use_sliding_window") not in (False, None)
    else:
        windowed = not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)
    if windowed:
        raise ValueError(f"{path}: layer_types or use_sliding_window asks for sliding-window attention; not supported")


def _rope_theta(path: Path, raw: dict) -> float:
    """The RoPE base, in the order transformers looks for it; scaled or partial rotary positions are refused."""
    nested = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(nested, dict) or any(isinstance(value, dict) for value in nested.values()):
        raise ValueError(f"{path}: rope_parameters is {nested!r}; one flat object for all layers is supported")
    kind = nested.get("rope_type", nested.get("type", "default"))
    if kind != "default" or nested.get("partial_rotary_factor") not in (1, None):
        raise ValueError(f"{path}: rope_parameters asks for {nested!r}; only unscaled, full rotation is supported")
    given = [theta for theta in (nested.get("rope_theta"), raw.get("rope_theta")) if theta is not None]
    if len(given) == 2 and given[0] != given[1]:
        raise ValueError(f"{path}: rope_theta is given as {given[0]} and as {given[1]}; make the two places agree")
    return given[0] if given else 10_000.0


def _tensor_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: the single one, or the shards that the index names."""
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    if not (folder / INDEX_FILE).is_file():
        raise ValueError(f"{folder}: neither {WEIGHTS_FILE} nor {INDEX_FILE}; save the model as safetensors")
    weight_map = _read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{folder / INDEX_FILE}: no weight_map; copy or save the folder again")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise ValueError(f"{folder / INDEX_FILE}: the shard {name!r} is not a file of this folder; copy it there")
    return [folder / name for name in names]


class _Stored(NamedTuple):
    """Where a tensor lies: its file, its name there, and its shape."""

    path: Path
    name: str
    shape: tuple[int, ...]

    def read(self) -> Tensor:
        with safe_open(self.path, framework="pt") as tensors:
            return tensors.get_tensor(self.name)


def _stored_tensors(folder: Path) -> dict[str, _Stored]:
    """Every tensor of a folder by its plain name; reads headers only."""
    stored: dict[str, _Stored] = {}
    for path in _tensor_files(folder):
        with safe_open(path, framework="pt") as tensors:
            for given in sorted(tensors.keys()):
                name, part = plain_name(given), tensors.get_slice(given)
                if name in stored:
                    raise ValueError(
                        f"{folder}: {name} is there twice, as {stored[name].name} and {given}; save it again"
                    )
                if part.get_dtype() not in ("F64", "F32", "F16", "BF16"):
                    raise ValueError(f"{path}: {name} is stored as {part.get_dtype()}; only float weights load")
                stored[name] = _Stored(path, given, tuple(part.get_shape()))
    return stored


def _checked_tensors(folder: Path, config: GPTConfig) -> tuple[dict[str, _Stored], _Stored | None]:
    """As _stored_tensors, once they are those of config; apart from them the second copy of a tied head, if any."""
    with _naming_damage(folder):
        stored = _stored_tensors(folder)
    spare_head = stored.pop("lm_head.weight", None) if config.tie_word_embeddings else None
    _check_shapes(config, {name: part.shape for name, part in stored.items()}, str(folder))
    return stored, spare_head


@contextlib.contextmanager
def _naming_damage(folder: Path) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"{folder}: damaged safetensors file ({error}); copy or save it again") from None


def _check_tied(folder: Path, head: _Stored, embedding: _Stored) -> None:
    """Some writers store a tied head a second time; a copy that differs means that the folder is not tied."""
    if not torch.equal(head.read(), embedding.read()):
        raise ValueError(f"{folder}: tie_word_embeddings is true, but lm_head.weight differs from {EMBEDDING}")


def _check_shapes(config: GPTConfig, found: Shapes, where: str) -> None:
    """Refuse tensors that are not those of a saved GPT: of a tied head, the embedding alone."""
    # Even without memory for its tensors a model of 10^7 layers takes a minute to build.
    if config.num_hidden_layers > len(found):
        raise ValueError(
            f"{where}: the tensors do not fit the model: num_hidden_layers is {config.num_hidden_layers}, and there "
            f"are {len(found)} tensors"
        )
    try:
        with torch.device("meta"):
            wanted = shapes_of(GPT(config).state_dict())
    except (RuntimeError, TypeError, OverflowError):
        raise ValueError(f"{where}: {config} has sizes that no tensor can have") from None
    if config.tie_word_embeddings:
        del wanted["lm_head.weight"]
    require_shapes(wanted, found, where)
