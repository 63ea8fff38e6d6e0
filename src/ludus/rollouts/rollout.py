"""Many episodes at once: one coroutine each, and nothing waits for a batch.

Concurrency: an episode waits for a place among those in flight (`max_in_flight`, the only limit here), then
for its environments (from limited pools), then for the engine (which has its own admission queue). Groups
are yielded as soon as their last episode ends. Cancelling the iteration cancels every episode, and each one
releases its resources.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, get_args

from ludus.chat.renderer import Renderer
from ludus.core.failures import (
    Aborted,
    Boundary,
    CannotFork,
    ConfigError,
    EngineError,
    Failure,
    Fault,
    InfraError,
    MissingExtraError,
)
from ludus.core.generation import Engine, Sampling
from ludus.core.messages import IMAGE_MARK, Media, Message, ToolContext, ToolSet
from ludus.core.random import key
from ludus.core.task import Task
from ludus.core.trajectory import (
    Audit,
    EnvRender,
    Group,
    StopReason,
    TimeSpan,
    TokenSequence,
    Trajectory,
)
from ludus.core.user_code import log_once
from ludus.envs import (
    EnvAccess,
    EnvPool,
    EnvTools,
    Lease,
    Observation,
    RemoteEnv,
    as_observation,
    rename_clashes,
    tools_of,
)
from ludus.envs.env import call_env, setting_of
from ludus.remote.limits import SamplingGate, run_all, stop_all, time_limit
from ludus.rewards import Scorer
from ludus.rollouts.agent import Agent
from ludus.rollouts.branching import EpisodeRecord, Origin, WorldState, check_forkable
from ludus.rollouts.episode import Episode, EpisodeOver
from ludus.rollouts.recorder import Budgets, EngineChatModel, Recorder, asking_policy
from ludus.rollouts.tool_calls import StepRewards
from ludus.rollouts.tree import SEARCH_SCORE, Leaf, TreeConfig, grow_tree, search_turns
from ludus.tools import CombinedTools
from ludus.tools.toolset import is_deterministic

log = logging.getLogger(__name__)

_MOST_SPAN_CHARS = 300
_MOST_RENDER_CHARS = 20_000
_MOST_RENDER_BYTES = 2_000_000
"""A render that is larger is left out."""


@dataclass(slots=True)
class Rollout:
    """Plays episodes: everything an episode needs, and how many run at once."""

    engine: Engine
    renderer: Renderer
    scorer: Scorer
    tools: ToolSet
    pools: Mapping[str, EnvPool] = field(default_factory=dict)
    agent: Agent = field(default_factory=Agent)
    budgets: Budgets = field(default_factory=Budgets)
    sampling: Sampling = field(default_factory=Sampling)
    attempts: int = 1
    step_rewards: StepRewards | None = None
    """How rewards of calls make up an episode's; None leaves it to the environments, and else is "sum"."""
    tree: TreeConfig | None = None
    """Play each group as a tree of attempts that share their first turns."""
    audit: Audit | None = None
    """Told of every tool call."""
    max_in_flight: int = 256
    retries: int = 1
    """How often an episode is played again after an infrastructure failure."""
    zero_over_time: bool = False
    """Whether an episode over `max_seconds` ends there, with the reward 0, and is no infrastructure failure."""
    renders: bool = False
    """Whether to record what environments look like before each turn."""
    gate: SamplingGate | None = None
    """A gate at which requests to the engine wait while another user needs it."""

    @property
    def policy(self) -> EngineChatModel:
        """The policy as a model that rewards may ask."""
        return EngineChatModel(self.engine, self.renderer, gate=self.gate)

    async def groups(self, tasks: Sequence[Task], seed: int) -> AsyncIterator[Group]:
        """One group of `attempts` episodes for each task, in the order they finish."""
        places = asyncio.Semaphore(self.max_in_flight)
        seen: Counter[str] = Counter()
        running = []
        for task in tasks:
            # a task that comes twice gets new attempts, not the same ones again
            first = seen[task.id] * self.attempts
            seen[task.id] += 1
            running.append(asyncio.create_task(self.group(task, first, seed, places)))
        try:
            for finished in asyncio.as_completed(running):
                yield await finished
        finally:
            await stop_all(running)

    async def group(
        self, task: Task, first: int, seed: int, places: AbstractAsyncContextManager[object]
    ) -> Group:
        """The attempts `first` and following at a task, scored; each waits for one of the `places`."""

        async def one(attempt: int) -> Trajectory:
            async with places:
                return await self.play(task, attempt, seed)

        if self.tree is not None:
            group = Group(task, await self._tree(self.tree, task, first, seed, places))
        else:
            group = Group(task, await run_all([one(first + i) for i in range(self.attempts)]))
        try:
            with asking_policy(self.policy):
                await self.scorer.score_group(group)
        except InfraError as error:
            for trajectory in group.trajectories:
                if trajectory.failure is None and trajectory.stop is not StopReason.ABORTED:
                    _fail(trajectory, Failure.of(error, Boundary.REWARD))
        return group

    async def _tree(
        self,
        tree: TreeConfig,
        task: Task,
        first: int,
        seed: int,
        places: AbstractAsyncContextManager[object],
    ) -> list[Trajectory]:
        """The attempts of a group as a tree. Sessions and snapshots are kept until its last branch ends."""
        check_forkable({name: self._pool(name) for name in task.envs or self.pools}, self.tools)
        records: list[EpisodeRecord] = []

        async def play(attempt: int, origin: Origin | None, hold: int | None = None) -> Leaf:
            records.append(record := EpisodeRecord(origin, tree.state == "snapshot", hold))
            async with places:
                return Leaf(await self.play(task, attempt, seed, record), record)

        draw = key(seed, task.id, first, "tree")
        try:
            if tree.branch == "turns":
                return await search_turns(tree, first, draw, play)
            return await grow_tree(tree, self.attempts, first, draw, play)
        finally:
            for record in records:
                await self.engine.release(record.session)
                await record.close()

    async def play(
        self, task: Task, attempt: int, seed: int, record: EpisodeRecord | None = None
    ) -> Trajectory:
        """One episode, played again after an infrastructure failure; a last failure is in its trajectory.

        With a `record` others can branch off it, and it may be a branch itself; the engine's session is then
        kept. Raises only what is wrong with the recipe rather than with the episode (`ConfigError`).
        """
        trajectory = Trajectory(task)
        began, lost = time.perf_counter(), list[TimeSpan]()
        for trial in range(self.retries + 1):
            trajectory = Trajectory(task, attempt=attempt, seed=key(seed, task.id, attempt))
            name = f"{seed:x}/{task.id}/{attempt}/{trial}"
            started = time.perf_counter()
            try:
                await self._play_in_time(trajectory, name, record)
            except Aborted:
                trajectory.stop = StopReason.ABORTED
            except InfraError as error:
                if error.boundary is Boundary.DEADLINE and self.zero_over_time:
                    trajectory.stop = StopReason.MAX_SECONDS
                    trajectory.rewards, trajectory.reward = {}, 0.0
                    break
                _fail(trajectory, Failure.of(error, error.boundary, trial + 1))
                if not error.replay or error.boundary is Boundary.REWARD:
                    break  # rewards have retries of their own; another episode would not help
            except (ConfigError, MissingExtraError):
                raise
            except Exception as error:  # noqa: BLE001 - what an agent or an expert raises ends its episode alone
                log_once(log, "the agent", error)
                _fail(trajectory, Failure.of(error, Boundary.AGENT, trial + 1))
                break
            finally:
                trajectory.seconds["total"] = seconds = time.perf_counter() - started
                if (failure := trajectory.failure) is not None:
                    log.info("task %s, attempt %d: %s", task.id, attempt, failure)
                    what = f"{failure.boundary.value}: {failure.message}"[:_MOST_SPAN_CHARS]
                    lost.append(TimeSpan("failure", started - began, seconds, what))
                trajectory.spans = [
                    *lost,
                    *(replace(span, start=span.start - began) for span in trajectory.spans),
                ]
                if record is None or trajectory.failure is not None:
                    await self.engine.release(name)
            if trajectory.failure is None:
                break
        return trajectory

    async def _play_in_time(
        self, trajectory: Trajectory, name: str, record: EpisodeRecord | None
    ) -> None:
        """The episode within `max_seconds`, queues left out; a `TimeoutError` of user code passes through.

        A branch that cannot be had is played from the prompt.
        """
        limit = self.budgets.max_seconds
        try:
            async with time_limit(limit) as deadline:
                try:
                    await self._play_and_score(trajectory, name, record)
                except CannotFork as refused:
                    if record is None or record.origin is None:
                        raise
                    log.info("task %s: a branch is played anew: %s", trajectory.task.id, refused)
                    record.refuse()
                    await self.engine.release(name)
                    _clear(trajectory)
                    await self._play_and_score(trajectory, name, record)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            message = f"the episode took longer than budgets.max_seconds = {limit:g}"
            raise InfraError(Boundary.DEADLINE, message) from error

    async def _play_and_score(
        self, trajectory: Trajectory, name: str, record: EpisodeRecord | None
    ) -> None:
        """Acquire environments and tools, run the agent, score; whatever happens, all is released."""
        task = trajectory.task
        async with AsyncExitStack() as resources:
            if record is not None:
                await record.begin(trajectory, name)
            waited = time.perf_counter()
            leases = await self._leases(trajectory, name, resources)
            if leases:
                taken = time.perf_counter() - waited
                names = ", ".join(leases)
                trajectory.spans.append(TimeSpan("environment", waited, taken, names))
            envs = {env_name: lease.env for env_name, lease in leases.items()}
            access = EnvAccess()
            context = ToolContext(name, task, envs, exclusive=access)
            sets = {name: await self._env_tools(lease, name, access) for name, lease in leases.items()}
            rename_clashes(sets)
            observed = [
                replace(lease.observation, text=await sets[name].first(lease.observation, context))
                for name, lease in leases.items()
            ]
            tools = CombinedTools([self.tools, *sets.values()])
            await tools.open(context)
            resources.push_async_callback(_close, tools, context)
            if record is not None:
                await self._branch(record, context)
            recorder = Recorder(
                trajectory,
                engine=self.engine,
                budgets=self.budgets,
                sampling=self.sampling,
                session=name,
                gate=self.gate,
            )
            episode = Episode(
                recorder,
                renderer=self.renderer,
                tools=tools,
                specs=await tools.list(context),
                context=context,
                opening=opening_messages(task.messages, observed),
                step_rewards=self._step_rewards_of(task, envs),
                record=record,
                audit=self.audit,
                render=partial(_rendered, envs, access) if self.renders and envs else None,
                has_rewards=self.scorer.has_rewards,
            )
            try:
                await self.agent.run(episode)
            except EpisodeOver:
                log.debug("task %s ended by its budget or its environment", task.id)
            episode.finish()
            await episode.note_renders()
            started = time.perf_counter()
            for env in envs.values():
                if isinstance(env, RemoteEnv):
                    async with access(env):
                        await env.fetch_state()
            is_held = record is not None and record.hold == trajectory.turns and not episode.has_ended
            if is_held:
                trajectory.stop = StopReason.MAX_TURNS  # scored as if its turns were used up
            with asking_policy(self.policy):
                await self.scorer.score(trajectory, envs)
            if is_held and record is not None:
                self._hold(trajectory, record)
            trajectory.seconds["rewards"] = time.perf_counter() - started
            if self.scorer.rewards or self.scorer.turn_rewards:
                scored = TimeSpan("reward", started, trajectory.seconds["rewards"])
                trajectory.spans.append(scored)

    async def _branch(self, record: EpisodeRecord, context: ToolContext) -> None:
        """Get ready to be branched off, and as a branch go on with the other attempt's KV and state."""
        record.save = partial(WorldState.of, self.tools, context)
        if record.origin is None:
            return
        if record.origin.state is not None:
            await record.origin.state.restore(self.tools, context)
        elif not (
            is_deterministic(self.tools)
            and all(self._pool(name).is_deterministic for name in context.envs)
        ):
            raise CannotFork(
                "there is no snapshot of that turn, and it cannot be replayed", "the episode"
            )
        await self.engine.fork(record.origin.record.session, context.episode)

    def _hold(self, trajectory: Trajectory, record: EpisodeRecord) -> None:
        """Note what a held episode is worth; it is no failure, and neither trained nor in a baseline."""
        name = self.tree.score if self.tree is not None else "total"
        value = trajectory.reward if name == "total" else trajectory.rewards.get(name)
        if value is None and name not in ("total", *self.scorer.names):
            known = ", ".join(("total", *self.scorer.names))
            raise ConfigError(f"rl.tree.score: no reward is called {name!r}; there are: {known}")
        record.score = value or 0.0
        trajectory.counts[SEARCH_SCORE] = record.score
        trajectory.stop, trajectory.reward = StopReason.ABORTED, None

    async def _leases(
        self, trajectory: Trajectory, name: str, resources: AsyncExitStack
    ) -> dict[str, Lease]:
        """The episode's environments, in the order the task names them.

        They are acquired in the order of their names, so that no two episodes wait for each other.
        """
        task = trajectory.task
        names = list(task.envs or self.pools)
        leases: dict[str, Lease] = {}
        for env_name in sorted(names):
            pool = self._pool(env_name)
            leases[env_name] = await pool.acquire(name, task)
            resources.push_async_exit(_releaser(pool, name, trajectory))
        return {env_name: leases[env_name] for env_name in names}

    async def _env_tools(self, lease: Lease, name: str, access: EnvAccess) -> EnvTools:
        """The tools of one of the episode's environments; from now on, every use of it has a deadline."""
        pool = self._pool(name)
        access.add(name, lease.env, pool.step_timeout)
        async with access(lease.env):
            tools = await tools_of(lease.env, name)
        encode = self.renderer.tokenizer.encode
        return EnvTools(lease.env, tools, pool.show_actions_of(lease.env), encode=encode)

    def _step_rewards_of(self, task: Task, envs: Mapping[str, Any]) -> StepRewards:
        """How the rewards of calls make up the episode's: as the task, the recipe or its environments say."""
        own: set[Any] = {setting_of(env, "step_rewards") for env in envs.values()}
        chosen = task.metadata.get("step_rewards", self.step_rewards)
        if chosen is None and len(own) > 1:
            raise ConfigError(
                f"the environments {', '.join(envs)} have different step_rewards ({', '.join(sorted(own))}): "
                "set agent.step_rewards, or give it to the tasks"
            )
        rule: StepRewards = next(iter(own), "sum") if chosen is None else chosen
        if rule not in get_args(StepRewards):
            raise ConfigError(f"step_rewards is one of {', '.join(get_args(StepRewards))}, not {rule!r}")
        return rule

    def _pool(self, name: str) -> EnvPool:
        if name not in self.pools:
            known = ", ".join(self.pools) or "none"
            raise ConfigError(f"a task asks for the environment {name!r}, but this run has: {known}")
        return self.pools[name]


async def _rendered(envs: Mapping[str, Any], access: EnvAccess, turn: int) -> list[EnvRender]:
    """Renders of the environments; one that cannot be rendered is left out."""
    found: list[EnvRender] = []
    for name, env in envs.items():
        try:
            async with access(env):
                shown = await call_env(env.render)
        except Exception as error:  # noqa: BLE001 - looking on must not disturb an episode
            log_once(log, f"render of {name}", error)
            continue
        if isinstance(shown, bytes) and len(shown) <= _MOST_RENDER_BYTES:
            image = Media("image", hashlib.sha256(shown).hexdigest(), shown)
            found.append(EnvRender(turn, name, picture=image))
        elif not isinstance(shown, bytes) and shown is not None and shown != repr(env):
            found.append(EnvRender(turn, name, str(shown)[:_MOST_RENDER_CHARS]))
    return found


def opening_messages(
    messages: Sequence[Message], observations: Sequence[Observation | str]
) -> list[Message]:
    """The task's messages, with what the environments show first at the end of the last user message.

    One message rather than two, because many chat templates refuse two user messages in a row.
    """
    seen = [one for one in map(as_observation, observations) if one.text or one.media]
    if not seen:
        return list(messages)
    text = "\n\n".join(map(_marked, seen))
    media = tuple(item for one in seen for item in one.media)
    if messages and messages[-1].role == "user":
        last = messages[-1]
        content = f"{last.content}\n\n{text}"
        return [*messages[:-1], replace(last, content=content, media=(*last.media, *media))]
    return [*messages, Message("user", text, media=media)]


def _marked(seen: Observation) -> str:
    """An observation's text, with a mark for each of its images: other texts will stand before it."""
    images = sum(item.is_image for item in seen.media)
    missing = max(0, images - seen.text.count(IMAGE_MARK))
    return "\n".join([*[IMAGE_MARK] * missing, *([seen.text] if seen.text else [])])


def _releaser(pool: EnvPool, name: str, trajectory: Trajectory) -> Callable[..., Awaitable[None]]:
    """Gives an environment back. One in which a call may still be running is not handed out again."""

    async def release(kind: object, error: BaseException | None, trace: object) -> None:
        is_cut_off = error is not None and not isinstance(error, Aborted | CannotFork | EngineError)
        is_broken = is_cut_off or Fault.TOOL_TIMEOUT in trajectory.faults
        await pool.release(name, is_broken=is_broken)

    return release


async def _close(tools: ToolSet, context: ToolContext) -> None:
    """Close the tools; the episode has been played and scored, so an error here does not undo it."""
    try:
        await tools.close(context)
    except Exception as error:  # noqa: BLE001 - logged, and no more
        log_once(log, "closing the tools of an episode", error)


def _clear(trajectory: Trajectory) -> None:
    """Forget what was played."""
    trajectory.sequences, trajectory.messages, trajectory.branch = [TokenSequence()], [], None
    trajectory.seconds, trajectory.counts = {}, {}
    trajectory.spans, trajectory.renders = [], []


def _fail(trajectory: Trajectory, failure: Failure) -> None:
    """Record an infrastructure failure: no reward, whatever had been scored before."""
    trajectory.failure = failure
    trajectory.stop = StopReason.FAILED
    trajectory.reward = None
    trajectory.rewards = {}
