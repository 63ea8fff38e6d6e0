"""What a method of synthesis gives back: examples that were kept, others with the reason, and what it cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ludus.core.chat import ChatModel, ChatOptions, ChatReply
from ludus.core.messages import Json, Message
from ludus.core.trajectory import Trajectory
from ludus.observe import ReportTable

PROVENANCE = "synth"
"""The key of a task's metadata under which an example says how it was made."""


@dataclass(slots=True)
class Cost:
    """What was spent: on episodes, and on calls of language models that judge or write."""

    episodes: int = 0
    sampled_tokens: int = 0
    tool_calls: int = 0
    episode_seconds: float = 0.0
    """The time of all episodes, one after the other; many are played at once."""
    model_calls: int = 0
    """Calls of language models; those answered from a cache are counted apart, and cost nothing."""
    cached_calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, other: Cost) -> None:
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))

    def add_episodes(self, trajectories: Sequence[Trajectory]) -> None:
        """Count what these have sampled and called; what a branch shares is another's."""
        for one in trajectories:
            actions = [segment for segment in one.own_segments if segment.logprobs is not None]
            self.episodes += 1
            self.sampled_tokens += sum(len(action.tokens) for action in actions)
            self.tool_calls += sum(len(action.calls) for action in actions)
            self.episode_seconds += one.seconds.get("total", 0.0)

    def as_json(self) -> Json:
        return {one.name: getattr(self, one.name) for one in fields(self)}


def nothing_kept_hint(reasons: Mapping[str, int]) -> str | None:
    """What to say where nothing was kept, and a limit is what most examples did not meet."""
    if not reasons:
        return None
    most = max(reasons, key=lambda reason: reasons[reason])
    setting = _LIMITS.get(most)
    if setting is None:
        return None
    counted = f"{reasons[most]} were {most.replace('_', ' ')}"
    return f"nothing was kept: {counted}. {setting} may be what this data needs"


_LIMITS = {
    "too_short": "min_turns = 1 (synth.min_turns=1 on the command line of ludus synth)",
    "too_long": "a larger max_turns",
    "too_many_calls": "a larger max_calls",
    "wasteful": "a larger max_useless or max_detour",
    "low_quality": "a lower min_quality, or needs_thought = false for a model that does not think aloud",
}

current_cost: ContextVar[Cost | None] = ContextVar("current_cost", default=None)
"""Where the calls of language models are counted: the cost of the item that is being made."""


class MeteredModel:
    """A language model whose calls are counted."""

    def __init__(self, inner: ChatModel) -> None:
        self._inner = inner

    @property
    def name(self) -> str:
        return self._inner.name

    async def chat(self, messages: Sequence[Message], options: ChatOptions | None = None) -> ChatReply:
        reply = await self._inner.chat(messages, options or ChatOptions())
        cost = current_cost.get()
        if cost is not None and reply.is_cached:
            cost.cached_calls += 1
        elif cost is not None:
            cost.model_calls += 1
            cost.prompt_tokens += reply.prompt_tokens
            cost.completion_tokens += reply.completion_tokens
        return reply

    async def close(self) -> None:
        await self._inner.close()


@dataclass(frozen=True, slots=True)
class Rejected:
    """A candidate that was left out. `reason` is a short name that reports count by; `detail`, the facts."""

    trajectory: Trajectory
    reason: str
    detail: str = ""


@dataclass(slots=True)
class SynthResult:
    """The examples of a method."""

    kept: list[Trajectory] = field(default_factory=list)
    """To be learned from, each with how it was made in its task's metadata (`provenance_of`)."""
    rejected: list[Rejected] = field(default_factory=list)
    pairs: list[tuple[Trajectory, Trajectory]] = field(default_factory=list)
    """(better, worse) episodes at one task, for preference losses."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Further numbers of the report, by name."""
    tables: list[ReportTable] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def reasons(self) -> Counter[str]:
        return Counter(one.reason for one in self.rejected)

    @property
    def candidates(self) -> int:
        return len(self.kept) + len(self.rejected)

    @property
    def yielded(self) -> float:
        """The share of candidates that was kept."""
        return len(self.kept) / max(1, self.candidates)


def provenance_of(trajectory: Trajectory) -> Mapping[str, Any]:
    """How an example was made; nothing for an episode that was only played."""
    found = trajectory.task.metadata.get(PROVENANCE, {})
    return found if isinstance(found, Mapping) else {}


def with_provenance(trajectory: Trajectory, **facts: Any) -> Trajectory:
    """The same episode, whose task's metadata says how it was made."""
    task = trajectory.task
    told = {**provenance_of(trajectory), **facts}
    return replace(trajectory, task=replace(task, metadata={**task.metadata, PROVENANCE: told}))
