"""Why the rewards of a step taught nothing, as far as its numbers tell, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SOLVED = 0.98
"""From this success on, attempts that are all alike are good news."""


@dataclass(frozen=True, slots=True)
class Silence:
    """The likely reason, and the advice."""

    likely: str
    advice: str
    is_solved: bool = False


def explain_silence(row: Mapping[str, float]) -> Silence:
    """From a step's success, reward and spread of rewards, or their means over several."""
    success, reward, spread = row.get("success"), row.get("reward"), row.get("reward_std")
    if success is not None and success >= SOLVED:
        return Silence(
            "the tasks are solved, or were too easy from the start",
            "go on with harder tasks, or let the run end here (evaluation.patience)",
            is_solved=True,
        )
    if spread == 0 and success == 0 and not reward:
        return Silence(
            "the tasks are too hard, or no answer has the form that the reward looks for",
            "try a warm start, easier tasks or a curriculum, a reward with partial credit, more rl.attempts, "
            "or rl.refill",
        )
    if spread == 0:
        return Silence(
            "the reward pays every episode the same",
            "look at what it pays for (ludus check reward), and give partial credit",
        )
    return Silence(
        "the attempts at each task do the same (the policy is almost deterministic, look at entropy), or the "
        "rewards do not tell them apart",
        "try more rl.attempts, rl.refill, a higher sampling.temperature, or a reward with partial credit",
    )
