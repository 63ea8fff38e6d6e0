"""`ludus synth workflows`: what successes did, in a file that recipes read; nothing of held-out tasks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from synth_parts import Source, context, open_door, rollout, safe_task, turn

from ludus.core import ConfigError
from ludus.rollouts.workflows import load_workflows
from ludus.synth.workflows import Workflows, WorkflowsConfig

RIGHT = [turn("red", 1), turn("green", 2), turn("blue", 3), open_door()]
WRONG = [turn("red", 9), open_door()]


async def test_successes_at_training_tasks_are_remembered(tmp_path: Path) -> None:
    tasks = [safe_task("a"), safe_task("b")]
    source = Source(tasks, rollout(lambda task, attempt: RIGHT if attempt % 2 else WRONG))
    made = context(tmp_path / "s", source)
    result = await Workflows(WorkflowsConfig.parse({"attempts": 4})).run(made)
    [flow] = load_workflows(tmp_path / "s" / "workflows.json")
    assert flow.episodes == 4 and [step.tool for step in flow.steps] == ["turn", "turn", "turn", "open"]
    assert result.numbers == {"workflows": 1, "successes": 4} and len(result.kept) == 4


async def test_nothing_is_learned_from_held_out_tasks(tmp_path: Path) -> None:
    task = safe_task("a")
    source = Source([task], rollout(lambda name, attempt: RIGHT), held_out=[replace(task)])
    with pytest.raises(ConfigError, match="nothing to remember"):
        await Workflows(WorkflowsConfig.parse({"attempts": 2})).run(context(tmp_path / "s", source))
