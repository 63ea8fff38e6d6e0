"""Learning-rate schedules beside those of torch."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from ludus.training import OptimizerConfig
from ludus.training.optim.optimizer import lr_factor

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
