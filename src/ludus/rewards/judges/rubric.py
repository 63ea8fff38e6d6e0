"""Rubrics: what a judge looks at, as versioned data (docs/judges.md), and how they evolve with the policy.

Every `every` steps, before the update, strictness follows the mean score, criteria that do not tell good
episodes from bad are retired, and the judge's model proposes new ones, which are checked. Each change is a
version, and part of a checkpoint. After RLER's evolving rubrics (DR Tulu).
"""

from __future__ import annotations

import logging
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import Field, model_validator

from ludus.core.config import Config, Place, read_toml
from ludus.core.failures import ConfigError
from ludus.core.trajectory import Group, Trajectory
from ludus.core.user_files import read_user_json
from ludus.llm import ChatError
from ludus.rewards.judges.asking import (
    UNTRUSTED,
    Asking,
    CodedVerdict,
    JudgeQuestion,
    listed,
    numbered,
    question,
    transcript,
)

Strictness = Literal["loose", "middle", "strict"]
STRICTNESS_LEVELS: tuple[Strictness, ...] = get_args(Strictness)

_LEVELS: dict[Strictness, str] = {
    "loose": "Be lenient: reward the right direction and partial results, even where details are wrong.",
    "middle": "Be fair: the substance must be right; small mistakes cost a little, and claims should be "
    "verifiable in part.",
    "strict": "Be strict: full marks only for what is exact, complete, fully verifiable and without waste.",
}


class Criterion(Config):
    """One thing that a judge scores from 0 to 10."""

    id: str = Field(pattern=r"^[a-z][a-z0-9_]{0,39}$")
    """Its name in verdicts and metrics."""
    text: str = Field(default="", max_length=2_000)
    """Definition of the criterion."""
    weight: float = Field(default=1.0, gt=0)
    """Its share of the score; weights are normalised."""


class Rubric(Config):
    """Criteria and how strictly they are applied; a change makes another version."""

    name: str = "rubric"
    version: int = Field(default=1, ge=1)
    strictness: Strictness = "middle"
    criteria: tuple[Criterion, ...] = Field(min_length=1)
    levels: dict[Strictness, str] = Field(default_factory=dict)
    """What the levels of strictness mean, where the usual words do not fit."""
    retired: tuple[Criterion, ...] = ()
    """Criteria of earlier versions: they are not proposed again."""

    @model_validator(mode="after")
    def _differ(self) -> Self:
        ids = [criterion.id for criterion in self.criteria]
        if len(set(ids)) < len(ids):
            raise ValueError("two criteria have the same id")
        return self

    @property
    def weights(self) -> dict[str, float]:
        """By id; they sum to 1."""
        total = sum(criterion.weight for criterion in self.criteria)
        return {criterion.id: criterion.weight / total for criterion in self.criteria}

    @property
    def level_text(self) -> str:
        return self.levels.get(self.strictness, _LEVELS[self.strictness])

    def score(self, scores: Mapping[str, float]) -> float:
        """Scores from 0 to 10 as one number from 0 to 1."""
        return sum(weight * scores[name] / 10 for name, weight in self.weights.items())

    def changed(self, **changes: Any) -> Rubric:
        return Rubric.model_validate(dict(self) | {"version": self.version + 1} | changes)

    def at(self, strictness: float) -> Rubric:
        """The rubric at the level of a number from 0 to 1, as a curriculum moves it."""
        place = min(int(max(strictness, 0.0) * len(STRICTNESS_LEVELS)), len(STRICTNESS_LEVELS) - 1)
        return self.model_copy(update={"strictness": STRICTNESS_LEVELS[place]})


DEFAULT_RUBRIC = Rubric(
    name="answer",
    criteria=(
        Criterion(id="completion", text="The task was done, all of it.", weight=0.4),
        Criterion(id="accuracy", text="What is said and done is correct.", weight=0.3),
        Criterion(id="structure", text="The answer is clear and well organised.", weight=0.15),
        Criterion(
            id="citation", text="Claims rest on what was found, and say where it was found.", weight=0.15
        ),
    ),
)


CODE_QUALITY_RUBRIC = Rubric(
    name="code_quality",
    criteria=(
        Criterion(
            id="readability",
            text="Names say what things are, functions are short and do one thing, and comments say why.",
            weight=0.4,
        ),
        Criterion(
            id="architecture",
            text="Parts have one job each and clear interfaces; nothing is copied, dead or needlessly general.",
            weight=0.3,
        ),
        Criterion(
            id="robustness",
            text="Edge cases and wrong input are handled, errors are not swallowed, and nothing is hard-coded "
            "to pass known tests.",
            weight=0.3,
        ),
    ),
)

RubricSpec = str | Path | Mapping[str, Any] | Rubric
"""A rubric's file, its table, or itself."""


def load_rubric(spec: RubricSpec) -> Rubric:
    """A rubric by its file, table, or as it is."""
    if isinstance(spec, Rubric):
        return spec
    if isinstance(spec, Mapping):
        return Rubric.parse(spec, "the rubric")
    path = Path(spec)
    if path.suffix == ".toml":
        return Rubric.parse(read_toml(path), str(path))
    if path.suffix != ".json":
        raise ConfigError(f"a rubric is a .toml or .json file, or a table, not {str(spec)!r:.80}")
    raw = read_user_json(path)
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds no table of a rubric")
    return Rubric.parse(raw, str(path))


def dimensions_rubric(dimensions: Mapping[str, float], name: str) -> Rubric:
    """A rubric of named dimensions with weights; those of the usual four have their usual meaning."""
    known = {criterion.id: criterion.text for criterion in DEFAULT_RUBRIC.criteria}
    criteria = [
        {"id": one, "weight": weight, "text": known.get(one, "")} for one, weight in dimensions.items()
    ]
    return Rubric.parse({"criteria": criteria, "name": name}, "dimensions")


log = logging.getLogger(__name__)

_SAME_WORDS = 0.7
_EXAMPLE_CHARS = 6_000
_MOST_WINDOW = 4_096


class EvolutionConfig(Config):
    """How a rubric evolves."""

    every: int = Field(default=10, ge=1)
    """Steps from one change to the next."""
    stricter_above: float = Field(default=0.7, ge=0, le=1)
    """Mean score from which on the rubric becomes stricter."""
    looser_below: float = Field(default=0.3, ge=0, le=1)
    """Mean score below which it becomes looser."""
    min_spread: float = Field(default=0.05, ge=0, le=1)
    """The least difference between good and bad episodes by which a criterion stays; 0 retires none."""
    propose: int = Field(default=1, ge=0, le=5)
    """Most new criteria in a version; 0 asks for none."""
    examples: int = Field(default=2, ge=1, le=8)
    """Good and bad episodes that the model is shown, each."""
    least_criteria: int = Field(default=2, ge=1)
    """So many are never retired."""
    most_criteria: int = Field(default=8, ge=1)
    """So many are never exceeded."""
    library: Place | None = None
    """A folder in which every version is kept, as NAME-v0001.json."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.looser_below >= self.stricter_above:
            raise ValueError("looser_below must be below stricter_above")
        return self


class ProposedCriteria(CodedVerdict):
    criteria: list[Criterion]


def next_strictness(level: Strictness, performance: float, config: EvolutionConfig) -> Strictness:
    """The level that fits the mean score, at most one away."""
    place = STRICTNESS_LEVELS.index(level)
    step = (performance >= config.stricter_above) - (performance < config.looser_below)
    return STRICTNESS_LEVELS[min(max(place + step, 0), len(STRICTNESS_LEVELS) - 1)]


def spreads(window: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """How much higher each criterion is for better episodes; empty where all are equally good."""
    rewards = [entry["reward"] for entry in window]
    middle = statistics.fmean(rewards) if rewards else 0.0
    better = [entry["scores"] for entry in window if entry["reward"] > middle]
    worse = [entry["scores"] for entry in window if entry["reward"] <= middle]
    if not better or not worse:
        return {}
    names = {name for scores in better for name in scores} & {n for scores in worse for n in scores}
    return {
        name: statistics.fmean(s[name] for s in better if name in s)
        - statistics.fmean(s[name] for s in worse if name in s)
        for name in sorted(names)
    }


class RubricEvolution:
    """What a rubric has become, and what it will be judged by. `judge` is the name of its reward."""

    def __init__(self, rubric: Rubric, config: EvolutionConfig, judge: str) -> None:
        self.rubric, self.config, self._judge = rubric, config, judge
        self.steps = 0
        self.window: list[dict[str, Any]] = []
        """Scores of the episodes since the last change."""
        self.history: list[dict[str, Any]] = []
        """Changes of each version."""

    async def end_step(self, groups: Sequence[Group], asking: Asking) -> None:
        """Note a step's episodes, and change the rubric where it is time to."""
        played = [t for group in groups for t in group.trainable if self._judge in t.rewards]
        self.window += [self._entry(trajectory) for trajectory in played]
        self.window = self.window[-_MOST_WINDOW:]
        self.steps += 1
        if self.steps % self.config.every == 0 and self.window:
            await self._evolve(played, asking)
            self.window = []

    def _entry(self, trajectory: Trajectory) -> dict[str, Any]:
        found = trajectory.rewards
        names = [(c.id, f"{self._judge}_{c.id}") for c in self.rubric.criteria]
        scores = {one: found[part] for one, part in names if part in found}
        return {"reward": trajectory.reward, "score": found[self._judge], "scores": scores}

    async def _evolve(self, played: Sequence[Trajectory], asking: Asking) -> None:
        rubric, config = self.rubric, self.config
        performance = statistics.fmean(entry["score"] for entry in self.window)
        strictness = next_strictness(rubric.strictness, performance, config)
        spread = spreads(self.window)
        idle = [c for c in rubric.criteria if abs(spread.get(c.id, 1.0)) < config.min_spread]
        idle.sort(key=lambda criterion: abs(spread[criterion.id]))
        retired = idle[: max(0, len(rubric.criteria) - config.least_criteria)]
        kept = [c for c in rubric.criteria if c not in retired]
        added = await self._proposed(played, kept, asking)
        if strictness == rubric.strictness and not retired and not added:
            return
        self.rubric = rubric.changed(
            strictness=strictness,
            criteria=[*kept, *added],
            retired=[*rubric.retired, *retired],
        )
        self.history.append(
            {
                "version": self.rubric.version,
                "step": self.steps,
                "performance": performance,
                "strictness": strictness,
                "added": [c.id for c in added],
                "retired": [c.id for c in retired],
            }
        )
        log.info("the rubric of %r changed: %s", self._judge, self.history[-1])
        self.keep()

    async def _proposed(
        self, played: Sequence[Trajectory], kept: Sequence[Criterion], asking: Asking
    ) -> list[Criterion]:
        """New criteria, checked; none where the model has none to give."""
        room = min(self.config.propose, self.config.most_criteria - len(kept))
        ranked = sorted(played, key=lambda trajectory: trajectory.reward or 0.0)
        if room < 1 or not ranked or ranked[0].reward == ranked[-1].reward:
            return []
        count = min(self.config.examples, len(ranked) // 2)
        asked = _proposal(ranked[-count:], ranked[:count], kept, room)
        try:
            found = await asking.ask(asked, ProposedCriteria)
        except ChatError as error:
            log.warning("no new criteria for %r: %s", self._judge, error)
            return []
        weight = statistics.fmean(c.weight for c in kept)
        known = [*self.rubric.criteria, *self.rubric.retired]
        new: list[Criterion] = []
        for criterion in found.criteria:
            others = [*known, *new]
            is_new = criterion.text and criterion.id not in {other.id for other in others}
            if is_new and not any(_alike(criterion.text, other.text) for other in others):
                new.append(criterion.model_copy(update={"weight": weight}))
        return new[:room]

    def keep(self) -> None:
        """Write the version into the library, if there is one."""
        if self.config.library is None:
            return
        folder = Path(self.config.library)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{self.rubric.name}-v{self.rubric.version:04}.json"
        file.write_text(self.rubric.model_dump_json(indent=2) + "\n", encoding="utf-8")

    def state_dict(self) -> dict[str, Any]:
        return {
            "rubric": self.rubric.model_dump(mode="json"),
            "steps": self.steps,
            "window": list(self.window),
            "history": list(self.history),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rubric = Rubric.parse(state["rubric"], "the saved rubric")
        self.steps = int(state["steps"])
        self.window, self.history = list(state["window"]), list(state["history"])


def _alike(one: str, other: str) -> bool:
    """Whether two texts have mostly the same words."""
    words, others = (set(re.findall(r"\w+", text.lower())) for text in (one, other))
    return len(words & others) >= _SAME_WORDS * max(1, min(len(words), len(others)))


def _proposal(
    good: Sequence[Trajectory], bad: Sequence[Trajectory], kept: Sequence[Criterion], room: int
) -> JudgeQuestion:
    texts = {
        kind: [transcript(trajectory.messages, _EXAMPLE_CHARS) for trajectory in some]
        for kind, some in (("good", good), ("bad", bad))
    }
    system = [
        "You improve the rubric by which AI agents are judged. You are given episodes that went well and "
        f"episodes that went badly, between marks such as <good-1-CODE> and <bad-1-CODE>. {UNTRUSTED}",
        "The rubric has these criteria:\n" + listed(f"{c.id}: {c.text}" for c in kept),
        f"Propose at most {room} new criteria that tell the good episodes from the bad ones and that none "
        "of the above covers. They must make sense for other tasks of the kind, name behaviour that can be "
        "seen in an episode, and not reward length or praise. An empty list is fine. An id is lower case "
        "with underscores.",
    ]
    evidence = numbered("good", texts["good"]) | numbered("bad", texts["bad"])
    form = '"criteria": [{"id": "checks_units", "text": "<one sentence>"}]'
    return question(system, evidence, form)


def load_evolution(
    evolve: Mapping[str, Any] | bool, rubric: Rubric, judge: str
) -> RubricEvolution | None:
    """The evolution that `evolve` asks for: a table, true for the usual one, or false for none."""
    if evolve is False:
        return None
    config = EvolutionConfig.parse({} if evolve is True else evolve, "evolve")
    if "strictness" not in rubric.model_fields_set:
        rubric = rubric.model_copy(update={"strictness": "loose"})
    evolution = RubricEvolution(rubric, config, judge)
    evolution.keep()
    return evolution
