"""What a WKV backend is."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Verdict:
    """What a backend says of some inputs: will it take them, and if not, why."""

    ok: bool
    reason: str = ""


@dataclass(frozen=True)
class Backend:
    """A WKV-7 implementation.

    run(r, w, k, v, a, b, initial_state, cu_seqlens) -> (o, final_state)
        gets inputs that `check_inputs` has passed; shapes as in `wkv7`.
    verify(device, dtype, head_size) -> Verdict
        answers from the device, the dtype of r/k/v/a/b and N alone, so that a choice can be made
        before there is any tensor.
    """

    name: str
    needs: str
    run: Callable[..., tuple[Tensor, Tensor]]
    verify: Callable[[torch.device, torch.dtype, int], Verdict]
