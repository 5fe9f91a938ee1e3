"""Why a row is left out: every reason there is, with a sentence for reports.

A reason is a short code to count by; the detail beside it says what was found in which place of the row.
"""

from __future__ import annotations

REASONS: dict[str, str] = {
    # the row as it was read
    "undecodable": "text that is not UTF-8",
    "json": "text that is not JSON, or a value that JSON has no form for",
    "duplicate_key": "a JSON object that names a key twice",
    "number": "a number that is not finite, or too large for JSON",
    "nesting": "JSON nested too deep",
    "text": "text with a lone surrogate, or text that the tokenizer would not give back exactly",
    "over_budget": "a row of too many bytes or values, or one that contains itself",
    "schema": "a column or member of another type than the format has, or parameters that are no JSON Schema",
    "filtered": "a row that the filters of its source leave out",
    # the format
    "adapter": "the source's own adapter function failed on the row",
    "score": "a score that is missing, no finite number, or below what the format asks for",
    "no_correct_generation": "no generation that is both complete and correct",
    "tool_call": "a <tool_call> block that is not closed, out of place, or no call",
    "tool_response": "a <tool_response> block that is not closed or out of place",
    # the conversation
    "messages": "messages that are no list of objects",
    "empty": "a conversation without messages",
    "role": "a message of an unknown role",
    "order": "a message that may not stand where it stands in its transmission",
    "content": "message content of an unknown kind",
    "span": "token ids of a modality that cannot be right",
    "field": "a message field that its role may not have, or that would be lost",
    "empty_turn": "a turn that says nothing",
    "reasoning": "reasoning that is missing, not closed, or given in two ways that differ",
    "no_target": "no supervised tokens: there is nothing to learn from",
    # tools and what surrounds the messages
    "tools": "tool declarations that are malformed or name a tool twice",
    "caps": "capabilities that are malformed",
    "ctrl": "a control object that is malformed",
    "tool_calls": "calls that are malformed",
    "missing_call_id": "a call, or the result of one, without an id",
    "duplicate_call_id": "a call id that was used before",
    "undeclared_tool": "a call of a tool that is not declared",
    "undeclared_action": "an action that is not declared",
    "arguments": "arguments that are no JSON object",
    "orphan_observation": "the result of a call that was not made",
    "duplicate_observation": "a second result of one call",
    "observation": "a result whose success, content and error contradict each other",
    # the document, and the documents around it
    "too_long": "more tokens than a document may have",
    "duplicate": "the same conversation came before",
    "near_duplicate": "nearly the same conversation came before",
    "contaminated": "a long run of words that also stands in a held-out file",
    "held_out": "kept for validation",
    "not_held_out": "kept for training",
    # the work
    "time_out": "the row took longer than a row may take",
    "crash": "the process that worked on the row died",
}


def describe(reason: str) -> str:
    """The sentence for a reason; a source's own adapter may give reasons of its own."""
    return REASONS.get(reason, "a reason of the source's own adapter")
