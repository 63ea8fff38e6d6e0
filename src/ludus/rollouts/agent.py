"""The agent loop: generate an action, run its tool calls, observe the results, until there is an answer.

Write your own by subclassing `Agent`: `run` is a coroutine over `episode.generate`, `episode.call` and
`episode.observe`. It never sees tokens, masks or budgets; `generate` ends the episode when a budget is used
up, so a loop needs no exit of its own for that.
"""

from __future__ import annotations

import contextlib

from ludus.core.messages import ToolCall
from ludus.envs.world import Expert as Expert
from ludus.rollouts.episode import Episode


class Agent:
    """The default loop."""

    async def run(self, episode: Episode) -> None:
        while not episode.over:
            turn = await episode.generate()
            if turn.calls:
                episode.observe(await episode.call(turn.calls))
            else:
                episode.answer(turn.answer)


class RetrieveThenAnswer(Agent):
    """Naive RAG, a baseline: one search with the question as it is, then an answer from what was found.

    The question is the task's metadata `question`, or else its last message. The model's own calls are not run.
    """

    tool = "search"

    async def run(self, episode: Episode) -> None:
        question = episode.task.metadata.get("question", episode.task.messages[-1].content)
        ((_, result),) = await episode.call([ToolCall(self.tool, {"query": question})])
        episode.observe(f"What a search for the question has found:\n{result.content}\nAnswer now.")
        episode.answer((await episode.generate()).answer)


class Demonstrator(Agent):
    """Plays an expert through a real episode, so that its demonstrations are ordinary trajectories.

    The agent's own loop runs as it does for the model: the expert acts at each `generate`, and is sent what was
    observed since the last one.
    """

    def __init__(self, expert: Expert, loop: Agent | None = None) -> None:
        self.expert = expert
        self.loop = loop or Agent()

    async def run(self, episode: Episode) -> None:
        episode.expert = self.expert(episode.task)
        try:
            await self.loop.run(episode)
        finally:
            with contextlib.suppress(ValueError):  # cut off while it thinks, in a thread of its own
                episode.expert.close()
