"""Whole runs on trees: in the synchronous and the asynchronous loop, and again from their record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_async_training import Slow, settings, trained_ordinals
from training_helpers import add, even, tasks
from typer.testing import CliRunner

import ludus
from ludus.cli.main import app
from ludus.core import ConfigError
from ludus.observe import RunFolder, read_groups
from ludus.training.checkpoint import replayed_recipe

TREE = {"roots": 1, "rounds": 2}


def train(folder: Path, **rl: Any) -> RunFolder:
    chosen = {"attempts": 4, "algorithm": "tree_grpo", "tree": TREE, "steps": 3, **rl}
    tables = settings(folder, **chosen)
    tables["run"] |= {"trajectories_every": 1}
    parts: dict[str, Any] = {"tasks": tasks(6), "tools": [add], "rewards": [even], "agent": Slow()}
    ludus.train(**tables, **parts, progress=False)
    return RunFolder(folder)


def weights(run: RunFolder) -> dict[str, torch.Tensor]:
    return load_file(run.checkpoints()[-1].path / "model.safetensors")


@pytest.mark.parametrize("staleness", [0, 1])
def test_runs_on_trees_learn_and_are_recorded(tmp_path: Path, staleness: int) -> None:
    run = train(tmp_path / "run", staleness=staleness)
    rows = [row for row in run.metrics() if "step_seconds" in row]
    assert [row["episodes"] for row in rows] == [8] * 3
    assert [row["tree/branches"] for row in rows] == [6] * 3
    assert all(row["tree/tokens_saved"] > 0 and row["tree/depth"] >= 1 for row in rows)
    if not staleness:  # what was sampled from forked KV is what the trainer computes over the whole row
        assert max(row["logprob_difference_max"] for row in rows) < 1e-3
    groups = [
        group
        for file in run.trajectory_files()
        if file.split == "train"
        for group in read_groups(file.path)
    ]
    assert len(groups) == 6
    for row, step in zip(rows, range(3), strict=True):
        own = groups[2 * step : 2 * step + 2]
        sampled = {id(a): len(a.tokens) for g in own for t in g.trajectories for a in t.actions}
        # the loss counts every sampled token once, and so does the metric
        assert row["action_tokens"] == sum(sampled.values()) == pytest.approx(row["tokens/action"] * 8)
    if staleness:
        assert sorted(trained_ordinals(run)) == list(range(6))
    shown = CliRunner().invoke(
        app, ["show", str(run.path), "--tree", "--limit", "1", "--split", "train"]
    )
    assert "4 attempts, 3 of them branches" in shown.output
    assert shown.output.count("─ attempt ") == 3
    again = tmp_path / "again"
    parts: dict[str, Any] = {"tasks": tasks(6), "tools": [add], "rewards": [even], "agent": Slow()}
    ludus.train(replayed_recipe(run, [f"run.folder={again}"]), **parts, progress=False)
    first, second = weights(run), weights(RunFolder(again))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_run_on_searches_over_turns_trains_the_leaves_alone(tmp_path: Path) -> None:
    tree = {"branch": "turns", "beam": 2, "candidates": 3}
    run = train(tmp_path / "run", algorithm="grpo", tree=tree)
    rows = [row for row in run.metrics() if "step_seconds" in row]
    # what was sampled from forked KV, turn by turn, is what the trainer computes over the whole row
    assert max(row["logprob_difference_max"] for row in rows) < 1e-3
    files = [file.path for file in run.trajectory_files() if file.split == "train"]
    groups = [group for path in files for group in read_groups(path)]
    assert len(groups) == 6
    for group in groups:
        held = [one for one in group.trajectories if not one.is_trainable]
        assert held and group.trainable and all("search/score" in one.counts for one in held)
        trained = {id(a) for one in group.trainable for a in one.actions if a.advantages is not None}
        pruned = {id(a) for one in held for a in one.actions} - {
            id(a) for one in group.trainable for a in one.actions
        }
        assert not trained & pruned


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="roots"):
        train(Path("nowhere"), attempts=2, tree={"roots": 2})
    with pytest.raises(ConfigError, match="tree_value"):
        train(Path("nowhere"), algorithm="gigpo")


def test_an_environment_that_cannot_fork_is_refused_before_the_run(tmp_path: Path) -> None:
    class Counting(ludus.Env):
        """Neither has snapshots nor is deterministic."""

        def step(self, action: str) -> str:
            return action

    tables = settings(tmp_path / "run", attempts=4, tree=TREE)
    parts: dict[str, Any] = {"tasks": tasks(6), "rewards": [even], "envs": {"count": Counting}}
    with pytest.raises(ConfigError, match=r"agent\.pools\.count\.deterministic"):
        ludus.train(**tables, **parts, progress=False)
