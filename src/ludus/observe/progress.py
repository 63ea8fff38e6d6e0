"""A live progress display: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as _Bar
from rich.text import Text

from ludus.observe.catalogue import combine, definition_of
from ludus.observe.logs import printable

SHOWN: Mapping[str, str] = {
    "reward": "reward",
    "success": "success",
    "turns": "turns",
    "invalid_call_share": "tool errors",
    "tokens_per_second": "tokens/s",
    "failure_share": "FAILED",
    "no_signal": "NO SIGNAL",
}
"""The numbers on display, and what they are called there."""
_TROUBLE = ("failure_share", "no_signal")
"""Numbers that are shown only when they are not 0."""


class Progress:
    """Shows how far a run is and how it does. Use it in `with`: the terminal is restored on any exit."""

    def __init__(
        self,
        total: int,
        title: str,
        *,
        shown: Mapping[str, str] = SHOWN,
        console: Console | None = None,
        first: int = 0,
        every: int | None = None,
    ) -> None:
        """`first` is the step a resumed run starts from; `every`, the steps per plain line."""
        self._total = total
        self._title = printable(title)
        self._shown = shown
        self._console = console or Console(stderr=True)
        self._every = every or max(1, total // 20)
        self._since_line: list[Mapping[str, float]] = []
        self._bar: _Bar | None = _bar(self._console) if self._console.is_terminal else None
        if self._bar is not None:
            self._task = self._bar.add_task(
                self._title, total=total, completed=first, numbers="", note=""
            )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, step: int, metrics: Mapping[str, float], note: str = "") -> None:
        """Show that `step` steps are done, with the numbers of the last one."""
        if self._bar is not None:
            numbers = numbers_text(metrics, self._shown)
            self._bar.update(self._task, completed=step, numbers=numbers, note=printable(note))
            return
        self._since_line.append({name: metrics[name] for name in self._shown if name in metrics})
        if step % self._every == 0 or step >= self._total:
            numbers = numbers_text(combine(self._since_line), self._shown)
            self._since_line = []
            self._line(f"{self._title} {step}/{self._total}", numbers, printable(note))

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._line(printable(text))

    def _line(self, *parts: str) -> None:
        text = "  ".join(part for part in parts if part)
        self._console.print(Text(text), soft_wrap=True, highlight=False)


def numbers_text(metrics: Mapping[str, float], shown: Mapping[str, str] = SHOWN) -> str:
    """The shown numbers in one line, shares in per cent; those that are missing are left out."""
    parts = [
        f"{label} {_formatted(name, metrics[name])}"
        for name, label in shown.items()
        if name in metrics and (metrics[name] or name.rpartition("/")[2] not in _TROUBLE)
    ]
    return "  ".join(parts)


def _formatted(name: str, value: float) -> str:
    metric = definition_of(name)
    if metric is not None and metric.unit == "share":
        return f"{value:.0%}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"


def _bar(console: Console) -> _Bar:
    return _Bar(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left", markup=False),
        TimeRemainingColumn(),
        TextColumn("{task.fields[numbers]}", markup=False),
        TextColumn("{task.fields[note]}", markup=False),
        console=console,
        refresh_per_second=4,
    )
