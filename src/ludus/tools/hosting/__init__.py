"""Hosting tools for many episodes at once: on this event loop, in worker processes, or elsewhere.

`ToolHost` is the interface that the tool server uses; `PooledHost` is for anything that has workers.
"""

from ludus.remote.lost_episodes import EpisodeLost, OutcomeUnknown
from ludus.remote.supervisor import WorkerDied
from ludus.tools.hosting.host import (
    HostHealth,
    LocalHost,
    ToolFacts,
    ToolHost,
    ToolReference,
    ToolsFile,
    load_tools,
)
from ludus.tools.hosting.pool import PooledHost, ProcessHost, ToolWorker

__all__ = [
    "EpisodeLost",
    "HostHealth",
    "LocalHost",
    "OutcomeUnknown",
    "PooledHost",
    "ProcessHost",
    "ToolFacts",
    "ToolHost",
    "ToolReference",
    "ToolWorker",
    "ToolsFile",
    "WorkerDied",
    "load_tools",
]
