"""The training loss: a sum of cross-entropies that never holds the logits of a whole batch."""

import torch
from torch import Tensor

IGNORE_INDEX = -100

# Logits alive at once. On a CPU 2^22 (16 MiB in float32) was fastest: 8192 x 512 x 6400 takes 279 ms in bfloat16
# with chunks of 512 rows, 367 with 2048. Elsewhere every chunk costs a dozen kernel launches, so fewer and larger.
CPU_LOGITS_PER_CHUNK, LOGITS_PER_CHUNK = 1 << 22, 1 << 25


def cross_entropy_sum(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Sum of the cross-entropies of hidden @ weight.T against targets, a chunk of logits at a time.

    hidden: (rows, size) in the compute dtype; weight: (vocab, size); targets: (rows,), IGNORE_INDEX counts zero.
    Returns a float32 scalar (float64 for float64). When every row is ignored it is 0 with zero gradients.
    Why not F.linear_cross_entropy (torch 2.13; 8192 rows x 512 x 6400, bfloat16, 2 CPU threads, forward and backward):
    279 ms and 182 MiB here; 319 ms, 373 MiB and a bfloat16 sum 0.8 % off there; 857 ms with its chunking options.
    """
    return _CrossEntropySum.apply(hidden, weight, targets, torch.is_grad_enabled())


class _CrossEntropySum(torch.autograd.Function):
    """The gradient of a sum does not wait for the backward pass: it is made while a chunk's logits are alive."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, with_grad: bool) -> Tensor:
        sum_dtype = torch.promote_types(hidden.dtype, torch.float32)
        head = weight.to(hidden.dtype)
        need_hidden, need_weight = (with_grad and need for need in ctx.needs_input_grad[:2])
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=sum_dtype) if need_weight else None
        total = hidden.new_zeros((), dtype=sum_dtype)
        budget = CPU_LOGITS_PER_CHUNK if hidden.device.type == "cpu" else LOGITS_PER_CHUNK
        rows = max(1, budget // (64 * weight.shape[0])) * 64
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, hidden.shape[0], rows):
                piece, target = hidden[start : start + rows], targets[start : start + rows, None]
                ignored = target == IGNORE_INDEX
                target = target.masked_fill(ignored, 0)
                log_probs = torch.log_softmax(piece @ head.T, dim=-1, dtype=sum_dtype)
                picked = log_probs.gather(1, target)
                total -= picked.masked_fill(ignored, 0.0).sum()
                if not (need_hidden or need_weight):
                    continue
                grad = log_probs.exp_().scatter_(1, target, picked.exp() - 1.0).masked_fill_(ignored, 0.0)
                grad = grad.to(hidden.dtype)
                if need_hidden:
                    torch.mm(grad, head, out=grad_hidden[start : start + rows])
                if need_weight:
                    grad_weight += grad.T @ piece
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        # Multiplied in float32: a half-precision scale would round 1 / target_tokens, or overflow a loss scaler.
        if grad_hidden is not None:
            grad_hidden = (grad_hidden.to(grad_output.dtype) * grad_output).to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * grad_output).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None
