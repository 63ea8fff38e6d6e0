"""What can go wrong with the sandbox itself. What goes wrong inside it is an `Execution`."""

from __future__ import annotations

from ludus.core.failures import Boundary, ConfigError, InfraError, LudusError


class SandboxError(InfraError):
    """The sandbox could not do its work: our failure, never the model's."""

    def __init__(self, message: str, *, retriable: bool = True, replay: bool | None = None) -> None:
        super().__init__(Boundary.SANDBOX, message, retriable=retriable, replay=replay)


class SessionLost(SandboxError):
    """A session is gone with all its state, through no fault of the code in it: only a new start helps."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retriable=False, replay=True)


class SandboxUnavailable(ConfigError):
    """This machine allows too little isolation for untrusted code."""


class CannotFork(LudusError):
    """The session's state cannot be had twice: it has threads, child processes, open pipes."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"this session cannot be forked now: {reason}")
        self.reason = reason


class SessionEnded(LudusError):
    """The code in a session ended it or hung it, between two requests: the model's doing; its state is gone."""

    def __init__(self, message: str, *, hung: bool = False) -> None:
        super().__init__(message)
        self.hung = hung
        """Whether it had stopped answering, and was ended for that."""
