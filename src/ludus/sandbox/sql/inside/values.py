"""What leaves the sandbox: rows as JSON, within bounds. And how a request can be turned down."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import shutil
from collections.abc import Iterable, Sequence
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import Any

Json = dict[str, Any]

_MOST_COUNTED = 1_000_000
_DEEPEST = 50
"""Lists in lists; `sandbox.sql.results` reads a few more."""


class Refused(Exception):
    """What the query asks for is not allowed here."""


class Broken(Exception):
    """The database itself cannot be used: nobody's query is at fault."""


def collect(
    rows: Iterable[Sequence[Any]], request: Json, errors: tuple[type[BaseException], ...]
) -> Json:
    """Rows within the bounds, and how many there are in all, as far as they can be counted."""
    kept: list[list[Any]] = []
    size = total = 0
    room = counted = True
    try:
        for row in itertools.islice(rows, _MOST_COUNTED):
            total += 1
            if not room:
                continue
            encoded = [_encoded(value, request["max_cell"]) for value in row]
            size += len(json.dumps(encoded))
            room = len(kept) < request["max_rows"] and size <= request["max_bytes"]
            if room:
                kept.append(encoded)
    except errors:
        if room:
            raise
        counted = False  # what can be shown is there; only counting the rest took too long
    return {"rows": kept, "total": total, "counted": counted and total < _MOST_COUNTED}


def _encoded(value: Any, longest: int | None, depth: int = 0) -> Any:
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"f": str(value)}
    if isinstance(value, str):
        text = value.encode("utf-8", "backslashreplace").decode()
        return text if longest is None or len(text) <= longest else {"c": [text[:longest], len(text)]}
    if isinstance(value, (bytes, bytearray, memoryview)):
        data = bytes(value)
        return {"b": [len(data), data[:16].hex(), hashlib.sha256(data).hexdigest()]}
    if isinstance(value, Decimal):
        return {"n": str(value)}
    if isinstance(value, (list, tuple, dict)) and depth >= _DEEPEST:
        raise Refused(f"a value is nested more than {_DEEPEST} deep")
    if isinstance(value, (list, tuple)):
        return {"l": [_encoded(item, longest, depth + 1) for item in value]}
    if isinstance(value, dict):
        return {
            "o": [
                [_encoded(key, longest, depth + 1), _encoded(item, longest, depth + 1)]
                for key, item in value.items()
            ]
        }
    if isinstance(value, (date, time)):
        return {"x": value.isoformat()}
    return {"x": str(value)}


def prepared(request: Json) -> str | None:
    """The database file to open: the original, or this session's own copy, made when first needed.

    The copy is in the session's home, wherever its programs have gone since.
    """
    if request["scratch"] is None:
        return None if request["path"] is None else str(request["path"])
    scratch = Path(os.environ.get("HOME", "."), request["scratch"])
    if request["path"] is not None and not scratch.exists():
        half = scratch.with_name(f".{scratch.name}.half")  # a full disk must not leave half a database
        shutil.copyfile(request["path"], half)
        half.replace(scratch)
    return str(scratch)
