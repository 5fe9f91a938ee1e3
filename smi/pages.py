"""What the pages that are written beside data and runs have in common: one HTML file with its pictures inside."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape
from io import BytesIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 9.0
DPI = 110
RC: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h1 { margin-bottom: 0 } h2 { margin-top: 2.5rem }
table { border-collapse: collapse; width: 100%; font-size: 14px }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #ddd; vertical-align: top }
th.n, td.n { text-align: right; font-variant-numeric: tabular-nums }
td { overflow-wrap: anywhere } td.n { white-space: nowrap }
img { max-width: 100% } .short { color: #a00 } code { font-size: 13px }
"""


def page(title: str, parts: Iterable[str], style: str = "") -> str:
    """A whole page; empty parts are left out."""
    body = "\n".join(part for part in parts if part)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f"<style>{_STYLE}{style}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def picture(image: bytes, says: str) -> str:
    """A PNG file as an element."""
    return f'<img alt="{escape(says)}" src="data:image/png;base64,{b64encode(image).decode()}">'


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], numbers: Iterable[int] = ()) -> str:
    """Columns of whole numbers stand right, and those in `numbers`; everything else is text."""
    rows = list(rows)
    right = [i in numbers or (all(isinstance(row[i], int) for row in rows) and bool(rows)) for i in range(len(head))]
    classes = [' class="n"' if number else "" for number in right]
    titles = "".join(f"<th{kind}>{escape(title)}</th>" for kind, title in zip(classes, head, strict=True))
    lines = [
        "".join(
            f"<td{kind}>{f'{cell:,}' if isinstance(cell, int) else escape(str(cell))}</td>"
            for kind, cell in zip(classes, row, strict=True)
        )
        for row in rows
    ]
    return f"<table>\n<tr>{titles}</tr>\n" + "".join(f"<tr>{line}</tr>\n" for line in lines) + "</table>"


def png(figure: Figure) -> bytes:
    """A figure as a PNG file."""
    image = BytesIO()
    # without the library's version, so that equal pictures are equal files
    figure.savefig(image, format="png", dpi=DPI, metadata={"Software": None})
    return image.getvalue()
