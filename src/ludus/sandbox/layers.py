"""Which layers of isolation this machine allows, found out by using them.

Two arrangements. *Namespaces*: every session has user, pid and mount namespaces of its own inside those of its
worker (user, pid, mount, network, ipc, uts), with Landlock and seccomp on top. *Bare*: where namespaces are
refused, as in an unprivileged container, Landlock and seccomp alone keep a session from files, network and
processes. A worker is started with the best arrangement that works, a program inside tries the doors, and
what it finds open is not reported as closed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import secrets
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ludus.core.failures import ConfigError
from ludus.sandbox import network
from ludus.sandbox.body import Body
from ludus.sandbox.cgroups import ControlGroup, make_group
from ludus.sandbox.config import SandboxConfig
from ludus.sandbox.errors import SandboxError, SandboxUnavailable
from ludus.sandbox.inside import kernel, landlock
from ludus.sandbox.inside.filesystem import is_covered, remove_folder
from ludus.sandbox.session import Session
from ludus.sandbox.worker import Worker

_log = logging.getLogger(__name__)

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
_FIRST_USER = 1_954_300_000
_DESCRIPTORS = 65_536
_NAMESPACES = ("user", "pid", "mnt", "net", "ipc", "uts")
_PROBE_SECONDS = 10.0
# Tries the doors from inside. What it can open is open, whatever we believe to have closed.
_PROBE = """
import json, os, socket, subprocess, sys
def tries(attempt):
    try:
        attempt()
    except BaseException as error:
        return type(error).__name__
    return None
def tries_all(*attempts):
    errors = [tries(attempt) for attempt in attempts]
    return None if None in errors else errors[0]
def write_outside():
    with open(SECRET + ".written", "w") as file:
        file.write("x")
with open("/proc/self/status") as file:
    status = dict(line.split(":", 1) for line in file.read().splitlines())
print(json.dumps({
    "doors": {
        "files": tries(lambda: open(SECRET).read()),
        "writing": tries(write_outside),
        "network": tries_all(
            lambda: socket.create_connection(("127.0.0.1", PORT), 1),
            lambda: socket.create_connection((GATEWAY, PORT), 1),
            lambda: socket.socket(socket.AF_UNIX).connect(chr(0) + ABSTRACT),
        ),
        "processes": tries(lambda: os.kill(HOST, 0)),
        "environment": tries(lambda: open(f"/proc/{HOST}/environ").read()),
        "privileges": tries(lambda: os.setuid(0)) if os.getuid() else None,
    },
    "imports": tries(lambda: __import__("colorsys")),
    "starts": tries(lambda: subprocess.run([sys.executable, "-c", ""], check=True)),
    "namespaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in NAMES},
    "seccomp": status["Seccomp"].strip() == "2",
    "no new privileges": status["NoNewPrivs"].strip() == "1",
    "capabilities": int(status["CapEff"], 16) | int(status["CapPrm"], 16) | int(status["CapAmb"], 16),
}))
"""


@dataclass(frozen=True)
class Layers:
    """What keeps code inside, and what was refused and why."""

    order: dict[str, Any]
    """What workers are told."""
    active: dict[str, bool]
    """The layers, by name; and whether code inside can import and start Python."""
    doors: dict[str, str | None]
    """What a program inside tried: the error that it met, or None where it got through."""
    group: ControlGroup
    reasons: dict[str, str] = field(default_factory=dict)
    """Why a layer is not there."""

    @property
    def has_slots(self) -> bool:
        """Whether one-shot programs can share namespaces that others have left clean."""
        # what is shown among a session's own files is not compared between programs
        covered = any(is_covered(path) for path in self.order["shown"])
        return bool(self.order["namespaces"]) and not covered

    @property
    def open_doors(self) -> list[str]:
        return [name for name, error in self.doors.items() if error is None]

    def tidy(self) -> None:
        """Remove what was made for the sandbox as a whole."""
        _remove(self.order)
        self.group.remove()


async def prepare(config: SandboxConfig, on_death: Callable[[Worker], None]) -> tuple[Layers, Worker]:
    """The best arrangement that works here, and a first worker in it. Too little is refused."""
    _check(config)
    _allow_descriptors()
    reasons: dict[str, str] = {}
    group = make_group()
    if not group.counts:
        reasons["control group"] = "no hierarchy in which this user may make one"
    for order in _orders(config, reasons):
        worker = Worker(order, group, on_death)
        try:
            layers = await _tried(worker, order, config, reasons)
            if not order["namespaces"]:
                _tell_of_fallback(reasons.get("namespaces", "not tried"))
            return layers, worker
        except BaseException as error:  # whoever is cancelled here must not leave anything behind either
            await worker.close()
            _remove(order)
            if not isinstance(error, SandboxError) or not order["namespaces"]:
                group.remove()
                raise
            reasons["namespaces"] = str(error)
    raise SandboxUnavailable("no arrangement was tried")


@cache
def _tell_of_fallback(reason: str) -> None:
    _log.warning(
        "the sandbox runs without namespaces here, behind Landlock and seccomp alone, which is weaker "
        "(`ludus check sandbox` shows what holds): %s",
        reason,
    )


async def _tried(
    worker: Worker, order: dict[str, Any], config: SandboxConfig, reasons: dict[str, str]
) -> Layers:
    """Which layers hold in an arrangement; `SandboxError` when it does not work, or too few of them do."""
    told = await worker.start()
    kinds = (False, True) if order["namespaces"] else (False,)
    found = [await _probe(worker, config, is_slot=is_slot) for is_slot in kinds]
    active = {name: all(_active(one, told)[name] for one in found) for name in _active(found[0], told)}
    active["control group"] = worker.group.counts
    if not active["Python"]:
        reasons["Python"] = f"{sys.prefix} and {sys.base_prefix} are not open to other users"
    doors = _doors(found[0], config)
    for one in found[1:]:  # what a program gets through from either kind of process is open
        doors |= {name: error for name, error in _doors(one, config).items() if error is None}
    layers = Layers(order, active, doors, worker.group, reasons)
    if layers.open_doors and not config.accept_risk:
        raise SandboxUnavailable(_refusal(layers))
    return layers


def _check(config: SandboxConfig) -> None:
    if sys.platform != "linux" or not kernel.supported():
        raise SandboxUnavailable(
            "the sandbox needs Linux on x86_64 or aarch64; run `ludus serve tools` on such a machine and give "
            "its address in place of the tools"
        )
    for path in config.readable:
        if not Path(path).exists():
            raise ConfigError(f"sandbox.readable names {path!r}, which does not exist")


def _allow_descriptors() -> None:
    """Each live session takes a descriptor; the usual soft limit of 1,024 is for programs that use few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _orders(config: SandboxConfig, reasons: dict[str, str]) -> Iterator[dict[str, Any]]:
    """The arrangements, best first."""
    has_landlock = bool(landlock.version())
    if not has_landlock:
        reasons["landlock"] = "the kernel has none, or it is switched off"
    shown = [str(Path(path).absolute()) for path in (*_python_folders(), *config.readable)]
    common: dict[str, Any] = {
        "preload": list(config.preload),
        "network": config.network,
        "own_net": not config.network,
        "slirp": False,
        "resolver": _resolver() if config.network else "",
        "landlock": has_landlock,
        "seccomp": True,
        "shown": list(dict.fromkeys(shown)),
        "folder": "",
        "uid": _FIRST_USER if os.geteuid() == 0 else None,
        "users": 1,
    }
    if config.network and network.program():
        yield {
            **common,
            "namespaces": True,
            "own_net": True,
            "slirp": True,
            "resolver": network.RESOLVER,
        }
    yield {**common, "namespaces": True}
    folder = tempfile.mkdtemp(prefix="ludus-sandbox-")
    Path(folder).chmod(0o711)
    yield {**common, "namespaces": False, "shown": [*_SYSTEM, *common["shown"]], "folder": folder}


def _resolver() -> str:
    """The machine's own name servers, for code that shares its network."""
    try:
        return Path("/etc/resolv.conf").read_text()
    except OSError:
        return ""


def _python_folders() -> list[str]:
    """Where this Python and its packages live, so that code inside can import what we could."""
    program = Path(sys.executable).resolve().parent
    return [sys.prefix, sys.base_prefix, sys.exec_prefix, str(program)]


async def _probe(worker: Worker, config: SandboxConfig, *, is_slot: bool) -> dict[str, Any]:
    """Run the program that tries the doors, with a secret and a listening port for it to find."""
    with tempfile.TemporaryDirectory(prefix="ludus-probe-") as folder:
        secret = _plant_secret(folder)
        with (
            socket.create_server(("127.0.0.1", 0)) as listening,
            socket.socket(socket.AF_UNIX) as abstract,
        ):
            port = listening.getsockname()[1]
            abstract.bind(f"\0ludus-probe-{port}")
            abstract.listen()
            values = (secret, port, os.getpid(), _NAMESPACES, network.GATEWAY, f"ludus-probe-{port}")
            limits = config.limits.model_copy(update={"wall_seconds": _PROBE_SECONDS})
            ours, theirs = socket.socketpair()
            process = worker.spawn(theirs, limits, one_shot=True, slot=is_slot)
            theirs.close()
            body = Body(process, ours, asyncio.Semaphore(0))
            async with Session(body, limits, asyncio.Semaphore(0), is_slot=is_slot) as session:
                await body.opened()
                tried = await session.python(
                    f"SECRET, PORT, HOST, NAMES, GATEWAY, ABSTRACT = {values!r}\n{_PROBE}"
                )
    try:
        found: dict[str, Any] = json.loads(tried.stdout)
    except ValueError:
        raise SandboxError(f"the probe of the sandbox failed: {tried.text()}") from None
    return found


def _plant_secret(folder: str) -> str:
    """A file that anybody may read: what keeps code from it must be the sandbox, not its owner."""
    secret = Path(folder, "secret")
    secret.write_text(secrets.token_hex())
    for path in (Path(folder), secret):
        path.chmod(0o777)
    return str(secret)


def _doors(found: dict[str, Any], config: SandboxConfig) -> dict[str, str | None]:
    doors: dict[str, str | None] = dict(found["doors"])
    if found["capabilities"]:
        doors["capabilities"] = None
    if config.network:  # what it must not reach then is what listens on this machine for itself alone
        doors["loopback"] = doors.pop("network")
    return doors


def _active(found: dict[str, Any], told: dict[str, Any]) -> dict[str, bool]:
    inside: dict[str, str] = found["namespaces"]
    own = {
        f"{name} namespace": str(Path(f"/proc/self/ns/{name}").readlink()) != inside[name]
        for name in _NAMESPACES
    }
    return {
        **own,
        "Landlock": bool(told["landlock"]),
        "seccomp": bool(found["seccomp"]),
        "no new privileges": bool(found["no new privileges"]),
        "no capabilities": not found["capabilities"],
        "Python": found["imports"] is None and found["starts"] is None,
    }


def _remove(order: dict[str, Any]) -> None:
    if order["folder"]:
        remove_folder(order["folder"])


def _refusal(layers: Layers) -> str:
    missing = ", ".join(name for name, is_active in layers.active.items() if not is_active) or "nothing"
    reasons = "; ".join(f"{name}: {reason}" for name, reason in layers.reasons.items()) or "no reasons"
    advice = ""
    if "loopback" in layers.open_doors:
        advice = (
            "With network = true it shares the network of this machine, and so reaches what listens on its "
            "loopback; install slirp4netns, which gives it a network of its own. "
        )
    return (
        f"code in the sandbox still reaches: {', '.join(layers.open_doors)} (missing: {missing}; {reasons}). "
        f"Untrusted code is not run like this. {advice}`ludus check sandbox` shows what the machine allows; "
        "accept_risk = true runs it all the same"
    )
