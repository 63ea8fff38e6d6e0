"""One line of JSON for each request and each call."""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar
from typing import TextIO

from ludus.core.messages import Json, ToolResult
from ludus.serve.problems import Problem

_log = logging.getLogger("ludus.serve.access")
_LONGEST = 500


request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The request that is being answered; every line that is logged on its way names it."""


def log_call(
    session: str,
    tool: str,
    outcome: ToolResult | Problem,
    queue_seconds: float,
    seconds: float,
) -> None:
    """Note how a call ended."""
    if not _log.isEnabledFor(logging.INFO):
        return
    if isinstance(outcome, ToolResult):
        ending, problem = "ok" if outcome.fault is None else outcome.fault.value, None
    else:
        ending, problem = outcome.kind.value, str(outcome)[:_LONGEST]
    fields: Json = {
        "request": request_id.get(),
        "session": session,
        "tool": tool[:100],
        "outcome": ending,
    }
    fields["seconds"], fields["queue_seconds"] = round(seconds, 6), round(queue_seconds, 6)
    if problem is not None:
        fields["problem"] = problem
    _log.info("call", extra={"fields": fields})


def log_request(method: str, path: str, status: int, seconds: float) -> None:
    """Note how a request that is not a call ended."""
    if _log.isEnabledFor(logging.INFO):
        fields = {"request": request_id.get(), "method": method, "path": path[:200], "status": status}
        _log.info("request", extra={"fields": {**fields, "seconds": round(seconds, 6)}})


class JsonFormatter(logging.Formatter):
    """A record as one line; control characters cannot break out of it."""

    def format(self, record: logging.LogRecord) -> str:
        line: Json = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_as_json(stream: TextIO | None = None, level: int = logging.INFO) -> None:
    """Make JSON lines on `stream` (standard error) the log of this whole process.

    Of other libraries, warnings and worse are logged.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("ludus").setLevel(level)
