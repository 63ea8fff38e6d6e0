"""Telemetry of a server: Prometheus metrics, and on demand a line of JSON for each request and call."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from ludus.core.failures import MissingExtraError
from ludus.core.messages import Json, ToolResult
from ludus.serve.admission import RequestError

try:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
    from prometheus_client.exposition import CONTENT_TYPE_LATEST
except ImportError as error:  # pragma: no cover - depends on the installation
    raise MissingExtraError("prometheus-client", "serve", "a server") from error

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

CONTENT_TYPE = CONTENT_TYPE_LATEST
CallOutcome = ToolResult | RequestError


class ServerMetrics:
    """One registry per server, so that several in one process do not meet."""

    prefix: str

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"{self.prefix}_{name}", help, labels, registry=self.registry)

    def _histogram(self, name: str, help: str, label: str) -> Histogram:
        name = f"{self.prefix}_{name}"
        return Histogram(name, help, (label,), buckets=_BUCKETS, registry=self.registry)

    def watch(self, name: str, help: str, read: Callable[[], float]) -> None:
        """A gauge that is read when it is asked for."""
        gauge: Any = Gauge(f"{self.prefix}_{name}", help, registry=self.registry)
        gauge.set_function(read)

    def page(self) -> bytes:
        text: bytes = generate_latest(self.registry)
        return text


class Metrics(ServerMetrics):
    """Those of a tool server."""

    prefix = "ludus_tools"

    def __init__(self) -> None:
        super().__init__()
        counter = self._counter
        self.calls = counter(
            "calls", "Calls that ended, by tool and by how they ended.", "tool", "outcome"
        )
        self.refused = counter("refused", "Requests that were not taken, by kind.", "kind")
        self.joined = counter("joined", "Requests answered by a call that ran for an earlier one.")
        self.repeated = counter(
            "repeated", "Calls run although an earlier run may have happened.", "tool"
        )
        self.cancelled = counter("cancelled", "Running calls that were cancelled, by why.", "why")
        self.opened = counter("sessions_opened", "Sessions opened.")
        self.closed = counter("sessions_closed", "Sessions closed, by why.", "why")
        self.seconds = self._histogram("call_seconds", "How long calls ran.", "tool")
        self.queue_seconds = self._histogram(
            "queue_seconds", "How long calls waited for a slot.", "tool"
        )

        self._pools = Gauge(
            "ludus_envs_instances",
            "Instances of an environment, over all replicas: in use, idle, waited for, the most there may be; "
            "and since the start: created, closed, gone wrong.",
            ("env", "state"),
            registry=self.registry,
        )

    def set_pools(self, stats: Json) -> None:
        """How the pools of environments are doing."""
        for env, numbers in stats.items():
            for state, value in numbers.items():
                self._pools.labels(env, state).set(value)


class ModelMetrics(ServerMetrics):
    """Those of a model server."""

    prefix = "ludus_model"

    def __init__(self) -> None:
        super().__init__()
        counter = self._counter
        self._children: dict[tuple[Any, ...], Any] = {}
        self._requests = counter("requests", "Requests, by API and HTTP status.", "api", "status")
        self._tokens = counter("tokens", "Tokens: read, found in the cache, written.", "kind")
        self.retried = counter("retried", "Requests answered by what an earlier, equal one had sampled.")
        self._seconds = self._histogram("seconds", "How long replies took.", "api")

    def count(self, api: str, status: int) -> None:
        """A request that was answered."""
        self._child(self._requests, api, status).inc()

    def note(self, api: str, seconds: float, **tokens: int) -> None:
        """A reply, and its tokens: read, cached, written."""
        self._child(self._seconds, api).observe(seconds)
        for kind, number in tokens.items():
            self._child(self._tokens, kind).inc(number)

    def _child(self, metric: Any, *labels: str | int) -> Any:
        """The series of these labels. To look one up in the library takes longer than to count."""
        key = (metric, *labels)
        if key not in self._children:
            self._children[key] = metric.labels(*labels)
        return self._children[key]


_log = logging.getLogger("ludus.serve.access")
_LONGEST = 500


request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The request that is being answered; every line that is logged on its way names it."""


def outcome_name(outcome: CallOutcome | None) -> str:
    """How a call ended, in one word."""
    if isinstance(outcome, ToolResult):
        return "ok" if outcome.fault is None else outcome.fault.value
    return "lost" if outcome is None else outcome.kind.value


def log_call(
    session: str, tool: str, outcome: CallOutcome, queue_seconds: float, seconds: float
) -> None:
    """Note how a call ended."""
    if not _log.isEnabledFor(logging.DEBUG):
        return
    fields: Json = {"request": request_id.get(), "session": session, "tool": tool[:100]}
    fields["outcome"] = outcome_name(outcome)
    fields["seconds"], fields["queue_seconds"] = round(seconds, 6), round(queue_seconds, 6)
    if isinstance(outcome, RequestError):
        fields["problem"] = str(outcome)[:_LONGEST]
    _log.debug("call", extra={"fields": fields})


def log_request(method: str, path: str, status: int, seconds: float) -> None:
    """Note how a request that is not a call ended."""
    if _log.isEnabledFor(logging.DEBUG):
        fields = {"request": request_id.get(), "method": method, "path": path[:200], "status": status}
        _log.debug("request", extra={"fields": {**fields, "seconds": round(seconds, 6)}})


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


def log_as_json(level: int = logging.INFO) -> None:
    """Make JSON lines on standard error the log of this whole process.

    Of other libraries, warnings and worse are logged.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("ludus").setLevel(level)
