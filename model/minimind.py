"""MiniMind's own weight files (`pretrain_512.pth`, `full_sft_768.pth`, ...) to a GPT, and a GPT's tensors to its names.

Its generations, by the names in the file: "tok_embeddings" (2025, February to April) with rotary positions on
neighbouring channels; "model.embed_tokens" without QK-norm (to March 2026); the same with QK-norm (minimind-3). All
count 6400 tokens, but minimind-3 has another vocabulary: the file cannot tell, its tokenizer has to come with it.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from model.gpt import GPT, GPTConfig
from model.names import plain_names, require_shapes, shapes_of

# First generation's name -> ours, which is that of all later ones.
OLD_NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
EXPERTS = re.compile(r"\.(experts|shared_experts)\.|\.(mlp|feed_forward)\.gate\.")
# Tables that some versions store beside the weights; they follow from the sizes.
TABLES = re.compile(r"(^|\.)(pos_cis|freqs_cos|freqs_sin|attention\.mask)$")

# No shape tells these; every published dense model has them.
HEADS, ROPE_THETA, POSITIONS = 8, 1e6, 32768


def read_minimind(path: Path, num_attention_heads: int | None = None) -> tuple[GPTConfig, dict[str, Tensor]]:
    """The configuration and the float32 state dict (a GPT's names) of a MiniMind file of any generation.

    num_attention_heads: only a file with QK-norm holds it; for the others None means the 8 of all published models.
    Sizes come from the shapes, the rest (rope_theta, rms_norm_eps) is what MiniMind's code fixes. A resume file
    counts as the weights in it. A mixture of experts, or tensors too many, too few or of a wrong shape are a
    ValueError. Unpickles tensors only, so a file from a stranger runs no code.
    """
    if num_attention_heads is not None and num_attention_heads < 1:
        raise ValueError(f"{path}: {num_attention_heads} attention heads asked for; at least 1 is needed")
    state = _read_tensors(path)
    experts = [name for name in state if EXPERTS.search(name)]
    if experts:
        raise ValueError(
            f"{path}: a mixture of experts ({len(experts)} of its tensors, as {experts[0]}); "
            "only MiniMind's dense models can be loaded"
        )
    neighbouring_pairs = "tok_embeddings.weight" in state
    if neighbouring_pairs:
        state = {_new_name(name): tensor for name, tensor in state.items()}
    config = _config_of(path, state, num_attention_heads)
    require_shapes(minimind_shapes(config), shapes_of(state), str(path))
    if config.tie_word_embeddings:
        # One tensor, as in a GPT: stored twice, it would load twice.
        state[HEAD] = state[EMBEDDING]
    if neighbouring_pairs:
        for name, tensor in state.items():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                state[name] = _halves_from_pairs(tensor, config.head_dim)
    return config, state


def minimind_state(config: GPTConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a GPT as a MiniMind file holds them: float16, its names, the tied head a second time.

    MiniMind from April 2025 on, minimind-3 with qk_norm. Its scripts build the model from two sizes alone; what they
    would silently assume otherwise than config says, or a number that float16 cannot hold, is a ValueError.
    """
    assumed = {"rope_theta": ROPE_THETA, "rms_norm_eps": _epsilon(config.qk_norm), "num_attention_heads": HEADS}
    assumed["tie_word_embeddings"] = True  # it loads both tensors into one, and the second wins
    differing = [
        f"{name} is {getattr(config, name)}, MiniMind takes {value}"
        for name, value in assumed.items()
        if getattr(config, name) != value
    ]
    if differing:
        raise ValueError(f"this model cannot be a MiniMind file: {'; '.join(differing)}; export a transformers folder")
    state = plain_names(state)
    if config.tie_word_embeddings and EMBEDDING in state:
        state[HEAD] = state[EMBEDDING]
    require_shapes(minimind_shapes(config), shapes_of(state), "the state to export")
    halves = {name: tensor.detach().cpu().half() for name, tensor in state.items()}
    too_large = [name for name, tensor in halves.items() if not tensor.isfinite().all()]
    if too_large:
        raise ValueError(f"{len(too_large)} tensors do not fit into float16 (as {too_large[0]}); use a float32 folder")
    return halves


def minimind_shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that a file of such a model holds, the head included."""
    with torch.device("meta"):
        return shapes_of(GPT(config).state_dict())


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        with open(path, "rb") as file:
            head = file.read(4)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error}); give a MiniMind .pth file") from None
    if not head.startswith((b"PK", b"\x80")):  # a zip archive, or before torch 1.6 a pickle
        raise ValueError(f"{path}: torch.save has not written it (it begins with {head!r}); give a MiniMind .pth file")
    try:
        raw = torch.load(path, map_location="cpu", weights_only=True)
    # A damaged or hostile file fails as it likes: UnpicklingError, RuntimeError, OSError, EOFError, KeyError, ...
    except Exception as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ValueError(
            f"{path}: damaged, cut off, or not a file of tensors alone ({reason:.200}); give a whole MiniMind .pth file"
        ) from None
    if isinstance(raw, dict) and isinstance(raw.get("model"), dict):
        raw = raw["model"]  # a resume file
    if not isinstance(raw, dict) or not raw or not all(isinstance(name, str) for name in raw):
        raise ValueError(f"{path}: holds no tensors by name; give a MiniMind .pth file")
    bad = [name for name, tensor in raw.items() if not (isinstance(tensor, Tensor) and _is_plain(tensor, name))]
    if bad:
        raise ValueError(f"{path}: {len(bad)} entries are no dense float tensors (as {bad[0]}); give a MiniMind file")
    return {name: tensor.float() for name, tensor in plain_names(raw).items() if not TABLES.search(name)}


def _is_plain(tensor: Tensor, name: str) -> bool:
    # A view can repeat a few numbers for ever: none of its numbers may be another's.
    whole = tensor.layout == torch.strided and tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.itemsize
    return whole and (tensor.is_floating_point() or bool(TABLES.search(name)))


def _new_name(name: str) -> str:
    """Our name of a tensor of the first generation; one that it never had stays, to be reported."""
    layer = re.fullmatch(r"(layers\.\d+\.)(.+)", name)
    prefix, rest = (f"model.{layer[1]}", layer[2]) if layer else ("", name)
    module = OLD_NAMES.get(rest.removesuffix(".weight"))
    return f"{prefix}{module}.weight" if module and rest.endswith(".weight") else name


def _config_of(path: Path, state: dict[str, Tensor], heads: int | None) -> GPTConfig:
    """The sizes, as the first layer and the embedding show them."""
    layer = "model.layers.0."
    q, k, gate = (f"{layer}{name}_proj.weight" for name in ("self_attn.q", "self_attn.k", "mlp.gate"))
    absent = [name for name in (EMBEDDING, q, k, gate) if name not in state or state[name].dim() != 2]
    if absent:
        raise ValueError(f"{path}: {len(absent)} of 4 matrices that show the sizes are missing ({', '.join(absent)})")
    q_size, k_size = len(state[q]), len(state[k])
    norm = state.get(f"{layer}self_attn.q_norm.weight")
    if norm is not None and norm.numel():
        head_dim = norm.numel()
        if heads not in (None, q_size // head_dim):
            raise ValueError(f"{path}: {q_size // head_dim} attention heads there and {heads} asked for; leave it out")
    else:
        head_dim = q_size // (heads or HEADS)
    if not head_dim or q_size % head_dim or k_size % head_dim:
        raise ValueError(
            f"{path}: {q_size} query and {k_size} key channels do not split into {heads or HEADS} attention heads; "
            "give the number that the model was trained with"
        )
    numbers = [int(found[1]) for name in state if (found := re.match(r"model\.layers\.(\d+)\.", name))]
    try:
        return GPTConfig(
            vocab_size=state[EMBEDDING].shape[0],
            hidden_size=state[EMBEDDING].shape[1],
            num_hidden_layers=min(max(numbers) + 1, len(state)),  # a wild number must not build a wild model
            num_attention_heads=q_size // head_dim,
            num_key_value_heads=k_size // head_dim,
            intermediate_size=len(state[gate]),
            head_dim=head_dim,
            max_position_embeddings=POSITIONS,
            rope_theta=ROPE_THETA,
            rms_norm_eps=_epsilon(norm is not None),
            tie_word_embeddings=HEAD in state and torch.equal(state[HEAD], state[EMBEDDING]),
            qk_norm=norm is not None,
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _epsilon(qk_norm: bool) -> float:
    """What MiniMind's norms add to the mean square; minimind-3 went to Qwen3's value."""
    return 1e-6 if qk_norm else 1e-5


def _halves_from_pairs(weight: Tensor, head_dim: int) -> Tensor:
    """Rows of a q or k projection in the order that pairs channel i with i + head_dim / 2, not 2i with 2i + 1."""
    return weight.view(-1, head_dim // 2, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
