import os

# one thread: small tensors gain nothing from more, and results do not depend on how many there are
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

DATA = Path(__file__).parent / "data"

_slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
# the same examples every time, so that a red run is red again; the full profile goes looking for new ones
settings.register_profile("default", max_examples=200, derandomize=True, deadline=None, suppress_health_check=_slow)
settings.register_profile("full", max_examples=2000, deadline=None, suppress_health_check=_slow)
settings.load_profile("default")


@pytest.fixture(scope="session")
def family_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tokenizers of every family as files, structural tokens installed; "world" and "t1" are real ones."""
    from families import CONFIG, FAMILIES, write

    from smi.tokenizer import load_tokenizer

    root = tmp_path_factory.mktemp("families")
    sources = {"world": "rwkv_world", "t1": str(DATA / "t1_tokenizer")}
    sources |= {name: write(root / f"{name}_source", make(), **CONFIG) for name, make in FAMILIES.items()}
    for name, source in sources.items():
        load_tokenizer(source).save_pretrained(root / name)
    return {name: root / name for name in sources}


@pytest.fixture(scope="session")
def family(family_files: dict[str, Path]) -> dict:
    """The same, loaded."""
    from smi.tokenizer import load_tokenizer

    return {name: load_tokenizer("rwkv_world" if name == "world" else str(path)) for name, path in family_files.items()}


@pytest.fixture(scope="session")
def special(family_files: dict[str, Path]) -> dict[str, set[int]]:
    """The ids that no text may give in each of them."""
    from families import special_ids

    return {name: special_ids(path) for name, path in family_files.items()}


@pytest.fixture(scope="session")
def world(family: dict):
    """The RWKV World tokenizer."""
    return family["world"]


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Fixtures shipped with the tests."""
    return DATA


@pytest.fixture(scope="session")
def goldens() -> dict:
    """Numbers that five other implementations of RWKV-7 agree on, for the checkpoint T1."""
    from safetensors.torch import load_file

    return load_file(DATA / "rwkv7" / "goldens.safetensors")
