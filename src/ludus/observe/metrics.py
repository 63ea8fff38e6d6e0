"""From a batch of groups to numbers. Pure; what each number means is written in `catalogue`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from ludus.core.failures import Boundary, Fault
from ludus.core.trajectory import Group, SegmentKind, StopReason, Trajectory, is_success

Success = Callable[[Trajectory], bool]

_ENDINGS = tuple(
    reason for reason in StopReason if reason not in (StopReason.FAILED, StopReason.ABORTED)
)


def rollout_metrics(groups: Sequence[Group], success: Success = is_success) -> dict[str, float]:
    """The numbers of a batch. A mean over nothing is left out, so that nobody reads it as zero."""
    played = [trajectory for group in groups for trajectory in group.trajectories]
    scored = [trajectory for trajectory in played if trajectory.is_trainable]
    metrics: dict[str, float] = {"episodes": len(played), "episodes_scored": len(scored)}
    if scored:
        metrics |= reward_metrics(scored, success)
        metrics |= _conduct(scored)
        metrics |= _tokens(scored)
        metrics |= _seconds(scored)
    if groups:
        metrics["groups_without_signal"] = _mean(not has_signal(group) for group in groups)
    return metrics | failure_metrics(played)


def reward_metrics(scored: Sequence[Trajectory], success: Success = is_success) -> dict[str, float]:
    """The total, its spread, its parts, and success."""
    totals = [trajectory.reward for trajectory in scored if trajectory.reward is not None]
    parts: dict[str, list[float]] = {}
    for trajectory in scored:
        for name, value in trajectory.rewards.items():
            parts.setdefault(name, []).append(value)
    mean = _mean(totals)
    return {
        "reward": mean,
        "reward_std": _mean((total - mean) ** 2 for total in totals) ** 0.5,
        "success": _mean(success(trajectory) for trajectory in scored),
        **{f"reward/{name}": _mean(parts[name]) for name in sorted(parts)},
    }


def failure_metrics(played: Sequence[Trajectory]) -> dict[str, float]:
    """What was lost, and where: the only numbers that failed episodes take part in."""
    boundaries = Counter(t.failure.boundary for t in played if t.failure is not None)
    healthy = [t for t in played if t.failure is None]
    aborted = sum(t.stop is StopReason.ABORTED for t in healthy)
    metrics: dict[str, float] = {
        "failures": boundaries.total(),
        **{f"failure/{boundary.value}": boundaries[boundary] for boundary in Boundary},
        "aborted": aborted,
        "unscored": sum(t.reward is None for t in healthy if t.stop is not StopReason.ABORTED),
    }
    if played:
        metrics["failure_share"] = boundaries.total() / len(played)
    return metrics


def has_signal(group: Group) -> bool:
    """Whether two scored attempts differ in reward, so that a group baseline tells them apart."""
    return len({trajectory.reward for trajectory in group.trainable}) > 1


def _conduct(scored: Sequence[Trajectory]) -> dict[str, float]:
    """Turns, calls, faults, endings."""
    faults = Counter(fault for trajectory in scored for fault in trajectory.faults)
    # A call that could not even be parsed may have left a fault and no call: it was an attempt at one.
    calls = sum(max(len(a.calls), len(a.faults)) for trajectory in scored for a in trajectory.actions)
    stops = Counter(trajectory.stop for trajectory in scored)
    count = len(scored)
    return {
        "turns": _mean(trajectory.turns for trajectory in scored),
        "tool_calls": calls / count,
        "invalid_calls": faults.total() / count,
        "invalid_call_share": faults.total() / calls if calls else 0.0,
        **{f"fault/{fault.value}": faults[fault] / count for fault in Fault},
        **{f"fault_share/{fault.value}": faults[fault] / calls if calls else 0.0 for fault in Fault},
        **{f"stop/{reason.value}": stops[reason] / count for reason in _ENDINGS},
        "truncated": _mean(trajectory.stop.is_truncated for trajectory in scored),
    }


def _tokens(scored: Sequence[Trajectory]) -> dict[str, float]:
    totals: Counter[SegmentKind] = Counter()
    for trajectory in scored:
        for sequence in trajectory.sequences:
            for segment in sequence.segments:
                totals[segment.kind] += len(segment.tokens)
    return {f"tokens/{kind.value}": totals[kind] / len(scored) for kind in SegmentKind}


def _seconds(scored: Sequence[Trajectory]) -> dict[str, float]:
    phases: dict[str, list[float]] = {}
    for trajectory in scored:
        for phase, seconds in trajectory.seconds.items():
            phases.setdefault(phase, []).append(seconds)
    return {f"seconds/{phase}": _mean(phases[phase]) for phase in sorted(phases)}


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)
