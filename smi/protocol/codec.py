"""Between streams and token ids: the secure compiler, its inverse, and the prompt for generation.

A block is its type id followed by `"\\n" + payload + "\\n"` encoded as one string with structural recognition
off; a transmission ends with the EOT id and an encoded newline. The only seams are structural ids, so nothing
that a payload spells can move a boundary.
Protocol sections: "Security", "Reference Serialization", "BOS and EOS".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from smi.protocol.stream import Block, ProtocolError, Stream, Transmission
from smi.protocol.tokens import BlockType, Side, StructuralIds


class PlainTokenizer(Protocol):
    """What the codec asks of a tokenizer: text in, text ids out, losslessly, and never a special id."""

    @property
    def structural(self) -> StructuralIds:
        """The ids of the structural slots."""
        ...

    @property
    def eos_id(self) -> int:
        """The tokenizer's own end-of-sequence id."""
        ...

    @property
    def vocab_size(self) -> int:
        """Rows of the vocabulary, structural rows included."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; never a structural or other special id."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The strict inverse of `encode` on text ids; ValueError where there is none."""
        ...


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


def encode(stream: Stream, tokenizer: PlainTokenizer, *, complete: bool = True) -> Example:
    """Compile a stream to ids, loss mask and block types.

    complete: append the tokenizer's EOS; it is supervised when the last transmission is the model's.
    Supervised are all tokens of model-side transmissions: type ids, payloads, EOT and its newline.
    """
    structural = tokenizer.structural
    newline = tokenizer.encode("\n")
    ids: list[int] = []
    runs: list[tuple[BlockType, bool, int]] = []
    target = False
    for transmission in stream.transmissions:
        target = transmission.side is Side.MODEL
        for block in transmission.blocks:
            tokens = tokenizer.encode(f"\n{block.payload}\n")
            ids.append(structural.id(block.type))
            ids.extend(tokens)
            runs.append((block.type, target, len(tokens) + 1))
        ids.append(structural.eot)
        ids.extend(newline)
        runs.append((BlockType.EOT, target, len(newline) + 1))
    inserted = len(runs)
    if complete:
        ids.append(tokenizer.eos_id)
        runs.append((BlockType.EOS, target, 1))
    input_ids = np.array(ids, dtype=np.int32)
    # the promise of the tokenizer is checked once more here, where it matters most
    if np.isin(input_ids, structural.ids).sum() != inserted or (input_ids == tokenizer.eos_id).sum() != complete:
        raise ProtocolError("tokenizer", "", "the tokenizer produced a structural or end-of-sequence id from text")
    lengths = [length for _, _, length in runs]
    return Example(
        input_ids=input_ids,
        loss_mask=np.repeat(np.array([target for _, target, _ in runs], dtype=np.bool_), lengths),
        block_types=np.repeat(np.array([kind for kind, _, _ in runs], dtype=np.uint8), lengths),
    )


def encode_prompt(stream: Stream, tokenizer: PlainTokenizer) -> np.ndarray:
    """Ids (int32 [T]) of a stream that hands over to the model, ready for generation.

    Raises ProtocolError "prompt" unless the last transmission is the runtime's.
    """
    if not stream.transmissions or stream.transmissions[-1].side is not Side.RUNTIME:
        raise ProtocolError("prompt", "", "a prompt ends with a transmission of the runtime, such as a USR block")
    return encode(stream, tokenizer, complete=False).input_ids


def decode(ids: Iterable[int], tokenizer: PlainTokenizer) -> Stream:
    """The stream that compiles to these ids, byte for byte; one EOS at the very end is accepted.

    ids: whole numbers, such as a list or an integer array.
    Raises ProtocolError: "unfinished" (no EOT at the end), "outside_block" (text before the first block or
    after an EOT), "framing" (a payload without its newlines), "text" (ids that are no text), "eos" (tokens
    after EOS), and the reasons of the grammar.
    """
    transmissions: list[Transmission] = []
    blocks: list[Block] = []
    for kind, tokens, position in _runs(ids, tokenizer):
        where = f"ids[{position}]"
        try:
            text = tokenizer.decode(tokens)
        except ValueError as error:
            raise ProtocolError("text", where, f"the ids after {kind.token} are no text: {error}") from None
        if kind is BlockType.EOT:
            if text != "\n":
                raise ProtocolError("outside_block", where, f"expected one newline after <|eot|>, got {text[:40]!r}")
            transmissions.append(Transmission(tuple(blocks)))
            blocks = []
        elif len(text) < 2 or text[0] != "\n" or text[-1] != "\n":
            raise ProtocolError(
                "framing", where, f"a payload starts and ends with a newline of its own, got {text[:40]!r}"
            )
        else:
            blocks.append(Block(kind, text[1:-1]))
    if blocks:
        raise ProtocolError("unfinished", "", f"the ids end inside a transmission, after {blocks[-1].type.token}")
    return Stream(tuple(transmissions))


def _runs(ids: Iterable[int], tokenizer: PlainTokenizer) -> Iterator[tuple[BlockType, list[int], int]]:
    """Cut ids at structural ids: (type, the ids after it, position of the type id)."""
    kind: BlockType | None = None
    start = 0
    tokens: list[int] = []
    ended = False
    for position, token in enumerate(map(int, ids)):
        if ended:
            raise ProtocolError("eos", f"ids[{position}]", "tokens after the end of the sequence")
        opened = tokenizer.structural.type_of(token)
        ended = token == tokenizer.eos_id
        if not ended and opened is None:
            if kind is None:
                raise ProtocolError("outside_block", f"ids[{position}]", "text before the first block")
            tokens.append(token)
            continue
        if kind is not None:
            yield kind, tokens, start
        kind, tokens, start = opened, [], position
    if kind is not None:
        yield kind, tokens, start
