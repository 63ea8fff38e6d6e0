"""Sinks, chunks, windows, latent attention, KV heads by layer, shared KV: beside the model's own forward."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
import torch
from engine_models import plain_logprobs, prompts
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ludus.core import ConfigError, Sampling
from ludus.engine import EmbeddedEngine, EngineConfig
from ludus.engine.embedded.core import cache_blocks
from ludus.engine.embedded.cuda.runner import usable_kv_shape
from ludus.model import (
    AttentionParams,
    ForestContext,
    PackedContext,
    can_share_prefixes,
    checkpointable_layers,
    head_logits,
    hidden_states,
    set_activation_checkpointing,
    use_ludus_attention,
)
from ludus.model.attention import attend, attend_once, causal_mask
from ludus.model.kv_layers import kv_layers

_SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 96,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 6,
    "layer_types": _ALTERNATING,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97,
    "num_kv_shared_layers": 2,
}
_GEMMA3N = {
    "head_dim": 8,
    "sliding_window": 6,
    "layer_types": _ALTERNATING,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97,
    "laurel_rank": 8,
    "altup_num_inputs": 2,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    "intermediate_size": [48] * 4,
}
KINDS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"head_dim": 8, "sliding_window": 6, **_EXPERTS},
    "granite_swa": {"sliding_window": 6},
    "mimo_v2_flash": {
        "head_dim": 8,
        "v_head_dim": 6,
        "swa_head_dim": 8,
        "swa_v_head_dim": 6,
        "sliding_window": 6,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "llama4_text": {
        "head_dim": 8,
        "attention_chunk_size": 7,
        "floor_scale": 4,
        "intermediate_size_mlp": 32,
        **_EXPERTS,
    },
    "deepseek_v2": {**_LATENT, "topk_method": "greedy"},
    "deepseek_v3": _LATENT,
    "minicpm3": _LATENT,
    "gemma4_text": _GEMMA4,
    "gemma3n_text": _GEMMA3N,
    "stablelm": {},
    "hrm_text": {"head_dim": 8},
}


def make_kind(kind: str, **changes: Any) -> PreTrainedModel:
    """A tiny model with weights that are large enough for attention to matter."""
    config = AutoConfig.for_model(kind, **{**_SHAPE, **KINDS.get(kind, {}), **changes})
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(
                torch.randn_like(weight) * (1.0 if weight.ndim == 1 else weight.shape[-1] ** -0.5)
            )
    return model


def _switched(kind: str, **changes: Any) -> PreTrainedModel:
    model = make_kind(kind, **changes)
    use_ludus_attention(model)
    return model


def _flat(rows: list[list[int]]) -> Tensor:
    return torch.tensor([token for row in rows for token in row])


def _logprobs(model: PreTrainedModel, hidden_TD: Tensor, tokens: list[int]) -> Tensor:
    logits = head_logits(model, hidden_TD[:-1]).float()
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def _gradient(model: PreTrainedModel, values: list[Tensor]) -> Tensor:
    model.zero_grad()
    (-torch.cat(values).sum()).backward()
    return torch.cat(
        [(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in model.parameters()]
    )


def _one_by_one(model: PreTrainedModel, rows: list[list[int]]) -> Tensor:
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    values = []
    for row in rows:
        logits = model(torch.tensor([row]), use_cache=False).logits[0, :-1].float()
        values.append(logits.log_softmax(-1).gather(1, torch.tensor(row[1:])[:, None])[:, 0])
    gradient = _gradient(model, values)
    model.set_attn_implementation(before)
    return gradient


@pytest.mark.parametrize("kind", KINDS)
async def test_the_engine_is_the_models_own_forward(kind: str) -> None:
    """Chunked prompts, decoding in company, preemption, a tool's result between two turns, a fork, a score."""
    model, stock = make_kind(kind), make_kind(kind)
    config = EngineConfig(max_running=6, tokens_per_step=13, block_size=4, cache_tokens=128)
    engine = EmbeddedEngine(model, config=config)
    contexts = prompts([1, 5, 19, 33, 22, 30])

    async def check(context: list[int], new: int, session: str | None = None) -> list[int]:
        given = await engine.generate(context, Sampling(max_tokens=new), session=session)
        expected = plain_logprobs(stock, context + given.tokens)[len(context) :]
        assert given.logprobs == pytest.approx(expected, abs=1e-4)
        return context + given.tokens

    await asyncio.gather(*(check(context, 24) for context in contexts))
    assert engine.stats.preemptions > 0
    first = await check(contexts[2], 7, "one")
    await engine.fork("one", "two")
    await check([*first, *prompts([9], seed=1)[0]], 6, "one")
    await check([*first, *prompts([4], seed=2)[0]], 6, "two")
    long = prompts([47], seed=3)[0]
    assert await engine.score(long) == pytest.approx(plain_logprobs(stock, long), abs=1e-4)
    await engine.close()


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_and_folded_gradients_are_those_of_one_row_at_a_time(
    kind: str, checkpointed: bool
) -> None:
    model = make_kind(kind)
    use_ludus_attention(model)
    if checkpointed:
        set_activation_checkpointing(model, checkpointable_layers(model))
    model.train()
    rows = prompts([23, 9, 31, 14])
    packed = PackedContext([len(row) for row in rows])
    hidden = hidden_states(model, _flat(rows), packed.position_ids, packed)
    parts = [_logprobs(model, h, row) for h, row in zip(hidden.split(packed.lengths), rows, strict=True)]
    given, expected = _gradient(model, parts), _one_by_one(model, rows)
    assert float((given - expected).norm() / expected.norm()) < 1e-5
    start, *tails = prompts([21, 8, 13], seed=1)
    forest = ForestContext([21, 8, 13], [-1, 0, 0])
    hidden = hidden_states(model, _flat([start, *tails]), forest.position_ids, forest)
    root, *leaves = hidden.split(forest.lengths)
    rows = [start + tail for tail in tails]
    parts = [
        _logprobs(model, torch.cat([root, leaf]), row) for leaf, row in zip(leaves, rows, strict=True)
    ]
    given, expected = _gradient(model, parts), _one_by_one(model, rows)
    assert float((given - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("kind", ["gpt_oss", "llama4_text", "gemma4_text", "deepseek_v3"])
def test_half_precision_is_as_close_as_the_stock_module(kind: str) -> None:
    exact, model = make_kind(kind), make_kind(kind).to(torch.bfloat16)
    rows = prompts([40, 17, 29])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        wanted = [exact(torch.tensor([row]), use_cache=False).logits[0] for row in rows]
        stock = [model(torch.tensor([row]), use_cache=False).logits[0].float() for row in rows]
    use_ludus_attention(model)
    packed = PackedContext([len(row) for row in rows])
    with torch.no_grad():
        hidden = hidden_states(model, _flat(rows), packed.position_ids, packed)
    given = [head_logits(model, part).float() for part in hidden.split(packed.lengths)]

    def off(found: list[Tensor]) -> float:
        return float((torch.cat(found) - torch.cat(wanted)).detach().norm())

    assert off(given) < 1.3 * off(stock)


def test_the_cache_keeps_what_each_layer_needs_and_nothing_for_layers_that_share() -> None:
    model = _switched("gemma4_text")
    found, shared = kv_layers(model)
    sizes = {place: (one.kv_heads, one.key_size, one.value_size) for place, one in found.items()}
    assert sizes == {(0, 0): (2, 8, 8), (1, 0): (1, 16, 16)}
    assert shared == 2
    config = EngineConfig(memory=1e-5, block_size=1, max_running=1 << 16)
    twice = _switched("gemma4_text", num_kv_shared_layers=0)
    assert cache_blocks(model, config) == pytest.approx(2 * cache_blocks(twice, config), rel=0.01)
    latent, _ = kv_layers(_switched("deepseek_v3"))
    assert {(one.kv_heads, one.key_size, one.value_size) for one in latent.values()} == {(4, 12, 6)}


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("gpt_oss", "attention sinks"),
        ("llama4_text", "chunked attention"),
        ("gemma4_text", "share keys and values"),
        ("hrm_text", "more than once"),
        ("deepseek_v3", "different shapes"),
    ],
)
def test_the_paged_kernels_are_not_used_for_what_they_do_not_compute(kind: str, reason: str) -> None:
    model = make_kind(kind)
    use_ludus_attention(model)
    assert reason in str(usable_kv_shape(model, block_size=4))


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("deepseek_v32", {**_LATENT, "index_n_heads": 2, "index_head_dim": 8}, r"layers\.0.*indexer"),
        ("doge", {}, r"layer 0 \(DogeAttention\).*mask of its own"),
    ],
)
def test_attention_that_ludus_does_not_compute_is_refused_by_name(
    kind: str, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        use_ludus_attention(make_kind(kind, **changes))
    assert "docs/models.md" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "changes"), [("gptj", {"rotary_dim": 4}), ("bloom", {}), ("mpt", {"expansion_ratio": 2})]
)
async def test_other_causal_models_run_row_by_row_with_a_warning(
    kind: str, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "d_model": 32, "n_layers": 2, "n_heads": 4}
    with torch.random.fork_rng():
        model = make_kind(kind, **sizes, **changes)
        stock = make_kind(kind, **sizes, **changes)
    with caplog.at_level(logging.WARNING):
        use_ludus_attention(model)
    assert "row by row" in caplog.text and "attention interface" in caplog.text
    assert not can_share_prefixes(model)
    assert "again for each token" in str(usable_kv_shape(model, block_size=4))
    engine = EmbeddedEngine(
        model, config=EngineConfig(max_running=4, tokens_per_step=13, cache_tokens=256)
    )
    contexts = prompts([5, 21, 14])
    given = await asyncio.gather(*(engine.generate(c, Sampling(max_tokens=9)) for c in contexts))
    for context, one in zip(contexts, given, strict=True):
        expected = plain_logprobs(stock, context + one.tokens)[len(context) :]
        assert one.logprobs == pytest.approx(expected, abs=1e-4)
    await engine.close()
    packed = PackedContext([len(row) for row in contexts])
    hidden = hidden_states(model, _flat(contexts), packed.position_ids, packed)
    parts = [
        _logprobs(model, h, row) for h, row in zip(hidden.split(packed.lengths), contexts, strict=True)
    ]
    found, wanted = _gradient(model, parts), _one_by_one(stock, contexts)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5
    forest = ForestContext([5, 3], [-1, 0])
    with pytest.raises(ConfigError, match="row by row"):
        hidden_states(model, torch.arange(8), forest.position_ids, forest)


def _plain_sinks(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, mask: Tensor) -> Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(group, dim=1) for states in (key, value))
    scores = (query @ key.transpose(2, 3) * 0.3).masked_fill(~mask, float("-inf"))
    column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1] @ value


@pytest.mark.parametrize(("window", "chunk"), [(None, None), (5, None), (None, 4)])
def test_sinks_take_their_share_of_the_softmax(window: int | None, chunk: int | None) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, h, 11, d) for h, d in ((4, 8), (2, 8), (2, 6)))
    sinks = torch.randn(4, requires_grad=True)
    params = AttentionParams(0.3, window, chunk=chunk, sinks=sinks)
    mask = causal_mask(11, 11, params, query.device)
    expected = _plain_sinks(query, key, value, sinks, mask)
    given = [attend(query, key, value, params, mask)]
    if not params.is_cut(11):
        given.append(attend(query, key, value, params, None))
    capped = AttentionParams(0.3, window, 1e6, chunk=chunk, sinks=sinks)
    given.append(attend(query, key, value, capped, mask))
    wanted = torch.autograd.grad(expected.square().sum(), sinks)[0]
    for one in given:
        torch.testing.assert_close(one, expected, atol=1e-4, rtol=1e-4)
        found = torch.autograd.grad(one.square().sum(), sinks)[0]
        torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)
    bias = torch.zeros(2, 1, 11).masked_fill_(~mask[:, 0, -1:], torch.finfo(torch.float32).min)
    last = attend_once(query[:, :, -1:], key, value, params, bias)
    torch.testing.assert_close(last, expected[:, :, -1:], atol=1e-5, rtol=1e-5)


def test_a_model_that_takes_the_plain_runner_says_so(caplog: pytest.LogCaptureFixture) -> None:
    from ludus.engine.config import EngineStats
    from ludus.engine.embedded.runner import TorchModelRunner, _warn_slow, make_runner

    _warn_slow.cache_clear()
    model = make_kind("gpt_oss")
    use_ludus_attention(model)
    with caplog.at_level(logging.WARNING):
        runner, _ = make_runner(model, 64, 4, 4, EngineStats(), is_static=True)
    assert isinstance(runner, TorchModelRunner)
    assert "attention sinks" in caplog.text
