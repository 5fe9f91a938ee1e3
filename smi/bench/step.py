"""A whole training step of the 1.5B model on one GPU: ``python -m smi.bench step``.

Forward, loss, backward, clipping and AdamW in bfloat16 autocast, with the shapes and the checkpointing of
`configs/model/rwkv7_1b5.yaml`. Weights are random: they do not change the time. Without a GPU, a model of two layers
goes through the same motions, so that the suite runs everywhere; its figures are those of the motions alone.
"""

import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import smi_kernels
from smi.bench.measure import Figure
from smi.model.configuration import RWKV7Config
from smi.model.modeling import RWKV7ForCausalLM
from smi.training.loss import supervised_loss
from smi.training.optim import parameter_groups

# dense bfloat16 rates of the data sheets, in flop/s, by what the name of the GPU contains
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "RTX 4090": 165e12}
# as configs/model/rwkv7_1b5.yaml
MODEL_1B5: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "decay_low_rank_dim": 96,
    "a_low_rank_dim": 96,
    "v_low_rank_dim": 64,
    "gate_low_rank_dim": 256,
}
WARMUP, STEPS = 2, 5


def _model(device: torch.device) -> tuple[RWKV7ForCausalLM, tuple[int, int]]:
    """The model with random weights, and the rows and tokens of its batch."""
    if device.type == "cuda":
        config, shape = RWKV7Config(**MODEL_1B5), (4, 2048)
    else:
        config, shape = RWKV7Config(vocab_size=512, hidden_size=128, num_hidden_layers=2), (2, 64)
    # the orthogonal start of 1.5B parameters takes longer than all steps together
    with torch.device("meta"):
        model = RWKV7ForCausalLM(config)
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    model.rwkv7.gradient_checkpointing = device.type == "cuda"
    return model.train(), shape


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    start = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - start


def _matmul_rate(device: torch.device) -> float:
    """flop/s of a bfloat16 product that is large enough to be limited by arithmetic."""
    size = 8192
    x = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    times = [_seconds(lambda: x @ x, device) for _ in range(8)]
    return 2 * size**3 / statistics.median(times[3:])


def _flops_per_token(model: RWKV7ForCausalLM) -> float:
    """Multiply-adds counted twice, backward as two forwards; what checkpointing repeats is not counted."""
    config = model.config
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2) - model.rwkv7.emb.weight.numel()
    wkv = config.num_hidden_layers * config.num_heads * 9 * config.head_dim**2
    return 3 * (2 * matrices + wkv)


def _peak_memory(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def run() -> dict[str, Figure]:
    """tokens/s, peak memory in GB and, on a GPU, MFU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, shape = _model(device)
    optimizer = torch.optim.AdamW(parameter_groups(model, 1e-5, 0.1), betas=(0.9, 0.99), eps=1e-18, fused=True)
    ids = torch.randint(0, model.config.vocab_size, shape, device=device)
    labels, types = ids.roll(-1, 1), torch.zeros(shape, dtype=torch.uint8, device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            hidden = model.rwkv7(input_ids=ids, use_cache=False).last_hidden_state
            loss = supervised_loss(hidden, model.head.weight, labels, types).loss / labels.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(WARMUP):
        step()
    seconds = statistics.median(_seconds(step, device) for _ in range(STEPS))
    peak_memory = _peak_memory(device)
    rate = labels.numel() / seconds
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    backend = smi_kernels.resolve("auto", device, torch.bfloat16, model.config.head_dim).name
    parameters = sum(p.numel() for p in model.parameters())
    what = f"{parameters / 1e6:.0f}M parameters, {shape[0]} rows of {shape[1]}, kernel {backend}, {name}"
    figures = {
        "step_tokens_per_second": Figure(rate, f"{what}: {seconds:.3g} s a step"),
        "step_peak_memory_gb": Figure(peak_memory / 1e9, "allocated" if device.type == "cuda" else "resident"),
    }
    if device.type == "cuda":
        measured = _matmul_rate(device)
        peak = next((flops for key, flops in PEAKS.items() if key in name), measured)
        achieved = rate * _flops_per_token(model)
        detail = (
            f"{achieved / 1e12:.3g} of {peak / 1e12:.3g} Tflop/s; a bare bf16 product runs at {measured / 1e12:.3g}"
        )
        figures["step_mfu"] = Figure(achieved / peak, detail)
    return figures
