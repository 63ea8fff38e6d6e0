"""RL with a judge: it learns by a good one, nothing by a coin, and games one that can be gamed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "judge_noise.py"


@pytest.fixture(scope="module")
def noise() -> Any:
    spec = importlib.util.spec_from_file_location("judge_noise", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_scripted_judge_is_as_wrong_as_it_says(noise: Any) -> None:
    for rate in (0.0, 0.2, 0.5):
        accuracy, kappa = noise.agreement(noise.ScriptedJudge(rate))
        assert accuracy == pytest.approx(1 - rate, abs=0.05)
        assert kappa == pytest.approx(1 - 2 * rate, abs=0.1)


@pytest.mark.slow
def test_a_judge_is_learned_from_as_far_as_it_can_be_trusted(noise: Any) -> None:
    ends = {
        rate: noise.tail(noise.train(noise.ScriptedJudge(rate), 0, 40), "reward/success")
        for rate in (0.0, 0.5)
    }
    assert ends[0.0] > ends[0.5] + 0.3
    gamed = noise.train(noise.ScriptedJudge(0.0, is_gameable=True), 0, 40)
    assert noise.tail(gamed, "reward") > gamed[0]["reward"] + 0.2
    assert noise.tail(gamed, "reward/success") < ends[0.0] - 0.3
