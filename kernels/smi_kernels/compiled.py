"""How loops are compiled, by numba, and run, in the threads that torch has.

torch runs its operations in OpenMP threads, which stay awake for a while after each: on a machine whose cores are all
torch's, threads of ours would have to wait for these to fall asleep. So a loop is handed to the same OpenMP library,
where that has the entry point of GNU's (Linux). Elsewhere, and in a forked child, which has none of its parent's
threads, Python's threads do.
"""

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import extending, types

# numba's own annotations say little of what happens to a function
_numba: Any = numba
intrinsic: Any = extending.intrinsic

# a function that loops call
helper: Any = _numba.njit(error_model="numpy")

_PROCESS = os.getpid()

_I64P = ir.IntType(64).as_pointer()


@intrinsic
def _pointer(typingctx, address):
    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], _I64P)

    return types.CPointer(types.int64)(types.int64), codegen


@helper
def table(address, rows, columns):
    """The int64 [rows, columns] at an address."""
    return _numba.carray(_pointer(address), (rows, columns))


class Loop:
    """A function that threads run side by side: `function(arguments)`, arguments the address of int64 numbers.

    The first of these counts the threads that have come; the others are as they were handed to `run`. It is compiled
    when it is first needed, and kept on disk for the next process.
    """

    def __init__(self, function: Callable[[int], None]) -> None:
        self._function = function

    @cached_property
    def _compiled(self) -> Any:
        signature, options = types.void(types.int64), {"error_model": "numpy"}
        try:
            return _numba.cfunc(signature, cache=True, **options)(self._function)
        except RuntimeError:
            # neither this directory nor the user's cache can be written to: each process compiles for itself
            return _numba.cfunc(signature, **options)(self._function)

    def run(self, threads: int, *arguments: int) -> None:
        """Returns when the work is done. The loop shares it out: one thread alone would do all of it, and one that
        comes late finds nothing left.

        arguments: addresses too, whose memory the caller keeps.
        """
        numbers = np.array([0, *arguments], np.int64)
        openmp = _openmp() if threads > 1 and os.getpid() == _PROCESS else None
        if openmp is None:
            _in_pool(self._compiled.ctypes, threads, numbers)
        else:
            openmp(self._compiled.address, numbers.ctypes.data, threads, 0)


@cache
def _openmp() -> Callable | None:
    """`GOMP_parallel` (function, argument, threads, flags) of the OpenMP library that torch has loaded, if it is one
    that has it."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    loaded = {Path(line.split()[-1]) for line in maps.read_text().splitlines()}
    found = [path for path in loaded if path.name.startswith(("libgomp", "libomp", "libiomp5"))]
    # other packages bring libraries of their own
    found.sort(key=lambda path: Path(torch.__file__).parent not in path.parents)
    run = getattr(ctypes.CDLL(str(found[0])), "GOMP_parallel", None) if found else None
    if run is not None:
        run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        run.restype = None
    return run


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, thread_name_prefix="smi_kernels")


def _in_pool(loop: Callable[[int], None], threads: int, numbers: np.ndarray) -> None:
    others = [_pool(threads - 1).submit(loop, numbers.ctypes.data) for _ in range(1, threads)]
    try:
        loop(numbers.ctypes.data)
    finally:
        # also when interrupted: they work in the caller's memory. One that has not begun would find nothing left
        for other in others:
            if not other.cancel():
                other.result()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)
