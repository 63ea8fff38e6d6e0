"""Messages in a canonical form: the same for those that mean the same, however a client wrote them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ludus.core.messages import Message

MessageKey = tuple[Any, ...]


def message_key(message: Message) -> MessageKey:
    """The same for messages that mean the same.

    A reply's text is compared without the white space around it, and calls by their ids, names and arguments,
    whatever the order of the keys and however numbers are written. Other texts are compared as they are.
    """
    text = message.content.strip() if message.role == "assistant" else message.content
    calls = tuple((call.id, call.name, canonical_json(call.arguments)) for call in message.tool_calls)
    return message.role, text, calls, message.tool_call_id or "", tuple(m.sha256 for m in message.media)


def canonical_json(value: Any) -> str:
    """JSON that is the same for equal values: keys sorted, 2.0 written as 2."""
    return _canonical(_plain(value))


_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def _plain(value: Any) -> Any:
    if isinstance(value, str | int):  # most are
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict | Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value
