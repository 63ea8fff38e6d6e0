"""Algorithms by name, with options that are checked, and algorithms of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ludus.algos as algos
from ludus.algos import (
    Attempt,
    LossInputs,
    Need,
    TurnTokens,
    inputs_from,
    load_algorithm,
    load_estimator,
    load_loss,
)
from ludus.core import ConfigError

PAIR = [Attempt(1.0, [TurnTokens(1)]), Attempt(0.0, [TurnTokens(2)])]


@pytest.mark.parametrize("name", list(algos.ALGORITHMS))
def test_every_algorithm_can_be_loaded_and_run(name: str) -> None:
    needs_length = algos.ALGORITHMS[name].aggregation == "length"
    algorithm = load_algorithm(name, aggregation_options={"length": 4} if needs_length else None)
    batch = [
        Attempt(r, [TurnTokens(2, 1, anchor=0), TurnTokens(1)], values=[0.0] * 5) for r in (1.0, 0.0)
    ]
    inputs = inputs_from(batch)
    advantages = algorithm.estimate(inputs).advantages_T[inputs.action_T]
    logprobs = torch.full_like(advantages, -1.0).requires_grad_()
    sampled = LossInputs(logprobs, logprobs.detach(), advantages, inputs.trajectory_T[inputs.action_T])
    weights = algorithm.weigh(inputs.trajectory_T, inputs.action_T)[inputs.action_T]
    (algorithm.loss(sampled)[0] * weights).sum().backward()
    assert logprobs.grad is not None
    # what was said in the better attempt is pulled up, in the worse one pushed down
    assert (logprobs.grad[:3] < 0).all() and (logprobs.grad[3:] > 0).all()


def test_an_algorithm_brings_its_own_defaults_and_takes_others() -> None:
    sampled = LossInputs(
        torch.tensor([0.0]), torch.tensor([-0.25]), torch.tensor([1.0]), torch.tensor([0])
    )
    ratio = torch.tensor(0.25).exp().item()
    assert load_algorithm("grpo").loss(sampled)[0].item() == pytest.approx(-1.2)
    assert load_algorithm("dapo").loss(sampled)[0].item() == pytest.approx(-1.28)
    wider = load_algorithm("dapo", loss_options={"clip_high": 0.5})
    assert wider.loss(sampled)[0].item() == pytest.approx(-ratio)
    other = load_algorithm("dapo", loss="policy_gradient")
    assert other.loss(sampled)[0].item() == 0.0
    assert load_algorithm("ppo").needs == {Need.CRITIC}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gae", {"lamda": 1.0}, "lamda: unknown key; did you mean 'lam'?"),
        ("gae", {"lam": 1.5}, "lam: .*less than or equal to 1"),
        ("gae", {"discount_per": "day"}, "discount_per: .*'token' or 'turn'"),
        ("grpo", {"discount": 1.0}, "discount: unknown key"),
        ("grppo", {}, "Did you mean 'grpo'?"),
        ("ludus.algos:EPSILON_OF_MINE", {}, "has no 'EPSILON_OF_MINE'"),
        ("math:pi", {}, "must be a function"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    name: str, options: dict[str, float], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_estimator(name, options)


def test_an_unknown_algorithm_and_stray_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no algorithm called 'pppo'\. Did you mean 'ppo'"):
        load_algorithm("pppo")
    with pytest.raises(ConfigError, match="no correction is named"):
        load_algorithm("grpo", correction_options={"high": 2.0})
    with pytest.raises(ConfigError, match="length: must be given"):
        load_algorithm("dr_grpo")


def test_an_algorithm_of_ones_own_is_one_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from __future__ import annotations\n"
        "from ludus.algos import AdvantageInputs, Advantages, LossInputs\n"
        "def best_only(inputs: AdvantageInputs, *, threshold: float = 0.5) -> Advantages:\n"
        "    return inputs.broadcast((inputs.rewards_N > threshold).double())\n"
        "def squared(sampled: LossInputs, *, power: int = 2):\n"
        "    return -sampled.advantages_A * sampled.logprobs_A**power, {}\n"
    )
    algorithm = load_algorithm(f"{file}:best_only", {"threshold": 0.9}, loss=f"{file}:squared")
    assert algorithm.estimate(inputs_from(PAIR)).advantages_T.tolist() == [0, 1, 0, 0, 0]
    assert algorithm.needs == frozenset()
    with pytest.raises(ConfigError, match="power"):
        load_loss(f"{file}:squared", {"power": "high"})


OWN = """
import torch
from ludus.algos import Advantages, Need, needs

def by_trajectory(inputs):
    return Advantages(inputs.rewards_N)

def bare(inputs):
    return inputs.rewards_N[inputs.trajectory_T]

def whole(inputs):
    return Advantages(inputs.action_T)

def divided(inputs):
    return inputs.broadcast(inputs.rewards_N / 0)

@needs(Need.CRITIC)
def silent(inputs):
    return inputs.broadcast(inputs.rewards_N)

def placed(inputs, power=2.0):
    return inputs.broadcast(inputs.rewards_N**power)

def demanding(inputs, power):
    return inputs.broadcast(inputs.rewards_N**power)

def mean_loss(sampled):
    return -(sampled.advantages_A * sampled.logprobs_A).mean(), {}

def lonely_loss(sampled):
    return -sampled.advantages_A * sampled.logprobs_A

def flat(trajectory_T, trained_T):
    return torch.ones(1)
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("by_trajectory", r"estimator '.*own.py:by_trajectory' returned advantages_T as a tensor of "
                          r"float\d+ and shape \(2,\); one for each token is wanted: .* \(5,\)"),
        ("bare", r"returned a tensor of float\d+ and shape \(5,\); an Advantages is wanted: inputs\.broadcast"),
        ("whole", r"as a tensor of bool .* floats"),
        ("divided", r"of which 5 of 5 are not finite"),
        ("silent", r"needs a critic and returned no returns_T"),
    ],
)  # fmt: skip
def test_an_estimator_that_returns_something_else_is_named(own: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_algorithm(f"{own}:{name}").estimate(inputs_from(PAIR))


def test_losses_and_aggregations_that_return_something_else_are_named(own: str) -> None:
    one = torch.tensor([-1.0, -2.0])
    sampled = LossInputs(one, one, one, torch.tensor([0, 0]))
    with pytest.raises(
        ConfigError, match=r"'.*mean_loss' returned a loss as .*shape \(\);.*not their mean"
    ):
        load_algorithm("grpo", loss=f"{own}:mean_loss").loss(sampled)
    with pytest.raises(ConfigError, match=r"'.*lonely_loss' returned .*\(loss_A, metrics_A\) is wanted"):
        load_algorithm("grpo", loss=f"{own}:lonely_loss").loss(sampled)
    weigh = load_algorithm("grpo", aggregation=f"{own}:flat").weigh
    with pytest.raises(ConfigError, match=r"'.*flat' returned weights as .*\(1,\)"):
        weigh(torch.zeros(3, dtype=torch.long), torch.ones(3, dtype=torch.bool))


def test_options_that_are_taken_by_position_are_refused(own: str) -> None:
    assert load_estimator(f"{own}:placed")(inputs_from(PAIR)).advantages_T.tolist() == [0, 1, 0, 0, 0]
    hint = r"options stand behind a '\*': def placed\(inputs, \*, power=2.0\)"
    with pytest.raises(ConfigError, match=hint):
        load_estimator(f"{own}:placed", {"power": 3})
    with pytest.raises(ConfigError, match=r"def demanding\(inputs, \*, power\)"):
        load_estimator(f"{own}:demanding")


RAISING = """
import torch
from ludus.core.failures import ConfigError

def estimator(inputs):
    return 1 / 0

def correction(sampled):
    return torch.ones(2) @ torch.ones(3)

def aggregation(trajectory_T, trained_T):
    raise ConfigError("said on purpose")

def loss(sampled):
    raise torch.OutOfMemoryError("no memory")
"""


def test_exceptions_are_told_by_the_lines_of_their_author(tmp_path: Path) -> None:
    """Not those of Ludus or torch. What was meant to be told stays, and so does a lack of memory."""
    (tmp_path / "raising.py").write_text(RAISING)
    own = str(tmp_path / "raising.py")
    sampled = LossInputs(
        torch.zeros(1), torch.zeros(1), torch.zeros(1), torch.zeros(1, dtype=torch.long)
    )
    with pytest.raises(ConfigError) as error:
        load_estimator(f"{own}:estimator")(inputs_from(PAIR))
    said = "raised ZeroDivisionError: division by zero (raising.py:6 in estimator)"
    assert str(error.value) == f"the estimator '{own}:estimator' {said}"
    corrected = load_algorithm("grpo", correction=f"{own}:correction")
    with pytest.raises(ConfigError, match=r"RuntimeError: .* \(raising\.py:9 in correction\)$"):
        corrected.loss(sampled)
    with pytest.raises(ConfigError, match=r"^said on purpose$"):
        load_algorithm("grpo", aggregation=f"{own}:aggregation").weigh(torch.zeros(1), torch.ones(1))
    with pytest.raises(torch.OutOfMemoryError):
        load_loss(f"{own}:loss")(sampled)
