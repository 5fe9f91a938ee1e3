"""The backends that need a GPU, as far as a machine without one can tell: verdicts, choice, and what FLA is handed."""

import functools
import re
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch

import smi_kernels
from smi_kernels import fla_backends, numerics, recurrent
from smi_kernels.fla_backends import run_tilelang, run_triton, verify_tilelang, verify_triton

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SETTING = numerics.Setting(CPU, torch.float64, 64, length=21, heads=2)


class ChunkDPLRDeltaRuleFunction(torch.autograd.Function):
    """What FLA's Triton path leaves in the graph; the identity."""

    @staticmethod
    def forward(ctx, o):
        return o.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


class FakeFLA:
    """FLA's function with the recurrence inside, in FLA's layout of the state; it keeps what it was handed."""

    def __init__(self, tilelang_fails: bool = False):
        self.calls: list[SimpleNamespace] = []
        self.accepts: tuple[bool, str | None] = (True, None)
        fake = self

        def compute(path, q, k, v, a, b, gk, scale, initial_state, output_final_state, cu_seqlens, **how):
            fake.calls.append(
                SimpleNamespace(path=path, scale=scale, cu_seqlens=cu_seqlens, initial=initial_state, **how)
            )
            assert output_final_state
            assert all(x.is_contiguous() for x in (q, k, v, a, b, gk))
            state = None if initial_state is None else initial_state.mT
            o, final = recurrent.run(q, gk, k, v, a, b, state, cu_seqlens)
            return ChunkDPLRDeltaRuleFunction.apply(o) if path == "Triton" else o, final.mT.contiguous()

        def chunk_dplr_delta_rule(
            q, k, v, a, b, gk, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None,
            cu_seqlens_cpu=None, safe_gate=False, chunk_size=None, disable_recompute=False, cp_context=None,
            lower_bound=None, **kwargs,
        ):  # fmt: skip
            how = {"cu_seqlens_cpu": cu_seqlens_cpu, "safe_gate": safe_gate, "chunk_size": chunk_size}
            arguments = (q, k, v, a, b, gk, scale, initial_state, output_final_state, cu_seqlens)
            return compute("Triton", *arguments, **how, lower_bound=lower_bound)

        @functools.wraps(chunk_dplr_delta_rule)
        def dispatched(
            q, k, v, a, b, gk, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, **how
        ):
            path = "TileLang" if fake.accepts[0] and not tilelang_fails else "Triton"
            return compute(path, q, k, v, a, b, gk, scale, initial_state, output_final_state, cu_seqlens, **how)

        class DPLRTileLangBackend:
            def verify(self, name, *arguments, **how):
                assert name == "chunk_dplr_delta_rule"
                assert how["chunk_size"] == 32
                assert how["q"].shape[-1] == 64
                return fake.accepts

        self.modules = {
            "fla": {},
            "fla.ops": {},
            "fla.ops.generalized_delta_rule": {"chunk_dplr_delta_rule": dispatched},
            "fla.ops.generalized_delta_rule.dplr": {},
            "fla.ops.generalized_delta_rule.dplr.backends": {"DPLRTileLangBackend": DPLRTileLangBackend},
        }

    def install(self, monkeypatch, without: tuple[str, ...] = (), missing: str = "") -> None:
        # triton and tilelang are only ever looked for
        monkeypatch.setattr(fla_backends, "find_spec", lambda name: None if name == missing else ModuleSpec(name, None))
        for name, contents in self.modules.items():
            if name in without:
                # None makes the import system say that it is not there
                monkeypatch.setitem(sys.modules, name, None)
                continue
            module = ModuleType(name)
            vars(module).update(contents)
            monkeypatch.setitem(sys.modules, name, module)


def clear_caches():
    for cached in (fla_backends._triton_function, fla_backends._tilelang, fla_backends._log_once, smi_kernels.resolve):
        cached.cache_clear()


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    monkeypatch.delenv("FLA_TILELANG", raising=False)
    monkeypatch.delenv("FLA_DISABLE_BACKEND_DISPATCH", raising=False)
    clear_caches()
    yield
    clear_caches()


@pytest.fixture
def fla(monkeypatch):
    fake = FakeFLA()
    fake.install(monkeypatch)
    return fake


@pytest.fixture
def gpu(monkeypatch):
    """A machine whose torch sees a Hopper GPU, with nvcc, and multiplies float32 in float32."""
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "highest")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(fla_backends, "has_nvcc", lambda: True)


def through(run):
    """`numerics.run_all` with the backend's `run`, whatever its verifier says of this machine."""
    backend = smi_kernels.Backend("direct", "", run, lambda *what: smi_kernels.Verdict(True))

    def all_of(inputs, state, cu_seqlens=None):
        smi_kernels.registry._backends["direct"] = backend
        smi_kernels.resolve.cache_clear()
        try:
            return numerics.run_all("direct", inputs, state, cu_seqlens)
        finally:
            del smi_kernels.registry._backends["direct"]
            smi_kernels.resolve.cache_clear()

    return all_of


class TestWhatFLAIsHanded:
    @pytest.mark.parametrize("run", [run_triton, run_tilelang])
    @pytest.mark.parametrize("packed", [False, True])
    def test_states_and_gradients_are_turned_and_turned_back(self, fla, run, packed):
        cut = torch.tensor([0, 1, 9, 21], dtype=torch.int32) if packed else None
        inputs = numerics.make_inputs(SETTING, 1 if packed else 3, 21)
        state = numerics.make_state(SETTING, 3)
        got = through(run)(inputs, state, cut)
        want = numerics.run_all("recurrent", inputs, state, cut)
        for name, x, y in zip(numerics.NAMES, got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12, msg=name)

    def test_triton_promises_nothing_and_goes_around_the_dispatcher(self, fla):
        through(run_triton)(numerics.make_inputs(SETTING, 2, 21), numerics.make_state(SETTING, 2))
        (call,) = fla.calls
        assert (call.path, call.scale) == ("Triton", 1.0)
        # FLA then takes chunks of 16, and the inverse that holds for repeated keys
        assert (call.chunk_size, call.safe_gate, call.lower_bound) == (None, False, None)

    def test_tilelang_promises_the_bound_at_chunks_of_32(self, fla):
        through(run_tilelang)(numerics.make_inputs(SETTING, 2, 21), numerics.make_state(SETTING, 2))
        (call,) = fla.calls
        assert (call.path, call.scale, call.chunk_size) == ("TileLang", 1.0, 32)
        assert call.lower_bound == pytest.approx(-(2.718281828459045**-0.5))

    def test_what_tilelang_declines_runs_as_triton_and_is_logged_once(self, fla, caplog):
        fla.accepts = (False, "TileLang backend is slower than Triton on small grids")
        with caplog.at_level("INFO"):
            for _ in range(2):
                through(run_tilelang)(numerics.make_inputs(SETTING, 2, 21), numerics.make_state(SETTING, 2))
        assert [(c.path, c.chunk_size, c.lower_bound) for c in fla.calls] == [("Triton", None, None)] * 2
        assert [r.getMessage().count("small grids") for r in caplog.records if r.name == fla_backends.__name__] == [1]

    def test_a_tilelang_kernel_that_fails_is_an_error(self, monkeypatch):
        FakeFLA(tilelang_fails=True).install(monkeypatch)
        with pytest.raises(RuntimeError, match="choose the WKV backend triton"):
            through(run_tilelang)(numerics.make_inputs(SETTING, 2, 21), numerics.make_state(SETTING, 2))

    @pytest.mark.parametrize("run", [run_triton, run_tilelang])
    def test_boundaries_are_the_same_tensors_for_the_same_boundaries(self, fla, run):
        inputs, state = numerics.make_inputs(SETTING, 1, 21), numerics.make_state(SETTING, 2)
        cut = torch.tensor([0, 8, 21], dtype=torch.int64)
        through(run)(inputs, state, cut)
        through(run)(inputs, state, cut.clone())
        cut[1] = 9
        through(run)(inputs, state, cut)
        first, second, third = (call.cu_seqlens for call in fla.calls)
        assert first is second
        assert first.dtype == torch.int32
        assert third.tolist() == [0, 9, 21]
        assert fla.calls[2].cu_seqlens_cpu.tolist() == [0, 9, 21]

    @pytest.mark.parametrize("run", [run_triton, run_tilelang])
    def test_a_float32_decay_stays_float32_beside_bfloat16(self, fla, run, monkeypatch):
        seen = {}

        def record(q, k, v, a, b, gk, **how):
            seen.update(gk=gk.dtype, q=q.dtype)
            return q, torch.zeros(2, 2, 64, 64)

        module = sys.modules["fla.ops.generalized_delta_rule"]
        monkeypatch.setattr(module, "chunk_dplr_delta_rule", record)
        setting = numerics.Setting(CPU, torch.bfloat16, 64, heads=2)
        run(*numerics.make_inputs(setting, 2, 21), None, None)
        assert seen == {"gk": torch.float32, "q": torch.bfloat16}

    def test_fla_05_is_called_without_what_it_does_not_know(self, monkeypatch):
        def chunk_dplr_delta_rule(
            q, k, v, a, b, gk, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None,
            cu_seqlens_cpu=None, safe_gate=False, chunk_size=None,
        ):  # fmt: skip
            return recurrent.run(q, gk, k, v, a, b, initial_state.mT, cu_seqlens)

        fake = FakeFLA()
        fake.modules["fla.ops.generalized_delta_rule"] = {"chunk_dplr_delta_rule": chunk_dplr_delta_rule}
        fake.install(monkeypatch)
        o = through(run_triton)(numerics.make_inputs(SETTING, 2, 21), numerics.make_state(SETTING, 2))[0]
        assert torch.isfinite(o).all()


class TestVerdicts:
    @pytest.mark.parametrize("verify", [verify_triton, verify_tilelang])
    def test_both_run_on_hopper_in_bfloat16(self, fla, gpu, verify):
        assert verify(CUDA, torch.bfloat16, 64).ok

    @pytest.mark.parametrize("verify", [verify_triton, verify_tilelang])
    @pytest.mark.parametrize(
        ("device", "dtype", "size", "reason"),
        [
            (CPU, torch.bfloat16, 64, "needs a CUDA device, not cpu"),
            (CUDA, torch.bfloat16, 48, "head sizes are .*64, 128, not 48"),
            (CUDA, torch.float64, 64, "float64"),
            (CUDA, torch.float32, 64, "float32"),
        ],
    )
    def test_what_they_do_not_take(self, fla, gpu, verify, device, dtype, size, reason):
        verdict = verify(device, dtype, size)
        assert not verdict.ok
        assert re.search(reason, verdict.reason), verdict.reason

    @pytest.mark.parametrize("verify", [verify_triton, verify_tilelang])
    def test_no_device(self, fla, gpu, verify, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert verify(CUDA, torch.bfloat16, 64).reason == "torch sees no CUDA device"

    @pytest.mark.parametrize("verify", [verify_triton, verify_tilelang])
    def test_an_old_device(self, fla, gpu, verify, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
        assert "this GPU has 7.5" in verify(CUDA, torch.bfloat16, 64).reason

    def test_float32_runs_where_torch_may_use_tf32(self, fla, gpu, monkeypatch):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
        assert verify_triton(CUDA, torch.float32, 64).ok

    @pytest.mark.parametrize("verify", [verify_triton, verify_tilelang])
    @pytest.mark.parametrize(("module", "package"), [("fla", "flash-linear-attention"), ("triton", "triton")])
    def test_a_missing_package_is_named_with_what_to_install(self, gpu, verify, module, package, monkeypatch):
        FakeFLA().install(monkeypatch, missing=module)
        assert verify(CUDA, torch.bfloat16, 64).reason == f"{package} not installed: pip install 'smi[gpu]'"

    def test_tilelang_alone_missing(self, gpu, monkeypatch):
        FakeFLA().install(monkeypatch, missing="tilelang")
        assert "tilelang not installed" in verify_tilelang(CUDA, torch.bfloat16, 64).reason
        assert verify_triton(CUDA, torch.bfloat16, 64).ok

    def test_an_fla_that_cannot_be_imported(self, gpu, monkeypatch):
        FakeFLA().install(monkeypatch, without=("fla.ops.generalized_delta_rule",))
        reason = verify_triton(CUDA, torch.bfloat16, 64).reason
        assert reason.startswith("flash-linear-attention cannot be imported: ModuleNotFoundError")

    def test_an_fla_without_tilelang_kernels(self, gpu, monkeypatch):
        FakeFLA().install(monkeypatch, without=("fla.ops.generalized_delta_rule.dplr.backends",))
        assert "0.6 or later" in verify_tilelang(CUDA, torch.bfloat16, 64).reason

    def test_no_nvcc(self, fla, gpu, monkeypatch):
        monkeypatch.setattr(fla_backends, "has_nvcc", lambda: False)
        assert "nvcc, which is missing" in verify_tilelang(CUDA, torch.bfloat16, 64).reason

    @pytest.mark.parametrize(("switch", "value"), [("FLA_TILELANG", "0"), ("FLA_DISABLE_BACKEND_DISPATCH", "1")])
    def test_turned_off_in_fla(self, fla, gpu, switch, value, monkeypatch):
        monkeypatch.setenv(switch, value)
        assert f"{switch}={value}" in verify_tilelang(CUDA, torch.bfloat16, 64).reason

    @pytest.mark.parametrize("found", [True, False])
    def test_nvcc_is_found_where_cuda_home_says(self, tmp_path, monkeypatch, found):
        monkeypatch.setattr(fla_backends.shutil, "which", lambda name: None)
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        if found:
            (tmp_path / "bin").mkdir()
            (tmp_path / "bin" / "nvcc").touch()
            assert fla_backends.has_nvcc()

    def test_fla_is_not_imported_for_a_cpu(self, monkeypatch):
        known = fla_backends.importlib.import_module

        def load(name, *package):
            assert not name.startswith("fla"), f"imported {name}"
            return known(name, *package)

        monkeypatch.setattr(fla_backends.importlib, "import_module", load)
        smi_kernels.resolve("auto", CPU, torch.bfloat16, 64)


class TestChoice:
    def choose(self, dtype=torch.bfloat16, size=64):
        return smi_kernels.resolve("auto", CUDA, dtype, size).name

    def test_tilelang_before_triton_before_the_portable_ones(self, fla, gpu):
        assert smi_kernels.available()[:2] == ["tilelang", "triton"]
        assert self.choose() == "tilelang"

    def test_triton_where_tilelang_does_not_go(self, fla, gpu):
        assert self.choose(size=32) == "triton"

    def test_chunked_for_float32(self, fla, gpu):
        assert self.choose(torch.float32) == "chunked"

    def test_the_reasons_are_logged(self, fla, gpu, caplog, monkeypatch):
        monkeypatch.setattr(fla_backends, "has_nvcc", lambda: False)
        with caplog.at_level("INFO"):
            assert self.choose() == "triton"
        assert "not tilelang: it compiles with nvcc" in caplog.text
