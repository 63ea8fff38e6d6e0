"""The choices a recording offers."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

from ludus.core.failures import ConfigError

Choice = TypeVar("Choice", bound=StrEnum)


class Mode(StrEnum):
    """What to do with a call."""

    RECORD = "record"
    """Call, and write; a record that is there already is replaced."""
    REPLAY = "replay"
    """Never call; what is not recorded is a failure of ours."""
    REPLAY_OR_CALL = "replay_or_call"
    """Replay what is recorded; call and write the rest."""


class OnDivergence(StrEnum):
    """What to do when the real tool, catching up, answers differently from the recording."""

    FAIL = "fail"
    """The episode fails, and leaves the loss and the baseline: the model has read what is not so."""
    CONTINUE = "continue"
    """Warn, go on with the real tool as it is, and write nothing more in this episode."""


class Scope(StrEnum):
    """Who shares the records of stateful tools."""

    TASK = "task"
    """All attempts at a task, as long as their histories agree."""
    EPISODE = "episode"
    """Nobody: each attempt has records of its own, as tools with random results need."""


def chosen(kind: type[Choice], value: str, option: str) -> Choice:
    """The choice that `value` names; `ConfigError` with all of them when it names none."""
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(one.value for one in kind)
        raise ConfigError(f"{option} is one of {known}; not {value!r}") from None
