"""What a tokenizer.json says, and what payload encoding needs of it: functions over the parsed file.

Protocol sections: "Security", "Recommended Token Allocation".
"""

from __future__ import annotations

import copy
import gzip
import json
import re
from collections.abc import Collection, Iterator
from importlib.resources import files
from typing import Any

import tokenizers

from smi.protocol.tokens import StructuralIds, settled_slots, slot_tokens

WORLD_ROWS = 65536
_WORLD_EOS = "<|endoftext|>"
_FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}

# the character that byte-level vocabularies write for a byte: itself where visible, else one from U+0100 on
_VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = [byte for byte in range(256) if byte not in _VISIBLE]
_CHAR_OF_BYTE = {byte: chr(byte) for byte in _VISIBLE} | {byte: chr(256 + n) for n, byte in enumerate(_HIDDEN)}
# the same back, as Latin-1; what no byte is written as goes where Latin-1 cannot follow
_LATIN_OF_CHAR = dict.fromkeys(_HIDDEN, "\uffff") | {ord(char): chr(byte) for byte, char in _CHAR_OF_BYTE.items()}


def vocabulary(document: dict[str, Any]) -> dict[str, int]:
    """Piece -> id of the model inside a tokenizer.json, added tokens aside; ValueError if it holds none."""
    model = document.get("model")
    pieces = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(pieces, list):
        return {piece: id for id, (piece, _) in enumerate(pieces)}
    if isinstance(pieces, dict):
        return pieces
    raise ValueError("tokenizer.json holds no model with a vocabulary")


def install(
    document: dict[str, Any], slots: int, sequence_tokens: bool = False
) -> tuple[dict[str, Any], StructuralIds]:
    """A copy of a tokenizer.json with the structural tokens appended where absent, in the library's own form.

    Ids that the file gives stay, and so does its choice of slots if it has reserved ones. Raises ValueError when
    the library cannot read the file, when a structural spelling is an ordinary piece, or when ids would move on
    loading.
    """
    pieces = vocabulary(document)
    added = [dict(token) for token in document.get("added_tokens") or []]
    present = {token["content"]: token for token in added}
    rows = {*pieces.values(), *(token["id"] for token in added)}
    slots, sequence_tokens = settled_slots(present, slots, sequence_tokens)
    names = slot_tokens(slots, sequence_tokens)
    free = max(rows, default=-1) + 1
    for name in names:
        if name in present:
            present[name].update(_FLAGS)
        elif name in pieces:
            raise ValueError(f"{name} is an ordinary piece of this vocabulary; it cannot also be structural")
        else:
            added.append({"id": free, "content": name, **_FLAGS})
            free += 1
    try:
        library = tokenizers.Tokenizer.from_str(json.dumps({**document, "added_tokens": added}))
    # the library raises nothing narrower
    except Exception as error:
        raise ValueError(f"the tokenizers library cannot read this tokenizer.json: {error}") from error
    for token in added:
        loaded = library.token_to_id(token["content"])
        if loaded != token["id"]:
            raise ValueError(
                f"tokenizer.json gives {token['content']!r} the id {token['id']}, where loading it gives "
                f"{loaded}; added tokens must follow the vocabulary without gaps"
            )
    ids = {token["content"]: token["id"] for token in added}
    return json.loads(library.to_str()), StructuralIds(tuple(ids[name] for name in names), sequence_tokens)


def _parts(part: Any) -> Iterator[dict[str, Any]]:
    """A normalizer, pre-tokenizer or decoder, with what its sequences hold."""
    if isinstance(part, dict):
        yield part
        for key in ("normalizers", "pretokenizers", "decoders"):
            for inner in part.get(key, []):
                yield from _parts(inner)


def plain_copy(document: dict[str, Any], special: Collection[int]) -> tuple[dict[str, Any], str]:
    """The tokenizer.json to encode payloads with, and the text to put before each.

    Tokens that are special, or eat the blanks beside them, are gone, and so is randomness. Whatever adds a blank by
    itself is off: it does so only where the text does not start with one, so the blank is made explicit as the
    prefix.
    """
    plain = {
        **document,
        "added_tokens": [
            token
            for token in document["added_tokens"]
            if not (token["lstrip"] or token["rstrip"] or token["id"] in special)
        ],
        "normalizer": copy.deepcopy(document["normalizer"]),
        "pre_tokenizer": copy.deepcopy(document["pre_tokenizer"]),
        "model": {**document["model"], **({"dropout": None} if "dropout" in document["model"] else {})},
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }
    prefix = ""
    for part in _parts(plain["normalizer"]):
        if part["type"] == "Prepend" and part["prepend"] == "▁":
            part["prepend"], prefix = "", " "
    for part in _parts(plain["pre_tokenizer"]):
        if part["type"] == "ByteLevel" and part["add_prefix_space"]:
            part["add_prefix_space"], prefix = False, " "
        if part["type"] == "Metaspace" and part["prepend_scheme"] != "never":
            # "first" means the first text of a sequence, and a structural token always stands before ours
            prefix = " " if part["prepend_scheme"] == "always" else prefix
            part["prepend_scheme"] = "never"
    return plain, prefix


def piece_bytes(plain: dict[str, Any], rows: int) -> list[bytes | None]:
    """The bytes that each of `rows` ids stands for, by the decoder's rules; None where it stands for none.

    Raises ValueError when the decoder is neither byte-level nor falls back to bytes: it could not be exact.
    """
    decoders = {part["type"] for part in _parts(plain["decoder"])}
    pieces: list[bytes | None] = [None] * rows
    if "ByteLevel" in decoders:
        for piece, id in vocabulary(plain).items():
            try:
                pieces[id] = piece.translate(_LATIN_OF_CHAR).encode("latin-1")
            except UnicodeEncodeError:
                pieces[id] = None
    elif plain["model"].get("byte_fallback") and "ByteFallback" in decoders:
        for piece, id in vocabulary(plain).items():
            byte = re.fullmatch(r"<0x([0-9A-F]{2})>", piece)
            pieces[id] = bytes.fromhex(byte[1]) if byte else piece.replace("▁", " ").encode()
    else:
        raise ValueError(
            "its vocabulary is neither byte-level nor falls back to bytes "
            f"(model {plain['model'].get('type')}, decoder {', '.join(sorted(decoders)) or 'none'}), "
            "so it changes text: 'a  b' or an unknown character would not come back"
        )
    for token in plain["added_tokens"]:
        pieces[token["id"]] = token["content"].encode()
    return pieces


def byte_ids(plain: dict[str, Any], pieces: list[bytes | None]) -> list[int]:
    """The id of each of the 256 single bytes; ValueError names the first that the vocabulary lacks."""
    known = vocabulary(plain)
    fallback = plain["model"].get("byte_fallback")
    ids: list[int] = []
    for byte in range(256):
        id = known.get(f"<0x{byte:02X}>" if fallback else _CHAR_OF_BYTE[byte])
        if id is None or pieces[id] != bytes([byte]):
            raise ValueError(f"its vocabulary has no text token for the byte 0x{byte:02X}: some text would be lost")
        ids.append(id)
    return ids


def is_world_form(plain: dict[str, Any]) -> bool:
    """Whether encoding is greedy longest match over the bytes of the whole text, and nothing else."""
    model, splitter = plain["model"], plain["pre_tokenizer"]
    return (
        model["type"] == "WordPiece"
        and model["continuing_subword_prefix"] == ""
        and plain["normalizer"] is None
        and splitter is not None
        and splitter["type"] == "ByteLevel"
        and not splitter["use_regex"]
        and not plain["added_tokens"]
    )


def world_files() -> tuple[dict[str, Any], dict[str, Any]]:
    """The RWKV World vocabulary as the tokenizer.json and tokenizer_config.json of public checkpoints."""
    packed = files("smi").joinpath("tokenizers", "rwkv_world", "vocabulary.gz").read_bytes()
    data = gzip.decompress(packed)
    pieces = {_WORLD_EOS: 0}
    start = 0
    # a record is: the length of the token in one byte, its bytes
    while start < len(data):
        end = start + 1 + data[start]
        pieces[data[start + 1 : end].decode("latin-1").translate(_CHAR_OF_BYTE)] = len(pieces)
        start = end
    # rows past the last token exist in every checkpoint; no byte-level text can match these spellings
    for id in range(len(pieces), WORLD_ROWS):
        pieces[f"\ue000{id}\ue001"] = id
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 0, "content": _WORLD_EOS, **_FLAGS}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level | {"add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "WordPiece",
            "unk_token": _WORLD_EOS,
            "continuing_subword_prefix": "",
            "max_input_chars_per_word": 2**31 - 1,
            "vocab": pieces,
        },
    }
    config = {
        "eos_token": _WORLD_EOS,
        "pad_token": _WORLD_EOS,
        "padding_side": "left",
        "unk_token": _WORLD_EOS,
    }
    return document, config
