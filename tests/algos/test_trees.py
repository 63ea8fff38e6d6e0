"""Credit in trees against references that walk the attempts one by one, in plain Python."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest
import torch

from ludus.algos import AdvantageInputs, load_estimator, tree_nodes

Paths = list[list[str]]
"""The names of each attempt's turns; equal names are one turn."""


def batch(
    paths: Paths, rewards: list[float], groups: list[int], penalty: float = 0.0
) -> AdvantageInputs:
    """Two tokens a turn and a prompt token each; shared turns lie with the first that has them."""
    number: dict[str, int] = {}
    trajectory_T, turn_T, trajectory_U = [], [], []
    for leaf, path in enumerate(paths):
        trajectory_T.append(leaf)
        turn_T.append(-1)
        for name in path:
            if name not in number:
                number[name] = len(number)
                trajectory_U.append(leaf)
                trajectory_T += [leaf, leaf]
                turn_T += [number[name]] * 2
    turn = torch.tensor(turn_T)
    return AdvantageInputs(
        rewards_N=torch.tensor(rewards, dtype=torch.float64),
        group_N=torch.tensor(groups),
        trajectory_T=torch.tensor(trajectory_T),
        action_T=turn >= 0,
        turn_T=turn,
        trajectory_U=torch.tensor(trajectory_U, dtype=torch.long),
        penalty_T=torch.full((len(turn_T),), penalty, dtype=torch.float64) if penalty else None,
        tree=tree_nodes([[number[name] for name in path] for path in paths], len(number)),
    )


def by_turn(inputs: AdvantageInputs, paths: Paths, name: str, **options: object) -> dict[str, float]:
    found = load_estimator(name, options)(inputs).advantages_T
    names = list(dict.fromkeys(turn for path in paths for turn in path))
    assert inputs.turn_T is not None
    assert not found[inputs.turn_T < 0].any()
    result = {}
    for number, turn in enumerate(names):
        values = found[inputs.turn_T == number].tolist()
        assert len(set(values)) == 1  # the tokens of a turn are alike
        result[turn] = values[0]
    return result


def standard(value: float, others: list[float]) -> float:
    if len(others) < 2 or len(set(others)) == 1:
        return 0.0
    return (value - statistics.mean(others)) / (statistics.stdev(others) + 1e-6)


def trees(seed: int) -> tuple[Paths, list[float], list[int]]:
    """Two groups of random trees: each attempt is a chain, or goes on from a prefix of an earlier one."""
    draw = random.Random(seed)
    paths: Paths = []
    groups: list[int] = []
    for group in range(2):
        first = len(paths)
        for leaf in range(draw.randint(2, 6)):
            fresh = [f"{group}.{leaf}.{turn}" for turn in range(draw.randint(1, 4))]
            prefix: list[str] = []
            if leaf and draw.random() < 0.7:
                parent = draw.choice(paths[first:])
                prefix = parent[: draw.randint(0, len(parent) - 1)]
            paths.append(prefix + fresh)
            groups.append(group)
    return paths, [float(draw.randint(0, 2)) for _ in paths], groups


CASES = [trees(seed) for seed in range(12)]


def leaves_of(turn: str, paths: Paths) -> list[int]:
    return [leaf for leaf, path in enumerate(paths) if turn in path]


def of_group(values: list[float], groups: list[int], leaf: int) -> list[float]:
    return [value for value, group in zip(values, groups, strict=True) if group == groups[leaf]]


@pytest.mark.parametrize(("paths", "rewards", "groups"), CASES)
def test_grpo_over_leaves_gives_a_shared_turn_the_mean_of_its_leaves(
    paths: Paths, rewards: list[float], groups: list[int]
) -> None:
    found = by_turn(batch(paths, rewards, groups), paths, "grpo")
    own = [standard(r, of_group(rewards, groups, i)) for i, r in enumerate(rewards)]
    for turn, value in found.items():
        assert value == pytest.approx(statistics.mean(own[i] for i in leaves_of(turn, paths)), abs=1e-9)


@pytest.mark.parametrize(("paths", "rewards", "groups"), CASES)
def test_tree_grpo_adds_the_tree_and_the_group(
    paths: Paths, rewards: list[float], groups: list[int]
) -> None:
    found = by_turn(batch(paths, rewards, groups), paths, "tree_grpo")

    def tree(leaf: int) -> set[int]:
        """All that can be reached through shared turns."""
        members, last = {leaf}, 0
        while len(members) > last:
            last = len(members)
            turns = {turn for one in members for turn in paths[one]}
            members = {i for i, path in enumerate(paths) if i in members or turns & set(path)}
        return members

    own = [
        standard(r, of_group(rewards, groups, i)) + standard(r, [rewards[j] for j in tree(i)])
        for i, r in enumerate(rewards)
    ]
    for turn, value in found.items():
        assert value == pytest.approx(statistics.mean(own[i] for i in leaves_of(turn, paths)), abs=1e-9)


@pytest.mark.parametrize("group_weight", [0.0, 1.0])
@pytest.mark.parametrize(("paths", "rewards", "groups"), CASES)
def test_tree_value_is_the_gain_over_the_node_before(
    paths: Paths, rewards: list[float], groups: list[int], group_weight: float
) -> None:
    inputs = batch(paths, rewards, groups)
    found = by_turn(inputs, paths, "tree_value", group_weight=group_weight)
    for path_number, path in enumerate(paths):
        prompt = statistics.mean(of_group(rewards, groups, path_number))
        for place, turn in enumerate(path):
            below = leaves_of(turn, paths)
            before = [p for p in path[:place] if leaves_of(p, paths) != below]
            value = statistics.mean(rewards[i] for i in below)
            parent = (
                statistics.mean(rewards[i] for i in leaves_of(before[-1], paths)) if before else prompt
            )
            expected = value - parent + group_weight * (value - prompt)
            assert found[turn] == pytest.approx(expected, abs=1e-9)


def share_of(leaf: int, paths: Paths, groups: list[int]) -> float:
    """Walks down an attempt: at each place, among how many ways does the policy's share go on?"""
    beside = [path for path, group in zip(paths, groups, strict=True) if group == groups[leaf]]
    path, share = paths[leaf], 1.0
    for place in range(len(path)):
        here = [one for one in beside if one[:place] == path[:place]]
        share /= len({one[place] if place < len(one) else f"end {id(one)}" for one in here})
    return share


@pytest.mark.parametrize(("paths", "rewards", "groups"), CASES)
def test_tree_value_by_the_policys_shares(paths: Paths, rewards: list[float], groups: list[int]) -> None:
    found = by_turn(batch(paths, rewards, groups), paths, "tree_value", weigh="policy", group_weight=0.5)
    shares = [share_of(leaf, paths, groups) for leaf in range(len(paths))]
    for group in set(groups):
        own = [share for share, of in zip(shares, groups, strict=True) if of == group]
        assert sum(own) == pytest.approx(1)

    def mean(leaves: list[int]) -> float:
        return sum(shares[i] * rewards[i] for i in leaves) / sum(shares[i] for i in leaves)

    for number, path in enumerate(paths):
        prompt = mean([i for i, group in enumerate(groups) if group == groups[number]])
        for place, turn in enumerate(path):
            below = leaves_of(turn, paths)
            before = [p for p in path[:place] if leaves_of(p, paths) != below]
            parent = mean(leaves_of(before[-1], paths)) if before else prompt
            expected = mean(below) - parent + 0.5 * (mean(below) - prompt)
            assert found[turn] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("weigh", ["size", "equal"])
@pytest.mark.parametrize(("paths", "rewards", "groups"), CASES)
def test_treepo_averages_over_the_sub_groups_on_the_way(
    paths: Paths, rewards: list[float], groups: list[int], weigh: str
) -> None:
    found = by_turn(batch(paths, rewards, groups), paths, "treepo", weigh=weigh)
    own = []
    for leaf, path in enumerate(paths):
        everyone = [i for i, group in enumerate(groups) if group == groups[leaf]]
        shared = {tuple(leaves_of(turn, paths)) for turn in path}
        subgroups = [everyone, *(list(one) for one in shared if len(one) > 1)]
        weights = [len(one) if weigh == "size" else 1 for one in subgroups]
        parts = [rewards[leaf] - statistics.mean(rewards[i] for i in one) for one in subgroups]
        own.append(sum(w * p for w, p in zip(weights, parts, strict=True)) / sum(weights))
    plain = {turn: statistics.mean(own[i] for i in leaves_of(turn, paths)) for turn in found}
    tokens = [value for value in plain.values() for _ in range(2)]
    mean, deviation = statistics.mean(tokens), statistics.stdev(tokens)
    for turn, value in found.items():
        expected = (plain[turn] - mean) / (deviation + 1e-8) if deviation > 1e-6 else 0.0
        assert value == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", ["tree_grpo", "treepo", "tree_value"])
def test_without_branches_trees_are_flat_groups(name: str) -> None:
    paths = [[f"{leaf}.{turn}" for turn in range(3)] for leaf in range(4)]
    inputs = batch(paths, [0.0, 1.0, 1.0, 0.5], [0] * 4)
    assert by_turn(inputs, paths, name) == by_turn(replace(inputs, tree=None), paths, name)
    flat = by_turn(inputs, paths, "dr_grpo" if name == "tree_value" else "grpo")
    if name != "treepo":
        assert by_turn(inputs, paths, name) == pytest.approx(flat)


def test_penalties_of_shared_turns_count_for_every_leaf() -> None:
    paths = [["a", "b"], ["a", "c", "d"]]
    inputs = batch(paths, [1.0, 1.0], [0, 0], penalty=-0.25)
    assert inputs.totals.tolist() == [1 - 4 * 0.25, 1 - 6 * 0.25]
