"""The run context: model, engine, environments, tools and task sets of a run, built and closed together."""

from __future__ import annotations

import copy
import json
import logging
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import nn

from ludus.chat.tokenizers import HFTokenizer
from ludus.core.generation import Engine, Sampling
from ludus.core.random import key, shuffled
from ludus.core.task import Task
from ludus.core.trajectory import Trajectory
from ludus.engine import EmbeddedEngine, FakeEngine
from ludus.model import use_ludus_attention
from ludus.observe import diagnose
from ludus.rewards import Scorer
from ludus.rollouts.agent import Expert
from ludus.rollouts.rollout import Rollout
from ludus.sandbox import close_shared_sandboxes
from ludus.training.checkpoint import RunProgress, load_progress, save_tokenizer, unsaved_at
from ludus.training.config.parts import Parts, task_set_specs
from ludus.training.config.recipe import Recipe
from ludus.training.config.run import ModelConfig
from ludus.training.data.conversations import Conversation
from ludus.training.data.rollout_batch import Recording, open_recording
from ludus.training.data.tasks import TaskSet
from ludus.training.evaluation.evaluate import Evaluation, OnTasks, measure_sets
from ludus.training.evaluation.summary import Summary, SummaryOptions
from ludus.training.models.loading import device_of, load_model
from ludus.training.models.scratch import fit_tokenizer
from ludus.training.models.sharded import ModelSource, hollow_tokenizer, source_for_ranks
from ludus.training.placement import Placement, host_parts, hosted_parts, place, start_engine
from ludus.training.ranks.processes import start_ranks
from ludus.training.ranks.steps import Ranks
from ludus.training.task_sets import build_task_sets, close_task_sets, demonstrate

log = logging.getLogger(__name__)

FITTING_SAMPLE = 64
"""How many demonstrations a tokenizer made from scratch is fitted to."""


@dataclass(slots=True)
class RunContext:
    """Resources of a run. Use it as an async context manager; leaving it closes everything."""

    recipe: Recipe
    parts: Parts
    tokenizer: HFTokenizer
    engine: Engine
    task_sets: list[TaskSet]
    ranks: Ranks
    """The processes that train."""
    recording: Recording | None = None
    """Where the groups come from that RL learns from, where nothing is played."""
    scratch: Path | None = None
    """Where models are written that the ranks cannot read as they are."""
    behind: int = 0
    """How many versions of the weights the engine has not been given yet."""
    placement: Placement | None = None
    """Where what is not in this process lives; None where all is on this machine."""
    on_tasks: OnTasks | None = None
    """Told of each held-out task that has been played."""

    @property
    def has_tools(self) -> bool:
        """Whether an episode can call anything that Ludus offers it; a program's own tools are not known."""
        return any(
            one.parts.tools or one.parts.all_envs for one in task_set_specs(self.recipe, self.parts)
        )

    @property
    def policy(self) -> nn.Module:
        """The trained model; of several ranks, rank 0's part."""
        return self.ranks.rank0.policy

    def save_policy(self, folder: Path) -> None:
        """Write the policy and its tokenizer in Hugging Face format; all ranks write their parts."""
        with unsaved_at(folder):
            self.ranks.perform("save_policy", folder)
        save_tokenizer(folder, self.policy, self.tokenizer)

    def source(self, name: str) -> ModelSource:
        """Where the ranks read another model than the policy."""
        own, seed = self.recipe.model, self.recipe.seed
        config = ModelConfig(
            name=name, dtype=own.dtype, device=own.device, trust_remote_code=own.trust_remote_code
        )
        if self.ranks.size == 1:
            return ModelSource(config, seed)
        assert self.scratch is not None
        return source_for_ranks(config, seed, self.scratch / sha256(name.encode()).hexdigest())

    @property
    def rollout(self) -> Rollout:
        """The rollout of the first task set, which is the only one in most runs."""
        return self.task_sets[0].rollout

    @property
    def scorers(self) -> dict[str, Scorer]:
        """The scorer of each task set, by the set's name."""
        return {one.name: one.rollout.scorer for one in self.task_sets}

    def rewards_state(self) -> str:
        """State of the rewards that have one, by task set, as text."""
        return json.dumps({name: scorer.state_dict() for name, scorer in self.scorers.items()})

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ranks.close()
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)
        await self.engine.close()
        await close_task_sets(self.task_sets)
        await close_shared_sandboxes()
        if self.placement is not None:
            await self.placement.close()

    async def pause_sampling(self) -> None:
        """Before the weights change: an engine that samples the trained module stops; others go on."""
        if self.engine.shares_weights:
            await self.engine.pause()

    async def sync_engine(self, *, later: bool = False) -> None:
        """After the weights have changed: let the engine go on with them.

        With `later`, an engine with weights of its own gets them when something is played next
        (`refresh_engine`), once for all updates until then.
        """
        if self.engine.shares_weights:
            await self.engine.update_weights()
            await self.engine.resume()
            return
        self.behind += 1
        if not later:
            await self.refresh_engine()

    async def refresh_engine(self) -> None:
        """Give the engine the newest weights, if it does not have them."""
        if self.behind:
            behind, self.behind = self.behind, 0
            await self.engine.update_weights(behind)

    async def demonstrations(
        self, shown: Expert | Sequence[Conversation] | None, needed: int | None = None
    ) -> list[Trajectory]:
        """Conversations, or what an expert plays on the training tasks of each set, as trajectories.

        An expert plays no more than `needed` tasks, drawn from all: some take minutes for a few.
        """
        seed, most = self.recipe.seed, self.recipe.max_failures
        if not callable(shown):
            return await demonstrate(self.rollout, shown, [], seed, max_failures=most)
        total = sum(len(one.tasks) for one in self.task_sets)
        drawn = sorted(shuffled(total, key(seed, "demonstrations"))[:needed])
        found: list[Trajectory] = []
        first = 0
        for one in self.task_sets:
            tasks = [one.tasks[n - first] for n in drawn if first <= n < first + len(one.tasks)]
            first += len(one.tasks)
            found += (
                await demonstrate(one.rollout, shown, tasks, seed, max_failures=most) if tasks else []
            )
        return found

    def held_out(self, most: int | None = None) -> list[list[Task]]:
        """The held-out tasks of each task set, which may have none."""
        return [list(one.held_out[:most]) for one in self.task_sets]

    async def measure(
        self,
        *,
        attempts: int,
        sampling: Sampling,
        tasks: int | None = None,
        pass_at: Sequence[int] = (),
        with_pass: bool = False,
    ) -> Evaluation:
        """Play the held-out tasks of all sets; with `with_pass`, pass@k and average@k are among the metrics.

        Measuring changes nothing. Rewards that remember what they scored forget what they scored here; and the
        engine drops the KV it has computed: found again later, it would change a last bit there, and a run that
        is resumed does not have it.
        """
        await self.refresh_engine()
        held_out = self.held_out(tasks)
        memories = [(s, copy.deepcopy(s.state_dict())) for s in self.scorers.values()]
        try:
            measured = await measure_sets(
                list(zip(self.task_sets, held_out, strict=True)),
                attempts=attempts,
                sampling=sampling,
                seed=self.recipe.seed,
                on_tasks=self.on_tasks,
            )
        finally:
            for scorer, memory in memories:
                scorer.load_state_dict(memory)
        await self.engine.forget()
        summary = measured.summary(SummaryOptions(ks=tuple(pass_at) if with_pass else (1,)))
        found = measured.metrics | _estimates(summary, with_pass)
        modes = diagnose(measured.trajectories, has_tools=self.has_tools).metrics
        return Evaluation(found | modes, measured.groups)


def _estimates(summary: Summary, with_pass: bool) -> dict[str, float]:
    """The interval of success, which allows for lost episodes; and pass@k and average@k, if asked for."""
    found: dict[str, float] = {}
    if summary.success is not None and summary.success.low is not None:
        assert summary.success.high is not None
        found |= {"success_low": summary.success.low, "success_high": summary.success.high}
    if with_pass:
        found |= {f"pass@{k}": float(e.value) for k, e in summary.passed.items()}
        found |= {f"average@{k}": float(e.value) for k, e in summary.average.items()}
    return found


async def build_run_context(
    recipe: Recipe,
    parts: Parts,
    checkpoint: Path | None = None,
    *,
    run: str | None = None,
    folder: Path | None = None,
) -> RunContext:
    """Load or make the model, and build all around it. A checkpoint's weights come before the recipe's.

    `run` is what the run is called where its processes are listed, and `folder` where it writes.
    """
    device = device_of(recipe.model)
    # processes that share the cores wait for each other's threads otherwise
    shares = recipe.cluster.engines or recipe.cluster.servers
    threads = 1 if shares and device.type == "cpu" else torch.get_num_threads()
    torch.set_num_threads(recipe.threads or threads)
    async with AsyncExitStack() as opened:
        plan = hosted_parts(recipe, parts)
        placement = place(recipe, run or recipe.name, plan)
        if placement is not None:
            opened.push_async_callback(placement.close)
        ranks = start_ranks(recipe.cluster, device, recipe.threads, launcher=placement)
        opened.callback(ranks.close)
        recipe, parts = await host_parts(placement, plan, recipe, parts)
        built = await _build_on(ranks, placement, recipe, parts, checkpoint, folder)
        opened.pop_all()
        return built


async def _build_on(
    ranks: Ranks,
    placement: Placement | None,
    recipe: Recipe,
    parts: Parts,
    checkpoint: Path | None,
    folder: Path | None,
) -> RunContext:
    recording = open_recording(recipe)
    samples = recording is not None or not (recipe.cluster.engines or recipe.cluster.servers)
    scratch: Path | None = None
    model: nn.Module | None = None
    if ranks.size == 1:
        model, tokenizer = await load_policy(recipe, parts, checkpoint)
        use_ludus_attention(model)
        ranks.rank0.policy = model
    else:
        scratch = Path(tempfile.mkdtemp(prefix="ludus-")) if folder is None else folder / "ranks"
        config = policy_config(recipe, checkpoint)
        corpus = await _corpus(recipe, parts) if config.scratch is not None else []
        source = source_for_ranks(config, recipe.seed, scratch / "policy", corpus)
        ranks.perform("load_policy", source, samples)
        tokenizer = hollow_tokenizer(source)
        if samples:
            model, tokenizer = load_model(source.config, source.seed, base=source.base)
            use_ludus_attention(model)
            ranks.rank0.sampled = model
    version = updates_until(load_progress(checkpoint), recipe) if checkpoint is not None else 0
    if recording is None:
        engine: Engine = await start_engine(recipe, ranks, model, tokenizer, version, placement)
    else:  # which plays nothing
        assert model is not None
        engine = EmbeddedEngine(model, tokenizer, recipe.engine, version=version)
    try:
        sets = build_task_sets(recipe, parts, engine, tokenizer)
        return RunContext(
            recipe,
            parts,
            tokenizer,
            engine,
            sets,
            ranks,
            recording,
            scratch,
            placement=placement,
        )
    except BaseException:
        await engine.close()
        raise


def policy_config(recipe: Recipe, checkpoint: Path | None) -> ModelConfig:
    if checkpoint is None:
        return recipe.model
    return recipe.model.model_copy(update={"name": str(checkpoint), "scratch": None})


async def load_policy(
    recipe: Recipe, parts: Parts, checkpoint: Path | None = None
) -> tuple[nn.Module, HFTokenizer]:
    """The model that a run begins with as a whole, and its tokenizer."""
    config = policy_config(recipe, checkpoint)
    corpus = await _corpus(recipe, parts) if config.scratch is not None else []
    return load_model(config, recipe.seed, corpus)


async def _corpus(recipe: Recipe, parts: Parts) -> list[str]:
    """Texts to fit a tokenizer to: some demonstrations as the model will read them, or the bare tasks."""
    tokenizer = HFTokenizer(fit_tokenizer([], vocabulary=0))
    sets = build_task_sets(recipe, parts, FakeEngine([]), tokenizer)
    rollout, sample = sets[0].rollout, list(sets[0].tasks[:FITTING_SAMPLE])
    try:
        # whether too many fail, is for the stage to say that imitates them
        shown = await demonstrate(
            rollout, parts.demonstrations, sample, recipe.seed, FITTING_SAMPLE, max_failures=1.0
        )
    finally:
        await close_task_sets(sets)
        await close_shared_sandboxes()
    if not shown:
        return [message.content for task in sample for message in task.messages]
    # segment by segment, because that is how they are encoded: a token must not span two of them
    segments = [segment for t in shown for sequence in t.sequences for segment in sequence.segments]
    return [rollout.renderer.tokenizer.decode(segment.tokens) for segment in segments]


def updates_until(progress: RunProgress, recipe: Recipe) -> int:
    """The policy version: one for every step of a stage that learns."""
    steps = [stage.total_steps for stage in recipe.stages[: progress.stage]] + [progress.done]
    return sum(count for count, stage in zip(steps, recipe.stages, strict=False) if stage.learns)
