"""Task sets as a recipe describes them, built on an engine; and the demonstrations that are shown in them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from ludus.chat.recognition import format_for
from ludus.chat.renderer import Renderer
from ludus.core.failures import Boundary, ConfigError, LudusError
from ludus.core.generation import Engine, Sampling
from ludus.core.messages import ToolContext, ToolSpec
from ludus.core.task import Task
from ludus.core.tokenizer import Tokenizer
from ludus.core.trajectory import StopReason, Trajectory
from ludus.engine.servers import TranscriptTokenizer
from ludus.envs import EnvPool, EnvTools, rename_clashes, tools_of
from ludus.observe.report import call_text
from ludus.rewards import Scorer
from ludus.rollouts.agent import Demonstrator, Expert
from ludus.rollouts.rollout import Rollout
from ludus.tools import shut
from ludus.tools.calling import raised_by
from ludus.tools.library import build_toolset
from ludus.training.config.parts import Parts, task_set_specs
from ludus.training.config.recipe import Recipe
from ludus.training.config.run import AgentConfig
from ludus.training.data.conversations import Conversation, trajectory_of
from ludus.training.data.tasks import TaskSet


def build_task_sets(recipe: Recipe, parts: Parts, engine: Engine, tokenizer: Tokenizer) -> list[TaskSet]:
    """The task sets that a recipe describes, all on one engine. What they share is built once."""
    base = build_rollout(recipe, parts, engine, tokenizer)
    sets: list[TaskSet] = []
    for spec in task_set_specs(recipe, parts):
        config, own, rollout = spec.config, spec.parts, base
        if config is not None:
            rollout = build_rollout(spec.recipe, own, engine, tokenizer)
            if config.envs is None:
                shared = {name for name, env in own.all_envs.items() if parts.all_envs.get(name) is env}
                rollout.pools = {**rollout.pools, **{name: base.pools[name] for name in shared}}
            if config.tools is None:
                rollout.tools = base.tools
            # where there are none, the set's own environments decide what an episode without rewards is worth
            shares_rewards = config.rewards is None and config.group_rewards is None
            if shares_rewards and (parts.rewards or parts.group_rewards):
                rollout.scorer = base.scorer
        weight = 1.0 if config is None else config.weight
        sets.append(TaskSet(spec.name, weight, own.tasks, own.held_out, rollout, spec.limits))
    return sets


def build_rollout(recipe: Recipe, parts: Parts, engine: Engine, tokenizer: Tokenizer) -> Rollout:
    """The rollout that a recipe describes, on any engine."""
    format = format_for(tokenizer, recipe.agent.format.name, **recipe.agent.format.options)
    if recipe.agent.turns == "inline" and isinstance(tokenizer, TranscriptTokenizer):
        raise ConfigError(
            'agent.turns = "inline" goes on in an open turn of the assistant, which a chat server cannot: name '
            "the model's tokenizer (--tokenizer), and its tokens are sent to /completions"
        )
    # where environments are the only source of reward, an episode without one has 0, and is not unscored
    alone = bool(parts.all_envs) and not (parts.rewards or parts.group_rewards)
    renderer = Renderer(tokenizer, format, recipe.agent.history, recipe.agent.turns)
    return Rollout(
        engine=engine,
        renderer=renderer,
        scorer=Scorer(parts.rewards, parts.group_rewards, default_total=0.0 if alone else None),
        tools=build_toolset(
            parts.tools,
            encode=tokenizer.encode,
            sandbox=recipe.agent.sandbox,
            record=recipe.agent.record,
        ),
        pools=_pools(parts, recipe.agent),
        step_rewards=recipe.agent.step_rewards,
        agent=parts.agent,
        audit=parts.audit,
        budgets=recipe.budgets,
        sampling=Sampling(temperature=recipe.sampling.temperature),
        max_in_flight=recipe.max_in_flight,
        renders=recipe.run.renders,
    )


def _pools(parts: Parts, agent: AgentConfig) -> dict[str, EnvPool]:
    return {
        name: EnvPool(factory, name=name, **agent.pool(name).model_dump())
        for name, factory in parts.all_envs.items()
    }


async def close_task_sets(sets: Sequence[TaskSet]) -> None:
    """Close the environments and tools of all sets, those they share once. Not the engine, nor sandboxes."""
    pools = {id(pool): pool for one in sets for pool in one.rollout.pools.values()}
    tools = {id(one.rollout.tools): one.rollout.tools for one in sets}
    agents = {id(one.rollout.agent): one.rollout.agent for one in sets}
    for agent in agents.values():
        if (close := getattr(agent, "close", None)) is not None:  # a user's own may have none
            await close()
    await asyncio.gather(*(pool.close() for pool in pools.values()))
    for shared in tools.values():
        await shut(shared)


log = logging.getLogger(__name__)

EXPERT_TURNS, EXPERT_TOKENS = 1_000, 1_000_000
"""Where an expert's episode is cut off, and is no demonstration."""
_REPEATS = 3
"""So many equal calls at the end of such an episode are a loop."""


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
    if (failure := trajectory.failure) is not None:
        spins = " (does the expert come to an end?)" if failure.boundary is Boundary.DEADLINE else ""
        return f"{failure.message}{spins}"
    if trajectory.stop in (StopReason.MAX_TURNS, StopReason.MAX_TOKENS):
        last = [call_text(call) for call in trajectory.calls[-_REPEATS:]]
        repeats = f": it repeats {last[0]}" if len(last) == _REPEATS and len({*last}) == 1 else ""
        told = f"it came to no end within {EXPERT_TURNS} turns or {EXPERT_TOKENS} tokens{repeats}"
        return told + _raised_most(trajectory)
    return None


def _raised_most(trajectory: Trajectory) -> str:
    """What tools and environments raised most often in an episode; the expert may have met nothing else."""
    raised: Counter[tuple[str, str]] = Counter()
    for message in trajectory.messages:
        name = message.name if message.role == "tool" else None
        if name is not None and (error := raised_by(name, message.content)) is not None:
            raised[name, error] += 1
    if not raised:
        return ""
    [((tool, error), _)] = raised.most_common(1)
    return f"; the tool {tool!r} raised {error:.300}"
