"""Running what a model wrote: isolated Python, shell commands and programs, one-shot or in live sessions.

`Sandbox` is where it runs, `Session` a private world that stays between turns and can be forked, `Execution`
what came of it. `Limits` and `SandboxConfig` say how much it may take.
"""

from ludus.sandbox.config import Limits, SandboxConfig
from ludus.sandbox.errors import (
    CannotFork,
    SandboxError,
    SandboxUnavailable,
    SessionEnded,
    SessionLost,
)
from ludus.sandbox.execution import Execution, Outcome
from ludus.sandbox.layers import Layers
from ludus.sandbox.sandbox import Sandbox, close_shared_sandboxes, shared_sandbox
from ludus.sandbox.session import Session, Snapshot

__all__ = [
    "CannotFork",
    "Execution",
    "Layers",
    "Limits",
    "Outcome",
    "Sandbox",
    "SandboxConfig",
    "SandboxError",
    "SandboxUnavailable",
    "Session",
    "SessionEnded",
    "SessionLost",
    "Snapshot",
    "close_shared_sandboxes",
    "shared_sandbox",
]
