"""`PairJudge`: a language model says which of two attempts is better, in all and in each dimension.

It is asked twice, with the two in either order, because judges prefer what they read first. Where the two
verdicts differ there is none: a tie.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field

from ludus.core.trajectory import Trajectory
from ludus.rewards.judges.asking import Asking, CodedVerdict
from ludus.rewards.judges.evidence import UNTRUSTED, JudgeQuestion, listed, question, transcript
from ludus.rewards.preferences import AttemptPair, PairVerdict, Side, flipped


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
