"""Where rewards land: from totals and turns to tokens, and back to turns."""

from __future__ import annotations

import torch
from torch import Tensor

from ludus.algos.credit import Credit, required
from ludus.algos.moments import sum_backwards, sum_within


def token_rewards(credit: Credit) -> Tensor:
    """The reward of each token.

    A turn's pay lands on its last token, and what no turn was paid on the trajectory's last action token.
    Penalties stay where they are.
    """
    count = len(credit.rewards_N)
    rest_N, rewards_T = credit.rewards_N, credit.rewards_N.new_zeros(len(credit.trajectory_T))
    if credit.penalty_T is not None:
        rewards_T = rewards_T + credit.penalty_T * credit.action_T
    if credit.rewards_U is not None:
        turn_T, trajectory_U = _turns(credit)
        last_U = _last(turn_T, len(trajectory_U), credit.action_T)
        rewards_T = rewards_T.index_add(0, last_U, credit.rewards_U)
        rest_N = rest_N - sum_within(credit.rewards_U, trajectory_U, count)
    last_N = _last(credit.trajectory_T, count, credit.action_T)
    spoke_N = last_N >= 0
    return rewards_T.index_add(0, last_N[spoke_N], rest_N[spoke_N])


def turn_returns(credit: Credit, discount: float) -> Tensor:
    """For each turn, the sum of what landed on it and on the later ones, discounted once per turn."""
    turn_T, trajectory_U = _turns(credit)
    said_T = credit.action_T
    rewards_U = sum_within(token_rewards(credit)[said_T], turn_T[said_T], len(trajectory_U))
    return sum_backwards(rewards_U, torch.full_like(rewards_U, discount), trajectory_U)


def speech_span(trajectory_T: Tensor, action_T: Tensor, count: int) -> Tensor:
    """True from the first to the last action token of each trajectory, observations in between included."""
    place_T = torch.arange(len(action_T), device=action_T.device)
    last_N = _last(trajectory_T, count, action_T)
    first_N = len(action_T) - 1 - _last(trajectory_T.flip(0), count, action_T.flip(0))
    return (place_T >= first_N[trajectory_T]) & (place_T <= last_N[trajectory_T])


def _turns(credit: Credit) -> tuple[Tensor, Tensor]:
    return required(credit.turn_T, "turn_T"), required(credit.trajectory_U, "trajectory_U")


def _last(owner_T: Tensor, count: int, chosen_T: Tensor) -> Tensor:
    """The place of each owner's last chosen token; -1 where it has none."""
    place_T = torch.arange(len(owner_T), device=owner_T.device)
    nowhere = torch.full((count,), -1, device=owner_T.device)
    return nowhere.scatter_reduce(0, owner_T[chosen_T], place_T[chosen_T], "amax")
