"""What a recording holds, by label: results of calls, lists of tools, and why a call was not found."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from ludus.core.concurrency import run_sync
from ludus.core.failures import Boundary, InfraError
from ludus.core.messages import ToolCall, ToolContext, ToolResult, ToolSet, ToolSpec
from ludus.tools.recording.keys import (
    NO_HISTORY,
    BadRecord,
    Label,
    Mode,
    decode_result,
    decode_specs,
    encode_result,
    encode_specs,
    list_key,
    next_history,
    spec_version,
    specs_key,
)
from ludus.tools.recording.stores import RecordingStoreError, Store
from ludus.tools.toolset import LocalTools

# What is kept for one episode while it is open, and the counters of a whole run.


@dataclass(slots=True)
class RecordingStats:
    """Counters over all episodes of one `RecordedTools`."""

    hits: int = 0
    """Calls answered from the recording."""
    misses: int = 0
    """Calls that were looked for and not found."""
    recorded: int = 0
    """Results written."""
    caught_up: int = 0
    """Calls that were replayed first and had to be made on the real tool after all."""
    diverged: int = 0
    """Of these, the ones whose real result was not the recorded one."""
    unrecorded: int = 0
    """Calls made without writing them down, because the real tool's state was no longer known."""
    opened: int = 0
    """Episodes for which the real tools were opened."""


@dataclass(slots=True, eq=False)
class EpisodeSession:
    """One episode. Everything but `is_open` and `is_closed` is touched only under `turn`."""

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
    """The real tools are in a state that no history describes: straight through from here on."""
    broken: str = ""
    """Why the real tools could not be brought to where the model believes them to be."""
    tools: dict[str, str] = field(default_factory=dict)
    """The versions of the tools there are, by name."""

    def learn(self, specs: Sequence[tuple[ToolSpec, str]]) -> None:
        self.tools = {spec.name: version for spec, version in specs}

    def advance(self, label: Label, result: ToolResult) -> None:
        self.history = next_history(label.key, result)


# Why a call was not found: what was asked for, and what came nearest.

_SHOWN = 300
_COMPARED = 400


def explain_miss(wanted: Label, recorded: Sequence[Label]) -> str:
    """One message with tool, arguments and the nearest recorded call."""
    asked = f"no recorded result for {wanted.tool}({_shown(wanted.arguments)})"
    return f"{asked}; {_nearest(wanted, recorded)}. Record it, or use the mode replay_or_call"


def _nearest(wanted: Label, recorded: Sequence[Label]) -> str:
    if not recorded:
        return "nothing is recorded for this tool"
    same_arguments = [one for one in recorded if one.arguments_digest == wanted.arguments_digest]
    if any(one.history == wanted.history for one in same_arguments):
        return "this very call is recorded for another version of the tool: it was changed since"
    if any(one.history == NO_HISTORY for one in same_arguments):
        return "these arguments are recorded, but when the tool was declared stateless"
    if same_arguments and wanted.history == NO_HISTORY:
        return "these arguments are recorded, but when the tool was not declared stateless"
    if same_arguments:
        return "these arguments are recorded, but for another task or after other calls"
    here = [one for one in recorded if one.history == wanted.history]
    near = max(here or recorded, key=lambda one: _likeness(wanted.arguments, one.arguments))
    where = "" if wanted.history == NO_HISTORY else " at this point" if here else " elsewhere"
    return f"the nearest recorded call{where} is {near.tool}({_shown(near.arguments)})"


def _likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, one[:_COMPARED], other[:_COMPARED], autojunk=False).quick_ratio()


def _shown(arguments: str) -> str:
    return arguments if len(arguments) <= _SHOWN else arguments[:_SHOWN] + "..."


# Results of calls, found and kept: between typed results and a store of bytes.

_LONG = 262_144  # from here on, coding is left to a thread
_COMPARED_FOR_A_MISS = 50


class RecordedCalls:
    """Looks results up and writes them, by the rules of a mode; counts both."""

    def __init__(self, store: Store, mode: Mode, statistics: RecordingStats) -> None:
        self._store, self._mode, self._statistics = store, mode, statistics

    async def find(self, label: Label) -> ToolResult | None:
        """The recorded result; None where calling is allowed, a typed failure where it is not."""
        data = await self._store.get(label.key)
        if data is None:
            self._statistics.misses += 1
            if self._mode is Mode.REPLAY:
                near = await self._store.similar(label, _COMPARED_FOR_A_MISS)
                raise InfraError(Boundary.TOOL, explain_miss(label, near), retriable=False)
            return None
        try:
            result = decode_result(data) if len(data) < _LONG else await run_sync(decode_result, data)
        except BadRecord as error:
            message = f"the record of a call of {label.tool!r} is damaged: {error}; record it anew"
            raise RecordingStoreError(message, retriable=False) from error
        self._statistics.hits += 1
        return result

    async def keep(self, label: Label, result: ToolResult) -> None:
        """Write a result. In the mode record it replaces another; else the first one stays."""
        try:
            size = len(result.content) + sum(len(medium.data or b"") for medium in result.media)
            data = encode_result(result) if size < _LONG else await run_sync(encode_result, result)
        except (AttributeError, TypeError, ValueError) as error:
            message = f"what the tool {label.tool!r} gave cannot be recorded: {error}"
            raise InfraError(Boundary.TOOL, message, retriable=False) from error
        await self._store.put(label.key, data, label=label, replace=self._mode is Mode.RECORD)
        self._statistics.recorded += 1


# The lists of tools of a recorded set: what the model is told, with the version of each tool.
#
# A list is kept by its content, and a short note says which list there was after which history. The note
# without a history is the *usual* list: the one seen last, for tasks that were never recorded. The tools
# of this process need no recording for themselves, since their list can always be had; theirs is written
# for those who replay without the tools.

Specs = Sequence[tuple[ToolSpec, str]]


class RecordedLists:
    """Reads and writes the lists of one set."""

    def __init__(
        self,
        inner: ToolSet | None,
        store: Store,
        name: str,
        versions: Mapping[str, str],
        *,
        writes: bool,
        replaces: bool,
    ) -> None:
        self._inner, self._store, self._name = inner, store, name
        self._versions = dict(versions)
        self._writes, self._replaces = writes, replaces
        self._read: dict[str, Specs] = {}
        self._usual = ""
        """The list that the note without a history was last made to point at."""

    @property
    def is_local(self) -> bool:
        """Whether the list can be had without opening anything."""
        return isinstance(self._inner, LocalTools)

    async def real(self, history: str, context: ToolContext) -> Specs:
        """What the real set says now; written down where this set writes, and `history` is one."""
        assert self._inner is not None
        specs = [(spec, self._version(spec)) for spec in await self._inner.list(context)]
        if self._writes:
            await self._write(specs, NO_HISTORY if self.is_local else history)
        return specs

    async def recorded(self, history: str, context: ToolContext, *, or_usual: bool) -> Specs | None:
        """The list recorded after `history`, or else the usual one; always known for local tools."""
        if self.is_local:
            return await self.real(history, context)
        note = await self._store.get(specs_key(self._name, history))
        if note is None and or_usual:
            note = await self._store.get(specs_key(self._name, NO_HISTORY))
        return None if note is None else await self._read_list(note.decode("ascii", "replace"))

    async def unopened(self, root: str, context: ToolContext) -> Specs:
        """The list for somebody who asks before, or without, opening the set."""
        found = None if self._replaces else await self.recorded(root, context, or_usual=True)
        if found is not None:
            return found
        if not self._writes:
            raise self.miss()
        return await self.real(NO_HISTORY, context)

    def miss(self) -> InfraError:
        """The failure of a replay that does not even know the tools."""
        message = (
            f"no list of tools is recorded for the set {self._name!r}; record one (mode record or "
            "replay_or_call), or give the name that was used for recording"
        )
        return InfraError(Boundary.TOOL, message, retriable=False)

    def _version(self, spec: ToolSpec) -> str:
        return spec_version(spec, self._versions.get(spec.name, ""))

    async def _write(self, specs: list[tuple[ToolSpec, str]], history: str) -> None:
        data = encode_specs(specs)
        where = list_key(data)
        note = where.encode("ascii")
        if where not in self._read:
            await self._store.put(where, data, label=None, replace=False)
            self._read[where] = specs
        if history != NO_HISTORY:
            key = specs_key(self._name, history)
            await self._store.put(key, note, label=None, replace=self._replaces)
        if self._usual != where:
            await self._store.put(specs_key(self._name, NO_HISTORY), note, label=None, replace=True)
            self._usual = where

    async def _read_list(self, where: str) -> Specs:
        if where not in self._read:
            data = await self._store.get(where)
            try:
                if data is None:
                    raise BadRecord("it is not there")
                specs = decode_specs(data)
            except BadRecord as error:
                message = f"the recorded list of tools is damaged: {error}; record anew"
                raise RecordingStoreError(message, retriable=False) from error
            self._read[where] = [
                (spec, self._version(spec) if spec.name in self._versions else version)
                for spec, version in specs
            ]
        return self._read[where]
