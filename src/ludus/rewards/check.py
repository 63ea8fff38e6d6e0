"""Checking rewards before training: right answers win, wrong ones do not, and they agree with people.

Each task is scored with its gold answer, with the answer of a neighbour that differs, with nonsense and with an
empty answer. Labels of people are a JSON-lines file: `task` or `messages`, `answer`, `label` (a number, or true
and false), and if wanted `target` and `metadata`; answers that cannot be scored are counted and left out.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from ludus.core.failures import ConfigError, InfraError
from ludus.core.messages import Message
from ludus.core.task import Task, numbered
from ludus.core.trajectory import (
    Reward,
    Segment,
    SegmentKind,
    StopReason,
    TokenSequence,
    Trajectory,
    is_success,
)
from ludus.core.user_files import json_lines, read_user_text
from ludus.rewards.conduct_rewards import average_ranks
from ludus.rewards.scorer import RewardLike, Scorer, TurnReward

NONSENSE = "I do not know, perhaps zzyzx."
_AT_ONCE = 32
_SHOWN = 20

Answer = str | Trajectory


class RewardProblem(StrEnum):
    NO_GOLD = "no_gold"
    GOLD_FAILS = "gold_fails"
    WRONG_PASSES = "wrong_passes"
    UNSCORED = "unscored"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class RewardFinding:
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


_LABELS_AT_ONCE = 16
_SHOWN_PROBLEMS = 3
_FAIR_KAPPA, _NOTABLE_BIAS, _NOTABLE_SHARE = 0.4, 0.3, 0.05
_POLITE = re.compile(
    r"\b(please|thanks?|sorry|apolog\w*|happy to|glad to|kindly|welcome|hope this)\b", re.I
)
_KEYS = {"task", "messages", "answer", "label", "target", "metadata", "text"}


@dataclass(frozen=True, slots=True)
class LabelledAnswer:
    """An answer that a person judged."""

    task: Task
    answer: str
    label: float
    text: str | None = None
    """The whole action, where it is more than the answer."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How a reward's scores fit the labels. A number is None where it is not defined: all labels are equal."""

    labels: int
    unscored: int
    accuracy: float
    """Share on the same side: of the threshold for scores, of the middle of their range for labels."""
    kappa: float | None
    """Cohen's: agreement beyond chance; 0 is chance, 1 perfect."""
    pearson: float | None
    spearman: float | None
    length_bias: float | None
    """Correlation of length with what the score has beyond the label (partial correlation): 0 is none."""
    politeness_bias: float | None
    """Partial correlation with the number of polite words (please, thank you, sorry, happy to help)."""
    label_length: float | None
    """Correlation of length with the labels themselves, for comparison."""
    tokens: float
    """Of the judge's model, for each label."""
    money: float
    problems: tuple[str, ...] = ()
    """Why answers could not be scored, each reason once."""

    def __str__(self) -> str:
        shown = [
            f"{self.labels} labels, {self.unscored} not scored",
            f"accuracy {self.accuracy:.3f}, Cohen's kappa {_shown(self.kappa)}",
            f"correlation {_shown(self.pearson)} (Pearson), {_shown(self.spearman)} (Spearman)",
            f"length bias {_shown(self.length_bias)} (the labels' own correlation with length is "
            f"{_shown(self.label_length)}), politeness bias {_shown(self.politeness_bias)}",
        ]
        if self.tokens:
            shown.append(f"{self.tokens:.0f} tokens and {self.money:.2g} of money for each label")
        return "\n".join(shown)

    def warnings(self) -> list[str]:
        """Problems to fix before training on it."""
        found = []
        if self.kappa is not None and self.kappa < _FAIR_KAPPA:
            found.append(
                f"kappa {self.kappa:.2f} is little more than chance: sharpen the rubric, or the model"
            )
        if self.length_bias is not None and self.length_bias > _NOTABLE_BIAS:
            found.append(f"longer answers score higher than people think ({self.length_bias:+.2f})")
        if self.politeness_bias is not None and self.politeness_bias > _NOTABLE_BIAS:
            found.append(f"polite answers score higher than people think ({self.politeness_bias:+.2f})")
        if self.unscored > _NOTABLE_SHARE * (self.labels + self.unscored):
            found.append(f"{self.unscored} answers could not be scored")
        found += [f"not scored: {problem:.400}" for problem in self.problems[:_SHOWN_PROBLEMS]]
        return found


def _shown(value: float | None) -> str:
    return "not defined" if value is None else f"{value:+.3f}"


def read_labels(path: str | Path) -> list[LabelledAnswer]:
    """The labels of a file; what is wrong is named by its line."""
    found: list[LabelledAnswer] = []
    for where, raw in json_lines(read_user_text(path, beside_recipe=False), str(path)):
        try:
            found.append(_label(raw, where.rpartition(" ")[2]))
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{where}: {error}") from None
    if not found:
        raise ConfigError(f"{path} has no labels")
    return found


def _label(raw: Any, name: str) -> LabelledAnswer:
    if not isinstance(raw, Mapping):
        raise ValueError("a label is a JSON object")
    unknown = sorted(raw.keys() - _KEYS)
    if unknown:
        raise ValueError(f"there is no key {unknown[0]!r}; there are: {', '.join(sorted(_KEYS))}")
    answer, label = raw.get("answer"), raw.get("label")
    if not isinstance(answer, str):
        raise ValueError("'answer' must be a text")
    if not isinstance(label, bool | int | float) or not math.isfinite(label):
        raise ValueError("'label' must be a number, true or false")
    asked = raw.get("messages", raw.get("task"))
    if asked is None:
        raise ValueError("a label needs 'task' (the question) or 'messages'")
    task = Task.of(asked, raw.get("target"), id=name, metadata=raw.get("metadata"))
    return LabelledAnswer(task, answer, float(label), raw.get("text"))


async def measure_agreement(
    reward: RewardLike | Reward,
    labels: Sequence[LabelledAnswer],
    *,
    threshold: float | None = None,
    on_scored: Callable[[int], None] = lambda count: None,
) -> Agreement:
    """Score every labelled answer and compare. `threshold` divides scores; the middle of theirs if None.

    `on_scored` hears how many are done: a judge may take minutes.
    """
    scorer = Scorer([reward])
    slots = asyncio.Semaphore(_LABELS_AT_ONCE)
    problems: dict[str, None] = {}
    done = 0

    async def score(label: LabelledAnswer) -> tuple[float | None, dict[str, float]]:
        nonlocal done
        episode = synthetic_episode(label.task, label.answer, label.text)
        async with slots:
            try:
                await scorer.score(episode)
            except InfraError as error:
                problems.setdefault(str(error))
        done += 1
        on_scored(done)
        return episode.reward, episode.counts

    scored = await asyncio.gather(*(score(label) for label in labels))
    pairs = [(s, one) for (s, _), one in zip(scored, labels, strict=True) if s is not None]
    if not pairs:
        why = f": {next(iter(problems)):.400}" if problems else ""
        raise ConfigError(f"the reward scored none of the labelled answers{why}")
    counts = [counted for _, counted in scored]
    spent = {n: sum(c.get(f"judge/{n}", 0.0) for c in counts) / len(counts) for n in ("tokens", "money")}
    return compare(
        [s for s, _ in pairs],
        [one.label for _, one in pairs],
        [one.text or one.answer for _, one in pairs],
        threshold=threshold,
        unscored=len(labels) - len(pairs),
        problems=tuple(problems),
        **spent,
    )


def compare(
    scores: Sequence[float],
    labels: Sequence[float],
    texts: Sequence[str],
    *,
    threshold: float | None = None,
    unscored: int = 0,
    tokens: float = 0.0,
    money: float = 0.0,
    problems: tuple[str, ...] = (),
) -> Agreement:
    """The numbers; pure."""
    if threshold is None:
        threshold = (min(scores) + max(scores)) / 2
    middle = (min(labels) + max(labels)) / 2
    ours = [score >= threshold if threshold > min(scores) else score > threshold for score in scores]
    theirs = [label > middle if middle == min(labels) else label >= middle for label in labels]
    accuracy = sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)
    pearson = _pearson(scores, labels)
    lengths = [float(len(text)) for text in texts]
    manners = [float(len(_POLITE.findall(text))) for text in texts]
    label_length = _pearson(labels, lengths)
    return Agreement(
        labels=len(scores),
        unscored=unscored,
        accuracy=accuracy,
        kappa=_kappa(ours, theirs, accuracy),
        pearson=pearson,
        spearman=_pearson(average_ranks(scores), average_ranks(labels)),
        length_bias=_partial(_pearson(scores, lengths), pearson, label_length),
        politeness_bias=_partial(_pearson(scores, manners), pearson, _pearson(labels, manners)),
        label_length=label_length,
        tokens=tokens,
        money=money,
        problems=problems,
    )


def _kappa(ours: Sequence[bool], theirs: Sequence[bool], accuracy: float) -> float | None:
    a, b = sum(ours) / len(ours), sum(theirs) / len(theirs)
    chance = a * b + (1 - a) * (1 - b)
    return None if chance == 1 else (accuracy - chance) / (1 - chance)


def _pearson(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    x0, y0 = sum(xs) / len(xs), sum(ys) / len(ys)
    xx, yy = sum((x - x0) ** 2 for x in xs), sum((y - y0) ** 2 for y in ys)
    if xx == 0 or yy == 0:
        return None
    return sum((x - x0) * (y - y0) for x, y in zip(xs, ys, strict=True)) / math.sqrt(xx * yy)


def _partial(xz: float | None, xy: float | None, yz: float | None) -> float | None:
    """The correlation of x and z with y held constant; without y's, that of x and z."""
    if xz is None:
        return None
    if xy is None or yz is None:
        return xz
    rest = (1 - xy**2) * (1 - yz**2)
    return 0.0 if rest <= 1e-12 else (xz - xy * yz) / math.sqrt(rest)
