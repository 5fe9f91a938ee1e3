import json
from typing import Literal

import pytest
import torch
from pydantic import BaseModel

from smi.protocol.payloads import parse_act
from smi.protocol.stream import ProtocolError
from smi.protocol.tokens import BlockType
from smi.runtime.constrained import Constrainer
from smi.runtime.grammar import Grammar, Limits
from smi.runtime.sampling import Sampling
from smi.runtime.tools import tool
from smi.runtime.turn import Turn

pytest.importorskip("llguidance", reason="constrained decoding needs llguidance: pip install 'smi[runtime]'")


class Place(BaseModel):
    city: str
    tags: list[Literal["warm", "cold"]] = []


def weather(place: Place, days: int, scale: float | None = None) -> None:
    """Look."""


def add(numbers: list[float], exact: bool = False) -> None:
    """Add."""


CAPS = {"tools": [tool(weather).declaration, tool(add).declaration], "actions": ["wave"]}


@pytest.fixture(scope="module", params=["world", "t1", "llama_bpe"])
def grammar(request, family):
    if request.param not in family:
        pytest.fail(f"no such family: {request.param}; there are {sorted(family)}")
    tokenizer = family[request.param]
    return Grammar(tokenizer, tokenizer.vocab_size + 3)


def wild(grammar, seed, opening, constrain, limit=300):
    """A turn of a model that writes at random: every payload it finishes is one that the constraint let through."""
    generator = torch.Generator().manual_seed(seed)
    structural = grammar.tokenizer.structural
    turn = Turn(grammar, Limits(limit, 0), Sampling(temperature=1.0, seed=seed), constrain=constrain)
    while turn.reply is None:
        scores = torch.randn(grammar.rows, generator=generator)
        scores[structural.eot] += 9
        if not turn.ids:
            scores[structural.id(opening)] += 50
        turn.choose(scores)
    blocks = enumerate(turn.reply.transmission.blocks)
    return [block for number, block in blocks if block.type is opening and number not in turn.reply.cut]


def test_every_finished_action_is_valid_whatever_the_model_wants(grammar):
    constrain = Constrainer(grammar).actions(CAPS)
    names = set()
    seeds = range(3 if grammar.rows > 60_000 else 20)
    for seed in seeds:
        for block in wild(grammar, seed, BlockType.ACT, constrain):
            names.add(parse_act(block.payload, CAPS["tools"], CAPS["actions"]).name)
    assert names
    assert len(names) >= 2 or len(seeds) < 10


def test_answers_are_the_json_asked_for(grammar):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    constrain = Constrainer(grammar).output(schema)
    written = [json.loads(b.text) for seed in range(4) for b in wild(grammar, seed, BlockType.OUT, constrain)]
    assert written
    assert all(set(value) == {"name", "age"} and type(value["age"]) is int for value in written)


def test_what_cannot_be_followed_is_refused(family):
    constrainer = Constrainer(Grammar(family["t1"], family["t1"].vocab_size))
    with pytest.raises(ProtocolError, match="cannot be held"):
        constrainer.output({"type": "object", "properties": {"a": {"type": "text"}}})
    other = {"name": "b", "parameters": {"type": "object", "$defs": {"Place": {"type": "string"}}}}
    with pytest.raises(ProtocolError, match="defines it differently"):
        constrainer.actions({"tools": [tool(weather).declaration, other]})
    assert constrainer.actions({})(BlockType.ACT) is None
