"""Packing: every action token is trained exactly once, in its own context, whatever the micro-batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ludus.core import MediaSpan, Segment, SegmentKind, StopReason, Task, TokenSequence, Trajectory
from ludus.training import Batch, items_of_step, micro_batches
from ludus.training.data.batch import advantage_inputs
from ludus.training.data.micro_batches import take_rows

tokens = st.lists(st.integers(0, 99), min_size=1, max_size=6)


@st.composite
def sequences(draw: st.DrawFn, parent: tuple[int, int] | None = None) -> TokenSequence:
    segments = [Segment(SegmentKind.PROMPT, draw(tokens))]
    for _ in range(draw(st.integers(0, 3))):
        said = draw(tokens)
        segments.append(Segment(SegmentKind.ACTION, said, logprobs=[-float(t) for t in said]))
        segments.append(Segment(SegmentKind.OBSERVATION, draw(tokens)))
    return TokenSequence(segments, parent)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    first = draw(sequences())
    rows = [first]
    if draw(st.booleans()):
        rows.append(draw(sequences(parent=(0, draw(st.integers(0, len(first.segments) - 1))))))
    return Trajectory(Task.of("x", id="t"), sequences=rows, reward=1.0)


@given(st.lists(trajectories(), min_size=1, max_size=6), st.integers(1, 60))
def test_every_action_token_is_trained_once(played: list[Trajectory], budget: int) -> None:
    batch = Batch.of(played)
    marks_T = torch.arange(len(batch.tokens_T), dtype=torch.float32)
    trained: list[tuple[int, float]] = []
    pack_rows: list[list[int]] = []
    for packed in micro_batches(replace(batch, advantages_T=marks_T, weights_T=marks_T), budget):
        assert len(packed.lengths) == 1 or sum(packed.lengths) <= budget
        torch.testing.assert_close(packed.old_logprobs_A, -packed.actions.float())
        torch.testing.assert_close(packed.rollout_logprobs_A, -packed.actions.float())
        torch.testing.assert_close(packed.advantages_A, packed.weights_A)
        trained += zip(packed.actions.tolist(), packed.advantages_A.tolist(), strict=True)
        pack_rows += [piece.tolist() for piece in packed.tokens_T.split(packed.lengths)]
        starts = {sum(packed.lengths[:i]) for i in range(len(packed.lengths))}
        assert not starts & set(packed.trained_index_A.tolist()), "an action needs a token before it"
    assert sorted(pack_rows) == sorted(row.tolist() for row in batch.split(batch.tokens_T))
    said = sorted(t for p in played for s in p.sequences for a in s.actions for t in a.tokens)
    assert sorted(token for token, _ in trained) == said
    assert len({mark for _, mark in trained}) == len(trained), "a token was packed twice"


def test_a_branch_reads_its_ancestors_and_trains_its_own() -> None:
    trunk = TokenSequence(
        [
            Segment(SegmentKind.PROMPT, [1, 2]),
            Segment(SegmentKind.ACTION, [3], logprobs=[-0.3]),
            Segment(SegmentKind.OBSERVATION, [4]),
            Segment(SegmentKind.ACTION, [5], logprobs=[-0.5]),
        ]
    )
    branch = TokenSequence([Segment(SegmentKind.ACTION, [6, 7], logprobs=[-0.6, -0.7])], parent=(0, 2))
    batch = Batch.of([Trajectory(Task.of("x", id="t"), sequences=[trunk, branch])])
    assert batch.split(batch.tokens_T)[1].tolist() == [1, 2, 3, 4, 6, 7]
    assert batch.split(batch.action_T)[1].tolist() == [False, False, False, False, True, True]


@given(st.lists(trajectories(), min_size=1, max_size=4), st.data())
def test_credit_says_which_turn_said_what(played: list[Trajectory], data: st.DataObject) -> None:
    """Read back turn by turn, the batch holds every action, its pay and its trajectory, in order."""
    for trajectory in played:
        for action in trajectory.actions:
            action.reward = data.draw(st.sampled_from([None, 0.0, 0.5]))
    batch = Batch.of(played)
    inputs = advantage_inputs(batch, played, list(range(len(played))))
    assert inputs.turn_T is not None
    assert inputs.trajectory_U is not None
    assert inputs.rewards_U is not None
    assert torch.equal(inputs.turn_T >= 0, inputs.action_T)
    found = [batch.tokens_T[inputs.turn_T == turn].tolist() for turn in range(len(inputs.trajectory_U))]
    expected = [(n, action) for n, t in enumerate(played) for action in t.actions]
    assert found == [action.tokens for _, action in expected]
    assert inputs.trajectory_U.tolist() == [number for number, _ in expected]
    assert inputs.rewards_U.tolist() == [action.reward or 0.0 for _, action in expected]


def episode(*parts: tuple[str, list[int]], stop: StopReason = StopReason.ANSWERED) -> Trajectory:
    kinds = {"p": SegmentKind.PROMPT, "a": SegmentKind.ACTION, "o": SegmentKind.OBSERVATION}
    segments = [
        Segment(kinds[kind], tokens, logprobs=[0.0] * len(tokens) if kind == "a" else None)
        for kind, tokens in parts
    ]
    return Trajectory(Task.of("x"), sequences=[TokenSequence(segments)], stop=stop, reward=1.0)


def test_the_state_of_a_turn_is_what_was_just_heard() -> None:
    """Not how one came there; in another group, or straight after another action, it is another state."""
    one = episode(("p", [1, 2]), ("a", [3]), ("o", [4]), ("a", [5]), ("o", [9]))
    other = episode(
        ("p", [1, 2]), ("a", [6]), ("o", [7]), ("a", [8]), ("o", [4]), ("a", [5]), ("a", [5])
    )
    apart = episode(("p", [1, 2]), ("a", [3]), stop=StopReason.MAX_TOKENS)
    inputs = advantage_inputs(Batch.of([one, other, apart]), [one, other, apart], [0, 0, 1], [0, 0, 7])
    assert inputs.anchor_U is not None
    first, at_four, again, at_seven, also_four, nothing, elsewhere = inputs.anchor_U.tolist()
    assert first == again
    assert at_four == also_four
    assert nothing == -1
    assert len({first, at_four, at_seven, nothing, elsewhere}) == 5
    assert inputs.truncated_N is not None
    assert inputs.truncated_N.tolist() == [False, False, True]
    assert inputs.sets.tolist() == [0, 0, 7]


def test_images_make_states_differ() -> None:
    """Their tokens are placeholders, the same for all."""
    shown = [episode(("p", [1, 1]), ("a", [3])) for _ in range(3)]
    for trajectory, sha in zip(shown, ("x", "y", "x"), strict=True):
        trajectory.sequences[0].segments[0].media = (MediaSpan(sha, 0, 2),)
    anchors = advantage_inputs(Batch.of(shown), shown, [0, 0, 0]).anchor_U
    assert anchors is not None
    assert anchors.tolist() == [0, 1, 0]


def test_training_on_observations_leaves_prompts_and_ancestors_out() -> None:
    trunk = episode(("p", [1, 2]), ("a", [3]), ("o", [4, 5]), ("a", [6]), ("o", [7])).sequences[0]
    branch = TokenSequence(
        [Segment(SegmentKind.ACTION, [8], logprobs=[0.0]), Segment(SegmentKind.OBSERVATION, [9])],
        parent=(0, 2),
    )
    whole = Trajectory(Task.of("x"), sequences=[trunk, branch], reward=0.0)
    inputs = advantage_inputs(Batch.of([whole]), [whole], [0], train_observations=True)
    assert inputs.trained_T is not None
    assert inputs.trained_T.int().tolist() == [0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1]


@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 5))
def test_steps_walk_through_epochs(count: int, size: int, seed: int) -> None:
    """However steps and epochs fall, each epoch holds every item once, in an order of its own."""
    items = list(range(count))
    walked = [item for step in range(count * 2) for item in items_of_step(items, step, size, seed)]
    for epoch in range(len(walked) // count):
        assert sorted(walked[epoch * count : (epoch + 1) * count]) == items


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool]
)
def test_places_are_looked_up_in_whatever_an_estimator_returns(dtype: torch.dtype) -> None:
    values_T = torch.tensor([0, 1, 1, 0], dtype=dtype)
    if dtype.is_floating_point:
        values_T.requires_grad_()
    found = take_rows(values_T, torch.tensor([2, 0]))
    assert found.tolist() == [1, 0]
    assert not found.requires_grad
    assert found.dtype not in (torch.bfloat16, torch.float16)
