"""Prefix forests: what rows share is found, whatever the order, and each row can be read back from its fold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.core import MediaSpan, Segment, SegmentKind, Task, TokenSequence, Trajectory
from ludus.training.data.batch import Batch
from ludus.training.data.micro_batches import (
    BLOCK,
    Fold,
    Ints,
    bundles_of,
    micro_batches,
    micro_batches_of,
    row_keys,
    shared_micro_batches_of,
    split_point,
)

SHORTEST = 3 * BLOCK


def run(name: int, length: int) -> list[int]:
    """Tokens that no run of another name has."""
    return [1000 * name + i for i in range(length)]


@st.composite
def forests(draw: st.DrawFn) -> list[list[int]]:
    """Rows that begin like an earlier one, or not at all alike; some end where others go on."""
    rows: list[list[int]] = []
    for name in range(1, draw(st.integers(1, 9)) + 1):
        prefix: list[int] = []
        if rows and draw(st.booleans()):
            other = draw(st.sampled_from(rows))
            prefix = other[: draw(st.integers(0, len(other)))]
        own = run(name, draw(st.integers(0, 90)))
        rows.append(prefix + own or [0])
    return draw(st.permutations(rows))


def keys_of(rows: list[list[int]]) -> list[Ints]:
    return [np.array(row, dtype=np.int64) for row in rows]


def computed_by_hand(rows: list[list[int]]) -> int:
    """Of each row what it does not share with one before it, in whole blocks."""
    total = 0
    for number, row in enumerate(rows):
        most = max((_common(row, other) for other in rows[:number]), default=0)
        total += len(row) - (most // BLOCK * BLOCK if most >= SHORTEST else 0)
    return total


def _common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@given(forests())
def test_every_row_can_be_read_back(rows: list[list[int]]) -> None:
    keys = keys_of(rows)
    fold = Fold.of(keys)
    flat = np.concatenate(keys)
    if fold is None:
        assert computed_by_hand(rows) == len(flat)
        return
    assert fold.computed == sum(fold.lengths) == computed_by_hand(rows) < len(flat)
    assert np.array_equal(flat[fold.source_U][fold.index_T], flat)
    assert fold.own_R.sum() == fold.computed
    assert all(parent < node for node, parent in enumerate(fold.parents))
    assert min(fold.lengths) > 0
    ends = np.cumsum(fold.lengths)
    node_U = np.searchsorted(ends, np.arange(fold.computed), side="right")
    place = 0
    for key in keys:
        index = fold.index_T[place : place + len(key)]
        place += len(key)
        path: list[int] = []  # a row is its last node, behind the nodes before it, from the root on
        node = int(node_U[index[-1]])
        while node >= 0:
            path = [*range(ends[node] - fold.lengths[node], ends[node]), *path]
            node = fold.parents[node]
        assert index.tolist() == path


@given(forests(), st.data())
def test_halves_fold_as_if_they_had_never_been_one(rows: list[list[int]], data: st.DataObject) -> None:
    keys = keys_of(sorted(rows))
    fold = Fold.of(keys)
    if fold is None or len(rows) < 2:
        return
    lengths = [len(key) for key in keys]
    cut = data.draw(st.integers(1, len(rows) - 1))
    for first, stop in ((0, cut), (cut, len(rows))):
        part = fold.part(sum(lengths[:first]), lengths[first:stop])
        alone = Fold.of(keys[first:stop])
        assert (part is None) == (alone is None)
        assert part is None or alone is None or part.computed == alone.computed
    row, _ = split_point(lengths, fold.own_R.tolist())

    def larger(at: int) -> int:
        return max(computed_by_hand(sorted(rows)[:at]), computed_by_hand(sorted(rows)[at:]))

    assert larger(row) == min(larger(at) for at in range(1, len(rows)))


@given(forests(), st.integers(1, 400), st.integers(1, 4))
def test_micro_batches_hold_every_row_once_within_the_budget(
    rows: list[list[int]], budget: int, ranks: int
) -> None:
    keys = keys_of(rows)
    batches = shared_micro_batches_of(keys, budget, ranks)
    assert sorted(row for batch in batches for row in batch) == list(range(len(rows)))
    for batch in batches:
        assert len(batch) == 1 or computed_by_hand([rows[i] for i in batch]) <= budget
    assert batches == shared_micro_batches_of(keys, budget, ranks), "packing is no function of its input"


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(1, 150), st.integers(1, 4))
def test_rows_that_share_nothing_are_packed_as_ever(lengths: list[int], budget: int, ranks: int) -> None:
    rows = [run(name, length) for name, length in enumerate(lengths, start=1)]
    assert shared_micro_batches_of(keys_of(rows), budget, ranks) == micro_batches_of(
        lengths, budget, ranks
    )


def test_attempts_at_one_task_travel_together() -> None:
    """Eight attempts at each of three tasks, in any order, with room for two groups."""
    groups = [run(task, 100) for task in (1, 2, 3)]
    rows = [prompt + run(10 + 8 * task + i, 20) for i in range(8) for task, prompt in enumerate(groups)]
    size = 96 + 8 * 24
    batches = shared_micro_batches_of(keys_of(rows), 2 * size)
    assert [sorted({i % 3 for i in batch}) for batch in batches] == [[0, 1], [2]]


def test_a_tree_larger_than_the_budget_is_cut_between_rows() -> None:
    rows = [run(1, 96) + run(2 + i, 24) for i in range(8)]
    bundles = bundles_of(keys_of(rows), 96 + 3 * 24)
    assert sorted((len(bundle.rows), bundle.size) for bundle in bundles) == [
        (2, 144),
        (3, 168),
        (3, 168),
    ]


def test_ranks_get_a_part_of_a_group_each_where_one_would_wait_for_the_other() -> None:
    rows = [run(1, 96) + run(2 + i, 64) for i in range(8)]
    batches = shared_micro_batches_of(keys_of(rows), 10_000, ranks=2)
    assert sorted(len(batch) for batch in batches) == [4, 4]
    many = [run(group, 96) + run(100 + 8 * group + i, 64) for group in range(1, 5) for i in range(8)]
    batches = shared_micro_batches_of(keys_of(many), 10_000, ranks=2)
    assert all(len({many[i][0] for i in batch}) == 2 for batch in batches), "a group was torn apart"


def batch_of(rows: list[list[int]]) -> Batch:
    """All tokens are trained, as the places of all are looked at."""
    return Batch.of_tokens(rows, [[True] * len(row) for row in rows])


@given(forests(), st.integers(1, 300), st.integers(1, 3))
def test_packs_say_where_each_token_comes_from(rows: list[list[int]], budget: int, ranks: int) -> None:
    flat = np.concatenate(keys_of(rows))
    made = list(micro_batches(batch_of(rows), budget, ranks=ranks, share=True))
    assert sorted(i for one in made for i in one.source_index_A.tolist()) == list(range(len(flat)))
    for one in made:
        assert one.tokens_T.tolist() == flat[one.source_index_A.numpy()].tolist()
        assert one.computed <= sum(one.lengths)
        if len(one.lengths) > 1:
            halves = one.split()
            assert [*halves[0].lengths, *halves[1].lengths] == one.lengths
            for half in halves:
                assert half.computed <= one.computed


def shown(sha: str | None, before: int = 50) -> Trajectory:
    image = Segment(SegmentKind.OBSERVATION, [7] * 40)
    image.media = (MediaSpan(sha, 0, 40),) if sha else ()
    segments = [
        Segment(SegmentKind.PROMPT, run(1, before)),
        image,
        Segment(SegmentKind.ACTION, [5, 6], logprobs=[0.0, 0.0]),
    ]
    return Trajectory(Task.of("x"), sequences=[TokenSequence(segments)], reward=1.0)


@pytest.mark.parametrize(
    ("first", "second", "shared"), [("x", "x", 80), ("x", "y", 48), ("x", None, 48), (None, None, 80)]
)
def test_images_are_shared_only_with_themselves(
    first: str | None, second: str | None, shared: int
) -> None:
    """Their tokens are placeholders, the same for all."""
    (packed,) = micro_batches(Batch.of([shown(first), shown(second)]), 1000, share=True)
    assert sum(packed.lengths) - packed.computed == shared


def test_images_at_the_very_beginning_keep_rows_apart() -> None:
    batch = Batch.of([shown("x", before=0), shown("y", before=0)])
    (packed,) = micro_batches(batch, 1000, share=True)
    assert packed.fold is None
    keys = row_keys([[7, 8], [7, 8]], [[MediaSpan("x", 0, 2)], [MediaSpan("x", 0, 2)]])
    assert np.array_equal(keys[0], keys[1])


def test_nothing_to_pack_is_nothing() -> None:
    assert list(micro_batches(Batch.of([]), 10, share=True)) == []
    assert Fold.of([]) is None
