"""Random conversations for property tests: every role and every slot that text can stand in."""

from typing import Any

import families
import strategies
from hypothesis import strategies as st

from smi.protocol import Conversation

NAMESPACES = strategies.NAMESPACES


def hostile() -> st.SearchStrategy[str]:
    """Structural and special spellings, pieces of them, and what JSON has to escape."""
    pieces = st.sampled_from(['"', "\\", "\\n", "{", "\n", " ", "\u2028", "<|", "|>"])
    return st.lists(families.hostile() | pieces, max_size=3).map("".join)


def clean() -> st.SearchStrategy[str]:
    """Text without the characters that structural tokens and JSON objects start with."""
    return st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<{"), max_size=12)


def spans() -> st.SearchStrategy[dict[str, Any]]:
    """A part of tokens."""
    return strategies.spans().map(lambda span: {"type": "span", "namespace": span.namespace, "ids": list(span.ids)})


def values(text: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(text, inner, max_size=2), max_leaves=4
    )


def objects(text: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(text, values(text), max_size=2)


def filled(text: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return text.map(lambda found: found + "x")


@st.composite
def conversations(draw: st.DrawFn, text: st.SearchStrategy[str], modal: bool = True) -> Conversation:
    """A conversation that `to_stream` takes.

    text: what to fill it with. modal: with spans and JSON readings, which a template cannot write.
    """
    name = filled(text)
    schema = st.builds(lambda key, about: {"properties": {key: {"description": about}}}, text, text)
    tool = st.fixed_dictionaries({"name": name}, optional={"description": text, "parameters": schema})
    tools = draw(st.lists(tool, max_size=2, unique_by=lambda found: found["name"]))
    tools = [{"type": "function", "function": found} if draw(st.booleans()) else found for found in tools]
    actions = draw(st.lists(name, max_size=2, unique=True))
    part = st.builds(lambda found: {"type": "text", "text": found}, text)
    if modal:
        part |= spans() | st.builds(lambda found: {"type": "smi_payload", "payload": found}, objects(text))
    content = text | st.lists(part, max_size=3)
    # an observation of this spelling would be taken for the result of a call
    seen = st.lists(part, min_size=1, max_size=2).map(lambda found: [{"type": "text", "text": "seen "}, *found])
    calls: list[tuple[str, bool]] = []
    open_calls: list[str] = []

    def act() -> dict[str, Any]:
        choices = ["tool"] * bool(tools) + ["action", "tokens"] * bool(actions)
        kind = draw(st.sampled_from(choices))
        if kind == "tokens":
            action = draw(spans().map(lambda found: [found]) if modal else st.just("x"))
            return {"type": "action", "content": action}
        id = f"{draw(text)}{len(calls)}"
        calls.append((id, kind == "tool"))
        open_calls.append(id)
        arguments = draw(objects(text))
        if kind == "action":
            return {"id": id, "type": "action", "name": draw(st.sampled_from(actions)), "arguments": arguments}
        chosen = draw(st.sampled_from(tools))
        function = {"name": chosen.get("function", chosen)["name"], "arguments": arguments}
        return {"id": id, "type": "function", "function": function} if draw(st.booleans()) else {"id": id, **function}

    def assistant() -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": draw(st.none() | content)}
        if draw(st.booleans()):
            message[draw(st.sampled_from(["reasoning_content", "thinking"]))] = draw(filled(text))
        if (tools or actions) and draw(st.booleans()):
            message["tool_calls"] = [act() for _ in range(draw(st.integers(1, 2)))]
        if "tool_calls" not in message:
            message["content"] = draw(filled(text))
        return message

    def result() -> dict[str, Any]:
        id = open_calls.pop(draw(st.integers(0, len(open_calls) - 1)))
        if draw(st.booleans()):
            return {"role": "tool", "tool_call_id": id, "content": draw(values(text))}
        error = {"code": 1, "type": draw(text), "message": draw(text)}
        return {"role": "tool", "tool_call_id": id, "ok": False, "error": error}

    messages: list[dict[str, Any]] = []
    for _ in range(draw(st.integers(1, 2))):
        heads = [role for role in ("system", "developer") if draw(st.booleans())]
        messages += [{"role": role, "content": draw(content)} for role in heads]
        for _ in range(draw(st.integers(1, 2))):
            if open_calls and draw(st.booleans()):
                messages.append(result())
            elif draw(st.booleans()):
                messages.append({"role": "environment", "content": draw(seen)})
            else:
                messages.append({"role": "user", "content": draw(content)})
        messages += [assistant() for _ in range(draw(st.integers(1, 2)))]
    return Conversation(
        messages,
        tools=tools or None,
        ctrl=draw(st.none() | st.just({"reasoning": {"mode": "adaptive"}})),
        caps={"actions": actions} if actions else None,
    )
