"""Escaping content by separators, for chat templates that change it: each way is stronger than the last."""

from __future__ import annotations

import re
from collections.abc import Callable

from ludus.core.messages import ToolSpec
from ludus.core.tokenizer import Tokenizer
from ludus.rollouts.chat_entries import Piece
from ludus.rollouts.placeholders import Escape, each_text, same_length
from ludus.rollouts.tokenizers import ControlTexts

SEPARATORS = (" ", ".", "_")
"""The first disturbs least. A template that removes spaces seldom removes the others."""
_PLAIN_IDENTIFIER = re.compile(r"[A-Za-z0-9_-]+")


class Escaper:
    """Writes content so that the tokenizer makes no special token of it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._controls = ControlTexts(tokenizer.controls)
        self._ids = frozenset(tokenizer.controls.values())

    def escapes(self) -> list[Escape]:
        """From the mildest: inside control texts only; after all that could begin one; everywhere."""
        opened = [_with(separator, self._controls.opened) for separator in SEPARATORS]
        spread = [_with(separator, _spread) for separator in SEPARATORS]
        return [self.harmless, *opened, *spread]

    def harmless(self, text: str) -> str:
        """`text` that gives no special token by itself, after any normalisation: spaced out if need be."""
        broken = self._controls.broken(text)
        return broken if self._ids.isdisjoint(self._tokenizer.encode(broken)) else " ".join(broken)

    def piece(self, piece: Piece, escape: Escape) -> str:
        """What a template is given for `piece`. An identifier that could do harm gets another name."""
        if piece.trusted:
            return piece.text
        if not piece.identifier:
            return escape(piece.text)
        kept = escape == self.harmless and _PLAIN_IDENTIFIER.fullmatch(piece.text)
        return piece.text if kept else same_length(piece.text, len(piece.text))

    def tool(self, tool: ToolSpec, escape: Escape) -> ToolSpec:
        """The same tool. Its name is kept as far as it can be: the model has to call it by that."""
        return ToolSpec(
            self.harmless(tool.name), escape(tool.description), each_text(tool.parameters, escape)
        )


def _with(separator: str, separate: Callable[[str, str], str]) -> Escape:
    return lambda text: separate(text, separator)


def _spread(text: str, separator: str) -> str:
    """A separator around every character."""
    return f"{separator}{separator.join(text)}{separator}" if text.strip() else text
