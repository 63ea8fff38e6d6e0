"""The fused forward against the modules whose parameters it reads."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ludus import kernels
from ludus.engine.embedded.paged_attention import DecodeContext, PrefillContext
from ludus.model import PackedContext, decoder_of, fused_model, hidden_states, use_ludus_attention
from ludus.model.fused_linear import is_stacked, stacked_linear
from ludus.model.fused_model import decoder_parts, fused_hidden_states, unsupported

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MAKERS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama with biases": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, head_dim=16)
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen2 with windows": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5)),
}


def make(name):
    torch.manual_seed(0)
    model = MAKERS[name]()
    for parameter in model.parameters():  # norms and biases too, which start at 1 and 0
        parameter.data += 0.1 * torch.randn_like(parameter)
    use_ludus_attention(model)
    return model


@pytest.fixture(params=["plain twins", "compiled"])
def operations(request, monkeypatch):
    """What the forward is made of: torch operations, or the kernels (in the interpreter without a GPU)."""
    if request.param == "compiled":
        pytest.importorskip("triton")
        for module in (fused_model, kernels.layers):
            monkeypatch.setattr(module, "unavailable", lambda device: None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels want tensors of the GPU")
@pytest.mark.parametrize(
    ("name", "operations"),
    [(name, "plain twins") for name in MAKERS] + [("qwen2", "compiled")],
    indirect=["operations"],
)
def test_it_gives_the_hidden_states_and_gradients_of_the_module(name, operations):
    model = make(name)
    tokens = torch.randint(0, 60, (11,))
    context = PackedContext([7, 4])
    slope = torch.randn(11, 32)
    expected = hidden_states(model, tokens, context.position_ids, context)
    expected.backward(slope)
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for checkpointed in (0, 2):
        model.zero_grad()
        parts = decoder_parts(decoder_of(model))
        given = fused_hidden_states(parts, tokens, context.position_ids, context, checkpointed)
        assert torch.allclose(given, expected, atol=1e-5)
        given.backward(slope)
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert found.keys() == wanted.keys()
        for key, gradient in found.items():
            assert torch.allclose(gradient, wanted[key], atol=1e-4), key


@pytest.mark.parametrize("name", MAKERS)
def test_it_reads_and_writes_blocks(name):
    """A prompt in two chunks, then single tokens, give what the whole sequence gives at once."""
    model = make(name)
    parts = decoder_parts(decoder_of(model))
    tokens = torch.randint(0, 60, (14,))
    whole = PackedContext([14])
    block, size = 4, decoder_of(model).layers[0].self_attn.head_dim
    blocks = [tuple(torch.full((6, 2, block, size), 9.0) for _ in "kv") for _ in parts.layers]

    class Store:
        def blocks(self, layer):
            return blocks[layer]

    tables = torch.tensor([[4, 1, 5, 2]], dtype=torch.int32)
    slots = torch.tensor([int(tables[0, i // block]) * block + i % block for i in range(14)])
    with torch.no_grad():
        expected = hidden_states(model, tokens, whole.position_ids, whole)
        given = []
        for start, stop in ((0, 5), (5, 11), (11, 12), (12, 13), (13, 14)):
            length = torch.tensor([stop], dtype=torch.int32)
            if stop - start > 1:
                starts = torch.tensor([0, stop - start], dtype=torch.int32)
                context = PrefillContext(Store(), slots[start:stop], tables, starts, length)
            else:
                context = DecodeContext(Store(), slots[start:stop], tables, length)
            positions = torch.arange(start, stop)
            given.append(fused_hidden_states(parts, tokens[start:stop], positions, context))
    assert torch.allclose(torch.cat(given), expected, atol=1e-5)
    assert all((keys[3] == 9.0).all() and (keys[0] == 9.0).all() for keys, _ in blocks)


def test_joined_parameters_stay_parameters_of_their_own():
    layers = [nn.Linear(8, width) for width in (6, 2, 4)]
    alone = copy.deepcopy(layers)
    x = torch.randn(5, 8)

    def joint(x):
        return stacked_linear(layers, x)

    assert not is_stacked(layers)
    assert torch.allclose(joint(x), torch.cat([layer(x) for layer in alone], dim=1), atol=1e-6)
    assert is_stacked(layers)
    addresses = [p.data_ptr() for layer in layers for p in layer.parameters()]
    optimizers = [
        torch.optim.SGD([p for layer in group for p in layer.parameters()], lr=0.1)
        for group in (layers, alone)
    ]
    joint(x).pow(2).sum().backward()
    torch.cat([layer(x) for layer in alone], dim=1).pow(2).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    for ours, theirs in zip(layers, alone, strict=True):
        assert torch.allclose(ours.weight, theirs.weight, atol=1e-5)
        assert torch.allclose(ours.bias, theirs.bias, atol=1e-5)
    layers[1].load_state_dict({"weight": torch.zeros(2, 8), "bias": torch.ones(2)})
    assert [p.data_ptr() for layer in layers for p in layer.parameters()] == addresses
    assert (joint(x)[:, 6:8] == 1).all()
    layers[0].double().float()  # new storage: found out, and joined again
    assert not is_stacked(layers)
    assert torch.allclose(joint(x)[:, :6], layers[0](x), atol=1e-6)
    assert is_stacked(layers)


def test_frozen_weights_get_no_gradient_and_stop_none(operations):
    model = make("qwen2")
    layers = decoder_of(model).layers
    for frozen in (layers[0].self_attn.k_proj, layers[1].mlp.down_proj, layers[1].mlp.up_proj):
        frozen.requires_grad_(False)
    tokens, context = torch.randint(0, 60, (9,)), PackedContext([9])
    slope = torch.randn(9, 32)
    hidden_states(model, tokens, context.position_ids, context).backward(slope)
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    parts = decoder_parts(decoder_of(model))
    fused_hidden_states(parts, tokens, context.position_ids, context).backward(slope)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys()
    assert all(torch.allclose(found[name], wanted[name], atol=1e-4) for name in found)


def test_frozen_parameters_get_no_gradient():
    layers = [nn.Linear(4, 3, bias=False), nn.Linear(4, 2, bias=False)]
    layers[0].requires_grad_(False)
    x = torch.randn(3, 4, requires_grad=True)
    stacked_linear(layers, x).sum().backward()
    assert layers[0].weight.grad is None
    assert torch.allclose(layers[1].weight.grad, x.sum(0).expand(2, 4))
    assert torch.allclose(x.grad, torch.cat([layer.weight for layer in layers]).sum(0).expand(3, 4))


def test_other_layers_are_called_as_they_are():
    class Odd(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    layers = [Odd(4, 3), nn.Linear(4, 2)]
    x = torch.randn(3, 4)
    assert torch.equal(stacked_linear(layers, x), torch.cat([layer(x) for layer in layers], dim=1))
    assert not is_stacked(layers)


def test_what_is_not_of_the_family_is_named():
    model = GemmaForCausalLM(GemmaConfig(**SIZES, head_dim=8))
    assert decoder_parts(decoder_of(model)) is None
    assert "gemma" in unsupported(decoder_of(model))


def test_an_adapter_that_comes_later_is_seen():
    """Parts are found once; projections that were replaced since are the ones that count."""
    peft = pytest.importorskip("peft")
    model = make("llama")
    tokens, context = torch.randint(0, 60, (9,)), PackedContext([9])
    parts = decoder_parts(decoder_of(model))
    with torch.no_grad():
        before = fused_hidden_states(parts, tokens, context.position_ids, context)
        adapted = peft.get_peft_model(
            model, peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
        ).eval()
        after = fused_hidden_states(parts, tokens, context.position_ids, context)
        expected = hidden_states(adapted, tokens, context.position_ids, context)
    assert not torch.allclose(before, after, atol=1e-3)
    assert torch.allclose(after, expected, atol=1e-5)
