"""`ludus train --seeds ... --sweep ...`: several runs of a recipe, one after the other or side by side.

    runs/tickets-study-001/settings.json    the recipe of every run
    runs/tickets-study-001/seed-0/          a run as any other

Each run is a process of its own, which ends with this one however it ends, so that no failure touches the
others. It is resumed also when it begins: its folder holds its recipe. What is finished is not repeated.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ludus.cli.options import stopped_says, until_told
from ludus.core.config import swept
from ludus.core.failures import ConfigError, LudusError
from ludus.core.messages import Json
from ludus.observe import RunFolder, RunWriter, SettingsFolder, printable, slug_of
from ludus.observe.files import read_regular
from ludus.observe.run_folder import SETTINGS
from ludus.remote.process_worker import end_with_parent
from ludus.training.config.parts import load_parts
from ludus.training.config.recipe import (
    load_recipe,
    with_absolute_paths,
    with_usual_settings,
)
from ludus.training.config.run import launched_rank
from ludus.training.evaluation.runs import ComparedRecipe, compared_recipes, paired_table, recipes_table

_PROGRAM = "from ludus.cli.study import run_member; run_member()"
_CHUNK, _LONGEST_LINE = 1 << 16, 2000
AGAIN = "ludus train --resume {path}"


@dataclass(frozen=True, slots=True)
class StudyOptions:
    """What makes a study of a run, and how many of its runs go side by side."""

    seeds: str | None = None
    sweep: Sequence[str] = ()
    parallel: int = 1

    @property
    def is_study(self) -> bool:
        return self.seeds is not None or bool(self.sweep)


class StudyFolder(SettingsFolder):
    """The folder of a study."""

    holds, root, made = "runs", "runs", "*/recipe.json"


def study_settings(folder: Path) -> Json | None:
    """The settings of the study in a folder; None where there is none."""
    try:
        found = json.loads(read_regular(folder / SETTINGS))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "members" in found else None


def run_study(recipe_path: Path, overrides: list[str], options: StudyOptions) -> None:
    """Begin the study, or go on with the one that this command has begun."""
    if launched_rank()[1] > 1:
        raise ConfigError(
            "a study starts its runs itself: begin it without torchrun, with cluster.trainer_ranks"
        )
    first = load_recipe(recipe_path, overrides)
    load_parts(first)  # mistakes in the code are reported before there is a folder
    settings = {"members": _members(recipe_path, overrides, options)}
    folder = first.run.folder or _unfinished(settings)
    _go_on(StudyFolder.at(folder, f"{first.name}-study", settings), settings, options.parallel)


def resume_study(folder: Path, settings: Json, options: StudyOptions, given: Sequence[str]) -> None:
    """Go on with the study in a folder, by its own recipes."""
    if options.is_study or given:
        raise ConfigError(
            f"{folder} is a study, which goes on by its own recipes: leave out "
            f"{' '.join(given) or '--seeds and --sweep'}"
        )
    _go_on(StudyFolder(folder, settings), settings, options.parallel)


def _members(recipe_path: Path, overrides: list[str], options: StudyOptions) -> Json:
    """The recipe of each run, by the name of its folder."""
    found: Json = {}
    for row in swept(
        [*options.sweep, *([f"seed={options.seeds}"] if options.seeds is not None else [])]
    ):
        given = [f"{key}={value}" for key, value in row.items()]
        recipe = with_usual_settings(load_recipe(recipe_path, [*overrides, *given]))
        raw = with_absolute_paths(recipe.model_dump(mode="json"))
        raw["run"]["folder"] = None  # it is in the study's
        if raw in found.values():
            raise ConfigError(f"the study has a run twice: {', '.join(given)}")
        name = slug_of("-".join(f"{key.rpartition('.')[2]}-{value}" for key, value in row.items()))
        found[f"{name}-{len(found)}" if name in found else name] = raw
    settings: Json = json.loads(json.dumps(found))
    return settings


def _unfinished(settings: Json) -> Path | None:
    """The newest study of these settings with a run left to do: the command that began it was given again."""
    for folder in sorted(Path(StudyFolder.root).glob("*-study-*"), reverse=True):
        if study_settings(folder) == settings and _left(folder, settings):
            return folder
    return None


def _left(folder: Path, settings: Json) -> list[str]:
    return [name for name in settings["members"] if not RunFolder(folder / name).curve_path.exists()]


def _go_on(study: StudyFolder, settings: Json, parallel: int) -> None:
    console = Console(stderr=True)
    again = AGAIN.format(path=study.path)
    with study:
        left = _left(study.path, settings)
        total = len(settings["members"])
        console.print(Text(f"study: {study.path}, {total} runs, {total - len(left)} of them finished"))
        made = _Study(study.path, settings["members"], console)
        with stopped_says(console, f"go on with: {again}"):
            try:
                asyncio.run(until_told(made.run(left, parallel)))
            except asyncio.CancelledError:  # by a signal; each run has said where it is saved
                raise KeyboardInterrupt from None
        done = [name for name in settings["members"] if name not in made.failed]
        if done:
            show_comparison(console, [study.path / name for name in done], None)
        if made.failed:
            told = "\n".join(f"  {name}: {why}" for name, why in made.failed.items())
            raise LudusError(
                f"{len(made.failed)} of {total} runs failed:\n{told}\nthe others are finished. To try these "
                f"again, from where they are saved: {again}"
            )
        console.print(Text(f"compare: ludus compare {study.path}"), soft_wrap=True)


@dataclass(slots=True)
class _Study:
    path: Path
    recipes: Json
    console: Console
    failed: dict[str, str] = field(default_factory=dict)

    async def run(self, names: Sequence[str], parallel: int) -> None:
        """Run these, so many side by side. A run that fails stops no other one."""
        waiting = list(reversed(names))

        async def work(slot: int) -> None:
            while waiting:
                await self._run_one(waiting.pop(), slot, parallel)

        async with asyncio.TaskGroup() as group:
            for slot in range(min(parallel, len(waiting))):
                group.create_task(work(slot))

    async def _run_one(self, name: str, slot: int, parallel: int) -> None:
        folder = self.path / name
        if not RunFolder(folder).is_run:
            RunWriter.create(folder, _logged_as(self.recipes[name], self.path.name, name)).close()
        watched, lifeline = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", _PROGRAM, str(folder), str(watched)),
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
                env={**os.environ, **_share(slot, parallel, self.recipes[name])},
                pass_fds=(watched,),
                start_new_session=True,  # Ctrl-C in a terminal is for this process, which passes it on once
            )
            reading = asyncio.create_task(self._show(name, process))
            try:
                await asyncio.shield(reading)
            except asyncio.CancelledError:
                process.terminate()
                await reading
                raise
            finally:
                code = await process.wait()
            if code:
                self.failed[name] = reading.result() or f"it ended with status {code}"
                self._say(name, "failed; the others go on")
        finally:
            os.close(lifeline)
            os.close(watched)

    async def _show(self, name: str, process: asyncio.subprocess.Process) -> str:
        """Print what a run says, with its name before each line; its last line."""
        assert process.stdout is not None
        rest, last = b"", ""
        while chunk := await process.stdout.read(_CHUNK):
            *lines, rest = (rest + chunk).split(b"\n")
            rest = rest[-_LONGEST_LINE:]
            for line in lines:
                if text := line.decode(errors="replace").strip():
                    last = text[:_LONGEST_LINE]
                    self._say(name, last)
        return last

    def _say(self, name: str, text: str) -> None:
        self.console.print(Text(f"{name}: {printable(text)}"), soft_wrap=True, highlight=False)


def _logged_as(recipe: Json, study: str, name: str) -> Json:
    """The recipe, with the study as the group of its runs at Weights & Biases."""
    wandb = recipe["run"]["wandb"]
    if wandb is None:
        return recipe
    named = {"group": wandb["group"] or study, "name": f"{wandb['name'] or study}/{name}"}
    return {**recipe, "run": {**recipe["run"], "wandb": {**wandb, **named}}}


def _share(slot: int, parallel: int, recipe: Json) -> dict[str, str]:
    """Of the machine's cores and GPUs, what one of several runs side by side gets, as environment variables."""
    if parallel == 1:
        return {}
    cores = max(1, len(os.sched_getaffinity(0)) // parallel)
    found = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(cores)}
    cluster = recipe["cluster"]
    if (
        cluster["engines"]
        or (cluster["trainer_ranks"] or 1) > 1
        or cluster["address"]
        or cluster["nodes"]
    ):
        return found  # it has several by itself
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = named.split(",") if named else [str(n) for n in range(torch.cuda.device_count())]
    return found | ({"CUDA_VISIBLE_DEVICES": devices[slot % len(devices)]} if len(devices) > 1 else {})


def run_member() -> None:
    """The program of a run's process: go on with the run in the folder that it is given."""
    from ludus.cli.main import run_command
    from ludus.cli.train import run_training

    folder, lifeline = sys.argv[1:]
    end_with_parent(int(lifeline))
    sys.exit(run_command(lambda **_: run_training(None, [], Path(folder), is_member=True)))


def show_comparison(console: Console, folders: Sequence[Path], against: str | None) -> None:
    """Print the held-out success of each recipe, and paired tests against the first or the one named."""
    recipes, without = compared_recipes(folders)
    if without:
        shown = ", ".join(without[:5]) + (", ..." if without[5:] else "")
        console.print(Text(f"without an evaluation: {shown}"), soft_wrap=True)
    if not recipes:
        console.print("nothing to compare: no run has played held-out tasks (tasks.evaluation)")
        return
    other = _named(recipes, against)
    console.print(recipes_table(recipes).rich())
    if len(recipes) > 1:
        console.print(paired_table(recipes, other).rich())
    console.print(CAPTION, soft_wrap=True)


CAPTION = (
    "Brackets are 95% intervals: over seeds where a recipe has several runs, over tasks of a single run. +/-/= "
    "counts tasks (or seeds) that went better, worse, the same; p flip and p sign are two-sided."
)


def _named(recipes: Sequence[ComparedRecipe], against: str | None) -> ComparedRecipe:
    if against is None:
        return recipes[0]
    for one in recipes:
        if one.label == against or any(
            against == run.name or Path(against).resolve() == run.path.resolve() for run in one.runs
        ):
            return one
    known = ", ".join(one.label for one in recipes)
    raise ConfigError(f"--against {against} is none of what is compared: {known}")
