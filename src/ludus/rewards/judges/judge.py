"""`Judge`: a language model scores an episode on named dimensions, each from 0 to 10."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ludus.core.failures import ConfigError
from ludus.core.messages import Message
from ludus.core.task import Task
from ludus.core.trajectory import Group, Trajectory
from ludus.rewards.judges.asking import (
    UNTRUSTED,
    AskingReward,
    CodedVerdict,
    JudgeQuestion,
    OutOfTen,
    done_in,
    images,
    listed,
    question,
    shortened,
    transcript,
)
from ludus.rewards.judges.rubric import (
    CODE_QUALITY_RUBRIC,
    DEFAULT_RUBRIC,
    Rubric,
    RubricSpec,
    dimensions_rubric,
    load_evolution,
    load_rubric,
)
from ludus.rewards.scores import Parts


class JudgeVerdict(CodedVerdict):
    """Answer of a judge."""

    reason: str = ""
    scores: dict[str, OutOfTen]


@dataclass(kw_only=True, eq=False)
class Judge(AskingReward):
    """Scores an episode by a rubric: each criterion from 0 to 10, summed by weight, from 0 to 1 in all.

    The four dimensions without a rubric are completion 0.4, accuracy 0.3, structure 0.15 and citation 0.15;
    `dimensions` gives others with their weights, `rubric` a file, and `instructions` what else to mind. With
    `target`, the judge sees the task's target. `show` is the whole episode, or its answer alone. Each dimension
    is logged as `<name>_<dimension>`, from 0 to 1, and the version of a rubric as `<name>_version`. With
    `evolve` the rubric changes as the policy does (`evolving.py`); `rubric` is always the one of now.
    """

    dimensions: Mapping[str, float] | None = None
    rubric: RubricSpec = DEFAULT_RUBRIC
    evolve: Mapping[str, Any] | bool = False
    instructions: str = ""
    target: bool = False
    show: Literal["episode", "answer"] = "episode"
    images: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        has_own = self.rubric is not type(self).rubric
        if self.dimensions is not None and has_own:
            raise ConfigError(f"{self.name!r}: give dimensions or a rubric, not both")
        if self.show not in ("episode", "answer"):
            raise ConfigError(f"{self.name!r}: show is 'episode' or 'answer', not {self.show!r}")
        rubric = load_rubric(self.rubric)
        if self.dimensions is not None:
            rubric = dimensions_rubric(self.dimensions, self.name)
        self._shows_version = has_own or bool(self.evolve)
        self.evolution = load_evolution(self.evolve, rubric, self.name)
        self.rubric = rubric if self.evolution is None else self.evolution.rubric

    async def score(
        self,
        trajectory: Trajectory,
        task: Task,
        envs: Mapping[str, Any],
        *,
        strictness: float | None = None,
    ) -> Parts:
        rubric = load_rubric(self.rubric)
        if strictness is not None:
            rubric = rubric.at(strictness)

        def check(verdict: JudgeVerdict) -> None:
            missing = [name for name in rubric.weights if name not in verdict.scores]
            if missing:
                raise ValueError(f"scores has no {', '.join(missing)}")

        verdict = await self.verdict(
            trajectory, JudgeVerdict, lambda shown: self.question(shown, task, rubric), check
        )
        scores = dict.fromkeys(rubric.weights, 0.0) if verdict is None else verdict.scores
        parts = {f"{self.name}_{one}": scores[one] / 10 for one in rubric.weights}
        if self._shows_version:
            parts[f"{self.name}_version"] = float(rubric.version)
        return {self.name: rubric.score(scores), **parts}

    async def end_step(self, groups: Sequence[Group]) -> None:
        """After the episodes of a step, and before the update: the rubric may evolve."""
        if self.evolution is not None:
            await self.evolution.end_step(groups, self)
            self.rubric = self.evolution.rubric

    def state_dict(self) -> dict[str, Any]:
        evolution = {} if self.evolution is None else {"evolution": self.evolution.state_dict()}
        return super().state_dict() | evolution

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self.evolution is not None and "evolution" in state:
            self.evolution.load_state_dict(state["evolution"])
            self.rubric = self.evolution.rubric

    def question(self, trajectory: Trajectory, task: Task, rubric: Rubric) -> JudgeQuestion:
        """The question to the judge about an episode."""
        done = done_in(trajectory, task)
        evidence = {"task": transcript(task.messages, self.most_chars)}
        if self.target:
            evidence["expected-answer"] = shortened(str(task.target), self.most_chars)
        evidence["episode"] = shortened(self.shown(trajectory, done), self.most_chars + 200)
        criteria = [f"{c.id}: {c.text}" if c.text else c.id for c in rubric.criteria]
        system = [
            "You judge the work of an AI agent. You are given its task and what it did, between marks "
            f"such as <task-CODE> and <episode-CODE>. {UNTRUSTED}",
            f"Score each of these from 0 (not at all) to 10 (perfectly):\n{listed(criteria)}",
            rubric.level_text,
            "Length is no merit, and politeness is none: score what was achieved.",
            self.instructions,
        ]
        scores = ", ".join(f'"{c.id}": <0 to 10>' for c in rubric.criteria)
        form = f'"reason": "<one or two sentences>", "scores": {{{scores}}}'
        return question(system, evidence, form, media=images(done) if self.images else ())

    def shown(self, trajectory: Trajectory, done: Sequence[Message]) -> str:
        """The text that is judged; `done` is the conversation after the task."""
        if self.show == "answer":
            return trajectory.answer or "(no answer)"
        return f"{transcript(done, self.most_chars)}\n\n[the episode ended: {trajectory.stop.value}]"


@dataclass(kw_only=True, eq=False)
class CodeQuality(Judge):
    """How code is written: readability, architecture and robustness, unless others are given.

    Whether it works is for tests to say.
    """

    rubric: RubricSpec = CODE_QUALITY_RUBRIC
    name: str = "code_quality"
