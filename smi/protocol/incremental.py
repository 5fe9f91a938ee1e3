"""Reading a stream as its ids arrive: every id gives the events it completes, and none is given twice.

Protocol sections: "Core Stream Model", "End of Transmission", "Runtime and Model Transmissions", "Modalities".
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from smi.protocol.stream import Block, ProtocolError, Span, Transmission, check_follows
from smi.protocol.tokens import BlockType, PlainTokenizer, TokenNamespace, check_namespaces


@dataclass(frozen=True, slots=True)
class BlockOpened:
    """A type token was read; `type.side` may write here."""

    type: BlockType


@dataclass(frozen=True, slots=True)
class PayloadText:
    """More text of the open block: whole characters, and never the newlines that frame the payload."""

    text: str


@dataclass(frozen=True, slots=True)
class PayloadSpan:
    """One more id of a modality, as a span of one; its neighbours in the block continue it."""

    span: Span


@dataclass(frozen=True, slots=True)
class BlockClosed:
    """The open block is complete: the texts and spans since `BlockOpened`, together."""

    block: Block


@dataclass(frozen=True, slots=True)
class TransmissionEnded:
    """EOT was read: the side hands over, and what it wrote may be acted on."""

    transmission: Transmission


@dataclass(frozen=True, slots=True)
class SequenceEnded:
    """The tokenizer's end of sequence was read; nothing may follow."""


Event: TypeAlias = BlockOpened | PayloadText | PayloadSpan | BlockClosed | TransmissionEnded | SequenceEnded


class StreamDecoder:
    """Turns ids, fed one at a time, into events.

    Text is handed on as soon as it is certain: bytes of a character wait for the rest of it, and a newline waits
    for what follows, since the last one before the next structural token is the frame's and not the payload's.
    EOT hands over at once; the newline behind it must be the next text.

    A stream may stop anywhere. Events already given stay true, but the block that was open has no `BlockClosed`
    and its transmission no `TransmissionEnded`: nothing of it may be executed. `finish` tells whether it stopped
    at a boundary.
    """

    def __init__(self, tokenizer: PlainTokenizer, namespaces: Sequence[TokenNamespace] = ()) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._structural = tokenizer.structural
        self._eos_id = tokenizer.eos_id
        self._namespaces = tuple(check_namespaces(namespaces, tokenizer).values())
        # some tokenizers put a blank before every text; it is no part of it
        newline = b"".join(self._token_bytes(id) or b"" for id in tokenizer.encode("\n"))
        self._blank = newline.removesuffix(b"\n")
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._head: bytes | None = b""

        self._position = -1
        self._error: ProtocolError | None = None
        self._ended = False
        # the structural token that was read last, and what stood behind it
        self._kind: BlockType | None = None
        self._framed = False
        self._newline = ""
        self._parts: list[str | Span] = []
        self._blocks: list[Block] = []

    def feed(self, id: int) -> list[Event]:
        """The events that one more id completes, in order; often none.

        Raises ProtocolError with the position of the id: "mixed_sides", "order" and "empty_transmission" as for
        `Transmission`, "outside_block" (content before the first block or behind an EOT), "framing" (a payload
        without its newlines), "text" (an id or bytes that are no text), "unfinished" (EOS before EOT) and "eos"
        (ids behind EOS). A decoder that has raised raises the same again.
        """
        if self._error is not None:
            raise self._error
        self._position += 1
        try:
            return self._read(int(id))
        except ProtocolError as error:
            self._error = error
            raise

    def finish(self) -> None:
        """Say that no more ids come; ProtocolError "unfinished" unless the last transmission is complete."""
        if self._error is not None:
            raise self._error
        if self._ended or self._kind is None:
            return
        if self._kind is not BlockType.EOT:
            raise ProtocolError("unfinished", "", f"the ids end inside a {self._kind.token} block, before its EOT")
        if not self._newline:
            raise ProtocolError("unfinished", "", "the ids end at an EOT without the newline behind it")

    def _refusal(self, reason: str, message: str) -> ProtocolError:
        return ProtocolError(reason, f"ids[{self._position}]", message)

    def _read(self, id: int) -> list[Event]:
        if self._ended:
            raise self._refusal("eos", "tokens after the end of the sequence")
        if id == self._eos_id:
            if self._kind not in (None, BlockType.EOT):
                raise self._refusal(
                    "unfinished", f"the sequence ends inside a {self._kind.token} block, before its EOT"
                )
            self._close()
            self._ended = True
            return [SequenceEnded()]
        opened = self._structural.type_of(id)
        if opened is not None:
            return [*self._close(), *self._open(opened)]
        if self._kind is None:
            raise self._refusal("outside_block", f"the id {id} before the first block")
        data = self._token_bytes(id)
        if data is not None:
            return self._text(self._characters(data))
        for namespace in self._namespaces:
            if id in namespace.ids:
                return self._span(Span(namespace.name, (id - namespace.first_id,)))
        raise self._refusal("text", f"the id {id} stands for no text and belongs to no token namespace")

    def _characters(self, data: bytes, final: bool = False) -> str:
        """What is certain once these bytes of a run of text were read; `final` ends the run."""
        if self._head is not None:
            data = self._head + data
            if not final and len(data) < len(self._blank):
                self._head = data
                return ""
            data = data.removeprefix(self._blank)
        self._head = b"" if final else None
        try:
            return self._utf8.decode(data, final)
        except UnicodeDecodeError as error:
            raise self._refusal("text", f"the ids are no text: {error}") from None

    def _text(self, text: str) -> list[Event]:
        if not text:
            return []
        if self._kind is BlockType.EOT:
            self._newline += text
            if self._newline != "\n":
                raise self._refusal("outside_block", f"expected one newline after <|eot|>, got {self._newline[:40]!r}")
            return []
        if not self._framed:
            if text[0] != "\n":
                raise self._refusal("framing", f"a payload starts with a newline of its own, got {text[:40]!r}")
            self._framed, text = True, text[1:]
        text = self._newline + text
        self._newline = "\n" if text.endswith("\n") else ""
        return self._payload(text.removesuffix("\n"))

    def _payload(self, text: str) -> list[Event]:
        if not text:
            return []
        self._parts.append(text)
        return [PayloadText(text)]

    def _span(self, span: Span) -> list[Event]:
        events = self._text(self._characters(b"", final=True))
        if self._kind is BlockType.EOT:
            raise self._refusal("outside_block", f"an id of {span.namespace!r} after <|eot|>")
        if not self._framed:
            raise self._refusal(
                "framing", f"a payload starts with a newline of its own, got an id of {span.namespace!r}"
            )
        events += self._payload(self._newline)
        self._newline = ""
        self._parts.append(span)
        return [*events, PayloadSpan(span)]

    def _close(self) -> list[Event]:
        """End what stands behind the last structural token."""
        if self._kind is None:
            return []
        events = self._text(self._characters(b"", final=True))
        if self._kind is BlockType.EOT:
            if not self._newline:
                raise self._refusal("outside_block", "expected one newline after <|eot|>")
            return events
        if not self._framed or not self._newline:
            raise self._refusal("framing", f"a {self._kind.token} payload starts and ends with a newline of its own")
        block = Block(self._kind, tuple(self._parts))
        self._blocks.append(block)
        return [*events, BlockClosed(block)]

    def _open(self, kind: BlockType) -> list[Event]:
        self._framed, self._newline, self._parts = False, "", []
        self._kind = kind
        if kind is not BlockType.EOT:
            if self._blocks:
                check_follows(self._blocks[-1].type, kind, f"ids[{self._position}]")
            return [BlockOpened(kind)]
        if not self._blocks:
            raise self._refusal("empty_transmission", "an EOT without a block before it")
        transmission = Transmission(tuple(self._blocks))
        self._blocks = []
        return [TransmissionEnded(transmission)]
