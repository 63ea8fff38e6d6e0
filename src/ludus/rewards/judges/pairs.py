"""`PairJudge`: a language model says which of two attempts is better, in all and in each dimension.

It is asked twice, with the two in either order, because judges prefer what they read first. Where the two
verdicts differ there is none: a tie.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from pydantic import Field, TypeAdapter

from ludus.core.chat import ChatOptions
from ludus.core.trajectory import Trajectory
from ludus.llm import ask_json, load_chat_model
from ludus.rewards.judges.asking import CodedVerdict, ModelSpec, coded, listed
from ludus.rewards.judges.evidence import (
    DEFAULT_CHARS,
    UNTRUSTED,
    code_of,
    enclosed,
    question,
    transcript,
)
from ludus.rewards.preferences import AttemptPair, PairVerdict, Side, flipped


class PairAnswer(CodedVerdict):
    """What the judge answers."""

    reason: str = ""
    better: Side
    dimensions: dict[str, Side] = Field(default_factory=dict)


class PairJudge:
    """Asks a model which of two attempts is better. `dimensions` maps names to what they mean."""

    def __init__(
        self,
        model: ModelSpec,
        *,
        dimensions: Mapping[str, str] | Sequence[str] = (),
        instructions: str = "",
        attempts: int = 3,
        max_tokens: int = 1024,
        most_chars: int = DEFAULT_CHARS,
    ) -> None:
        self.model = load_chat_model(model)
        named = dimensions if isinstance(dimensions, Mapping) else dict.fromkeys(dimensions, "")
        self.dimensions = dict(named)
        self.instructions, self.attempts, self.most_chars = instructions, attempts, most_chars
        self._options = ChatOptions(max_tokens=max_tokens)

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
        return PairVerdict(better, dimensions, here.reason, f"judge {self.model.name}", agrees)

    async def _ask(self, first: Trajectory, second: Trajectory) -> PairAnswer:
        task = transcript(first.task.messages, self.most_chars)
        asked = len(first.task.messages)
        shown = [transcript(one.messages[asked:], self.most_chars // 2) for one in (first, second)]
        code = code_of(task, *shown)
        evidence = [
            enclosed(task, "task", code),
            enclosed(shown[0], "first", code),
            enclosed(shown[1], "second", code),
        ]
        sides = ", ".join(f'"{name}": "first" | "second" | "tie"' for name in self.dimensions)
        form = (
            f'{{"code": "{code}", "reason": "<one or two sentences>", "better": "first" | "second" | "tie", '
            f'"dimensions": {{{sides}}}}}'
        )
        messages = question(self._system(), evidence, form)
        found = await ask_json(
            self.model, messages, self._answer_type(code), self._options, attempts=self.attempts
        )
        return found.value

    def _system(self) -> str:
        named = [f"{name}: {text}" if text else name for name, text in self.dimensions.items()]
        parts = [
            "You compare two attempts of an AI agent at one task. You are given the task and what each did, "
            f"between marks such as <task-CODE>, <first-CODE> and <second-CODE>. {UNTRUSTED}",
            "Say which one is better: first, second or tie. Length is no merit, and the order means nothing.",
            f"Say it for each of these too:\n{listed(named)}" if named else "",
            self.instructions,
        ]
        return "\n\n".join(part for part in parts if part)

    def _answer_type(self, code: str) -> TypeAdapter[PairAnswer]:
        def check(answer: PairAnswer) -> None:
            missing = [name for name in self.dimensions if name not in answer.dimensions]
            if missing:
                raise ValueError(f"dimensions has no {', '.join(missing)}")
            answer.dimensions = {name: answer.dimensions[name] for name in self.dimensions}

        return coded(PairAnswer, code, check)

    async def close(self) -> None:
        await self.model.close()
