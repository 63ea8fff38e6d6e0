"""Settings of a sandbox, and the errors it raises. What goes wrong in the guest is an `Execution` instead."""

from __future__ import annotations

import os
from typing import Any, Literal

from pydantic import Field, field_validator

from ludus.core.config import Config
from ludus.core.failures import Boundary, ConfigError, InfraError, LudusError
from ludus.core.failures import CannotFork as CannotFork
from ludus.core.registry import Registry

BACKENDS = Registry("sandbox backend", group="ludus.sandboxes")


class Limits(Config):
    """Limits of one session. Exceeding a limit is a result that says so, never an exception."""

    wall_seconds: float = Field(default=10.0, gt=0, le=86_400)
    """Seconds that one execution may last."""
    cpu_seconds: float = Field(default=10.0, gt=0, le=86_400)
    """CPU seconds that one execution may use, in each process."""
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
    """Bytes kept of each of stdout and stderr; the middle of longer output is left out."""


class ContainerConfig(Config):
    """Containers, for the tiers docker, podman and kubernetes."""

    image: str | None = None
    """The image of sessions that name none. It needs bash, coreutils and tar; python3 for the tool python."""
    program: tuple[str, ...] = ()
    """The engine's command and options, such as ["podman", "--runtime", "runc"]; the tier's own if empty."""
    workdir: str | None = None
    """The working directory; the image's own when left out."""
    user: str | None = None
    """The user in the container; the image's own when left out (Kubernetes: a number)."""
    sudo: bool = False
    """Leave the engine's usual capabilities, and let programs gain rights; otherwise there are none."""
    cpus: float = Field(default=1.0, gt=0)
    """Processors of a session; in Kubernetes what it requests."""
    burst: float = Field(default=2.0, ge=1)
    """Kubernetes: how many times its cpus and memory a pod may use."""
    pull: Literal["always", "missing", "never"] = "missing"
    """When an image is fetched from its registry."""
    start_seconds: float = Field(default=300.0, gt=0)
    """Seconds until a container must have started, fetching its image included."""
    lifetime_seconds: int = Field(default=7200, ge=1)
    """Seconds after which a container ends itself, also when the run has died."""
    namespace: str = "default"
    """Kubernetes: where jobs are made."""
    template: str | None = None
    """Kubernetes: a JSON file with the pod spec to start from (nodeSelector, tolerations, ...)."""


class SandboxConfig(Config):
    """Where and how model-written code runs."""

    tier: str = "process"
    """The backend: "process" (of this machine), "docker", "podman", "kubernetes", that of an installed
    package, or "file.py:Class" (docs/sandbox.md)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of a backend of another package."""
    container: ContainerConfig = ContainerConfig()
    """Settings of containers."""
    workers: int | None = Field(default=None, ge=1)
    """Fork servers (warm interpreters) that sessions are forked from; one for each core when left out."""
    preload: tuple[str, ...] = ()
    """Modules that are imported once, before any code arrives, such as numpy."""
    limits: Limits = Limits()
    """Limits of a session, unless it is given its own."""
    readable: tuple[str, ...] = ()
    """Files and folders of this machine that sessions can read, under the same path."""
    network: bool = False
    """Let the code use the network through slirp4netns; without it, `accept_risk` shares the machine's own."""
    accept_risk: bool = False
    """Run even where the machine allows less isolation than untrusted code needs."""
    max_sessions: int = Field(default=4096, ge=1)
    """Sessions and executions alive at one time; further ones wait."""
    max_starting: int = Field(default=4, ge=1)
    """Executions in their first 30 milliseconds, for each worker; further ones wait."""

    @field_validator("tier")
    @classmethod
    def _check_tier(cls, name: str) -> str:
        # without any, Ludus is not installed: `BACKENDS.load` says so, where a sandbox is needed
        if BACKENDS and ":" not in name and name not in BACKENDS:
            raise ValueError(
                f"is none of the backends {', '.join(sorted(BACKENDS))}, and no file.py:Class"
            )
        return name

    def __hash__(self) -> int:  # `options` has no hash
        return hash((self.tier, self.container, self.limits, self.preload, self.readable))

    @property
    def worker_count(self) -> int:
        return self.workers or len(os.sched_getaffinity(0))


class SandboxError(InfraError):
    """The sandbox failed: an infrastructure failure, never the model's fault."""

    def __init__(self, message: str, *, retriable: bool = True, replay: bool | None = None) -> None:
        super().__init__(Boundary.SANDBOX, message, retriable=retriable, replay=replay)


class SessionLost(SandboxError):
    """A session and its state are lost through no fault of the code in it: only replaying helps."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retriable=False, replay=True)


class SandboxUnavailable(ConfigError):
    """This machine allows too little isolation for untrusted code."""


class SessionEnded(LudusError):
    """The code in a session ended or hung it between two requests: the model's fault; its state is lost."""

    def __init__(self, message: str, *, hung: bool = False) -> None:
        super().__init__(message)
        self.hung = hung
        """Whether it stopped answering, and was killed for that."""
