"""Plays the demonstrator of a prebuilt environment through real episodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ludus.chat import Renderer, load_format
from ludus.core import ByteTokenizer, Task, Trajectory
from ludus.engine import FakeEngine
from ludus.envs import WORLDS, EnvPool
from ludus.rewards import Scorer
from ludus.rollouts import Budgets, Demonstrator, Rollout
from ludus.rollouts.agent import Expert
from ludus.training import load_recipe


async def play_expert(
    name: str,
    tasks: Sequence[Task],
    *,
    size: int = 4,
    max_turns: int | None = None,
    retries: int = 1,
    pool: EnvPool | None = None,
    expert: Expert | None = None,
    on_episode: Callable[[Trajectory], None] = lambda played: None,
) -> list[Trajectory]:
    """One episode for each task, by the environment's own expert, through the tools the model has.

    In the action format of its recipe, so that this is known to fit its tools. The pool is closed at the end.
    """
    world, agent = WORLDS[name], load_recipe(name).agent
    pools = {name: pool or EnvPool(world.factory, name=name, size=size)} if world.env else {}
    playing = Rollout(
        engine=FakeEngine([]),
        renderer=Renderer(
            ByteTokenizer(), load_format(agent.format.name or "hermes", **agent.format.options)
        ),
        scorer=Scorer(world.rewards),
        tools=world.toolset(),
        pools=pools,
        agent=Demonstrator(expert or world.expert),
        budgets=Budgets(
            max_turns=max_turns or world.max_turns, max_tokens=2_000_000, max_observation_tokens=20_000
        ),
        max_in_flight=8,
        retries=retries,
    )
    try:
        played = []
        async for group in playing.groups(tasks, seed=1):
            played += group.trajectories
            on_episode(group.trajectories[0])
        return played
    finally:
        for pool in pools.values():
            await pool.close()
