"""Adapters on a GPU: bfloat16 base, float32 adapters, the fused forward, graphs, a shared reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from training_helpers import TINY, Chatty, add, even, tasks

import ludus
from ludus.kernels import low_rank_unusable
from ludus.model import PackedContext, fused_linear, hidden_states, use_ludus_attention
from ludus.training import (
    ModelConfig,
    ScratchConfig,
    adapter_reference,
    fit_tokenizer,
    load_model,
    save_adapter,
    scratch_model,
)
from ludus.training.optim.logprobs import compute

pytestmark = pytest.mark.gpu
LORA = {"rank": 8, "alpha": 16}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained") / "small"
    tokenizer = fit_tokenizer(["a plus b? add"] * 20, 400)
    shape = ScratchConfig(layers=3, width=256, heads=4, kv_heads=2, vocabulary=400)
    model: Any = scratch_model(shape, tokenizer, seed=3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def states(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return compute(model, _states)


def _states(model: Any) -> torch.Tensor:
    context = PackedContext([70, 30], "cuda")
    tokens_T = torch.arange(100, device="cuda") % 300
    return hidden_states(model, tokens_T, context.position_ids, context)


def test_what_is_sampled_is_what_is_trained(base: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {**TINY, "model": {"name": str(base), "lora": LORA}}
    settings["rl"] = {"steps": 4, "tasks": 4, "attempts": 4, "kl": 0.05}
    settings["rl"]["optimizer"] = {"learning_rate": 3e-3}
    settings["run"] = {**TINY["run"], "folder": str(tmp_path / "run")}
    result = ludus.train(**settings, tasks=tasks(6), tools=[add], rewards=[even], agent=Chatty())
    rows = [row for row in result.metrics if "logprob_difference_mean" in row]
    assert len(rows) == 4
    assert max(row["logprob_difference_mean"] for row in rows) < 0.01
    assert rows[0]["kl"] < 1e-4 < rows[-1]["kl"], "the reference stays while the policy moves"
    model, _ = load_model(ModelConfig(name=str(result.model)), 0)
    inner: Any = model
    found = inner.unload().state_dict()
    for name, tensor in load_file(base / "model.safetensors").items():
        assert torch.equal(found[name].cpu(), tensor.bfloat16()), name


def test_the_kernels_give_what_peft_s_layers_give(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are off by what bf16 rounds, here and there differently: float32 says how much that may be."""
    model, _ = load_model(ModelConfig.parse({"name": str(base), "lora": LORA}), 0)
    use_ludus_attention(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    beside = states(model)
    assert not low_rank_unusable(beside.device)
    monkeypatch.setattr(fused_linear, "find_lora", lambda layers: None)
    layer_by_layer = states(model)
    exact = states(model.float())
    assert off(layer_by_layer, exact) < 0.05
    assert off(beside, exact) < 1.2 * off(layer_by_layer, exact)
    with model.disable_adapter():  # type: ignore[operator]
        assert off(states(model), exact) > 0.2, "the adapters matter"


def off(states_TD: torch.Tensor, exact_TD: torch.Tensor) -> float:
    """How far apart, as a share of what there is."""
    return float((states_TD.float() - exact_TD).norm() / exact_TD.norm())


def test_the_reference_is_the_base_or_the_start(base: Path, tmp_path: Path) -> None:
    plain, _ = load_model(ModelConfig(name=str(base)), 0)
    model, _ = load_model(ModelConfig.parse({"name": str(base), "lora": LORA}), 0)
    for one in (plain, model):
        use_ludus_attention(one)
    assert {p.dtype for name, p in model.named_parameters() if "lora_" in name} == {torch.float32}
    # joined and separate products round differently, so the base alone is compared loosely
    torch.testing.assert_close(states(model), states(plain), rtol=0.05, atol=0.05)
    bare = states(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    (tmp_path / "start").mkdir()
    save_adapter(tmp_path / "start", model)
    start = states(model)
    references = [adapter_reference(model, tmp_path / "start", bare=b) for b in (True, False)]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.mul_(1.5)
    assert not torch.allclose(states(model), start, atol=0.05)
    torch.testing.assert_close(states(references[0]), bare, rtol=0, atol=0)
    torch.testing.assert_close(states(references[1]), start, rtol=0, atol=0)
