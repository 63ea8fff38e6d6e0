"""Results of calls, found and kept: between typed results and a store of bytes."""

from __future__ import annotations

from ludus.core.concurrency import run_sync
from ludus.core.failures import Boundary, InfraError
from ludus.core.messages import ToolResult
from ludus.tools.recording.keys import Label
from ludus.tools.recording.misses import explain_miss
from ludus.tools.recording.modes import Mode
from ludus.tools.recording.records import BadRecord, decode_result, encode_result
from ludus.tools.recording.session import Statistics
from ludus.tools.recording.store import Store, StoreError

_LONG = 262_144  # from here on, coding is left to a thread
_COMPARED_FOR_A_MISS = 50


class CallMemory:
    """Looks results up and writes them, by the rules of a mode; counts both."""

    def __init__(self, store: Store, mode: Mode, statistics: Statistics) -> None:
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
            raise StoreError(message, retriable=False) from error
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
