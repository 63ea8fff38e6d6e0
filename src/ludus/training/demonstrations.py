"""Demonstrations: conversations that are given, or what an expert plays; and the specs of the tools in them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from ludus.core.failures import ConfigError, LudusError
from ludus.core.messages import ToolContext, ToolSpec
from ludus.core.task import Task
from ludus.core.trajectory import StopReason, Trajectory
from ludus.envs import EnvTools, rename_clashes, tools_of
from ludus.rewards import Scorer
from ludus.rollouts.agent import Demonstrator, Expert
from ludus.rollouts.rollout import Rollout
from ludus.training.data.conversations import Conversation, trajectory_of

log = logging.getLogger(__name__)

EXPERT_TURNS, EXPERT_TOKENS = 1_000, 1_000_000
"""Where an expert's episode is cut off, and is no demonstration."""


async def demonstrate(
    rollout: Rollout,
    source: Expert | Sequence[Conversation] | None,
    tasks: list[Task],
    seed: int,
    most: int | None = None,
    *,
    max_failures: float,
) -> list[Trajectory]:
    """The trajectories to imitate: the expert's on these tasks, or the first `most` conversations given."""
    if source is None:
        return []
    if callable(source):
        unscored = replace(rollout, scorer=Scorer(()))  # judging is dear, and rewards may remember it
        return await play_expert(unscored, source, tasks, seed, max_failures)
    specs = await tool_specs(rollout)
    shown: list[Trajectory] = []
    for number, conversation in enumerate(source[:most], start=1):
        try:
            shown.append(trajectory_of(conversation, rollout.renderer, specs))
        except ConfigError as error:
            raise ConfigError(f"demonstration {number}: {error}") from None
    return shown


async def tool_specs(rollout: Rollout) -> list[ToolSpec]:
    """Specs of all tools of a run, those of its environments included."""
    context = ToolContext("demonstrations", Task("", ()))
    specs = list(await rollout.tools.list(context))
    sets: dict[str, EnvTools] = {}
    for name, pool in rollout.pools.items():
        async with pool.new_instance() as env:
            sets[name] = EnvTools(env, await tools_of(env, name), pool.show_actions_of(env))
    rename_clashes(sets)
    for own in sets.values():
        specs += await own.list(context)
    return specs


async def play_expert(
    rollout: Rollout,
    expert: Expert,
    tasks: Sequence[Task],
    seed: int,
    max_failures: float = 0.5,
) -> list[Trajectory]:
    """One demonstration for each task, as long as the expert needs: budgets on turns are for the model.

    Episodes that failed, or came to no end within a thousand turns, are left out, with a warning; more than a
    share of `max_failures` is an error.
    """
    budgets = rollout.budgets.model_copy(update={"max_turns": EXPERT_TURNS, "max_tokens": EXPERT_TOKENS})
    playing = replace(rollout, agent=Demonstrator(expert, rollout.agent), budgets=budgets, attempts=1)
    played = [t async for group in playing.groups(tasks, seed) for t in group.trajectories]
    order = {task.id: place for place, task in enumerate(tasks)}
    played.sort(key=lambda trajectory: order[trajectory.task.id])
    failed = {t.task.id: reason for t in played if (reason := _no_demonstration(t)) is not None}
    if failed:
        reason, times = Counter(failed.values()).most_common(1)[0]
        task = next(task for task, why in failed.items() if why == reason)
        often = "" if times == len(failed) else f", most often ({times} times)"
        told = f"the expert failed on task {task!r}{often}: {reason}"
        share = f"{len(failed)} of {len(played)} tasks"
        if len(failed) / len(played) > max_failures:
            # of code, not of settings: the run's log says where it was
            raise LudusError(f"{told}. {share} failed; max_failures = {max_failures:g}")
        log.warning("%s; demonstrations of %s are left out", told, share)
    return [trajectory for trajectory in played if trajectory.task.id not in failed]


def _no_demonstration(trajectory: Trajectory) -> str | None:
    """Why an expert's episode is none; an expert that goes in circles would otherwise be imitated."""
    if trajectory.failure is not None:
        return trajectory.failure.message
    if trajectory.stop in (StopReason.MAX_TURNS, StopReason.MAX_TOKENS):
        return f"it came to no end within {EXPERT_TURNS} turns or {EXPERT_TOKENS} tokens"
    return None
