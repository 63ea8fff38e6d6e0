"""A session seen from outside: one private world in which code runs, turn after turn.

Who waits for whom. One execution at a time: a second caller waits for the first. An execution waits for the
inside to say that it is done, for its process to end, for its deadline, or for an overflow of its output,
whichever comes first; a deadline first interrupts, then kills. Whatever the inside says is taken as data from
a stranger; that the process has ended is known from the kernel alone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from ludus.sandbox.capture import Capture
from ludus.sandbox.config import Limits
from ludus.sandbox.endings import ended_at_once, execution_of, unfinished
from ludus.sandbox.errors import CannotFork, SandboxError, SessionLost
from ludus.sandbox.execution import Execution, Outcome
from ludus.sandbox.inside import frames
from ludus.sandbox.link import Link
from ludus.sandbox.worker import Process

_GRACE_SECONDS = 0.5
_WATCH_AFTER_SECONDS = 0.1
_MOST_SOURCE = 4 << 20


@dataclass(slots=True)
class _Running:
    """An execution under way."""

    finished: asyncio.Future[tuple[dict[str, Any], bytes]]
    stopped: Outcome | None = None
    """Why we stopped it."""
    wants_fd: bool = False
    """Whether a descriptor is expected with the answer."""
    fd: int | None = None


class Session:
    """Python, a shell and files in one private world. Made by `Sandbox.session`."""

    def __init__(
        self, process: Process, link_end: socket.socket, limits: Limits, places: asyncio.Semaphore
    ) -> None:
        """`places` are those among the living; the caller has taken one, and our end gives it back."""
        self.limits = limits
        self._process = process
        self._places = places
        self._link = Link(link_end, self._on_frame, self._on_close)
        self._lock = asyncio.Lock()
        self._running: _Running | None = None
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._forks = 0
        self._parent: Session | None = None
        self._closed = False
        process.ended.add_done_callback(self._on_end)

    @property
    def alive(self) -> bool:
        """Whether it can still run code."""
        return not self._closed and not self._process.ended.done()

    async def python(
        self, code: str, *, stdin: str = "", wall_seconds: float | None = None
    ) -> Execution:
        """Run Python statements; variables and imports stay for the next ones."""
        return await self._execute({"op": "python"}, _source(code), stdin, wall_seconds)

    async def shell(
        self, command: str, *, stdin: str = "", wall_seconds: float | None = None
    ) -> Execution:
        """Run a bash command; its working directory, variables and functions stay for the next ones."""
        return await self._execute({"op": "shell"}, _argument(command), stdin, wall_seconds)

    async def run(
        self, argv: Sequence[str], *, stdin: str = "", wall_seconds: float | None = None
    ) -> Execution:
        """Run a program in the session's files; nothing of it stays but what it wrote there."""
        words = [os.fsdecode(_argument(word)) for word in argv]
        return await self._execute({"op": "run", "argv": words}, b"", stdin, wall_seconds)

    async def write(self, path: str, data: bytes | str) -> None:
        """Write a file, relative to the working directory; folders are made. `OSError` as usual."""
        body = data.encode("utf-8", "surrogateescape") if isinstance(data, str) else data
        if len(body) > frames.MOST_BODY:
            raise OSError(27, "the file is too large to be sent at once", path)
        await self._ask({"op": "write", "path": path}, body)

    async def read(self, path: str, *, max_bytes: int = 1_000_000) -> bytes:
        """The first `max_bytes` of a file. `OSError` as usual."""
        return await self._ask({"op": "read", "path": path, "most": max_bytes}, b"")

    async def fork(self) -> Session:
        """A second live session with the same variables and files. `CannotFork` says what stands in the way."""
        async with self._lock:
            self._check()
            if self._places.locked():
                raise CannotFork("as many sessions are alive as the sandbox allows (max_sessions)")
            ours, theirs = socket.socketpair()
            try:
                pidfd = await self._request_fork(theirs)
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
            await self._places.acquire()
            process = self._process.worker.adopt(pidfd, self.limits)
            os.close(pidfd)
            twin = Session(process, ours, self.limits, self._places)
            twin._parent = self
            self._forks += 1
            if not await process.adopted:
                await twin.close()
                raise CannotFork("its files could not be copied within its limits")
            twin._link.send({"op": "go"})
            await twin.opened()
            return twin

    async def snapshot(self) -> Snapshot:
        """The state as it is now, to return to any number of times."""
        return Snapshot(await self.fork())

    async def close(self) -> None:
        """End the session and everything that it started; its forks live on."""
        if self._closed:
            return
        self._closed = True
        if self._forks:
            self._process.retire()  # its link stays open: the process ends at the end of it
        else:
            await self._end()

    async def _end(self) -> None:
        self._link.close()
        self._process.kill()
        await asyncio.shield(self._process.ended)
        if self._parent is not None and self._parent._closed and not self._parent._forks:
            await self._parent._end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def opened(self) -> None:
        """Wait until the inside is ready; a session that cannot start is our failure."""
        await _first(self._ready, self._process.ended)
        if not self._ready.done():
            reason = self._process.problem or ended_at_once(self._process.ended.result())
            await self.close()
            raise SandboxError(f"a session could not be started: {reason}")
        try:
            self._ready.result()
        except SandboxError:
            await self.close()
            raise

    def accounted(self, said: Execution) -> Execution:
        """`said` with what the whole session has used, once it is closed."""
        ending = self._process.ended.result()
        return replace(said, cpu_seconds=ending.cpu_seconds, peak_mb=ending.peak_mb, lost=False)

    async def put(self, files: Mapping[str, bytes | str] | None) -> None:
        """Write several files."""
        for path, data in (files or {}).items():
            await self.write(path, data)

    async def _execute(
        self, header: dict[str, Any], body: bytes, stdin: str, wall_seconds: float | None
    ) -> Execution:
        wall = self.limits.wall_seconds if wall_seconds is None else wall_seconds
        if wall <= 0:
            raise ValueError(f"wall_seconds = {wall} leaves no time to run in")
        async with self._lock:
            self._check()
            started = time.monotonic()
            running = self._begin()
            outputs = [Capture(self.limits.output_bytes, self._overflowed) for _ in range(2)]
            fds = [output.writer for output in outputs]
            given = _input(stdin)
            if given is not None:
                fds.append(given)
            try:
                self._link.send({**header, "wall": wall}, body, tuple(fds))
            finally:
                for output in outputs:
                    output.close_writer()
                if given is not None:
                    os.close(given)
            try:
                said = await self._outcome(running, wall, polite=header["op"] == "python")
            except BaseException:
                self._process.kill()  # a cancelled execution cannot be left to run on
                self._running = None
                for output in outputs:
                    output.finish()
                raise
            self._running = None
            texts = [output.finish() for output in outputs]
            return replace(
                said,
                stdout=texts[0],
                stderr=texts[1],
                truncated=any(output.truncated for output in outputs),
                seconds=time.monotonic() - started,
                lost=self._process.ended.done(),
            )

    def _begin(self) -> _Running:
        self._running = _Running(asyncio.get_running_loop().create_future())
        return self._running

    async def _outcome(self, running: _Running, wall: float, *, polite: bool) -> Execution:
        """Wait for the end of an execution, and bring it about at the deadline."""
        loop = asyncio.get_running_loop()
        patience = (
            wall if polite else wall + _GRACE_SECONDS
        )  # programs are stopped at `wall` from inside
        timers = [
            loop.call_later(_WATCH_AFTER_SECONDS, self._process.watch, self.limits),
            loop.call_later(patience, self._deadline, running, polite),
        ]
        try:
            await _first(running.finished, self._process.ended)
            if running.stopped is Outcome.OUTPUT and not self._process.ended.done():
                await self._process.ended
        finally:
            for timer in timers:
                timer.cancel()
            if not self._process.ended.done():
                self._process.unwatch()
        if running.finished.done() and running.stopped is not Outcome.OUTPUT:
            header, _ = running.finished.result()
            return execution_of(header, running.stopped)
        ending = await self._process.ended
        if self._process.problem is not None:
            raise SessionLost(f"a session was lost: {self._process.problem}")
        return unfinished(ending, running.stopped, self.limits)

    def _deadline(self, running: _Running, polite: bool) -> None:
        if self._running is not running or running.finished.done():
            return
        running.stopped = Outcome.TIMEOUT
        if polite:
            self._process.signal(signal.SIGINT)
            loop = asyncio.get_running_loop()
            loop.call_later(_GRACE_SECONDS, self._deadline, running, False)
        else:
            self._process.kill()

    def _overflowed(self) -> None:
        if self._running is not None:
            self._running.stopped = Outcome.OUTPUT
            self._process.kill()

    async def _ask(self, header: dict[str, Any], body: bytes) -> bytes:
        """A request that is answered from inside at once: files."""
        async with self._lock:
            self._check()
            running = self._begin()
            self._link.most_body = header.get("most", 0)
            self._link.send(header, body)
            said, content = await self._answer(running, "its files could not be reached")
            if said.get("done") != "ok":
                number = said.get("errno")
                raise OSError(
                    number if isinstance(number, int) else 5, str(said.get("error")), header["path"]
                )
            return content

    async def _request_fork(self, control: socket.socket) -> int:
        running = self._begin()
        running.wants_fd = True
        self._link.send({"op": "fork"}, fds=(control.fileno(),))
        said, _ = await self._answer(running, "it ended while it was forked")
        if running.fd is None:
            raise CannotFork(str(said.get("refused", "the session gave no reason"))[:500])
        return running.fd

    async def _answer(self, running: _Running, otherwise: str) -> tuple[dict[str, Any], bytes]:
        try:
            async with asyncio.timeout(self.limits.wall_seconds):
                await _first(running.finished, self._process.ended)
        except TimeoutError:
            self._process.kill()
            raise SessionLost("a session did not answer in time and was ended") from None
        finally:
            self._running = None
        if not running.finished.done():
            raise SessionLost(f"a session was lost: {self._process.problem or otherwise}")
        return running.finished.result()

    def _check(self) -> None:
        if self._closed:
            raise SessionLost("the session is closed")
        if self._process.ended.done():
            raise SessionLost(f"the session has ended: {self._process.problem or 'its process is gone'}")

    def _on_frame(self, header: dict[str, Any], body: bytes, fds: list[int]) -> None:
        if not self._ready.done():
            if header.get("state") == "ready":
                self._ready.set_result(None)
            else:
                self._ready.set_exception(SandboxError(f"a session could not be started: {header}"))
            return
        running = self._running
        if running is None or running.finished.done():
            self._process.kill()  # it speaks without being asked: that is not our code any more
            return
        if running.wants_fd and fds:
            running.fd = fds.pop()
        running.finished.set_result((header, body))

    def _on_close(self, problem: str | None) -> None:
        """The inside closed its end. Its process ends next, or is ended: without it there is no way in."""
        wait = 0.0 if problem else _GRACE_SECONDS
        asyncio.get_running_loop().call_later(wait, self._process.kill)

    def _on_end(self, _: object) -> None:
        self._link.close()
        self._places.release()
        if self._parent is not None:
            self._parent._forks -= 1


class Snapshot:
    """A session's state at one moment."""

    def __init__(self, frozen: Session) -> None:
        self._frozen = frozen

    async def restore(self) -> Session:
        """A new session that goes on from that moment."""
        return await self._frozen.fork()

    async def close(self) -> None:
        """Forget it; sessions restored from it live on."""
        await self._frozen.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def _first(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of them is done; cancelling the wait cancels none of them."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def _source(code: str) -> bytes:
    data = code.encode("utf-8", "surrogatepass")
    if len(data) > _MOST_SOURCE:
        raise ValueError(f"the code has {len(data):,} bytes; {_MOST_SOURCE:,} are accepted")
    return data


def _argument(word: str) -> bytes:
    return word.replace("\0", "\\0").encode("utf-8", "backslashreplace")


def _input(text: str) -> int | None:
    """Standard input as a file in memory; None for none."""
    if not text:
        return None
    fd = os.memfd_create("stdin", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(text.encode("utf-8", "surrogateescape"))
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
