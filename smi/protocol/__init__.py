"""The State Model Interface protocol: streams, payloads and their secure encoding. No torch, no I/O."""

from smi.protocol.codec import Example, PlainTokenizer, decode, encode, encode_many, encode_prompt
from smi.protocol.control import derive_ctrl
from smi.protocol.conversation import Conversation, to_stream
from smi.protocol.incremental import StreamDecoder
from smi.protocol.json_text import dumps, loads
from smi.protocol.payloads import Action, Capabilities, declare, parse_act
from smi.protocol.stream import Block, Payload, ProtocolError, Span, Stream, Transmission
from smi.protocol.tokens import (
    STRUCTURAL_TOKENS,
    BlockType,
    Side,
    StructuralIds,
    TokenNamespace,
    install_structural_tokens,
)
from smi.protocol.transcript import from_stream

__all__ = [
    "STRUCTURAL_TOKENS",
    "Action",
    "Block",
    "BlockType",
    "Capabilities",
    "Conversation",
    "Example",
    "Payload",
    "PlainTokenizer",
    "ProtocolError",
    "Side",
    "Span",
    "Stream",
    "StreamDecoder",
    "StructuralIds",
    "TokenNamespace",
    "Transmission",
    "declare",
    "decode",
    "derive_ctrl",
    "dumps",
    "encode",
    "encode_many",
    "encode_prompt",
    "from_stream",
    "install_structural_tokens",
    "loads",
    "parse_act",
    "to_stream",
]
