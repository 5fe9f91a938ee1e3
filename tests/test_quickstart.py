"""The quickstart to its end: trained as its recipe says, and then at work through the agent loop."""

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from smi.data.synthetic import SyntheticTools
from smi.protocol.conversation import Conversation
from smi.runtime.agent import Agent
from smi.runtime.loading import load_runtime
from smi.runtime.tools import Tool, ToolError

TASKS = 40


def world_of(talk: Conversation) -> list[Tool]:
    """The tools that a conversation declares; each call that it makes has the result that it had."""
    results: dict[str, Any] = {m["tool_call_id"]: m for m in talk.messages if m["role"] == "tool"}
    known = {}
    for message in talk.messages:
        for call in message.get("tool_calls") or ():
            function = call["function"]
            known[function["name"], json.dumps(function["arguments"], sort_keys=True)] = results[call["id"]]

    def bound(name: str) -> Tool:
        def run(**arguments: Any) -> Any:
            result = known.get((name, json.dumps(arguments, sort_keys=True)))
            if result is None:
                raise ToolError("not_found", "nobody asked for this")
            if result.get("error"):
                raise ToolError(result["error"]["type"], result["error"]["message"])
            return result["content"]

        return Tool(declarations[name], run)

    declarations = {tool["name"]: tool for tool in talk.tools or ()}
    return [bound(name) for name in declarations]


def answers(export: Path, talks: list[Conversation]) -> list[tuple[str, str]]:
    """Of each conversation's question, what the agent says in the end, and what it should say."""
    said = []
    runtime = load_runtime(str(export))
    for talk in talks:
        texts = {message["role"]: message.get("content") for message in talk.messages}
        options = {"system": texts.get("system"), "developer": texts.get("developer"), "ctrl": talk.ctrl}
        with Agent(runtime, world_of(talk), max_steps=4, max_tokens=400, **options) as agent:
            result = agent.run(texts["user"])
        assert result.steps <= 4
        assert result.tokens <= 400
        said.append((result.text, texts["assistant"]))
    return said


@pytest.mark.full
def test_the_trained_agent_answers_questions_that_were_held_out(tmp_path):
    command = [sys.executable, "-m", "smi.train", "+recipe=quickstart", f"paths.run_dir={tmp_path / 'run'}"]
    subprocess.run(command, check=True, cwd=tmp_path)
    talks = list(islice(SyntheticTools(0, max_questions=1).conversations(held_out=True), TASKS))
    said = answers(tmp_path / "run" / "export", talks)
    right = sum(text == expected for text, expected in said)
    assert right >= 0.6 * TASKS, said
