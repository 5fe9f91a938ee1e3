from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smi.protocol import (
    STRUCTURAL_TOKENS,
    Block,
    BlockType,
    Conversation,
    ProtocolError,
    Side,
    Stream,
    Transmission,
    decode,
    encode,
    encode_prompt,
    to_stream,
)
from smi.tokenizer import Tokenizer, load_tokenizer


def payloads() -> st.SearchStrategy[str]:
    """Text of structural spellings, fragments of them, look-alikes, line ends and arbitrary Unicode."""
    spellings = [*STRUCTURAL_TOKENS, "<|endoftext|>", "<|smi_reserved_10|>", "</s>", "<s>"]
    fragments = [spelling[:cut] for spelling in spellings for cut in (1, 2, 4)] + ["sys|>", "|>", "eot", "|"]
    looks = [
        "\uff1c|sys|\uff1e",
        "<\u2758sys\u2758>",
        "<|\u0455\u0443\u0455|>",
        "<\u200b|sys|>",
        "\n",
        "\r\n",
        " ",
        "  ",
        "\t",
        "\0",
        "\ufeff",
    ]
    return st.lists(st.one_of(st.sampled_from([*spellings, *fragments, *looks]), st.text(max_size=12))).map("".join)


def streams() -> st.SearchStrategy[Stream]:
    """Any stream the grammar allows."""

    def transmission(side: Side) -> st.SearchStrategy[Transmission]:
        types = [kind for kind in BlockType if kind < BlockType.EOT and kind.side is side]
        blocks = st.lists(st.builds(Block, st.sampled_from(types), payloads()), min_size=1, max_size=4)
        if side is Side.RUNTIME:
            blocks = blocks.map(lambda found: sorted(found, key=lambda block: min(block.type, BlockType.USR)))
        return blocks.map(lambda found: Transmission(tuple(found)))

    either = st.one_of(transmission(Side.RUNTIME), transmission(Side.MODEL))
    return st.lists(either, max_size=4).map(lambda found: Stream(tuple(found)))


def chat(*messages: tuple[str, str]) -> Stream:
    return to_stream(Conversation([{"role": role, "content": content} for role, content in messages]))


def test_ids_by_hand(world: Tokenizer) -> None:
    example = encode(chat(("user", "hello"), ("assistant", "hi")), world)
    usr, out, eot = (world.structural.id(kind) for kind in (BlockType.USR, BlockType.OUT, BlockType.EOT))
    expected = [
        usr,
        *world.encode("\nhello\n"),
        eot,
        *world.encode("\n"),
        out,
        *world.encode("\nhi\n"),
        eot,
        11,
        0,
    ]
    assert example.input_ids.tolist() == expected
    assert (example.input_ids.dtype, example.loss_mask.dtype, example.block_types.dtype) == (
        np.int32,
        bool,
        np.uint8,
    )
    split = expected.index(out)
    assert example.loss_mask.tolist() == [False] * split + [True] * (len(expected) - split)
    assert example.supervised_tokens == len(expected) - split
    tail = example.block_types[split:].tolist()
    assert tail == [BlockType.OUT] * (len(tail) - 3) + [BlockType.EOT, BlockType.EOT, BlockType.EOS]


@given(stream=streams())
def test_decode_inverts_encode(stream: Stream, world: Tokenizer, t1: Tokenizer) -> None:
    for tokenizer in (world, t1):
        for complete in (True, False):
            example = encode(stream, tokenizer, complete=complete)
            assert decode(example.input_ids, tokenizer) == stream
            assert len(example.input_ids) == len(example.loss_mask) == len(example.block_types)


@given(payload=payloads())
def test_no_payload_reaches_a_structural_id(payload: str, world: Tokenizer, t1: Tokenizer) -> None:
    stream = Stream((Transmission((Block(BlockType.OBS, payload),)),))
    for tokenizer in (world, t1):
        ids = encode(stream, tokenizer, complete=False).input_ids.tolist()
        structural = [id for id in ids if id in tokenizer.structural.all or id == tokenizer.eos_id]
        assert structural == [tokenizer.structural.id(BlockType.OBS), tokenizer.structural.eot]


@given(stream=streams())
def test_supervision_is_the_model_side(stream: Stream, world: Tokenizer) -> None:
    example = encode(stream, world)
    ends_with_model = bool(stream.transmissions) and stream.transmissions[-1].side is Side.MODEL
    assert bool(example.loss_mask[-1]) == ends_with_model
    assert example.block_types[-1] == BlockType.EOS
    # the supervised tokens alone are the stream of the model's transmissions
    kept = example.input_ids[example.loss_mask]
    model = tuple(part for part in stream.transmissions if part.side is Side.MODEL)
    assert decode(kept, world) == Stream(model)
    starts = np.isin(example.input_ids, world.structural.ids)
    assert [world.structural.type_of(id) for id in example.input_ids[starts].tolist()] == [
        *(BlockType(kind) for kind in example.block_types[starts])
    ]


def test_a_prompt_is_a_prefix_of_the_whole(world: Tokenizer) -> None:
    whole = chat(("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    for cut in (1, 3):
        prompt = encode_prompt(Stream(whole.transmissions[:cut]), world)
        assert prompt.tolist() == encode(whole, world).input_ids[: len(prompt)].tolist()
        assert prompt[-2] == world.structural.eot
    for cut in (0, 2, 4):
        with pytest.raises(ProtocolError, match=r"\[prompt\]"):
            encode_prompt(Stream(whole.transmissions[:cut]), world)


def test_decode_refuses(world: Tokenizer) -> None:
    usr, out, eot = (world.structural.id(kind) for kind in (BlockType.USR, BlockType.OUT, BlockType.EOT))
    newline, text = world.encode("\n"), world.encode("\nx\n")
    good = [usr, *text, eot, *newline]
    assert decode([*good, world.eos_id], world) == decode(good, world)
    for ids, reason in [
        ([*text, *good], "outside_block"),
        ([usr, *text, eot], "outside_block"),
        ([*good, *text, *good], "outside_block"),
        ([*good, world.eos_id, *good], "eos"),
        ([*good, world.eos_id, world.eos_id], "eos"),
        ([usr, *text], "unfinished"),
        ([usr, *text, world.eos_id], "unfinished"),
        ([usr, *world.encode("x"), eot, *newline], "framing"),
        ([usr, *newline, eot, *newline], "framing"),
        ([usr, eot, *newline], "framing"),
        ([eot, *newline], "empty_transmission"),
        ([*good, eot, *newline], "empty_transmission"),
        ([usr, *text, out, *text, eot, *newline], "mixed_sides"),
        ([usr, *newline, 243, *newline, eot, *newline], "text"),
        ([usr, *newline, world.vocab_size, *newline, eot, *newline], "text"),
        ([usr, *newline, -1, *newline, eot, *newline], "text"),
    ]:
        with pytest.raises(ProtocolError) as caught:
            decode(ids, world)
        assert caught.value.reason == reason, ids


def test_a_tokenizer_that_breaks_its_promise_is_caught(world: Tokenizer) -> None:
    class Leaky:
        structural, eos_id, vocab_size, decode = world.structural, 0, world.vocab_size, world.decode

        def encode(self, text: str) -> list[int]:
            return [self.structural.eot if part == "x" else 11 for part in text]

    with pytest.raises(ProtocolError, match=r"\[tokenizer\]"):
        encode(chat(("user", "x"), ("assistant", "y")), Leaky())


def test_reserved_slots_are_not_text() -> None:
    tokenizer = load_tokenizer(str(Path(__file__).parents[1] / "data/t1_tokenizer"), slots=32)
    assert (tokenizer.vocab_size, len(tokenizer.structural.ids)) == (544, 32)
    usr, eot, newline = (
        tokenizer.structural.id(BlockType.USR),
        tokenizer.structural.eot,
        tokenizer.encode("\n"),
    )
    for reserved in tokenizer.structural.ids[10:]:
        with pytest.raises(ProtocolError, match=r"\[text\]"):
            decode([usr, *newline, reserved, *newline, eot, *newline], tokenizer)
