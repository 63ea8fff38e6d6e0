"""The training loop: play, score, update, write down.

    groups  = play the step's tasks           (the engine samples, tools and environments answer)
    update  = advantages, loss, optimizer     (the engine is paused: it runs the same parameters)
    version = the engine drops its KV, and goes on with the new weights

It runs in one event loop. The update blocks that loop on purpose: nothing else may happen meanwhile. From
the update to the end of its bookkeeping nothing is awaited, so that a cancelled run stops either before a
step or after it, and what it saves is never half a step.

Steps are counted through the whole run: first those of the warm start, then those of RL.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from torch import nn

from ludus.core.failures import ConfigError, LudusError
from ludus.core.generation import Sampling
from ludus.core.random import key
from ludus.core.trajectory import Group
from ludus.engine import use_ludus_attention
from ludus.observe import Checkpoint, RunWriter, atomic_directory, prefixed, rollout_metrics
from ludus.training.batches import items_of_step
from ludus.training.checkpoint import load_state, save_checkpoint, save_model
from ludus.training.evaluation import Evaluation, in_order, measure
from ludus.training.learner import Learner, frozen
from ludus.training.models import load_model
from ludus.training.recipe import ModelConfig
from ludus.training.updates import imitate, reinforce_groups
from ludus.training.workshop import Workshop

log = logging.getLogger(__name__)

OnStep = Callable[[str, int, int, dict[str, float]], None]
"""Called as (phase, step, total, metrics) after every step, for whoever shows progress."""


class Trainer:
    """Runs the stages of a recipe in a workshop, and writes them into a run folder."""

    def __init__(self, workshop: Workshop, run: RunWriter, on_step: OnStep | None = None) -> None:
        self.workshop = workshop
        self.recipe = workshop.recipe
        self.run = run
        self.step = 0
        self.evaluations: dict[str, Evaluation] = {}
        self._on_step = on_step or (lambda phase, step, total, metrics: None)
        self._saved: int | None = None
        self._reference: nn.Module | None = None
        rl = self.recipe.rl
        self._warm_steps = self.recipe.warm_start.steps if self.recipe.warm_start else 0
        self.learner = Learner(
            workshop.model, rl.optimizer, rl.steps * rl.updates, self.recipe.sampling.temperature
        )
        self._active = self.learner
        """Whose state a checkpoint holds: the warm start has a learner of its own."""

    async def train(self, checkpoint: Checkpoint | None = None) -> None:
        """All stages, or what is left of them after a checkpoint."""
        if checkpoint is None:
            await self._evaluate("at the start")
        else:
            self.step = self._saved = checkpoint.step
        try:
            if self.step < self._warm_steps:
                await self._warm_start(checkpoint)
            elif checkpoint is not None:
                load_state(checkpoint.path, self.learner, self.workshop.rollout.scorer)
            self.save()
            self._load_reference()
            while self.step < self._warm_steps + self.recipe.rl.steps:
                await self._rl_step()
        finally:
            if self.step:
                self.save()
        await self._evaluate("after RL")

    def save(self) -> None:
        """A checkpoint of the last completed step, unless there is one already."""
        if self._saved == self.step:
            return
        made = self.workshop
        save_checkpoint(
            self.run, self.step, made.model, made.tokenizer, self._active, made.rollout.scorer
        )
        self._saved = self.step
        self.run.prune_checkpoints(self.recipe.run.keep_checkpoints)

    async def _warm_start(self, checkpoint: Checkpoint | None) -> None:
        config = self.recipe.warm_start
        assert config is not None
        demonstrations = await self.workshop.demonstrations()
        if not demonstrations:
            raise ConfigError("warm_start.demonstrations gave no demonstrations")
        self._active = learner = Learner(self.workshop.model, config.optimizer, config.steps)
        if checkpoint is not None:
            load_state(checkpoint.path, learner, self.workshop.rollout.scorer)
        seed = key(self.recipe.seed, "warm start")
        while self.step < config.steps:
            started = time.perf_counter()
            metrics = imitate(learner, items_of_step(demonstrations, self.step, config.batch, seed))
            metrics["step_seconds"] = time.perf_counter() - started
            self.step += 1
            self._log("warm start", self.step, config.steps, prefixed("sft", metrics))
            if self.step < config.steps and self.step % self.recipe.run.checkpoint_every == 0:
                self.save()
            await asyncio.sleep(0)  # where Ctrl-C is heard
        self._active = self.learner
        await self.workshop.engine.update_weights()
        await self._evaluate("after the warm start")

    async def _rl_step(self) -> None:
        rl, workshop = self.recipe.rl, self.workshop
        number = self.step - self._warm_steps
        started = time.perf_counter()
        tasks = items_of_step(workshop.parts.tasks, number, rl.tasks, self.recipe.seed)
        seed = key(self.recipe.seed, "rl", number)
        groups = in_order(
            [group async for group in workshop.rollout.groups(tasks, seed)], [task.id for task in tasks]
        )
        self._check_failures(groups)
        await workshop.engine.pause()
        played = time.perf_counter()
        metrics = reinforce_groups(self.learner, groups, rl, self._reference)
        ended = time.perf_counter()
        self.step += 1
        metrics |= rollout_metrics(groups) | timing_metrics(groups, played - started, ended - played)
        metrics["policy_version"] = workshop.engine.policy_version
        every = self.recipe.run.trajectories_every
        if every and (number + 1) % every == 0:
            self.run.write_groups(groups, self.step)
        self._log("RL", number + 1, rl.steps, metrics)
        if (number + 1) % self.recipe.run.checkpoint_every == 0:
            self.save()
        await workshop.engine.update_weights()
        await workshop.engine.resume()
        between = self.recipe.evaluation.every
        if between and (number + 1) % between == 0 and number + 1 < rl.steps:
            await self._evaluate(f"after {number + 1} steps of RL")

    async def _evaluate(self, when: str) -> None:
        config = self.recipe.evaluation
        tasks = self.workshop.parts.held_out[: config.tasks]
        if not tasks:
            return
        result = await measure(
            self.workshop.rollout,
            tasks,
            attempts=config.attempts,
            sampling=Sampling(temperature=config.temperature),
            seed=self.recipe.seed,
        )
        self._check_failures(result.groups)
        self.evaluations[when] = result
        self.run.write_groups(result.groups, self.step, "eval")
        self._log("evaluation", self.step, self.step, prefixed("eval", result.metrics))

    def _load_reference(self) -> None:
        """The model that RL started from, where the recipe weighs the distance to it.

        It is written down at the start of RL, because a resumed run has only later weights.
        """
        if self.recipe.rl.kl == 0:
            return
        folder = self.run.path / "reference"
        if not folder.exists():
            with atomic_directory(folder) as temporary:
                save_model(temporary, self.workshop.model, self.workshop.tokenizer)
            self._reference = frozen(copy.deepcopy(self.workshop.model))
        else:
            config = ModelConfig(
                name=str(folder), dtype=self.recipe.model.dtype, device=self.recipe.model.device
            )
            model, _ = load_model(config, self.recipe.seed)
            use_ludus_attention(model)
            self._reference = frozen(model)

    def _log(self, phase: str, number: int, total: int, metrics: dict[str, float]) -> None:
        self.run.log(self.step, metrics)
        self._on_step(phase, number, total, metrics)

    def _check_failures(self, groups: Sequence[Group]) -> None:
        """Stop when too much of what we are responsible for is broken: training would be on luck."""
        failures = [t.failure for g in groups for t in g.trajectories if t.failure is not None]
        played = sum(len(group.trajectories) for group in groups)
        if played and not failures and not any(group.trainable for group in groups):
            raise ConfigError(
                f"none of {played} episodes was scored: every reward returned None. Return a number for at "
                "least some of them"
            )
        if played and len(failures) / played > self.recipe.rl.max_failures:
            (boundary, message), count = Counter((f.boundary, f.message) for f in failures).most_common(
                1
            )[0]
            raise LudusError(
                f"{len(failures)} of {played} episodes failed through no fault of the model's, more than "
                f"rl.max_failures = {self.recipe.rl.max_failures:g} allows. Most often ({count} times), at "
                f"the boundary '{boundary}': {message}"
            )


def timing_metrics(groups: Sequence[Group], playing: float, training: float) -> dict[str, float]:
    """Where the step's time went. While playing, a phase's share is its share of the episodes' time."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    total = sum(t.seconds.get("total", 0.0) for t in trajectories) or 1.0
    step = playing + training
    names = {"generation": "generate", "tools": "tools", "rewards": "rewards"}
    shares = {
        f"time_share/{name}": playing
        / step
        * sum(t.seconds.get(phase, 0.0) for t in trajectories)
        / total
        for name, phase in names.items()
    }
    said = sum(len(action.tokens) for t in trajectories for action in t.actions)
    return shares | {
        "time_share/training": training / step,
        "tokens_per_second": said / step,
        "episodes_per_second": len(trajectories) / step,
        "step_seconds": step,
    }
