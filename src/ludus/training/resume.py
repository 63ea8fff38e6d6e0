"""Going on with a run: from which checkpoint, by which recipe, and what of it may change."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing

from ludus.core.config import apply_overrides
from ludus.core.failures import ConfigError
from ludus.observe import Checkpoint, JsonLinesSink, RunWriter
from ludus.training.checkpoint import RunProgress, load_progress
from ludus.training.config.parts import KEYS
from ludus.training.config.paths import with_absolute_paths
from ludus.training.config.recipe import Recipe
from ludus.training.config.stages import SFTConfig
from ludus.training.report import EXTENDED

log = logging.getLogger(__name__)


def checkpoint_to_resume(run: RunWriter, recipe: Recipe) -> Checkpoint | None:
    """The checkpoint to go on from."""
    checkpoint = run.latest_checkpoint(thorough=True)
    if checkpoint is None and any(run.checkpoints_path.glob("step-*")):
        raise ConfigError(
            f"every checkpoint in {run.checkpoints_path} is damaged (the log says how), so there is nothing to "
            "go on from: put back what they were, or begin a new run"
        )
    if checkpoint is None and _must_have_saved(run, recipe):
        raise ConfigError(
            f"{run.path} has recorded steps and has no checkpoint of them in {run.checkpoints_path.name}, so "
            "there is nothing to go on from: put the folder back, or begin a new run"
        )
    return checkpoint


def _must_have_saved(run: RunWriter, recipe: Recipe) -> bool:
    """Whether a run that recorded what it did has had a checkpoint; only imitation begins without one."""
    done: int = max((row.get("step", 0) for row in run.metrics()), default=0)
    first = recipe.stages[0]
    return done > (0 if first.saves_at_start else min(first.total_steps, recipe.run.checkpoint_every))


def resumed_recipe(run: RunWriter, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe that a run goes on by: its own, with its last stage made longer where that is asked for."""
    where = f"{run.path}/recipe.json"
    raw, objects = run.recipe(), run.objects()
    before = Recipe.parse(raw, where)
    full = Recipe.parse(with_absolute_paths(raw), where)

    def changes(override: str) -> bool:
        """Whether the recipe would be another one: the command that began a run may be given again."""
        key = override.partition("=")[0].strip()
        if key in {KEYS.get(name, name) for name in objects}:
            return True  # what the recipe has of an object is no more than its name
        try:
            return Recipe.parse(with_absolute_paths(apply_overrides(raw, [override])), where) != full
        except ConfigError:
            return True  # not by itself, or not at all: all of them together tell

    overrides = [one for one in overrides if changes(one)]
    if not overrides:
        return before
    changed = apply_overrides(raw, overrides)
    recipe = Recipe.parse(changed, where)
    latest = run.latest_checkpoint()
    done = load_progress(latest.path) if latest is not None else None
    keys = [one.partition("=")[0].strip() for one in overrides]
    missing = {name: what for name, what in objects.items() if KEYS.get(name, name) not in keys}
    rebuilt = {KEYS.get(name, name) for name in objects if name not in missing}  # by reference now
    check_extension(recipe, [key for key in keys if key not in rebuilt], done, before)
    optimizer = getattr(recipe.stages[-1], "optimizer", None)
    if optimizer is not None and optimizer.schedule != "constant":
        log.warning(
            "the learning rate's schedule (%s) is over all steps of a stage: with more of them it is another "
            "one from here on",
            optimizer.schedule,
        )
    if done is not None and recipe.stages[-1] != before.stages[-1]:  # which differ in length alone
        with closing(JsonLinesSink(run.metrics_path)) as rows:
            rows.write(done.step, {EXTENDED: 1.0})
    run.replace_recipe(with_absolute_paths(changed))
    if rebuilt:
        run.note_objects(missing)
    return recipe


def length_key(recipe: Recipe) -> str | None:
    """The key that says how long the last stage is, such as rl.steps; None where it does not learn."""
    where, last = recipe.named_stages[-1]
    return f"{where}.{last.length_key}" if last.length_key is not None else None


def check_extension(
    recipe: Recipe, changed: Sequence[str], done: RunProgress | None, before: Recipe
) -> None:
    """Refuse what a resumed run cannot change: all but how long its last stage is, and what is written down.

    `changed` are the keys, as on the command line; `done` is how far the run has come; `before` is its recipe
    as it was.
    """
    length = length_key(before)
    for key in changed:
        noted = key.startswith(("run.", "evaluation.", "cluster.")) and key != "run.folder"
        if key != length and not noted:
            raise ConfigError(
                "a resumed run goes on by its own recipe, and "
                f"{key} cannot be changed; what can be: {f'{length}, ' if length else ''}"
                f"evaluation.*, run.* and cluster.*. {_OTHERWISE}"
            )
    where, last = recipe.named_stages[-1]
    if isinstance(last, SFTConfig) and last.epochs is not None:  # its steps depend on the data
        earlier = before.stages[-1]
        assert isinstance(earlier, SFTConfig)
        if earlier.epochs is not None and last.epochs < earlier.epochs:
            raise ConfigError(f"{length} can only be raised: it is {earlier.epochs:g}")
        return
    if done is not None and done.stage == len(recipe.stages) - 1 and last.total_steps < done.done:
        raise ConfigError(
            f"{where} has done {done.done} steps already, so its length cannot be {last.total_steps}"
        )


_OTHERWISE = (
    "To train otherwise, begin a new run whose model is the last checkpoint's folder "
    "(model.name=RUN/checkpoints/step-...)"
)


def finished_text(recipe: Recipe, counted: Recipe, done: RunProgress | None, run: str) -> str | None:
    """Text for a run that has done all its steps; None for any other.

    `counted` is the recipe with steps where it says epochs.
    """
    if done is None or done.step < sum(stage.total_steps for stage in counted.stages):
        return None
    text, key = f"{run} is finished: all {done.step} steps are done.", length_key(recipe)
    if key is None:
        return f"{text} Its last stage is an evaluation, so it cannot be extended. {_OTHERWISE}"
    longer = 2 * getattr(recipe.stages[-1], key.rpartition(".")[2])
    return (
        f"{text} To extend it, raise the length of its last stage: "
        f"ludus train --resume {run} {key}={longer}"
    )
