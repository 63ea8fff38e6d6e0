"""`audit.jsonl` of a run: one line for each tool call, appended when it ends, and never rewritten.

A list of tools on offer is written once, as a line of its own kind, and named by its digest afterwards:

    {"kind": "tools", "tools": "3f1c...", "names": ["read_file", ...]}
    {"kind": "call", "time": ..., "tool": "read_file", "tools": "3f1c...", "legality": "legal", ...}

A resumed run goes on in the same file, also where it plays steps again: the log is of what was called.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from ludus.core.messages import Json
from ludus.core.trajectory import AuditRecord

AUDIT = "audit.jsonl"
_MOST_ARGUMENTS = 4_000


class AuditLog:
    """Writes the log. The file is made by the first call."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / AUDIT
        self._lists: set[str] = set()
        self._file: int | None = None
        self._lock = threading.Lock()

    def __call__(self, record: AuditRecord) -> None:
        """Append a call: one write each, so that a run that is killed has lost none."""
        row = asdict(record)
        names = row.pop("offered")
        digest = hashlib.sha256(json.dumps(names).encode()).hexdigest()[:12]
        with self._lock:
            text = ""
            if digest not in self._lists:
                self._lists.add(digest)
                text = _line({"kind": "tools", "tools": digest, "names": names})
            text += _line({"kind": "call", "time": time.time(), **_short(row), "tools": digest})
            if self._file is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._file = os.open(self.path, flags, 0o666)
            os.write(self._file, text.encode())

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                os.close(self._file)
            self._file = None


def read_audit(folder: str | Path) -> Iterator[Json]:
    """The calls of a run, each with the names of the tools that were on offer; a torn last line is left out."""
    lists: dict[str, list[str]] = {}
    path = Path(folder) / AUDIT
    if not path.exists():
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if row["kind"] == "tools":
                lists[row["tools"]] = row["names"]
            else:
                yield {**row, "offered": lists.get(row["tools"], [])}


def _short(row: Json) -> Json:
    """Arguments of a sensible size; what was longer is text, and cut."""
    text = json.dumps(row["arguments"], default=str)
    if len(text) > _MOST_ARGUMENTS:
        row["arguments"] = f"{text[:_MOST_ARGUMENTS]}... ({len(text):,} characters)"
    return row


def _line(row: Json) -> str:
    return json.dumps(row, default=str) + "\n"
