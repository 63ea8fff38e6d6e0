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
from ludus.core.failures import Fault, LudusError
from ludus.core.messages import Json, ToolCall, ToolSet, ToolSpec
from ludus.core.task import Task
from ludus.core.tokenizer import ByteTokenizer
from ludus.core.trajectory import Trajectory
from ludus.engine import FakeEngine
from ludus.envs import EnvPool
from ludus.rewards import Scorer
from ludus.rollouts.agent import Agent
from ludus.rollouts.budgets import Budgets
from ludus.rollouts.episode import Episode
from ludus.rollouts.rollout import Rollout
from ludus.synth.paths.call_paths import CallPath, NoValue, bound_arguments, value_of
from ludus.synth.paths.signature_graph import SignatureGraph

_PLENTY = 10_000_000
_SHOWN_CHARS = 300

Reply = Callable[[Episode, Sequence[str]], Awaitable[str]]
"""What the assistant says at the end of a turn, given the results of the turn's calls."""


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
    """Makes the calls of its task's path."""

    def __init__(self, planned: Mapping[str, PathTask], graph: SignatureGraph, reply: Reply) -> None:
        self._planned, self._graph, self._reply = planned, graph, reply
        self.problems: dict[str, str] = {}
        self.targets: dict[str, list[Json]] = {}
        self.schema_faults: dict[str, int] = {}

    async def run(self, episode: Episode) -> None:
        try:
            await self._play(self._planned[episode.task.id], episode)
        except (NoValue, _Refused) as problem:
            self.problems[episode.task.id] = str(problem)

    async def _play(self, planned: PathTask, episode: Episode) -> None:
        results: list[Any] = []
        target = self.targets[episode.task.id] = []
        turns = list(planned.path.by_turn())
        for place, numbers in enumerate(turns):
            if place:
                episode.observe(planned.further_turns[place - 1])
            texts = []
            for number in numbers:
                call = planned.path.calls[number]
                arguments = bound_arguments(call, results)
                target.append({"name": call.tool, "arguments": arguments})
                made = episode.demonstrate(calls=[ToolCall(call.tool, arguments)])
                pairs = await episode.call(made.calls)
                episode.observe(pairs)
                ((_, result),) = pairs
                if result.fault is not None:
                    is_schema = result.fault in (Fault.BAD_ARGUMENTS, Fault.UNKNOWN_TOOL)
                    self.schema_faults[episode.task.id] = int(is_schema)
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
    """Make the calls of a path in an episode of its own."""
    agent = PathAgent({planned.task.id: planned}, graph, reply)
    rollout = demonstration_rollout(agent, tools, pools)
    return _outcome(planned, await rollout.play(planned.task, 0, 0), agent)


async def offered_tools(
    tools: ToolSet, pools: Mapping[str, EnvPool] | None = None, task: Task | None = None
) -> list[ToolSpec]:
    """The tools that an episode has, those of its environments included."""
    found: list[ToolSpec] = []

    class Listing(Agent):
        async def run(self, episode: Episode) -> None:
            found.extend(episode.specs)

    rollout = demonstration_rollout(Listing(), tools, pools)
    played = await rollout.play(task or Task.of("list", id="list"), 0, 0)
    if played.failure is not None:
        raise LudusError(f"the tools cannot be listed: {played.failure}")
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


def _outcome(planned: PathTask, trajectory: Trajectory, agent: PathAgent) -> PlayedPath:
    name = planned.task.id
    problem = agent.problems.get(name, "")
    if not problem and trajectory.failure is not None:
        problem = f"the episode failed: {trajectory.failure}"
    target = agent.targets.get(name, [])
    trajectory.task = replace(planned.task, target=target)
    trajectory.rewards, trajectory.reward = {"success": float(not problem)}, float(not problem)
    return PlayedPath(trajectory, problem, agent.schema_faults.get(name, 0))
