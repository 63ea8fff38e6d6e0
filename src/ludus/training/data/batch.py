"""A step's rows as tensors: what every stage makes of its trajectories, and what estimators read of it.

A row is one sequence of a trajectory, with the prefix it shares with its ancestors in front. The prefix is
context: its actions are trained where they were first sampled, and nowhere else. The turns that a branch of a
tree shares with another attempt are handled alike: the first of the given trajectories that has them trains
them, so unmasked episodes come before masked ones. For the trunk [1 2] (3) [4] (5), actions in parentheses,
and a branch (6 7) that begins after the 4::

    tokens_T       1  2  3  4  5  |  1  2  3  4  6  7
    action_T       0  0  1  0  1  |  0  0  0  0  1  1
    turn_T        -1 -1  0 -1  1  | -1 -1 -1 -1  2  2

Rows lie end to end, without padding. Indexing goes through numpy: torch would wake one thread per core, and
on a busy host the last of them keeps the GPU waiting for milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ludus.algos import AdvantageInputs, TreeNodes, tree_nodes
from ludus.core.messages import MediaSpan
from ludus.core.trajectory import Segment, SegmentKind, Trajectory, media_spans

State = tuple[tuple[tuple[int, ...], tuple[str, ...]], ...]
"""The observations just before a turn: the tokens and the media of each segment."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """R rows end to end: T tokens, U turns. All tensors are on the host.

    The last four fields of T are computed later, and set with `replace`.
    """

    lengths_R: Tensor
    """int64: the tokens of each row."""
    first_R: Tensor
    """int64: the place of the first token of each row."""
    trajectory_T: Tensor
    """int64: the trajectory, by number, that each token belongs to."""
    tokens_T: Tensor
    """int64."""
    action_T: Tensor
    """bool: the row's own actions."""
    observation_T: Tensor
    """bool: the row's own observations, without images; trained on in ablations only."""
    turn_T: Tensor
    """int64: the turn that an action token belongs to, numbered over the batch; -1 elsewhere."""
    version_T: Tensor
    """int64: the version of the policy that sampled an action token; -1 where unknown, and elsewhere."""
    rollout_logprobs_T: Tensor
    """float32: log-probabilities as the engine reported them; 0 where it reported none."""
    trajectory_U: Tensor
    """int64: the trajectory of each turn."""
    state_U: Tensor
    """int64: a number for the observations just before each turn, equal for equal ones; -1 for none."""
    trained_T: Tensor
    """bool: where the loss applies. At first the actions."""
    old_logprobs_T: Tensor
    """float32: log-probabilities that importance ratios start from. At first the engine's."""
    advantages_T: Tensor
    """float32. At first 0."""
    weights_T: Tensor
    """float32: the weight of each token in the loss of the optimizer step. At first 0."""
    images: tuple[MediaSpan, ...] = ()
    """Which of the T tokens stand for images."""
    turns: Sequence[Segment] = field(default=(), repr=False)
    """The turns as the episodes have them, to note on them what was computed."""

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> Batch:
        """The rows of these trajectories, in order. A sequence without an own action has no row."""
        rows = list(_rows(trajectories))
        pieces = [(s, s_own) for row in rows for s, s_own in row.segments()]
        sizes = np.array([len(s.tokens) for s, _ in pieces], dtype=np.int64)
        lengths_R = np.array([row.length for row in rows], dtype=np.int64)
        turns = [s for s, own in pieces if own and s.kind is SegmentKind.ACTION and s.tokens]
        observation_T = np.repeat(_flags(pieces, SegmentKind.OBSERVATION), sizes)
        starts_R = np.cumsum(lengths_R) - lengths_R
        images = tuple(
            span.moved(start)
            for row, start in zip(rows, starts_R.tolist(), strict=True)
            for span in media_spans([*row.before, *row.own])
        )
        for span in images:  # an image's placeholders cannot be predicted
            observation_T[span.start : span.stop] = False
        action_T = np.repeat(_flags(pieces, SegmentKind.ACTION), sizes)
        if action_T[starts_R].any():
            raise ValueError("a row starts with an action: the model must have read something first")
        observation_T[starts_R] = False  # nothing before the first token could have predicted it
        turn_T = np.full(len(action_T), -1, dtype=np.int64)
        sizes_U = np.array([len(turn.tokens) for turn in turns], dtype=np.int64)
        turn_T[action_T] = np.repeat(np.arange(len(turns)), sizes_U)
        version_T = np.full(len(action_T), -1, dtype=np.int64)
        version_T[action_T] = np.concatenate([np.empty(0, np.int64), *map(_versions, turns)])
        logprobs = [v for s, own in pieces for v in _logprobs(s, own)]
        known: dict[State, int] = {}
        states = [
            known.setdefault(one, len(known)) if one else -1 for row in rows for one in row.states()
        ]
        return cls._with_defaults(
            lengths_R=lengths_R,
            trajectory_R=np.array([row.trajectory for row in rows], dtype=np.int64),
            tokens_T=np.array([token for s, _ in pieces for token in s.tokens], dtype=np.int64),
            action_T=action_T,
            observation_T=observation_T,
            turn_T=turn_T,
            version_T=version_T,
            rollout_logprobs_T=np.array(logprobs, dtype=np.float32),
            trajectory_U=np.array(
                [row.trajectory for row in rows for _ in row.states()], dtype=np.int64
            ),
            state_U=np.array(states, dtype=np.int64),
            images=images,
            turns=turns,
        )

    @classmethod
    def of_tokens(
        cls,
        rows: Sequence[Sequence[int]],
        action_masks: Sequence[Sequence[bool]],
        *,
        logprob: float = 0.0,
    ) -> Batch:
        """Rows given as tokens, a trajectory each; every token was sampled with this log-probability."""
        tokens_T = np.array([token for row in rows for token in row], dtype=np.int64)
        action_T = np.array([said for mask in action_masks for said in mask], dtype=np.bool_)
        nothing = np.full(len(tokens_T), -1, dtype=np.int64)
        return cls._with_defaults(
            lengths_R=np.array([len(row) for row in rows], dtype=np.int64),
            trajectory_R=np.arange(len(rows)),
            tokens_T=tokens_T,
            action_T=action_T,
            observation_T=np.zeros_like(action_T),
            turn_T=nothing,
            version_T=nothing,
            rollout_logprobs_T=np.full(len(tokens_T), logprob, dtype=np.float32),
            trajectory_U=np.empty(0, dtype=np.int64),
            state_U=np.empty(0, dtype=np.int64),
        )

    @classmethod
    def _with_defaults(
        cls,
        *,
        images: tuple[MediaSpan, ...] = (),
        turns: Sequence[Segment] = (),
        **arrays: npt.NDArray[Any],
    ) -> Batch:
        lengths_R = arrays["lengths_R"]
        arrays["first_R"] = np.cumsum(lengths_R) - lengths_R
        arrays["trajectory_T"] = np.repeat(arrays.pop("trajectory_R"), lengths_R)
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        logprobs_T = tensors["rollout_logprobs_T"]
        return cls(
            **tensors,
            trained_T=tensors["action_T"],
            old_logprobs_T=logprobs_T,
            advantages_T=torch.zeros_like(logprobs_T),
            weights_T=torch.zeros_like(logprobs_T),
            images=images,
            turns=turns,
        )

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.lengths_R)

    @property
    def lengths(self) -> list[int]:
        """The tokens of each row."""
        lengths: list[int] = self.lengths_R.tolist()
        return lengths

    def split(self, values_T: Tensor) -> tuple[Tensor, ...]:
        """Values of the tokens, row by row."""
        return torch.split(values_T, self.lengths)

    def row_mask(self, rows: Iterable[int]) -> Tensor:
        """True at the tokens of these rows."""
        chosen_R = np.zeros(len(self), dtype=np.bool_)
        chosen_R[list(rows)] = True
        return torch.from_numpy(np.repeat(chosen_R, self.lengths_R.numpy()))

    def rows_with(self, mask_T: Tensor, rows: Iterable[int] | None = None) -> list[int]:
        """Rows (of these, or of all) with a token at which the mask is true."""
        ends = np.concatenate([[0], np.cumsum(self.lengths_R.numpy())])
        count = np.concatenate([[0], np.cumsum(mask_T.numpy())])
        given = range(len(self)) if rows is None else rows
        return [i for i in given if count[ends[i + 1]] > count[ends[i]]]

    def images_of(self, start: int, length: int) -> tuple[MediaSpan, ...]:
        """The images among so many tokens from `start`, counted from there."""
        return tuple(span.moved(-start) for span in self.images if start <= span.start < start + length)


@dataclass(frozen=True, slots=True)
class _Row:
    """The segments of a row: context, and its own."""

    trajectory: int
    before: list[Segment]
    own: list[Segment]

    @property
    def length(self) -> int:
        return sum(len(segment.tokens) for segment in (*self.before, *self.own))

    def segments(self) -> Iterator[tuple[Segment, bool]]:
        """All segments, and whether they are the row's own."""
        yield from ((segment, False) for segment in self.before)
        yield from ((segment, True) for segment in self.own)

    def states(self) -> Iterator[State]:
        """For each own turn the observations since the action before it."""
        state: State = ()
        for segment, is_own in self.segments():
            if segment.kind is not SegmentKind.ACTION:
                state += ((tuple(segment.tokens), tuple(media.sha256 for media in segment.media)),)
            elif segment.tokens:
                if is_own:
                    yield state
                state = ()


def _rows(trajectories: Sequence[Trajectory]) -> Iterator[_Row]:
    shared = _shared_segments(trajectories)
    for number, trajectory in enumerate(trajectories):
        for index, sequence in enumerate(trajectory.sequences):
            known = shared[number] if index == 0 else 0
            own = sequence.segments[known:]
            if any(s.kind is SegmentKind.ACTION and s.tokens for s in own):
                before = _inherited(trajectory, index) + sequence.segments[:known]
                yield _Row(number, before, own)


def _shared_segments(trajectories: Sequence[Trajectory]) -> dict[int, int]:
    """How many leading segments of each attempt at a tree an earlier one of these trajectories has already.

    That may be the one that it branched off, or a branch of its own.
    """
    shared: dict[int, int] = {}
    seen: set[int] = set()
    inherited: set[int] = set()
    """Ids of seen segments that a branch has from another attempt."""
    for number, trajectory in enumerate(trajectories):
        segments = trajectory.sequences[0].segments if trajectory.sequences else []
        prefix = segments[: trajectory.branch.segments] if trajectory.branch is not None else []
        known = seen.intersection(map(id, prefix))
        both = takewhile(lambda s: id(s) in known or id(s) in inherited, segments)  # noqa: B023 - used up here
        shared[number] = sum(1 for _ in both)
        seen.update(map(id, segments))
        inherited.update(map(id, prefix))
    return shared


def _inherited(trajectory: Trajectory, index: int) -> list[Segment]:
    parent = trajectory.sequences[index].parent
    if parent is None:
        return []
    sequence, segment = parent
    own = trajectory.sequences[sequence].segments[: segment + 1]
    return _inherited(trajectory, sequence) + own


def _flags(pieces: Sequence[tuple[Segment, bool]], kind: SegmentKind) -> npt.NDArray[np.bool_]:
    return np.array([own and segment.kind is kind for segment, own in pieces], dtype=np.bool_)


def _logprobs(segment: Segment, own: bool) -> Sequence[float]:
    return (segment.logprobs if own else None) or [0.0] * len(segment.tokens)


def _versions(turn: Segment) -> npt.NDArray[np.int64]:
    versions = np.full(len(turn.tokens), -1, dtype=np.int64)
    for span in turn.versions:
        versions[span.start :] = span.version
    return versions


def advantage_inputs(
    batch: Batch,
    trajectories: Sequence[Trajectory],
    groups: Sequence[int],
    sets: Sequence[int] | None = None,
    *,
    train_observations: bool = False,
    masked: Sequence[bool] | None = None,
) -> AdvantageInputs:
    """The estimator's view of a batch.

    A trajectory's reward includes its turns' rewards, as the scorer has it. Two turns of a group have the same
    anchor where the observation just before was the same. The caller adds a critic's values and KL penalties.

    Args:
        batch: `Batch.of(trajectories)`.
        trajectories: The episodes, all of them scored.
        groups: The group of each.
        sets: The task set of each; one when left out.
        train_observations: Whether the loss applies to observations as well.
        masked: Which episodes are not in the loss; none when left out.
    """
    return AdvantageInputs(
        rewards_N=torch.tensor([t.reward or 0.0 for t in trajectories], dtype=torch.float32),
        group_N=torch.tensor(groups, dtype=torch.long),
        trajectory_T=batch.trajectory_T,
        action_T=batch.action_T,
        trained_T=batch.action_T | batch.observation_T if train_observations else None,
        turn_T=batch.turn_T,
        trajectory_U=batch.trajectory_U,
        rewards_U=torch.tensor([turn.reward or 0.0 for turn in batch.turns], dtype=torch.float32),
        anchor_U=_anchors(batch.state_U.tolist(), [groups[n] for n in batch.trajectory_U.tolist()]),
        truncated_N=torch.tensor([t.stop.is_truncated for t in trajectories], dtype=torch.bool),
        set_N=None if sets is None else torch.tensor(sets, dtype=torch.long),
        tree=_tree(batch.turns, trajectories, masked),
    )


def _tree(
    turns: Sequence[Segment], trajectories: Sequence[Trajectory], masked: Sequence[bool] | None
) -> TreeNodes | None:
    """Which trajectories share which of these turns; None where none does."""
    if all(trajectory.branch is None for trajectory in trajectories):
        return None
    number = {id(turn): place for place, turn in enumerate(turns)}
    paths = [[number[id(a)] for a in one.actions if id(a) in number] for one in trajectories]
    masked_N = None if masked is None else torch.tensor(masked, dtype=torch.bool)
    return tree_nodes(paths, len(turns), masked_N)


def _anchors(states: Sequence[int], groups: Sequence[int]) -> Tensor:
    """A number for each pair of a state and a group; -1 for no state."""
    known: dict[tuple[int, int], int] = {}
    anchors = [
        known.setdefault((group, state), len(known)) if state >= 0 else -1
        for state, group in zip(states, groups, strict=True)
    ]
    return torch.tensor(anchors, dtype=torch.long)
