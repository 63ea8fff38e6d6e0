"""The real tools behind a recording: opened once for an episode, and only when they are needed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from pydantic import Field

from ludus.core.config import Config, Place
from ludus.core.failures import Boundary, ConfigError, Fault, InfraError
from ludus.core.messages import ToolCall, ToolContext, ToolResult, ToolSet, ToolSpec
from ludus.tools.recording.keys import (
    NO_HISTORY,
    Label,
    Mode,
    OnDivergence,
    Scope,
    Unkeyable,
    chosen,
    label_of,
    result_digest,
    root_history,
    source_versions,
)
from ludus.tools.recording.lookup import EpisodeSession, RecordedCalls, RecordedLists, RecordingStats
from ludus.tools.recording.stores import Store, open_store
from ludus.tools.tool import Tool
from ludus.tools.toolset import as_toolset, malformed, shut, unknown_tool

# the episodes whose real call is running around here
_inside: ContextVar[frozenset[EpisodeSession]] = ContextVar("ludus_recording", default=frozenset())


class RealTools:
    """A tool set with lazy opening. Where there is none, nothing but `close` may be asked of it."""

    def __init__(self, inner: ToolSet | None, statistics: RecordingStats) -> None:
        self._inner, self._statistics = inner, statistics

    @property
    def tools(self) -> ToolSet:
        assert self._inner is not None  # only replaying does without, and it never calls
        return self._inner

    def is_inside(self, session: EpisodeSession) -> bool:
        """Whether we are called by a tool of this very episode: then its call is recorded as one."""
        return session in _inside.get()

    async def open(self, session: EpisodeSession, context: ToolContext) -> None:
        async with session.opening:
            if session.is_closed:
                raise not_open(context)
            if not session.is_open:
                await self.tools.open(context)
                session.is_open = True
                self._statistics.opened += 1

    async def call(self, session: EpisodeSession, call: ToolCall, context: ToolContext) -> ToolResult:
        await self.open(session, context)
        token = _inside.set(_inside.get() | {session})
        try:
            return await self.tools.call(call, context)
        finally:
            _inside.reset(token)

    async def shut(self) -> None:
        """Release what they hold for all episodes together."""
        if self._inner is not None:
            await shut(self._inner)

    async def close(self, session: EpisodeSession, context: ToolContext) -> None:
        async with session.opening:
            session.is_closed = True
            if session.is_open:
                await self.tools.close(context)


def not_open(context: ToolContext) -> InfraError:
    """The failure of a call that comes before `open` or after `close`."""
    message = f"a call in the episode {context.episode!r}, which is not open"
    return InfraError(Boundary.TOOL, message, retriable=False)


# A tool set that remembers: record what tools answer, replay it, or replay and call where nothing is
# known.
#
# Who waits for whom. The calls of an episode to stateful tools run one at a time, in the order in which
# they arrive, which for the calls of one turn is the order in which the model wrote them. So an episode's
# history is one sequence that depends on no scheduling: how long calls take, which ends first, what other
# episodes do. What is recorded is what such a sequence gave, and can be played again. Tools declared
# stateless keep out of this: they run at once, have no history, and share their records between all
# episodes; of equal stateless calls at the same time one is made, and the others wait for it (they try
# themselves if it fails or is cancelled). Nothing else waits, and nothing is queued but callers.
#
# A real tool that is called after some calls were replayed has not seen those. They are made on it first
# (*catching up*), and what it answers is compared with what was recorded, which is what the model has
# read.

_log = logging.getLogger(__name__)

_ALL = "*"


class RecordedTools:
    """Another tool set with a memory. One serves all episodes of a run at once, in one event loop."""

    def __init__(
        self,
        inner: ToolSet | None,
        store: Store,
        mode: Mode | str = Mode.REPLAY_OR_CALL,
        *,
        stateless: Iterable[str] = (),
        versions: Mapping[str, str] | None = None,
        scope: Scope | str = Scope.TASK,
        on_divergence: OnDivergence | str = OnDivergence.FAIL,
        name: str = "tools",
    ) -> None:
        """`inner` may be None for replaying. `name` keeps the lists of two sets in one store apart.

        `stateless` names tools whose result depends on nothing but the arguments ("*": all of them).
        """
        self.mode = chosen(Mode, mode, "mode")
        self.on_divergence = chosen(OnDivergence, on_divergence, "on_divergence")
        if inner is None and self.mode is not Mode.REPLAY:
            raise ConfigError(
                f"the mode {self.mode.value} needs tools to call; only replay does without"
            )
        if isinstance(stateless, str):
            raise ConfigError(f"stateless is a list of names: write stateless=[{stateless!r}]")
        self.stateless = frozenset(stateless)
        self.statistics = RecordingStats()
        self._store = store
        self._real = RealTools(inner, self.statistics)
        self._per_episode = chosen(Scope, scope, "scope") is Scope.EPISODE
        self._memory = RecordedCalls(store, self.mode, self.statistics)
        self._lists = RecordedLists(
            inner,
            store,
            name,
            versions or {},
            writes=self.mode is not Mode.REPLAY,
            replaces=self.mode is Mode.RECORD,
        )
        self._sessions: dict[str, EpisodeSession] = {}
        self._running: dict[str, asyncio.Future[ToolResult | None]] = {}

    async def open(self, context: ToolContext) -> None:
        """Get ready. The real tools are opened now only in the mode record, else when first needed."""
        if context.episode in self._sessions:
            raise InfraError(
                Boundary.TOOL, f"the episode {context.episode!r} is open already", retriable=False
            )
        root = root_history(context, per_episode=self._per_episode)
        session = self._sessions[context.episode] = EpisodeSession(root, root)
        try:
            if self.mode is Mode.RECORD:
                await self._real.open(session, context)
            async with session.turn:
                session.learn(await self._specs(session, context))
            self._check_names(session)
        except BaseException:
            await self._close_quietly(context)
            raise

    async def list(self, context: ToolContext) -> Sequence[ToolSpec]:
        """The tools that can be called now; from the recording where there is one for this moment."""
        session = self._sessions.get(context.episode)
        if session is None:
            root = root_history(context, per_episode=self._per_episode)
            return [spec for spec, _ in await self._lists.unopened(root, context)]
        if self._real.is_inside(session):
            return await self._real.tools.list(context)
        async with session.turn:
            specs = await self._specs(session, context)
            session.learn(specs)
        return [spec for spec, _ in specs]

    async def call(self, call: ToolCall, context: ToolContext) -> ToolResult:
        """The recorded result or the real one, by the mode. Failures of ours are never recorded."""
        if call.fault is not None:
            return malformed(call)
        session = self._session(context)
        if self._real.is_inside(session):
            return await self._real.tools.call(call, context)
        try:
            if call.name in session.tools and self._is_stateless(call.name):
                return await self._stateless_call(session, call, context)
            async with session.turn:
                if call.name not in session.tools:
                    session.learn(await self._specs(session, context))
                if call.name not in session.tools:
                    return unknown_tool(call.name, session.tools)
                if self._is_stateless(call.name):
                    return await self._stateless_call(session, call, context)
                return await self._stateful_call(session, call, context)
        except Unkeyable as problem:
            return ToolResult(f"The arguments of {call.name} are {problem}.", fault=Fault.BAD_ARGUMENTS)

    async def close(self, context: ToolContext) -> None:
        """Close the real tools where they were opened."""
        session = self._sessions.pop(context.episode, None)
        if session is not None:
            await self._real.close(session, context)

    async def _close_quietly(self, context: ToolContext) -> None:
        """After something else went wrong, which is what the caller should hear of."""
        try:
            await self.close(context)
        except Exception:  # noqa: BLE001 - logged, so that the first error is not hidden
            _log.exception("the tools of episode %s could not be closed", context.episode)

    async def aclose(self) -> None:
        """Release the store's connections, and what the real tools hold; for the end of a run."""
        await self._store.close()
        await self._real.shut()

    def _session(self, context: ToolContext) -> EpisodeSession:
        session = self._sessions.get(context.episode)
        if session is None:
            raise not_open(context)
        return session

    def _is_stateless(self, name: str) -> bool:
        return name in self.stateless or _ALL in self.stateless

    def _check_names(self, session: EpisodeSession) -> None:
        unknown = self.stateless - {_ALL} - set(session.tools)
        if unknown and self._lists.is_local:  # of another set, the list may change
            known = ", ".join(sorted(session.tools)) or "none"
            raise ConfigError(f"stateless names {min(unknown)!r}, but the tools are: {known}")

    async def _specs(
        self, session: EpisodeSession, context: ToolContext
    ) -> Sequence[tuple[ToolSpec, str]]:
        """The tools now. The caller holds `session.turn`."""
        if session.is_detached:
            return await self._lists.real(NO_HISTORY, context)
        if session.is_open and not session.behind:
            return await self._lists.real(session.history, context)
        or_usual = self.mode is Mode.REPLAY or session.history == session.root
        found = await self._lists.recorded(session.history, context, or_usual=or_usual)
        if found is not None:
            return found
        if self.mode is Mode.REPLAY:
            raise self._lists.miss()
        in_step = await self._catch_up(session, context)
        return await self._lists.real(session.history if in_step else NO_HISTORY, context)

    async def _stateless_call(
        self, session: EpisodeSession, call: ToolCall, context: ToolContext
    ) -> ToolResult:
        label = label_of(call.name, session.tools[call.name], NO_HISTORY, call.arguments)
        if self.mode is Mode.RECORD:
            return await self._call_and_keep(session, call, context, label)
        while (running := self._running.get(label.key)) is not None:
            await asyncio.wait((running,))
            shared = running.result()
            if shared is not None:
                self.statistics.hits += 1
                return shared
        mine = self._running[label.key] = asyncio.get_running_loop().create_future()
        result: ToolResult | None = None
        try:
            result = await self._memory.find(label)
            if result is None:
                result = await self._call_and_keep(session, call, context, label)
        finally:
            del self._running[label.key]
            mine.set_result(result)
        return result

    async def _stateful_call(
        self, session: EpisodeSession, call: ToolCall, context: ToolContext
    ) -> ToolResult:
        if session.is_detached:
            return await self._call_unrecorded(session, call, context)
        if session.broken:
            raise InfraError(Boundary.TOOL, session.broken, retriable=False)
        label = label_of(call.name, session.tools[call.name], session.history, call.arguments)
        result = None if self.mode is Mode.RECORD else await self._memory.find(label)
        if result is not None:
            if self.mode is Mode.REPLAY_OR_CALL:
                session.behind.append((call, result))
            session.advance(label, result)
            return result
        if not await self._catch_up(session, context):
            return await self._call_unrecorded(session, call, context)
        try:
            result = await self._call_and_keep(session, call, context, label)
        except BaseException:
            # it may have had its effect or not, so what follows has no history that could be found again
            session.is_detached = True
            raise
        session.advance(label, result)
        return result

    async def _call_unrecorded(
        self, session: EpisodeSession, call: ToolCall, context: ToolContext
    ) -> ToolResult:
        self.statistics.unrecorded += 1
        return await self._real.call(session, call, context)

    async def _call_and_keep(
        self, session: EpisodeSession, call: ToolCall, context: ToolContext, label: Label
    ) -> ToolResult:
        result = await self._real.call(session, call, context)
        await self._memory.keep(label, result)
        return result

    async def _catch_up(self, session: EpisodeSession, context: ToolContext) -> bool:
        """Make the replayed calls on the real tools, in order; whether these are now where they should be.

        The caller holds `session.turn`.
        """
        if session.broken:
            raise InfraError(Boundary.TOOL, session.broken, retriable=False)
        await self._real.open(session, context)
        while session.behind:
            call, recorded = session.behind[0]
            try:
                result = await self._real.call(session, call, context)
            except BaseException as error:
                session.broken = f"catching up with replayed calls, {call.name!r} failed: {error}"
                raise
            self.statistics.caught_up += 1
            session.behind.pop(0)
            if result_digest(result) != result_digest(recorded):
                self._diverge(session, call, context)
        return not session.is_detached

    def _diverge(self, session: EpisodeSession, call: ToolCall, context: ToolContext) -> None:
        self.statistics.diverged += 1
        message = (
            f"the tool {call.name!r} now answers otherwise than recorded, so the rest of an episode of task "
            f"{context.task.id!r} cannot follow from what the model has read"
        )
        if self.on_divergence is OnDivergence.FAIL:
            session.broken = f"{message}; record anew, or choose on_divergence='continue'"
            raise InfraError(Boundary.TOOL, session.broken, retriable=False)
        session.is_detached = True
        _log.warning("%s; going on with the real tool, unrecorded", message)


# `recorded`: tools with a memory, in one line.


def recorded(
    tools: Any,
    address: str | Path,
    mode: Mode | str = Mode.REPLAY_OR_CALL,
    *,
    stateless: Iterable[str] = (),
    versions: Mapping[str, str] | None = None,
    scope: Scope | str = Scope.TASK,
    on_divergence: OnDivergence | str = OnDivergence.FAIL,
    name: str = "tools",
) -> RecordedTools:
    """`tools` (functions, tools, tool sets, or None to replay) with a memory at a path or an address.

    Functions and tools given here have their own source as version, unless `versions` names one; those
    inside a tool set are known by their specs alone. The rest is as for `RecordedTools`.
    """
    things = [] if tools is None else _one_by_one(tools)
    return RecordedTools(
        None if tools is None else as_toolset(things),
        open_store(address, must_exist=chosen(Mode, mode, "mode") is Mode.REPLAY),
        mode,
        stateless=stateless,
        versions={**source_versions(things), **(versions or {})},
        scope=scope,
        on_divergence=on_divergence,
        name=name,
    )


def _one_by_one(tools: Any) -> list[Any]:
    is_one = isinstance(tools, (Tool, ToolSet)) or callable(tools) or not isinstance(tools, Iterable)
    return [tools] if is_one else list(tools)


# The settings of a recording, as a recipe writes them.


class RecordingConfig(Config):
    """A memory for the results of tools."""

    path: Place = Field(min_length=1)
    """A SQLite file, or the address of a Redis server: redis://host:port/db."""
    mode: Mode = Mode.REPLAY_OR_CALL
    """record, replay, or replay_or_call."""
    stateless: tuple[str, ...] = ()
    """Tools whose result depends on their arguments alone; ['*'] for all of them."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Versions of tools by name, in place of a digest of their source."""
    scope: Scope = Scope.TASK
    """Who shares the records of stateful tools: all attempts at a task, or each episode its own."""
    name: str = Field(default="tools", min_length=1)
    """What this set of tools is called there: two sets in one store have different names."""
    on_divergence: OnDivergence = OnDivergence.FAIL
    """What to do when a real tool, catching up, answers otherwise than recorded: fail or continue."""

    def wrap(self, tools: Any) -> RecordedTools:
        """`tools` with this memory."""
        return recorded(
            tools,
            self.path,
            self.mode,
            stateless=self.stateless,
            versions=self.versions,
            scope=self.scope,
            on_divergence=self.on_divergence,
            name=self.name,
        )
