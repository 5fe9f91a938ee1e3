"""FLA's Triton kernels through our backend, run by Triton's interpreter on the CPU: a program, not a test module.

    python fla_interpreted.py DTYPE HEAD_SIZE      prints a JSON list of [case, error, tolerance, where]

It runs in a process of its own, because the interpreter is chosen when Triton is first imported, and because FLA's
kernels need three things put right to be interpreted.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import json
import sys
import warnings
from builtins import range as builtin_range

import torch
import triton
import triton.language

from smi_kernels import Backend, Verdict, fla_backends, numerics, register


def one_configuration(configs, *arguments, **options):
    """Autotuning measures time, which means nothing here."""
    return autotune(configs[:1], *arguments, **options)


class Index(int):
    """The interpreter's loops count with Python's integers, but two kernels cast theirs with `.to(tl.int64)`."""

    def to(self, dtype):
        return int(self)


def indices(*bounds):
    return map(Index, builtin_range(*map(int, bounds)))


autotune, triton.autotune = triton.autotune, one_configuration
# FLA looks for it when imported, and has another way where it is missing; the interpreter cannot run it
del triton.language.gather

import fla.ops.generalized_delta_rule.dplr.chunk_h_bwd as chunk_h_bwd  # noqa: E402
import fla.ops.generalized_delta_rule.dplr.chunk_h_fwd as chunk_h_fwd  # noqa: E402

chunk_h_fwd.range = chunk_h_bwd.range = indices
# FLA warns that some GPUs cannot do float32
warnings.filterwarnings("ignore", category=RuntimeWarning)

register(Backend("interpreted", "Triton's interpreter", fla_backends.run_triton, lambda *what: Verdict(True)))
torch.set_num_threads(1)
dtype, head_size = getattr(torch, sys.argv[1]), int(sys.argv[2])
setting = numerics.Setting(torch.device("cpu"), dtype, head_size, length=53, heads=1)
findings = [case("interpreted", setting) for case in numerics.CASES]
print(json.dumps([[f.case, f.error, f.tolerance, f.where] for f in findings]))
