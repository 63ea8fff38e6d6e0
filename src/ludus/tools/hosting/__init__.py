"""Hosting tools for many episodes at once: on this event loop, in worker processes, or elsewhere.

`ToolHost` is the seam that the tool server stands on; `PooledHost` is for anything that has workers.
"""

from ludus.tools.hosting.host import EpisodeLost, HostHealth, OutcomeUnknown, ToolFacts, ToolHost
from ludus.tools.hosting.loading import ToolReference, ToolsFile, load_tools
from ludus.tools.hosting.local import LocalHost
from ludus.tools.hosting.pool import PooledHost, Worker, WorkerDied
from ludus.tools.hosting.process import ProcessHost

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
    "ToolsFile",
    "Worker",
    "WorkerDied",
    "load_tools",
]
