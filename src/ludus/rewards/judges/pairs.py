"""Preferences: pairs of attempts at a task, which of the two is better, and `PairJudge`, a model that says so.

The model is asked twice, with the two in either order, because judges prefer what they read first. Where the
two verdicts differ there is none: a tie.

A row is what DPO and reward models read: `prompt`, `chosen`, `rejected`, and `dimensions` with what is better
in which respect. A pair in which neither is better makes no row.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Literal

from pydantic import Field

from ludus.core.messages import Json, Message
from ludus.core.random import key, shuffled
from ludus.core.trajectory import Group, Trajectory
from ludus.rewards.judges.asking import (
    UNTRUSTED,
    Asking,
    CodedVerdict,
    JudgeQuestion,
    listed,
    question,
    transcript,
)

Side = Literal["first", "second", "tie"]
_FLIPPED: dict[Side, Side] = {"first": "second", "second": "first", "tie": "tie"}


def flipped(side: Side) -> Side:
    """The verdict where the two have changed places."""
    return _FLIPPED[side]


@dataclass(frozen=True, slots=True)
class PairVerdict:
    """Which of two attempts is better, in all and in some respects."""

    better: Side
    dimensions: Mapping[str, Side] = field(default_factory=dict)
    reason: str = ""
    by: str = "person"
    """Author of the verdict."""
    is_consistent: bool = True
    """Whether a judge said the same with the two in the other order."""


@dataclass(frozen=True, slots=True)
class AttemptPair:
    """Two attempts at one task. Its id is that of its contents, whatever file they are in."""

    first: Trajectory
    second: Trajectory

    @property
    def id(self) -> str:
        said = json.dumps([_chat(self.first.messages), _chat(self.second.messages)], default=str)
        return hashlib.blake2b(said.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def choose_pairs(groups: Iterable[Group], most: int, seed: int = 0) -> list[AttemptPair]:
    """At most so many pairs, drawn from all tasks in turns; which one is first is drawn too.

    Attempts that say the same, that failed, or that were asked something else make no pair.
    """
    by_task: dict[str, list[Trajectory]] = {}
    for group in groups:
        played = [t for t in group.trajectories if t.failure is None and _asked(t) is not None]
        by_task.setdefault(group.task.id, []).extend(played)
    decks = []
    for number, (task, attempts) in enumerate(by_task.items()):
        pairs = [
            (one, other)
            for one, other in combinations(attempts, 2)
            if _asked(one) == _asked(other) and one.messages != other.messages
        ]
        order = shuffled(len(pairs), key(seed, "pairs", number, task))
        decks.append([pairs[place] for place in order])
    drawn: list[AttemptPair] = []
    for round_number in range(max(map(len, decks), default=0)):
        for number, deck in enumerate(decks):
            if round_number < len(deck) and len(drawn) < most:
                first, second = deck[round_number]
                swap = key(seed, "order", number, round_number) % 2
                drawn.append(AttemptPair(second, first) if swap else AttemptPair(first, second))
    return drawn


def preference_row(pair: AttemptPair, verdict: PairVerdict) -> Json | None:
    """A line of a file of pairs; None where neither is better."""
    if verdict.better == "tie":
        return None
    chosen, rejected = (
        (pair.first, pair.second) if verdict.better == "first" else (pair.second, pair.first)
    )
    prompt = _asked(chosen) or []
    sides: dict[Side, str] = {
        verdict.better: "chosen",
        flipped(verdict.better): "rejected",
        "tie": "tie",
    }
    return {
        "id": pair.id,
        "task": chosen.task.id,
        "prompt": _chat(prompt),
        "chosen": _chat(chosen.messages[len(prompt) :]),
        "rejected": _chat(rejected.messages[len(prompt) :]),
        "dimensions": {name: sides[side] for name, side in verdict.dimensions.items()},
        "reason": verdict.reason,
        "by": verdict.by,
        "consistent": verdict.is_consistent,
    }


def agreement(rows: Iterable[Mapping[str, Any]], others: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """(pairs on which both files choose the same, pairs that both have)."""
    chosen = {_unordered(row): row.get("chosen") for row in others}
    both = [row for row in rows if _unordered(row) in chosen]
    return sum(chosen[_unordered(row)] == row.get("chosen") for row in both), len(both)


def _unordered(row: Mapping[str, Any]) -> str:
    sides = sorted(json.dumps(row.get(side), sort_keys=True) for side in ("chosen", "rejected"))
    return json.dumps([row.get("prompt"), *sides], sort_keys=True)


def _asked(trajectory: Trajectory) -> list[Message] | None:
    """The messages before the first action; None where no action follows."""
    asked = trajectory.asked
    return asked if asked and len(asked) < len(trajectory.messages) else None


def _chat(messages: Sequence[Message]) -> list[Json]:
    return [message.as_chat() for message in messages]


class PairAnswer(CodedVerdict):
    """Answer of the judge."""

    reason: str = ""
    better: Side
    dimensions: dict[str, Side] = Field(default_factory=dict)


@dataclass(kw_only=True, eq=False)
class PairJudge(Asking):
    """Asks a model which of two attempts is better. `dimensions` maps names to what they mean."""

    dimensions: Mapping[str, str] | Sequence[str] = ()
    instructions: str = ""
    name: str = "pair_judge"

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.dimensions
        self._meanings = dict(given if isinstance(given, Mapping) else dict.fromkeys(given, ""))

    async def prefer(self, pair: AttemptPair) -> PairVerdict:
        """The verdict on a pair; raises `ChatError` where none can be had."""
        here, there = await asyncio.gather(
            self._ask(pair.first, pair.second), self._ask(pair.second, pair.first)
        )
        dimensions: dict[str, Side] = {
            name: side if side == flipped(there.dimensions[name]) else "tie"
            for name, side in here.dimensions.items()
        }
        agrees = here.better == flipped(there.better)
        better: Side = here.better if agrees else "tie"
        return PairVerdict(better, dimensions, here.reason, f"judge {self.chat_model.name}", agrees)

    async def _ask(self, first: Trajectory, second: Trajectory) -> PairAnswer:
        def check(answer: PairAnswer) -> None:
            missing = [name for name in self._meanings if name not in answer.dimensions]
            if missing:
                raise ValueError(f"dimensions has no {', '.join(missing)}")
            answer.dimensions = {name: answer.dimensions[name] for name in self._meanings}

        return await self.ask(self.question(first, second), PairAnswer, check=check)

    def question(self, first: Trajectory, second: Trajectory) -> JudgeQuestion:
        """The question to the model about two attempts, in this order."""
        named = [f"{name}: {text}" if text else name for name, text in self._meanings.items()]
        system = [
            "You compare two attempts of an AI agent at one task. You are given the task and what each did, "
            f"between marks such as <task-CODE>, <first-CODE> and <second-CODE>. {UNTRUSTED}",
            "Say which one is better: first, second or tie. Length is no merit, and the order means nothing.",
            f"Say it for each of these too:\n{listed(named)}" if named else "",
            self.instructions,
        ]
        asked, most = first.task.messages, self.most_chars // 2
        evidence = {
            "task": transcript(asked, self.most_chars),
            "first": transcript(first.messages[len(asked) :], most),
            "second": transcript(second.messages[len(asked) :], most),
        }
        sides = ", ".join(f'"{name}": "first" | "second" | "tie"' for name in self._meanings)
        form = (
            '"reason": "<one or two sentences>", "better": "first" | "second" | "tie", '
            f'"dimensions": {{{sides}}}'
        )
        return question(system, evidence, form)
