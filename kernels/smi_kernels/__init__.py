"""WKV-7 kernels: one function, interchangeable backends.

    o, state = wkv7(r, w, k, v, a, b, initial_state=None, cu_seqlens=None, backend="auto")

Per head, with the state ``S`` of shape [V, K], every backend computes

    S_t = S_{t-1} diag(exp w_t) + (S_{t-1} a_t) b_t^T + v_t k_t^T        o_t = S_t r_t

where ``w`` is the log decay, ``a = -kk`` and ``b = kk * rate`` in RWKV-7's terms.

Backends register with `register`; other packages add theirs through the entry-point group
``smi.wkv_backends`` (an entry point resolves to a `Backend`). This package imports torch and never smi.
"""

from smi_kernels.backend import Backend, Verdict
from smi_kernels.registry import available, register, resolve, wkv7

__all__ = ["Backend", "Verdict", "available", "register", "resolve", "wkv7"]
