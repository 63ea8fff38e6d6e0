"""A run is a folder: `RunFolder` reads it, `RunWriter` writes it. Its layout is in docs/observe.md.

A checkpoint `step-000012` is complete whenever it is visible, by an atomic rename. Its `manifest.json` has
the size and the CRC-32 of every other file, which shows what happened to it since: a copy that stopped
half-way, a disk that lost blocks.

`audit.jsonl` has one line for each tool call, appended when it ends, and never rewritten. A list of tools on
offer is written once, as a line of its own kind, and named by its digest afterwards. A resumed run goes on in
the same file, also where it plays steps again: the log is of what was called::

    {"kind": "tools", "tools": "3f1c...", "names": ["read_file", ...]}
    {"kind": "call", "time": ..., "tool": "read_file", "tools": "3f1c...", "legality": "legal", ...}

What `ludus eval` and `ludus synth` write is a `SettingsFolder`, and is read as runs of one step, without
metrics (`ResultFolder`)::

    evaluations/NAME-001/settings.json, MODEL/model.json, MODEL/turns-8[/TASK SET]/episodes.parquet
    synth/NAME-001/settings.json, examples.parquet, rejected.parquet

While they go on, what is finished is in `parts/000003.parquet` beside `episodes.parquet`, or in
`parts/STAGE/000003.parquet`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from ludus.core.failures import ConfigError
from ludus.core.messages import Json
from ludus.core.trajectory import AuditRecord, Trajectory
from ludus.observe.episodes import MEDIA, read_trajectories
from ludus.observe.files import (
    FolderLock,
    atomic_directory,
    atomic_write,
    numbered_folder,
    read_regular,
    remove_directory,
)
from ludus.observe.sinks import read_metrics

RECIPE = "recipe.json"
OBJECTS = "objects.json"
SETTINGS, MODEL, PARTS = "settings.json", "model.json", "parts"
_EPISODES, _EXAMPLES = ("episodes.parquet",), ("examples.parquet", "rejected.parquet")
_MOST_ENTRIES = 2000
"""How many folders are looked at within one that is no run: a viewer looks again and again."""
AUDIT = "audit.jsonl"
_MOST_ARGUMENTS = 4_000
MANIFEST = "manifest.json"
_CHANGEABLE = ("adapter_config.json", "base.json")
"""Files that say where an adapter's base is and what it was, which a person may have to change: not proven."""
_NAME = re.compile(r"step-(\d{6,})")
_CHUNK = 1 << 22
_log = logging.getLogger(__name__)

_DEPTH = 2
"""Runs of `ludus mcp-rl`, of sweeps and of rounds stand so deep within a folder of their own."""
_TRAJECTORIES = re.compile(r"step-(\d{6,})(?:-(\w+))?\.parquet")


@dataclass(frozen=True, slots=True, order=True)
class Checkpoint:
    """A complete checkpoint in a folder of checkpoints."""

    step: int
    path: Path


@contextmanager
def new_checkpoint(folder: Path, step: int) -> Iterator[Path]:
    """A folder to write the files of a checkpoint to; it appears, whole, when the block ends.

    A damaged checkpoint of that step is replaced; a good one is refused.
    """
    if step < 0:
        raise ValueError(f"a step is 0 or more, not {step}")
    target = folder / f"step-{step:06d}"
    if target.is_dir() and (problems := checkpoint_problems(target)):
        _log.warning("the damaged checkpoint %s is replaced: %s", target, problems[0])
        remove_directory(target)
    with atomic_directory(target) as temporary:
        yield temporary
        files = {
            str(file.relative_to(temporary)): {"bytes": file.stat().st_size, "crc32": _crc32(file)}
            for file in sorted(temporary.rglob("*"))
            if file.is_file()
        }
        (temporary / MANIFEST).write_text(json.dumps({"files": files}, indent=1), encoding="utf-8")


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """The checkpoints in `folder`, the oldest first. Damaged ones are left out, with a warning."""
    good: list[Checkpoint] = []
    for checkpoint in _named(folder):
        if problems := checkpoint_problems(checkpoint.path):
            _log.warning("the checkpoint %s is left out: %s", checkpoint.path, problems[0])
        else:
            good.append(checkpoint)
    return good


def remove_checkpoints_after(folder: Path, step: int) -> list[Checkpoint]:
    """Remove the checkpoints, damaged or not, of later steps, and say which."""
    removed = [checkpoint for checkpoint in _named(folder) if checkpoint.step > step]
    for checkpoint in removed:
        remove_directory(checkpoint.path)
    return removed


def checkpoint_problems(checkpoint: Path, *, thorough: bool = False) -> list[str]:
    """Problems of a checkpoint: files missing or of another size; with `thorough`, also other content."""
    try:
        files: dict[str, Json] = json.loads(read_regular(checkpoint / MANIFEST))["files"]
    except FileNotFoundError:
        return [f"it has no {MANIFEST}"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"its {MANIFEST} cannot be read: {error}"]
    return [
        problem
        for name, expected in files.items()
        if name not in _CHANGEABLE
        and (problem := _problem(checkpoint / name, expected, thorough)) is not None
    ]


def _named(folder: Path) -> list[Checkpoint]:
    """Whatever is called like a checkpoint, by step."""
    entries = folder.iterdir() if folder.is_dir() else ()
    matches = [(entry, _NAME.fullmatch(entry.name)) for entry in entries if entry.is_dir()]
    return sorted(Checkpoint(int(match[1]), entry) for entry, match in matches if match)


def _problem(file: Path, expected: Json, thorough: bool) -> str | None:
    try:
        if not file.is_file():
            return f"{file.name} is missing"
        if (size := file.stat().st_size) != expected["bytes"]:
            return f"{file.name} has {size} bytes instead of {expected['bytes']}"
        if thorough and _crc32(file) != expected["crc32"]:
            return f"{file.name} has other content than was written"
    except OSError as error:
        return f"{file.name} cannot be read: {error}"
    return None


def _crc32(file: Path) -> int:
    value = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value


@dataclass(frozen=True, slots=True, order=True)
class TrajectoryFile:
    """A file of the episodes of one step and split."""

    step: int
    split: str
    path: Path


class RunFolder:
    """The things in a run's folder. Reading takes no lock and is safe while the run is written."""

    kind = "run"

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metrics_path = self.path / "metrics.jsonl"
        self.trajectories_path = self.path / "trajectories"
        self.checkpoints_path = self.path / "checkpoints"
        self.media_path = self.path / MEDIA
        self.log_path = self.path / "logs" / "ludus.log"
        self.tensorboard_path = self.path / "tensorboard"
        self.curve_path = self.path / "curve.png"
        self.report_path = self.path / "report.md"
        self.diagnosis_path = self.path / "diagnosis.md"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def is_run(self) -> bool:
        return (self.path / RECIPE).is_file()

    def recipe(self) -> Json:
        """The recipe that the run was started with."""
        try:
            recipe: Json = json.loads(read_regular(self.path / RECIPE))
        except FileNotFoundError:
            raise ConfigError(f"{self.path} is not a run: it has no {RECIPE}") from None
        except ValueError as error:
            raise ConfigError(f"{self.path / RECIPE} is damaged ({error})") from None
        return recipe

    def objects(self) -> dict[str, str]:
        """Parts of the run that were passed as Python objects, by name: a command cannot rebuild them."""
        file = self.path / OBJECTS
        try:
            found: dict[str, str] = json.loads(read_regular(file)) if file.exists() else {}
        except ValueError as error:
            raise ConfigError(f"{file} is damaged ({error})") from None
        return found

    def metrics(self) -> list[Json]:
        """The rows of numbers, in the order they were logged."""
        return read_metrics(self.metrics_path)

    def trajectory_path(self, step: int, split: str = "train") -> Path:
        if not re.fullmatch(r"\w+", split):
            raise ValueError(f"a split is a word, not {split!r}")
        suffix = "" if split == "train" else f"-{split}"
        return self.trajectories_path / f"step-{step:06d}{suffix}.parquet"

    def trajectory_files(self) -> list[TrajectoryFile]:
        """The files of episodes that there are, the oldest first."""
        folder = self.trajectories_path
        entries = folder.iterdir() if folder.is_dir() else ()
        matches = [(entry, _TRAJECTORIES.fullmatch(entry.name)) for entry in entries]
        found = [(entry, m) for entry, m in matches if m and entry.is_file()]
        return sorted(TrajectoryFile(int(m[1]), m[2] or "train", entry) for entry, m in found)

    def trajectories(self, step: int, split: str = "train") -> list[Trajectory]:
        return read_trajectories(self.trajectory_path(step, split))

    def checkpoints(self) -> list[Checkpoint]:
        """The complete checkpoints, the oldest first."""
        return list_checkpoints(self.checkpoints_path)

    def latest_checkpoint(self, *, thorough: bool = False) -> Checkpoint | None:
        """The newest that is whole, by the sizes of its files; `thorough`: and by what is in them."""
        for checkpoint in reversed(self.checkpoints()):
            problems = checkpoint_problems(checkpoint.path, thorough=True) if thorough else []
            if not problems:
                return checkpoint
            _log.warning("the checkpoint %s is left out: %s", checkpoint.path, problems[0])
        return None


class ResultFolder(RunFolder):
    """Episodes of `ludus eval` (one model under one budget) or `ludus synth`, and what was asked for."""

    def __init__(self, path: Path, kind: str, results: Path, about: Sequence[Path] = ()) -> None:
        super().__init__(path)
        self.kind, self._results = kind, results
        self.described_in = [results / SETTINGS, *about]
        """The files that say what it is."""

    @property
    def is_run(self) -> bool:
        return bool(self.trajectory_files())

    def recipe(self) -> Json:
        """What was asked for, in the form of a run's recipe."""
        settings, *about = [_table(file) for file in self.described_in]
        model = about[0] if about else settings.get("model")
        named = {"name": model.get("label"), **model} if isinstance(model, dict) else {}
        return {"name": self._results.name, "model": named, self.kind: settings}

    def trajectory_files(self) -> list[TrajectoryFile]:
        usual = _EPISODES if self.kind == "evaluation" else _EXAMPLES
        files = [self.path / name for name in usual]
        for folder in (self.path / PARTS, *([self.path] if self.path.parent.name == PARTS else [])):
            files += sorted(folder.glob("*.parquet"))
        split = "eval" if self.kind == "evaluation" else "kept"
        return [
            TrajectoryFile(0, "rejected" if file.name == _EXAMPLES[1] else split, file)
            for file in files
            if file.is_file()
        ]


def recorded_in(
    folder: Path, name: str | None = None, depth: int = _DEPTH, left: Iterator[int] | None = None
) -> Iterator[tuple[str, RunFolder]]:
    """Everything with episodes in a folder, by names without slashes: the run that it is, or what it holds."""
    name = folder.resolve().name if name is None else name
    left = iter(range(_MOST_ENTRIES)) if left is None else left
    if RunFolder(folder).is_run:
        yield name, RunFolder(folder)
        return
    for result in _results(folder):
        yield ":".join((name, *result.path.relative_to(folder).parts)), result
    with suppress(OSError):
        for entry in folder.iterdir() if depth else ():
            if entry.name.startswith(".") or entry.is_symlink() or not entry.is_dir():
                continue
            if next(left, None) is None:
                return
            yield from recorded_in(entry, f"{name}:{entry.name}", depth - 1, left)


def _results(folder: Path) -> Iterator[ResultFolder]:
    """What `ludus eval` or `ludus synth` has written into a folder; nothing where it is another one."""
    if not (folder / SETTINGS).is_file():
        return
    made = ResultFolder(folder, "synthesis", folder)
    with suppress(OSError):
        if made.is_run:
            yield made
        elif (folder / PARTS).is_dir():  # it goes on
            stages = (
                ResultFolder(stage, "synthesis", folder) for stage in sorted((folder / PARTS).iterdir())
            )
            yield from (stage for stage in stages if stage.is_run)
        for model in sorted(folder.glob(f"*/{MODEL}")):
            for budget in sorted(model.parent.glob("turns-*")):
                for place in (budget, *sorted(one for one in budget.iterdir() if one.is_dir())):
                    found = ResultFolder(place, "evaluation", folder, [model])
                    if found.is_run:
                        yield found


def _table(path: Path) -> dict[str, Any]:
    found = json.loads(read_regular(path))
    return found if isinstance(found, dict) else {"(damaged)": f"{path.name} is no table"}


def find_runs(root: str | Path = "runs") -> Sequence[RunFolder]:
    """The runs directly below `root`, the one written to last at the end."""
    folder = Path(root)
    runs = [RunFolder(entry) for entry in folder.iterdir()] if folder.is_dir() else []

    def last_written(run: RunFolder) -> float:
        source = run.metrics_path if run.metrics_path.exists() else run.path / RECIPE
        return source.stat().st_mtime

    return sorted((run for run in runs if run.is_run), key=last_written)


class SettingsFolder:
    """A folder whose contents all come from one set of settings: an interrupted command resumes in it.

    `settings.json` says what was asked for; other settings are refused, with what differs. One process writes
    at a time.
    """

    holds: ClassVar[str] = "results"
    """One word for its contents."""
    root: ClassVar[str] = "results"
    """Where numbered ones are made."""
    made: ClassVar[str] = "**/*.parquet"
    """The pattern of files that are worth keeping a new folder for."""

    def __init__(self, path: str | Path, settings: Mapping[str, Any]) -> None:
        self.path = Path(path)
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path} is a file, not a folder of {self.holds}")
        stored = self.path / SETTINGS
        if (
            not stored.is_file()
            and self.path.is_dir()
            and any(not entry.name.startswith(".") for entry in self.path.iterdir())
        ):
            raise ConfigError(
                f"{self.path} holds something else than {self.holds}; choose another folder"
            )
        self._was_there = stored.is_file()
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(self.path / ".lock")
        self._lock.acquire()
        try:
            if stored.is_file():
                _check_same(stored, settings, self.holds)
            else:
                atomic_write(stored, json.dumps(settings, indent=2) + "\n")
        except BaseException:
            self._lock.release()
            raise

    @classmethod
    def at(cls, path: str | Path | None, name: str, settings: Mapping[str, Any]) -> Self:
        """The folder at `path`; without one, a new ROOT/NAME-001, counted up."""
        return cls(numbered_folder(cls.root, name) if path is None else path, settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A new folder into which nothing was written, because something was wrong, is removed."""
        if error is not None and not self._was_there and not any(self.path.glob(self.made)):
            shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


def _check_same(stored: Path, settings: Mapping[str, Any], holds: str) -> None:
    try:
        found = json.loads(stored.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{stored} cannot be read: {error}") from None
    differing = list(_differences(found, dict(settings), ""))
    if differing:
        raise ConfigError(
            f"{stored.parent} holds {holds} of other settings:\n"
            + "\n".join(f"  {line}" for line in differing[:20])
            + "\ngive the same settings, or another folder"
        )


def _differences(old: Any, new: Any, where: str) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(old.keys() | new.keys()):
            yield from _differences(old.get(name), new.get(name), f"{where}.{name}" if where else name)
    elif old != new:
        yield f"{where}: {old!r:.80} there, {new!r:.80} now"


# The audit


class AuditLog:
    """Writes the log. The file is made by the first call."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / AUDIT
        self._lists: set[str] = set()
        self._file: int | None = None
        self._lock = threading.Lock()

    def __call__(self, record: AuditRecord) -> None:
        """Append a call: one write each, so that a run that is killed has lost none."""
        row = asdict(record)
        names = row.pop("offered")
        digest = hashlib.sha256(json.dumps(names).encode()).hexdigest()[:12]
        with self._lock:
            text = ""
            if digest not in self._lists:
                self._lists.add(digest)
                text = _line({"kind": "tools", "tools": digest, "names": names})
            text += _line({"kind": "call", "time": time.time(), **_short(row), "tools": digest})
            if self._file is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._file = os.open(self.path, flags, 0o666)
            os.write(self._file, text.encode())

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                os.close(self._file)
            self._file = None


def read_audit(folder: str | Path) -> Iterator[Json]:
    """The calls of a run, each with the names of the tools that were on offer; a torn last line is left out."""
    lists: dict[str, list[str]] = {}
    path = Path(folder) / AUDIT
    if not path.exists():
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if row["kind"] == "tools":
                lists[row["tools"]] = row["names"]
            else:
                yield {**row, "offered": lists.get(row["tools"], [])}


def _short(row: Json) -> Json:
    """Arguments of a sensible size; what was longer is text, and cut."""
    text = json.dumps(row["arguments"], default=str)
    if len(text) > _MOST_ARGUMENTS:
        row["arguments"] = f"{text[:_MOST_ARGUMENTS]}... ({len(text):,} characters)"
    return row


def _line(row: Json) -> str:
    return json.dumps(row, default=str) + "\n"
