"""A stream as a tree, and the grammar that every one of its parts is checked against when it is made.

    STREAM := TRANSMISSION*    TRANSMISSION := BLOCK+ EOT    BLOCK := TYPE PAYLOAD

Protocol sections: "Core Stream Model", "Runtime and Model Transmissions".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from smi.protocol.tokens import BlockType, Side


class ProtocolError(ValueError):
    """Something the protocol does not allow.

    reason: a short snake_case code that callers may count by, such as "role" or "undeclared_tool".
    where: the place, such as "messages[3].tool_calls[0]"; empty when there is only one.
    message: what was wrong and what to do about it.
    """

    def __init__(self, reason: str, where: str, message: str) -> None:
        # all three go to args, so that the error survives pickling between worker processes
        super().__init__(reason, where, message)
        self.reason = reason
        self.where = where
        self.message = message

    def __str__(self) -> str:
        return f"{self.where}: {self.message} [{self.reason}]" if self.where else f"{self.message} [{self.reason}]"


def check_text(text: object, where: str) -> str:
    """Hand `text` back if it is a str that UTF-8 can carry; ProtocolError "text" otherwise."""
    if not isinstance(text, str):
        raise ProtocolError("text", where, f"expected text, got {type(text).__name__}")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ProtocolError(
                "text",
                where,
                f"lone surrogate U+{ord(text[error.start]):04X} at character {error.start}; "
                "text must be valid Unicode, repair or drop it at its source",
            ) from None
    return text


@dataclass(frozen=True, slots=True)
class Span:
    """A run of ids of one modality: image codes, audio codes, action bins.

    namespace: the name of the `TokenNamespace` they belong to.
    ids: relative to it, 0 to size - 1; the codec adds its first id and checks the range.

    Raises ProtocolError "span" for a name or ids that cannot be right in any namespace, or no ids at all.
    """

    namespace: str
    ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.namespace, str) or not self.namespace:
            raise ProtocolError("span", "", f"a span names its namespace, got {self.namespace!r}")
        if not isinstance(self.ids, tuple) or any(type(id) is not int or id < 0 for id in self.ids):
            raise ProtocolError("span", self.namespace, "ids must be a tuple of whole numbers from 0 up")
        if not self.ids:
            raise ProtocolError("span", self.namespace, "a span without ids says nothing; leave it out")


Payload: TypeAlias = str | tuple[str | Span, ...]
"""What a block holds: text, or text parts and spans in causal order."""


def _joined(parts: Iterable[object], where: str) -> Payload:
    """Parts in the one form they have: neighbours of a kind joined, empty text gone, a str if all is text."""
    runs: list[tuple[str | None, list]] = []
    for index, part in enumerate(parts):
        if isinstance(part, Span):
            name, items = part.namespace, part.ids
        else:
            name, items = None, [check_text(part, f"{where}[{index}]")]
        if items == [""]:
            continue
        if not runs or runs[-1][0] != name:
            runs.append((name, []))
        runs[-1][1].extend(items)
    made = tuple("".join(items) if name is None else Span(name, tuple(items)) for name, items in runs)
    if all(isinstance(part, str) for part in made):
        return "".join(part for part in made if isinstance(part, str))
    return made


@dataclass(frozen=True, slots=True)
class Block:
    """One typed block. `payload` is what stands between the newlines that the serialisation adds.

    payload: text, or a tuple of text parts and spans. Such a tuple is brought to one form: neighbouring texts are
    joined, and so are neighbouring spans of one namespace, since nothing on the wire tells them apart; empty
    texts go; and where no span is left, the payload is a str.

    Raises ProtocolError "block_type" for EOT / EOS and "text" for a payload that is not valid Unicode.
    Protocol sections: "Core Stream Model", "Modalities".
    """

    type: BlockType
    payload: Payload

    def __post_init__(self) -> None:
        kind, payload = self.type, self.payload
        if type(kind) is not BlockType or kind >= BlockType.EOT:
            raise ProtocolError("block_type", "", f"{kind!r} cannot open a block")
        if type(payload) is str and payload.isascii():
            return
        if isinstance(payload, tuple):
            object.__setattr__(self, "payload", _joined(payload, kind.token))
        else:
            check_text(payload, kind.token)

    @property
    def text(self) -> str:
        """The payload of a block that holds text alone; ProtocolError "text" where it holds spans."""
        if isinstance(self.payload, str):
            return self.payload
        raise ProtocolError("text", self.type.token, "the payload holds token spans, where only text is expected")

    @property
    def parts(self) -> tuple[str | Span, ...]:
        """The payload as parts, whatever it is; none for an empty one."""
        if isinstance(self.payload, str):
            return (self.payload,) if self.payload else ()
        return self.payload


# the header of a runtime transmission comes in the order of the types; USR and OBS follow as they came
# by the value of the type; a dictionary would call the hash of an enum, which runs in Python
_RANK = tuple(min(block, BlockType.USR) for block in BlockType if block < BlockType.THINK)


def in_order(before: BlockType, after: BlockType) -> bool:
    """Whether `after` may follow `before` within one transmission; both must be of the same side."""
    return before >= BlockType.THINK or _RANK[before] <= _RANK[after]


def check_follows(before: BlockType, after: BlockType, where: str) -> None:
    """Refuse `after` behind `before` within one transmission: ProtocolError "mixed_sides" or "order"."""
    if before.side is not after.side:
        raise ProtocolError("mixed_sides", where, f"{after.token} cannot follow {before.token} without an EOT")
    if not in_order(before, after):
        raise ProtocolError("order", where, f"{after.token} must stand before {before.token} in a transmission")


@dataclass(frozen=True, slots=True)
class Transmission:
    """One or more blocks of one side; the EOT that ends it is implied.

    Raises ProtocolError "empty_transmission", "mixed_sides", or "order" where a runtime block stands before
    one that the protocol puts first (CTRL, SYS, DEV, CAPS, then USR and OBS as they came).
    """

    blocks: tuple[Block, ...]

    def __post_init__(self) -> None:
        if not self.blocks:
            raise ProtocolError("empty_transmission", "", "a transmission holds at least one block")
        for index, (before, after) in enumerate(pairwise(self.blocks), start=1):
            check_follows(before.type, after.type, f"blocks[{index}]")

    @property
    def side(self) -> Side:
        """The side that wrote it."""
        return self.blocks[0].type.side


@dataclass(frozen=True, slots=True)
class Stream:
    """Transmissions in causal order. Two of the same side may follow each other: EOT only synchronises."""

    transmissions: tuple[Transmission, ...]
