"""Adapters in the fused forward against peft's own layers, whose parameters it reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ludus import kernels
from ludus.model import (
    PackedContext,
    decoder_of,
    fused_linear,
    fused_model,
    hidden_states,
    use_ludus_attention,
)
from ludus.model.fused_linear import is_stacked
from ludus.model.fused_model import decoder_parts, fused_hidden_states

peft: Any = pytest.importorskip("peft")

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
COMPUTED: dict[str, dict[str, Any]] = {
    "all layers": {},
    "queries and values": {"target_modules": ["q_proj", "v_proj"]},
    "keys and the last product": {"target_modules": ["k_proj", "down_proj"]},
    "another scale": {"use_rslora": True, "lora_alpha": 7},
    "ranks that differ": {"rank_pattern": {"k_proj": 2, "up_proj": 5}},
    "ranks that differ at one scale": {
        "lora_alpha": 8,
        "rank_pattern": {"k_proj": 2, "up_proj": 5},
        "alpha_pattern": {"k_proj": 4, "up_proj": 10},
    },
    "scales that differ": {"alpha_pattern": {"v_proj": 1, "gate_proj": 9}},
    "dropout at rest": {"lora_dropout": 0.5},
}
INTERPRETED = ("keys and the last product", "ranks that differ")
"""Where adapters lie beside bases without one, and of two widths; the interpreter takes a second for each."""
LEFT: dict[str, dict[str, Any]] = {
    "magnitudes": {"use_dora": True},
    "biases": {"lora_bias": True},
}


def adapted(dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    torch.manual_seed(0)
    base: Any = LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)).to(dtype)
    for parameter in base.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    use_ludus_attention(base)
    common = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}
    model = peft.get_peft_model(base, peft.LoraConfig(**{**common, **settings}))
    return model.eval()


@pytest.fixture(params=["plain twins", "compiled"])
def operations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the forward is made of: torch operations, or the kernels (in the interpreter without a GPU)."""
    if request.param == "compiled":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("compiled kernels want tensors of the GPU")
        for module in (fused_model, kernels.layers):
            monkeypatch.setattr(module, "unavailable", lambda device: None)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The layers whose own forward ran."""
    names: list[str] = []
    layer = peft.tuners.lora.Linear
    own = layer.forward

    def forward(self: Any, *given: Any, **others: Any) -> Any:
        names.append(type(self).__name__)
        return own(self, *given, **others)

    monkeypatch.setattr(layer, "forward", forward)
    return names


def both(model: Any, recomputed: int = 0) -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Hidden states and gradients: the module's, and those of the fused forward."""
    tokens = torch.randint(0, 60, (11,), generator=torch.Generator().manual_seed(1))
    context = PackedContext([7, 4])
    slope = torch.randn(11, 32, generator=torch.Generator().manual_seed(2))
    parts = decoder_parts(decoder_of(model))
    assert parts is not None
    states, gradients = [], []
    for is_fused in (False, True):
        model.zero_grad()
        given = (tokens, context.position_ids, context)
        out = (
            fused_hidden_states(parts, *given, recomputed) if is_fused else hidden_states(model, *given)
        )
        if out.requires_grad:
            out.backward(slope.to(out.dtype))
        states.append(out.detach())
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    return states, gradients


def assert_same(model: Any, recomputed: int = 0) -> None:
    states, gradients = both(model, recomputed)
    torch.testing.assert_close(states[1], states[0], rtol=1e-5, atol=1e-5)
    assert gradients[0].keys() == gradients[1].keys()
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("name", COMPUTED)
def test_states_and_gradients_are_those_of_peft(name: str, called: list[str]) -> None:
    assert_like_peft(name, called)


@pytest.mark.parametrize(
    "name",
    [one if one in INTERPRETED else pytest.param(one, marks=pytest.mark.slow) for one in COMPUTED],
)
@pytest.mark.parametrize("operations", ["compiled"], indirect=True)
def test_the_kernels_give_those_of_peft_too(name: str, operations: None, called: list[str]) -> None:
    assert_like_peft(name, called)


def assert_like_peft(name: str, called: list[str]) -> None:
    model = adapted(**COMPUTED[name])
    expected = sum(1 for module in model.modules() if type(module) is peft.tuners.lora.Linear)
    assert_same(model, recomputed=1)
    assert len(called) == expected, "the fused forward calls none of them"
    names = {name for name, p in model.named_parameters() if p.grad is not None}
    assert names == {name for name, _ in model.named_parameters() if "lora_" in name}


@pytest.mark.parametrize("settings", LEFT.values(), ids=LEFT)
def test_other_adapters_compute_in_their_own_way(settings: dict[str, Any], called: list[str]) -> None:
    model = adapted(**settings)
    assert_same(model)
    assert len(called) == 2 * 14


def test_dropout_is_left_to_the_layer(called: list[str]) -> None:
    model = adapted(lora_dropout=0.5).train()
    parts, context = decoder_parts(decoder_of(model)), PackedContext([9])
    assert parts is not None
    tokens = torch.arange(9)
    one, other = (fused_hidden_states(parts, tokens, context.position_ids, context) for _ in range(2))
    assert len(called) == 28
    assert not torch.allclose(one, other, atol=1e-3)


def test_where_the_kernels_fail_their_trial_layers_compute_their_own(
    called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_linear, "low_rank_unusable", lambda device: True)
    model = adapted()
    assert_same(model)
    assert len(called) == 2 * 14


def test_adapters_that_are_off_or_merged_or_two(called: list[str]) -> None:
    model = adapted()
    with model.disable_adapter():
        assert_same(model)
    assert len(called) == 14, "the bases alone are one product"
    attention = decoder_of(model).layers[0].self_attn
    assert is_stacked([getattr(attention, name).base_layer for name in ("q_proj", "k_proj", "v_proj")])
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model.add_adapter("second", config)
    model.set_adapter("second")
    assert_same(model)
    model.base_model.set_adapter(["default", "second"])
    assert_same(model)
    model.merge_adapter()
    assert_same(model)


def test_a_base_that_learns_too_is_left_to_its_layers() -> None:
    model = adapted()
    for parameter in model.parameters():
        parameter.requires_grad_()
    assert_same(model)


def test_float32_adapters_of_a_bfloat16_base() -> None:
    model = adapted(torch.bfloat16)
    kinds = {p.dtype for name, p in model.named_parameters() if "lora_" in name}
    assert kinds == {torch.float32}
    states, gradients = both(model)
    assert states[1].dtype == torch.bfloat16
    torch.testing.assert_close(states[1], states[0], rtol=0.05, atol=0.05)
    assert gradients[0].keys() == gradients[1].keys()
    for name, expected in gradients[0].items():
        found = gradients[1][name]
        assert found.dtype == expected.dtype == torch.float32
        assert float((found - expected).norm() / expected.norm()) < 0.05, name


def test_joined_factors_stay_the_optimizer_s_own() -> None:
    model = adapted()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    both(model)
    attention = decoder_of(model).layers[0].self_attn
    downs = [getattr(attention, name).lora_A["default"] for name in ("q_proj", "k_proj", "v_proj")]
    assert is_stacked(downs)
    addresses = [p.data_ptr() for p in model.parameters()]
    before = downs[1].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(downs[1].weight, before)
    assert_same(model)
    assert [p.data_ptr() for p in model.parameters()] == addresses


def fused(model: Any, count: int = 9) -> torch.Tensor:
    parts, context = decoder_parts(decoder_of(model)), PackedContext([count])
    assert parts is not None
    return fused_hidden_states(parts, torch.arange(count), context.position_ids, context)


def test_bases_and_factors_of_different_kinds() -> None:
    model = adapted()
    attention = decoder_of(model).layers[0].self_attn
    attention.k_proj.base_layer.bias = None
    for factor in (attention.v_proj.lora_A, attention.v_proj.lora_B):
        factor.to(torch.bfloat16)
    states, _ = both(model)
    torch.testing.assert_close(states[1], states[0], rtol=0.02, atol=0.02)
    assert not is_stacked([attention.q_proj.base_layer, attention.k_proj.base_layer])


def test_factors_that_are_joined_otherwise_before_the_backward_pass() -> None:
    """Which layers are computed together may change with a switch, and moves parameters."""
    model = adapted()
    key = decoder_of(model).layers[0].self_attn.k_proj
    slope = torch.randn(9, 32)

    def gradients(interrupts: bool) -> list[torch.Tensor]:
        model.zero_grad()
        key.enable_adapters(False)
        out = fused(model)
        key.enable_adapters(True)
        if interrupts:
            with torch.no_grad():
                fused(model)
        out.backward(slope)
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    torch.testing.assert_close(gradients(True), gradients(False), rtol=0, atol=0)


def test_a_change_before_the_backward_pass_is_noticed() -> None:
    model = adapted()
    out = fused(model)
    with torch.no_grad():
        decoder_of(model).layers[1].self_attn.v_proj.lora_A["default"].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_model_that_was_read_in_inference_mode_can_be_trained() -> None:
    model = adapted()
    with torch.inference_mode():
        fused(model)
    fused(model).sum().backward()
    assert any(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("where", ["layer", "base", "factor", "forward"])
def test_what_others_have_hung_onto_a_layer_is_called(where: str) -> None:
    model = adapted()
    layer = decoder_of(model).layers[0].self_attn.q_proj
    if where == "forward":
        own = layer.forward
        layer.forward = lambda x: 2 * own(x)
    else:
        module = {"layer": layer, "base": layer.base_layer, "factor": layer.lora_A["default"]}[where]
        module.register_forward_hook(lambda module, given, out: 2 * out)
    assert_same(model)


def test_sums_in_parts_give_the_gradient_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, operations: None
) -> None:
    low_rank = pytest.importorskip("ludus.kernels.triton_layers")
    monkeypatch.setattr(low_rank, "_DEPTH", 16)
    monkeypatch.setattr(low_rank, "_CHUNK", 16)
    assert_same(adapted())
