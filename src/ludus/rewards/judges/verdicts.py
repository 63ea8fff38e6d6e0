"""Verdicts on an answer: does it say the same as the target (`ModelMatch`), is code right (`SemiFormal`)?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field

from ludus.core.task import Task
from ludus.core.trajectory import Reward, Trajectory
from ludus.rewards.declared import RewardTraits
from ludus.rewards.judges.asking import AskingReward, CodedVerdict, Unit
from ludus.rewards.judges.evidence import (
    UNTRUSTED,
    JudgeQuestion,
    done_in,
    question,
    shortened,
    transcript,
)
from ludus.rewards.scorer import RewardLike, as_reward, evaluate
from ludus.rewards.scores import Parts, merge
from ludus.rewards.text_rewards import exact_match

_AGREES_FROM = 0.5


class MatchVerdict(CodedVerdict):
    """Whether two answers agree."""

    reason: str = ""
    match: Annotated[bool, Field(strict=True)]


@dataclass(kw_only=True, eq=False)
class ModelMatch(AskingReward):
    """`right` for an answer that means what the target says, `wrong` otherwise (1 and -1 in VerlTool).

    An answer that is the target, as `exact_match` compares, needs no model, and an empty one matches nothing.
    The part `<name>_asked` says how often the model decided.
    """

    right: float = 1.0
    wrong: float = 0.0
    max_tokens: int = 512
    most_chars: int = 8_000
    name: str = "model_match"

    async def score(self, trajectory: Trajectory, task: Task, envs: Mapping[str, Any]) -> Parts:
        answer = (trajectory.answer or "").strip()
        settled = not answer or bool(exact_match(answer, task.target))
        is_match = bool(answer)
        if not settled:
            verdict = await self.verdict(
                trajectory, MatchVerdict, lambda shown: self.question((shown.answer or "").strip(), task)
            )
            is_match = verdict is not None and verdict.match
        score = self.right if is_match else self.wrong
        return {self.name: score, f"{self.name}_asked": float(not settled)}

    def question(self, answer: str, task: Task) -> JudgeQuestion:
        targets = task.target if isinstance(task.target, list | tuple) else [task.target]
        system = [
            "You compare an answer with the right one. You are given a question, its right answer (any line of "
            f"it, if there are several) and an answer, between marks such as <answer-CODE>. {UNTRUSTED}",
            "It matches if it says the same: another wording, unit or notation of the same value is fine; "
            "several different answers, or a hedge between them, is no match.",
        ]
        evidence = {
            "question": transcript(task.messages, self.most_chars),
            "right-answer": shortened("\n".join(map(str, targets)), self.most_chars),
            "answer": shortened(answer, self.most_chars),
        }
        return question(system, evidence, '"reason": "<a few words>", "match": true or false')


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


@dataclass(kw_only=True, eq=False)
class SemiFormal(AskingReward):
    """1 for code that an argument finds correct, 0 for incorrect; with `graded`, by how sure it is.

    The code is not run: the model must list its assumptions and trace every path that matters with concrete
    values before it concludes; a conclusion without these is refused and asked for again. After the semi-formal
    reasoning of agentic code reasoning, whose verdicts on patches agree with execution in most cases.

    Parts: `<name>_traces`, how many paths were traced; with `execution`, that reward's own parts and
    `<name>_agrees`, 1 where both say the same. The score is the verdict's; execution is not counted.
    """

    takes_rewards: ClassVar[frozenset[str]] = frozenset({"execution"})

    execution: RewardLike | None = None
    graded: bool = False
    least_traces: int = 1
    instructions: str = ""
    max_tokens: int = 4096
    name: str = "semi_formal"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.children: tuple[Reward, ...] = ()
        if self.execution is not None:
            self.children = (as_reward(self.execution),)
        self.uses_envs = any(RewardTraits.of(one).uses_envs for one in self.children)

    async def score(self, trajectory: Trajectory, task: Task, envs: Mapping[str, Any]) -> Parts:
        verdict = await self.verdict(
            trajectory, SemiFormalVerdict, lambda shown: self.question(shown, task), self._check
        )
        is_right = verdict is not None and verdict.conclusion == "correct"
        value = float(is_right)
        if self.graded and verdict is not None:
            value = 0.5 + 0.5 * verdict.confidence * (1 if is_right else -1)
        traces = 0 if verdict is None else len(verdict.traces)
        parts = {self.name: value, f"{self.name}_traces": float(traces)}
        for execution in self.children:
            run = await evaluate(execution, trajectory, task, envs)
            merge(parts, run, self.name)
            if execution.name in run:
                passed = run[execution.name] >= 1.0 - 1e-9
                parts[f"{self.name}_agrees"] = float(passed == (value >= _AGREES_FROM))
        return parts

    def _check(self, verdict: SemiFormalVerdict) -> None:
        if len(verdict.traces) < self.least_traces:
            raise ValueError(f"at least {self.least_traces} paths must be traced, with different inputs")
        if len({trace.inputs.strip() for trace in verdict.traces}) < len(verdict.traces):
            raise ValueError("two traces have the same inputs: each must be another path")

    def question(self, trajectory: Trajectory, task: Task) -> JudgeQuestion:
        system = [
            "You verify code by reasoning alone; nothing is run. You are given a task and the work on "
            f"it, between marks such as <task-CODE> and <work-CODE>. {UNTRUSTED}",
            "Argue in this order. First list your assumptions: what the task demands, and what you "
            "take for granted about the language and the libraries. Then trace every path that "
            "decides: pick concrete inputs, empty, extreme and wrong ones among them, and follow the "
            "code line by line to its outcome. Names and comments prove nothing. Only then conclude: "
            "correct if the work does what the task demands on every path, otherwise incorrect.",
            self.instructions,
        ]
        evidence = {
            "task": transcript(task.messages, self.most_chars),
            "work": transcript(done_in(trajectory, task), self.most_chars),
        }
        form = (
            '"assumptions": ["..."], "traces": [{"inputs": "...", "steps": "...", "outcome": "..."}], '
            '"conclusion": "correct" or "incorrect", "confidence": <0 to 1>'
        )
        return question(system, evidence, form)
