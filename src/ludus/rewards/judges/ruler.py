"""`Ruler`: one call ranks all attempts at a task. No labels, no reference answer, no hand-made reward.

After RULER (Relative Universal LLM-Elicited Rewards) of OpenPipe's ART: scores only have to be right relative
to each other, because GRPO takes the group's mean off. Where one attempt's text keeps the judge from answering
(`asking.py`), halves of the group are asked about until it is found, in about 2 log2(G) questions; it scores 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from pydantic import BaseModel, Field

from ludus.core.messages import Message
from ludus.core.random import key, shuffled
from ludus.core.trajectory import Group
from ludus.llm import BudgetExceeded, ChatError
from ludus.rewards.judges.asking import (
    UNTRUSTED,
    AskingReward,
    CodedVerdict,
    JudgeQuestion,
    Unit,
    common_prefix,
    fair_limit,
    harmless,
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
    """One attempt's place in a verdict."""

    id: Annotated[int, Field(strict=True)]
    reason: str = ""
    score: Unit


class RulerVerdict(CodedVerdict):
    """Verdict on a group."""

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
        """The question to the judge about these attempts, in this order."""
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
