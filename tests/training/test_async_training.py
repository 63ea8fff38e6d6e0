"""Whole runs of asynchronous training: what staleness changes, what it keeps; each group is trained once."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stage_runs import Talker, assert_same_tensors, episodes, numbers
from training_helpers import TINY, add, even, tasks
from worker_parts import PlainSteps

import ludus
from ludus.core import ConfigError
from ludus.observe import RunFolder, read_notes
from ludus.observe.findings import metric_findings
from ludus.observe.metrics import undefined
from ludus.training import Learner, Parts, Recipe, build_run_context, train_async
from ludus.training.controller import StalledError
from ludus.training.ledger import Ledger
from played_steps import policy_update

RL = {**TINY["rl"], "steps": 4, "tasks": 2, "attempts": 2}


class Slow(Talker):
    """Its turns take random times."""

    def __init__(self, seed: int = 0, seconds: float = 0.01) -> None:
        self._draw, self._seconds = random.Random(seed), seconds

    async def run(self, episode: ludus.Episode) -> None:
        for _ in range(3):
            await episode.generate(max_tokens=5)
            await asyncio.sleep(self._draw.random() ** 4 * 4 * self._seconds)
            episode.observe("and then?")


def settings(folder: Path, **rl: Any) -> dict[str, Any]:
    run = {"checkpoint_every": 1, "keep_checkpoints": 50, "folder": str(folder)}
    return {**TINY, "rl": {**RL, **rl}, "run": run}


def code(**changes: Any) -> dict[str, Any]:
    return {"tasks": tasks(6), "tools": [add], "rewards": [even], "agent": Slow(), **changes}


def train(folder: Path, tables: dict[str, Any] | None = None, **rl: Any) -> RunFolder:
    ludus.train(**{**settings(folder, **rl), **(tables or {})}, **code(), progress=False)
    return RunFolder(folder)


def weights(run: RunFolder) -> dict[str, torch.Tensor]:
    return load_file(run.checkpoints()[-1].path / "model.safetensors")


def trained_ordinals(run: RunFolder) -> list[int]:
    files = [file for file in run.trajectory_files() if file.split == "train"]
    return [int(note["ordinal"]) for file in files for note in read_notes(file.path)]


def test_without_staleness_a_run_is_a_plain_loop(tmp_path: Path) -> None:
    """Play, update, go on: written down here once more, with the parts that a run is made of."""
    tables = {"max_in_flight": 1}
    found = train(tmp_path / "run", tables, staleness=0)

    async def plain_loop() -> dict[str, torch.Tensor]:
        recipe = Recipe.parse({**settings(tmp_path / "none"), **tables})
        rl = recipe.stages[0]
        async with await build_run_context(recipe, Parts(**code())) as context:
            learner = Learner(context.policy, rl.optimizer, rl.steps)
            plain = PlainSteps(context.task_sets, rl.rollouts, recipe.seed)
            for step in range(rl.steps):
                played = await plain.play(step)
                await context.engine.pause()
                policy_update(learner, played, rl, reference=None, critic=None)
                await context.engine.update_weights()
                await context.engine.resume()
            return {name: tensor.clone() for name, tensor in context.policy.state_dict().items()}

    expected = asyncio.run(plain_loop())
    for name, tensor in weights(found).items():
        assert torch.equal(tensor, expected[name]), name


def test_the_asynchronous_loop_without_slack_is_the_synchronous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: the ledger of a staleness of 0 makes the other loop wait for every group of a step."""
    tables = {"max_in_flight": 1, "evaluation": {"every": 2}}
    expected = train(tmp_path / "sync", tables)
    monkeypatch.setattr("ludus.training.stages.rl.Ledger", lambda b, s, w, total: Ledger(b, 0, 1, total))
    found = train(tmp_path / "async", tables, staleness=1, correction="none")
    assert_same_tensors(weights(expected), weights(found))
    assert episodes(expected) == episodes(found)
    further = {"groups_in_flight", "groups_finished", "wait_seconds", "paused_seconds"}
    further |= {"lag_mean", "lag_max", "versions_per_episode"}
    rows = [{k: v for k, v in row.items() if k not in further} for row in numbers(found)]
    assert rows == numbers(expected)


@pytest.mark.parametrize(("staleness", "window"), [(1, 1), (2, 1), (1, 3)])
def test_the_largest_lag_is_the_bound(tmp_path: Path, staleness: int, window: int) -> None:
    """Of the tokens themselves: by the versions that the engine noted while it sampled them."""
    run = train(tmp_path / "run", staleness={"steps": staleness, "window": window}, steps=8)
    rows = [row for row in run.metrics() if "lag_max" in row]
    bound = staleness + -(-(window - 1) // 2)
    assert len(rows) == 8 and max(row["lag_max"] for row in rows) <= bound
    if window == 1:
        assert max(row["lag_max"] for row in rows) == bound
        assert trained_ordinals(run) == list(range(16))
    assert sorted(trained_ordinals(run)) == list(range(16))
    assert not undefined(name for row in run.metrics() for name in row if name not in ("step", "time"))
    assert {"importance_weight", "importance_cut", "ess", "paused_seconds"} <= rows[-1].keys()
    for step, row in enumerate(rows):
        spans = [
            {span.version for action in t.actions for span in action.versions}
            for t in run.trajectories(step + 1)
        ]
        assert row["lag_max"] == max(step - min(one) for one in spans)
        assert row["versions_per_episode"] == pytest.approx(sum(map(len, spans)) / len(spans))


class Stop(Exception):
    pass


def stop_at(step: int, error: type[BaseException]) -> Any:
    def on_step(phase: str, done: int, total: int, metrics: dict[str, float]) -> None:
        if phase != "evaluation" and done == step:
            raise error

    return on_step


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
def test_a_stopped_run_goes_on_and_trains_every_group_once(tmp_path: Path, error: Any) -> None:
    tables = settings(tmp_path, staleness=2, steps=6)
    tables["run"]["checkpoint_every"] = 2
    for step in (1, 3, 4):
        given = {"resume": tmp_path} if RunFolder(tmp_path).is_run else tables
        with pytest.raises(error):
            ludus.train(**given, **code(), on_step=stop_at(step, error), progress=False)
    ludus.train(resume=tmp_path, **code(), progress=False)
    assert trained_ordinals(RunFolder(tmp_path)) == list(range(12))
    versions = [
        row["policy_version"] for row in RunFolder(tmp_path).metrics() if "policy_version" in row
    ]
    assert versions == list(range(6))


def test_a_finished_run_can_be_made_longer(tmp_path: Path) -> None:
    train(tmp_path, staleness=2, steps=2)
    ludus.train(resume=tmp_path, rl={"steps": 4}, **code(), progress=False)
    assert trained_ordinals(RunFolder(tmp_path)) == list(range(8))


async def test_a_cancelled_update_is_finished_and_saved(tmp_path: Path) -> None:
    """Ctrl-C while the weights change: the step is whole, and the last one."""
    tables = settings(tmp_path, staleness=1, steps=50)
    task: asyncio.Task[Any]

    @ludus.reward(name="even")
    async def telling(trajectory: ludus.Trajectory) -> float:
        nonlocal scored
        scored += 1
        if scored == 13:
            task.cancel()
        return float(scored % 5)

    scored = 0
    task = asyncio.create_task(train_async(Recipe.parse(tables), Parts(**code(rewards=[telling]))))
    with pytest.raises(asyncio.CancelledError):
        await task
    run = RunFolder(tmp_path)
    latest = run.checkpoints()[-1].step
    assert 0 < latest < 50 and latest == run.metrics()[-1]["step"]
    assert trained_ordinals(run) == list(range(2 * latest))


def test_evaluation_patience_and_several_stages(tmp_path: Path) -> None:
    """The first stage ends early with groups in flight, which are dropped; the second begins afresh."""
    stage = {"kind": "rl", **RL, "steps": 30, "staleness": 1}
    tables = {name: table for name, table in settings(tmp_path).items() if name != "rl"}
    tables |= {
        "stage": [stage, {**stage, "steps": 2, "staleness": 2}],
        "evaluation": {"every": 1, "patience": 2, "best_by": "reward"},
    }
    ludus.train(**tables, **code(held_out=tasks(2, first=50)), progress=False)
    run = RunFolder(tmp_path)
    done = run.recipe()["stage"][0]["steps"]
    assert 2 <= done <= 30
    assert trained_ordinals(run) == [*range(2 * done), *range(4)]
    measured = [row["step"] for row in run.metrics() if "eval/reward" in row]
    assert measured == list(range(done + 3))


def test_a_hanging_episode_ends_the_run_with_its_name(tmp_path: Path) -> None:
    class Hanging(Talker):
        async def run(self, episode: ludus.Episode) -> None:
            if episode.task.id == "3":
                await asyncio.sleep(1000)
            await episode.generate(max_tokens=5)

    with pytest.raises(StalledError, match=r"for the groups of step .*task '3'"):
        ludus.train(
            **settings(tmp_path, staleness={"steps": 1, "stall_seconds": 1.0}),
            **code(agent=Hanging()),
            progress=False,
        )
    assert "waited 1 s for the groups of step" in (tmp_path / "logs" / "ludus.log").read_text()


def test_engine_and_trainer_are_compared_under_the_same_weights(tmp_path: Path) -> None:
    """Not on what older weights have sampled: a run whose policy moves fast is no run whose engine is wrong."""
    fast = {"staleness": 2, "steps": 8, "optimizer": {"learning_rate": 3e-2}}
    rows = [row for row in train(tmp_path / "run", **fast).metrics() if "lag_mean" in row]
    assert max(row["lag_max"] for row in rows) >= 1 and min(row["ess"] for row in rows) < 0.9
    compared = [row for row in rows if "logprob_difference_mean" in row]
    assert compared and rows[0] in compared, "the first step has nothing older"
    assert max(row["logprob_difference_max"] for row in compared) < 1e-3
    stale = [row for row in rows if row not in compared]
    assert all(row["lag_mean"] >= 1 for row in stale)
    assert not [one for one in metric_findings(rows) if one.kind == "engine_apart"]


def test_stored_groups_are_not_compared_with_newer_weights(tmp_path: Path) -> None:
    again = {"replay_buffer": {"groups": 2}, "steps": 6, "optimizer": {"learning_rate": 3e-2}}
    rows = [row for row in train(tmp_path / "run", **again).metrics() if "replay/groups" in row]
    assert max(row["replay/groups"] for row in rows) > 0
    assert max(row["logprob_difference_max"] for row in rows if "logprob_difference_max" in row) < 1e-3


REPLAYED = {
    "plain": {"staleness": 2, "steps": 6},
    "sync": {"staleness": 0},
    "much": {
        "staleness": {"steps": 1, "updates": True}, "algorithm": "ppo", "updates": 2,
        "kl": {"weight": 0.1, "control": {"target": 0.01, "horizon": 50}}, "keep_attempts": 2,
        "attempts": 4, "refill": {"rounds": 1}, "reference_sync": {"every": 2, "mixup_alpha": 0.5},
        "critic": {"warmup_steps": 1, "optimizer": {"learning_rate": 1e-2}},
        "broken": {"no_answer": "mask", "void_turn": -0.1},
    },
}  # fmt: skip


@pytest.mark.parametrize("table", REPLAYED.values(), ids=REPLAYED)
def test_training_from_the_record_gives_the_same_weights(tmp_path: Path, table: Any) -> None:
    """Bit for bit, though nothing is played: an agent that cannot play is given."""

    class Broken(ludus.Agent):
        async def run(self, episode: ludus.Episode) -> None:
            raise AssertionError("nothing is played in a replay")

    warm = {"steps": 2, "batch": 2, "optimizer": {"learning_rate": 1e-2}}
    shown = [[ludus.Message("user", "1 plus 2?"), ludus.Message("assistant", "3")]] * 2
    tables = {**settings(tmp_path / "run", **table), "warm_start": warm}
    given = code(held_out=tasks(2, first=50), demonstrations=shown)
    ludus.train(**tables, evaluation={"every": 2}, **given, progress=False)
    again = {"folder": str(tmp_path / "again"), "checkpoint_every": 1, "keep_checkpoints": 50}
    given["agent"] = Broken()
    ludus.train(replay=tmp_path / "run", run=again, **given, progress=False)
    first, second = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "again")
    assert [one.step for one in first.checkpoints()] == [one.step for one in second.checkpoints()]
    for old, new in zip(first.checkpoints(), second.checkpoints(), strict=True):
        for name in ("model.safetensors", "optimizer.safetensors", "critic.safetensors"):
            if (old.path / name).exists():
                assert_same_tensors(
                    load_file(old.path / name), load_file(new.path / name), f"{new.step}/{name}"
                )
    assert not second.trajectory_files()


def test_a_replay_needs_the_episodes_of_every_step(tmp_path: Path) -> None:
    tables = settings(tmp_path / "run", staleness=1)
    tables["run"]["trajectories_every"] = 2
    ludus.train(**tables, **code(), progress=False)
    with pytest.raises(
        ConfigError, match=r"no episodes of 2 of the 4 steps of rl .*trajectories_every=1"
    ):
        ludus.train(
            replay=tmp_path / "run", run={"folder": str(tmp_path / "no")}, **code(), progress=False
        )
    with pytest.raises(ConfigError, match="is not a run"):
        ludus.train(replay=tmp_path / "nowhere", **code(), progress=False)
    with pytest.raises(ConfigError, match="leave out the recipe"):
        ludus.train("safe", replay=tmp_path / "run", progress=False)


def test_a_replay_that_was_stopped_goes_on_from_the_record(tmp_path: Path) -> None:
    train(tmp_path / "run", staleness=1)
    run = {"folder": str(tmp_path / "again"), "checkpoint_every": 1}
    with pytest.raises(Stop):
        ludus.train(replay=tmp_path / "run", run=run, **code(), on_step=stop_at(2, Stop), progress=False)
    ludus.train(resume=tmp_path / "again", **code(), progress=False)
    assert_same_tensors(weights(RunFolder(tmp_path / "run")), weights(RunFolder(tmp_path / "again")))


def test_what_rewards_remember_is_of_the_training_groups_alone(tmp_path: Path) -> None:
    """Evaluations between the steps neither add to it nor lose what is scored around them."""

    class Counting:
        name = "counting"

        def __init__(self) -> None:
            self.seen: list[str] = []

        async def score_group(self, group: ludus.Group) -> list[float]:
            await asyncio.sleep(0.005)
            self.seen.append(group.task.id)
            return [0.0 for _ in group.trajectories]

        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.seen}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.seen = list(state["seen"])

    counting = Counting()
    given = code(held_out=tasks(2, first=50), group_rewards=[counting])
    tables = settings(tmp_path, staleness=2, steps=5)
    ludus.train(**tables, evaluation={"every": 1}, **given, progress=False)
    run = RunFolder(tmp_path)
    trained = [t.task.id for step in range(1, 6) for t in run.trajectories(step) if t.attempt % 2 == 0]
    assert sorted(counting.seen) == sorted(trained) and len(trained) == 10
