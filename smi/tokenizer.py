"""Loading tokenizers so that payloads stay text: lossless, and never a special or structural id.

Two encoders stand behind one class. World-form vocabularies (greedy longest match over bytes, as in RWKV
World) go to `smi.tokenizer_trie`, linear where the library's form of them is cubic; every other tokenizer.json to
the `tokenizers` library, from a copy that knows no special tokens. Both decode through a table of the bytes that
each id stands for, so decoding inverts encoding exactly.
Protocol sections: "Security", "Reference Serialization", "Recommended Token Allocation".
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import tokenizers
from numpy.typing import NDArray

from smi import tokenizer_json
from smi.protocol.codec import flatten
from smi.protocol.tokens import SEQUENCE_TOKENS, SLOTS, slot_tokens

if TYPE_CHECKING:
    from smi.tokenizer_trie import LongestMatch

WORLD = "rwkv_world"
# made by smi.data.compact for the quickstart
COMPACT = "compact"
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MORE = "additional_special_tokens"
_BLANK = "▁"


class Tokenizer:
    """A tokenizer with the structural tokens installed; made by `load_tokenizer`.

    name: what it was loaded from. structural: the ids of the slots. eos_id: its own end of sequence.
    vocab_size: rows of the vocabulary, structural rows included.
    fingerprint: sha256 (hex) over vocabulary, text rules, eos and structural ids; equal means equal ids.
    """

    def __init__(
        self, name: str, document: dict[str, Any], config: dict[str, Any], slots: int, sequence_tokens: bool = False
    ) -> None:
        self.name = name
        self._document, self.structural = tokenizer_json.install(document, slots, sequence_tokens)
        document = self._document
        added = {token["content"]: token["id"] for token in document["added_tokens"]}
        ids = tokenizer_json.vocabulary(document) | added
        self.vocab_size = max(ids.values()) + 1
        if config["eos_token"] not in ids:
            raise ValueError(f"its end-of-sequence token {config['eos_token']!r} is not in its vocabulary")
        self.eos_id = ids[config["eos_token"]]

        # whatever the files call special is, also where it is spelled in the vocabulary alone; what is in neither
        # would become a new row when transformers loads them
        self._config = config = {key: text for key, text in config.items() if key not in _NAMED_TOKENS or text in ids}
        more = config[_MORE] = [token for token in config.get(_MORE, ()) if token in ids]
        special = {ids[token] for token in (*more, *(config[key] for key in _NAMED_TOKENS if key in config))}
        special |= {token["id"] for token in document["added_tokens"] if token["special"]}
        plain, self._prefix = tokenizer_json.plain_copy(document, special)
        self._pieces = tokenizer_json.piece_bytes(plain, self.vocab_size)
        kept = {token["id"] for token in plain["added_tokens"]}
        lost: set[str] = set()
        for id in special | (set(added.values()) - kept):
            lost.add((self._pieces[id] or b"").decode("utf-8", "ignore"))
            self._pieces[id] = None
        self._byte_ids = tokenizer_json.byte_ids(plain, self._pieces)
        self._match: LongestMatch | None = None
        if tokenizer_json.is_world_form(plain):
            # imported here: it brings numba, which only this form needs
            from smi.tokenizer_trie import LongestMatch

            self._match = LongestMatch(self._pieces)
        else:
            self._encode_plain = _library_encoder(plain)
        # spellings that some vocabularies take for something other than text, the longest first
        awkward = {text for text, id in ids.items() if self._pieces[id] is None or text[:3] == "<0x"}
        self._spellings = sorted((awkward | lost | {_BLANK}) - {""}, key=lambda text: (-len(text), text))
        self._awkward = re.compile(f"({'|'.join(map(re.escape, self._spellings))})")

        identity = {
            "plain": plain,
            "prefix": self._prefix,
            "eos": self.eos_id,
            "special": sorted(special),
            "slots": self.structural.to_dict(),
        }
        self.fingerprint = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        self._probe()

    def __reduce__(self) -> tuple[Any, ...]:
        slots, sequence_tokens = self.structural.slots, self.structural.sequence_tokens
        return Tokenizer, (self.name, self._document, self._config, slots, sequence_tokens)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; never a special or structural id. ValueError if the text cannot be kept exactly."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of many texts, the same as one by one."""
        if self._match is not None:
            row, bounds = self._match(texts)
            ids, cuts = row.tolist(), bounds.tolist()
            return [ids[start:end] for start, end in pairwise(cuts)]
        prefixed = [self._prefix + text if text else "" for text in texts]
        batch = self._encode_plain(prefixed)
        return [self._verified(ids, text) for ids, text in zip(batch, prefixed, strict=True)]

    def encode_flat(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Ids of many texts in one row, int32 [T], and its bounds, int64 [texts + 1]: text i has ids b[i] to b[i + 1].

        The fast way for a World-form vocabulary, several times `encode_batch`: no object is made per token, and the
        interpreter's lock is released, so that threads encode side by side.
        """
        if self._match is not None:
            return self._match(texts)
        return flatten(self.encode_batch(texts))

    def decode(self, ids: Iterable[int], errors: Literal["strict", "replace"] = "strict") -> str:
        """The text of text ids, the exact inverse of `encode`.

        strict: ValueError for ids without text (special, structural, unused, out of range) and for ids whose
        bytes are no UTF-8, such as half a character. replace: U+FFFD for each; defined for every input.
        """
        parts = [self.token_bytes(id) for id in ids]
        if errors == "strict" and None in parts:
            raise ValueError(f"id at position {parts.index(None)} stands for no text")
        data = b"".join("\N{REPLACEMENT CHARACTER}".encode() if part is None else part for part in parts)
        return data.decode("utf-8", errors).removeprefix(self._prefix)

    def token_bytes(self, id: int) -> bytes | None:
        """The bytes an id stands for within a text; None where it stands for no text."""
        return self._pieces[id] if 0 <= id < self.vocab_size else None

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write files that transformers and `load_tokenizer` load to the same ids.

        tokenizer.json, tokenizer_config.json, chat_template.jinja and smi_token_ids.json.
        """
        target = Path(directory)
        target.mkdir(parents=True, exist_ok=True)
        tokens = self._document["added_tokens"]
        flags = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
        config = {
            "added_tokens_decoder": {str(token["id"]): {key: token[key] for key in flags} for token in tokens},
            "backend": "tokenizers",
            "clean_up_tokenization_spaces": False,
            **self._config,
            _MORE: [*self._config[_MORE], *self.structural.to_dict()],
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        for file, value in (
            ("tokenizer.json", self._document),
            ("tokenizer_config.json", config),
            ("smi_token_ids.json", self.structural.to_dict()),
        ):
            (target / file).write_text(json.dumps(value, ensure_ascii=False, indent=2), encoding="utf-8")
        special = self._not_text()
        template = files("smi.protocol").joinpath("chat_template.jinja").read_text(encoding="utf-8")
        # a template sees the named tokens alone, and has to refuse every spelling that only the compiler keeps as text
        slot, filled = "set special = []", f"set special = {json.dumps(special, ensure_ascii=False)}"
        assert slot in template
        template = template.replace(slot, filled)
        (target / "chat_template.jinja").write_text(template, encoding="utf-8")

    def _not_text(self) -> list[str]:
        """Spellings that the library, left to itself, takes for something other than their text."""
        apart = {token["content"] for token in self._document["added_tokens"] if self._pieces[token["id"]] is None}
        if self._match is None:
            texts = [self._prefix + text for text in self._spellings]
            found = zip(self._spellings, texts, self._encode_plain(texts), strict=True)
            apart |= {spelling for spelling, text, ids in found if self._bytes(ids) != text.encode()}
        return sorted(apart)

    def _verified(self, ids: list[int], text: str) -> list[int]:
        data = text.encode("utf-8")
        if self._bytes(ids) == data:
            return ids
        # a spelling was taken for something else: spell it byte by byte instead
        ids = []
        for index, part in enumerate(self._awkward.split(text)):
            ids += [self._byte_ids[byte] for byte in part.encode()] if index % 2 else self._encode_plain([part])[0]
        if self._bytes(ids) != data:
            after = self.decode(ids, errors="replace")
            before = text.removeprefix(self._prefix)
            raise ValueError(f"it changes text: {before[:80]!r} comes back as {after[:80]!r}")
        return ids

    def _bytes(self, ids: list[int]) -> bytes | None:
        parts = [self._pieces[id] for id in ids]
        return None if None in parts else b"".join(parts)  # pyright: ignore[reportCallIssue, reportArgumentType]

    def _probe(self) -> None:
        """Refuse a tokenizer that changes text or lets text become a special id."""
        special = [token["content"] for token in self._document["added_tokens"]]
        texts = [*_PROBES, *special, *(f"a {token} b\n{token}{token}" for token in special)]
        for text in texts:
            ids = self.encode(text)
            if self._bytes(ids) is None or self.decode(ids) != text:
                after = self.decode(ids, errors="replace")
                raise ValueError(f"{self.name} changes text: {text!r} comes back as {after!r}; it cannot be used")


_PROBES = (
    "",
    "\n",
    "\n\n",
    "\nline\n\n\nline\r\n\ttab\t\n",
    " leading",
    "trailing ",
    "  two  and   three    blanks  ",
    "MiXeD UPPER lower",
    "a" * 300,
    "\N{GRINNING FACE} 👩\N{ZERO WIDTH JOINER}🚀 🏳️\N{ZERO WIDTH JOINER}🌈",
    "漢字かな交じり文 한국어 ไทย العربية हिन्दी",
    "e\N{COMBINING ACUTE ACCENT} A\N{COMBINING RING ABOVE} é Å ﬁ ① \N{FULLWIDTH LATIN CAPITAL LETTER A}",
    "\N{NO-BREAK SPACE}\N{ZERO WIDTH SPACE}\N{BYTE ORDER MARK}\0\x7f\N{REPLACEMENT CHARACTER}",
    "\N{IDEOGRAPHIC SPACE}\N{LINE SEPARATOR}\x85\N{SOFT HYPHEN}\N{LEFT-TO-RIGHT OVERRIDE}",
    "don't , stop . it 's \N{LEFT DOUBLE QUOTATION MARK}x\N{RIGHT DOUBLE QUOTATION MARK}",
    "## ▁ ▁▁ Ġ Ċ <0x0A> <unk> </s>",
)


def load_tokenizer(source: str, slots: int = 10, *, sequence_tokens: bool = False) -> Tokenizer:
    """Load a tokenizer and install the structural tokens if they are absent.

    source: "rwkv_world", "compact" (the quickstart's), or a directory holding tokenizer.json, with the
    end-of-sequence token named in tokenizer_config.json, or by id in generation_config.json or config.json.
    slots: 10, or 32 to add the reserved rows as well; slots the files already have are kept.
    sequence_tokens: with 32 slots, allot slots 10 and 11 to `<|bos|>` and `<|eos|>`, and end sequences with the
    latter: for a tokenizer without an end of sequence of its own.
    Raises ValueError when there is no such tokenizer, when it names no end of sequence, or when it cannot
    keep text exactly and apart from special tokens (lower-casing, white-space folding, unknown characters).
    """
    slot_tokens(slots, sequence_tokens)
    allotted = dict(zip(("bos_token", "eos_token"), SEQUENCE_TOKENS, strict=True)) if sequence_tokens else {}
    if source == WORLD:
        document, config = tokenizer_json.world_files()
        return Tokenizer(WORLD, document, config | allotted, slots, sequence_tokens)
    directory = Path(__file__).parent / "tokenizers" / COMPACT if source == COMPACT else Path(source)
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"no tokenizer at {source!r}: expected {WORLD!r}, {COMPACT!r} or a directory holding tokenizer.json"
        )
    try:
        document = _read_json(path)
        config = _config(directory, document) | allotted
        if "eos_token" not in config:
            raise ValueError(
                "it names no end-of-sequence token: set eos_token in tokenizer_config.json, or eos_token_id in "
                "generation_config.json, or load it with slots=32 and sequence_tokens=True to allot one"
            )
        tokenizer = Tokenizer(directory.resolve().name, document, config, slots, sequence_tokens)
        ids = directory / "smi_token_ids.json"
        if ids.is_file() and _read_json(ids) != tokenizer.structural.to_dict():
            raise ValueError("smi_token_ids.json and tokenizer.json disagree about the structural ids")
    except ValueError as error:
        raise ValueError(f"the tokenizer in {source} cannot be used: {error}") from None
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not valid JSON: {error}") from None
    if isinstance(value, dict):
        return value
    raise ValueError(f"{path.name} should hold a JSON object")


def _config(directory: Path, document: dict[str, Any]) -> dict[str, Any]:
    """The part of tokenizer_config.json that is kept: special tokens as text, padding side, length limit."""
    present = {
        file: _read_json(directory / file)
        for file in ("tokenizer_config.json", "generation_config.json", "config.json")
        if (directory / file).is_file()
    }
    given = present.get("tokenizer_config.json", {})
    config = {key: given[key] for key in ("padding_side", "model_max_length") if key in given}
    for key in _NAMED_TOKENS:
        token = _spelling(given.get(key))
        if token is not None:
            config[key] = token
    more = [given.get(key) or () for key in (_MORE, "extra_special_tokens")]
    spelled = [_spelling(token) for group in more for token in (group.values() if isinstance(group, dict) else group)]
    structural = slot_tokens(SLOTS) + SEQUENCE_TOKENS
    config[_MORE] = [token for token in dict.fromkeys(spelled) if token is not None and token not in structural]
    if "eos_token" not in config:
        by_id = {token["id"]: token["content"] for token in document.get("added_tokens", [])}
        by_id |= {id: text for text, id in tokenizer_json.vocabulary(document).items() if id not in by_id}
        for file in ("generation_config.json", "config.json"):
            ids = present.get(file, {}).get("eos_token_id")
            first = ids[0] if isinstance(ids, list) and ids else ids
            if first in by_id:
                config["eos_token"] = by_id[first]
                break
    return config


def _spelling(token: object) -> str | None:
    """The text of a token that a configuration names, as text or as an object; None for anything else."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _library_encoder(plain: dict[str, Any]) -> Callable[[Sequence[str]], list[list[int]]]:
    library = tokenizers.Tokenizer.from_str(json.dumps(plain))
    # with special tokens gone, the library may number the added tokens that stay anew
    renumbered = {library.token_to_id(token["content"]): token["id"] for token in plain["added_tokens"]}

    def encode(texts: Sequence[str]) -> list[list[int]]:
        batch = library.encode_batch(list(texts), add_special_tokens=False)
        return [[renumbered.get(id, id) for id in encoding.ids] if renumbered else encoding.ids for encoding in batch]

    return encode
