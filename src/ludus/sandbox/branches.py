"""Forks and snapshots: a session's process is kept as a stem, and what lives are branches of it.

To fork a process is to make two of it; but a fork lives inside its parent's pid namespace and would die with
it, whatever the parent's code does to itself. So the process whose state is wanted twice runs no code any more:
it becomes a *stem* that is only forked from, and the session goes on in a branch of it. Code runs in leaves
alone, and no leaf's end takes another along. A stem goes when its last branch and its last snapshot have gone.

Namespaces nest some thirty deep, so a line of descent can be forked about that often; then it is refused.
"""

from __future__ import annotations

import asyncio
import socket
import weakref
from dataclasses import replace
from typing import Any

from ludus.sandbox.blame import Blame
from ludus.sandbox.body import Body, first
from ludus.sandbox.config import Limits
from ludus.sandbox.endings import wait_status
from ludus.sandbox.errors import CannotFork, SandboxError, SessionEnded, SessionLost
from ludus.sandbox.worker import Ending


class Stem:
    """A process that is kept as it is, to be forked from."""

    def __init__(
        self, body: Body, limits: Limits, places: asyncio.Semaphore, below: Stem | None
    ) -> None:
        self._body = body
        self._limits, self._places = limits, places
        self._below = below
        self._users = 0
        self._is_let_go = False
        self.is_session = True
        """Whether the session itself still lives in it: then a branch that fails leaves it alone."""
        self._blame = Blame(limits, body.process)
        self.is_lent = False
        """Whether a branch lives in its files: then they are as that branch makes them."""
        self._lock = asyncio.Lock()
        self._pids: weakref.WeakKeyDictionary[Body, int] = weakref.WeakKeyDictionary()
        self._farewells: weakref.WeakKeyDictionary[Body, asyncio.Task[int | None]] = (
            weakref.WeakKeyDictionary()
        )

    async def branch(self, *, copy: bool) -> Body:
        """A new process with the stem's state. `copy`: with files of its own; otherwise it has the stem's."""
        self.is_lent = self.is_lent or not copy
        async with self._lock:
            if not self._body.alive:
                raise self._gone()
            if self._places.locked():
                raise CannotFork("as many sessions are alive as the sandbox allows (max_sessions)")
            await self._body.process.widen(True)
            ours, theirs = socket.socketpair()
            try:
                pid = await self._clone(theirs)
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
            await self._places.acquire()
            body = self._adopted(pid, ours, copy)
            self._pids[body] = pid
        try:
            async with asyncio.timeout(self._limits.wall_seconds):
                if not await asyncio.shield(body.process.adopted):
                    raise SandboxError(body.process.refused or "it could not be completed")
                body.tell({"op": "go", "copy": copy})
                await body.opened()
        except (TimeoutError, SandboxError) as error:
            ours_to_blame = body.process.problem
            await body.end()
            if not self._body.alive:
                raise self._gone() from None
            if ours_to_blame is not None:
                raise SandboxError(f"a fork could not be completed: {ours_to_blame}") from None
            reason = str(error) or "it did not answer in time"
            raise CannotFork(f"the fork did not come to life: {reason}") from None
        except BaseException:
            await body.end()
            raise
        return body

    async def ending(self, branch: Body) -> Ending:
        """How a branch ended, which its parent alone can ask the kernel; the parent is this stem's process."""
        known = await asyncio.shield(branch.process.ended)
        farewell = self._farewells.get(branch)
        status = await asyncio.shield(farewell) if farewell is not None else None
        return known if status is None else replace(known, status=status)

    def hold(self) -> None:
        """One more user: a branch or a snapshot."""
        self._users += 1

    def release(self) -> None:
        """One user less; without any, the stem is of no use."""
        self._users -= 1
        if not self._users and not self.is_session:
            self._is_let_go = True
            self._body.process.kill()

    async def gone(self) -> None:
        """If nobody uses it, wait until it has ended, and those below it."""
        await asyncio.gather(*self._farewells.values())
        stem: Stem | None = self
        while stem is not None and not stem._users:
            await asyncio.shield(stem._body.process.ended)
            stem = stem._below

    def _adopted(self, pid: int, link_end: socket.socket, copy: bool) -> Body:
        parent = self._body.process
        process = parent.worker.adopt(pid, parent.number, self._limits, copy=copy)
        self.hold()
        body = Body(process, link_end, self._places)
        process.ended.add_done_callback(lambda _: self._on_branch_end(body))
        return body

    def _on_branch_end(self, branch: Body) -> None:
        # where the session still lives in it, its own requests are under way there
        if branch.process.was_killed or self.is_session or not self._body.alive:
            self.release()
        else:
            self._farewells[branch] = asyncio.get_running_loop().create_task(self._farewell(branch))

    async def _farewell(self, branch: Body) -> int | None:
        """Ask how a branch ended that nobody ended; only then let go of it."""
        try:
            async with self._lock:
                said = await self._asked({"op": "ended", "pid": self._pids.get(branch, 0)}, fds=())
        except (SandboxError, SessionEnded):
            return None
        finally:
            self.release()
        return wait_status(said.get("status"))

    async def _clone(self, control: socket.socket) -> int:
        """The new process: its pid where the stem lives."""
        said = await self._asked({"op": "fork"}, fds=(control.fileno(),))
        pid = said.get("forked")
        if not isinstance(pid, int):
            raise CannotFork(str(said.get("refused", "the session gave no reason"))[:500])
        return pid

    async def _asked(self, header: dict[str, Any], fds: tuple[int, ...]) -> dict[str, Any]:
        request = self._body.ask(header, fds=fds)
        try:
            async with asyncio.timeout(self._limits.wall_seconds):
                await first(request.answered, self._body.process.ended)
        except BaseException as error:
            self._body.process.kill()  # a fork that nobody will adopt may be under way
            if isinstance(error, TimeoutError):
                await asyncio.shield(self._body.process.ended)
                raise self._gone(hung=True) from None
            raise
        finally:
            self._body.settled()
        if not request.answered.done():
            raise self._gone()
        return request.answered.result()[0]

    def _gone(self, *, hung: bool = False) -> SessionLost | SessionEnded:
        """What to say about a stem that has ended: no code runs in it, but the code's signals still arrive."""
        reason = self._blame.ours(self._body.process) or ("it was let go" if self._is_let_go else None)
        if reason is not None:
            return SessionLost(f"what was to be forked is gone: {reason}")
        how = "did not let it answer in time, and it was ended" if hung else "has ended it"
        return SessionEnded(f"the code in what was to be forked {how}", hung=hung)
