"""Templates: processes that are only forked from.

A fork lives inside its parent's pid namespace and would die with it, whatever the parent's code does to itself.
So the process whose state is wanted twice runs no code any more: it becomes a *template*, and the session
continues in a fork of it. Code runs in leaves alone, and the end of one leaf does not affect another. It ends
with its last fork and its last snapshot. Namespaces nest some thirty deep, so one line of descent can be forked
about that often; then the kernel refuses.
"""

from __future__ import annotations

import asyncio
import socket
import weakref
from dataclasses import replace
from typing import Any

from ludus.sandbox.config import CannotFork, SandboxError, SessionEnded, SessionLost
from ludus.sandbox.processes.guest_process import GuestProcess
from ludus.sandbox.result import ProcessExit, wait_status


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
