"""What the C library does with freed memory."""

import ctypes
import sys

# mallopt's parameters (malloc.h)
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tells glibc to keep freed memory for the next allocation; says whether it listened.

    By default every large block comes from the kernel and goes back to it when it is freed. A training step on the
    CPU frees and asks for the same activations over and over, and the kernel clears each page anew: about a third
    of what a block takes beyond its matrix products. The process keeps its peak for as long as it runs. Other C
    libraries are left alone.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # musl has none
        return False
    return all([mallopt(_MMAP_THRESHOLD, _LARGEST), mallopt(_TRIM_THRESHOLD, _LARGEST)])
