"""Branches: what an episode keeps so that others can go on from its turns, and how they get there.

A branch runs the agent's own loop from its beginning. Up to its turn, `generate` gives the recorded actions and
`call` the recorded results; no token is sampled again. The tools and environments are then where the other
attempt's had been, in one of two ways:

    fork     each of them had been asked for a snapshot before the turn, and restores it
    replay   the recorded calls are made again, and their results must be what they were

What does not come out the same (results, rendered tokens, the agent's calls) raises `CannotFork`, and the
attempt is played from the prompt instead. The engine's KV of the prefix is forked, and never computed again.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ludus.core.failures import CannotFork, ConfigError, InfraError
from ludus.core.messages import ToolCall, ToolContext, ToolResult, ToolSet
from ludus.core.trajectory import Branch, Segment, SegmentKind, Trajectory
from ludus.envs.env import call_env, has_snapshots
from ludus.tools.toolset import ForkingTools, is_deterministic, restore_tools, snapshot_tools

if TYPE_CHECKING:
    from ludus.rollouts.episode import Turn

log = logging.getLogger(__name__)

Results = list[tuple[ToolCall, ToolResult]]


@runtime_checkable
class HeldState(Protocol):
    """A snapshot that holds something until it is closed."""

    def close(self) -> Awaitable[None] | None:
        """Release it; may be a coroutine function."""


@dataclass(slots=True)
class WorldState:
    """The state of an episode's environments and tools at one moment, to return to any number of times."""

    envs: dict[str, Any] = field(default_factory=dict)
    tools: Any = None

    @classmethod
    async def of(cls, tools: ToolSet, context: ToolContext) -> WorldState:
        """The state now. `CannotFork` where one of them cannot tell."""
        state = cls()
        try:
            for name, env in context.envs.items():
                if not has_snapshots(env):
                    raise CannotFork("it has no snapshot", f"the environment {name!r}")
                async with context.exclusive(env):
                    state.envs[name] = await call_env(env.snapshot)
            state.tools = await snapshot_tools(tools, context)
        except BaseException:
            await state.close()
            raise
        return state

    async def restore(self, tools: ToolSet, context: ToolContext) -> None:
        """Bring another episode's environments, which have been reset, and its tools to this state."""
        for name, env in context.envs.items():
            async with context.exclusive(env):
                await call_env(env.restore, self.envs[name])
        await restore_tools(tools, self.tools, context)

    async def close(self) -> None:
        """Release what the states hold; those that hold something have `close`."""
        for state in [*self.envs.values(), *_flattened(self.tools)]:
            if isinstance(state, HeldState):
                try:
                    closing = state.close()
                    if inspect.isawaitable(closing):
                        await closing
                except Exception as error:  # noqa: BLE001 - the others are closed all the same
                    log.warning("closing the snapshot of a branch: %s", error)
        self.envs, self.tools = {}, None


def _flattened(state: Any) -> list[Any]:
    return [one for part in state for one in _flattened(part)] if isinstance(state, list) else [state]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a branch goes on: before the action `turn` of an attempt that has been played."""

    trajectory: Trajectory
    record: EpisodeRecord
    turn: int
    """At least 1, in the attempt's first sequence."""

    @property
    def segments(self) -> list[Segment]:
        """The shared segments: all before that action; all there are of one that was held."""
        segments = self.trajectory.sequences[0].segments
        places = [i for i, one in enumerate(segments) if one.kind is SegmentKind.ACTION]
        return segments[: places[self.turn]] if self.turn < len(places) else list(segments)

    @property
    def state(self) -> WorldState | None:
        """The state of tools and environments before that action; None where there is no snapshot."""
        return self.record.states.get(self.turn)


@dataclass(slots=True)
class EpisodeRecord:
    """Actions and calls of an episode, in order, and snapshots of the state before its turns."""

    origin: Origin | None = None
    takes_snapshots: bool = True
    hold: int | None = None
    """Stop before this turn, with everything observed and a snapshot taken, for others to go on from there."""
    score: float | None = None
    """Score of a held episode when it stopped; None for one that went on to its end."""
    session: str = ""
    """The engine's session, which holds the KV; kept until no attempt can branch off any more."""
    turns: list[Turn] = field(default_factory=list)
    calls: list[Results] = field(default_factory=list)
    """One entry for each time that the agent called anything."""
    called: list[int] = field(default_factory=list)
    """How many of these there were before each turn."""
    states: dict[int, WorldState] = field(default_factory=dict)
    save: Callable[[], Awaitable[WorldState]] | None = None
    _prefix: list[Segment] = field(default_factory=list)
    _was_refused: bool = False

    async def begin(self, trajectory: Trajectory, session: str) -> None:
        """Forget what was recorded, and mark the trajectory as what it will be."""
        await self.close()
        self.session, self.save, self.score = session, None, None
        self.turns, self.calls, self.called = [], [], []
        if self.origin is not None:
            self._prefix = self.origin.segments
            trajectory.branch = Branch(
                self.origin.trajectory.attempt,
                len(self._prefix),
                "replay" if self.origin.state is None else "fork",
            )
        elif self._was_refused:
            trajectory.branch = Branch(trajectory.attempt, 0, "fresh")

    def refuse(self) -> None:
        """Play the attempt from the prompt: it cannot be had as a branch."""
        self.origin, self._prefix, self._was_refused = None, [], True

    def action(self, place: int) -> Segment:
        """The shared action at that place of the first sequence."""
        return self._prefix[place]

    def is_shared(self, turn: int) -> bool:
        """Whether an action is the other attempt's."""
        return self.origin is not None and turn < self.origin.turn

    async def next_turn(self, turn: int) -> Turn | None:
        """The recorded action, or None where the model is to be asked; snapshots are taken then."""
        self.called.append(len(self.calls))
        if self.origin is not None and self.is_shared(turn):
            return self.origin.record.turns[turn]
        is_own = turn > (0 if self.origin is None else self.origin.turn)
        if is_own and self.takes_snapshots and self.save is not None:
            try:
                self.states[turn] = await self.save()
            except (CannotFork, InfraError) as error:
                log.debug("no snapshot before turn %d: %s", turn, error)
        return None

    def next_calls(self, calls: Sequence[ToolCall]) -> tuple[int, Results | None]:
        """The place of these calls among all, and their recorded results, if they have any."""
        place = len(self.calls)
        self.calls.append([])
        if self.origin is None or place >= self.origin.record.called[self.origin.turn]:
            return place, None
        recorded = self.origin.record.calls[place]
        if [call for call, _ in recorded] != list(calls):
            raise CannotFork("the agent made other calls than before", "the episode")
        return place, recorded

    @property
    def is_restored(self) -> bool:
        """Whether recorded calls need not be made again."""
        return self.origin is not None and self.origin.state is not None

    def share(self, trajectory: Trajectory) -> None:
        """After a segment was appended: take the other attempt's own object instead, which must be equal."""
        segments = trajectory.sequences[-1].segments
        place = len(segments) - 1
        if place >= len(self._prefix) or self.origin is None:
            return
        other = self._prefix[place]
        if len(trajectory.sequences) > 1 or segments[place] is not other:
            own = segments[place]
            is_same = own.tokens == other.tokens and own.media == other.media
            if len(trajectory.sequences) > 1 or not is_same:
                raise CannotFork(
                    "the conversation was rendered to other tokens than before", "the episode"
                )
            segments[place] = other
        if place == len(self._prefix) - 1:
            count = len(trajectory.messages)
            theirs = self.origin.trajectory.messages[:count]
            if trajectory.messages == theirs:
                trajectory.messages[:] = theirs  # files hold them once

    async def close(self) -> None:
        """Release the snapshots."""
        states, self.states = self.states, {}
        for state in states.values():
            await state.close()


def check_results(recorded: Results, found: Results) -> None:
    """Refuse a replay in which a call had another result than before."""
    for (call, before), (_, now) in zip(recorded, found, strict=True):
        for name in ("content", "reward", "terminated", "fault"):
            if getattr(before, name) != getattr(now, name):
                raise CannotFork(
                    f"the call {call.name!r} gave another {name} when it was made again: "
                    f"{getattr(now, name)!r:.80} instead of {getattr(before, name)!r:.80}",
                    "the episode",
                )


def check_forkable(pools: Mapping[str, Any], tools: ToolSet) -> None:
    """Refuse environments and tools that can neither be forked nor replayed (`ConfigError`)."""
    for name, pool in pools.items():
        if not (pool.has_snapshots or pool.is_deterministic):
            raise ConfigError(
                f"rl.tree: the environment {name!r} ({pool.made_by}) can neither be forked nor replayed: give "
                "its class `snapshot` and `restore`, or, if the same calls always have the same results, "
                f"deterministic = True (in a recipe: agent.pools.{name}.deterministic = true)"
            )
    if not (isinstance(tools, ForkingTools) or is_deterministic(tools)):
        raise ConfigError(
            f"rl.tree: the tools ({type(tools).__name__}) can neither be forked nor replayed: give the tool "
            "set `snapshot(context)` and `restore(state, context)`, or deterministic = True"
        )
