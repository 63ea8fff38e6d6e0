"""`ModelMatch`: does the answer say the same as the target? By rule where that settles it, else by a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from ludus.core.messages import Message
from ludus.core.task import Task
from ludus.core.trajectory import Trajectory
from ludus.rewards.judges.asking import AskingReward, CodedVerdict, ModelSpec, coded
from ludus.rewards.judges.evidence import UNTRUSTED, code_of, enclosed, question, shortened, transcript
from ludus.rewards.scores import Parts
from ludus.rewards.text_rewards import exact_match


class MatchVerdict(CodedVerdict):
    """Whether two answers agree."""

    reason: str = ""
    match: Annotated[bool, Field(strict=True)]


class ModelMatch(AskingReward):
    """`right` for an answer that means what the target says, `wrong` otherwise (1 and -1 in VerlTool).

    An answer that is the target, as `exact_match` compares, needs no model, and an empty one matches nothing.
    The part `<name>_asked` says how often the model decided.
    """

    def __init__(
        self,
        model: ModelSpec,
        *,
        right: float = 1.0,
        wrong: float = 0.0,
        attempts: int = 3,
        max_tokens: int = 512,
        temperature: float = 0.0,
        most_chars: int = 8_000,
        name: str = "model_match",
        weight: float = 1.0,
    ) -> None:
        super().__init__(
            model,
            attempts=attempts,
            max_tokens=max_tokens,
            temperature=temperature,
            most_chars=most_chars,
            name=name,
            weight=weight,
        )
        self.right, self.wrong = right, wrong

    async def score(self, trajectory: Trajectory, task: Task, envs: Mapping[str, Any]) -> Parts:
        answer = (trajectory.answer or "").strip()
        settled = not answer or bool(exact_match(answer, task.target))
        is_match = bool(answer)

        async def ask(shown: Trajectory) -> MatchVerdict:
            messages, code = self.question((shown.answer or "").strip(), task)
            return await self.ask(messages, coded(MatchVerdict, code), [shown])

        if not settled:
            verdict = await self.judged(ask, trajectory)
            is_match = verdict is not None and verdict.match
        score = self.right if is_match else self.wrong
        return {self.name: score, f"{self.name}_asked": float(not settled)}

    def question(self, answer: str, task: Task) -> tuple[list[Message], str]:
        """What the model is asked, and the code that its verdict has to name."""
        targets = task.target if isinstance(task.target, list | tuple) else [task.target]
        wanted = shortened("\n".join(str(target) for target in targets), self.most_chars)
        asked, given = transcript(task.messages, self.most_chars), shortened(answer, self.most_chars)
        code = code_of(asked, wanted, given)
        system = (
            "You compare an answer with the right one. You are given a question, its right answer (any line of "
            f"it, if there are several) and an answer, between marks such as <answer-CODE>. {UNTRUSTED}\n\n"
            "It matches if it says the same: another wording, unit or notation of the same value is fine; "
            "several different answers, or a hedge between them, is no match."
        )
        evidence = [
            enclosed(text, name, code)
            for name, text in (("question", asked), ("right-answer", wanted), ("answer", given))
        ]
        form = f'{{"code": "{code}", "reason": "<a few words>", "match": true or false}}'
        return question(system, evidence, form), code
