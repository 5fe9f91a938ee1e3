"""From a raw row to a conversation: one pure function a format, by name.

An adapter only brings a row into shape; `smi.protocol.conversation.to_stream` judges what it says. What does
not fit is a ProtocolError with a reason that accounts count by; nothing is repaired.
"""

from __future__ import annotations

import ast
import math
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from smi.protocol.conversation import Conversation
from smi.protocol.payloads import loads
from smi.protocol.stream import ProtocolError

Raw = Mapping[str, Any]

MIN_TEST_SCORE = 0.8
MAX_LITERAL_CHARS = 1 << 16


@dataclass(frozen=True)
class Adapter:
    """A format.

    convert: raw row -> conversation; raises ProtocolError.
    needs: groups of columns of which a file must have at least one each.
    optional: columns read where there are any.
    """

    name: str
    convert: Callable[[Raw], Conversation]
    needs: tuple[tuple[str, ...], ...]
    optional: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column the adapter looks at."""
        return tuple(column for group in self.needs for column in group) + self.optional


def get_adapter(name: str) -> Adapter:
    """The adapter of that name. Raises ValueError with the names there are."""
    if name not in ADAPTERS:
        raise ValueError(f"no adapter is named {name!r}; known are {', '.join(ADAPTERS)}")
    return ADAPTERS[name]


def messages(row: Raw) -> Conversation:
    """Chat messages as they are: `messages`, or `messages_json` as JSON text (it wins where both are there).

    `tools`, `tools_json`, `smi_ctrl` and `smi_caps` may stand beside them, as values or as JSON text.
    """
    tools = row.get("tools_json") if row.get("tools_json") is not None else row.get("tools")
    spoken = row.get("messages_json")
    # whatever stands there: `to_stream` says so where it is no list
    talk: Any = row.get("messages") if spoken is None else _json_text(spoken, "messages_json")
    return Conversation(
        messages=talk,
        tools=_value(tools, "tools"),
        ctrl=_value(row.get("smi_ctrl"), "smi_ctrl"),
        caps=_value(row.get("smi_caps"), "smi_caps"),
    )


_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
}


def sharegpt(row: Raw) -> Conversation:
    """`conversations` of `{"from", "value"}`, plain talk without tools."""
    turns = [{"role": role, "content": text} for role, text in _turns(row)]
    return Conversation(messages=turns)


def hermes(row: Raw) -> Conversation:
    """ShareGPT whose turns hold `<tool_call>` and `<tool_response>` blocks.

    Calls and the `tools` column are JSON or Python literals. Calls are numbered a1, a2, ... through the
    conversation; responses answer them in the order they were made. Text must stand before a turn's calls.
    """
    spoken: list[dict[str, Any]] = []
    unanswered: list[str] = []
    made = 0
    for index, (role, text) in enumerate(_turns(row)):
        where = f"conversations[{index}]"
        if role == "assistant":
            before, blocks = _tagged(text, "tool_call", where)
            calls = []
            for block in blocks:
                made += 1
                unanswered.append(f"a{made}")
                calls.append({"id": f"a{made}", "type": "function", "function": _call(block, where)})
            spoken.append({"role": role, "content": before, **({"tool_calls": calls} if calls else {})})
        elif role == "tool":
            before, blocks = _tagged(text, "tool_response", where)
            if before or not blocks:
                raise ProtocolError("tool_response", where, "expected nothing but <tool_response> blocks")
            for block in blocks:
                if not unanswered:
                    raise ProtocolError("orphan_observation", where, "a response without a call before it")
                spoken.append({"role": role, "tool_call_id": unanswered.pop(0), "content": block})
        else:
            spoken.append({"role": role, "content": text})
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = _literal(tools, "tools", "tools")
    return Conversation(messages=spoken, tools=tools)


def aya(row: Raw) -> Conversation:
    """One question and its answer: `inputs`, `targets`."""
    return _exchange(_text(row, "inputs"), _text(row, "targets"))


def opencode(row: Raw) -> Conversation:
    """A coding task and its solution, kept where the solution passed at least 0.8 of its tests.

    `average_test_score` is text; what is no finite number is no score.
    """
    score = row.get("average_test_score")
    try:
        passed = float(score) if isinstance(score, str | float | int) else math.nan
    except ValueError:
        passed = math.nan
    if not (math.isfinite(passed) and passed >= MIN_TEST_SCORE):
        raise ProtocolError("score", "average_test_score", f"{score!r} is not a score of {MIN_TEST_SCORE} or more")
    return _exchange(_text(row, "input"), _text(row, "output"))


def openr1(row: Raw) -> Conversation:
    """A problem with the first of its `generations` that is complete and correct by either judge.

    `<think>...</think>` at its start becomes the reasoning, what follows the answer.
    """
    problem = _text(row, "problem")
    generations = row.get("generations")
    if not isinstance(generations, list):
        raise ProtocolError("schema", "generations", f"expected a list, not {type(generations).__name__}")
    complete, verified, judged = (
        _flags(row, name) for name in ("is_reasoning_complete", "correctness_math_verify", "correctness_llama")
    )
    good = (i for i in range(len(generations)) if complete(i) and (verified(i) or judged(i)))
    index = next(good, None)
    if index is None:
        raise ProtocolError("no_correct_generation", "generations", "none is both complete and correct")
    generation, where = generations[index], f"generations[{index}]"
    if not isinstance(generation, str):
        raise ProtocolError("schema", where, f"expected text, not {type(generation).__name__}")
    parts = re.fullmatch(r"\s*<think>(.*?)</think>(.*)", generation, re.DOTALL)
    if not parts:
        raise ProtocolError("reasoning", where, "expected <think>...</think> and an answer after it")
    reasoning, answer = parts[1].strip(), parts[2].strip()
    if not answer:
        raise ProtocolError("empty_turn", where, "no answer after the reasoning")
    return _exchange(problem, answer, reasoning)


def _exchange(question: str, answer: str, reasoning: str = "") -> Conversation:
    reply = {"role": "assistant", "content": answer}
    if reasoning:
        reply["reasoning_content"] = reasoning
    return Conversation(messages=[{"role": "user", "content": question}, reply])


def _text(row: Raw, column: str) -> str:
    text = row.get(column)
    if not isinstance(text, str):
        raise ProtocolError("schema", column, f"expected text, not {type(text).__name__}")
    if not text.strip():
        raise ProtocolError("empty_turn", column, "holds no text")
    return text


def _flags(row: Raw, column: str) -> Callable[[int], bool]:
    """The flags of a column by index; absent ones, and all of an absent column, are false."""
    flags = row.get(column)
    if flags is None:
        flags = []
    if not isinstance(flags, list):
        raise ProtocolError("schema", column, f"expected a list of flags, not {type(flags).__name__}")
    return lambda index: index < len(flags) and flags[index] is True


def _turns(row: Raw) -> list[tuple[str, str]]:
    """(role, text) of every ShareGPT turn."""
    turns = row.get("conversations")
    if not isinstance(turns, list):
        raise ProtocolError("schema", "conversations", f"expected a list of turns, not {type(turns).__name__}")
    result = []
    for index, turn in enumerate(turns):
        where = f"conversations[{index}]"
        if not isinstance(turn, dict):
            raise ProtocolError("schema", where, f"expected a turn object, not {type(turn).__name__}")
        speaker, text = turn.get("from"), turn.get("value")
        if not isinstance(speaker, str) or speaker not in _SHAREGPT_ROLES:
            known = ", ".join(_SHAREGPT_ROLES)
            raise ProtocolError("role", where, f"unknown speaker {speaker!r}; known are {known}")
        if not isinstance(text, str):
            raise ProtocolError("schema", where, f"value must be text, not {type(text).__name__}")
        result.append((_SHAREGPT_ROLES[speaker], text))
    return result


def _tagged(text: str, tag: str, where: str) -> tuple[str, list[str]]:
    """Split `text<tag>block</tag>...` into the text before and the blocks, each without outer white space."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    before, *rest = text.split(opening)
    if closing in before:
        raise ProtocolError(tag, where, f"{closing} without {opening} before it")
    blocks = []
    for part in rest:
        block, closed, after = part.partition(closing)
        if not closed:
            raise ProtocolError(tag, where, f"{opening} is not closed")
        if after.strip():
            raise ProtocolError(tag, where, f"text after {closing}; it can only stand before the first {opening}")
        blocks.append(block.strip())
    # without blocks the text is left as it is, to the last space
    return (before.strip() if blocks else text), blocks


def _call(block: str, where: str) -> dict[str, Any]:
    call = _literal(block, where, "tool_call")
    if not isinstance(call, dict) or call.keys() != {"name", "arguments"}:
        raise ProtocolError("tool_call", where, "a call is an object with the keys name and arguments")
    return call


def _json_text(text: object, where: str) -> Any:
    if not isinstance(text, str):
        raise ProtocolError("schema", where, f"expected JSON text, not {type(text).__name__}")
    try:
        return loads(text)
    except ProtocolError as error:
        raise ProtocolError(error.reason, where, error.message) from None


def _value(value: Any, where: str) -> Any:
    return _json_text(value, where) if isinstance(value, str) else value


def _literal(text: str, where: str, reason: str) -> Any:
    """A plain value written as JSON or as a Python literal. Read, never evaluated."""
    try:
        return loads(text)
    except ProtocolError as error:
        if error.reason != "json":
            raise ProtocolError(error.reason, where, error.message) from None
    if len(text) > MAX_LITERAL_CHARS:
        raise ProtocolError(
            "over_budget", where, f"not JSON, and {len(text):,} characters are too many for a Python literal"
        )
    try:
        # the parser warns about unknown escapes in text it keeps as written: nothing the reader could act on
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text.strip(), mode="eval")
        return _plain(tree.body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ProtocolError(reason, where, f"neither JSON nor a Python literal: {error}") from None


def _plain(node: ast.expr) -> Any:
    """The value of a literal made of what JSON knows. ast.literal_eval would let duplicate keys pass."""
    if isinstance(node, ast.Constant) and (node.value is None or type(node.value) in (str, bool, int, float)):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _plain(node.operand)
        if type(number) in (int, float):
            return -number
    if isinstance(node, ast.List):
        return [_plain(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
        if not all(isinstance(key, str) for key in keys) or len(set(keys)) < len(keys):
            raise ValueError("the keys of an object must be texts that differ")
        return dict(zip(keys, map(_plain, node.values), strict=True))
    raise ValueError(f"{type(node).__name__} at column {node.col_offset} is no plain value")


ADAPTERS: dict[str, Adapter] = {
    adapter.name: adapter
    for adapter in (
        Adapter(
            "messages",
            messages,
            (("messages", "messages_json"),),
            ("tools", "tools_json", "smi_ctrl", "smi_caps"),
        ),
        Adapter("sharegpt", sharegpt, (("conversations",),)),
        Adapter("hermes", hermes, (("conversations",), ("tools",))),
        Adapter("aya", aya, (("inputs",), ("targets",))),
        Adapter(
            "openr1",
            openr1,
            (("problem",), ("generations",), ("is_reasoning_complete",)),
            ("correctness_math_verify", "correctness_llama"),
        ),
        Adapter("opencode", opencode, (("input",), ("output",), ("average_test_score",))),
    )
}
