from itertools import islice

import pytest
from scripted import ScriptedRuntime, tiny

from smi.data.synthetic import SyntheticTools
from smi.protocol.conversation import to_stream
from smi.protocol.stream import Block, Transmission
from smi.protocol.tokens import BlockType, Side
from smi.runtime import evaluation
from smi.runtime.turn import Reply
from smi.tokenizer import load_tokenizer

CALL = '{"id":"a1","type":"tool","name":"lookup","arguments":{"item":"lamp","field":"price"}}'
TOOLS = [
    {
        "name": "lookup",
        "parameters": {
            "type": "object",
            "properties": {"item": {"type": "string"}, "field": {"enum": ["price"]}},
            "required": ["item", "field"],
        },
    }
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("compact")


def written(*blocks, finished=True):
    transmission = Transmission(tuple(Block(kind, payload) for kind, payload in blocks))
    cut = frozenset() if finished else frozenset({len(blocks) - 1})
    return Reply(transmission, (), cut, "eot" if finished else "max_tokens", 0, "")


def score(reply, *truth):
    scores = evaluation.ActionScores()
    evaluation._score(scores, reply, tuple(Block(kind, p) for kind, p in truth), TOOLS)
    return scores


@pytest.mark.parametrize(
    ("payload", "parsed", "declared", "valid", "exact"),
    [
        (CALL, 1, 1, 1, 1),
        (CALL.replace("lamp", "rope"), 1, 1, 1, 0),
        (CALL.replace('"price"', '"weight"'), 1, 1, 0, 0),
        (CALL.replace('"lookup"', '"order"'), 1, 0, 0, 0),
        (CALL.replace('"type":"tool",', ""), 0, 0, 0, 0),
        (CALL[:-1], 0, 0, 0, 0),
    ],
)
def test_steps_that_an_action_reaches(payload, parsed, declared, valid, exact):
    scores = score(written((BlockType.ACT, payload)), (BlockType.ACT, CALL))
    assert (scores.parsed, scores.declared, scores.valid, scores.exact) == (parsed, declared, valid, exact)
    assert (scores.expected, scores.generated) == (1, 1)


def test_an_action_cut_by_the_limit_counts_as_unparsed():
    reply = written((BlockType.ACT, CALL), finished=False)
    scores = score(reply, (BlockType.ACT, CALL))
    assert (scores.generated, scores.parsed, scores.unfinished) == (1, 0, 1)


def test_missing_and_surplus_actions_lower_the_share():
    act = (BlockType.ACT, CALL)
    assert score(written(act), act, act).exact_share == 0.5
    assert score(written(act, act), act).exact_share == 0.5
    assert score(written((BlockType.OUT, "no")), act).exact_share == 0


def test_answers_are_compared_word_for_word():
    out = (BlockType.OUT, "The lamp costs 4 euros.")
    think = (BlockType.THINK, "Done.")
    assert score(written(think, out), think, out).answers_exact == 1
    assert score(written(out), think, out).answers_exact == 1
    assert score(written((BlockType.OUT, "It costs 4.")), out).answers_exact == 0
    scores = score(written(out, (BlockType.ACT, CALL)), out)
    assert (scores.answers, scores.answers_exact) == (1, 0)


def test_a_model_that_knows_every_answer_scores_full_marks(tokenizer, monkeypatch):
    conversations = list(islice(SyntheticTools(seed=1).conversations(held_out=True), 20))
    truths = [
        written(*((b.type, b.payload) for b in t.blocks))
        for c in conversations
        for t in to_stream(c).transmissions
        if t.side is Side.MODEL
    ]
    script = [reply.transmission.blocks for reply in truths]
    monkeypatch.setattr(evaluation, "Runtime", lambda model, tokenizer, capacity: ScriptedRuntime(tokenizer, script))
    scores = evaluation.score_actions(tiny(1).train(), tokenizer, conversations)
    assert scores.exact == scores.generated == scores.expected > 20
    assert scores.answers == scores.answers_exact > 10
    assert scores.valid_share == scores.exact_share == 1


def test_batches_change_nothing_and_training_goes_on(tokenizer):
    conversations = list(islice(SyntheticTools(seed=1).conversations(held_out=True), 4))
    model = tiny(tokenizer.vocab_size).double().train()
    one, many = (evaluation.score_actions(model, tokenizer, conversations, max_tokens=8, batch=n) for n in (1, 5))
    assert one == many
    assert one.generated + one.answers > 0
    assert model.training
