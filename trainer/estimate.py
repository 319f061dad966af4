"""How much memory a rank of a training run will take, told from the sizes of its model and batch alone."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

GIB = 1 << 30
# What torch's own libraries and their first use take beside the tensors of a run, and what glibc's heap keeps in holes
# between blocks of unequal size, as a share of the activations: 0.45 to 0.8 in six models of 0.4 to 26 million
# parameters (see tests/test_memory.py for three of them). Both on a CPU under Linux.
FIRST_USE = 95 << 20
HELD_SHARE = 0.65
# Logits that model/loss.py holds at once on a CPU and elsewhere, and the copies of them at its worst moment.
CPU_LOGITS, LOGITS = 1 << 22, 1 << 25
LOGITS_BYTES = {2: 16, 4: 12}  # a logit, by the bytes of the compute dtype


class Sizes(Protocol):
    """What the estimate needs of a model's configuration."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    head_dim: int
    qk_norm: bool
    dropout: float


@dataclass(frozen=True)
class Estimate:
    """Bytes of one rank at its peak, which is where the backward pass begins, or where it ends if that needs more."""

    weights: int  # float32
    moments: int  # AdamW's two
    gradients: int  # those alive at the peak; with several ranks they live in DDP's buckets all the time
    casts: int  # weights in the compute dtype
    activations: int  # what the backward pass needs
    loss: int  # logits of a chunk, and the head's gradient
    held: int  # by the allocator, free and not given back

    @property
    def total(self) -> int:
        """Of all parts."""
        return sum(vars(self).values())

    def line(self) -> str:
        """The parts that are not zero."""
        parts = {"casts": "weights in half precision", "held": "kept by the allocator"}
        named = [f"{value / GIB:.2f} {parts.get(name, name)}" for name, value in vars(self).items() if value]
        return f"{self.total / GIB:.2f} GiB = {' + '.join(named)}"


def estimate_memory(
    sizes: Sizes,
    *,
    parameters: int,
    trained: int,
    batch_size: int,
    seq_len: int,
    accumulation: int,
    world_size: int,
    dtype: str,
    activation_checkpointing: bool,
    packed: bool,
    on_gpu: bool,
) -> Estimate:
    """Estimate a rank's tensors at the peak of a step, beside the process itself (see `FIRST_USE`).

    parameters: of the model, trained: of them those that the optimizer sees; batch_size: sequences per micro-batch;
    packed: whether rows hold several texts, so that attention may need a mask. Compared with the measured peak on CPUs
    only; a GPU's kernels keep other tensors, so there it was never measured.
    """
    tokens = batch_size * seq_len
    element = 4 if dtype == "float32" else 2
    block = block_bytes(sizes, element) + (seq_len * element if packed else 0)
    blocks = block * sizes.num_hidden_layers
    if activation_checkpointing:
        blocks = block + sizes.hidden_size * element * sizes.num_hidden_layers
    around = 12 + 8 * sizes.hidden_size + 2 * element * sizes.hidden_size  # ids, the last norm, the loss's gradient
    head = sizes.vocab_size * sizes.hidden_size
    activations = tokens * (blocks + around)
    casts = element * (parameters - head) if element == 2 else 0
    if activation_checkpointing:
        casts //= sizes.num_hidden_layers  # a block's are let go with it
    logits = min(CPU_LOGITS if not on_gpu else LOGITS, tokens * sizes.vocab_size)
    loss = logits * LOGITS_BYTES[element] + (4 * head if trained == parameters else 0)
    kept = world_size > 1 or accumulation > 1
    # Without either, gradients appear while activations go.
    late = max(0, 4 * trained - activations - casts - loss)
    return Estimate(
        weights=4 * parameters,
        moments=8 * trained,
        gradients=4 * trained if kept else late,
        casts=casts,
        activations=activations,
        loss=loss,
        held=0 if on_gpu else int(HELD_SHARE * activations),
    )


def block_bytes(sizes: Sizes, element: int) -> int:
    """What one layer keeps of a token for the backward pass; element: bytes of the compute dtype.

    Two RMSNorms, in float32 whatever the dtype: their input, it scaled, its scale. Attention: its input, queries, keys,
    values, its output, a float32 sum per head. SwiGLU: its input, gate, silu of it, up, their product.
    """
    hidden, heads, kv_heads = sizes.hidden_size, sizes.num_attention_heads, sizes.num_key_value_heads
    queries, keys = heads * sizes.head_dim, kv_heads * sizes.head_dim
    norms = 2 * (2 * 4 * hidden + 4)
    if sizes.qk_norm:
        norms += 2 * 4 * (queries + keys) + 4 * (heads + kv_heads)
    attention = element * (hidden + 2 * queries + 2 * keys) + 4 * heads
    swiglu = element * (hidden + 4 * sizes.intermediate_size)
    dropped = 2 * element * hidden if sizes.dropout else 0
    return norms + attention + swiglu + dropped


def lines(estimate: Estimate, resident: int, on_gpu: bool) -> Iterator[str]:
    """What to say of it. resident: bytes of the process without the model."""
    if on_gpu:
        yield f"memory of a rank's GPU, estimated (never measured on a GPU): {estimate.line()}"
        return
    process = resident + FIRST_USE
    whole = (process + estimate.total) / GIB
    yield f"memory of a rank, estimated: {whole:.2f} GiB, {process / GIB:.2f} of it the process itself"
    yield f"its tensors at the peak of a step, estimated: {estimate.line()}"
