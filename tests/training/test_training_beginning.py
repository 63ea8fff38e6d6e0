"""What cannot work is refused before a run begins: no folder, no evaluation, no lost hour."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import ludus
from conftest import TINY, even, expert, tasks
from ludus.core.failures import ConfigError

RL = {"kind": "rl", "steps": 1, "tasks": 2, "attempts": 2}
SFT = {"kind": "sft", "steps": 1}
DPO = {"kind": "dpo", "steps": 1, "tasks": 2, "attempts": 2}


def refused(tmp_path: Path, *stages: dict[str, Any], **other: Any) -> str:
    """The message with which training is refused; there must be no run then, and nothing played."""
    played: list[str] = []

    @ludus.reward
    async def counted(trajectory: ludus.Trajectory) -> float:
        played.append(trajectory.task.id)
        return 1.0

    tables = {name: table for name, table in TINY.items() if name != "rl"}
    usual = {"tasks": tasks(2), "held_out": tasks(2, first=50), "rewards": [counted]}
    run = {"folder": str(tmp_path / "run")}
    with pytest.raises(ConfigError) as error:
        ludus.train(**{**tables, "stage": list(stages), "run": run, **usual, **other})
    assert not (tmp_path / "run").exists() and not played
    return str(error.value)


def test_imitation_without_demonstrations(tmp_path: Path) -> None:
    said = refused(tmp_path, RL, SFT)
    assert re.match(r"stage\.1 has no demonstrations to imitate: set stage\.1\.demonstrations", said)
    (tmp_path / "none.jsonl").write_text("")
    assert "stage.0" in refused(tmp_path, {**SFT, "demonstrations": str(tmp_path / "none.jsonl")})
    tables = {name: table for name, table in TINY.items() if name != "rl"}
    with pytest.raises(ConfigError, match="warm_start has no demonstrations"):
        ludus.train(**tables, warm_start={"steps": 1}, tasks=tasks(2), rewards=[even])


def test_files_of_later_stages_are_looked_at_first(tmp_path: Path) -> None:
    missing = str(tmp_path / "nothing.jsonl")
    later = {**SFT, "demonstrations": missing}
    assert "nothing.jsonl" in refused(tmp_path, SFT, RL, later, demonstrations=expert)
    assert "nothing.jsonl" in refused(tmp_path, RL, {**DPO, "pairs": missing})
    (tmp_path / "bad.jsonl").write_text(json.dumps({"chosen": []}))
    assert "line 1" in refused(tmp_path, RL, {**DPO, "pairs": str(tmp_path / "bad.jsonl")})


def test_a_model_behind_an_address_can_be_evaluated_only(tmp_path: Path) -> None:
    said = refused(tmp_path, RL, model={"name": "http://127.0.0.1:1/v1#m"})
    assert "can be evaluated only (ludus eval" in said and "name a folder" in said


def test_task_sets_have_their_own_tasks(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "1?"}\n')
    sets = [{"name": "a", "train": str(tmp_path / "a.jsonl")}]
    assert "leave out tasks=" in refused(tmp_path, RL, task_sets=sets)
    said = refused(tmp_path, RL, task_sets=sets, tasks=None, held_out=None, rewards=None)
    assert "nothing is rewarded in the task set 'a'" in said
    said = refused(tmp_path, {"kind": "eval"}, task_sets=sets, tasks=None, held_out=None)
    assert "stage.0" in said and "nothing to measure on" in said


@pytest.mark.parametrize("name", ["stage", "task_sets"])
def test_lists_without_tables(tmp_path: Path, name: str) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f"{name} = []\n[model.scratch]\n")
    with pytest.raises(ConfigError, match=rf"{name} = \[\] has no table"):
        ludus.train(recipe)
    with pytest.raises(ConfigError, match=rf"{name} = \[\] has no table"):
        ludus.training.load_recipe(recipe)
