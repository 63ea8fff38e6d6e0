"""A session: one private world in which code runs, turn after turn.

Who waits for whom. One execution at a time: a second caller waits for the first. An execution waits for the
inside to say that it is done, for its process to end, for its deadline, or for an overflow of its output,
whichever comes first; a deadline first interrupts, then kills.

Whose doing an end is, `blame` says. A session that stops answering was hung by the code that has run in it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ludus.sandbox import given
from ludus.sandbox.blame import FULL, Blame
from ludus.sandbox.body import Body, Request, first
from ludus.sandbox.branches import Stem
from ludus.sandbox.capture import Capture
from ludus.sandbox.closing import ClosedAtExit, undisturbed
from ludus.sandbox.config import Limits
from ludus.sandbox.endings import execution_of, looks_killed, unfinished
from ludus.sandbox.errors import CannotFork, SandboxError, SessionEnded, SessionLost
from ludus.sandbox.execution import Execution, Outcome
from ludus.sandbox.inside import frames
from ludus.sandbox.inside.slot import MOST_REPORT
from ludus.sandbox.slots import SlotUsage
from ludus.sandbox.worker import Ending

_GRACE_SECONDS = 0.5
_LISTEN_AFTER_SECONDS, _WATCH_AFTER_SECONDS = 0.03, 0.1
"""Most programs have ended before; what they wrote is then read at once, and nobody had to wait for it."""


@dataclass(slots=True)
class _Running:
    """An execution under way."""

    request: Request | None = None
    stopped: Outcome | None = None
    """Why we stopped it."""
    report: Capture | None = None
    """What a slot's program says of itself."""
    outputs: list[Capture] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None
    """When somebody looks after it next."""


class Session(ClosedAtExit):
    """Python, a shell and files in one private world. Made by `Sandbox.session`."""

    def __init__(
        self,
        body: Body,
        limits: Limits,
        places: asyncio.Semaphore,
        stem: Stem | None = None,
        *,
        is_slot: bool = False,
    ) -> None:
        """`is_slot`: each `python` is a program of its own, and nothing of one is there for the next."""
        self.limits = limits
        self._usage = SlotUsage() if is_slot else None
        self._body = body
        self._places = places
        self._stem = stem
        """What our process was forked from."""
        self._is_stem_state = stem is not None
        """Whether our state is still the stem's, so that a fork of us can be a fork of it."""
        self._has_stem_files = False
        """Whether our files are the stem's own rather than a copy."""
        self._lock = asyncio.Lock()
        self._closed = False
        self._abandoned = False
        """Whether an execution was cancelled under way, for which its process was ended."""
        self._has_run = stem is not None
        """Whether any code has run in it."""
        self._hung = False
        """Whether it stopped answering, for which its process was ended."""
        self._blame = Blame(limits, body.process)

    @property
    def alive(self) -> bool:
        """Whether it can still run code."""
        return not self._closed and not self._abandoned and self._body.alive

    @property
    def is_reusable(self) -> bool:
        """Whether it is a slot that the last program has left as it was."""
        is_clean = self._usage is not None and self._usage.is_clean
        return self.alive and is_clean and not self._body.process.was_killed

    @property
    def was_ended_inside(self) -> bool:
        """Whether the code in it ended it, or hit a limit for it: the model's doing, not ours."""
        gone = not self._body.alive and not self._closed and not self._abandoned
        return gone and self._blame.ours(self._body.process) is None

    async def python(
        self, code: str, *, stdin: str = "", wall_seconds: float | None = None
    ) -> Execution:
        """Run Python statements; variables and imports stay for the next ones."""
        return await self._execute({"op": "python"}, given.source(code), stdin, wall_seconds)

    async def shell(
        self, command: str, *, stdin: str = "", wall_seconds: float | None = None
    ) -> Execution:
        """Run a bash command; its working directory, variables and functions stay for the next ones."""
        return await self._execute({"op": "shell"}, given.argument(command), stdin, wall_seconds)

    async def run(
        self, argv: Sequence[str], *, stdin: str = "", wall_seconds: float | None = None
    ) -> Execution:
        """Run a program in the session's files; nothing of it stays but what it wrote there."""
        if isinstance(argv, str | bytes) or not argv:
            raise ValueError(
                f'argv is a list of words such as ["ls", "-la"], not {argv!r:.60}; see `shell`'
            )
        words = [os.fsdecode(given.argument(word)) for word in argv]
        return await self._execute({"op": "run", "argv": words}, b"", stdin, wall_seconds)

    async def write(self, path: str, data: bytes | str) -> None:
        """Write a file, relative to the working directory; folders are made. `OSError` as usual."""
        body = given.text(data) if isinstance(data, str) else data
        if len(body) > frames.MOST_BODY:
            raise OSError(27, "the file is too large to be sent at once", path)
        await self._file({"op": "write", "path": path}, body, 0)

    async def read(self, path: str, *, max_bytes: int = 1_000_000) -> bytes:
        """The first `max_bytes` of a file. `OSError` as usual."""
        if not 0 <= max_bytes <= frames.MOST_BODY:
            raise ValueError(f"max_bytes = {max_bytes} is not between 0 and {frames.MOST_BODY:,}")
        return await self._file({"op": "read", "path": path, "most": max_bytes}, b"", max_bytes)

    async def fork(self) -> Session:
        """A second live session with the same variables and files. `CannotFork` says what stands in the way.

        `SessionEnded` when the code has ended this one, or does not let it answer; so does `snapshot`.
        """
        return await undisturbed(self._fork())

    async def snapshot(self) -> Snapshot:
        """The state as it is now, to return to any number of times."""
        return await undisturbed(self._snapshot())

    async def _fork(self) -> Session:
        async with self._lock:
            self._check()
            stem = self._stem
            if stem is not None and self._is_stem_state and (self._has_stem_files or not stem.is_lent):
                twin = await stem.branch(copy=True)
            else:
                twin = await self._asked_itself(self._split())
            return Session(twin, self.limits, self._places, self._stem)

    async def _snapshot(self) -> Snapshot:
        async with self._lock:
            self._check()
            if self._stem is None or not self._is_stem_state or self._stem.is_lent:
                stem = self._as_stem()
                branch = await self._asked_itself(stem.branch(copy=True))
                self._go_on(branch, stem, has_stem_files=False)
            assert self._stem is not None
            return Snapshot(self._stem, self.limits, self._places)

    async def close(self) -> None:
        """End the session and everything that it started; its forks live on."""
        if self._closed:
            return
        self._closed = True
        await self._body.end()
        if self._stem is not None:
            await self._stem.gone()

    def accounted(self, said: Execution) -> Execution:
        """`said` with what it has used: the whole session, once it is closed, or a program in a slot."""
        if said.cpu_seconds is None:
            ending = self._ending()
            said = replace(said, cpu_seconds=ending.cpu_seconds, peak_mb=ending.peak_mb)
        return replace(said, lost=False)

    def _ending(self) -> Ending:
        """How our process ended, without what earlier programs in the slot have used."""
        ending = self._body.process.ended.result()
        return ending if self._usage is None else self._usage.rest(ending)

    async def put(self, files: Mapping[str, bytes | str] | None) -> None:
        """Write several files."""
        for path, data in (files or {}).items():
            await self.write(path, data)

    async def _split(self) -> Body:
        """Make our process a stem of two branches, at once: us, who keep its files, and a twin with a copy."""
        stem = self._as_stem()
        ours, twin = await asyncio.gather(
            stem.branch(copy=False), stem.branch(copy=True), return_exceptions=True
        )
        if isinstance(ours, Body):
            self._go_on(ours, stem, has_stem_files=True)
        elif isinstance(twin, Body):
            await twin.end()
        for result in (ours, twin):
            if isinstance(result, BaseException):
                raise result
        assert isinstance(twin, Body)
        return twin

    async def _asked_itself(self, branching: Awaitable[Body]) -> Body:
        """What comes of asking our own process for a branch, remembering that it did not answer."""
        try:
            return await branching
        except SessionEnded as ended:
            self._hung = ended.hung
            raise
        except (CannotFork, SandboxError):
            await self._body.process.widen(False)  # we live on in it
            raise

    def _as_stem(self) -> Stem:
        return Stem(self._body, self.limits, self._places, self._stem)

    def _go_on(self, branch: Body, stem: Stem, *, has_stem_files: bool) -> None:
        """From now on live in a branch of what was our process."""
        stem.is_session = False
        self._body, self._stem = branch, stem
        self._is_stem_state, self._has_stem_files = True, has_stem_files

    async def _execute(
        self, header: dict[str, Any], body: bytes, stdin: str, wall_seconds: float | None
    ) -> Execution:
        wall = self.limits.wall_seconds if wall_seconds is None else wall_seconds
        if wall <= 0:
            raise ValueError(f"wall_seconds = {wall} leaves no time to run in")
        async with self._lock:
            if self.was_ended_inside:
                return await self._gone()
            self._check()
            self._is_stem_state, self._has_run = False, True
            self._blame.begin(self._body.process)
            started = time.monotonic()
            running = _Running()
            standard_input = given.standard_input(stdin)
            outputs = running.outputs
            bounds = [self.limits.output_bytes] * 2
            if self._usage is not None:
                bounds.insert(0, MOST_REPORT)
            outputs += [Capture(n, lambda: self._overflowed(running), at_once=False) for n in bounds]
            if self._usage is not None:
                running.report = outputs[0]
            fds = [output.writer for output in outputs]
            running.request = self._body.ask(
                {**header, "wall": wall},
                body,
                tuple(fds if standard_input is None else [*fds, standard_input]),
            )
            for output in outputs:
                output.close_writer()
            if standard_input is not None:
                os.close(standard_input)
            try:
                said = await self._outcome(running, wall, polite=header["op"] == "python")
            except asyncio.CancelledError:
                self._abandoned = True
                self._body.process.kill()  # it cannot be left to run on
                raise
            finally:
                self._body.settled()
                texts = [output.finish() for output in outputs]
            return replace(
                said,
                stdout=texts[-2],
                stderr=texts[-1],
                truncated=any(output.truncated for output in outputs[-2:]),
                seconds=time.monotonic() - started,
                lost=not self._body.alive,
            )

    async def _gone(self) -> Execution:
        """What there is to say to somebody who runs something in a session that its code has ended."""
        ending = self._body.process.ended.result()
        if self._stem is not None:
            ending = await self._stem.ending(self._body)
        if self._hung:
            return Execution(Outcome.TIMEOUT, seconds=self.limits.wall_seconds, lost=True)
        return replace(unfinished(ending, None, self.limits), lost=True)

    async def _outcome(self, running: _Running, wall: float, *, polite: bool) -> Execution:
        """Wait for the end of an execution, and bring it about at the deadline."""
        process, request = self._body.process, running.request
        assert request is not None
        loop = asyncio.get_running_loop()
        patience = (
            wall if polite else wall + _GRACE_SECONDS
        )  # programs are stopped at `wall` from inside
        running.timer = loop.call_later(_LISTEN_AFTER_SECONDS, self._look_after, running)
        deadline = loop.call_later(patience, self._deadline, running, polite)
        try:
            await first(request.answered, process.ended)
            if running.stopped is Outcome.OUTPUT:
                await asyncio.shield(process.ended)
        finally:
            running.timer.cancel()
            deadline.cancel()
            if self._body.alive:
                process.unwatch()
        if request.answered.done() and running.stopped is not Outcome.OUTPUT:
            header, _ = request.answered.result()
            if running.report is None or self._usage is None:
                said = execution_of(header, running.stopped)
            else:
                report = running.report.finish()
                said = self._usage.execution(header, report, running.stopped, self.limits)
            if not looks_killed(said) or not self._blame.is_group_full(process):
                return said
            process.problem = FULL
            process.kill()  # something in it was ended that should have gone on
            await asyncio.shield(process.ended)
        if process.problem is not None:
            raise SessionLost(f"a session was lost: {process.problem}")
        ending = self._ending()
        if self._stem is not None:
            ending = await self._stem.ending(self._body)
        said = unfinished(ending, running.stopped, self.limits)
        if looks_killed(said) and self._blame.is_group_full(process):
            process.problem = FULL
            raise SessionLost(f"a session was lost: {FULL}")
        return said

    def _look_after(self, running: _Running) -> None:
        """It takes its time: read what it writes, and soon have its processes watched."""
        for output in running.outputs:
            output.listen()
        wait = _WATCH_AFTER_SECONDS - _LISTEN_AFTER_SECONDS
        running.timer = asyncio.get_running_loop().call_later(wait, self._body.process.watch)

    def _deadline(self, running: _Running, polite: bool) -> None:
        assert running.request is not None
        if running.request.answered.done() or not self._body.alive:
            return
        running.stopped = Outcome.TIMEOUT
        if polite:
            self._body.process.signal(signal.SIGINT)
            loop = asyncio.get_running_loop()
            loop.call_later(_GRACE_SECONDS, self._deadline, running, False)
        else:
            self._body.process.kill()

    def _overflowed(self, running: _Running) -> None:
        running.stopped = Outcome.OUTPUT
        self._body.process.kill()

    async def _file(self, header: dict[str, Any], body: bytes, most_body: int) -> bytes:
        """A request about a file, which is answered from inside at once."""
        async with self._lock:
            self._check()
            self._is_stem_state = self._is_stem_state and header["op"] == "read"
            request = self._body.ask(header, body, most_body=most_body)
            try:
                async with asyncio.timeout(self.limits.wall_seconds):
                    await first(request.answered, self._body.process.ended)
            except TimeoutError:
                raise await self._silent() from None
            except BaseException:
                self._abandoned = True
                self._body.process.kill()  # what it would answer later belongs to nobody
                raise
            finally:
                self._body.settled()
            if not request.answered.done():
                self._check()
            said, content = request.answered.result()
        if said.get("done") != "ok":
            number = said.get("errno")
            code = number if isinstance(number, int) else 5
            raise OSError(code, str(said.get("error"))[:500], header["path"])
        return content

    async def _silent(self) -> SessionEnded | SessionLost:
        """What to say about a session that does not answer, once it is ended."""
        process = self._body.process
        if not self._has_run:
            process.problem = process.problem or "it did not answer in time and was ended"
        self._hung = self._has_run
        process.kill()
        await asyncio.shield(process.ended)
        return self._gone_for_good()

    def _check(self) -> None:
        if self._closed:
            raise SessionLost("the session is closed")
        if self._abandoned:
            raise SessionLost("the session was ended because an execution in it was cancelled")
        if not self._body.alive:
            raise self._gone_for_good()

    def _gone_for_good(self) -> SessionEnded | SessionLost:
        reason = self._blame.ours(self._body.process)
        if reason is not None:
            return SessionLost(f"the session has ended: {reason}")
        how = "did not let it answer in time, and it was ended" if self._hung else "has ended it"
        return SessionEnded(f"the code in the session {how}", hung=self._hung)


class Snapshot(ClosedAtExit):
    """A session's state at one moment."""

    def __init__(self, stem: Stem, limits: Limits, places: asyncio.Semaphore) -> None:
        self._stem, self._limits, self._places = stem, limits, places
        self._closed = False
        stem.hold()

    async def restore(self) -> Session:
        """A new session that goes on from that moment."""
        if self._closed:
            raise SessionLost("the snapshot is closed")
        return await undisturbed(self._restore())

    async def _restore(self) -> Session:
        return Session(await self._stem.branch(copy=True), self._limits, self._places, self._stem)

    async def close(self) -> None:
        """Forget it; sessions restored from it live on."""
        if not self._closed:
            self._closed = True
            self._stem.release()
            await self._stem.gone()
