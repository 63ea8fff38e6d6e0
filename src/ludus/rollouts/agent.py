"""The agent loop: who speaks next, and when it is over.

Write your own by subclassing `Agent`: `run` is a coroutine over `episode.generate`, `episode.call` and
`episode.observe`. It never sees tokens, masks or budgets; `generate` ends the episode when a budget is used
up, so a loop needs no exit of its own for that.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

from ludus.core.messages import ToolCall
from ludus.core.task import Task
from ludus.rollouts.episode import Episode


class Agent:
    """The default loop: speak, run what was called, read the results, until there is an answer."""

    async def run(self, episode: Episode) -> None:
        while not episode.over:
            turn = await episode.generate()
            if turn.calls:
                episode.observe(await episode.call(turn.calls))
            else:
                episode.answer(turn.answer)


# --- demonstrator ---
# Experts as plain generators: yield a call and be sent its result; yield a text to answer.

Expert = Callable[[Task], Generator[ToolCall | str, str, None]]


class Demonstrator(Agent):
    """Plays an expert through a real episode, so that its demonstrations are ordinary trajectories.

    The agent's own loop decides what is asked and when, as it does for the model: the expert answers each
    `generate`, and is sent what was read since the last one.
    """

    def __init__(self, expert: Expert, loop: Agent | None = None) -> None:
        self.expert = expert
        self.loop = loop or Agent()

    async def run(self, episode: Episode) -> None:
        moves = self.expert(episode.task)
        begun = False

        def speak(read: str) -> ToolCall | str | None:
            nonlocal begun
            try:
                move = moves.send(read) if begun else next(moves)
            except StopIteration:
                return None
            begun = True
            return move

        episode.speaker = speak
        try:
            await self.loop.run(episode)
        finally:
            moves.close()
