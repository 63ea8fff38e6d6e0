"""The code of a run: what a recipe names by reference, or what Python passes in directly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ludus.core.failures import ConfigError
from ludus.core.messages import Message
from ludus.core.registry import load_reference
from ludus.core.task import Task
from ludus.core.trajectory import Trajectory
from ludus.envs import ENVS, Env
from ludus.observe import read_trajectories
from ludus.rewards import build_group_reward, build_reward
from ludus.rollout.agent import Agent
from ludus.rollout.demonstrator import Expert
from ludus.rollout.tasksets import load_tasks
from ludus.training.recipe import Recipe


@dataclass(slots=True)
class Parts:
    """What is not data: tasks, tools, environments, rewards, the agent, the demonstrations."""

    tasks: list[Task] = field(default_factory=list)
    held_out: list[Task] = field(default_factory=list)
    tools: Sequence[Any] = ()
    envs: dict[str, Callable[[], Env]] = field(default_factory=dict)
    rewards: Sequence[Any] = ()
    group_rewards: Sequence[Any] = ()
    agent: Agent = field(default_factory=Agent)
    demonstrations: Expert | list[Trajectory] | None = None


def load_parts(recipe: Recipe) -> Parts:
    """Everything that the recipe names, imported. What is missing or broken is a `ConfigError`."""
    warm = recipe.warm_start
    return Parts(
        tasks=with_system(load_tasks(recipe.tasks.train), recipe) if recipe.tasks.train else [],
        held_out=with_system(load_tasks(recipe.tasks.evaluation), recipe)
        if recipe.tasks.evaluation
        else [],
        tools=[load_reference(name) for name in recipe.agent.tools],
        envs={name: ENVS.load(reference) for name, reference in recipe.agent.envs.items()},
        rewards=[build_reward(spec) for spec in recipe.rewards],
        group_rewards=[build_group_reward(spec) for spec in recipe.group_rewards],
        agent=_agent(recipe.agent.loop),
        demonstrations=_demonstrations(warm.demonstrations) if warm else None,
    )


def with_system(tasks: Sequence[Task], recipe: Recipe) -> list[Task]:
    """The tasks, each with the recipe's system message unless it has one of its own."""
    if recipe.agent.system is None:
        return list(tasks)
    system = Message("system", recipe.agent.system)
    return [
        task
        if task.messages and task.messages[0].role == "system"
        else replace(task, messages=(system, *task.messages))
        for task in tasks
    ]


def _agent(reference: str) -> Agent:
    agent = load_reference(reference)
    agent = agent() if isinstance(agent, type) else agent
    if not callable(getattr(agent, "run", None)):
        raise ConfigError(f"agent.loop = {reference!r} has no coroutine 'run(self, episode)'")
    made: Agent = agent
    return made


def _demonstrations(source: str) -> Expert | list[Trajectory]:
    if source.endswith(".parquet"):
        return list(read_trajectories(source))
    expert: Expert = load_reference(source)
    if not callable(expert):
        raise ConfigError(f"warm_start.demonstrations = {source!r} is not a function of a task")
    return expert
