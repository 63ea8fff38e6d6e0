"""Runs that are sampled by a vLLM server (cluster.servers): here one with vLLM's routes and a real model.

`tests/training/test_vllm_real.py` does the same with vLLM itself.
"""

from __future__ import annotations

import asyncio
import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from stage_runs import Talker, episodes
from test_async_training import trained_ordinals, weights
from training_helpers import TINY, add, even, expert, tasks
from typer.testing import CliRunner

import ludus
from ludus.chat.tokenizers import load_tokenizer
from ludus.cli.main import app
from ludus.core import ConfigError, EngineError, Sampling
from ludus.engine import Canary
from ludus.engine.replicas import ReplicaLimits, ReplicatedEngine
from ludus.engine.servers import VllmEngine, VllmOptions
from ludus.observe import RunFolder
from ludus.training import Parts, Recipe
from ludus.training.placement import PolicyWeights, write_policy
from ludus.training.ranks.steps import Ranks
from ludus.training.run_context import load_policy

sys.path.append(str(Path(__file__).parent.parent / "engine"))
from vllm_server import VllmTestServer, vllm_server

RL = {**TINY["rl"], "steps": 3, "tasks": 2, "attempts": 2}
PARTS = {"tasks": tasks(6), "tools": [add], "rewards": [even], "agent": Talker()}
FAST = VllmOptions(first_pause=0.001, watch_seconds=0.01)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    """The model that the runs begin with, its tokenizer, and the folder that a server is started from."""
    recipe = Recipe.parse(TINY)
    model, tokenizer = asyncio.run(load_policy(recipe, Parts(**PARTS, demonstrations=expert)))
    folder = tmp_path_factory.mktemp("vllm")
    written = write_policy(model, tokenizer, folder)
    assert written.dtype == "float32" and written.context == 4096
    return model, load_tokenizer(str(folder)), folder


@pytest.fixture
def server(begun: tuple[Any, Any, Path]) -> Iterator[VllmTestServer]:
    model, tokenizer, folder = begun
    own = copy.deepcopy(model)
    own.config.tie_word_embeddings = False
    own.lm_head.weight = torch.nn.Parameter(own.lm_head.weight.detach().clone())
    with vllm_server(own, tokenizer, folder) as running:
        yield running


def train(
    folder: Path, servers: list[str], tables: dict[str, Any] | None = None, **code: Any
) -> RunFolder:
    run = {"folder": str(folder), "checkpoint_every": 1, "keep_checkpoints": 50}
    settings = {**TINY, "rl": RL, "run": run, "cluster": {"servers": servers}, **(tables or {})}
    parts = {**PARTS, "demonstrations": expert, **code}
    settings.setdefault("warm_start", {"steps": 1, "batch": 2})
    ludus.train(**settings, **parts, progress=False)
    return RunFolder(folder)


def test_a_run_on_a_server_is_the_same_run(server: VllmTestServer, tmp_path: Path) -> None:
    """A warm start, RL and evaluations: the same tokens, by the same versions, and the same weights."""
    tables = {"warm_start": {"steps": 4, "batch": 2}, "max_in_flight": 1}
    code = {"held_out": tasks(2, first=50)}
    old = train(tmp_path / "embedded", [], tables, **code)
    new = train(tmp_path / "server", [server.url], tables, **code)
    known, found = episodes(old), episodes(new)
    assert list(known) == list(found)
    for name in known:
        for one, other in zip(known[name], found[name], strict=True):
            for action, same in zip(one.actions, other.actions, strict=True):
                assert action.tokens == same.tokens and action.versions == same.versions
                assert action.logprobs == pytest.approx(same.logprobs, abs=1e-4)
    for name, tensor in weights(old).items():
        torch.testing.assert_close(tensor, weights(new)[name], rtol=0, atol=1e-5, msg=name)
    rows = [row for row in new.metrics() if "engine/replicas" in row]
    assert [row["policy_version"] for row in rows] == [4, 5, 6]
    assert all(0 < row["engine/canary_difference"] < 1e-5 for row in rows)
    assert not server.is_paused
    label = server.label
    cluster = {"servers": [server.url]}
    measured = ludus.evaluate(**TINY, cluster=cluster, **PARTS, held_out=tasks(2, first=50))
    assert measured.metrics and server.label == label, "an evaluation leaves a run's servers alone"


def test_an_asynchronous_run_outlives_its_server(server: VllmTestServer, tmp_path: Path) -> None:
    """It dies and comes back with its first weights: each group is trained once, by known versions."""

    deaths: list[int] = []

    def on_step(phase: str, step: int, total: int, metrics: dict[str, float]) -> None:
        if "lag_max" in metrics and step == 2:
            deaths.append(step)
            server.die()
            server.start()

    tables = {"rl": {**RL, "steps": 5, "staleness": 2}}
    run = train(tmp_path / "run", [server.url], tables, on_step=on_step)
    assert trained_ordinals(run) == list(range(10))
    rows = [row for row in run.metrics() if "lag_max" in row]
    assert max(row["lag_max"] for row in rows) <= 2
    assert all(row["failures"] == 0 for row in rows)
    assert deaths == [2] and rows[-1]["engine/replicas"] == 1


def test_two_servers_share_a_run(
    server: VllmTestServer, begun: tuple[Any, Any, Path], tmp_path: Path
) -> None:
    """Each episode stays on one of them, and both have every version."""
    _, tokenizer, folder = begun
    with vllm_server(server.model, tokenizer, folder) as other:
        run = train(tmp_path / "run", [server.url, other.url])
        sessions = [{session for session, _ in one.asked if session} for one in (server, other)]
        assert all(sessions) and not sessions[0] & sessions[1]
        assert server.engine.policy_version == other.engine.policy_version > 2
    rows = [row for row in run.metrics() if "engine/replicas" in row]
    assert all(row["engine/replicas"] == 2 and row["failures"] == 0 for row in rows)


def test_the_canary_refuses_a_half_applied_update(
    server: VllmTestServer, begun: tuple[Any, Any, Path], tmp_path: Path
) -> None:
    """A head that stays behind, with success reported: the server is taken out, and its tokens are not used."""
    model, tokenizer = copy.deepcopy(begun[0]), begun[1]

    async def scenario() -> None:
        engine = ReplicatedEngine(
            [VllmEngine(server.url, tokenizer, options=FAST)],
            PolicyWeights(Ranks.alone(model), tokenizer),
            Canary.of(tokenizer.vocabulary_size, 4096, "float32"),
            limits=ReplicaLimits(seconds=20, backoff=0.001),
            folder=tmp_path,
        )
        await engine.open()
        try:
            request = [1, 2, 3], Sampling(max_tokens=4)
            assert (await engine.generate(*request)).versions[0].version == 0
            server.faults.stale_head = True
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(0.01 * torch.randn_like(weight))
            with pytest.raises(EngineError, match="does not have the weights of version 1"):
                await engine.update_weights()
                await engine.generate(*request)
        finally:
            await engine.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
        ({"scale_out": False}, "--enable-scale-out"),
    ],
)
def test_a_run_on_a_server_that_cannot_be_trained_on_does_not_begin(
    server: VllmTestServer, tmp_path: Path, changes: dict[str, Any], fix: str
) -> None:
    for name, value in changes.items():
        setattr(server.faults, name, value)
    with pytest.raises(ConfigError, match=f"cluster.servers: .*{fix}"):
        train(tmp_path / "run", [server.url])
    assert not (tmp_path / "run").exists()


MODULE = """
import ludus

def tasks():
    return [ludus.Task.of(f"{n} plus {n}?", target=str(2 * n), id=str(n)) for n in range(8)]
"""
RECIPE = """
name = "adding"
rewards = ["exact_match"]
model.scratch = { layers = 1, width = 32, heads = 2, kv_heads = 1 }
tasks.train = "task.py:tasks"
"""


def test_the_command_line_checks_servers_and_shows_how_to_start_one(
    server: VllmTestServer, tmp_path: Path
) -> None:
    (tmp_path / "task.py").write_text(MODULE)
    recipe = tmp_path / "adding.toml"
    recipe.write_text(RECIPE)
    runner = CliRunner()
    shown = runner.invoke(app, ["serve", "vllm", str(recipe), "--folder", str(tmp_path / "model")])
    assert shown.exit_code == 0, shown.output
    assert f"--model {tmp_path}/model --served-model-name policy" in shown.output
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert (tmp_path / "model" / "tokenizer.json").is_file()
    checked = ["check", "recipe", str(recipe), f'cluster.servers=["{server.url}"]']
    good = runner.invoke(app, checked)
    assert good.exit_code == 0, good.output
    server.faults.logprobs_mode = "raw_logprobs"
    bad = runner.invoke(app, checked)
    assert bad.exit_code == 1 and "--logprobs-mode" in " ".join(bad.output.split())


@pytest.mark.parametrize(
    ("cluster", "problem"),
    [
        ({"servers": ["127.0.0.1:8000"]}, "is not an address such as http://127.0.0.1:8000"),
        ({"servers": ["http://a", "http://a"]}, "names a server twice"),
        ({"servers": ["http://a"], "engines": 2}, "give one of them"),
        ({"weights": "/shared"}, "there are none"),
    ],
)
def test_settings_that_do_not_go_together(cluster: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Recipe.parse({**TINY, "cluster": cluster})
