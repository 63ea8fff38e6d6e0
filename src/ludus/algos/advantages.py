"""Critic-free advantage estimators: pure functions from a packed batch to one advantage per token.

Each has its formula and its paper in its docstring. PPO's estimator, which needs a critic, is in `gae`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ludus.algos.advantage_inputs import (
    AdvantageInputs,
    Advantages,
    Need,
    NotNegative,
    Share,
    centered,
    discounted_sums,
    needs,
    required,
    size_within,
    standardized,
    token_rewards,
    turn_returns,
    whitened,
)


@needs(Need.SIBLINGS)
def grpo(inputs: AdvantageInputs) -> Advantages:
    """GRPO: an attempt is worth how much better it was than its siblings.

        A_i = (r_i - mean(r_1..r_G)) / (std(r_1..r_G) + 1e-6)

    The standard deviation is the unbiased one (divided by G - 1), as in the paper's code. A group of one, or
    one whose rewards are all equal, carries no signal: its advantages are 0. The algorithm of this name
    averages the loss by token, as DAPO does (and TRL and verl by default); the paper averages within each
    episode first: `aggregation = "sequence"`.

    Shao et al., "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", 2024,
    arXiv:2402.03300.
    """
    return inputs.broadcast(standardized(inputs.totals, inputs.group_N))


@needs(Need.SIBLINGS)
def dr_grpo(inputs: AdvantageInputs) -> Advantages:
    """Dr. GRPO: GRPO without the two divisions that bias it.

        A_i = r_i - mean(r_1..r_G)

    Dividing by the group's deviation gives tasks that are almost always or almost never solved more weight than
    the others; dividing by an episode's length makes long failures cheap. The first division is left out here.
    For the second, take the aggregation "length", which divides by a constant.

    Liu et al., "Understanding R1-Zero-Like Training: A Critical Perspective", 2025, arXiv:2503.20783.
    """
    return inputs.broadcast(centered(inputs.totals, inputs.group_N))


@needs(Need.SIBLINGS)
def rloo(inputs: AdvantageInputs) -> Advantages:
    """RLOO: REINFORCE, the baseline being the mean of the other attempts at the same task.

        A_i = r_i - mean(r_j, j != i) = G / (G - 1) * (r_i - mean(r_1..r_G))

    The whole episode is one action: the loss is -A_i log p(episode i), the sum over its tokens, averaged over
    episodes (the aggregation "sequence_sum"). Divided by the length, long and short episodes would get another
    gradient than the paper's. The importance ratio is clipped token by token; TRL clips the whole sequence's.
    The two differ only after the first update of a step.

    The baseline does not contain the attempt's own reward, so the gradient is unbiased. A group of one has no
    baseline, and its advantage is 0.

    Kool et al., "Buy 4 REINFORCE samples, get a baseline for free!", ICLR workshop 2019; Ahmadian et al., "Back
    to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs", 2024,
    arXiv:2402.14740.
    """
    size_N = size_within(inputs.group_N, inputs.totals.dtype)
    own_share_N = size_N / (size_N - 1).clamp(min=1)
    return inputs.broadcast(centered(inputs.totals, inputs.group_N) * own_share_N)


def reinforce(inputs: AdvantageInputs) -> Advantages:
    """REINFORCE with the batch's mean reward as its baseline.

        A_i = r_i - mean(r_1..r_N)

    The baseline does not depend on the group, so tasks that are easier than the average push up whatever was
    done on them; that is what GRPO's group baseline removes. Task sets have a mean each.

    Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement learning",
    Machine Learning 8, 1992.
    """
    return inputs.broadcast(centered(inputs.totals, inputs.sets))


def reinforce_pp(inputs: AdvantageInputs, *, discount: Share = 1.0) -> Advantages:
    """REINFORCE++: no critic and no groups; token rewards, their discounted sum, and one normalisation.

        r_t = penalty_t + [pay of the turn that ends at t] + [rest of the total, at the last action token]
        G_t = r_t + discount * G_(next action token)
        A_t = (G_t - mean(G)) / (std(G) + 1e-8)        over all action tokens of the batch

    The penalty is -beta times the KL divergence from a reference (`kl_reward`): this method puts it there.
    Observations are skipped: neither do they carry a reward nor do they discount one.

    Hu et al., "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization",
    2025, arXiv:2501.03262.
    """
    index_A = inputs.action_T.nonzero().squeeze(1)
    rewards_A = token_rewards(inputs)[index_A]
    returns_A = discounted_sums(
        rewards_A, torch.full_like(rewards_A, discount), inputs.trajectory_T[index_A]
    )
    returns_T = rewards_A.new_zeros(len(inputs.action_T)).index_copy(0, index_A, returns_A)
    return Advantages(whitened(returns_T, inputs))


@needs(Need.SIBLINGS)
def reinforce_pp_baseline(inputs: AdvantageInputs) -> Advantages:
    """REINFORCE++-baseline: the group's mean as the baseline, the batch's deviation as the scale.

        A_i = r_i - mean(r_1..r_G)                     within the group
        A_t = (A - mean(A)) / (std(A) + 1e-8)          over all action tokens of the batch

    Against GRPO: one scale for the whole batch, so that a group whose rewards hardly differ is not blown up.

    Hu et al., "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization",
    2025, arXiv:2501.03262, section on the variant with a baseline.
    """
    centred_N = centered(inputs.totals, inputs.group_N)
    return Advantages(whitened(inputs.broadcast(centred_N).advantages_T, inputs))


@needs(Need.SIBLINGS, Need.TURNS)
def turn_grpo(inputs: AdvantageInputs, *, discount: Share = 1.0, normalise: bool = True) -> Advantages:
    """Turn-level group-relative credit: each turn against what the siblings went on to earn from that turn on.

        R_(i,u) = r_(i,u) + discount * R_(i,u+1)
        A_(i,u) = (R_(i,u) - mean_j R_(j, min(u, U_j))) / (std_j R_(j, min(u, U_j)) + 1e-6)

    U_j is the last turn of sibling j. Episodes differ in how many turns they have, and that biases the obvious
    baselines. The mean over all turns of the group counts long episodes, mostly the failing ones, many
    times, and it is the same for early and late turns although discounted returns are not. The mean over those
    that reached turn u leaves out those that were done before, mostly the succeeding ones. Here each
    sibling counts exactly once at every turn: at the same turn, or, if it was over by then, at its last. One
    that never acted counts with its total.

    With discount 1 and nothing paid to single turns this is GRPO, to the letter. Identical siblings teach
    nothing. A group of one has advantage 0.

    The idea of turn-level credit in groups: Zeng et al., "Reinforcing Multi-Turn Reasoning in LLM Agents via
    Turn-Level Credit Assignment", 2025, arXiv:2505.11821. The paper does not treat ragged turn counts.

    Args:
        inputs: The batch, with turns.
        discount: By which each later turn counts less.
        normalise: Whether to divide by the standard deviation.
    """
    trajectory_U = required(inputs.trajectory_U, "trajectory_U")
    returns_U = turn_returns(inputs, discount)
    turns_N = torch.bincount(trajectory_U, minlength=len(inputs.rewards_N))
    most = int(turns_N.max()) if turns_N.numel() else 0
    if most == 0:
        return Advantages(inputs.rewards_N.new_zeros(len(inputs.action_T)))
    # rank_U: the turn's number within its trajectory. Sorted by trajectory, it is the place less the first one.
    order_U = trajectory_U.argsort(stable=True)
    first_N = turns_N.cumsum(0) - turns_N
    rank_U = torch.empty_like(order_U)
    rank_U[order_U] = torch.arange(len(order_U), device=order_U.device) - first_N[trajectory_U[order_U]]

    returns_NK = _at_each_turn(inputs, returns_U[order_U], first_N, turns_N, most)
    # an owner for each pair of a group and a turn: siblings are compared turn by turn
    owner_NK = inputs.group_N[:, None] * most + torch.arange(most, device=order_U.device)
    compare = standardized if normalise else centered
    advantages_NK = compare(returns_NK.flatten(), owner_NK.flatten()).view_as(returns_NK)
    return inputs.broadcast_turns(advantages_NK[trajectory_U, rank_U])


def _at_each_turn(
    inputs: AdvantageInputs, sorted_U: Tensor, first_N: Tensor, turns_N: Tensor, most: int
) -> Tensor:
    """Return of each trajectory at turns 0 .. most - 1: after its end the last one; without turns its total."""
    turn_K = torch.arange(most, device=first_N.device)
    place_NK = first_N[:, None] + torch.minimum(turn_K, (turns_N[:, None] - 1).clamp(min=0))
    returns_NK = sorted_U[place_NK.clamp(max=len(sorted_U) - 1)]
    return torch.where(turns_N[:, None] > 0, returns_NK, inputs.totals[:, None])


@needs(Need.SIBLINGS, Need.TURNS, Need.ANCHORS)
def gigpo(
    inputs: AdvantageInputs,
    *,
    discount: Share = 0.95,
    step_weight: NotNegative = 1.0,
    normalise: bool = True,
) -> Advantages:
    """GiGPO: siblings are compared twice, as whole episodes and wherever they stood in the same state.

        A^E_i     = (r_i - mean(r)) / (std(r) + 1e-6)                      over the group
        A^S_(i,u) = (R_(i,u) - mean(R)) / (std(R) + 1e-6)                  over the turns of the group taken in
                                                                           the same state
        A         = A^E + step_weight * A^S,      R_(i,u) = r_(i,u) + discount * R_(i,u+1)

    An episode that comes through a state twice is in the comparison twice. A state that only one turn of the
    group was taken in, or an unknown one (a negative anchor), has nothing to compare: its A^S is 0. Without
    `normalise` the deviations are left out, as in the paper's second form.

    Feng et al., "Group-in-Group Policy Optimization for LLM Agent Training", 2025, arXiv:2505.10978.

    Args:
        inputs: The batch, with turns and anchors.
        discount: By which each later turn counts less in a step's return.
        step_weight: Weight of the step-level part (omega).
        normalise: Whether to divide by the standard deviations.
    """
    compare = standardized if normalise else centered
    trajectory_U = required(inputs.trajectory_U, "trajectory_U")
    anchor_U = required(inputs.anchor_U, "anchor_U")
    known = (anchor_U >= 0).nonzero().squeeze(1)
    # a state's number for each turn with a known anchor: equal for equal (group, anchor)
    states = torch.stack([inputs.group_N[trajectory_U[known]], anchor_U[known]])
    state_k = torch.unique(states, dim=1, return_inverse=True)[1]
    returns_U = turn_returns(inputs, discount)
    step_U = torch.zeros_like(returns_U).index_copy(0, known, compare(returns_U[known], state_k))
    episode_N = compare(inputs.totals, inputs.group_N)
    return inputs.broadcast_turns(episode_N[trajectory_U] + step_weight * step_U)
