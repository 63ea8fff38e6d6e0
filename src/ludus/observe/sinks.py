"""Where metrics go: JSON lines always, TensorBoard and Weights & Biases when asked for."""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ludus.core.failures import MissingExtraError
from ludus.core.messages import Json
from ludus.core.registry import Registry
from ludus.observe.files import atomic_write, read_regular

_log = logging.getLogger(__name__)

RESERVED = ("step", "time", "nonfinite")
"""The keys of a line of metrics that are not metrics."""


class Sink(Protocol):
    """Takes the numbers of a step."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one row."""

    def close(self) -> None:
        """Write out what is left."""


class JsonLinesSink:
    """One JSON object per row: `step`, `time`, then the metrics.

    Lines are valid JSON: a number that is not finite is null, and `nonfinite` says which it was. A line
    is on the disk when `write` returns. A line that a killed writer left unfinished is cut off.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(self.path)
        self._descriptor: int | None = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._descriptor is None:
            raise ValueError(f"{self.path} has been closed")
        line = json.dumps(metrics_row(step, metrics), allow_nan=False).encode() + b"\n"
        before = os.fstat(self._descriptor).st_size
        try:
            if (written := os.write(self._descriptor, line)) != len(line):
                raise OSError(f"{self.path}: only {written} of {len(line)} bytes could be written")
        except OSError:
            os.ftruncate(self._descriptor, before)
            raise
        os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class TensorBoardSink:
    """Scalars in TensorBoard's own format; needs neither torch nor TensorFlow."""

    def __init__(self, folder: str | Path, first_step: int | None = None) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise MissingExtraError("tensorboard", "tensorboard", "writing TensorBoard files") from None
        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        self._writer: Any = EventFileWriter(str(folder))
        if first_step is not None:
            # Tells TensorBoard to forget what an interrupted run wrote from this step on.
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._writer.add_event(
                event_pb2.Event(wall_time=time.time(), step=first_step, session_log=start)
            )

    @classmethod
    def of_run(cls, folder: Path, recipe: Json, first_step: int) -> TensorBoardSink:
        return cls(folder / "tensorboard", first_step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [
            self._summaries.Summary.Value(tag=name, simple_value=float(value))
            for name, value in metrics.items()
        ]
        summary = self._summaries.Summary(value=values)
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Weights & Biases. `mode` is online, offline or disabled; None lets WANDB_MODE decide."""

    def __init__(
        self,
        folder: str | Path,
        *,
        project: str,
        name: str,
        recipe: Json,
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: str | None = None,
    ) -> None:
        try:
            import wandb
        except ImportError:
            raise MissingExtraError("wandb", "wandb", "logging to Weights & Biases") from None
        # an id that the run keeps when it is resumed, and shares with no run of the same name elsewhere
        id_file = Path(folder) / "wandb-id"
        if not id_file.exists():
            atomic_write(id_file, secrets.token_hex(8))
        self._run: Any = wandb.init(
            project=project,
            name=name,
            entity=entity,
            group=group,
            tags=list(tags),
            id=id_file.read_text(encoding="utf-8").strip(),
            resume="allow",
            config=recipe,
            dir=str(folder),
            mode=mode,
        )
        # The axis is the run's step: wandb's own step may not go back, as the run's does on a resume.
        self._run.define_metric("*", step_metric="step")

    @classmethod
    def of_run(cls, folder: Path, recipe: Json, first_step: int) -> WandbSink:
        named = {name: value for name, value in recipe["run"]["wandb"].items() if value is not None}
        return cls(folder, **{"name": folder.name, **named}, recipe=recipe)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()


SINKS = Registry(
    "metric sink",
    {
        "tensorboard": "ludus.observe.sinks:TensorBoardSink.of_run",
        "wandb": "ludus.observe.sinks:WandbSink.of_run",
    },
)
"""Destinations of metrics: functions of (run folder, recipe, first step) that open a `Sink`."""


class Sinks:
    """Several sinks as one. The first is the record, whose failure counts; another's is worth one warning."""

    def __init__(self, record: Sink) -> None:
        self._record = record
        self._others: list[Sink] = []

    def add(self, open_sink: Callable[[], Sink]) -> None:
        """Also send every later row to the sink that `open_sink` gives."""
        try:
            self._others.append(open_sink())
        except MissingExtraError:
            raise  # not installed: fail before the run, not in it
        except Exception as error:  # noqa: BLE001 - a third-party client may raise anything
            self._give_up("a sink for metrics", error)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._record.write(step, metrics)
        self._guarded(lambda sink: sink.write(step, metrics))

    def close(self) -> None:
        self._record.close()
        self._guarded(lambda sink: sink.close())
        self._others = []

    def _guarded(self, action: Callable[[Sink], None]) -> None:
        for sink in list(self._others):
            try:
                action(sink)
            except Exception as error:  # noqa: BLE001 - a third-party client may raise anything
                self._others.remove(sink)
                self._give_up(type(sink).__name__, error)

    def _give_up(self, name: str, error: Exception) -> None:
        _log.warning(
            "%s failed and is switched off; the run goes on, metrics.jsonl has every number (%s: %s)",
            name,
            type(error).__name__,
            error,
        )


def metrics_row(step: int, metrics: Mapping[str, float]) -> Json:
    row: Json = {"step": int(step), "time": round(time.time(), 3)}
    nonfinite: dict[str, str] = {}
    for name, value in metrics.items():
        if name in RESERVED:
            raise ValueError(f"a metric cannot be called {name!r}")
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise TypeError(f"the metric {name!r} is not a number: {value!r:.80}") from None
        if math.isfinite(number):
            row[name] = int(value) if number.is_integer() and isinstance(value, int) else number
        else:
            row[name] = None
            nonfinite[name] = str(number)
    if nonfinite:
        row["nonfinite"] = nonfinite
        _log.warning("step %d: not finite: %s", step, nonfinite)
    return row


def read_metrics(path: str | Path) -> list[Json]:
    """The rows of a metrics file, numbers that are not finite restored. A torn line is left out."""
    rows: list[Json] = []
    try:
        lines = read_regular(path).split(b"\n")
    except FileNotFoundError:
        return rows
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            row = json.loads(line)
            step = row["step"]
        except (ValueError, KeyError, TypeError):
            _log.warning("%s: line %d is torn and left out", path, number)
            continue
        restored = {name: float(text) for name, text in row.pop("nonfinite", {}).items()}
        rows.append({**row, "step": int(step), **restored})
    return rows


def _cut_torn_line(path: Path) -> None:
    """Drop what follows the last newline: a killed writer did not finish it."""
    if not path.is_file():
        return
    content = path.read_bytes()
    complete = content.rfind(b"\n") + 1
    if complete != len(content):
        _log.warning("%s: the last line was torn by a crash and is dropped", path)
        os.truncate(path, complete)
