"""Frames between a host and its worker processes: a JSON head, and a text that need not be escaped.

A long result travels as the text, so that it is neither quoted into JSON nor parsed out of it.
"""

from __future__ import annotations

import asyncio
import json
import struct

from ludus.core.messages import Json
from ludus.tools.hosting.encoding import dump

_LENGTHS = struct.Struct("!QQ")


def packed(head: Json, text: str | None = None) -> list[bytes]:
    """One frame, in pieces to be written one after the other."""
    head_bytes = dump(head if text is None else {**head, "text": True})
    text_bytes = b"" if text is None else text.encode("utf-8", "replace")
    return [_LENGTHS.pack(len(head_bytes), len(text_bytes)) + head_bytes, text_bytes]


async def read(reader: asyncio.StreamReader) -> tuple[Json, str | None]:
    """The next frame; `IncompleteReadError` or `ConnectionError` when the other side is gone."""
    head_length, text_length = _LENGTHS.unpack(await reader.readexactly(_LENGTHS.size))
    head: Json = json.loads(await reader.readexactly(head_length))
    text = (await reader.readexactly(text_length)).decode() if text_length else ""
    return head, text if head.pop("text", False) else None
