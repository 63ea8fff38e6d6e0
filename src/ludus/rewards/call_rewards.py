"""Rewards that compare the calls of an episode with those that were expected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ludus.core.messages import ToolCall
from ludus.core.trajectory import Trajectory
from ludus.rewards.reward import reward


@reward
def expected_calls(trajectory: Trajectory, target: Any) -> float:
    """1 if the calls are those of the target, `[{"name": ..., "arguments": {...}}]`, in order and no others."""
    return float([_key(call) for call in trajectory.calls] == calls_of(target))


def calls_of(target: Any) -> list[tuple[str, Any]]:
    """The calls of a target, to compare; a `ValueError` says what is wrong with it."""
    if not isinstance(target, Sequence) or isinstance(target, str):
        raise ValueError(f'the target is a list of {{"name", "arguments"}}, not {target!r:.80}')
    found = []
    for one in target:
        if not isinstance(one, Mapping) or not isinstance(one.get("name"), str):
            raise ValueError(
                f'a call of the target is {{"name": ..., "arguments": ...}}, not {one!r:.80}'
            )
        found.append((one["name"], _plain(one.get("arguments") or {})))
    return found


def _key(call: ToolCall) -> tuple[str, Any]:
    return call.name, _plain(call.arguments)


def _plain(value: Any) -> Any:
    """Arguments as values that compare as JSON does: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return ("boolean", value) if isinstance(value, bool) else value
