"""Next-token cross entropy over the supervised positions alone."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from smi.data.batch import IGNORE
from smi.protocol.tokens import BlockType

# rows of logits that exist at a time: 1024 rows of the World vocabulary are 268 MB in float32
ROWS = 1024


@dataclass(frozen=True)
class LossSums:
    """Sums over the supervised tokens of a batch.

    loss: [] differentiable sum of the token losses, in nats, float32; exactly 0 where nothing is supervised.
    tokens: [types] int64 supervised tokens by `BlockType`.
    by_type: [types] float32 sums of the token losses, detached.
    correct: [types] int64 tokens whose likeliest prediction is right.
    """

    loss: Tensor
    tokens: Tensor
    by_type: Tensor
    correct: Tensor


def supervised_loss(hidden: Tensor, head: Tensor, labels: Tensor, block_types: Tensor) -> LossSums:
    """Loss of predicting `labels` from `hidden`.

    Args:
        hidden: [B, T, C] output of the stack.
        head: [V, C] weight of the language-model head.
        labels: int64 [B, T], the token that follows each position; -100 where it is not supervised.
        block_types: uint8 [B, T], the `BlockType` of that token.

    The logits of unsupervised positions are never computed, and those of the others are made (and made again in
    the backward pass) a slice of rows at a time.
    """
    kept = labels != IGNORE
    rows, targets, types = hidden[kept], labels[kept], block_types[kept].long()
    losses, hits = [], []
    for start in range(0, rows.shape[0], ROWS):
        part = slice(start, start + ROWS)
        # one slice needs no second pass: its logits are all there is
        if rows.shape[0] <= ROWS or not torch.is_grad_enabled():
            loss, hit = _token_losses(rows[part], head, targets[part])
        else:
            loss, hit = checkpoint(_token_losses, rows[part], head, targets[part], use_reentrant=False)  # type: ignore[misc]
        losses.append(loss)
        hits.append(hit)
    if losses:
        loss, hit = torch.cat(losses), torch.cat(hits)
    else:
        # an empty product keeps every parameter in the graph, with a gradient of exactly zero
        loss = F.linear(rows, head).sum(-1).float()
        hit = torch.zeros_like(targets)
    count = len(BlockType)
    zeros = torch.zeros(count, dtype=torch.int64, device=labels.device)
    return LossSums(
        loss=loss.sum(),
        tokens=zeros.index_add(0, types, torch.ones_like(targets)),
        by_type=zeros.to(loss.dtype).index_add(0, types, loss.detach()),
        correct=zeros.index_add(0, types, hit),
    )


def _token_losses(rows: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(rows, head)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    hit = (logits.detach().argmax(-1) == targets).long()
    return F.cross_entropy(logits, targets, reduction="none"), hit
