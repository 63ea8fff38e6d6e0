"""Experience replay with expiry: scored groups of earlier steps, trained on again for as long as they hold.

A stored group has the log-probabilities of the policy that played it, so the importance correction weighs its
tokens as stale samples'; its baseline is its own group's. It is dropped by `age`, `versions`, `uses`, or
`tools`: what a changed tool or environment answered then would not be observed now. Which groups join a step
is a function of the seed, the step and what is stored.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ludus.core.random import key, shuffled
from ludus.core.trajectory import Group
from ludus.observe import has_signal, keep_images, read_groups, read_notes, with_images, write_groups
from ludus.rollouts.rollout import Rollout
from ludus.tools.versions import tool_versions
from ludus.training.config.rl import ReplayBufferConfig, RolloutSettings
from ludus.training.data.rollout_batch import GroupFilter, RolloutBatch
from ludus.training.data.tasks import TaskSet

STORED = "replay.parquet"
REASONS = ("age", "versions", "tools", "uses")


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A scored group, and what it depends on."""

    group: Group
    set: int
    version: int
    """Version of the oldest policy that played it."""
    code: Mapping[str, str]
    """The versions of the tools that it called, and of its environments, by name."""
    stored: float
    """When, in seconds since 1970."""
    uses: int = 0

    def expired(
        self, config: ReplayBufferConfig, version: int, code: Mapping[str, str], now: float
    ) -> str | None:
        """Why it is dropped; None while it holds."""
        if config.max_age is not None and now - self.stored > config.max_age:
            return "age"
        if version - self.version > config.max_lag:
            return "versions"
        if any(code.get(name) != one for name, one in self.code.items()):
            return "tools"
        return "uses" if self.uses >= config.uses else None


async def code_versions(rollout: Rollout) -> dict[str, str]:
    """The versions of a rollout's tools and environments, by name."""
    tools = {f"tool {name}": one for name, one in (await tool_versions(rollout.tools)).items()}
    return tools | {f"env {name}": pool.version for name, pool in rollout.pools.items()}


@dataclass(slots=True)
class ReplayBuffer:
    """The stored groups of a stage."""

    config: ReplayBufferConfig
    settings: RolloutSettings
    sets: Sequence[TaskSet]
    code: Sequence[Mapping[str, str]]
    """The versions of tools and environments of each task set, now."""
    seed: int
    stored: list[StoredGroup] = field(default_factory=list)
    _expired: Counter[str] = field(default_factory=Counter)

    def mixed(
        self, played: RolloutBatch, step: int, version: int, now: float | None = None
    ) -> RolloutBatch:
        """The step's groups with stored ones among them, evenly spread."""
        self._expire(version, time.time() if now is None else now)
        chosen = shuffled(len(self.stored), key(self.seed, "replay", step))[: self.config.groups]
        again = [self.stored[place] for place in sorted(chosen)]
        for place in chosen:
            self.stored[place] = replace(self.stored[place], uses=self.stored[place].uses + 1)
        groups, sets = list(played.groups), list(played.sets)
        for number, one in enumerate(again):
            place = (number + 1) * len(played.groups) // (len(again) + 1) + number
            groups.insert(place, one.group)
            sets.insert(place, one.set)
        masked = GroupFilter(self.sets, self.settings).masked(groups)
        metrics = {
            "replay/groups": float(len(again)),
            "replay/stored": float(len(self.stored)),
            **{f"replay/expired_{name}": float(self._expired[name]) for name in REASONS},
        }
        if again:
            metrics["replay/lag_mean"] = sum(version - one.version for one in again) / len(again)
        self._expired.clear()
        return RolloutBatch(groups, masked, sets, metrics)

    def add(self, played: RolloutBatch, version: int, now: float | None = None) -> None:
        """Store what a step has played, if it can teach anything; the oldest make room."""
        moment = time.time() if now is None else now
        for group, number in zip(played.groups, played.sets, strict=True):
            if has_signal(group):
                versions = [v.version for t in group.trainable for a in t.actions for v in a.versions]
                code = _used(group, self.code[number])
                oldest = min(versions, default=version)
                self.stored.append(StoredGroup(group, number, oldest, code, moment))
        del self.stored[: max(0, len(self.stored) - self.config.capacity)]

    def _expire(self, version: int, now: float) -> None:
        held: list[StoredGroup] = []
        for one in self.stored:
            reason = one.expired(self.config, version, self.code[one.set], now)
            if reason is None:
                held.append(one)
            else:
                self._expired[reason] += 1
        self.stored = held

    def save(self, folder: Path) -> None:
        notes = [
            {
                "set": self.sets[one.set].name,
                "version": one.version,
                "code": dict(one.code),
                "stored": one.stored,
                "uses": one.uses,
            }
            for one in self.stored
        ]
        write_groups(folder / STORED, [one.group for one in self.stored], notes=notes)
        keep_images(folder, (t for one in self.stored for t in one.group.trajectories))

    def load(self, folder: Path) -> None:
        """Load the groups of a checkpoint; those of task sets that are gone are left out."""
        if not (folder / STORED).is_file():
            return
        numbers = {one.name: number for number, one in enumerate(self.sets)}
        groups = read_groups(folder / STORED)
        with_images((t for group in groups for t in group.trajectories), folder / STORED)
        rows = zip(groups, read_notes(folder / STORED), strict=True)
        self.stored = [
            StoredGroup(
                group, numbers[note["set"]], note["version"], note["code"], note["stored"], note["uses"]
            )
            for group, note in rows
            if note["set"] in numbers
        ]


def _used(group: Group, code: Mapping[str, str]) -> dict[str, str]:
    """The versions of what a group depends on: tools that were called, environments that it was played in."""
    called = {f"tool {call.name}" for t in group.trajectories for call in t.calls}
    envs = {f"env {name}" for name in group.task.envs}
    own = envs or {name for name in code if name.startswith("env ")}
    return {name: one for name, one in code.items() if name in called | own}
