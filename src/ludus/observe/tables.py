"""Tables of results: typed cells, for the terminal, Markdown and JSON; and text that is safe to show.

A share of 1 is a per cent with one decimal everywhere (`share_text`, `75.0%`), other floats have three
decimals, an interval stands in brackets behind its number, and what was not measured is a dash.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from ludus.core.messages import Json
from ludus.observe.statistics import Estimate

_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters, what turns the direction of text around, and halves of surrogate pairs."""


def printable(text: str) -> str:
    """The text with what a terminal would obey, or could not encode, shown as `\\x1b` or `\\ud800`."""
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


def markdown_text(text: str) -> str:
    """A message of unknown origin in one line of Markdown."""
    return " ".join(printable(text).split()).replace("<", "&lt;").replace("`", "'")


def share_text(value: float) -> str:
    return f"{value:.1%}"


@dataclass(frozen=True, slots=True)
class Share:
    """A share of 1, or a difference of two, with its interval where that is known."""

    value: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, estimate: Estimate | None) -> Share | None:
        return None if estimate is None else cls(estimate.value, estimate.low, estimate.high)

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return share_text(self.value)
        return f"{share_text(self.value)} [{share_text(self.low)}, {share_text(self.high)}]"


Cell = str | float | int | Share | Estimate | None


@dataclass(frozen=True, slots=True)
class ReportTable:
    """Columns and rows. Numbers are right-aligned, by the first row."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""

    @property
    def texts(self) -> list[list[str]]:
        return [[_text(cell) for cell in row] for row in self.rows]

    def markdown(self) -> str:
        head = "| " + " | ".join(map(_markdown_cell, self.columns)) + " |"
        rule = "|" + "|".join("--:" if right else "---" for right in self._numeric()) + "|"
        body = ["| " + " | ".join(map(_markdown_cell, row)) + " |" for row in self.texts]
        return "\n".join([head, rule, *body]) + "\n"

    def rich(self, styles: Mapping[str, str] | None = None) -> Table:
        """For `rich.console.Console.print`; no cell is read as markup. `styles` are those of cells by text."""
        table = Table(title=Text(printable(self.title)) if self.title else None)
        for column, right in zip(self.columns, self._numeric(), strict=True):
            table.add_column(
                Text(printable(column)),
                justify="right" if right else "left",
                overflow="fold",
                no_wrap=right,
            )
        for row in self.texts:
            table.add_row(*(Text(printable(text), (styles or {}).get(text, "")) for text in row))
        return table

    def as_json(self) -> Json:
        """Numbers as they are; a share or an estimate is a table of value, low and high."""
        rows = [
            [estimate_json(c) if isinstance(c, Share | Estimate) else c for c in row]
            for row in self.rows
        ]
        return {"title": self.title, "columns": list(self.columns), "rows": rows}

    def _numeric(self) -> list[bool]:
        first = self.rows[0] if self.rows else [""] * len(self.columns)
        return [isinstance(cell, int | float | Share | Estimate) for cell in first]


def estimate_json(estimate: Share | Estimate | None) -> dict[str, Any] | None:
    if estimate is None:
        return None
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}


def _text(cell: Cell) -> str:
    if cell is None:
        return "–"
    return f"{cell:.3f}" if isinstance(cell, float) else str(cell)


def _markdown_cell(text: str) -> str:
    return printable(text).replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")
