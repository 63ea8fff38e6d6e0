"""Simulation of asynchronous training on more GPUs: the real controller, on a virtual clock.

The event loop jumps to the next event, so that hours of 1,000 GPUs take minutes of one core. Engines and
episodes only pass time:

engine   all its requests advance together, one token every `decode_seconds + request_seconds * (n - 1)`;
         prompts are read first, `prompt_tokens_per_second`. After an update, contexts are read again.
group    its episodes live on one engine, the one with the fewest groups
tools    lognormal seconds; a share of them hangs until a deadline
death    an engine loses its groups, which fail and are scheduled again by the controller, and comes back
update   on the engines' own GPUs while they are paused; or on GPUs of its own, and a sync pauses the engines
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
import selectors
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar, cast

from pydantic import Field, model_validator

from ludus.core.config import Config, apply_overrides, swept
from ludus.core.failures import Boundary, ConfigError, EngineError, Failure
from ludus.core.random import key
from ludus.core.task import Task
from ludus.core.trajectory import Group, StopReason, Trajectory
from ludus.observe import Cell, ReportTable, Share
from ludus.rollouts.rollout import Rollout
from ludus.training.config.rl import RolloutSettings
from ludus.training.controller import RolloutController, StalledError
from ludus.training.data.tasks import TaskSet
from ludus.training.ledger import Ledger, Phase
from ludus.training.player import GroupPlan, PlayedGroup

T = TypeVar("T")
_COLUMNS = ("s/step", "gain", "eps/s", "tok/s", "play", "train", "lag", "deaths", "ms/group")
_FEWEST_STEPS = 5
CAPTION = (
    "gain: seconds a step with staleness 0, divided by these. eps/s, tok/s: episodes and tokens trained. "
    "play, train: share of the time in which engines and trainer were busy. lag: mean, and largest of its "
    "bound, in steps. ms/group: CPU time of controller and simulation."
)


class SimulationConfig(Config):
    """A load and a cluster. The defaults are a 1.5B model on one H200 (docs/performance.md)."""

    tasks: int = Field(default=32, ge=1)
    """Groups in a step."""
    attempts: int = Field(default=8, ge=1)
    """Episodes in a group."""
    steps: int = Field(default=8, ge=1)
    """Steps to simulate."""
    staleness: int = Field(default=1, ge=0)
    """As rl.staleness; 0 waits for every episode of a step."""
    staleness_window: int = Field(default=1, ge=1)
    """As rl.staleness_window."""
    engines: int = Field(default=1, ge=1)
    """GPUs that play."""
    trainers: int = Field(default=0, ge=0)
    """GPUs that train; 0: the engines' own, while they are paused."""
    turns: tuple[int, int] = (3, 6)
    """Fewest and most turns of an episode."""
    prompt_tokens: int = Field(default=400, ge=0)
    """Tokens of a task."""
    turn_tokens: int = Field(default=120, ge=1)
    """Mean tokens of an action; they are spread exponentially."""
    observation_tokens: int = Field(default=100, ge=0)
    """Tokens of what a tool returns."""
    tool_seconds: float = Field(default=0.5, ge=0)
    """Mean seconds of a tool."""
    tool_sigma: float = Field(default=1.0, ge=0)
    """Spread of the logarithm of a tool's seconds."""
    hang_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the calls that hang until their deadline."""
    hang_seconds: float = Field(default=30.0, ge=0)
    """Seconds until that deadline."""
    max_requests: int = Field(default=256, ge=1)
    """Requests that an engine runs at once; others wait in line."""
    decode_seconds: float = Field(default=0.0018, gt=0)
    """Seconds of a decoding step of one request."""
    request_seconds: float = Field(default=0.000006, ge=0)
    """Seconds that each further request adds to it."""
    prompt_tokens_per_second: float = Field(default=150_000.0, gt=0)
    """How fast an engine reads prompts."""
    train_tokens_per_second: float = Field(default=50_000.0, gt=0)
    """How fast one GPU trains."""
    train_seconds: float = Field(default=0.3, ge=0)
    """Fixed seconds of an update, whatever its size."""
    train_efficiency: float = Field(default=0.95, gt=0, le=1)
    """Share of each GPU's speed that remains at every doubling of the GPUs that train."""
    pause_seconds: float = Field(default=0.02, ge=0)
    """Seconds to pause and resume the engines."""
    weight_gb: float = Field(default=3.1, ge=0)
    """Size of the weights."""
    sync_gb_per_second: float = Field(default=8.0, gt=0)
    """How fast the weights reach all engines; nothing is sent where the engines' own GPUs train."""
    engine_mtbf_seconds: float | None = Field(default=None, gt=0)
    """Mean time between the deaths of an engine."""
    restart_seconds: float = Field(default=30.0, ge=0)
    """Until a dead engine plays again."""
    seed: int = 0
    """Seed of every draw."""

    @model_validator(mode="after")
    def _has_turns(self) -> SimulationConfig:
        fewest, most = self.turns
        if not 1 <= fewest <= most:
            raise ValueError(f"turns = [{fewest}, {most}] must be the fewest and the most, at least 1")
        return self

    def update_seconds(self, tokens: int) -> float:
        gpus = self.trainers or self.engines
        speed: float = self.train_tokens_per_second * gpus * self.train_efficiency ** math.log2(gpus)
        return self.train_seconds + tokens / speed

    @property
    def sync_seconds(self) -> float:
        return self.pause_seconds + (self.weight_gb / self.sync_gb_per_second if self.trainers else 0.0)


@dataclass(slots=True)
class _Episode:
    """One attempt of a group: how many turns it has left, and what its context holds."""

    group: _PlayingGroup
    draw: random.Random
    turns: int
    context: int = 0
    version: int = -1
    """The weights that its context was read with."""


@dataclass(slots=True, eq=False)
class _PlayingGroup:
    plan: GroupPlan
    engine: SimulatedEngine
    left: int
    tokens: int = 0
    is_lost: bool = False


class SimulatedPlayer:
    """A `Player` whose episodes only pass time."""

    def __init__(self, config: SimulationConfig) -> None:
        self.config = config
        self._loop = asyncio.get_running_loop()
        self.engines = [SimulatedEngine(config, self._loop, self._die) for _ in range(config.engines)]
        self._idlest = [(0, number) for number in range(config.engines)]
        """Engines by the groups they have: a heap whose entries may be out of date."""
        self._playing: dict[int, _PlayingGroup] = {}
        self._arrived: asyncio.Queue[PlayedGroup] = asyncio.Queue()
        self.tokens: dict[int, int] = {}
        """Tokens of played groups, by ordinal."""
        self.deaths = 0
        self._draw = random.Random(key(config.seed, "deaths"))
        for engine in self.engines:
            self._expect_death(engine)

    def play(self, plan: GroupPlan) -> None:
        group = _PlayingGroup(plan, self._choose(), self.config.attempts)
        group.engine.groups.add(group)
        self._playing[plan.ordinal] = group
        for attempt in range(self.config.attempts):
            draw = random.Random(key(plan.seed, plan.ordinal, attempt))
            episode = _Episode(group, draw, draw.randint(*self.config.turns))
            self._act(episode, self.config.prompt_tokens)

    def _choose(self) -> SimulatedEngine:
        while True:
            groups, number = heapq.heappop(self._idlest)
            found = len(self.engines[number].groups) + (10**9 if self.engines[number].is_down else 0)
            heapq.heappush(self._idlest, (found + (found == groups), number))
            if found == groups or len(self.engines) == 1:
                return self.engines[number]

    def _act(self, episode: _Episode, new: int) -> None:
        """Read what is new, or everything where the weights have changed, and say something."""
        engine = episode.group.engine
        said = 1 + int(episode.draw.expovariate(1 / self.config.turn_tokens))
        unread = new if episode.version == engine.version else episode.context + new
        episode.context += new + said
        episode.version = engine.version
        engine.submit(said, unread, episode.context, lambda: self._acted(episode))

    def _acted(self, episode: _Episode) -> None:
        group, config, draw = episode.group, self.config, episode.draw
        episode.turns -= 1
        if episode.turns:
            seconds = 0.0
            if draw.random() < config.hang_share:
                seconds = config.hang_seconds
            elif config.tool_seconds:
                middle = math.log(config.tool_seconds) - config.tool_sigma**2 / 2
                seconds = draw.lognormvariate(middle, config.tool_sigma)
            self._loop.call_later(seconds, self._observed, episode)
            return
        group.tokens += episode.context
        group.left -= 1
        if not group.left:
            self._end(group)
            task = group.plan.task
            played = [
                Trajectory(task, attempt=i, reward=float(i % 2), stop=StopReason.ANSWERED)
                for i in range(config.attempts)
            ]
            self.tokens[group.plan.ordinal] = group.tokens
            self._arrived.put_nowait(PlayedGroup(group.plan.ordinal, Group(task, played)))

    def _observed(self, episode: _Episode) -> None:
        if not episode.group.is_lost:
            self._act(episode, self.config.observation_tokens)

    def _end(self, group: _PlayingGroup) -> None:
        group.engine.groups.discard(group)
        heapq.heappush(self._idlest, (len(group.engine.groups), self.engines.index(group.engine)))
        del self._playing[group.plan.ordinal]

    def _expect_death(self, engine: SimulatedEngine) -> None:
        if self.config.engine_mtbf_seconds is not None:
            self._loop.call_later(
                self._draw.expovariate(1 / self.config.engine_mtbf_seconds), engine.die
            )

    def _die(self, engine: SimulatedEngine) -> None:
        """Lose the engine's groups: the controller gets a failure for each, and retries or drops it."""
        self.deaths += 1
        error = EngineError("the engine died")
        for group in list(engine.groups):
            group.is_lost = True
            self._end(group)
            failed = PlayedGroup(group.plan.ordinal, failure=Failure.of(error, Boundary.ENGINE))
            self._arrived.put_nowait(failed)
        self._expect_death(engine)

    async def outcome(self) -> PlayedGroup:
        return await self._arrived.get()

    def outcomes(self) -> list[PlayedGroup]:
        return [self._arrived.get_nowait() for _ in range(self._arrived.qsize())]

    async def hold(self) -> None:
        for engine in self.engines:
            engine.pause()

    def release(self) -> None:
        for engine in self.engines:
            engine.resume()

    def describe(self, ordinal: int) -> str:
        return f"group {ordinal}"

    async def close(self) -> None:
        self._playing.clear()


@dataclass(slots=True, eq=False)
class SimulatedEngine:
    """Requests that share an engine's time. All advance at one rate, so one counter serves them all.

    `_served` is the number of tokens that a request active from the start would have got. A request admitted at
    `_served` = s ends at s plus its tokens, whatever is admitted later, so a heap of these ends is enough.
    """

    config: SimulationConfig
    loop: asyncio.AbstractEventLoop
    on_death: Callable[[SimulatedEngine], None]
    version: int = 0
    busy: float = 0.0
    is_down: bool = False
    groups: set[_PlayingGroup] = field(default_factory=set)
    _served: float = 0.0
    _unread: float = 0.0
    """Seconds of prompts left to read, before which no token is decoded."""
    _updated: float = 0.0
    _is_paused: bool = False
    _active: list[tuple[float, int, int, Callable[[], None]]] = field(default_factory=list)
    """A heap of (`_served` at the request's end, its number, its context, callback at its end)."""
    _waiting: deque[tuple[int, int, int, Callable[[], None]]] = field(default_factory=deque)
    _numbers: count[int] = field(default_factory=count)
    _timer: asyncio.TimerHandle | None = None

    def submit(self, said: int, unread: int, context: int, done: Callable[[], None]) -> None:
        """Read `unread` tokens, say `said`, and call `done`."""
        self._pass_time()
        self._waiting.append((said, unread, context, done))
        self._admit()
        self._schedule()

    def pause(self) -> None:
        self._pass_time()
        self._is_paused = True
        self._schedule()

    def resume(self) -> None:
        """Go on with new weights: the contexts of running requests are read again."""
        self._pass_time()
        self._is_paused = False
        self.version += 1
        self._unread += sum(one[2] for one in self._active) / self.config.prompt_tokens_per_second
        self._schedule()

    def die(self) -> None:
        self._pass_time()
        self.is_down = True
        self._active, self._unread = [], 0.0
        self._waiting.clear()
        self.loop.call_later(self.config.restart_seconds, self._restart)
        self.on_death(self)

    def _restart(self) -> None:
        self._pass_time()
        self.is_down = False
        self._admit()
        self._schedule()

    @property
    def _token_seconds(self) -> float:
        return self.config.decode_seconds + self.config.request_seconds * (len(self._active) - 1)

    def _pass_time(self) -> None:
        now = self.loop.time()
        passed, self._updated = now - self._updated, now
        if self._is_paused or not self._active:
            return
        self.busy += passed
        reading = min(passed, self._unread)
        self._unread -= reading
        self._served += (passed - reading) / self._token_seconds

    def _admit(self) -> None:
        while self._waiting and len(self._active) < self.config.max_requests and not self.is_down:
            said, unread, context, done = self._waiting.popleft()
            self._unread += unread / self.config.prompt_tokens_per_second
            heapq.heappush(self._active, (self._served + said, next(self._numbers), context, done))

    def _schedule(self) -> None:
        if self._is_paused or not self._active:
            return
        seconds = self._unread + (self._active[0][0] - self._served) * self._token_seconds
        when = self.loop.time() + max(0.0, seconds)
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = self.loop.call_at(when, self._look)

    def _look(self) -> None:
        self._timer = None
        self._pass_time()
        ended = []
        while self._active and not self._is_paused and self._active[0][0] <= self._served + 1e-6:
            ended.append(heapq.heappop(self._active)[3])
        self._admit()
        self._schedule()
        for done in ended:
            done()


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """Results of a simulation. Rates leave out the first step, in which the pipeline fills."""

    seconds: float
    steps: int
    step_seconds: float
    episodes_per_second: float
    tokens_per_second: float
    """Trained tokens."""
    engine_busy: float
    """Share of the engines' time in which they had requests and ran."""
    trainer_busy: float
    lag_mean: float
    lag_max: int
    lag_bound: int
    deaths: int
    given_up: int
    """Groups that failed too often."""
    controller_seconds: float
    """CPU seconds of the controller, the simulation included, for each group."""


def simulate(config: SimulationConfig) -> SimulatedRun:
    return run_virtually(_run(config))


class _VirtualSelector(selectors.SelectSelector):
    """Waits for nothing: what would be waited for is added to the clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise StalledError("the controller waits, and nothing is left that could happen")
        self.now += max(0.0, timeout)
        return []


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _VirtualSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a virtual clock: sleeping takes no time."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(main)


async def _run(config: SimulationConfig) -> SimulatedRun:
    """The trainer: takes batches from the controller, and lets time pass."""
    ledger = Ledger(config.tasks, config.staleness, config.staleness_window, config.steps * config.tasks)
    clock, began = asyncio.get_running_loop().time, time.process_time()
    player = SimulatedPlayer(config)
    tasks = [Task.of("", id=str(i)) for i in range(config.tasks)]
    # no rollout: the player does without
    sets = [TaskSet("simulated", 1.0, tasks, [], cast(Rollout, None))]
    settings = RolloutSettings(tasks=config.tasks, attempts=config.attempts)
    rollouts = RolloutController(
        sets, settings, config.seed, ledger, player, lambda step: {}, stall_seconds=1e9
    )
    lags: list[int] = []
    ends: list[float] = []
    tokens: list[int] = []
    training, given_up = 0.0, 0
    while ledger.phase is not Phase.ENDED:
        batch = await rollouts.next_batch()
        lags += [ledger.lag(plan.ordinal) for plan in batch.plans]
        given_up += sum(not group.trainable for group in batch.played.groups)
        tokens.append(sum(player.tokens.pop(plan.ordinal, 0) for plan in batch.plans))
        seconds = config.update_seconds(tokens[-1])
        if config.trainers:
            await asyncio.sleep(seconds)
        await player.hold()
        await asyncio.sleep(config.sync_seconds + (0.0 if config.trainers else seconds))
        player.release()
        training += seconds
        ends.append(clock())
        rollouts.trained(batch)
    await rollouts.close()
    steady = ends[-1] - ends[0] if len(ends) > 1 else ends[-1]
    counted = max(1, len(ends) - 1)
    busy = sum(engine.busy for engine in player.engines) / len(player.engines)
    return SimulatedRun(
        seconds=ends[-1],
        steps=len(ends),
        step_seconds=steady / counted,
        episodes_per_second=counted * config.tasks * config.attempts / steady,
        tokens_per_second=sum(tokens[-counted:]) / steady,
        engine_busy=busy / ends[-1],
        trainer_busy=training / ends[-1],
        lag_mean=sum(lags) / len(lags),
        lag_max=max(lags),
        lag_bound=ledger.max_lag,
        deaths=player.deaths,
        given_up=given_up,
        controller_seconds=(time.process_time() - began) / len(lags),
    )


def simulation_table(settings: Sequence[str], sweep: Sequence[str]) -> ReportTable:
    """Simulate every row of a sweep, each also with a staleness of 0."""
    rows: list[list[Cell]] = []
    for swept_row in (grid := swept(sweep)):
        chosen = [f"{name}={value}" for name, value in swept_row.items()]
        config = SimulationConfig.parse(apply_overrides({}, [*settings, *chosen]), "the simulation")
        if config.steps < _FEWEST_STEPS:
            raise ConfigError(
                f"steps = {config.steps} is too few to compare: rates leave out the first step, and one slow "
                f"tool decides about so few. Simulate at least {_FEWEST_STEPS}"
            )
        run = simulate(config)
        waiting = simulate(config.model_copy(update={"staleness": 0, "staleness_window": 1}))
        row: list[Cell] = [
            run.step_seconds,
            waiting.step_seconds / run.step_seconds,
            round(run.episodes_per_second),
            round(run.tokens_per_second),
            Share(run.engine_busy),
            Share(run.trainer_busy),
            f"{run.lag_mean:.1f} {run.lag_max}/{run.lag_bound}",
            run.deaths,
            1000 * run.controller_seconds,
        ]
        rows.append([*swept_row.values(), *row])
    return ReportTable((*grid[0], *_COLUMNS), rows)
