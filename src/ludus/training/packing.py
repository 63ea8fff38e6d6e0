"""Trajectories to training rows to packed micro-batches. No padding: rows lie end to end.

A row is one sequence of a trajectory, with the prefix it shares with its ancestors in front. The prefix is
context: its actions are trained where they were first said, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ludus.algos import Credit
from ludus.core.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence to train on, and the trajectory (by number) it belongs to."""

    tokens: list[int]
    action_mask: list[bool]
    logprobs: list[float]
    trajectory: int


def rows_of(trajectories: Sequence[Trajectory]) -> list[Row]:
    """The rows of these trajectories, in order; a sequence without an action has nothing to train."""
    rows: list[Row] = []
    for number, trajectory in enumerate(trajectories):
        for index, sequence in enumerate(trajectory.sequences):
            mask = sequence.action_mask
            if not any(mask):
                continue
            prefix = trajectory.prefix_tokens(index)
            rows.append(
                Row(
                    tokens=prefix + sequence.tokens,
                    action_mask=[False] * len(prefix) + mask,
                    logprobs=[0.0] * len(prefix) + sequence.logprobs,
                    trajectory=number,
                )
            )
            if rows[-1].action_mask[0]:
                raise ValueError("a row starts with an action: the model must have read something first")
    return rows


@dataclass(frozen=True, slots=True)
class Pack:
    """Rows end to end: R rows, T tokens, A of them actions.

    `action_A` holds the places of the action tokens; each was predicted from the place before it.
    """

    lengths: list[int]
    tokens_T: Tensor
    action_A: Tensor
    old_logprobs_A: Tensor
    advantages_A: Tensor
    weights_A: Tensor

    def to(self, device: torch.device) -> Pack:
        tensors = {f.name: getattr(self, f.name).to(device) for f in fields(self) if f.name != "lengths"}
        return replace(self, **tensors)

    @property
    def actions(self) -> Tensor:
        """The action tokens themselves."""
        return self.tokens_T[self.action_A]


def credit_of(rows: Sequence[Row], rewards: Sequence[float], groups: Sequence[int]) -> Credit:
    """The estimator's view of all rows laid end to end, in the order they are given."""
    return Credit(
        rewards_N=torch.tensor(rewards, dtype=torch.float32),
        group_N=torch.tensor(groups, dtype=torch.long),
        trajectory_T=torch.tensor(
            [row.trajectory for row in rows for _ in row.tokens], dtype=torch.long
        ),
        action_T=torch.tensor([said for row in rows for said in row.action_mask], dtype=torch.bool),
    )


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


def pack(rows: Sequence[Row], chosen: Sequence[int], advantages_T: Tensor, weights_T: Tensor) -> Pack:
    """The chosen rows as one pack; `advantages_T` and `weights_T` lie over all rows, as in `credit_of`."""
    lengths = torch.tensor([len(row.tokens) for row in rows])
    starts = torch.cumsum(lengths, 0) - lengths
    picked = [rows[i] for i in chosen]
    own = torch.cat([torch.arange(int(starts[i]), int(starts[i] + lengths[i])) for i in chosen])
    mask_T = torch.tensor([said for row in picked for said in row.action_mask], dtype=torch.bool)
    logprobs_T = torch.tensor([value for row in picked for value in row.logprobs], dtype=torch.float32)
    return Pack(
        lengths=[len(row.tokens) for row in picked],
        tokens_T=torch.tensor([token for row in picked for token in row.tokens], dtype=torch.long),
        action_A=mask_T.nonzero().squeeze(1),
        old_logprobs_A=logprobs_T[mask_T],
        advantages_A=advantages_T[own][mask_T],
        weights_A=weights_T[own][mask_T],
    )
