"""Loading peaks at little more than the model's own size, measured in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers.initialization import no_init_weights

from smi.model import RWKV7Config, RWKV7ForCausalLM
from smi.model.checkpoint import save_native, save_pretrained

# most of it in layers, as in large models; 120 MB in bfloat16
CONFIG = RWKV7Config(vocab_size=8192, hidden_size=768, num_hidden_layers=7)

# prints the peak over what the process held before, in bytes, and the model's size
MEASURE = """
import sys, torch
from smi.model import checkpoint
source, small, dtype, checkpoint._MAPPED_AT_ONCE = sys.argv[1], sys.argv[2], sys.argv[3], 2**22
dtype = None if dtype == "None" else getattr(torch, dtype)

def held(what):
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) * 1024

checkpoint.load_pretrained(small)  # what is imported and set up once
before = held("VmHWM")
model = checkpoint.load_pretrained(source, dtype=dtype)
tensors = model.state_dict().values()
for tensor in tensors:
    tensor.view(torch.uint8).max()  # every page of it is read
print(held("VmHWM") - before, sum(tensor.nbytes for tensor in tensors))
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sizes")
    with no_init_weights(), torch.device("meta"):
        model = RWKV7ForCausalLM(CONFIG).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    for tensor in model.state_dict().values():
        tensor.uniform_(-1, 1)
    save_native(model, folder / "native.pth")
    save_pretrained(model, folder / "hf", max_shard_size="50MB")
    save_pretrained(model, folder / "fla", layout="fla")
    return folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read from Linux's /proc")
@pytest.mark.parametrize(
    ("source", "dtype", "most"),
    [("native.pth", None, 1.1), ("native.pth", "float32", 1.25), ("hf", "float32", 1.25), ("fla", None, 1.2)],
)
def test_peak(saved, data_dir, source, dtype, most):
    """A copy of the weights on top would give 2 (1.5 where they are converted)."""
    command = [sys.executable, "-c", MEASURE, str(saved / source), str(data_dir / "rwkv7" / "T1.pth"), str(dtype)]
    peak, size = map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    assert size == pytest.approx(120e6 * (1 if dtype is None else 2), rel=0.1)
    assert 0.9 < peak / size < most
