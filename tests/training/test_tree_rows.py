"""Branches in training rows and in files: what is shared is stored once and trained once."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from ludus.algos import by_token
from ludus.core import Branch, Group, Message, Segment, SegmentKind, StopReason, Task, Trajectory
from ludus.core.trajectory import TokenSequence
from ludus.observe import read_groups, rollout_metrics, write_groups
from ludus.observe.episodes import select_trajectories
from ludus.training import Batch
from ludus.training.data.batch import advantage_inputs


def tree(seed: int, attempts: int = 6) -> Group:
    """A group of random branches; every token is another number, so that each can be followed."""
    draw, task, next_token = random.Random(seed), Task.of("Go.", id="t"), iter(range(1, 100_000))

    def segment(kind: SegmentKind) -> Segment:
        tokens = [next(next_token) for _ in range(draw.randint(1, 5))]
        logprobs = [-draw.random() for _ in tokens] if kind is SegmentKind.ACTION else None
        return Segment(kind, tokens, logprobs)

    prompt = segment(SegmentKind.PROMPT)
    made: list[Trajectory] = []
    for attempt in range(attempts):
        one = Trajectory(task, attempt=attempt, stop=StopReason.ANSWERED, reward=float(attempt % 3))
        segments = [Segment(SegmentKind.PROMPT, list(prompt.tokens))]
        one.messages = [Message("user", "Go.")]
        if made and draw.random() < 0.8:
            parent = draw.choice(made)
            count = draw.choice(range(3, len(parent.sequences[0].segments) + 1, 2))
            segments = parent.sequences[0].segments[:count]
            one.messages = parent.messages[:count]
            one.branch = Branch(parent.attempt, count)
        for _ in range(draw.randint(1, 3)):
            segments += [segment(SegmentKind.ACTION), segment(SegmentKind.OBSERVATION)]
            one.messages += [Message("assistant", f"{attempt}"), Message("user", "seen")]
        one.sequences = [TokenSequence(segments)]
        made.append(one)
    return Group(task, made)


@pytest.mark.parametrize("seed", range(10))
def test_every_sampled_token_is_trained_exactly_once(seed: int) -> None:
    group = tree(seed)
    batch = Batch.of(group.trajectories)
    said_T = batch.action_T
    trained = list(
        zip(batch.tokens_T[said_T].tolist(), batch.rollout_logprobs_T[said_T].tolist(), strict=True)
    )
    actions = {id(action): action for one in group.trajectories for action in one.actions}
    sampled = [
        pair
        for action in actions.values()
        for pair in zip(
            action.tokens, torch.tensor(action.logprobs or [], dtype=torch.float32).tolist(), strict=True
        )
    ]
    assert sorted(trained) == sorted(sampled)
    inputs = advantage_inputs(batch, group.trajectories, [0] * len(group.trajectories))
    weights = by_token(inputs.trajectory_T, inputs.loss_mask)
    assert weights[inputs.action_T].tolist() == pytest.approx([1 / len(sampled)] * len(sampled))
    numbers = batch.trajectory_T[batch.first_R].tolist()
    for row, number in zip(batch.split(batch.tokens_T), numbers, strict=True):
        assert row.tolist() == group.trajectories[number].tokens  # the whole context in front, exactly


@pytest.mark.parametrize("seed", range(10))
def test_a_lost_parent_leaves_its_turns_to_its_branches(seed: int) -> None:
    group = tree(seed)
    lost = group.trajectories[0]
    lost.reward = None
    batch = Batch.of(group.trainable)
    trained = batch.tokens_T[batch.action_T].tolist()
    assert len(trained) == len(set(trained))
    wanted = {token for one in group.trainable for action in one.actions for token in action.tokens}
    assert set(trained) == wanted
    inputs = advantage_inputs(batch, group.trainable, [0] * len(group.trainable))
    if inputs.tree is not None:
        assert len(inputs.tree.tree_N) == len(group.trainable)


@pytest.mark.parametrize("seed", range(10))
def test_files_hold_shared_segments_once(tmp_path: Path, seed: int) -> None:
    group = tree(seed)
    path = tmp_path / "episodes.parquet"
    write_groups(path, [group, tree(seed + 100)])
    back, _ = read_groups(path)
    assert back.trajectories == group.trajectories
    for one in back.trajectories:
        if one.branch is not None:
            parent = back.trajectories[one.branch.attempt].sequences[0].segments
            own = one.sequences[0].segments
            assert all(own[i] is parent[i] for i in range(one.branch.segments))
    stored = pq.read_table(path).to_pylist()[:6]
    tokens = {id(s): len(s.tokens) for one in group.trajectories for s in one.sequences[0].segments}
    assert sum(len(row["tokens"]) for row in stored) == sum(tokens.values())
    chosen = list(select_trajectories(path, lambda task, attempt, lost: attempt == 5))
    assert chosen[0] == group.trajectories[5]


def test_a_branch_without_its_parent_is_stored_whole(tmp_path: Path) -> None:
    group = next(g for g in map(tree, range(20)) if g.trajectories[1].branch is not None)
    kept = Group(group.task, group.trajectories[1:])
    write_groups(tmp_path / "episodes.parquet", [kept])
    assert read_groups(tmp_path / "episodes.parquet")[0].trajectories == kept.trajectories


def test_flat_files_keep_their_format(tmp_path: Path) -> None:
    flat = Group(Task.of("Go."), [one for one in tree(0).trajectories if one.branch is None])
    write_groups(tmp_path / "flat.parquet", [flat])
    assert pq.read_schema(tmp_path / "flat.parquet").metadata[b"ludus.trajectories"] == b"1"
    write_groups(tmp_path / "tree.parquet", [tree(3)])
    assert pq.read_schema(tmp_path / "tree.parquet").metadata[b"ludus.trajectories"] == b"2"


def test_metrics_count_shared_tokens_once() -> None:
    group = tree(4)
    branches = [one for one in group.trajectories if one.branch is not None]
    metrics = rollout_metrics([group])
    actions = {id(action): len(action.tokens) for one in group.trajectories for action in one.actions}
    assert metrics["tokens/action"] == pytest.approx(sum(actions.values()) / 6)
    everything = sum(len(action.tokens) for one in group.trajectories for action in one.actions)
    assert metrics["tree/tokens_saved"] == everything - sum(actions.values())
    assert metrics["tree/branches"] == len(branches)
