import pytest
import torch
import torch.nn.functional as F

from smi.protocol.tokens import BlockType
from smi.training import loss as loss_module
from smi.training.loss import supervised_loss


def batch(T=60, V=50, C=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(1, T, C, generator=generator).requires_grad_()
    head = torch.randn(V, C, generator=generator).requires_grad_()
    labels = torch.randint(V, (1, T), generator=generator)
    labels[torch.rand(1, T, generator=generator) < 0.4] = -100
    kinds = torch.randint(6, 10, (1, T), generator=generator).to(torch.uint8)
    return hidden, head, labels, kinds


@pytest.mark.parametrize("rows", [7, 1024])
def test_it_is_the_cross_entropy_of_all_logits(monkeypatch, rows):
    """Also when the supervised rows take several slices."""
    monkeypatch.setattr(loss_module, "ROWS", rows)
    hidden, head, labels, kinds = batch()
    sums = supervised_loss(hidden, head, labels, kinds)
    sums.loss.backward()
    got = [hidden.grad.clone(), head.grad.clone()]
    hidden.grad = head.grad = None
    logits = hidden @ head.T
    want = F.cross_entropy(logits[0], labels[0], reduction="sum")
    want.backward()
    torch.testing.assert_close(sums.loss, want)
    torch.testing.assert_close(got, [hidden.grad, head.grad])


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


def test_nothing_supervised_contributes_exactly_zero():
    hidden, head, labels, kinds = batch()
    sums = supervised_loss(hidden, head, torch.full_like(labels, -100), kinds)
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
