"""The formats that public sources come in: a raw row -> a conversation, one pure function each.

A format only brings a row into shape; `smi.protocol.conversation.to_stream` judges what it says. What does not fit is
a ProtocolError with a reason of `smi.data.reasons`; nothing is repaired. Wherever a column holds nested values, it may
hold their JSON text instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from smi.data.filters import finite_number
from smi.protocol.conversation import REASONING_FIELDS, Conversation
from smi.protocol.json_text import loads
from smi.protocol.stream import ProtocolError

Raw = Mapping[str, Any]

MIN_TEST_SCORE = 0.8


def messages(row: Raw) -> Conversation:
    """Chat messages as they are: `messages`, or `messages_json` (it wins where both are there).

    `tools` or `tools_json`, `smi_ctrl` and `smi_caps` may stand beside them. Where `chat_template_kwargs` says
    `preserve_thinking: false`, only the messages after the last user message keep their reasoning, as they would in
    a chat template; without it, all do.
    """
    talk = _either(row, "messages")
    if not _preserves_thinking(row):
        talk = _without_past_reasoning(talk)
    return Conversation(
        messages=talk,
        tools=_either(row, "tools"),
        ctrl=value(row.get("smi_ctrl"), "smi_ctrl"),
        caps=value(row.get("smi_caps"), "smi_caps"),
    )


def _either(row: Raw, column: str) -> Any:
    """A column, or its `_json` form where that is there. `to_stream` says so where the value is of no use."""
    text = row.get(f"{column}_json")
    return value(row.get(column), column) if text is None else _json_text(text, f"{column}_json")


def _preserves_thinking(row: Raw) -> bool:
    settings = value(row.get("chat_template_kwargs"), "chat_template_kwargs")
    if settings is None:
        return True
    if not isinstance(settings, dict):
        raise ProtocolError("schema", "chat_template_kwargs", f"expected an object, not {type(settings).__name__}")
    preserve = settings.get("preserve_thinking")
    if preserve is not None and type(preserve) is not bool:
        raise ProtocolError("schema", "chat_template_kwargs.preserve_thinking", f"true or false, not {preserve!r}")
    return preserve is not False


def _without_past_reasoning(talk: Any) -> Any:
    if not isinstance(talk, list):
        return talk
    users = [i for i, message in enumerate(talk) if isinstance(message, dict) and message.get("role") == "user"]
    last = users[-1] if users else 0
    return [
        {key: part for key, part in message.items() if key not in REASONING_FIELDS}
        if i < last and isinstance(message, dict)
        else message
        for i, message in enumerate(talk)
    ]


def openai_tools(row: Raw) -> Conversation:
    """OpenAI's format for training on tool use: `messages` with `tools`, or with the `functions` of older days.

    There, a message makes one `function_call` without an id, and a message of the role function answers it by name:
    these become calls numbered a1, a2, ... and their results. `messages_json` and `tools_json` may stand instead.
    """
    talk = _either(row, "messages")
    tools = _either(row, "tools")
    functions = value(row.get("functions"), "functions")
    if functions:
        if tools:
            raise ProtocolError("tools", "functions", "tools are declared twice, as tools and as functions")
        tools = functions
    return Conversation(messages=_with_call_ids(talk) if isinstance(talk, list) else talk, tools=tools)


def _with_call_ids(talk: list[Any]) -> list[Any]:
    spoken: list[Any] = []
    made = 0
    # the call that waits for its result: (id, name)
    open_call: tuple[str, Any] | None = None
    for index, message in enumerate(talk):
        where = f"messages[{index}]"
        if isinstance(message, dict) and (call := message.get("function_call")) is not None:
            if not isinstance(call, dict) or message.get("tool_calls"):
                raise ProtocolError("tool_calls", where, "function_call is one object, without tool_calls beside it")
            made += 1
            open_call = (f"a{made}", call.get("name"))
            rest = {key: part for key, part in message.items() if key != "function_call"}
            message = rest | {"tool_calls": [{"id": open_call[0], "type": "function", "function": call}]}
        elif isinstance(message, dict) and message.get("role") == "function":
            if open_call is None or open_call[1] != message.get("name"):
                name = message.get("name")
                raise ProtocolError("orphan_observation", where, f"no call of {name!r} waits for a result")
            rest = {key: part for key, part in message.items() if key != "name"}
            message = rest | {"role": "tool", "tool_call_id": open_call[0]}
            open_call = None
        spoken.append(message)
    return spoken


_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
}


def sharegpt(row: Raw) -> Conversation:
    """`conversations` of `{"from", "value"}`, plain talk without tools; a `system` column stands before it."""
    spoken = [{"role": role, "content": text} for role, text in turns(row)]
    if (system := row.get("system")) is not None and system != "":
        spoken.insert(0, {"role": "system", "content": _text(row, "system")})
    return Conversation(messages=spoken)


def aya(row: Raw) -> Conversation:
    """One question and its answer: `inputs`, `targets`."""
    return _exchange(_text(row, "inputs"), _text(row, "targets"))


def opencode(row: Raw) -> Conversation:
    """A coding task and its solution, kept where the solution passed at least 0.8 of its tests.

    `average_test_score` is text; what is no finite number is no score.
    """
    score = row.get("average_test_score")
    passed = finite_number(score)
    if passed is None or passed < MIN_TEST_SCORE:
        raise ProtocolError("score", "average_test_score", f"{score!r} is not a score of {MIN_TEST_SCORE} or more")
    return _exchange(_text(row, "input"), _text(row, "output"))


_THINK = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)


def openr1(row: Raw) -> Conversation:
    """A problem with the first of its `generations` that is complete and correct by either judge.

    `<think>...</think>` at its start becomes the reasoning, what follows the answer.
    """
    problem = _text(row, "problem")
    generations = value(row.get("generations"), "generations")
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
    parts = _THINK.fullmatch(generation)
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
    flags = value(row.get(column), column)
    if flags is None:
        flags = []
    if not isinstance(flags, list):
        raise ProtocolError("schema", column, f"expected a list of flags, not {type(flags).__name__}")
    return lambda index: index < len(flags) and flags[index] is True


def turns(row: Raw) -> list[tuple[str, str]]:
    """(role, text) of every ShareGPT turn."""
    talk = value(row.get("conversations"), "conversations")
    if not isinstance(talk, list):
        raise ProtocolError("schema", "conversations", f"expected a list of turns, not {type(talk).__name__}")
    result = []
    for index, turn in enumerate(talk):
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


def _json_text(text: object, where: str) -> Any:
    if not isinstance(text, str):
        raise ProtocolError("schema", where, f"expected JSON text, not {type(text).__name__}")
    try:
        return loads(text)
    except ProtocolError as error:
        raise ProtocolError(error.reason, where, error.message) from None


def value(column: Any, where: str) -> Any:
    """What a column holds that may be nested: the value itself, or the one its JSON text stands for."""
    return _json_text(column, where) if isinstance(column, str) else column
