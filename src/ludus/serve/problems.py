"""Why a request has no result: one exception, which any answer can be made of."""

from __future__ import annotations

from ludus.core.failures import Boundary, InfraError, LudusError
from ludus.core.messages import Json
from ludus.tools.hosting import EpisodeLost, OutcomeUnknown
from ludus.tools.wire import ErrorKind


class Problem(LudusError):
    """An answer that is an error. `started` says whether the tool may have run."""

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        started: bool = False,
        retry_after: float | None = None,
        boundary: Boundary | None = None,
        attempts: int = 1,
        retriable: bool = False,
        replay: bool = False,
    ) -> None:
        super().__init__(message)
        self.kind, self.started, self.retry_after = kind, started, retry_after
        self.boundary, self.attempts = boundary, attempts
        self.retriable, self.replay = retriable, replay

    @classmethod
    def of(cls, error: InfraError) -> Problem:
        """A failure of ours that a host or a tool raised."""
        kind = ErrorKind.FAILED
        if isinstance(error, EpisodeLost):
            kind = ErrorKind.SESSION_LOST
        elif isinstance(error, OutcomeUnknown):
            kind = ErrorKind.UNKNOWN_OUTCOME
        return cls(
            kind,
            str(error),
            started=True,
            boundary=error.boundary,
            attempts=error.attempts,
            retriable=error.retriable,
            replay=error.replay,
        )

    def body(self) -> Json:
        """As `ErrorBody` has it."""
        return {
            "kind": self.kind.value,
            "message": str(self),
            "started": self.started,
            "retry_after": self.retry_after,
            "boundary": None if self.boundary is None else self.boundary.value,
            "attempts": self.attempts,
            "retriable": self.retriable,
            "replay": self.replay,
        }
