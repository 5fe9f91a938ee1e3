import os

# one thread: small tensors gain nothing from more, and results do not depend on how many there are
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

DATA = Path(__file__).parent / "data"

_slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("default", max_examples=100, deadline=None, suppress_health_check=_slow)
settings.register_profile("full", max_examples=2000, deadline=None, suppress_health_check=_slow)
settings.load_profile("default")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Fixtures shipped with the tests."""
    return DATA


@pytest.fixture(scope="session")
def goldens() -> dict:
    """Numbers that five other implementations of RWKV-7 agree on, for the checkpoint T1."""
    from safetensors.torch import load_file

    return load_file(DATA / "rwkv7" / "goldens.safetensors")
