"""For people: tables of results, the learning curve, and an episode as text that is safe to show.

A share of 1 is a per cent with one decimal everywhere (`share_text`, `75.0%`), other floats have three
decimals, an interval stands in brackets behind its number, and what was not measured is a dash.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group as Stack
from rich.table import Table
from rich.text import Text

from ludus.core.failures import Fault
from ludus.core.messages import Json, Message, ToolCall
from ludus.core.trajectory import Group, Trajectory
from ludus.observe.episode_rows import dump_value
from ludus.observe.files import atomic_file
from ludus.observe.statistics import Estimate

_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters, what turns the direction of text around, and halves of surrogate pairs."""

_CALL_BLOCK = re.compile(
    r"<(?P<tag>\w+)[^>\n]*>.*?</(?P=tag)>|```.*?```|<\|python_tag\|>.*|^Action(?: Input)?:.*$",
    re.S | re.M,
)
"""Where formats of actions write calls."""

LOSSES = ("sft/loss", "dpo/loss", "rejection/loss", "distill/loss")
"""Loss curves of the stages that need not play."""
_WINDOW = 5
_COLOURS = {"loss": "0.4", "reward": "tab:orange"}


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

    def rich(self, styles: Mapping[str, str] | None = None) -> Stack:
        """For `rich.console.Console.print`; no cell is read as markup. `styles` are those of cells by text."""
        table = Table(box=SIMPLE_HEAD)
        for column, right in zip(self.columns, self._numeric(), strict=True):
            table.add_column(
                Text(printable(column)),
                justify="right" if right else "left",
                overflow="fold",
                no_wrap=right,
            )
        for row in self.texts:
            table.add_row(*(Text(printable(text), (styles or {}).get(text, "")) for text in row))
        return Stack(Text(printable(self.title), "bold"), table) if self.title else Stack(table)

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


def plot_curve(path: str | Path, rows: Sequence[Mapping[str, Any]], *, title: str = "") -> None:
    """Draw success and reward over the steps, smoothed over `_WINDOW` steps, with evaluations as points.

    What a run learned before it played (a warm start) has a panel of its own, with its loss: it may have ten
    times the steps. `rows` are those of metrics.jsonl. Nothing of matplotlib's global state is touched.
    """
    from matplotlib.figure import Figure

    played = min((row["step"] for row in rows if "success" in row or "reward" in row), default=None)
    before = [row for row in rows if played is None or row["step"] < played]
    learned = any(name in LOSSES for row in before for name in row)
    panels = [("loss", before)] if learned else []
    if played is not None or not learned:
        start = before[-1]["step"] if learned else 0
        panels.append(("reward", [row for row in rows if row["step"] >= start]))
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, width_ratios=[1, 3][-len(panels) :])[0]
    handles: dict[str, Any] = {}
    for axis, (beside, shown) in zip(axes, panels, strict=True):
        other = axis.twinx()
        _draw(axis, shown, "success", "tab:blue")
        for name in LOSSES if beside == "loss" else ("reward",):
            _draw(other, shown, name, _COLOURS[beside], label=beside)
        axis.set_ylim(-0.03, 1.03)
        axis.set_xlabel("step")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set_ylabel("success (share of episodes)", color="tab:blue")
        other.set_ylabel(beside, color=_COLOURS[beside])
        axis.grid(alpha=0.25)
        for one in (axis, other):
            drawn, labels = one.get_legend_handles_labels()
            handles |= dict(zip(labels, drawn, strict=True))
    if title:
        figure.suptitle(printable(title), parse_math=False)
    if handles:
        figure.legend(handles=[*handles.values()], loc="outside lower center", ncols=len(handles))
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)


def series(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """The steps at which a metric was logged, and its values; nulls are left out."""
    points = [(int(row["step"]), float(row[name])) for row in rows if row.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and up to `window` - 1 before it."""
    spans = [values[max(0, i + 1 - window) : i + 1] for i in range(len(values))]
    return [sum(span) / len(span) for span in spans]


def _draw(axis: Any, rows: Sequence[Mapping[str, Any]], name: str, colour: str, label: str = "") -> None:
    steps, values = series(rows, name)
    label = label or name
    if steps:
        axis.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
        axis.plot(steps, smoothed(values, _WINDOW), color=colour, linewidth=2, label=label)
    steps, values = series(rows, f"eval/{name}")
    if steps:
        axis.plot(steps, values, "o", color=colour, markeredgecolor="black", label=f"{label}, held out")


def episode_text(trajectory: Trajectory, *, max_chars: int = 6000, max_message_chars: int = 1200) -> str:
    """The conversation, the calls, the rewards and the ending, in about `max_chars` characters."""
    task = _one_line(trajectory.task.id or "(no id)", 200)
    head = printable(f"=== task {task}, attempt {trajectory.attempt} ===")
    messages = trajectory.messages or list(trajectory.task.messages)
    body = "\n".join(printable(_message_text(message, max_message_chars)) for message in messages)
    foot = "\n".join(f"--- {printable(line)}" for line in _ending(trajectory))
    room = max(0, max_chars - len(head) - len(foot))
    return "\n".join([head, shortened(body, room), foot])


def tree_text(group: Group) -> str:
    """The attempts of a group as a tree: each branch stands under the attempt that it branched off."""
    attempts = {one.attempt: one for one in group.trajectories}
    below: dict[int | None, list[Trajectory]] = {}
    for one in group.trajectories:
        parent = one.branch.attempt if one.branch is not None and one.branch.segments else None
        below.setdefault(parent if parent in attempts else None, []).append(one)
    sampled = sum(len(s.tokens) for one in attempts.values() for s in one.own_segments if s.logprobs)
    branches = len(attempts) - len(below.get(None, ()))
    lines = [
        f"=== task {_one_line(group.task.id or '(no id)', 200)}: {len(attempts)} attempts, {branches} of them "
        f"branches, {sampled} tokens sampled ==="
    ]

    def add(one: Trajectory, indent: str, mark: str, further: str) -> None:
        lines.append(f"{indent}{mark}{_attempt_text(one)}")
        children = below.get(one.attempt, [])
        for number, child in enumerate(children):
            is_last = number == len(children) - 1
            add(child, indent + further, "└─ " if is_last else "├─ ", "   " if is_last else "│  ")

    for root in below.get(None, ()):
        add(root, "", "", "")
    return "\n".join(map(printable, lines))


def _place_text(one: Trajectory) -> str:
    if one.branch is None:
        return ""
    if not one.branch.segments:
        return " (could not branch, played anew)"
    shared = one.sequences[0].segments[: one.branch.segments]
    turn = sum(segment.logprobs is not None for segment in shared) + 1
    return f" from turn {turn} ({one.branch.state})"


def _attempt_text(one: Trajectory) -> str:
    where = _place_text(one)
    total = "not scored" if one.reward is None else f"reward {one.reward:g}"
    why = "" if one.failure is None else f" at {one.failure.boundary.value}: {one.failure.kind}"
    return f"attempt {one.attempt}{where}: {one.turns} turns, {total}, {one.stop.value}{why}"


def shortened(text: str, limit: int, gap: str = "\n") -> str:
    """The head and the tail of a text, and how much is missing between them."""
    if len(text) <= limit:
        return text
    head, tail = limit * 2 // 3, limit // 3
    left_out = len(text) - head - tail
    return f"{text[:head]}{gap}[... {left_out} characters left out ...]{gap}{text[len(text) - tail :]}"


def _one_line(text: str, limit: int) -> str:
    """A shortened text in one line, so that no part of it looks like a line of the report."""
    return shortened(text.replace("\n", "\\n"), limit, gap=" ")


def _message_text(message: Message, limit: int) -> str:
    speaker = f"{message.role} {message.name}" if message.name else message.role
    lines = [f"[{_one_line(speaker, 100)}]"]
    if said := said_beside_calls(message):
        lines.append(shortened(said, limit))
    lines += [_one_line(f"-> {call_text(call)}", limit) for call in message.tool_calls]
    lines += [f"<{item.kind} {item.sha256[:12]}>" for item in message.media]
    return "\n".join(lines)


def said_beside_calls(message: Message) -> str:
    """What a message says, without the blocks in which its calls are written: they are shown as calls."""
    if not message.tool_calls or any(call.fault is Fault.MALFORMED_CALL for call in message.tool_calls):
        return message.content
    values = {
        v.strip() for call in message.tool_calls for v in call.arguments.values() if isinstance(v, str)
    }
    written = {call.name for call in message.tool_calls} | values - {""}

    def shown(block: re.Match[str]) -> str:
        is_thought = block["tag"] in ("think", "answer")
        return "" if not is_thought and any(one in block[0] for one in written) else block[0]

    return _CALL_BLOCK.sub(shown, message.content).strip()


def call_text(call: ToolCall) -> str:
    shown = {
        name: json.dumps(value, ensure_ascii=False) if isinstance(value, str) else dump_value(value)[0]
        for name, value in call.arguments.items()
    }
    arguments = ", ".join(f"{name}={text}" for name, text in shown.items())
    fault = f"   ! {call.fault.value}: {call.problem}" if call.fault is not None else ""
    return f"{call.name}({arguments}){fault}"


def _ending(trajectory: Trajectory) -> list[str]:
    tokens = sum(len(action.tokens) for action in trajectory.actions)
    calls = len(trajectory.calls)
    lines = [
        f"{trajectory.stop.value} after {trajectory.turns} turns, {calls} calls, {tokens} tokens said"
    ]
    if trajectory.branch is not None and trajectory.branch.segments:
        lines.append(f"a branch of attempt {trajectory.branch.attempt}{_place_text(trajectory)}")
    if trajectory.answer is not None:
        lines.append(f"answer: {_one_line(trajectory.answer, 300)}")
    if faults := Counter(fault.value for fault in trajectory.faults):
        lines.append("faults: " + ", ".join(f"{name} × {count}" for name, count in faults.items()))
    turn_rewards = [(n, a.reward) for n, a in enumerate(trajectory.actions, 1) if a.reward is not None]
    if turn_rewards:
        lines.append(
            "turn rewards: " + ", ".join(f"turn {n}: {value:g}" for n, value in turn_rewards[:20])
        )
    if trajectory.failure is not None:
        failure = trajectory.failure
        what = _one_line(f"{failure.kind}: {failure.message}", 300)
        lines.append(f"failed at {failure.boundary.value} after {failure.attempts} tries: {what}")
    parts = ", ".join(f"{name} {value:g}" for name, value in list(trajectory.rewards.items())[:20])
    total = "not scored" if trajectory.reward is None else f"{trajectory.reward:g}"
    lines.append(f"reward: {total}" + (f" ({_one_line(parts, 600)})" if parts else ""))
    return lines
