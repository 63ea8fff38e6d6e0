"""What rewards declare (optional attributes, options), and what they return, as checked scores.

A function may return:

- a number: the score;
- a dictionary of named parts. "reward" (or "total", or the reward's own name) is the score, and all other parts
  are logged only: `{"reward": f1, "f1": f1, "em": em}`. Without such a key, the score is the sum of the parts;
- None, or None for a part: unscored, which is not zero.

Anything else (NaN, an infinity, text, a list) is a bug in the reward. So is a weighted score or a total beyond
`MOST_REWARD`; parts that are only logged may be any finite number.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from numbers import Real
from typing import Any, Protocol, get_type_hints, runtime_checkable

from ludus.core.config_errors import type_mismatch
from ludus.core.failures import ConfigError
from ludus.core.trajectory import Group

Parts = dict[str, float]
"""Scores by name; the reward's own name holds the one that counts."""

_log = logging.getLogger(__name__)

REWARD, TOTAL = "reward", "total"
"""The keys of a returned dictionary whose value is the score; the others are logged."""
_SIMILAR = frozenset({REWARD, TOTAL, "score"})
"""verl's key is "score". Misspelled beside other parts, such a key must not become one addend of a sum."""
MOST_REWARD = 1e6
"""Rewards lie between minus this and this: float32, which advantages are computed in, tells 0.1 more apart."""
TOOLS = "tools"
"""The part that holds the rewards of single tool calls."""
EXECUTION = "execution"
"""Of `Trajectory.seconds`: what the answer's own code or query took while it was scored."""
RESERVED_NAMES = frozenset({TOTAL, TOOLS})


class ScoreError(ValueError):
    """A reward returned something that is not a score."""


def number(value: Any, what: str) -> float:
    """`value` as a finite float. Scalars of numpy and torch are numbers too; text never is."""
    if not isinstance(value, Real) and hasattr(value, "item"):
        try:
            value = value.item()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ScoreError(f"{what} is not a single number: {error}") from error
    if not isinstance(value, Real):
        raise ScoreError(f"{what} must be a number, not {type(value).__name__} ({value!r:.60})")
    try:
        result = float(value)
    except OverflowError as error:
        raise ScoreError(f"{what} is too large for a float") from error
    if not math.isfinite(result):
        raise ScoreError(f"{what} is {result}; a score must be finite")
    return result


def trainable(value: float, what: str) -> float:
    """`value`, if it is a reward that can be trained on."""
    if not abs(value) <= MOST_REWARD:
        raise ScoreError(
            f"{what} is {value:g}, and rewards lie between {-MOST_REWARD:,.0f} and {MOST_REWARD:,.0f}: divide "
            "it, or give it a smaller weight"
        )
    return value


def parse_parts(value: Any, name: str) -> Parts:
    """Check the return value of the reward `name`; its score stands under its own name."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        return {name: number(value, f"the score of {name!r}")}
    parts: Parts = {}
    for key, part in value.items():
        if not isinstance(key, str) or not key:
            raise ScoreError(f"{name!r} returned a part called {key!r}; names are non-empty strings")
        if key == TOOLS:
            raise ScoreError(f"{name!r} returned a part called {TOOLS!r}, which tools' own rewards have")
        if part is not None:
            parts[key] = number(part, f"the part {key!r} of {name!r}")
    score_keys = [key for key in dict.fromkeys((REWARD, TOTAL, name)) if key in value]
    if len(score_keys) > 1:
        raise ScoreError(
            f"{name!r} returned both {score_keys[0]!r} and {score_keys[1]!r}; which one is the score?"
        )
    if score_keys:
        score = parts.pop(score_keys[0], None)
        return parts if score is None else {name: score, **parts}
    if not parts:
        return parts
    if len(parts) > 1:
        similar = [key for key in parts if key.strip().lower() in _SIMILAR]
        if similar:
            raise ScoreError(
                f"{name!r} returned {similar[0]!r} beside other parts: call it {REWARD!r} if that is the "
                "score, or something else if it is one of several that are added up"
            )
        _warn_of_sum(name, ", ".join(parts))
    return {name: number(sum(parts.values()), f"the sum of the parts of {name!r}"), **parts}


_warned: set[str] = set()


def _warn_of_sum(name: str, keys: str) -> None:
    """Once for each reward."""
    if name in _warned:
        return
    _warned.add(name)
    _log.warning(
        "the reward %r returned the parts %s and no %r: its score is their sum. Return %r to score by one "
        "number and log the others",
        *(name, keys, REWARD, REWARD),
    )


def parse_scores(values: Any, name: str, count: int, of: str = "actions") -> list[float | None]:
    """One score or None for each of `count` actions or attempts, in order."""
    if hasattr(values, "tolist"):
        values = values.tolist()  # an array of numpy or torch
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence):
        raise ScoreError(
            f"{name!r} must return a list, one score for each of the {of}, not {values!r:.60}"
        )
    if len(values) != count:
        raise ScoreError(f"{name!r} returned {len(values)} scores for {count} {of}")
    return [
        None if value is None else number(value, f"score {i} of {name!r}")
        for i, value in enumerate(values)
    ]


def parse_group_scores(values: Any, name: str, group: Group) -> list[float]:
    scores = [
        s for s in parse_scores(values, name, len(group.trajectories), "attempts") if s is not None
    ]
    if len(scores) != len(group.trajectories):
        raise ScoreError(f"{name!r} left an attempt unscored; a group reward scores all it is shown")
    return scores


def merge(into: MutableMapping[str, float], parts: Mapping[str, float], source: str) -> None:
    """Add `parts`; two different numbers under one name are refused, because one would be lost."""
    for key, value in parts.items():
        if into.setdefault(key, value) != value:
            raise ScoreError(f"{source!r} reports a part {key!r} that another reward reports as well")


def checked_name(name: str) -> str:
    """`name`, if a reward may be called that."""
    if not isinstance(name, str) or not name or name == "<lambda>":
        raise ConfigError("a reward needs a name: use a named function, or reward(..., name='...')")
    if name in RESERVED_NAMES:
        raise ConfigError(f"a reward cannot be called {name!r}: that part of the score has a meaning")
    return name


def checked_weight(weight: float, name: str) -> float:
    """`weight`, if a score can be multiplied by it. 0 means: logged, but not counted."""
    try:
        return number(weight, f"the weight of {name!r}")
    except ScoreError as error:
        raise ConfigError(str(error)) from error


DEFAULT_TIMEOUT = 60.0


@dataclass(frozen=True, slots=True)
class RewardTraits:
    """Optional attributes of a reward, with what holds where it has none."""

    weight: float = 1.0
    """Factor of its score."""
    timeout: float | None = DEFAULT_TIMEOUT
    """Seconds for one call of its scoring method."""
    uses_envs: bool = True
    """Whether it touches the episode's environments, which only one reward may do at a time."""
    runs_last: bool = False
    """Whether it waits for the rewards beside it."""
    children: Sequence[Any] = ()
    """The rewards that it is made of."""
    env: type | None = None
    """The class of the environment that it looks at."""
    takes_rewards: frozenset[str] = frozenset()
    """Of a class: which of its options are rewards themselves; recipes may nest these."""

    @classmethod
    def of(cls, reward: Any) -> RewardTraits:
        names = [one.name for one in fields(cls) if hasattr(reward, one.name)]
        return cls(**{name: getattr(reward, name) for name in names})


def option_types(kind: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of the parameters of a function or class; nothing where they are no types."""
    hints: dict[str, Any] = {}
    with suppress(Exception):  # annotations can be anything, and reading them runs it
        has_init = isinstance(kind, type) and not is_dataclass(kind)
        found = get_type_hints(kind.__init__ if has_init else kind)
        for name, parameter in inspect.signature(kind).parameters.items():
            with suppress(KeyError, TypeError):
                hash(found[name])
                hints[name] = found[name] | None if parameter.default is None else found[name]
    return hints


def check_options(name: str, options: Mapping[str, Any], types: Mapping[str, Any]) -> None:
    """Refuse what would be taken for something else: the text "no" is true, and true is the number 1."""
    for key, value in options.items():
        if key in types and (wanted := type_mismatch(types[key], value)):
            raise ConfigError(f"{name!r}: {key} {wanted} (given: {value!r:.80})")


@runtime_checkable
class StatefulReward(Protocol):
    """A reward whose memory is part of a checkpoint."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@runtime_checkable
class EvolvingReward(Protocol):
    """A reward that changes with the policy."""

    async def end_step(self, groups: Sequence[Group]) -> None:
        """After the episodes of a training step, and before its update."""


@dataclass(kw_only=True, eq=False)
class OptionsReward:
    """A reward whose options are the fields of a dataclass, as those of the library are."""

    name: str
    weight: float = 1.0
    uses_envs = False

    def __post_init__(self) -> None:
        self.name = checked_name(self.name)
        self.weight = checked_weight(self.weight, self.name)
        check_options(self.name, vars(self), option_types(type(self)))
