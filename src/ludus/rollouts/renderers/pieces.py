"""Messages as a template takes them, cut into what we wrote ourselves and what somebody else did."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ludus.core.messages import Message, Role
from ludus.rollouts.formats.base import THINK, ActionFormat
from ludus.rollouts.renderers.abilities import Abilities


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of content. Only in trusted ones may special tokens be recognised."""

    text: str
    trusted: bool = False
    identifier: bool = False
    """The id of a call: it may be exchanged for another, but not for a longer one."""


@dataclass(frozen=True, slots=True)
class Entry:
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


def entries(messages: Sequence[Message], format: ActionFormat, abilities: Abilities) -> list[Entry]:
    """What the template is given for `messages`, in the roles that it knows."""
    made = [_entry(message, format, abilities) for message in messages]
    return _merged(made) if abilities.alternates else made


def described(
    made: Sequence[Entry], description: str, format: ActionFormat, abilities: Abilities
) -> list[Entry]:
    """The same conversation with `description` in the system prompt, or before the first message.

    It names tools that others made: only the format's own marks are special in it.
    """
    if not description:
        return list(made)
    frame = [text.strip() for text in format.result_frame if text.strip()]
    text = marked(description, (*THINK, *format.marks, *frame))
    home: Role = "system" if abilities.system else "user"
    if not made or made[0].role != home:
        return [Entry(home, text), *made]
    gap = Piece("\n\n", trusted=True)
    first = made[0].pieces
    joined = (*first, gap, *text) if home == "system" else (*text, gap, *first)
    return [replace(made[0], pieces=joined), *made[1:]]


def _entry(message: Message, format: ActionFormat, abilities: Abilities) -> Entry:
    role, content = message.role, message.content
    if role == "assistant":
        return Entry(role, marked(action_text(message, format), (*THINK, *format.marks)))
    if role == "tool" and (format.result_role == "user" or not abilities.tool_role):
        # The role says that this is a result. What a user wrote says nothing, whatever it looks like.
        opening, closing = format.result_frame
        return Entry("user", (Piece(opening, True), Piece(content), Piece(closing, True)))
    if role == "system" and not abilities.system:
        role = "user"
    return Entry(role, (Piece(content),), message.name, message.tool_call_id)


def action_text(message: Message, format: ActionFormat) -> str:
    """What the assistant said, calls included: as it wrote it, or as the format would write it."""
    if message.tool_calls and not format.parse(message.content).calls:
        return format.render_action(message.content, message.tool_calls)
    return message.content


def marked(content: str, marks: Sequence[str]) -> tuple[Piece, ...]:
    """`content` cut at its marks, which are trusted."""
    parts = re.split("(" + "|".join(re.escape(mark) for mark in marks) + ")", content)
    return tuple(Piece(part, trusted=index % 2 == 1) for index, part in enumerate(parts) if part)


def _merged(made: Sequence[Entry]) -> list[Entry]:
    """Neighbouring messages of a user joined, for templates that insist on turns."""
    result: list[Entry] = []
    for entry in made:
        if result and entry.role == "user" == result[-1].role:
            joined = (*result[-1].pieces, Piece("\n\n", True), *entry.pieces)
            result[-1] = replace(result[-1], pieces=joined)
        else:
            result.append(entry)
    return result
