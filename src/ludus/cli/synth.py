"""`ludus synth METHOD RECIPE`: make examples, and say what became of each candidate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ludus.cli.eval import load
from ludus.cli.options import stopped_says, until_told
from ludus.core.config import apply_overrides
from ludus.core.failures import ConfigError
from ludus.core.generation import ChatModel, Sampling
from ludus.core.messages import Json
from ludus.core.task import Task
from ludus.core.tokenizer import ByteTokenizer
from ludus.core.trajectory import Group
from ludus.engine import FakeEngine
from ludus.llm import is_address, load_chat_model
from ludus.observe import Progress, RunFolder, RunWriter, printable
from ludus.rollouts.agent import Expert
from ludus.rollouts.recorder import EngineChatModel
from ludus.sandbox import close_shared_sandboxes
from ludus.synth import (
    Cost,
    SynthConfig,
    SynthContext,
    SynthFolder,
    SynthMethod,
    SynthResult,
    load_method,
    write_result,
)
from ludus.synth.method import POLICY, ModelSpec
from ludus.synth.result import tables_of
from ludus.training.api import train_async
from ludus.training.checkpoint import resumed_recipe
from ludus.training.config.parts import Parts, task_set_specs
from ludus.training.config.recipe import Recipe
from ludus.training.config.stages import SFTConfig
from ludus.training.data.conversations import read_conversations
from ludus.training.data.tasks import TaskSet
from ludus.training.evaluation.evaluate import EvalModel, find_model, measure
from ludus.training.evaluation.study import settings_of_set

_TABLE = "synth."


def run_synthesis(
    name: str,
    source: Path,
    overrides: Sequence[str],
    model: str | None,
    tokenizer: str | None,
    out: Path | None,
) -> None:
    method_type = load_method(name)
    own = [one for one in overrides if one.startswith(_TABLE)]
    others = [one for one in overrides if not one.startswith(_TABLE)]
    remote = model if model is not None and is_address(model) else None
    recipe, parts = load(source, others, None if remote else model)
    settings = method_settings(method_type, name, recipe, own)
    method = method_type(settings)
    console = Console(stderr=True)
    player = asyncio.run(find_model(remote or recipe.model.name, recipe, tokenizer=tokenizer))
    asked = folder_settings(name, settings, recipe, parts, player)
    with SynthFolder.at(out, f"{recipe.name}-{name}", asked) as folder:
        console.print(Text(f"folder: {folder.path}"), soft_wrap=True)
        kept = f"what is finished is kept. Go on with the same command and --out {folder.path}"
        with stopped_says(console, kept), ExitStack() as shown:
            work = _made(method, recipe, parts, player, folder, ProgressBars(console, shown))
            result, cost, written = asyncio.run(until_told(work))
    show_result(Console(), method_type.title, result, cost, written)


def method_settings(
    method: type[SynthMethod[Any]], name: str, recipe: Recipe, overrides: Sequence[str]
) -> SynthConfig:
    """A method's settings: the recipe's table [synth.METHOD], and the command's synth.key=value."""
    given = [one.removeprefix(_TABLE).removeprefix(f"{name}.") for one in overrides]
    raw = apply_overrides(recipe.synth.get(name, {}), given)
    return method.settings_type.parse(raw, f"[synth.{name}]")


def folder_settings(
    name: str, settings: SynthConfig, recipe: Recipe, parts: Parts, player: EvalModel
) -> Json:
    """Everything that decides what is made: a folder holds one such set."""
    described = {
        one.name: settings_of_set(one, one.parts.tasks) for one in task_set_specs(recipe, parts)
    }
    for one in described.values():
        one["budgets"]["max_turns"] = recipe.budgets.max_turns
    return {
        "format": 1,
        "method": name,
        "settings": settings.model_dump(mode="json"),
        "model": player.identity(recipe),
        "seed": recipe.seed,
        "temperature": recipe.sampling.temperature,
        "sets": described,
    }


async def _made(
    method: SynthMethod[Any],
    recipe: Recipe,
    parts: Parts,
    player: EvalModel,
    folder: SynthFolder,
    bars: ProgressBars,
) -> tuple[SynthResult, Cost, list[Path]]:
    opened = player.open(recipe, parts) if method.needs_policy else open_without_model(recipe, parts)
    async with opened as sets:
        context = SynthContext(
            sets,
            folder,
            seed=recipe.seed,
            open_model=opener(sets) if method.needs_policy else open_model,
            trainer=RecipeTrainer(recipe, parts),
            on_item=bars.update,
        )
        try:
            result = await method.run(context)
        finally:
            await context.close()
        written = await asyncio.to_thread(
            write_result, folder, method.title, result, context.cost, context.failures
        )
        return result, context.cost, written


@asynccontextmanager
async def open_without_model(recipe: Recipe, parts: Parts) -> AsyncIterator[list[TaskSet]]:
    """The task sets for demonstrators: nothing can be generated in them, and no model is loaded."""
    # loads torch
    from ludus.training.preflight import check_servers
    from ludus.training.task_sets import build_task_sets, close_task_sets

    await check_servers(recipe, parts)
    sets = build_task_sets(recipe, parts, FakeEngine([]), ByteTokenizer())
    try:
        yield sets
    finally:
        await close_task_sets(sets)
        await close_shared_sandboxes()


async def open_model(spec: ModelSpec) -> ChatModel:
    if spec == POLICY:
        raise ConfigError('"policy" is the model that plays the episodes, and nothing is played here')
    return load_chat_model(spec)


def opener(sets: Sequence[TaskSet]) -> Callable[[ModelSpec], Awaitable[ChatModel]]:
    """Opens the language model that a setting names; "policy" is the model that plays."""

    async def open_one(spec: ModelSpec) -> ChatModel:
        if spec == POLICY:
            return EngineChatModel(sets[0].rollout.engine, sets[0].rollout.renderer, POLICY)
        return await open_model(spec)

    return open_one


@dataclass(slots=True)
class RecipeTrainer:
    """Trains and plays by a recipe, each time with other demonstrations and another model: for `looptool`."""

    recipe: Recipe
    parts: Parts

    @property
    def expert(self) -> Expert | None:
        shown = self.parts.demonstrations
        return shown if callable(shown) else None

    async def train(self, data: Path, folder: Path, model: str | None) -> str:
        run = RunWriter.resume(folder) if RunFolder(folder).is_run else None
        recipe = resumed_recipe(run, []) if run is not None else self._recipe(data, folder, model)
        parts = replace(self.parts, demonstrations=read_conversations(data))
        return str((await train_async(recipe, parts, run)).model)

    async def play(
        self, model: str | None, tasks: Sequence[Task], attempts: int, temperature: float
    ) -> list[Group]:
        found = await find_model(model, self.recipe)
        async with found.open(self.recipe, self.parts) as sets:
            drawn = Sampling(temperature=temperature)
            played = await measure(
                sets[0].rollout, tasks, attempts=attempts, sampling=drawn, seed=self.recipe.seed
            )
        return played.groups

    def _recipe(self, data: Path, folder: Path, model: str | None) -> Recipe:
        """The recipe with these demonstrations in its first stage that imitates."""
        recipe = self.recipe
        first = next((one for one in recipe.stages if isinstance(one, SFTConfig)), None)
        if first is None:
            raise ConfigError(
                "a loop of data and training imitates what it makes: give the recipe a [warm_start], or a "
                '[[stage]] of kind "sft"'
            )
        shown = first.model_copy(update={"demonstrations": str(data.resolve()), "columns": {}})
        stages = [shown if one is first else one for one in recipe.stages]
        raw: dict[str, Any] = recipe.with_stages(stages).model_dump()
        raw["run"] = {**raw["run"], "folder": str(folder)}
        if model is not None:
            raw["model"] = {**raw["model"], "name": model, "scratch": None}
        return Recipe.parse(raw, str(folder))


class ProgressBars:
    """One progress bar for each stage of a method."""

    def __init__(self, console: Console, open_bars: ExitStack) -> None:
        self._console, self._open = console, open_bars
        self._bars: dict[str, Progress] = {}

    def update(self, stage: str, done: int, total: int) -> None:
        if stage not in self._bars:
            self._open.close()
            bar = Progress(total, stage, console=self._console, first=done, shown={})
            self._bars[stage] = self._open.enter_context(bar)
            if done:
                bar.say(f"{stage}: {done} of {total} were there already")
            return
        self._bars[stage].update(done, {})


def show_result(
    console: Console, title: str, result: SynthResult, cost: Cost, written: Sequence[Path]
) -> None:
    for table in tables_of(result, cost):
        console.print(replace(table, title=f"{title}: {table.title}").rich())
    for warning in result.warnings:
        console.print(Text(f"warning: {printable(warning)}", style="yellow"), soft_wrap=True)
    for path in written:
        console.print(Text(str(path)), soft_wrap=True)
    if written and result.kept:
        console.print(
            Text(f"next: ludus train RECIPE warm_start.demonstrations={written[0]}"), soft_wrap=True
        )
