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

import numpy as np

from smi.protocol.incremental import StreamDecoder, TransmissionEnded
from smi.protocol.stream import Block, ProtocolError, Span, Stream
from smi.protocol.tokens import BlockType, PlainTokenizer, Side, TokenNamespace, check_namespaces

__all__ = ["Example", "PlainTokenizer", "decode", "encode", "encode_many", "encode_prompt"]


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
    plan = _plan(stream, check_namespaces(namespaces, tokenizer))
    try:
        runs = [tokenizer.encode(text) for text in _texts(plan)]
        return _assemble(plan, iter(runs), tokenizer.encode("\n"), tokenizer, complete)
    except ProtocolError:
        raise
    except ValueError as error:
        raise ProtocolError("text", "", str(error)) from None


def encode_many(
    streams: Sequence[Stream],
    tokenizer: PlainTokenizer,
    *,
    complete: bool = True,
    namespaces: Sequence[TokenNamespace] = (),
) -> list[Example | ProtocolError]:
    """Compile many streams with one call of the tokenizer; each as `encode` would, in the same order.

    A stream that `encode` refuses has the ProtocolError in its place, and the others are as if it were not there.
    Raises ValueError for namespaces that overlap with something.
    """
    named = check_namespaces(namespaces, tokenizer)
    plans: list[list[_Run] | ProtocolError] = []
    texts = ["\n"]
    for stream in streams:
        try:
            plan = _plan(stream, named)
        except ProtocolError as error:
            plans.append(error)
            continue
        plans.append(plan)
        texts.extend(_texts(plan))
    try:
        newline, *encoded = tokenizer.encode_batch(texts)
    except ValueError:
        # one text spoils the whole call; only going one by one tells which
        return [_attempt(stream, tokenizer, complete, namespaces) for stream in streams]
    runs = iter(encoded)
    results: list[Example | ProtocolError] = []
    for plan in plans:
        if isinstance(plan, ProtocolError):
            results.append(plan)
            continue
        try:
            results.append(_assemble(plan, runs, newline, tokenizer, complete))
        except ProtocolError as error:
            results.append(error)
    return results


def _attempt(
    stream: Stream, tokenizer: PlainTokenizer, complete: bool, namespaces: Sequence[TokenNamespace]
) -> Example | ProtocolError:
    try:
        return encode(stream, tokenizer, complete=complete, namespaces=namespaces)
    except ProtocolError as error:
        return error


@dataclass(frozen=True, slots=True)
class _Run:
    """What follows one structural token: texts, each to be encoded as one string, and absolute ids.

    EOT has no parts: its newline is the same everywhere.
    """

    type: BlockType
    target: bool
    parts: tuple[str | tuple[int, ...], ...] = ()


def _plan(stream: Stream, namespaces: Mapping[str, TokenNamespace]) -> list[_Run]:
    """The stream as runs; ProtocolError "span" with the place of the block."""
    plan: list[_Run] = []
    for index, transmission in enumerate(stream.transmissions):
        target = transmission.side is Side.MODEL
        for number, block in enumerate(transmission.blocks):
            place = f"transmissions[{index}].blocks[{number}]"
            plan.append(_Run(block.type, target, tuple(_framed(block, namespaces, place))))
        plan.append(_Run(BlockType.EOT, target))
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


def _texts(plan: list[_Run]) -> Iterator[str]:
    """The texts that `_assemble` wants the ids of, in its order."""
    return (part for run in plan for part in run.parts if isinstance(part, str))


def _assemble(
    plan: list[_Run], texts: Iterator[list[int]], newline: list[int], tokenizer: PlainTokenizer, complete: bool
) -> Example:
    """Put a plan and the ids of its texts together. Takes all its texts, also where it raises."""
    structural = tokenizer.structural
    ids: list[int] = []
    starts: list[int] = []
    for run in plan:
        starts.append(len(ids))
        ids.append(structural.id(run.type))
        for part in run.parts:
            ids.extend(next(texts) if isinstance(part, str) else part)
        if run.type is BlockType.EOT:
            ids.extend(newline)
    kinds, targets = [run.type for run in plan], [run.target for run in plan]
    if complete:
        starts.append(len(ids))
        ids.append(tokenizer.eos_id)
        kinds.append(BlockType.EOS)
        targets.append(bool(plan) and plan[-1].target)
    input_ids = np.array(ids, dtype=np.int32)
    # the promise of the tokenizer is checked once more here, where it matters most
    if np.isin(input_ids, [*structural.ids, tokenizer.eos_id]).sum() != len(starts):
        raise ProtocolError("tokenizer", "", "the tokenizer produced a structural or end-of-sequence id from text")
    lengths = np.diff([*starts, len(ids)])
    return Example(
        input_ids=input_ids,
        loss_mask=np.repeat(np.array(targets, dtype=np.bool_), lengths),
        block_types=np.repeat(np.array(kinds, dtype=np.uint8), lengths),
    )


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
