"""A folder of results. What is played is written at once, so that stopping loses nothing that was finished.

::

    settings.json                        what was asked for; a folder holds one set of settings
    MODEL-DIGEST/model.json              which model
    MODEL-DIGEST/turns-8/parts/000003.parquet   the episodes of the fourth task, while it is being played
    MODEL-DIGEST/turns-8/episodes.parquet       all of them, once it has been
    MODEL-DIGEST/turns-8/NAME/...        the same for each task set, where there are several
    report.md, report.json, plot.png     what people and programs read

Every file appears whole or not at all. A task counts as finished when none of its episodes failed through
our fault or was aborted; those that did are played again by the next run, and shown until then.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ludus.core.failures import ConfigError
from ludus.core.generation import Sampling
from ludus.core.messages import Json
from ludus.core.task import Task
from ludus.core.trajectory import Group, StopReason
from ludus.observe import atomic_write, read_groups, write_groups
from ludus.observe.encoding import dump_value
from ludus.observe.lock import FolderLock
from ludus.training.anchoring import anchored
from ludus.training.set_building import SetPlan

SETTINGS = "settings.json"
_FORMAT = 1
_EPISODES, _PARTS = "episodes.parquet", "parts"


def settings_of(
    sets: Sequence[SetPlan],
    tasks: Sequence[Sequence[Task]],
    attempts: int,
    sampling: Sampling,
    seed: int,
) -> Json:
    """Everything that decides what an episode is, apart from the model and the most turns."""
    found: Json = {
        "format": _FORMAT,
        "attempts": attempts,
        "sampling": asdict(sampling),
        "seed": seed,
    }
    described = {one.name: _settings_of_set(one, own) for one, own in zip(sets, tasks, strict=True)}
    if len(described) == 1:
        found |= next(iter(described.values()))
    else:
        found["sets"] = described
    loaded: Json = json.loads(json.dumps(found))
    return loaded


def _settings_of_set(one: SetPlan, tasks: Sequence[Task]) -> Json:
    raw = anchored(one.recipe.model_dump(mode="json"))
    return {
        "tasks": {"count": len(tasks), "digest": digest_of(tasks)},
        "agent": raw["agent"],
        "budgets": {name: value for name, value in raw["budgets"].items() if name != "max_turns"},
        "rewards": raw["rewards"],
        "group_rewards": raw["group_rewards"],
    }


def digest_of(tasks: Sequence[Task]) -> str:
    """Changes when a task does. A value that cannot be stored, such as an object, is not looked at."""
    digest = hashlib.sha256()
    for task in tasks:
        messages = [message.as_chat() for message in task.messages]
        for value in (task.id, messages, task.target, dict(task.envs), dict(task.metadata)):
            text, is_exact = dump_value(value)
            digest.update((text if is_exact else "?").encode() + b"\0")
    return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Cell:
    """One model under one budget of turns."""

    path: Path

    def groups(self, tasks: Sequence[Task]) -> dict[str, Group]:
        """What has been played, by task, finished or not."""
        known = {task.id: task for task in tasks}
        files = [self.path / _EPISODES, *sorted((self.path / _PARTS).glob("*.parquet"))]
        read = (group for file in files if file.is_file() for group in read_groups(file))
        # a part is newer than the whole: it was played because something in the whole had failed
        return {g.task.id: Group(known[g.task.id], g.trajectories) for g in read if g.task.id in known}

    def write(self, group: Group, number: int) -> None:
        """Keep the episodes of the task with this number."""
        write_groups(self.path / _PARTS / f"{number:06d}.parquet", [group], split="eval")

    def close(self, groups: Sequence[Group]) -> None:
        """All has been played: one file instead of many."""
        if (self.path / _PARTS).is_dir():
            write_groups(self.path / _EPISODES, groups, split="eval")
            shutil.rmtree(self.path / _PARTS)


def is_finished(group: Group, attempts: int) -> bool:
    """Whether nothing of it need be played again."""
    return len(group.trajectories) == attempts and all(
        t.failure is None and t.stop is not StopReason.ABORTED for t in group.trajectories
    )


class ResultsFolder:
    """The results of one set of settings, for any models and budgets. One process writes at a time."""

    def __init__(self, path: str | Path, settings: Mapping[str, Any]) -> None:
        """A new folder, or one that was written under the same settings."""
        self.path = Path(path)
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path} is a file, not a folder of results")
        stored = self.path / SETTINGS
        if not stored.is_file() and self.path.is_dir() and any(_visible(self.path)):
            raise ConfigError(f"{self.path} holds something else than results; choose another folder")
        self._was_there = stored.is_file()
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(self.path / ".lock")
        self._lock.acquire()
        try:
            if stored.is_file():
                _check_same(stored, settings)
            else:
                atomic_write(stored, json.dumps(settings, indent=2) + "\n")
        except BaseException:
            self._lock.release()
            raise

    @classmethod
    def numbered(cls, name: str, settings: Mapping[str, Any], root: str | Path = "evaluations") -> Self:
        """A new folder evaluations/NAME-001, counted up."""
        slug = slug_of(name)
        for number in range(1, 1_000_000):
            path = Path(root) / f"{slug}-{number:03d}"
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            return cls(path, settings)
        raise ConfigError(f"{root} is full of results called {slug}")

    def cell(
        self, label: str, identity: Mapping[str, Any], turns: int, task_set: str | None = None
    ) -> Cell:
        """The place of a model's episodes under a budget. Another model of that name has another place."""
        raw = json.dumps(identity, sort_keys=True)
        digest = hashlib.sha256(raw.encode()).hexdigest()[:8]
        folder = self.path / f"{slug_of(label)}-{digest}"
        if not (folder / "model.json").is_file():
            atomic_write(
                folder / "model.json", json.dumps({"label": label, **identity}, indent=2) + "\n"
            )
        place = folder / f"turns-{turns}"
        return Cell(place if task_set is None else place / task_set)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A new folder into which nothing was played, because something was wrong, is removed."""
        if error is not None and not self._was_there and not any(self.path.rglob("*.parquet")):
            shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


def slug_of(name: str) -> str:
    """The name as part of a path."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.")[-60:].strip("-.") or "model"


def _visible(folder: Path) -> Iterator[Path]:
    return (entry for entry in folder.iterdir() if not entry.name.startswith("."))


def _check_same(stored: Path, settings: Mapping[str, Any]) -> None:
    try:
        found = json.loads(stored.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{stored} cannot be read: {error}") from None
    differing = list(_differences(found, dict(settings), ""))
    if differing:
        raise ConfigError(
            f"{stored.parent} holds results of other settings:\n"
            + "\n".join(f"  {line}" for line in differing[:20])
            + "\ngive the same settings, or another folder"
        )


def _differences(old: Any, new: Any, where: str) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(old.keys() | new.keys()):
            yield from _differences(old.get(name), new.get(name), f"{where}.{name}" if where else name)
    elif old != new:
        yield f"{where}: {old!r:.80} there, {new!r:.80} now"
