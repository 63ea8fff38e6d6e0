"""Checking a task set against its rewards before training: right answers win, wrong ones do not.

Each task is scored with its gold answer, with the answer of a neighbour that differs, with nonsense and
with an empty answer. A reward for nonsense, a target that cannot be parsed, a gold answer that its own
normaliser rejects: each is found here in seconds, and never in training.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ludus.core.failures import InfraError
from ludus.core.messages import Message
from ludus.core.task import Task, numbered
from ludus.core.trajectory import Segment, SegmentKind, StopReason, TokenSequence, Trajectory, is_success
from ludus.rewards.scorer import RewardLike, Scorer, TurnReward

NONSENSE = "I do not know, perhaps zzyzx."
_AT_ONCE = 32
_SHOWN = 20

Answer = str | Trajectory


class RewardProblem(StrEnum):
    """Kinds of problems of a task and its rewards."""

    NO_GOLD = "no_gold"
    GOLD_FAILS = "gold_fails"
    WRONG_PASSES = "wrong_passes"
    UNSCORED = "unscored"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class RewardFinding:
    """One thing that is wrong, with the answer that showed it."""

    task: str
    problem: RewardProblem
    answer: str
    detail: str

    def __str__(self) -> str:
        return f"task {self.task}: {self.problem} with the answer {self.answer!r:.60}: {self.detail}"


@dataclass(frozen=True, slots=True)
class RewardReport:
    """The result of a check; `ok` when there are no findings."""

    tasks: int
    episodes: int
    findings: tuple[RewardFinding, ...]
    ignores_answers: bool = False
    """Whether no task's gold answer is a success, and each of its answers scores the same: the rewards read
    something else, such as calls, or are broken."""

    @property
    def ok(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        head = f"{self.tasks} tasks, {self.episodes} answers scored, {len(self.findings)} problem(s)"
        more = len(self.findings) - _SHOWN
        lines = [head, *(f"  {finding}" for finding in self.findings[:_SHOWN])]
        return "\n".join(lines + ([f"  and {more} more"] if more > 0 else []))


def gold_answer(task: Task) -> str:
    """The target as an answer; the first one where there are several."""
    target = task.target
    if isinstance(target, list | tuple) and target:
        target = target[0]
    if not isinstance(target, str | int | float) or isinstance(target, bool):
        raise ValueError(f"no answer can be made of the target {target!r:.60}; give gold=...")
    return str(target)


def synthetic_episode(task: Task, answer: str, text: str | None = None) -> Trajectory:
    """An episode of one turn that ends in `answer`; `text` is the whole action, where that is more."""
    segments = [
        Segment(SegmentKind.PROMPT, [0]),
        Segment(SegmentKind.ACTION, [0], logprobs=[0.0]),
    ]
    messages = [*task.messages, Message("assistant", answer if text is None else text)]
    return Trajectory(task, [TokenSequence(segments)], messages, answer, StopReason.ANSWERED)


async def check_rewards(
    tasks: Sequence[Task],
    rewards: Sequence[RewardLike | TurnReward],
    *,
    gold: Callable[[Task], Answer] = gold_answer,
    wrong: Callable[[Task], Sequence[Answer]] | None = None,
    threshold: float = 1.0,
    envs: Callable[[Task], Mapping[str, Any]] | None = None,
) -> RewardReport:
    """Score every task with right and with wrong answers, and report what should not be.

    `gold` and `wrong` make answers, or whole trajectories where a bare answer is not enough (a format
    to keep, a tool to use). `envs` makes the environments for rewards that read them. Full marks are a
    success as `is_success` defines it.
    """
    if not tasks:
        raise ValueError("there are no tasks to check")
    checker = _Checker(Scorer(rewards), threshold, envs)
    tasks = numbered(tasks)
    golds: dict[str, Answer] = {}
    for task in tasks:
        try:
            golds[task.id] = gold(task)
        except (ValueError, TypeError, KeyError) as error:
            checker.note(task, RewardProblem.NO_GOLD, "", str(error))
    jobs = [checker.check(task, golds[task.id], should_win=True) for task in tasks if task.id in golds]
    for position, task in enumerate(tasks):
        neighbour = golds.get(tasks[position - 1].id)
        others = _wrong_answers(golds.get(task.id), neighbour) if wrong is None else wrong(task)
        jobs += [checker.check(task, other, should_win=False) for other in others]
    await asyncio.gather(*jobs)
    order = {task.id: i for i, task in enumerate(tasks)}
    findings = sorted(checker.findings, key=lambda finding: order[finding.task])
    fails = {finding.task for finding in findings if finding.problem is RewardProblem.GOLD_FAILS}
    ignores = len(fails) == len(tasks) == len(findings) and all(
        len(parts) == 1 for parts in checker.scores.values()
    )
    return RewardReport(len(tasks), len(jobs), tuple(findings), ignores)


def _wrong_answers(gold: Answer | None, neighbour: Answer | None) -> list[Answer]:
    answers: list[Answer] = [NONSENSE, ""]
    if isinstance(neighbour, str) and isinstance(gold, str):
        differs = neighbour.strip().lower() != gold.strip().lower()
        answers += [neighbour] if differs else []
    return answers


class _Checker:
    def __init__(
        self, scorer: Scorer, threshold: float, envs: Callable[[Task], Mapping[str, Any]] | None
    ) -> None:
        self.scorer, self.threshold, self.envs = scorer, threshold, envs
        self.findings: list[RewardFinding] = []
        self.scores: dict[str, set[tuple[tuple[str, float], ...]]] = {}
        """The different scores of a task's answers, by their parts."""
        self._slots = asyncio.Semaphore(_AT_ONCE)

    def note(self, task: Task, problem: RewardProblem, answer: str, detail: str) -> None:
        self.findings.append(RewardFinding(task.id, problem, answer, detail))

    async def check(self, task: Task, answer: Answer, *, should_win: bool) -> None:
        trajectory = answer if isinstance(answer, Trajectory) else synthetic_episode(task, answer)
        given = trajectory.answer or ""
        try:
            async with self._slots:
                await self.scorer.score(trajectory, self.envs(task) if self.envs else {})
        except InfraError as error:
            self.note(task, RewardProblem.BROKEN, given, str(error))
            return
        parts = tuple(sorted(trajectory.rewards.items()))
        self.scores.setdefault(task.id, set()).add(parts)
        scored = f"the total is {trajectory.reward}, the parts are {trajectory.rewards}"
        if not trajectory.is_trainable:
            self.note(task, RewardProblem.UNSCORED, given, scored)
        elif is_success(trajectory, self.threshold) != should_win:
            self.note(
                task,
                RewardProblem.GOLD_FAILS if should_win else RewardProblem.WRONG_PASSES,
                given,
                scored,
            )
