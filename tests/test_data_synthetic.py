from itertools import islice

import pytest

from smi.data.compact import train_compact_tokenizer
from smi.data.synthetic import (
    KINDS,
    OPERATIONS,
    TASKS,
    THINGS,
    TOOLS,
    SyntheticTools,
    Task,
    ToolError,
    World,
)
from smi.protocol.codec import decode, encode
from smi.protocol.conversation import to_stream
from smi.protocol.payloads import loads, parse_act
from smi.protocol.tokens import BlockType
from smi.tokenizer import load_tokenizer


def take(n, **how):
    return list(islice(SyntheticTools(seed=3).conversations(**how), n))


def calls(conversation):
    for message in conversation.messages:
        for call in message.get("tool_calls", []):
            yield call["id"], call["function"]["name"], call["function"]["arguments"]


@pytest.mark.parametrize("held_out", [False, True])
def test_every_conversation_is_valid_smi_and_every_action_valid(held_out):
    for conversation in take(200, held_out=held_out):
        stream = to_stream(conversation)
        for transmission in stream.transmissions:
            for block in transmission.blocks:
                if block.type is BlockType.ACT:
                    parse_act(block.payload, conversation.tools)


def test_one_seed_always_gives_the_same_conversations_and_others_give_others():
    assert take(20) == take(20)
    assert take(20) != take(20, epoch=1)
    assert take(5) != list(islice(SyntheticTools(seed=4).conversations(), 5))


def test_held_out_tasks_never_occur_in_training():
    def tasks(held_out):
        return {
            (name, str(sorted(arguments.items())))
            for conversation in take(600, held_out=held_out)
            for _, name, arguments in calls(conversation)
        }

    train, held_out = tasks(False), tasks(True)
    assert len(train) > 500
    assert len(held_out) > 300
    assert not train & held_out


def test_answers_follow_from_observations():
    """What the tools say is what the assistant says: no number in an answer comes from anywhere else."""
    import re

    for conversation in take(200):
        known = set()
        for message in conversation.messages:
            text = str(message.get("content", ""))
            numbers = set(re.findall(r"\d+(?:\.\d+)?", text))
            if message["role"] in ("user", "tool"):
                known |= numbers
            elif message["role"] == "assistant":
                assert numbers <= {n.rstrip(".") for n in known}, (numbers - known, conversation.messages)


def test_the_data_shows_what_it_promises():
    conversations = take(400)
    parallel = out_of_order = errors = retries = without_tool = thinking = 0
    for conversation in conversations:
        messages = conversation.messages
        thinking += conversation.ctrl["reasoning"]["mode"] == "adaptive"
        for i, message in enumerate(messages):
            ids = [call["id"] for call in message.get("tool_calls", [])]
            seen = [m["tool_call_id"] for m in messages[i + 1 : i + 1 + len(ids)] if m["role"] == "tool"]
            parallel += len(ids) > 1
            out_of_order += seen != ids
            if message["role"] == "tool" and message.get("ok") is False:
                errors += 1
                retries += message["error"]["type"] == "busy"
            without_tool += message.get("content") == "I have no tool for that."
    assert min(parallel, out_of_order, errors, retries, without_tool, thinking, len(conversations) - thinking) > 20


def test_reasoning_is_written_only_where_ctrl_asks_for_it():
    for conversation in take(100):
        blocks = [b.type for t in to_stream(conversation).transmissions for b in t.blocks]
        assert (BlockType.THINK in blocks) == (conversation.ctrl["reasoning"]["mode"] != "disabled")


class TestTools:
    world = World({"red lamp": {"price": 9, "stock": 4, "aisle": 2}})

    @pytest.mark.parametrize(
        ("name", "arguments", "result"),
        [
            ("calculate", {"op": "add", "a": 2, "b": 3}, 5),
            ("calculate", {"op": "divide", "a": 7, "b": 2}, 3.5),
            ("calculate", {"op": "divide", "a": 1, "b": 3}, 0.33),
            ("convert", {"value": 10, "from": "km", "to": "miles"}, 6.21),
            ("convert", {"value": 100, "from": "celsius", "to": "fahrenheit"}, 212),
            ("lookup", {"item": "red lamp", "field": "stock"}, 4),
            ("remind", {"text": "buy bread", "time": "07:30"}, "saved"),
        ],
    )
    def test_results(self, name, arguments, result):
        assert self.world.run(name, arguments) == result

    @pytest.mark.parametrize(
        ("name", "arguments", "error"),
        [
            ("calculate", {"op": "divide", "a": 7, "b": 0}, "division_by_zero"),
            ("convert", {"value": 1, "from": "km", "to": "kg"}, "unknown_unit"),
            ("lookup", {"item": "spaceship", "field": "price"}, "not_found"),
        ],
    )
    def test_errors(self, name, arguments, error):
        with pytest.raises(ToolError) as caught:
            self.world.run(name, arguments)
        assert caught.value.type == error

    def test_reminders_are_kept(self):
        world = World({})
        world.run("remind", {"text": "buy milk", "time": "08:00"})
        assert world.reminders == [("08:00", "buy milk")]

    def test_every_tool_has_tasks(self):
        assert {tool["name"] for tool in TOOLS} == set(TASKS)


def test_a_task_is_held_out_by_its_content_alone():
    task = Task("lookup", {"item": "lamp", "field": "price"}, "how much is the lamp", "price of lamp")
    other = Task("lookup", {"item": "lamp", "field": "price"}, "find the price of the lamp", "")
    assert task.held_out == other.held_out


class TestCompactTokenizer:
    def test_the_shipped_one_is_the_one_that_the_code_makes(self):
        import json
        from pathlib import Path

        import smi.tokenizer

        shipped = Path(smi.tokenizer.__file__).parent / "tokenizers" / "compact" / "tokenizer.json"
        assert json.loads(train_compact_tokenizer().to_str()) == json.loads(shipped.read_text(encoding="utf-8"))

    def test_every_word_of_the_world_is_one_token(self):
        tokenizer = load_tokenizer("compact")
        for word in [*(f" {thing}" for thing in THINGS), *KINDS, *(f" {kind}" for kind in KINDS), *OPERATIONS]:
            assert len(tokenizer.encode(word)) == 1, word

    def test_numbers_are_single_digits(self):
        tokenizer = load_tokenizer("compact")
        assert [tokenizer.decode([i]) for i in tokenizer.encode("1734")] == ["1", "7", "3", "4"]

    def test_streams_come_back(self):
        tokenizer = load_tokenizer("compact")
        for conversation in take(30):
            stream = to_stream(conversation)
            assert decode(encode(stream, tokenizer).input_ids, tokenizer) == stream

    def test_any_text_can_be_written(self):
        tokenizer = load_tokenizer("compact")
        text = "<|sys|> naïve 漢字 \N{GRINNING FACE}\n\t{}"
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_observations_name_the_calls_they_answer():
    for conversation in take(50):
        known = {call_id for call_id, _, _ in calls(conversation)}
        for transmission in to_stream(conversation).transmissions:
            for block in transmission.blocks:
                if block.type is BlockType.OBS:
                    assert loads(block.payload)["caused_by"] in known
