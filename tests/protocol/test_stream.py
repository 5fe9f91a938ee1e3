import pickle

import pytest

from smi.protocol import Block, BlockType, ProtocolError, Side, Span, Stream, Transmission


def refused(reason: str):
    return pytest.raises(ProtocolError, match=rf"\[{reason}\]$")


def test_sides() -> None:
    runtime = Transmission((Block(BlockType.SYS, "a"), Block(BlockType.USR, "b"), Block(BlockType.USR, "c")))
    model = Transmission((Block(BlockType.ACT, "x"), Block(BlockType.THINK, "y"), Block(BlockType.OUT, "z")))
    assert runtime.side is Side.RUNTIME
    assert model.side is Side.MODEL
    # EOT synchronises; a side may go on after its own
    assert Stream((runtime, runtime, model, model)).transmissions[1] is runtime


@pytest.mark.parametrize(
    "types",
    [
        ("USR", "SYS"),
        ("OBS", "DEV"),
        ("USR", "CAPS"),
        ("CAPS", "DEV"),
        ("DEV", "SYS"),
        ("SYS", "CTRL"),
        ("USR", "CTRL"),
    ],
)
def test_runtime_order(types: tuple[str, str]) -> None:
    with refused("order"):
        Transmission(tuple(Block(BlockType[name], "") for name in types))


@pytest.mark.parametrize("types", [("CTRL", "SYS", "DEV", "CAPS", "USR", "OBS", "USR"), ("SYS", "SYS"), ("OBS", "USR")])
def test_runtime_order_kept(types: tuple[str, ...]) -> None:
    Transmission(tuple(Block(BlockType[name], "") for name in types))


def test_refusals() -> None:
    with refused("empty_transmission"):
        Transmission(())
    with refused("mixed_sides"):
        Transmission((Block(BlockType.USR, ""), Block(BlockType.OUT, "")))
    with refused("block_type"):
        Block(BlockType.EOT, "")
    with refused("text"):
        Block(BlockType.USR, "a\ud800b")
    with refused("text"):
        Block(BlockType.USR, None)  # pyright: ignore[reportArgumentType]


def test_payloads_have_one_form() -> None:
    image, more, sound = Span("image", (1, 2)), Span("image", (3,)), Span("audio", (0,))

    def payload(*parts: str | Span) -> object:
        return Block(BlockType.USR, parts).payload

    assert payload() == payload("", "") == ""
    assert payload("a", "", "b") == "ab"
    assert payload("a", "b", image, "", more, sound, "") == ("ab", Span("image", (1, 2, 3)), sound)
    assert payload(image, " ", more) == (image, " ", more)
    assert Block(BlockType.USR, ("a", image)).parts == ("a", image)
    assert (Block(BlockType.USR, "a").parts, Block(BlockType.USR, "").parts) == (("a",), ())
    assert Block(BlockType.USR, ("a", "b")).text == "ab"
    with refused("text"):
        _ = Block(BlockType.USR, ("a", image)).text
    # a code point cannot be put together from halves
    for parts in (("a", "\ud83d"), ("\ud83d", "\ude00"), ("a", 3)):
        with refused("text"):
            Block(BlockType.USR, parts)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("name", "ids"), [("", (1,)), (3, (1,)), ("a", ()), ("a", (-1,)), ("a", (True,)), ("a", [1])])
def test_spans_refused(name: object, ids: object) -> None:
    with refused("span"):
        Span(name, ids)  # pyright: ignore[reportArgumentType]


def test_errors_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(ProtocolError("role", "messages[3]", "unknown role")))
    assert (error.reason, error.where, error.message) == ("role", "messages[3]", "unknown role")
    assert str(error) == "messages[3]: unknown role [role]"
