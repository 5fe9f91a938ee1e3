from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from families import FAMILIES, hostile
from hypothesis import given
from hypothesis import strategies as st
from strategies import NAMESPACES, payloads, streams

from smi.protocol import (
    Block,
    BlockType,
    Conversation,
    Example,
    Payload,
    ProtocolError,
    Side,
    Span,
    Stream,
    Transmission,
    decode,
    encode,
    encode_many,
    encode_prompt,
    to_stream,
)
from smi.tokenizer import Tokenizer, load_tokenizer


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
def test_decode_inverts_encode(stream: Stream, family: dict[str, Tokenizer]) -> None:
    for tokenizer in family.values():
        for complete in (True, False):
            example = encode(stream, tokenizer, complete=complete, namespaces=NAMESPACES)
            assert decode(example.input_ids, tokenizer, namespaces=NAMESPACES) == stream
            assert len(example.input_ids) == len(example.loss_mask) == len(example.block_types)


@given(payload=payloads(), kind=st.sampled_from([kind for kind in BlockType if kind < BlockType.EOT]))
def test_no_payload_reaches_a_special_id(
    payload: Payload, kind: BlockType, family: dict[str, Tokenizer], special: dict[str, set[int]]
) -> None:
    stream = Stream((Transmission((Block(kind, payload),)),))
    for name, tokenizer in family.items():
        ids = encode(stream, tokenizer, complete=False, namespaces=NAMESPACES).input_ids.tolist()
        found = [id for id in ids if id in special[name] | tokenizer.structural.all | {tokenizer.eos_id}]
        assert found == [tokenizer.structural.id(kind), tokenizer.structural.eot]


@given(text=hostile(), data=st.data())
def test_spellings_split_over_parts_are_the_text_they_join_to(
    text: str, data: st.DataObject, family: dict[str, Tokenizer]
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    for parts in (tuple(text), tuple(text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True))):
        assert Block(BlockType.OBS, parts) == Block(BlockType.OBS, text)
    # a span between the characters of a spelling keeps them apart, and they stay text
    apart = tuple(part for char in text for part in (char, Span("audio", (3,))))
    stream = Stream((Transmission((Block(BlockType.OBS, apart),)),))
    for name in ("world", "t1", "llama_bpe"):
        example = encode(stream, family[name], namespaces=NAMESPACES)
        assert decode(example.input_ids, family[name], namespaces=NAMESPACES) == stream


@given(stream=streams())
def test_supervision_is_the_model_side(stream: Stream, family: dict[str, Tokenizer]) -> None:
    for name in ("world", "t1", "byte_bpe_prefix", "llama_bpe"):
        tokenizer = family[name]
        example = encode(stream, tokenizer, namespaces=NAMESPACES)
        ids, mask = example.input_ids, example.loss_mask
        ends_with_model = bool(stream.transmissions) and stream.transmissions[-1].side is Side.MODEL
        assert bool(mask[-1]) == ends_with_model
        assert example.block_types[-1] == BlockType.EOS
        # what is supervised is the model's transmissions, whole and with their ends; what is not, the runtime's
        for side, kept in ((Side.MODEL, ids[mask]), (Side.RUNTIME, ids[~mask])):
            written = tuple(part for part in stream.transmissions if part.side is side)
            assert decode(kept, tokenizer, namespaces=NAMESPACES) == Stream(written)
            assert (kept == tokenizer.structural.eot).sum() == len(written)
        starts = np.isin(ids, tokenizer.structural.ids)
        assert [tokenizer.structural.type_of(id) for id in ids[starts].tolist()] == [
            *(BlockType(kind) for kind in example.block_types[starts])
        ]


@given(many=st.lists(streams(), max_size=4), name=st.sampled_from(["world", "t1", *FAMILIES]))
def test_batched_equals_scalar(many: list[Stream], name: str, family: dict[str, Tokenizer]) -> None:
    batch = encode_many(many, family[name], namespaces=NAMESPACES)
    assert len(batch) == len(many)
    for stream, got in zip(many, batch, strict=True):
        assert isinstance(got, Example)
        assert_same(got, encode(stream, family[name], namespaces=NAMESPACES))


def assert_same(got: Example, expected: Example) -> None:
    for field in ("input_ids", "loss_mask", "block_types"):
        one, other = getattr(got, field), getattr(expected, field)
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)


def test_one_bad_stream_never_harms_its_neighbours(world: Tokenizer) -> None:
    class Picky:
        structural, eos_id, vocab_size = world.structural, world.eos_id, world.vocab_size
        decode, token_bytes = world.decode, world.token_bytes
        calls = 0

        def encode(self, text: str) -> list[int]:
            return self.encode_batch([text])[0]

        def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
            Picky.calls += 1
            if any("picky" in text for text in texts):
                raise ValueError("it changes text: 'picky'")
            return [
                [world.structural.eot] if "leaky" in text else ids
                for text, ids in zip(texts, world.encode_batch(texts), strict=True)
            ]

    def one(*parts: str | Span) -> Stream:
        return Stream((Transmission((Block(BlockType.USR, "q"),)), Transmission((Block(BlockType.OUT, parts),))))

    good = [one("a"), one("b", Span("audio", (1,)), "c"), one(""), Stream(())]
    bad = {
        "span": one(Span("audio", (16,))),
        "tokenizer": one("leaky"),
        "text": one("picky"),
    }
    for reasons in (["span"], ["span", "tokenizer"], ["tokenizer", "span", "text"]):
        mixed = [good[0], *(bad[reason] for reason in reasons), *good[1:]]
        Picky.calls = 0
        results = encode_many(mixed, Picky(), complete=False, namespaces=NAMESPACES)
        assert (Picky.calls == 1) == ("text" not in reasons)
        middle = results[1 : 1 + len(reasons)]
        assert [error.reason for error in middle if isinstance(error, ProtocolError)] == reasons
        for got, stream in zip([results[0], *results[1 + len(reasons) :]], good, strict=True):
            assert isinstance(got, Example)
            assert_same(got, encode(stream, world, complete=False, namespaces=NAMESPACES))
        for reason, got in zip(reasons, middle, strict=True):
            with pytest.raises(ProtocolError) as caught:
                encode(bad[reason], Picky(), complete=False, namespaces=NAMESPACES)
            assert str(caught.value) == str(got)


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
        ([usr, *text, eot], "unfinished"),
        ([usr, *text, eot, world.eos_id], "outside_block"),
        ([usr, *text, eot, usr], "outside_block"),
        ([243], "outside_block"),
        ([usr, *text, eot, 243, world.eos_id], "text"),
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

        def token_bytes(self, id: int) -> bytes | None:
            return world.token_bytes(id)

        def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
            return [self.encode(text) for text in texts]

        def encode(self, text: str) -> list[int]:
            return [self.structural.eot if part == "x" else 11 for part in text]

    with pytest.raises(ProtocolError, match=r"\[tokenizer\]"):
        encode(chat(("user", "x"), ("assistant", "y")), Leaky())


@pytest.mark.parametrize("sequence_tokens", [False, True])
def test_reserved_slots_are_never_written_or_read(sequence_tokens: bool) -> None:
    source = str(Path(__file__).parents[1] / "data/t1_tokenizer")
    tokenizer = load_tokenizer(source, slots=32, sequence_tokens=sequence_tokens)
    structural = tokenizer.structural
    assert (tokenizer.vocab_size, len(structural.ids)) == (544, 32)
    usr, eot, newline = structural.id(BlockType.USR), structural.eot, tokenizer.encode("\n")
    reserved = [id for id in structural.ids[10:] if id != tokenizer.eos_id]
    assert len(reserved) == 22 - sequence_tokens
    for id in reserved:
        with pytest.raises(ProtocolError, match=r"\[text\]"):
            decode([usr, *newline, id, *newline, eot, *newline], tokenizer)
    example = encode(chat(("user", " ".join(structural.to_dict())), ("assistant", "<|bos|><|eos|>")), tokenizer)
    assert not set(example.input_ids.tolist()) & set(reserved)
    assert example.input_ids[-1] == tokenizer.eos_id
    assert example.loss_mask[-1]
    assert decode(example.input_ids, tokenizer).transmissions[1].blocks[0].payload == "<|bos|><|eos|>"
