"""What training data looks like: a table and plots that need nothing but text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO

import numpy as np
from numpy.typing import NDArray
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table

BINS = 12
WIDTH = 40


@dataclass(frozen=True, eq=False)
class Facts:
    """Figures of some documents and of the packs that they are in.

    sources: names. source_of: int [documents], places in `sources`. tokens, targets: int [documents], tokens and
    supervised ones. pack_tokens: int [packs].
    """

    sources: list[str]
    source_of: NDArray[np.int64]
    tokens: NDArray[np.integer]
    targets: NDArray[np.integer]
    pack_tokens: NDArray[np.integer]


@dataclass(frozen=True, eq=False)
class Description:
    """Facts that show themselves: in a notebook, and with rich's `print` in a terminal."""

    facts: Facts
    pack_length: int

    def __repr__(self) -> str:
        facts = self.facts
        return (
            f"Description({facts.tokens.size:,} documents, {facts.tokens.sum():,} tokens, "
            f"{facts.targets.sum():,} supervised, {facts.pack_tokens.size:,} packs, fill {self.fill:.1%})"
        )

    @property
    def fill(self) -> float:
        """Share of the packs that is in use, 0 to 1."""
        # a document that is longer than a pack fills one as long as itself
        return float(self.facts.pack_tokens.sum() / np.maximum(self.facts.pack_tokens, self.pack_length).sum())

    def table(self) -> Table:
        """One line a source."""
        table = Table(title="Sources")
        table.add_column("source")
        for column in ("documents", "tokens", "supervised", "share", "shortest", "median", "longest"):
            table.add_column(column, justify="right")
        facts = self.facts
        for number, name in enumerate(facts.sources):
            self._row(table, name, facts.source_of == number)
        if len(facts.sources) > 1:
            table.add_section()
            self._row(table, "all", np.ones(facts.tokens.size, bool))
        return table

    def _row(self, table: Table, name: str, chosen: NDArray[np.bool_]) -> None:
        tokens, targets = self.facts.tokens[chosen], self.facts.targets[chosen]
        if not tokens.size:
            table.add_row(name, "0")
            return
        lengths = (tokens.min(), int(np.median(tokens)), tokens.max())
        share = f"{targets.sum() / tokens.sum():.1%}"
        counts = (tokens.size, tokens.sum(), targets.sum())
        table.add_row(name, *(f"{n:,}" for n in counts), share, *(f"{n:,}" for n in lengths))

    def plots(self) -> Iterator[Table]:
        """Histograms: lengths, supervised share of a document, and fill of the packs."""
        facts = self.facts
        yield histogram("Tokens a document", facts.tokens, (0, int(facts.tokens.max())), "{:,.0f}")
        yield histogram("Supervised share of a document", facts.targets / facts.tokens, (0, 1), "{:.0%}")
        title = f"Fill of the packs, {self.fill:.2%} on average"
        yield histogram(title, np.minimum(facts.pack_tokens / self.pack_length, 1), (0, 1), "{:.0%}")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield self.table()
        yield from self.plots()

    def _repr_html_(self) -> str:
        console = Console(record=True, width=120, file=StringIO())
        console.print(self)
        return console.export_html(inline_styles=True, code_format="<pre style='line-height:1.2'>{code}</pre>")


def histogram(title: str, values: NDArray[np.number], span: tuple[float, float], form: str) -> Table:
    """Counts of values in equal bins, as bars."""
    counts, edges = np.histogram(values, bins=BINS, range=span)
    table = Table(title=title, show_header=False, box=None, title_justify="left")
    for column in ("right", "left", "right"):
        table.add_column(justify=column)  # type: ignore[arg-type]
    for count, low, high in zip(counts.tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        bar = "█" * round(WIDTH * count / max(counts.max(), 1))
        table.add_row(f"{form.format(low)} to {form.format(high)}", bar, f"{count:,}")
    return table
