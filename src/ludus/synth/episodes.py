"""Episodes that a method begins with, of a file, of a run or played for it; their steps; episodes played again.

To play recorded actions again, in a fresh environment, before another prompt, or up to a turn, an engine gives
the recorded tokens instead of sampling, and the episode is played as any other: calls are made, results
observed, rewards computed. So what comes out is a real episode whose actions are those that were recorded,
token for token. What follows the recorded actions is the business of another engine, if there is one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field

from ludus.chat.formats import load_format
from ludus.chat.formats.base import ParsedAction, split_thinking
from ludus.chat.renderer import Renderer
from ludus.core.config import Place
from ludus.core.failures import ConfigError, InfraError, not_there
from ludus.core.generation import Completion, Engine, FinishReason, OnTokens, Sampling
from ludus.core.messages import MediaSpan, Message, ToolCall, ToolResult, ToolSet, ToolSpec
from ludus.core.task import Task
from ludus.core.tokenizer import ByteTokenizer
from ludus.core.trajectory import Trajectory, is_lost
from ludus.engine import FakeEngine
from ludus.envs import EnvPool
from ludus.observe import RunFolder, read_trajectories
from ludus.rewards import Scorer
from ludus.rollouts.agent import Agent
from ludus.rollouts.episode import Episode
from ludus.rollouts.recorder import Budgets
from ludus.rollouts.rollout import Rollout
from ludus.synth.method import SynthConfig, SynthContext, TaskSource
from ludus.synth.result import current_cost
from ludus.tools.versions import Unkeyable, canonical

_PLENTY = 10_000_000
_SHOWN_CHARS = 300


class EpisodesConfig(SynthConfig):
    """Where the episodes come from that a method works on."""

    source: Place | None = None
    """A Parquet file of episodes, or a run's folder; played when left out."""
    attempts: int = Field(default=4, ge=1)
    """Episodes for each task, where they are played."""
    threshold: float = 1.0
    """The least reward of a success, where no reward is called success."""


@dataclass(frozen=True, slots=True)
class SourcedEpisode:
    """An episode, and where its task is played."""

    source: TaskSource
    trajectory: Trajectory

    @property
    def name(self) -> str:
        one = self.trajectory
        return f"{self.source.name}/{one.task.id}/{one.attempt}/{one.seed}"


async def episodes_of(context: SynthContext, settings: EpisodesConfig) -> list[SourcedEpisode]:
    """The scored episodes to work on."""
    if settings.source is not None:
        found = _read(Path(settings.source))
        places = {task.id: one for one in context.sources for task in (*one.tasks, *one.held_out)}
        own = [SourcedEpisode(places.get(one.task.id, context.sources[0]), one) for one in found]
        # an episode that several files of a run have is one
        return list({one.name: one for one in own if not is_lost(one.trajectory)}.values())
    tasks = context.tasks(settings.tasks)
    groups = await context.groups("attempts", tasks, settings.attempts)
    return [
        SourcedEpisode(one.source, trajectory)
        for one, group in zip(tasks, groups, strict=True)
        for trajectory in group.trajectories
        if not is_lost(trajectory)
    ]


def _read(path: Path) -> list[Trajectory]:
    run = RunFolder(path)
    if path.is_dir() and run.is_run:
        return [t for file in run.trajectory_files() for t in run.trajectories(file.step, file.split)]
    if not path.is_file():
        raise ConfigError(not_there(path))
    return read_trajectories(path)


class RecordedEngine(Engine):
    """An `Engine` that gives these completions in each session, and then those of another, or none."""

    def __init__(self, actions: Sequence[Completion], then: Engine | None = None) -> None:
        self._actions, self._then = list(actions), then
        self._given: defaultdict[str | None, int] = defaultdict(int)

    @property
    def policy_version(self) -> int:
        return 0 if self._then is None else self._then.policy_version

    async def generate(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        media: Sequence[MediaSpan] = (),
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        number = self._given[session]
        self._given[session] += 1
        if number < len(self._actions):
            return self._actions[number]
        if self._then is None:
            return Completion([], [], FinishReason.ABORTED)
        return await self._then.generate(
            tokens, sampling, session=session, media=media, on_tokens=on_tokens
        )

    async def fork(self, session: str, into: str) -> None:
        self._given[into] = self._given[session]
        if self._then is not None:
            await self._then.fork(session, into)

    async def release(self, session: str) -> None:
        self._given.pop(session, None)
        if self._then is not None:
            await self._then.release(session)

    async def abort(self, session: str) -> None:
        if self._then is not None:
            await self._then.abort(session)


def recorded_actions(trajectory: Trajectory, renderer: Renderer) -> list[Completion]:
    """The actions of an episode as they were sampled; written anew where another tokenizer has sampled them."""
    after = trajectory.messages[len(trajectory.asked) :]
    said = [message for message in after if message.role == "assistant"]
    sampled = [
        Completion(
            list(action.tokens),
            list(action.logprobs or ()),
            action.finish or FinishReason.STOP_TOKEN,
            action.versions,
        )
        for action in trajectory.actions
    ]
    texts = [message.content for message in said]
    if len(sampled) == len(said) and _texts(sampled, renderer) == texts:
        return sampled
    written = [renderer.action_tokens(renderer.action_text(message)) for message in said]
    return [Completion(one, [0.0] * len(one), FinishReason.STOP_TOKEN) for one in written]


def written_action(text: str, renderer: Renderer) -> Completion:
    """An action that was not sampled: its log-probabilities are 0, and it is for imitation."""
    tokens = renderer.action_tokens(text)
    return Completion(tokens, [0.0] * len(tokens), FinishReason.STOP_TOKEN)


def _texts(actions: Sequence[Completion], renderer: Renderer) -> list[str] | None:
    try:
        return [renderer.text_of(action) for action in actions]
    except (ValueError, IndexError, OverflowError, KeyError):  # ids that this tokenizer does not have
        return None


async def replay(
    rollout: Rollout,
    task: Task,
    actions: Sequence[Completion],
    *,
    seed: int,
    attempt: int = 0,
    then: Engine | None = None,
) -> Trajectory:
    """Play these actions at a task, and score them; `then` goes on.

    What is played at the same time needs different seeds: they name the episodes, and so their environments.
    """
    turns = len(actions) if then is None else rollout.budgets.max_turns
    playing = replace(
        rollout,
        engine=RecordedEngine(actions, then),
        budgets=rollout.budgets.model_copy(update={"max_turns": max(1, turns)}),
        tree=None,
    )
    played = await playing.play(task, attempt, seed)
    if (cost := current_cost.get()) is not None:
        cost.add_episodes([played])
        if then is None:  # nothing was sampled
            cost.sampled_tokens -= sum(len(action.tokens) for action in played.actions)
    return played


def observed(trajectory: Trajectory) -> list[str]:
    """Texts that the model read after its first action, in order."""
    after = trajectory.messages[len(trajectory.asked) :]
    return [one.content for one in after if one.role != "assistant"]


def first_difference(recorded: Trajectory, played: Trajectory) -> str:
    """Where two episodes with the same actions got other results; "" where they did not."""
    before, now = observed(recorded), observed(played)
    for number, (old, new) in enumerate(zip(before, now, strict=False), start=1):
        if old != new:
            return f"result {number}: {new!r:.120} instead of {old!r:.120}"
    if len(before) != len(now):
        return f"{len(now)} results instead of {len(before)}"
    return ""


# Demonstrations: episodes of agents that need no model


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


# Steps: what was thought, what was called, what came back. Filters and methods read these.

Parse = Callable[[str], ParsedAction]
"""Reads an action's text in the format that it was written in (`ActionFormat.parse`)."""

_MARKUP = re.compile(r"<tool_call>.*?(?:</tool_call>|$)|```.*?(?:```|$)|<\|python_tag\|>.*", re.S)
"""How calls look in the usual formats, for episodes of which no format is known."""

CLOSE = 1e-9
"""Qualities that differ by less are the same."""


@dataclass(frozen=True, slots=True)
class EpisodeStep:
    """One action of an episode, and what was observed after it."""

    said: str
    """The text of the action outside its calls, thinking included."""
    calls: tuple[ToolCall, ...]
    results: tuple[Message, ...]
    """Results of the calls, and whatever else the model read before its next action."""

    @property
    def is_answer(self) -> bool:
        return not self.calls

    def is_complete(self, *, needs_thought: bool = True) -> bool:
        """Whether it has a thought, an action and an observation. An answer ends an episode: it needs no
        observation, and its text is thought and action in one."""
        is_observed = self.is_answer or bool(self.results)
        return is_observed and (not needs_thought or bool(self.said.strip()))


def steps_of(trajectory: Trajectory, parse: Parse | None = None) -> list[EpisodeStep]:
    steps: list[EpisodeStep] = []
    for message in trajectory.messages[len(trajectory.asked) :]:
        if message.role == "assistant":
            said = _outside_calls(message, parse)
            steps.append(EpisodeStep(said, message.tool_calls, ()))
        elif steps:
            last = steps[-1]
            steps[-1] = EpisodeStep(last.said, last.calls, (*last.results, message))
    return steps


def _outside_calls(message: Message, parse: Parse | None) -> str:
    if not message.tool_calls:
        return message.content
    if parse is not None:
        parsed = parse(message.content)
        return f"{parsed.thought}\n{parsed.text}".strip()
    thought, rest, _ = split_thinking(message.content)
    return f"{thought}\n{_MARKUP.sub('', rest)}".strip()


def call_text(call: ToolCall) -> str:
    """A call as text in which equal calls are equal."""
    try:
        return f"{call.name}({canonical(call.arguments)})"
    except Unkeyable:
        return f"{call.name}({call.arguments!r:.2000})"


def action_set(steps: Sequence[EpisodeStep]) -> frozenset[str]:
    """The set of an episode's actions: its calls with their arguments, and its answers."""
    called = {call_text(call) for step in steps for call in step.calls}
    answers = {f"say {' '.join(step.said.split())}" for step in steps if step.is_answer}
    return frozenset(called | answers)


def count_calls(steps: Sequence[EpisodeStep]) -> int:
    return sum(len(step.calls) for step in steps)


def quality_of(steps: Sequence[EpisodeStep], *, needs_thought: bool = True) -> float:
    """0.5 · max(0, 1 − 0.1 · calls) + 0.5 · share of complete turns."""
    brevity = max(0.0, 1 - 0.1 * count_calls(steps))
    complete = sum(step.is_complete(needs_thought=needs_thought) for step in steps)
    return 0.5 * brevity + 0.5 * (complete / len(steps) if steps else 0.0)
