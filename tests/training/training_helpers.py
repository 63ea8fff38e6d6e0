"""A whole run in miniature: a tool, a reward, tasks, a model of a few thousand weights."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import ludus


@ludus.tool
async def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


@ludus.reward
async def even(trajectory: ludus.Trajectory) -> float:
    """The share of tokens with an even number: something that even a random model differs in."""
    said = [token for action in trajectory.actions for token in action.tokens]
    return sum(token % 2 == 0 for token in said) / len(said)


def expert(task: ludus.Task) -> Generator[ludus.ToolCall | str, str, None]:
    """Add, then say what came out."""
    heard = yield ludus.ToolCall("add", {"a": task.metadata["a"], "b": task.metadata["b"]})
    yield heard


def tasks(count: int, first: int = 0) -> list[ludus.Task]:
    return [
        ludus.Task.of(f"{n} plus {n + 1}?", target=str(2 * n + 1), id=str(n), a=n, b=n + 1)
        for n in range(first, first + count)
    ]


class Chatty(ludus.Agent):
    """Says three things, whatever they are, and hears something after each: several turns for sure."""

    async def run(self, episode: ludus.Episode) -> None:
        for _ in range(3):
            turn = await episode.generate()
            episode.observe(await episode.call(turn.calls))
            episode.observe("and then?")


TINY: dict[str, Any] = {
    "name": "tiny",
    "threads": 1,
    "model": {"scratch": {"layers": 1, "width": 32, "heads": 2, "kv_heads": 1, "vocabulary": 400}},
    "budgets": {"max_turns": 3, "max_turn_tokens": 16, "max_tokens": 1024},
    "engine": {"cache_tokens": 8192, "max_running": 16, "tokens_per_step": 512},
    "rl": {"steps": 3, "tasks": 2, "attempts": 3, "optimizer": {"learning_rate": 1e-3}},
    "run": {"checkpoint_every": 1, "keep_checkpoints": 50},
}
