"""bf16 weights with float32 masters: small updates count, addresses stay, resuming is exact."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from small_steps import imitation, learner_of, packs, rows_of_lengths, small_model, weights_of
from torch import Tensor, nn

from ludus.core import LudusError
from ludus.training import Learner, OptimizerConfig, action_logprobs
from ludus.training.optim.accumulation import GradientAccumulator, total_norm
from ludus.training.optim.optimizers import MasterAdamW, MasterWeights

ROWS = rows_of_lengths([9, 14, 6])
STEPS = 250


def trained(learner: Learner, steps: int, budget: int = 1 << 14) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for _ in range(steps):
        metrics = learner.step(packs(ROWS, budget), imitation)
    return metrics


def plainly_trained(model: nn.Module, steps: int, rate: float) -> None:
    """The stock way: AdamW on the bf16 weights themselves."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        for pack in packs(ROWS):
            logprobs_A, _ = action_logprobs(model, pack, 1.0)
            (-logprobs_A * pack.weights_A).sum().backward()
        optimizer.step()


def share_of(moved: list[Tensor], wanted: list[Tensor]) -> float:
    """How far one displacement goes along another, as a share of it."""
    along = sum(float((a * b).sum()) for a, b in zip(moved, wanted, strict=True))
    return along / sum(float((b * b).sum()) for b in wanted)


def displacement(model: nn.Module, start: list[Tensor]) -> list[Tensor]:
    return [now - then for now, then in zip(weights_of(model), start, strict=True)]


@pytest.mark.slow
def test_small_updates_move_bf16_weights_as_they_move_float32_ones() -> None:
    exact, ours, plain = (
        small_model(dtype, num_hidden_layers=1)
        for dtype in (torch.float32, torch.bfloat16, torch.bfloat16)
    )
    start = weights_of(exact)
    trained(learner_of(exact, learning_rate=1e-6), STEPS)
    trained(learner_of(ours, learning_rate=1e-6), STEPS)
    plainly_trained(plain, STEPS, 1e-6)
    wanted = displacement(exact, start)
    matrices = [i for i, p in enumerate(exact.parameters()) if p.ndim >= 2]
    wanted = [wanted[i] for i in matrices]
    reached = share_of([displacement(ours, start)[i] for i in matrices], wanted)
    assert 0.9 < reached < 1.1
    lost = share_of([displacement(plain, start)[i] for i in matrices], wanted)
    assert lost < 0.2, "plain bf16 AdamW is not expected to follow: the test would prove nothing"


def test_the_module_keeps_its_storage(tmp_path: Path) -> None:
    model = small_model(torch.bfloat16)
    before = [(p.data_ptr(), id(p)) for p in model.parameters()]
    start = weights_of(model)
    learner = learner_of(model)
    trained(learner, 3)
    learner.save(tmp_path / "state")
    learner.load(tmp_path / "state")
    trained(learner, 1)
    assert [(p.data_ptr(), id(p)) for p in model.parameters()] == before
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(start, weights_of(model), strict=True))


def test_weights_that_share_a_storage_stay_in_it() -> None:
    """As where a forward pass gives several projections one matrix."""
    model: Any = small_model(torch.bfloat16)
    mlp = model.model.layers[0].mlp
    joint = torch.cat([mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()])
    mlp.gate_proj.weight.data, mlp.up_proj.weight.data = joint[:48], joint[48:]
    learner = learner_of(model)
    trained(learner, 2)
    again = torch.cat([mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()])
    assert torch.equal(joint, again)
    mlp.gate_proj.weight.data = joint[:48]  # giving a weight its place is no change of it
    apart = small_model(torch.bfloat16)
    trained(learner_of(apart), 3)
    trained(learner, 1)
    for one, other in zip(weights_of(model), weights_of(apart), strict=True):
        assert torch.equal(one, other)


def test_float32_parameters_are_their_own_masters() -> None:
    model = small_model()
    masters = MasterWeights(model.parameters())
    assert all(masters.of(p) is p for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resuming_is_exact(dtype: torch.dtype, tmp_path: Path) -> None:
    straight = small_model(dtype)
    trained(learner_of(straight), 6)

    first = small_model(dtype)
    learner = learner_of(first)
    trained(learner, 3)
    learner.save(tmp_path / "state")
    saved = copy.deepcopy(first.state_dict())

    resumed = small_model(dtype)
    resumed.load_state_dict(saved)
    learner = learner_of(resumed)
    learner.load(tmp_path / "state")
    trained(learner, 3)
    assert learner.steps_done == 6
    for one, other in zip(weights_of(straight), weights_of(resumed), strict=True):
        assert torch.equal(one, other)


def test_weights_that_somebody_loads_are_the_truth() -> None:
    model, other = small_model(torch.bfloat16), small_model(torch.bfloat16)
    learner = learner_of(model)
    trained(learner, 3)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    model.load_state_dict(other.state_dict())
    learner.config = learner.config.model_copy(update={"learning_rate": 1e-30})
    trained(learner, 1)
    for one, expected in zip(weights_of(model), weights_of(other), strict=True):
        assert torch.equal(one, expected)


def test_masters_beside_other_weights_are_dropped_where_they_disagree(tmp_path: Path) -> None:
    model = small_model(torch.bfloat16)
    learner = learner_of(model)
    trained(learner, 2)
    learner.save(tmp_path / "state")
    fresh = small_model(torch.bfloat16)  # not the weights that belong to these masters
    start = weights_of(fresh)
    learner = learner_of(fresh, learning_rate=1e-30)
    learner.load(tmp_path / "state")
    trained(learner, 1)
    for one, expected in zip(weights_of(fresh), start, strict=True):
        assert torch.equal(one, expected)


def fuse(learner: Learner, kind: str) -> None:
    """The optimizer as it is on a GPU: torch's, which it also has for CPUs, or the one kernel's twin."""
    for group in learner.optimizer.param_groups:
        group["fused"] = True
    learner.optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    learner.optimizer._has_kernel = kind == "at once"


@pytest.mark.parametrize("kind", ["fused", "at once"])
@pytest.mark.parametrize("limit", [1e9, 0.01])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_step_is_the_plain_step(dtype: torch.dtype, limit: float, kind: str) -> None:
    plain, fused = small_model(dtype), small_model(dtype)
    expected = trained(learner_of(plain, max_gradient_norm=limit), 5)
    learner = learner_of(fused, max_gradient_norm=limit)
    fuse(learner, kind)
    assert trained(learner, 5) == pytest.approx(expected, rel=1e-3)
    for one, other in zip(weights_of(plain), weights_of(fused), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-2)


@pytest.mark.parametrize("kind", ["plain", "fused", "at once"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_not_finite_changes_nothing(dtype: torch.dtype, kind: str) -> None:
    model = small_model(dtype)
    learner = learner_of(model)
    if kind != "plain":
        fuse(learner, kind)
    trained(learner, 1)
    start, before = weights_of(model), copy.deepcopy(learner.tensors())

    def broken(logprobs_A: Tensor, entropy_A: Tensor, pack: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return logprobs_A * float("nan"), {}

    with pytest.raises(LudusError, match="the weights were left as they were"):
        learner.step(packs(ROWS), broken)
    assert learner.steps_done == 1
    for one, other in zip(start, weights_of(model), strict=True):
        assert torch.equal(one, other)
    for name, value in learner.tensors().items():
        assert torch.equal(value, before[name]), name
    trained(learner, 1)
    assert learner.steps_done == 2


def test_gradients_of_micro_batches_are_summed_in_float32() -> None:
    """In bf16 the sum over many passes would drift away from the gradient of one."""
    rows = rows_of_lengths([11] * 24, seed=3)
    exact = learner_of(small_model())
    exact.step(packs(rows), imitation)
    many = learner_of(small_model(torch.bfloat16))
    many.step(packs(rows, budget=1), imitation)
    for (_, wanted), (_, given) in zip(
        exact._gradients.in_order(), many._gradients.in_order(), strict=True
    ):
        assert given.dtype == torch.float32
        scale = float(wanted.abs().max())
        assert float((given - wanted).abs().mean()) < 0.01 * scale


def test_gradients_in_half_precision_are_gone_when_their_copies_are_stepped_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learner = learner_of(small_model(torch.bfloat16))
    found: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    take, step = GradientAccumulator._take, MasterAdamW.step

    def taken(self: GradientAccumulator, parameter: Tensor) -> None:
        take(self, parameter)
        found.append(weakref.ref(self._totals[parameter]))  # type: ignore[index]

    def stepped(self: MasterAdamW) -> None:
        alive.append(sum(gradient() is not None for gradient in found))
        step(self)

    monkeypatch.setattr(GradientAccumulator, "_take", taken)
    monkeypatch.setattr(MasterAdamW, "step", stepped)
    learner.step(packs(ROWS), imitation)
    assert found
    assert alive == [0]


@pytest.mark.parametrize("at_once", [False, True])
def test_a_parameter_without_a_gradient_stays_as_it_is(at_once: bool) -> None:
    one, other = (torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    optimizer = MasterAdamW([one, other], OptimizerConfig(learning_rate=0.1))
    optimizer._has_kernel = at_once
    optimizer.apply_gradients([(one, torch.ones(2, 2)), (other, torch.ones(2, 2))])
    before = other.detach().clone()
    norm = optimizer.apply_gradients([(one, torch.full((2, 2), 3.0))])
    assert float(norm) == pytest.approx(6.0)
    assert torch.equal(other.detach(), before)
    assert not torch.equal(one.detach(), before)


def test_a_norm_is_that_of_all_tensors_whatever_they_are() -> None:
    tensors = [torch.full((3,), 2.0), torch.full((2, 2), 1.0, dtype=torch.bfloat16)]
    assert float(total_norm(tensors)) == pytest.approx(4.0)
    assert float(total_norm([])) == 0.0
    apart = [torch.ones(3, device="meta"), torch.ones(2)]
    assert total_norm(apart).device == torch.device("meta")
