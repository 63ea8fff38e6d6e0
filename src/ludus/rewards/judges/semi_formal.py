"""Verdicts on code without running it: a model must argue semi-formally before it concludes.

It lists its assumptions, traces every path that matters with concrete values, and only then concludes; a
conclusion without the other two is refused and asked for again. After the semi-formal reasoning of agentic code
reasoning, whose verdicts on patches agree with execution in most cases. Where execution is at hand as well,
`execution` says by which reward, and whether the two agree is logged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field, TypeAdapter

from ludus.core.messages import Message
from ludus.core.task import Task
from ludus.core.trajectory import Reward, Trajectory
from ludus.rewards.judges.asking import AskingReward, CodedVerdict, ModelSpec, Unit, coded
from ludus.rewards.judges.evidence import (
    DEFAULT_CHARS,
    UNTRUSTED,
    code_of,
    enclosed,
    question,
    transcript,
)
from ludus.rewards.scorer import RewardLike, as_reward, evaluate
from ludus.rewards.scores import Parts, merge

_AGREES_FROM = 0.5


class PathTrace(BaseModel):
    """One way through the code."""

    inputs: str = Field(min_length=1)
    steps: str = Field(min_length=1)
    outcome: str = Field(min_length=1)


class SemiFormalVerdict(CodedVerdict):
    """Premises, traces, and a conclusion."""

    assumptions: list[str] = Field(min_length=1)
    traces: list[PathTrace] = Field(min_length=1)
    conclusion: Literal["correct", "incorrect"]
    confidence: Unit = 1.0


class SemiFormal(AskingReward):
    """1 for work that the argument finds correct, 0 for incorrect; with `graded`, by how sure it is.

    Parts: `<name>_traces`, how many paths were traced; with `execution`, that reward's own parts and
    `<name>_agrees`, 1 where both say the same. The score is the verdict's; execution is not counted.
    """

    takes_rewards: ClassVar[frozenset[str]] = frozenset({"execution"})

    def __init__(
        self,
        model: ModelSpec,
        *,
        execution: RewardLike | None = None,
        graded: bool = False,
        least_traces: int = 1,
        instructions: str = "",
        attempts: int = 3,
        max_tokens: int = 4096,
        temperature: float = 0.0,
        most_chars: int = DEFAULT_CHARS,
        name: str = "semi_formal",
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
        self.execution: Reward | None = None if execution is None else as_reward(execution)
        self.children = () if self.execution is None else (self.execution,)
        self.uses_envs = self.execution is not None and getattr(self.execution, "uses_envs", True)
        self.graded, self.least_traces, self.instructions = graded, least_traces, instructions

    async def score(self, trajectory: Trajectory, task: Task, envs: Mapping[str, Any]) -> Parts:

        async def ask(shown: Trajectory) -> SemiFormalVerdict:
            messages, code = self.question(shown, task)
            return await self.ask(messages, _verdict_type(code, self.least_traces), [shown])

        verdict = await self.judged(ask, trajectory)
        is_right = verdict is not None and verdict.conclusion == "correct"
        value = float(is_right)
        if self.graded and verdict is not None:
            value = 0.5 + 0.5 * verdict.confidence * (1 if is_right else -1)
        traces = 0 if verdict is None else len(verdict.traces)
        parts = {self.name: value, f"{self.name}_traces": float(traces)}
        if self.execution is not None:
            run = await evaluate(self.execution, trajectory, task, envs)
            merge(parts, run, self.name)
            if self.execution.name in run:
                passed = run[self.execution.name] >= 1.0 - 1e-9
                parts[f"{self.name}_agrees"] = float(passed == (value >= _AGREES_FROM))
        return parts

    def question(self, trajectory: Trajectory, task: Task) -> tuple[list[Message], str]:
        """What the model is asked, and the code that its verdict has to name."""
        asked = transcript(task.messages, self.most_chars)
        done = trajectory.messages[len(task.messages) :] or trajectory.messages
        shown = transcript(done, self.most_chars)
        code = code_of(asked, shown)
        system = "\n\n".join(
            filter(
                None,
                [
                    "You verify code by reasoning alone; nothing is run. You are given a task and the work on "
                    f"it, between marks such as <task-CODE> and <work-CODE>. {UNTRUSTED}",
                    "Argue in this order. First list your assumptions: what the task demands, and what you "
                    "take for granted about the language and the libraries. Then trace every path that "
                    "decides: pick concrete inputs, empty, extreme and wrong ones among them, and follow the "
                    "code line by line to its outcome. Names and comments prove nothing. Only then conclude: "
                    "correct if the work does what the task demands on every path, otherwise incorrect.",
                    self.instructions,
                ],
            )
        )
        form = (
            f'{{"code": "{code}", "assumptions": ["..."], "traces": [{{"inputs": "...", "steps": "...", '
            '"outcome": "..."}], "conclusion": "correct" or "incorrect", "confidence": <0 to 1>}'
        )
        evidence = [enclosed(asked, "task", code), enclosed(shown, "work", code)]
        return question(system, evidence, form), code


def _verdict_type(code: str, least_traces: int) -> TypeAdapter[SemiFormalVerdict]:
    def check(verdict: SemiFormalVerdict) -> None:
        if len(verdict.traces) < least_traces:
            raise ValueError(f"at least {least_traces} paths must be traced, with different inputs")
        if len({trace.inputs.strip() for trace in verdict.traces}) < len(verdict.traces):
            raise ValueError("two traces have the same inputs: each must be another path")

    return coded(SemiFormalVerdict, code, check)
