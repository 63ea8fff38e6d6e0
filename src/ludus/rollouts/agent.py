"""The agent loop: who speaks next, and when it is over.

Write your own by subclassing `Agent`: `run` is a coroutine over `episode.generate`, `episode.call` and
`episode.observe`. It never sees tokens, masks or budgets; `generate` ends the episode when a budget is used
up, so a loop needs no exit of its own for that.
"""

from __future__ import annotations

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
