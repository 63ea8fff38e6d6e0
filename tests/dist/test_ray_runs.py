"""Whole runs on a Ray cluster of two raylets: placed, looked at, killed in parts, resumed, interrupted.

The process of `ludus train` lives on the head, which has room for rank 0 alone; everything else is on the other
node. Both raylets share this machine. Run it with `pytest -m slow tests/dist` where ray is installed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
sys.path.append(str(Path(__file__).parent.parent / "training"))

from raylets import STORE, two_raylets
from stage_runs import Talker, episodes
from test_async_training import Slow, trained_ordinals, weights
from test_ranks_runs import CODE, RECIPE, assert_gone, started, wait_for
from test_replica_runs import assert_close, assert_same_episodes
from training_helpers import TINY, add, even, expert, tasks

import ludus
from ludus.dist.cluster import ActorStatus, look
from ludus.observe import RunFolder
from ludus.training import Recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with two_raylets(head_cpus=1, other_cpus=8) as raylets:
        yield raylets


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny_tasks.py").write_text(CODE)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path


def train(folder: Path, cluster: Any, *overrides: str) -> subprocess.Popen[str]:
    where = (f"cluster.address={cluster.address}", "cluster.nodes=2")
    return started(folder, "-m", "ludus", "train", "recipe.toml", *where, *overrides)


def looked_at(folder: Path, cluster: Any) -> list[dict[str, Any]]:
    """The actors that `ludus cluster` finds."""
    command = ("-m", "ludus", "cluster", "--address", cluster.address, "--json")
    found = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, check=True)
    actors: list[dict[str, Any]] = json.loads(found.stdout)["actors"]
    return actors


def assert_nothing_left(folder: Path, cluster: Any, pids: list[int]) -> None:
    assert_gone(pids)
    deadline = time.monotonic() + 30
    while looked_at(folder, cluster):
        assert time.monotonic() < deadline, "an actor was left behind"


def steps(folder: Path) -> list[int]:
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [row["step"] for row in rows if "gradient_norm" in row]


def replaced_rank(folder: Path, cluster: Any, old: int, process: subprocess.Popen[str]) -> int:
    """The process of rank 1 that took the place of one that was killed."""
    deadline = time.monotonic() + 120
    while True:
        found = [one["pid"] for one in looked_at(folder, cluster) if one["number"] == 1]
        if found and found[0] is not None and found[0] != old:
            return int(found[0])
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the rank did not come back"


def test_a_killed_rank_restarts_from_the_last_checkpoint(folder: Path, cluster: Any) -> None:
    """Two nodes, one rank on each; every step is trained once, and nobody is left."""
    process = train(
        folder, cluster, "cluster.trainer_ranks=2", "cluster.restarts=2", "rl.steps=40",
        "run.keep_checkpoints=50",
    )  # fmt: skip
    wait_for(folder, 2, process)
    first = looked_at(folder, cluster)
    assert [(one["role"], one["number"], one["state"]) for one in first] == [
        ("trainer", 0, "alive"),
        ("trainer", 1, "alive"),
    ]
    assert first[0]["node"] != first[1]["node"] and first[0]["pid"] == process.pid
    assert first[0]["facts"]["phase"] == "RL" and first[1]["memory_bytes"] > 1e8
    os.kill(first[1]["pid"], signal.SIGKILL)
    second = replaced_rank(folder, cluster, first[1]["pid"], process)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 0, told
    assert "trainer rank 1 was killed by SIGKILL; the run goes on" in " ".join(told.split())
    assert steps(folder) == list(range(1, 41))
    assert_nothing_left(folder, cluster, [first[1]["pid"], second])


def test_a_lost_actor_is_a_rank_error(folder: Path, cluster: Any) -> None:
    process = train(folder, cluster, "cluster.trainer_ranks=2")
    wait_for(folder, 2, process)
    rank = looked_at(folder, cluster)[1]
    actor = int(Path(f"/proc/{rank['pid']}/stat").read_text().split()[3])
    os.kill(actor, signal.SIGKILL)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "trainer rank 1 was lost with its Ray actor" in " ".join(told.split())
    assert_nothing_left(folder, cluster, [rank["pid"]])


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_everything_ends_with_the_run(folder: Path, cluster: Any, stop: signal.Signals) -> None:
    everything = ("cluster.trainer_ranks=2", "cluster.engines=1", "cluster.tools=1")
    process = train(folder, cluster, *everything)
    wait_for(folder, 2, process)
    found = looked_at(folder, cluster)
    assert [one["role"] for one in found] == ["trainer", "trainer", "engine", "rewards", "tools"]
    pids = [one["pid"] for one in found]
    process.send_signal(stop)
    _, told = process.communicate(timeout=60)
    if stop != signal.SIGKILL:
        assert "--resume" in told
        last = sorted((folder / "run" / "checkpoints").glob("step-*"))[-1]
        assert (last / "optimizer" / "rank-00001.safetensors").is_file()
    assert_nothing_left(folder, cluster, pids)


def test_what_has_no_place_is_refused_before_the_run(folder: Path, cluster: Any) -> None:
    process = train(folder, cluster, "cluster.trainer_ranks=20")
    _, told = process.communicate(timeout=60)
    words = " ".join(told.split())
    assert process.returncode == 2 and not (folder / "run").exists()
    assert "no room for one more trainer rank. Asked for: 20 x trainer rank (1 CPU each)" in words
    assert "8 CPUs (8 free)" in words


# Engines. These runs live in this process, which joins the cluster and leaves it again.


RL = {**TINY["rl"], "steps": 3, "tasks": 2, "attempts": 2}


def run_here(folder: Path, cluster: dict[str, Any], **more: Any) -> RunFolder:
    """A small run of this process."""
    run = {"folder": str(folder), "checkpoint_every": 1, "keep_checkpoints": 50}
    parts = {"tasks": tasks(6), "tools": [add], "rewards": [even], "agent": Talker()}
    ludus.train(**{**TINY, "rl": RL, "run": run, "cluster": cluster, **parts, **more}, progress=False)
    return RunFolder(folder)


def here(cluster: Any, **more: Any) -> dict[str, Any]:
    return {"address": cluster.address, "nodes": 2, "timeout": 60, **more}


def test_a_run_on_the_cluster_is_the_same_run(tmp_path: Path, cluster: Any) -> None:
    """With staleness 0 and the same seeds: the tokens and weights of one process."""
    tables = {"max_in_flight": 1, "warm_start": {"steps": 2, "batch": 2}, "demonstrations": expert}
    alone = run_here(tmp_path / "alone", {}, **tables)
    spread = run_here(tmp_path / "spread", here(cluster, engines=1, trainer_ranks=2), **tables)
    assert_same_episodes(alone, spread)
    assert_close(weights(alone), weights(spread))
    rows = [row for row in spread.metrics() if "engine/replicas" in row]
    assert len(rows) == 3 and all(0 < row["engine/canary_difference"] < 1e-5 for row in rows)


def test_a_killed_engine_comes_back_with_the_newest_weights(tmp_path: Path, cluster: Any) -> None:
    """Its episodes are played again, every group is trained once, the lag stays in its bound."""
    seen: list[ActorStatus] = []

    def on_step(phase: str, step: int, total: int, metrics: dict[str, float]) -> None:
        engines = [one for one in look(cluster.address).actors if one.role == "engine"]
        if step == 2:
            seen.extend(engines)
            assert {one.node for one in engines}.isdisjoint({own_node()}), "the head has no room"
            os.kill(engines[0].pid or 0, signal.SIGKILL)
        if step == total:
            seen.extend(engines)

    rl = {**RL, "steps": 6, "staleness": 2}
    run = run_here(tmp_path / "run", here(cluster, engines=1), rl=rl, agent=Slow(), on_step=on_step)
    assert trained_ordinals(run) == list(range(12))
    rows = [row for row in run.metrics() if "lag_max" in row]
    assert max(row["lag_max"] for row in rows) <= 2
    assert sum(row["failures"] for row in rows) == 0
    assert rows[-1]["engine/restarts"] == 1
    assert seen[0].pid not in [one.pid for one in seen[1:]]
    assert {one.facts["version"] for one in seen[1:] if one.facts} <= {5, 6}
    assert_gone([one.pid for one in seen if one.pid is not None])


def own_node() -> str:
    import ray

    found: str = ray.get_runtime_context().get_node_id()
    return found


def test_an_engine_outlives_its_node(tmp_path: Path, cluster: Any) -> None:
    """The node dies with everything on it; Ray finds another place, and the run goes on."""
    doomed = cluster.add_node(num_cpus=4, object_store_memory=STORE)
    killed: list[str] = []

    def on_step(phase: str, step: int, total: int, metrics: dict[str, float]) -> None:
        if step == 2:
            engines = [one for one in look(cluster.address).actors if one.role == "engine"]
            killed.extend(one.node or "" for one in engines if one.node == doomed.node_id)
            cluster.remove_node(doomed, allow_graceful=False)

    rl = {**RL, "steps": 6, "staleness": 1}
    run = run_here(tmp_path / "run", here(cluster, engines=2), rl=rl, agent=Slow(), on_step=on_step)
    assert len(killed) == 1, "one engine was to be placed on each node"
    assert trained_ordinals(run) == list(range(12))
    assert run.metrics()[-1]["failures"] == 0


# Tools, environments and rewards.


def run_recipe(folder: Path, cluster: dict[str, Any], **more: Any) -> RunFolder:
    """The same, with everything named by reference."""
    on_step = more.pop("on_step", None)
    raw = {
        **TINY,
        "rl": RL,
        "run": {"folder": str(folder), "checkpoint_every": 1, "keep_checkpoints": 50},
        "budgets": {**TINY["budgets"], "max_turn_tokens": 8},
        "cluster": cluster,
        "tasks": {"train": "cluster_parts:some_tasks"},
        "rewards": ["cluster_parts:scored", "cluster_parts:counted"],
        "agent": {
            "tools": ["cluster_parts:greet"],
            "envs": {"counter": "cluster_parts:Counter"},
            "loop": "cluster_parts:Caller",
        },
        **more,
    }
    ludus.train(Recipe.parse(raw, "test"), on_step=on_step, progress=False)
    return RunFolder(folder)


def test_tools_environments_and_rewards_live_on_other_nodes(tmp_path: Path, cluster: Any) -> None:
    """The same episodes, tokens and scores as in one process; and they are played and scored over there."""
    seen: list[ActorStatus] = []
    home: list[str] = []

    def on_step(phase: str, step: int, total: int, metrics: dict[str, float]) -> None:
        seen[:] = look(cluster.address).actors
        home[:] = [own_node()]

    alone = run_recipe(tmp_path / "alone", {}, max_in_flight=1)
    where = here(cluster, tools=1, engines=1)
    spread = run_recipe(tmp_path / "spread", where, max_in_flight=1, on_step=on_step)
    assert_same_episodes(alone, spread)
    assert_close(weights(alone), weights(spread))
    roles = [one.role for one in seen]
    assert roles == ["trainer", "engine", "rewards", "tools", "tools"]
    assert all(one.node not in home for one in seen[1:]), "the head has no room for them"
    played = sum(len(group) for group in episodes(spread).values())
    assert played == 12 and seen[2].facts is not None and seen[2].facts["scores"] == played
    assert all(one.facts is not None and one.facts["requests"] >= 4 * played for one in seen[3:])
    scorers = {t.rewards["scorer"] for group in episodes(spread).values() for t in group}
    assert scorers == {float(seen[2].pid or 0)}
    for one, other in zip(episodes(alone).values(), episodes(spread).values(), strict=True):
        assert [t.reward for t in one] == [t.reward for t in other]


def test_each_part_is_killed_in_turn(tmp_path: Path, cluster: Any) -> None:
    """Tools, environments, rewards and an engine, one after the other: nothing is lost or trained twice."""
    turn = ["tools", "tools", "rewards", "engine"]
    killed: list[int] = []

    def on_step(phase: str, step: int, total: int, metrics: dict[str, float]) -> None:
        if 1 < step <= 1 + len(turn):
            found = [one for one in look(cluster.address).actors if one.role == turn[step - 2]]
            pid = found[-1 if step == 3 else 0].pid
            assert pid is not None
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)

    rl = {**RL, "steps": 8, "staleness": 1}
    run = run_recipe(tmp_path / "run", here(cluster, tools=1, engines=1), rl=rl, on_step=on_step)
    assert len(set(killed)) == 4
    assert trained_ordinals(run) == list(range(16))
    rows = [row for row in run.metrics() if "lag_max" in row]
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert [row["failures"] for row in rows] == [0] * 8
    assert rows[-1]["engine/restarts"] == 1
    assert_gone(killed)


def test_objects_cannot_be_hosted(tmp_path: Path, cluster: Any) -> None:
    with pytest.raises(ludus.core.ConfigError, match=r"cluster\.tools builds .* name them by reference"):
        run_here(tmp_path / "run", here(cluster, tools=1))
