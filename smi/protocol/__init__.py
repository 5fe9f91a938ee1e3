"""The State Model Interface protocol: streams, payloads and their secure encoding. No torch, no I/O."""

from smi.protocol.codec import Example, PlainTokenizer, decode, encode, encode_prompt
from smi.protocol.conversation import Conversation, to_stream
from smi.protocol.payloads import Action, dumps, loads, parse_act
from smi.protocol.stream import Block, ProtocolError, Stream, Transmission
from smi.protocol.tokens import STRUCTURAL_TOKENS, BlockType, Side, StructuralIds, install_structural_tokens

__all__ = [
    "STRUCTURAL_TOKENS",
    "Action",
    "Block",
    "BlockType",
    "Conversation",
    "Example",
    "PlainTokenizer",
    "ProtocolError",
    "Side",
    "Stream",
    "StructuralIds",
    "Transmission",
    "decode",
    "dumps",
    "encode",
    "encode_prompt",
    "install_structural_tokens",
    "loads",
    "parse_act",
    "to_stream",
]
