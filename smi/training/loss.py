"""Next-token cross entropy over the supervised positions alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from smi.data.batch import IGNORE
from smi.protocol.tokens import BlockType

# logits that exist at a time: 256 rows of the World vocabulary, 67 MB in float32
LOGITS = 1 << 24
# L2Wrap's share of the largest logit (RWKV-LM)
L2WRAP = 1e-4


@dataclass(frozen=True)
class LossSums:
    """Sums over the supervised tokens of a batch.

    loss: [] differentiable sum of what is minimised, in nats, float32 (float64 for float64 inputs): the token
        losses, and the z-loss where one is asked for; exactly 0 where nothing is supervised.
    tokens: [types] int64 supervised tokens by `BlockType`.
    by_type: [types] sums of the token losses alone, detached.
    correct: [types] int64 tokens whose likeliest prediction is right.
    entropy: [types] sums of the entropies of the predictions, in nats, detached.
    """

    loss: Tensor
    tokens: Tensor
    by_type: Tensor
    correct: Tensor
    entropy: Tensor


def sum_of(parts: Sequence[LossSums]) -> LossSums:
    """The sums of rows that belong together. Only the last one's loss is still to be back-propagated."""
    *earlier, last = parts
    loss = last.loss + sum(part.loss.detach() for part in earlier)
    rest = (sum(getattr(part, name) for part in parts) for name in ("tokens", "by_type", "correct", "entropy"))
    return LossSums(loss, *rest)  # pyright: ignore[reportArgumentType] (sums of at least one tensor)


def supervised_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    block_types: Tensor,
    *,
    z_loss: float = 0.0,
    l2wrap: bool = False,
) -> LossSums:
    """Loss of predicting `labels` from `hidden`.

    Args:
        hidden: [B, T, C] output of the stack.
        head: [V, C] weight of the language-model head.
        labels: int64 [B, T], the token that follows each position; -100 where it is not supervised.
        block_types: uint8 [B, T], the `BlockType` of that token.
        z_loss: adds so much of the squared log-partition, ``log(sum(exp(logits)))``, of each supervised position
            ("PaLM: Scaling Language Modeling with Pathways", arXiv:2204.02311, section 5).
        l2wrap: adds ``1e-4 * max_logit`` to the gradient at the largest logit of each supervised position, and
            nothing to the loss (RWKV-LM; there over the mean of all positions, here over the sum).

    The logits of unsupervised positions are never computed, and those of the others exist a slice of rows at a
    time. A slice gives its part of the gradients at once, so that nothing is computed twice.
    """
    kept = labels != IGNORE
    rows, targets, types = hidden[kept], labels[kept], block_types[kept].long()
    device = rows.device.type
    if torch.is_autocast_enabled(device):
        rows = rows.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        loss, losses, correct, entropy = _ChunkedCrossEntropy.apply(  # type: ignore[misc]
            rows, head, targets, z_loss, l2wrap, torch.is_grad_enabled()
        )

    def by_type(values: Tensor) -> Tensor:
        return values.new_zeros(len(BlockType)).index_add(0, types, values)

    return LossSums(loss, by_type(torch.ones_like(targets)), by_type(losses), by_type(correct), by_type(entropy))


class _ChunkedCrossEntropy(torch.autograd.Function):
    """What is minimised [], and of each row its loss, whether the likeliest token is right (int64), the entropy.

    rows [R, C], head [V, C], targets int64 [R]. The products are made in the dtype of `rows`, the rest in float32
    or better. The gradients with respect to the logits are ``softmax - one_hot``, and what the z-loss and L2Wrap
    add; they become those of `rows` and `head` while their slice of the logits exists.
    """

    @staticmethod
    def forward(ctx, rows, head, targets, z_loss, l2wrap, differentiate):
        wanted = [differentiate and need for need in ctx.needs_input_grad[:2]]
        precise = torch.promote_types(rows.dtype, torch.float32)
        count, vocabulary = len(rows), len(head)
        weight = head.to(rows.dtype)
        d_rows = torch.empty_like(rows) if wanted[0] else None
        # the slices' sum stays in full precision; without a slice it is zero
        d_head = (torch.empty_like if count else torch.zeros_like)(head, dtype=precise) if wanted[1] else None
        partition, largest, at_target, mean_logit = rows.new_empty(4, count, dtype=precise)
        best = torch.empty_like(targets)

        # the same memory for every slice: fresh pages cost more than what is computed in them
        size = min(count, max(1, LOGITS // vocabulary))
        logits_buffer, p_buffer = rows.new_empty(2, size, vocabulary, dtype=precise)
        for start in range(0, count, max(size, 1)):
            at = slice(start, min(start + size, count))
            x, target = rows[at], targets[at].unsqueeze(1)
            logits, p = logits_buffer[: len(x)], p_buffer[: len(x)]
            if rows.dtype == precise:
                torch.mm(x, weight.T, out=logits)
            else:
                logits.copy_(x @ weight.T)
            torch.softmax(logits, -1, out=p)
            largest[at], best[at] = _largest(logits)
            # the likeliest token's probability is at least 1 / V: its logarithm loses no digits
            partition[at] = largest[at] - p.gather(1, best[at].unsqueeze(1)).squeeze(1).log()
            at_target[at] = logits.gather(1, target).squeeze(1)
            mean_logit[at] = torch.bmm(p.unsqueeze(1), logits.unsqueeze(2)).flatten()
            if not any(wanted):
                continue
            if z_loss:
                p *= 1 + 2 * z_loss * partition[at].unsqueeze(1)
            p.scatter_add_(1, target, p.new_full((), -1).expand_as(target))
            if l2wrap:
                p.scatter_add_(1, best[at].unsqueeze(1), L2WRAP * largest[at].unsqueeze(1))
            d_logits = p.to(rows.dtype)
            if d_rows is not None:
                torch.mm(d_logits, weight, out=d_rows[at])
            if d_head is not None and rows.dtype == precise:
                torch.addmm(d_head, d_logits.T, x, beta=min(start, 1), out=d_head)
            elif d_head is not None:
                part = d_logits.T @ x
                d_head = part.to(precise) if start == 0 else d_head.add_(part)
        ctx.gradients = d_rows, d_head

        losses = partition - at_target
        loss = losses.sum() + z_loss * partition.square().sum() if z_loss else losses.sum()
        correct, entropy = (best == targets).long(), partition - mean_logit
        ctx.mark_non_differentiable(losses, correct, entropy)
        ctx.head_dtype = head.dtype
        return loss, losses, correct, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *_):  # type: ignore[override]
        # handed over rather than copied: the head's is the largest tensor of a step
        if ctx.gradients is None:
            raise RuntimeError("the loss has been back-propagated already: compute it again for a second time")
        d_rows, d_head = ctx.gradients
        ctx.gradients = None
        if d_rows is not None:
            d_rows *= grad
        if d_head is not None:
            d_head = d_head.mul_(grad).to(ctx.head_dtype)
        return d_rows, d_head, None, None, None, None


def _largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """As ``logits.max(-1)`` of [R, V], in two steps: only the first, without indices, reads everything."""
    width = math.gcd(logits.shape[-1], 256)
    blocks = logits.unflatten(-1, (-1, width))
    block = blocks.amax(-1).argmax(-1, keepdim=True)
    value, inside = torch.take_along_dim(blocks, block.unsqueeze(-1), 1).squeeze(1).max(-1)
    return value, block.squeeze(1) * width + inside
