"""Data without a trainer and without a Hydra application: the shipped notebook, and what it is made of."""

import contextlib
import io
import json
from pathlib import Path

import pytest
from shards import prepared
from test_data_datamodule import Bytes

from smi.data import SMIDataModule

NOTEBOOK = Path(__file__).parent.parent / "recipes" / "data.ipynb"


def test_the_notebook_runs() -> None:
    """Its cells are plain Python, so that no kernel has to be installed to run them."""
    notebook = json.loads(NOTEBOOK.read_text())
    names: dict[str, object] = {}
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                assert cell["outputs"] == []
                exec("".join(cell["source"]), names)
    for text in ("<|usr|>", "Tokens a document", "Fill of the packs", "PackedBatch(", "PaddedBatch(", "Training rows"):
        assert text in shown.getvalue(), text
    assert "<pre" in names["description"]._repr_html_()


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("quickstart", ["data.max_qestions=2"], "did you mean max_questions"),
        ("quickstart", ["data.mirror=x"], "data.mirror is not read by data.kind=synthetic"),
        ("rwkv7_pilot", ["data.mixture=null"], "data.mirror is not set"),
    ],
)
def test_recipes_say_what_is_wrong(name: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SMIDataModule.from_recipe(name, overrides)


def test_a_mixture_is_described_whole(tmp_path: Path) -> None:
    sources = [prepared(tmp_path, 100, name="a"), prepared(tmp_path, 50, name="b", epochs=2)]
    dm = SMIDataModule(Bytes(), sources, steps=1, max_length=100, pack_length=256, window=64)
    facts = dm.describe().facts
    assert facts.sources == ["a", "b"]
    assert facts.tokens.size == 200
    assert facts.pack_tokens.sum() == facts.tokens.sum()
    assert (facts.source_of == 1).sum() == 100
    assert repr(dm.describe()).startswith("Description(200 documents")
    assert dm.account.rows == 0
