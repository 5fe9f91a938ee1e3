import pytest
import torch

from smi.model import elementwise
from smi.model.elementwise import mix, squared_relu


def leaves(*shapes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("shares", [1, 6])
@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 50, 8), (1, 33, 8)], ids=str)
def test_mix_is_its_formula(monkeypatch, shape, shares):
    """In slices of rows that go on from one sequence into the next, with gradients in any layout."""
    monkeypatch.setattr(elementwise, "CACHED_ROWS", 16)
    x, shifted, *parts = leaves(shape, shape, *[(1, 1, 8)] * shares)
    want = [x + (shifted - x) * part for part in parts]
    got = mix(x, shifted, *parts)
    torch.testing.assert_close(list(got), want)
    grads = [torch.randn(shape[::-1], dtype=torch.float64).permute(2, 1, 0) for _ in parts]
    inputs = (x, shifted, *parts)
    torch.testing.assert_close(torch.autograd.grad(got, inputs, grads), torch.autograd.grad(want, inputs, grads))


def test_an_output_that_is_not_used_has_a_gradient_of_zero():
    x, shifted, a, b = leaves((1, 9, 8), (1, 9, 8), (1, 1, 8), (1, 1, 8))
    got = torch.autograd.grad(mix(x, shifted, a, b)[1].sum(), (x, a, b))
    assert torch.count_nonzero(got[1]) == 0
    torch.testing.assert_close(got[2].flatten(), (shifted - x).sum((0, 1)))


def test_bfloat16_activations_with_float32_shares():
    x, shifted = leaves((1, 300, 8), (1, 300, 8), dtype=torch.bfloat16)
    (share,) = leaves((1, 1, 8), dtype=torch.float32)
    (got,) = mix(x, shifted, share)
    assert got.dtype == torch.float32
    grads = torch.autograd.grad(got.sum(), (x, shifted, share))
    assert [g.dtype for g in grads] == [torch.bfloat16, torch.bfloat16, torch.float32]
    torch.testing.assert_close(grads[2].flatten(), (shifted - x).float().sum((0, 1)), rtol=1e-3, atol=1e-2)


def test_squared_relu_is_its_formula():
    (x,) = leaves((3, 40))
    with torch.no_grad():
        x[0, :3] = torch.tensor([0.0, -0.0, 1e-200])
    got, want = squared_relu(x), torch.relu(x) ** 2
    torch.testing.assert_close(got, want)
    grad = torch.randn_like(got)
    torch.testing.assert_close(torch.autograd.grad(got, x, grad), torch.autograd.grad(want, x, grad))
