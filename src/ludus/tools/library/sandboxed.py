"""`python` and `bash`, and the tool set that gives every episode its sandbox session."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ludus.core.config import Config
from ludus.core.failures import Fault
from ludus.core.messages import ToolCall, ToolContext, ToolResult, ToolSpec
from ludus.sandbox import Execution, Outcome
from ludus.tools.library.kits import Kit
from ludus.tools.library.sessions import EpisodeSessions
from ludus.tools.results import Encode
from ludus.tools.tool import Tool
from ludus.tools.toolset import LocalTools

_FAULTS = {
    Outcome.RAISED: Fault.TOOL_RAISED,
    Outcome.KILLED: Fault.TOOL_RAISED,
    Outcome.TIMEOUT: Fault.TOOL_TIMEOUT,
    Outcome.CPU: Fault.TOOL_TIMEOUT,
    Outcome.MEMORY: Fault.LIMIT,
    Outcome.PROCESSES: Fault.LIMIT,
    Outcome.OUTPUT: Fault.LIMIT,
}
_NOTHING = "(no output)"


class SandboxTool(Tool):
    """A tool that works in the episode's session. The sandbox has the deadlines; what it loses stays lost.

    What comes from a session is a stranger's word. Where it makes one of these tools raise, that is the model's
    fault: called ours, it would leave the episode unscored, and a policy could learn that.
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


class SandboxTools:
    """Sandbox tools with a session per episode, opened by the first call and closed with the episode."""

    def __init__(
        self,
        tools: Iterable[Tool],
        sessions: EpisodeSessions,
        *,
        encode: Encode | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self._tools = LocalTools(tools, encode=encode, max_tokens=max_tokens)
        self._sessions = sessions

    async def open(self, context: ToolContext) -> None:
        await self._tools.open(context)

    async def list(self, context: ToolContext) -> Sequence[ToolSpec]:
        return await self._tools.list(context)

    async def call(self, call: ToolCall, context: ToolContext) -> ToolResult:
        return await self._tools.call(call, context)

    async def close(self, context: ToolContext) -> None:
        await self._sessions.close(context)


class ProgramOptions(Config):
    """Options of `python` and `bash`."""

    name: str | None = None
    """What the model calls it."""
    seconds: float | None = None
    """Wall time for one call; the sandbox's own limit when None."""
    max_chars: int = 20_000
    """How much of the output the model reads."""


class PythonTool(SandboxTool):
    """Run Python code in a session that lasts: variables, imports and files stay for the next call.

    What is printed comes back, and the value of the last line if it is an expression. There is no
    network, and there are limits on time and memory.

    Args:
        code: The code to run.
    """

    name = "python"

    def __init__(self, sessions: EpisodeSessions, options: ProgramOptions) -> None:
        super().__init__(sessions, options.name, options.max_chars)
        self.seconds = options.seconds

    async def run(self, code: str, context: ToolContext) -> ToolResult:
        if context.one_call:
            note, execution = "", await self.sessions.python_once(code, self.seconds)
        else:
            async with self.sessions.use(context) as place:
                execution = place.saw(await place.session.python(code, wall_seconds=self.seconds))
            note = place.note
        exited_well = execution.outcome is Outcome.EXITED and not execution.exit_code
        default = None if execution.ok or exited_well else Fault.TOOL_RAISED
        return ToolResult(_said(note, execution), fault=_FAULTS.get(execution.outcome, default))


class BashTool(SandboxTool):
    """Run a command in a bash shell that lasts: the folder, variables and files stay for the next call.

    What it writes to stdout and stderr comes back. There is no network, and there are limits on time
    and memory.

    Args:
        command: The command, or several lines of them.
    """

    name = "bash"

    def __init__(self, sessions: EpisodeSessions, options: ProgramOptions) -> None:
        super().__init__(sessions, options.name, options.max_chars)
        self.seconds = options.seconds

    async def run(self, command: str, context: ToolContext) -> ToolResult:
        async with self.sessions.use(context) as place:
            execution = place.saw(await place.session.shell(command, wall_seconds=self.seconds))
        # A status that is not zero is how commands answer (`grep` found nothing): no fault by itself.
        answered = execution.outcome in (Outcome.OK, Outcome.RAISED, Outcome.EXITED)
        return ToolResult(
            _said(place.note, execution), fault=None if answered else _FAULTS.get(execution.outcome)
        )


def _said(note: str, execution: Execution) -> str:
    text = execution.text() or _NOTHING
    return f"{note}\n{text}" if note else text


PYTHON = Kit(ProgramOptions, lambda options, sessions: [PythonTool(sessions, options)])
BASH = Kit(ProgramOptions, lambda options, sessions: [BashTool(sessions, options)])
