"""What a short name in a list of tools stands for: options, and how tools are made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ludus.core.config import Config
from ludus.tools.tool import Tool

if TYPE_CHECKING:
    from ludus.tools.library.sessions import EpisodeSessions


def _nothing(options: Any) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class Kit:
    """Tools that belong together and work in an episode's sandbox session."""

    options: type[Config]
    """The model of the table that a recipe may give."""
    build: Callable[[Any, EpisodeSessions], Sequence[Tool]]
    """Tools of checked options."""
    readable: Callable[[Any], tuple[str, ...]] = _nothing
    """The files that the sandbox must be able to see."""
