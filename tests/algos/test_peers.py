"""The same numbers as verl and TRL, each run by its own interpreter.

Name the interpreters in LUDUS_VERL_PYTHON and LUDUS_TRL_PYTHON; without them these tests are skipped. Batches
are such that the projects mean the same thing: groups have at least two attempts, every attempt speaks, and a
row of GSPO has one advantage. Where they differ on purpose (a group of one keeps its raw reward in verl; TRL
adds 1e-4 to a deviation), the tests of this folder say what ours do.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ludus.algos as algos
from ludus.algos import (
    Attempt,
    LossInputs,
    TurnTokens,
    inputs_from,
    load_aggregation,
    load_estimator,
    load_loss,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
DISCOUNT, LAM, BOUND, LENGTH = 0.97, 0.9, 1.5, 9
SEEDS = [0, 1, 2]


class Batch:
    """Attempts of several turns, and the same as padded matrices."""

    def __init__(self, seed: int) -> None:
        source = random.Random(seed)
        self.attempts = []
        for number in range(12):
            turns = [
                TurnTokens(source.randint(1, 3), source.randint(0, 3))
                for _ in range(source.randint(1, 4))
            ]
            length = 1 + sum(turn.action + turn.observation for turn in turns)
            values = [source.gauss(0, 1) for _ in range(length)]
            reward = round(source.uniform(-1, 2), 2)
            self.attempts.append(Attempt(reward, turns, group=number // 4, values=values))
        self.inputs = inputs_from(self.attempts)
        self.lengths = [len(attempt.turn_of_token) for attempt in self.attempts]
        self.said = self.inputs.action_T
        self.row = self.inputs.trajectory_T[self.said]
        generator = torch.Generator().manual_seed(seed)
        size = len(self.said)
        self.old = -torch.rand(size, generator=generator, dtype=torch.float64) * 3
        self.new, self.reference = (
            self.old + 0.4 * torch.randn(size, generator=generator, dtype=torch.float64)
            for _ in range(2)
        )
        shared = torch.randn(len(self.attempts), generator=generator, dtype=torch.float64)
        self.advantages = shared[self.inputs.trajectory_T]

    def padded(self, values_T: Tensor) -> list[list[float]]:
        """One row for each attempt, its prompt (one token) left out."""
        rows = [row[1:].tolist() for row in torch.split(values_T.double(), self.lengths)]
        width = max(map(len, rows))
        return [row + [0.0] * (width - len(row)) for row in rows]

    def flat(self, matrix: list[list[float]]) -> Tensor:
        """A padded matrix at the action tokens."""
        rows = [[0.0, *row[: n - 1]] for row, n in zip(matrix, self.lengths, strict=True)]
        return torch.tensor([v for row in rows for v in row], dtype=torch.float64)[self.said]

    def given(self) -> dict[str, Any]:
        assert self.inputs.values_T is not None
        tensors = {
            "mask": self.said, "values": self.inputs.values_T, "old": self.old, "new": self.new,
            "reference": self.reference, "advantages": self.advantages,
            "rewards": algos.token_rewards(self.inputs),
        }  # fmt: skip
        numbers = {"discount": DISCOUNT, "lam": LAM, "bound": BOUND, "length": LENGTH}
        groups = [attempt.group for attempt in self.attempts]
        return {name: self.padded(t) for name, t in tensors.items()} | numbers | {"groups": groups}

    def loss(
        self, name: str, aggregation: str, kl_weight: float = 0.0, **options: float
    ) -> tuple[float, Tensor]:
        """Ours: the total, and its gradient at the action tokens."""
        new = self.new[self.said].clone().requires_grad_()
        sampled = LossInputs(new, self.old[self.said], self.advantages[self.said], self.row)
        loss, _ = load_loss(name, options)(sampled)
        loss = algos.with_regularization(
            loss, kl_A=algos.k3(new, self.reference[self.said]), kl_weight=kl_weight
        )
        return self.total(loss, aggregation, new)

    def total(self, loss: Tensor, aggregation: str, leaf: Tensor) -> tuple[float, Tensor]:
        weigh = load_aggregation(aggregation, {"length": LENGTH} if aggregation == "length" else None)
        weights = weigh(self.inputs.trajectory_T, self.said)[self.said]
        total = (loss * weights.double()).sum()
        return total.item(), torch.autograd.grad(total, leaf)[0]


@cache
def answers(peer: str, seed: int) -> dict[str, Any]:
    variable = f"LUDUS_{peer.upper()}_PYTHON"
    python = os.environ.get(variable)
    if not python:
        pytest.skip(f"{variable} does not name an interpreter that has {peer}")
    done = subprocess.run(
        [python, str(Path(__file__).with_name(f"peer_{peer}.py"))],
        input=json.dumps(Batch(seed).given()),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def assert_same_loss(batch: Batch, ours: tuple[float, Tensor], theirs: list[Any]) -> None:
    value, gradient = theirs
    assert ours[0] == pytest.approx(value, rel=1e-5, abs=1e-7)
    torch.testing.assert_close(ours[1], batch.flat(gradient), atol=1e-7, rtol=1e-5)
    assert float(ours[1].abs().max()) > 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("grpo", {}),
        ("dr_grpo", {}),
        ("rloo", {}),
        ("reinforce_pp", {"discount": DISCOUNT}),
        ("reinforce_pp_baseline", {}),
        ("gae", {"discount": DISCOUNT, "lam": LAM}),
    ],
)
def test_advantages_are_verls(name: str, options: dict[str, float], seed: int) -> None:
    theirs, batch = answers("verl", seed), Batch(seed)
    found = load_estimator(name, options)(batch.inputs)
    expected = batch.flat(theirs[name])
    torch.testing.assert_close(found.advantages_T[batch.said], expected, atol=1e-5, rtol=1e-5)
    if name == "gae":
        assert found.returns_T is not None
        torch.testing.assert_close(found.returns_T[batch.said], batch.flat(theirs["returns"]))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("theirs", "loss", "aggregation", "options"),
    [
        ("dual_clip", "dual_clip", "token", {"clip_low": 0.2, "clip_high": 0.28, "bound": BOUND}),
        (
            "dual_clip by length",
            "dual_clip",
            "length",
            {"clip_low": 0.2, "clip_high": 0.28, "bound": BOUND},
        ),
        ("gspo", "gspo", "sequence", {"clip_low": 0.1, "clip_high": 0.2}),
        ("cispo", "cispo", "token", {"clip_low": 0.4, "clip_high": 0.5}),
    ],
)
def test_losses_are_verls(
    theirs: str, loss: str, aggregation: str, options: dict[str, float], seed: int
) -> None:
    batch = Batch(seed)
    expected = answers("verl", seed)[theirs]
    assert_same_loss(batch, batch.loss(loss, aggregation, **options), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_value_loss_and_the_divergences_are_verls(seed: int) -> None:
    theirs, batch = answers("verl", seed), Batch(seed)
    assert batch.inputs.values_T is not None
    new = batch.new[batch.said].clone().requires_grad_()
    old, returns = batch.inputs.values_T[batch.said], batch.advantages[batch.said]
    loss, _ = algos.value_loss(new, old, returns, bound=0.3)
    assert_same_loss(batch, batch.total(loss, "token", new), theirs["value_loss"])
    for name in algos.DIVERGENCES:
        found = algos.load_divergence(name)(batch.new, batch.old)[batch.said]
        torch.testing.assert_close(found, batch.flat(theirs[name]))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("theirs", "loss", "aggregation", "options"),
    [
        ("clipped by sequence", "clipped", "sequence", {"clip_low": 0.2, "clip_high": 0.28}),
        ("clipped by token", "clipped", "token", {"clip_low": 0.2, "clip_high": 0.28}),
        ("clipped by length", "clipped", "length", {"clip_low": 0.2, "clip_high": 0.28}),
        ("gspo", "gspo", "sequence", {"clip_low": 0.1, "clip_high": 0.2}),
        ("cispo", "cispo", "token", {"clip_low": 1.0, "clip_high": 0.5}),
        ("clipped with k3", "clipped", "token", {"clip_low": 0.2, "clip_high": 0.28, "kl_weight": 0.3}),
    ],
)
def test_losses_are_trls(
    theirs: str, loss: str, aggregation: str, options: dict[str, float], seed: int
) -> None:
    batch = Batch(seed)
    expected = answers("trl", seed)[theirs]
    assert_same_loss(batch, batch.loss(loss, aggregation, **options), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_rloo_is_trls(seed: int) -> None:
    """Its gradient where ratios are 1. TRL's value counts a sequence once, ours every token of it."""
    batch = Batch(seed)
    batch.new = batch.old
    algorithm = algos.load_algorithm("rloo")
    new = batch.new[batch.said].clone().requires_grad_()
    loss, _ = algorithm.loss(
        LossInputs(new, batch.old[batch.said], batch.advantages[batch.said], batch.row)
    )
    weights = algorithm.weigh(batch.inputs.trajectory_T, batch.said)[batch.said]
    (gradient,) = torch.autograd.grad((loss * weights.double()).sum(), new)
    _, theirs = answers("trl", seed)["rloo, on policy"]
    torch.testing.assert_close(gradient, batch.flat(theirs), atol=1e-7, rtol=1e-5)
