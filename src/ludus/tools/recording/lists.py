"""The lists of tools of a recorded set: what the model is told, with the version of each tool.

A list is kept by its content, and a short note says which list there was after which history. The note
without a history is the *usual* list: the one seen last, for tasks that were never recorded. The tools of
this process need no recording for themselves, since their list can always be had; theirs is written for
those who replay without the tools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ludus.core.failures import Boundary, InfraError
from ludus.core.messages import ToolContext, ToolSet, ToolSpec
from ludus.tools.recording.keys import NO_HISTORY, list_key, spec_version, specs_key
from ludus.tools.recording.records import BadRecord, decode_specs, encode_specs
from ludus.tools.recording.store import Store, StoreError
from ludus.tools.toolset import LocalTools

Specs = Sequence[tuple[ToolSpec, str]]


class ToolLists:
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
                raise StoreError(message, retriable=False) from error
            self._read[where] = [
                (spec, self._version(spec) if spec.name in self._versions else version)
                for spec, version in specs
            ]
        return self._read[where]
