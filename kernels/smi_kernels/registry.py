"""The backends by name, and the one function that calls them."""

import logging
from functools import cache
from importlib.metadata import entry_points

import torch
from torch import Tensor

from smi_kernels import chunked, cpu, recurrent
from smi_kernels.backend import Backend
from smi_kernels.inputs import check_inputs

log = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "smi.wkv_backends"


_backends: dict[str, Backend] = {}
# `auto` asks in this order, after the backends registered from outside.
_LAST = ("cpu", "chunked", "recurrent")


def register(backend: Backend) -> None:
    """Adds a backend. A second registration of a name is a ValueError: no backend is shadowed in silence."""
    known = _backends.get(backend.name)
    if known is not None and known is not backend:
        raise ValueError(f"a WKV backend named {backend.name!r} is registered already")
    _backends[backend.name] = backend
    resolve.cache_clear()


@cache
def _load_entry_points() -> None:
    for point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            register(point.load())
        except Exception as error:  # a broken plug-in must not take the working backends with it
            log.warning("WKV backend %r (%s) could not be loaded: %s", point.name, point.value, error)


def available() -> list[str]:
    """Names of all registered backends, in the order in which `auto` asks them."""
    _load_entry_points()
    return [n for n in _backends if n not in _LAST] + [n for n in _LAST if n in _backends]


@cache
def resolve(name: str, device: torch.device, dtype: torch.dtype, head_size: int) -> Backend:
    """The backend that will run for these inputs.

    Args:
        name: a registered name, or "auto" for the first backend that accepts.
        device: where the tensors live.
        dtype: of r, k, v, a, b.
        head_size: N.

    Raises:
        ValueError: the name is unknown, or the backend refuses, with its reason.
    """
    names = available()
    if name != "auto":
        if name not in names:
            raise ValueError(f"no WKV backend named {name!r}; there are: auto, {', '.join(names)}")
        backend = _backends[name]
        verdict = backend.verify(device, dtype, head_size)
        if not verdict.ok:
            raise ValueError(f"WKV backend {name!r} cannot run here: {verdict.reason}")
        return backend

    refusals = []
    for backend in map(_backends.__getitem__, names):
        verdict = backend.verify(device, dtype, head_size)
        if verdict.ok:
            log.info(
                "WKV backend: %s (%s, %s, head size %d)%s",
                backend.name, device.type, str(dtype).removeprefix("torch."), head_size,
                "".join(f"; not {n}: {why}" for n, why in refusals),
            )  # fmt: skip
            return backend
        refusals.append((backend.name, verdict.reason))
    raise ValueError("no WKV backend accepts these inputs: " + "; ".join(f"{n}: {why}" for n, why in refusals))


def wkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The RWKV-7 time mix: a generalised delta rule with a diagonal decay.

    Args:
        r, k, v, a, b: [B, T, H, N], one dtype of float64, float32, bfloat16 or float16; ``a = -kk``,
            ``b = kk * rate``.
        w: [B, T, H, N] log decay, at most 0; the same dtype or float32.
        initial_state: [S, H, V, K], float32 (float64 for float64 inputs); zeros when absent. S = B, or the
            number of segments when packed.
        cu_seqlens: int32 [S + 1] boundaries of the segments of one packed row (B = 1): starts at 0, strictly
            increasing, ends at T. Each segment has a state of its own.
        backend: a name of `available`, or "auto".

    Returns:
        o [B, T, H, N] in the dtype of v, and the final state [S, H, V, K] in the state's dtype. The initial
        state is never written to.

    Raises:
        ValueError: a wrong rank, shape, dtype, device or boundary list; a backend that cannot run here.

    Source: "RWKV-7 Goose with Expressive Dynamic State Evolution" (arXiv:2503.14456), section 3 (WKV).
    """
    check_inputs(r, w, k, v, a, b, initial_state, cu_seqlens)
    chosen = resolve(backend, r.device, r.dtype, r.shape[-1])
    # a backend chooses its own precision: autocast must not lower the state's products behind its back
    with torch.autocast(r.device.type, enabled=False):
        return chosen.run(r, w, k, v, a, b, initial_state, cu_seqlens)


register(cpu.BACKEND)
register(chunked.BACKEND)
register(recurrent.BACKEND)
