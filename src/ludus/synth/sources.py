"""Episodes that a method begins with: those of a file or a run, or played for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from ludus.core.config import Place
from ludus.core.failures import ConfigError, not_there
from ludus.core.messages import Message
from ludus.core.trajectory import Trajectory, is_lost
from ludus.observe import RunFolder, read_trajectories
from ludus.synth.folder import ItemResult
from ludus.synth.method import SourcedTask, SynthConfig, SynthContext, TaskSource


class EpisodesConfig(SynthConfig):
    """Where the episodes come from that a method works on."""

    source: Place | None = None
    """A Parquet file of episodes, or a run's folder; played when left out."""
    attempts: int = Field(default=4, ge=1)
    """Episodes for each task, where they are played."""
    threshold: float = 1.0
    """The least reward of a success, where no reward is called success."""


@dataclass(frozen=True, slots=True)
class SourcedEpisode:
    """An episode, and where its task is played."""

    source: TaskSource
    trajectory: Trajectory

    @property
    def name(self) -> str:
        one = self.trajectory
        return f"{self.source.name}/{one.task.id}/{one.attempt}/{one.seed}"


async def episodes_of(context: SynthContext, settings: EpisodesConfig) -> list[SourcedEpisode]:
    """The scored episodes to work on."""
    if settings.source is not None:
        found = _read(Path(settings.source))
        places = {task.id: one for one in context.sources for task in (*one.tasks, *one.held_out)}
        own = [SourcedEpisode(places.get(one.task.id, context.sources[0]), one) for one in found]
        # an episode that several files of a run have is one
        return list({one.name: one for one in own if not is_lost(one.trajectory)}.values())
    tasks = context.tasks(settings.tasks)

    async def play(one: SourcedTask) -> ItemResult:
        return ItemResult((await context.group(one, settings.attempts)).trajectories)

    pieces = await context.each("attempts", tasks, play, name=lambda one: one.name)
    context.check_made(pieces)
    return [
        SourcedEpisode(one.source, trajectory)
        for one, piece in zip(tasks, pieces, strict=True)
        for trajectory in piece.trajectories
        if not is_lost(trajectory)
    ]


def _read(path: Path) -> list[Trajectory]:
    run = RunFolder(path)
    if path.is_dir() and run.is_run:
        return [t for file in run.trajectory_files() for t in run.trajectories(file.step, file.split)]
    if not path.is_file():
        raise ConfigError(not_there(path))
    return read_trajectories(path)


def transcript(messages: Sequence[Message], asked: int = 0, most: int = 24_000) -> str:
    """A conversation as text for a language model; the middle of a long one is left out.

    The first `asked` messages are the task's: none of them is a step of the agent.
    """
    steps, lines = 0, []
    for place, message in enumerate(messages):
        is_step = message.role == "assistant" and place >= asked
        steps += is_step
        label = f"step {steps}, the agent" if is_step else message.role
        lines.append(f"[{label}]\n{message.content}")
    text = "\n".join(lines)
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[... {len(text) - most} characters left out ...]\n{text[-half:]}"
