"""Writing a run's folder (its layout: `run_folder`)."""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from ludus.core.failures import ConfigError, LudusError, not_there
from ludus.core.messages import Json
from ludus.core.trajectory import Group, Trajectory
from ludus.observe.episodes import MediaStore, write_groups
from ludus.observe.files import (
    FolderLock,
    atomic_write,
    clean_leftovers,
    is_hidden_write,
    make_folder,
    numbered_folder,
    remove,
)
from ludus.observe.run_folder import (
    OBJECTS,
    RECIPE,
    RunFolder,
    TrajectoryFile,
    new_checkpoint,
    remove_checkpoints_after,
)
from ludus.observe.sinks import JsonLinesSink, Sink, Sinks

_log = logging.getLogger(__name__)

_LOCK = ".lock"
_BEGINNING = (RECIPE, OBJECTS, "metrics.jsonl", "logs", "tensorboard", "wandb", "wandb-id", "stages")
"""Files of a run's folder before anything has been recorded; there are no metrics yet."""


class BackgroundWriter:
    """Does writes in the order in which they were given, in a thread of its own.

    At most `max_waiting` wait: a caller that is faster than the disk waits for it then. After the first error
    nothing more is written, and every further call raises it, so that it cannot be missed. One thread gives
    writes; the daemon thread that does them begins with the first and ends with `close`.
    """

    def __init__(self, max_waiting: int = 32) -> None:
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._waiting: deque[Callable[[], object]] = deque()
        self._is_writing = False
        self._is_closed = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def submit(self, write: Callable[[], object]) -> None:
        """Have `write` called soon. Raises the error of an earlier one."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or len(self._waiting) < self._max_waiting)
            self._check()
            if self._is_closed:
                raise ValueError("this writer has been closed")
            self._waiting.append(write)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ludus-writer", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self) -> None:
        """Return when everything that was given is written. Raises the first error."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or not (self._waiting or self._is_writing))
            self._check()

    def close(self) -> None:
        """Flush, and end the thread. May be called twice; an error is raised each time."""
        try:
            self.flush()
        finally:
            with self._changed:
                self._is_closed = True
                self._changed.notify_all()
            if self._thread is not None:
                self._thread.join()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting or self._error is not None:
                    return
                write = self._waiting.popleft()
                self._is_writing = True
            error: BaseException | None = None
            try:
                write()
            except BaseException as raised:  # noqa: BLE001 - raised where the caller is
                error = raised
            with self._changed:
                self._is_writing, self._error = False, error
                if error is not None:
                    self._waiting.clear()
                self._changed.notify_all()
            if error is not None:
                return


class RunWriter(RunFolder):
    """A run that is being written: one process holds the folder's lock from the first to the last write.

    Made by `create` or `resume`; close it, or use it in `with`. After `write_in_background` metrics and
    episodes are written by a thread: all of them are on the disk when a checkpoint appears, when they are
    read here, and when the writer is closed. What could not be written is raised by the next call.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._lock = FolderLock(self.path / _LOCK)
        self._sinks: Sinks | None = None
        self._background: BackgroundWriter | None = None
        self._media = MediaStore(self.media_path)
        self._is_new = False
        """Whether it was begun by this writer."""
        self._made_folder = False
        """Whether the folder was, too."""

    @classmethod
    def create(cls, path: str | Path, recipe: Mapping[str, Any]) -> Self:
        """Start a run in a new or empty folder; any other is refused."""
        return cls._begun(path, recipe, makes_folder=not Path(path).exists())

    @classmethod
    def _begun(cls, path: str | Path, recipe: Mapping[str, Any], *, makes_folder: bool) -> Self:
        writer = cls(path)
        writer._made_folder = makes_folder
        if writer.path.exists() and not writer.path.is_dir():
            raise ConfigError(f"{path} is a file; a run needs a folder")
        text = _recipe_text(recipe)
        if writer.path.is_dir():
            writer._refuse_content()  # before a lock is left in a folder of another owner
        make_folder(writer.path)
        with writer._locked():
            clean_leftovers(writer.path)
            writer._refuse_content()
            try:
                atomic_write(writer.path / RECIPE, text)
            except BaseException:
                writer._vanish()
                raise
        writer._is_new = True
        return writer

    def _vanish(self) -> None:
        """Remove our lock, which is still held, and a folder that was made for us and holds nothing else."""
        self._lock.file.unlink(missing_ok=True)
        if self._made_folder:
            with suppress(OSError):  # it holds something after all
                self.path.rmdir()

    def _refuse_content(self) -> None:
        """A new run begins in an empty folder; leftovers of a write that was cut off do not count."""
        if self.is_run:
            raise ConfigError(
                f"{self.path} already holds a run; go on with it by --resume, or choose another folder"
            )
        entries = [entry.name for entry in self.path.iterdir()] if self.path.is_dir() else []
        if foreign := [name for name in entries if name != _LOCK and not is_hidden_write(name)]:
            raise ConfigError(
                f"{self.path} is not a run and not empty (it holds {foreign[0]!r}); choose another folder"
            )

    @classmethod
    def create_numbered(cls, name: str, recipe: Mapping[str, Any], *, root: str | Path = "runs") -> Self:
        """Start a run in `<root>/<name>-001`, or the next number that is free."""
        _recipe_text(recipe)  # what cannot be stored makes no folder
        return cls._begun(numbered_folder(root, name), recipe, makes_folder=True)

    @classmethod
    def resume(cls, path: str | Path) -> Self:
        """Go on with a run. What came after its checkpoint is still there: see `truncate_after`."""
        writer = cls(path)
        if not writer.path.exists():
            raise ConfigError(f"{path} is not a run: {not_there(path, 'folder', beside_recipe=False)}")
        if not writer.is_run:
            raise ConfigError(f"{path} is not a run: it has no {RECIPE}")
        with writer._locked():
            for folder in (writer.path, writer.trajectories_path, writer.checkpoints_path):
                if folder.is_dir():
                    clean_leftovers(folder)
        return writer

    def discard(self) -> None:
        """Take back a run that was begun here and has come to nothing, after it was closed.

        One that has recorded something, or holds foreign files, stays as it is; and so does a folder
        that was there before.
        """
        with suppress(OSError, LudusError):  # where that cannot be, it stays
            if not self._is_new:
                return
            self._lock.acquire()
            try:
                begun = (*_BEGINNING, _LOCK)
                others = [
                    entry.name
                    for entry in self.path.iterdir()
                    if entry.name not in begun and not is_hidden_write(entry.name)
                ]
                recorded = self.metrics_path.exists() and self.metrics_path.stat().st_size > 0
                if not others and not recorded:
                    for name in _BEGINNING:
                        remove(self.path / name)
                    self._vanish()
            finally:
                self._lock.release()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._lock.acquire()
        try:
            yield
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except Exception as error:
            if kind is None:
                raise
            _log.warning("closing %s: %s", self.path, error)  # what ended the run is worth more

    def close(self) -> None:
        """Write out what waits, close the sinks and give the lock back. May be called twice."""
        try:
            if self._background is not None:
                self._background.close()
        finally:
            self._background = None
            try:
                if self._sinks is not None:
                    self._sinks.close()
            finally:
                self._sinks = None
                self._lock.release()

    def write_in_background(self) -> None:
        """From now on metrics and episodes are written without the caller waiting for it."""
        self._check_open()
        self._background = self._background or BackgroundWriter()

    def flush(self) -> None:
        """Return when all that was logged is on the disk; raises what kept it from getting there."""
        if self._background is not None:
            self._background.flush()

    def _write(self, write: Callable[[], object]) -> None:
        if self._background is not None:
            self._background.submit(write)
        else:
            write()

    def metrics(self) -> list[Json]:
        self.flush()
        return super().metrics()

    def trajectory_files(self) -> list[TrajectoryFile]:
        self.flush()
        return super().trajectory_files()

    def trajectories(self, step: int, split: str = "train") -> list[Trajectory]:
        self.flush()
        return super().trajectories(step, split)

    def _check_open(self) -> None:
        if not self._lock.is_held:
            raise ValueError(f"{self!r} is not open; start with RunWriter.create or RunWriter.resume")

    def _opened(self) -> Sinks:
        self._check_open()
        if self._sinks is None:
            self._sinks = Sinks(JsonLinesSink(self.metrics_path))
        return self._sinks

    def add_sink(self, open_sink: Callable[[], Sink]) -> None:
        """Also send every row of metrics to the sink that `open_sink` gives.

        Its failures, when it opens too, cost one warning and never the run; only a package that is not
        installed is an error.
        """
        self._opened().add(open_sink)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        sinks, row = self._opened(), dict(metrics)
        self._write(lambda: sinks.write(step, row))

    def replace_recipe(self, recipe: Mapping[str, Any]) -> None:
        """Go on by another recipe, which a later resume reads."""
        self._check_open()
        atomic_write(self.path / RECIPE, _recipe_text(recipe))

    def note_objects(self, objects: Mapping[str, str]) -> None:
        """Write down what was passed as Python objects, in words."""
        self._check_open()
        atomic_write(self.path / OBJECTS, json.dumps(dict(objects), indent=1) + "\n")

    def write_groups(
        self,
        groups: Sequence[Group],
        step: int,
        split: str = "train",
        *,
        notes: Sequence[Json] = (),
    ) -> Path:
        """Store the episodes of a step; a file of the same step and split is replaced.

        `notes` has more about each group, which `read_notes` reads.
        """
        self._check_open()
        path = self.trajectory_path(step, split)

        def write() -> None:
            write_groups(path, groups, step=step, split=split, notes=notes)
            self._media.keep(groups)

        self._write(write)
        return path

    @contextmanager
    def checkpoint(self, step: int) -> Iterator[Path]:
        """A folder to write a checkpoint's files to; it appears, whole, when the block ends."""
        self._check_open()
        self.flush()  # what came before a checkpoint does not come again
        with new_checkpoint(self.checkpoints_path, step) as folder:
            yield folder

    def truncate_after(self, step: int) -> None:
        """Forget what came after `step`, so that a resumed run records no step twice; -1 forgets all."""
        self._check_open()
        if self._sinks is not None:
            raise ValueError("truncate a run before its first metrics are logged, not after")
        dropped = _drop_lines_after(self.metrics_path, step)
        files = [file for file in self.trajectory_files() if file.step > step]
        for file in files:
            file.path.unlink()
        checkpoints = remove_checkpoints_after(self.checkpoints_path, step)
        if step < 0 and not (dropped or files or checkpoints):
            return  # a run that begins
        _log.info(
            "%s: dropped %d rows of metrics, %d files of episodes, %d checkpoints",
            f"going on after step {step}" if step >= 0 else "beginning anew, without a checkpoint",
            dropped,
            len(files),
            len(checkpoints),
        )


def _recipe_text(recipe: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(recipe), indent=1, default=str, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the recipe cannot be stored as JSON: {error}") from None


def _drop_lines_after(metrics: Path, step: int) -> int:
    """Rewrite a file of metrics without the lines that are torn or of a later step; count them."""
    lines = [line for line in metrics.read_bytes().split(b"\n") if line] if metrics.exists() else []
    kept = [line for line in lines if (found := _step_of(line)) is not None and found <= step]
    if len(kept) != len(lines):
        atomic_write(metrics, b"".join(line + b"\n" for line in kept))
    return len(lines) - len(kept)


def _step_of(line: bytes) -> int | None:
    """The step of a line of metrics; None for a torn one."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None
