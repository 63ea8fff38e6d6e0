"""`ludus check data FILE`: put any file of episodes or conversations through quality control."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from ludus.chat.tokenizers import load_tokenizer
from ludus.cli.eval import load
from ludus.cli.synth import ProgressBars, open_model, show_result
from ludus.core.config import apply_overrides
from ludus.core.failures import ConfigError
from ludus.core.task import Task
from ludus.core.tokenizer import ByteTokenizer, Tokenizer
from ludus.core.trajectory import StopReason, Trajectory
from ludus.core.user_files import file_problem
from ludus.engine.fake import FakeEngine
from ludus.observe import holds_trajectories, read_trajectories
from ludus.sandbox import close_shared_sandboxes
from ludus.synth import Cost, SynthContext, SynthFolder, SynthResult, write_result
from ludus.synth.quality.pipeline import QualityConfig, QualityPipeline
from ludus.training.config.parts import Parts
from ludus.training.config.recipe import Recipe
from ludus.training.data.conversations import asked, read_conversations

_MOST_TOKENS = 1_000_000


def check_data(
    files: Sequence[Path], recipe: Path | None, settings: Sequence[str], out: Path | None
) -> None:
    given = apply_overrides({}, settings)
    parsed = QualityConfig.parse(given, "the settings of the check")
    loaded = load(recipe, [], None) if recipe is not None else None
    trajectories = [one for file in files for one in read_examples(file)]
    console = Console(stderr=True)
    asked = {
        "format": 1,
        "method": "check",
        "settings": parsed.model_dump(mode="json"),
        "files": {str(file): hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in files},
        "recipe": loaded[0].model_dump(mode="json") if loaded else None,
    }
    with (
        SynthFolder.at(out, f"{files[0].stem}-checked", asked) as folder,
        ExitStack() as shown,
    ):
        bars = ProgressBars(console, shown)
        context = SynthContext((), folder, open_model=open_model, on_item=bars.update)
        result, written = asyncio.run(_checked(trajectories, parsed, loaded, context))
    show_result(Console(), "quality control", result, context.cost, written)


def read_examples(file: Path) -> list[Trajectory]:
    """Episodes as Ludus writes them, or conversations as others do."""
    if (problem := file_problem(file, beside_recipe=False)) is not None:
        raise ConfigError(problem)
    if file.suffix == ".parquet" and holds_trajectories(file):
        return read_trajectories(file)
    found = []
    for number, conversation in enumerate(read_conversations(file)):
        task = Task(f"{file.stem}-{number}", tuple(asked(conversation)))
        found.append(Trajectory(task, messages=list(conversation), stop=StopReason.ANSWERED))
    return found


async def _checked(
    trajectories: Sequence[Trajectory],
    settings: QualityConfig,
    loaded: tuple[Recipe, Parts] | None,
    context: SynthContext,
) -> tuple[SynthResult, list[Path]]:
    """The pipeline with the recipe's tools, environments and held-out tasks; no model is loaded."""
    if loaded is None:
        result = await QualityPipeline(settings).run(trajectories, context)
        return result, await asyncio.to_thread(_write, context, result)
    # torch comes with it
    from ludus.training.task_sets import build_task_sets, close_task_sets, tool_specs

    recipe, parts = loaded
    sets = build_task_sets(recipe, parts, FakeEngine([]), _tokenizer(recipe))
    try:
        specs = [spec for one in sets for spec in await tool_specs(one.rollout)]
        rollouts = {task.id: one.rollout for one in sets for task in (*one.tasks, *one.held_out)}
        for one in sets:  # another program may have counted tokens otherwise
            one.rollout.budgets = one.rollout.budgets.model_copy(update={"max_tokens": _MOST_TOKENS})
        pipeline = QualityPipeline(
            settings,
            {spec.name: spec for spec in specs},
            [task for one in sets for task in one.held_out],
            {"": sets[0].rollout, **rollouts},
            sets[0].rollout.renderer.format.parse,
        )
        result = await pipeline.run(trajectories, context)
    finally:
        await context.close()
        await close_task_sets(sets)
        await close_shared_sandboxes()
    return result, await asyncio.to_thread(_write, context, result)


def _write(context: SynthContext, result: SynthResult) -> list[Path]:
    cost: Cost = context.cost
    return write_result(context.folder, "quality control", result, cost, context.failures)


def _tokenizer(recipe: Recipe) -> Tokenizer:
    """The recipe's own where it has one, so that long results are cut as they were."""
    name = recipe.model.name
    return ByteTokenizer() if name is None or name.endswith(".gguf") else load_tokenizer(name)
