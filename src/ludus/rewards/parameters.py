"""What a user's function asks for: things of the episode by name, and options of its own.

A parameter is matched by its name alone. Keyword-only parameters with a default that are none of the
known names are the function's options, which a recipe may set.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from ludus.core.failures import ConfigError

SETTINGS = ("name", "weight", "timeout", "retries")

STRICTNESS = "strictness"
"""The option that a run may move while it trains, wherever a reward has it."""

current_strictness: ContextVar[float | None] = ContextVar("current_strictness", default=None)
"""What it is for the episode that is being scored; None leaves every reward with its own."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """The names a function is called with, and the names of its options."""

    wanted: frozenset[str]
    options: frozenset[str]

    @classmethod
    def of(cls, function: Callable[..., Any], known: Sequence[str]) -> Parameters:
        """Read the signature; a parameter that nobody can fill is refused here, not in training."""
        label = getattr(function, "__qualname__", None) or repr(function)
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{label} cannot be a reward: {error}") from error
        wanted: set[str] = set()
        options: set[str] = set()
        for name, parameter in signature.parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise ConfigError(f"{label} takes {parameter}; name its parameters instead")
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise ConfigError(f"{label}: {name!r} is positional-only, and is filled by name")
            if name in known:
                wanted.add(name)
            elif _is_option(parameter):
                options.add(name)
            else:
                raise ConfigError(_explanation(label, name, known))
        return cls(frozenset(wanted), frozenset(options))


def _is_option(parameter: inspect.Parameter) -> bool:
    if parameter.kind is not parameter.KEYWORD_ONLY or parameter.default is parameter.empty:
        return False
    if parameter.name in SETTINGS:
        raise ConfigError(f"an option cannot be called {parameter.name!r}: that is a setting")
    return True


def _explanation(label: str, name: str, known: Sequence[str]) -> str:
    return (
        f"{label} has a parameter {name!r} that nothing fills; known: {', '.join(known)}. "
        f"An option of its own is keyword-only and has a default: (..., *, {name}=...)"
    )
