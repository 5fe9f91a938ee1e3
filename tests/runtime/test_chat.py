import io
import os
import signal
import threading

import pytest
from rich.console import Console
from scripted import ScriptedRuntime

from smi import chat
from smi.protocol.payloads import act_payload
from smi.protocol.stream import Block
from smi.protocol.tokens import BlockType
from smi.runtime.actions import Policy
from smi.runtime.agent import Agent
from smi.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("compact")


def talk(tokenizer, script, lines, tools=()):
    """What a terminal shows of some lines."""
    runtime = ScriptedRuntime(tokenizer, [[Block(kind, text) for kind, text in blocks] for blocks in script])
    shown = io.StringIO()
    with Agent(runtime, tools or chat.quickstart_tools()) as agent:
        it = chat.Chat(agent, runtime, Console(file=shown, width=200, color_system=None))
        agent.on_event, agent.on_outcomes = it.show, it.observe
        it.loop(lines)
    assert runtime.pool.free_slots + len(it._kept) == runtime.pool.capacity
    return shown.getvalue()


CALL = act_payload("a1", "calculate", {"op": "add", "a": 2, "b": 3})


def test_a_turn_shows_thoughts_actions_and_observations(tokenizer):
    script = [[(BlockType.THINK, "add"), (BlockType.ACT, CALL)], [(BlockType.OUT, "5")]]
    shown = talk(tokenizer, script, ["2 + 3?", "/quit", "never read"])
    assert shown.splitlines() == [
        "think add",
        f"act   {CALL}",
        'obs   {"caused_by":"a1","ok":true,"content":5}',
        "out   5",
    ]


def test_commands(tokenizer, tmp_path):
    script = [[(BlockType.OUT, word)] for word in ("one", "two", "three", "four", "five")]
    file = tmp_path / "s.safetensors"
    lines = ["hello", "/fork", "in the copy", "/back", f"/save {file}", "on", f"/restore {file}", "again", "/new", "hi"]
    shown = talk(tokenizer, script, [*lines, "/caps", "/budget 0", "/help"])
    for word in ("one", "two", "three", "four", "five", '"calculate"', "/restore FILE"):
        assert word in shown
    assert file.exists()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("/nope", "there is no /nope"),
        ("/", "there is no /"),
        ("/budget many", "takes a number"),
        ("/back", "no fork"),
        ("/save", "name a file"),
        ("/restore /nowhere/x", "/nowhere/x"),
        ("/restore /", "is a directory"),
        ("/save /nowhere/x", "/nowhere/x"),
    ],
)
def test_mistakes_are_answered_and_the_chat_goes_on(tokenizer, line, says):
    shown = talk(tokenizer, [[(BlockType.OUT, "still here")]], [line, "hello"])
    assert says in shown
    assert "still here" in shown


def test_ctrl_c_takes_the_turn_back(tokenizer):
    """The turn stops between two tokens, and the next line is answered."""
    sent = threading.Event()

    class Noisy(chat.Chat):
        def show(self, event):
            super().show(event)
            if not sent.is_set():
                sent.set()
                os.kill(os.getpid(), signal.SIGINT)
                # the handler runs in the main thread
                for _ in range(200):
                    if self._interrupted:
                        break
                    threading.Event().wait(0.05)

    runtime = ScriptedRuntime(tokenizer, [[Block(BlockType.OUT, "long " * 50)], [Block(BlockType.OUT, "short")]])
    shown = io.StringIO()
    with Agent(runtime) as agent:
        it = Noisy(agent, runtime, Console(file=shown, width=200, color_system=None))
        agent.on_event, agent.on_outcomes = it.show, it.observe
        it.loop(["a", "b"])
        assert "taken back" in shown.getvalue()
        assert shown.getvalue().count("long") < 10
        assert "short" in shown.getvalue()
        # what was asked stands twice, what was taken back not at all
        assert len(agent.transcript.transmissions) == 3


def test_what_is_shown_gives_the_terminal_no_orders(tokenizer):
    """Neither what the model writes nor what a tool returns, which may be anybody's."""
    sly = "\x1b]0;owned\x07 \x9b2J \u202eback \r over [bold]"

    def fetch() -> str:
        return sly

    script = [[(BlockType.THINK, sly), (BlockType.ACT, act_payload("a1", "fetch", {}))], [(BlockType.OUT, sly)]]
    shown = talk(tokenizer, script, ["go"], [fetch])
    assert not set(shown) & {"\x1b", "\x07", "\x9b", "\u202e", "\r"}
    assert shown.count("\\u202eback") == 3
    assert shown.count("[bold]") == 3


def test_who_is_asked_sees_all_arguments(tokenizer, monkeypatch):
    """Markup in them is text, and the end of the input is no yes."""
    ran, shown = [], io.StringIO()

    def remove(path: str) -> None:
        ran.append(path)

    calls = [(BlockType.ACT, act_payload(f"a{n}", "remove", {"path": path})) for n, path in enumerate(PATHS)]
    runtime = ScriptedRuntime(tokenizer, [[Block(*one) for one in calls], [Block(BlockType.OUT, "well")]])
    answers = iter(["y", "n"])

    def typed(prompt=""):
        for answer in answers:
            return answer
        raise EOFError

    monkeypatch.setattr("builtins.input", typed)
    console = Console(file=shown, width=200, color_system=None)
    with Agent(runtime, [remove], Policy(default="ask", ask=chat._confirm(console))) as agent:
        it = chat.Chat(agent, runtime, console)
        agent.on_event, agent.on_outcomes = it.show, it.observe
        it.loop(["go"])
    assert ran == [PATHS[0]]
    assert 'run remove {"path": "/[/bold]"}? [y/N]' in shown.getvalue()
    assert 'run remove {"path": "[conceal]/etc[/conceal]\\u202e"}? [y/N]' in shown.getvalue()
    assert "nobody could be asked: EOFError" in shown.getvalue()


PATHS = ["/[/bold]", "[conceal]/etc[/conceal]\u202e", "/home"]


def test_the_declarations_of_a_restored_session_are_its_own(tokenizer, tmp_path):
    def fetch() -> str:
        return ""

    file, script = tmp_path / "s", [[(BlockType.OUT, "hi")]]
    talk(tokenizer, script, ["hello", f"/save {file}"], [fetch])
    shown = talk(tokenizer, script, ["/caps", f"/restore {file}", "/caps", "/new", "/caps"])
    assert [shown.count(name) for name in ('"fetch"', '"calculate"')] == [1, 2]


def test_tools_of_a_file(tmp_path):
    file = tmp_path / "mine.py"
    lines = ["from math import sqrt", "class Odd: ...", "def _hidden(): ...", "def twice(x: int): return 2 * x"]
    file.write_text("\n".join(lines))
    assert [tool.__name__ for tool in chat.load_tools(file)] == ["twice"]
    (tmp_path / "none.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match="holds no tools"):
        chat.load_tools(tmp_path / "none.py")
    with pytest.raises(ValueError, match="no Python file"):
        chat.load_tools(tmp_path / "gone.py")


def test_a_checkpoint_that_is_not_there(capsys):
    assert chat.main(["./nowhere"]) == 2
    assert "no checkpoint at ./nowhere" in capsys.readouterr().err
