"""T1 against the numbers of five other implementations (float64 there, stored as float32)."""

from itertools import pairwise

import pytest
import torch

import smi_kernels

BACKENDS = [name for name in ("recurrent", "chunked", "cpu") if name in smi_kernels.available()]
# relative to the largest entry; gradients relative in the L2 norm of each tensor
FORWARD = {torch.float32: 1e-5, torch.float64: 2e-7}
GRADIENT = {torch.float32: 5e-5, torch.float64: 2e-7}


def relative(got, want):
    got = got.detach()
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())


@pytest.fixture(params=[torch.float32, torch.float64], ids=["fp32", "fp64"])
def dtype(request):
    return request.param


@pytest.fixture(params=BACKENDS)
def model(request, t1, dtype):
    try:
        smi_kernels.resolve(request.param, torch.device("cpu"), dtype, 64)
    except ValueError as refusal:
        pytest.skip(str(refusal))
    return t1(dtype, request.param)


@pytest.mark.parametrize("length", [1, 37, 150])
def test_logits_and_states(model, goldens, dtype, length):
    out = model(goldens[f"ids.{length}"].long()[None])
    assert relative(out.logits[0], goldens[f"logits.{length}"]) < FORWARD[dtype]
    for layer in range(2):
        for ours, name in (("wkv", "wkv"), ("att_shift", "att_shift"), ("ffn_shift", "ffn_shift")):
            got = getattr(out.state, ours)[layer, 0]
            assert relative(got, goldens[f"state.{length}.{name}.{layer}"]) < FORWARD[dtype], name


def test_packed_row(model, goldens, dtype):
    ids, cut = goldens["ids.150"].long()[None], goldens["cu_seq_lens"]
    out = model(ids, labels=ids, cu_seqlens=cut)
    assert relative(out.logits[0, 5:], goldens["logits.packed"]) < FORWARD[dtype]
    assert relative(out.logits[0, :5], goldens["logits.150"][:5]) < FORWARD[dtype]
    assert float(out.loss) == pytest.approx(float(goldens["loss.packed"]), rel=FORWARD[dtype])


def test_packed_segments_have_their_own_losses(model, goldens, dtype):
    ids, cut = goldens["ids.150"].long()[None], goldens["cu_seq_lens"].tolist()
    for i, (start, end) in enumerate(pairwise(cut)):
        part = ids[:, start:end]
        loss = float(model(part, labels=part).loss)
        assert loss == pytest.approx(float(goldens["loss.packed.segments"][i]), rel=FORWARD[dtype])


def test_every_gradient_of_the_packed_row(model, goldens, dtype):
    ids = goldens["ids.150"].long()[None]
    model(ids, labels=ids, cu_seqlens=goldens["cu_seq_lens"]).loss.backward()
    for name, parameter in model.named_parameters():
        native = name.removeprefix("rwkv7.")
        if native == "emb.weight":
            want = torch.zeros_like(parameter)
            rows = goldens["grad.packed.emb.weight.rows"].long()
            want[rows] = goldens["grad.packed.emb.weight.values"].to(dtype)
            assert 0 in rows, "token 0 is an ordinary token and has a gradient"
        else:
            want = goldens[f"grad.packed.{native}"].to(dtype)
        error = (parameter.grad - want).norm() / want.norm()
        assert error < GRADIENT[dtype], f"{name}: {error:.1e}"


def test_loss_and_gradients_of_a_single_sequence(model, goldens, dtype):
    ids = goldens["ids.150"].long()[None]
    loss = model(ids, labels=ids).loss
    assert float(loss) == pytest.approx(float(goldens["loss.single"]), rel=FORWARD[dtype])
    loss.backward()
    seen = 0
    for name, parameter in model.named_parameters():
        native, grad = name.removeprefix("rwkv7."), parameter.grad
        if f"grad.single.full.{native}" in goldens:
            pairs = [(grad, goldens[f"grad.single.full.{native}"])]
        else:
            # a matrix is held by its products with fixed vectors from both sides
            rows, columns = (goldens[f"probe.{n}"].to(dtype) for n in grad.shape)
            pairs = [
                (rows @ grad, goldens[f"grad.single.left.{native}"]),
                (grad @ columns, goldens[f"grad.single.right.{native}"]),
            ]
        for got, want in pairs:
            error = (got - want.to(dtype)).norm() / want.norm()
            assert error < 2 * GRADIENT[dtype], f"{name}: {error:.1e}"
            seen += 1
    assert seen == sum(name.startswith("grad.single.") for name in goldens)


def test_greedy_continuation(model, goldens):
    ids = goldens["ids.37"].long()[None]
    out = model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None)
    assert out[0, 37:].tolist() == goldens["greedy.37"].tolist()
