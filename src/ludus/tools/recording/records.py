"""What is written for a call and for a list of tools: bytes, and back.

A record is JSON, media as base64, compressed where it is long. It is never pickle: a recording may come
from somebody else.
"""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

from ludus.core.failures import Fault
from ludus.core.messages import Json, Media, ToolResult, ToolSpec

_COMPRESS_FROM = 4_096
_PLAIN, _COMPRESSED = b"j", b"z"


class BadRecord(ValueError):
    """Bytes that are no record of ours."""


def encode_result(result: ToolResult) -> bytes:
    """A result as bytes; `TypeError` or `ValueError` when a foreign tool set gave something odd."""
    if not isinstance(result.content, str):
        raise TypeError(f"its content is {type(result.content).__name__}, not text")
    return _packed(
        {
            "content": result.content,
            "reward": None if result.reward is None else float(result.reward),
            "terminated": bool(result.terminated),
            "fault": None if result.fault is None else Fault(result.fault).value,
            "media": [_media_out(medium) for medium in result.media],
            "seconds": float(result.seconds),
        }
    )


def decode_result(data: bytes) -> ToolResult:
    """The result that `encode_result` was given, equal in every field."""
    raw = _unpacked(data)
    try:
        return ToolResult(
            content=_text(raw["content"]),
            reward=raw["reward"],
            terminated=raw["terminated"],
            fault=None if raw["fault"] is None else Fault(raw["fault"]),
            media=tuple(_media_in(medium) for medium in raw["media"]),
            seconds=raw["seconds"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadRecord(f"it is no result of a call ({type(error).__name__}: {error})") from None


def encode_specs(specs: list[tuple[ToolSpec, str]]) -> bytes:
    """Tools with their versions, as bytes; equal lists give equal bytes."""
    rows = [[spec.name, spec.description, spec.parameters, version] for spec, version in specs]
    return _packed({"tools": rows})


def decode_specs(data: bytes) -> list[tuple[ToolSpec, str]]:
    """Tools with their versions."""
    raw = _unpacked(data)
    try:
        rows = raw["tools"]
        return [(ToolSpec(_text(n), _text(d), dict(p)), _text(v)) for n, d, p, v in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise BadRecord(f"it is no list of tools ({type(error).__name__}: {error})") from None


def _packed(value: Json) -> bytes:
    # ASCII escapes carry lone surrogates, which UTF-8 cannot; keys stay in order, since a schema's order is
    # part of the prompt
    data = json.dumps(value, separators=(",", ":")).encode("ascii")
    if len(data) < _COMPRESS_FROM:
        return _PLAIN + data
    return _COMPRESSED + zlib.compress(data, 1)


def _unpacked(data: bytes) -> Json:
    try:
        body = zlib.decompress(data[1:]) if data[:1] == _COMPRESSED else data[1:]
        if data[:1] not in (_PLAIN, _COMPRESSED):
            raise ValueError("unknown form")
        value = json.loads(body)
    except (ValueError, zlib.error, RecursionError) as error:
        raise BadRecord(f"it cannot be read ({error})") from None
    if not isinstance(value, dict):
        raise BadRecord("it is not an object")
    return value


def _media_out(medium: Media) -> Json:
    data = None if medium.data is None else base64.b64encode(medium.data).decode("ascii")
    return {"kind": medium.kind, "sha256": medium.sha256, "data": data}


def _media_in(raw: Json) -> Media:
    data = None if raw["data"] is None else base64.b64decode(raw["data"], validate=True)
    return Media(_text(raw["kind"]), _text(raw["sha256"]), data)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, not {type(value).__name__}")
    return value
