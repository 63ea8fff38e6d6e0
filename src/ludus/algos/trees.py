"""Credit in trees: attempts at a task that share their first turns.

A branch goes on from a turn of another attempt, so that the two have a prefix in common. Shared turns are in
the batch once, with the attempt that sampled them. A node is a run of turns that the same attempts, its
leaves, have in common. Three attempts, of which B branched off A after two turns, and C off B after four::

    A  a0 a1 a2 a3              nodes   {A,B,C}: a0 a1    {A}: a2 a3
    B        b2 b3 b4                                     {B,C}: b2 b3    {B}: b4
    C              c4                                                     {C}: c4

The value of a node is the mean reward of its leaves. The prompt is the node above all of them: its leaves are
the whole group. An advantage per attempt becomes one per turn as the mean over the leaves of its node
(`AdvantageInputs.broadcast`), so that `grpo` over the leaves of a tree is ARPO's credit. Masked leaves are in
every baseline and in no credit: a turn that others have too is trained with the mean over those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ludus.algos.advantage_inputs import (
    AdvantageInputs,
    Advantages,
    Need,
    NotNegative,
    centered,
    needs,
    required,
    size_within,
    standardized,
    sum_within,
    whitened,
)


@dataclass(frozen=True, slots=True)
class TreeNodes:
    """Which trajectories share which turns: K nodes, and P pairs of a node and a leaf of it."""

    node_U: Tensor
    """The node of each turn."""
    parent_K: Tensor
    """The node before each one; -1 where that is the prompt."""
    node_P: Tensor
    leaf_P: Tensor
    """The trajectories below each node, itself a trajectory's last node included."""
    tree_N: Tensor
    """The tree of each trajectory: those that share a turn, directly or through others, are in one."""
    masked_N: Tensor | None = None
    """True at trajectories that are not in the loss. None: all are."""

    def node_means(self, values_N: Tensor) -> Tensor:
        """The mean over the leaves of each node."""
        count = len(self.parent_K)
        size_K = torch.bincount(self.node_P, minlength=count).to(values_N.dtype)
        return sum_within(values_N[self.leaf_P], self.node_P, count) / size_K.clamp(min=1)

    def weighted_means(self, values_N: Tensor, weight_N: Tensor) -> Tensor:
        """The mean over the leaves of each node, with these weights."""
        count = len(self.parent_K)
        sums_K = sum_within((values_N * weight_N)[self.leaf_P], self.node_P, count)
        return sums_K / sum_within(weight_N[self.leaf_P], self.node_P, count).clamp(min=1e-12)

    def credits(self, values_N: Tensor, weight_N: Tensor | None = None) -> Tensor:
        """The mean over those leaves of each node that are in the loss; over all where none is."""
        weight_N = torch.ones_like(values_N) if weight_N is None else weight_N
        of_all_K = self.weighted_means(values_N, weight_N)
        if self.masked_N is None:
            return of_all_K
        trained_N = (~self.masked_N).to(values_N.dtype)
        is_trained_K = sum_within(trained_N[self.leaf_P], self.node_P, len(self.parent_K)) > 0
        return torch.where(is_trained_K, self.weighted_means(values_N, weight_N * trained_N), of_all_K)

    def policy_shares(self, group_N: Tensor) -> Tensor:
        """The share of the policy's own attempts that each trajectory stands for: they sum to 1 in each group.

        The prompt's share is divided among the ways that begin there, and that of a node among the nodes that
        follow it. Where branchings were chosen by what lay before them alone, the weighted mean over the leaves
        is an unbiased estimate of what the policy earns; the plain mean counts good prefixes too often.
        """
        parents, groups = self.parent_K.tolist(), group_N.tolist()
        leaves: list[list[int]] = [[] for _ in parents]
        for node, leaf in zip(self.node_P.tolist(), self.leaf_P.tolist(), strict=True):
            leaves[node].append(leaf)
        acted = {leaf for own in leaves for leaf in own}
        ways = Counter(  # from each node, and from the prompt of each group
            parent if parent >= 0 else -1 - groups[leaves[node][0]]
            for node, parent in enumerate(parents)
        )
        ways.update(-1 - groups[leaf] for leaf in range(len(groups)) if leaf not in acted)
        shares = [1.0 / ways[-1 - group] for group in groups]
        for node in sorted(range(len(parents)), key=lambda one: -len(leaves[one])):
            before = parents[node]  # has more leaves, and was visited
            if before >= 0:
                for leaf in leaves[node]:
                    shares[leaf] /= ways[before]
        return torch.tensor(shares, dtype=torch.float64).to(group_N.device)

    def turn_sums(self, values_U: Tensor, count: int) -> Tensor:
        """For each of `count` trajectories, the sum over all of its turns, shared ones included."""
        of_node_K = sum_within(values_U, self.node_U, len(self.parent_K))
        return sum_within(of_node_K[self.node_P], self.leaf_P, count)


def tree_nodes(paths: Sequence[Sequence[int]], turns: int, masked_N: Tensor | None = None) -> TreeNodes:
    """The nodes of these trajectories, each given by its turns in order; there are `turns` in all."""
    leaves: list[list[int]] = [[] for _ in range(turns)]
    for leaf, path in enumerate(paths):
        for turn in path:
            leaves[turn].append(leaf)
    numbers: dict[tuple[int, ...], int] = {}
    node_U = [numbers.setdefault(tuple(own), len(numbers)) for own in leaves]
    parent_K, trees = [-1] * len(numbers), list(range(len(paths)))
    for leaf, path in enumerate(paths):
        before = -1
        for turn in path:
            if node_U[turn] != before:
                parent_K[node_U[turn]], before = before, node_U[turn]
        if path:
            trees[leaf] = leaves[path[0]][0]  # attempts that share anything share the first turn
    pairs = [(k, leaf) for own, k in numbers.items() for leaf in own]

    def whole(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long)

    return TreeNodes(
        node_U=whole(node_U),
        parent_K=whole(parent_K),
        node_P=whole([k for k, _ in pairs]),
        leaf_P=whole([leaf for _, leaf in pairs]),
        tree_N=whole(trees),
        masked_N=masked_N,
    )


def _tree(inputs: AdvantageInputs) -> TreeNodes:
    """The nodes; where nothing is shared, every trajectory is a node and a tree of its own."""
    if inputs.tree is not None:
        return inputs.tree
    trajectory_U = required(inputs.trajectory_U, "trajectory_U")
    own_N = torch.arange(len(inputs.rewards_N), device=trajectory_U.device)
    return TreeNodes(trajectory_U, torch.full_like(own_N, -1), own_N, own_N, own_N)


@needs(Need.SIBLINGS, Need.TURNS)
def tree_grpo(inputs: AdvantageInputs, *, tree_weight: NotNegative = 1.0) -> Advantages:
    """Tree-GRPO: attempts are compared within their tree and over all trees of the task.

        A_i = (r_i - mean(group)) / (std(group) + 1e-6) + tree_weight * (r_i - mean(tree)) / (std(tree) + 1e-6)

    A tree is a root attempt with all of its branches. A tree of one has nothing to compare, and its second part
    is 0. Shared turns get the mean over the leaves below them; the paper trains them once per leaf.

    Ji et al., "Tree Search for LLM Agent Reinforcement Learning", 2025, arXiv:2509.21240.

    Args:
        inputs: The batch, with turns.
        tree_weight: Weight of the part within the tree.
    """
    totals_N = inputs.totals
    within_N = standardized(totals_N, _tree(inputs).tree_N)
    return inputs.broadcast(standardized(totals_N, inputs.group_N) + tree_weight * within_N)


@needs(Need.SIBLINGS, Need.TURNS)
def treepo(inputs: AdvantageInputs, *, weigh: Literal["size", "equal"] = "size") -> Advantages:
    """TreePO: an attempt against every sub-group on its way, from the whole group to its last branching.

        A_i = sum_G w_G (r_i - mean(G)) / sum_G w_G          over the sub-groups G of two or more that hold i
        A_t = (A - mean(A)) / (std(A) + 1e-8)                over all action tokens of the batch

    A sub-group holds the leaves of one node; the whole group always counts. w_G is its size, or 1.

    Li et al., "TreePO: Bridging the Gap of Policy Optimization and Efficacy and Inference Efficiency with
    Heuristic Tree-based Modeling", 2025, arXiv:2508.17445.

    Args:
        inputs: The batch, with turns.
        weigh: How sub-groups count: by their sizes, or all alike.
    """
    totals_N, tree = inputs.totals, _tree(inputs)
    count = len(totals_N)
    size_P = size_within(tree.node_P, totals_N.dtype)
    weight_P = (size_P > 1).to(totals_N.dtype) * (size_P if weigh == "size" else 1)
    size_N = size_within(inputs.group_N, totals_N.dtype)
    weight_N = size_N if weigh == "size" else torch.ones_like(size_N)
    from_mean_P = centered(totals_N[tree.leaf_P], tree.node_P)
    sums_N = weight_N * centered(totals_N, inputs.group_N)
    sums_N = sums_N + sum_within(weight_P * from_mean_P, tree.leaf_P, count)
    found_N = sums_N / (weight_N + sum_within(weight_P, tree.leaf_P, count))
    return Advantages(whitened(inputs.broadcast(found_N).advantages_T, inputs))


@needs(Need.SIBLINGS, Need.TURNS)
def tree_value(
    inputs: AdvantageInputs,
    *,
    group_weight: NotNegative = 0.0,
    normalise: bool = False,
    weigh: Literal["leaves", "policy"] = "leaves",
) -> Advantages:
    """Value of a node minus that of its parent: SPO's and TreeRL's credit.

        V(n) = mean reward of the leaves below n, V(prompt) = mean(group)
        A(n) = V(n) - V(parent of n) + group_weight * (V(n) - V(prompt))

    Masked leaves are in V(parent) and V(prompt), and in V(n) where all of its leaves are masked. All turns of a
    node get its advantage. With `group_weight` 1 this is TreeRL's local and global advantage, but for its
    division by the root of the number of leaves, which makes up for training shared tokens once per leaf: here
    they are trained once. Without branches it is Dr. GRPO's advantage.

    Guo et al., "Segment Policy Optimization", 2025, arXiv:2505.23564; Hou et al., "TreeRL: LLM Reinforcement
    Learning with On-Policy Tree Search", 2025, arXiv:2506.11902.

    Args:
        inputs: The batch, with turns.
        group_weight: Weight of the difference from the whole group.
        normalise: Whether to divide by the standard deviation of the group's rewards.
        weigh: What the leaves count in means: all alike, or as much of the policy's own attempts as each stands
            for. Search (rl.tree.branch = "beam" or "success") has more leaves where it was good, and a mean
            over leaves alike lies above what the policy earns.
    """
    totals_N, tree = inputs.totals, _tree(inputs)
    count = len(tree.parent_K)
    from_mean_N = centered(totals_N, inputs.group_N)  # V(prompt) is 0 from here on
    if normalise:
        from_mean_N = standardized(totals_N, inputs.group_N)
    weight_N: Tensor | None = None
    if weigh == "policy":
        weight_N = tree.policy_shares(inputs.group_N).to(totals_N.dtype)
        prompt_N = sum_within(weight_N * from_mean_N, inputs.group_N)[inputs.group_N]
        from_mean_N = from_mean_N - prompt_N
        value_K = tree.weighted_means(from_mean_N, weight_N)
    else:
        value_K = tree.node_means(from_mean_N)
    before_K = torch.cat([value_K, value_K.new_zeros(1)])[tree.parent_K] if count else value_K
    credit_K = tree.credits(from_mean_N, weight_N)
    found_K = credit_K - before_K + group_weight * credit_K
    return inputs.broadcast_turns(found_K[tree.node_U])
