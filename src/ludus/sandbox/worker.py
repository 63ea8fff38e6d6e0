"""A warm interpreter seen from outside: started, asked for sessions, and replaced when it dies.

Who waits for whom. `start` waits for the interpreter's preloading. After that nothing here waits: requests are
written to its socket, and its events (a session ended, a fork has its files) arrive on the event loop and are
handed to the session they belong to. The interpreter ends when its socket is closed, also by our death, and
every session ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ludus.sandbox.cgroups import ControlGroup
from ludus.sandbox.config import Limits
from ludus.sandbox.errors import SandboxError
from ludus.sandbox.inside.life import Bounds
from ludus.sandbox.link import Link
from ludus.sandbox.network import Slirp

_START_SECONDS = 120.0
_END_SECONDS = 5.0
_USERS_EACH, _WORKERS_APART = 1_000_000, 2_000
# Another process on this machine counts its workers too, and most likely begins somewhere else.
_counter = itertools.count(secrets.randbelow(_WORKERS_APART))
_ROOM = Path(__file__).parent
# The packages above `inside` are replaced by empty ones, so that the warm interpreter loads none of them.
_BOOTSTRAP = """
import sys, types
root, link = sys.argv[1], int(sys.argv[2])
for name, path in (("ludus", root), ("ludus.sandbox", root + "/sandbox")):
    sys.modules[name] = module = types.ModuleType(name)
    module.__path__ = [path]
from ludus.sandbox.inside import zygote
for name in [name for name in sys.modules if name.partition(".")[0] == "ludus"]:
    del sys.modules[name]
zygote.main(link)
"""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a session's process ended."""

    status: int | None
    """As `os.wait` gives it; None when nobody could ask."""
    cpu_seconds: float = 0.0
    peak_mb: float = 0.0
    excess: str | None = None
    """The limit on the session as a whole for which it was ended."""


class Process:
    """The process of one session, as far as its worker knows it."""

    def __init__(self, worker: Worker, number: int) -> None:
        self.worker, self.number = worker, number
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[Ending] = loop.create_future()
        self.adopted: asyncio.Future[bool] = loop.create_future()
        self._is_wide = False
        self.widened: asyncio.Future[None] | None = None
        """Done when its worker has changed how many processes it may have."""
        self.excess: str | None = None
        self.problem: str | None = None
        """Why it could not be started, or was lost."""
        self.was_killed = False
        """Whether its end was our doing."""
        self._is_watched = False
        self.refused: str | None = None
        """Why it could not be completed, where the code in it has made that impossible."""

    def kill(self) -> None:
        """End it and all it started; `ended` tells when that is done.

        Told once: hostile code may give as many reasons to be ended as it can write frames.
        """
        if self.ended.done() or self.was_killed:
            return
        self.was_killed = True
        self.worker.tell({"op": "kill", "id": self.number})

    def signal(self, which: int) -> None:
        self.worker.tell({"op": "signal", "id": self.number, "signal": which})

    def watch(self) -> None:
        """Hold all its processes together to its limits without delay, until `unwatch`."""
        self._is_watched = True
        self.worker.tell({"op": "watch", "id": self.number})

    async def widen(self, wide: bool) -> None:
        """Let forks of it have processes beside its own; or, if it is not forked after all, its own alone."""
        if self._is_wide != wide:
            self._is_wide = wide
            self.widened = asyncio.get_running_loop().create_future()
            self.worker.tell({"op": "widen", "id": self.number, "wide": wide})
            await asyncio.wait((self.widened, self.ended), return_when=asyncio.FIRST_COMPLETED)

    def unwatch(self) -> None:
        if self._is_watched:
            self._is_watched = False
            self.worker.tell({"op": "unwatch", "id": self.number})


class Worker:
    """One warm interpreter."""

    def __init__(
        self, order: dict[str, Any], group: ControlGroup, on_death: Callable[[Worker], None]
    ) -> None:
        self._order = dict(order)
        if order["uid"] is not None:  # no two workers give their sessions the same users
            self._order["uid"] += _USERS_EACH * (next(_counter) % _WORKERS_APART)
            self._order["users"] = _USERS_EACH
        self.group = group
        self._on_death = on_death
        self._processes: dict[int, Process] = {}
        self._numbers = itertools.count(1)
        self._link: Link | None = None
        self._popen: subprocess.Popen[bytes] | None = None
        self._slirp: Slirp | None = None
        self._ready: asyncio.Future[dict[str, Any]] | None = None
        self.is_alive = False
        self.starting = 0
        """Executions of it in their first moments."""

    @property
    def pid(self) -> int:
        """The process that was started; with namespaces, the warm interpreter is its child."""
        return self._popen.pid if self._popen else 0

    @property
    def sessions(self) -> int:
        return len(self._processes)

    async def start(self) -> dict[str, Any]:
        """Wait until sessions can be forked; `SandboxError` says why not."""
        ours = self._launch()
        self.group.add(self.pid)  # before it starts anything, so that everything it starts is in there
        self._ready = asyncio.get_running_loop().create_future()
        self._link = Link(ours, self._on_frame, self._on_close)
        self._link.send(self._order)
        try:
            async with asyncio.timeout(_START_SECONDS):
                told = await self._ready
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError):
                raise SandboxError(f"no warm interpreter within {_START_SECONDS:g} seconds") from None
            raise
        self.is_alive = True
        return told

    def _launch(self) -> socket.socket:
        """Start the process; our end of the socket to it."""
        ours, theirs = socket.socketpair()
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-c", _BOOTSTRAP, str(_ROOM.parent), str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # else every fork would look up for itself what its parent has not called yet
                env={**_environment(), "LD_BIND_NOW": "1"},
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise SandboxError(f"a warm interpreter could not be started: {error}") from error
        finally:
            theirs.close()
        return ours

    def spawn(
        self, control: socket.socket, limits: Limits, *, one_shot: bool = False, slot: bool = False
    ) -> Process:
        """Fork a session that talks over `control`, or a slot, which runs one-shot programs."""
        process = self._new_process()
        bounds = asdict(bounds_of(limits))
        bounds["processes"] += slot  # its first process runs no program
        header = {"op": "spawn", "id": process.number, "bounds": bounds}
        header |= {"one_shot": one_shot, "slot": slot}
        self.tell(header, (control.fileno(),))
        return process

    def adopt(self, pid: int, parent: int, limits: Limits, *, copy: bool) -> Process:
        """Look after a session that another one forked; `adopted` tells when it has its files."""
        process = self._new_process()
        header = {"op": "adopt", "id": process.number, "parent": parent, "pid": pid}
        self.tell({**header, "copy": copy, "disk_mb": limits.disk_mb})
        return process

    def tell(self, header: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        if self._link is not None:
            self._link.send(header, fds=fds)

    async def close(self) -> None:
        """End the interpreter and with it all its sessions."""
        if self._link is not None:
            self._link.close()
            self._on_close(None)
        if self._popen is not None and self._popen.returncode is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_SECONDS):
                    await _exited(self._popen.pid)
            self._popen.kill()
            self._popen.wait()
        if self._slirp is not None:
            await asyncio.to_thread(self._slirp.close)

    def abandon(self) -> None:
        """Tell it to end, where there is no event loop any more; `wait_for_end` waits for it."""
        self.is_alive = False
        if self._link is not None:
            self._link.abandon()
            self._link = None

    def wait_for_end(self) -> None:
        """It ends by itself and takes its sessions along; what is killed leaves that to the kernel, later."""
        if self._popen is not None and self._popen.returncode is None:
            try:
                self._popen.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._popen.kill()
                self._popen.wait()
        if self._slirp is not None:
            self._slirp.close()

    def _new_process(self) -> Process:
        process = Process(self, next(self._numbers))
        if (
            self._link is None
        ):  # it died after it was chosen: nobody would ever tell how the process ended
            _lose(process)
        else:
            self._processes[process.number] = process
        return process

    def _on_frame(self, header: dict[str, Any], body: bytes, fds: list[int]) -> None:
        event = header.get("event")
        assert self._ready is not None
        if event == "unshared":
            self._map_users()
        elif event == "ready" and not self._ready.done():
            self._ready.set_result(header)
        elif event == "broken" and not self._ready.done():
            self._ready.set_exception(SandboxError(str(header["error"])))
        elif event in ("exit", "failed", "adopted", "excess", "widened"):
            self._on_event(event, header)

    def _on_event(self, event: str, header: dict[str, Any]) -> None:
        process = self._processes.get(header["id"])
        if process is None:
            return
        if event == "excess":
            process.excess = header["what"]
        elif event == "widened":
            if process.widened is not None and not process.widened.done():
                process.widened.set_result(None)
        elif event == "adopted":
            process.refused, process.problem = header.get("refused"), header.get("ours")
            process.adopted.set_result(bool(header["good"]))
        else:
            if event == "failed":
                process.problem = str(header["error"])
            peak = header.get("peak_kb", 0) / 1024
            ending = Ending(header.get("status"), header.get("cpu", 0.0), peak, process.excess)
            del self._processes[process.number]
            _resolve(process, ending)

    def _map_users(self) -> None:
        assert self._popen is not None and self._ready is not None and self._link is not None
        try:
            map_users(self._popen.pid, self._order["uid"])
        except OSError as error:
            if not self._ready.done():
                self._ready.set_exception(SandboxError(f"user map: {error}"))
            return
        if self._order["slirp"]:
            self._slirp = Slirp(self._popen.pid, self._on_network)
            self.group.add(self._slirp.pid)
        else:
            self._on_network(None)

    def _on_network(self, problem: str | None) -> None:
        """The namespaces have their users, and their network where there is one."""
        assert self._ready is not None
        if problem is not None and not self._ready.done():
            self._ready.set_exception(SandboxError(problem))
        elif self._link is not None:
            self._link.send({"op": "mapped"})

    def _on_close(self, problem: str | None) -> None:
        was_alive, self.is_alive = self.is_alive, False
        self._link = None
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(SandboxError("the warm interpreter ended while it started"))
        processes, self._processes = list(self._processes.values()), {}
        for process in processes:
            _lose(process)
        if was_alive:
            self._on_death(self)


async def _exited(pid: int) -> None:
    """Wait for a child to end, without collecting it."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    pidfd = os.pidfd_open(pid)
    try:
        loop.add_reader(pidfd, ended.set)
        await ended.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


def _lose(process: Process) -> None:
    """Its worker is gone, and it with it."""
    process.problem = "the warm interpreter it was forked from ended"
    _resolve(process, Ending(None))


def _resolve(process: Process, ending: Ending) -> None:
    if not process.adopted.done():
        process.adopted.set_result(False)
    if not process.ended.done():
        process.ended.set_result(ending)


def bounds_of(limits: Limits) -> Bounds:
    """The limits that the inside itself puts in place."""
    return Bounds(
        cpu_seconds=limits.cpu_seconds,
        memory_mb=limits.memory_mb,
        processes=limits.processes,
        open_files=limits.open_files,
        file_mb=limits.file_mb,
        disk_mb=limits.disk_mb,
    )


_IN_A_CONTAINER = ((52_000, 8_000), (65_534, 1))
"""User ids that nobody has, where a container's root has few: the first, and how many."""


def map_users(pid: int, first: int | None) -> None:
    """Say who the users of a new user namespace are outside.

    As root: nobody at all, and one user for each session, because the kernel keeps many of its counts
    (descriptors in flight, pages in pipes, watches of epoll) for a user. Otherwise the one user that we are.
    """
    folder = Path(f"/proc/{pid}")
    if first is None:
        (folder / "setgroups").write_text("deny")
        (folder / "uid_map").write_text(f"0 {os.geteuid()} 1")
        (folder / "gid_map").write_text(f"0 {os.getegid()} 1")
        return
    ranges = ((first, _USERS_EACH), *_IN_A_CONTAINER)
    for position, (user, count) in enumerate(ranges):
        try:
            (folder / "uid_map").write_text(f"0 {user} {count}")
        except OSError:
            if position == len(ranges) - 1:
                raise
            continue
        (folder / "gid_map").write_text(f"0 {user} {count}")
        return


def _environment() -> dict[str, str]:
    """The whole environment of model-written code: nothing of ours is in it."""
    folders = [f"{sys.prefix}/bin", f"{sys.base_prefix}/bin", "/usr/local/bin", "/usr/bin", "/bin"]
    return {
        "PATH": ":".join(dict.fromkeys(folders)),
        "LANG": "C.UTF-8",
        "USER": "agent",
        "LOGNAME": "agent",
        "SHELL": "/bin/bash",
        "TERM": "dumb",
        "PYTHONDONTWRITEBYTECODE": "1",
        # a library's own threads would not survive the fork, and a session has few processors anyway
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
