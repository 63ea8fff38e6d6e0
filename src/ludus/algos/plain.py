"""Batches from plain lists: for tests, examples and experiments without a trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ludus.algos.credit import Credit


@dataclass(frozen=True, slots=True)
class Turn:
    """So many tokens said, so many heard in answer, and what the turn was paid, out of the total."""

    said: int
    heard: int = 0
    reward: float = 0.0
    anchor: int = -1


@dataclass(frozen=True, slots=True)
class Attempt:
    """One episode: its total reward, its group, and how its tokens lie."""

    reward: float
    turns: Sequence[Turn]
    group: int = 0
    prompt: int = 1
    """Tokens before the first turn."""
    truncated: bool = False
    set: int = 0
    values: Sequence[float] = field(default=())
    """One for each token; left out where there is no critic."""
    penalties: Sequence[float] = field(default=())
    """One for each token; left out where there are none."""

    @property
    def turn_of_token(self) -> list[int]:
        """The turn in which each token was said, counted within the attempt; -1 where it was not said."""
        tokens, number = [-1] * self.prompt, 0
        for turn in self.turns:
            tokens += [number] * turn.said + [-1] * turn.heard
            number += bool(turn.said)
        return tokens

    @property
    def spoken(self) -> list[Turn]:
        """The turns in which something was said; what the others were paid is paid at the end."""
        return [turn for turn in self.turns if turn.said]


def credit_from(attempts: Sequence[Attempt], dtype: torch.dtype = torch.float64) -> Credit:
    """These attempts as a batch, laid end to end in the order given."""
    turns = [(number, turn) for number, attempt in enumerate(attempts) for turn in attempt.spoken]
    tokens: list[tuple[int, int]] = []
    first = 0
    for number, attempt in enumerate(attempts):
        tokens += [(number, t if t < 0 else t + first) for t in attempt.turn_of_token]
        first += len(attempt.spoken)

    def whole(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long)

    def real(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    turn_T = whole([turn for _, turn in tokens])
    has_values = not attempts or any(attempt.values for attempt in attempts)
    has_penalties = any(attempt.penalties for attempt in attempts)
    return Credit(
        rewards_N=real([attempt.reward for attempt in attempts]),
        group_N=whole([attempt.group for attempt in attempts]),
        trajectory_T=whole([number for number, _ in tokens]),
        action_T=turn_T >= 0,
        turn_T=turn_T,
        trajectory_U=whole([number for number, _ in turns]),
        rewards_U=real([turn.reward for _, turn in turns]),
        anchor_U=whole([turn.anchor for _, turn in turns]),
        truncated_N=torch.tensor([attempt.truncated for attempt in attempts], dtype=torch.bool),
        values_T=real([v for attempt in attempts for v in attempt.values]) if has_values else None,
        set_N=whole([attempt.set for attempt in attempts]),
        penalty_T=real([p for attempt in attempts for p in attempt.penalties])
        if has_penalties
        else None,
    )
