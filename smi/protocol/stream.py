"""A stream as a tree, and the grammar that every one of its parts is checked against when it is made.

    STREAM := TRANSMISSION*    TRANSMISSION := BLOCK+ EOT    BLOCK := TYPE PAYLOAD

Protocol sections: "Core Stream Model", "Runtime and Model Transmissions".
"""

from __future__ import annotations

from dataclasses import dataclass

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
class Block:
    """One typed block. `payload` is the text between the newlines that the serialisation adds.

    Raises ProtocolError "block_type" for EOT / EOS and "text" for a payload that is not valid Unicode.
    """

    type: BlockType
    payload: str

    def __post_init__(self) -> None:
        if not isinstance(self.type, BlockType) or self.type >= BlockType.EOT:
            raise ProtocolError("block_type", "", f"{self.type!r} cannot open a block")
        check_text(self.payload, self.type.token)


# the header of a runtime transmission comes in this order; USR and OBS follow as they came
_RANK = {
    BlockType.CTRL: 0,
    BlockType.SYS: 1,
    BlockType.DEV: 2,
    BlockType.CAPS: 3,
    BlockType.USR: 4,
    BlockType.OBS: 4,
}


def in_order(before: BlockType, after: BlockType) -> bool:
    """Whether `after` may follow `before` within one transmission; both must be of the same side."""
    return before.side is Side.MODEL or _RANK[before] <= _RANK[after]


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
        for index, (before, after) in enumerate(zip(self.blocks, self.blocks[1:], strict=False), start=1):
            where = f"blocks[{index}]"
            if before.type.side is not after.type.side:
                raise ProtocolError(
                    "mixed_sides",
                    where,
                    f"{after.type.token} cannot follow {before.type.token} without an EOT",
                )
            if not in_order(before.type, after.type):
                raise ProtocolError(
                    "order",
                    where,
                    f"{after.type.token} must stand before {before.type.token} in a transmission",
                )

    @property
    def side(self) -> Side:
        """The side that wrote it."""
        return self.blocks[0].type.side


@dataclass(frozen=True, slots=True)
class Stream:
    """Transmissions in causal order. Two of the same side may follow each other: EOT only synchronises."""

    transmissions: tuple[Transmission, ...]
