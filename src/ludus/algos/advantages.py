"""Advantage estimators: pure functions from a packed batch to one advantage per token.

Each has its formula and its paper in its docstring. `gae` needs a critic, the others do not.
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
    NotNegative,
    Share,
    action_span,
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
from ludus.algos.losses import Metrics


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
    """PPO's advantage: generalised estimation with a critic, from action token to action token.

        delta_t = r_t + gamma * V_next - V_t
        A_t     = delta_t + gamma * lambda * A_next
        R_t     = A_t + V_t                            what the critic should have said

    "Next" is the next token that the model said. What it heard in between is skipped: the value of a state is
    read where the model is about to speak, and credit passes over an observation without decay. After the
    last token the value is 0, because the episode is over. An episode that a budget cut is over as well (the
    budget is part of the task), unless `bootstrap` says that it would have gone on. Then it is followed up to
    the state in which its last token was chosen, whose value stands for all that comes after::

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
