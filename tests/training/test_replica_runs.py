"""Runs whose episodes are sampled by engines in other processes (cluster.engines)."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stage_runs import Talker, episodes
from test_async_training import Slow, trained_ordinals, weights
from test_kill_and_resume import STAGES
from test_lora import base  # noqa: F401 - a fixture
from training_helpers import TINY, add, even, expert, tasks

import ludus
from ludus.core.generation import Sampling
from ludus.engine.replicas import ProcessReplica
from ludus.observe import RunFolder
from ludus.observe.metrics import undefined
from ludus.training import Parts, Recipe, build_run_context

RL = {**TINY["rl"], "steps": 3, "tasks": 2, "attempts": 2}


def train(folder: Path, engines: int, tables: dict[str, Any] | None = None, **code: Any) -> RunFolder:
    run = {"folder": str(folder), "checkpoint_every": 1, "keep_checkpoints": 50}
    settings = {**TINY, "rl": RL, "run": run, "cluster": {"engines": engines}, **(tables or {})}
    if "stage" in settings:
        del settings["rl"]
    parts = {"tasks": tasks(6), "tools": [add], "rewards": [even], "agent": Talker()}
    ludus.train(**settings, **{**parts, **code}, progress=False)
    return RunFolder(folder)


def assert_close(old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> None:
    assert list(old) == list(new)
    for name in old:
        torch.testing.assert_close(old[name], new[name], rtol=0, atol=1e-5, msg=name)


def assert_same_episodes(old: RunFolder, new: RunFolder) -> None:
    """The same tokens, by policies of the same versions."""
    known, found = episodes(old), episodes(new)
    assert list(known) == list(found)
    for name in known:
        for one, other in zip(known[name], found[name], strict=True):
            for action, same in zip(one.actions, other.actions, strict=True):
                assert action.tokens == same.tokens and action.versions == same.versions
                assert action.logprobs == pytest.approx(same.logprobs, abs=1e-4)


def test_a_run_with_an_engine_of_its_own_is_the_same_run(tmp_path: Path) -> None:
    """A warm start, RL and evaluations: what samples is nobody's business."""
    tables = {
        "warm_start": {"steps": 4, "batch": 2},
        "evaluation": {"every": 2},
        "max_in_flight": 1,
    }
    code = {"demonstrations": expert, "held_out": tasks(2, first=50)}
    embedded = train(tmp_path / "embedded", 0, tables, **code)
    found = train(tmp_path / "engine", 1, tables, **code)
    assert_same_episodes(embedded, found)
    assert_close(weights(embedded), weights(found))
    rows = [row for row in found.metrics() if "engine/replicas" in row]
    assert len(rows) == 3 and all(row["engine/replicas"] == 1 for row in rows)
    assert all(0 < row["engine/canary_difference"] < 1e-5 for row in rows)
    assert [row["policy_version"] for row in rows] == [4, 5, 6]
    assert not undefined(name for row in rows for name in row if name not in ("step", "time"))
    assert not list(Path("/dev/shm").glob(f"ludus-weights-*/{6}"))


@pytest.mark.slow
def test_an_asynchronous_run_outlives_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed once: its episodes are played again, each group is trained once, the lag is bounded."""
    started: list[int] = []
    start = ProcessReplica.start

    async def noted(self: ProcessReplica, folder: Path, version: int) -> None:
        await start(self, folder, version)
        assert self.pid is not None
        started.append(self.pid)

    def on_step(phase: str, step: int, total: int, metrics: dict[str, float]) -> None:
        if step == 2:
            os.kill(started[-1], signal.SIGKILL)

    monkeypatch.setattr(ProcessReplica, "start", noted)
    tables = {"rl": {**RL, "steps": 6, "staleness": 2}}
    run = train(tmp_path / "run", 1, tables, agent=Slow(), on_step=on_step)
    assert len(started) == 2
    assert trained_ordinals(run) == list(range(12))
    rows = [row for row in run.metrics() if "lag_max" in row]
    assert max(row["lag_max"] for row in rows) <= 2
    for step, row in enumerate(rows):
        spans = [
            {span.version for action in t.actions for span in action.versions}
            for t in run.trajectories(step + 1)
        ]
        assert row["lag_max"] == max(step - min(one) for one in spans)
    assert rows[-1]["engine/restarts"] == 1 and all(row["failures"] == 0 for row in rows)


@pytest.mark.slow
def test_an_adapter_is_sampled_elsewhere(base: Path, tmp_path: Path) -> None:  # noqa: F811
    model = {"name": str(base), "lora": {"rank": 4}}
    tables = {"model": model, "max_in_flight": 1}
    runs = [train(tmp_path / str(engines), engines, tables) for engines in (0, 1)]
    assert_same_episodes(*runs)
    files = [run.checkpoints()[-1].path / "adapter_model.safetensors" for run in runs]
    assert_close(*map(load_file, files))


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_trees_on_two_engines(tmp_path: Path, staleness: int) -> None:
    rl = {"attempts": 4, "algorithm": "tree_grpo", "tree": {"roots": 1, "rounds": 2}}
    run = train(tmp_path, 2, {"rl": {**RL, **rl, "staleness": staleness}}, agent=Slow())
    rows = [row for row in run.metrics() if "step_seconds" in row]
    assert [row["tree/branches"] for row in rows] == [6] * 3
    assert all(row["tree/tokens_saved"] > 0 and row["engine/replicas"] == 2 for row in rows)
    if not staleness:
        assert max(row["logprob_difference_max"] for row in rows) < 1e-3


@pytest.mark.slow
def test_two_trainer_ranks_and_an_engine(tmp_path: Path) -> None:
    tables = {"max_in_flight": 1}
    one = train(tmp_path / "one", 0, tables)
    several = train(tmp_path / "several", 1, {**tables, "cluster": {"engines": 1, "trainer_ranks": 2}})
    assert_same_episodes(one, several)
    assert_close(weights(one), weights(several))


@pytest.mark.slow
def test_all_stages_sample_elsewhere(tmp_path: Path) -> None:
    rate = {"optimizer": {"learning_rate": 1e-3}}
    stages = [{**stage, **rate, "steps": min(stage["steps"], 3)} for stage in STAGES[:-1]]
    tables = {"stage": [*stages, STAGES[-1]], "max_in_flight": 1}
    code = {"demonstrations": expert, "held_out": tasks(2, first=50), "group_rewards": ["count_bonus"]}
    runs = [train(tmp_path / str(engines), engines, tables, **code) for engines in (0, 1)]
    assert_same_episodes(*runs)
    assert_close(*map(weights, runs))


@pytest.mark.slow
async def test_evaluation_on_two_engines() -> None:
    """Which engine has which episode changes nothing."""
    found = []
    for engines in (0, 2):
        recipe = Recipe.parse({**TINY, "cluster": {"engines": engines}})
        parts = Parts(tasks=tasks(6), held_out=tasks(6), tools=[add], rewards=[even], agent=Talker())
        async with await build_run_context(recipe, parts) as context:
            measured = await context.measure(attempts=2, sampling=Sampling())
            found.append([action.tokens for t in measured.trajectories for action in t.actions])
            before = context.engine.policy_version
            for _ in range(3):
                await context.sync_engine(later=True)  # as stages do that play nothing
            await context.measure(attempts=1, temperature=1.0)
            assert context.engine.policy_version == before + 3
    assert found[0] == found[1]


PROGRAM = """
import json, os, sys, urllib.request
messages = [{"role": "user", "content": json.load(sys.stdin)["messages"][-1]["content"]}]
for _ in range(2):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    reply = json.load(urllib.request.urlopen(urllib.request.Request(url, body, key)))
    messages += [reply["choices"][0]["message"], {"role": "user", "content": "and then?"}]
"""


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_programs_are_answered_by_engines_elsewhere(tmp_path: Path, staleness: int) -> None:
    (tmp_path / "agent.py").write_text(PROGRAM)
    run = {"folder": str(tmp_path / "run")}
    ludus.train(
        **{**TINY, "rl": {**RL, "staleness": staleness}, "run": run, "cluster": {"engines": 1}},
        agent={"loop": f"command: {sys.executable} {tmp_path / 'agent.py'}"},
        tasks=tasks(6),
        rewards=[even],
        progress=False,
    )
    rows = [row for row in RunFolder(tmp_path / "run").metrics() if "step_seconds" in row]
    assert len(rows) == 3 and all(row["failures"] == 0 and row["turns"] == 2 for row in rows)
    assert all(row["model_server/requests"] == 2 and row["engine/replicas"] == 1 for row in rows)
