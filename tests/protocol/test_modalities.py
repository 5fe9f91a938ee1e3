"""The robot and the any-to-any examples of the protocol, with small made-up modalities."""

import numpy as np
import pytest
from strategies import NAMESPACES

from smi.protocol import (
    Block,
    BlockType,
    ProtocolError,
    Side,
    Span,
    Stream,
    TokenNamespace,
    Transmission,
    decode,
    encode,
    encode_prompt,
)
from smi.tokenizer import Tokenizer

SENSES = tuple(
    TokenNamespace(name, first_id, size)
    for name, first_id, size in [
        ("vision", 100_000, 512),
        ("depth", 100_512, 64),
        ("proprioception", 100_576, 32),
        ("force", 100_608, 32),
        ("action", 101_000, 256),
        ("audio", 102_000, 1024),
        ("image", 104_000, 8192),
    ]
)
VISION, DEPTH, JOINTS, FORCE = (
    Span("vision", (0, 511, 7)),
    Span("depth", (63, 0)),
    Span("proprioception", (1, 2, 3)),
    Span("force", (31,)),
)
APPROACH, MOVE, RELEASE = Span("action", (0, 17, 17)), Span("action", (200, 201)), Span("action", (255,))
DONE = Span("audio", (1023, 5, 0))


def sent(*blocks: tuple[BlockType, object]) -> Transmission:
    return Transmission(tuple(Block(kind, payload) for kind, payload in blocks))  # pyright: ignore[reportArgumentType]


ROBOT = Stream(
    (
        sent(
            (BlockType.CTRL, '{"reasoning":{"mode":"adaptive","effort":"medium","max_tokens":2048},"realtime":true}'),
            (BlockType.SYS, "Prioritize human safety."),
            (BlockType.DEV, "You control a mobile manipulator."),
            (BlockType.CAPS, '{"actions":["navigate","arm_trajectory","gripper","speak"]}'),
            (BlockType.USR, "Pick up the red cup and place it on the tray."),
            (BlockType.OBS, (VISION, DEPTH, JOINTS)),
        ),
        sent(
            (BlockType.THINK, "The red cup is reachable on the left side of the table."), (BlockType.ACT, (APPROACH,))
        ),
        sent((BlockType.OBS, (VISION, FORCE, JOINTS))),
        sent((BlockType.ACT, (MOVE, RELEASE))),
        sent((BlockType.OBS, (VISION,))),
        sent((BlockType.OUT, (DONE,))),
    )
)
ANY_TO_ANY = Stream(
    (
        sent((BlockType.USR, ("Describe this image and answer aloud.", Span("image", (8191, 0, 4096))))),
        sent((BlockType.THINK, "A cup on a table."), (BlockType.OUT, (DONE,))),
        sent((BlockType.USR, ("[text]", Span("image", (1,)), "and this?\n", DONE))),
        sent((BlockType.OUT, ("Here: ", DONE, Span("image", (2, 3)), "\n"))),
    )
)


@pytest.mark.parametrize("stream", [ROBOT, ANY_TO_ANY], ids=["robot", "any_to_any"])
def test_examples_round_trip(stream: Stream, family: dict[str, Tokenizer]) -> None:
    for tokenizer in family.values():
        example = encode(stream, tokenizer, namespaces=SENSES)
        assert decode(example.input_ids, tokenizer, namespaces=SENSES) == stream
        model = Stream(tuple(part for part in stream.transmissions if part.side is Side.MODEL))
        assert decode(example.input_ids[example.loss_mask], tokenizer, namespaces=SENSES) == model
        prompt = encode_prompt(Stream(stream.transmissions[:1]), tokenizer, namespaces=SENSES)
        assert prompt.tolist() == example.input_ids[: len(prompt)].tolist()


def test_ids_by_hand(world: Tokenizer) -> None:
    act, eot = world.structural.id(BlockType.ACT), world.structural.eot
    example = encode(Stream(ROBOT.transmissions[3:4]), world, namespaces=SENSES)
    # what is sent apart and follows at once is one run of its namespace
    assert example.input_ids.tolist() == [act, 11, 101_200, 101_201, 101_255, 11, eot, 11, 0]
    assert example.loss_mask.all()
    assert example.block_types.tolist() == [BlockType.ACT] * 6 + [BlockType.EOT] * 2 + [BlockType.EOS]
    assert decode(example.input_ids, world, namespaces=SENSES).transmissions[0].blocks[0].payload == (
        Span("action", (200, 201, 255)),
    )
    mixed = Stream((sent((BlockType.USR, ("a", VISION, JOINTS, "b"))),))
    ids = encode(mixed, world, complete=False, namespaces=SENSES).input_ids.tolist()
    seen = [100_000, 100_511, 100_007, 100_577, 100_578, 100_579]
    usr = world.structural.id(BlockType.USR)
    assert ids == [usr, *world.encode("\na"), *seen, *world.encode("b\n"), eot, 11]


@pytest.mark.parametrize("kind", [kind for kind in BlockType if kind < BlockType.EOT])
def test_any_block_may_hold_spans(kind: BlockType, world: Tokenizer) -> None:
    for parts in ((VISION,), ("\n", VISION, "\n"), (VISION, "x", DONE), ("\n\n", DONE)):
        stream = Stream((sent((kind, parts)),))
        example = encode(stream, world, namespaces=SENSES)
        assert decode(example.input_ids, world, namespaces=SENSES) == stream
        assert set(np.unique(example.block_types)) == {kind, BlockType.EOT, BlockType.EOS}


def test_spans_refused(world: Tokenizer) -> None:
    good = sent((BlockType.USR, "q"))
    for span, message in [
        (Span("vision", (3, 512)), "the id 512 is outside 'vision', whose ids are 0 to 511"),
        (Span("smell", (0,)), "no token namespace is named 'smell'; registered: vision"),
    ]:
        with pytest.raises(ProtocolError, match=message) as caught:
            encode(
                Stream((good, sent((BlockType.OUT, "x"), (BlockType.ACT, ("y", span))))), world, namespaces=SENSES[:1]
            )
        assert (caught.value.reason, caught.value.where) == ("span", "transmissions[1].blocks[1]")
    with pytest.raises(ProtocolError, match="registered: none"):
        encode(Stream((sent((BlockType.USR, (VISION,))),)), world)
    ids = encode(ROBOT, world, namespaces=SENSES).input_ids
    with pytest.raises(ProtocolError, match=r"belongs to no token namespace \[text\]"):
        decode(ids, world, namespaces=NAMESPACES[:1])


def test_a_namespace_never_holds_structural_ids(world: Tokenizer) -> None:
    wrong = [TokenNamespace("vision", world.structural.eot - 3, 512)]
    stream = Stream((sent((BlockType.USR, "q")),))
    for call in (
        lambda: encode(stream, world, namespaces=wrong),
        lambda: encode_prompt(stream, world, namespaces=wrong),
        lambda: decode([], world, namespaces=wrong),
    ):
        with pytest.raises(ValueError, match=r"the token namespace 'vision' holds .* of <\|"):
            call()
