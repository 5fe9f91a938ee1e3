"""Held-out prompts that the model continues every so often, with what its actions are worth."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from smi.config import SamplesConfig
from smi.data.batch import PackedBatch
from smi.model.modeling import RWKV7ForCausalLM
from smi.protocol.codec import decode
from smi.protocol.json_text import loads
from smi.protocol.render import visible
from smi.protocol.stream import Block, Stream
from smi.protocol.tokens import BlockType, Side
from smi.runtime.evaluation import VERDICTS, judge_action, replies
from smi.runtime.grammar import Limits
from smi.runtime.session import Runtime
from smi.runtime.turn import Reply
from smi.tokenizer import Tokenizer
from smi.training.loggers import append_lines
from smi.training.module import SMIModule
from smi.training.tuning import merged

SAMPLES_FILE = "samples.jsonl"

log = logging.getLogger("smi")


@dataclass(frozen=True)
class Prompt:
    """A held-out conversation up to a transmission of the model, and that transmission."""

    stream: Stream
    expected: tuple[Block, ...]


class Samples(L.Callback):
    """Lets the model continue held-out prompts greedily, and writes them to ``samples.jsonl`` and to the loggers.

    The prompts are the first documents of the validation batches, the same each time. Adds ``samples/actions`` to the
    figures, and the shares of them that parse, name a declared tool, have valid arguments, and are the expected ones.
    Weights, gradients, random numbers and the model's mode are left as they were.

    Rank 0 does it alone, so a model whose parameters are spread over ranks has no samples; nor has one that is not
    RWKV-7. Both are said once.
    """

    def __init__(self, how: SamplesConfig, run_dir: Path):
        self.how = how
        self.run_dir = run_dir
        self._prompts: list[Prompt] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        data: Any = getattr(trainer, "datamodule", None)
        if not trainer.is_global_zero or data is None:
            return
        self._tokenizer: Tokenizer = data.tokenizer
        reason = _reason_against(trainer, cast(SMIModule, pl_module))
        if reason is None:
            self._prompts = prompts(data.val_dataloader(), self._tokenizer, self.how.count)
            reason = None if self._prompts else "no validation data, so there are no held-out prompts"
        if reason is not None:
            log.info("no samples of what the model writes: %s", reason)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: PackedBatch, batch_idx: int
    ) -> None:
        module, step = cast(SMIModule, pl_module), trainer.global_step
        if not self._prompts or not module.stepped:
            return
        if step % self.how.every and step != trainer.max_steps:
            return
        start, most = module.time_state, self.how.max_tokens
        rows = write_samples(module.model, self._tokenizer, self._prompts, most, start)
        append_lines(self.run_dir / SAMPLES_FILE, [{"step": step} | row for row in rows])
        _to_loggers(trainer, step, rows)
        figures = _figures(rows)
        module.log_dict(figures, logger=False, rank_zero_only=True)
        module.record(figures)


def _reason_against(trainer: L.Trainer, module: SMIModule) -> str | None:
    if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
        return "its parameters are spread over ranks"
    if not isinstance(module.model, RWKV7ForCausalLM):
        return "the runtime runs RWKV-7 alone"
    return None


def prompts(batches: Sequence[PackedBatch], tokenizer: Tokenizer, count: int) -> list[Prompt]:
    """Of the first `count` documents, each up to one of the model's transmissions: the first, the second, and so on."""
    found: list[Prompt] = []
    for stream in _streams(batches, tokenizer):
        turns = [i for i, said in enumerate(stream.transmissions) if said.side is Side.MODEL and i]
        if not turns:
            continue
        at = turns[len(found) % len(turns)]
        found.append(Prompt(Stream(stream.transmissions[:at]), stream.transmissions[at].blocks))
        if len(found) == count:
            break
    return found


def _streams(batches: Sequence[PackedBatch], tokenizer: Tokenizer) -> Iterator[Stream]:
    for batch in batches:
        ids = batch.input_ids[0]
        for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
            yield decode(ids[start:end].tolist(), tokenizer)


def write_samples(
    model: RWKV7ForCausalLM,
    tokenizer: Tokenizer,
    asked: Sequence[Prompt],
    max_tokens: int,
    time_state: torch.Tensor | None = None,
) -> list[dict[str, Any]]:
    """The continuations as plain values: prompt, expected, reply (lists of type and text), verdicts, reason.

    time_state: float32 [L, H, V, K], the state that each begins with; zero when absent.
    """
    modes = [(module, module.training) for module in model.modules()]
    devices = [model.head.weight.device] if model.head.weight.device.type == "cuda" else []
    try:
        with torch.no_grad(), torch.random.fork_rng(devices), merged(model):
            runtime = Runtime(model, tokenizer, capacity=len(asked), time_state=time_state)
            written = replies(runtime, [prompt.stream for prompt in asked], Limits(max_tokens))
    finally:
        for module, mode in modes:
            module.training = mode
    return [
        {
            "prompt": [_plain(block) for said in prompt.stream.transmissions for block in said.blocks],
            "expected": [_plain(block) for block in prompt.expected],
            "reply": [_plain(block) for block in reply.transmission.blocks],
            "verdicts": _verdicts(prompt, reply),
            "reason": reply.reason,
        }
        for prompt, reply in zip(asked, written, strict=True)
    ]


def _plain(block: Block) -> list[str]:
    text = block.payload if isinstance(block.payload, str) else str(block.payload)
    return [block.type.name.lower(), text]


def _verdicts(prompt: Prompt, reply: Reply) -> list[str]:
    """Of each ACT block in the reply: one of VERDICTS, "right" where it is the expected one, or "cut"."""
    declared = [b.text for said in prompt.stream.transmissions for b in said.blocks if b.type is BlockType.CAPS]
    caps: dict[str, Any] = loads(declared[-1]) if declared else {}
    expected = [block.payload for block in prompt.expected if block.type is BlockType.ACT]
    acts = [(i, b.payload) for i, b in enumerate(reply.transmission.blocks) if b.type is BlockType.ACT]
    found: list[str] = []
    for place, (number, payload) in enumerate(acts):
        if number in reply.cut:
            found.append("cut")
        elif place < len(expected) and payload == expected[place]:
            found.append("right")
        else:
            found.append(judge_action(payload, caps.get("tools") or [], caps.get("actions")))
    return found


def _figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    verdicts = [verdict for row in rows for verdict in row["verdicts"]]
    reached = [[*VERDICTS, "right"].index(verdict) if verdict != "cut" else 0 for verdict in verdicts]
    figures = {"samples/actions": float(len(verdicts))}
    if verdicts:
        for least, name in enumerate(("parsed", "declared", "valid", "right"), 1):
            figures[f"samples/{name}"] = sum(reach >= least for reach in reached) / len(reached)
    return figures


def as_text(row: dict[str, Any]) -> str:
    """A sample for people: the blocks of prompt and reply, a line or more each, and the verdicts."""
    prompt = [f"{kind:<6}{visible(text)}" for kind, text in row["prompt"]]
    reply = [f"{kind:<6}{visible(text)}" for kind, text in row["reply"]]
    verdicts = f"[{', '.join(row['verdicts'])}]" if row["verdicts"] else ""
    return "\n".join([*prompt, "---", *reply, verdicts]).strip()


def _to_loggers(trainer: L.Trainer, step: int, rows: Sequence[dict[str, Any]]) -> None:
    texts = [as_text(row) for row in rows]
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            for number, text in enumerate(texts):
                # four blanks in front: a block of code in its Markdown
                indented = "\n".join(f"    {line}" for line in text.split("\n"))
                logger.experiment.add_text(f"samples/{number}", indented, step)
        elif isinstance(logger, WandbLogger):
            columns = ["step", "sample", "verdicts"]
            table = [[step, text, ", ".join(row["verdicts"])] for text, row in zip(texts, rows, strict=True)]
            logger.log_table("samples/text", columns=columns, data=table)
