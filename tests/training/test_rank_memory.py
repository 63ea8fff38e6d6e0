"""What each rank holds of a model: its share of everything, and no more than a layer beside it."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_steps import imitation, rows_of_lengths, weighed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from called_ranks import called_ranks
from ludus.training import (
    Learner,
    ModelConfig,
    OptimizerConfig,
    ScratchConfig,
    fit_tokenizer,
    scratch_model,
)
from ludus.training.models.sharded import ModelSource, load_sharded, save_policy
from ludus.training.optim.sharding import current_group, local

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
SHAPE = ScratchConfig(layers=8, width=64, heads=4, kv_heads=4, vocabulary=300, context=64)


class PeakBytes(TorchDispatchMode):
    """Bytes of the tensors that operations have made and that are still there; at most, and now."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and type(tensor) in (torch.Tensor, torch.nn.Parameter):
                self._note(tensor.untyped_storage())
        return made

    def _note(self, storage: Any) -> None:
        place, size = storage._cdata, storage.nbytes()
        if storage.device.type != "cpu" or place in self._known or not size:
            return
        self._known.add(place)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, place, size)

    def _forget(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.now -= size


def step_and_count(folder: str, saved: str) -> dict[str, int]:
    """Read a model, train a step of it, and write it; the bytes of this rank."""
    group = current_group()
    source = ModelSource(ModelConfig(name=folder, device="cpu", dtype="float32"), 0)
    with PeakBytes() as loading:
        policy = load_sharded(source, group)
    learner = Learner(policy, OptimizerConfig(learning_rate=1e-3), 4)
    batch = rows_of_lengths([6, 5, 7, 4])
    learner.step_on(weighed(batch), imitation)
    parameters = sum(local(p).numel() * 4 for p in policy.parameters())
    moments = sum(t.numel() * 4 for t in (local(t) for t in learner.tensors().values()) if t.ndim)
    with PeakBytes() as saving:
        save_policy(Path(saved), policy)
    return {
        "parameters": parameters,
        "moments": moments,
        "loading": loading.most,
        "saving": saving.most,
    }


def largest_counts(folder: str, saved: str) -> dict[str, float]:
    """Of the rank that has the most."""
    found = step_and_count(folder, saved)
    largest = current_group().largest(torch.tensor([float(one) for one in found.values()]))
    return dict(zip(found, largest.tolist(), strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    tokenizer = fit_tokenizer(["a plus b? add"] * 20, SHAPE.vocabulary)
    model: Any = scratch_model(SHAPE, tokenizer, seed=3)
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


@pytest.mark.parametrize("count", [2, 4])
def test_a_rank_holds_its_share_and_a_layer(folder: Path, tmp_path: Path, count: int) -> None:
    """Rank 0 included; what all ranks have written is the whole model, and what was trained."""
    before = load_file(folder / "model.safetensors")
    whole = sum(tensor.numel() * 4 for tensor in before.values())
    layer = max(
        sum(t.numel() * 4 for name, t in before.items() if f"layers.{one}." in name) for one in range(8)
    )
    root = whole - 8 * layer
    ranks = called_ranks(trainer_ranks=count)
    try:
        found = ranks.run(largest_counts, str(folder), str(tmp_path))
    finally:
        ranks.close()
    share, uneven = whole / count, 0.02 * whole
    assert found["parameters"] <= share + uneven
    assert found["moments"] <= 2 * share + 2 * uneven
    # while a layer is cut, its whole and its part are there at once
    assert found["loading"] <= share + 2 * max(layer, root) + uneven
    assert found["saving"] <= share + max(layer, root)
    after = load_file(tmp_path / "model.safetensors")
    assert after.keys() == before.keys()
    assert all(after[name].shape == tensor.shape for name, tensor in before.items())
    assert any(not torch.equal(after[name], tensor) for name, tensor in before.items())
