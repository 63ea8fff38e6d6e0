"""Running what a model wrote: isolated Python, shell commands and programs, one-shot or in live sessions.

`Sandbox` runs code, `Session` is a private environment that keeps its state between turns and can be forked,
`Execution` is a result. `Limits` and `SandboxConfig` are the settings. `ludus.sandbox.sql` runs SQL.
"""

from ludus.sandbox.config import (
    CannotFork,
    Limits,
    SandboxConfig,
    SandboxError,
    SandboxUnavailable,
    SessionEnded,
    SessionLost,
)
from ludus.sandbox.exchange import Execution, Outcome, bundle, call
from ludus.sandbox.sandbox import (
    Layers,
    Sandbox,
    SandboxBackend,
    Session,
    Snapshot,
    close_shared_sandboxes,
    shared_sandbox,
)

__all__ = [
    "CannotFork",
    "Execution",
    "Layers",
    "Limits",
    "Outcome",
    "Sandbox",
    "SandboxBackend",
    "SandboxConfig",
    "SandboxError",
    "SandboxUnavailable",
    "Session",
    "SessionEnded",
    "SessionLost",
    "Snapshot",
    "bundle",
    "call",
    "close_shared_sandboxes",
    "shared_sandbox",
]
