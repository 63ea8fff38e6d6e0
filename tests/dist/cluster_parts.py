"""Parts of a run that a recipe names by reference, so that other nodes can build them."""

from __future__ import annotations

import os

import ludus


@ludus.tool
async def greet() -> str:
    """Say hello."""
    return "hello"


class Counter(ludus.Env):
    """Counts calls: state that is lost with its process."""

    async def reset(self, task: ludus.Task) -> str:
        self.count = 0
        return "zero"

    @ludus.tool
    async def up(self) -> str:
        """Count one up."""
        self.count += 1
        return str(self.count)


@ludus.reward
def scored(trajectory: ludus.Trajectory) -> dict[str, float]:
    """The share of even tokens, and in which process that was counted."""
    said = [token for action in trajectory.actions for token in action.tokens]
    return {
        "reward": sum(token % 2 == 0 for token in said) / len(said),
        "scorer": float(os.getpid()),
    }


@ludus.reward
def counted(env: Counter) -> float:
    """Reads the environment, so that it stays where the episode is."""
    return env.count / 10


class Caller(ludus.Agent):
    """Samples, and calls the tool and the environment itself: three turns with state between them."""

    async def run(self, episode: ludus.Episode) -> None:
        for _ in range(3):
            await episode.generate()
            calls = [ludus.ToolCall("greet", {}), ludus.ToolCall("up", {})]
            episode.observe(await episode.call(calls))


def some_tasks() -> list[ludus.Task]:
    return [ludus.Task.of(f"{n}?", id=str(n)) for n in range(6)]
