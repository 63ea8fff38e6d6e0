"""`Judge`: a language model scores an episode on named dimensions, each from 0 to 10."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import TypeAdapter

from ludus.core.failures import ConfigError
from ludus.core.messages import Message
from ludus.core.task import Task
from ludus.core.trajectory import Group, Trajectory
from ludus.rewards.judges.asking import AskingReward, CodedVerdict, ModelSpec, OutOfTen, coded, listed
from ludus.rewards.judges.evidence import (
    DEFAULT_CHARS,
    UNTRUSTED,
    code_of,
    enclosed,
    images,
    question,
    shortened,
    transcript,
)
from ludus.rewards.judges.evolving import load_evolution
from ludus.rewards.judges.rubric import DEFAULT_RUBRIC, Rubric, dimensions_rubric, load_rubric
from ludus.rewards.scores import Parts


class JudgeVerdict(CodedVerdict):
    """What a judge answers."""

    reason: str = ""
    scores: dict[str, OutOfTen]


class Judge(AskingReward):
    """Scores an episode by a rubric: each criterion from 0 to 10, summed by weight, from 0 to 1 in all.

    The four dimensions without a rubric are completion 0.4, accuracy 0.3, structure 0.15 and citation 0.15;
    `dimensions` gives others with their weights, `rubric` a file, and `instructions` what else to mind. With
    `target`, the judge sees the task's target. `show` is the whole episode, or its answer alone. Each dimension
    is logged as `<name>_<dimension>`, from 0 to 1, and the version of a rubric as `<name>_version`. With
    `evolve` the rubric changes as the policy does (`evolving.py`).
    """

    default_name: ClassVar[str] = "judge"

    def __init__(
        self,
        model: ModelSpec,
        *,
        dimensions: Mapping[str, float] | None = None,
        rubric: str | Path | Mapping[str, Any] | Rubric | None = None,
        evolve: Mapping[str, Any] | bool = False,
        instructions: str = "",
        target: bool = False,
        show: Literal["episode", "answer"] = "episode",
        images: bool = False,
        attempts: int = 3,
        max_tokens: int = 1024,
        temperature: float = 0.0,
        most_chars: int = DEFAULT_CHARS,
        name: str | None = None,
        weight: float = 1.0,
    ) -> None:
        name = name or self.default_name
        super().__init__(
            model,
            attempts=attempts,
            max_tokens=max_tokens,
            temperature=temperature,
            most_chars=most_chars,
            name=name,
            weight=weight,
        )
        if dimensions is not None and rubric is not None:
            raise ConfigError(f"{name!r}: give dimensions or a rubric, not both")
        if show not in ("episode", "answer"):
            raise ConfigError(f"{name!r}: show is 'episode' or 'answer', not {show!r}")
        self._rubric = self.default_rubric()
        if dimensions is not None:
            self._rubric = dimensions_rubric(dimensions, name)
        if rubric is not None:
            self._rubric = load_rubric(rubric)
        self._shows_version = rubric is not None or bool(evolve)
        self.evolution = load_evolution(evolve, self._rubric, self.name)
        self.instructions, self.target, self.show, self.images = instructions, target, show, images

    @property
    def rubric(self) -> Rubric:
        """What it judges by now."""
        return self._rubric if self.evolution is None else self.evolution.rubric

    def default_rubric(self) -> Rubric:
        """What is judged where neither dimensions nor a rubric are given."""
        return DEFAULT_RUBRIC

    async def score(
        self,
        trajectory: Trajectory,
        task: Task,
        envs: Mapping[str, Any],
        *,
        strictness: float | None = None,
    ) -> Parts:
        rubric = self.rubric if strictness is None else self.rubric.at(strictness)

        async def ask(shown: Trajectory) -> JudgeVerdict:
            messages, code = self.question(shown, task, rubric)
            return await self.ask(messages, _verdict_type(rubric, code), [shown])

        verdict = await self.judged(ask, trajectory)
        scores = dict.fromkeys(rubric.weights, 0.0) if verdict is None else verdict.scores
        parts = {f"{self.name}_{one}": scores[one] / 10 for one in rubric.weights}
        if self._shows_version:
            parts[f"{self.name}_version"] = float(rubric.version)
        return {self.name: rubric.score(scores), **parts}

    async def end_step(self, groups: Sequence[Group]) -> None:
        """After the episodes of a step, and before the update: the rubric may evolve."""
        if self.evolution is not None:
            await self.evolution.end_step(groups, self.ask)

    def state_dict(self) -> dict[str, Any]:
        evolution = {} if self.evolution is None else {"evolution": self.evolution.state_dict()}
        return super().state_dict() | evolution

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self.evolution is not None and "evolution" in state:
            self.evolution.load_state_dict(state["evolution"])

    def question(
        self, trajectory: Trajectory, task: Task, rubric: Rubric | None = None
    ) -> tuple[list[Message], str]:
        """What the judge is asked about an episode, and the code that its verdict has to name."""
        rubric = rubric or self.rubric
        asked = transcript(task.messages, self.most_chars)
        done = trajectory.messages[len(task.messages) :] or trajectory.messages
        shown = shortened(self.shown(trajectory, done), self.most_chars + 200)
        target = shortened(str(task.target), self.most_chars)
        code = code_of(asked, shown, target)
        evidence = [enclosed(asked, "task", code)]
        if self.target:
            evidence.append(enclosed(target, "expected-answer", code))
        evidence.append(enclosed(shown, "episode", code))
        media = images(done) if self.images else ()
        scores = ", ".join(f'"{c.id}": <0 to 10>' for c in rubric.criteria)
        form = f'{{"code": "{code}", "reason": "<one or two sentences>", "scores": {{{scores}}}}}'
        return question(self._system(rubric), evidence, form, media), code

    def shown(self, trajectory: Trajectory, done: Sequence[Message]) -> str:
        """The text that is judged; `done` is the conversation after the task."""
        if self.show == "answer":
            return trajectory.answer or "(no answer)"
        return f"{transcript(done, self.most_chars)}\n\n[the episode ended: {trajectory.stop.value}]"

    def _system(self, rubric: Rubric) -> str:
        criteria = [f"{c.id}: {c.text}" if c.text else c.id for c in rubric.criteria]
        return "\n\n".join(
            filter(
                None,
                [
                    "You judge the work of an AI agent. You are given its task and what it did, between marks "
                    f"such as <task-CODE> and <episode-CODE>. {UNTRUSTED}",
                    f"Score each of these from 0 (not at all) to 10 (perfectly):\n{listed(criteria)}",
                    rubric.level_text,
                    "Length is no merit, and politeness is none: score what was achieved.",
                    self.instructions,
                ],
            )
        )


def _verdict_type(rubric: Rubric, code: str) -> TypeAdapter[JudgeVerdict]:
    def check(verdict: JudgeVerdict) -> None:
        missing = [name for name in rubric.weights if name not in verdict.scores]
        if missing:
            raise ValueError(f"scores has no {', '.join(missing)}")

    return coded(JudgeVerdict, code, check)
