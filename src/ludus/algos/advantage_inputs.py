"""Inputs and outputs of an advantage estimator.

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, TypeVar

import torch
from pydantic import Field
from torch import Tensor

if TYPE_CHECKING:
    from ludus.algos.trees import TreeNodes

# Ranges of options: a recipe's value outside of its range is refused by name.
Share = Annotated[float, Field(ge=0, le=1)]
"""From 0 to 1."""
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""Above 0."""
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""0 or above."""
Count = Annotated[int, Field(ge=1)]
"""A whole number from 1."""

EPSILON = 1e-6
"""Added to a deviation that divides."""
TINY = 1e-8
"""Added to the deviation of a batch, which is hardly ever small."""
NOISE = 1e-6
"""Differences up to this are rounding, such as the divergence of a policy from itself."""


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
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
    """The turn an action token belongs to, numbered over the whole batch; -1 at other tokens."""
    trajectory_U: Tensor | None = None
    """The trajectory of each turn; those of one trajectory are in order, and each has a token at least."""
    rewards_U: Tensor | None = None
    """Reward of each turn, as part of its trajectory's total. None: no turn has one."""
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
    tree: TreeNodes | None = None
    """Which trajectories share their first turns. None: none does."""

    def __post_init__(self) -> None:
        sizes = {"N": len(self.rewards_N), "T": len(self.trajectory_T)}
        if self.trajectory_U is not None:
            sizes["U"] = len(self.trajectory_U)
        for name in self.__slots__:
            value, letter = getattr(self, name), name[-1]
            if value is None or name == "tree":
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
        if self.tree is not None:  # shared turns count for each trajectory that has them
            said_T, turn_T = self.action_T, required(self.turn_T, "turn_T")
            paid_U = sum_within(self.penalty_T[said_T], turn_T[said_T], len(self.tree.node_U))
            return self.rewards_N + self.tree.turn_sums(paid_U, len(self.rewards_N))
        return self.rewards_N.index_add(0, self.trajectory_T, self.penalty_T * self.action_T)

    @property
    def sets(self) -> Tensor:
        """The task set of each trajectory, all 0 where there is one."""
        return torch.zeros_like(self.group_N) if self.set_N is None else self.set_N

    def broadcast(self, advantages_N: Tensor) -> Advantages:
        """One number per trajectory, given to each of its tokens that the loss applies to.

        A turn that several trajectories share gets the mean of theirs, of those that are in the loss.
        """
        advantages_T = advantages_N[self.trajectory_T]
        if self.tree is not None:
            turn_T = required(self.turn_T, "turn_T")
            mean_U = self.tree.credits(advantages_N)[self.tree.node_U]
            padded = torch.cat([mean_U, mean_U.new_zeros(1)])
            advantages_T = torch.where(turn_T >= 0, padded[turn_T], advantages_T)
        return Advantages(advantages_T * self.loss_mask)

    def broadcast_turns(self, advantages_U: Tensor) -> Advantages:
        """One number per turn, given to each of its tokens that the loss applies to."""
        turn_T = required(self.turn_T, "turn_T")
        padded = torch.cat([advantages_U, advantages_U.new_zeros(1)])  # -1 reads the 0 at the end
        return Advantages(padded[turn_T] * self.loss_mask)


@dataclass(frozen=True, slots=True)
class Advantages:
    """Result of an estimator."""

    advantages_T: Tensor
    """How much better than expected each token was; 0 where the loss does not apply."""
    returns_T: Tensor | None = None
    """Value targets of the critic at each token (0 where it is not asked). None: there is no critic."""


Estimator = Callable[[AdvantageInputs], Advantages]
"""An algorithm's first half. Its options are keyword arguments with defaults: see `load_estimator`."""


class Need(StrEnum):
    """Inputs that an estimator needs beyond rewards and groups; a recipe without them is refused early."""

    SIBLINGS = "siblings"
    """At least two attempts at each task: in a group of one it has nothing to compare."""
    TURNS = "turns"
    """turn_T and trajectory_U."""
    ANCHORS = "anchors"
    """anchor_U."""
    CRITIC = "critic"
    """values_T, and something that learns from `Advantages.returns_T`."""


F = TypeVar("F", bound=Callable[..., Advantages])


def needs(*what: Need) -> Callable[[F], F]:
    """Write down what an estimator needs; `needs_of` reads it."""

    def mark(estimator: F) -> F:
        vars(estimator)["needs"] = frozenset(what)
        return estimator

    return mark


def needs_of(estimator: Callable[..., Advantages]) -> frozenset[Need]:
    """The declared needs of an estimator; none if it declares none."""
    found: frozenset[Need] = vars(estimator).get("needs", frozenset())
    return found


def required(tensor: Tensor | None, name: str) -> Tensor:
    """The field, or an error that names it."""
    if tensor is None:
        raise ValueError(f"this estimator needs AdvantageInputs.{name}, which was not given")
    return tensor


# Group statistics: means and standard deviations within groups, and discounted sums backwards along episodes.
# An owner is whatever a number belongs to: a group, a task set, a trajectory. Owners are whole numbers from 0,
# in any order; the standard deviation of a single number is 0.


def owners(owner_S: Tensor) -> int:
    """How many there are."""
    return int(owner_S.max()) + 1 if owner_S.numel() else 0


def sum_within(values_S: Tensor, owner_S: Tensor, count: int | None = None) -> Tensor:
    """One sum for each owner."""
    size = owners(owner_S) if count is None else count
    return values_S.new_zeros(size).index_add(0, owner_S, values_S)


def size_within(owner_S: Tensor, dtype: torch.dtype) -> Tensor:
    """For each number, how many its owner has."""
    return torch.bincount(owner_S, minlength=owners(owner_S)).to(dtype)[owner_S]


def centered(values_S: Tensor, owner_S: Tensor) -> Tensor:
    """Each number less its owner's mean; exactly 0 where an owner's numbers are all equal.

    Exactly, because rounding in the mean would otherwise leave a trace, which a division by a deviation
    of the same order would blow up into a signal.
    """
    size_S = size_within(owner_S, values_S.dtype)
    mean_S = sum_within(values_S, owner_S)[owner_S] / size_S
    return torch.where(_all_equal(values_S, owner_S), 0, values_S - mean_S)


def standardized(values_S: Tensor, owner_S: Tensor, epsilon: float = EPSILON) -> Tensor:
    """(x - mean) / (deviation + epsilon) within each owner, the deviation being the unbiased one."""
    from_mean_S = centered(values_S, owner_S)
    size_S = size_within(owner_S, values_S.dtype)
    variance_S = sum_within(from_mean_S**2, owner_S)[owner_S] / (size_S - 1).clamp(min=1)
    return from_mean_S / (variance_S.sqrt() + epsilon)


def discounted_sums(values_S: Tensor, decay_S: Tensor, owner_S: Tensor) -> Tensor:
    """y_s = x_s + decay_s * y_(next s of the same owner), and x_s for an owner's last.

    By doubling: after round k each number holds the next 2^k of its owner, so there are log2(longest) rounds
    of whole-tensor operations and no padding.
    """
    order_S = owner_S.argsort(stable=True)
    owner_S, sums_S, factor_S = owner_S[order_S], values_S[order_S], decay_S[order_S]
    step = 1
    while step < len(owner_S):
        together = owner_S[:-step] == owner_S[step:]
        if not bool(together.any()):
            break
        reach = torch.where(together, factor_S[:-step], 0)
        ends = sums_S.new_zeros(step)
        sums_S = sums_S + torch.cat([reach * sums_S[step:], ends])
        factor_S = torch.cat([reach * factor_S[step:], ends])
        step *= 2
    return torch.empty_like(sums_S).index_copy(0, order_S, sums_S)


def _all_equal(values_S: Tensor, owner_S: Tensor) -> Tensor:
    empty = values_S.new_zeros(owners(owner_S))
    most = empty.scatter_reduce(0, owner_S, values_S, "amax", include_self=False)
    least = empty.scatter_reduce(0, owner_S, values_S, "amin", include_self=False)
    return (most == least)[owner_S]


# Reward placement: from totals and turns to tokens, and back to turns.


def token_rewards(inputs: AdvantageInputs) -> Tensor:
    """The reward of each token.

    A turn's pay lands on its last token, and what no turn was paid on the trajectory's last action token.
    Penalties stay where they are.
    """
    count = len(inputs.rewards_N)
    rest_N, rewards_T = inputs.rewards_N, inputs.rewards_N.new_zeros(len(inputs.trajectory_T))
    if inputs.penalty_T is not None:
        rewards_T = rewards_T + inputs.penalty_T * inputs.action_T
    if inputs.rewards_U is not None:
        turn_T, trajectory_U = _turns(inputs)
        last_U = _last(turn_T, len(trajectory_U), inputs.action_T)
        rewards_T = rewards_T.index_add(0, last_U, inputs.rewards_U)
        rest_N = rest_N - sum_within(inputs.rewards_U, trajectory_U, count)
    last_N = _last(inputs.trajectory_T, count, inputs.action_T)
    acted_N = last_N >= 0
    return rewards_T.index_add(0, last_N[acted_N], rest_N[acted_N])


def turn_returns(inputs: AdvantageInputs, discount: float) -> Tensor:
    """For each turn, the sum of what landed on it and on the later ones, discounted once per turn."""
    turn_T, trajectory_U = _turns(inputs)
    said_T = inputs.action_T
    rewards_U = sum_within(token_rewards(inputs)[said_T], turn_T[said_T], len(trajectory_U))
    return discounted_sums(rewards_U, torch.full_like(rewards_U, discount), trajectory_U)


def action_span(trajectory_T: Tensor, action_T: Tensor, count: int) -> Tensor:
    """True from the first to the last action token of each trajectory, observations in between included."""
    place_T = torch.arange(len(action_T), device=action_T.device)
    last_N = _last(trajectory_T, count, action_T)
    first_N = len(action_T) - 1 - _last(trajectory_T.flip(0), count, action_T.flip(0))
    return (place_T >= first_N[trajectory_T]) & (place_T <= last_N[trajectory_T])


def _turns(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    return required(inputs.turn_T, "turn_T"), required(inputs.trajectory_U, "trajectory_U")


def _last(owner_T: Tensor, count: int, chosen_T: Tensor) -> Tensor:
    """The place of each owner's last chosen token; -1 where it has none."""
    place_T = torch.arange(len(owner_T), device=owner_T.device)
    nowhere = torch.full((count,), -1, device=owner_T.device)
    return nowhere.scatter_reduce(0, owner_T[chosen_T], place_T[chosen_T], "amax")


# Whitening: normalisation over all trained tokens of a batch, task set by task set.


def whitened(values_T: Tensor, inputs: AdvantageInputs) -> Tensor:
    """(x - mean) / (deviation + 1e-8) over the tokens that the loss applies to; 0 elsewhere.

    Every token counts once, so long episodes count more. Sets are kept apart, because one with larger or more
    scattered rewards would otherwise decide the scale for all. A set whose values differ by rounding alone has
    no signal, and gets 0: blown up to unit size, its noise would be an update like any other.
    """
    chosen = inputs.loss_mask.nonzero().squeeze(1)
    values_A, set_A = values_T[chosen], inputs.sets[inputs.trajectory_T[chosen]]
    differs_A = (centered(values_A, set_A).abs() > NOISE).to(values_A.dtype)
    has_signal_A = sum_within(differs_A, set_A)[set_A] > 0
    whitened_A = standardized(values_A, set_A, TINY) * has_signal_A
    return torch.zeros_like(values_T).index_copy(0, chosen, whitened_A)


# Batches from plain lists: for tests, examples and experiments without a trainer


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """The token counts of one turn, and its reward, which is part of the episode's total."""

    action: int
    observation: int = 0
    reward: float = 0.0
    anchor: int = -1


@dataclass(frozen=True, slots=True)
class Attempt:
    """One episode: its total reward, its group, and how its tokens lie."""

    reward: float
    turns: Sequence[TurnTokens]
    group: int = 0
    prompt: int = 1
    """Tokens before the first turn."""
    truncated: bool = False
    set: int = 0
    values: Sequence[float] = field(default=())
    """One for each token; left out where there is no critic."""
    penalties: Sequence[float] = field(default=())
    """One for each token; left out where there are none."""

    @property
    def turn_of_token(self) -> list[int]:
        """The turn of each action token, counted within the attempt; -1 for prompt and observation tokens."""
        tokens, number = [-1] * self.prompt, 0
        for turn in self.turns:
            tokens += [number] * turn.action + [-1] * turn.observation
            number += bool(turn.action)
        return tokens

    @property
    def acted(self) -> list[TurnTokens]:
        """The turns that have action tokens; the rewards of the others land on the last token."""
        return [turn for turn in self.turns if turn.action]


def inputs_from(attempts: Sequence[Attempt], dtype: torch.dtype = torch.float64) -> AdvantageInputs:
    """These attempts as a batch, laid end to end in the order given."""
    turns = [(number, turn) for number, attempt in enumerate(attempts) for turn in attempt.acted]
    tokens: list[tuple[int, int]] = []
    first = 0
    for number, attempt in enumerate(attempts):
        tokens += [(number, t if t < 0 else t + first) for t in attempt.turn_of_token]
        first += len(attempt.acted)

    def whole(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long)

    def real(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    turn_T = whole([turn for _, turn in tokens])
    has_values = not attempts or any(attempt.values for attempt in attempts)
    has_penalties = any(attempt.penalties for attempt in attempts)
    return AdvantageInputs(
        rewards_N=real([attempt.reward for attempt in attempts]),
        group_N=whole([attempt.group for attempt in attempts]),
        trajectory_T=whole([number for number, _ in tokens]),
        action_T=turn_T >= 0,
        turn_T=turn_T,
        trajectory_U=whole([number for number, _ in turns]),
        rewards_U=real([turn.reward for _, turn in turns]),
        anchor_U=whole([turn.anchor for _, turn in turns]),
        truncated_N=torch.tensor([attempt.truncated for attempt in attempts], dtype=torch.bool),
        values_T=real([v for attempt in attempts for v in attempt.values]) if has_values else None,
        set_N=whole([attempt.set for attempt in attempts]),
        penalty_T=real([p for attempt in attempts for p in attempt.penalties])
        if has_penalties
        else None,
    )
