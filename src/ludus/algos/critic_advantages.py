"""PPO's advantage: generalised estimation with a critic, from action token to action token.

    delta_t = r_t + gamma * V_next - V_t
    A_t     = delta_t + gamma * lambda * A_next
    R_t     = A_t + V_t                            what the critic should have said

"Next" is the next token that the model said. What it heard in between is skipped: the value of a state is
read where the model is about to speak, and credit passes over an observation without decay. After the
last token the value is 0, because the episode is over. An episode that a budget cut is over as well (the
budget is part of the task), unless `bootstrap` says that it would have gone on. Then it is followed up to the
state in which its last token was chosen, whose value stands for all that comes after::

    delta_last = 0, so that A_last = 0 and R_last = V_last

That is the last state that the critic is trained on: it never learns what follows a finished turn. What is
paid at the last token (the outcome) is part of that value, and is not added to it. Added, it would be paid
anew at every cut: V = r + V has no solution. Pardo et al., "Time Limits in Reinforcement Learning", 2018,
arXiv:1712.00378.

A turn's pay lands on the last token of the turn, the rest of the total on the last action token. In the end
the advantages are normalised over the batch; the critic's targets are not.

Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation", 2015,
arXiv:1506.02438; and "Proximal Policy Optimization Algorithms", 2017, arXiv:1707.06347. A lambda of the
critic's own: Yuan et al., "What's Behind PPO's Collapse in Long-CoT?", 2025, arXiv:2503.01491.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ludus.algos.advantage_inputs import (
    AdvantageInputs,
    Advantages,
    Need,
    Share,
    action_span,
    discounted_sums,
    needs,
    required,
    token_rewards,
    whitened,
)
from ludus.algos.losses import Metrics

Unit = Literal["token", "turn"]


@needs(Need.CRITIC)
def gae(
    inputs: AdvantageInputs,
    *,
    discount: Share = 1.0,
    lam: Share = 0.95,
    critic_lam: Share | None = None,
    discount_per: Unit = "token",
    lam_per: Unit = "token",
    bootstrap: bool = False,
    skip_observations: bool = True,
    normalise: bool = True,
) -> Advantages:
    """Advantages and the critic's targets.

    Args:
        inputs: The batch, with `values_T`.
        discount: Gamma, by which the future counts less.
        lam: Lambda: 1 trusts the rewards that came, 0 the critic's next value.
        critic_lam: The lambda of the critic's targets; the same when left out.
        discount_per: Whether gamma counts at every action token, or only between two turns.
        lam_per: The same for lambda.
        bootstrap: Whether an episode that a budget cut is taken to go on, at the worth of its last state; its
            outcome is not paid then. Rewards of turns in episodes that never end want a discount below 1.
        skip_observations: The advantage mask. False lets the recursion run through what was heard, for
            ablations; whether that is trained on is another matter (`AdvantageInputs.trained_T`).
        normalise: Whether advantages are normalised over the batch, task set by task set.
    """
    walk = _walk(inputs, skip_observations)
    values_S = required(inputs.values_T, "values_T")[walk.place_S]
    gamma_S = walk.rate(discount, discount_per, values_S)
    after_S = torch.where(walk.goes_on_S, values_S.roll(-1), 0)
    delta_S = token_rewards(inputs)[walk.place_S] + gamma_S * after_S - values_S
    if bootstrap:
        cut_S = required(inputs.truncated_N, "truncated_N")[walk.owner_S]
        delta_S = delta_S.masked_fill(cut_S & ~walk.goes_on_S, 0)

    def credited(number: float) -> Tensor:
        return discounted_sums(delta_S, gamma_S * walk.rate(number, lam_per, values_S), walk.owner_S)

    advantages_S = credited(lam)
    returns_S = (advantages_S if critic_lam is None else credited(critic_lam)) + values_S
    empty_T = values_S.new_zeros(len(inputs.action_T))
    advantages_T = empty_T.index_copy(0, walk.place_S, advantages_S)
    if inputs.trained_T is not None:
        advantages_T = _handed_back(advantages_T, walk.place_S, inputs)
    advantages_T = advantages_T * inputs.loss_mask
    return Advantages(
        whitened(advantages_T, inputs) if normalise else advantages_T,
        empty_T.index_copy(0, walk.place_S, returns_S),
    )


@dataclass(frozen=True, slots=True)
class _Walk:
    """The S tokens of the recursion, each trajectory's in order and together."""

    place_S: Tensor
    owner_S: Tensor
    goes_on_S: Tensor
    """Whether the same trajectory has another token after this one."""
    same_turn_S: Tensor | None
    """Whether that one is of the same turn; None where turns are not known."""

    def rate(self, number: float, per: Unit, like_S: Tensor) -> Tensor:
        """`number` at each step; per turn, 1 within a turn. The step out of an episode is between turns."""
        rate_S = torch.full_like(like_S, number)
        if per == "token":
            return rate_S
        return rate_S.masked_fill(required(self.same_turn_S, "turn_T"), 1.0)


def _walk(inputs: AdvantageInputs, skip_observations: bool) -> _Walk:
    on_T = inputs.action_T
    if not skip_observations:
        on_T = action_span(inputs.trajectory_T, inputs.action_T, len(inputs.rewards_N))
    place_S = on_T.nonzero().squeeze(1)
    place_S = place_S[inputs.trajectory_T[place_S].argsort(stable=True)]
    owner_S = inputs.trajectory_T[place_S]
    goes_on_S = torch.zeros_like(owner_S, dtype=torch.bool)
    goes_on_S[:-1] = owner_S[:-1] == owner_S[1:]
    same_turn_S = None
    if inputs.turn_T is not None:
        # what is heard belongs to the turn that it answers; a walk starts with an action, so there is one
        turn_S = inputs.turn_T[place_S]
        number_S = torch.arange(len(turn_S), device=turn_S.device)
        turn_S = turn_S[torch.where(turn_S >= 0, number_S, 0).cummax(0).values]
        same_turn_S = goes_on_S & (turn_S == turn_S.roll(-1))
    return _Walk(place_S, owner_S, goes_on_S, same_turn_S)


def _handed_back(advantages_T: Tensor, place_S: Tensor, inputs: AdvantageInputs) -> Tensor:
    """A token outside of the recursion gets what the next one inside has; 0 where none follows."""
    order_T = inputs.trajectory_T.argsort(stable=True)
    inside_T = torch.zeros_like(inputs.action_T).index_fill(0, place_S, True)[order_T]
    number_T = torch.arange(len(order_T), device=order_T.device)
    next_T = torch.where(inside_T, number_T, len(order_T)).flip(0).cummin(0).values.flip(0)
    owner_T = torch.cat([inputs.trajectory_T[order_T], order_T.new_full((1,), -1)])
    sorted_T = torch.cat([advantages_T[order_T], advantages_T.new_zeros(1)])
    found_T = torch.where(owner_T[next_T] == owner_T[:-1], sorted_T[next_T], 0)
    return torch.zeros_like(advantages_T).index_copy(0, order_T, found_T)


def value_loss(
    values_A: Tensor, old_A: Tensor, returns_A: Tensor, *, bound: float | None = 0.5
) -> tuple[Tensor, Metrics]:
    """The critic's loss.

        L_t = max((V - R)^2, (clip(V, V_old - bound, V_old + bound) - R)^2) / 2

    R is `Advantages.returns_T`, V_old what the critic said when the step began. The larger of the two errors
    counts, so that a value that has moved further than the bound in one step gets no gradient for going on.

    As in the code of Schulman et al., "Proximal Policy Optimization Algorithms", 2017, arXiv:1707.06347.
    """
    free_A = (values_A - returns_A) ** 2
    if bound is None:
        return free_A / 2, {"value_clip_fraction": torch.zeros_like(free_A)}
    near_A = torch.maximum(torch.minimum(values_A, old_A + bound), old_A - bound)
    bound_A = (near_A - returns_A) ** 2
    clipped_A = (bound_A > free_A).to(free_A.dtype)
    return torch.maximum(free_A, bound_A) / 2, {"value_clip_fraction": clipped_A}
