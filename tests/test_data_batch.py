"""PackedBatch: targets, boundaries, and what it refuses to be."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from smi.data.batch import Origin, PackedBatch, pack
from smi.protocol.codec import Example


def example(ids: list[int], supervised: str, types: list[int]) -> Example:
    mask = np.array([letter == "x" for letter in supervised])
    return Example(np.array(ids, np.int32), mask, np.array(types, np.uint8))


FIRST = example([10, 11, 12, 13], "..xx", [4, 4, 7, 10])
SECOND = example([20, 21, 22], "xxx", [6, 6, 10])
THIRD = example([30], "x", [10])


def test_labels_are_the_next_token_and_never_cross_a_document() -> None:
    batch = pack([FIRST, SECOND, THIRD], capacity=10)
    assert batch.input_ids.tolist() == [[10, 11, 12, 13, 20, 21, 22, 30]]
    assert batch.labels.tolist() == [[-100, 12, 13, -100, 21, 22, -100, -100]]
    assert batch.block_types.tolist() == [[4, 7, 10, 10, 6, 10, 10, 10]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0]]
    assert batch.cu_seqlens.tolist() == [0, 4, 7, 8]
    assert (batch.tokens, batch.documents, batch.supervised_tokens, batch.fill) == (8, 3, 4, 0.8)
    dtypes = {f.name: getattr(batch, f.name).dtype for f in fields(batch)[:4]}
    assert dtypes == {
        "input_ids": torch.int64,
        "labels": torch.int64,
        "cu_seqlens": torch.int32,
        "block_types": torch.uint8,
    }


def test_documents_as_rows_of_their_own() -> None:
    batch = pack([FIRST, THIRD, SECOND])
    assert batch.document_ids.tolist() == [[0, 0, 0, 0, 1, 2, 2, 2]]
    assert batch.document_ids.dtype == torch.int32
    padded = batch.padded(pad_id=99)
    assert padded.input_ids.tolist() == [[10, 11, 12, 13], [30, 99, 99, 99], [20, 21, 22, 99]]
    assert padded.labels.tolist() == [[-100, 12, 13, -100], [-100] * 4, [21, 22, -100, -100]]
    assert padded.attention_mask.sum(1).tolist() == [4, 1, 3]
    assert padded.position_ids.tolist() == [[0, 1, 2, 3], [0, 0, 0, 0], [0, 1, 2, 0]]
    assert padded.block_types.tolist() == [[4, 7, 10, 10], [10, 0, 0, 0], [6, 10, 10, 0]]
    assert repr(padded) == "PaddedBatch(3 documents of at most 4 tokens, fill 66.7%, cpu)"


def test_packing_takes_the_documents_named_in_their_order() -> None:
    assert pack([FIRST, SECOND, THIRD], [2, 0]).input_ids.tolist() == [[30, 10, 11, 12, 13]]
    with pytest.raises(ValueError, match="at least one document"):
        pack([FIRST], [])
    with pytest.raises(ValueError, match="8 tokens are more than the capacity of 7"):
        pack([FIRST, SECOND, THIRD], capacity=7)


@pytest.mark.parametrize("bounds", [[0, 4], [1, 8], [0, 4, 4, 8], [0, 5, 4, 8], [8, 0], [0, 9]])
def test_boundaries_are_checked(bounds: list[int]) -> None:
    batch = pack([FIRST, SECOND, THIRD])
    with pytest.raises(ValueError, match="cu_seqlens must start at 0, rise strictly and end at 8"):
        replace(batch, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens": torch.tensor([0, 8])}, r"cu_seqlens must be int32 \[S \+ 1\]"),
        ({"cu_seqlens": torch.tensor([8], dtype=torch.int32)}, r"cu_seqlens must be int32"),
        ({"labels": torch.zeros(1, 7, dtype=torch.int64)}, r"labels must be torch.int64 \[1, 8\]"),
        ({"labels": torch.zeros(1, 8, dtype=torch.int32)}, "labels must be torch.int64"),
        ({"labels": torch.zeros(1, 8, dtype=torch.int64)}, "last token must be -100"),
        ({"block_types": torch.zeros(1, 8, dtype=torch.int64)}, "block_types must be torch.uint8"),
        ({"input_ids": torch.zeros(2, 8, dtype=torch.int64)}, r"input_ids must be \[1, T\]"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.int64)}, r"input_ids must be \[1, T\] with T > 0"),
    ],
)
def test_an_invalid_batch_cannot_be_made(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(pack([FIRST, SECOND, THIRD]), **change)


def test_moving_keeps_everything() -> None:
    batch = pack([FIRST, SECOND], capacity=14)
    moved = batch.to("meta")
    assert isinstance(moved, PackedBatch)
    assert moved.labels.device.type == moved.cu_seqlens.device.type == "meta"
    assert (moved.supervised_tokens, moved.documents, moved.fill) == (4, 2, 0.5)
    assert repr(batch) == "PackedBatch(2 documents, 7 tokens, 4 supervised, fill 50.0%, cpu)"
    assert torch.equal(batch.to("cpu").labels, batch.labels)


def test_origins_of_joined_batches_count_on() -> None:
    first = Origin(("a", "b"), np.array([3, 4]), "abc".__getitem__)
    second = Origin(("a", "b"), np.array([5, 0]), "xy".__getitem__)
    whole = Origin.join([first, second], [3, 2])
    assert whole.targets.tolist() == [8, 4]
    assert "".join(map(whole.where, range(5))) == "abcxy"
