"""A tool set that remembers: record what tools answer, replay it, or replay and call where nothing is known.

Who waits for whom. The calls of an episode to stateful tools run one at a time, in the order in which they
arrive, which for the calls of one turn is the order in which the model wrote them. So an episode's history
is one sequence that depends on no scheduling: how long calls take, which ends first, what other episodes
do. What is recorded is what such a sequence gave, and can be played again. Tools declared stateless keep
out of this: they run at once, have no history, and share their records between all episodes; of equal
stateless calls at the same time one is made, and the others wait for it (they try themselves if it fails
or is cancelled). Nothing else waits, and nothing is queued but callers.

A real tool that is called after some calls were replayed has not seen those. They are made on it first
(*catching up*), and what it answers is compared with what was recorded, which is what the model has read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence

from ludus.core.failures import Boundary, ConfigError, Fault, InfraError
from ludus.core.messages import ToolCall, ToolContext, ToolResult, ToolSet, ToolSpec
from ludus.tools.recording.keys import (
    NO_HISTORY,
    Label,
    Unkeyable,
    label_of,
    result_digest,
    root_history,
)
from ludus.tools.recording.lists import ToolLists
from ludus.tools.recording.memory import CallMemory
from ludus.tools.recording.modes import Mode, OnDivergence, Scope, chosen
from ludus.tools.recording.real import RealTools, not_open
from ludus.tools.recording.session import EpisodeSession, Statistics
from ludus.tools.recording.store import Store
from ludus.tools.toolset import malformed, unknown_tool

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
        self.statistics = Statistics()
        self._store = store
        self._real = RealTools(inner, self.statistics)
        self._per_episode = chosen(Scope, scope, "scope") is Scope.EPISODE
        self._memory = CallMemory(store, self.mode, self.statistics)
        self._lists = ToolLists(
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
