"""What became of a run, for people: `report.html` in its directory.

Made from the files beside it alone (`config.yaml`, `history.jsonl`, `samples.jsonl`), with its pictures inside.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from lightning.pytorch.utilities.exceptions import SIGTERMException

from smi.pages import page, picture, table
from smi.protocol.render import COLOURS, visible
from smi.protocol.tokens import BlockType
from smi.training.loggers import HISTORY_FILE, cut_lines, read_history, read_lines
from smi.training.report_plots import KINDS, plots
from smi.training.run_directory import CONFIG_FILE
from smi.training.samples import SAMPLES_FILE

REPORT = "report.html"
# samplings that are shown: the last, and so many spread over those before it
EARLIER = 3
_MEASURES = ("loss", "accuracy", "entropy")
# characters of a block of a prompt
SHOWN = 600

log = logging.getLogger("smi")

_STYLE = """
details { margin: .6rem 0 } summary { cursor: pointer; color: #555 }
pre { font: 13px/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; overflow-x: auto }
.talk { border: 1px solid #ddd; border-radius: 6px; margin: .8rem 0; padding: .6rem .8rem }
.talk p { margin: 0; padding: .1rem 0 .1rem .7rem; border-left: 3px solid var(--c); white-space: pre-wrap;
  overflow-wrap: anywhere;
  font: 13px/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace }
.talk b { color: var(--c); margin-right: .6rem } .talk hr { border: 0; border-top: 1px dashed #bbb; margin: .5rem 0 }
.ok { color: #1a7f37 } .bad { color: #a00 } .note { color: #555 }
"""


class WriteReport(L.Callback):
    """Writes the report when training ends, also where it was stopped or failed.

    A resumed run leaves out of the files what an earlier process wrote after the checkpoint.
    """

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            for name in (HISTORY_FILE, SAMPLES_FILE):
                cut_lines(self.run_dir / name, trainer.global_step)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            write_report(self.run_dir, finished(trainer))

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if not trainer.is_global_zero:
            return
        if isinstance(exception, KeyboardInterrupt | SIGTERMException):
            status = f"Stopped in step {trainer.global_step + 1:,}."
        else:
            status = f"Failed in step {trainer.global_step + 1:,}: {type(exception).__name__}: {exception}"
        try:
            write_report(self.run_dir, status, failed=True)
        except OSError as error:
            # what stopped the run is what should be seen
            log.warning("the report could not be written: %s", error)


def finished(trainer: L.Trainer) -> str:
    """The status of a run that came to its end."""
    early = "" if trainer.global_step >= trainer.max_steps else ", stopped early"
    return f"Finished after {trainer.global_step:,} steps{early}."


def write_report(
    run_dir: Path, status: str, *, failed: bool = False, results: Mapping[str, float] | None = None
) -> Path:
    """Write the report of the run in `run_dir`.

    Args:
        status: what became of it, a sentence.
        failed: whether that is bad news.
        results: figures of the finished model.
    """
    figures, samples = read_history(run_dir), read_lines(run_dir / SAMPLES_FILE)
    config_text = (run_dir / CONFIG_FILE).read_text(encoding="utf-8") if (run_dir / CONFIG_FILE).is_file() else ""
    config = yaml.safe_load(config_text) or {}
    name = str(config.get("name", run_dir.name))
    images = plots(figures)

    def drawn(image: str, says: str) -> str:
        return picture(images[image], says) if image in images else ""

    parts = [
        f"<h1>{escape(name)}</h1>",
        f'<p class="{"bad" if failed else "note"}">{escape(status)}</p>',
        f'<p class="note">{escape(str(run_dir))}</p>',
        "<h2>Loss</h2>" if images else "<p>No step was logged.</p>",
        drawn("loss", "loss, accuracy and entropy over the steps"),
        _summary(figures, config),
        "<h2>By block type</h2>" if "blocks" in images else "",
        drawn("blocks", "loss and accuracy by block type; points are validation"),
        _by_block(figures),
        _results(results or {}),
        _samples(samples),
        "<h2>Optimizer</h2>" if "optimizer" in images else "",
        drawn("optimizer", "learning rate by group, gradient norm"),
        "<h2>Speed and memory</h2>" if "speed" in images else "",
        drawn("speed", "tokens a second, and utilisation or time spent waiting"),
        drawn("memory", "memory over the steps"),
        "<h2>Mixture</h2>" if "mixture" in images else "",
        drawn("mixture", "share of each source in the supervised tokens so far"),
        "<h2>All figures</h2>" if figures else "",
        _all_figures(figures),
        "<h2>Config</h2>" if config_text else "",
        f"<details><summary>{CONFIG_FILE}</summary><pre>{escape(config_text)}</pre></details>" if config_text else "",
    ]
    target = run_dir / REPORT
    draft = target.with_name(f".{REPORT}.partial")
    draft.write_text(page(name, parts, _STYLE), encoding="utf-8")
    draft.replace(target)
    return target


def _last(figures: Mapping[str, Mapping[int, float]], name: str) -> float | None:
    points = figures.get(name)
    return None if not points else points[max(points)]


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if value == int(value) and abs(value) >= 1000:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _summary(figures: Mapping[str, Mapping[int, float]], config: Mapping[str, Any]) -> str:
    if not figures:
        return ""
    model = (config.get("model") or {}).get("name", "")
    rows = [
        ("model", str(model)),
        ("loss, training / validation", _pair(figures, "loss")),
        ("accuracy, training / validation", _pair(figures, "accuracy")),
        ("tokens", _number(_last(figures, "data/tokens"))),
        ("supervised tokens", _number(_last(figures, "data/supervised_tokens"))),
        ("tokens a second", _number(_last(figures, "speed/tokens_per_s"))),
        ("packing", _percent(_last(figures, "data/packing"))),
        ("model flops utilisation", _percent(_last(figures, "speed/mfu"))),
    ]
    return table(("figure", "at the end"), [row for row in rows if row[1]])


def _pair(figures: Mapping[str, Mapping[int, float]], name: str) -> str:
    values = (_number(_last(figures, f"{stage}/{name}")) for stage in ("train", "val"))
    return " / ".join(value for value in values if value)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _by_block(figures: Mapping[str, Mapping[int, float]]) -> str:
    """Of the latest validation, or the latest step where nothing was validated."""
    stage = "val" if "val/loss" in figures else "train"
    rows = [
        (
            kind.name,
            *(
                _number(_last(figures, f"{stage}/{what}_{kind.name.lower()}"))
                for what in ("loss", "accuracy", "entropy")
            ),
        )
        for kind in (*KINDS, BlockType.EOS)
        if f"{stage}/loss_{kind.name.lower()}" in figures
    ]
    if not rows:
        return ""
    name = {"val": "validation", "train": "training"}[stage]
    return table((f"block type, {name}", *_MEASURES), rows, numbers=(1, 2, 3))


def _results(results: Mapping[str, float]) -> str:
    if not results:
        return ""
    rows = [(name, _number(value)) for name, value in results.items()]
    return "<h2>The finished model</h2>" + table(("figure", "value"), rows, numbers=(1,))


def _samples(samples: Sequence[dict[str, Any]]) -> str:
    if not samples:
        return ""
    steps = sorted({row["step"] for row in samples})
    before = steps[:-1]
    shown = sorted({before[i * (len(before) - 1) // max(EARLIER - 1, 1)] for i in range(EARLIER)} if before else set())
    parts = [
        "<h2>Samples</h2>",
        '<p class="note">Held-out prompts, continued by the model below the dashed line. Verdicts are of its actions: '
        "right is the expected one, valid one that a runtime could run.</p>",
        *(_talk(row) for row in samples if row["step"] == steps[-1]),
    ]
    for step in reversed(shown):
        talks = "".join(_talk(row) for row in samples if row["step"] == step)
        parts.append(f"<details><summary>after {step:,} steps</summary>{talks}</details>")
    return "\n".join(parts)


def _talk(row: Mapping[str, Any]) -> str:
    verdicts = iter(row["verdicts"])
    reply = []
    for kind, text in row["reply"]:
        verdict = next(verdicts, "") if kind == "act" else ""
        reply.append(_block(kind, text, verdict))
    notes = [] if row["reason"] == "eot" else ["ended by the limit on its tokens"]
    if row["reply"] != row["expected"]:
        expected = "".join(_block(kind, text) for kind, text in row["expected"])
        notes.append(f"<details><summary>expected</summary>{expected}</details>")
    prompt = "".join(_block(kind, text if len(text) <= SHOWN else f"{text[:SHOWN]}...") for kind, text in row["prompt"])
    note = "".join(f'<div class="note">{text}</div>' for text in notes)
    return f'<div class="talk">{prompt}<hr>{"".join(reply)}{note}</div>'


def _block(kind: str, text: str, verdict: str = "") -> str:
    good = "ok" if verdict in ("right", "valid") else "bad"
    mark = f' <span class="{good}">[{escape(verdict)}]</span>' if verdict else ""
    colour = COLOURS[BlockType[kind.upper()]]
    return f'<p style="--c:{colour}"><b>{kind}</b>{escape(visible(text))}{mark}</p>'


def _all_figures(figures: Mapping[str, Mapping[int, float]]) -> str:
    rows = [
        (name, _number(_last(figures, name)), _number(min(points.values())), _number(max(points.values())), len(points))
        for name, points in sorted(figures.items())
    ]
    if not rows:
        return ""
    content = table(("figure", "last", "lowest", "highest", "points"), rows, numbers=(1, 2, 3))
    return f"<details><summary>{len(rows)} figures</summary>{content}</details>"
