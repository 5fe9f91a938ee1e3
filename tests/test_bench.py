"""The bench: its command line, how it takes turns, and the baseline it compares with. No time is asserted."""

import json

import pytest
import torch

from smi.bench import __main__ as command
from smi.bench import kernels, measure
from smi.bench.measure import Figure, alternate
from smi.bench.portable import portable
from smi_kernels import wkv7


class TestCommandLine:
    def test_help_names_the_suites(self, capsys):
        with pytest.raises(SystemExit) as stop:
            command.main(["--help"])
        assert stop.value.code == 0
        printed = capsys.readouterr().out
        assert "--json FILE" in printed
        assert "kernels" in printed

    @pytest.mark.parametrize("suite", ["nonesuch", "measure", "portable"])
    def test_an_unknown_suite_is_refused_with_those_that_exist(self, suite, capsys):
        with pytest.raises(SystemExit) as stop:
            command.main([suite])
        assert stop.value.code == 2
        printed = capsys.readouterr().err
        assert suite in printed
        assert "kernels" in printed.split("choose from")[1]

    def test_json_holds_the_values_that_the_table_shows(self, monkeypatch, tmp_path, capsys):
        figures = {"fast": Figure(2.5, "5 s over 2 s", at_least=2.0), "small": Figure(0.75, at_most=0.5)}
        monkeypatch.setattr(kernels, "run", lambda: figures)
        path = tmp_path / "out.json"
        assert command.main(["kernels", "--json", str(path)]) == 0
        assert json.loads(path.read_text()) == {"fast": 2.5, "small": 0.75}
        printed = capsys.readouterr().out
        for text in ("fast", "2.5", ">= 2", "5 s over 2 s", "small", "0.75", "<= 0.5"):
            assert text in printed


@pytest.mark.parametrize(
    ("figure", "met"),
    [
        (Figure(1.0), None),
        (Figure(2.0, at_least=2.0), True),
        (Figure(1.9, at_least=2.0), False),
        (Figure(0.2, at_most=0.2), True),
        (Figure(0.3, at_most=0.2), False),
        (Figure(1.5, at_least=1.0, at_most=2.0), True),
        (Figure(0.5, at_least=1.0, at_most=2.0), False),
        (Figure(2.5, at_least=1.0, at_most=2.0), False),
        (Figure(float("nan"), at_least=1.0), False),
        (Figure(float("nan"), at_most=1.0), False),
    ],
)
def test_a_figure_knows_whether_its_target_is_met(figure, met):
    assert figure.met is met


class TestAlternate:
    @pytest.fixture
    def clock(self, monkeypatch):
        class Clock:
            now = 0.0

        clock = Clock()
        monkeypatch.setattr(measure.time, "perf_counter", lambda: clock.now)
        return clock

    def test_peers_take_turns_in_an_order_that_turns(self, clock):
        calls = []
        alternate({name: lambda name=name: calls.append(name) for name in "abc"}, rounds=3, warmup=2)
        assert "".join(calls) == "aabbcc" + "abc" + "bca" + "cab"

    def test_each_gets_the_median_of_its_own_times_and_warmup_does_not_count(self, clock):
        lasts = {"a": iter([100.0, 1.0, 9.0, 2.0]), "b": iter([100.0, 5.0, 3.0, 4.0])}

        def peer(name):
            def call():
                clock.now += next(lasts[name])

            return call

        assert alternate({name: peer(name) for name in lasts}, rounds=3, warmup=1) == {"a": 2.0, "b": 4.0}

    def test_garbage_is_collected_again_after_a_peer_fails(self):
        def fail():
            raise RuntimeError("no")

        with pytest.raises(RuntimeError):
            alternate({"a": fail}, warmup=0)
        assert measure.gc.isenabled()


def results(function, inputs, state, cu_seqlens):
    leaves = [x.detach().clone().requires_grad_() for x in (*inputs, state)]
    o, final = function(*leaves[:6], initial_state=leaves[6], cu_seqlens=cu_seqlens)
    generator = torch.Generator().manual_seed(5)
    along = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in (o, final)]
    return [o, final, *torch.autograd.grad((o, final), leaves, along)]


class TestPortable:
    @pytest.mark.parametrize(
        ("shape", "cut"),
        [((2, 150, 2, 16), None), ((1, 64, 1, 32), None), ((1, 150, 2, 16), [0, 1, 65, 129, 150])],
        ids=["rows", "one chunk", "packed"],
    )
    def test_it_equals_the_recurrence_in_values_and_gradients(self, shape, cut):
        inputs = kernels.make_inputs(shape, torch.float64)
        segments = shape[0] if cut is None else len(cut) - 1
        generator = torch.Generator().manual_seed(1)
        state = torch.randn(segments, shape[2], shape[3], shape[3], generator=generator, dtype=torch.float64)
        cu_seqlens = None if cut is None else torch.tensor(cut, dtype=torch.int32)

        def recurrent(*args, **kwargs):
            return wkv7(*args, **kwargs, backend="recurrent")

        got, want = (results(f, inputs, state, cu_seqlens) for f in (portable, recurrent))
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)

    def test_it_starts_from_zeros_without_a_state(self):
        inputs = kernels.make_inputs((2, 70, 1, 16), torch.float64)
        got, want = portable(*inputs), wkv7(*inputs, backend="recurrent")
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


class TestKernels:
    def test_inputs_are_as_the_model_makes_them(self):
        _, w, _, _, a, b = kernels.make_inputs((1, 32, 2, 64))
        assert -0.6066 < w.min() < -0.3 < w.max() < 0
        torch.testing.assert_close(a.norm(dim=-1), torch.ones(1, 32, 2))
        rate = -b / a
        assert 0 < rate.min() < 0.1
        assert 0.9 < rate.max() < 1

    def test_a_backend_that_is_missing_is_named_and_left_out(self, capsys):
        assert not kernels._is_ready("nonesuch")
        assert "no figures for nonesuch: no WKV backend named 'nonesuch'" in capsys.readouterr().out
        assert kernels._is_ready("chunked")

    @pytest.mark.parametrize("case", ["typical", "repeated_gate99"])
    def test_errors_are_those_of_float32(self, case):
        # an error of nothing would be a comparison of a thing with itself
        figure = kernels._error("chunked", case)
        assert figure.met
        assert figure.value > 1e-8

    def test_memory_counts_what_a_step_keeps_alive(self):
        if not kernels.Path("/proc/self/clear_refs").exists():
            pytest.skip("the peak of a process is read from Linux' /proc")
        shape = (1, 2048, 4, 64)
        with kernels.multiprocessing.get_context("spawn").Pool(1) as pool:
            peak = pool.apply(kernels.peak_memory, ("portable", shape, 1))
        token_bytes = 2048 * 4 * 64 * 4
        # six gradients and the outputs at the least
        assert 7 * token_bytes < peak < 200 * token_bytes
