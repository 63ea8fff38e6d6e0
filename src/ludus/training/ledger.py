"""The ledger of asynchronous training: which groups may be played, and which are trained next.

A pure state machine: no clocks, no tasks, no tensors. The controller tells it what happened.

    schedule  a group gets the next ordinal and takes one of (S + 1) * B slots, until it is trained
    start     a player plays it
    finish    it has been played; or `fail`: it is played again, and given up after so many tries
    replace   it is left out (a refill): its slot is free, and a further ordinal takes its place
    take      the next B finished groups become a batch: always the oldest finished one among the W ordinals
              that begin with the oldest group not yet taken (torchtitan's `windowed_fifo`)
    train     the batch has been trained: one version more, and its slots are free

The lag of a group, the versions between its scheduling and its training, is at most S + ceil((W - 1) / B):
when it is scheduled at most (S + 1) * B - 1 others hold slots, and at most W - 1 younger ones can be taken
before it, so at most (S + 1) * B + W - 2 groups are trained before it. Nothing is dropped for its age, and it
cannot get stuck: `tests/training/test_ledger.py` explores every sequence of events for small bounds.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Phase(StrEnum):
    """Where a stage is, as far as groups go."""

    OPEN = "open"
    """Groups are scheduled."""
    DRAINING = "draining"
    """All groups have been scheduled, or the tasks have ended: what is under way is played and trained."""
    ENDED = "ended"
    """No group in flight and none left to schedule."""


class GroupState(StrEnum):
    """Where a group is, from its scheduling to its training."""

    TO_PLAY = "to_play"
    IN_FLIGHT = "in_flight"
    FINISHED = "finished"
    GIVEN_UP = "given_up"
    """The group failed too often. It counts as finished, and has no data to train on."""


_TAKEABLE = (GroupState.FINISHED, GroupState.GIVEN_UP)


@dataclass(slots=True)
class Entry:
    """A group that holds a slot."""

    version: int
    """Batches that had been trained when it was scheduled."""
    state: GroupState = GroupState.TO_PLAY
    tries: int = 0
    """How often it has failed as a whole."""


@dataclass(slots=True)
class Ledger:
    """Groups by ordinal. `total` is how many groups are to be trained; None for no end."""

    batch: int
    staleness: int = 0
    window: int = 1
    total: int | None = None
    max_tries: int = 2
    """A group that failed so often is given up."""
    entries: dict[int, Entry] = field(default_factory=dict)
    """The groups that hold slots, by ordinal, the oldest first."""
    taken: list[int] = field(default_factory=list)
    """The ordinals of the batch that is being put together, or trained."""
    next_ordinal: int = 0
    version: int = 0
    """Batches that have been trained."""
    settled: int = 0
    """Groups that have been trained."""
    # Kept beside the entries, so that no event looks at all of them: 1,000 GPUs have tens of thousands.
    _untaken: OrderedDict[int, None] = field(init=False, repr=False)
    """The groups that are in no batch, the oldest first."""
    _idle: set[int] = field(init=False, repr=False)
    """Ordinals of groups that are scheduled but not being played."""

    def __post_init__(self) -> None:
        if self.batch < 1 or self.staleness < 0 or self.window < 1 or self.max_tries < 1:
            raise ValueError(
                f"a ledger of batch {self.batch}, staleness {self.staleness}, window {self.window}"
            )
        self._index()

    def _index(self) -> None:
        staged = set(self.taken)
        self._untaken = OrderedDict.fromkeys(one for one in self.entries if one not in staged)
        self._idle = set(self._in_state(GroupState.TO_PLAY))

    @property
    def capacity(self) -> int:
        return (self.staleness + 1) * self.batch

    @property
    def max_lag(self) -> int:
        """The proven bound on the lag of a group. With a staleness of 0 a window changes nothing."""
        return self.staleness + math.ceil((self.window - 1) / self.batch) if self.staleness else 0

    @property
    def phase(self) -> Phase:
        if not self.entries and not self._has_demand:
            return Phase.ENDED
        return Phase.OPEN if self._has_demand else Phase.DRAINING

    @property
    def _has_demand(self) -> bool:
        """Whether further groups will be scheduled, now or when slots are free."""
        return self.total is None or self.settled + len(self.entries) < self.total

    @property
    def can_schedule(self) -> bool:
        return self._has_demand and len(self.entries) < self.capacity

    @property
    def next_step(self) -> int:
        """The step in which a group that is scheduled now will be trained, if the order is kept."""
        return (self.settled + len(self.entries)) // self.batch

    def schedule(self) -> int:
        if not self.can_schedule:
            raise ValueError(f"no group can be scheduled: {self!r}")
        ordinal = self.next_ordinal
        self.entries[ordinal] = Entry(self.version)
        self._untaken[ordinal] = None
        self._idle.add(ordinal)
        self.next_ordinal += 1
        return ordinal

    def to_play(self) -> list[int]:
        """The ordinals that are not played now, the oldest first."""
        return sorted(self._idle)

    def in_flight(self) -> list[int]:
        return self._in_state(GroupState.IN_FLIGHT)

    def finished(self) -> list[int]:
        """The ordinals that have been played and not been trained."""
        return self._in_state(*_TAKEABLE)

    def _in_state(self, *states: GroupState) -> list[int]:
        return [ordinal for ordinal, entry in self.entries.items() if entry.state in states]

    def start(self, ordinal: int) -> None:
        self._entry(ordinal, GroupState.TO_PLAY).state = GroupState.IN_FLIGHT
        self._idle.remove(ordinal)

    def finish(self, ordinal: int) -> None:
        self._entry(ordinal, GroupState.IN_FLIGHT).state = GroupState.FINISHED

    def fail(self, ordinal: int) -> bool:
        """The group could not be played. Whether it is to be played again, under its ordinal."""
        entry = self._entry(ordinal, GroupState.IN_FLIGHT)
        entry.tries += 1
        again = entry.tries < self.max_tries
        entry.state = GroupState.TO_PLAY if again else GroupState.GIVEN_UP
        if again:
            self._idle.add(ordinal)
        return again

    def interrupt(self, ordinal: int) -> None:
        """Its player is gone, through no fault of the group's: it is played again."""
        self._entry(ordinal, GroupState.IN_FLIGHT).state = GroupState.TO_PLAY
        self._idle.add(ordinal)

    def replace(self, ordinal: int) -> None:
        """Leave out a finished group; as it will not be trained, another one will be scheduled in its place."""
        self._entry(ordinal, GroupState.FINISHED)
        if ordinal not in self._untaken:
            raise ValueError(f"group {ordinal} is part of a batch already")
        del self.entries[ordinal], self._untaken[ordinal]

    def take(self) -> list[int] | None:
        """The next batch in the order of its ordinals, once it is complete; it stays until `train`."""
        while len(self.taken) < self._size and (ordinal := self._first_finished()) is not None:
            del self._untaken[ordinal]
            self.taken.append(ordinal)
        return sorted(self.taken) if self.taken and len(self.taken) == self._size else None

    def _first_finished(self) -> int | None:
        """The oldest finished group within the window, which begins with the oldest one in no batch."""
        end = next(iter(self._untaken), 0) + self.window
        for ordinal in self._untaken:
            if ordinal >= end:
                return None
            if self.entries[ordinal].state in _TAKEABLE:
                return ordinal
        return None

    @property
    def _size(self) -> int:
        """Groups of the next batch: fewer than usual where the tasks have ended."""
        return self.batch if self._has_demand else min(self.batch, len(self.entries))

    def lag(self, ordinal: int) -> int:
        return self.version - self.entries[ordinal].version

    def train(self, ordinals: Iterable[int]) -> None:
        """The batch has been trained: its slots are free."""
        if sorted(ordinals) != sorted(self.taken) or not self.taken:
            raise ValueError(f"the batch to train is {sorted(self.taken)}")
        for ordinal in self.taken:
            del self.entries[ordinal]
        self.settled += len(self.taken)
        self.taken = []
        self.version += 1

    def _entry(self, ordinal: int, state: GroupState) -> Entry:
        entry = self.entries.get(ordinal)
        if entry is None or entry.state is not state:
            found = "nowhere" if entry is None else entry.state.value
            raise ValueError(f"group {ordinal} is {found}, and should be {state.value}")
        return entry

    def state_dict(self) -> dict[str, Any]:
        """State for a resumed run. Groups in flight are played again."""
        return {
            "next_ordinal": self.next_ordinal,
            "version": self.version,
            "settled": self.settled,
            "entries": [
                {
                    "ordinal": ordinal,
                    "version": entry.version,
                    "tries": entry.tries,
                    "state": GroupState.TO_PLAY if entry.state is GroupState.IN_FLIGHT else entry.state,
                }
                for ordinal, entry in self.entries.items()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.next_ordinal, self.version = int(state["next_ordinal"]), int(state["version"])
        self.settled = int(state["settled"])
        self.entries = {
            int(one["ordinal"]): Entry(one["version"], GroupState(one["state"]), one["tries"])
            for one in state["entries"]
        }
        self.taken = []
        self._index()
