"""Does a reward agree with people? Accuracy, kappa, correlation, and whether it pays for length.

Labels are a JSON-lines file: `task` (the question) or `messages`, `answer`, `label` (a number, or true and
false), and if wanted `target` and `metadata`. The reward scores each answer; what it cannot is counted and
left out.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludus.core.failures import ConfigError, InfraError
from ludus.core.task import Task
from ludus.core.trajectory import Reward
from ludus.core.user_files import json_lines, read_user_text
from ludus.rewards.check import synthetic_episode
from ludus.rewards.group_rewards import average_ranks
from ludus.rewards.scorer import RewardLike, Scorer

_AT_ONCE = 16
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
    slots = asyncio.Semaphore(_AT_ONCE)
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
