"""Findings that need a person, each a suspicion with its evidence; here those in a run's metrics.

Those in its episodes are in `episode_findings`. Terminal, report and viewer show the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ludus.observe.diagnosis import explain_silence
from ludus.observe.report import share_text

Severity = Literal["error", "warning", "note"]
STYLES: Mapping[Severity, str] = {"error": "red", "warning": "yellow", "note": "dim"}
"""Colours on a terminal; the worst comes first."""
Rows = Sequence[Mapping[str, Any]]

_RECENT = 10
"""Steps that count as now."""
_FEWEST_STEPS = 6
"""A trend needs so many steps."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a person should look at. `query` are filters of the viewer's episodes page."""

    kind: str
    severity: Severity
    title: str
    detail: str
    query: Mapping[str, str] = field(default_factory=dict)
    metric: str = ""
    """The metric that shows it, if one does."""

    @property
    def key(self) -> tuple[str, str]:
        """What it is about: the numbers of its title change while a run goes on."""
        return self.kind, self.query.get("tool", "")


def run_findings(rows: Rows, in_episodes: Iterable[Finding]) -> list[Finding]:
    """All findings of a run, the worst first; that nothing succeeds is said once."""
    found = [*metric_findings(rows), *in_episodes]
    has_error = any(
        one.kind in ("no_signal", "never_calls") and one.severity == "error" for one in found
    )
    return by_severity(one for one in found if one.kind != "never_succeeds" or not has_error)


def by_severity(found: Iterable[Finding]) -> list[Finding]:
    return sorted(found, key=lambda one: [*STYLES].index(one.severity))


# From metrics.


def metric_findings(rows: Rows) -> Iterator[Finding]:
    for check in (_no_signal, _diverged, _engine_apart, _hacking, _lengths, _collapse, _truncated):
        yield from check(rows)


def _column(rows: Rows, name: str) -> list[float]:
    return [float(row[name]) for row in rows if name in row and math.isfinite(row[name])]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _recent(rows: Rows, name: str) -> float:
    """The mean over the last steps that have it; not a number where none has."""
    return _mean(_column(rows, name)[-_RECENT:])


def _succeeds(rows: Rows) -> bool:
    """Whether episodes nearly always succeed by now: what else they do is then the way to do it."""
    values = _column(rows, "success")
    return _mean(values[-min(_RECENT, max(1, len(values) // 3)) :]) >= 0.9


def _thirds(values: Sequence[float]) -> tuple[float, float]:
    """The means of the first and the last third."""
    size = max(1, len(values) // 3)
    return _mean(values[:size]), _mean(values[-size:])


def _no_signal(rows: Rows) -> Iterator[Finding]:
    """Most steps, or most of what is trained on, taught nothing; where all is solved, that is good news."""
    recent = [row for row in rows if "no_signal" in row][-_RECENT:]
    silent = [row for row in recent if row["no_signal"]]
    idle = _column(recent, "without_advantage")
    never_succeeds = (
        len(silent) == len(recent) and _recent(recent, "success") == 0
    )  # plain from the first step on
    is_silent = (len(recent) >= 3 and len(silent) >= 0.5 * len(recent)) or never_succeeds
    if not is_silent and not (len(idle) >= 3 and _mean(idle) >= 0.9):
        return
    usual = {n: _recent(silent if is_silent else recent, n) for n in ("success", "reward", "reward_std")}
    why = explain_silence({name: value for name, value in usual.items() if not math.isnan(value)})
    told = f"Every advantage was 0 (mean reward {usual['reward']:.3g}). Most likely {why.likely}: {why.advice}."
    if why.is_solved:
        title = f"Solved: nothing was left to learn in {len(silent)} of the last {len(recent)} steps"
        yield Finding("solved", "note", title, told, {"sort": "step"}, "success")
    elif is_silent:
        title = f"Nothing to learn from in {len(silent)} of the last {len(recent)} steps"
        title += f": {share_text(usual['success'])} succeed" if usual["success"] <= 0.05 else ""
        severity: Severity = "note" if _succeeds(rows) else "error"
        yield Finding("no_signal", severity, title, told, {"sort": "step"}, "no_signal")
    else:
        title = f"{share_text(_mean(idle))} of what is trained on has nothing to teach"
        told = f"Its advantage is 0. Most likely {why.likely}: {why.advice}."
        yield Finding("no_signal", "warning", title, told, {"sort": "step"}, "without_advantage")


def _diverged(rows: Rows) -> Iterator[Finding]:
    for name in dict.fromkeys(name for row in rows for name in row):
        if name.rpartition("/")[2] not in ("loss", "gradient_norm", "kl", "entropy"):
            continue
        broken = [row["step"] for row in rows if name in row and not math.isfinite(row[name])]
        if broken:
            yield Finding(
                "diverged",
                "error",
                f"{name} is not a number from step {broken[0]} on",
                "Training has diverged: lower the learning rate, or look for rewards that are not finite.",
                metric=name,
            )
            return


def _engine_apart(rows: Rows) -> Iterator[Finding]:
    recent = _column(rows, "logprob_difference_mean")[-_RECENT:]
    if recent and _mean(recent) > 0.02:
        yield Finding(
            "engine_apart",
            "error",
            f"Engine and trainer disagree by {_mean(recent):.2g} nats per token",
            "The log-probabilities of sampling and training differ: the gradient is that of another policy. "
            "Look at dtype, at the attention kernels, and at what was sampled with (docs/engine.md).",
            metric="logprob_difference_mean",
        )


def _hacking(rows: Rows) -> Iterator[Finding]:
    both = [row for row in rows if "reward" in row and "success" in row]
    is_told = any("reward/success" in row for row in both)
    if len(both) < _FEWEST_STEPS or not (is_told or any(_column(both, "success"))):
        return  # a total that never comes to 1 is no failure, where no reward says what success is
    (reward_first, reward_last), (success_first, success_last) = (
        _thirds(_column(both, name)) for name in ("reward", "success")
    )
    spread = max(_column(both, "reward")) - min(_column(both, "reward"))
    rise, gain = reward_last - reward_first, success_last - success_first
    is_stuck = gain < 0.25 * rise and gain < 0.05 and not _succeeds(both)
    if spread > 0 and rise > 0.3 * spread and rise > 0.05 and is_stuck:
        yield Finding(
            "reward_hacking",
            "error",
            f"Reward rises ({reward_first:.2f} → {reward_last:.2f}) while success does not "
            f"({share_text(success_first)} → {share_text(success_last)})",
            f"{_risen_part(both)}The policy may have found a way to be paid without doing the task: look at "
            "what episodes with a high reward that did not succeed have in common.",
            {"success": "no", "sort": "reward"},
            "reward",
        )


def _risen_part(rows: Rows) -> str:
    names = {name for row in rows for name in row if name.startswith("reward/")} - {"reward/success"}
    rises = {name: _thirds(_column(rows, name)) for name in names}
    if not rises:
        return ""
    name, (first, last) = max(rises.items(), key=lambda one: one[1][1] - one[1][0])
    return f"The part “{name.removeprefix('reward/')}” rose most ({first:.2f} → {last:.2f}). "


def _lengths(rows: Rows) -> Iterator[Finding]:
    lengths = _column(rows, "tokens/action")
    if len(lengths) < _FEWEST_STEPS:
        return
    first, last = _thirds(lengths)
    before, now = _thirds(_column(rows, "success"))
    is_better = now > before + 0.05
    if first > 0 and last < 0.3 * first and not _succeeds(rows):
        yield Finding(
            "short",
            "note" if is_better else "warning",
            f"Answers have shrunk from {first:.0f} to {last:.0f} tokens",
            f"Success has risen with it, from {share_text(before)} to {share_text(now)}."
            if is_better
            else "A policy that says less and less may have given up, or found a short way to be paid.",
            {"sort": "tokens", "order": "asc"},
            "tokens/action",
        )
    if last > 3 * first and last > 64:
        yield Finding(
            "long",
            "warning",
            f"Answers have grown from {first:.0f} to {last:.0f} tokens",
            "Length may be what is rewarded; look at rl.overlong and at the longest episodes.",
            {"sort": "tokens"},
            "tokens/action",
        )


def _collapse(rows: Rows) -> Iterator[Finding]:
    entropy = _column(rows, "entropy")
    if len(entropy) >= _FEWEST_STEPS:
        first, last = _thirds(entropy)
        if last < 0.02 and last < 0.1 * first and not _succeeds(rows):
            yield Finding(
                "collapse",
                "warning",
                f"Entropy has collapsed from {first:.2g} to {last:.2g} nats",
                "The policy is almost deterministic: attempts of a group are alike and teach nothing.",
                metric="entropy",
            )


def _truncated(rows: Rows) -> Iterator[Finding]:
    recent = _column(rows, "truncated")[-_RECENT:]
    if len(recent) >= 3 and _mean(recent) > 0.5 and not _succeeds(rows):
        yield Finding(
            "truncated",
            "warning",
            f"{share_text(_mean(recent))} of the episodes run out of turns or tokens",
            "Raise budgets.max_turns or budgets.max_tokens, or let budgets.remind tell the model.",
            {"stop": "max_turns"},
            "truncated",
        )
