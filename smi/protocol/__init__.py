"""The State Model Interface protocol: streams, payloads and their secure encoding. No torch, no I/O."""

from smi.protocol.codec import Example, PlainTokenizer, decode, encode, encode_many, encode_prompt
from smi.protocol.conversation import Conversation, to_stream
from smi.protocol.incremental import StreamDecoder
from smi.protocol.payloads import Action, dumps, loads, parse_act
from smi.protocol.stream import Block, Payload, ProtocolError, Span, Stream, Transmission
from smi.protocol.tokens import (
    STRUCTURAL_TOKENS,
    BlockType,
    Side,
    StructuralIds,
    TokenNamespace,
    install_structural_tokens,
)

__all__ = [
    "STRUCTURAL_TOKENS",
    "Action",
    "Block",
    "BlockType",
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
    "decode",
    "dumps",
    "encode",
    "encode_many",
    "encode_prompt",
    "install_structural_tokens",
    "loads",
    "parse_act",
    "to_stream",
]
