from pathlib import Path

import pytest

from smi.tokenizer import Tokenizer, load_tokenizer

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="session")
def t1() -> Tokenizer:
    return load_tokenizer(str(DATA / "t1_tokenizer"))
