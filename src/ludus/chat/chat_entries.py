"""The messages that a chat template is given, in pieces of which each is trusted or not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ludus.core.messages import Json, Role, ToolCall


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a message. Special tokens are recognised in trusted pieces only."""

    text: str
    trusted: bool = False
    identifier: bool = False
    """The id of a call: it may be replaced by another one, but not by a longer one."""
    is_image: bool = False
    """An image, for a template that is given images as parts of their own and writes their placeholders."""


@dataclass(frozen=True, slots=True)
class CallData:
    """How a template takes calls and thoughts as data, where it needs more than the text of an action."""

    text_arguments: bool = False
    """Arguments are JSON in a string, rather than an object."""
    thought_key: str = ""
    """The key of a message's thought; without one it stands in `<think>` in the content."""
    one_call: bool = False
    """It writes the first call of a message, and leaves the others out."""


@dataclass(frozen=True, slots=True)
class ChatEntry:
    """One message of the conversation that a chat template renders."""

    role: Role
    pieces: tuple[Piece, ...]
    name: str | None = None
    tool_call_id: str | None = None
    calls: tuple[ToolCall, ...] = field(default=(), hash=False)
    thought: str = ""
    data: CallData | None = None
    """How `calls` and `thought` are given; None where they are part of the text."""
    is_stub: bool = False
    """Its arguments are our own words, which say where a call ends."""

    def all_pieces(self) -> list[Piece]:
        """The template's input for this message: its content, and what comes with it."""
        found: list[Piece] = []

        def note(piece: Piece) -> str:
            found.append(piece)
            return piece.text

        as_chat(self, note)
        return found


def split_at_marks(content: str, marks: Sequence[str]) -> tuple[Piece, ...]:
    """`content` cut at its marks, which are trusted."""
    parts = re.split("(" + "|".join(re.escape(mark) for mark in marks) + ")", content)
    return tuple(Piece(part, trusted=index % 2 == 1) for index, part in enumerate(parts) if part)


Writer = Callable[[Piece], str]


def as_chat(entry: ChatEntry, write: Writer) -> Json:
    """The dictionary a template takes. Names may come from a model or a server: they are content too."""
    chat: Json = {
        "role": entry.role,
        "content": _content(entry.pieces, [write(piece) for piece in entry.pieces]),
    }
    if entry.name is not None:
        chat["name"] = write(Piece(entry.name))
    if entry.tool_call_id is not None:
        chat["tool_call_id"] = write(Piece(entry.tool_call_id, identifier=True))
    if entry.data is None:
        return chat
    if entry.thought:
        chat[entry.data.thought_key] = write(Piece(entry.thought))
    if entry.calls:
        chat["tool_calls"] = [_call(call, entry, entry.data, write) for call in entry.calls]
    return chat


def _call(call: ToolCall, entry: ChatEntry, data: CallData, write: Writer) -> Json:
    arguments: Any = call.arguments
    if data.text_arguments:
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not entry.is_stub:
        arguments = _written(arguments, write)
    made: Json = {
        "type": "function",
        "function": {"name": write(Piece(call.name)), "arguments": arguments},
    }
    return made | ({"id": write(Piece(call.id, identifier=True))} if call.id else {})


def _written(value: Any, write: Writer) -> Any:
    """A JSON value with every text in it written."""
    if isinstance(value, str):
        return write(Piece(value))
    if isinstance(value, dict):
        return {write(Piece(key)): _written(item, write) for key, item in value.items()}
    return [_written(item, write) for item in value] if isinstance(value, list) else value


def _content(pieces: Sequence[Piece], written: Sequence[str]) -> str | list[Json]:
    """A text; with images in it, a list of parts."""
    if not any(piece.is_image for piece in pieces):
        return "".join(written)
    parts: list[Json] = []
    for piece, text in zip(pieces, written, strict=True):
        if piece.is_image:
            parts.append({"type": "image"})
        elif parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += text
        elif text:
            parts.append({"type": "text", "text": text})
    return parts
