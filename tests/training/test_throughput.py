"""Speed is counted, and so is what a step has to compute."""

import pytest
import torch
from small_run import fit, small_config
from torch.utils.flop_counter import FlopCounterMode

from smi.data.batch import pack
from smi.data.synthetic import SyntheticTools
from smi.model import RWKV7Config, RWKV7ForCausalLM
from smi.protocol.codec import encode
from smi.protocol.conversation import to_stream
from smi.tokenizer import load_tokenizer
from smi.training.loggers import read_history
from smi.training.loss import supervised_loss
from smi.training.throughput import known_peak, step_flops


def test_flops_are_those_of_the_matrices_in_forward_and_backward():
    """Against torch's own counter, with a kernel that it sees nothing of, and the WKV added by hand."""
    model = RWKV7ForCausalLM(RWKV7Config(vocab_size=1024, hidden_size=64, num_hidden_layers=2, head_dim=32))
    tokenizer = load_tokenizer("compact")
    batch = pack([encode(to_stream(next(iter(SyntheticTools(0, 1).conversations()))), tokenizer)])
    model.wkv_backend = "recurrent"
    wkv = 3 * 9 * 32**2 * 2 * 2 * batch.tokens
    with FlopCounterMode(display=False) as counter:
        hidden = model.rwkv7(input_ids=batch.input_ids, cu_seqlens=batch.cu_seqlens).last_hidden_state
        supervised_loss(hidden, model.head.weight, batch.labels, batch.block_types).loss.backward()
    products = sum(counter.get_flop_counts()["Global"][op] for op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    per_token, per_target = step_flops(model)
    want = per_token * batch.tokens + per_target * batch.supervised_tokens - wkv
    # the first layer's input needs no gradient of its own, and small products of other kinds are not counted
    assert want == pytest.approx(products, rel=0.1)


def test_what_does_not_learn_takes_less():
    model = RWKV7ForCausalLM(RWKV7Config(vocab_size=1024, hidden_size=64, num_hidden_layers=2, head_dim=32))
    whole = step_flops(model)
    model.requires_grad_(False)
    frozen = step_flops(model)
    assert frozen[1] == whole[1] * 4 / 6
    wkv = 3 * 9 * 32**2 * 2 * 2
    assert frozen[0] - wkv == pytest.approx((whole[0] - wkv) * 4 / 6)


def test_peaks_are_of_known_devices_in_bfloat16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    cuda = torch.device("cuda")
    assert known_peak(cuda, "bf16-mixed") == 989.4
    assert known_peak(cuda, "32-true") is None
    assert known_peak(torch.device("cpu"), "bf16-mixed") is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA GeForce RTX 9999")
    assert known_peak(cuda, "bf16-mixed") is None


def test_utilisation_is_flops_over_peak(tmp_path):
    _, module = fit(small_config(tmp_path, "hardware.peak_tflops=0.01", "trainer.max_steps=2", "trainer.val_every=9"))
    figures = read_history(tmp_path)
    tokens = figures["data/tokens"][2] - figures["data/tokens"][1]
    targets = figures["data/supervised_tokens"][2] - figures["data/supervised_tokens"][1]
    seconds = tokens / figures["speed/model_tokens_per_s"][2]
    per_token, per_target = step_flops(module.model)
    want = (per_token * tokens + per_target * targets) / seconds / 1e10
    assert figures["speed/mfu"][2] == pytest.approx(want, rel=1e-9)
    rates = [figures[f"speed/{name}"][2] for name in ("tokens_per_s", "supervised_per_s")]
    assert rates[1] / rates[0] == pytest.approx(targets / tokens, rel=1e-9)
    assert 0 <= figures["speed/wait_share"][2] < 1
