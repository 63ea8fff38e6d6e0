"""`python` and `bash`, and the sandbox session that all sandbox tools of an episode share.

Who waits for whom. The calls of one episode take its session one after the other, in the order in which they
came, because a session is one interpreter and one folder. Different episodes wait in the sandbox's own queue
only. A session is opened by the first call that needs it, and closed with the episode.

A task may say what a session starts with, in its metadata: `sandbox = {files = {path: text}, setup = "Python
code", image = "..."}`. The model is not shown it; what the code defines is there for the model's own code.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from pydantic import Field

from ludus.core.config import Config
from ludus.core.failures import Boundary, ConfigError, Fault, InfraError, ToolFault
from ludus.core.messages import ToolContext, ToolResult, released_slot
from ludus.core.task import Task
from ludus.sandbox import (
    CannotFork,
    Execution,
    Outcome,
    SandboxConfig,
    SandboxError,
    Session,
    SessionEnded,
    Snapshot,
    shared_sandbox,
)
from ludus.tools.calling import Encode
from ludus.tools.library import Toolkit
from ludus.tools.tool import LocalTools, Tool

GONE = "[A new session was started: the earlier variables, processes and files are gone.]"


class SessionStart(Config):
    """Initial files, image and setup of a task's session."""

    files: dict[str, str | bytes] = Field(default_factory=dict)
    """Files by path, relative to the working directory."""
    image: str | None = None
    """The image of its container, where the sandbox's tier has containers."""
    setup: str = ""
    """Python code that runs first."""


@dataclass(slots=True)
class _Held:
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    session: Session | None = None
    lost: bool = False


@dataclass(slots=True)
class SessionLease:
    """A session for one call. `note` tells the model that a new one was started in the middle of an episode."""

    session: Session
    note: str = ""
    lost: bool = False

    def watch(self, execution: Execution) -> Execution:
        """`execution`, after noting whether the session survived it."""
        self.lost = self.lost or execution.lost
        return execution

    def with_note(self, text: str) -> str:
        return f"{self.note}\n{text}" if self.note else text


@asynccontextmanager
async def _turn_of(held: _Held) -> AsyncIterator[None]:
    """Hold the session's lock; a call that waits for it leaves its admission slot to others."""
    if held.turn.locked():
        with released_slot():
            await held.turn.acquire()
    else:
        await held.turn.acquire()
    try:
        yield
    finally:
        held.turn.release()


class EpisodeSessions:
    """Hands out the session of an episode, one caller at a time."""

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        self._held: dict[str, _Held] = {}

    @asynccontextmanager
    async def use(self, context: ToolContext) -> AsyncIterator[SessionLease]:
        """The episode's session; one that the model's own program ended is replaced next time."""
        held = self._held.setdefault(context.episode, _Held())
        async with _turn_of(held):
            if held.session is not None and held.session.was_ended_inside:
                ended, held.session, held.lost = held.session, None, True
                await ended.close()
            note = GONE if held.lost else ""
            if held.session is None:
                held.session = await self._opened(context.task)
                held.lost = False
            lease = SessionLease(held.session, note)
            try:
                yield lease
            except SessionEnded as ended:
                fault = Fault.TOOL_TIMEOUT if ended.hung else Fault.TOOL_RAISED
                raise ToolFault(f"{ended}: its variables and files are gone", fault) from ended
            finally:
                if lease.lost or not held.session.alive:
                    session, held.session, held.lost = held.session, None, True
                    await session.close()

    async def python_once(self, code: str, wall_seconds: float | None) -> Execution:
        """Run a program outside of sessions, for episodes of one call."""
        limits = self.config.limits
        if wall_seconds is not None:
            limits = limits.model_copy(update={"wall_seconds": wall_seconds})
        try:
            return await shared_sandbox(self.config).python(code, limits=limits)
        except (ConfigError, OSError) as error:
            raise InfraError(Boundary.SANDBOX, str(error), retriable=False) from error

    async def _opened(self, task: Task) -> Session:
        start = self.start_of(task)
        try:
            session = await shared_sandbox(self.config).session(files=start.files, image=start.image)
        except (ConfigError, OSError) as error:  # such as too little isolation
            raise InfraError(Boundary.SANDBOX, str(error), retriable=False) from error
        if start.setup:
            execution = await session.python(start.setup)
            if not execution.ok:
                await session.close()
                message = f"the setup of the task {task.id!r} failed: {execution.text()}"
                raise InfraError(Boundary.SANDBOX, message, retriable=False)
        return session

    def start_of(self, task: Task) -> SessionStart:
        """What the session of a task starts with."""
        return SessionStart.parse(task.metadata.get("sandbox") or {}, f"the task {task.id!r}, sandbox")

    async def snapshot(self, context: ToolContext) -> SessionState:
        """The session's variables and files as they are now. `CannotFork` says what prevents it."""
        held = self._held.get(context.episode, _Held())
        async with held.turn:
            if held.session is None:
                return SessionState(None, held.lost)
            try:
                return SessionState(await held.session.snapshot(), held.lost)
            except (SessionEnded, SandboxError) as error:
                raise CannotFork(str(error)) from error

    async def restore(self, state: SessionState, context: ToolContext) -> None:
        """Go on from that snapshot in the session of another episode, which has not begun."""
        session = None if state.snapshot is None else await state.snapshot.restore()
        self._held[context.episode] = _Held(session=session, lost=state.lost)

    async def close(self, context: ToolContext) -> None:
        """End the episode's session, if it ever had one."""
        held = self._held.pop(context.episode, None)
        if held is None:
            return
        async with held.turn:
            session, held.session = held.session, None
            if session is not None:
                await session.close()


@dataclass(slots=True)
class SessionState:
    """A snapshot of an episode's session; none where it had not begun, or was lost."""

    snapshot: Snapshot | None
    lost: bool

    async def close(self) -> None:
        if self.snapshot is not None:
            await self.snapshot.close()


_FAULTS = {
    Outcome.RAISED: Fault.TOOL_RAISED,
    Outcome.KILLED: Fault.TOOL_RAISED,
    Outcome.TIMEOUT: Fault.TOOL_TIMEOUT,
    Outcome.CPU: Fault.TOOL_TIMEOUT,
    Outcome.MEMORY: Fault.LIMIT,
    Outcome.PROCESSES: Fault.LIMIT,
    Outcome.OUTPUT: Fault.LIMIT,
}


class SandboxTool(Tool):
    """A tool that works in the episode's session. The sandbox has the deadlines, so there are none here.

    What comes from a session is untrusted. Where it makes one of these tools raise, that is the model's fault:
    as an infrastructure failure it would leave the episode unscored, and a policy could learn to cause it.
    """

    timeout = None
    retries = 0
    on_error = "fault"

    def __init__(
        self, sessions: EpisodeSessions, name: str | None = None, max_chars: int | None = None
    ) -> None:
        self.sessions = sessions
        self.name = name or self.name
        self.max_chars = max_chars or self.max_chars
        super().__init__()


class SandboxTools(LocalTools):
    """Sandbox tools with a session per episode, opened by the first call and closed with the episode."""

    def __init__(
        self, tools: Iterable[Tool], sessions: EpisodeSessions, *, encode: Encode | None = None
    ) -> None:
        super().__init__(tools, encode=encode)
        self._sessions = sessions

    async def close(self, context: ToolContext) -> None:
        await self._sessions.close(context)

    async def snapshot(self, context: ToolContext) -> SessionState:
        return await self._sessions.snapshot(context)

    async def restore(self, state: SessionState, context: ToolContext) -> None:
        await self._sessions.restore(state, context)


class ProgramOptions(Config):
    """Options of `python` and `bash`."""

    name: str | None = None
    """The name in the schema."""
    seconds: float | None = None
    """Wall time for one call; the sandbox's own limit when None."""
    max_chars: int = 20_000
    """How much of the output the model reads."""


class _ProgramTool(SandboxTool):
    def __init__(self, sessions: EpisodeSessions, options: ProgramOptions) -> None:
        super().__init__(sessions, options.name, options.max_chars)
        self.seconds = options.seconds


class PythonTool(_ProgramTool):
    """Run Python code in a session that lasts: variables, imports and files stay for the next call.

    What is printed comes back, and the value of the last line if it is an expression. There is no
    network, and there are limits on time and memory.

    Args:
        code: The code to run.
    """

    name = "python"

    async def run(self, code: str, context: ToolContext) -> ToolResult:
        if context.one_call:
            execution = await self.sessions.python_once(code, self.seconds)
            text = _shown(execution)
        else:
            async with self.sessions.use(context) as lease:
                execution = lease.watch(await lease.session.python(code, wall_seconds=self.seconds))
            text = lease.with_note(_shown(execution))
        exited_well = execution.outcome is Outcome.EXITED and not execution.exit_code
        default = None if execution.ok or exited_well else Fault.TOOL_RAISED
        return ToolResult(text, fault=_FAULTS.get(execution.outcome, default))


class BashTool(_ProgramTool):
    """Run a command in a bash shell that lasts: the folder, variables and files stay for the next call.

    What it writes to stdout and stderr comes back. There is no network, and there are limits on time
    and memory.

    Args:
        command: The command, or several lines of them.
    """

    name = "bash"

    async def run(self, command: str, context: ToolContext) -> ToolResult:
        async with self.sessions.use(context) as lease:
            execution = lease.watch(await lease.session.shell(command, wall_seconds=self.seconds))
        # A status that is not zero is how commands answer (`grep` found nothing): no fault by itself.
        answered = execution.outcome in (Outcome.OK, Outcome.RAISED, Outcome.EXITED)
        fault = None if answered else _FAULTS.get(execution.outcome)
        return ToolResult(lease.with_note(_shown(execution)), fault=fault)


def _shown(execution: Execution) -> str:
    return execution.text() or "(no output)"


PYTHON = Toolkit(ProgramOptions, lambda options, sessions: [PythonTool(sessions, options)])
BASH = Toolkit(ProgramOptions, lambda options, sessions: [BashTool(sessions, options)])
