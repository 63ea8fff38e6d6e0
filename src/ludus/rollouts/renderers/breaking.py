"""Ways to break content up, for templates that change it; each is harder than the one before."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ludus.core.messages import ToolSpec
from ludus.core.tokenizer import Tokenizer
from ludus.rollouts.controls import ControlTexts
from ludus.rollouts.renderers.pieces import Piece
from ludus.rollouts.renderers.placeholders import SCHEMA_WORDS, same_length

Way = Callable[[str], str]

SEPARATORS = (" ", ".", "_")
"""The first is the least disturbing. A template that takes spaces out seldom takes out the others."""
_PLAIN_IDENTIFIER = re.compile(r"[A-Za-z0-9_-]+")


class Breaker:
    """Knows what would be special to a tokenizer, and how to write it so that it is not."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._controls = ControlTexts(tokenizer.controls)
        self._ids = frozenset(tokenizer.controls.values())

    def ways(self) -> list[Way]:
        """From the mildest: inside control texts only; after all that could begin one; everywhere."""
        opened = [_with(separator, self._controls.opened) for separator in SEPARATORS]
        spread = [_with(separator, _spread) for separator in SEPARATORS]
        return [self.harmless, *opened, *spread]

    def harmless(self, text: str) -> str:
        """`text` that is not special by itself, in the eyes of any normaliser: spaced out if need be."""
        broken = self._controls.broken(text)
        return broken if self._ids.isdisjoint(self._tokenizer.encode(broken)) else " ".join(broken)

    def piece(self, piece: Piece, way: Way) -> str:
        """What a template is given for `piece`. An identifier that could do harm gets another name."""
        if piece.trusted:
            return piece.text
        if not piece.identifier:
            return way(piece.text)
        kept = way == self.harmless and _PLAIN_IDENTIFIER.fullmatch(piece.text)
        return piece.text if kept else same_length(piece.text, len(piece.text))

    def tool(self, tool: ToolSpec, way: Way) -> ToolSpec:
        """The same tool. Its name is kept as far as it can be: the model has to call it by that."""
        return ToolSpec(self.harmless(tool.name), way(tool.description), _each(tool.parameters, way))


def _with(separator: str, break_up: Callable[[str, str], str]) -> Way:
    return lambda text: break_up(text, separator)


def _spread(text: str, separator: str) -> str:
    """A separator around every character."""
    return f"{separator}{separator.join(text)}{separator}" if text.strip() else text


def _each(value: Any, way: Way) -> Any:
    """Every text of a JSON value, keys included; not the schema's own words, which templates look for."""
    if isinstance(value, str):
        return value if value in SCHEMA_WORDS else way(value)
    if isinstance(value, dict):
        return {_each(key, way): _each(item, way) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_each(item, way) for item in value]
    return value
