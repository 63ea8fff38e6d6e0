"""Replay: train again from the groups that a run recorded, instead of playing.

An update is a function of the weights, the optimizer's state and the groups of its step, in their order. A
run writes the groups of every step (`run.trajectories_every = 1`), with tokens, log-probabilities, rewards
and turns as they were trained on. So training from the record gives the weights that the run had: bit for bit
on a CPU, whatever was played when. Asynchronous runs, whose episodes depend on time, can be repeated in this
way alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ludus.core.config import apply_overrides
from ludus.core.failures import ConfigError
from ludus.observe import RunFolder, read_groups, read_notes, with_images
from ludus.training.config.recipe import Recipe
from ludus.training.config.rl import RolloutSettings
from ludus.training.data.task_sampler import TaskSet
from ludus.training.rollout_batch import GroupFilter, RolloutBatch


@dataclass(frozen=True, slots=True)
class Recording:
    """The recorded groups of a run."""

    run: RunFolder
    scored: Mapping[int, float]
    """Episodes that were scored in each step. Those that were left out are not in the record, and count for an
    adaptive KL coefficient."""

    def batch(self, step: int, sets: Sequence[TaskSet], settings: RolloutSettings) -> RolloutBatch:
        """The batch that the run trained on in a step, counted from 1 over all stages."""
        path = self.run.trajectory_path(step)
        groups, notes = read_groups(path), read_notes(path)
        with_images((t for group in groups for t in group.trajectories), path)
        names = {one.name: number for number, one in enumerate(sets)}
        if not notes and len(sets) > 1:
            raise ConfigError(
                f"{path} does not say which task set its groups are of: it cannot be replayed"
            )
        numbers = [names[note["set"]] for note in notes] or [0] * len(groups)
        played = {"episodes_scored": self.scored[step]} if step in self.scored else {}
        masked = GroupFilter(sets, settings).masked(groups)
        return RolloutBatch(groups, masked, numbers, played)


def open_recording(recipe: Recipe) -> Recording | None:
    """The recording that a recipe replays, if any. What cannot be replayed whole is refused."""
    if recipe.run.replay is None:
        return None
    run = RunFolder(recipe.run.replay)
    if not run.is_run:
        raise ConfigError(f"run.replay: {recipe.run.replay} is not a run")
    ends = list(accumulate(stage.total_steps for stage in recipe.stages))
    for (where, stage), end in zip(recipe.named_stages, ends, strict=True):
        if stage.learns and stage.needs_tasks and stage.kind != "rl":
            raise ConfigError(
                f"{where} plays (kind {stage.kind!r}), and only the groups of RL are recorded to be replayed"
            )
        if stage.kind != "rl":
            continue
        steps = range(end - stage.total_steps + 1, end + 1)
        missing = [step for step in steps if not run.trajectory_path(step).is_file()]
        if missing:
            raise ConfigError(
                f"{run.path} has no episodes of {len(missing)} of the {len(steps)} steps of {where} (the first "
                f"is step {missing[0]}), and a replay needs those of every step: record them with "
                "run.trajectories_every=1, finish a run that was stopped with --resume, or replay the first "
                f"steps alone with {where}.steps=N"
            )
    scored = {row["step"]: row["episodes_scored"] for row in run.metrics() if "episodes_scored" in row}
    return Recording(run, scored)


def replayed_recipe(run: RunFolder, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a run that trains from the record of another, in a folder of its own."""
    raw = run.recipe()
    raw["name"] = f"{raw.get('name', 'run')}-replay"
    raw["run"] = {**raw.get("run", {}), "folder": None, "replay": str(run.path.absolute())}
    return Recipe.parse(apply_overrides(raw, overrides), f"{run.path}/recipe.json")
