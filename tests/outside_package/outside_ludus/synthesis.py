"""A method of synthesis: one attempt at each task, kept where it succeeds."""

from __future__ import annotations

from ludus.core.trajectory import is_success
from ludus.synth import (
    ItemResult,
    Rejected,
    SourcedTask,
    SynthConfig,
    SynthContext,
    SynthMethod,
    SynthResult,
)


class FirstTryConfig(SynthConfig):
    """One attempt at each task."""

    threshold: float = 1.0
    """The least reward of a success."""


class FirstTry(SynthMethod[FirstTryConfig]):
    """What succeeds at once."""

    title = "first try"
    settings_type = FirstTryConfig

    async def run(self, context: SynthContext) -> SynthResult:
        async def play(one: SourcedTask) -> ItemResult:
            return ItemResult((await context.group(one, 1)).trajectories)

        pieces = await context.each(
            "tries", context.tasks(self.settings.tasks), play, name=lambda one: one.name
        )
        result = SynthResult()
        for piece in pieces:
            for one in piece.trajectories:
                if is_success(one, self.settings.threshold):
                    result.kept.append(one)
                else:
                    result.rejected.append(Rejected(one, "failed"))
        return result
