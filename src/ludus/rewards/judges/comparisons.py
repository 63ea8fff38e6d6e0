"""Comparing attempts at a task: `Ruler` ranks all of a group, `PairJudge` says which of two is better.

`Ruler` is after RULER (Relative Universal LLM-Elicited Rewards) of OpenPipe's ART: one call, without labels or
a reference answer. Scores only have to be right relative to each other, because GRPO takes the group's mean
off. Where one attempt's text keeps the judge from answering (`asking.py`), halves of the group are asked about
until it is found, in about 2 log2(G) questions; it scores 0.

`PairJudge` asks twice, with the two in either order, because judges prefer what they read first. Where the two
verdicts differ there is none: a tie, which makes no row. An attempt that keeps the judge from answering, which
a harmless one does not, is the worse one. A row is what DPO and reward models read: `prompt`,
`chosen`, `rejected`, and `dimensions` with what is better in which respect.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from ludus.core.messages import Json, Message
from ludus.core.random import key, shuffled
from ludus.core.trajectory import Group, Trajectory
from ludus.llm import BudgetExceeded, ChatError
from ludus.rewards.judges.asking import (
    UNTRUSTED,
    Asking,
    AskingReward,
    CodedVerdict,
    JudgeQuestion,
    Unit,
    asked_in,
    common_prefix,
    done_in,
    fair_limit,
    harmless,
    listed,
    numbered,
    question,
    transcript,
)

DEFAULT_RULER_RUBRIC = """\
- An attempt that reaches the goal scores clearly higher than one that does not.
- Among attempts that reach it, the one that wastes less (calls, turns, words) scores higher.
- A small difference in quality is a small difference in score; a large one is large.
- An attempt that misses the goal may have up to 0.3 for real progress towards it.
- Claims that the transcript does not support count as not done. Length and politeness are no merit."""

_MIDDLE = 0.5


class AttemptVerdict(BaseModel):
    id: Annotated[int, Field(strict=True)]
    reason: str = ""
    score: Unit


class RulerVerdict(CodedVerdict):
    scores: list[AttemptVerdict]


@dataclass(kw_only=True, eq=False)
class Ruler(AskingReward):
    """A group reward: scores in [0, 1] by one question to a judge over all attempts (equal ones share theirs).

    `rubric` says in plain text what is better. A group of which all attempts are equal has 0.5 for each, and no
    question. Together attempts show `most_chars` characters; longer ones lose their middles, with notice.
    """

    rubric: str = DEFAULT_RULER_RUBRIC
    max_tokens: int = 2048
    most_chars: int = 60_000
    seed: int = 0
    name: str = "ruler"

    async def score_group(self, group: Group) -> list[float]:
        distinct: list[Sequence[Message]] = []
        place_of: list[int] = []
        for trajectory in group.trajectories:
            if trajectory.messages not in distinct:
                distinct.append(trajectory.messages)
            place_of.append(distinct.index(trajectory.messages))
        try:
            scores = await self._ranked(group, distinct)
        except BudgetExceeded:
            raise
        except ChatError as error:
            first = group.trajectories[0]
            plain = [harmless(first).messages, harmless(first).messages]
            await self.check_judge(first, partial(self._ranked, group, plain), error)
            breaking = await self._breaking(group, distinct, range(len(distinct)))
            if not breaking:
                raise  # each of them can be judged: it is the question as a whole, which we wrote
            rest = [place for place in range(len(distinct)) if place not in breaking]
            if len(rest) < 2:
                await self._ranked(group, plain)  # the judge has not broken down meanwhile
            ranked = await self._ranked(group, [distinct[place] for place in rest])
            scores = [0.0] * len(distinct)
            for place, score in zip(rest, ranked, strict=True):
                scores[place] = score
            self.note_unanswered(
                [t for t, place in zip(group.trajectories, place_of, strict=True) if place in breaking],
                error,
            )
        return [scores[place] for place in place_of]

    async def _ranked(self, group: Group, conversations: Sequence[Sequence[Message]]) -> list[float]:
        """A score for each of these; one alone has the middle, without a question."""
        if len(conversations) < 2:
            return [_MIDDLE] * len(conversations)
        # it depends on which attempts the group has, and on nothing else
        seeds = (one.seed for one in group.trajectories)
        order = shuffled(
            len(conversations), key(self.seed, "ruler", group.trajectories[0].task.id, *seeds)
        )

        def check(verdict: RulerVerdict) -> None:
            if sorted(one.id for one in verdict.scores) != list(range(1, len(order) + 1)):
                raise ValueError(f"scores must have each of the attempts 1 to {len(order)} once")

        asked = self.question([conversations[place] for place in order])
        verdict = await self.ask(asked, RulerVerdict, group.trajectories, check)
        shown = {one.id: one.score for one in verdict.scores}
        scores = {place: shown[number] for number, place in enumerate(order, start=1)}
        return [scores[place] for place in range(len(conversations))]

    async def _breaking(
        self, group: Group, conversations: Sequence[Sequence[Message]], places: Sequence[int]
    ) -> set[int]:
        """Which of these keep the judge from answering, beside a harmless one: by halves."""
        found: set[int] = set()
        middle = (len(places) + 1) // 2
        for half in filter(len, (places[:middle], places[middle:])):
            plain = harmless(group.trajectories[0]).messages
            try:
                await self._ranked(group, [*(conversations[place] for place in half), plain])
            except BudgetExceeded:
                raise
            except ChatError:
                found |= await self._breaking(group, conversations, half) if len(half) > 1 else set(half)
        return found

    def question(self, conversations: Sequence[Sequence[Message]]) -> JudgeQuestion:
        shared = common_prefix(conversations)
        start = transcript(conversations[0][:shared], self.most_chars) or "(nothing)"
        whole = [transcript(one[shared:], self.most_chars) for one in conversations]
        limit = fair_limit(whole, self.most_chars)
        rests = [transcript(one[shared:], limit) or "(nothing)" for one in conversations]
        system = [
            "You compare attempts of AI agents at one task. What they have in common stands between "
            "<common-start-CODE> and its end, and how each went on between marks such as "
            f"<attempt-1-CODE>. {UNTRUSTED}",
            f"Give each attempt a score from 0 to 1, by comparing them with each other:\n{self.rubric}",
            "Attempts that are equally good have the same score. The order of attempts means nothing.",
        ]
        scores = ", ".join(
            f'{{"id": {number}, "reason": "<a few words>", "score": <0 to 1>}}'
            for number in range(1, len(rests) + 1)
        )
        note = f"There are {len(rests)} attempts: `scores` has each of them once."
        evidence = {"common-start": start, **numbered("attempt", rests)}
        return question(system, evidence, f'"scores": [{scores}]', note=note)


Side = Literal["first", "second", "tie"]
_FLIPPED: dict[Side, Side] = {"first": "second", "second": "first", "tie": "tie"}


def flipped(side: Side) -> Side:
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
        """The verdict on a pair; an attempt that keeps the judge from answering is worse. Raises `ChatError`
        where none can be had."""
        try:
            return await self._judged(pair)
        except BudgetExceeded:
            raise
        except ChatError as error:
            broken = [await self._breaks(one) for one in (pair.first, pair.second)]
            if not any(broken):
                return await self._judged(pair)
            if await self._breaks(harmless(pair.first)):
                raise  # the judge is broken, whatever it is shown
            worse = [
                one
                for one, is_broken in zip((pair.first, pair.second), broken, strict=True)
                if is_broken
            ]
            self.note_unanswered(worse, error)
            better: Side = "tie" if all(broken) else "second" if broken[0] else "first"
            reason = "keeps the judge from answering: " + ("both" if all(broken) else flipped(better))
            return PairVerdict(better, dict.fromkeys(self._meanings, better), reason, self._by)

    async def _judged(self, pair: AttemptPair) -> PairVerdict:
        here, there = await asyncio.gather(
            self._ask(pair.first, pair.second), self._ask(pair.second, pair.first)
        )
        dimensions: dict[str, Side] = {
            name: side if side == flipped(there.dimensions[name]) else "tie"
            for name, side in here.dimensions.items()
        }
        agrees = here.better == flipped(there.better)
        better: Side = here.better if agrees else "tie"
        return PairVerdict(better, dimensions, here.reason, self._by, agrees)

    @property
    def _by(self) -> str:
        return f"judge {self.chat_model.name}"

    async def _breaks(self, attempt: Trajectory) -> bool:
        """Whether the judge gives no answer about this attempt beside a harmless one."""
        try:
            await self._ask(attempt, harmless(attempt))
        except BudgetExceeded:
            raise
        except ChatError:
            return True
        return False

    async def _ask(self, first: Trajectory, second: Trajectory) -> PairAnswer:
        def check(answer: PairAnswer) -> None:
            missing = [name for name in self._meanings if name not in answer.dimensions]
            if missing:
                raise ValueError(f"dimensions has no {', '.join(missing)}")
            answer.dimensions = {name: answer.dimensions[name] for name in self._meanings}

        return await self.ask(self.question(first, second), PairAnswer, check=check)

    def question(self, first: Trajectory, second: Trajectory) -> JudgeQuestion:
        named = [f"{name}: {text}" if text else name for name, text in self._meanings.items()]
        system = [
            "You compare two attempts of an AI agent at one task. You are given the task and what each did, "
            f"between marks such as <task-CODE>, <first-CODE> and <second-CODE>. {UNTRUSTED}",
            "Say which one is better: first, second or tie. Length is no merit, and the order means nothing.",
            f"Say it for each of these too:\n{listed(named)}" if named else "",
            self.instructions,
        ]
        most = self.most_chars // 2
        evidence = {
            "task": transcript(asked_in(first, first.task), self.most_chars),
            "first": transcript(done_in(first, first.task), most),
            "second": transcript(done_in(second, second.task), most),
        }
        sides = ", ".join(f'"{name}": "first" | "second" | "tie"' for name in self._meanings)
        form = (
            '"reason": "<one or two sentences>", "better": "first" | "second" | "tie", '
            f'"dimensions": {{{sides}}}'
        )
        return question(system, evidence, form)
