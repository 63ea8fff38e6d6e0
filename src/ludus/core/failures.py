"""Whose fault was it? Every error in Ludus answers that question by its type.

A *fault* is the model's: a malformed call, an unknown tool, arguments that do not fit. It becomes an
observation the model can learn from, and the episode goes on.

A *failure* is infrastructure's: a server is down, a pool is exhausted, a deadline passed. It is retried; if it
persists, the episode leaves both the loss and the group's baseline, and is counted by the boundary it
crossed. A failure is never turned into a reward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from ludus.core.user_code import error_with_location


class Fault(StrEnum):
    """Kinds of mistakes that a model makes in a call. Each is answered by an observation."""

    MALFORMED_CALL = "malformed_call"
    UNKNOWN_TOOL = "unknown_tool"
    BAD_ARGUMENTS = "bad_arguments"
    TOOL_RAISED = "tool_raised"
    TOOL_TIMEOUT = "tool_timeout"
    LIMIT = "limit"


class Boundary(StrEnum):
    """The component whose failure ended an episode."""

    ENGINE = "engine"
    TOOL = "tool"
    ENV = "env"
    POOL = "pool"
    SANDBOX = "sandbox"
    SERVER = "server"
    REWARD = "reward"
    CHAT = "chat"
    AGENT = "agent"
    DEADLINE = "deadline"


@dataclass(frozen=True, slots=True)
class Failure:
    """An infrastructure failure, recorded once, as data."""

    boundary: Boundary
    kind: str
    message: str
    attempts: int = 1

    @classmethod
    def of(cls, error: BaseException, boundary: Boundary, attempts: int = 1) -> Failure:
        """The record of `error`; an `InfraError` keeps the boundary it already names."""
        if not isinstance(error, InfraError):
            return cls(boundary, type(error).__name__, error_with_location(error), attempts)
        cause: BaseException = error
        while isinstance(cause, InfraError) and cause.kind is None and cause.__cause__ is not None:
            cause = cause.__cause__
        kind = cause.kind if isinstance(cause, InfraError) else None
        kind = kind or type(cause).__name__
        return cls(error.boundary, kind, str(error) or kind, max(attempts, error.attempts))


def most_frequent_failure(failures: Iterable[Failure]) -> str:
    """Summary of many failures: the most frequent one and its count."""
    counted = Counter((failure.boundary, failure.message) for failure in failures)
    (boundary, message), count = counted.most_common(1)[0]
    return f"Most often ({count} times), at the boundary '{boundary}': {message}"


DISTRIBUTION = "ludus-rl"
"""What pip installs; the import and the command are called `ludus`."""
NOTABLE_SHARE = 0.05
"""From this share of lost episodes on, people are warned."""


def failed_episodes_warning(failures: Sequence[Failure], played: int, which: str) -> str | None:
    """A warning with the number of lost `which` episodes and the reason; None below `NOTABLE_SHARE`."""
    if not failures or len(failures) < NOTABLE_SHARE * played:
        return None
    return failed_episodes_text(len(failures), played, " and were not scored", failures, which)


def failed_episodes_text(
    failed: int, played: int, then: str, causes: Sequence[Failure], which: str = ""
) -> str:
    """How many `which` episodes were lost, what follows from it (`then`), and the most frequent cause."""
    why = f" {most_frequent_failure(causes)}" if causes else ""
    return (
        f"{failed} of {played} {which}{' ' if which else ''}episodes ({failed / played:.1%}) were lost to "
        f"infrastructure failures{then}.{why}"
    )


def not_there(path: str | Path, what: str = "file", *, beside_recipe: bool = True) -> str:
    """Error text for a missing file: its full path, and the folder that a relative path started from."""
    if Path(path).is_absolute():
        return f"there is no {what} {path}"
    first = "; a path in a recipe is looked for beside the recipe first" if beside_recipe else ""
    return f"there is no {what} {Path(path).absolute()} ({str(path)!r} in the working directory{first})"


class LudusError(Exception):
    """The root of everything Ludus raises on purpose. It pickles with its fields."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (type(self), *self.args), vars(self)


def _unpickled(kind: type[LudusError], *args: Any) -> LudusError:
    return kind.__new__(kind, *args)


class ConfigError(LudusError):
    """A recipe, an option or an argument is wrong; the message names the key and the fix."""


def install_command(extra: str = "") -> str:
    """The command that installs Ludus, with what an extra brings. `ludus` on PyPI is another project."""
    return f"pip install '{DISTRIBUTION}[{extra}]'" if extra else f"pip install {DISTRIBUTION}"


def install_hint(extra: str) -> str:
    """The command that installs an extra, and the one for a clone."""
    return (
        f"{install_command(extra)} (in a clone of the repository, .venv/bin/pip install -e '.[{extra}]')"
    )


class MissingExtraError(LudusError):
    """An optional dependency is needed; `apart` is the option of pip with which it is installed by itself."""

    def __init__(self, package: str, extra: str, purpose: str, *, apart: str = "") -> None:
        then = f", then pip install {apart} {package}" if apart else ""
        super().__init__(f"{purpose} needs the package '{package}': {install_hint(extra)}{then}")


class ToolFault(LudusError):
    """The model's fault. A tool may raise it to say precisely what the model did wrong."""

    def __init__(self, message: str, fault: Fault = Fault.TOOL_RAISED) -> None:
        super().__init__(message)
        self.fault = fault


class InfraError(LudusError):
    """An infrastructure failure, named by the boundary it crossed.

    `retriable` says whether to try the same thing again. `replay` says whether to play the whole episode
    again where that cannot help: what is lost is its state, such as a session. It is `retriable` unless given.
    `kind` names the error behind it where there is none to be its cause: it was raised in another process.
    """

    def __init__(
        self,
        boundary: Boundary,
        message: str,
        *,
        attempts: int = 1,
        retriable: bool = True,
        replay: bool | None = None,
        kind: str | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.boundary = boundary
        self.attempts = attempts
        self.retriable = retriable
        self.replay = retriable if replay is None else replay


class EngineError(InfraError):
    """The engine could not serve a request."""

    def __init__(self, message: str, *, retriable: bool = True) -> None:
        super().__init__(Boundary.ENGINE, message, retriable=retriable)


class CannotFork(LudusError):
    """A state cannot be duplicated: a session that has threads, an environment that has no snapshot."""

    def __init__(self, reason: str, what: str = "this session") -> None:
        super().__init__(f"{what} cannot be forked now: {reason}")
        self.reason = reason


class Aborted(LudusError):
    """The work was cancelled on purpose (shutdown, too stale): neither a fault nor a failure."""
