"""A run is a folder: `RunFolder` reads it, `RunWriter` (`run_writer`) writes it. Its layout:

::

    recipe.json                      the whole recipe, as it was resolved
    metrics.jsonl                    one line of numbers per step
    trajectories/step-000012.parquet the episodes of a step (step-000012-eval.parquet: evaluated)
    checkpoints/step-000012/         see `checkpoints`
    media/<sha256>                   images of episodes, each once
    logs/ludus.log                   everything that was logged
    audit.jsonl                      every tool call, when asked for or where MCP servers are used
    tensorboard/                     when asked for
    curve.png, report.md             what a person looks at first
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ludus.core.failures import ConfigError
from ludus.core.messages import Json
from ludus.core.trajectory import Trajectory
from ludus.observe.checkpoints import Checkpoint, checkpoint_problems, list_checkpoints
from ludus.observe.episodes.media import MEDIA
from ludus.observe.episodes.store import read_trajectories
from ludus.observe.files import read_regular
from ludus.observe.sinks import read_metrics

_log = logging.getLogger(__name__)

RECIPE = "recipe.json"
OBJECTS = "objects.json"
_TRAJECTORIES = re.compile(r"step-(\d{6,})(?:-(\w+))?\.parquet")


@dataclass(frozen=True, slots=True, order=True)
class TrajectoryFile:
    """A file of the episodes of one step and split."""

    step: int
    split: str
    path: Path


class RunFolder:
    """The things in a run's folder. Reading takes no lock and is safe while the run is written."""

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
        """Whether there is a run in this folder."""
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
        """Where the episodes of a step are, or will be."""
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
        """The episodes of a step."""
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


def find_runs(root: str | Path = "runs") -> Sequence[RunFolder]:
    """The runs directly below `root`, the one written to last at the end."""
    folder = Path(root)
    runs = [RunFolder(entry) for entry in folder.iterdir()] if folder.is_dir() else []
    return sorted((run for run in runs if run.is_run), key=_last_written)


def _last_written(run: RunFolder) -> float:
    source = run.metrics_path if run.metrics_path.exists() else run.path / RECIPE
    return source.stat().st_mtime
