"""Magnet: from the signatures of tools to multi-turn examples of their use (`signatures`, `call_paths`).

Paths are planned over the graph, put into words, and played with the real tools: each call is made in a real
episode, and its result feeds the later ones. An episode in which a call is refused, or in which a result lacks
what a later call needs, is no example. Needs no tasks and no model that can do anything yet; a language model
that writes the user's messages makes them less wooden.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from pydantic import BaseModel, Field

from ludus.core.failures import ConfigError, Fault
from ludus.core.generation import ChatModel, ChatOptions
from ludus.core.messages import Json, Message, ToolCall, ToolSet, ToolSpec
from ludus.core.random import key
from ludus.core.task import Task
from ludus.core.trajectory import Trajectory
from ludus.envs import EnvPool
from ludus.observe import ReportTable
from ludus.rollouts.agent import Agent
from ludus.rollouts.episode import Episode
from ludus.synth.episodes import demonstrated_call, demonstration_rollout, offered_tools, plain_reply
from ludus.synth.method import ModelSpec, SynthConfig, SynthContext, SynthMethod, TaskSource, ask
from ludus.synth.paths.call_paths import (
    CallPath,
    FromResult,
    FromUser,
    NoValue,
    Operation,
    PathCall,
    PathPlanner,
    bound_arguments,
    plan_paths,
    schema_values,
    value_of,
)
from ludus.synth.paths.signatures import SignatureGraph
from ludus.synth.result import PROVENANCE, ItemResult, SynthResult

Reply = Callable[[Episode, Sequence[str]], Awaitable[str]]
"""Makes the assistant's reply at the end of a turn, given the results of the turn's calls."""
_ANSWERER = """You are the assistant in the conversation below. Answer the user's last request in one or two
sentences, from the results of the tools and from nothing else."""


class PathConfig(SynthConfig):
    """How paths are planned and put into words."""

    count: int = Field(default=100, ge=1)
    """How many paths to plan; those that the tools refuse are left out."""
    max_calls: int = Field(default=6, ge=1)
    """Most calls of a path."""
    max_turns: int = Field(default=3, ge=1)
    """Most messages of the user in an example."""
    optional: float = Field(default=0.3, ge=0, le=1)
    """How often an optional parameter is given."""
    values: dict[str, list[Any]] = Field(default_factory=dict)
    """Values that a user may give, by "parameter" or "tool.parameter": { city = ["Rome", "Oslo"] }."""
    writer: ModelSpec | None = None
    """The language model that writes the messages; a template does when left out."""
    temperature: float = Field(default=0.7, ge=0)
    """Of the writer."""


class MagnetConfig(PathConfig):
    """Magnet: examples from the signatures of tools."""

    operations: tuple[Operation, ...] = ("magnify", "connect")
    """How paths are found: behind one tool, or from one tool to another."""


class Magnet(SynthMethod[MagnetConfig]):
    """Examples from the signatures of tools, by calling them."""

    title = "Magnet"
    settings_type = MagnetConfig
    needs_policy = False

    async def run(self, context: SynthContext) -> SynthResult:
        settings = self.settings
        source, graph = await graph_of(context)
        planner = planner_of(graph, settings, context.seed)
        paths = plan_paths(
            planner, settings.count, max_turns=settings.max_turns, operations=settings.operations
        )
        told = [{"operation": path.operation} for path in paths]
        result = await play_examples(context, "magnet", settings, source, graph, paths, told)
        if len(paths) < settings.count:
            result.warnings.append(
                f"the tools allow {len(paths)} different paths of at most {settings.max_calls} calls; "
                "give more values, or more tools whose results feed others"
            )
        result.numbers["edges"] = len(graph.edges)
        if not graph.edges:
            result.warnings.append(
                "no tool's result fits another one's parameter, so that every path is a single call: annotate "
                "what tools return (-> dict with named fields), and name what is the same thing the same"
            )
        return result


async def graph_of(context: SynthContext) -> tuple[TaskSource, SignatureGraph]:
    """The tools of the first task set, and the graph of their signatures."""
    if not context.sources:
        raise ConfigError("there are no tools: set agent.tools or agent.envs")
    source = context.sources[0]
    base = source.tasks[0] if source.tasks else None
    return source, SignatureGraph.of(await offered_tools(source.rollout, base))


def planner_of(graph: SignatureGraph, settings: PathConfig, seed: int) -> PathPlanner:
    draw = Random(key(seed, "paths"))
    values = schema_values(settings.values)
    return PathPlanner(graph, values, draw, settings.max_calls, settings.optional)


async def play_examples(
    context: SynthContext,
    method: str,
    settings: PathConfig,
    source: TaskSource,
    graph: SignatureGraph,
    paths: Sequence[CallPath],
    provenance: Sequence[Json],
) -> SynthResult:
    """Put paths into words and play them; `provenance` says of each how it came about."""
    writer = await context.model(settings.writer) if settings.writer else None
    options = ChatOptions(temperature=settings.temperature)
    reply = answered_by(writer) if writer is not None else plain_reply

    async def make(number: int) -> ItemResult:
        path = paths[number]
        turns = template_turns(path, graph)
        if writer is not None:
            turns = await written_turns(path, graph, writer, replace(options, seed=number))
        facts = {"method": method, "capability": capability_of(path, graph), "tools": path.tools}
        base = source.tasks[number % len(source.tasks)] if source.tasks else Task()
        planned = path_task(f"{method}-{number}", path, turns, base, facts | provenance[number])
        played = await play_path(planned, graph, source.rollout.tools, source.rollout.pools, reply=reply)
        notes: Json = {"schema": played.schema_faults}
        if played.problem:
            notes |= {"reason": "refused", "detail": played.problem}
        return ItemResult([played.trajectory], notes)

    numbers = list(range(len(paths)))
    pieces = await context.each("paths", numbers, make, name=lambda number: f"{method}-{number}")
    result = SynthResult()
    for piece in pieces:
        result.add(piece)
    faults = sum(piece.notes.get("schema", 0) for piece in pieces)
    result.numbers["schema_faults"] = float(faults)
    lengths = Counter(len(paths[number].calls) for number in numbers)
    rows: list[list[Any]] = [[count, lengths[count]] for count in sorted(lengths)]
    result.tables.append(ReportTable(("calls", "paths"), rows, "Paths by length"))
    return result


def path_task(
    name: str, path: CallPath, turns: Sequence[str], base: Task, facts: Mapping[str, Any]
) -> PathTask:
    """A path as a task: the first turn is its message, after the base task's system message."""
    system = [message for message in base.messages if message.role == "system"]
    messages = (*system, Message("user", turns[0]))
    told = dict(facts)
    metadata = {"capability": told.pop("capability"), PROVENANCE: told}
    return PathTask(Task(name, messages, None, base.envs, metadata), path, tuple(turns[1:]))


def capability_of(path: CallPath, graph: SignatureGraph) -> str:
    """The capability that an example practises, in a word: loops measure failures by it."""
    if len(path.turns) > 1:
        return "several_turns"
    if len(path.calls) > 1:
        return "chained_calls"
    [call] = path.calls
    required = {node.name for node in graph.parameters[call.tool] if node.is_required}
    return "optional_parameters" if call.arguments.keys() - required else "one_call"


def answered_by(writer: ChatModel) -> Reply:
    """The assistant's words at the end of a turn, by a language model."""

    async def reply(episode: Episode, results: Sequence[str]) -> str:
        lines = [f"{message.role}: {message.content}" for message in episode.messages]
        asked = [Message("system", _ANSWERER), Message("user", "\n".join(lines))]
        said = (await writer.chat(asked, ChatOptions(max_tokens=256))).text.strip()
        return said or await plain_reply(episode, results)

    return reply


_SENTENCE = re.compile(r"^(.+?)(?:\.\s|\.?$)", re.M)
_WRITER = """You write what a person says to an assistant that has tools. You are given the calls that the
assistant is to make, turn by turn. Write one message of the person for each turn, so that exactly these calls
follow from it. Say every value under "said" literally, in the turn that first needs it. What is under "found"
the assistant finds out itself: refer to it in words, and never invent a value for it. Do not name tools. Plain,
natural sentences. Answer with JSON: {"turns": ["...", ...]}"""


class UserTurns(BaseModel):
    """Answer of a language model."""

    turns: list[str]


def template_turns(path: CallPath, graph: SignatureGraph) -> list[str]:
    texts = []
    for numbers in path.by_turn():
        parts = [_sentence(path, number, graph.specs[path.calls[number].tool]) for number in numbers]
        texts.append(" Then ".join([parts[0], *(part[0].lower() + part[1:] for part in parts[1:])]))
    return texts


def _sentence(path: CallPath, number: int, spec: ToolSpec) -> str:
    call = path.calls[number]
    found = _SENTENCE.match(spec.description.strip())
    what = found.group(1).strip() if found else spec.name.replace("_", " ").capitalize()
    said = [
        f"{name} {_shown(one.value)}"
        for name, one in call.arguments.items()
        if isinstance(one, FromUser)
    ]
    got = [
        f"the {name.replace('_', ' ')} from that"
        if one.call == number - 1
        else f"the {name.replace('_', ' ')} from step {one.call + 1}"
        for name, one in call.arguments.items()
        if isinstance(one, FromResult)
    ]
    using = ", ".join([*said, *got])
    return f"{what} ({using})." if using else f"{what}."


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


async def written_turns(
    path: CallPath, graph: SignatureGraph, model: ChatModel, options: ChatOptions
) -> list[str]:
    """An instruction for each turn by a language model; `ChatError` where no answer says every value."""
    plan = [
        [_described(path.calls[number], graph.specs[path.calls[number].tool]) for number in numbers]
        for numbers in path.by_turn()
    ]

    def check(reply: UserTurns) -> None:
        if problem := unsaid(path, reply.turns):
            raise ValueError(problem)

    return (await ask(model, _WRITER, {"turns": plan}, UserTurns, options, check=check)).turns


def _described(call: PathCall, spec: ToolSpec) -> dict[str, Any]:
    said = {name: one.value for name, one in call.arguments.items() if isinstance(one, FromUser)}
    found = [name for name, one in call.arguments.items() if isinstance(one, FromResult)]
    return {"does": spec.description, "tool": call.tool, "said": said, "found": found}


def unsaid(path: CallPath, turns: Sequence[str]) -> str:
    """The missing part of the instructions: a turn, or a value that could not be known; empty if nothing is."""
    numbers = list(path.by_turn())
    if len(turns) != len(numbers):
        return f"there are {len(turns)} turns and there should be {len(numbers)}"
    for place, turn in enumerate(numbers):
        heard = " ".join(turns[: place + 1]).lower()
        for number in turn:
            for name, source in path.calls[number].arguments.items():
                if isinstance(source, FromUser) and not _is_said(source.value, heard):
                    return f"turn {place + 1} does not say {name} = {_shown(source.value)}"
    return ""


def _is_said(value: Any, heard: str) -> bool:
    if isinstance(value, bool) or value is None:
        return True  # yes and no have many words
    if isinstance(value, list | tuple):
        return all(_is_said(one, heard) for one in value)
    if isinstance(value, dict):
        return all(_is_said(one, heard) for one in value.values())
    return _shown(value).lower() in heard


# Playing


@dataclass(frozen=True, slots=True)
class PathTask:
    """A path with what the user says: the first turn is in the task, the others follow."""

    task: Task
    path: CallPath
    further_turns: tuple[str, ...] = ()


@dataclass(slots=True)
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
            await self._play(episode)
        except (NoValue, _Refused) as problem:
            self.problem = str(problem)

    async def _play(self, episode: Episode) -> None:
        results: list[Any] = []
        planned = self._planned
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
