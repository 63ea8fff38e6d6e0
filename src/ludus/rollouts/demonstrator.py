"""Experts as plain generators: yield a call and be sent its result; yield a text to answer."""

from __future__ import annotations

from collections.abc import Callable, Generator

from ludus.core.failures import ConfigError
from ludus.core.messages import ToolCall
from ludus.core.task import Task
from ludus.rollouts.agent import Agent
from ludus.rollouts.episode import Episode

Expert = Callable[[Task], Generator[ToolCall | str, str, None]]


class Demonstrator(Agent):
    """Plays an expert through a real episode, so that its demonstrations are ordinary trajectories."""

    def __init__(self, expert: Expert) -> None:
        self.expert = expert

    async def run(self, episode: Episode) -> None:
        moves = self.expert(episode.task)
        move = next(moves, None)
        while move is not None and not episode.over:
            if isinstance(move, str):
                episode.demonstrate(move)
                episode.answer(move)
                break
            turn = episode.demonstrate(calls=[move])
            if not turn.calls:
                raise ConfigError(
                    f"the expert calls {move.name!r}, which the action format has no way to write; choose "
                    "another format, or tell it about that tool"
                )
            results = await episode.call(turn.calls)
            episode.observe(results)
            try:
                move = moves.send(results[0][1].content)
            except StopIteration:
                break
        moves.close()
