"""Container engines by their command lines: what is run to start, enter and remove a container.

Containers are named after the process that they belong to, so that a later one on the same machine can tell
which are leftovers: `ludus-MACHINE-PID-START-RANDOM`. They get no files of this machine.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ludus.core.failures import ConfigError
from ludus.sandbox.config import Limits, SandboxConfig

LABEL = "ludus.session"
READY = "ludus-ready"
_NPROC = 32_768
"""Processes of a user, over all containers. Podman's default is more than it may set on some machines; the
bound of a container is `--pids-limit`."""
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")
POLICY = "ludus-no-network"
_STDIN_ENDS = """echo "$1"; while read -r -t "$2" _; do kill -KILL -1; done"""
"""A container's program: bash waits for the end of its standard input, which comes when this process dies. A
line makes it kill all others in the container: a fork bomb leaves no room to do that by `exec`."""
_LIFETIME_ENDS = """echo "$1"; exec 4<> <(:); read -r -t "$2" -u 4 _"""


@dataclass(frozen=True, slots=True)
class Command:
    argv: list[str]
    stdin: bytes = b""


class ContainerEngine(ABC):
    """How containers are made. `NAME` is what `new_name` gives."""

    def __init__(self, config: SandboxConfig) -> None:
        self.config, self.settings = config, config.container
        default = {"kubernetes": "kubectl"}.get(config.tier, config.tier)
        name, *options = self.settings.program or (default,)
        # commands run in another folder
        self.program = [str(Path(name).absolute()) if "/" in name else name, *options]

    @abstractmethod
    def check(self) -> Command:
        """Succeeds where the engine can be used; says its version."""

    @abstractmethod
    def start(self, name: str, image: str, limits: Limits) -> Command:
        """Starts a container. Where `is_attached`, it lives as long as this command's standard input."""

    @abstractmethod
    def execute(self, name: str, argv: Sequence[str]) -> Command:
        """Runs a program in it."""

    @abstractmethod
    def remove(self, names: Sequence[str]) -> Command:
        """Ends and removes containers."""

    @abstractmethod
    def leftovers(self) -> Command:
        """Prints the names of all containers that Ludus made here, one a line."""

    is_attached = True

    def ready(self, name: str) -> Command | None:
        """Waits until a container that is not attached has started."""
        return None

    def prepare(self) -> Command | None:
        """A command to run before the first session; None where there is nothing to prepare."""
        return None

    def ending(self, name: str) -> Command | None:
        """Prints OOMKilled for a container that is not attached and was killed for its memory."""
        return None


class DockerEngine(ContainerEngine):
    """Docker, and Podman, whose command line is the same."""

    def check(self) -> Command:
        if self.config.tier == "podman":
            return Command([*self.program, "info", "--format", "podman {{.Version.Version}}"])
        return Command([*self.program, "version", "--format", "docker {{.Server.Version}}"])

    def start(self, name: str, image: str, limits: Limits) -> Command:
        if not _IMAGE.fullmatch(image):  # a data set may have named it
            raise ConfigError(f"{image!r:.200} is no name of an image, such as python:3.12-slim")
        given = self.settings
        memory = f"{limits.memory_mb}m"
        argv = [*self.program, "run", "--interactive", "--rm", "--name", name, "--label", LABEL]
        argv += ["--pull", given.pull, "--memory", memory, "--memory-swap", memory]
        argv += ["--cpus", f"{given.cpus:g}", "--pids-limit", str(limits.processes)]
        argv += ["--ulimit", f"nofile={limits.open_files}:{limits.open_files}", "--ulimit", "core=0:0"]
        argv += ["--ulimit", f"nproc={_NPROC}:{_NPROC}"]
        if not self.config.network:
            argv += ["--network", "none"]
        if not given.sudo:
            argv += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        argv += ["--workdir", given.workdir] if given.workdir else []
        argv += ["--user", given.user] if given.user else []
        argv += ["--entrypoint", "bash", image]
        return Command([*argv, "-c", _STDIN_ENDS, "bash", READY, str(given.lifetime_seconds)])

    def execute(self, name: str, argv: Sequence[str]) -> Command:
        return Command([*self.program, "exec", "--interactive", name, *argv])

    def remove(self, names: Sequence[str]) -> Command:
        return Command([*self.program, "rm", "--force", "--volumes", *names])

    def leftovers(self) -> Command:
        return Command(
            [*self.program, "ps", "--all", "--filter", f"label={LABEL}", "--format", "{{.Names}}"]
        )


class KubernetesEngine(ContainerEngine):
    """A job for each session, by kubectl. It ends at its deadline; the cluster deletes it a minute after."""

    is_attached = False

    def __init__(self, config: SandboxConfig) -> None:
        super().__init__(config)
        self.program += ["--namespace", self.settings.namespace]

    def check(self) -> Command:
        return Command([*self.program, "auth", "can-i", "create", "jobs.batch", "--request-timeout=20s"])

    def prepare(self) -> Command | None:
        if self.config.network:
            return None
        policy = {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": POLICY, "namespace": self.settings.namespace},
            "spec": {
                "podSelector": {"matchLabels": {"ludus.network": "none"}},
                "policyTypes": ["Ingress", "Egress"],
            },
        }
        return Command([*self.program, "apply", "-f", "-"], json.dumps(policy).encode())

    def start(self, name: str, image: str, limits: Limits) -> Command:
        manifest = self.job(name, image, limits)
        return Command([*self.program, "create", "-f", "-"], json.dumps(manifest).encode())

    def job(self, name: str, image: str, limits: Limits) -> dict[str, Any]:
        given = self.settings
        network = "any" if self.config.network else "none"
        labels = {LABEL: "", "ludus.network": network}
        asked = {"cpu": f"{given.cpus:g}", "memory": f"{limits.memory_mb}Mi"}
        most = {
            "cpu": f"{given.cpus * given.burst:g}",
            "memory": f"{math.ceil(limits.memory_mb * given.burst)}Mi",
            "ephemeral-storage": f"{limits.disk_mb}Mi",
        }
        security: dict[str, Any] = {}
        if not given.sudo:
            security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        if given.user is not None:
            security["runAsUser"] = int(given.user)
        pulls = {"always": "Always", "missing": "IfNotPresent", "never": "Never"}
        container: dict[str, Any] = {
            "name": "session",
            "image": image,
            "imagePullPolicy": pulls[given.pull],
            "command": ["bash", "-c", _LIFETIME_ENDS, "bash", READY, str(given.lifetime_seconds)],
            "resources": {"requests": asked, "limits": most},
            "securityContext": security,
        }
        if given.workdir:
            container["workingDir"] = given.workdir
        pod = {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 1,
            "containers": [container],
        }
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": name, "namespace": given.namespace, "labels": labels},
            "spec": {
                "backoffLimit": 0,
                "activeDeadlineSeconds": given.lifetime_seconds,
                "ttlSecondsAfterFinished": 60,
                "template": {"metadata": {"labels": labels}, "spec": merged(self._template(), pod)},
            },
        }

    def ready(self, name: str) -> Command:
        wait = ["wait", "--for=condition=Ready", "pod", f"--selector=job-name={name}"]
        return Command([*self.program, *wait, f"--timeout={self.settings.start_seconds:g}s"])

    def ending(self, name: str) -> Command:
        shown = "jsonpath={.items[*].status.containerStatuses[*].state.terminated.reason}"
        return Command([*self.program, "get", "pods", f"--selector=job-name={name}", "--output", shown])

    def execute(self, name: str, argv: Sequence[str]) -> Command:
        where = ["exec", "--stdin", f"job/{name}", "--container", "session", "--"]
        return Command([*self.program, *where, *argv])

    def remove(self, names: Sequence[str]) -> Command:
        how = ["--ignore-not-found", "--wait=false", "--cascade=background", "--now"]
        return Command([*self.program, "delete", *how, *(f"job/{name}" for name in names)])

    def leftovers(self) -> Command:
        shown = "jsonpath={range .items[*]}{.metadata.name}{'\\n'}{end}"
        return Command([*self.program, "get", "jobs", "--selector", LABEL, "--output", shown])

    def _template(self) -> Mapping[str, Any]:
        path = self.settings.template
        return {} if path is None else _read_template(path)


@cache
def _read_template(path: str) -> Mapping[str, Any]:
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"sandbox.container.template: {path} cannot be read as JSON: {error}"
        ) from None
    if not isinstance(found, dict) or "kind" in found:
        raise ConfigError(
            f"sandbox.container.template: {path} has to be the spec of a pod alone, such as "
            '{"nodeSelector": {"pool": "sandboxes"}}'
        )
    return found


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`, table by table; the first container of both is one table."""
    found = dict(base)
    for name, value in over.items():
        own = found.get(name)
        if isinstance(own, Mapping) and isinstance(value, Mapping):
            found[name] = merged(own, value)
        elif name == "containers" and isinstance(own, list) and own:
            found[name] = [merged(own[0], value[0]), *own[1:]]
        else:
            found[name] = value
    return found


def make_engine(config: SandboxConfig) -> ContainerEngine:
    """The engine of a config; `ConfigError` for settings that containers do not have."""
    for name in ("readable", "preload"):
        if getattr(config, name):
            raise ConfigError(
                f'sandbox.{name} is for tier = "process": a container of tier = "{config.tier}" sees its image '
                "and no file or module of this machine; put what is needed into the image"
            )
    return KubernetesEngine(config) if config.tier == "kubernetes" else DockerEngine(config)


def new_name() -> str:
    return f"{_machine()}-{os.getpid()}-{_started(os.getpid())}-{secrets.token_hex(4)}"


def is_leftover(name: str) -> bool:
    """Whether a container belongs to a process of this machine that is no more."""
    machine, _, rest = name.rpartition("-")[0].rpartition("-")[0].rpartition("-")
    parts = name.split("-")
    if machine != _machine() or not rest.isdecimal() or len(parts) != 5:
        return False
    return _started(int(rest)) != parts[3]


@cache
def _machine() -> str:
    """This machine since it was started, and our pid namespace: process ids mean something only there."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    known = boot.read_text() if boot.exists() else os.uname().nodename
    namespace = Path("/proc/self/ns/pid").readlink() if Path("/proc/self/ns").exists() else ""
    return f"ludus-{hashlib.sha256(f'{known}{namespace}'.encode()).hexdigest()[:8]}"


def _started(pid: int) -> str:
    """When a process was started, in the kernel's clock ticks; 0 where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except OSError:
        return "0"
