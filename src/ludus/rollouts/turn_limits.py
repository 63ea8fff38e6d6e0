"""How much a program may sample in an episode."""

from __future__ import annotations

from dataclasses import dataclass

from ludus.core.failures import LudusError
from ludus.core.trajectory import StopReason


class BudgetUsedUp(LudusError):
    """The episode has no turns or tokens left for another reply."""

    def __init__(self, message: str, stop: StopReason) -> None:
        super().__init__(message)
        self.stop = stop


@dataclass(frozen=True, slots=True)
class TurnLimits:
    """Turns in all, tokens of a turn, tokens of a sequence. What goes beyond raises `BudgetUsedUp`."""

    turns: int
    turn_tokens: int
    tokens: int

    def check_turns(self, used: int) -> None:
        """Whether another turn may begin."""
        if used >= self.turns:
            message = f"the episode has used up its {self.turns} turns (budgets.max_turns)"
            raise BudgetUsedUp(message, StopReason.MAX_TURNS)

    def check_length(self, fewest: int) -> None:
        """Refuse what cannot fit before it is encoded: that takes seconds, in which no episode goes on."""
        if fewest > self.tokens:
            raise self._too_long(f"at least {fewest}")

    def turn_room(self, context: int) -> int:
        """How many tokens a turn may have after a context of so many."""
        if context >= self.tokens:
            raise self._too_long(str(context))
        return min(self.tokens - context, self.turn_tokens)

    def _too_long(self, count: str) -> BudgetUsedUp:
        return BudgetUsedUp(
            f"the conversation has {count} tokens, and a sequence may have {self.tokens} (budgets.max_tokens)",
            StopReason.MAX_TOKENS,
        )
