"""Where a step's time went."""

from __future__ import annotations

from collections.abc import Sequence

from ludus.core.trajectory import Group


def timing_metrics(groups: Sequence[Group], playing: float, training: float) -> dict[str, float]:
    """Shares of the step. While playing, a phase's share is its share of the episodes' time."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    total = sum(t.seconds.get("total", 0.0) for t in trajectories) or 1.0
    step = playing + training
    names = {"generation": "generate", "tools": "tools", "rewards": "rewards"}
    shares = {
        f"time_share/{name}": playing
        / step
        * sum(t.seconds.get(phase, 0.0) for t in trajectories)
        / total
        for name, phase in names.items()
    }
    said = sum(len(action.tokens) for t in trajectories for action in t.actions)
    return shares | {
        "time_share/training": training / step,
        "tokens_per_second": said / step,
        "episodes_per_second": len(trajectories) / step,
        "step_seconds": step,
    }
