"""Limits on one episode, and the error of what goes beyond them."""

from __future__ import annotations

from pydantic import Field

from ludus.core.config import Config
from ludus.core.failures import LudusError
from ludus.core.trajectory import StopReason


class BudgetUsedUp(LudusError):
    """The episode has no turns or tokens left for another action; `stop` is the reason for its end."""

    def __init__(self, message: str, stop: StopReason) -> None:
        super().__init__(message)
        self.stop = stop


class Budgets(Config):
    """Limits on one episode."""

    max_turns: int = Field(default=8, ge=1)
    """Actions the model may take."""
    max_turn_tokens: int = Field(default=512, ge=1)
    """Tokens of one action; an action cut here that holds no complete call ends the episode."""
    max_observation_tokens: int = Field(default=1024, ge=16)
    """Tokens of one tool result; a longer one is cut in the middle, and says so."""
    max_tokens: int = Field(default=8192, ge=2)
    """Tokens of the whole episode, the prompt included."""
    max_calls: int = Field(default=16, ge=1)
    """Tool calls in one action; those beyond are refused with an observation."""
    max_seconds: float = Field(default=600.0, gt=0)
    """Seconds of wall time; time in queues (for an environment, the engine, a tool's place) is left out, the
    run of a tool is not. An episode over it is an infrastructure failure, not the model's fault."""
    remind: bool = False
    """Whether each observation ends with how many turns are left."""

    def reminder(self, turns_taken: int) -> str:
        """The text that tells the model how many turns are left."""
        left = self.max_turns - turns_taken
        return f"[{left} turn{'' if left == 1 else 's'} left]"

    def check_turns(self, used: int) -> None:
        """Raise `BudgetUsedUp` where no further turn may begin."""
        if used >= self.max_turns:
            message = f"the episode has used up its {self.max_turns} turns (budgets.max_turns)"
            raise BudgetUsedUp(message, StopReason.MAX_TURNS)

    def check_length(self, fewest: int) -> None:
        """Refuse a conversation that cannot fit before it is encoded: encoding takes seconds."""
        if fewest > self.max_tokens:
            raise self._too_long(f"at least {fewest}")

    def turn_room(self, context: int) -> int:
        """How many tokens an action may have after a context of this length; `BudgetUsedUp` if none."""
        if context >= self.max_tokens:
            raise self._too_long(str(context))
        return min(self.max_tokens - context, self.max_turn_tokens)

    def _too_long(self, count: str) -> BudgetUsedUp:
        return BudgetUsedUp(
            f"the conversation has {count} tokens, and a sequence may have {self.max_tokens} "
            "(budgets.max_tokens)",
            StopReason.MAX_TOKENS,
        )
