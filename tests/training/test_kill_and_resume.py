"""Kill a training process, again and again, at random moments: what it ends with is what it would have been.

Each process goes on with the run, or begins it where none before had come so far, and is killed with SIGKILL at
a delay that a seed decides: while it assembles, plays, updates, evaluates or writes. How far a process gets in
that time is the machine's business. It is counted from the moment at which everything is imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from stage_runs import Talker, assert_same_runs
from test_state_runs import tiny_qwen
from training_helpers import TINY, add, even, expert, tasks

import ludus
from ludus.observe import RunFolder, read_notes

HANG = 600.0

RATE = {"learning_rate": 1e-2}
GROWING = {
    "setting": "budgets.max_turns",
    "adaptive": {"start": 1, "stop": 3, "by": 1, "metric": "reward", "above": 0.1, "over": 2},
}
STAGES: list[dict[str, Any]] = [
    {"kind": "sft", "steps": 8, "batch": 2, "optimizer": {**RATE, "schedule": "linear"}},
    {
        "kind": "rl", "algorithm": "ppo", "steps": 6, "tasks": 2, "attempts": 2, "updates": 2,
        "kl": {"weight": 0.1, "control": {"target": 0.01, "horizon": 50}}, "epochs": 2, "target_kl": 0.05,
        "reference_sync": {"every": 2, "mixup_alpha": 0.5},
        "critic": {"warmup_steps": 1, "optimizer": RATE}, "refill": {"rounds": 1},
        "curriculum": [GROWING], "broken": {"no_answer": -0.1},
        "optimizer": {**RATE, "schedule": "cosine", "warmup_steps": 2},
    },
    {
        "kind": "rejection", "rounds": 2, "steps": 2, "tasks": 2, "attempts": 2, "threshold": -1.0,
        "batch": 2, "restart": True, "optimizer": RATE,
    },
    {"kind": "dpo", "steps": 3, "tasks": 2, "attempts": 2, "optimizer": RATE},
    {"kind": "eval", "attempts": 2},
]  # fmt: skip


SHORT = [{**STAGES[0], "steps": 2}, {**STAGES[1], "steps": 4}, {**STAGES[3], "steps": 2}]


ASYNC = [{
    "kind": "rl", "steps": 12, "tasks": 2, "attempts": 2, "staleness": {"steps": 2, "window": 2},
    "optimizer": RATE,
}]  # fmt: skip


class Unsteady(ludus.Agent):
    """Its turns take random times."""

    async def run(self, episode: ludus.Episode) -> None:
        for _ in range(3):
            await episode.generate(max_tokens=5)
            await asyncio.sleep(random.random() ** 4 * 0.1)
            episode.observe("and then?")


def attempt(
    folder: str,
    checkpoint_every: int,
    stages: list[dict[str, Any]],
    engines: int,
    model: str | None,
    ready: Connection,
) -> None:
    """What a process does: begin the run, or go on with it. One episode at a time, on one core."""
    code: dict[str, Any] = {
        "tasks": tasks(6), "held_out": tasks(2, first=50), "tools": [add], "rewards": [even],
        "agent": Talker(), "demonstrations": expert, "group_rewards": ["count_bonus"],
    }  # fmt: skip
    tables = {name: table for name, table in TINY.items() if name != "rl"}
    run = {"folder": folder, "checkpoint_every": checkpoint_every, "keep_checkpoints": 2}
    tables |= {"max_in_flight": 1, "stage": stages, "evaluation": {"every": 2}, "run": run}
    if model is not None:
        tables["model"] = {"name": model}
    if stages == ASYNC:
        code |= {"agent": Unsteady(), "demonstrations": None, "group_rewards": None}
        tables |= {"max_in_flight": 64, "cluster": {"engines": engines}}
    os.environ["LUDUS_KILLED_RUN"] = folder  # so that its processes can be told from others
    import matplotlib.pyplot  # noqa: F401 - what is imported late otherwise, so that a delay is spent on the run
    import pyarrow.parquet  # noqa: F401
    from transformers import LlamaForCausalLM  # noqa: F401

    ready.send("ready")
    if RunFolder(folder).is_run:
        ludus.train(resume=folder, **code)
    else:
        ludus.train(**tables, **code)


@dataclass
class Killer:
    """Starts processes, and kills them."""

    method: str
    """forkserver, where imports are done once; spawn, where each process is new from the ground up."""
    stages: list[dict[str, Any]]
    engines: int = 0
    """Of an asynchronous run: processes that sample."""
    model: str | None = None
    """A folder; a model from scratch when left out."""
    took: float = 0.0
    """How long a whole run takes."""
    kills: list[tuple[int, int]] = field(default_factory=list)
    """After which (step, stage) the last checkpoint was, for each kill; -1 where there was none."""

    def start(self, run: Path, checkpoint_every: int) -> Any:
        context: Any = multiprocessing.get_context(self.method)
        if self.method == "forkserver":
            heavy = ["ludus", "pyarrow.parquet", "matplotlib.pyplot", "ludus.training"]
            context.set_forkserver_preload([*heavy, "transformers.models.llama.modeling_llama"])
        heard, ready = context.Pipe(duplex=False)
        given = (str(run), checkpoint_every, self.stages, self.engines, self.model, ready)
        process = context.Process(target=attempt, args=given)
        process.start()
        ready.close()
        assert heard.poll(HANG) and heard.recv() == "ready", "the process did not get to its start"
        heard.close()
        return process

    def run_whole(self, run: Path, checkpoint_every: int) -> None:
        process = self.start(run, checkpoint_every)
        started = time.monotonic()
        self.finish(process)
        self.took = time.monotonic() - started

    def finish(self, process: Any) -> None:
        process.join(HANG)
        assert process.exitcode == 0
        process.close()

    def kill(self, run: Path, checkpoint_every: int, delay: float) -> bool:
        """Let it run so long; False when it was done before."""
        process = self.start(run, checkpoint_every)
        process.join(delay)
        if process.exitcode is not None:
            self.finish(process)
            return False
        self._end(process, run)
        return True

    def kill_after(self, run: Path, step: int) -> None:
        """Kill it as soon as there is a checkpoint of this step or a later one."""
        process, deadline = self.start(run, 1), time.monotonic() + HANG
        while _reached(run)[0] < step:
            assert process.exitcode is None and time.monotonic() < deadline
            time.sleep(0.002)
        self._end(process, run)

    def _end(self, process: Any, run: Path) -> None:
        process.kill()
        process.join(HANG)
        process.close()
        self.kills.append(_reached(run))


def _reached(run: Path) -> tuple[int, int]:
    latest = RunFolder(run).latest_checkpoint()
    if latest is None:
        return -1, -1
    progress = json.loads((latest.path / "progress.json").read_text())
    return progress["step"], progress["stage"]


@pytest.mark.slow
def test_a_killed_run_is_the_same_run(tmp_path: Path) -> None:
    """Three kills in one run."""
    killer, draw = Killer("forkserver", SHORT), random.Random(1)
    killer.run_whole(tmp_path / "whole", 2)
    for _ in range(3):
        killer.kill(tmp_path / "cut", 2, killer.took * draw.uniform(0.2, 0.35))
    killer.finish(killer.start(tmp_path / "cut", 2))
    assert killer.kills, "the machine was too fast for a single kill"
    assert_same_runs(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_run_of_a_model_with_states_is_the_same_run(tmp_path: Path) -> None:
    killer, draw = (
        Killer("forkserver", SHORT, model=str(tiny_qwen(tmp_path / "model"))),
        random.Random(2),
    )
    killer.run_whole(tmp_path / "whole", 2)
    for _ in range(3):
        killer.kill(tmp_path / "cut", 2, killer.took * draw.uniform(0.2, 0.35))
    killer.finish(killer.start(tmp_path / "cut", 2))
    assert killer.kills, "the machine was too fast for a single kill"
    assert_same_runs(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_runs_killed_at_many_points_are_the_same_run(tmp_path: Path, method: str) -> None:
    """At least 24 kills, and one at least in each stage that learns, over as many runs as that takes."""
    killer, draw = Killer(method, STAGES), random.Random(20)
    for every in (1, 2):
        killer.run_whole(tmp_path / f"whole-{every}", every)
    for number in range(60):
        every, cut = 1 + number % 2, tmp_path / f"cut-{number}"
        while killer.kill(cut, every, killer.took * draw.uniform(0.0, 0.4)):
            pass
        assert_same_runs(tmp_path / f"whole-{every}", cut)
        if len(killer.kills) >= 24 and {stage for _, stage in killer.kills} >= {0, 1, 2, 3}:
            return
    pytest.fail(f"the kills were too few, or all in the same stages: {killer.kills}")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_an_asynchronous_run_that_is_killed_three_times_trains_every_group_once(tmp_path: Path) -> None:
    killer = Killer("forkserver", ASYNC)
    for step in (1, 4, 8):
        killer.kill_after(tmp_path / "cut", step)
    killer.finish(killer.start(tmp_path / "cut", 1))
    assert all(step < ASYNC[0]["steps"] for step, _ in killer.kills), "killed when it was done"
    _check_whole(tmp_path / "cut")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_asynchronous_run_that_is_killed_at_any_moment_trains_every_group_once(
    tmp_path: Path,
) -> None:
    """20 kills, over as many runs as that takes. What was in flight begins again; nothing is left behind."""
    killer, draw = Killer("forkserver", ASYNC), random.Random(5)
    killer.run_whole(tmp_path / "whole", 1)
    for number in range(40):
        every, cut = 1 + number % 3, tmp_path / f"cut-{number}"
        while killer.kill(cut, every, killer.took * draw.uniform(0.05, 0.6)):
            pass
        _check_whole(cut)
        if len(killer.kills) >= 20:
            reached = {step for step, _ in killer.kills}
            assert len(reached) > 3, f"the kills were all at the same place: {reached}"
            return
    pytest.fail(f"the kills were too few: {killer.kills}")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_that_is_killed_takes_its_engines_with_it(tmp_path: Path) -> None:
    """Every group is trained once, and no engine's process lives on."""
    killer = Killer("forkserver", ASYNC, engines=2)
    for step in (1, 4, 8):
        killer.kill_after(tmp_path / "cut", step)
        deadline = time.monotonic() + 20
        while _engines_of(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not _engines_of(tmp_path)
    last = killer.start(tmp_path / "cut", 1)
    while last.exitcode is None and len(_engines_of(tmp_path)) < 2:
        time.sleep(0.05)
    assert len(_engines_of(tmp_path)) == 2
    killer.finish(last)
    _check_whole(tmp_path / "cut")
    assert not _engines_of(tmp_path)


def _engines_of(folder: Path) -> list[str]:
    """The processes that are engines of a run in this folder, by the environment that they have from it."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_engine = b"ludus.engine.replicas.process" in (path / "cmdline").read_bytes()
            if is_engine and str(folder).encode() in (path / "environ").read_bytes():
                found.append(path.name)
    return found


def _check_whole(folder: Path) -> None:
    """Every ordinal was trained in one step, and the versions of tokens keep the bound through all restarts."""
    run, steps, batch = RunFolder(folder), ASYNC[0]["steps"], ASYNC[0]["tasks"]
    files = [file for file in run.trajectory_files() if file.split == "train"]
    assert [file.step for file in files] == list(range(1, steps + 1))
    trained = [note["ordinal"] for file in files for note in read_notes(file.path)]
    assert sorted(trained) == list(range(steps * batch))
    rows = [row for row in run.metrics() if "lag_max" in row]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert [row["policy_version"] for row in rows] == list(range(steps))
    assert max(row["lag_max"] for row in rows) <= 3
    hidden = [path for path in folder.rglob(".*") if path.name != ".lock"]
    assert not hidden, "leftovers of writes that were cut off"
    latest = run.latest_checkpoint(thorough=True)
    assert latest is not None and latest.step == steps
    assert not json.loads((latest.path / "stage.json").read_text())["rollouts"]["plans"]
