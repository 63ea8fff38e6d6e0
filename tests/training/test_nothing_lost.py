"""Checkpoints by minutes, and what a resumed run says of where it goes on."""

from __future__ import annotations

import shutil
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from stage_runs import Talker
from training_helpers import TINY, add, even, tasks

import ludus
from ludus.observe import RunFolder, RunWriter
from ludus.training import Parts, Recipe, Trainer, build_run_context
from ludus.training.checkpoint import checkpoint_to_resume, going_on_text
from ludus.training.config.recipe import with_usual_settings

CODE: dict[str, Any] = {"tasks": tasks(6), "tools": [add], "rewards": [even], "agent": Talker()}


def recipe_at(folder: Path, rl: dict[str, Any], **run: Any) -> Recipe:
    tables = {**TINY, "rl": {**TINY["rl"], **rl}, "run": {"folder": str(folder), **run}}
    return with_usual_settings(Recipe.parse(tables, "the test"))


@pytest.mark.parametrize(("minutes", "saved"), [(10.0, [0, 3, 6, 7]), (None, [0, 7])])
async def test_a_checkpoint_is_due_after_minutes_too(
    tmp_path: Path, minutes: float | None, saved: list[int]
) -> None:
    """A clock on which 290 seconds pass between any two looks at it: one look a step, and one a save."""
    run = {"checkpoint_every": 100, "keep_checkpoints": 9, "checkpoint_minutes": minutes}
    recipe = recipe_at(tmp_path / "run", {"steps": 7}, **run)
    ticks = count(0.0, 290.0)
    with RunWriter.create(tmp_path / "run", recipe.model_dump(mode="json")) as writer:
        async with await build_run_context(recipe, Parts(**CODE)) as context:
            await Trainer(context, writer, clock=lambda: next(ticks)).train()
        assert [one.step for one in writer.checkpoints()] == saved


def going_on(folder: Path, recipe: Recipe) -> str:
    with RunWriter.resume(folder) as writer:
        return going_on_text(writer, recipe, checkpoint_to_resume(writer, recipe))


def test_a_resumed_run_says_from_where_and_what_is_played_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    recipe = recipe_at(folder, {"steps": 4, "tasks": 2}, checkpoint_every=2, keep_checkpoints=9)
    ludus.train(recipe, **CODE, progress=False)
    assert going_on(folder, recipe).endswith("played again: nothing that was recorded")
    shutil.rmtree(RunFolder(folder).checkpoints()[-1].path)  # as if it had been killed before the end
    said = f"going on after step 2 of 4, from {folder}/checkpoints/step-000002; "
    said += "played again: steps 3 to 4, 4 groups"
    assert going_on(folder, recipe) == said
    ludus.train(resume=folder, **CODE)
    assert said in " ".join(capsys.readouterr().err.split())
    assert said in RunFolder(folder).log_path.read_text()


def test_groups_in_flight_are_counted_apart_from_those_that_are_finished(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    recipe = recipe_at(
        folder,
        {"steps": 6, "tasks": 2, "staleness": {"steps": 2}},
        checkpoint_every=2,
        keep_checkpoints=9,
    )
    ludus.train(recipe, **CODE, progress=False)
    for checkpoint in RunFolder(folder).checkpoints()[2:]:
        shutil.rmtree(checkpoint.path)
    with RunWriter.resume(folder) as writer:
        checkpoint = checkpoint_to_resume(writer, recipe)
        text = going_on_text(writer, recipe, checkpoint)
    # (staleness 2 + 1) * 2 tasks: so many groups hold a slot after a step, in flight or finished
    numbers = [int(word) for word in text.replace(",", "").split() if word.isdecimal()]
    assert checkpoint is not None and checkpoint.step == 2
    assert "after step 2 of 6" in text and "steps 3 to 6" in text
    assert sum(numbers[4:]) == 6, text
