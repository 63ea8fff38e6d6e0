"""The folder that is looked at: which runs it holds, what they logged, and whether they go on.

Nothing is looked up by a path that a client sends: names are compared with those that a listing has found, and
what a link leads to outside the folder is not listed.
"""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from ludus.core.failures import ConfigError, LudusError
from ludus.core.messages import Json
from ludus.observe import (
    ResultFolder,
    RunFolder,
    TrajectoryFile,
    open_regular,
    read_regular,
    recorded_in,
)
from ludus.observe.run_folder import RECIPE

_RECENT_SECONDS = 900.0
"""A run on another machine counts as going on for so long after its last write."""
_MOST_POINTS = 1000
_READ_AT_ONCE = 8_000_000
_MOST_LINE_BYTES = 4_000_000


class NotFound(LudusError):
    """There is no such run, file or episode, or it is gone."""


@dataclass
class MetricsTail:
    """The rows of a `metrics.jsonl` that grows: each look reads what has been added since the last one."""

    path: Path
    rows: list[Json] = field(default_factory=list)
    torn: int = 0
    problem: str = ""
    """Why the file cannot be read."""
    _offset: int = 0
    _inode: tuple[int, int] = (0, 0)

    def refresh(self) -> list[Json]:
        """All rows so far. A file that was replaced or cut, as by a resumed run, is read again."""
        self.problem = ""
        try:
            with open_regular(self.path) as file:
                status = os.fstat(file.fileno())
                if (status.st_dev, status.st_ino) != self._inode or status.st_size < self._offset:
                    self.rows, self.torn, self._offset = [], 0, 0
                    self._inode = (status.st_dev, status.st_ino)
                file.seek(self._offset)
                while data := file.read(_READ_AT_ONCE):
                    whole, newline, _ = data.rpartition(b"\n")
                    if not newline:
                        if len(data) > _MOST_LINE_BYTES:  # a line of that length is no row
                            self._offset += len(data)
                            self.torn += 1
                            continue
                        break
                    self._take(whole)
                    self._offset += len(whole) + 1
                    file.seek(self._offset)
        except OSError as error:
            self.rows, self._offset, self._inode = [], 0, (0, 0)
            if not isinstance(error, FileNotFoundError):
                self.problem = f"{self.path.name} cannot be read: {error.strerror}"
        return self.rows

    def _take(self, lines: bytes) -> None:
        for line in lines.split(b"\n"):
            if not line:
                continue
            try:
                row = json.loads(line)
                step = int(row["step"])
                numbers = {
                    str(name): float(value)
                    for name, value in row.items()
                    if isinstance(value, int | float) and not isinstance(value, bool)
                }
                for name, text in (row.get("nonfinite") or {}).items():
                    numbers[str(name)] = float(text)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                self.torn += 1
                continue
            self.rows.append({**numbers, "step": step})


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Whether a run is being written, and by whom."""

    is_live: bool
    updated: float
    """When something was last written, in seconds since 1970."""


class Workspace:
    """The runs, evaluations and syntheses below a folder, or the one that the folder is."""

    def __init__(self, root: Path) -> None:
        if not root.exists():
            raise ConfigError(f"there is no folder {root}; `ludus train` makes runs/")
        if not root.is_dir():
            raise ConfigError(f"{root} is a file; give a run's folder, or a folder of runs")
        self.root = root.resolve()
        self.is_single = RunFolder(self.root).is_run
        # where `ludus eval` and `ludus synth` write
        beside = [self.root.parent / name for name in ("evaluations", "synth")]
        self._roots = [self.root, *(one for one in beside if self.root.name == "runs" and one.is_dir())]
        self._tails: dict[str, MetricsTail] = {}
        self._lock = threading.Lock()

    @property
    def labels_path(self) -> Path:
        return self.root / "labels"

    def runs(self) -> dict[str, RunFolder]:
        if self.is_single:
            run = RunFolder(self.root)
            return {run.name: run} if run.is_run else {}
        found = [(_last_write(run), name, run) for name, run in self._found()]
        return {name: run for _, name, run in sorted(found, key=lambda one: one[:2])}

    def _found(self) -> Iterator[tuple[str, RunFolder]]:
        """All that was recorded, by name; the folder itself may be that of an evaluation or a synthesis."""
        yield from (one for one in recorded_in(self.root, depth=0) if self._is_own(one[1]))
        for root in self._roots:
            with suppress(OSError):
                for entry in root.iterdir():
                    with suppress(OSError):
                        if entry.is_dir() and self._is_inside(entry):
                            yield from (
                                one for one in recorded_in(entry, entry.name) if self._is_own(one[1])
                            )

    def _is_own(self, run: RunFolder) -> bool:
        """Whether what says what it is stands in here, too."""
        about = run.described_in if isinstance(run, ResultFolder) else [run.path / RECIPE]
        return all(self._is_inside(file) for file in about)

    def run(self, name: str) -> RunFolder:
        """The run of that name; `NotFound` where there is none."""
        found = self.runs().get(name)
        if found is None:
            raise NotFound(f"there is no run {name!r} here; it may have been deleted or renamed")
        return found

    def files(self, run: RunFolder) -> list[TrajectoryFile]:
        try:
            return [file for file in run.trajectory_files() if self._is_inside(file.path)]
        except OSError:
            return []

    def file(self, name: str, file: str) -> Path:
        for one in self.files(self.run(name)):
            if one.path.name == file:
                return one.path
        raise NotFound(
            f"the run {name!r} has no episodes in {file!r}; it may have been resumed or deleted"
        )

    def _is_inside(self, path: Path) -> bool:
        try:
            resolved = path.resolve()
            return any(resolved.is_relative_to(root) for root in self._roots)
        except (OSError, RuntimeError):
            return False

    def recipe(self, name: str) -> Json:
        """The recipe of a run; what is wrong with it where it cannot be read."""
        try:
            found = self.run(name).recipe()
        except NotFound:
            raise
        except (LudusError, OSError, ValueError, RecursionError) as error:
            return {"(damaged)": str(error)}
        return found if isinstance(found, dict) else {"(damaged)": "recipe.json is no table"}

    def metrics(self, name: str) -> list[Json]:
        run = self.run(name)
        with self._lock:
            tail = self._tails.setdefault(name, MetricsTail(run.metrics_path))
            return list(tail.refresh()) if self._is_inside(run.metrics_path) else []

    def metrics_problem(self, name: str) -> str:
        tail = self._tails.get(name)
        torn = f"{tail.torn} torn lines" if tail is not None and tail.torn else ""
        return (tail.problem if tail is not None else "") or torn

    def status(self, name: str) -> RunStatus:
        """Whether a process writes the run. Its lock is read and not tried: that would disturb a writer."""
        run = self.run(name)
        updated = _last_write(run)
        try:
            holder = json.loads(read_regular(run.path / ".lock")[:1000])
            pid, host = int(holder["pid"]), str(holder["host"])
        except (OSError, ValueError, KeyError, TypeError):
            return RunStatus(False, updated)
        if host != socket.gethostname():
            return RunStatus(time.time() - updated < _RECENT_SECONDS, updated)
        return RunStatus(_holds_lock(run.path / ".lock", pid), updated)


def _holds_lock(lock: Path, pid: int) -> bool:
    """Whether a process has this lock file open: the lock ends with it, the file stays."""
    try:
        target = lock.resolve()
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if link.readlink() == target:
                    return True
    except OSError:
        return False
    return False


def _last_write(run: RunFolder) -> float:
    found = 0.0
    own = [file.path for file in run.trajectory_files()] if isinstance(run, ResultFolder) else []
    for path in (run.metrics_path, run.trajectories_path, run.path / RECIPE, *own):
        with suppress(OSError):
            found = max(found, path.stat().st_mtime)
    return found


def series_of(
    runs: Sequence[Sequence[Json]], name: str, *, first: int | None = None, last: int | None = None
) -> Json:
    """A metric as steps and values, thinned to what a screen can show; non-finite values are listed apart.

    Of several runs: at each step the mean over those that have it, how many they are, the lowest and highest.
    """
    found: dict[int, list[float]] = {}
    broken: set[int] = set()
    for rows in runs:
        own = {row["step"]: row[name] for row in rows if name in row}
        for step, value in own.items():
            if (first is not None and step < first) or (last is not None and step > last):
                continue
            if math.isfinite(value):
                found.setdefault(step, []).append(value)
            else:
                broken.add(step)
    shown = thinned([(step, fmean(values)) for step, values in sorted(found.items())])
    series: Json = {
        "steps": [step for step, _ in shown],
        "values": [value for _, value in shown],
        "points": len(found),
        "broken": sorted(broken)[:100],
    }
    if len(runs) > 1:
        of_steps = [found[step] for step, _ in shown]
        series |= {"low": [*map(min, of_steps)], "high": [*map(max, of_steps)]}
        series["runs"] = [*map(len, of_steps)]
    return series


def thinned(points: Sequence[tuple[int, float]], most: int = _MOST_POINTS) -> list[tuple[int, float]]:
    """At most about `most` points: of each stretch its lowest and highest, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / (most // 2))
    shown: list[tuple[int, float]] = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        shown += sorted(ends)
    return shown


def plain(value: Any, most: int = 2000) -> Any:
    """A value as JSON can carry it, long texts cut."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):
        return value if len(value) <= most else f"{value[:most]}…"
    if isinstance(value, dict):
        return {str(key)[:200]: plain(item, most) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, most) for item in value]
    return value
