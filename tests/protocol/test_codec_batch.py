"""What the codec lays out in one row for a whole batch, against assembly block by block."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from strategies import NAMESPACES, streams

from smi.protocol import BlockType, Example, Side, Stream, encode_many
from smi.tokenizer import Tokenizer


def by_definition(stream: Stream, tokenizer: Tokenizer, complete: bool) -> list[tuple[int, bool, int]]:
    """(id, supervised, block type) of each token."""
    first = {namespace.name: namespace.first_id for namespace in NAMESPACES}
    rows: list[tuple[int, bool, int]] = []
    target = False
    for transmission in stream.transmissions:
        target = transmission.side is Side.MODEL
        for block in transmission.blocks:
            ids = [tokenizer.structural.id(block.type)]
            text = "\n"
            for part in block.parts:
                if isinstance(part, str):
                    text += part
                else:
                    ids += [*tokenizer.encode(text), *(first[part.namespace] + id for id in part.ids)]
                    text = ""
            ids += tokenizer.encode(text + "\n")
            rows += [(id, target, block.type) for id in ids]
        rows += [(id, target, BlockType.EOT) for id in (tokenizer.structural.eot, *tokenizer.encode("\n"))]
    return [*rows, (tokenizer.eos_id, target, BlockType.EOS)] if complete else rows


@given(many=st.lists(streams(), max_size=3), name=st.sampled_from(["world", "t1", "llama_bpe"]), complete=st.booleans())
def test_a_batch_is_what_its_blocks_are(
    many: list[Stream], name: str, complete: bool, family: dict[str, Tokenizer]
) -> None:
    results = encode_many(many, family[name], complete=complete, namespaces=NAMESPACES)
    assert len(results) == len(many)
    for stream, got in zip(many, results, strict=True):
        assert isinstance(got, Example)
        found = zip(got.input_ids.tolist(), got.loss_mask.tolist(), got.block_types.tolist(), strict=True)
        assert list(found) == by_definition(stream, family[name], complete)
        assert (got.input_ids.dtype, got.loss_mask.dtype, got.block_types.dtype) == (np.int32, np.bool_, np.uint8)
        # an example that is kept must not keep its batch
        assert got.input_ids.base is None
