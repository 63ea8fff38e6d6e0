"""Trained weights amplify rounding: a probe in half precision must accept them and still find what is wrong."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from ludus.core import ConfigError, Sampling
from ludus.engine import EmbeddedEngine
from ludus.engine.embedded import runner
from ludus.engine.embedded.cuda.kv_cache import KVShape
from ludus.engine.embedded.cuda.runner import usable_kv_shape
from ludus.model import use_ludus_attention
from ludus.model.forward import why_not_fused
from ludus.model.hf_model import rows_alone
from ludus.training import ModelConfig, load_model

HALF = [torch.bfloat16, torch.float16]


def sharp_qwen2(dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> Qwen2ForCausalLM:
    """Random, but with attention as sharp as a trained model's: eager and SDPA differ widely in bfloat16."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=211,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
        max_position_embeddings=128,
    )
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(4)
            layer.self_attn.k_proj.weight.mul_(4)
    return model.to(dtype)


def test_stock_attentions_differ_more_in_bfloat16_than_a_fixed_tolerance() -> None:
    model, states = sharp_qwen2(), []
    for kind in ("eager", "sdpa"):
        model.set_attn_implementation(kind)
        with torch.no_grad():
            states.append(model.model(torch.arange(3, 59, 7)[None]).last_hidden_state[0].float())
    error = ((states[0] - states[1]).norm(dim=-1) / states[0].norm(dim=-1)).max()
    assert error > 0.05


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2, 5))])
def test_sharp_attention_is_taken_in_every_format(dtype: torch.dtype, seed: int) -> None:
    model = sharp_qwen2(dtype, seed)
    use_ludus_attention(model)
    assert isinstance(usable_kv_shape(model, block_size=16), KVShape)


def test_the_probe_leaves_the_weights_as_they_were() -> None:
    model = sharp_qwen2()
    before = {name: (p.data_ptr(), p.dtype, p.clone()) for name, p in model.named_parameters()}
    precision = torch.get_float32_matmul_precision()
    use_ludus_attention(model)
    assert torch.get_float32_matmul_precision() == precision
    for name, parameter in model.named_parameters():
        address, dtype, value = before[name]
        assert (parameter.data_ptr(), parameter.dtype) == (address, dtype)
        assert torch.equal(parameter, value)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class _Mixing(nn.Module):
    """A layer norm that also looks at the token before, across the boundary of packed sequences."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, states: Tensor) -> Tensor:
        normed: Tensor = self.norm(states)
        shifted = torch.cat([torch.zeros_like(normed[:, :1]), normed[:, :-1]], dim=1)
        return normed + 0.1 * shifted


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_a_model_that_mixes_tokens_is_refused_in_every_format(dtype: torch.dtype) -> None:
    model = sharp_qwen2(dtype)
    layer = model.model.layers[3]
    layer.input_layernorm = _Mixing(layer.input_layernorm)
    with pytest.raises(ConfigError, match="mixes tokens"):
        use_ludus_attention(model, or_alone=False)
    assert model.dtype == dtype
    assert {p.dtype for p in model.parameters()} == {dtype}
    if dtype != torch.float16:  # in which these weights overflow
        use_ludus_attention(model)
        assert "mixes tokens" in str(rows_alone(model))
        assert {p.dtype for p in model.parameters()} == {dtype}


def _zeros(*arguments: Any, **_: Any) -> Tensor:
    return torch.zeros_like(arguments[0])


def _without_the_oldest(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def windowed(*arguments: Any, **options: Any) -> Tensor:
        return kernel(*arguments, **{**options, "window": 2})

    return windowed


@pytest.mark.parametrize("name", ["paged_decode", "paged_prefill"])
@pytest.mark.parametrize("is_blind", [True, False], ids=["zeros", "window"])
def test_wrong_paged_kernels_are_found_in_bfloat16(
    name: str, is_blind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"ludus.engine.embedded.paged_attention.{name}"
    real = getattr(__import__("ludus.engine.embedded.paged_attention", fromlist=[name]), name)
    model = sharp_qwen2()
    use_ludus_attention(model)
    monkeypatch.setattr(place, _zeros if is_blind else _without_the_oldest(real))
    assert "other hidden states" in str(usable_kv_shape(model, block_size=16))


async def test_the_slower_runner_is_announced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner._warn_slow.cache_clear()
    monkeypatch.setattr("ludus.engine.embedded.paged_attention.paged_decode", _zeros)
    monkeypatch.setattr("ludus.engine.embedded.core.make_runner", _static(runner.make_runner))
    with caplog.at_level(logging.WARNING):
        engine = EmbeddedEngine(sharp_qwen2())
        await engine.generate([1, 2, 3], Sampling(max_tokens=2, temperature=0))
        await engine.close()
    assert "several times slower" in caplog.text


def _static(build: Callable[..., Any]) -> Callable[..., Any]:
    def always(model: nn.Module, blocks: int, block_size: int, rows: int, stats: Any, *_: Any) -> Any:
        return build(model, blocks, block_size, rows, stats, True, 0)

    return always


def _stays_on_the_fast_path(model: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        use_ludus_attention(model)
        assert why_not_fused(model) is None
        assert isinstance(usable_kv_shape(model, block_size=16), KVShape)
    assert not caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("seed", range(6))
def test_sharp_attention_stays_fused_on_a_gpu(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    _stays_on_the_fast_path(sharp_qwen2(seed=seed).to("cuda"), caplog)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.skipif("LUDUS_TEST_MODEL" not in os.environ, reason="LUDUS_TEST_MODEL names no model")
@pytest.mark.timeout(600)
def test_a_trained_model_stays_fused_on_a_gpu(caplog: pytest.LogCaptureFixture) -> None:
    config = ModelConfig(name=os.environ["LUDUS_TEST_MODEL"], dtype="bfloat16", device="cuda")
    model, _ = load_model(config, 0)
    _stays_on_the_fast_path(model, caplog)
