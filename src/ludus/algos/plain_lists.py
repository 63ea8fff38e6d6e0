"""Batches from plain lists: for tests, examples and experiments without a trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ludus.algos.advantage_inputs import AdvantageInputs


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """The token counts of one turn, and its reward, which is part of the episode's total."""

    action: int
    observation: int = 0
    reward: float = 0.0
    anchor: int = -1


@dataclass(frozen=True, slots=True)
class Attempt:
    """One episode: its total reward, its group, and how its tokens lie."""

    reward: float
    turns: Sequence[TurnTokens]
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
        """The turn of each action token, counted within the attempt; -1 for prompt and observation tokens."""
        tokens, number = [-1] * self.prompt, 0
        for turn in self.turns:
            tokens += [number] * turn.action + [-1] * turn.observation
            number += bool(turn.action)
        return tokens

    @property
    def acted(self) -> list[TurnTokens]:
        """The turns that have action tokens; the rewards of the others land on the last token."""
        return [turn for turn in self.turns if turn.action]


def inputs_from(attempts: Sequence[Attempt], dtype: torch.dtype = torch.float64) -> AdvantageInputs:
    """These attempts as a batch, laid end to end in the order given."""
    turns = [(number, turn) for number, attempt in enumerate(attempts) for turn in attempt.acted]
    tokens: list[tuple[int, int]] = []
    first = 0
    for number, attempt in enumerate(attempts):
        tokens += [(number, t if t < 0 else t + first) for t in attempt.turn_of_token]
        first += len(attempt.acted)

    def whole(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long)

    def real(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    turn_T = whole([turn for _, turn in tokens])
    has_values = not attempts or any(attempt.values for attempt in attempts)
    has_penalties = any(attempt.penalties for attempt in attempts)
    return AdvantageInputs(
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
