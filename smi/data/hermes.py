"""The Hermes format: tool use written into ShareGPT turns as tagged text."""

from __future__ import annotations

import ast
import warnings
from typing import Any

from smi.data.formats import Raw, turns
from smi.protocol.conversation import Conversation
from smi.protocol.json_text import loads
from smi.protocol.stream import ProtocolError

MAX_LITERAL_CHARS = 1 << 16


def hermes(row: Raw) -> Conversation:
    """ShareGPT whose turns hold `<tool_call>` and `<tool_response>` blocks.

    Calls and the `tools` column are JSON or Python literals. Calls are numbered a1, a2, ... through the
    conversation; responses answer them in the order they were made. Text must stand before a turn's calls.
    """
    spoken: list[dict[str, Any]] = []
    unanswered: list[str] = []
    made = 0
    for index, (role, text) in enumerate(turns(row)):
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
    return Conversation(spoken, _literal(tools, "tools", "tools") if isinstance(tools, str) else tools)


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
