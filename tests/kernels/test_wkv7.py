"""Every backend against the recurrence in float64: output, final state and all seven gradients."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

import smi_kernels
from smi_kernels import Backend, Verdict, wkv7
from smi_kernels.inputs import segment_bounds

CPU = torch.device("cpu")


def verdict(name, dtype=torch.float32):
    return smi_kernels.registry._backends[name].verify(CPU, dtype, 32)


def runnable(name):
    """Skipped with the backend's own reason where it does not run on this machine's CPU."""
    answer = verdict(name)
    return pytest.param(name, marks=pytest.mark.skipif(not answer.ok, reason=f"{name}: {answer.reason}"))


BACKENDS = [runnable(name) for name in smi_kernels.available() if name != "recurrent"]
NAMES = ("o", "state", "dr", "dw", "dk", "dv", "da", "db", "dstate")


def make_inputs(B, T, H, N, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(B, T, H, N, generator=generator, dtype=torch.float64)

    r, k, v = normal(), normal(), normal()
    w = -0.6065306597126334 * torch.sigmoid(2 * normal())
    kk = F.normalize(normal(), dim=-1)
    b = kk * torch.sigmoid(normal())
    return [x.to(dtype) for x in (r, w, k, v, -kk, b)]


def make_state(S, H, N, dtype=torch.float64, seed=7):
    # not symmetric: a state read transposed must show
    return torch.randn(S, H, N, N, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def finest(backend):
    """The most precise dtype that a backend takes, and how near it must come to float64 then."""
    return (torch.float64, 1e-12) if verdict(backend, torch.float64).ok else (torch.float32, 1e-6)


def assert_agrees(backend, inputs, state, cu_seqlens=None):
    """Output, state and gradients equal those of the recurrence in float64."""
    dtype, tolerance = finest(backend)
    got = run_all(backend, [x.to(dtype) for x in inputs], state.to(dtype), cu_seqlens)
    assert_close(got, run_all("recurrent", inputs, state, cu_seqlens), tolerance)


def run_all(backend, inputs, state, cu_seqlens=None, call=wkv7):
    """Outputs and gradients for a fixed random direction."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    state = state.detach().clone().requires_grad_()
    o, final = call(*inputs, initial_state=state, cu_seqlens=cu_seqlens, backend=backend)
    generator = torch.Generator().manual_seed(3)
    loss = (o.double() * torch.randn(o.shape, generator=generator, dtype=torch.float64)).sum()
    loss = loss + (final.double() * torch.randn(final.shape, generator=generator, dtype=torch.float64)).sum()
    loss.backward()
    return [o.detach(), final.detach(), *(x.grad for x in inputs), state.grad]


def assert_close(got, want, tolerance):
    for name, x, y in zip(NAMES, got, want, strict=True):
        assert torch.isfinite(x).all(), name
        error = (x.double() - y.double()).abs().max() / y.double().abs().max()
        assert error < tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 63, 64, 65, 127, 257, 1023, 4097])
def test_rows_of_any_length(backend, T):
    B, H = (2, 2) if T < 1000 else (1, 1)
    assert_agrees(backend, make_inputs(B, T, H, 32), make_state(B, H, 32))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("N", [32, 64, 128])
def test_head_sizes(backend, N):
    assert_agrees(backend, make_inputs(1, 40, 2, N), make_state(1, 2, N))


# boundaries on and off the edges of a chunk, documents of one token, long before short
CUTS = [[0, 5, 65, 150], [0, 1, 2, 34, 64], [0, 16, 32, 48], [0, 100, 101, 117]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_packed_rows(backend, cut):
    cu_seqlens = torch.tensor(cut, dtype=torch.int32)
    assert_agrees(backend, make_inputs(1, cut[-1], 2, 32), make_state(len(cut) - 1, 2, 32), cu_seqlens)


@pytest.mark.parametrize("backend", ["recurrent", *BACKENDS])
def test_packed_segments_equal_rows_alone(backend):
    cut = [0, 7, 40, 73]
    dtype, tolerance = finest(backend)
    inputs, state = make_inputs(1, 73, 2, 32, dtype), make_state(3, 2, 32, dtype)
    o, final = wkv7(*inputs, initial_state=state, cu_seqlens=torch.tensor(cut, dtype=torch.int32), backend=backend)
    for i, (start, end) in enumerate(pairwise(cut)):
        alone, last = wkv7(*(x[:, start:end] for x in inputs), initial_state=state[i : i + 1], backend=backend)
        torch.testing.assert_close(o[:, start:end], alone, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(final[i : i + 1], last, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", ["recurrent", *BACKENDS])
def test_packed_segments_are_isolated_bit_for_bit(backend):
    cut = torch.tensor([0, 5, 37, 60], dtype=torch.int32)
    inputs = make_inputs(1, 60, 2, 32, torch.float32)
    o, final = wkv7(*inputs, cu_seqlens=cut, backend=backend)
    changed = [x.clone() for x in inputs]
    for x, y in zip(changed, make_inputs(1, 60, 2, 32, torch.float32, seed=1), strict=True):
        x[:, 5:37] = y[:, 5:37]
    o2, final2 = wkv7(*changed, cu_seqlens=cut, backend=backend)
    assert not torch.equal(o[:, 5:37], o2[:, 5:37])
    assert torch.equal(o[:, :5], o2[:, :5])
    assert torch.equal(o[:, 37:], o2[:, 37:])
    assert torch.equal(final[[0, 2]], final2[[0, 2]])


@pytest.mark.parametrize("backend", ["recurrent", *BACKENDS])
def test_gradient_does_not_cross_a_boundary(backend):
    cut = [0, 1, 20, 32, 70]
    for start, end in pairwise(cut):
        inputs = [x.requires_grad_() for x in make_inputs(1, 70, 1, 32, torch.float32)]
        state = make_state(4, 1, 32, torch.float32).requires_grad_()
        cu_seqlens = torch.tensor(cut, dtype=torch.int32)
        o, _ = wkv7(*inputs, initial_state=state, cu_seqlens=cu_seqlens, backend=backend)
        o[:, start:end].sum().backward()
        for x in inputs:
            assert x.grad is not None
            assert torch.count_nonzero(x.grad[:, :start]) == 0
            assert torch.count_nonzero(x.grad[:, end:]) == 0
            assert torch.count_nonzero(x.grad[:, start:end])
        assert torch.count_nonzero(state.grad.sum((1, 2, 3))) == 1


@pytest.mark.parametrize("backend", ["recurrent", *BACKENDS])
@pytest.mark.parametrize("pieces", [[48], [20, 28], [1] * 48], ids=["48", "20+28", "48x1"])
def test_state_carries_a_sequence_on(backend, pieces):
    """Output, final state and gradients, in pieces as in one; the pieces' states are never written to."""
    dtype, tolerance = finest(backend)
    inputs, state = make_inputs(2, 48, 2, 32), make_state(2, 2, 32)
    want = run_all("recurrent", inputs, state)

    def in_pieces(*inputs, initial_state, cu_seqlens, backend):
        outputs, at, state = [], 0, initial_state
        for n in pieces:
            before = state.clone()
            o, new = wkv7(*(x[:, at : at + n] for x in inputs), initial_state=state, backend=backend)
            assert torch.equal(state, before), "the initial state was written to"
            outputs.append(o)
            state, at = new, at + n
        return torch.cat(outputs, 1), state

    got = run_all(backend, [x.to(dtype) for x in inputs], state.to(dtype), call=in_pieces)
    assert_close(got, want, 10 * tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("other", ["recurrent", "chunked"])
def test_a_state_continues_on_another_backend(backend, other):
    inputs, state = make_inputs(1, 70, 2, 32), make_state(1, 2, 32)
    want, last = wkv7(*inputs, initial_state=state, backend="recurrent")
    inputs, state = [x.float() for x in inputs], state.float()
    for first, second in ((backend, other), (other, backend)):
        head, between = wkv7(*(x[:, :33] for x in inputs), initial_state=state, backend=first)
        tail, final = wkv7(*(x[:, 33:] for x in inputs), initial_state=between, backend=second)
        for got, value in ((torch.cat([head, tail], 1), want), (final, last)):
            assert (got - value).abs().max() / value.abs().max() < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_float32_is_as_accurate_as_stated(backend):
    inputs, state = make_inputs(1, 257, 2, 64), make_state(1, 2, 64)
    got = run_all(backend, [x.float() for x in inputs], state.float())
    assert_close(got, run_all("recurrent", inputs, state), 1e-6 if backend == "cpu" else 3e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_repeated_key_with_a_gate_near_one(backend):
    # the case in which an inverse by doubling loses every digit
    inputs = make_inputs(1, 128, 1, 64)
    kk = F.normalize(torch.ones(1, 128, 1, 64, dtype=torch.float64), dim=-1)
    inputs[1] = torch.full_like(inputs[1], -1e-4)
    inputs[4], inputs[5] = -kk, 0.99 * kk
    state = make_state(1, 1, 64)
    got = run_all(backend, [x.float() for x in inputs], state.float())
    assert_close(got, run_all("recurrent", inputs, state), 2e-5)


@pytest.mark.parametrize("backend", ["recurrent", *BACKENDS])
@pytest.mark.parametrize("decay", [-1e-7, -0.6065306597126334])
def test_decay_at_both_ends(backend, decay):
    inputs = make_inputs(1, 100, 1, 64)
    inputs[1] = torch.full_like(inputs[1], decay)
    state = make_state(1, 1, 64)
    got = run_all(backend, [x.float() for x in inputs], state.float())
    assert_close(got, run_all("recurrent", inputs, state), 1e-5)


@pytest.mark.parametrize("backend", ["recurrent", *BACKENDS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_keep_a_float32_state(backend, dtype):
    inputs = make_inputs(1, 50, 2, 32, dtype)
    inputs[1] = inputs[1].float()
    o, state = wkv7(*inputs, backend=backend)
    assert (o.dtype, state.dtype) == (dtype, torch.float32)
    want, _ = wkv7(*(x.double() for x in inputs), backend="recurrent")
    assert (o.double() - want).abs().max() / want.abs().max() < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("backend", ["recurrent", *BACKENDS])
@pytest.mark.parametrize("case", ["zero", "large"])
def test_extreme_inputs_in_bfloat16(backend, case):
    inputs = make_inputs(1, 100, 1, 64, torch.bfloat16)
    if case == "zero":
        inputs = [torch.zeros_like(x) for x in inputs]
    else:
        inputs[0] *= 300
        inputs[2] *= 300
    state = make_state(1, 1, 64, torch.float32)
    got = run_all(backend, inputs, state)
    want = run_all("recurrent", [x.double() for x in inputs], state.double())
    for name, x, y in zip(NAMES, got, want, strict=True):
        assert torch.isfinite(x).all(), name
        # gradients of bfloat16 inputs are bfloat16
        assert (x.double() - y).abs().max() <= 2 * torch.finfo(torch.bfloat16).eps * y.abs().max(), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_need_not_be_contiguous(backend):
    dtype, tolerance = finest(backend)
    plain, state = make_inputs(2, 40, 3, 32), make_state(2, 3, 32)
    want = run_all("recurrent", plain, state)
    layouts = {
        "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "elements first": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
        "every other": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    }
    for layout in layouts.values():
        strided = [layout(x.to(dtype)) for x in plain]
        assert not strided[0].is_contiguous()

        def call(*inputs, initial_state, layout=layout, **options):
            # `run_all` clones its inputs, which keeps no stride of a view
            return wkv7(*(layout(x) for x in inputs), initial_state=initial_state.mT.contiguous().mT, **options)

        assert_close(run_all(backend, strided, state.to(dtype), call=call), want, tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T", [1, 37, 64])
def test_nothing_is_read_past_the_input_or_from_unwritten_memory(backend, T):
    """Surroundings and fresh allocations hold NaN: any use of either would show."""
    dtype, tolerance = finest(backend)
    plain, state = make_inputs(1, T, 2, 32), make_state(1, 2, 32)
    want = run_all("recurrent", plain, state)

    def framed(*inputs, **options):
        frames = []
        for x in inputs:
            frame = torch.full((1, T + 20, 4, 32), float("nan"), dtype=x.dtype)
            frame[:, 10 : T + 10, 1:3] = x
            frames.append(frame[:, 10 : T + 10, 1:3])
        return wkv7(*frames, **options)

    filling = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        got = run_all(backend, [x.to(dtype) for x in plain], state.to(dtype), call=framed)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filling
    assert_close(got, want, tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_directional_derivatives(backend):
    """The gradients against differences of the recurrence in float64, which share no code with them."""
    dtype, _ = finest(backend)
    inputs, state = make_inputs(1, 35, 1, 32), make_state(1, 1, 32)
    weight = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    variables = [x.to(dtype).requires_grad_() for x in (*inputs, state)]
    o, _ = wkv7(*variables[:6], initial_state=variables[6], backend=backend)
    grads = torch.autograd.grad((o * weight.to(dtype)).sum(), variables)

    def loss(values):
        return (wkv7(*values[:6], initial_state=values[6], backend="recurrent")[0] * weight).sum()

    for i, grad in enumerate(grads):
        values = [*inputs, state]
        step = 1e-6 * torch.randn(values[i].shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
        ends = [loss([*values[:i], values[i] + sign * step, *values[i + 1 :]]) for sign in (1, -1)]
        difference, slope = (ends[0] - ends[1]) / 2, (grad.double() * step).sum()
        assert abs(difference - slope) < 1e-5 * grad.double().norm() * step.norm(), NAMES[i + 2]


def bad_inputs():
    good = make_inputs(1, 8, 2, 16, torch.float32)
    cut = torch.tensor([0, 3, 8], dtype=torch.int32)

    def case(match, **changes):
        arguments = dict(zip("rwkvab", good, strict=True)) | changes
        return pytest.param(arguments, match, id=match)

    yield case(r"r must be \[B, T, H, N\]", r=good[0][0])
    yield case("k has shape", k=good[2][:, :4])
    yield case("v is torch.float64", v=good[3].double())
    yield case("r must be float64", r=good[0].long())
    yield case(
        "packs one row", cu_seqlens=cut, **{n: x.repeat(2, 1, 1, 1) for n, x in zip("rwkvab", good, strict=True)}
    )
    yield case("must start at 0", cu_seqlens=cut + 1)
    yield case("must strictly increase", cu_seqlens=torch.tensor([0, 3, 3, 8], dtype=torch.int32))
    yield case("ends at 7", cu_seqlens=torch.tensor([0, 3, 7], dtype=torch.int32))
    yield case("must be an int32 tensor", cu_seqlens=cut.float())
    yield case("initial_state must be", initial_state=torch.zeros(1, 2, 16, 15))
    yield case("initial_state must be torch.float32", initial_state=torch.zeros(1, 2, 16, 16).double())
    yield case("k is on meta", k=good[2].to("meta"))
    yield case("empty inputs", **{n: x[:, :0] for n, x in zip("rwkvab", good, strict=True)})
    yield case("no WKV backend named 'fast'", backend="fast")


@pytest.mark.parametrize(("arguments", "match"), bad_inputs())
def test_wrong_inputs_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        wkv7(**arguments)


def test_boundaries_are_checked_again_after_a_change():
    cut = torch.tensor([0, 3, 8], dtype=torch.int32)
    assert segment_bounds(cut) == (0, 3, 8)
    cut[1] = 8
    with pytest.raises(ValueError, match="strictly increase"):
        segment_bounds(cut)


class TestRegistry:
    @pytest.fixture(autouse=True)
    def restored(self, monkeypatch):
        monkeypatch.setattr(smi_kernels.registry, "_backends", dict(smi_kernels.registry._backends))
        smi_kernels.resolve.cache_clear()
        yield
        smi_kernels.resolve.cache_clear()

    def picky(self, ok):
        run = smi_kernels.registry._backends["recurrent"].run
        return Backend("picky", "luck", run, lambda device, dtype, size: Verdict(ok, "out of luck"))

    def test_auto_asks_others_before_the_portable_ones(self, caplog):
        smi_kernels.register(self.picky(True))
        with caplog.at_level("INFO"):
            chosen = smi_kernels.resolve("auto", torch.device("cpu"), torch.float32, 64)
        assert chosen.name == "picky"

    def test_auto_passes_over_a_refusal_and_says_why_once(self, caplog):
        smi_kernels.register(self.picky(False))
        with caplog.at_level("INFO"):
            for _ in range(3):
                assert smi_kernels.resolve("auto", torch.device("cpu"), torch.float64, 64).name == "chunked"
        assert [r.getMessage().count("picky: out of luck") for r in caplog.records] == [1]

    def test_a_named_backend_that_refuses_is_an_error(self):
        smi_kernels.register(self.picky(False))
        with pytest.raises(ValueError, match="'picky' cannot run here: out of luck"):
            wkv7(*make_inputs(1, 4, 1, 16), backend="picky")

    def test_a_name_is_taken_once(self):
        smi_kernels.register(self.picky(True))
        with pytest.raises(ValueError, match="registered already"):
            smi_kernels.register(self.picky(True))
