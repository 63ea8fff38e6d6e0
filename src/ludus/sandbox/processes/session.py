"""A session in processes of this machine: code runs in it, turn after turn; it can be forked and snapshotted.

Who waits for whom. One execution at a time: a second caller waits for the first. An execution waits for the
guest's report, for its process to end, for its deadline, or for an overflow of its output, whichever comes
first; a deadline first interrupts, then kills.

`GuestProcess.infra_failure` says whose fault an end is. A session that stops answering was hung by code that
ran in it.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ludus.sandbox.config import CannotFork, SandboxError, SessionEnded, SessionLost
from ludus.sandbox.exchange import (
    Execution,
    Outcome,
    ProcessExit,
    SlotUsage,
    checked_argv,
    encode_argument,
    encode_text,
    execution_of,
    looks_killed,
    unfinished,
)
from ludus.sandbox.guest import frames
from ludus.sandbox.processes.guest_process import (
    CONTROL_GROUP_FULL,
    Answer,
    GuestProcess,
    OutputPipe,
    first,
)
from ludus.sandbox.processes.worker import TemplateProcess
from ludus.sandbox.sandbox import Session, Snapshot, finishes

if TYPE_CHECKING:
    from ludus.sandbox.processes.worker import SandboxWorker

_GRACE_SECONDS = 0.5
_MOST_SOURCE = 4 << 20
_ADD_SEALS, _ALL_SEALS = 1033, 0x000F
_LISTEN_AFTER_SECONDS, _WATCH_AFTER_SECONDS = 0.03, 0.1
"""Most programs end earlier; their output is then read at once, without event loop callbacks."""


@dataclass(slots=True)
class _Running:
    answered: Answer | None = None
    stopped: Outcome | None = None
    """Why the host stopped it."""
    report: OutputPipe | None = None
    """The report of a slot's program."""
    outputs: list[OutputPipe] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None
    """Calls `_on_slow`."""


class ProcessSession(Session):
    def __init__(
        self,
        guest: GuestProcess,
        template: TemplateProcess | None = None,
        *,
        is_slot: bool = False,
    ) -> None:
        """`is_slot`: each `python` is a separate program, and nothing of it is kept for the next."""
        self.limits = guest.limits
        self._usage = SlotUsage() if is_slot else None
        self._guest = guest
        self._template = template
        """The template that its process was forked from."""
        self._is_template_state = template is not None
        """Whether its state is still the template's, so that a fork of it can be made from the template."""
        self._has_template_files = False
        """Whether its files are the template's own rather than a copy."""
        self._lock = asyncio.Lock()
        self._abandoned = False
        """Whether an execution was cancelled in flight, for which its process was killed."""
        self._has_run = template is not None
        """Whether any code has run in it."""
        self._hung = False
        """Whether it stopped answering, for which its process was killed."""
        self._kills = guest.kernel_kills()
        """The kernel's kills before the last execution."""

    @property
    def alive(self) -> bool:
        return not self.closed and not self._abandoned and self._guest.alive

    @property
    def is_reusable(self) -> bool:
        """Whether it is a slot that the last program left unchanged."""
        is_clean = self._usage is not None and self._usage.is_clean
        return self.alive and is_clean and not self._guest.was_killed

    @property
    def worker(self) -> SandboxWorker:
        return self._guest.worker

    @property
    def was_ended_inside(self) -> bool:
        gone = not self._guest.alive and not self.closed and not self._abandoned
        return gone and self._guest.infra_failure(self._kills) is None

    async def python(
        self, code: str, *, stdin: str = "", wall_seconds: float | None = None
    ) -> Execution:
        return await self._execute({"op": "python"}, _encoded_source(code), stdin, wall_seconds)

    async def shell(
        self, command: str, *, stdin: str = "", wall_seconds: float | None = None
    ) -> Execution:
        return await self._execute({"op": "shell"}, encode_argument(command), stdin, wall_seconds)

    async def run(
        self, argv: Sequence[str], *, stdin: str = "", wall_seconds: float | None = None
    ) -> Execution:
        return await self._execute({"op": "run", "argv": checked_argv(argv)}, b"", stdin, wall_seconds)

    async def write(self, path: str, data: bytes | str) -> None:
        body = encode_text(data) if isinstance(data, str) else data
        if len(body) > frames.MOST_BODY:
            raise OSError(27, "the file is too large to be sent at once", path)
        await self._file({"op": "write", "path": path}, body, 0)

    async def read(self, path: str, *, max_bytes: int = 1_000_000) -> bytes:
        if not 0 <= max_bytes <= frames.MOST_BODY:
            raise ValueError(f"max_bytes = {max_bytes} is not between 0 and {frames.MOST_BODY:,}")
        return await self._file({"op": "read", "path": path, "most": max_bytes}, b"", max_bytes)

    @finishes
    async def fork(self) -> Session:
        """A second live session with the same variables and files. `CannotFork` says what prevents it.

        `SessionEnded` when the code has ended this one, or keeps it from answering; so does `snapshot`.
        """
        async with self._lock:
            self._check()
            template = self._template
            if (
                template is not None
                and self._is_template_state
                and (self._has_template_files or not template.has_lent_files)
            ):
                twin = await template.fork(copy_files=True)
            else:
                twin = await self._asked_itself(self._split())
            return ProcessSession(twin, self._template)

    @finishes
    async def snapshot(self) -> Snapshot:
        async with self._lock:
            self._check()
            if self._template is None or not self._is_template_state or self._template.has_lent_files:
                template = self._as_template()
                fork = await self._asked_itself(template.fork(copy_files=True))
                self._continue_in(fork, template, has_template_files=False)
            assert self._template is not None
            return ProcessSnapshot(self._template)

    async def end(self) -> None:
        await self._guest.end()
        if self._template is not None:
            await self._template.gone()

    def accounted(self, said: Execution) -> Execution:
        """`said` with the resources used: by the whole session, once closed, or by a program in a slot."""
        if said.cpu_seconds is None:
            ending = self._ending()
            said = replace(said, cpu_seconds=ending.cpu_seconds, peak_mb=ending.peak_mb)
        return replace(said, lost=False)

    def _ending(self) -> ProcessExit:
        """How the process ended, without what earlier programs in the slot have used."""
        ending = self._guest.ended.result()
        return ending if self._usage is None else self._usage.rest(ending)

    async def _split(self) -> GuestProcess:
        """Make the process a template with two forks: this session, which keeps the files, and its copy."""
        template = self._as_template()
        ours, twin = await asyncio.gather(
            template.fork(copy_files=False), template.fork(copy_files=True), return_exceptions=True
        )
        if isinstance(ours, GuestProcess):
            self._continue_in(ours, template, has_template_files=True)
        elif isinstance(twin, GuestProcess):
            await twin.end()
        for result in (ours, twin):
            if isinstance(result, BaseException):
                raise result
        assert isinstance(twin, GuestProcess)
        return twin

    async def _asked_itself(self, forking: Awaitable[GuestProcess]) -> GuestProcess:
        """Await a fork of the session's own process, and remember if it did not answer."""
        try:
            return await forking
        except SessionEnded as ended:
            self._hung = ended.hung
            raise
        except (CannotFork, SandboxError):
            await self._guest.widen(False)  # the session stays in it
            raise

    def _as_template(self) -> TemplateProcess:
        return TemplateProcess(self._guest, self._template)

    def _continue_in(
        self, fork: GuestProcess, template: TemplateProcess, *, has_template_files: bool
    ) -> None:
        """Replace the session's process, which is now the template, by a fork of it."""
        template.is_session = False
        self._guest, self._template = fork, template
        self._is_template_state, self._has_template_files = True, has_template_files

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
            self._is_template_state, self._has_run = False, True
            self._kills = self._guest.kernel_kills()
            started = time.monotonic()
            running = _Running()
            standard_input = _stdin_file(stdin)
            outputs = running.outputs
            bounds = [self.limits.output_bytes] * 2
            if self._usage is not None:
                bounds.insert(0, frames.MOST_REPORT)
            outputs += [OutputPipe(n, lambda: self._overflowed(running), at_once=False) for n in bounds]
            if self._usage is not None:
                running.report = outputs[0]
            fds = [output.writer for output in outputs]
            running.answered = self._guest.ask(
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
                self._guest.kill()  # it must not keep running
                raise
            finally:
                self._guest.settled()
                texts = [output.finish() for output in outputs]
            return replace(
                said,
                stdout=texts[-2],
                stderr=texts[-1],
                truncated=any(output.truncated for output in outputs[-2:]),
                seconds=time.monotonic() - started,
                lost=not self._guest.alive,
            )

    async def _gone(self) -> Execution:
        """The result of running something in a session that its code has ended."""
        ending = self._guest.ended.result()
        if self._template is not None:
            ending = await self._template.ending(self._guest)
        if self._hung:
            return Execution(Outcome.TIMEOUT, seconds=self.limits.wall_seconds, lost=True)
        return replace(unfinished(ending, None, self.limits), lost=True)

    async def _outcome(self, running: _Running, wall: float, *, polite: bool) -> Execution:
        guest, answered = self._guest, running.answered
        assert answered is not None
        loop = asyncio.get_running_loop()
        # the guest itself stops programs at `wall`
        patience = wall if polite else wall + _GRACE_SECONDS
        running.timer = loop.call_later(_LISTEN_AFTER_SECONDS, self._on_slow, running)
        deadline = loop.call_later(patience, self._deadline, running, polite)
        try:
            await first(answered, guest.ended)
            if running.stopped is Outcome.OUTPUT:
                await asyncio.shield(guest.ended)
        finally:
            running.timer.cancel()
            deadline.cancel()
            if guest.alive:
                guest.unwatch()
        if answered.done() and running.stopped is not Outcome.OUTPUT:
            header, _ = answered.result()
            if running.report is None or self._usage is None:
                said = execution_of(header, running.stopped)
            else:
                report = running.report.finish()
                said = self._usage.execution(header, report, running.stopped, self.limits)
            if not looks_killed(said) or not guest.is_group_full(self._kills):
                return said
            guest.problem = CONTROL_GROUP_FULL
            guest.kill()  # the kernel killed something in it that should have continued
            await asyncio.shield(guest.ended)
        if guest.problem is not None:
            raise SessionLost(f"a session was lost: {guest.problem}")
        ending = self._ending()
        if self._template is not None:
            ending = await self._template.ending(guest)
        said = unfinished(ending, running.stopped, self.limits)
        if looks_killed(said) and guest.is_group_full(self._kills):
            guest.problem = CONTROL_GROUP_FULL
            raise SessionLost(f"a session was lost: {CONTROL_GROUP_FULL}")
        return said

    def _on_slow(self, running: _Running) -> None:
        """It runs longer than most: read its output as it comes, and soon have its processes monitored."""
        for output in running.outputs:
            output.listen()
        wait = _WATCH_AFTER_SECONDS - _LISTEN_AFTER_SECONDS
        running.timer = asyncio.get_running_loop().call_later(wait, self._guest.watch)

    def _deadline(self, running: _Running, polite: bool) -> None:
        assert running.answered is not None
        if running.answered.done() or not self._guest.alive:
            return
        running.stopped = Outcome.TIMEOUT
        if polite:
            self._guest.signal(signal.SIGINT)
            loop = asyncio.get_running_loop()
            loop.call_later(_GRACE_SECONDS, self._deadline, running, False)
        else:
            self._guest.kill()

    def _overflowed(self, running: _Running) -> None:
        running.stopped = Outcome.OUTPUT
        self._guest.kill()

    async def _file(self, header: dict[str, Any], body: bytes, most_body: int) -> bytes:
        """A request about a file, which the guest answers at once."""
        async with self._lock:
            self._check()
            self._is_template_state = self._is_template_state and header["op"] == "read"
            try:
                answer = await self._guest.exchange(header, body, most_body=most_body)
            except TimeoutError:
                raise await self._silent() from None
            except BaseException:
                self._abandoned = True
                raise
            if answer is None:
                self._check()  # raises: its process has ended
            assert answer is not None
            said, content = answer
        if said.get("done") != "ok":
            number = said.get("errno")
            code = number if isinstance(number, int) else 5
            raise OSError(code, str(said.get("error"))[:500], header["path"])
        return content

    async def _silent(self) -> SessionEnded | SessionLost:
        """The error for a session that did not answer and was killed."""
        guest = self._guest
        if not self._has_run:
            guest.problem = guest.problem or "it did not answer in time and was killed"
        self._hung = self._has_run
        await asyncio.shield(guest.ended)
        return self._gone_for_good()

    def _check(self) -> None:
        if self.closed:
            raise SessionLost("the session is closed")
        if self._abandoned:
            raise SessionLost("the session was ended because an execution in it was cancelled")
        if not self._guest.alive:
            raise self._gone_for_good()

    def _gone_for_good(self) -> SessionEnded | SessionLost:
        reason = self._guest.infra_failure(self._kills)
        if reason is not None:
            return SessionLost(f"the session has ended: {reason}")
        how = "did not let it answer in time, and it was ended" if self._hung else "has ended it"
        return SessionEnded(f"the code in the session {how}", hung=self._hung)


class ProcessSnapshot(Snapshot):
    def __init__(self, template: TemplateProcess) -> None:
        self._template = template
        self._closed = False
        template.hold()

    @finishes
    async def restore(self) -> Session:
        if self._closed:
            raise SessionLost("the snapshot is closed")
        fork = await self._template.fork(copy_files=True)
        return ProcessSession(fork, self._template)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._template.release()
        await self._template.gone()


def _encoded_source(code: str) -> bytes:
    """Python source as bytes; `ValueError` for more than 4 MB."""
    if not isinstance(code, str):
        raise TypeError(f"code is a text, not {type(code).__name__}")
    data = encode_text(code)
    if len(data) > _MOST_SOURCE:
        raise ValueError(f"the code has {len(data):,} bytes; {_MOST_SOURCE:,} are accepted")
    return data


def _stdin_file(given: str) -> int | None:
    """Standard input as a sealed memory file; None for none."""
    if not given:
        return None
    fd = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(encode_text(given))
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, _ADD_SEALS, _ALL_SEALS)
    return fd
