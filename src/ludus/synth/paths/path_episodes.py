"""Paths, played: each call is made in a real episode with the real tools, and its result feeds the later ones.

An episode in which a call is refused, or in which a result lacks what a later call needs, is no example: it
comes back with the reason. What is left are ordinary trajectories.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ludus.chat.formats import load_format
from ludus.chat.renderer import Renderer
from ludus.core.failures import Fault, InfraError
from ludus.core.messages import Json, ToolCall, ToolResult, ToolSet, ToolSpec
from ludus.core.task import Task
from ludus.core.tokenizer import ByteTokenizer
from ludus.core.trajectory import Trajectory
from ludus.engine import FakeEngine
from ludus.envs import EnvPool
from ludus.rewards import Scorer
from ludus.rollouts.agent import Agent
from ludus.rollouts.episode import Episode
from ludus.rollouts.recorder import Budgets
from ludus.rollouts.rollout import Rollout
from ludus.synth.paths.call_paths import CallPath, NoValue, bound_arguments, value_of
from ludus.synth.paths.signature_graph import SignatureGraph

_PLENTY = 10_000_000
_SHOWN_CHARS = 300

Reply = Callable[[Episode, Sequence[str]], Awaitable[str]]
"""Makes the assistant's reply at the end of a turn, given the results of the turn's calls."""


@dataclass(frozen=True, slots=True)
class PathTask:
    """A path with what the user says: the first turn is in the task, the others follow."""

    task: Task
    path: CallPath
    further_turns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlayedPath:
    """An episode, and why it is no example, if it is none."""

    trajectory: Trajectory
    problem: str = ""
    schema_faults: int = 0
    """Calls whose arguments the tool refused; of a legal path there are none."""


class _Refused(Exception):
    """A call of the path did not work."""


class PathAgent(Agent):
    """Makes the calls of a path, and notes what became of them."""

    def __init__(self, planned: PathTask, graph: SignatureGraph, reply: Reply) -> None:
        self._planned, self._graph, self._reply = planned, graph, reply
        self.problem = ""
        self.target: list[Json] = []
        """The calls that were made."""
        self.schema_faults = 0

    async def run(self, episode: Episode) -> None:
        try:
            await self._play(self._planned, episode)
        except (NoValue, _Refused) as problem:
            self.problem = str(problem)

    async def _play(self, planned: PathTask, episode: Episode) -> None:
        results: list[Any] = []
        turns = list(planned.path.by_turn())
        for place, numbers in enumerate(turns):
            if place:
                episode.observe(planned.further_turns[place - 1])
            texts = []
            for number in numbers:
                call = planned.path.calls[number]
                arguments = bound_arguments(call, results)
                self.target.append({"name": call.tool, "arguments": arguments})
                result = await demonstrated_call(episode, ToolCall(call.tool, arguments))
                if result.fault is not None:
                    self.schema_faults += result.fault in (Fault.BAD_ARGUMENTS, Fault.UNKNOWN_TOOL)
                    raise _Refused(f"{call.tool} answered with {result.fault}: {result.content:.200}")
                results.append(value_of(result, self._graph.specs[call.tool].returns))
                texts.append(result.content)
                if result.terminated:
                    if place + 1 < len(turns) or number != numbers[-1]:
                        raise _Refused(f"{call.tool} ended the episode before the last call")
                    return
            said = episode.demonstrate(await self._reply(episode, texts))
            if place + 1 == len(turns):
                episode.answer(said.answer)


async def demonstrated_call(episode: Episode, call: ToolCall) -> ToolResult:
    """Write a call as an action, make it, and observe its result."""
    made = episode.demonstrate(calls=[call])
    pairs = await episode.call(made.calls)
    episode.observe(pairs)
    ((_, result),) = pairs
    return result


async def plain_reply(episode: Episode, results: Sequence[str]) -> str:
    """The last result, as it is."""
    text = results[-1] if results else "done"
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."


async def play_path(
    planned: PathTask,
    graph: SignatureGraph,
    tools: ToolSet,
    pools: Mapping[str, EnvPool] | None = None,
    *,
    reply: Reply = plain_reply,
) -> PlayedPath:
    agent = PathAgent(planned, graph, reply)
    trajectory = await demonstration_rollout(agent, tools, pools).play(planned.task, 0, 0)
    problem = agent.problem
    if not problem and trajectory.failure is not None:
        problem = f"the episode failed: {trajectory.failure}"
    trajectory.task = replace(planned.task, target=agent.target)
    trajectory.rewards, trajectory.reward = {"success": float(not problem)}, float(not problem)
    return PlayedPath(trajectory, problem, agent.schema_faults)


async def offered_tools(rollout: Rollout, task: Task | None = None, seed: int = 0) -> list[ToolSpec]:
    """The tools that an episode of a rollout has, those of its environments included."""
    found: list[ToolSpec] = []

    class Listing(Agent):
        async def run(self, episode: Episode) -> None:
            found.extend(episode.specs)

    listing = replace(rollout, agent=Listing(), scorer=Scorer(()))
    failure = (await listing.play(task or Task.of("list", id="list"), 0, seed)).failure
    if failure is not None:
        raise InfraError(failure.boundary, f"the tools cannot be listed: {failure.message}")
    return found


def demonstration_rollout(
    agent: Agent,
    tools: ToolSet,
    pools: Mapping[str, EnvPool] | None = None,
    rewards: Sequence[Any] = (),
) -> Rollout:
    """A rollout for agents that demonstrate: no model, and no limits but those of the tools."""
    return Rollout(
        engine=FakeEngine([]),
        renderer=Renderer(ByteTokenizer(), load_format("hermes")),
        scorer=Scorer(rewards, default_total=None if rewards else 0.0),
        tools=tools,
        pools=dict(pools or {}),
        agent=agent,
        budgets=Budgets(max_turns=1000, max_tokens=_PLENTY, max_observation_tokens=_PLENTY),
    )
