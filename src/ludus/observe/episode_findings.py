"""Findings in a run's episodes: counts are judged, and where they come from is the caller's.

`EpisodeTally` counts trajectories while a run goes on; the viewer counts in its index, where a finding's
`query` opens the episodes that were counted. Training and evaluation count alike.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ludus.core.failures import NOTABLE_SHARE, Fault
from ludus.core.trajectory import Trajectory, is_success
from ludus.observe.findings import Finding
from ludus.observe.report import share_text

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
