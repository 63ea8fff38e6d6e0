"""What an advantage estimator reads, and what it gives back.

Shapes in names: N trajectories, T tokens packed end to end, U turns of all trajectories, A action tokens.

A worked example: one episode of two turns. The first turn was paid 0.25 by a tool; the total is 1::

    token        p    p    a    a    o    o    a    a    a    o
    action_T     0    0    1    1    0    0    1    1    1    0
    turn_T      -1   -1    0    0   -1   -1    1    1    1   -1
    rewards_U              .25                 0
    token reward           0   .25             0    0   .75

What a turn was paid lands on its last token. The rest of the total lands on the last action token, so the
token rewards of an episode always add up to its total. An observation carries neither reward nor credit.

The tokens of a trajectory are read in the order in which they lie in the batch. Where a trajectory has
several rows (a rewritten history, a sub-agent), they are therefore read as one life, row after row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Credit:
    """A batch as estimators see it. Failed episodes are not in it, so no baseline can include them.

    Everything after `action_T` may be left out; an estimator that cannot do without says so (`Need`).
    """

    rewards_N: Tensor
    """The total reward of each trajectory, what its turns were paid included."""
    group_N: Tensor
    """The group each trajectory belongs to: whole numbers from 0."""
    trajectory_T: Tensor
    """The trajectory each token belongs to."""
    action_T: Tensor
    """True where the model said the token."""
    trained_T: Tensor | None = None
    """True where the loss applies. None: the actions, which is right; anything else is for ablations."""
    turn_T: Tensor | None = None
    """The turn an action token belongs to, numbered over the whole batch; -1 where nobody acted."""
    trajectory_U: Tensor | None = None
    """The trajectory of each turn; those of one trajectory are in order, and each has a token at least."""
    rewards_U: Tensor | None = None
    """What each turn was paid, as part of its trajectory's total. None: nothing."""
    anchor_U: Tensor | None = None
    """A number for the state in which each turn was taken, equal for equal states; negative: unknown."""
    truncated_N: Tensor | None = None
    """True where a budget cut the episode, as against an ending of its own. None: nowhere."""
    values_T: Tensor | None = None
    """A critic's value of the state in which each token was chosen, that is, before it was said."""
    set_N: Tensor | None = None
    """The task set of each trajectory: statistics over the batch are taken within it. None: one set."""
    penalty_T: Tensor | None = None
    """A reward for each action token beside the total, such as -beta times a divergence. None: 0."""

    def __post_init__(self) -> None:
        sizes = {"N": len(self.rewards_N), "T": len(self.trajectory_T)}
        if self.trajectory_U is not None:
            sizes["U"] = len(self.trajectory_U)
        for name in self.__slots__:
            value, letter = getattr(self, name), name[-1]
            if value is None:
                continue
            if letter not in sizes:
                raise ValueError(f"{name} counts turns, so trajectory_U must be given with it")
            if value.shape != (sizes[letter],):
                raise ValueError(f"{name} has the shape {tuple(value.shape)}, not ({sizes[letter]},)")

    @property
    def loss_mask(self) -> Tensor:
        """True where the loss applies, and hence where an advantage may differ from 0."""
        return self.action_T if self.trained_T is None else self.trained_T

    @property
    def totals(self) -> Tensor:
        """The total reward of each trajectory and the penalties of its action tokens."""
        if self.penalty_T is None:
            return self.rewards_N
        return self.rewards_N.index_add(0, self.trajectory_T, self.penalty_T * self.action_T)

    @property
    def sets(self) -> Tensor:
        """The task set of each trajectory, all 0 where there is one."""
        return torch.zeros_like(self.group_N) if self.set_N is None else self.set_N

    def spread(self, advantages_N: Tensor) -> Estimate:
        """One number per trajectory, given to each of its tokens that the loss applies to."""
        return Estimate(advantages_N[self.trajectory_T] * self.loss_mask)

    def spread_turns(self, advantages_U: Tensor) -> Estimate:
        """One number per turn, given to each of its tokens that the loss applies to."""
        turn_T = required(self.turn_T, "turn_T")
        padded = torch.cat([advantages_U, advantages_U.new_zeros(1)])  # -1 reads the 0 at the end
        return Estimate(padded[turn_T] * self.loss_mask)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What an estimator found out."""

    advantages_T: Tensor
    """How much better than expected each token was; 0 where the loss does not apply."""
    returns_T: Tensor | None = None
    """What a critic should have said at each token (0 where it is not asked). None: there is no critic."""


Estimator = Callable[[Credit], Estimate]
"""An algorithm's first half. Its options are keyword arguments with defaults: see `load_estimator`."""


class Need(StrEnum):
    """What an estimator needs beyond rewards and groups; a recipe without it is refused before it runs."""

    SIBLINGS = "siblings"
    """At least two attempts at each task: in a group of one it has nothing to compare."""
    TURNS = "turns"
    """turn_T and trajectory_U."""
    ANCHORS = "anchors"
    """anchor_U."""
    CRITIC = "critic"
    """values_T, and something that learns from `Estimate.returns_T`."""


F = TypeVar("F", bound=Callable[..., Estimate])


def needs(*what: Need) -> Callable[[F], F]:
    """Write down what an estimator needs; `needs_of` reads it."""

    def mark(estimator: F) -> F:
        vars(estimator)["needs"] = frozenset(what)
        return estimator

    return mark


def needs_of(estimator: Callable[..., Estimate]) -> frozenset[Need]:
    """What an estimator needs; one that says nothing needs nothing."""
    found: frozenset[Need] = vars(estimator).get("needs", frozenset())
    return found


def required(tensor: Tensor | None, name: str) -> Tensor:
    """The field, or an error that names it."""
    if tensor is None:
        raise ValueError(f"this estimator needs Credit.{name}, which was not given")
    return tensor
