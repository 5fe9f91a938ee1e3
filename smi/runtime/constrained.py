"""Decoding held to declared schemas: an ACT that its caller could not refuse for its form, an OUT that is the JSON
asked for.

The grammar of JSON Schema is llguidance's. It covers the whole framed payload, its newlines included, so that it
agrees with any vocabulary about where tokens may end; masks of this module and of `smi.runtime.grammar` are combined.

Protocol section: "Structured Data".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smi.protocol.payloads import declare
from smi.protocol.stream import ProtocolError
from smi.protocol.tokens import BlockType
from smi.runtime.grammar import Grammar
from smi.runtime.turn import Constraint

# an id is free but for this; the name of the action and its arguments follow the declaration
_ID = {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"}

# numbers whose schema has no bounds are held to these
_LARGEST = 1e15

# symbols of a grammar; past so many it takes seconds to compile
_MOST_SYMBOLS = 20_000


class Constrainer:
    """Makes the constraints of one model's grammar; see `Session.generate(constrain=...)`.

    Raises ImportError that says what to install where llguidance is missing.
    """

    def __init__(self, grammar: Grammar) -> None:
        try:
            import llguidance
        except ImportError:
            raise ImportError("constrained decoding needs llguidance: pip install 'smi[runtime]'") from None
        self._library = llguidance
        self._grammar = grammar

    @cached_property
    def _tokenizer(self) -> Any:
        grammar = self._grammar
        special = [id for id in range(grammar.rows) if grammar.piece(id) is None]

        class Vocabulary:
            eos_token_id = grammar.tokenizer.eos_id
            bos_token_id = None
            tokens = [grammar.piece(id) or f"<|{id}|>".encode() for id in range(grammar.rows)]
            special_token_ids = special

            def __call__(self, text: str) -> list[int]:
                """Ids of text in the middle of a payload."""
                if not grammar.blank:
                    return grammar.tokenizer.encode(text)
                # behind a newline no blank is put before it
                newline = grammar.tokenizer.encode("\n")
                return grammar.tokenizer.encode("\n" + text)[len(newline) :]

        wrapper = self._library.TokenizerWrapper(Vocabulary())
        return self._library.LLTokenizer(wrapper, n_vocab=grammar.rows)

    def schema(self, schema: Mapping[str, Any]) -> Constraint:
        """Holds a payload to compact JSON of this schema.

        Raises ProtocolError "schema" for one that llguidance cannot follow; it says which part.
        """
        return _Matched(self._compiled(schema), self._grammar)

    def _compiled(self, schema: Mapping[str, Any]) -> Any:
        """A matcher at its start. Compiling can take a second, copying does not."""
        rules = {**_finite(schema), "x-guidance": {"whitespace_flexible": False}}
        # some tokenizers put a blank before every text
        blank = f"{json.dumps(self._grammar.blank.decode())}? " if self._grammar.blank else ""
        lark = f'start: {blank}"\\n" value "\\n"\nvalue: %json {json.dumps(rules)}\n'
        limits = self._library.LLParserLimits(max_grammar_size=_MOST_SYMBOLS)
        problem = self._library.LLMatcher.validate_grammar(lark, self._tokenizer, limits=limits)
        if problem:
            raise ProtocolError("schema", "", f"decoding cannot be held to this schema: {problem}")
        return self._library.LLMatcher(self._tokenizer, lark, limits=limits)

    def actions(self, capabilities: Mapping[str, Any]) -> Callable[[BlockType], Constraint | None]:
        """For `constrain`: holds every ACT to what a CAPS object declares. Without declarations there is no ACT to
        hold; the runtime refuses what the model writes then.

        Raises ProtocolError as `declare` and `schema` do.
        """
        declared = declare(None, dict(capabilities) or None)
        kinds = [("tool", d) for d in declared.tools.values()] + [("action", d) for d in declared.actions.values()]
        if not kinds:
            return lambda kind: None
        definitions: dict[str, Any] = {}
        whole = {"anyOf": [_envelope(type, declaration, definitions) for type, declaration in kinds], **definitions}
        return self._copies(whole, BlockType.ACT)

    def output(self, schema: Mapping[str, Any]) -> Callable[[BlockType], Constraint | None]:
        """For `constrain`: holds every OUT to compact JSON of this schema."""
        return self._copies(schema, BlockType.OUT)

    def _copies(self, schema: Mapping[str, Any], held: BlockType) -> Callable[[BlockType], Constraint | None]:
        """A constraint of its own for each block of that type."""
        start = self._compiled(schema)
        return lambda kind: _Matched(start.deep_copy(), self._grammar) if kind is held else None


def _finite(schema: Any) -> Any:
    """The schema with bounds for numbers that have none.

    Without them the grammar lets exponents through that no double can hold, which every reader here refuses.
    """
    if isinstance(schema, list):
        return [_finite(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = {key: value if key in ("enum", "const", "default") else _finite(value) for key, value in schema.items()}
    kinds = made.get("type")
    if kinds == "number" or (isinstance(kinds, list) and "number" in kinds):
        if not {"minimum", "exclusiveMinimum"} & made.keys():
            made["minimum"] = -_LARGEST
        if not {"maximum", "exclusiveMaximum"} & made.keys():
            made["maximum"] = _LARGEST
    return made


def _envelope(type: str, declaration: Mapping[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of an ACT payload; what references look for at the root is moved to `definitions`."""
    parameters = dict(declaration.get("parameters", {"type": "object"}))
    parameters.pop("$schema", None)
    for key in ("$defs", "definitions"):
        for name, definition in parameters.pop(key, {}).items():
            if definitions.setdefault(key, {}).setdefault(name, definition) != definition:
                raise ProtocolError(
                    "schema",
                    f"tools.{declaration['name']}.parameters.{key}.{name}",
                    "another tool defines it differently; give one of them another name to hold decoding to both",
                )
    return {
        "type": "object",
        "properties": {
            "id": _ID,
            "type": {"const": type},
            "name": {"const": declaration["name"]},
            "arguments": parameters,
        },
        "required": ["id", "type", "name", "arguments"],
        "additionalProperties": False,
    }


class _Matched:
    """A llguidance matcher as a `Constraint`."""

    def __init__(self, matcher: Any, grammar: Grammar) -> None:
        self._matcher = matcher
        self._grammar = grammar

    def mask(self) -> Tensor:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        allowed = np.unpackbits(bits, bitorder="little")[: self._grammar.rows].astype(bool)
        return torch.from_numpy(allowed).to(self._grammar.device)

    def take(self, id: int) -> None:
        self._matcher.consume_token(id)
        self._check()

    @property
    def complete(self) -> bool:
        return self._matcher.is_accepting()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RuntimeError(f"constrained decoding failed: {self._matcher.get_error()}")
