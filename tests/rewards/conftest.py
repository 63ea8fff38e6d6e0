"""Episodes made by hand, and nothing else: rewards need no engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ludus.core import (
    Boundary,
    Failure,
    Fault,
    Message,
    Segment,
    SegmentKind,
    StopReason,
    Task,
    TokenSequence,
    ToolCall,
    Trajectory,
)

Episode = Callable[..., Trajectory]


@pytest.fixture
def episode() -> Episode:
    """A maker of episodes: `turns` gives each action's calls by tool name, `paid` the tools' rewards."""

    def make(
        answer: str | None = "Paris",
        target: Any = "Paris",
        *,
        turns: Sequence[Sequence[str]] = ((),),
        paid: Sequence[float | None] | None = None,
        faults: Sequence[Sequence[Fault]] | None = None,
        tokens: int = 3,
        reward: float | None = None,
        failed: bool = False,
        stop: StopReason = StopReason.ANSWERED,
    ) -> Trajectory:
        task = Task.of("Capital of France?", target, id="t")
        segments = [Segment(SegmentKind.PROMPT, [1, 2])]
        messages = list(task.messages)
        for i, names in enumerate(turns):
            calls = tuple(ToolCall(name) for name in names)
            segments.append(
                Segment(
                    SegmentKind.ACTION,
                    [5] * tokens,
                    logprobs=[-0.5] * tokens,
                    calls=calls,
                    reward=paid[i] if paid else None,
                    faults=tuple(faults[i]) if faults else (),
                )
            )
            last = i == len(turns) - 1
            messages.append(Message("assistant", (answer or "") if last else "calling", calls))
        failure = Failure(Boundary.SERVER, "ConnectionError", "down") if failed else None
        return Trajectory(
            task, [TokenSequence(segments)], messages, answer, stop, failure, reward=reward
        )

    return make
