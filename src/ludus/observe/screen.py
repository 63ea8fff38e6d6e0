"""For terminals: shares as large figures and as bars, and an episode folded into a few lines. All pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.text import Text

from ludus.core.trajectory import Trajectory
from ludus.observe.report import Share, call_text, printable, said_beside_calls, share_text

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
    told: list[tuple[str, str]] = []
    for message in messages:
        speaker = f"{message.role} {message.name}" if message.name else message.role
        said = [said_beside_calls(message), *(call_text(call) for call in message.tool_calls)]
        told.append((speaker, " ".join(" ".join(said).split())))
    left_out = len(told) - _LINES_OF_AN_EPISODE
    if left_out > 0:
        head = _LINES_OF_AN_EPISODE // 2
        told[head : len(told) - head] = [("", f"... {left_out} more messages")]
    target = trajectory.task.target
    ends = [] if target is None else [("target", str(target))]
    if trajectory.answer is not None:
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
