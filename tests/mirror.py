"""The small mirror of public sources, and what should become of every row of it."""

import json
from pathlib import Path

from hydra import compose, initialize_config_dir

from smi.composing import config_dir, judge, register
from smi.config import source_options
from smi.data.sources import SourceSpec

HUB = Path(__file__).parent / "data" / "hub"
EXPECTED = json.loads((HUB / "expectations.json").read_text())


def _pilot() -> dict[str, SourceSpec]:
    register()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        config = judge(compose("prepare", ["data=pilot", "tokenizer=rwkv_world"]))
    return {name: SourceSpec(name, **source_options(source)) for name, source in config.data.source.items()}


SOURCES = _pilot()
# what the mirror says about a faulty row -> the reason it is counted under
REASONS = {
    "duplicate": "duplicate",
    "no model-side target": "no_target",
    "unknown role": "role",
    "empty conversation": "empty",
    "null messages": "messages",
    "longer than 2048 tokens": "too_long",
    "assistant turn is only white space: no target": "empty_turn",
    "empty target": "empty_turn",
    "null input": "schema",
    "white-space input": "empty_turn",
    "call names an undeclared tool": "undeclared_tool",
    "arguments are not valid JSON": "arguments",
    "arguments are a list, not a mapping": "arguments",
    "observation for an unknown call id": "orphan_observation",
    "duplicate call id": "duplicate_call_id",
    "calls without any declared tool": "undeclared_tool",
    "tools is a number": "tools",
    "line is not JSON": "json",
    "line is an array": "schema",
    "lone surrogate in text": "text",
    "NaN in arguments": "arguments",
    "nested 2000 deep": "arguments",
    "unclosed tool_call block": "tool_call",
    "tool response without a call": "orphan_observation",
    "tools string is code, and must never be evaluated": "tools",
    "message value is not text": "schema",
    "no generation is correct": "no_correct_generation",
    "no generation is complete": "no_correct_generation",
    "flags shorter than generations: none correct in range": "no_correct_generation",
    "empty problem": "empty_turn",
    "score below 0.8": "score",
    "score is nan": "score",
    "score is inf": "score",
    "score is not a number": "score",
    "score is null": "score",
}
