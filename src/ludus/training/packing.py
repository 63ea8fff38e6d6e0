"""Rows to an estimator's batch, and to packed micro-batches. No padding: rows lie end to end.

What lies over all rows, in the order they are given, has T in its name. Places are looked up by numpy: torch
would wake a thread for each of the host's cores, and on a busy host one of them comes milliseconds late, which
the GPU spends idle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ludus.algos import AdvantageInputs
from ludus.core.trajectory import Trajectory
from ludus.kernels.device import sent
from ludus.training.rows import Row, State, end_to_end, engine_logprobs, flags, owners


def advantage_inputs(
    rows: Sequence[Row],
    trajectories: Sequence[Trajectory],
    groups: Sequence[int],
    sets: Sequence[int] | None = None,
    *,
    trains_heard: bool = False,
) -> AdvantageInputs:
    """The estimator's view of all rows laid end to end.

    A total includes what the turns were paid, as the scorer has it. Two turns of a group have the same anchor
    where the model had been told the same just before: the observation, not the history, is the state. A
    critic's values and a divergence's penalties are for the caller to add.

    Args:
        rows: From `rows_of(trajectories)`.
        trajectories: The episodes, all of them scored.
        groups: The group of each.
        sets: The task set of each; one when left out.
        trains_heard: Whether the loss applies to observations as well.
    """
    turns = [(row.trajectory, turn) for row in rows for turn in row.turns]
    action_T = flags(row.action_mask for row in rows)
    return AdvantageInputs(
        rewards_N=torch.tensor([t.reward or 0.0 for t in trajectories], dtype=torch.float32),
        group_N=torch.tensor(groups, dtype=torch.long),
        trajectory_T=owners(rows),
        action_T=action_T,
        trained_T=action_T | flags(row.heard_mask for row in rows) if trains_heard else None,
        turn_T=_turns(rows),
        trajectory_U=torch.tensor([number for number, _ in turns], dtype=torch.long),
        rewards_U=torch.tensor([turn.reward or 0.0 for _, turn in turns], dtype=torch.float32),
        anchor_U=_anchors(rows, groups),
        truncated_N=torch.tensor([t.stop.is_truncated for t in trajectories], dtype=torch.bool),
        set_N=None if sets is None else torch.tensor(sets, dtype=torch.long),
    )


def _turns(rows: Sequence[Row]) -> Tensor:
    numbers: list[int] = []
    first = 0
    for row in rows:
        own = [first + i for i, turn in enumerate(row.turns) for _ in turn.tokens]
        said = iter(own)
        numbers += [next(said) if is_action else -1 for is_action in row.action_mask]
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


def batches_of(rows: Sequence[Row], budget: int) -> Iterator[list[int]]:
    """Row numbers in micro-batches of at most `budget` tokens; a longer row travels alone.

    Longest first, each into the fullest micro-batch that still takes it: few of them, evenly filled, and
    rows of like length together, which is what attention over packed rows likes best.
    """
    batches: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(rows)), key=lambda i: -len(rows[i].tokens)):
        size = len(rows[index].tokens)
        fits = [b for b, left in enumerate(room) if left >= size]
        if fits:
            best = min(fits, key=lambda b: room[b])
            batches[best].append(index)
            room[best] -= size
        else:
            batches.append([index])
            room.append(budget - size)
    yield from batches


@dataclass(frozen=True, slots=True)
class Laid:
    """Some of the rows end to end, and where their tokens lie among those of all rows."""

    lengths: list[int]
    tokens_T: Tensor
    own_T: Tensor

    def to(self, device: torch.device) -> Laid:
        """The same with its tokens on a device; where they lie is asked on the host."""
        return replace(self, tokens_T=moved(self.tokens_T, device))

    def halves(self) -> tuple[Laid, Laid]:
        """Two parts of whole rows, of about as many tokens each."""
        row, place = middle(self.lengths)
        return (
            Laid(self.lengths[:row], self.tokens_T[:place], self.own_T[:place]),
            Laid(self.lengths[row:], self.tokens_T[place:], self.own_T[place:]),
        )


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device. To a GPU it goes from pinned memory: any other copy waits until the GPU has caught up."""
    return _all_moved([tensor], device)[0]


def _all_moved(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The same for several, in one copy."""
    if device.type != "cuda" or any(tensor.device.type != "cpu" for tensor in tensors):
        return [tensor.to(device) for tensor in tensors]
    return sent([tensor.numpy() for tensor in tensors], device)


def picked(values_T: Tensor, place_A: Tensor) -> Tensor:
    """values_T[place_A], on the host; half precision becomes float32."""
    values_T = values_T.detach()
    if values_T.dtype in (
        torch.bfloat16,
        torch.float16,
    ):  # numpy knows one of them, a recipe's author both
        values_T = values_T.float()
    return torch.from_numpy(values_T.numpy()[place_A.numpy()])


def middle(lengths: Sequence[int]) -> tuple[int, int]:
    """(rows, tokens) of the first of two halves: at least a row each, and as even as whole rows allow."""
    if len(lengths) < 2:
        raise ValueError("a single row cannot be halved")
    ends = list(accumulate(lengths))
    row = min(range(1, len(lengths)), key=lambda i: abs(2 * ends[i - 1] - ends[-1]))
    return row, ends[row - 1]


def laid(rows: Sequence[Row], numbers: Sequence[int], budget: int) -> Iterator[Laid]:
    """The rows of these numbers in micro-batches."""
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + len(row.tokens))
    for batch in batches_of([rows[i] for i in numbers], budget):
        chosen = [numbers[i] for i in batch]
        yield Laid(
            lengths=[len(rows[i].tokens) for i in chosen],
            tokens_T=end_to_end([rows[i].tokens for i in chosen], np.int64),
            own_T=torch.from_numpy(
                np.concatenate([np.arange(starts[i], starts[i + 1]) for i in chosen])
            ),
        )


@dataclass(frozen=True, slots=True)
class Pack:
    """Rows end to end: R rows, T tokens, A of them trained.

    `action_A` holds the places of the trained tokens; each was predicted from the place before it. They are
    the actions, unless a recipe trains on observations as well.
    """

    lengths: list[int]
    tokens_T: Tensor
    action_A: Tensor
    old_logprobs_A: Tensor
    """Under the weights at the start of the step: where ratios start from."""
    behaviour_A: Tensor
    """As the engine reported them when it sampled."""
    advantages_A: Tensor
    weights_A: Tensor
    row_A: Tensor
    """The row in which each trained token lies."""

    def to(self, device: torch.device) -> Pack:
        names, tensors = zip(*self._tensors(), strict=True)
        there: dict[str, Any] = dict(zip(names, _all_moved(tensors, device), strict=True))
        return replace(self, **there)

    def halves(self) -> tuple[Pack, Pack]:
        """Two packs of whole rows, of about as many tokens each."""
        row, place = middle(self.lengths)
        trained = int((self.action_A < place).sum())
        along_A = {name: tensor for name, tensor in self._tensors() if name != "tokens_T"}
        first: dict[str, Any] = {name: tensor[:trained] for name, tensor in along_A.items()}
        second: dict[str, Any] = {name: tensor[trained:] for name, tensor in along_A.items()}
        second["action_A"] = second["action_A"] - place
        second["row_A"] = second["row_A"] - row
        return (
            replace(self, lengths=self.lengths[:row], tokens_T=self.tokens_T[:place], **first),
            replace(self, lengths=self.lengths[row:], tokens_T=self.tokens_T[place:], **second),
        )

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        return ((f.name, getattr(self, f.name)) for f in fields(self) if f.name != "lengths")

    @property
    def actions(self) -> Tensor:
        """The trained tokens themselves."""
        return self.tokens_T[self.action_A]


@dataclass(frozen=True, slots=True)
class Columns:
    """What is known about every token of all rows."""

    trained_T: Tensor
    behaviour_T: Tensor
    old_T: Tensor
    advantages_T: Tensor
    weights_T: Tensor

    @classmethod
    def of(cls, rows: Sequence[Row], advantages_T: Tensor, weights_T: Tensor) -> Columns:
        """The usual ones: the actions are trained, and the engine's logprobs are the old ones."""
        sampled_T = engine_logprobs(rows)
        said_T = flags(row.action_mask for row in rows)
        return cls(said_T, sampled_T, sampled_T, advantages_T, weights_T)


def packs_of(
    rows: Sequence[Row], columns: Columns, budget: int, numbers: Sequence[int] | None = None
) -> Iterator[Pack]:
    """These rows (all when left out) as packs; a row without a trained token is left out."""
    lengths = [len(row.tokens) for row in rows]
    ends = list(accumulate(lengths, initial=0))
    trains = [bool(columns.trained_T.numpy()[start:stop].any()) for start, stop in pairwise(ends)]
    wanted = range(len(rows)) if numbers is None else numbers
    for part in laid(rows, [i for i in wanted if trains[i]], budget):
        mask_T = picked(columns.trained_T, part.own_T)
        action_A = mask_T.nonzero().squeeze(1)
        own_A = picked(part.own_T, action_A)
        row_T = torch.from_numpy(np.repeat(np.arange(len(part.lengths)), part.lengths))
        yield Pack(
            lengths=part.lengths,
            tokens_T=part.tokens_T,
            action_A=action_A,
            old_logprobs_A=picked(columns.old_T, own_A),
            behaviour_A=picked(columns.behaviour_T, own_A),
            advantages_A=picked(columns.advantages_T, own_A),
            weights_A=picked(columns.weights_T, own_A),
            row_A=picked(row_T, action_A),
        )
