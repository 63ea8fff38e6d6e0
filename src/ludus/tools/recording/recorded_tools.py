"""A tool set that remembers: record what tools answer, replay it, or replay and call where nothing is known.

Who waits for whom. The calls of an episode to stateful tools run one at a time, in the order in which they
arrive, which for the calls of one turn is the order in which the model wrote them. So an episode's history is
one sequence that depends on no scheduling. Tools declared stateless keep out of this: they run at once, have
no history, and share their records between all episodes; of equal stateless calls at the same time one is
made, and the others wait for it (they try themselves if it fails or is cancelled).

A real tool that is called after some calls were replayed has not seen those. They are made on it first
(*catching up*), and what it answers is compared with what was recorded, which is what the model has read.

A list of tools is kept by its content, and a short note says which list there was after which history. The
note without a history points at the *usual* list: the one seen last, for tasks that were never recorded.
Tools of this process can always be listed; their list is written for those who replay without the tools.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ludus.core.failures import Boundary, ConfigError, Fault, InfraError
from ludus.core.messages import ToolCall, ToolContext, ToolResult, ToolSet, ToolSpec
from ludus.remote.threads import run_sync
from ludus.tools.recording.records import (
    NO_HISTORY,
    BadRecord,
    Label,
    Mode,
    OnDivergence,
    RecordingConfig,
    RecordingStats,
    Scope,
    Specs,
    decode_result,
    decode_specs,
    encode_result,
    encode_specs,
    explain_miss,
    label_of,
    list_key,
    next_history,
    result_digest,
    root_history,
    specs_key,
)
from ludus.tools.recording.stores import RecordingStoreError, Store, open_store
from ludus.tools.tool import LocalTools, Tool, malformed, unknown_tool
from ludus.tools.toolset import as_toolset, effects_of, shut
from ludus.tools.versions import Unkeyable, source_versions, spec_version

_log = logging.getLogger(__name__)

_ALL = "*"
_LONG = 262_144  # from here on, coding is left to a thread
_COMPARED_FOR_A_MISS = 50


@dataclass(slots=True, eq=False)
class _EpisodeState:
    """One open episode. Everything but `is_open` and `is_closed` is touched only under `turn`."""

    root: str
    history: str
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held for the length of a stateful call: an episode's history is one sequence."""
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_open: bool = False
    """Whether the real tools were opened."""
    is_closed: bool = False
    behind: list[tuple[ToolCall, ToolResult]] = field(default_factory=list)
    """Replayed calls that the real tools have not seen, in order."""
    is_detached: bool = False
    """The real tools are in a state that no history describes: calls go straight through from here on."""
    broken: str = ""
    """Why the real tools could not be brought to where the model believes them to be."""
    tools: dict[str, str] = field(default_factory=dict)
    """The versions of the tools there are, by name."""


# The episodes whose real call is running in this context.
_inside: ContextVar[frozenset[_EpisodeState]] = ContextVar("ludus_recording", default=frozenset())


class RecordedTools:
    """Another tool set with a memory. One serves all episodes of a run at once, in one event loop."""

    deterministic = True
    """Branches of trees may make recorded calls again."""

    def __init__(
        self,
        inner: ToolSet | None,
        store: Store,
        mode: Mode | str = Mode.REPLAY_OR_CALL,
        **options: Any,
    ) -> None:
        """`inner` may be None for replaying. The options are those of `RecordingConfig`, without its path."""
        config = RecordingConfig.parse({"path": "-", "mode": mode, **options}, "the recording")
        if inner is None and config.mode is not Mode.REPLAY:
            raise ConfigError(
                f"the mode {config.mode.value} needs tools to call; only replay does without"
            )
        self.mode, self.on_divergence = config.mode, config.on_divergence
        self.stateless = frozenset(config.stateless)
        self.inner, self._store, self._name = inner, store, config.name
        self.statistics = RecordingStats()
        self._is_local = isinstance(inner, LocalTools)
        """Whether the list can be had without opening anything."""
        self._per_episode = config.scope is Scope.EPISODE
        self._versions = config.versions
        self._known_lists: dict[str, Specs] = {}
        self._usual = ""
        self._episodes: dict[str, _EpisodeState] = {}
        self._running: dict[str, asyncio.Future[ToolResult | None]] = {}

    def effects(self) -> frozenset[str]:
        """As the real tools say; a call that is not recorded reaches them."""
        return frozenset() if self.inner is None else effects_of(self.inner)

    async def open(self, context: ToolContext) -> None:
        """Get ready. The real tools are opened now only in the mode record, else when first needed."""
        if context.episode in self._episodes:
            raise _failure(f"the episode {context.episode!r} is open already")
        root = root_history(context, per_episode=self._per_episode)
        state = self._episodes[context.episode] = _EpisodeState(root, root)
        try:
            if self.mode is Mode.RECORD:
                await self._open_real(state, context)
            async with state.turn:
                await self._list_tools(state, context)
            unknown = self.stateless - {_ALL} - set(state.tools)
            if unknown and self._is_local:  # the list of another set may change
                known = ", ".join(sorted(state.tools)) or "none"
                raise ConfigError(f"stateless names {min(unknown)!r}, but the tools are: {known}")
        except BaseException:
            try:
                await self.close(context)
            except Exception:  # noqa: BLE001 - logged, so that the first error is not hidden
                _log.exception("the tools of episode %s could not be closed", context.episode)
            raise

    async def list(self, context: ToolContext) -> Sequence[ToolSpec]:
        """The tools that can be called now; from the recording where there is one for this moment."""
        state = self._episodes.get(context.episode)
        if state is None:  # asked before, or without, opening the set
            root = root_history(context, per_episode=self._per_episode)
            specs = None
            if self.mode is not Mode.RECORD:
                specs = await self._recorded_list(root, context, or_usual=True)
            specs = await self._real_list(NO_HISTORY, context) if specs is None else specs
        elif state in _inside.get():
            return await self._real.list(context)
        else:
            async with state.turn:
                specs = await self._list_tools(state, context)
        return [spec for spec, _ in specs]

    async def call(self, call: ToolCall, context: ToolContext) -> ToolResult:
        """The recorded result or the real one, by the mode. Infrastructure failures are never recorded."""
        if call.fault is not None:
            return malformed(call)
        state = self._episodes.get(context.episode)
        if state is None:
            raise _not_open(context)
        if state in _inside.get():  # called by a tool of this very episode: recorded as part of its call
            return await self._real.call(call, context)
        is_stateless = call.name in self.stateless or _ALL in self.stateless
        try:
            if is_stateless and call.name in state.tools:
                return await self._stateless_call(state, call, context)
            async with state.turn:
                if call.name not in state.tools:
                    await self._list_tools(state, context)
                if call.name not in state.tools:
                    return unknown_tool(call.name, state.tools)
                perform = self._stateless_call if is_stateless else self._stateful_call
                return await perform(state, call, context)
        except Unkeyable as problem:
            return ToolResult(f"The arguments of {call.name} are {problem}.", fault=Fault.BAD_ARGUMENTS)

    async def close(self, context: ToolContext) -> None:
        """Close the real tools where they were opened."""
        state = self._episodes.pop(context.episode, None)
        if state is None:
            return
        async with state.opening:
            state.is_closed = True
            if state.is_open:
                await self._real.close(context)

    async def aclose(self) -> None:
        """Release the store's connections, and what the real tools hold; for the end of a run."""
        await self._store.close()
        if self.inner is not None:
            await shut(self.inner)

    # Calls

    @property
    def _real(self) -> ToolSet:
        assert self.inner is not None  # only replaying does without, and it never calls
        return self.inner

    async def _open_real(self, state: _EpisodeState, context: ToolContext) -> None:
        async with state.opening:
            if state.is_closed:
                raise _not_open(context)
            if not state.is_open:
                await self._real.open(context)
                state.is_open = True
                self.statistics.opened += 1

    async def _call_real(self, state: _EpisodeState, call: ToolCall, context: ToolContext) -> ToolResult:
        await self._open_real(state, context)
        token = _inside.set(_inside.get() | {state})
        try:
            return await self._real.call(call, context)
        finally:
            _inside.reset(token)

    async def _stateless_call(
        self, state: _EpisodeState, call: ToolCall, context: ToolContext
    ) -> ToolResult:
        label = label_of(call.name, state.tools[call.name], NO_HISTORY, call.arguments)
        if self.mode is Mode.RECORD:
            return await self._call_and_keep(state, call, context, label)
        while (running := self._running.get(label.key)) is not None:
            await asyncio.wait((running,))
            shared = running.result()
            if shared is not None:
                self.statistics.hits += 1
                return shared
        mine = self._running[label.key] = asyncio.get_running_loop().create_future()
        result: ToolResult | None = None
        try:
            result = await self._find(label)
            if result is None:
                result = await self._call_and_keep(state, call, context, label)
        finally:
            del self._running[label.key]
            mine.set_result(result)
        return result

    async def _stateful_call(
        self, state: _EpisodeState, call: ToolCall, context: ToolContext
    ) -> ToolResult:
        if not state.is_detached:
            if state.broken:
                raise _failure(state.broken)
            label = label_of(call.name, state.tools[call.name], state.history, call.arguments)
            result = None if self.mode is Mode.RECORD else await self._find(label)
            if result is not None:
                if self.mode is Mode.REPLAY_OR_CALL:
                    state.behind.append((call, result))
                state.history = next_history(label.key, result)
                return result
            await self._catch_up(state, context)
        if state.is_detached:
            self.statistics.unrecorded += 1
            return await self._call_real(state, call, context)
        try:
            result = await self._call_and_keep(state, call, context, label)
        except BaseException:
            # It may have had its effect or not, so what follows has no history that could be found again.
            state.is_detached = True
            raise
        state.history = next_history(label.key, result)
        return result

    async def _catch_up(self, state: _EpisodeState, context: ToolContext) -> None:
        """Make the replayed calls on the real tools, in order. A different answer detaches the episode.

        The caller holds `state.turn`.
        """
        if state.broken:
            raise _failure(state.broken)
        await self._open_real(state, context)
        while state.behind:
            call, recorded = state.behind[0]
            try:
                result = await self._call_real(state, call, context)
            except BaseException as error:
                state.broken = f"catching up with replayed calls, {call.name!r} failed: {error}"
                raise
            self.statistics.caught_up += 1
            state.behind.pop(0)
            if result_digest(result) != result_digest(recorded):
                self._diverge(state, call, context)

    def _diverge(self, state: _EpisodeState, call: ToolCall, context: ToolContext) -> None:
        self.statistics.diverged += 1
        message = (
            f"the tool {call.name!r} now answers otherwise than recorded, so the rest of an episode of task "
            f"{context.task.id!r} cannot follow from what the model has read"
        )
        if self.on_divergence is OnDivergence.FAIL:
            state.broken = f"{message}; record anew, or choose on_divergence='continue'"
            raise _failure(state.broken)
        state.is_detached = True
        _log.warning("%s; going on with the real tool, unrecorded", message)

    # Records

    async def _find(self, label: Label) -> ToolResult | None:
        """The recorded result; None where calling is allowed, a typed failure where it is not."""
        data = await self._store.get(label.key)
        if data is None:
            self.statistics.misses += 1
            if self.mode is Mode.REPLAY:
                raise _failure(
                    explain_miss(label, await self._store.similar(label, _COMPARED_FOR_A_MISS))
                )
            return None
        try:
            result = decode_result(data) if len(data) < _LONG else await run_sync(decode_result, data)
        except BadRecord as error:
            message = f"the record of a call of {label.tool!r} is damaged: {error}; record it anew"
            raise RecordingStoreError(message, retriable=False) from error
        self.statistics.hits += 1
        return result

    async def _call_and_keep(
        self, state: _EpisodeState, call: ToolCall, context: ToolContext, label: Label
    ) -> ToolResult:
        """The real result, written. In the mode record it replaces another; else the first one stays."""
        result = await self._call_real(state, call, context)
        try:
            size = len(result.content) + sum(len(medium.data or b"") for medium in result.media)
            data = encode_result(result) if size < _LONG else await run_sync(encode_result, result)
        except (AttributeError, TypeError, ValueError) as error:
            raise _failure(f"what the tool {label.tool!r} gave cannot be recorded: {error}") from error
        await self._store.put(label.key, data, label=label, replace=self.mode is Mode.RECORD)
        self.statistics.recorded += 1
        return result

    async def _list_tools(self, state: _EpisodeState, context: ToolContext) -> Specs:
        """The tools of the episode now, which it knows from here on. The caller holds `state.turn`."""
        specs: Specs | None = None
        if not (state.is_detached or (state.is_open and not state.behind)):
            or_usual = self.mode is Mode.REPLAY or state.history == state.root
            specs = await self._recorded_list(state.history, context, or_usual=or_usual)
            if specs is None:
                await self._catch_up(state, context)
        if specs is None:
            history = NO_HISTORY if state.is_detached else state.history
            specs = await self._real_list(history, context)
        state.tools = {spec.name: version for spec, version in specs}
        return specs

    def _version(self, spec: ToolSpec) -> str:
        return spec_version(spec, self._versions.get(spec.name, ""))

    async def _real_list(self, history: str, context: ToolContext) -> Specs:
        """The list of the real set now; it is recorded, unless this only replays."""
        specs = [(spec, self._version(spec)) for spec in await self._real.list(context)]
        if self.mode is Mode.REPLAY:
            return specs
        data = encode_specs(specs)
        where = list_key(data)
        note = where.encode("ascii")
        if where not in self._known_lists:
            await self._store.put(where, data, label=None, replace=False)
            self._known_lists[where] = specs
        if history != NO_HISTORY and not self._is_local:
            key = specs_key(self._name, history)
            await self._store.put(key, note, label=None, replace=self.mode is Mode.RECORD)
        if self._usual != where:
            await self._store.put(specs_key(self._name, NO_HISTORY), note, label=None, replace=True)
            self._usual = where
        return specs

    async def _recorded_list(
        self, history: str, context: ToolContext, *, or_usual: bool
    ) -> Specs | None:
        """The list recorded after `history`, or else the usual one; always known for local tools.

        In the mode replay, to have none is a failure.
        """
        if self._is_local:
            return await self._real_list(history, context)
        note = await self._store.get(specs_key(self._name, history))
        if note is None and or_usual:
            note = await self._store.get(specs_key(self._name, NO_HISTORY))
        if note is None:
            if self.mode is not Mode.REPLAY:
                return None
            raise _failure(
                f"no list of tools is recorded for the set {self._name!r}; record one (mode record or "
                "replay_or_call), or give the name that was used for recording"
            )
        where = note.decode("ascii", "replace")
        if where not in self._known_lists:
            data = await self._store.get(where)
            try:
                specs = decode_specs(data or b"")
            except BadRecord as error:
                message = f"the recorded list of tools is damaged: {error}; record anew"
                raise RecordingStoreError(message, retriable=False) from error
            self._known_lists[where] = [
                (spec, self._version(spec) if spec.name in self._versions else version)
                for spec, version in specs
            ]
        return self._known_lists[where]


def _failure(message: str) -> InfraError:
    return InfraError(Boundary.TOOL, message, retriable=False)


def _not_open(context: ToolContext) -> InfraError:
    return _failure(f"a call in the episode {context.episode!r}, which is not open")


def recorded(
    tools: Any,
    address: str | Path,
    mode: Mode | str = Mode.REPLAY_OR_CALL,
    *,
    versions: Mapping[str, str] | None = None,
    **options: Any,
) -> RecordedTools:
    """`tools` (functions, tools, tool sets, or None to replay) with a memory at a path or an address.

    Functions and tools of this process have their source and settings as version, unless `versions` names one;
    those elsewhere, on a server for instance, are known by their specs alone. The options are those of
    `RecordedTools`.
    """
    is_one = isinstance(tools, (Tool, ToolSet)) or callable(tools) or not isinstance(tools, Iterable)
    things = [] if tools is None else [tools] if is_one else list(tools)
    inner = None if tools is None else as_toolset(things)
    store = open_store(address, must_exist=mode == Mode.REPLAY)
    versions = {**source_versions(things), **(versions or {})}
    return RecordedTools(inner, store, mode, versions=versions, **options)
