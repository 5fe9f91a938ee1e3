"""Plays held-out conversations with a checkpoint and says what its actions, answers and predictions are worth.

python -m smi.evaluate runs/quickstart/2026-01-31_12-00-00 --data synthetic
python -m smi.evaluate CHECKPOINT --data talk.parquet --limit 200 --json scores.json --html scores.html

Exits 1 where a transmission passed its reasoning budget, and 2 where arguments, files or all rows are wrong.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from smi.data.adapters import ADAPTERS, get_adapter
from smi.data.pipeline import Compiler, Rejection, RowAccount
from smi.data.sources import Location, SourceSpec, find_files, missing_columns, read_rows
from smi.data.synthetic import SyntheticTools
from smi.protocol.codec import Example, encode
from smi.protocol.conversation import Conversation
from smi.protocol.render import render_html, visible
from smi.protocol.stream import ProtocolError, Stream, Transmission
from smi.protocol.tokens import BlockType
from smi.tokenizer import Tokenizer

if TYPE_CHECKING:
    from smi.runtime.evaluation import ActionScores, BlockLoss, Played

SYNTHETIC = "synthetic"
SYNTHETIC_ROWS = 100
SAMPLES = 6


@dataclass(frozen=True)
class Report:
    """What an evaluation found. max_tokens: of a transmission. account: what became of the rows."""

    checkpoint: str
    data: str
    max_tokens: int
    account: RowAccount
    scores: "ActionScores"
    losses: "dict[BlockType, BlockLoss]"

    @property
    def figures(self) -> list[tuple[str, int, int | None, str]]:
        """(what, count, of how many, of what) for people."""
        s = self.scores
        written, turns = "actions written", "transmissions"
        return [
            ("actions expected", s.expected, None, ""),
            (written, s.generated, None, ""),
            ("actions that parse", s.parsed, s.generated, written),
            ("... and are declared", s.declared, s.generated, written),
            ("... with valid arguments", s.valid, s.generated, written),
            ("actions exactly right", s.exact, max(s.expected, s.generated), "expected or written, whichever are more"),
            ("answers right word for word", s.answers_exact, s.answers, "transmissions that should only answer"),
            ("unfinished transmissions", s.unfinished, s.transmissions, turns),
            ("transmissions past their THINK budget", s.budget_violations, s.transmissions, turns),
            ("THINK tokens", s.think_tokens, None, ""),
        ]

    @property
    def total(self) -> "BlockLoss":
        """The loss over all block types."""
        from smi.runtime.evaluation import BlockLoss

        return BlockLoss(sum(x.tokens for x in self.losses.values()), sum(x.nll for x in self.losses.values()))

    def to_dict(self) -> dict[str, Any]:
        losses = {kind.name.lower(): loss for kind, loss in self.losses.items()} | {"all": self.total}
        return {
            "checkpoint": self.checkpoint,
            "data": self.data,
            "max_tokens": self.max_tokens,
            "rows": self.account.rows,
            "accepted": self.account.accepted,
            "rejected": dict(self.account.rejected),
            "scores": self.scores.to_dict(),
            "perplexity": {
                name: {"tokens": loss.tokens, "nll": loss.nll, "perplexity": loss.perplexity}
                for name, loss in losses.items()
            },
        }


def read_conversations(
    data: str, adapter_name: str, limit: int | None, tokenizer: Tokenizer
) -> tuple[list[Conversation], list[Example], RowAccount]:
    """The conversations of the first `limit` rows that are any, compiled, and what became of all rows.

    Raises ValueError for files that are not there or lack a column.
    """
    conversations, examples, account = [], [], RowAccount()
    compiler = Compiler(tokenizer, sys.maxsize)
    for talk, where in itertools.islice(_raw(data, adapter_name), limit):
        outcome = compiler(talk, where)
        account.add(outcome)
        if not isinstance(outcome, Rejection):
            assert isinstance(talk, Conversation)
            conversations.append(talk)
            examples.append(outcome.example)
    return conversations, examples, account


def _raw(data: str, adapter_name: str) -> Iterator[tuple[Conversation | ProtocolError, Location]]:
    if data == SYNTHETIC:
        talks = SyntheticTools().conversations(held_out=True)
        for row, talk in enumerate(itertools.islice(talks, SYNTHETIC_ROWS)):
            yield talk, Location(SYNTHETIC, "", None, row)
        return
    adapter = get_adapter(adapter_name)
    spec = SourceSpec(Path(data).name, data, adapter_name)
    for path in find_files(spec):
        if missing := missing_columns(path, adapter.needs):
            raise ValueError(f"{path} has no column {missing[0]}, which the adapter {adapter_name!r} needs")
    for row in read_rows(spec, columns=adapter.columns):
        if isinstance(row.value, ProtocolError):
            yield row.value, row.where
            continue
        try:
            yield adapter.convert(row.value), row.where
        except ProtocolError as error:
            yield error, row.where


def show(report: Report, console: Console) -> None:
    """Print the report as tables."""
    if report.account.rejected:
        console.print(str(report.account), highlight=False, markup=False)
    table = Table(title=f"{report.account.accepted} conversations, {report.scores.transmissions} transmissions")
    table.add_column("")
    for name in ("count", "share"):
        table.add_column(name, justify="right")
    table.add_column("of")
    for name, count, of, what in report.figures:
        table.add_row(name, f"{count:,}", _share(count, of), _of(of, what))
    console.print(table)
    table = Table(title="perplexity of the true tokens")
    table.add_column("block")
    for name in ("tokens", "perplexity"):
        table.add_column(name, justify="right")
    for name, loss in report.to_dict()["perplexity"].items():
        table.add_row(name, f"{loss['tokens']:,}", _readable(loss["perplexity"]))
    console.print(table)


def _share(count: int, of: int | None) -> str:
    return "" if of is None else f"{count / of:.1%}" if of else "-"


def _of(of: int | None, what: str) -> str:
    return "" if of is None else f"{of:,} {what}"


def _readable(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"


def page(report: Report, played: "list[Played]", tokenizer: Tokenizer) -> str:
    """The report as one HTML page that needs nothing else, with some transmissions as they were written."""
    figures = "".join(
        f'<tr><th scope="row">{name}<td>{count:,}<td>{_share(count, of)}<td class="text">{_of(of, what)}'
        for name, count, of, what in report.figures
    )
    losses = "".join(
        f'<tr><th scope="row">{name}<td>{loss["tokens"]:,}<td>{_readable(loss["perplexity"])}'
        for name, loss in report.to_dict()["perplexity"].items()
    )
    firsts = {
        reason: samples[0] for source in report.account.sources.values() for reason, samples in source.samples.items()
    }
    rejected = "".join(
        f'<tr><th scope="row">{escape(reason)}<td>{count:,}<td class="text">{escape(visible(str(firsts[reason])))}'
        for reason, count in report.account.rejected.most_common()
    )
    if rejected:
        head = '<tr><th scope="col">reason<th scope="col">rows<th scope="col" class="text">the first'
        rejected = f'<h2>Rows rejected</h2><table class="figures">{head}{rejected}</table>'
    title = escape(f"{report.checkpoint} on {report.data}")
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ max-width: 1000px; margin: 24px auto; padding: 0 16px; font: 14px/1.5 system-ui, sans-serif }}
table.figures {{ border-collapse: collapse; margin: 8px 0 24px }}
table.figures th, table.figures td {{ text-align: right; padding: 0 0 0 24px; vertical-align: top }}
table.figures td {{ font-variant-numeric: tabular-nums }}
table.figures th {{ font-weight: 400; opacity: .7 }}
table.figures th:first-child {{ text-align: left; padding: 0 }}
table.figures th[scope=row] {{ opacity: 1 }}
table.figures .text {{ text-align: left; overflow-wrap: anywhere }}
</style>
<h1>{title}</h1>
<p>{report.account.rows:,} rows, {report.account.accepted:,} conversations,
{report.scores.transmissions:,} transmissions, each generated greedily after the true ones before it,
with at most {report.max_tokens:,} tokens</p>
<table class="figures">
<tr><th scope="col">what<th scope="col">count<th scope="col">share<th scope="col" class="text">of{figures}
</table>
<h2>Perplexity of the true tokens</h2>
<table class="figures"><tr><th scope="col">block<th scope="col">tokens<th scope="col">perplexity{losses}</table>
{rejected}
<h2>Samples</h2>
<p>{len(played):,} of {report.scores.transmissions:,} transmissions: the last one of each is what the model wrote, those
before it are true. Blocks of the model's side are tinted and count as supervised.</p>
{"".join(_sample(number, turn, tokenizer) for number, turn in enumerate(played, 1))}
</html>
"""


def _sample(number: int, turn: "Played", tokenizer: Tokenizer) -> str:
    """A conversation with the model's transmission at its end, and the true one below where it differs."""
    same = turn.reply.transmission.blocks == turn.truth
    verdict = "as expected" if same else "not as expected"
    if turn.reply.reason != "eot":
        verdict += ", cut by the limit on its tokens"
    written = Stream((*turn.prompt.transmissions, turn.reply.transmission))
    html = f"<h3>{number}: {verdict}</h3>{render_html(encode(written, tokenizer, complete=False), tokenizer)}"
    if not same:
        truth = encode(Stream((Transmission(turn.truth),)), tokenizer, complete=False)
        html += f"<p>expected:</p>{render_html(truth, tokenizer)}"
    return html


def parser() -> argparse.ArgumentParser:
    """The command line."""
    it = argparse.ArgumentParser(
        prog="python -m smi.evaluate",
        description="Plays held-out conversations with a checkpoint and says what it is worth.",
    )
    it.add_argument("checkpoint", help="a run directory, an export, or a checkpoint in any layout")
    it.add_argument("--data", required=True, metavar="FILE", help=f"a .parquet, .jsonl or .json file, or {SYNTHETIC}")
    it.add_argument("--adapter", default="messages", help=f"format of the rows: {', '.join(ADAPTERS)} (messages)")
    it.add_argument("--tokenizer", help="where it is not beside the model")
    it.add_argument("--limit", type=int, metavar="N", help=f"rows, from the first (all; {SYNTHETIC} has 100)")
    it.add_argument("--batch", type=int, default=32, metavar="N", help="transmissions at a time (32)")
    it.add_argument("--max-tokens", type=int, default=256, metavar="N", help="of a transmission (256)")
    it.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    it.add_argument("--html", type=Path, metavar="FILE", help="write a page with figures and samples")
    return it


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    console = Console(highlight=False)
    try:
        for name in ("limit", "batch", "max_tokens"):
            if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be 1 or more")
        from smi.runtime.evaluation import block_losses, play, score
        from smi.runtime.loading import load_runtime

        runtime = load_runtime(arguments.checkpoint, arguments.tokenizer, capacity=1)
        model, tokenizer = runtime.model, runtime.tokenizer
        conversations, examples, account = read_conversations(
            arguments.data, arguments.adapter, arguments.limit, tokenizer
        )
        if not conversations:
            raise ValueError(f"{arguments.data} has no conversation that can be played:\n{account}")
        start, most, batch = runtime.time_state, arguments.max_tokens, arguments.batch
        played = play(model, tokenizer, conversations, max_tokens=most, batch=batch, time_state=start)
        scores = score(played, tokenizer)
        losses = block_losses(model, examples, start)
        report = Report(arguments.checkpoint, arguments.data, most, account, scores, losses)
        show(report, console)
        if arguments.json:
            arguments.json.write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
        if arguments.html:
            samples = played[:: max(len(played) // SAMPLES, 1)][:SAMPLES]
            arguments.html.write_text(page(report, samples, tokenizer), encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if scores.budget_violations:
        print(f"error: {scores.budget_violations} transmissions passed their reasoning budget", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
