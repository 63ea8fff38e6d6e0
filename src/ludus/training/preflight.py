"""Checks before a run begins: mistakes are refused then, and not hours later."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from ludus.core.failures import ConfigError
from ludus.engine.servers import VllmServer
from ludus.envs import PoolConfig
from ludus.envs.instances import probe_env
from ludus.llm import Address, is_address
from ludus.observe import SINKS
from ludus.tools.mcp import MCPServerConfig, is_mcp
from ludus.training.config.parts import (
    Parts,
    demonstrations_of,
    errors_at,
    refuse_stray_tasks,
    task_set_specs,
)
from ludus.training.config.recipe import Recipe, StageConfig
from ludus.training.config.rl import RLConfig
from ludus.training.config.run import AgentConfig, launched_rank
from ludus.training.config.stages import SFTConfig
from ludus.training.loop import StepHooks
from ludus.training.models.loading import device_of
from ludus.training.optim.optimizers import check_optimizer
from ludus.training.stages import stage_class


def check_parts(recipe: Recipe, parts: Parts) -> None:
    """Refuse what could not be run to its end, or would run and not learn."""
    name = recipe.model.name
    if name is not None and is_address(name):
        raise ConfigError(
            f"model.name = {name!r} is an address, and a model behind a server can be evaluated only (ludus "
            "eval RECIPE -m ADDRESS): to train one, name a folder or a model on the hub"
        )
    _check_optimizers(recipe, device_of(recipe.model))
    for one in recipe.run.sinks:
        with errors_at("run.sinks"):
            SINKS.load(one)
    StepHooks(recipe.run)
    _check_tasks(recipe, parts)
    _check_pools(recipe, parts)
    for where, stage in recipe.named_stages:
        stage_class(stage).check_parts(stage, where, recipe, parts)
    imitates = any(isinstance(stage, SFTConfig) for stage in recipe.stages)
    if parts.demonstrations is not None and not imitates:
        raise ConfigError(
            "there are demonstrations, but no [warm_start] to imitate them in: add the table (or a "
            '[[stage]] of kind "sft"), or pass warm_start={...}'
        )


def _check_optimizers(recipe: Recipe, device: torch.device) -> None:
    ranks = recipe.cluster.trainer_ranks or launched_rank()[1]
    for where, stage in recipe.named_stages:
        found = [(where, config) for config in stage.optimizers.values()]
        if isinstance(stage, RLConfig) and stage.critic is not None:
            found.append((f"{where}.critic", stage.critic.optimizer))
        for place, config in found:
            with errors_at(place):
                check_optimizer(config, device, ranks)


def _check_tasks(recipe: Recipe, parts: Parts) -> None:
    refuse_stray_tasks(recipe, parts)
    plays = any(stage.needs_tasks for stage in recipe.stages)
    if plays and not (parts.tasks or any(one.train for one in recipe.sets)):
        raise ConfigError("there are no tasks to train on: set tasks.train, or pass tasks=")
    if not any(stage.needs_rewards for stage in recipe.stages):
        return
    # a program reports its rewards, which shows only when it is played
    shared = bool(parts.rewards or parts.group_rewards or getattr(parts.agent, "reports_rewards", False))
    # environments pay for steps, which shows only when they are played
    for one in task_set_specs(recipe, parts):
        if shared or one.parts.rewards or one.parts.group_rewards or one.parts.all_envs:
            continue
        if one.config is not None:
            raise ConfigError(
                f"nothing is rewarded in the task set {one.name!r}: list rewards, or its own"
            )
        raise ConfigError(
            "nothing is rewarded, so nothing can be learned: list rewards, pass rewards=, or let an "
            "environment pay for its steps"
        )


def _check_pools(recipe: Recipe, parts: Parts) -> None:
    known = {name for one in task_set_specs(recipe, parts) for name in one.parts.all_envs}
    known |= parts.all_envs.keys()
    for name in recipe.agent.pools.keys() - known:
        there = ", ".join(sorted(known)) or "none"
        raise ConfigError(
            f"agent.pools.{name}: there is no environment of that name; there are: {there}"
        )


def _check_programs(recipe: Recipe, parts: Parts) -> None:
    """Refuse MCP servers whose program is not installed; on a cluster it is needed where the tools run."""
    if recipe.cluster.tools:
        return
    specs = [spec for one in task_set_specs(recipe, parts) for spec in one.parts.tools]
    with errors_at("agent.tools"):
        for spec in specs:
            if is_mcp(spec):
                MCPServerConfig.of(spec).check_program()


async def check_servers(recipe: Recipe, parts: Parts) -> None:
    """Refuse environments and tools on servers that are not there, cannot be started, or do not let us in."""
    _check_programs(recipe, parts)

    async def check(name: str, factory: Any, agent: AgentConfig) -> None:
        with errors_at(f"agent.envs.{name}"):
            await probe_env(factory, name, agent.pools.get(name, PoolConfig()).options)

    probes = [
        check(name, factory, one.recipe.agent)
        for one in task_set_specs(recipe, parts)
        for name, factory in one.parts.all_envs.items()
    ]
    await asyncio.gather(*probes)


async def check_engines(recipe: Recipe) -> None:
    """Refuse vLLM servers that are not there, or that cannot be trained on as they were started."""

    async def check(address: str) -> None:
        with errors_at("cluster.servers"):
            server = VllmServer(Address.parse(address))
            try:
                await server.check()
            finally:
                await server.close()

    if recipe.run.replay is None:  # which plays nothing
        await asyncio.gather(*map(check, recipe.cluster.servers))


def with_step_counts(recipe: Recipe, parts: Parts) -> Recipe:
    """The recipe with a number of steps where it says epochs."""

    def counted(stage: StageConfig) -> StageConfig:
        if not isinstance(stage, SFTConfig) or stage.epochs is None:
            return stage
        shown = demonstrations_of(stage, recipe, parts)
        # an expert plays each of the first set's tasks once
        found = task_set_specs(recipe, parts)[0].parts.tasks if callable(shown) else shown
        return stage.with_steps(len(found))

    return recipe.with_stages(map(counted, recipe.stages))
