"""Which layers of isolation this machine allows, found out by using them.

Two arrangements. *Namespaces*: every session has its own user, pid and mount namespace inside those of its
worker (user, pid, mount, network, ipc, uts), with Landlock and seccomp on top. *Bare*: where namespaces are
refused, as in an unprivileged container, Landlock and seccomp alone keep a session from files, network and
processes. A worker is started with the best arrangement that works; then a probe in the guest tries to get out
(the *doors*: files, network, processes, ...), and a door that it gets through is reported as open, whatever was
configured.
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
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ludus.core.failures import ConfigError
from ludus.sandbox.config import SandboxConfig, SandboxError, SandboxUnavailable
from ludus.sandbox.guest import kernel
from ludus.sandbox.guest.filesystem import is_covered, remove_folder
from ludus.sandbox.processes import machine
from ludus.sandbox.processes.machine import ControlGroup, make_group, subordinate_ids
from ludus.sandbox.processes.session import ProcessSession
from ludus.sandbox.processes.worker import SandboxWorker
from ludus.sandbox.sandbox import Layers

_log = logging.getLogger(__name__)

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
_FIRST_USER = 1_954_300_000
_DESCRIPTORS = 65_536
_NAMESPACES = ("user", "pid", "mnt", "net", "ipc", "uts")
_PROBE_SECONDS = 10.0
# Runs in the guest and tries the doors.
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


@dataclass(frozen=True, kw_only=True)
class ProcessLayers(Layers):
    """Layers of an arrangement; `settings` are those that its fork servers are started with."""

    group: ControlGroup

    @property
    def has_slots(self) -> bool:
        """Whether one-shot programs can run in slots."""
        # `readable` paths among a session's own files are not compared between programs
        covered = any(is_covered(path) for path in self.settings["shown"])
        return bool(self.settings["namespaces"]) and not covered

    def remove(self) -> None:
        _remove_session_folders(self.settings)
        self.group.remove()


async def prepare(
    config: SandboxConfig, on_death: Callable[[SandboxWorker], None]
) -> tuple[ProcessLayers, SandboxWorker]:
    """The best arrangement that works here and its first worker; `SandboxUnavailable` if it is too weak."""
    _check(config)
    _allow_descriptors()
    reasons: dict[str, str] = {}
    group = make_group()
    if not group.counts:
        reasons["control group"] = "no hierarchy in which this user may make one"
    for settings in arrangements(config, reasons):
        worker = SandboxWorker(settings, group, on_death)
        try:
            layers = await try_arrangement(worker, settings, config, reasons)
            if not settings["namespaces"]:
                _warn_of_fallback(reasons.get("namespaces", "not tried"))
            return layers, worker
        except BaseException as error:  # cancellation included: nothing may be left behind
            await worker.close()
            _remove_session_folders(settings)
            if not isinstance(error, SandboxError) or not settings["namespaces"]:
                group.remove()
                raise
            reasons["own user ids" if settings["subids"] else "namespaces"] = str(error)
    raise SandboxUnavailable("no arrangement was tried")


@cache
def _warn_of_fallback(reason: str) -> None:
    _log.warning(
        "the sandbox runs without namespaces here, behind Landlock and seccomp alone, which is weaker "
        "(`ludus check sandbox` shows what holds): %s",
        reason,
    )


async def try_arrangement(
    worker: SandboxWorker, settings: dict[str, Any], config: SandboxConfig, reasons: dict[str, str]
) -> ProcessLayers:
    """Which layers hold in an arrangement; `SandboxError` when it does not work or is too weak."""
    told = await worker.start()
    kinds = (False, True) if settings["namespaces"] else (False,)
    found = [await _probe(worker, config, is_slot=is_slot) for is_slot in kinds]
    active = {name: all(_active(one, told)[name] for one in found) for name in _active(found[0], told)}
    active["own user ids"] = settings["uid"] is not None or settings["subids"] is not None
    active["control group"] = worker.group.counts
    if not active["Python"]:
        reasons["Python"] = f"{sys.prefix} and {sys.base_prefix} are not open to other users"
        if settings["subids"]:  # as this very user it may run
            raise SandboxError(reasons["Python"])
    doors = _doors(found[0], config)
    for one in found[1:]:  # a door is open if a session or a slot gets through it
        doors |= {name: error for name, error in _doors(one, config).items() if error is None}
    layers = ProcessLayers(active, doors, reasons, settings, group=worker.group)
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
    """Raise the soft limit on open files: each live session takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def arrangements(config: SandboxConfig, reasons: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Settings of the arrangements, best first."""
    has_landlock = bool(kernel.landlock_version())
    if not has_landlock:
        reasons["landlock"] = "the kernel has none, or it is switched off"
    # where this Python and its packages are installed, so that guest code can import them
    python = [sys.prefix, sys.base_prefix, sys.exec_prefix, str(Path(sys.executable).resolve().parent)]
    shown = [str(Path(path).absolute()) for path in (*python, *config.readable)]
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
        "subids": None,
    }
    if config.network and machine.slirp_program():
        own_net = {"own_net": True, "slirp": True, "resolver": machine.RESOLVER}
        yield from _with_and_without_subids({**common, **own_net, "namespaces": True}, reasons)
    yield from _with_and_without_subids({**common, "namespaces": True}, reasons)
    folder = tempfile.mkdtemp(prefix="ludus-sandbox-")
    Path(folder).chmod(0o711)
    yield {**common, "namespaces": False, "shown": [*_SYSTEM, *common["shown"]], "folder": folder}


def _with_and_without_subids(
    settings: dict[str, Any], reasons: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """As an ordinary user: first with a subordinate user id for each session, then all as this user."""
    if settings["uid"] is None:
        try:
            subids = list(subordinate_ids(shown=settings["shown"]))
        except SandboxError as error:
            reasons["own user ids"] = str(error)
        else:
            yield {**settings, "subids": subids}
    yield settings


def _resolver() -> str:
    """The machine's own resolv.conf, for code that shares its network."""
    try:
        return Path("/etc/resolv.conf").read_text()
    except OSError:
        return ""


async def _probe(worker: SandboxWorker, config: SandboxConfig, *, is_slot: bool) -> dict[str, Any]:
    """Run the probe, with a secret file and a listening port for it to find."""
    with tempfile.TemporaryDirectory(prefix="ludus-probe-") as folder:
        secret = _plant_secret(folder)
        with (
            socket.create_server(("127.0.0.1", 0)) as listening,
            socket.socket(socket.AF_UNIX) as abstract,
        ):
            port = listening.getsockname()[1]
            abstract.bind(f"\0ludus-probe-{port}")
            abstract.listen()
            values = (secret, port, os.getpid(), _NAMESPACES, machine.GATEWAY, f"ludus-probe-{port}")
            limits = config.limits.model_copy(update={"wall_seconds": _PROBE_SECONDS})
            guest = worker.spawn(limits, asyncio.Semaphore(0), one_shot=True, is_slot=is_slot)
            async with ProcessSession(guest, is_slot=is_slot) as session:
                await guest.opened()
                tried = await session.python(
                    f"SECRET, PORT, HOST, NAMES, GATEWAY, ABSTRACT = {values!r}\n{_PROBE}"
                )
    try:
        found: dict[str, Any] = json.loads(tried.stdout)
    except ValueError:
        raise SandboxError(f"the probe of the sandbox failed: {tried.text()}") from None
    return found


def _plant_secret(folder: str) -> str:
    """A world-readable file: only the sandbox keeps code from it."""
    secret = Path(folder, "secret")
    secret.write_text(secrets.token_hex())
    for path in (Path(folder), secret):
        path.chmod(0o777)
    return str(secret)


def _doors(found: dict[str, Any], config: SandboxConfig) -> dict[str, str | None]:
    doors: dict[str, str | None] = dict(found["doors"])
    if found["capabilities"]:
        doors["capabilities"] = None
    if config.network:  # then only the machine's loopback must be out of reach
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


def _remove_session_folders(settings: dict[str, Any]) -> None:
    if settings["folder"]:
        remove_folder(settings["folder"])


def _refusal(layers: ProcessLayers) -> str:
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
