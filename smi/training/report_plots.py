"""The curves of a run's report, as PNG."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from smi.pages import RC, WIDTH, png
from smi.protocol.render import COLOURS
from smi.protocol.tokens import BlockType

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Figures = Mapping[str, Mapping[int, float]]

HEIGHT = 2.5
# what a model writes
KINDS = (BlockType.THINK, BlockType.OUT, BlockType.ACT, BlockType.EOT)
# points of a curve that are drawn as they are; longer ones get a running mean on top
PLAIN_POINTS = 50


def plots(figures: Figures) -> dict[str, bytes]:
    """`loss`, `blocks`, `optimizer`, `speed`, `memory` and `mixture`, as far as there is something to show."""
    # imported here: nothing else needs it, and it takes a second
    import matplotlib as mpl

    sources = [name for name in figures if name.startswith("data/share_")]
    panels = {
        "loss": ("loss", "accuracy", "entropy"),
        "blocks": ("loss_blocks", "accuracy_blocks"),
        "optimizer": ("lr", "grad_norm"),
        "speed": ("tokens_per_s", "mfu" if "speed/mfu" in figures else "wait_share"),
        "memory": ("memory",),
        "mixture": ("mixture",) if len(sources) > 1 else (),
    }
    with mpl.rc_context(RC):
        return {name: image for name, wanted in panels.items() if (image := _row(figures, wanted)) is not None}


def _row(figures: Figures, wanted: tuple[str, ...]) -> bytes | None:
    """Plots beside each other."""
    from matplotlib.figure import Figure

    drawn = [name for name in wanted if any(source in figures for source in _sources(name, figures))]
    if not drawn:
        return None
    figure = Figure((WIDTH, HEIGHT), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(drawn), squeeze=False)[0], drawn, strict=True):
        for label, (source, colour, style) in _curves(name, figures).items():
            if source in figures:
                _draw(axes, figures[source], label, colour, style, smooth=name not in _EVEN)
        axes.set_title(_TITLES[name], loc="left")
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if name in ("grad_norm", "loss") and _spans(axes):
            axes.set_yscale("log")
        elif name in ("accuracy", "accuracy_blocks", "wait_share", "mfu", "mixture"):
            axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
        elif name in ("tokens_per_s", "memory"):
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.12g}")
            axes.set_ylim(bottom=0)
        if len(axes.get_legend_handles_labels()[1]) > 1:
            # where there is one plot, beside the curves
            beside = {"loc": "upper left", "bbox_to_anchor": (1, 1)} if len(drawn) == 1 else {}
            axes.legend(frameon=False, fontsize=8, **beside)
    return png(figure)


_TITLES = {
    "loss": "loss, nats a token",
    "accuracy": "token accuracy",
    "entropy": "entropy, nats a token",
    "loss_blocks": "loss by block type",
    "accuracy_blocks": "accuracy by block type",
    "lr": "learning rate by group",
    "grad_norm": "gradient norm, before clipping",
    "tokens_per_s": "tokens a second",
    "mfu": "model flops utilisation",
    "wait_share": "time spent waiting for data",
    "memory": "memory, GiB",
    "mixture": "supervised tokens so far, by source",
}

# plots whose curves have no noise
_EVEN = ("lr", "memory", "mixture")


def _curves(name: str, figures: Figures) -> dict[str, tuple[str, str, str]]:
    """Of a plot: label -> (figure, colour, style)."""
    if name in ("loss", "accuracy", "entropy"):
        return {"training": (f"train/{name}", "C0", "-"), "validation": (f"val/{name}", "C1", "o-")}
    if name.endswith("_blocks"):
        what = name.removesuffix("_blocks")
        curves = {}
        for kind in KINDS:
            curves[kind.name] = (f"train/{what}_{kind.name.lower()}", COLOURS[kind], "-")
            # without a label of its own: the points on the line
            curves[f"_{kind.name}"] = (f"val/{what}_{kind.name.lower()}", COLOURS[kind], "o")
        return curves
    if name == "tokens_per_s":
        return {
            "training": ("speed/tokens_per_s", "C0", "-"),
            "supervised": ("speed/supervised_per_s", "C1", "-"),
        }
    prefixes = {"lr": "train/lr_", "memory": "memory/", "mixture": "data/share_"}
    if name in prefixes:
        chosen = [source for source in figures if source.startswith(prefixes[name])]
        labels = [source.removeprefix(prefixes[name]).removesuffix("_gib") for source in chosen]
        return {label: (source, f"C{i}", "-") for i, (label, source) in enumerate(zip(labels, chosen, strict=True))}
    source = {"grad_norm": "train/grad_norm", "mfu": "speed/mfu", "wait_share": "speed/wait_share"}[name]
    return {name: (source, "C0", "-")}


def _sources(name: str, figures: Figures) -> list[str]:
    return [source for source, _, _ in _curves(name, figures).values()]


def _draw(axes: Axes, points: Mapping[int, float], label: str, colour: str, style: str, smooth: bool) -> None:
    steps = np.array(sorted(points))
    values = np.array([points[step] for step in steps.tolist()])
    if len(steps) == 1:
        style = "o"
    if smooth and style == "-" and len(steps) > PLAIN_POINTS:
        axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.3)
        width = len(steps) // 25
        values = np.convolve(values, np.ones(width) / width, "valid")
        steps = steps[width // 2 :][: values.size]
    axes.plot(steps, values, style, color=colour, label=label, linewidth=1.3, markersize=3)


def _spans(axes: Axes) -> bool:
    """Whether the values are all above 0 and span more than a factor of 20."""
    values = np.concatenate([np.asarray(line.get_ydata(), float) for line in axes.lines])
    return bool(values.min() > 0 and values.max() / values.min() > 20)
