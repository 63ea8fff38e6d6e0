"""Two agents of one's own: one that plans before it acts, and one that checks its answer and tries again.

An agent is a coroutine over four verbs: `generate` (the model speaks), `call` (its tools run), `observe` (it
reads something before it speaks next) and `answer` (the episode is over). Tokens, masks and budgets are not
its business: everything the model says, the plan and the reflection included, is recorded and trained.

In a recipe:

    [agent]
    loop = "examples/agents.py:PlanThenAct"
"""

from __future__ import annotations

from ludus import Agent
from ludus.rollouts import Episode, Turn


class PlanThenAct(Agent):
    """Writes a plan first, with nothing run, and then follows it with tools."""

    ask = "Before you do anything, write a short plan. Do not call a tool yet."
    begin = "Good. Now follow your plan, step by step."

    async def run(self, episode: Episode) -> None:
        episode.observe(self.ask)
        await episode.generate(max_tokens=128)  # a call in the plan is not run: it was not asked for
        episode.observe(self.begin)
        await super().run(episode)


class ReflectAndRetry(Agent):
    """Acts until it has an answer, then asks itself whether that holds, and tries again if it does not."""

    ask = "Is this answer right? Reply with YES, or say what is wrong with it."
    again = "Then try again, and avoid that mistake."

    def __init__(self, tries: int = 3) -> None:
        self.tries = tries

    async def run(self, episode: Episode) -> None:
        turn = await self.act(episode)
        for _ in range(self.tries - 1):
            # with one turn left, doubting the answer would leave none to give another
            if episode.turns_left < 2 or await self.approves(episode):
                break
            episode.observe(self.again)
            turn = await self.act(episode)
        episode.answer(turn.answer)

    async def act(self, episode: Episode) -> Turn:
        """Turns with tool calls, up to one without. An episode that ends meanwhile leaves by an exception."""
        turn = await episode.generate()
        while turn.calls:
            episode.observe(await episode.call(turn.calls))
            turn = await episode.generate()
        return turn

    async def approves(self, episode: Episode) -> bool:
        """What the model thinks of its own answer."""
        episode.observe(self.ask)
        return (await episode.generate(max_tokens=128)).text.strip().upper().startswith("YES")
