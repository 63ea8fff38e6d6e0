"""Declarations of a reward: its optional attributes, and the options of those that are dataclasses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

from ludus.core.trajectory import Group
from ludus.rewards.scores import checked_name, checked_weight

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
    takes_rewards: frozenset[str] = frozenset()
    """Of a class: which of its options are rewards themselves; recipes may nest these."""

    @classmethod
    def of(cls, reward: Any) -> RewardTraits:
        names = [one.name for one in fields(cls) if hasattr(reward, one.name)]
        return cls(**{name: getattr(reward, name) for name in names})


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
