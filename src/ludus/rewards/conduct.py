"""How an episode was played: its calls, their faults and results, repeats, recovery, turns and tokens. Pure."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from ludus.core.failures import ConfigError, Fault
from ludus.core.messages import Message, ToolCall
from ludus.core.trajectory import Segment, Trajectory

_WORD = re.compile(r"\w+")
Unit = Literal["turns", "calls", "tokens"]


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    turn: int
    """The number of its action."""
    call: ToolCall
    is_faulty: bool
    result: str
    """The result as the model read it; empty where the episode ended first."""

    @property
    def key(self) -> str:
        return json.dumps([self.call.name, self.call.arguments], sort_keys=True, default=str)


def call_records(trajectory: Trajectory) -> list[AnsweredCall]:
    """All calls in order, each with the message that answered it."""
    actions, messages = trajectory.actions, trajectory.messages
    places = [n for n, message in enumerate(messages) if message.role == "assistant"]
    places = places[len(places) - len(actions) :] if len(places) >= len(actions) else []
    records: list[AnsweredCall] = []
    for turn, action in enumerate(actions):
        answers: list[Message] = []
        if turn < len(places):
            following = places[turn + 1] if turn + 1 < len(places) else len(messages)
            answers = messages[places[turn] + 1 : following]
        faulty = faulty_calls(action)
        for number, call in enumerate(action.calls):
            result = answers[number].content if number < len(answers) else ""
            records.append(AnsweredCall(turn, call, number in faulty, result))
    return records


def faulty_calls(action: Segment, kinds: Collection[Fault] = tuple(Fault)) -> set[int]:
    """Which calls of an action were answered by such a fault; those of one name are taken in order."""
    if not action.faulted and any(fault in kinds for fault in action.faults):
        return set(range(len(action.calls)))  # which ones is not known
    pairs = zip(action.faulted, action.faults, strict=False)
    faulted = Counter(name for name, fault in pairs if fault in kinds)
    faulted -= Counter(call.name for call in action.calls if call.fault in kinds)
    found: set[int] = set()
    for number, call in enumerate(action.calls):
        if call.fault is not None:
            found.add(number)
        elif faulted[call.name] > 0:
            faulted[call.name] -= 1
            found.add(number)
    return found


def effective_share(records: Collection[AnsweredCall]) -> float:
    """Calls without a fault whose result was not seen before, over all calls; 0 without any."""
    seen: set[str] = set()
    effective = 0
    for record in records:
        if not record.is_faulty and record.result not in seen:
            effective += 1
        seen.add(record.result)
    return effective / len(records) if records else 0.0


def recovery_share(trajectory: Trajectory) -> float:
    """Faulty actions that a faultless call followed later, over all faulty ones; 1 without any."""
    good = [bool(action.calls) and not action.faults for action in trajectory.actions]
    faulty = [number for number, action in enumerate(trajectory.actions) if action.faults]
    return sum(any(good[n + 1 :]) for n in faulty) / len(faulty) if faulty else 1.0


def repeated_calls(records: Collection[AnsweredCall]) -> int:
    """Calls that had been made before, with the same arguments and the same result: nothing was learned."""
    seen: set[tuple[str, str]] = set()
    repeats = 0
    for record in records:
        repeats += (record.key, record.result) in seen
        seen.add((record.key, record.result))
    return repeats


def needless_calls(
    records: Collection[AnsweredCall], answers: Collection[str], tools: Collection[str] | None = None
) -> int:
    """Calls in turns after the one whose result held an answer: enough was known."""
    wanted = [words for answer in answers if (words := _words(answer))]
    known_at = min(
        (r.turn for r in records if any(f" {w} " in f" {_words(r.result)} " for w in wanted)),
        default=None,
    )
    if known_at is None:
        return 0
    return sum(r.turn > known_at and (tools is None or r.call.name in tools) for r in records)


def distinct_thoughts_share(trajectory: Trajectory) -> float:
    """Turns that say something that no earlier turn said, over all turns: a crude sign of coherence."""
    said = [m.content for m in trajectory.messages if m.role == "assistant"][-trajectory.turns :]
    texts = [_words(text) for text in said] if trajectory.turns else []
    fresh = sum(bool(text) and text not in texts[:place] for place, text in enumerate(texts))
    return fresh / len(texts) if texts else 1.0


def _words(text: str) -> str:
    return " ".join(_WORD.findall(text.lower()))


def made_calls(trajectory: Trajectory, tools: Collection[str] | None = None) -> list[ToolCall]:
    """The calls of existing tools, or of these tools, including those that a tool answered with an error.

    A call that cannot be parsed, or of an unknown tool, calls nothing.
    """
    made: list[ToolCall] = []
    for action in trajectory.actions:
        unknown = faulty_calls(action, (Fault.UNKNOWN_TOOL,))
        made += [call for number, call in enumerate(action.calls) if number not in unknown]
    return [call for call in made if tools is None or call.name in tools]


def good_calls(trajectory: Trajectory) -> list[ToolCall]:
    """The calls of those actions that had no fault at all: an invented tool never earns anything."""
    return [
        call
        for action in trajectory.actions
        if not action.faults
        for call in action.calls
        if call.fault is None
    ]


def tool_names(tools: Collection[str] | None, name: str) -> frozenset[str] | None:
    """Which tools a reward is about; one text in place of a list would be read letter by letter."""
    if isinstance(tools, str):
        raise ConfigError(f"{name!r}: tools is a list of names, not the text {tools!r}")
    return None if tools is None else frozenset(tools)


def amount_used(trajectory: Trajectory, unit: Unit) -> int:
    """How many turns, calls or tokens an episode took."""
    if unit == "turns":
        return trajectory.turns
    if unit == "calls":
        return len(trajectory.calls)
    return sum(len(action.tokens) for action in trajectory.actions)
