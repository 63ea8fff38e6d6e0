"""What a tool server counts, in the words of Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ludus.core.failures import MissingExtraError

try:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
    from prometheus_client.exposition import CONTENT_TYPE_LATEST
except ImportError as error:  # pragma: no cover - depends on the installation
    raise MissingExtraError("prometheus-client", "serve", "the tool server") from error

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

CONTENT_TYPE = CONTENT_TYPE_LATEST


class Metrics:
    """One registry per server, so that several in one process do not meet."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"ludus_tools_{name}", help, labels, registry=registry)

        def histogram(name: str, help: str) -> Histogram:
            return Histogram(f"ludus_tools_{name}", help, ("tool",), buckets=_BUCKETS, registry=registry)

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
        self.seconds = histogram("call_seconds", "How long calls ran.")
        self.queue_seconds = histogram("queue_seconds", "How long calls waited for a slot.")

    def watch(self, name: str, help: str, read: Callable[[], float]) -> None:
        """A gauge that is read when it is asked for."""
        gauge: Any = Gauge(f"ludus_tools_{name}", help, registry=self.registry)
        gauge.set_function(read)

    def page(self) -> bytes:
        text: bytes = generate_latest(self.registry)
        return text
