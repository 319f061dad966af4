"""AdamW groups, and the learning rate as a pure function of the step."""

import math

import torch
from torch import nn

FINAL_RATE_SHARE = 0.1  # where cosine and MiniMind's schedule end, as a share of the peak rate
WSD_DECAY_SHARE = 0.2  # wsd: the last fifth of the steps decays (arXiv:2404.06395 uses 10-20 %)


def adamw(model: nn.Module, weight_decay: float) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; decay on matrices only (norm gains and biases have no direction to decay).

    The fused kernel updates all tensors in one pass and honours `found_inf`, which skips an update on the device.
    The rate is set before every step by the back end.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=(0.9, 0.95), eps=1e-8, fused=True)


def scaled_rate(learning_rate: float, global_batch: int, base_batch_size: int, scaling: str) -> float:
    """Peak rate for a global batch, in sequences: linear (arXiv:1706.02677), sqrt, or none."""
    ratio = global_batch / base_batch_size
    return learning_rate * {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[scaling]


def default_warmup(total_steps: int, schedule: str) -> int:
    """Warm-up steps where none are given: 3 % of the run, at most 500; none for MiniMind's schedule, which has none."""
    return 0 if schedule == "minimind" else min(500, math.ceil(0.03 * total_steps))


def rate_share(step: int, total_steps: int, warmup_steps: int, schedule: str) -> float:
    """Share of the peak rate at `step` (0 .. total_steps - 1): linear warm-up, then the schedule.

    cosine    1 to 0.1 along half a cosine, 0.1 at the last step
    wsd       1, then linearly towards 0 over the last fifth
    constant  1
    minimind  0.1 + 0.45 (1 + cos(pi step / total)), MiniMind's formula since v3
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if schedule == "minimind":
        return FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * (1 + math.cos(math.pi * step / total_steps)) / 2
    if schedule == "cosine":
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - 1 - warmup_steps))
        return FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * (1 + math.cos(math.pi * progress)) / 2
    if schedule == "wsd":
        decay_steps = max(1, round(WSD_DECAY_SHARE * total_steps))
        return min(1.0, max(0.0, (total_steps - step) / (decay_steps + 1)))
    return 1.0
