"""What is particular to the chunked backend: groups of steps, blocks of heads, and what the backward pass keeps."""

import pytest
import torch
import torch.nn.functional as F

from smi_kernels import chunked, wkv7

NAMES = ("o", "state", "dr", "dw", "dk", "dv", "da", "db", "dstate")


def make_inputs(B, T, H, N, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    r, w, k, v, kk, rate = (torch.randn(B, T, H, N, generator=generator, dtype=torch.float64) for _ in range(6))
    w = -0.6065306597126334 * torch.sigmoid(2 * w)
    kk = F.normalize(kk, dim=-1)
    return [x.to(dtype) for x in (r, w, k, v, -kk, kk * torch.sigmoid(rate))]


def results(backend, inputs, cut=None):
    """Outputs, final state and all gradients, from a random state and along a random direction."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    B, _, H, N = inputs[0].shape
    segments = B if cut is None else len(cut) - 1
    generator = torch.Generator().manual_seed(7)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(inputs[0].dtype)

    state = draw(segments, H, N, N).requires_grad_()
    cu_seqlens = None if cut is None else torch.tensor(cut, dtype=torch.int32)
    outputs = wkv7(*inputs, initial_state=state, cu_seqlens=cu_seqlens, backend=backend)
    grads = torch.autograd.grad(outputs, [*inputs, state], [draw(*x.shape) for x in outputs])
    return [x.detach() for x in (*outputs, *grads)]


def worst_error(got, want):
    return max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(got, want, strict=True))


@pytest.fixture
def small_groups(monkeypatch):
    """Several groups and blocks in tests of a size that the recurrence can follow."""
    monkeypatch.setattr(chunked, "GROUP", {"cpu": 4})
    monkeypatch.setattr(chunked, "STEP", {"cpu": 4})
    monkeypatch.setattr(chunked, "MIN_STEPS", 2)
    chunked._layout.cache_clear()
    yield
    chunked._layout.cache_clear()


# lanes that end at the end of a group, inside one, and long before the others
CUTS = [
    None,
    [0, 32, 64, 160],
    [0, 33, 150, 151, 183],
    [0, 200],
    [0, 16, 17, 18, 19, 20, 120],
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("heads", [1, 3])
def test_groups_and_blocks_change_nothing(small_groups, cut, heads):
    inputs = make_inputs(*((2, 100) if cut is None else (1, cut[-1])), heads, 16)
    got, want = results("chunked", inputs, cut), results("recurrent", inputs, cut)
    # rounding grows along the row, to some hundred units in the last place of a double at this length
    assert worst_error(got, want) < 2e-14


def test_the_layout_has_the_groups_and_blocks_that_it_should(small_groups):
    layout = chunked._layout((0, 33, 150, 151, 183), 3, torch.device("cpu"))
    assert layout.order.tolist() == [1, 0, 3, 2]
    assert layout.heads == (slice(0, 1), slice(1, 2), slice(2, 3))
    assert [group.active for group in layout.groups] == [(4, 3), (2, 1), (1, 1, 1, 1)]
    held = torch.cat([g.tokens if g.held is None else g.tokens[g.held] for g in layout.groups])
    assert held.sort().values.tolist() == list(range(183))


def test_packed_isolation_holds_in_gradients_bit_for_bit(small_groups):
    cut = [0, 21, 90, 91, 140]
    inputs = make_inputs(1, 140, 3, 16, torch.float32)
    other = make_inputs(1, 140, 3, 16, torch.float32, seed=1)
    changed = [x.clone() for x in inputs]
    for x, y in zip(changed, other, strict=True):
        x[:, 21:90] = y[:, 21:90]
    for name, x, y in zip(NAMES, results("chunked", inputs, cut), results("chunked", changed, cut), strict=True):
        if name in ("state", "dstate"):
            assert torch.equal(x[[0, 2, 3]], y[[0, 2, 3]]), name
        else:
            assert torch.equal(x[:, :21], y[:, :21]), name
            assert torch.equal(x[:, 90:], y[:, 90:]), name


def test_float64_is_exact_to_the_last_digits():
    inputs = make_inputs(1, 150, 2, 64)
    assert worst_error(results("chunked", inputs), results("recurrent", inputs)) < 1e-14


def test_heads_of_a_strided_view_are_not_copied_whole():
    """Heads cut from one projection, as a model may hand them over."""
    plain = make_inputs(1, 60, 2, 16)
    strided = list(torch.cat(plain, -1).split(16, -1))
    assert not strided[0].is_contiguous()
    for x, y in zip(results("chunked", strided), results("chunked", plain), strict=True):
        assert torch.equal(x, y)


def test_what_the_backward_pass_keeps_is_a_quarter_more_than_the_inputs():
    kept = []
    inputs = [x.requires_grad_() for x in make_inputs(1, 1024, 4, 64, torch.float32)]
    known = {x.untyped_storage().data_ptr() for x in inputs}

    def keep(x):
        if x.untyped_storage().data_ptr() not in known:
            kept.append(x.numel() * x.element_size())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        wkv7(*inputs, backend="chunked")
    assert 0 < sum(kept) < 1.25 * sum(x.numel() * x.element_size() for x in inputs)
