"""Between streams and token ids: the secure compiler, its inverse, and the prompt for generation.

A block is its type id followed by `"\\n" + payload + "\\n"` encoded as one string with structural recognition
off; a transmission ends with the EOT id and an encoded newline. Where a payload holds spans, their ids stand between
its texts, and the newlines belong to the text beside them. The only seams are structural ids and spans, so nothing
that a payload spells can move a boundary.
Protocol sections: "Security", "Reference Serialization", "Modalities", "BOS and EOS".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import TypeAlias, cast

import numpy as np

from smi.protocol.incremental import StreamDecoder, TransmissionEnded
from smi.protocol.stream import Block, ProtocolError, Span, Stream
from smi.protocol.tokens import BlockType, PlainTokenizer, Side, TokenNamespace, check_namespaces

__all__ = ["Example", "PlainTokenizer", "decode", "encode", "encode_many", "encode_prompt", "flatten"]


@dataclass(frozen=True, eq=False)
class Example:
    """A compiled stream of T tokens.

    input_ids: int32 [T].
    loss_mask: bool [T]; True where the token is supervised as a target.
    block_types: uint8 [T]; the BlockType of each token. A type token and its payload carry the block's type,
    the EOT id and its newline EOT, the end-of-sequence id EOS.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    block_types: np.ndarray

    @property
    def supervised_tokens(self) -> int:
        """How many tokens are targets."""
        return int(self.loss_mask.sum())


def encode(
    stream: Stream,
    tokenizer: PlainTokenizer,
    *,
    complete: bool = True,
    namespaces: Sequence[TokenNamespace] = (),
) -> Example:
    """Compile a stream to ids, loss mask and block types.

    complete: append the tokenizer's EOS; it is supervised when the last transmission is the model's.
    namespaces: of the spans that payloads hold.
    Supervised are all tokens of model-side transmissions: type ids, payloads, EOT and its newline.

    Raises ProtocolError "span" (an unknown namespace, an id beyond its size), "text" (a text that the tokenizer
    would not give back exactly) and "tokenizer" (one that breaks its promise); ValueError for namespaces that
    overlap with something.
    """
    [result] = encode_many([stream], tokenizer, complete=complete, namespaces=namespaces)
    if isinstance(result, ProtocolError):
        raise result
    return result


def encode_many(
    streams: Sequence[Stream],
    tokenizer: PlainTokenizer,
    *,
    complete: bool = True,
    namespaces: Sequence[TokenNamespace] = (),
) -> list[Example | ProtocolError]:
    """Compile many streams with one call of the tokenizer; each as `encode` would, in the same order.

    A stream that `encode` refuses has the ProtocolError in its place, and the others are as if it were not there.
    Raises ValueError for namespaces that overlap with something. Batches of about a hundred conversations are
    several times as fast as one by one; larger ones gain no more and only take memory.
    """
    named = check_namespaces(namespaces, tokenizer) if namespaces else {}
    results: list[Example | ProtocolError | None] = []
    pieces: list[_Piece] = []
    # the streams that have a plan, and where their pieces begin and end
    planned: list[int] = []
    bounds = [0]
    for index, stream in enumerate(streams):
        try:
            pieces += _plan(stream, named, complete)
        except ProtocolError as error:
            results.append(error)
            continue
        results.append(None)
        planned.append(index)
        bounds.append(len(pieces))
    try:
        examples = _assemble(pieces, bounds, tokenizer)
    except ValueError as error:
        # one text spoils the whole call; only going one by one tells which
        if len(planned) > 1:
            examples = [
                encode_many([streams[index]], tokenizer, complete=complete, namespaces=namespaces)[0]
                for index in planned
            ]
        else:
            examples = [error if isinstance(error, ProtocolError) else ProtocolError("text", "", str(error))]
    for index, example in zip(planned, examples, strict=True):
        results[index] = example
    return cast("list[Example | ProtocolError]", results)


_Piece: TypeAlias = tuple[int, bool, bool, str | tuple[int, ...]]
"""(type, opens, target, part): a text to be encoded as one string, or absolute ids, and what its tokens are.

opens: whether the token of that type stands before it. Every block, EOT and EOS opens with its own; where a payload
holds spans, its further parts do not. A plain tuple: these are made by the million.
"""


def _plan(stream: Stream, namespaces: Mapping[str, TokenNamespace], complete: bool) -> list[_Piece]:
    """The stream as pieces; ProtocolError "span" with the place of the block."""
    plan: list[_Piece] = []
    target = False
    for index, transmission in enumerate(stream.transmissions):
        target = transmission.side is Side.MODEL
        for number, block in enumerate(transmission.blocks):
            if isinstance(block.payload, str):
                plan.append((block.type, True, target, f"\n{block.payload}\n"))
                continue
            parts = _framed(block, namespaces, f"transmissions[{index}].blocks[{number}]")
            plan.extend((block.type, order == 0, target, part) for order, part in enumerate(parts))
        plan.append((BlockType.EOT, True, target, "\n"))
    if complete:
        plan.append((BlockType.EOS, True, target, ""))
    return plan


def _framed(block: Block, namespaces: Mapping[str, TokenNamespace], where: str) -> Iterator[str | tuple[int, ...]]:
    """The payload between its newlines, which belong to the text beside them."""
    text = "\n"
    for part in block.parts:
        if isinstance(part, str):
            text += part
            continue
        if text:
            yield text
        text = ""
        yield _absolute(part, namespaces, where)
    yield text + "\n"


def _absolute(span: Span, namespaces: Mapping[str, TokenNamespace], where: str) -> tuple[int, ...]:
    namespace = namespaces.get(span.namespace)
    if namespace is None:
        known = ", ".join(namespaces) or "none"
        raise ProtocolError("span", where, f"no token namespace is named {span.namespace!r}; registered: {known}")
    if max(span.ids) >= namespace.size:
        raise ProtocolError(
            "span",
            where,
            f"the id {max(span.ids)} is outside {span.namespace!r}, whose ids are 0 to {namespace.size - 1}",
        )
    return tuple(namespace.first_id + id for id in span.ids)


def _assemble(
    pieces: Sequence[_Piece], bounds: Sequence[int], tokenizer: PlainTokenizer
) -> list[Example | ProtocolError]:
    """Encode pieces and put them together; stream i has the pieces `bounds[i]` to `bounds[i + 1]`.

    All streams are laid out in one row first, so that nothing here is done token by token. Raises what the
    tokenizer raises.
    """
    if not pieces:
        empty = np.empty(0, dtype=np.int32)
        return [Example(empty, empty.astype(np.bool_), empty.astype(np.uint8)) for _ in bounds[1:]]
    types, opens, targets, parts = zip(*pieces, strict=True)
    types_P, opens_P, targets_P = (np.frombuffer(bytes(row), dtype=np.uint8) for row in (types, opens, targets))
    opens_P, targets_P = opens_P.view(np.bool_), targets_P.view(np.bool_)
    if set(map(type, parts)) != {str}:
        spans = [index for index, part in enumerate(parts) if not isinstance(part, str)]
        text_T, text_bounds = _encode_flat(tokenizer, [part if isinstance(part, str) else "" for part in parts])
        rows = np.split(text_T, text_bounds[1:-1])
        for index in spans:
            rows[index] = np.array(parts[index], dtype=np.int32)
        text_T, text_bounds = flatten(rows)
    else:
        text_T, text_bounds = _encode_flat(tokenizer, parts)

    sizes_P = np.diff(text_bounds) + opens_P
    ends_P = np.cumsum(sizes_P)
    heads = (ends_P - sizes_P)[opens_P]
    input_ids = np.empty(ends_P[-1], dtype=np.int32)
    is_text = np.ones(input_ids.size, dtype=np.bool_)
    is_text[heads] = False
    structural = tokenizer.structural
    id_of_type = np.array([*structural.ids[: BlockType.EOS], tokenizer.eos_id], dtype=np.int32)
    input_ids[heads] = id_of_type[types_P[opens_P]]
    input_ids[is_text] = text_T
    loss_mask = np.repeat(targets_P, sizes_P)
    block_types = np.repeat(types_P, sizes_P)

    # the promise of the tokenizer is checked once more here, where it matters most
    leaks = _positions_of(text_T, np.array(sorted({*structural.ids, tokenizer.eos_id})))
    leaky = set(np.searchsorted(bounds, np.searchsorted(text_bounds, leaks, side="right") - 1, side="right").tolist())
    results: list[Example | ProtocolError] = []
    cuts = np.concatenate(([0], ends_P))[np.asarray(bounds)].tolist()
    for number, (start, end) in enumerate(pairwise(cuts), start=1):
        if number in leaky:
            problem = "the tokenizer produced a structural or end-of-sequence id from text"
            results.append(ProtocolError("tokenizer", "", problem))
            continue
        # copies, or one example would keep the whole batch in memory
        results.append(Example(input_ids[start:end].copy(), loss_mask[start:end].copy(), block_types[start:end].copy()))
    return results


def _encode_flat(tokenizer: PlainTokenizer, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    encode_flat = getattr(tokenizer, "encode_flat", None)
    return flatten(tokenizer.encode_batch(texts)) if encode_flat is None else encode_flat(texts)


def flatten(rows: Sequence[Sequence[int] | np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ids as one, int32 [T], and where each begins and ends in it, int64 [rows + 1]."""
    bounds = np.fromiter(accumulate(map(len, rows), initial=0), dtype=np.int64, count=len(rows) + 1)
    return np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=bounds[-1]), bounds


def _positions_of(ids: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Where in `ids` any of `wanted` stands, given in ascending order."""
    if not ids.size:
        return np.empty(0, dtype=np.int64)
    # most vocabularies have all such ids before or behind those of text: two looks then settle it
    if np.searchsorted(wanted, ids.min()) == np.searchsorted(wanted, ids.max(), side="right"):
        return np.empty(0, dtype=np.int64)
    return np.flatnonzero(np.isin(ids, wanted))


def encode_prompt(
    stream: Stream, tokenizer: PlainTokenizer, *, namespaces: Sequence[TokenNamespace] = ()
) -> np.ndarray:
    """Ids (int32 [T]) of a stream that hands over to the model, ready for generation.

    Raises ProtocolError "prompt" unless the last transmission is the runtime's, and what `encode` raises.
    """
    if not stream.transmissions or stream.transmissions[-1].side is not Side.RUNTIME:
        raise ProtocolError("prompt", "", "a prompt ends with a transmission of the runtime, such as a USR block")
    return encode(stream, tokenizer, complete=False, namespaces=namespaces).input_ids


def decode(ids: Iterable[int], tokenizer: PlainTokenizer, *, namespaces: Sequence[TokenNamespace] = ()) -> Stream:
    """The stream that compiles to these ids, byte for byte; one EOS at the very end is accepted.

    ids: whole numbers, such as a list or an integer array. namespaces: of the spans that payloads hold.
    Raises ProtocolError "unfinished" where the last transmission has no EOT or no newline behind it, and what
    `StreamDecoder.feed` raises; ValueError for namespaces that overlap with something.
    """
    decoder = StreamDecoder(tokenizer, namespaces)
    events = (event for id in ids for event in decoder.feed(id))
    transmissions = tuple(event.transmission for event in events if isinstance(event, TransmissionEnded))
    decoder.finish()
    return Stream(transmissions)
