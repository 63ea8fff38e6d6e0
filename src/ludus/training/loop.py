"""The training loop: one stage after the other, step by step, and everything written down.

    groups  = play the step's tasks           (the engine samples, tools and environments answer)
    update  = advantages, loss, optimizer     (the engine is paused: it runs the same parameters)
    version = the engine drops its KV, and continues with the new weights

The update blocks the event loop on purpose, and from it to the end of its bookkeeping nothing is awaited: a
cancelled run stops before a step or after it. With `rl.staleness` above 0 episodes go on during the update,
which runs in a thread. Randomness is counter-based, so a run that goes on from a checkpoint does what it would
have.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ludus.core.config import apply_overrides
from ludus.core.failures import LudusError, failed_episodes_warning
from ludus.core.registry import load_function
from ludus.core.trajectory import Group
from ludus.core.user_code import error_with_location
from ludus.kernels.device import GpuMonitor
from ludus.observe import (
    Checkpoint,
    EpisodeTally,
    Finding,
    RunWriter,
    prefixed,
    remove_directory,
    run_findings,
)
from ludus.observe.console import numbers_text
from ludus.remote import user_log
from ludus.training.checkpoint import (
    RunProgress,
    load_progress,
    load_rewards,
    save_checkpoint,
)
from ludus.training.config.recipe import stage_ends
from ludus.training.config.run import RunConfig
from ludus.training.display import SHOWN, ProgressDisplay
from ludus.training.early_end import best_of, idle_patience, reason_to_end
from ludus.training.evaluation.evaluate import Evaluation
from ludus.training.report import stage_of, success_text, write_diagnosis, write_report
from ludus.training.run_context import RunContext
from ludus.training.stages import Stage, StepResult, stage_class
from ludus.training.stages.base import check_failures


class HookError(LudusError):
    """A hook raised. The run is saved after its last whole step."""


@dataclass(frozen=True, slots=True)
class StepEvent:
    """A step, as hooks see it."""

    run: Path
    """The run's folder."""
    stage: str
    """The kind of its stage: sft, rl, dpo, ..."""
    step: int
    """The number of the step in the run, from 1."""
    metrics: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """The metrics of the step; empty before it."""


class StepHooks:
    """The functions that are called before and after every step, in order."""

    def __init__(self, config: RunConfig) -> None:
        self._before = _loaded("run.before_step", config.before_step)
        self._after = _loaded("run.after_step", config.after_step)

    def before(self, event: StepEvent) -> None:
        _call(self._before, event)

    def after(self, event: StepEvent) -> None:
        _call(self._after, event)


def _loaded(where: str, references: Sequence[str]) -> dict[str, Callable[[StepEvent], Any]]:
    return {f"{name} ({where})": load_function(where, name) for name in references}


def _call(hooks: Mapping[str, Callable[[StepEvent], Any]], event: StepEvent) -> None:
    for name, hook in hooks.items():
        try:
            hook(event)
        except Exception as error:
            raise HookError(f"the hook {name} raised {error_with_location(error)}") from error


log = logging.getLogger(__name__)

_LOOKS = 50
"""How often findings are looked for while the rows of metrics double."""

OnStep = Callable[[str, int, int, dict[str, float]], None]
"""Called as (phase, step, total, metrics) after every step, to show progress."""


class Trainer:
    """Runs the stages of a recipe in a run context, and writes them into a run folder."""

    def __init__(
        self,
        context: RunContext,
        run: RunWriter,
        watchers: Sequence[OnStep] = (),
        clock: Callable[[], float] = time.monotonic,
        display: ProgressDisplay | None = None,
    ) -> None:
        self.context = context
        self.recipe = context.recipe
        self.run = run
        self.progress = RunProgress()
        self.evaluations: dict[str, Evaluation] = {}
        self._watchers = watchers
        self._hooks = StepHooks(self.recipe.run)
        self._saved: int | None = None
        self._clock = clock
        self._saved_at = clock()
        self._stage: Stage[Any] | None = None
        self._rewards = ""
        """State of the rewards after the last completed step."""
        self._measured: set[int] = set()
        """The steps after which the held-out tasks have been played."""
        self._warned: set[str] = set()
        """Warnings that were logged already: each is logged once."""
        self._gpus: GpuMonitor | None = None
        self._display = display or ProgressDisplay()
        self._rows: list[dict[str, float]] = []
        """The metrics of all steps."""
        self._tally = EpisodeTally(has_tools=context.has_tools)
        self.findings: list[Finding] = []
        """What needs a person, as of the newest look."""
        self._found: set[tuple[str, str]] = set()
        """What these were about: each finding is told once."""

    async def train(self, checkpoint: Checkpoint | None = None) -> None:
        """All stages, or what is left of them after a checkpoint."""
        if next(self.context.policy.parameters()).is_cuda:
            self._gpus = GpuMonitor.start()
        with closing(self._gpus) if self._gpus is not None else nullcontext():
            await self._run_stages(checkpoint)

    async def _run_stages(self, checkpoint: Checkpoint | None) -> None:
        if checkpoint is None:
            if text := idle_patience(self.recipe):
                log.warning("%s", text)
            for stage in self.recipe.stages:
                await stage_class(stage).check_data(self.context, stage)
            await self._evaluate()
        else:
            self._go_on(checkpoint)
        self._rewards = self.context.rewards_state()
        try:
            for number in range(self.progress.stage, len(self.recipe.stages)):
                await self._run_stage(number, checkpoint)
                checkpoint = None
        finally:
            if self.progress.step:
                self.save()

    def _go_on(self, checkpoint: Checkpoint) -> None:
        self.progress = load_progress(checkpoint.path)
        self._saved = checkpoint.step
        self._rows = self.run.metrics()
        self._measured = {
            int(row["step"]) for row in self._rows if any(name.startswith("eval/") for name in row)
        }
        load_rewards(checkpoint.path, self.context.scorers)

    def save(self) -> None:
        """A checkpoint of the last completed step, unless there is one already.

        Where a step has changed weights and come to no end, there is nothing to save: the checkpoint before
        it is what a resumed run goes on from.
        """
        stage = self._stage
        if self._saved == self.progress.step or stage is None:
            return
        if stage.is_half_updated:
            log.warning("step %d was cut off in its midst and is not saved", self.progress.step + 1)
            return
        save_checkpoint(self.run, self.progress, self.context, stage, self._rewards)
        self._saved, self._saved_at = self.progress.step, self._clock()
        log.info("step %d: saved", self.progress.step)
        self._prune()

    def _prune(self) -> None:
        """Leave the newest checkpoints, the best, and the last one of every stage: what a stage has made."""
        kept = stage_ends(self.recipe)
        if (best := best_of(self.run.metrics(), self.recipe)) is not None:
            kept.add(best.step)
        for checkpoint in self.run.checkpoints()[: -self.recipe.run.keep_checkpoints]:
            if checkpoint.step not in kept:
                remove_directory(checkpoint.path)

    async def _run_stage(self, number: int, checkpoint: Checkpoint | None) -> None:
        config = self.recipe.stages[number]
        folder = self.run.path / "stages" / str(number)
        self._stage = stage = stage_class(config)(self.context, folder, config)
        stage.is_resumed = checkpoint is not None and self.progress.done < stage.steps
        try:
            await self._run_steps(stage, number, checkpoint)
        finally:
            await stage.end()
        if stage.config.learns:
            self.save()
            await self._evaluate()

    async def _run_steps(self, stage: Stage[Any], number: int, checkpoint: Checkpoint | None) -> None:
        log.info("%s: %d steps", stage.phase, stage.steps)
        await self.context.refresh_engine()
        with self._display.waiting(f"preparing {stage.phase}"):
            await stage.begin()
        if checkpoint is not None:
            stage.load(checkpoint.path)
            await self._evaluate_between(stage)  # which may be what the run was stopped in
        else:
            self.progress = replace(self.progress, stage=number, done=0)
        if self.progress.step or stage.config.saves_at_start:
            self.save()
        while self.progress.done < stage.steps:
            done = self.progress.done
            reason = reason_to_end(self.run, self.recipe, number, self.progress.step - done, done)
            if reason is not None:
                self._end_early(number, reason)
                break
            await self._advance(stage)

    def _end_early(self, number: int, reason: str) -> None:
        """The stage has as many steps as it has done, by the run's recipe too: it counts as finished."""
        done, (where, config) = self.progress.done, self.recipe.named_stages[number]
        log.warning(
            "stopped early, after %d of %d steps: %s; %s.steps is %d in the run's recipe now",
            done,
            config.total_steps,
            reason,
            where,
            done,
        )
        self.run.replace_recipe(apply_overrides(self.run.recipe(), [f"{where}.steps={done}"]))
        shorter = config.model_copy(update={"steps": done})
        stages = self.recipe.stages
        self.recipe = self.recipe.with_stages([*stages[:number], shorter, *stages[number + 1 :]])

    async def _advance(self, stage: Stage[Any]) -> None:
        event = StepEvent(self.run.path, stage.config.kind, self.progress.step + 1)
        self._hooks.before(event)
        result = await stage.advance(self.progress.done)
        self.progress = replace(self.progress, step=self.progress.step + 1, done=self.progress.done + 1)
        self._rewards = self.context.rewards_state()
        try:
            self._hooks.after(replace(event, metrics=dict(result.metrics)))
        finally:  # the step is whole, whatever a hook raises
            self._write_down(stage, result)
        done = self.progress.done
        if self._is_due(done) and done < stage.steps:
            self.save()
        await stage.sync_engine()
        await asyncio.sleep(0)  # where Ctrl-C is heard
        await self._evaluate_between(stage)

    def _is_due(self, done: int) -> bool:
        """Whether a checkpoint is due after so many steps of the stage."""
        config = self.recipe.run
        minutes = math.inf if config.checkpoint_minutes is None else config.checkpoint_minutes
        return done % config.checkpoint_every == 0 or self._clock() - self._saved_at >= 60 * minutes

    def _write_down(self, stage: Stage[Any], result: StepResult) -> None:
        every = self.recipe.run.trajectories_every
        due = bool(every) and (self.progress.done % every == 0 or result.split == "eval")
        if result.groups and due:
            self.run.write_groups(
                list(result.groups), self.progress.step, result.split, notes=result.notes
            )
        metrics = (
            prefixed(stage.config.prefix, result.metrics) if stage.config.prefix else result.metrics
        )
        logged = user_log.means(user_log.swap())
        metrics = metrics | (prefixed("eval", logged) if result.split == "eval" else logged)
        self._warn_of_failures(result.groups, "held-out" if result.split == "eval" else "training")
        self._tally.add(self.progress.step, [t for g in result.groups for t in g.trajectories])
        if not stage.config.learns:
            self._log(stage.phase, self.progress.step, self.progress.step, metrics)
            return
        self._log(stage.phase, self.progress.done, stage.steps, metrics)

    def _warn_of_failures(self, groups: Sequence[Group], which: str) -> None:
        """Say that episodes are lost, once for each place where they are."""
        failures = [t.failure for g in groups for t in g.trajectories if t.failure is not None]
        key = f"{which} {sorted({failure.boundary for failure in failures})}"
        played = sum(len(group.trajectories) for group in groups)
        if not failures or key in self._warned:
            return
        if text := failed_episodes_warning(failures, played, which):
            self._warned.add(key)
            log.warning("step %d: %s", self.progress.step, text)

    def _look(self) -> None:
        """Look for what needs a person, and tell it once."""
        if len(self._rows) % (len(self._rows) // _LOOKS + 1):
            return
        self.findings = run_findings(self._rows, self._tally.findings())
        new = [one for one in self.findings if one.key not in self._found]
        for one in new:
            self._found.add(one.key)
            self._display.find(self.progress.step, one)
        if new:
            write_report(self.run, self.recipe, self.findings, is_live=True)

    async def _evaluate_between(self, stage: Stage[Any]) -> None:
        """Evaluate if it is time to in the midst of a stage; at its end it always is."""
        every, done = self.recipe.evaluation.every, self.progress.done
        if stage.config.learns and every and done and done % every == 0 and done < stage.steps:
            await self._evaluate()

    async def _evaluate(self) -> None:
        config, step = self.recipe.evaluation, self.progress.step
        is_replay = self.context.recording is not None  # which is about weights, and plays nothing
        if step in self._measured or is_replay or not any(self.context.held_out(config.tasks)):
            return
        async with self._stage.holding() if self._stage is not None else nullcontext():
            of_training = user_log.swap()
            try:
                result = await self.context.measure(
                    attempts=config.attempts, sampling=config.sampling, tasks=config.tasks
                )
            finally:
                logged = user_log.means(user_log.swap(of_training))
        check_failures(result.groups, self.recipe.max_failures)
        self._warn_of_failures(result.groups, "held-out")
        self.evaluations[stage_of(step, self.recipe)] = result
        self.run.write_groups(result.groups, step, "eval")
        self._measured.add(step)
        self._tally.add(step, result.trajectories)
        self._log("evaluation", step, step, prefixed("eval", result.metrics | logged))
        when = stage_of(step, self.recipe)
        write_diagnosis(self.run, when, result.trajectories, has_tools=self.context.has_tools)
        write_report(self.run, self.recipe, self.findings, is_live=True)
        best = best_of(self.run.metrics(), self.recipe)
        if best is not None and best.step == step:
            self.save()

    def _log(self, phase: str, number: int, total: int, metrics: dict[str, float]) -> None:
        metrics |= {} if self._gpus is None else self._gpus.take()
        self.run.log(self.progress.step, metrics)
        is_measured = phase == "evaluation"
        told = f"success {success_text(metrics)}" if is_measured else numbers_text(metrics, SHOWN)
        of = "" if is_measured else f" {number}/{total}"
        log.info("step %d: %s%s  %s", self.progress.step, phase, of, told)
        watchers: list[OnStep] = [self._display, *self._watchers]
        for watch in watchers:
            watch(phase, number, total, metrics)
        self._rows.append({"step": self.progress.step, **metrics})
        self._look()
