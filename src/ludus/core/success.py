"""What "success" means, for metrics and for checks."""

from __future__ import annotations

from ludus.core.trajectory import Trajectory

SUCCESS = "success"
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
