"""What can go wrong with the sandbox itself. What goes wrong inside it is an `Execution`."""

from __future__ import annotations

from ludus.core.failures import Boundary, ConfigError, InfraError, LudusError


class SandboxError(InfraError):
    """The sandbox could not do its work: our failure, never the model's."""

    def __init__(self, message: str, *, retriable: bool = True) -> None:
        super().__init__(Boundary.SANDBOX, message, retriable=retriable)


class SessionLost(SandboxError):
    """A session is gone with all its state, through no fault of the code in it; it cannot be retried."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retriable=False)


class SandboxUnavailable(ConfigError):
    """This machine allows too little isolation for untrusted code."""


class CannotFork(LudusError):
    """The session's state cannot be had twice: it has threads, child processes, open pipes."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"this session cannot be forked now: {reason}")
        self.reason = reason
