"""Paths in a recipe made absolute, so that a run can be resumed and evaluated from any folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_FILE = re.compile(r"(?P<path>.+\.(?:jsonl|parquet|py))(?P<attribute>:[\w.]+)?")


def anchored(value: Any) -> Any:
    """The same tables; a text that names a file that is there, alone or as file.py:name, is absolute."""
    if isinstance(value, dict):
        return {name: anchored(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [anchored(inner) for inner in value]
    match = _FILE.fullmatch(value) if isinstance(value, str) else None
    if match is None or not Path(match["path"]).is_file():
        return value
    return f"{Path(match['path']).resolve()}{match['attribute'] or ''}"
