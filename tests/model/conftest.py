import pytest
import torch

from smi.model import RWKV7ForCausalLM
from smi.model.checkpoint import load_pretrained


@pytest.fixture
def t1(data_dir):
    """T1 in a given dtype and with a given backend; every call loads it anew."""

    def load(dtype: torch.dtype = torch.float32, backend: str = "auto") -> RWKV7ForCausalLM:
        model = load_pretrained(data_dir / "rwkv7" / "T1.pth", dtype=dtype)
        model.wkv_backend = backend
        return model

    return load
