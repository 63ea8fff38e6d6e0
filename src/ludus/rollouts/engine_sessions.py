"""The engine's sessions of one episode: which one holds the KV of which sequence, and which are in use."""

from __future__ import annotations

from ludus.core.generation import Engine


class EngineSessions:
    """A session for each request that runs at once; they are used again."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.name = name
        """The first session's; the others add a number to it."""
        self._engine = engine
        self._held: dict[str, int | None] = {}
        """The sequence that each session holds the KV of."""
        self._busy: set[str] = set()

    @property
    def busy(self) -> int:
        """How many are in use."""
        return len(self._busy)

    async def take(self, sequence: int | None, at_end: bool) -> str:
        """A session for a request: the one that holds its sequence's KV, if it goes on from its end, or a fork.

        `sequence` is None for a new conversation.
        """
        holder = next((name for name, held in self._held.items() if held == sequence), None)
        if holder is not None and holder not in self._busy and at_end:
            self._busy.add(holder)
            return holder
        unused = (name for name, held in self._held.items() if held is None)
        name = next((name for name in unused if name not in self._busy), None)
        if name is None:
            name = f"{self.name}.{len(self._held)}" if self._held else self.name
        self._held[name] = None
        self._busy.add(name)
        if holder is not None:
            try:
                await self._engine.fork(holder, name)
            except BaseException:
                self._busy.discard(name)
                raise
        return name

    def give_back(self, name: str) -> None:
        """Its request has ended."""
        self._busy.discard(name)

    def holds(self, name: str, sequence: int) -> None:
        """What was sampled in a session is part of this sequence."""
        if name in self._held:
            self._held[name] = sequence

    async def close(self) -> None:
        """Release all of them."""
        for name in list(self._held):
            await self._engine.release(name)
        self._held.clear()
