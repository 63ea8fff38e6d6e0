"""Sequence packing: from trajectories to rows, and from rows to packed micro-batches without padding.

A row is one sequence of a trajectory, with the prefix it shares with its ancestors in front. The prefix is
context: its actions are trained where they were first sampled, and nowhere else. So it is with the turns that a
branch of a tree shares with another attempt: the first of the given trajectories that has them trains them, so
that unmasked episodes come before masked ones.

Tensors over the tokens of all rows, in the order given, have T in their names. Indexing goes through numpy:
torch would wake one thread per core, and on a busy host the last of them keeps the GPU waiting for
milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise, takewhile
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ludus.algos import AdvantageInputs, TreeNodes, tree_nodes
from ludus.core.messages import MediaSpan
from ludus.core.trajectory import Segment, SegmentKind, Trajectory, media_spans
from ludus.kernels import arrays_to_device
from ludus.training.data.micro_batches import micro_batches_of, shared_micro_batches_of, split_point
from ludus.training.data.prefixes import Fold, row_keys, sorted_by_prefix

State = tuple[tuple[tuple[int, ...], tuple[str, ...]], ...]
"""The observations just before a turn: the tokens and the media of each segment."""


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence to train on, and the trajectory (by number) it belongs to."""

    tokens: list[int]
    action_mask: list[bool]
    observation_mask: list[bool]
    """True at the row's own observations: trained on in ablations alone."""
    logprobs: list[float]
    trajectory: int
    turns: list[Segment]
    """The actions that are the row's own and have tokens."""
    states: list[State]
    """For each of them, the observations since the action before it."""
    images: tuple[MediaSpan, ...] = ()
    """Which of the tokens stand for images."""


def rows_of(trajectories: Sequence[Trajectory]) -> list[Row]:
    """The rows of these trajectories, in order; a sequence without an action has nothing to train."""
    rows: list[Row] = []
    shared = _shared_segments(trajectories)
    for number, trajectory in enumerate(trajectories):
        for index, sequence in enumerate(trajectory.sequences):
            known = shared[number] if index == 0 else 0
            before = _inherited(trajectory, index) + sequence.segments[:known]
            own = sequence.segments[known:]
            mask = [s.kind is SegmentKind.ACTION for s in own for _ in s.tokens]
            if not any(mask):
                continue
            prefix = [token for segment in before for token in segment.tokens]
            logprobs = [value for s in own for value in (s.logprobs or [0.0] * len(s.tokens))]
            observed = [seen for s in own for seen in _observed(s)]
            rows.append(
                Row(
                    tokens=prefix + [token for segment in own for token in segment.tokens],
                    action_mask=[False] * len(prefix) + mask,
                    observation_mask=[False] * len(prefix) + observed,
                    logprobs=[0.0] * len(prefix) + logprobs,
                    trajectory=number,
                    turns=[s for s in own if s.kind is SegmentKind.ACTION and s.tokens],
                    states=list(_states(before, own)),
                    images=tuple(media_spans([*before, *own])),
                )
            )
            if rows[-1].action_mask[0]:
                raise ValueError("a row starts with an action: the model must have read something first")
            rows[-1].observation_mask[0] = False  # nothing before it could have predicted it
    return rows


def _observed(segment: Segment) -> list[bool]:
    """True at the tokens of an observation; what stands for an image is nothing that could be predicted."""
    observed = [segment.kind is SegmentKind.OBSERVATION] * len(segment.tokens)
    for span in segment.media:
        observed[span.start : span.stop] = [False] * (span.stop - span.start)
    return observed


def _shared_segments(trajectories: Sequence[Trajectory]) -> dict[int, int]:
    """How many leading segments of each attempt at a tree an earlier one of these trajectories has already.

    That may be the one that it branched off, or a branch of its own.
    """
    shared: dict[int, int] = {}
    seen: set[int] = set()
    inherited: set[int] = set()
    """Of the segments seen, those that a branch has from another attempt."""
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


def _states(before: Iterable[Segment], own: Iterable[Segment]) -> Iterator[State]:
    state: State = ()
    for segment, is_own in [(s, False) for s in before] + [(s, True) for s in own]:
        if segment.kind is not SegmentKind.ACTION:
            state += ((tuple(segment.tokens), tuple(media.sha256 for media in segment.media)),)
        elif segment.tokens:
            if is_own:
                yield state
            state = ()


def concat_lists(lists: Iterable[Sequence[float]], dtype: npt.DTypeLike) -> Tensor:
    """Lists as one tensor, through numpy, which reads a list several times faster than torch."""
    pieces = [np.array(numbers, dtype=dtype) for numbers in lists]
    return torch.from_numpy(np.concatenate(pieces) if pieces else np.empty(0, dtype=dtype))


def concat_masks(masks: Iterable[Sequence[bool]]) -> Tensor:
    """Masks of rows, end to end."""
    return concat_lists(masks, np.bool_)


def engine_logprobs(rows: Sequence[Row]) -> Tensor:
    """The log-probabilities that the engine reported; 0 where it reported none."""
    return concat_lists([row.logprobs for row in rows], np.float32)


def row_mask(rows: Sequence[Row], numbers: Sequence[int]) -> Tensor:
    """True at the tokens of these rows."""
    chosen = set(numbers)
    return concat_masks([i in chosen] * len(row.tokens) for i, row in enumerate(rows))


def trajectory_ids(rows: Sequence[Row]) -> Tensor:
    """The trajectory that each token belongs to."""
    counts = [len(row.tokens) for row in rows]
    numbers = np.array([row.trajectory for row in rows], dtype=np.int64)
    return torch.from_numpy(np.repeat(numbers, counts))


def advantage_inputs(
    rows: Sequence[Row],
    trajectories: Sequence[Trajectory],
    groups: Sequence[int],
    sets: Sequence[int] | None = None,
    *,
    train_observations: bool = False,
    masked: Sequence[bool] | None = None,
) -> AdvantageInputs:
    """The estimator's view of all rows laid end to end.

    A trajectory's reward includes its turns' rewards, as the scorer has it. Two turns of a group have the same
    anchor where the observation just before was the same. The caller adds a critic's values and KL penalties.

    Args:
        rows: From `rows_of(trajectories)`.
        trajectories: The episodes, all of them scored.
        groups: The group of each.
        sets: The task set of each; one when left out.
        train_observations: Whether the loss applies to observations as well.
        masked: Which episodes are not in the loss; none when left out.
    """
    turns = [(row.trajectory, turn) for row in rows for turn in row.turns]
    action_T = concat_masks(row.action_mask for row in rows)
    return AdvantageInputs(
        rewards_N=torch.tensor([t.reward or 0.0 for t in trajectories], dtype=torch.float32),
        group_N=torch.tensor(groups, dtype=torch.long),
        trajectory_T=trajectory_ids(rows),
        action_T=action_T,
        trained_T=action_T | concat_masks(row.observation_mask for row in rows)
        if train_observations
        else None,
        turn_T=_turns(rows),
        trajectory_U=torch.tensor([number for number, _ in turns], dtype=torch.long),
        rewards_U=torch.tensor([turn.reward or 0.0 for _, turn in turns], dtype=torch.float32),
        anchor_U=_anchors(rows, groups),
        truncated_N=torch.tensor([t.stop.is_truncated for t in trajectories], dtype=torch.bool),
        set_N=None if sets is None else torch.tensor(sets, dtype=torch.long),
        tree=_tree([turn for _, turn in turns], trajectories, masked),
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


def _turns(rows: Sequence[Row]) -> Tensor:
    numbers: list[int] = []
    first = 0
    for row in rows:
        own = [first + i for i, turn in enumerate(row.turns) for _ in turn.tokens]
        turns = iter(own)
        numbers += [next(turns) if is_action else -1 for is_action in row.action_mask]
        first += len(row.turns)
    return torch.tensor(numbers, dtype=torch.long)


def _anchors(rows: Sequence[Row], groups: Sequence[int]) -> Tensor:
    known: dict[tuple[int, State], int] = {}
    anchors = [
        known.setdefault((groups[row.trajectory], state), len(known)) if state else -1
        for row in rows
        for state in row.states
    ]
    return torch.tensor(anchors, dtype=torch.long)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """A micro-batch of rows end to end, and the places of their tokens among those of all rows."""

    lengths: list[int]
    tokens_T: Tensor
    source_index_T: Tensor
    fold: Fold | None = None
    """Which prefixes the rows share and a pass computes once; None where they share none."""
    images: tuple[MediaSpan, ...] = ()
    """Where images stand, among the micro-batch's tokens."""

    def to(self, device: torch.device) -> PackedRows:
        """The same with its tokens on a device; where they lie is asked on the host."""
        return replace(self, tokens_T=to_device(self.tokens_T, device))

    @property
    def computed(self) -> int:
        """The tokens that a pass computes."""
        return sum(self.lengths) if self.fold is None else self.fold.computed

    def split(self) -> tuple[PackedRows, PackedRows]:
        """Two parts of whole rows, of about as many tokens each."""
        row, place, folds = _halves(self.lengths, self.fold)
        images = split_images(self.images, place)
        return (
            PackedRows(
                self.lengths[:row],
                self.tokens_T[:place],
                self.source_index_T[:place],
                folds[0],
                images[0],
            ),
            PackedRows(
                self.lengths[row:],
                self.tokens_T[place:],
                self.source_index_T[place:],
                folds[1],
                images[1],
            ),
        )


def _halves(
    lengths: Sequence[int], fold: Fold | None
) -> tuple[int, int, tuple[Fold | None, Fold | None]]:
    """(rows, tokens) of the first half of a micro-batch, and what the rows of each half share."""
    if fold is None:
        return *split_point(lengths), (None, None)
    row, place = split_point(lengths, fold.own_R.tolist())
    return row, place, (fold.part(0, lengths[:row]), fold.part(place, lengths[row:]))


def split_images(
    images: Sequence[MediaSpan], place: int
) -> tuple[tuple[MediaSpan, ...], tuple[MediaSpan, ...]]:
    """The spans before a place, and those behind it, counted from there. No span lies across two rows."""
    before = tuple(span for span in images if span.start < place)
    return before, tuple(span.moved(-place) for span in images if span.start >= place)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device. Copies to a GPU go through pinned memory: others wait until the GPU has caught up."""
    return _all_to_device([tensor], device)[0]


def _all_to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The same for several, in one copy."""
    if device.type != "cuda" or any(tensor.device.type != "cpu" for tensor in tensors):
        return [tensor.to(device) for tensor in tensors]
    return arrays_to_device([tensor.numpy() for tensor in tensors], device)


def take_rows(values_T: Tensor, place_A: Tensor) -> Tensor:
    """values_T[place_A], on the host; half precision becomes float32."""
    values_T = values_T.detach()
    if values_T.dtype in (torch.bfloat16, torch.float16):  # numpy knows one of them alone
        values_T = values_T.float()
    return torch.from_numpy(values_T.numpy()[place_A.numpy()])


def pack_rows(
    rows: Sequence[Row], numbers: Sequence[int], budget: int, ranks: int = 1, *, share: bool = False
) -> Iterator[PackedRows]:
    """The rows of these numbers in micro-batches; with `share`, a prefix that rows share is computed once."""
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + len(row.tokens))
    keys = (
        row_keys([rows[i].tokens for i in numbers], [rows[i].images for i in numbers]) if share else []
    )
    if share:
        batches = shared_micro_batches_of(keys, budget, ranks)
    else:
        batches = micro_batches_of([len(rows[i].tokens) for i in numbers], budget, ranks)
    for batch in batches:
        fold: Fold | None = None
        if share:
            order, common = sorted_by_prefix([keys[i] for i in batch])
            if any(common):
                batch = [batch[i] for i in order]  # halves then have whole subtrees
                fold = Fold.of([keys[i] for i in batch])
        chosen = [numbers[i] for i in batch]
        yield PackedRows(
            lengths=[len(rows[i].tokens) for i in chosen],
            tokens_T=concat_lists([rows[i].tokens for i in chosen], np.int64),
            source_index_T=torch.from_numpy(
                np.concatenate([np.arange(starts[i], starts[i + 1]) for i in chosen])
            ),
            fold=fold,
            images=_packed_images([rows[i] for i in chosen]),
        )


def _packed_images(rows: Sequence[Row]) -> tuple[MediaSpan, ...]:
    starts = accumulate((len(row.tokens) for row in rows), initial=0)
    placed = zip(rows, starts, strict=False)
    return tuple(span.moved(start) for row, start in placed for span in row.images)


@dataclass(frozen=True, slots=True)
class Pack:
    """Rows end to end: R rows, T tokens, A of them trained.

    `trained_index_A` holds the positions of the trained tokens; each was predicted from the position before it.
    They are the actions, unless a recipe trains on observations as well.
    """

    lengths: list[int]
    tokens_T: Tensor
    trained_index_A: Tensor
    old_logprobs_A: Tensor
    """What importance ratios are measured by: the engine's, or the trainer's at the start of the step where
    `rl.correction` compares the two."""
    rollout_logprobs_A: Tensor
    """As the engine reported them when it sampled."""
    advantages_A: Tensor
    weights_A: Tensor
    row_A: Tensor
    """The row in which each trained token lies."""
    source_index_A: Tensor
    """Where each of them is among the tokens of all rows of the step."""
    fold: Fold | None = None
    """Which prefixes the rows share and a pass computes once; None where they share none."""
    images: tuple[MediaSpan, ...] = ()
    """Where images stand, among the pack's tokens."""

    @property
    def computed(self) -> int:
        """The tokens that a pass computes."""
        return sum(self.lengths) if self.fold is None else self.fold.computed

    def to(self, device: torch.device) -> Pack:
        names, tensors = zip(*self._tensors(), strict=True)
        there: dict[str, Any] = dict(zip(names, _all_to_device(tensors, device), strict=True))
        return replace(self, **there)

    def split(self) -> tuple[Pack, Pack]:
        """Two packs of whole rows, of about as many tokens each."""
        row, place, folds = _halves(self.lengths, self.fold)
        trained = int((self.trained_index_A < place).sum())
        along_A = {name: tensor for name, tensor in self._tensors() if name != "tokens_T"}
        first: dict[str, Any] = {name: tensor[:trained] for name, tensor in along_A.items()}
        second: dict[str, Any] = {name: tensor[trained:] for name, tensor in along_A.items()}
        second["trained_index_A"] = second["trained_index_A"] - place
        second["row_A"] = second["row_A"] - row
        first |= {"lengths": self.lengths[:row], "tokens_T": self.tokens_T[:place], "fold": folds[0]}
        second |= {"lengths": self.lengths[row:], "tokens_T": self.tokens_T[place:], "fold": folds[1]}
        first["images"], second["images"] = split_images(self.images, place)
        return replace(self, **first), replace(self, **second)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        values = ((one.name, getattr(self, one.name)) for one in fields(self))
        return ((name, value) for name, value in values if isinstance(value, Tensor))

    @property
    def actions(self) -> Tensor:
        """The trained tokens themselves."""
        return self.tokens_T[self.trained_index_A]


@dataclass(frozen=True, slots=True)
class Columns:
    """Training inputs for every token of all rows."""

    trained_T: Tensor
    rollout_logprobs_T: Tensor
    old_logprobs_T: Tensor
    advantages_T: Tensor
    weights_T: Tensor

    @classmethod
    def of(cls, rows: Sequence[Row], advantages_T: Tensor, weights_T: Tensor) -> Columns:
        """Train on the actions, with ratios that start from the log-probabilities that the engine reported."""
        sampled_T = engine_logprobs(rows)
        said_T = concat_masks(row.action_mask for row in rows)
        return cls(said_T, sampled_T, sampled_T, advantages_T, weights_T)


def packs_of(
    rows: Sequence[Row],
    columns: Columns,
    budget: int,
    numbers: Sequence[int] | None = None,
    ranks: int = 1,
    *,
    share: bool = False,
) -> Iterator[Pack]:
    """These rows (all when left out) as packs; a row without a trained token is left out.

    With `share`, a prefix that rows of a pack share is computed once.
    """
    lengths = [len(row.tokens) for row in rows]
    ends = list(accumulate(lengths, initial=0))
    trains = [bool(columns.trained_T.numpy()[start:stop].any()) for start, stop in pairwise(ends)]
    wanted = range(len(rows)) if numbers is None else numbers
    for part in pack_rows(rows, [i for i in wanted if trains[i]], budget, ranks, share=share):
        mask_T = take_rows(columns.trained_T, part.source_index_T)
        trained_index_A = mask_T.nonzero().squeeze(1)
        source_index_A = take_rows(part.source_index_T, trained_index_A)
        row_T = torch.from_numpy(np.repeat(np.arange(len(part.lengths)), part.lengths))
        yield Pack(
            lengths=part.lengths,
            tokens_T=part.tokens_T,
            trained_index_A=trained_index_A,
            old_logprobs_A=take_rows(columns.old_logprobs_T, source_index_A),
            rollout_logprobs_A=take_rows(columns.rollout_logprobs_T, source_index_A),
            advantages_A=take_rows(columns.advantages_T, source_index_A),
            weights_A=take_rows(columns.weights_T, source_index_A),
            row_A=take_rows(row_T, trained_index_A),
            source_index_A=source_index_A,
            fold=part.fold,
            images=part.images,
        )
