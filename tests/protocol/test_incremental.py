import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import AUDIO, NAMESPACES, VISION, streams

from smi.protocol import (
    Block,
    BlockType,
    ProtocolError,
    Span,
    Stream,
    StreamDecoder,
    StructuralIds,
    Transmission,
    decode,
    encode,
)
from smi.protocol.incremental import (
    BlockClosed,
    BlockOpened,
    Event,
    PayloadSpan,
    PayloadText,
    SequenceEnded,
    TransmissionEnded,
)
from smi.tokenizer import Tokenizer


class Cuts:
    """A tokenizer whose tokens are the bytes of a text, cut wherever `lengths` says, inside characters too."""

    structural = StructuralIds(tuple(range(10)))
    eos_id = 10
    vocab_size = 90_000

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = itertools.cycle(lengths)
        self.pieces: list[bytes] = []

    def encode(self, text: str) -> list[int]:
        data, ids = text.encode(), []
        while data:
            length = next(self.lengths)
            self.pieces.append(data[:length])
            data = data[length:]
            ids.append(10 + len(self.pieces))
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def token_bytes(self, id: int) -> bytes | None:
        return self.pieces[id - 11] if 11 <= id < 11 + len(self.pieces) else None

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.pieces[id - 11] for id in ids).decode()


def merged(events: Sequence[Event]) -> list[Event]:
    """The events with neighbouring texts, and neighbouring spans of a namespace, put together."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, PayloadText) and isinstance(last, PayloadText):
            result[-1] = PayloadText(last.text + event.text)
        elif isinstance(event, PayloadSpan) and isinstance(last, PayloadSpan):
            joined = Block(BlockType.USR, (last.span, event.span)).parts
            result[-1:] = [PayloadSpan(part) for part in joined if isinstance(part, Span)]
        else:
            result.append(event)
    return result


def expected(stream: Stream, complete: bool) -> Iterator[Event]:
    for transmission in stream.transmissions:
        for block in transmission.blocks:
            yield BlockOpened(block.type)
            for part in block.parts:
                yield PayloadText(part) if isinstance(part, str) else PayloadSpan(part)
            yield BlockClosed(block)
        yield TransmissionEnded(transmission)
    if complete:
        yield SequenceEnded()


def feed(ids: Sequence[int], tokenizer) -> tuple[StreamDecoder, list[Event]]:
    decoder = StreamDecoder(tokenizer, NAMESPACES)
    return decoder, [event for id in ids for event in decoder.feed(id)]


@given(stream=streams(), lengths=st.lists(st.integers(1, 7), min_size=1, max_size=9), complete=st.booleans())
def test_events_are_the_stream_wherever_tokens_are_cut(stream: Stream, lengths: list[int], complete: bool) -> None:
    tokenizer = Cuts(lengths)
    ids = encode(stream, tokenizer, complete=complete, namespaces=NAMESPACES).input_ids.tolist()
    decoder, events = feed(ids, tokenizer)
    decoder.finish()
    assert merged(events) == list(expected(stream, complete))
    assert all(event.text for event in events if isinstance(event, PayloadText))
    assert decode(ids, tokenizer, namespaces=NAMESPACES) == stream


@given(stream=streams(), name=st.sampled_from(["world", "t1", "byte_bpe_prefix", "llama_bpe", "unigram"]))
def test_events_of_every_family(stream: Stream, name: str, family: dict[str, Tokenizer]) -> None:
    ids = encode(stream, family[name], namespaces=NAMESPACES).input_ids
    decoder, events = feed(ids.tolist(), family[name])
    decoder.finish()
    assert merged(events) == list(expected(stream, complete=True))


@pytest.mark.parametrize("payload", ["\né😀\n", "\n\n\r\n", "漢字 "])
def test_every_split_of_a_payload(payload: str) -> None:
    stream = Stream((Transmission((Block(BlockType.OUT, payload),)),))
    size = len(f"\n{payload}\n".encode())
    for cuts in itertools.product([False, True], repeat=size - 1):
        edges = [0, *(place for place, cut in enumerate(cuts, start=1) if cut), size]
        tokenizer = Cuts([b - a for a, b in itertools.pairwise(edges)])
        tokens = tokenizer.encode(f"\n{payload}\n")
        assert len(tokens) == len(edges) - 1
        newline = tokenizer.encode("\n")
        decoder, events = feed([7, *tokens, 9, *newline], tokenizer)
        decoder.finish()
        assert merged(events) == list(expected(stream, complete=False))


@given(stream=streams(), lengths=st.lists(st.integers(1, 5), min_size=1, max_size=5), data=st.data())
def test_an_unfinished_stream_keeps_what_was_complete(stream: Stream, lengths: list[int], data: st.DataObject) -> None:
    tokenizer = Cuts(lengths)
    ids = encode(stream, tokenizer, complete=False, namespaces=NAMESPACES).input_ids.tolist()
    cut = data.draw(st.integers(0, len(ids)))
    decoder, events = feed(ids[:cut], tokenizer)
    # the rest of the ids gives the rest of the events
    rest = [event for id in ids[cut:] for event in decoder.feed(id)]
    assert merged([*events, *rest]) == list(expected(stream, complete=False))

    decoder, again = feed(ids[:cut], tokenizer)
    assert again == events
    ended = tuple(event.transmission for event in events if isinstance(event, TransmissionEnded))
    assert ended == stream.transmissions[: len(ended)]
    # behind every EOT stands one token of a newline
    ends = [0, *(place + 2 for place, id in enumerate(ids) if id == tokenizer.structural.eot)]
    if cut in ends:
        decoder.finish()
        assert decode(ids[:cut], tokenizer, namespaces=NAMESPACES) == Stream(ended)
    else:
        with pytest.raises(ProtocolError, match=r"\[unfinished\]"):
            decoder.finish()
        with pytest.raises(ProtocolError, match=r"\[unfinished\]"):
            decode(ids[:cut], tokenizer, namespaces=NAMESPACES)


def whole(ids: Sequence[int], tokenizer: Tokenizer) -> Stream | None:
    """A second reading of ids, by cutting the whole at its structural ids; None where it is no stream."""
    if ids and ids[-1] == tokenizer.eos_id:
        ids = ids[:-1]
    runs: list[tuple[BlockType, list[int]]] = []
    for id in ids:
        kind = tokenizer.structural.type_of(id)
        if kind is not None:
            runs.append((kind, []))
        elif not runs:
            return None
        else:
            runs[-1][1].append(id)
    transmissions, blocks = [], []
    try:
        for kind, tokens in runs:
            parts = list(parts_of(tokens, tokenizer))
            if kind is BlockType.EOT:
                if parts != ["\n"]:
                    return None
                transmissions.append(Transmission(tuple(blocks)))
                blocks = []
                continue
            first, last = parts[0], parts[-1]
            if not isinstance(first, str) or not isinstance(last, str) or first[0] != "\n" or last[-1] != "\n":
                return None
            if len(parts) == 1 and len(first) < 2:
                return None
            parts[0] = first[1:]
            parts[-1] = parts[-1][:-1]
            blocks.append(Block(kind, tuple(parts)))
    except (ValueError, IndexError):
        return None
    return None if blocks else Stream(tuple(transmissions))


def parts_of(tokens: Sequence[int], tokenizer: Tokenizer) -> Iterator[str | Span]:
    def home(id: int) -> str:
        return next((one.name for one in NAMESPACES if id in one.ids), "")

    for name, run in itertools.groupby(tokens, home):
        if name:
            first = next(one.first_id for one in NAMESPACES if one.name == name)
            yield Span(name, tuple(id - first for id in run))
        else:
            text = tokenizer.decode(list(run))
            if text:
                yield text


@given(data=st.data(), name=st.sampled_from(["world", "llama_bpe"]))
def test_incremental_equals_whole_on_any_ids(data: st.DataObject, name: str, family: dict[str, Tokenizer]) -> None:
    tokenizer = family[name]
    id_of, newline = tokenizer.structural.id, tokenizer.encode("\n")
    bits = [
        [id_of(BlockType.USR), *newline],
        [id_of(BlockType.OUT), *newline],
        [id_of(BlockType.SYS), *tokenizer.encode("\nx\n")],
        [*newline, tokenizer.structural.eot, *newline],
        [tokenizer.structural.eot, *newline],
        [tokenizer.structural.eot],
        newline,
        tokenizer.encode("é "),
        tokenizer.encode("😀")[-1:],
        [VISION.first_id],
        [AUDIO.first_id, AUDIO.first_id + 15],
        [tokenizer.eos_id],
        [99_999],
    ]
    usual = st.sampled_from([*bits[:5], *bits[6:8], *bits[9:11]])
    chosen = data.draw(st.lists(st.one_of(usual, usual, usual, st.sampled_from(bits)), max_size=9))
    ids = [id for bit in chosen for id in bit]
    try:
        got = decode(ids, tokenizer, namespaces=NAMESPACES)
    except ProtocolError:
        got = None
    assert got == whole(ids, tokenizer)
    if got is not None:
        again = encode(got, tokenizer, namespaces=NAMESPACES)
        assert decode(again.input_ids, tokenizer, namespaces=NAMESPACES) == got


def test_text_is_handed_on_as_it_becomes_certain(world: Tokenizer) -> None:
    decoder = StreamDecoder(world)
    out, eot = world.structural.id(BlockType.OUT), world.structural.eot
    face = world.encode("\U000f0000")
    assert len(face) == 4
    assert decoder.feed(out) == [BlockOpened(BlockType.OUT)]
    assert decoder.feed(world.encode("\n")[0]) == []
    assert [decoder.feed(id) for id in face] == [[], [], [], [PayloadText("\U000f0000")]]
    # this newline may be the last of the payload or the frame's
    assert decoder.feed(world.encode("\n")[0]) == []
    assert decoder.feed(world.encode("a")[0]) == [PayloadText("\na")]
    assert decoder.feed(world.encode("\n")[0]) == []
    block = Block(BlockType.OUT, "\U000f0000\na")
    assert decoder.feed(eot) == [BlockClosed(block), TransmissionEnded(Transmission((block,)))]
    with pytest.raises(ProtocolError, match=r"without the newline .*\[unfinished\]"):
        decoder.finish()
    assert decoder.feed(world.encode("\n")[0]) == []
    decoder.finish()
    assert decoder.feed(world.eos_id) == [SequenceEnded()]
    decoder.finish()


def test_a_refusal_comes_at_once_and_stays(world: Tokenizer) -> None:
    id_of, frame = world.structural.id, world.encode("\nx\n")
    for ids, reason in [
        ([id_of(BlockType.USR), *frame, id_of(BlockType.OUT)], "mixed_sides"),
        ([id_of(BlockType.ACT), *frame, id_of(BlockType.OBS)], "mixed_sides"),
        ([id_of(BlockType.USR), *frame, id_of(BlockType.SYS)], "order"),
        ([id_of(BlockType.USR), *world.encode("x")], "framing"),
        ([id_of(BlockType.USR), VISION.first_id], "framing"),
        ([VISION.first_id], "outside_block"),
        ([id_of(BlockType.USR), *frame, world.structural.eot, VISION.first_id], "outside_block"),
        ([id_of(BlockType.USR), *frame, world.structural.eot, *world.encode("x")], "outside_block"),
        ([world.structural.eot], "empty_transmission"),
        ([id_of(BlockType.USR), *frame, world.eos_id], "unfinished"),
    ]:
        decoder, _ = feed(ids[:-1], world)
        for _ in range(2):
            with pytest.raises(ProtocolError) as caught:
                decoder.feed(ids[-1])
            assert (caught.value.reason, caught.value.where) == (reason, f"ids[{len(ids) - 1}]"), ids
        with pytest.raises(ProtocolError, match=rf"\[{reason}\]"):
            decoder.finish()
