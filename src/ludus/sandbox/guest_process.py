"""Guest processes on the host: requests to one, forking from one, and fault attribution when one is gone.

Who waits for whom. At most one request to a guest process is in flight. Its answer is the next frame that the
guest sends; an unsolicited frame means that the code has taken over the process, which is killed for it. What
the guest says is untrusted data; that its process has ended is known from the kernel alone.

Forks and snapshots. A fork lives inside its parent's pid namespace and would die with it, whatever the parent's
code does to itself. So the process whose state is wanted twice runs no code any more: it becomes a *template*
that is only forked from, and the session continues in a fork of it. Code runs in leaves alone, and the end of
one leaf does not affect another. A template ends with its last fork and its last snapshot. Namespaces nest some
thirty deep, so one line of descent can be forked about that often; then the kernel refuses.
"""

from __future__ import annotations

import asyncio
import socket
import weakref
from dataclasses import dataclass, replace
from typing import Any

from ludus.sandbox.config import CannotFork, Limits, SandboxError, SessionEnded, SessionLost
from ludus.sandbox.guest_io import ControlChannel
from ludus.sandbox.result import ProcessExit, ended_at_once, looks_killed, unfinished, wait_status
from ludus.sandbox.worker import ProcessHandle

_GRACE_SECONDS = 0.5
CONTROL_GROUP_FULL = (
    "all sessions together used up the memory of the sandbox's control group, and the kernel ended this one; "
    "allow fewer at a time (max_sessions) or less memory to each (limits.memory_mb)"
)


class FaultAttribution:
    """Attributes the end of a process to the code or to the infrastructure, where its report does not say.

    The code is at fault, with two exceptions: the worker died; or the process was killed while the kernel
    killed processes for the memory of the whole sandbox. Those are infrastructure failures (`SessionLost`): a
    session that exceeds a limit of its own is killed for that, with a result that says so.
    """

    def __init__(self, limits: Limits, process: ProcessHandle) -> None:
        self._limits = limits
        self.begin(process)

    def begin(self, process: ProcessHandle) -> None:
        """Count the kernel's kills from now on; called before each execution."""
        self._kills = process.worker.group.kills()

    def is_group_full(self, process: ProcessHandle) -> bool:
        """Whether the kernel killed a process for the memory of all; False where this session alone may fill
        it."""
        group = process.worker.group
        return group.kills() > self._kills and self._limits.memory_mb << 20 < group.memory_bytes

    def infra_failure(self, process: ProcessHandle) -> str | None:
        """Why the end of a process is an infrastructure failure; None where the code is at fault."""
        if process.problem is not None:
            return process.problem
        if not process.ended.done() or process.was_killed or not self.is_group_full(process):
            return None
        return (
            CONTROL_GROUP_FULL
            if looks_killed(unfinished(process.ended.result(), None, self._limits))
            else None
        )


@dataclass(slots=True)
class GuestRequest:
    """A request to the guest."""

    answered: asyncio.Future[tuple[dict[str, Any], bytes]]


class GuestProcess:
    """A process that code runs in, or that is kept as a template."""

    def __init__(
        self, process: ProcessHandle, link_end: socket.socket, capacity: asyncio.Semaphore
    ) -> None:
        """The caller has acquired `capacity`; the end of the process releases it."""
        self.process = process
        self._capacity = capacity
        self._link = ControlChannel(link_end, self._on_frame, self._on_close)
        self._request: GuestRequest | None = None
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        process.ended.add_done_callback(self._on_end)

    @property
    def alive(self) -> bool:
        return not self.process.ended.done()

    async def opened(self) -> None:
        """Wait until the guest is ready; one that cannot start is an infrastructure failure."""
        await first(self._ready, self.process.ended)
        if not self._ready.done():
            reason = self.process.problem or ended_at_once(self.process.ended.result())
            raise SandboxError(f"a session could not be started: {reason}")
        self._ready.result()

    def ask(
        self,
        header: dict[str, Any],
        body: bytes = b"",
        fds: tuple[int, ...] = (),
        *,
        most_body: int = 0,
    ) -> GuestRequest:
        """Send a request; its `answered` is done when the guest answers. `fds` are copied."""
        self._request = GuestRequest(asyncio.get_running_loop().create_future())
        self._link.most_body = most_body
        self._link.send(header, body, fds)
        return self._request

    async def exchange(
        self,
        header: dict[str, Any],
        body: bytes = b"",
        fds: tuple[int, ...] = (),
        *,
        seconds: float,
        most_body: int = 0,
    ) -> tuple[dict[str, Any], bytes] | None:
        """The answer to a request that takes no time; None if the process ended instead.

        After a timeout (`TimeoutError`) or a cancellation it is killed: its late answer would be taken for that
        of the next request, and a fork that it is making would have no owner.
        """
        request = self.ask(header, body, fds, most_body=most_body)
        try:
            async with asyncio.timeout(seconds):
                await first(request.answered, self.process.ended)
        except BaseException:
            self.process.kill()
            raise
        finally:
            self.settled()
        return request.answered.result() if request.answered.done() else None

    def tell(self, header: dict[str, Any]) -> None:
        """Send a message that has no answer."""
        self._link.send(header)

    def settled(self) -> None:
        """The request is over; any further frame is unsolicited."""
        self._request = None

    async def end(self) -> None:
        """Kill the process and all it started, and wait until it is gone."""
        self._link.close()
        self.process.kill()
        await asyncio.shield(self.process.ended)

    def _on_frame(self, header: dict[str, Any], body: bytes, fds: list[int]) -> None:
        if not self._ready.done():
            if header.get("state") == "ready":
                self._ready.set_result(None)
            else:
                reason = str(header.get("broken", header))[:500]
                self._ready.set_exception(SandboxError(f"a session could not be started: {reason}"))
            return
        request = self._request
        if request is None or request.answered.done():
            self.process.kill()
            return
        request.answered.set_result((header, body))

    def _on_close(self, problem: str | None) -> None:
        """The guest closed its end. Its process ends next, or is killed: it cannot be reached any more."""
        wait = 0.0 if problem else _GRACE_SECONDS
        asyncio.get_running_loop().call_later(wait, self.process.kill)

    def _on_end(self, _: object) -> None:
        self._link.drain()  # its last frame may have arrived together with its end
        self._link.close()
        self._capacity.release()
        if self._ready.done() and not self._ready.cancelled():
            self._ready.exception()  # retrieved, so that asyncio does not warn when no caller waits in `opened`


class TemplateProcess:
    """A process that runs no code any more and is only forked from."""

    def __init__(
        self,
        guest: GuestProcess,
        limits: Limits,
        capacity: asyncio.Semaphore,
        parent: TemplateProcess | None,
    ) -> None:
        self._guest = guest
        self._limits, self._capacity = limits, capacity
        self._parent = parent
        self._users = 0
        self._is_released = False
        self.is_session = True
        """Whether the session itself still lives in it: then it survives a fork that fails."""
        self._faults = FaultAttribution(limits, guest.process)
        self.has_lent_files = False
        """Whether a fork lives in its files and may change them."""
        self._lock = asyncio.Lock()
        self._pids: weakref.WeakKeyDictionary[GuestProcess, int] = weakref.WeakKeyDictionary()
        self._status_queries: weakref.WeakKeyDictionary[GuestProcess, asyncio.Task[int | None]] = (
            weakref.WeakKeyDictionary()
        )

    async def fork(self, *, copy_files: bool) -> GuestProcess:
        """A new process with the template's state, and with a copy of its files or the files themselves."""
        self.has_lent_files = self.has_lent_files or not copy_files
        async with self._lock:
            if not self._guest.alive:
                raise self._gone()
            if self._capacity.locked():
                raise CannotFork("as many sessions are alive as the sandbox allows (max_sessions)")
            await self._guest.process.widen(True)
            ours, theirs = socket.socketpair()
            try:
                pid = await self._request_fork(theirs)
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
            await self._capacity.acquire()
            fork = self._adopted(pid, ours, copy_files)
            self._pids[fork] = pid
        try:
            async with asyncio.timeout(self._limits.wall_seconds):
                if not await asyncio.shield(fork.process.adopted):
                    raise SandboxError(fork.process.refused or "it could not be completed")
                fork.tell({"op": "go", "copy": copy_files})
                await fork.opened()
        except (TimeoutError, SandboxError) as error:
            infra_failure = fork.process.problem
            await fork.end()
            if not self._guest.alive:
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
        known = await asyncio.shield(fork.process.ended)
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
            self._guest.process.kill()

    async def gone(self) -> None:
        """If it has no users, wait until it has ended; then wait for the templates it was forked from."""
        template: TemplateProcess | None = self
        while template is not None:
            # a fork that has just ended is counted off by a callback, or by a query that the callback begins
            await asyncio.sleep(0)
            await asyncio.gather(*template._status_queries.values())
            if template._users:
                return
            await asyncio.shield(template._guest.process.ended)
            template = template._parent

    def _adopted(self, pid: int, link_end: socket.socket, copy_files: bool) -> GuestProcess:
        parent = self._guest.process
        process = parent.worker.adopt(pid, parent.number, self._limits, copy=copy_files)
        self.hold()
        fork = GuestProcess(process, link_end, self._capacity)
        process.ended.add_done_callback(lambda _: self._on_fork_end(fork))
        return fork

    def _on_fork_end(self, fork: GuestProcess) -> None:
        # while the session itself lives in it, its own requests are in flight there
        if fork.process.was_killed or self.is_session or not self._guest.alive:
            self.release()
        else:
            query = asyncio.get_running_loop().create_task(self._exit_status(fork))
            self._status_queries[fork] = query

    async def _exit_status(self, fork: GuestProcess) -> int | None:
        """Ask the template how a fork ended that the host did not kill; then release the fork's hold."""
        try:
            async with self._lock:
                said = await self._asked({"op": "ended", "pid": self._pids.get(fork, 0)}, fds=())
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
            answer = await self._guest.exchange(header, fds=fds, seconds=self._limits.wall_seconds)
        except TimeoutError:
            await asyncio.shield(self._guest.process.ended)
            raise self._gone(hung=True) from None
        if answer is None:
            raise self._gone()
        return answer[0]

    def _gone(self, *, hung: bool = False) -> SessionLost | SessionEnded:
        """The error for a template that has ended: no code runs in it, but it can still receive the code's
        signals."""
        reason = self._faults.infra_failure(self._guest.process) or (
            "it was released" if self._is_released else None
        )
        if reason is not None:
            return SessionLost(f"what was to be forked is gone: {reason}")
        how = "did not let it answer in time, and it was ended" if hung else "has ended it"
        return SessionEnded(f"the code in what was to be forked {how}", hung=hung)


async def first(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of them is done; cancelling the wait cancels none of them."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
