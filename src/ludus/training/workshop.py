"""Everything a run needs, put together: model, engine, pools, rollout. Closed as one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import nn

from ludus.core.failures import ConfigError
from ludus.core.generation import Sampling
from ludus.core.protocols import Tokenizer
from ludus.core.task import Task
from ludus.core.tooling import ToolContext, ToolSpec
from ludus.core.trajectory import Trajectory
from ludus.engine import EmbeddedEngine, FakeEngine, use_ludus_attention
from ludus.envs import EnvPool, call_env
from ludus.rewards import Scorer
from ludus.rollouts.demonstrator import Demonstrator, Expert
from ludus.rollouts.env_tools import tools_of
from ludus.rollouts.formats import load_format
from ludus.rollouts.renderers import Renderer
from ludus.rollouts.runner import Rollout
from ludus.rollouts.tokenizers import HFTokenizer
from ludus.sandbox import close_shared_sandboxes
from ludus.tools import LocalTools, shut
from ludus.tools.library import build_toolset
from ludus.training.imitation import trajectory_of
from ludus.training.models import fit_tokenizer, load_model
from ludus.training.parts import Parts
from ludus.training.recipe import Recipe

FITTING_SAMPLE = 64
"""How many demonstrations a tokenizer made from scratch is fitted to."""


@dataclass(slots=True)
class Workshop:
    """The assembled run. Use it as an async context manager; leaving it stops and closes everything."""

    recipe: Recipe
    parts: Parts
    model: nn.Module
    tokenizer: HFTokenizer
    engine: EmbeddedEngine
    rollout: Rollout

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.engine.close()
        await asyncio.gather(*(pool.close() for pool in self.rollout.pools.values()))
        await shut(self.rollout.tools)
        await close_shared_sandboxes()

    async def demonstrations(self) -> list[Trajectory]:
        """The trajectories to imitate, on the training tasks."""
        return await demonstrate(self.rollout, self.parts, self.parts.tasks, self.recipe.seed)


async def assemble(recipe: Recipe, parts: Parts, checkpoint: Path | None = None) -> Workshop:
    """Load or make the model, and build all around it. A checkpoint's weights come before the recipe's."""
    torch.set_num_threads(recipe.threads or torch.get_num_threads())
    config = recipe.model
    if checkpoint is not None:
        config = config.model_copy(update={"name": str(checkpoint), "scratch": None})
    corpus = await _corpus(recipe, parts) if config.scratch is not None else []
    model, tokenizer = load_model(config, recipe.seed, corpus)
    use_ludus_attention(model)
    engine = EmbeddedEngine(model, tokenizer, recipe.engine)
    rollout = build_rollout(recipe, parts, engine, tokenizer)
    return Workshop(recipe, parts, model, tokenizer, engine, rollout)


def build_rollout(
    recipe: Recipe, parts: Parts, engine: EmbeddedEngine | FakeEngine, tokenizer: Tokenizer
) -> Rollout:
    """The rollout that a recipe describes, on any engine."""
    format = load_format(recipe.agent.format, **recipe.agent.format_options)
    renderer = Renderer(tokenizer, format, history=recipe.agent.history)
    return Rollout(
        engine=engine,
        renderer=renderer,
        scorer=Scorer(parts.rewards, parts.group_rewards),
        tools=build_toolset(
            parts.tools,
            encode=tokenizer.encode,
            max_tokens=recipe.budgets.max_observation_tokens,
            sandbox=recipe.agent.sandbox,
            record=recipe.agent.record,
        ),
        pools={
            name: EnvPool(factory, name=name, size=recipe.agent.env_pool)
            for name, factory in parts.envs.items()
        },
        agent=parts.agent,
        budgets=recipe.budgets,
        sampling=Sampling(temperature=recipe.sampling.temperature),
        attempts=recipe.rl.attempts,
        max_in_flight=recipe.max_in_flight,
    )


async def demonstrate(
    rollout: Rollout, parts: Parts, tasks: list[Task], seed: int, most: int | None = None
) -> list[Trajectory]:
    """The trajectories to imitate: the expert's on these tasks, or the first `most` conversations given."""
    source = parts.demonstrations
    if source is None:
        return []
    if callable(source):
        return await play_expert(rollout, source, tasks, seed)
    specs = await tool_specs(rollout, parts)
    return [trajectory_of(conversation, rollout.renderer, specs) for conversation in source[:most]]


async def tool_specs(rollout: Rollout, parts: Parts) -> list[ToolSpec]:
    """All tools of a run as the model is told of them, those of its environments included."""
    context = ToolContext("demonstrations", Task("", ()))
    specs = list(await rollout.tools.list(context))
    for name, factory in parts.envs.items():
        env = await call_env(factory)
        specs += await LocalTools(await tools_of(env, name)).list(context)
        await call_env(env.close)
    return specs


async def play_expert(
    rollout: Rollout, expert: Expert, tasks: list[Task], seed: int
) -> list[Trajectory]:
    """One demonstration for each task, as long as the expert needs: budgets on turns are for the model."""
    budgets = rollout.budgets.model_copy(update={"max_turns": 10_000, "max_tokens": 1_000_000})
    playing = replace(rollout, agent=Demonstrator(expert), budgets=budgets, attempts=1, retries=0)
    played = [t async for group in playing.groups(tasks, seed) for t in group.trajectories]
    for trajectory in played:
        if trajectory.failure is not None:
            raise ConfigError(
                f"the expert failed on task {trajectory.task.id!r}: {trajectory.failure.message}"
            )
    order = {task.id: place for place, task in enumerate(tasks)}
    return sorted(played, key=lambda trajectory: order[trajectory.task.id])


async def _corpus(recipe: Recipe, parts: Parts) -> list[str]:
    """Texts to fit a tokenizer to: some demonstrations as the model will read them, or the bare tasks."""
    rollout = build_rollout(recipe, parts, FakeEngine([]), HFTokenizer(fit_tokenizer([], vocabulary=0)))
    sample = parts.tasks[:FITTING_SAMPLE]
    shown = await demonstrate(rollout, parts, sample, recipe.seed, most=FITTING_SAMPLE)
    await asyncio.gather(*(pool.close() for pool in rollout.pools.values()))
    await shut(rollout.tools)
    await close_shared_sandboxes()
    if not shown:
        return [message.content for task in sample for message in task.messages]
    # segment by segment, because that is how they are encoded: a token must not span two of them
    segments = [segment for t in shown for sequence in t.sequences for segment in sequence.segments]
    return [rollout.renderer.tokenizer.decode(segment.tokens) for segment in segments]
