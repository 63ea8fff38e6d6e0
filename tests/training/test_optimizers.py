"""Optimizers beside AdamW: Muon against a reference, exact resuming, and what is refused."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from small_steps import imitation, learner_of, packs, rows_of_lengths, small_model, weights_of
from torch import nn

from ludus import train
from ludus.core import ConfigError
from ludus.training import Learner, OptimizerConfig, RLConfig
from ludus.training.optim.optimizers import MasterWeights, OtherOptimizer, check_optimizer, optimizer_for
from ludus.training.optim.sharding import ALONE

ROWS = rows_of_lengths([9, 14, 6])
MUON = {"name": "muon", "learning_rate": 1e-2}


def orthogonal(update: np.ndarray, iterations: int = 5) -> np.ndarray:
    """The quintic iteration of Jordan et al. in float64: singular values go to about 1."""
    wide = update if update.shape[0] <= update.shape[1] else update.T
    x = wide / np.linalg.norm(wide)
    for _ in range(iterations):
        square = x @ x.T
        x = 3.4445 * x - 4.775 * square @ x + 2.0315 * square @ square @ x
    return x if update.shape[0] <= update.shape[1] else x.T


class ReferenceMuon:
    """The papers' update of one matrix (Jordan et al., 2024, with Moonlight's scale), in float64."""

    def __init__(self, weight: np.ndarray, rate: float, decay: float, momentum: float) -> None:
        self.weight, self.mean = weight.copy(), np.zeros_like(weight)
        self.rate, self.decay, self.momentum = rate, decay, momentum

    def step(self, gradient: np.ndarray) -> None:
        self.mean = self.momentum * self.mean + (1 - self.momentum) * gradient
        ahead = (1 - self.momentum) * gradient + self.momentum * self.mean
        scale = 0.2 * math.sqrt(max(self.weight.shape))
        self.weight -= self.rate * self.decay * self.weight
        self.weight -= self.rate * scale * orthogonal(ahead)


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6)])
def test_muon_moves_a_matrix_as_the_papers_say(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(shape[1], shape[0], bias=False)
    weight = linear.weight
    start = weight.detach().double().numpy().copy()
    reference = ReferenceMuon(start, rate=0.1, decay=0.05, momentum=0.9)
    config = OptimizerConfig(
        name="muon", learning_rate=0.1, weight_decay=0.05, max_gradient_norm=1e9, muon={"momentum": 0.9}
    )
    optimizer = optimizer_for(nn.ModuleList([linear]), config, ALONE)
    for _ in range(4):
        gradient = torch.randn(shape)
        optimizer.apply_gradients([(weight, gradient)])
        reference.step(gradient.double().numpy())
    moved, wanted = weight.detach().double().numpy() - start, reference.weight - start
    # torch iterates in bfloat16
    assert np.linalg.norm(moved - wanted) < 0.03 * np.linalg.norm(wanted)


def test_muon_takes_the_matrices_of_layers_and_adamw_the_rest_as_ever() -> None:
    mixed, plain = small_model(), small_model()
    learner_of(mixed, **MUON).step(packs(ROWS), imitation)
    learner_of(plain, learning_rate=1e-2).step(packs(ROWS), imitation)
    names = [name for name, _ in mixed.named_parameters()]
    for name, one, other in zip(names, weights_of(mixed), weights_of(plain), strict=True):
        is_muon = one.ndim == 2 and "layers." in name
        assert torch.equal(one, other) == (not is_muon), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_with_muon_resumes_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    model = small_model(dtype)
    learner = learner_of(model, **MUON)
    for _ in range(3):
        learner.step(packs(ROWS), imitation)
    learner.save(tmp_path / "optimizer.safetensors")
    other = copy.deepcopy(model)
    resumed = learner_of(other, **MUON)
    resumed.load(tmp_path / "optimizer.safetensors")
    for one in (learner, resumed):
        for _ in range(3):
            one.step(packs(ROWS), imitation)
    assert all(map(torch.equal, weights_of(model), weights_of(other)))


class CountedStates(torch.optim.Optimizer):
    """Keeps its state as bitsandbytes' optimizers do: made by `init_state`, in bytes, counted by a number."""

    def __init__(self, params: object, lr: float, betas: object) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})  # type: ignore[arg-type]

    def init_state(self, group: dict[str, object], p: torch.Tensor, gindex: int, pindex: int) -> None:
        assert self.param_groups[gindex]["params"][pindex] is p
        self.state[p] = {
            "step": 0,
            "state1": torch.zeros(p.shape, dtype=torch.uint8),
            "qmap1": torch.ones(256),
        }

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for gindex, group in enumerate(self.param_groups):
            for pindex, p in enumerate(group["params"]):
                if not self.state[p]:
                    self.init_state(group, p, gindex, pindex)
                self.state[p]["step"] += 1
                self.state[p]["state1"] += 1
                p.add_(p.grad.sign(), alpha=-group["lr"] / self.state[p]["step"])


def test_states_in_bytes_are_saved_and_read_with_their_count(tmp_path: Path) -> None:
    def learner_with_counts(model: nn.Module) -> tuple[Learner, OtherOptimizer]:
        made, masters = learner_of(model), MasterWeights(model.parameters())
        inner = CountedStates(list(map(masters.of, model.parameters())), lr=1e-2, betas=(0.9, 0.99))
        own = OtherOptimizer(masters, [inner], 1.0)
        made.optimizer = own
        return made, own

    model = small_model()
    first, _ = learner_with_counts(model)
    first.step(packs(ROWS), imitation)
    first.step(packs(ROWS), imitation)
    first.save(tmp_path / "optimizer.safetensors")
    other = copy.deepcopy(model)
    second, optimizer = learner_with_counts(other)
    second.load(tmp_path / "optimizer.safetensors")
    for one in (first, second):
        one.step(packs(ROWS), imitation)
    assert all(map(torch.equal, weights_of(model), weights_of(other)))
    kept = optimizer.state_of(optimizer.masters.of(next(other.parameters())))
    assert int(kept["step"]) == 3 and int(kept["state1"].max()) == 3 and "qmap1" not in kept


def test_what_cannot_run_is_refused_with_a_reason() -> None:
    muon, bytes8 = OptimizerConfig(name="muon"), OptimizerConfig(name="paged_adamw_8bit")
    check_optimizer(muon, torch.device("cpu"), ranks=1)
    with pytest.raises(ConfigError, match="2 trainer ranks have parts of them"):
        check_optimizer(muon, torch.device("cpu"), ranks=2)
    with pytest.raises(ConfigError, match=r"pip install bitsandbytes|needs a GPU"):
        check_optimizer(bytes8, torch.device("cpu"), ranks=1)
    with pytest.raises(ValueError, match='muon would have no effect: name is "adamw"'):
        RLConfig(optimizer={"muon": {"momentum": 0.5}})


def test_an_optimizer_that_is_not_there_is_told_before_a_run_begins(tmp_path: Path) -> None:
    rl = {"steps": 1, "optimizer": {"name": "adamw_8bit"}}
    with pytest.raises(ConfigError, match=r'rl: optimizer.name = "adamw_8bit" needs'):
        train(
            model={"scratch": {}}, tasks=[{"prompt": "?", "target": "!"}], rewards=["exact_match"], rl=rl,
            run={"folder": str(tmp_path)},
        )  # fmt: skip
