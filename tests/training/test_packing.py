"""Packing: every action token is trained exactly once, in its own context, whatever the micro-batches."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ludus.core.task import Task
from ludus.core.trajectory import Segment, SegmentKind, TokenSequence, Trajectory
from ludus.training.batches import items_of_step
from ludus.training.packing import batches_of, credit_of, pack, rows_of

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
    rows = rows_of(played)
    credit = credit_of(rows, [0.0] * len(played), [0] * len(played))
    marks = torch.arange(len(credit.action_T), dtype=torch.float32)
    trained: list[tuple[int, float]] = []
    for chosen in batches_of(rows, budget):
        assert len(chosen) == 1 or sum(len(rows[i].tokens) for i in chosen) <= budget
        packed = pack(rows, chosen, marks, marks)
        torch.testing.assert_close(packed.old_logprobs_A, -packed.actions.float())
        torch.testing.assert_close(packed.advantages_A, packed.weights_A)
        trained += zip(packed.actions.tolist(), packed.advantages_A.tolist(), strict=True)
        laid = packed.tokens_T.split(packed.lengths)
        assert [piece.tolist() for piece in laid] == [rows[row].tokens for row in chosen]
        starts = {sum(packed.lengths[:i]) for i in range(len(chosen))}
        assert not starts & set(packed.action_A.tolist()), "an action needs a token before it"
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
    rows = rows_of([Trajectory(Task.of("x", id="t"), sequences=[trunk, branch])])
    assert rows[1].tokens == [1, 2, 3, 4, 6, 7]
    assert rows[1].action_mask == [False, False, False, False, True, True]


@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 5))
def test_steps_walk_through_epochs(count: int, size: int, seed: int) -> None:
    """However steps and epochs fall, each epoch holds every item once, in an order of its own."""
    items = list(range(count))
    walked = [item for step in range(count * 2) for item in items_of_step(items, step, size, seed)]
    for epoch in range(len(walked) // count):
        assert sorted(walked[epoch * count : (epoch + 1) * count]) == items
