"""An answer in OpenAI's form: the assistant's message while it is put together, and the envelopes of chat completions,
whole or in chunks. Reasoning travels as `reasoning_content`, the name that the ecosystem gave it.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field, replace
from typing import Any

from smi.protocol.conversation import to_stream
from smi.protocol.json_text import dumps
from smi.protocol.payloads import parse_act
from smi.protocol.stream import Payload, ProtocolError, Stream
from smi.protocol.tokens import BlockType
from smi.runtime.openai_request import ChatRequest, read_message
from smi.runtime.turn import Reply


@dataclass
class Refused:
    """An action that is not handed out, as the client is told of it."""

    type: str
    where: str
    message: str

    def to_dict(self) -> dict[str, str]:
        return {"type": self.type, "where": self.where, "message": self.message}


@dataclass
class Message:
    """The assistant's message while it is put together, block by block.

    A call goes out once its block is whole and was checked; what is cut, malformed or undeclared, does not fit its
    schema or repeats an id is listed as refused.
    """

    request: ChatRequest
    reasoning: str = ""
    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)

    def say(self, kind: BlockType, text: str) -> dict[str, Any] | None:
        """More text of a block; the delta, or None where there is none."""
        if kind is BlockType.THINK:
            self.reasoning += text
            return {"reasoning_content": text}
        if kind is BlockType.OUT:
            self.content += text
            return {"content": text}
        return None

    def act(self, payload: Payload) -> dict[str, Any] | None:
        """A whole ACT block; the delta, or None where it is refused."""
        conversation = self.request.conversation
        caps = conversation.caps or {}
        try:
            action = parse_act(payload, conversation.tools or caps.get("tools") or [], caps.get("actions"))
            if action.id in self.request.calls or any(call["id"] == action.id for call in self.calls):
                raise ProtocolError("duplicate_call_id", "id", f"the call id {action.id!r} was used before")
        except ProtocolError as error:
            self.refused.append(Refused(error.reason, error.where, error.message))
            return None
        function = {"name": action.name, "arguments": dumps(action.arguments)}
        if action.type == "tool":
            self.calls.append({"id": action.id, "type": "function", "function": function})
        else:
            self.calls.append({"id": action.id, "type": "action", **function})
        return {"tool_calls": [{"index": len(self.calls) - 1, **self.calls[-1]}]}

    def cut(self) -> None:
        """An ACT block that a limit or a stop ended."""
        self.refused.append(Refused("unfinished", "", "cut by a limit before it was whole"))

    def to_dict(self) -> dict[str, Any]:
        made: dict[str, Any] = {"role": "assistant", "content": self.content or None, "refusal": None}
        if self.reasoning:
            made["reasoning_content"] = self.reasoning
        if self.calls:
            made["tool_calls"] = self.calls
        if self.refused:
            made["smi_refused_actions"] = [refused.to_dict() for refused in self.refused]
        return made

    def history(self) -> Stream | None:
        """The conversation with this answer, as the client will send it again; None where it cannot."""
        spoken = [*self.request.conversation.messages, read_message(self.to_dict(), -1)]
        try:
            return to_stream(replace(self.request.conversation, messages=spoken))
        except ProtocolError:
            return None

    def finish_reason(self, reply: Reply) -> str:
        return "tool_calls" if self.calls else "length" if reply.reason == "max_tokens" else "stop"


@dataclass(frozen=True)
class Usage:
    """Tokens of a request. cached: of the prompt, those that the state had read already."""

    prompt: int
    cached: int
    completion: int
    reasoning: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }


class Envelope:
    """Id, time and model that the answer and all its chunks share."""

    def __init__(self, request: ChatRequest) -> None:
        self._request = request
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": request.model}

    def whole(self, message: Message, finish_reason: str, usage: Usage) -> dict[str, Any]:
        choice = {"index": 0, "message": message.to_dict(), "logprobs": None, "finish_reason": finish_reason}
        return {**self._head, "object": "chat.completion", "choices": [choice], "usage": usage.to_dict()}

    def chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        made = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        return {**made, "usage": None} if self._request.include_usage else made

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage.to_dict()}
