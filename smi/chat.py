"""Talks to a checkpoint in the terminal, with its thoughts, actions and observations in sight.

python -m smi.chat runs/quickstart/2026-01-31_12-00-00
python -m smi.chat CHECKPOINT --tools my_tools.py --ask
"""

import argparse
import contextlib
import importlib.util
import json
import random
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from smi.protocol.incremental import BlockClosed, BlockOpened, PayloadSpan, PayloadText
from smi.protocol.stream import ProtocolError
from smi.protocol.tokens import BlockType, Side

COMMANDS = """\
/caps            what the model is told it may use
/budget N        at most N tokens of thought a turn; /budget none for no limit
/fork            go on in a copy; /back returns to where it was made
/save FILE       write the session to a file
/restore FILE    go on from a saved session
/new             a fresh session
/help            this list
/quit            leave (or end of input)
Ctrl-C stops the model's turn."""

STYLES = {BlockType.THINK: "dim italic", BlockType.OUT: "bold", BlockType.ACT: "yellow", BlockType.OBS: "cyan"}


def quickstart_tools(seed: int = 0) -> list:
    """The quickstart's four tools over a small made-up store."""
    from smi.data import synthetic
    from smi.runtime.tools import Tool, ToolError

    world = synthetic.World.random(random.Random(seed))

    def bound(name: str) -> Callable:
        def run(**arguments):
            try:
                return world.run(name, arguments)
            except synthetic.ToolError as error:
                raise ToolError(error.type, error.message) from None

        return run

    return [Tool(declaration, bound(declaration["name"])) for declaration in synthetic.TOOLS]


def load_tools(path: Path) -> list:
    """The tools of a Python file: its list `TOOLS`, or else every public function defined in it.

    Raises ValueError for a file without any.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise ValueError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    # pydantic looks annotations up in the module
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    tools = getattr(module, "TOOLS", None)
    if tools is None:
        tools = [
            value
            for name, value in vars(module).items()
            if not name.startswith("_") and callable(value) and getattr(value, "__module__", "") == path.stem
            and not isinstance(value, type)
        ]  # fmt: skip
    if not tools:
        raise ValueError(f"{path} holds no tools: define functions, or a list TOOLS")
    return list(tools)


class Chat:
    """One conversation in a terminal."""

    def __init__(self, agent, runtime, console: Console) -> None:
        self._agent, self._runtime, self._console = agent, runtime, console
        self._kept: list = []
        self._interrupted = False
        self._column = 0

    def loop(self, lines: Iterable[str]) -> None:
        """Take lines until they end or say /quit."""
        for line in lines:
            text = line.strip()
            if text in ("/quit", "/exit"):
                break
            try:
                if text.startswith("/"):
                    self._command(*text[1:].split(maxsplit=1))
                elif text:
                    self._say(text)
            except (ValueError, RuntimeError, OSError) as error:
                self._console.print(Text(str(error), style="red"))

    def _say(self, text: str) -> None:
        answer = None
        with self._interruptible():
            answer = self._agent.run(text)
        if answer is None:
            # between its last token and the next event, the turn has ended already
            stands = self._agent.transcript.transmissions[-1].side is Side.MODEL
            self._console.print(Text("\n(stopped)" if stands else "\n(stopped; the turn is taken back)", style="dim"))
        elif answer.ended != "answer" or answer.reason != "eot":
            why = answer.ended if answer.ended != "answer" else answer.reason
            self._console.print(Text(f"(ended by {why})", style="dim"))

    @contextlib.contextmanager
    def _interruptible(self):
        """Ctrl-C ends the turn between two tokens, where the session can take it back."""

        def note(signum, frame):
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True

        self._interrupted = False
        before = signal.signal(signal.SIGINT, note)
        try:
            with contextlib.suppress(_Stopped):
                yield
        finally:
            signal.signal(signal.SIGINT, before)

    def show(self, event) -> None:
        """Print an event of generation as it comes."""
        if self._interrupted:
            raise _Stopped
        if isinstance(event, BlockOpened):
            self._kind = event.type
            self._console.print(Text(f"{event.type.name.lower():<6}", style="dim"), end="")
        elif isinstance(event, PayloadText):
            text = _visible(event.text).replace("\n", "\n      ")
            self._console.print(Text(text, style=STYLES[self._kind]), end="", soft_wrap=True)
        elif isinstance(event, PayloadSpan):
            self._console.print(Text(f"[{event.span.namespace} {event.span.ids}]", style="magenta"), end="")
        elif isinstance(event, BlockClosed):
            self._console.print()
        elif type(event).__name__ == "BlockCut":
            self._console.print(Text(" (cut)", style="red"))

    def observe(self, outcomes: Sequence) -> None:
        """Print what the actions came to."""
        for outcome in outcomes:
            for block in outcome.observations:
                self._console.print(Text("obs   ", style="dim"), end="")
                shown = block.payload if isinstance(block.payload, str) else str(block.payload)
                self._console.print(Text(_visible(shown), style=STYLES[BlockType.OBS]), soft_wrap=True)

    def _command(self, name: str = "", argument: str = "") -> None:
        from dataclasses import replace

        agent, runtime = self._agent, self._runtime
        match name:
            case "help":
                self._console.print(COMMANDS, highlight=False, markup=False)
            case "caps":
                self._console.print(Text(_visible(json.dumps(agent.declared, indent=2, ensure_ascii=False))))
            case "budget":
                if argument != "none" and not argument.isdecimal():
                    raise ValueError("/budget takes a number of tokens, or none")
                agent.limits = replace(agent.limits, max_think_tokens=None if argument == "none" else int(argument))
            case "fork":
                self._kept.append(agent.adopt(agent.session.fork()))
                self._console.print(Text("(in a copy; /back returns)", style="dim"))
            case "back":
                if not self._kept:
                    raise ValueError("there is no fork to come back from")
                agent.adopt(self._kept.pop()).close()
            case "save":
                agent.session.save(_path(argument))
                self._console.print(Text(f"saved {argument}", style="dim"))
            case "restore":
                agent.adopt(runtime.restore(_path(argument))).close()
            case "new":
                agent.renew()
            case _:
                raise ValueError(f"there is no /{name}; /help lists what there is")


class _Stopped(Exception):
    pass


# controls that move a terminal's cursor or give it orders, and marks that turn the direction of what follows
_BLIND = (*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_UNSEEN = {code: f"\\u{code:04x}" for code in _BLIND}


def _visible(text: str) -> str:
    """What a model or a tool wrote, for a terminal: only shown, never obeyed."""
    return text.translate(_UNSEEN)


def _path(argument: str) -> Path:
    if not argument:
        raise ValueError("name a file")
    return Path(argument).expanduser()


def _confirm(console: Console) -> Callable:
    def ask(action) -> bool:
        arguments = json.dumps(action.arguments, ensure_ascii=False)
        question = Text(_visible(f"run {action.name} {arguments}? [y/N] "))
        return console.input(question).strip().lower() in ("y", "yes")

    return ask


def lines(console: Console) -> Iterable[str]:
    """What people type, line by line, until the input ends."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  line editing and history
    while True:
        try:
            yield input("usr   " if sys.stdin.isatty() else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            console.print()


def parser() -> argparse.ArgumentParser:
    """The command line."""
    it = argparse.ArgumentParser(
        prog="python -m smi.chat",
        description="Talks to a checkpoint in the terminal, with its thoughts, actions and observations in sight.",
        epilog="In the chat:\n" + COMMANDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    it.add_argument("checkpoint", help="a run directory, an export, or a checkpoint in any layout")
    it.add_argument(
        "--tools", type=Path, metavar="FILE.py", help="functions in a Python file, instead of the quickstart's"
    )
    it.add_argument("--no-tools", action="store_true", help="declare no tools")
    it.add_argument("--ask", action="store_true", help="ask before each action")
    it.add_argument("--constrain", action="store_true", help="hold actions to their schemas while they are written")
    it.add_argument("--system", metavar="TEXT", help="a SYS block")
    it.add_argument("--max-tokens", type=int, default=512, metavar="N", help="of each turn of the model (512)")
    it.add_argument("--think", type=int, metavar="N", help="tokens of thought a turn")
    it.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest token (0)")
    it.add_argument("--top-p", type=float, default=1.0, metavar="P")
    it.add_argument("--seed", type=int, default=0, metavar="N")
    return it


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    console = Console(highlight=False)
    try:
        from smi.runtime.actions import Policy
        from smi.runtime.agent import Agent
        from smi.runtime.constrained import Constrainer
        from smi.runtime.grammar import Limits
        from smi.runtime.loading import load_runtime
        from smi.runtime.sampling import Sampling

        tools = load_tools(arguments.tools) if arguments.tools else [] if arguments.no_tools else quickstart_tools()
        runtime = load_runtime(arguments.checkpoint, capacity=16)
        agent = Agent(
            runtime,
            tools,
            Policy(default="ask" if arguments.ask else "allow", ask=_confirm(console), timeout=30),
            system=arguments.system,
            limits=Limits(arguments.max_tokens, arguments.think),
            sampling=Sampling(arguments.temperature, top_p=arguments.top_p, seed=arguments.seed),
            constrainer=Constrainer(runtime.grammar) if arguments.constrain else None,
        )
    except (ValueError, OSError, ImportError, ProtocolError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    chat = Chat(agent, runtime, console)
    agent.on_event, agent.on_outcomes = chat.show, chat.observe
    with agent:
        if sys.stdin.isatty():
            console.print(Text("/help lists the commands", style="dim"))
        try:
            chat.loop(lines(console))
        except KeyboardInterrupt:
            # asked for twice: the turn is not waited for
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
