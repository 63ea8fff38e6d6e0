"""Engines that are not part of Ludus: found by name or by file, and trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stage_runs import Talker, episodes
from training_helpers import TINY, add, even, tasks

import ludus
from ludus.core import ConfigError
from ludus.observe import RunFolder

OUTSIDE = Path(__file__).parent.parent / "outside_package"


def train(folder: Path, **cluster: Any) -> RunFolder:
    rl = {**TINY["rl"], "steps": 2, "tasks": 2, "attempts": 2}
    settings = {**TINY, "rl": rl, "run": {"folder": str(folder)}, "cluster": cluster}
    parts = {"tasks": tasks(4), "tools": [add], "rewards": [even], "agent": Talker()}
    ludus.train(**settings, **parts, progress=False)
    return RunFolder(folder)


def test_an_engine_of_an_installed_package_is_found_by_its_entry_point_and_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log-probabilities are those that the trainer computes, and every update reaches it."""
    monkeypatch.syspath_prepend(str(OUTSIDE))
    run = train(tmp_path / "run", engine="plain")
    rows = [row for row in run.metrics() if "engine/replicas" in row]
    assert [row["engine/replicas"] for row in rows] == [1, 1]
    assert [row["policy_version"] for row in rows] == [0, 1]
    assert all(row["engine/canary_difference"] < 1e-5 for row in rows)
    assert all(row["logprob_difference_max"] < 1e-4 for row in rows)
    actions = [action for step in episodes(run).values() for one in step for action in one.actions]
    assert actions and {span.version for action in actions for span in action.versions} == {0, 1}


def test_an_engine_is_named_by_its_file(tmp_path: Path) -> None:
    file = OUTSIDE / "outside_ludus" / "plain_engine.py"
    run = train(tmp_path / "run", engine=f"{file}:PlainEngine", engines=2)
    assert [row["engine/replicas"] for row in run.metrics() if "engine/replicas" in row] == [2, 2]


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ({"engine": "embeded"}, "no engine called 'embeded'.*Did you mean 'embedded'"),
        ({"engine": "vllm"}, "name them in cluster.servers"),
        ({"engine": "embedded", "engines": 1}, "leave out cluster.engines"),
        ({"engine": "plain", "engines": 1, "address": "local"}, "placed by Ray"),
    ],
)
def test_engines_that_cannot_be_are_refused(tmp_path: Path, cluster: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        train(tmp_path / "run", **cluster)
