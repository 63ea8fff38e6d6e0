"""How long to keep trying, and how long to pause in between."""

from __future__ import annotations

import asyncio
import random
import time

from ludus.core.failures import Boundary, InfraError

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 5.0
_FIRST_CONTACT_SECONDS = 10.0


class Contact:
    """Whether any server was ever reached; one that never was is more likely misspelt than restarting."""

    def __init__(self) -> None:
        self.was_made = False


class Patience:
    """One operation's attempts: exponential backoff with full jitter, within one deadline."""

    def __init__(
        self, seconds: float, unreachable_seconds: float, contact: Contact | None = None
    ) -> None:
        self._contact = contact or Contact()
        if not self._contact.was_made:
            unreachable_seconds = min(unreachable_seconds, _FIRST_CONTACT_SECONDS)
        self._seconds, self._unreachable_seconds = seconds, unreachable_seconds
        self._deadline = time.monotonic() + seconds
        self._unreachable_since: float | None = None
        self.attempts = 0

    @property
    def seconds_left(self) -> float:
        """Always a little, so that the last attempt is answered by the server and not by the clock."""
        return max(0.001, self._deadline - time.monotonic())

    @property
    def gave_up(self) -> bool:
        """Whether there is no time for another attempt."""
        now, since = time.monotonic(), self._unreachable_since
        return now >= self._deadline or (since is not None and now - since > self._unreachable_seconds)

    def reached(self) -> None:
        """A server answered, whatever it said."""
        self._contact.was_made = True
        self._unreachable_since = None

    def unreachable(self) -> None:
        """No server could be reached."""
        if self._unreachable_since is None:
            self._unreachable_since = time.monotonic()

    async def pause(self, problem: str, at_least: float = 0.0) -> None:
        """Wait before the next attempt, for as long as a server asked and some more; or give up."""
        if self.gave_up:
            message = f"no result from the tool server after {self.attempts} attempts: {problem}"
            if self._contact.was_made:
                raise InfraError(Boundary.SERVER, message, attempts=self.attempts)
            message += "; is the address right, and was it started (ludus serve tools ...)?"
            raise InfraError(Boundary.SERVER, message, attempts=self.attempts, retriable=False)
        longest = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(self.attempts, 20))
        delay = at_least + random.uniform(0.0, longest)
        await asyncio.sleep(min(delay, self.seconds_left))

    def too_late(self) -> InfraError:
        """The failure of an attempt that was not answered in time."""
        message = f"no answer from the tool server within {self._seconds:g} seconds"
        return InfraError(Boundary.SERVER, message, attempts=self.attempts)
