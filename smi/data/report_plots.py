"""The plots of a mixture's report, as PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from smi.data.manifest import Manifest
from smi.data.report import Contents, rejections
from smi.pages import RC, WIDTH, png
from smi.protocol.tokens import BlockType

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BINS = 48
# scripts that get a bar of their own; the others share one
SCRIPTS = 12


def plots(manifest: Manifest, contents: Mapping[str, Contents]) -> dict[str, bytes]:
    """`composition`, `lengths`, `rejections` and `quotas`, as far as there is something to show."""
    # imported here: nothing else needs it, and it takes a second
    import matplotlib as mpl

    with mpl.rc_context(RC):
        drawn = {
            "composition": _composition(manifest, contents),
            "lengths": _lengths(contents),
            "rejections": _rejections(manifest),
            "quotas": _quotas(manifest),
        }
        return {name: png(figure) for name, figure in drawn.items() if figure is not None}


def _figure(rows: Sequence[int]) -> tuple[Figure, list[Axes]]:
    """A column of plots; `rows` is how many bars each has room for."""
    from matplotlib.figure import Figure

    heights = [0.3 * max(count, 3) + 0.8 for count in rows]
    figure = Figure((WIDTH, sum(heights)), layout="constrained")
    grid = figure.subplots(len(rows), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    return figure, [axes for (axes,) in grid]


def _bars(
    axes: Axes, names: Sequence[str], parts: Mapping[str, Any], unit: str, colours: Mapping[str, str] | None = None
) -> None:
    """Horizontal bars, the first name on top, each made of the parts."""
    places = np.arange(len(names))
    left = np.zeros(len(names))
    for label, values in parts.items():
        axes.barh(places, values, left=left, label=label, color=None if colours is None else colours[label])
        left += np.asarray(values)
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(axis="x", alpha=0.3)
    if len(parts) > 1:
        # beside the bars, not on them
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))


def _composition(manifest: Manifest, contents: Mapping[str, Contents]) -> Figure | None:
    if not manifest.shards:
        return None
    names = list(contents)
    types = [kind for kind in BlockType if any(c.context[kind] + c.supervised[kind] for c in contents.values())]
    letters: dict[str, dict[str, int]] = {}
    for source, content in contents.items():
        for name, count in content.scripts.items():
            letters.setdefault(name, {})[source] = count
    ranked = sorted(letters, key=lambda name: (-sum(letters[name].values()), name))
    shown = {name: letters[name] for name in ranked[:SCRIPTS]}
    if rest := ranked[SCRIPTS:]:
        shown["others"] = {source: sum(letters[name].get(source, 0) for name in rest) for source in names}
    # rows may well be without a letter
    figure, (sources, blocks, *scripts) = _figure([len(names), len(types), *([len(shown)] if shown else [])])
    _bars(
        sources,
        names,
        {
            "supervised": [int(content.supervised.sum()) for content in contents.values()],
            "context": [int(content.context.sum()) for content in contents.values()],
        },
        "tokens",
    )
    sources.set_title("by source", loc="left")
    _bars(
        blocks,
        [kind.name for kind in types],
        {
            "supervised": [sum(int(content.supervised[kind]) for content in contents.values()) for kind in types],
            "context": [sum(int(content.context[kind]) for content in contents.values()) for kind in types],
        },
        "tokens",
    )
    blocks.set_title("by block type", loc="left")
    for axes in scripts:
        # Latin outweighs all others by far in most mixtures
        _bars(axes, list(shown), {"": [sum(c.values()) for c in shown.values()]}, "letters, logarithmic")
        axes.set_xscale("log")
        axes.set_xlim(left=1)
        axes.set_title("by script", loc="left")
    return figure


def _lengths(contents: Mapping[str, Contents]) -> Figure | None:
    longest = max((content.lengths.size for content in contents.values()), default=1) - 1
    if longest < 1:
        return None
    figure, (axes,) = _figure([9])
    edges = np.linspace(0, longest, min(BINS, longest) + 1)
    axes.hist(
        [np.arange(content.lengths.size) for content in contents.values()],
        bins=edges.tolist(),
        weights=[content.lengths for content in contents.values()],
        stacked=True,
        label=list(contents),
        color=[f"C{place}" for place in range(len(contents))],
    )
    axes.set_xlabel("tokens of a conversation")
    axes.set_ylabel("conversations")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _rejections(manifest: Manifest) -> Figure | None:
    found = rejections(manifest)
    if not found:
        return None
    figure, (axes,) = _figure([len(found)])
    parts = {
        source: [counts.get(source, 0) for counts in found.values()]
        for source, account in manifest.sources.items()
        if account["rejected"]
    }
    # as in the plot of lengths
    colours = {source: f"C{place}" for place, source in enumerate(manifest.sources)}
    _bars(axes, list(found), parts, "rows left out", colours)
    return figure


def _quotas(manifest: Manifest) -> Figure | None:
    asked = {name: account for name, account in manifest.sources.items() if account["quota"]}
    if not asked:
        return None
    figure, (axes,) = _figure([len(asked)])
    shares = [account["supervised_tokens"] / account["quota"] for account in asked.values()]
    _bars(axes, list(asked), {"taken": shares}, "supervised tokens, as a share of the quota")
    axes.axvline(1, color="black", linewidth=1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    for place, account in enumerate(asked.values()):
        text = f" {account['supervised_tokens']:,} of {account['quota']:,}"
        axes.annotate(text, (0, place), va="center", color="white")
    return figure
