"""The WKV-7 backends for CPUs: speed, memory and accuracy against a portable baseline.

Speed is forward and backward in float32, all cores, at the shapes of three models and of one packed row. `portable`
is the chunked form that a model file ships for machines without a kernel (`smi.bench.portable`). Backends come from
the registry: one that is missing or refuses this machine is named in a printed line, and its figures are left out.
"""

import ctypes
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import smi_kernels
from smi.bench.measure import Figure, alternate, duration, resident
from smi.bench.portable import portable

# [B, T, H, N]; names are the model sizes that have them
SHAPES = {"1b5": (1, 2048, 32, 64), "0b1": (1, 2048, 12, 64), "tiny": (8, 512, 4, 64), "packed": (1, 2048, 12, 64)}
# more where a round is short: a burst of other work on the machine then spoils few of them
ROUNDS = {"1b5": 9, "0b1": 15, "tiny": 21, "packed": 11}
BOUNDARIES = (0, 61, 700, 744, 1023, 1024, 1300, 1377, 1800, 2048)  # of the documents of "packed"

SPEED_AT_LEAST = {
    "chunked": {"1b5": 2.0, "0b1": 1.5, "tiny": 1.7},
    "cpu": {"1b5": 5.0, "0b1": 4.0, "tiny": 5.0, "packed": 5.0},
}
MEMORY_AT_MOST = {"cpu": 0.25}
FORWARD_AT_LEAST = 0.7
ERROR_AT_MOST = {"typical": 1e-6, "repeated_gate99": 2e-5}

Kernel = Callable[..., tuple[Tensor, Tensor]]


def run() -> dict[str, Figure]:
    # the caller's environment may ask for one thread, as it should in data loaders
    torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    names = [name for name in ("chunked", "cpu") if _is_ready(name)]
    figures: dict[str, Figure] = {}
    for shape in SHAPES:
        figures |= _speed(names, shape)
    if "cpu" in names:
        figures["cpu_forward_vs_sgemm"] = _forward_vs_sgemm("cpu")
    figures |= _memory(names)
    for name in names:
        for case in ERROR_AT_MOST:
            figures[f"{name}_error_{case}"] = _error(name, case)
    return figures


def _is_ready(name: str) -> bool:
    try:
        smi_kernels.resolve(name, torch.device("cpu"), torch.float32, 64)
    except ValueError as error:
        print(f"no figures for {name}: {error}")
        return False
    return True


def _kernel(name: str) -> Kernel:
    if name == "portable":
        return portable

    def kernel(*inputs, **arguments):
        return smi_kernels.wkv7(*inputs, backend=name, **arguments)

    return kernel


def make_inputs(shape: tuple[int, int, int, int], dtype=torch.float32, seed: int = 0) -> list[Tensor]:
    """r, w, k, v, a, b as RWKV-7 makes them: w in (-exp(-0.5), 0), kk of length 1, the in-context rate in (0, 1)."""
    generator = torch.Generator().manual_seed(seed)
    r, w, k, v, kk, rate = (torch.randn(shape, generator=generator) for _ in range(6))
    w.sigmoid_().mul_(-0.6065306597126334)
    kk = F.normalize(kk, dim=-1)
    return [x.to(dtype) for x in (r, w, k, v, -kk, kk * rate.sigmoid_())]


def _training_step(kernel: Kernel, shape: tuple[int, int, int, int], cu_seqlens: Tensor | None = None):
    """A call that runs forward and backward from a gradient of the outputs, as a layer in training does."""
    inputs = [x.requires_grad_() for x in make_inputs(shape)]
    grad_o = torch.randn(shape, generator=torch.Generator().manual_seed(1))

    def step():
        o, _ = kernel(*inputs, cu_seqlens=cu_seqlens)
        return torch.autograd.grad(o, inputs, grad_o)

    return step


def _speed(names: list[str], shape: str) -> dict[str, Figure]:
    cu_seqlens = torch.tensor(BOUNDARIES, dtype=torch.int32) if shape == "packed" else None
    peers = {name: _training_step(_kernel(name), SHAPES[shape], cu_seqlens) for name in ("portable", *names)}
    seconds = alternate(peers, rounds=ROUNDS[shape])
    return {
        f"{name}_vs_portable_{shape}": Figure(
            seconds["portable"] / seconds[name],
            f"forward + backward, portable {duration(seconds['portable'])} over {duration(seconds[name])}; "
            f"{list(SHAPES[shape])} float32, {torch.get_num_threads()} threads"
            + (f", {len(BOUNDARIES) - 1} documents" if shape == "packed" else ""),
            at_least=SPEED_AT_LEAST[name].get(shape),
        )
        for name in names
    }


def _forward_vs_sgemm(name: str) -> Figure:
    """The recurrence's 9 N^2 flops a step and head, per second, over the rate of a large matrix product."""
    B, T, H, N = SHAPES["1b5"]
    inputs = make_inputs((B, T, H, N))
    kernel = _kernel(name)
    size = 2048
    x, y = torch.randn(2, size, size, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        seconds = alternate({"forward": lambda: kernel(*inputs), "sgemm": lambda: x @ y}, rounds=21)
    rate = 9 * N**2 * B * T * H / seconds["forward"]
    sgemm = 2 * size**3 / seconds["sgemm"]
    return Figure(
        rate / sgemm,
        f"forward at {rate / 1e9:.1f} Gflop/s ({duration(seconds['forward'])}), sgemm at {sgemm / 1e9:.1f} Gflop/s",
        at_least=FORWARD_AT_LEAST,
    )


def _memory(names: list[str]) -> dict[str, Figure]:
    if not Path("/proc/self/clear_refs").exists():
        print("no figures for memory: the peak of a process is read from Linux' /proc")
        return {}
    peaks = {}
    for name in ("portable", *names):
        # a process of its own: memory that an allocator keeps from earlier calls would hide what a call needs
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            peaks[name] = pool.apply(peak_memory, (name, SHAPES["1b5"], torch.get_num_threads()))
    return {
        f"{name}_extra_memory_vs_portable_1b5": Figure(
            peaks[name] / peaks["portable"],
            f"peak above the inputs, outputs and gradients included: {peaks[name] / 2**20:.0f} MiB "
            f"over {peaks['portable'] / 2**20:.0f} MiB",
            at_most=MEMORY_AT_MOST.get(name),
        )
        for name in names
    }


def peak_memory(name: str, shape: tuple[int, int, int, int], threads: int) -> int:
    """Bytes by which one forward and backward raise the resident memory of this process above its inputs'."""
    torch.set_num_threads(threads)
    # code, thread pools and compiled loops are not the call's memory
    _training_step(_kernel(name), (1, 64, shape[2], shape[3]))()
    step = _training_step(_kernel(name), shape)
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
    before = resident("VmRSS")
    step()
    return resident("VmHWM") - before


def _error(name: str, case: str) -> Figure:
    """The largest error in float32 against the recurrence in float64, over outputs, final state and gradients.

    Each tensor's error is relative to its largest entry.
    """
    shape = (1, 256, 2, 64)
    inputs = make_inputs(shape, torch.float64)
    if case == "repeated_gate99":
        # one token again and again, hardly forgotten: products over a chunk's removals are ill conditioned
        r, _, k, v, a, _ = (x[:, :1].expand(shape) for x in inputs)
        inputs = [r, torch.full(shape, -1e-4, dtype=torch.float64), k, v, a, -0.99 * a]
    # rounded first, so that both see the same numbers
    inputs = [x.float() for x in inputs]
    exact = _results("recurrent", [x.double() for x in inputs])
    errors = [
        float((got.detach().double() - want.detach()).abs().max() / want.detach().abs().max())
        for got, want in zip(_results(name, inputs), exact, strict=True)
    ]
    parts = ("o", "state", "dr", "dw", "dk", "dv", "da", "db", "dstate")
    worst = max(range(len(parts)), key=errors.__getitem__)
    return Figure(
        errors[worst],
        f"float32 against float64, {list(shape)}: worst in {parts[worst]}, {errors[0]:.1e} in o",
        at_most=ERROR_AT_MOST[case],
    )


def _results(name: str, inputs: list[Tensor]) -> list[Tensor]:
    B, _, H, N = inputs[0].shape
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(inputs[0].dtype)

    leaves = [x.detach().clone().requires_grad_() for x in (*inputs, draw(B, H, N, N))]
    outputs = _kernel(name)(*leaves[:6], initial_state=leaves[6])
    return [*outputs, *torch.autograd.grad(outputs, leaves, [draw(*x.shape) for x in outputs])]
