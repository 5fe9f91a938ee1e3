"""Compiles FLA's TileLang kernels for an H200 on a machine without a GPU: a program, not a test module.

    python fla_compiled.py DTYPE HEAD_SIZE         prints a JSON object {kernel: seconds}

A forward and a backward pass go through FLA's own Python code on CPU tensors, told that it is on an H200, so that every
kernel is asked for with the arguments it would have there. Each is compiled by nvcc for sm_90, and none is launched.
"""

import json
import sys
import time
from types import SimpleNamespace

import tilelang
import torch

from smi_kernels import fla_backends, numerics

H200 = SimpleNamespace(
    name="NVIDIA H200",
    multi_processor_count=132,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
)
seconds: dict[str, float] = {}
jit = tilelang.jit


def compile_only(**options):
    def decorate(make):
        compiled = jit(target={"kind": "cuda", "arch": "sm_90"}, execution_backend="tvm_ffi", **options)(make)

        def kernel(*arguments, **settings):
            start = time.perf_counter()
            compiled(*arguments, **settings)
            seconds.setdefault(make.__name__.strip("_"), round(time.perf_counter() - start, 1))
            return lambda *tensors: None

        return kernel

    return decorate


tilelang.jit = compile_only
torch.cuda.get_device_capability = lambda device=None: (9, 0)
torch.cuda.get_device_properties = lambda device=None: H200
import fla.ops.generalized_delta_rule.dplr.backends.tilelang.chunk as chunk  # noqa: E402

torch.cuda.is_available = lambda: True
# the one Triton kernel of this path; the interpreter has it
chunk.chunk_dplr_bwd_dAu = lambda v, v_new, do, A_qb, **how: (do.clone(), A_qb.clone(), A_qb.clone())

dtype, head_size = getattr(torch, sys.argv[1]), int(sys.argv[2])
setting = numerics.Setting(torch.device("cpu"), dtype, head_size)
inputs = [x.requires_grad_() for x in numerics.make_inputs(setting, 1, 64)]
state = numerics.make_state(setting, 1).requires_grad_()
arguments = fla_backends._arguments(*inputs, state, None)
# with our arguments FLA has nothing against TileLang but the device, which it looks at after everything else
verdict = fla_backends._tilelang().verify("chunk_dplr_delta_rule", **arguments, **fla_backends.PROMISE)
assert verdict == (False, "TileLang backend is CUDA-only; fall back to Triton"), verdict
o, final = chunk.chunk_dplr_delta_rule_tilelang(**arguments, **fla_backends.PROMISE)
assert fla_backends.path(o) == "TileLang"
(o.float().sum() + final.sum()).backward()
print(json.dumps(seconds))
