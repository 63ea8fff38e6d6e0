"""What a sandbox allows, as settings."""

from __future__ import annotations

import os

from pydantic import Field

from ludus.core.config import Config


class Limits(Config):
    """What one session may take. Reaching a limit is a result that says so, never an exception."""

    wall_seconds: float = Field(default=10.0, gt=0, le=86_400)
    """Seconds that one execution may last."""
    cpu_seconds: float = Field(default=10.0, gt=0, le=86_400)
    """Processor seconds that one execution may use, in each process."""
    memory_mb: int = Field(default=512, ge=16)
    """Memory for each process, and for all of the session's processes together."""
    processes: int = Field(default=64, ge=1)
    """Processes and threads at one time."""
    open_files: int = Field(default=256, ge=16)
    """Open files in each process."""
    file_mb: int = Field(default=64, ge=1)
    """Size of one file."""
    disk_mb: int = Field(default=64, ge=1)
    """All files of the session together; held in memory."""
    output_bytes: int = Field(default=64_000, ge=100)
    """What is kept of each of standard output and standard error; the middle of longer ones is left out."""


class SandboxConfig(Config):
    """Where and how model-written code runs."""

    workers: int | None = Field(default=None, ge=1)
    """Warm interpreters that sessions are forked from; one for each core when left out."""
    preload: tuple[str, ...] = ()
    """Modules that are imported once, before any code arrives, such as numpy."""
    limits: Limits = Limits()
    """What a session may take unless it is given limits of its own."""
    readable: tuple[str, ...] = ()
    """Files and folders of this machine that sessions can read, under the same path."""
    network: bool = False
    """Let the code use the network, by slirp4netns; without it `accept_risk` shares the machine's own."""
    accept_risk: bool = False
    """Run even where the machine allows less isolation than untrusted code needs."""
    max_sessions: int = Field(default=4096, ge=1)
    """Sessions and executions alive at one time; further ones wait."""
    max_starting: int = Field(default=4, ge=1)
    """Executions in their first tenth of a second, for each warm interpreter; further ones wait."""

    @property
    def worker_count(self) -> int:
        return self.workers or len(os.sched_getaffinity(0))
