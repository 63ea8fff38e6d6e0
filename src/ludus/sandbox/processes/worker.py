"""What sessions are forked from: workers (the host's side of `guest/fork_server.py`), and templates.

Who waits for whom. `start` waits for the fork server's preloading. After that nothing here waits: requests are
written to its socket, and its events (a session ended, a fork has its files) arrive on the event loop and are
handed to the session they belong to. The fork server ends when its socket is closed, also by the host's death,
and every session ends with it.

A fork lives inside its parent's pid namespace and would die with it, whatever the parent's code does to
itself. So the process whose state is wanted twice runs no code any more: it becomes a *template*, and the
session continues in a fork of it. Code runs in leaves alone, and the end of one leaf does not affect another.
A template ends with its last fork and its last snapshot. Namespaces nest some thirty deep, so one line of
descent can be forked about that often; then the kernel refuses.
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
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ludus.sandbox.config import CannotFork, Limits, SandboxError, SessionEnded, SessionLost
from ludus.sandbox.exchange import ProcessExit, wait_status
from ludus.sandbox.processes.guest_process import ControlChannel, GuestProcess
from ludus.sandbox.processes.machine import (
    END_SECONDS,
    USERS_EACH,
    ControlGroup,
    Slirp,
    map_subids,
    map_users,
    share_of_subids,
    wait_or_kill,
)

_START_SECONDS = 120.0
_WORKERS_APART = 2_000
# Starts at random, so that workers of other processes on this machine get other user ids.
_counter = itertools.count(secrets.randbelow(_WORKERS_APART))
_PACKAGE = Path(__file__).parent.parent.parent
# The packages above `guest` are replaced by empty ones, so that the fork server loads none of their code.
_BOOTSTRAP = """
import sys, types
root, link = sys.argv[1], int(sys.argv[2])
for name, path in (("ludus", root), ("ludus.sandbox", root + "/sandbox")):
    sys.modules[name] = module = types.ModuleType(name)
    module.__path__ = [path]
from ludus.sandbox.guest import fork_server_main
for name in [name for name in sys.modules if name.partition(".")[0] == "ludus"]:
    del sys.modules[name]
fork_server_main.main(link)
"""


class SandboxWorker:
    """A fork server (a warm interpreter), from which sessions are forked."""

    def __init__(
        self, settings: dict[str, Any], group: ControlGroup, on_death: Callable[[SandboxWorker], None]
    ) -> None:
        self._settings = dict(settings)
        if settings["uid"] is not None:  # each worker has its own range of user ids
            self._settings["uid"] += USERS_EACH * (next(_counter) % _WORKERS_APART)
            self._settings["users"] = USERS_EACH
        elif settings["subids"]:
            self._settings["subids"] = share_of_subids(settings["subids"], next(_counter))
        self.group = group
        self._on_death = on_death
        self._guests: dict[int, GuestProcess] = {}
        self._numbers = itertools.count(1)
        self._link: ControlChannel | None = None
        self._popen: subprocess.Popen[bytes] | None = None
        self._slirp: Slirp | None = None
        self._ready: asyncio.Future[dict[str, Any]] | None = None
        self.is_alive = False
        self.starting = 0
        """Its executions in their first 30 milliseconds."""

    @property
    def pid(self) -> int:
        """The process that was started; the fork server is its child."""
        return self._popen.pid if self._popen else 0

    @property
    def sessions(self) -> int:
        return len(self._guests)

    async def start(self) -> dict[str, Any]:
        """Start it and wait until sessions can be forked; `SandboxError` says why not."""
        ours = self._launch()
        self.group.add(self.pid)  # before it starts anything: children inherit the group
        self._ready = asyncio.get_running_loop().create_future()
        self._link = ControlChannel(ours, self._on_frame, self._on_close)
        self._link.send(self._settings)
        try:
            async with asyncio.timeout(_START_SECONDS):
                told = await self._ready
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError):
                raise SandboxError(
                    f"the fork server did not start within {_START_SECONDS:g} seconds"
                ) from None
            raise
        self.is_alive = True
        return told

    def _launch(self) -> socket.socket:
        """Start the process; our end of the socket to it."""
        ours, theirs = socket.socketpair()
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-c", _BOOTSTRAP, str(_PACKAGE), str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # resolve symbols once, not lazily in every fork
                env={**_environment(), "LD_BIND_NOW": "1"},
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise SandboxError(f"a fork server could not be started: {error}") from error
        finally:
            theirs.close()
        return ours

    def spawn(
        self, limits: Limits, capacity: asyncio.Semaphore, *, one_shot: bool, is_slot: bool
    ) -> GuestProcess:
        """Fork a session, or a slot, which runs one-shot programs. The caller has acquired `capacity`."""
        ours, theirs = socket.socketpair()
        guest = self._new_guest(ours, limits, capacity)
        plain_limits = limits.model_dump()
        plain_limits["processes"] += is_slot  # a slot's first process runs no program
        header = {"op": "spawn", "id": guest.number, "limits": plain_limits}
        with theirs:
            self.tell({**header, "one_shot": one_shot, "slot": is_slot}, (theirs.fileno(),))
        return guest

    def adopt(
        self, pid: int, parent: GuestProcess, limits: Limits, link_end: socket.socket, *, copy: bool
    ) -> GuestProcess:
        """Take over a session that another one forked. The caller has acquired the parent's `capacity`."""
        guest = self._new_guest(link_end, limits, parent.capacity)
        header = {"op": "adopt", "id": guest.number, "parent": parent.number, "pid": pid}
        self.tell({**header, "copy": copy, "disk_mb": limits.disk_mb})
        return guest

    def tell(self, header: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        if self._link is not None:
            self._link.send(header, fds=fds)

    async def close(self) -> None:
        """End the fork server and with it all its sessions."""
        if self._link is not None:
            self._link.close()
            self._on_close(None)
        if self._popen is not None and self._popen.returncode is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_SECONDS):
                    await _exited(self._popen.pid)
            self._popen.kill()
            self._popen.wait()
        if self._slirp is not None:
            await asyncio.to_thread(self._slirp.close)

    def abandon(self) -> None:
        """Tell it to end without an event loop; `wait_for_end` waits for it."""
        self.is_alive = False
        if self._link is not None:
            self._link.abandon()
            self._link = None

    def wait_for_end(self) -> None:
        """Wait until it has ended with all its sessions; kill it if that takes too long."""
        if self._popen is not None and self._popen.returncode is None:
            wait_or_kill(self._popen)
        if self._slirp is not None:
            self._slirp.close()

    def _new_guest(
        self, link_end: socket.socket, limits: Limits, capacity: asyncio.Semaphore
    ) -> GuestProcess:
        guest = GuestProcess(self, next(self._numbers), link_end, limits, capacity)
        if self._link is None:  # it died after it was chosen: no event would ever come
            _lose(guest)
        else:
            self._guests[guest.number] = guest
        return guest

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
        guest = self._guests.get(header["id"])
        if guest is None:
            return
        if event == "excess":
            guest.excess = header["what"]
        elif event == "widened":
            if guest.widened is not None and not guest.widened.done():
                guest.widened.set_result(None)
        elif event == "adopted":
            guest.refused, guest.problem = header.get("refused"), header.get("failed")
            guest.adopted.set_result(bool(header["good"]))
        else:
            if event == "failed":
                guest.problem = str(header["error"])
            peak = header.get("peak_kb", 0) / 1024
            del self._guests[guest.number]
            guest.set_ended(
                ProcessExit(header.get("status"), header.get("cpu", 0.0), peak, guest.excess)
            )

    def _map_users(self) -> None:
        assert self._popen is not None and self._ready is not None and self._link is not None
        try:
            if self._settings["subids"]:
                map_subids(self._popen.pid, self._settings["subids"])
            else:
                map_users(self._popen.pid, self._settings["uid"])
        except (OSError, SandboxError) as error:
            if not self._ready.done():
                self._ready.set_exception(SandboxError(f"user map: {error}"))
            return
        if self._settings["slirp"]:
            self._slirp = Slirp(self._popen.pid, self._on_network)
            self.group.add(self._slirp.pid)
        else:
            self._on_network(None)

    def _on_network(self, problem: str | None) -> None:
        """The namespaces have their user map, and their network where there is one."""
        assert self._ready is not None
        if problem is not None and not self._ready.done():
            self._ready.set_exception(SandboxError(problem))
        elif self._link is not None:
            self._link.send({"op": "mapped"})

    def _on_close(self, problem: str | None) -> None:
        was_alive, self.is_alive = self.is_alive, False
        self._link = None
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(SandboxError("the fork server ended while it started"))
        guests, self._guests = list(self._guests.values()), {}
        for guest in guests:
            _lose(guest)
        if was_alive:
            self._on_death(self)


async def _exited(pid: int) -> None:
    """Wait for a child to end, without reaping it."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    pidfd = os.pidfd_open(pid)
    try:
        loop.add_reader(pidfd, ended.set)
        await ended.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


def _lose(guest: GuestProcess) -> None:
    """Its worker has ended, and the process with it."""
    guest.problem = "the fork server it was forked from ended"
    guest.set_ended(ProcessExit(None))


def _environment() -> dict[str, str]:
    """The whole environment of model-written code; nothing of the host's is in it."""
    folders = [f"{sys.prefix}/bin", f"{sys.base_prefix}/bin", "/usr/local/bin", "/usr/bin", "/bin"]
    return {
        "PATH": ":".join(dict.fromkeys(folders)),
        "LANG": "C.UTF-8",
        "USER": "agent",
        "LOGNAME": "agent",
        "SHELL": "/bin/bash",
        "TERM": "dumb",
        "PYTHONDONTWRITEBYTECODE": "1",
        # a library's threads would not survive the fork
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


class TemplateProcess:
    """A process that runs no code any more and is only forked from."""

    def __init__(self, guest: GuestProcess, parent: TemplateProcess | None) -> None:
        self.guest = guest
        self._parent = parent
        self._users = 0
        self._is_released = False
        self.is_session = True
        """Whether the session itself still lives in it: then it survives a fork that fails."""
        self.has_lent_files = False
        """Whether a fork lives in its files and may change them."""
        self._kills = guest.kernel_kills()
        self._lock = asyncio.Lock()
        self._status_queries: weakref.WeakKeyDictionary[GuestProcess, asyncio.Task[int | None]] = (
            weakref.WeakKeyDictionary()
        )

    async def fork(self, *, copy_files: bool) -> GuestProcess:
        """A new process with the template's state, and with a copy of its files or the files themselves."""
        self.has_lent_files = self.has_lent_files or not copy_files
        guest = self.guest
        async with self._lock:
            if not guest.alive:
                raise self._gone()
            if guest.capacity.locked():
                raise CannotFork("as many sessions are alive as the sandbox allows (max_sessions)")
            await guest.widen(True)
            ours, theirs = socket.socketpair()
            try:
                pid = await self._request_fork(theirs)
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
            await guest.capacity.acquire()
            fork = guest.worker.adopt(pid, guest, guest.limits, ours, copy=copy_files)
            self.hold()
            fork.ended.add_done_callback(lambda _: self._on_fork_end(fork, pid))
        try:
            async with asyncio.timeout(guest.limits.wall_seconds):
                if not await asyncio.shield(fork.adopted):
                    raise SandboxError(fork.refused or "it could not be completed")
                fork.tell({"op": "go", "copy": copy_files})
                await fork.opened()
        except (TimeoutError, SandboxError) as error:
            infra_failure = fork.problem
            await fork.end()
            if not guest.alive:
                raise self._gone() from None
            if infra_failure is not None:
                raise SandboxError(f"a fork could not be completed: {infra_failure}") from None
            reason = str(error) or "it did not answer in time"
            raise CannotFork(f"the fork did not come to life: {reason}") from None
        except BaseException:
            await fork.end()
            raise
        return fork

    async def ending(self, fork: GuestProcess) -> ProcessExit:
        """How a fork ended. Only its parent, which is this template's process, can ask the kernel for its
        status."""
        known = await asyncio.shield(fork.ended)
        query = self._status_queries.get(fork)
        status = await asyncio.shield(query) if query is not None else None
        return known if status is None else replace(known, status=status)

    def hold(self) -> None:
        """One more user: a fork or a snapshot."""
        self._users += 1

    def release(self) -> None:
        """One user less; the template ends with its last user."""
        self._users -= 1
        if not self._users and not self.is_session:
            self._is_released = True
            self.guest.kill()

    async def gone(self) -> None:
        """If it has no users, wait until it has ended; then wait for the templates it was forked from."""
        template: TemplateProcess | None = self
        while template is not None:
            # a fork that has just ended is counted off by a callback, or by a query that the callback begins
            await asyncio.sleep(0)
            await asyncio.gather(*template._status_queries.values())
            if template._users:
                return
            await asyncio.shield(template.guest.ended)
            template = template._parent

    def _on_fork_end(self, fork: GuestProcess, pid: int) -> None:
        # while the session itself lives in it, its own requests are in flight there
        if fork.was_killed or self.is_session or not self.guest.alive:
            self.release()
        else:
            query = asyncio.get_running_loop().create_task(self._exit_status(pid))
            self._status_queries[fork] = query

    async def _exit_status(self, pid: int) -> int | None:
        """Ask the template how a fork ended that the host did not kill; then release the fork's hold."""
        try:
            async with self._lock:
                said = await self._asked({"op": "ended", "pid": pid}, fds=())
        except (SandboxError, SessionEnded):
            return None
        finally:
            self.release()
        return wait_status(said.get("status"))

    async def _request_fork(self, control: socket.socket) -> int:
        """The pid of the new process in the template's pid namespace."""
        said = await self._asked({"op": "fork"}, fds=(control.fileno(),))
        pid = said.get("forked")
        if not isinstance(pid, int):
            raise CannotFork(str(said.get("refused", "the session gave no reason"))[:500])
        return pid

    async def _asked(self, header: dict[str, Any], fds: tuple[int, ...]) -> dict[str, Any]:
        try:
            answer = await self.guest.exchange(header, fds=fds)
        except TimeoutError:
            await asyncio.shield(self.guest.ended)
            raise self._gone(hung=True) from None
        if answer is None:
            raise self._gone()
        return answer[0]

    def _gone(self, *, hung: bool = False) -> SessionLost | SessionEnded:
        """The error for a template that has ended: no code runs in it, but it can still receive the code's
        signals."""
        reason = self.guest.infra_failure(self._kills)
        if reason is None and self._is_released:
            reason = "it was released"
        if reason is not None:
            return SessionLost(f"what was to be forked is gone: {reason}")
        how = "did not let it answer in time, and it was ended" if hung else "has ended it"
        return SessionEnded(f"the code in what was to be forked {how}", hung=hung)
