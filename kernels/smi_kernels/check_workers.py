"""The processes that `smi_kernels.check` starts: a job as JSON on the command line, rows as JSON on standard output."""

import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import smi_kernels
from smi_kernels import fla_backends, numerics
from smi_kernels.check import FLA_ITSELF, Row

Call = Callable[[], object]


def emit(section: str, what: str, case: str, **how: Any) -> None:
    """Hands a row to the parent at once, so that it survives whatever comes after it."""
    row = Row(section, what, case, **how)
    print("ROW " + json.dumps(vars(row)), flush=True)


def limit_autotuning(keep: slice, spread: int) -> None:
    """Lets Triton's autotuner see some of a kernel's configurations: `keep` of `spread` that lie evenly apart.

    To be called before FLA is imported.
    """
    try:
        import triton  # pyright: ignore[reportMissingImports]
    except ImportError:
        return
    autotune = triton.autotune

    def limited(configs: list, *arguments: Any, **options: Any) -> Any:
        some = configs[:: -(-len(configs) // spread)]
        return autotune(some[keep] or some[-1:], *arguments, **options)

    triton.autotune = limited


def _refusal(backend: str, device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
    try:
        smi_kernels.resolve(backend, device, dtype, head_size)
    except ValueError as error:
        return str(error).split(": ", 1)[-1]
    return None


def check_numerics(call: dict[str, Any]) -> None:
    """All cases of one backend, in each of its settings."""
    device, backend = torch.device(call["device"]), call["backend"]
    shape = {key: call[key] for key in ("length", "heads") if key in call}
    for name, head_size in call["settings"]:
        what = f"{backend}, {name}, N={head_size}"
        setting = numerics.Setting(device, getattr(torch, name), head_size, **shape)
        refusal = _refusal(backend, device, setting.dtype, head_size)
        if refusal is not None:
            emit("numerics", what, "refused", note=refusal)
            continue
        for case in numerics.CASES:
            try:
                finding = case(backend, setting)
            except Exception as error:  # the other cases may still say something
                emit("numerics", what, case.__name__.strip("_"), ok=False, note=_one_line(error))
                continue
            note = f"<= {finding.tolerance:g}" + (f", {finding.where}" if finding.where else "")
            emit("numerics", what, finding.case, value=finding.error, ok=finding.ok, note=note)
        if backend == "tilelang":
            # which of FLA's kernels the cases ran on
            inputs = [x.requires_grad_() for x in numerics.make_inputs(setting, 3, setting.length)]
            emit("numerics", what, "path", note=f"FLA ran {fla_backends.path(smi_kernels.wkv7(*inputs)[0])}")


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _shapes(device: torch.device) -> list[tuple[int, int, int, int]]:
    # the second fills a GPU: the first is below what FLA takes TileLang for on an H200
    return [(1, 2048, 32, 64), (4, 2048, 32, 64)] if device.type == "cuda" else [(1, 128, 2, 64)]


def _fla_itself() -> Callable[..., tuple[Tensor, Tensor]]:
    """FLA's Triton path as FLA would have it called: a promised bound, chunks of its choice."""
    chunk_rwkv7 = importlib.import_module("fla.ops.rwkv7").chunk_rwkv7

    def call(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return chunk_rwkv7(r, w, k, v, a, b, output_final_state=True, lower_bound=fla_backends.LOWER_BOUND)

    return call


def _peers(device: torch.device, shape: tuple[int, int, int, int]) -> dict[str, tuple[Call, Call]]:
    """Forward, and forward with backward, of every backend that takes bfloat16 here, and of FLA itself."""
    batch, length, heads, head_size = shape
    setting = numerics.Setting(device, torch.bfloat16, head_size, heads=heads)
    plain = numerics.make_inputs(setting, batch, length)
    leaves = [x.clone().requires_grad_() for x in plain]
    direction = torch.randn_like(plain[3])

    def pair(function: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Call, Call]:
        def forward() -> object:
            with torch.no_grad():
                return function(*plain)

        return forward, lambda: torch.autograd.grad(function(*leaves)[0], leaves, direction)

    peers = {}
    for name in reversed(smi_kernels.available()):
        # the recurrence takes a launch or ten a token
        if name == "recurrent" and device.type == "cuda":
            continue
        if _refusal(name, device, torch.bfloat16, head_size) is None:
            peers[name] = pair(lambda *inputs, name=name: smi_kernels.wkv7(*inputs, backend=name))
    if "triton" in peers:
        peers[FLA_ITSELF] = pair(_fla_itself())
    return peers


def build(call: dict[str, Any]) -> None:
    """Compiles a share of the kernels that are to be timed; Triton and TileLang keep them on disk."""
    device = torch.device(call["device"])
    for shape in _shapes(device):
        peer = _peers(device, shape).get(call["peer"])
        if peer is not None:
            start = time.perf_counter()
            peer[1]()
            what = f"{call['peer']}, {shape}, share {call['share']}"
            emit("build", what, "first call", value=time.perf_counter() - start)


def _milliseconds(call: Call, device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)
    calls = 5
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def time_peers(call: dict[str, Any]) -> None:
    """Medians of turns in which every peer runs once."""
    device = torch.device(call["device"])
    rounds = 9 if device.type == "cuda" else 3
    cases = ("forward", "forward and backward")
    for shape in _shapes(device):
        peers = _peers(device, shape)
        for name, calls in list(peers.items()):
            try:
                for case, each in zip(cases, calls, strict=True):
                    each()
                    # should a later peer use up the time, this much is known
                    alone = _milliseconds(each, device)
                    emit("timing", f"{name}, {shape}", case, value=alone, note="alone, once")
            except Exception as error:  # the others can still be timed
                emit("timing", f"{name}, {shape}", "failed", note=_one_line(error))
                del peers[name]
        times: dict[tuple[str, str], list[float]] = {}
        for _ in range(rounds):
            for name, calls in peers.items():
                for case, each in zip(cases, calls, strict=True):
                    times.setdefault((name, case), []).append(_milliseconds(each, device))
        medians = {key: statistics.median(values) for key, values in times.items()}
        for (name, case), value in medians.items():
            others = [other for other in ("chunked", FLA_ITSELF) if other != name and other in peers]
            note = ", ".join(f"{medians[other, case] / value:.2f} x {other}" for other in others)
            emit("timing", f"{name}, {shape}", case, value=value, note=note)


def step(_call: dict[str, Any]) -> None:
    """The training step lives with the trainer, in `smi.bench`; this package does not depend on it."""
    for name, figure in importlib.import_module("smi.bench.step").run().items():
        emit("step", name, "", value=figure.value, note=figure.detail)


def main() -> None:
    call = json.loads(sys.argv[1])
    spread = call.get("configurations", 1)
    if call["section"] == "build":
        limit_autotuning(slice(call["share"], call["share"] + 1), spread)
    elif call["section"] == "numerics":
        limit_autotuning(slice(1, 2), spread)
    else:
        limit_autotuning(slice(None), spread)
    {"numerics": check_numerics, "build": build, "timing": time_peers, "step": step}[call["section"]](call)


if __name__ == "__main__":
    main()
