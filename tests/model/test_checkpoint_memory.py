"""Loading peaks at little more than the model's own size, measured in a process of its own."""

import json
import os
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

# prints, for each case, the peak over what the process held before, in bytes, and the model's size
MEASURE = """
import ctypes, gc, json, sys, torch
from smi.model import checkpoint
small, folder, cases = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
checkpoint._MAPPED_AT_ONCE = 2**22  # in proportion to the model

def held(what):
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) * 1024

def measure(source, dtype):
    gc.collect()  # modules hold each other: the case before is gone only now
    ctypes.CDLL(None).malloc_trim(0)  # and its memory only now
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
    before = held("VmHWM")
    model = checkpoint.load_pretrained(source, dtype=dtype and getattr(torch, dtype))
    tensors = model.state_dict().values()
    for tensor in tensors:
        tensor.view(torch.uint8).max()  # every page of it is read
    return held("VmHWM") - before, sum(tensor.nbytes for tensor in tensors)

measure(small, None)  # what is imported and set up once
print(json.dumps([measure(f"{folder}/{source}", dtype) for source, dtype in cases]))
"""
CASES = {
    ("native.pth", None): 1.1,
    ("native.pth", "float32"): 1.25,
    ("hf", None): 1.1,
    ("hf", "float32"): 1.25,
    ("fla", None): 1.2,
    ("fla", "float32"): 1.25,
}


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="peaks are read from Linux's /proc")
def test_peak(data_dir, tmp_path):
    """One more copy of the weights would give 2, or 1.5 where they are converted."""
    with no_init_weights(), torch.device("meta"):
        model = RWKV7ForCausalLM(CONFIG).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    for tensor in model.state_dict().values():
        tensor.uniform_(-1, 1)
    save_native(model, tmp_path / "native.pth")
    save_pretrained(model, tmp_path / "hf", max_shard_size="50MB")
    save_pretrained(model, tmp_path / "fla", layout="fla")

    small: Path = data_dir / "rwkv7" / "T1.pth"
    command = [sys.executable, "-c", MEASURE, str(small), str(tmp_path), json.dumps(list(CASES))]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for (case, most), (peak, size) in zip(CASES.items(), json.loads(output), strict=True):
        assert size == pytest.approx(120e6 * (2 if case[1] else 1), rel=0.1)
        assert 0.9 < peak / size < most, f"{case}: {peak / size:.3f} of the model's size"
