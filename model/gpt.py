"""A decoder-only GPT in the Llama layout: RMSNorm before every branch, SwiGLU, rotary positions, grouped heads.

Parameter names are those of transformers' LlamaForCausalLM (Qwen3ForCausalLM with QK-norm), so a state dict
needs no renaming on its way in or out.
"""

from dataclasses import dataclass, fields
from math import isfinite

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.cache import KVCache, LayerCache
from model.loss import IGNORE_INDEX as IGNORE_INDEX
from model.loss import cross_entropy_sum

# Tokens a text in a packed row has on average where it is better attended to alone.
SHORT_TEXT = 128


@dataclass(frozen=True)
class GPTConfig:
    """Sizes and switches of a GPT, under their Hugging Face names; None means "derive from the others".

    The defaults give 25,829,888 parameters. intermediate_size defaults to 8/3 hidden_size rounded up to a
    multiple of 64, head_dim to hidden_size / num_attention_heads. All problems come in one ValueError.
    """

    vocab_size: int = 6400
    hidden_size: int = 512
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    intermediate_size: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 32768
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    qk_norm: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        problems = self._type_problems()
        if not problems:
            if self.intermediate_size is None:
                object.__setattr__(self, "intermediate_size", -(int(8 * self.hidden_size / 3) // -64) * 64)
            if self.head_dim is None:
                object.__setattr__(self, "head_dim", max(1, self.hidden_size // self.num_attention_heads))
            problems = self._size_problems()
        if problems:
            raise ValueError("model configuration: " + "; ".join(problems))

    def _type_problems(self) -> list[str]:
        problems = []
        for field in fields(self):
            value, kind = getattr(self, field.name), field.type
            if kind == int | None and value is None:
                continue
            if kind is bool:
                fits, wanted = isinstance(value, bool), "true or false"
            elif kind is float:
                fits = isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
                wanted = "a finite number"
            else:
                fits, wanted = type(value) is int and value > 0, "a whole number above 0"
            if not fits:
                problems.append(f"{field.name} is {value!r}; it must be {wanted}")
        return problems

    def _size_problems(self) -> list[str]:
        hidden, heads, kv_heads = self.hidden_size, self.num_attention_heads, self.num_key_value_heads
        problems = []
        # Qwen3 alone frees head_dim from this division; transformers refuses such a Llama.
        if hidden % heads and not (self.qk_norm and self.head_dim != hidden // heads):
            problems.append(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
        if heads % kv_heads:
            problems.append(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        if self.head_dim % 2:
            problems.append(f"head_dim {self.head_dim} is odd; rotary positions turn pairs of channels")
        if not 0 <= self.dropout < 1:
            problems.append(f"dropout {self.dropout} is outside [0, 1)")
        for name in ("rope_theta", "rms_norm_eps"):
            if getattr(self, name) <= 0:
                problems.append(f"{name} {getattr(self, name)} must be above 0")
        return problems


class RMSNorm(nn.Module):
    """Scale each row to unit root mean square, then by a learned weight (arXiv:1910.07467); keeps x's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # CUDA's autocast runs rms_norm in float32 and returns that.
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps).to(x.dtype)


def rope_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine of each position's angles (RoPE, arXiv:2104.09864), in float32.

    positions: (time,) or (batch, time). Returns two tensors of that shape + (1, head_dim), ready for
    (batch, time, heads, head_dim).
    """
    # Recomputed at every call, not kept as a buffer: model.to(bfloat16) would round the frequencies.
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions.float()[..., None, None] * (1.0 / theta**exponents)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the channel pairs (i, i + head_dim / 2) by their position's angle, as Hugging Face pairs them.

    x: (batch, time, heads, head_dim); cos, sin: from rope_tables, in x's dtype. Returns x's shape and dtype.
    """
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin


def attention_mask(
    time: int, past: int, segments: Tensor | None, key_segments: Tensor | None, device: torch.device
) -> Tensor | None:
    """What `time` tokens after `past` others may look at: (batch or 1, 1, time, past + time), True for yes.

    segments: (batch, time), key_segments: (batch, past + time). None where SDPA needs no mask: a whole row of one
    text, which its is_causal covers, and a single token, which sees all.
    """
    if segments is None and (past == 0 or time == 1):
        return None
    # is_causal would align the first query with the first key, and it does not go with a mask.
    earlier = torch.ones(time, past + time, dtype=torch.bool, device=device).tril(past)
    if segments is None:
        return earlier[None, None]
    return (earlier & (segments[:, :, None] == key_segments[:, None, :]))[:, None]


def stretches(segments: Tensor) -> list[int] | None:
    """Lengths of the texts in packed rows, row after row, where they are better attended to one by one; else None.

    segments: (batch, time). With a mask the kernel works on every pair of a row. Attention to each text alone takes a
    call a text: on a CPU a training step on 4 x 768 with three texts a row took 14 % less so.
    """
    if segments.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    starts = begins.flatten().nonzero().flatten()
    if segments.numel() < SHORT_TEXT * len(starts):
        return None
    rows = starts // segments.shape[1]
    if len(torch.stack((rows, segments.flatten()[starts])).unique(dim=1)[0]) < len(starts):
        return None  # a text that another one interrupts
    return starts.diff(append=starts.new_tensor([segments.numel()])).tolist()


def attend_alone(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], enable_gqa: bool) -> Tensor:
    """Causal attention within stretches of packed rows.

    q, k, v: (batch, time, heads, head_dim); lengths: of the stretches. Returns (batch, time, heads x head_dim).
    """
    # Split, not sliced: the gradients of all parts become one tensor with a single copy.
    mixed = []
    for part in zip(*(x.flatten(0, 1).split(lengths) for x in (q, k, v)), strict=True):
        per_head = (x.transpose(0, 1)[None] for x in part)
        alone = F.scaled_dot_product_attention(*per_head, is_causal=True, enable_gqa=enable_gqa)
        mixed.append(alone[0].transpose(0, 1))
    return torch.cat(mixed).view(*q.shape[:2], -1)


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads and, with qk_norm, Qwen3's norm of every q and k head."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.grouped = config.num_key_value_heads != config.num_attention_heads
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.qk_norm = config.qk_norm

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | list[int] | None = None,
        past: LayerCache | None = None,
    ) -> Tensor:
        """mask: (batch or 1, 1, time, keys), True where a token may look; None: at itself and all before it.

        A list of lengths: only within the stretches of these lengths, see `stretches`.
        """
        per_head = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = self.q_proj(x).view(per_head), self.k_proj(x).view(per_head), self.v_proj(x).view(per_head)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if isinstance(mask, list):
            return self.o_proj(attend_alone(q, k, v, mask, self.grouped))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if past is not None:
            k, v = past.extend(k, v)
        # A single new token may look at every key; is_causal would show it the first one only.
        is_causal = mask is None and q.shape[2] == k.shape[2]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=self.grouped)
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    """Gated feed-forward layer: down(silu(gate(x)) * up(x)) (arXiv:2002.05202)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer: attention, then the feed-forward layer, each normed before and added to the stream after."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = SwiGLU(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        # Residual branches only: dropout inside attention makes SDPA on a CPU 5 to 8 times slower.
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | list[int] | None = None,
        past: LayerCache | None = None,
    ) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin, mask, past))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class Decoder(nn.Module):
    """Token embeddings, the blocks and the last norm: everything under the "model." prefix of the state dict."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.dropout = nn.Dropout(config.dropout)


class GPT(nn.Module):
    """The language model. Set `activation_checkpointing` to recompute the blocks in backward and save memory.

    Works in float32, under autocast with float32 parameters, and with all parameters in bfloat16.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing = False
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self._init_weights()

    @torch.no_grad()
    def _init_weights(self) -> None:
        # GPT-2's scaling: each of the 2 x layers residual branches adds variance to the stream.
        branch_std = 0.02 / (2 * self.config.num_hidden_layers) ** 0.5
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                is_branch_end = name.endswith(("o_proj.weight", "down_proj.weight"))
                weight.normal_(0.0, branch_std if is_branch_end else 0.02)

    def forward(
        self,
        input_ids: Tensor,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> Tensor:
        """Logits, or the loss when there are targets.

        All arguments are (batch, time) int64. targets: each the id that should follow, or IGNORE_INDEX. positions and
        segments: see `hidden`. Returns logits (batch, time, vocab) in the compute dtype, or the float32 SUM of the
        token losses (float64 for a float64 model). A row longer than max_position_embeddings is a ValueError.
        """
        hidden = self.hidden(input_ids, positions, segments)
        if targets is None:
            return self.lm_head(hidden)
        return cross_entropy_sum(hidden.flatten(0, 1), self.lm_head.weight, targets.flatten())

    def hidden(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """The normed stream (batch, time, hidden_size) that the head turns into logits.

        segments: which of the texts in a row a token belongs to; a token sees the earlier ones of its own segment
        only. positions: a token's place in its text, 0 upwards; None counts along the row. cache: the tokens before
        these, seen as if they stood in front of them; these are added to it.
        """
        past = 0 if cache is None else cache.length
        time, limit = input_ids.shape[1], self.config.max_position_embeddings
        if time > limit or (positions is None and past + time > limit):
            raise ValueError(
                f"a row of {past + time} tokens is longer than max_position_embeddings {limit}; shorten it"
            )
        x = self.model.embed_tokens(input_ids)
        if torch.is_autocast_enabled(x.device.type):
            # A residual stream in float32 would double the traffic of every norm, sum and cast.
            x = x.to(torch.get_autocast_dtype(x.device.type))
        x = self.model.dropout(x)
        if positions is None:
            positions = torch.arange(past, past + time, device=input_ids.device)
        cos, sin = rope_tables(positions, self.config.head_dim, self.config.rope_theta)
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        key_segments = segments if cache is None else cache.extend(input_ids, segments)
        mask = stretches(segments) if segments is not None and cache is None else None
        if mask is None:
            mask = attention_mask(time, past, segments, key_segments, x.device)
        for number, block in enumerate(self.model.layers):
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, mask, use_reentrant=False)
            else:
                x = block(x, cos, sin, mask, None if cache is None else cache.layers[number])
        return self.model.norm(x)
