"""Element-wise lines of RWKV-7 whose gradients autograd would make in many more passes over memory.

Each function computes what the first line of its docstring says, on any device and in any dtype; only the backward
pass is written out. A CPU spends as long on reading an activation as on its arithmetic: what is read is used for
all that needs it while it is in the cache.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# rows of a slice that stays in a core's cache: 128 rows of 768 channels in float32 are 393 kB
CACHED_ROWS = 128


def mix(x: Tensor, shifted: Tensor, *shares: Tensor) -> tuple[Tensor, ...]:
    """``x + (shifted - x) * share`` for each share.

    x, shifted: [B, T, C]; shares: [1, 1, C] each. Returns as many [B, T, C].
    """
    return _Mix.apply(x, shifted, *shares)  # type: ignore[return-value]


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shifted, *shares):
        delta = shifted - x
        ctx.save_for_backward(delta, *shares)
        return tuple(torch.addcmul(x, delta, share) for share in shares)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        delta, *shares = ctx.saved_tensors
        # contiguous, whatever the gradients are: slices of them are written to
        d_x, d_shifted = grads[0].new_empty(2, *delta.shape)
        d_shares = [torch.zeros_like(share, dtype=torch.promote_types(share.dtype, torch.float32)) for share in shares]
        rows = delta.numel() // delta.shape[-1]
        # a GPU has no use for slices, only for few launches
        size = CACHED_ROWS if delta.is_cpu else rows
        flat = [x.reshape(1, rows, -1).split(size, 1) for x in (delta, d_x, d_shifted, *grads)]
        for delta, d_x_part, d_shifted_part, *parts in zip(*flat, strict=True):
            torch.mul(parts[0], shares[0], out=d_shifted_part)
            d_x_part.copy_(parts[0])
            for part, share in zip(parts[1:], shares[1:], strict=True):
                d_shifted_part.addcmul_(part, share)
                d_x_part += part
            d_x_part -= d_shifted_part
            for d_share, part in zip(d_shares, parts, strict=True):
                d_share += (part * delta).sum(1, keepdim=True)
        return d_x, d_shifted, *(d_share.to(share.dtype) for d_share, share in zip(d_shares, shares, strict=True))


def squared_relu(x: Tensor) -> Tensor:
    """``relu(x) ** 2``, of any shape."""
    return _SquaredReLU.apply(x)  # type: ignore[return-value]


class _SquaredReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        positive = x.relu()
        ctx.save_for_backward(positive)
        return positive.square()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (positive,) = ctx.saved_tensors
        # 2 * positive * grad in one pass; it is zero where the input was not positive
        return torch.addcmul(grad.new_zeros(()), grad, positive, value=2)
