"""Training for methods of synthesis that go round between data and training (`ludus synth looptool`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ludus.core.failures import ConfigError
from ludus.core.generation import Sampling
from ludus.core.task import Task
from ludus.core.trajectory import Group
from ludus.observe import RunFolder, RunWriter
from ludus.rollouts.agent import Expert
from ludus.training.api import train_async
from ludus.training.config.parts import Parts
from ludus.training.config.recipe import Recipe
from ludus.training.data.conversations import read_conversations
from ludus.training.evaluation.evaluate import find_model, measure
from ludus.training.resume import resumed_recipe


@dataclass(slots=True)
class RecipeTrainer:
    """Trains and plays by a recipe, each time with other demonstrations and another model."""

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
        raw: dict[str, Any] = self.recipe.model_dump()
        raw["run"] = {**raw["run"], "folder": str(folder)}
        if model is not None:
            raw["model"] = {**raw["model"], "name": model, "scratch": None}
        imitating = [stage for stage in raw["stage"] if stage["kind"] == "sft"]
        target = imitating[0] if imitating else raw["warm_start"]
        if target is None:
            raise ConfigError(
                "a loop of data and training imitates what it makes: give the recipe a [warm_start], or a "
                '[[stage]] of kind "sft"'
            )
        target.update(demonstrations=str(data.resolve()), columns={})
        return Recipe.parse(raw, str(folder))
