"""Terminal output: logging, a live progress display, shares as figures and bars, episodes in a few lines.

Only the `ludus` logger is touched; during a run, Python's warnings (of libraries, of code that a model wrote)
go to the run's log.
"""

from __future__ import annotations

import logging
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Self

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as _Bar
from rich.text import Text

from ludus.core.trajectory import Trajectory
from ludus.observe.diagnosis import explain_silence
from ludus.observe.metrics import combine, definition_of
from ludus.observe.report import Share, call_text, printable, said_beside_calls, share_text
from ludus.observe.run_folder import RunFolder

_CONSOLE_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)


def setup_logging(run: RunFolder | None = None, verbosity: int = 0) -> ExitStack:
    """Log to the run's file, and to the console: warnings at verbosity 0, information at 1, all at 2.

    Returns what undoes it: use it in `with`, or call its `close`.
    """
    undo = ExitStack()
    logger = logging.getLogger("ludus")
    level = _CONSOLE_LEVELS[max(0, min(verbosity, 2))]
    console = _ConsoleHandler(level)
    console.setFormatter(_PrintableFormatter("%(levelname)s %(name)s: %(message)s"))
    _attach(logger, console, undo)
    lowest = level
    if run is not None:
        run.log_path.parent.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(run.log_path, encoding="utf-8", errors="backslashreplace")
        file.setLevel(min(level, logging.INFO))
        file.setFormatter(_PrintableFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        _attach(logger, file, undo)
        _attach(logging.getLogger("py.warnings"), file, undo)
        undo.callback(logging.captureWarnings, False)
        logging.captureWarnings(True)
        lowest = min(level, logging.INFO)
    undo.callback(logger.setLevel, logger.level)
    logger.setLevel(lowest)
    undo.callback(setattr, logger, "propagate", logger.propagate)
    logger.propagate = False
    return undo


def _attach(logger: logging.Logger, handler: logging.Handler, undo: ExitStack) -> None:
    logger.addHandler(handler)
    undo.callback(handler.close)
    undo.callback(logger.removeHandler, handler)


class _PrintableFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


SHOWN_ELSEWHERE = "is_shown_elsewhere"
"""Extra of a log record that people read in another form."""


class _ConsoleHandler(logging.Handler):
    """Looks up `sys.stderr` for each record: a live display replaces it while it is on the screen."""

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, SHOWN_ELSEWHERE, False):
            return
        try:
            text = self.format(record)
            encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
            sys.stderr.write(text.encode(encoding, errors="backslashreplace").decode(encoding) + "\n")
        except Exception:  # noqa: BLE001 - logging's contract: report through handleError, never raise
            self.handleError(record)


SHOWN_METRICS: Mapping[str, str] = {
    "reward": "reward",
    "success": "success",
    "turns": "turns",
    "invalid_call_share": "tool errors",
    "tokens_per_second": "tok/s",
    "failure_share": "LOST",
    "no_signal": "NO SIGNAL",
}
"""The numbers on display, and what they are called there."""
CUSTOM = "custom/"
_MOST_LOGGED = 4
"""Of what the user has logged, so many numbers are on display."""
_TROUBLE = ("failure_share", "no_signal")
"""Numbers that are shown only when they are not 0."""
_PLAIN_SECONDS = 30.0
"""Seconds between plain lines about a wait."""


class Progress:
    """Progress of a run: a live bar on a terminal, elsewhere a plain line now and then.

    Use it in `with`: the terminal is restored on any exit.
    """

    def __init__(
        self,
        total: int | None,
        title: str,
        *,
        shown: Mapping[str, str] = SHOWN_METRICS,
        console: Console | None = None,
        first: int = 0,
        every: int | None = None,
        is_wait: bool = False,
    ) -> None:
        """`first` is the step a resumed run starts from; `every`, the steps per plain line.

        `is_wait`: what is waited for has no steps of its own; its bar disappears, and its plain lines come by
        time. Without a `total` the bar only moves.
        """
        self._total = total
        self._title = printable(title)
        self._shown = shown
        self._console = console or Console(stderr=True)
        self._every = every or max(1, (total or 1) // 20)
        self._since_line: list[Mapping[str, float]] = []
        self._is_wait, self._told = is_wait, time.monotonic()
        self._bar: _Bar | None = _bar(self._console, total) if self._console.is_terminal else None
        if self._bar is not None:
            self._bar.live.transient = is_wait
            self._task: TaskID = self._bar.add_task(
                self._title, total=total, completed=first, numbers="", note=""
            )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        elif self._total is None:
            self._line(f"{self._title} ...")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Give the terminal to another bar, and take it back."""
        if self._bar is None:
            yield
            return
        self._bar.live.transient = True
        self._bar.stop()
        try:
            yield
        finally:
            self._bar.live.transient = self._is_wait
            self._bar.start()

    def update(self, step: int, metrics: Mapping[str, float], note: str = "") -> None:
        """Show that `step` steps are done, with the numbers of the last one, and what the user has logged."""
        logged = {name: name.removeprefix(CUSTOM) for name in metrics if name.startswith(CUSTOM)}
        self._shown = {**self._shown, **dict(sorted(logged.items())[:_MOST_LOGGED])}
        if self._bar is not None:
            numbers = numbers_text(metrics, self._shown)
            self._bar.update(self._task, completed=step, numbers=numbers, note=printable(note))
            return
        self._since_line.append({name: metrics[name] for name in self._shown if name in metrics})
        if self._is_due(step):
            self._told = time.monotonic()
            numbers = numbers_text(combine(self._since_line), self._shown)
            self._since_line = []
            self._line(f"{self._title} {step}/{self._total}", numbers, printable(note))

    def _is_due(self, step: int) -> bool:
        if self._is_wait:
            return time.monotonic() - self._told >= _PLAIN_SECONDS
        return step % self._every == 0 or step >= (self._total or 0)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        say(self._console, text)

    def _line(self, *parts: str) -> None:
        self.say("  ".join(part for part in parts if part))


def numbers_text(metrics: Mapping[str, float], shown: Mapping[str, str] = SHOWN_METRICS) -> str:
    """The shown numbers in one line, shares in per cent; those that are missing are left out."""
    if explain_silence(metrics).is_solved:
        shown = {name: label for name, label in shown.items() if name != "no_signal"}
    parts: list[str] = []
    for name, label in shown.items():
        value = metrics.get(name)
        if value is None or (not value and name.rpartition("/")[2] in _TROUBLE):
            continue
        metric = definition_of(name)
        if metric is not None and metric.unit == "share":
            parts.append(f"{label} {share_text(value)}")
        else:
            parts.append(f"{label} {value:,.0f}" if abs(value) >= 100 else f"{label} {value:.2f}")
    return "  ".join(parts)


class EvaluationBars:
    """A bar while models are loaded, and one for each evaluation of a study, fed by calling it."""

    def __init__(self, console: Console) -> None:
        self._console, self._open = console, ExitStack()
        self._title = ""
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        self._show("loading", None)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def __call__(self, model: str, turns: int, done: int, total: int) -> None:
        """`done` of `total` tasks have been played by `model`, with at most so many turns."""
        title = f"{model}, at most {turns} turns"
        if title != self._title or self._bar is None:
            self._show(title, total)
        assert self._bar is not None
        self._bar.update(done, {})

    def _show(self, title: str, total: int | None) -> None:
        self._open.close()
        self._title = title
        bar = Progress(total, title, console=self._console, is_wait=True)
        self._bar = self._open.enter_context(bar)


def say(console: Console, text: str, *, style: str = "", is_prose: bool = False) -> None:
    """Print a text. Paths and commands in it can be copied; prose is wrapped between words on a terminal."""
    is_wrapped = is_prose and console.is_terminal
    console.print(Text(printable(text), style), soft_wrap=not is_wrapped, highlight=False)


class _BarWithNumbers(_Bar):
    """A bar as wide as the terminal allows, and below it the numbers, which no narrow terminal cuts off."""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            told = "  ".join(text for text in (task.fields["numbers"], task.fields["note"]) if text)
            if told:
                yield Padding(Text(told, style="dim"), (0, 0, 0, 2))


def _bar(console: Console, total: int | None) -> _Bar:
    counts = (MofNCompleteColumn(),) if total is not None else ()
    left = (TextColumn("left", markup=False), TimeRemainingColumn()) if total is not None else ()
    return _BarWithNumbers(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=min(40, max(10, console.width - 50))),
        *counts,
        TimeElapsedColumn(),
        *left,
        console=console,
        refresh_per_second=4,
    )


_FIGURES = {
    "0": ("┏━┓", "┃ ┃", "┗━┛"),
    "1": ("╺┓ ", " ┃ ", "╺┻╸"),
    "2": ("╺━┓", "┏━┛", "┗━╸"),
    "3": ("╺━┓", "╺━┫", "╺━┛"),
    "4": ("╻ ╻", "┗━┫", "  ╹"),
    "5": ("┏━╸", "┗━┓", "╺━┛"),
    "6": ("┏━╸", "┣━┓", "┗━┛"),
    "7": ("╺━┓", "  ┃", "  ╹"),
    "8": ("┏━┓", "┣━┫", "┗━┛"),
    "9": ("┏━┓", "┗━┫", "╺━┛"),
    ".": (" ", " ", "▪"),
    "%": ("▪ ╱", " ╱ ", "╱ ▪"),
}
GOOD, PLAIN, BAD = "bold green", "bold", "bold red"
_LINES_OF_A_MESSAGE = 2
_LINES_OF_AN_EPISODE = 8


def change_style(first: float, last: float) -> str:
    """Colour of a share that should rise."""
    return GOOD if last > first else BAD if last < first else PLAIN


def large(parts: Sequence[tuple[str, str]], width: int) -> Text | None:
    """Shares (text, style) three lines high, with arrows between them; None where they are too wide."""
    rows = [Text("  ") for _ in range(3)]
    for number, (text, style) in enumerate(parts):
        arrow = ("     ", " ━━▶ ", "     ") if number else ("", "", "")
        for line, row in enumerate(rows):
            row.append(arrow[line], style="dim")
            row.append(" ".join(_FIGURES[figure][line] for figure in text), style=style)
    if max(row.cell_len for row in rows) > width:
        return None
    return Text("\n").join(rows)


def share_bar(share: Share, width: int, style: str) -> Text:
    """A share of `width` cells: solid up to its value, the rest of its interval lighter."""
    solid = round(share.value * width)
    high = solid if share.high is None else max(solid, round(share.high * width))
    bar = Text("━" * solid, style=style)
    bar.append("╌" * (high - solid), style=style.replace("bold ", ""))
    bar.append(" " * (width - high))
    return bar


def share_lines(measured: Sequence[tuple[str, Share | None]], width: int) -> list[Text]:
    """A line for each share: what it is of, its number, its bar where there is room, its interval."""
    names = max((len(name) for name, _ in measured), default=0)
    first = next((share.value for _, share in measured if share is not None), 0.0)
    lines: list[Text] = []
    for number, (name, share) in enumerate(measured):
        line = Text(f"  {name:<{names}}  ")
        if share is None:
            lines.append(line.append("–", style="dim"))
            continue
        style = PLAIN if not number else change_style(first, share.value)
        line.append(f"{share_text(share.value):>6}  ", style=style)
        interval = ""
        if share.low is not None and share.high is not None:
            interval = f"{share_text(share.low)} to {share_text(share.high)}"
        room = min(60, width - line.cell_len - 2 - len("100.0% to 100.0%"))
        if room >= 10:
            line.append_text(share_bar(share, room, style)).append("  ")
        lines.append(line.append(interval, style="dim"))
    return lines


def folded_episode(trajectory: Trajectory, label: str, width: int) -> Text:
    """An episode in a few lines: what was said, each call once, the target, and what each reward gave."""
    messages = trajectory.messages or list(trajectory.task.messages)
    called = {call.id: call.name for message in messages for call in message.tool_calls}
    told: list[tuple[str, str]] = []
    for message in messages:
        name = message.name or called.get(message.tool_call_id or "")
        speaker = f"{message.role} {name}" if name else message.role
        said = [said_beside_calls(message), *(call_text(call) for call in message.tool_calls)]
        told.append((speaker, " ".join(" ".join(said).split())))
    left_out = len(told) - _LINES_OF_AN_EPISODE
    if left_out > 0:
        head = _LINES_OF_AN_EPISODE // 2
        told[head : len(told) - head] = [("", f"... {left_out} more messages")]
    target = trajectory.task.target
    ends = [] if target is None else [("target", str(target))]
    said_last = messages[-1].content.strip() if messages else None
    if trajectory.answer is not None and trajectory.answer.strip() != said_last:
        ends.append(("answer", trajectory.answer))
    parts = ", ".join(f"{name} {value:g}" for name, value in trajectory.rewards.items())
    total = "not scored" if trajectory.reward is None else f"{trajectory.reward:g}"
    ends.append(("reward", f"{total}  ({parts})" if parts else total))
    names = max(len(name) for name, _ in [*told, *ends])
    names = min(names, max(8, width // 4))
    text = Text().append(f"{label}: task {printable(trajectory.task.id)[:40]}", style="bold")
    room = max(20, width - names - 4)
    for number, (name, content) in enumerate([*told, *ends]):
        style = "cyan" if number >= len(told) else "dim"
        folded = textwrap.shorten(printable(content), room * _LINES_OF_A_MESSAGE - 8, placeholder=" ...")
        for place, line in enumerate(textwrap.wrap(folded, room) or [""]):
            text.append(f"\n  {printable(name)[:names] if not place else '':<{names}}", style=style)
            text.append(f"  {line}")
    return text
