"""How far a backend is from the recurrence in float64: the cases that `smi_kernels.check` runs on a device.

Errors are relative: the norm of the difference over the norm of the reference, which is computed from the same inputs,
rounded to the backend's dtype first.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from smi_kernels.inputs import state_dtype
from smi_kernels.registry import wkv7

NAMES = ("o", "state", "dr", "dw", "dk", "dv", "da", "db", "dstate")
# half the bits of a product are lost where a kernel keeps its intermediates in 16 bits, as FLA's do
TOLERANCES = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
MIN_DECAY = -0.6065306597126334


@dataclass(frozen=True)
class Setting:
    """What a case runs on.

    length: of the longest row, in tokens; odd and no multiple of any chunk.
    heads: H. Some kernels decline shapes that do not fill the GPU: three rows of 32 heads do.
    """

    device: torch.device
    dtype: torch.dtype
    head_size: int
    length: int = 203
    heads: int = 32


@dataclass(frozen=True)
class Finding:
    """A case's outcome: the largest error, or 0 and 1 for a property that holds or does not."""

    case: str
    error: float
    tolerance: float
    where: str = ""

    @property
    def ok(self) -> bool:
        # not `error > tolerance`: NaN must fail
        return self.error <= self.tolerance


def make_inputs(setting: Setting, batch: int, length: int, seed: int = 0) -> list[Tensor]:
    """r, w, k, v, a, b as RWKV-7 would have them; w in float32 beside 16-bit inputs."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, length, setting.heads, setting.head_size)

    def normal() -> Tensor:
        return torch.randn(shape, generator=generator)

    r, k, v = normal(), normal(), normal()
    w = MIN_DECAY * torch.sigmoid(2 * normal())
    kk = F.normalize(normal(), dim=-1)
    b = kk * torch.sigmoid(normal())
    inputs = [x.to(setting.device, setting.dtype) for x in (r, w, k, v, -kk, b)]
    inputs[1] = w.to(setting.device, state_dtype(setting.dtype))
    return inputs


def make_state(setting: Setting, sequences: int, seed: int = 7) -> Tensor:
    """A state that is not symmetric: read transposed, it shows."""
    shape = (sequences, setting.heads, setting.head_size, setting.head_size)
    state = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return state.to(setting.device, state_dtype(setting.dtype))


def run_all(backend: str, inputs: list[Tensor], state: Tensor, cu_seqlens: Tensor | None = None) -> list[Tensor]:
    """The output, the final state and the gradients of a fixed random direction, in the order of `NAMES`."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    state = state.detach().requires_grad_()
    o, final = wkv7(*inputs, initial_state=state, cu_seqlens=cu_seqlens, backend=backend)
    generator = torch.Generator().manual_seed(3)
    directions = [torch.randn(x.shape, generator=generator).to(x.device, x.dtype) for x in (o, final)]
    return [o.detach(), final.detach(), *torch.autograd.grad([o, final], [*inputs, state], directions)]


def compare(case: str, setting: Setting, got: list[Tensor], want: list[Tensor], factor: float = 1.0) -> Finding:
    """The largest relative error among tensors in the order of `NAMES`, and the name of the one that has it."""
    errors = {}
    for name, x, y in zip(NAMES, got, want, strict=False):
        error = float((x.double() - y.double()).norm() / y.double().norm())
        errors[name] = error if math.isfinite(error) else math.inf
    worst = max(errors, key=lambda name: errors[name])
    return Finding(case, errors[worst], TOLERANCES[setting.dtype] * factor, worst)


def _against_reference(case, backend, setting, inputs, state, cu_seqlens=None, factor=1.0) -> Finding:
    got = run_all(backend, inputs, state, cu_seqlens)
    want = run_all("recurrent", [x.double() for x in inputs], state.double(), cu_seqlens)
    return compare(case, setting, got, want, factor)


def _boundaries(setting: Setting) -> Tensor:
    """On and off the edges of chunks; a document of one token; a long one after short ones."""
    return torch.tensor([0, 1, 17, 49, setting.length], dtype=torch.int32, device=setting.device)


def _rows(backend: str, setting: Setting) -> Finding:
    inputs = make_inputs(setting, 3, setting.length)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    state = make_state(setting, 3).mT.contiguous().mT
    return _against_reference("rows, strided", backend, setting, strided, state)


def _packed(backend: str, setting: Setting) -> Finding:
    inputs, state = make_inputs(setting, 1, setting.length), make_state(setting, 4)
    return _against_reference("packed", backend, setting, inputs, state, _boundaries(setting))


def _repeated_key(backend: str, setting: Setting) -> Finding:
    # the case in which an inverse by doubling loses every digit
    inputs, state = make_inputs(setting, 3, 128), make_state(setting, 3)
    kk = F.normalize(torch.ones_like(inputs[4]), dim=-1)
    inputs[1] = torch.full_like(inputs[1], -1e-4)
    inputs[4], inputs[5] = -kk, 0.99 * kk
    return _against_reference("repeated key", backend, setting, inputs, state, factor=2)


def _fastest_decay(backend: str, setting: Setting) -> Finding:
    inputs, state = make_inputs(setting, 3, setting.length), make_state(setting, 3)
    inputs[1] = torch.full_like(inputs[1], MIN_DECAY)
    return _against_reference("fastest decay", backend, setting, inputs, state)


def _pieces(backend: str, setting: Setting) -> Finding:
    inputs, state = make_inputs(setting, 3, setting.length), make_state(setting, 3)
    want = wkv7(*(x.double() for x in inputs), initial_state=state.double(), backend="recurrent")
    outputs = []
    for start, end in pairwise([0, 20, 48, 49, setting.length]):
        o, state = wkv7(*(x[:, start:end] for x in inputs), initial_state=state, backend=backend)
        outputs.append(o)
    return compare("in pieces", setting, [torch.cat(outputs, 1), state], list(want))


def _isolation(backend: str, setting: Setting) -> Finding:
    """One document changed: outputs, states and gradients of the others stay as they are, bit for bit."""
    cut = _boundaries(setting)
    start, end = cut[2:4].tolist()
    inputs, state = make_inputs(setting, 1, setting.length), make_state(setting, 4)
    before = run_all(backend, inputs, state, cut)
    changed = [x.clone() for x in inputs]
    for x, y in zip(changed, make_inputs(setting, 1, setting.length, seed=1), strict=True):
        x[:, start:end] = y[:, start:end]
    after = run_all(backend, changed, state, cut)

    moved = []
    for name, x, y in zip(NAMES, before, after, strict=True):
        # states hold one document in each row, all else the tokens of all of them
        mine, dim = (slice(2, 3), 0) if "state" in name else (slice(start, end), 1)
        same = (x == y).transpose(0, dim)
        assert not same[mine].all(), f"{name} of the changed document did not move"
        same[mine] = True
        if not same.all():
            moved.append(name)
    return Finding("isolated, bit for bit", float(len(moved) > 0), 0.0, ", ".join(moved))


CASES: tuple[Callable[[str, Setting], Finding], ...] = (
    _rows,
    _packed,
    _isolation,
    _pieces,
    _repeated_key,
    _fastest_decay,
)
