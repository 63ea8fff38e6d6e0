"""The agent loop: generate an action, run its tool calls, observe the results, until there is an answer.

Write your own by subclassing `Agent`: `run` is a coroutine over `episode.generate`, `episode.call` and
`episode.observe`. It never sees tokens, masks or budgets; `generate` ends the episode when a budget is used
up, so a loop needs no exit of its own for that.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from ludus.core.config import Config
from ludus.core.messages import ToolCall, ToolSet, ToolSpec
from ludus.envs import EnvTools, call_env, tools_of
from ludus.envs.world import Expert as Expert
from ludus.rewards.scores import MOST_REWARD
from ludus.rollouts.episode import Episode
from ludus.tools import example_of


class ProgramConfig(Config):
    """How a program of yours plays an episode: agent.loop = "command: ..." or a function (docs/programs.md)."""

    models: dict[str, str] = Field(default_factory=dict)
    """The model behind each model name: "trained", "frozen" (the policy, not trained), or an address; "*" is
    any other name. All names are the trained policy when left out."""
    answer: Literal["reply", "stdout"] = "reply"
    """The episode's answer: the last reply, or what the program prints (what a function returns)."""
    timeout: float = Field(default=600.0, gt=0)
    """Seconds until the program is killed, a failure at the boundary agent; budgets.max_seconds holds too."""
    max_running: int | None = Field(default=None, ge=1)
    """Programs that run at once, beside max_in_flight."""
    output_bytes: int = Field(default=64_000, ge=100)
    """Bytes kept of each of stdout and stderr: of the first the beginning, of the second the end."""
    rewards: bool | None = None
    """Whether the program may set rewards, by call, by header or by a number that a function returns; when left
    out, only where no rewards are listed."""
    task_fields: tuple[Literal["target", "metadata", "envs"], ...] = ()
    """Fields of its task that a command gets beside id and messages. They often hold the right answer."""
    clients: Literal["own", "any"] = "own"
    """Who may use the key of a command: its own processes, or any client, such as a container that it
    starts."""
    crash_reward: float | None = Field(default=None, ge=-MOST_REWARD, le=MOST_REWARD)
    """The reward of an episode whose program fails after the model has replied; a failure, which is not
    trained on, when left out."""
    sandbox: bool = False
    """Run the command in the sandbox (agent.sandbox), which needs the network there to reach the model."""
    host: str = "127.0.0.1"
    """Where the model server listens; every episode has a key of its own."""
    env: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of a command."""


class Agent:
    """The default loop."""

    reports_rewards = False
    """Whether an episode may have a reward without any reward function: the agent reports it."""

    async def close(self) -> None:
        """The run is over."""

    async def run(self, episode: Episode) -> None:
        while not episode.over:
            turn = await episode.generate()
            if turn.calls:
                episode.observe(await episode.call(turn.calls))
            else:
                episode.answer(turn.answer)


class RetrieveThenAnswer(Agent):
    """Naive RAG, a baseline: one search with the question as it is, then an answer from what was found.

    The question is the task's metadata `question`, or else its last message. The model's own calls are not run.
    """

    tool = "search"

    async def run(self, episode: Episode) -> None:
        question = episode.task.metadata.get("question", episode.task.messages[-1].content)
        ((_, result),) = await episode.call([ToolCall(self.tool, {"query": question})])
        episode.observe(f"What a search for the question has found:\n{result.content}\nAnswer now.")
        episode.answer((await episode.generate()).answer)


class Demonstrator(Agent):
    """Plays an expert through a real episode, so that its demonstrations are ordinary trajectories.

    The agent's own loop runs as it does for the model: the expert acts at each `generate`, and is sent what was
    observed since the last one.
    """

    def __init__(self, expert: Expert, loop: Agent | None = None) -> None:
        self.expert = expert
        self.loop = loop or Agent()

    async def run(self, episode: Episode) -> None:
        episode.expert = moves = self.expert(episode.task)
        try:
            await self.loop.run(episode)
        finally:
            with contextlib.suppress(ValueError):  # cut off while it thinks, in a thread of its own
                moves.close()


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
