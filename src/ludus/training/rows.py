"""Training rows: the sequences of trajectories, ready to be laid end to end.

A row is one sequence of a trajectory, with the prefix it shares with its ancestors in front. The prefix is
context: its actions are trained where they were first said, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ludus.core.trajectory import Segment, SegmentKind, Trajectory

State = tuple[tuple[tuple[int, ...], tuple[str, ...]], ...]
"""What the model was told just before a turn: the tokens and the media of each segment."""


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence to train on, and the trajectory (by number) it belongs to."""

    tokens: list[int]
    action_mask: list[bool]
    heard_mask: list[bool]
    """True at the observations that are the row's own: trained on for ablations alone."""
    logprobs: list[float]
    trajectory: int
    turns: list[Segment]
    """The actions that are the row's own and have tokens."""
    states: list[State]
    """For each of them, what was heard since the action before it; empty where that was nothing."""


def rows_of(trajectories: Sequence[Trajectory]) -> list[Row]:
    """The rows of these trajectories, in order; a sequence without an action has nothing to train."""
    rows: list[Row] = []
    for number, trajectory in enumerate(trajectories):
        for index, sequence in enumerate(trajectory.sequences):
            mask = sequence.action_mask
            if not any(mask):
                continue
            before = _inherited(trajectory, index)
            prefix = [token for segment in before for token in segment.tokens]
            heard = [s.kind is SegmentKind.OBSERVATION for s in sequence.segments for _ in s.tokens]
            rows.append(
                Row(
                    tokens=prefix + sequence.tokens,
                    action_mask=[False] * len(prefix) + mask,
                    heard_mask=[False] * len(prefix) + heard,
                    logprobs=[0.0] * len(prefix) + sequence.logprobs,
                    trajectory=number,
                    turns=[action for action in sequence.actions if action.tokens],
                    states=list(_states(before, sequence.segments)),
                )
            )
            if rows[-1].action_mask[0]:
                raise ValueError("a row starts with an action: the model must have read something first")
            rows[-1].heard_mask[0] = False  # nothing before it could have predicted it
    return rows


def _inherited(trajectory: Trajectory, index: int) -> list[Segment]:
    parent = trajectory.sequences[index].parent
    if parent is None:
        return []
    sequence, segment = parent
    own = trajectory.sequences[sequence].segments[: segment + 1]
    return _inherited(trajectory, sequence) + own


def _states(before: Iterable[Segment], own: Iterable[Segment]) -> Iterator[State]:
    state: State = ()
    for segment, is_own in [(s, False) for s in before] + [(s, True) for s in own]:
        if segment.kind is not SegmentKind.ACTION:
            state += ((tuple(segment.tokens), tuple(media.sha256 for media in segment.media)),)
        elif segment.tokens:
            if is_own:
                yield state
            state = ()


def end_to_end(lists: Iterable[Sequence[float]], dtype: npt.DTypeLike) -> Tensor:
    """Lists of numbers as one tensor, by way of numpy, which reads a list several times faster than torch."""
    pieces = [np.array(numbers, dtype=dtype) for numbers in lists]
    return torch.from_numpy(np.concatenate(pieces) if pieces else np.empty(0, dtype=dtype))


def flags(masks: Iterable[Sequence[bool]]) -> Tensor:
    """Masks of rows, end to end."""
    return end_to_end(masks, np.bool_)


def engine_logprobs(rows: Sequence[Row]) -> Tensor:
    """What the engine reported for each token; 0 where it said nothing."""
    return end_to_end([row.logprobs for row in rows], np.float32)


def row_mask(rows: Sequence[Row], numbers: Sequence[int]) -> Tensor:
    """True at the tokens of these rows."""
    chosen = set(numbers)
    return flags([i in chosen] * len(row.tokens) for i, row in enumerate(rows))


def owners(rows: Sequence[Row]) -> Tensor:
    """The trajectory that each token belongs to."""
    counts = [len(row.tokens) for row in rows]
    numbers = np.array([row.trajectory for row in rows], dtype=np.int64)
    return torch.from_numpy(np.repeat(numbers, counts))
