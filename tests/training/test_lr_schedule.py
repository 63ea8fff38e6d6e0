"""Learning-rate schedules beside those of torch, and at which place of its plan a run is."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from stage_runs import Talker
from training_helpers import TINY, tasks

import ludus
from ludus.training import OptimizerConfig
from ludus.training.optim.optimizers import lr_factor

TOTAL, WARMUP = 40, 5


def of_torch(name: str) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    rest = TOTAL - WARMUP
    schedules = torch.optim.lr_scheduler
    after = {
        "constant": lambda: schedules.ConstantLR(optimizer, factor=1.0),
        "linear": lambda: schedules.LinearLR(optimizer, 1.0, 0.1, total_iters=rest),
        "cosine": lambda: schedules.CosineAnnealingLR(optimizer, T_max=rest, eta_min=0.1),
    }[name]()
    found = [(step + 1) / WARMUP for step in range(WARMUP)]
    for _ in range(rest):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        after.step()
    return found


@pytest.mark.parametrize("name", get_args(OptimizerConfig.model_fields["schedule"].annotation))
def test_every_schedule_is_that_of_torch(name: str) -> None:
    config = OptimizerConfig(schedule=name, warmup_steps=WARMUP)
    assert [lr_factor(step, TOTAL, config) for step in range(TOTAL)] == pytest.approx(of_torch(name))


RATE = 1e-2
COSINE = {"learning_rate": RATE, "schedule": "cosine"}


def cosine(place: float) -> float:
    """From the peak to a tenth of it; `place` is the share of the plan that is done."""
    return RATE * (0.1 + 0.9 * (1 + math.cos(math.pi * place)) / 2)


def code() -> dict[str, Any]:
    parts = {"tasks": tasks(6), "held_out": tasks(2, first=50), "rewards": [at_some_tasks]}
    return {**parts, "agent": Talker()}


def run(folder: Path, stage: dict[str, Any], **more: Any) -> list[dict[str, float]]:
    """The metrics of the steps of one stage."""
    base = {name: table for name, table in TINY.items() if name != "rl"}
    kept = {"folder": str(folder), "checkpoint_every": 1}
    tables = {**base, "max_in_flight": 1, "stage": [stage], "run": kept}
    result = ludus.train(**tables, **code(), **more)
    return steps_of(result)


def steps_of(result: ludus.Result) -> list[dict[str, float]]:
    return [row for row in result.metrics if not any(name.startswith("eval/") for name in row)]


@ludus.reward
async def at_some_tasks(task: ludus.Task, trajectory: ludus.Trajectory) -> float:
    """At every third task, which come first here, attempts do not differ: there is nothing to learn."""
    return 0.0 if int(task.id) % 3 == 0 else float(trajectory.attempt % 2)


RL = {"kind": "rl", "steps": 6, "tasks": 1, "attempts": 2, "optimizer": COSINE}


def test_a_schedule_ends_whether_or_not_steps_had_signal(tmp_path: Path) -> None:
    rows = run(tmp_path / "run", RL)
    taken = {int(row["step"]) - 1: row["learning_rate"] for row in rows if "learning_rate" in row}
    assert 0 < len(taken) < 6 and max(taken) == 5, "some steps had nothing to learn from"
    assert taken == {step: pytest.approx(cosine(step / 6)) for step in taken}


def test_a_schedule_goes_on_over_updates_that_target_kl_leaves_out(tmp_path: Path) -> None:
    stage = {**RL, "tasks": 6, "epochs": 4, "target_kl": 1e-9, "steps": 3}
    rows = run(tmp_path / "run", stage)
    assert [row["updates"] for row in rows] == [1, 1, 1], "the limit leaves one of four updates"
    rates = [row["learning_rate"] for row in rows]
    assert rates == [pytest.approx(cosine(step / 3)) for step in range(3)]


def test_the_critics_warm_up_is_before_the_policys_schedule(tmp_path: Path) -> None:
    critic = {"warmup_steps": 2, "passes": 2, "optimizer": COSINE}
    rows = run(tmp_path / "run", {**RL, "algorithm": "ppo", "tasks": 6, "critic": critic})
    rates = {int(row["step"]) - 1: row["learning_rate"] for row in rows if "learning_rate" in row}
    assert rates == {step: pytest.approx(cosine((step - 2) / 4)) for step in range(2, 6)}
    # two passes in a step, of which the second one's rate is noted
    critics = [row["value_learning_rate"] for row in rows]
    assert critics == [pytest.approx(cosine((2 * step + 1) / 12)) for step in range(6)]


def test_preferences_and_rejection_skip_steps_and_not_their_schedule(tmp_path: Path) -> None:
    dpo = {"kind": "dpo", "steps": 6, "tasks": 1, "attempts": 2, "optimizer": COSINE}
    rows = run(tmp_path / "dpo", dpo)
    rates = {
        int(row["step"]) - 1: row["dpo/learning_rate"] for row in rows if "dpo/learning_rate" in row
    }
    assert 0 < len(rates) < 6
    assert rates == {step: pytest.approx(cosine(step / 6)) for step in rates}
    stage = {"kind": "rejection", "rounds": 6, "steps": 1, "tasks": 1, "attempts": 2, "batch": 1}
    rows = run(tmp_path / "rejection", {**stage, "threshold": 1.0, "optimizer": COSINE})
    name = "rejection/learning_rate"
    rates = {int(row["step"]) - 1: row[name] for row in rows if name in row}
    assert 0 < len(rates) < 6
    assert rates == {step: pytest.approx(cosine(step / 6)) for step in rates}


def test_a_resumed_schedule_is_the_same(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", RL)

    def stop(phase: str, step: int, total: int, metrics: dict[str, float]) -> None:
        if (phase, step) == ("RL", 3):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", RL, on_step=stop)
    result = ludus.train(resume=tmp_path / "cut", **code())
    shown = ("step", "learning_rate", "loss", "gradient_norm")
    rows = steps_of(result)
    assert [[r.get(n) for n in shown] for r in rows] == [[r.get(n) for n in shown] for r in whole]
