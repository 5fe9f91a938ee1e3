"""Where the documents of a batch are from, in both kinds of stream."""

import pickle
from itertools import islice

import pytest
from shards import prepared
from test_data_datamodule import Bytes

from smi.data import SMIDataModule
from smi.data.synthetic import SyntheticTools
from smi.tokenizer import load_tokenizer


@pytest.fixture(params=["prepared", "compiled"])
def data(request, tmp_path):
    if request.param == "compiled":
        how = {"max_length": 400, "pack_length": 400}
        return SMIDataModule(load_tokenizer("compact"), SyntheticTools(0, 1), steps=8, window=16, **how)
    sources = [prepared(tmp_path, 40, name="a"), prepared(tmp_path, 20, first=500, name="b")]
    return SMIDataModule(Bytes(), sources, steps=8, max_length=100, pack_length=128, window=16)


def test_supervised_tokens_are_counted_by_source_and_documents_have_places(data):
    packs = data.packs()
    batches = list(islice(data.train_dataloader(), 8))
    for batch, members in zip(batches, packs, strict=False):
        origin = batch.origin
        assert origin.sources == tuple(source.name for source in data.train_sources)
        assert origin.targets.sum() == batch.supervised_tokens
        for number, name in enumerate(origin.sources):
            assert origin.targets[number] == sum(d.targets for d in members if d.where.source == name)
        assert [origin.where(s) for s in range(batch.documents)] == [str(document.where) for document in members]
    data.teardown()


def test_what_has_nothing_to_measure_has_no_origin(data):
    batch = next(iter(data.train_dataloader()))
    assert batch.unsupervised().origin is None
    again = pickle.loads(pickle.dumps(batch)).origin
    assert again.where(0) == batch.origin.where(0)
    data.teardown()
