"""An agent that acts at random: what an environment gives to who knows nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from ludus.core.messages import ToolCall, ToolSet, ToolSpec
from ludus.envs import EnvTools, call_env, tools_of
from ludus.rollouts.agent import Agent
from ludus.rollouts.episode import Episode
from ludus.tools import example_of


class RandomAgent(Agent):
    """Draws an action that the environment offers, or any call that the tools' schemas allow."""

    def __init__(self, tools: ToolSet | None = None) -> None:
        self.tools = tools
        """Where there is no environment."""

    async def run(self, episode: Episode) -> None:
        draw = random.Random(episode.task.id)
        env, tools = None, self.tools
        if tools is None:
            name, env = next(iter(episode.context.envs.items()))
            tools = EnvTools(env, await tools_of(env, name))
        specs = await tools.list(episode.context)
        while specs and not episode.over:
            turn = episode.demonstrate(calls=[await random_call(env, specs, draw)])
            episode.observe(await episode.call(turn.calls))


async def random_call(env: Any, specs: Sequence[ToolSpec], draw: random.Random) -> ToolCall:
    """One of `available_actions()`, where the environment says them and a tool takes a text; else any call."""
    offered = None if env is None else await call_env(env.available_actions)
    texts = [(spec.name, argument) for spec in specs if (argument := _only_text(spec)) is not None]
    if offered and texts:
        tool, argument = next((one for one in texts if one[0] == "step"), texts[0])
        return ToolCall(tool, {argument: str(draw.choice(list(offered)))})
    spec = draw.choice(list(specs))
    return ToolCall(spec.name, example_of(spec.parameters, draw.randrange(1000)))


def _only_text(spec: ToolSpec) -> str | None:
    """The name of a tool's only argument, if that is a text."""
    properties = spec.parameters.get("properties", {})
    [name] = properties if len(properties) == 1 else [None]
    is_text = name is not None and properties[name].get("type") == "string"
    return name if is_text and "enum" not in properties[name] else None
