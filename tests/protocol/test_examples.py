"""The worked examples of the protocol text as test vectors; `...` there stands for what a reader fills in."""

import re
from typing import Any

import pytest

from smi.protocol import (
    Block,
    BlockType,
    Conversation,
    Span,
    Stream,
    TokenNamespace,
    Transmission,
    decode,
    encode,
    from_stream,
    loads,
    parse_act,
    to_stream,
)
from smi.protocol.stream import Payload
from smi.tokenizer import Tokenizer

# small made-up modalities; "audio" also says the word that the text gives for its tokens
SIZES = {"vision": 64, "depth": 32, "proprioception": 16, "force": 16, "action": 128, "audio": 256, "image": 512}
FIRST = 70_000
NAMESPACES = [TokenNamespace(name, FIRST + 1000 * place, size) for place, (name, size) in enumerate(SIZES.items())]
EMPTY = '{"type":"object"}'

CODING_AGENT = f"""<|ctrl|>
{{"reasoning":{{"mode":"adaptive","effort":"high","max_tokens":8192}}}}
<|sys|>
You are a secure autonomous coding agent.
<|dev|>
Inspect code before modifying it.
Run relevant tests after changes.
<|caps|>
{{"tools":[{{"name":"read_file","parameters":{EMPTY}}},{{"name":"edit_file","parameters":{EMPTY}}},\
{{"name":"bash","parameters":{EMPTY}}}]}}
<|usr|>
Fix the failing authentication test.
<|eot|>
<|think|>
I need to inspect the implementation and its tests.
<|act|>
{{"id":"a1","type":"tool","name":"read_file","arguments":{{"path":"src/auth.ts"}}}}
<|act|>
{{"id":"a2","type":"tool","name":"read_file","arguments":{{"path":"tests/auth.test.ts"}}}}
<|eot|>
<|obs|>
{{"caused_by":"a1","ok":true,"content":"..."}}
<|obs|>
{{"caused_by":"a2","ok":true,"content":"..."}}
<|eot|>
<|think|>
The timestamp comparison uses inconsistent units.
<|act|>
{{"id":"a3","type":"tool","name":"edit_file","arguments":{{"path":"src/auth.ts","patch":"..."}}}}
<|eot|>
<|obs|>
{{"caused_by":"a3","ok":true}}
<|eot|>
<|act|>
{{"id":"a4","type":"tool","name":"bash","arguments":{{"command":"npm test"}}}}
<|eot|>
<|obs|>
{{"caused_by":"a4","ok":true,"content":"42 tests passed"}}
<|eot|>
<|out|>
Fixed the authentication timestamp comparison. All 42 tests pass.
<|eot|>
"""

ROBOT = """<|ctrl|>
{"reasoning":{"mode":"adaptive","effort":"medium","max_tokens":2048},"realtime":true}
<|sys|>
Prioritize human safety.
<|dev|>
You control a mobile manipulator.
<|caps|>
{"actions":["navigate","arm_trajectory","gripper","speak"]}
<|usr|>
Pick up the red cup and place it on the tray.
<|obs|>
[vision 5][depth 3][proprioception 2]
<|eot|>
<|think|>
The red cup is reachable on the left side of the table.
<|act|>
[action 7]
<|eot|>
<|obs|>
[vision 5][force 2][proprioception 2]
<|eot|>
<|act|>
[action 9]
<|eot|>
<|obs|>
[vision 5]
<|eot|>
<|out|>
[audio 6]
<|eot|>
"""

ANY_TO_ANY = """<|usr|>
Describe this image and answer aloud.
[image 16]
<|eot|>
<|think|>
The picture shows a harbour.
<|out|>
[audio 8]
<|eot|>
"""

PARALLEL = f"""<|caps|>
{{"tools":[{{"name":"read_file","parameters":{EMPTY}}}]}}
<|usr|>
Compare the two.
<|eot|>
<|act|>
{{"id":"a1","type":"tool","name":"read_file","arguments":{{"path":"a.py"}}}}
<|act|>
{{"id":"a2","type":"tool","name":"read_file","arguments":{{"path":"b.py"}}}}
<|eot|>
<|obs|>
{{"caused_by":"a2","ok":true,"content":"..."}}
<|obs|>
{{"caused_by":"a1","ok":true,"content":"..."}}
<|eot|>
<|out|>
{{"name":"Alice","age":31}}
<|eot|>
"""

ERROR = """<|caps|>
{"tools":[{"name":"bash","parameters":{"type":"object","properties":{"command":{"type":"string"}}}}]}
<|usr|>
Run the tests.
<|eot|>
<|act|>
{"id":"a1","type":"tool","name":"bash","arguments":{"command":"git status"}}
<|eot|>
<|obs|>
{"caused_by":"a1","ok":false,"error":{"type":"permission_denied","message":"Access denied"}}
<|eot|>
<|act|>
{"id":"a2","type":"tool","name":"bash","arguments":{"command":"pytest"}}
<|eot|>
"""

MULTIMODAL = """<|usr|>
Look:[image 4]and listen:[audio 3]
<|obs|>
[vision 2][depth 2][proprioception 2][audio 2]
<|usr|>
Also inspect concurrency behavior.
<|eot|>
<|out|>
Here.[audio 2][image 2]
<|eot|>
"""

EXAMPLES = {
    "coding_agent": CODING_AGENT,
    "robot": ROBOT,
    "any_to_any": ANY_TO_ANY,
    "parallel": PARALLEL,
    "error": ERROR,
    "multimodal": MULTIMODAL,
}


def payload(text: str) -> Payload:
    """`[name n]` stands for n tokens of a namespace."""
    parts = re.split(r"\[(\w+) (\d+)\]", text)
    made: list[str | Span] = []
    for before, name, count in zip(parts[::3], parts[1::3], parts[2::3], strict=False):
        made += [before, Span(name, tuple(range(int(count))))]
    return (*made, parts[-1])


def written(text: str) -> Stream:
    """The stream that a listing shows; block by block, without the code under test."""
    transmissions = []
    for listing in text.split("<|eot|>\n")[:-1]:
        names_and_payloads = re.split(r"<\|(\w+)\|>\n", listing)[1:]
        pairs = zip(names_and_payloads[::2], names_and_payloads[1::2], strict=True)
        blocks = [Block(BlockType[name.upper()], payload(inside.removesuffix("\n"))) for name, inside in pairs]
        transmissions.append(Transmission(tuple(blocks)))
    return Stream(tuple(transmissions))


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_round_trip(name: str, world: Tokenizer) -> None:
    stream = written(EXAMPLES[name])
    conversation = from_stream(stream)
    # payloads are equal as text, so the JSON lines come out byte for byte
    assert to_stream(conversation) == stream
    ids = encode(stream, world, namespaces=NAMESPACES).input_ids
    assert decode(ids, world, namespaces=NAMESPACES) == stream


@pytest.mark.parametrize("name", ["coding_agent", "parallel", "error"])
def test_a_listing_is_what_a_tokenizer_prints(name: str, world: Tokenizer) -> None:
    ids = encode(written(EXAMPLES[name]), world, complete=False).input_ids.tolist()
    spellings = {id: token for token, id in world.structural.to_dict().items()}
    shown = "".join(spellings.get(id) or world.decode([id]) for id in ids)
    assert shown == EXAMPLES[name]


def test_every_act_of_the_agents_is_valid() -> None:
    for text in (CODING_AGENT, PARALLEL, ERROR):
        stream = written(text)
        blocks = [block for transmission in stream.transmissions for block in transmission.blocks]
        tools = next(loads(block.text)["tools"] for block in blocks if block.type is BlockType.CAPS)
        acts = [parse_act(block.payload, tools) for block in blocks if block.type is BlockType.ACT]
        assert [act.type for act in acts] == ["tool"] * len(acts) != []


def test_the_robot_as_messages() -> None:
    def tokens(**counts: int) -> list[dict[str, Any]]:
        return [{"type": "span", "namespace": name, "ids": list(range(count))} for name, count in counts.items()]

    conversation = Conversation(
        [
            {"role": "system", "content": "Prioritize human safety."},
            {"role": "developer", "content": "You control a mobile manipulator."},
            {"role": "user", "content": "Pick up the red cup and place it on the tray."},
            {"role": "environment", "content": tokens(vision=5, depth=3, proprioception=2)},
            {
                "role": "assistant",
                "reasoning_content": "The red cup is reachable on the left side of the table.",
                "tool_calls": [{"type": "action", "content": tokens(action=7)}],
            },
            {"role": "environment", "content": tokens(vision=5, force=2, proprioception=2)},
            {"role": "assistant", "tool_calls": [{"type": "action", "content": tokens(action=9)}]},
            {"role": "environment", "content": tokens(vision=5)},
            {"role": "assistant", "content": tokens(audio=6)},
        ],
        ctrl={"reasoning": {"mode": "adaptive", "effort": "medium", "max_tokens": 2048}, "realtime": True},
        caps={"actions": ["navigate", "arm_trajectory", "gripper", "speak"]},
    )
    assert to_stream(conversation) == written(ROBOT)
    assert from_stream(written(ROBOT)) == conversation
