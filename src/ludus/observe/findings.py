"""Findings in a run's metrics and episodes that need a person, each a suspicion with its evidence.

Terminal, report and viewer show the same ones. `EpisodeTally` counts trajectories while a run goes on; the
viewer counts in its index, where a finding's `query` opens the episodes that were counted.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ludus.core.failures import NOTABLE_SHARE, Fault
from ludus.core.trajectory import TURN_CUT, Trajectory, is_success
from ludus.observe.diagnosis import SOLVED, explain_silence
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
    since = silent[0]["step"] if silent else math.inf
    measured = [row for row in rows if "eval/success" in row and row["step"] >= since][-1:]
    if why.is_solved and any(row.get("eval/success_high", 1.0) < SOLVED for row in measured):
        held_out = share_text(measured[0]["eval/success"])
        title = f"The tasks to train on are solved, the held-out ones are not ({held_out})"
        told = (
            "The policy has learned the former by heart, or they lack what the latter ask for: give it more "
            "and other tasks, or fewer steps."
        )
        yield Finding("learned_by_heart", "warning", title, told, {"split": "eval"}, "eval/success")
    elif why.is_solved:
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
        limits = _used_up(rows)
        first = next(iter(limits))
        remind = ", or let budgets.remind tell the model" if "max_turns" in limits else ""
        yield Finding(
            "truncated",
            "warning",
            f"{share_text(_mean(recent))} of the episodes run out of {_in_words(list(limits.values()))}",
            f"Raise {_in_words([f'budgets.{name}' for name in limits])}{remind}.",
            {"stop": "max_tokens" if first == "max_turn_tokens" else first},
            "truncated",
        )


_LIMITS = {
    "max_turns": "turns",
    "max_turn_tokens": "tokens in a turn",
    "max_tokens": "tokens in all",
    "max_seconds": "time",
}
"""What an episode runs out of, by budget."""


def _used_up(rows: Rows) -> dict[str, str]:
    """The budgets that end most of the truncated episodes, the most frequent one first."""
    shares = {name: _recent(rows, f"stop/{name}") for name in ("max_turns", "max_tokens", "max_seconds")}
    if math.isnan(cut := _recent(rows, TURN_CUT)) or any(map(math.isnan, shares.values())):
        return {name: text for name, text in _LIMITS.items() if name != "max_seconds"}  # not recorded
    shares |= {"max_turn_tokens": cut, "max_tokens": shares["max_tokens"] - cut}
    names = sorted(shares, key=lambda name: -shares[name])
    return {name: _LIMITS[name] for name in names if shares[name] >= 0.2 * shares[names[0]]}


def _in_words(names: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


LATE_STEPS = 5
"""Steps before the newest one whose episodes tell whether a mistake has been unlearned."""
FEWEST_EPISODES = 16
_FEWEST_CALLS = 8


@dataclass(frozen=True, slots=True)
class Counted:
    """Episodes, and those of them with a mistake."""

    episodes: int
    hit: int
    first: int | None = None
    """The step of the first one with it."""
    late: float | None = None
    """Share with it among the newest (`LATE_STEPS`); None where there are none."""


@dataclass(frozen=True, slots=True)
class ToolErrors:
    """The episodes that call a tool, with its errors."""

    name: str
    counted: Counted
    errors: int
    slow: int
    """Errors that are time-outs."""
    unknown: int
    """Errors because there is no such tool."""
    raised: int = 0
    """Errors that are exceptions of the tool."""


def tool_finding(tool: ToolErrors) -> Finding | None:
    """A tool whose calls fail, nearly always."""
    hit, episodes, late = tool.counted.hit, tool.counted.episodes, tool.counted.late
    if episodes < _FEWEST_CALLS or hit < 0.6 * episodes or (late is not None and late < 0.3):
        return None
    name, query = tool.name, {"tool": tool.name, "faulted": tool.name}
    if tool.unknown > 0.5 * (tool.errors or 1):
        title = f"The model calls “{name}”, which does not exist, in {hit} episodes"
        return Finding(
            "unknown_tool",
            "warning",
            title,
            "Tell it which tools there are, or give it this one.",
            query,
        )
    is_slow = tool.slow > 0.5 * (tool.errors or 1)
    advice = "Look at what it is given and what it answers."
    if is_slow:
        advice = "It takes longer than its timeout: look at what it waits for."
    elif tool.raised > 0.5 * (tool.errors or 1):
        advice = "It raises: the run's logs/ludus.log says where."
    return Finding(
        "tool",
        "error",
        f"The tool “{name}” {'times out' if is_slow else 'fails'} in {hit} of the {episodes} episodes that "
        "call it",
        f"{tool.errors} of its calls were answered by an error, first at step {tool.counted.first}. {advice}",
        query,
        f"tool/{name}/errors",
    )


def malformed_finding(counted: Counted, worst: tuple[str, float] | None = None) -> Finding | None:
    """Calls that cannot be read. `worst`: the kind of task that nearly all of them are of, and their share."""
    hit, count, late = counted.hit, counted.episodes, counted.late or 0
    if hit < _FEWEST_CALLS or late < 0.05 or (hit < 0.1 * count and late < 0.2):
        return None  # few, or it has learned better
    places = ""
    if worst is not None:
        places = f" Nearly all are of the tasks “{worst[0]}…” ({share_text(worst[1])} of them)."
    return Finding(
        "malformed",
        "error" if worst or hit >= 0.3 * count else "warning",
        f"{hit} of {count} episodes write tool calls that cannot be read",
        f"From step {counted.first} on.{places} The model writes calls in another form than agent.format "
        "reads: compare what the prompt shows it (ludus show RUN --prompt) with what it writes.",
        {"fault": "malformed_call"},
        "fault_share/malformed_call",
    )


def uncalled_finding(counted: Counted, good: int) -> Finding | None:
    """Tools that are not called, where success is rare (`good`). `counted.hit`: episodes that try to call."""
    is_rare = good < 0.1 * counted.episodes
    if counted.episodes < FEWEST_EPISODES or (counted.late or 0) >= NOTABLE_SHARE or not is_rare:
        return None
    return Finding(
        "never_calls",
        "error",
        f"The model does not call its tools: {counted.hit} of {counted.episodes} episodes do",
        "It does not know that it should, or writes calls in a form that agent.format does not see: look at "
        "what it says (ludus show RUN --prompt). Then a warm start that shows it calls, the agent.format that "
        "it was trained with, or a prompt that says when to call; more turns would not help.",
        {"success": "no", "sort": "step"},
        "tool_calls",
    )


def lost_finding(
    episodes: int, lost: int, boundaries: int, worst: tuple[str, str, int, int] | None
) -> Finding | None:
    """`worst` is the most frequent failure: boundary, message, how often, and its first step."""
    if worst is None or lost < NOTABLE_SHARE * episodes:
        return None
    boundary, message, times, first = worst
    return Finding(
        "lost",
        "error",
        f"{lost} of {episodes} episodes were lost",
        f"Most often ({times} times, from step {first} on), at the boundary “{boundary}”: {message}. They are "
        "infrastructure failures, in no loss and no baseline.",
        {"failure": boundary if boundaries == 1 else "any"},
        "failure_share",
    )


def never_succeeds_finding(episodes: int, good: int, *, is_told: bool, most: float) -> Finding | None:
    """Not one episode has succeeded, where a reward says what success is (`is_told`), or none has been paid."""
    if episodes < FEWEST_EPISODES or good or not (is_told or most <= 0):
        return None
    return Finding(
        "never_succeeds",
        "error",
        f"No episode has succeeded: 0 of {episodes}",
        "Read what the model does and what it was paid for. Most often the tasks are too hard for it "
        "(a warm start, easier tasks), or its answers lack the form that the reward looks for.",
        {"success": "no", "sort": "reward"},
        "success",
    )


class _Count:
    """Counts episodes by step, and those with a mistake."""

    def __init__(self) -> None:
        self.episodes = self.hit = 0
        self.first: int | None = None
        self._newest: deque[tuple[int, bool]] = deque()

    def add(self, step: int, is_hit: bool) -> None:
        self.episodes += 1
        self.hit += is_hit
        if is_hit and self.first is None:
            self.first = step
        self._newest.append((step, is_hit))
        self._drop(step)

    def _drop(self, newest: int) -> None:
        while self._newest and self._newest[0][0] < newest - LATE_STEPS:
            self._newest.popleft()

    def at(self, newest: int) -> Counted:
        self._drop(newest)
        late = sum(hit for _, hit in self._newest) / len(self._newest) if self._newest else None
        return Counted(self.episodes, self.hit, self.first, late)


class EpisodeTally:
    """Counts of the episodes of a run that goes on, for the findings in them."""

    def __init__(self, *, has_tools: bool) -> None:
        self._has_tools = has_tools
        self._step = 0
        self._malformed, self._callers = _Count(), _Count()
        self._tools: dict[str, _Count] = {}
        self._faults: Counter[tuple[str, Fault]] = Counter()
        self._lost: Counter[tuple[str, str]] = Counter()
        self._lost_first: dict[tuple[str, str], int] = {}
        self._scored = self._good = 0
        self._is_told, self._most = False, -math.inf

    def add(self, step: int, episodes: Iterable[Trajectory]) -> None:
        """Count the episodes of a step. That an untrained model (step 0) does not succeed is no news."""
        self._step = step
        for one in episodes:
            self._malformed.add(step, Fault.MALFORMED_CALL in one.faults)
            if one.failure is not None:
                cause = one.failure.boundary.value, one.failure.message
                self._lost[cause] += 1
                self._lost_first.setdefault(cause, step)
            faulted = {(n, f) for a in one.actions for n, f in zip(a.faulted, a.faults, strict=False)}
            for name in {call.name for call in one.calls if call.name} | {n for n, _ in faulted if n}:
                self._tools.setdefault(name, _Count()).add(step, any(name == n for n, _ in faulted))
            for action in one.actions:
                self._faults.update(zip(action.faulted, action.faults, strict=False))
            if step and one.is_trainable:
                self._callers.add(step, bool(one.calls or one.faults))
                self._scored, self._good = self._scored + 1, self._good + is_success(one)
                self._is_told |= "success" in one.rewards
                self._most = max(self._most, one.reward or 0.0)

    def findings(self) -> Iterator[Finding]:
        worst = None
        for (boundary, message), times in self._lost.most_common(1):
            worst = boundary, message, times, self._lost_first[boundary, message]
        boundaries = len({boundary for boundary, _ in self._lost})
        found = [
            lost_finding(self._malformed.episodes, self._lost.total(), boundaries, worst),
            *(tool_finding(self._errors_of(name)) for name in self._tools),
            malformed_finding(self._malformed.at(self._step)),
        ]
        if self._has_tools:
            found.append(uncalled_finding(self._callers.at(self._step), self._good))
        found.append(
            never_succeeds_finding(self._scored, self._good, is_told=self._is_told, most=self._most)
        )
        yield from (one for one in found if one is not None)

    def _errors_of(self, name: str) -> ToolErrors:
        faults = {fault: count for (tool, fault), count in self._faults.items() if tool == name}
        return ToolErrors(
            name,
            self._tools[name].at(self._step),
            sum(faults.values()),
            faults.get(Fault.TOOL_TIMEOUT, 0),
            faults.get(Fault.UNKNOWN_TOOL, 0),
            faults.get(Fault.TOOL_RAISED, 0),
        )
