"""The folders that `ludus eval` writes, read as runs of one step: one for each model, budget and task set.

evaluations/NAME-001/settings.json                                     what was measured, and how
evaluations/NAME-001/MODEL/model.json                                  who was measured
evaluations/NAME-001/MODEL/turns-8[/TASK SET]/episodes.parquet         or parts/*.parquet while it goes on
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ludus.core.messages import Json
from ludus.observe import RunFolder, TrajectoryFile, read_regular

SETTINGS, MODEL, EPISODES, PARTS = "settings.json", "model.json", "episodes.parquet", "parts"


class EvaluationFolder(RunFolder):
    """One model under one budget of turns. It has no metrics of its own: its episodes tell."""

    def __init__(self, results: Path, model: Path, path: Path) -> None:
        super().__init__(path)
        self._results, self._model = results, model

    @property
    def name(self) -> str:
        """Name from folder, model, budget and task set; no path, so that an address can hold it."""
        return ":".join((self._results.name, *self.path.relative_to(self._results).parts))

    @property
    def is_run(self) -> bool:
        return any(True for _ in self._files())

    def recipe(self) -> Json:
        """The settings and the model of the evaluation, in the form of a run's recipe."""
        settings, model = _table(self._results / SETTINGS), _table(self._model / MODEL)
        return {
            "name": self._results.name,
            "model": {"name": model.get("label"), **model},
            "evaluation": settings,
        }

    def trajectory_files(self) -> list[TrajectoryFile]:
        return [TrajectoryFile(0, "eval", file) for file in self._files()]

    def _files(self) -> Iterator[Path]:
        if (self.path / EPISODES).is_file():
            yield self.path / EPISODES
        yield from sorted(one for one in (self.path / PARTS).glob("*.parquet") if one.is_file())


def find_evaluations(results: Path) -> Iterator[EvaluationFolder]:
    """All that a folder of `ludus eval` holds; nothing where it is another folder."""
    if not (results / SETTINGS).is_file():
        return
    with suppress(OSError):
        for model in sorted(results.iterdir()):
            if not (model / MODEL).is_file():
                continue
            for budget in sorted(model.glob("turns-*")):
                for place in (budget, *sorted(one for one in budget.iterdir() if one.is_dir())):
                    found = EvaluationFolder(results, model, place)
                    if found.is_run:
                        yield found


def _table(path: Path) -> Json:
    found = json.loads(read_regular(path))
    return found if isinstance(found, dict) else {"(damaged)": f"{path.name} is no table"}
