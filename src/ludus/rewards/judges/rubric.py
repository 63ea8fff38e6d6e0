"""Rubrics: what a judge looks at, as versioned data.

A rubric is a TOML or JSON file::

    name = "report"
    version = 1
    strictness = "loose"

    [[criteria]]
    id = "sources"
    text = "Claims are backed by sources that were really opened."
    weight = 0.5

`strictness` is loose, middle or strict: how the same criteria are applied. `levels` may reword the three.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import Field, model_validator

from ludus.core.config import Config, read_toml
from ludus.core.failures import ConfigError
from ludus.core.user_files import read_user_json

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
        """The next version."""
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
