"""The record of an episode: the very tokens the model read and wrote.

A worked example. The task asks for 2+3, the model calls a tool, reads the result, and answers::

    segment      tokens                       action_mask   logprobs
    prompt       [BOS, what, is, 2, +, 3]     0 0 0 0 0 0   0 0 0 0 0 0
    action       [<call>, 2+3, </call>]       1 1 1         -0.1 -0.7 -0.0
    observation  [<result>, 5, </result>]     0 0 0         0 0 0
    action       [five, EOS]                  1 1           -0.2 -0.1

The model is trained on the five tokens whose mask is 1: those it sampled. The prompt and the tool's
results are never training targets. An end-of-turn token that we add after a cut belongs to
the observation, because the model did not sample it. Tokens are kept as sampled: nothing here is ever
decoded and encoded again, and every derived view below is computed, never stored twice.

With rewards 1 for this attempt and 0 for the other one of its group, GRPO gives each of the five action
tokens the advantage +0.71 and each action token of the other attempt -0.71; observations get none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import takewhile
from typing import Any, Literal, Protocol, runtime_checkable

from ludus.core.failures import Failure, Fault
from ludus.core.generation import FinishReason, VersionSpan
from ludus.core.messages import Json, Media, MediaSpan, Message, ToolCall
from ludus.core.task import Task


class SegmentKind(StrEnum):
    """Origin of a segment's tokens: the task, the model, or the environment and tools."""

    PROMPT = "prompt"
    ACTION = "action"
    OBSERVATION = "observation"


class StopReason(StrEnum):
    """How an episode ended."""

    ANSWERED = "answered"
    TERMINATED = "terminated"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    MAX_SECONDS = "max_seconds"
    FAILED = "failed"
    ABORTED = "aborted"

    @property
    def is_truncated(self) -> bool:
        """Whether a budget ran out, as against an ending of the episode's own."""
        return self in (StopReason.MAX_TURNS, StopReason.MAX_TOKENS, StopReason.MAX_SECONDS)


@dataclass(slots=True)
class Segment:
    """A run of tokens with one origin. The fields below `tokens` are for actions only."""

    kind: SegmentKind
    tokens: list[int]
    logprobs: list[float] | None = None
    versions: tuple[VersionSpan, ...] = ()
    finish: FinishReason | None = None
    calls: tuple[ToolCall, ...] = ()
    faults: tuple[Fault, ...] = ()
    faulted: tuple[str, ...] = ()
    """The names of the tools whose calls were answered by these faults, one for each."""
    reward: float | None = None
    """The turn's own reward; None when it was not scored, which is not zero."""
    seconds: float = 0.0
    media: tuple[MediaSpan, ...] = ()
    """Which of the tokens stand for pictures: of prompts and observations, never of actions."""
    advantages: list[float] | None = field(default=None, compare=False)
    """One for each token, as a step of RL has used them; None where it was not trained on, or not yet."""
    entropies: list[float] | None = field(default=None, compare=False)
    """The policy's entropy at each token, as the trainer found it when it first learned from the token."""

    def __post_init__(self) -> None:
        if self.kind is SegmentKind.ACTION:
            if self.logprobs is None or len(self.logprobs) != len(self.tokens):
                raise ValueError("an action needs one log-probability for each of its tokens")
        elif self.logprobs is not None:
            raise ValueError(f"a segment of kind {self.kind} has no log-probabilities")


def media_spans(segments: Iterable[Segment]) -> list[MediaSpan]:
    """Where pictures stand in these segments, laid end to end."""
    spans: list[MediaSpan] = []
    start = 0
    for segment in segments:
        spans += [span.moved(start) for span in segment.media]
        start += len(segment.tokens)
    return spans


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """One activity of an episode. `start` counts from the beginning of the episode, in seconds."""

    kind: Literal["environment", "queue", "generate", "tool", "reward", "failure"]
    """`queue` is a request that waits for the engine, or a call for its tool; `failure` a try that was lost."""
    start: float
    seconds: float
    name: str = ""
    """Name of the tool; for a failure, its boundary and text."""
    turn: int | None = None


_SHORTEST_WAIT = 1e-3
"""Shortest queue time, in seconds, that is recorded as a span of its own."""


def spans_of(
    kind: Literal["generate", "tool"],
    start: float,
    seconds: float,
    queued: float,
    turn: int,
    name: str = "",
) -> list[TimeSpan]:
    """Spans of one activity: the wait in a queue, if it was long enough to count, then the activity."""
    if queued < _SHORTEST_WAIT:
        return [TimeSpan(kind, start, seconds, name, turn)]
    done = TimeSpan(kind, start + queued, seconds - queued, name, turn)
    return [TimeSpan("queue", start, queued, name, turn), done]


@dataclass(frozen=True, slots=True)
class EnvRender:
    """A render of an environment before turn `turn`, for people: text or an image."""

    turn: int
    env: str
    text: str = ""
    picture: Media | None = None


@dataclass(slots=True)
class TokenSequence:
    """One training row: segments in order. `parent` = (sequence, segment) shares a prefix, inclusive."""

    segments: list[Segment] = field(default_factory=list)
    parent: tuple[int, int] | None = None

    @property
    def tokens(self) -> list[int]:
        return [token for segment in self.segments for token in segment.tokens]

    @property
    def action_mask(self) -> list[bool]:
        return [segment.kind is SegmentKind.ACTION for segment in self.segments for _ in segment.tokens]

    @property
    def logprobs(self) -> list[float]:
        """One per token; zero where the model did not sample it."""
        return [
            value
            for segment in self.segments
            for value in (segment.logprobs or [0.0] * len(segment.tokens))
        ]

    @property
    def media(self) -> list[MediaSpan]:
        """Where pictures stand, counted from the first token."""
        return media_spans(self.segments)

    @property
    def actions(self) -> Iterator[Segment]:
        return (segment for segment in self.segments if segment.kind is SegmentKind.ACTION)

    def __len__(self) -> int:
        return sum(len(segment.tokens) for segment in self.segments)


@dataclass(frozen=True, slots=True)
class Branch:
    """Where a branch of a tree goes on: behind the first `segments` segments of another attempt of its group.

    These segments are the other's own objects, in memory and after reading a file, so that code that counts
    or trains segments finds the shared ones by identity.
    """

    attempt: int
    segments: int
    """Number of shared segments of the first sequence; the next one is an action."""
    state: Literal["fork", "replay", "fresh"] = "fork"
    """How the tools and environments came to be where the other's had been: from a snapshot, by the same calls
    again, or not at all, so that the attempt began anew and shares nothing (`segments` is 0)."""


@dataclass(slots=True)
class Trajectory:
    """One episode. The common case is a single sequence.

    `tokens`, `action_mask` and `logprobs` are those of the first sequence; `actions`, `turns`, `calls` and
    `faults` are those of all.
    """

    task: Task
    sequences: list[TokenSequence] = field(default_factory=lambda: [TokenSequence()])
    messages: list[Message] = field(default_factory=list)
    answer: str | None = None
    stop: StopReason = StopReason.ABORTED
    failure: Failure | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    reward: float | None = None
    """The total that is trained on; None until scored, and for ever when the episode failed."""
    attempt: int = 0
    seed: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """Where the time went: generate, tools, rewards (execution: the part in which the answer's own code or
    query ran), total. A branch's own, without its prefix."""
    counts: dict[str, float] = field(default_factory=dict)
    """The agent's own counters by name of the metric: an agent behind the model server counts restarts."""
    branch: Branch | None = None
    """Where it branched off another attempt; None for an attempt that began at the prompt."""
    spans: list[TimeSpan] = field(default_factory=list, compare=False)
    """Timeline of the episode's activities. A branch's own, without its prefix."""
    renders: list[EnvRender] = field(default_factory=list, compare=False)
    """Renders of its environments, where they are recorded (`run.renders`)."""

    @property
    def tokens(self) -> list[int]:
        return self.sequences[0].tokens

    @property
    def action_mask(self) -> list[bool]:
        return self.sequences[0].action_mask

    @property
    def logprobs(self) -> list[float]:
        return self.sequences[0].logprobs

    @property
    def actions(self) -> list[Segment]:
        return [segment for sequence in self.sequences for segment in sequence.actions]

    @property
    def asked(self) -> list[Message]:
        """The prompt: the task's messages, of any role, up to the model's first action."""
        given = self.task.messages
        begins = [m.role for m in self.messages[: len(given)]] == [m.role for m in given]
        start = len(given) if begins else 0  # environments may have added to the text of the last one
        more = takewhile(lambda message: message.role != "assistant", self.messages[start:])
        return [*self.messages[:start], *more]

    @property
    def own_segments(self) -> list[Segment]:
        """All segments but those that a branch shares with the attempt that it branched off."""
        segments = [segment for sequence in self.sequences for segment in sequence.segments]
        return segments if self.branch is None else segments[self.branch.segments :]

    @property
    def turns(self) -> int:
        return len(self.actions)

    @property
    def calls(self) -> list[ToolCall]:
        return [call for action in self.actions for call in action.calls]

    @property
    def faults(self) -> list[Fault]:
        return [fault for action in self.actions for fault in action.faults]

    @property
    def is_trainable(self) -> bool:
        """Whether it belongs in the loss and the baseline: it was scored, and no infrastructure failed."""
        return self.failure is None and self.stop is not StopReason.ABORTED and self.reward is not None


@dataclass(slots=True)
class Group:
    """The attempts at one task. Baselines are taken over `trainable` alone."""

    task: Task
    trajectories: list[Trajectory]

    @property
    def trainable(self) -> list[Trajectory]:
        return [trajectory for trajectory in self.trajectories if trajectory.is_trainable]


SUCCESS = "success"
TURN_CUT = "turn_cut"
"""In `Trajectory.counts`: `budgets.max_turn_tokens` ended the episode, whose stop reason is `max_tokens`."""
_CLOSE = 1e-9


def is_success(trajectory: Trajectory, threshold: float = 1.0) -> bool:
    """Whether the episode succeeded.

    A part called "success" decides where there is one: at least 1 is a success. Otherwise the total
    decides: at least `threshold`. Give a reward the name "success" when bonuses or group rewards could
    lift a failure over the threshold. An episode that was not scored is no success, and no failure of
    the model either: leave it out of rates (`Trajectory.is_trainable`).
    """
    if not trajectory.is_trainable or trajectory.reward is None:
        return False
    if SUCCESS in trajectory.rewards:
        return trajectory.rewards[SUCCESS] >= 1.0 - _CLOSE
    return trajectory.reward >= threshold - _CLOSE


def is_lost(trajectory: Trajectory) -> bool:
    """True after an infrastructure failure or an abort; False if rewards returned None."""
    return trajectory.failure is not None or trajectory.stop is StopReason.ABORTED


@runtime_checkable
class Reward(Protocol):
    """Scores one episode. A reward may read the episode's environments before they are released."""

    @property
    def name(self) -> str: ...

    async def score(
        self, trajectory: Trajectory, task: Task, envs: Mapping[str, Any]
    ) -> dict[str, float]:
        """Parts by name; the part called like the reward itself is the one that counts."""


@runtime_checkable
class GroupReward(Protocol):
    """Scores all attempts at a task together."""

    @property
    def name(self) -> str: ...

    async def score_group(self, group: Group) -> list[float]:
        """One number for each trajectory of the group."""


# The execution log of tool calls: one record for each call that an episode makes, failed or not.

Legality = Literal["legal", "malformed", "unknown_tool", "bad_arguments", "not_run"]

_ILLEGAL: dict[Fault, Legality] = {
    Fault.MALFORMED_CALL: "malformed",
    Fault.UNKNOWN_TOOL: "unknown_tool",
    Fault.BAD_ARGUMENTS: "bad_arguments",
}


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """One call: who made it, what was on offer, what was asked, and what came of it."""

    episode: str
    task: str
    attempt: int
    turn: int
    """Actions of the episode up to and including the one that made the call."""
    call: str
    tool: str
    arguments: Json
    offered: tuple[str, ...]
    """The tools on offer when the call was made."""
    legality: Legality
    """Whether it was a call of a tool on offer with arguments that its schema allows."""
    seconds: float
    fault: Fault | None = None
    failure: str | None = None
    """The infrastructure failure, if one prevented a result."""
    chars: int = 0
    """Length of the result, before the episode's budget cuts it."""
    media: int = 0


Audit = Callable[[AuditRecord], None]


def legality_of(fault: Fault | None, *, was_run: bool = True) -> Legality:
    """Whether a call was legal, by the fault it was answered with."""
    if not was_run:
        return "not_run"
    return _ILLEGAL.get(fault, "legal") if fault is not None else "legal"
