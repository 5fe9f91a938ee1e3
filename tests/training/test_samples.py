"""Held-out prompts continued in training: what is written, and that training does not notice."""

from itertools import islice

import pytest
import torch
from small_run import fit, small_config

from smi.data.batch import pack
from smi.data.recipe import build_data, build_tokenizer
from smi.data.synthetic import SyntheticTools
from smi.protocol.codec import encode
from smi.protocol.conversation import to_stream
from smi.protocol.payloads import declare
from smi.protocol.stream import Block, Stream, Transmission
from smi.protocol.tokens import BlockType, Side
from smi.runtime.turn import Reply
from smi.tokenizer import load_tokenizer
from smi.training.loggers import read_history, read_lines
from smi.training.models import build_model
from smi.training.samples import SAMPLES_FILE, Prompt, _figures, _verdicts, prompts, write_samples


def weights(module):
    return [parameter.detach().clone() for parameter in module.parameters()]


def test_training_is_the_same_with_and_without_samples(tmp_path):
    kept = []
    for name, more in (
        ("with", ("callbacks=default", "callbacks.samples.every=1", "callbacks.samples.max_tokens=24")),
        ("without", ()),
    ):
        trainer, module = fit(small_config(tmp_path / name, "trainer.max_steps=3", *more))
        kept.append((weights(module), trainer.optimizers[0].state_dict()["state"], torch.get_rng_state()))
        assert all(part.training for part in module.modules())
    (here, moments, random), (there, other, other_random) = kept
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
    assert all(torch.equal(moments[i]["exp_avg"], other[i]["exp_avg"]) for i in moments)
    assert torch.equal(random, other_random)
    rows = read_lines(tmp_path / "with" / SAMPLES_FILE)
    count = len(rows) // 3
    assert [row["step"] for row in rows] == [1] * count + [2] * count + [3] * count
    assert not (tmp_path / "without" / SAMPLES_FILE).exists()
    # the same prompts each time
    assert [row["prompt"] for row in rows[:count]] == [row["prompt"] for row in rows[-count:]]
    assert read_history(tmp_path / "with")["samples/actions"].keys() == {1, 2, 3}


def test_the_model_is_left_as_it_was(tmp_path):
    config = small_config(tmp_path)
    tokenizer = build_tokenizer(config)
    data, model = build_data(config, tokenizer), build_model(config, tokenizer)
    data.setup()
    asked = prompts(data.val_dataloader(), tokenizer, 3)
    model.rwkv7.blocks[0].eval()
    before, modes = weights(model), [module.training for module in model.modules()]
    rows = write_samples(model, tokenizer, asked, 24)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(a, b) for a, b in zip(weights(model), before, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert rows == write_samples(model, tokenizer, asked, 24)


def test_prompts_are_held_out_and_end_where_the_model_has_the_floor(tmp_path):
    config = small_config(tmp_path, "data.max_questions=3", "data.max_length=1000", "data.pack_length=1000")
    tokenizer = build_tokenizer(config)
    data = build_data(config, tokenizer)
    data.setup()
    asked = prompts(data.val_dataloader(), tokenizer, 4)
    held_out = [to_stream(c) for c in islice(SyntheticTools(config.seed, 3).conversations(held_out=True), 200)]
    assert len(asked) == 4
    for prompt in asked:
        said = prompt.stream.transmissions
        assert said[-1].side is Side.RUNTIME
        whole = (*said, Transmission(prompt.expected))
        assert any(stream.transmissions[: len(whole)] == whole for stream in held_out)
    assert len({len(prompt.stream.transmissions) for prompt in asked}) > 1


ADD = {
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}


@pytest.mark.parametrize(
    ("payload", "cut", "verdict"),
    [
        ('{"id":"1","type":"tool","name":"add","arguments":{"a":1}}', False, "right"),
        ('{"id":"2","type":"tool","name":"add","arguments":{"a":2}}', False, "valid"),
        ('{"id":"1","type":"tool","name":"add","arguments":{"a":"x"}}', False, "invalid arguments"),
        ('{"id":"1","type":"tool","name":"sub","arguments":{"a":1}}', False, "undeclared"),
        ('{"id":"1"', False, "unreadable"),
        ('{"id":"1","type":"tool","name":"add","arguments":{"a":1}}', True, "cut"),
    ],
)
def test_verdicts(payload, cut, verdict):
    right = Block(BlockType.ACT, '{"id":"1","type":"tool","name":"add","arguments":{"a":1}}')
    heard = Transmission((Block(BlockType.CAPS, declare([ADD]).payload), Block(BlockType.USR, "1?")))
    said = Transmission((Block(BlockType.THINK, "so"), Block(BlockType.ACT, payload)))
    reply = Reply(said, (), frozenset({1} if cut else ()), "eot", 0, "")
    assert _verdicts(Prompt(Stream((heard,)), (right,)), reply) == [verdict]


def test_shares_count_what_got_further_too():
    rows = [{"verdicts": ["right", "valid"]}, {"verdicts": []}, {"verdicts": ["undeclared", "cut"]}]
    assert _figures(rows) == {
        "samples/actions": 4,
        "samples/parsed": 0.75,
        "samples/declared": 0.5,
        "samples/valid": 0.5,
        "samples/right": 0.25,
    }
    assert _figures([{"verdicts": []}]) == {"samples/actions": 0}


def test_a_document_without_a_turn_of_the_model_is_no_prompt():
    tokenizer = load_tokenizer("compact")
    talk = Stream((Transmission((Block(BlockType.USR, "hello"),)),))
    assert prompts([pack([encode(talk, tokenizer)])], tokenizer, 4) == []
