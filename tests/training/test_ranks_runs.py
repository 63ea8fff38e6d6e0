"""Whole runs on several ranks: equal to those of one, resumed on more or fewer, killed and interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from small_steps import small_model
from stage_runs import Talker, numbers
from test_kill_and_resume import STAGES
from test_ranks import assert_close, assert_same_weights, imitating
from training_helpers import TINY, add, even, expert, tasks

import ludus
from called_ranks import ALONE, called_ranks
from ludus.training import Result, ScratchConfig, fit_tokenizer, scratch_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def train(folder: Path, ranks: int, **settings: Any) -> Result:
    """One episode at a time, so that what is sampled does not depend on what is sampled beside it."""
    tables = {name: table for name, table in TINY.items() if name not in settings}
    if "stage" in settings:
        del tables["rl"]
    tables |= {"max_in_flight": 1, "cluster": {"trainer_ranks": ranks, "timeout": 60}} | settings
    tables["run"] = {"checkpoint_every": 1, "keep_checkpoints": 50, "folder": str(folder)}
    return ludus.train(**tables, **code(settings), progress=False)


def code(settings: dict[str, Any]) -> dict[str, Any]:
    parts = {
        "tasks": tasks(6), "held_out": tasks(2, first=50), "tools": [add], "rewards": [even],
        "agent": Talker(),
    }  # fmt: skip
    if any(stage["kind"] == "sft" for stage in settings.get("stage", ())):
        parts["demonstrations"] = expert
    return parts


def assert_same_run(one: Result, two: Result) -> None:
    """Every logged number to five digits, and every weight of the last checkpoint."""
    rows = [
        [{k: v for k, v in row.items() if isinstance(v, float | int)} for row in numbers(result.run)]
        for result in (one, two)
    ]
    assert_close(*rows)
    name = "adapter_model.safetensors" if (one.model / "adapter_model.safetensors").exists() else ""
    left, right = (load_file(result.model / (name or "model.safetensors")) for result in (one, two))
    for key, tensor in left.items():
        assert float((tensor - right[key]).abs().max()) <= 1e-5, key


@pytest.mark.parametrize("count", [2, 4])
def test_all_stages_on_several_ranks_equal_one(tmp_path: Path, count: int) -> None:
    rate = {"optimizer": {"learning_rate": 1e-3}}  # at a high one, rounding grows with every step
    stages = [{**stage, **rate, "steps": min(stage["steps"], 3)} for stage in STAGES[:-1]]
    results = [train(tmp_path / str(ranks), ranks, stage=stages) for ranks in (1, count)]
    assert_same_run(*results)
    assert len(results[0].metrics) > 8


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tokenizer = fit_tokenizer(["a plus b? add"] * 20, 400)
    shape = ScratchConfig(layers=2, width=32, heads=2, kv_heads=1, vocabulary=400)
    model: Any = scratch_model(shape, tokenizer, seed=3)
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


RL = {"steps": 2, "tasks": 2, "attempts": 3, "kl": 0.1, "optimizer": {"learning_rate": 1e-3}}


@pytest.mark.parametrize("counts", [(2, 1, 2), (2, 4, 1)])
def test_a_run_goes_on_with_more_and_fewer_ranks(
    tmp_path: Path, base: Path, counts: tuple[int, int, int]
) -> None:
    """An adapter and all weights, with a critic and a reference that follows."""
    # a written warm-up: the usual one depends on the steps that are planned, which grow here
    critic = {"warmup_steps": 1}
    ppo = RL | {"algorithm": "ppo", "critic": critic, "reference_sync": {"every": 1, "mixup_alpha": 1.0}}
    for name, lora in (("adapter", {"rank": 4}), ("whole", None)):
        model = {"name": str(base), "lora": lora}
        whole = train(tmp_path / f"{name}-1", 1, model=model, rl=ppo | {"steps": 6})
        folder = tmp_path / f"{name}-2"
        resumed = train(folder, counts[0], model=model, rl=ppo)
        for steps, ranks in zip((4, 6), counts[1:], strict=True):
            more: dict[str, Any] = {"rl": {"steps": steps}, "cluster": {"trainer_ranks": ranks}}
            resumed = ludus.train(resume=folder, progress=False, **more, **code({}))
        weights = [one.model / "model.safetensors" for one in (whole, resumed)]
        if lora is not None:
            weights = [one.model / "adapter_model.safetensors" for one in (whole, resumed)]
        left, right = map(load_file, weights)
        for key, tensor in left.items():
            assert float((tensor - right[key]).abs().max()) <= 1e-5, key


def test_asynchronous_training_on_two_ranks(tmp_path: Path) -> None:
    result = train(tmp_path / "run", 2, rl={**TINY["rl"], "staleness": 1}, max_in_flight=8)
    assert sum("gradient_norm" in row for row in result.metrics) == TINY["rl"]["steps"]


def test_distillation_on_two_ranks(tmp_path: Path, base: Path) -> None:
    stage = {"kind": "distill", "teacher": str(base), "steps": 2, "tasks": 2, "attempts": 2}
    results = [
        train(tmp_path / str(ranks), ranks, model={"name": str(base)}, stage=[stage]) for ranks in (1, 2)
    ]
    assert_same_run(*results)


def test_two_replicas_of_two_shards_equal_one_rank() -> None:
    """HSDP. Three ranks have parts of different sizes, and of small tensors some have nothing."""
    one = small_model()
    expected = imitating(ALONE, one)
    for settings in ({"trainer_ranks": 4, "dp_replicate": 2}, {"trainer_ranks": 3}):
        ranks = called_ranks(**settings)
        try:
            two = small_model()
            assert_close(expected, imitating(ranks, two))
            assert_same_weights(one, two)
        finally:
            ranks.close()


# Processes.


CODE = """
from training_helpers import tasks
def train(): return tasks(6)
"""
RECIPE = """
name = "tiny"
max_in_flight = 1
rewards = ["training_helpers:even"]
[model.scratch]
layers = 1
width = 32
heads = 2
kv_heads = 1
vocabulary = 400
[tasks]
train = "tiny_tasks.py:train"
[agent]
tools = ["training_helpers:add"]
loop = "training_helpers:Chatty"
[budgets]
max_turns = 3
max_turn_tokens = 16
[rl]
steps = 400
tasks = 2
attempts = 3
[run]
folder = "run"
checkpoint_every = 2
[cluster]
timeout = 20
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny_tasks.py").write_text(CODE)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path


def started(folder: Path, *command: str) -> subprocess.Popen[str]:
    places = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *command], cwd=folder, env=environment, text=True, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip


def children(pid: int) -> list[int]:
    """Its descendants that are Python processes with a rank of their own."""
    found: list[int] = []
    for one in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, one.read_text().split()):
            found += [child, *children(child)]
    return found


def ranks_of(pid: int) -> list[int]:
    return [one for one in children(pid) if b"serve_rank" in Path(f"/proc/{one}/cmdline").read_bytes()]


def wait_for(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 200
    while not (folder / "run" / "checkpoints" / f"step-{step:06d}").is_dir():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no checkpoint was written"
        time.sleep(0.05)


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "a process was left behind"
        time.sleep(0.1)


def files_of(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


TRAIN = ("-m", "ludus", "train", "recipe.toml", "cluster.trainer_ranks=2")


def test_a_killed_rank_and_resume(folder: Path) -> None:
    process = started(folder, *TRAIN)
    wait_for(folder, 2, process)
    (rank,) = ranks_of(process.pid)
    os.kill(rank, signal.SIGKILL)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "trainer rank 1 was killed by SIGKILL" in " ".join(told.split())
    again = started(
        folder, "-m", "ludus", "train", "--resume", "run", "rl.steps=401", "run.keep_checkpoints=3"
    )
    step = int(sorted((folder / "run" / "checkpoints").glob("step-*"))[-1].name.split("-")[1])
    wait_for(folder, step + 4, again)
    os.killpg(again.pid, signal.SIGINT)
    _, told = again.communicate(timeout=60)
    assert "--resume" in told


def test_ctrl_c_saves_and_ends_all_ranks(folder: Path) -> None:
    process = started(folder, *TRAIN)
    wait_for(folder, 2, process)
    pids = ranks_of(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it: to all of them
    _, told = process.communicate(timeout=60)
    assert "--resume" in told
    assert_gone(pids)
    last = sorted((folder / "run" / "checkpoints").glob("step-*"))[-1]
    assert "optimizer.safetensors" in files_of(last)


def test_ctrl_c_while_ranks_start_is_no_failure_of_theirs(folder: Path) -> None:
    process = started(folder, *TRAIN)
    while not ranks_of(process.pid):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    pids = ranks_of(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130 and "SIGINT" not in told and "Traceback" not in told, told
    assert_gone(pids)


def test_ranks_end_with_rank_0(folder: Path) -> None:
    process = started(folder, *TRAIN)
    wait_for(folder, 2, process)
    pids = ranks_of(process.pid)
    assert len(pids) == 1
    process.kill()
    process.communicate()
    assert_gone(pids)


def test_a_rank_that_hangs_is_given_up(folder: Path) -> None:
    process = started(folder, *TRAIN, "cluster.timeout=5")
    wait_for(folder, 2, process)
    (rank,) = ranks_of(process.pid)
    os.kill(rank, signal.SIGSTOP)
    _, told = process.communicate(timeout=90)
    assert process.returncode == 2
    assert "did not answer within cluster.timeout" in " ".join(told.split())
    assert_gone([rank])


def test_sigterm_while_a_rank_hangs_ends_the_run(folder: Path) -> None:
    """Long before `cluster.timeout`, though rank 0 waits in a collective."""
    process = started(folder, *TRAIN, "cluster.timeout=3600")
    wait_for(folder, 2, process)
    (rank,) = ranks_of(process.pid)
    os.kill(rank, signal.SIGSTOP)
    time.sleep(2)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "told to stop (SIGTERM)" in " ".join(told.split()), told
    assert_gone([rank])


def test_sigterm_saves_and_ends_all_ranks(folder: Path) -> None:
    process = started(folder, *TRAIN)
    wait_for(folder, 2, process)
    pids = ranks_of(process.pid)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=60)
    assert "--resume" in told
    assert_gone(pids)


def test_under_torchrun(folder: Path) -> None:
    process = started(
        folder, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "ludus", "train", "recipe.toml", "rl.steps=3",
    )  # fmt: skip
    _, told = process.communicate(timeout=200)
    assert process.returncode == 0, told
    last = sorted((folder / "run" / "checkpoints").glob("step-*"))[-1]
    assert "optimizer.safetensors" in files_of(last)
