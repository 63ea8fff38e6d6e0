"""Messages as a chat template gets them: pieces of text, trusted or content."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ludus.core.messages import Role


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a message. Special tokens are recognised in trusted pieces only."""

    text: str
    trusted: bool = False
    identifier: bool = False
    """The id of a call: it may be replaced by another one, but not by a longer one."""
    is_image: bool = False
    """A picture, for a template that is given pictures as parts of their own and writes their placeholders."""


@dataclass(frozen=True, slots=True)
class ChatEntry:
    """One message of the conversation that a chat template renders."""

    role: Role
    pieces: tuple[Piece, ...]
    name: str | None = None
    tool_call_id: str | None = None

    def all_pieces(self) -> list[Piece]:
        """What a template is given for this message: its content, and the names that come with it."""
        named = [] if self.name is None else [Piece(self.name)]
        identified = [] if self.tool_call_id is None else [Piece(self.tool_call_id, identifier=True)]
        return [*self.pieces, *named, *identified]


def split_at_marks(content: str, marks: Sequence[str]) -> tuple[Piece, ...]:
    """`content` cut at its marks, which are trusted."""
    parts = re.split("(" + "|".join(re.escape(mark) for mark in marks) + ")", content)
    return tuple(Piece(part, trusted=index % 2 == 1) for index, part in enumerate(parts) if part)
