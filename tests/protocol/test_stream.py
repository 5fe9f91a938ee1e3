import pickle

import pytest

from smi.protocol import Block, BlockType, ProtocolError, Side, Stream, Transmission


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


def test_errors_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(ProtocolError("role", "messages[3]", "unknown role")))
    assert (error.reason, error.where, error.message) == ("role", "messages[3]", "unknown role")
    assert str(error) == "messages[3]: unknown role [role]"
