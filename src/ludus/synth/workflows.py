"""`ludus synth workflows`: from successes to a file of workflows (`rollouts/workflows.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ludus.core.failures import ConfigError
from ludus.core.trajectory import is_success
from ludus.observe import ReportTable
from ludus.rollouts.workflows import extract_workflows, save_workflows
from ludus.synth.episodes import EpisodesConfig, episodes_of
from ludus.synth.method import SynthContext, SynthMethod
from ludus.synth.result import SynthResult

_SHOWN = 20


class WorkflowsConfig(EpisodesConfig):
    """Workflow memory, from successes."""


class Workflows(SynthMethod[WorkflowsConfig]):
    """How similar tasks were done, for the prompts of later runs."""

    title = "Workflows"
    settings_type = WorkflowsConfig

    async def run(self, context: SynthContext) -> SynthResult:
        seen = [one.trajectory for one in await episodes_of(context, self.settings)]
        held_out = {task.id for task in context.held_out()}
        good = [one for one in seen if is_success(one) and one.task.id not in held_out]
        if not good:
            raise ConfigError(
                f"none of {len(seen)} episodes at training tasks succeeded: there is nothing to remember"
            )
        found = extract_workflows(good)
        path = Path(context.folder.path) / "workflows.json"
        save_workflows(path, found)
        rows: list[list[Any]] = [
            [one.goals[0][:60], "; ".join(map(str, one.steps))[:100], one.episodes, f"{one.turns:.1f}"]
            for one in found[:_SHOWN]
        ]
        table = ReportTable(("good for", "steps", "episodes", "turns"), rows, "Workflows")
        note = f"use them with agent.workflows.file={path}"
        numbers = {"workflows": float(len(found)), "successes": float(len(good))}
        return SynthResult(kept=good, numbers=numbers, tables=[table], warnings=[note])
