import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from smi.protocol.tokens import BlockType
from smi.training import loss as loss_module
from smi.training.loss import supervised_loss


def batch(T=60, V=50, C=16, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(1, T, C, generator=generator, dtype=dtype).requires_grad_()
    head = torch.randn(V, C, generator=generator, dtype=dtype).requires_grad_()
    labels = torch.randint(V, (1, T), generator=generator)
    labels[torch.rand(1, T, generator=generator) < 0.4] = -100
    kinds = torch.randint(6, 10, (1, T), generator=generator).to(torch.uint8)
    return hidden, head, labels, kinds


def gradients(loss, hidden, head):
    return torch.autograd.grad(loss, (hidden, head))


@pytest.mark.parametrize("vocabulary", [50, 101, 512])
@pytest.mark.parametrize("rows", [1, 7, 1024])
def test_it_is_the_cross_entropy_of_all_logits(monkeypatch, rows, vocabulary):
    """Also when the supervised rows take several slices."""
    monkeypatch.setattr(loss_module, "LOGITS", rows * vocabulary)
    hidden, head, labels, kinds = batch(V=vocabulary)
    sums = supervised_loss(hidden, head, labels, kinds)
    want = F.cross_entropy((hidden @ head.T)[0], labels[0], reduction="sum")
    torch.testing.assert_close(sums.loss, want)
    # a third of it: what comes from above is passed on
    torch.testing.assert_close(gradients(sums.loss / 3, hidden, head), gradients(want / 3, hidden, head))


@pytest.mark.parametrize("rows", [7, 1024])
def test_z_loss_and_l2wrap_are_what_autograd_makes_of_their_definitions(monkeypatch, rows):
    monkeypatch.setattr(loss_module, "LOGITS", rows * 50)
    hidden, head, labels, kinds = batch(dtype=torch.float64)
    logits = (hidden @ head.T)[0][labels[0] != -100]
    plain = F.cross_entropy(logits, labels[labels != -100], reduction="sum")
    z_term = logits.logsumexp(-1).square().sum()
    largest = logits.max(-1).values
    # its value is zero, its gradient at the largest logit 1e-4 times that logit
    wrap = (1e-4 * largest.detach() * (largest - largest.detach())).sum()
    for z_loss, l2wrap, want in (
        (0.3, False, plain + 0.3 * z_term),
        (0.0, True, plain + wrap),
        (0.3, True, plain + 0.3 * z_term + wrap),
    ):
        sums = supervised_loss(hidden, head, labels, kinds, z_loss=z_loss, l2wrap=l2wrap)
        torch.testing.assert_close(sums.loss, want)
        want_gradients = torch.autograd.grad(want, (hidden, head), retain_graph=True)
        torch.testing.assert_close(gradients(sums.loss, hidden, head), want_gradients)
        # what is reported stays the cross entropy
        torch.testing.assert_close(sums.by_type.sum(), plain.detach())


def test_l2wrap_is_the_official_one():
    """RWKV-LM, over the mean of B T positions: the largest logit times 1e-4 / (B T), where it is."""
    hidden, head, labels, kinds = batch(dtype=torch.float64)
    labels = labels.clamp(min=0)
    logits = (hidden @ head.T).detach().requires_grad_()
    (want,) = torch.autograd.grad(F.cross_entropy(logits[0], labels[0]), logits)
    largest, place = logits.detach().max(-1, keepdim=True)
    want.scatter_add_(-1, place, largest * 1e-4 / labels.numel())
    sums = supervised_loss(hidden, head, labels, kinds, l2wrap=True)
    d_hidden, d_head = gradients(sums.loss / labels.numel(), hidden, head)
    torch.testing.assert_close(d_hidden, want @ head)
    torch.testing.assert_close(d_head, want[0].T @ hidden[0])


def test_only_wanted_gradients_are_made():
    hidden, head, labels, kinds = batch()
    want = gradients(supervised_loss(hidden, head, labels, kinds).loss, hidden, head)
    frozen_head = supervised_loss(hidden, head.detach(), labels, kinds).loss
    assert torch.equal(torch.autograd.grad(frozen_head, hidden)[0], want[0])
    frozen_stack = supervised_loss(hidden.detach(), head, labels, kinds).loss
    assert torch.equal(torch.autograd.grad(frozen_stack, head)[0], want[1])
    with torch.no_grad():
        assert not supervised_loss(hidden, head, labels, kinds).loss.requires_grad


def test_a_second_back_propagation_is_refused():
    hidden, head, labels, kinds = batch()
    loss = supervised_loss(hidden, head, labels, kinds).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="back-propagated already"):
        loss.backward()


def test_bfloat16_autocast():
    """Products in bfloat16, the sums in float32, gradients in the dtype of what they belong to."""
    hidden, head, labels, kinds = batch(T=200)
    want = supervised_loss(hidden, head, labels, kinds)
    want_gradients = gradients(want.loss, hidden, head)
    with torch.autocast("cpu", torch.bfloat16):
        sums = supervised_loss(hidden, head, labels, kinds)
    assert sums.loss.dtype == sums.entropy.dtype == torch.float32
    torch.testing.assert_close(sums.loss, want.loss, rtol=5e-3, atol=0)
    for got, exact in zip(gradients(sums.loss, hidden, head), want_gradients, strict=True):
        assert got.dtype == torch.float32
        assert (got - exact).norm() < 0.02 * exact.norm()


def test_logits_of_the_whole_row_never_exist(monkeypatch):
    monkeypatch.setattr(loss_module, "LOGITS", 8 * 50)
    hidden, head, labels, kinds = batch(T=64)
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            seen.extend(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.shape[-1:] == (50,))
            return out

    with Watch():
        supervised_loss(hidden, head, labels, kinds).loss.backward()
    # the buffers of the logits and of their softmax; the row has 64 positions
    assert max(seen) == 2 * 8 * 50


def test_sums_by_block_type():
    hidden, head, labels, kinds = batch()
    sums = supervised_loss(hidden, head, labels, kinds)
    logits = (hidden @ head.T)[0]
    for kind in BlockType:
        chosen = (labels[0] != -100) & (kinds[0] == kind)
        assert sums.tokens[kind] == chosen.sum()
        assert sums.correct[kind] == (logits.argmax(-1) == labels[0])[chosen].sum()
        part = F.cross_entropy(logits[chosen], labels[0][chosen], reduction="sum")
        torch.testing.assert_close(sums.by_type[kind], part.detach())
        p = logits[chosen].detach().softmax(-1)
        torch.testing.assert_close(sums.entropy[kind], -(p * p.log()).sum())


@pytest.mark.parametrize("extra", [{}, {"z_loss": 0.1, "l2wrap": True}], ids=["plain", "extra"])
def test_nothing_supervised_contributes_exactly_zero(extra):
    hidden, head, labels, kinds = batch()
    sums = supervised_loss(hidden, head, torch.full_like(labels, -100), kinds, **extra)
    assert float(sums.loss) == 0
    assert int(sums.tokens.sum()) == 0
    sums.loss.backward()
    assert torch.count_nonzero(hidden.grad) == 0
    assert torch.count_nonzero(head.grad) == 0


def test_labels_are_masked_by_position_not_by_id():
    """Token 0 is a target like any other."""
    hidden, head, labels, kinds = batch()
    zeros = torch.zeros_like(labels)
    assert int(supervised_loss(hidden, head, zeros, kinds).tokens.sum()) == labels.numel()
