"""Contents of a recording: results of calls and lists of tools, between typed values and a store of bytes.

A record is JSON, media as base64, compressed where it is long. It is never pickle: a recording may come from
a stranger.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import StrEnum
from typing import TypeVar

from pydantic import TypeAdapter

from ludus.core.failures import Boundary, ConfigError, InfraError
from ludus.core.messages import Json, ToolContext, ToolResult, ToolSet, ToolSpec
from ludus.core.strict_json import decode
from ludus.remote.threads import run_sync
from ludus.tools.recording.keys import NO_HISTORY, Label, list_key, specs_key
from ludus.tools.recording.store import RecordingStoreError, Store
from ludus.tools.toolset import LocalTools
from ludus.tools.versions import spec_version
from ludus.tools.wire import result_from_json, result_to_json

Choice = TypeVar("Choice", bound=StrEnum)
Specs = Sequence[tuple[ToolSpec, str]]
"""Tools, each with its version."""

_ROWS = TypeAdapter(list[tuple[str, str, Json, str]])
_COMPRESS_FROM = 4_096
_PLAIN, _COMPRESSED = b"j", b"z"
_LONG = 262_144  # from here on, coding is left to a thread
_COMPARED_FOR_A_MISS = 50
_SHOWN_CHARS = 300
_COMPARED_CHARS = 400


class Mode(StrEnum):
    """How a call is answered."""

    RECORD = "record"
    """Call, and write; a record that is there already is replaced."""
    REPLAY = "replay"
    """Never call; what is not recorded is an infrastructure failure."""
    REPLAY_OR_CALL = "replay_or_call"
    """Replay what is recorded; call and write the rest."""


class OnDivergence(StrEnum):
    """The reaction to a real tool that, catching up, answers differently from the recording."""

    FAIL = "fail"
    """The episode fails and leaves the loss and the baseline: the model has read a wrong result."""
    CONTINUE = "continue"
    """Warn, go on with the real tool as it is, and write nothing more in this episode."""


class Scope(StrEnum):
    """The episodes that share the records of stateful tools."""

    TASK = "task"
    """All attempts at a task, as long as their histories agree."""
    EPISODE = "episode"
    """None are shared: each attempt has its own, as tools with random results need."""


def chosen(kind: type[Choice], value: str, option: str) -> Choice:
    """The choice that `value` names; `ConfigError` with all of them when it names none."""
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(one.value for one in kind)
        raise ConfigError(f"{option} is one of {known}; not {value!r}") from None


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
    """Caught-up calls whose real result was not the recorded one."""
    unrecorded: int = 0
    """Calls made without writing them down, because the real tool's state was no longer known."""
    opened: int = 0
    """Episodes for which the real tools were opened."""


class Records:
    """Finds and writes results and lists of tools, by the rules of a mode; counts both.

    A list is kept by its content, and a short note says which list there was after which history. The note
    without a history points at the *usual* list: the one seen last, for tasks that were never recorded. Tools
    of this process can always be listed; their list is written for those who replay without the tools.
    """

    def __init__(
        self, inner: ToolSet | None, store: Store, name: str, versions: Mapping[str, str], mode: Mode
    ) -> None:
        self.statistics = RecordingStats()
        self._inner, self._store, self._name, self._mode = inner, store, name, mode
        self._versions = dict(versions)
        self._known_lists: dict[str, Specs] = {}
        self._usual = ""

    async def find(self, label: Label) -> ToolResult | None:
        """The recorded result; None where calling is allowed, a typed failure where it is not."""
        data = await self._store.get(label.key)
        if data is None:
            self.statistics.misses += 1
            if self._mode is Mode.REPLAY:
                near = await self._store.similar(label, _COMPARED_FOR_A_MISS)
                raise InfraError(Boundary.TOOL, explain_miss(label, near), retriable=False)
            return None
        try:
            result = decode_result(data) if len(data) < _LONG else await run_sync(decode_result, data)
        except BadRecord as error:
            message = f"the record of a call of {label.tool!r} is damaged: {error}; record it anew"
            raise RecordingStoreError(message, retriable=False) from error
        self.statistics.hits += 1
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
        self.statistics.recorded += 1

    @property
    def is_local(self) -> bool:
        """Whether the list can be had without opening anything."""
        return isinstance(self._inner, LocalTools)

    async def real_list(self, history: str, context: ToolContext) -> Specs:
        """The list of the real set now; it is recorded, unless this only replays."""
        assert self._inner is not None
        specs = [(spec, self._version(spec)) for spec in await self._inner.list(context)]
        if self._mode is not Mode.REPLAY:
            await self._keep_list(specs, NO_HISTORY if self.is_local else history)
        return specs

    async def recorded_list(self, history: str, context: ToolContext, *, or_usual: bool) -> Specs | None:
        """The list recorded after `history`, or else the usual one; always known for local tools.

        In the mode replay, to have none is a failure.
        """
        if self.is_local:
            return await self.real_list(history, context)
        note = await self._store.get(specs_key(self._name, history))
        if note is None and or_usual:
            note = await self._store.get(specs_key(self._name, NO_HISTORY))
        if note is not None:
            return await self._kept_list(note.decode("ascii", "replace"))
        if self._mode is not Mode.REPLAY:
            return None
        message = (
            f"no list of tools is recorded for the set {self._name!r}; record one (mode record or "
            "replay_or_call), or give the name that was used for recording"
        )
        raise InfraError(Boundary.TOOL, message, retriable=False)

    def _version(self, spec: ToolSpec) -> str:
        return spec_version(spec, self._versions.get(spec.name, ""))

    async def _keep_list(self, specs: list[tuple[ToolSpec, str]], history: str) -> None:
        data = encode_specs(specs)
        where = list_key(data)
        note = where.encode("ascii")
        if where not in self._known_lists:
            await self._store.put(where, data, label=None, replace=False)
            self._known_lists[where] = specs
        if history != NO_HISTORY:
            key = specs_key(self._name, history)
            await self._store.put(key, note, label=None, replace=self._mode is Mode.RECORD)
        if self._usual != where:
            await self._store.put(specs_key(self._name, NO_HISTORY), note, label=None, replace=True)
            self._usual = where

    async def _kept_list(self, where: str) -> Specs:
        if where not in self._known_lists:
            data = await self._store.get(where)
            try:
                if data is None:
                    raise BadRecord("it is not there")
                specs = decode_specs(data)
            except BadRecord as error:
                message = f"the recorded list of tools is damaged: {error}; record anew"
                raise RecordingStoreError(message, retriable=False) from error
            self._known_lists[where] = [
                (spec, self._version(spec) if spec.name in self._versions else version)
                for spec, version in specs
            ]
        return self._known_lists[where]


# Records as bytes


class BadRecord(ValueError):
    """Bytes that are no record."""


def encode_result(result: ToolResult) -> bytes:
    """A result as bytes; `TypeError` or `ValueError` when a foreign tool set gave something odd."""
    if not isinstance(result.content, str):
        raise TypeError(f"its content is {type(result.content).__name__}, not text")
    return _packed(result_to_json(result))


def decode_result(data: bytes) -> ToolResult:
    """The result that `encode_result` was given, equal in every field."""
    raw = _unpacked(data)
    try:
        return result_from_json(raw)
    except ValueError as error:
        raise BadRecord(f"it is no result of a call ({error})") from None


def encode_specs(specs: list[tuple[ToolSpec, str]]) -> bytes:
    """Tools with their versions, as bytes; equal lists give equal bytes."""
    rows = [[spec.name, spec.description, spec.parameters, version] for spec, version in specs]
    return _packed({"tools": rows})


def decode_specs(data: bytes) -> list[tuple[ToolSpec, str]]:
    """Tools with their versions."""
    raw = _unpacked(data)
    try:
        rows = decode(_ROWS, raw.get("tools"))
    except ValueError as error:
        raise BadRecord(f"it is no list of tools ({error})") from None
    return [(ToolSpec(name, about, schema), version) for name, about, schema, version in rows]


def _packed(value: Json) -> bytes:
    # ASCII escapes carry lone surrogates, which UTF-8 cannot; keys stay in order, since a schema's order is
    # part of the prompt
    data = json.dumps(value, separators=(",", ":")).encode("ascii")
    return _PLAIN + data if len(data) < _COMPRESS_FROM else _COMPRESSED + zlib.compress(data, 1)


def _unpacked(data: bytes) -> Json:
    try:
        if data[:1] not in (_PLAIN, _COMPRESSED):
            raise ValueError("unknown form")
        value = json.loads(zlib.decompress(data[1:]) if data[:1] == _COMPRESSED else data[1:])
    except (ValueError, zlib.error, RecursionError) as error:
        raise BadRecord(f"it cannot be read ({error})") from None
    if not isinstance(value, dict):
        raise BadRecord("it is not an object")
    return value


# Why a call was not found


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
    near = max(here or recorded, key=lambda one: _similarity(wanted.arguments, one.arguments))
    where = "" if wanted.history == NO_HISTORY else " at this point" if here else " elsewhere"
    return f"the nearest recorded call{where} is {near.tool}({_shown(near.arguments)})"


def _similarity(one: str, other: str) -> float:
    first, second = one[:_COMPARED_CHARS], other[:_COMPARED_CHARS]
    return SequenceMatcher(None, first, second, autojunk=False).quick_ratio()


def _shown(arguments: str) -> str:
    return arguments if len(arguments) <= _SHOWN_CHARS else arguments[:_SHOWN_CHARS] + "..."
