"""Attention over a prefix forest against each path alone, forwards and backwards."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from engine_models import FAMILIES, VOCABULARY, make
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ludus.model import (
    AttentionParams,
    ForestContext,
    PackedContext,
    can_share_prefixes,
    forest_attention,
    head_logits,
    hidden_states,
    packed_attention,
    use_ludus_attention,
)
from ludus.model.packed_attention import (
    SequenceBounds,
    first_correct,
    flash,
    flash_expanded,
    paths_of,
)

LENGTHS, PARENTS = [13, 4, 21, 1, 9, 30, 4, 2], [-1, 0, 0, 1, 1, -1, 5, 6]
CPU = torch.device("cpu")


def tokens_of(count: int, seed: int = 0) -> Tensor:
    source = random.Random(seed)
    return torch.tensor([source.randrange(2, VOCABULARY - 1) for _ in range(count)])


def _loss(states: Tensor) -> Tensor:
    weights = torch.linspace(-1, 1, states.shape[-1])
    return (states * weights).tanh().sum(-1).mean()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_forest_equals_each_path_alone(family: str, checkpointing: bool) -> None:
    """Sliding windows and soft caps included: nodes of similar shape are padded and masked."""
    model = make(family).train()
    tokens = tokens_of(sum(LENGTHS))
    model.set_attn_implementation("eager")
    alone = torch.cat(
        [
            model.model(tokens[torch.from_numpy(path)][None], use_cache=False).last_hidden_state[0][-n:]
            for path, n in zip(paths_of(LENGTHS, PARENTS), LENGTHS, strict=True)
        ]
    )
    _loss(head_logits(model, alone)).backward()
    expected = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()

    use_ludus_attention(model)
    if checkpointing:
        model.gradient_checkpointing_enable()
    context = ForestContext(LENGTHS, PARENTS)
    given_states = hidden_states(model, tokens, context.position_ids, context)
    torch.testing.assert_close(given_states, alone, atol=1e-4, rtol=1e-4)
    _loss(head_logits(model, given_states)).backward()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, expected[name], atol=1e-4, rtol=1e-3, msg=name)


@st.composite
def forests(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=12))
    return lengths, [draw(st.integers(-1, node - 1)) for node in range(len(lengths))]


def by_paths(states: Sequence[Tensor], lengths: list[int], parents: list[int], params: Any) -> Tensor:
    """Each path as a sequence of its own, of which the node's own tokens are kept."""
    outputs = []
    for path, length in zip(paths_of(lengths, parents), lengths, strict=True):
        pieces = [one[:, :, torch.from_numpy(path)] for one in states]
        context = PackedContext([len(path)])
        outputs.append(context.attend(0, pieces[0], pieces[1], pieces[2], params)[:, -length:])
    return torch.cat(outputs, dim=1)


@settings(max_examples=60)
@given(
    forests(),
    st.sampled_from([AttentionParams(0.5), AttentionParams(0.5, 7), AttentionParams(0.5, 40, 3.0)]),
)
def test_any_forest_is_attended_to_by_its_paths(
    forest: tuple[list[int], list[int]], params: AttentionParams
) -> None:
    _compare(*forest, params)


@pytest.mark.parametrize("window", [None, 100])
def test_long_nodes_go_through_in_chunks(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    monkeypatch.setattr(forest_attention, "_CHUNK", 16)
    monkeypatch.setattr(forest_attention, "_SCORES", 1 << 11)
    _compare([70, 55, 50, 17, 3, 64], [-1, 0, 0, 1, 1, -1], AttentionParams(0.5, window))


def _compare(lengths: list[int], parents: list[int], params: AttentionParams) -> None:
    torch.manual_seed(0)
    states = [torch.randn(1, heads, sum(lengths), 4, requires_grad=True) for heads in (4, 2, 2)]
    slope = torch.randn(1, sum(lengths), 4, 4)
    given_output = ForestContext(lengths, parents).attend(0, states[0], states[1], states[2], params)
    wanted_output = by_paths(states, lengths, parents, params)
    torch.testing.assert_close(given_output, wanted_output, atol=1e-5, rtol=1e-5)
    found = torch.autograd.grad(given_output, states, slope)
    for one, other in zip(found, torch.autograd.grad(wanted_output, states, slope), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_parents_come_before_their_children() -> None:
    for parents in ([0, -1], [-1, 2, -1], [-1, -2]):
        with pytest.raises(ValueError, match="must come before it"):
            ForestContext([3] * len(parents), parents)


# The flash kernel, with stand-ins where there is no GPU.


def standin(query: Tensor, key: Tensor, value: Tensor, bounds: SequenceBounds, scaling: float) -> Tensor:
    """What the kernel computes: causal attention, aligned at the ends of queries and keys."""
    keys = bounds.keys
    assert keys is not None
    assert bounds.cu_seqlens.dtype == keys.cu_seqlens.dtype == torch.int32
    queries, counts = bounds.cu_seqlens.tolist(), keys.cu_seqlens.tolist()
    assert max(b - a for a, b in pairwise(queries)) == bounds.max_seqlen
    assert max(b - a for a, b in pairwise(counts)) == keys.max_seqlen
    group = query.shape[1] // key.shape[1]
    outputs = []
    for node in range(len(queries) - 1):
        seen = keys.index[counts[node] : counts[node + 1]]
        q = query[queries[node] : queries[node + 1]].float()
        k, v = (one[seen].repeat_interleave(group, 1).float() for one in (key, value))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scaling
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outputs).to(query.dtype)


def aligned_at_the_beginning(
    query: Tensor, key: Tensor, value: Tensor, bounds: SequenceBounds, scaling: float
) -> Tensor:
    """A kernel with the other alignment: a node's first query sees its root's first key alone."""
    keys = bounds.keys
    assert keys is not None
    own = SequenceBounds(bounds.cu_seqlens, bounds.max_seqlen)
    first = torch.cat(
        [
            keys.index[start : start + stop - begin]
            for start, begin, stop in zip(
                keys.cu_seqlens.tolist(),
                own.cu_seqlens.tolist(),
                own.cu_seqlens.tolist()[1:],
                strict=False,
            )
        ]
    )
    bounds = SequenceBounds(
        own.cu_seqlens,
        own.max_seqlen,
        packed_attention.KeyBounds(first, own.cu_seqlens, own.max_seqlen),
    )
    return standin(query, key, value, bounds, scaling)


def test_a_kernel_is_tried_on_a_forest(caplog: pytest.LogCaptureFixture) -> None:
    assert first_correct((standin,), CPU, torch.bfloat16, 4, 2, 16, forest=True) is standin
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        wrong = (aligned_at_the_beginning,)
        assert first_correct(wrong, CPU, torch.float32, 4, 2, 16, forest=True) is None
        assert first_correct((flash, flash_expanded), CPU, torch.bfloat16, 4, 2, 16, forest=True) is None
    assert all("whole prefix" in record.getMessage() for record in caplog.records)
    assert len(caplog.records) == 2


def test_a_forest_uses_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("qwen2")
    use_ludus_attention(model)
    tokens = tokens_of(sum(LENGTHS))
    in_groups = ForestContext(LENGTHS, PARENTS)
    expected = hidden_states(model, tokens, in_groups.position_ids, in_groups)
    asked: list[tuple[int, bool]] = []

    def choose(
        query: Tensor, key: Tensor, params: AttentionParams, longest: int, forest: bool
    ) -> packed_attention.Kernel:
        asked.append((longest, forest))
        return standin

    monkeypatch.setattr(forest_attention, "kernel_for", choose)
    context = ForestContext(LENGTHS, PARENTS)
    found = hidden_states(model, tokens, context.position_ids, context)
    assert asked == [(36, True)] * 2
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


class FlashOps:
    """Stands in for torch's flash operators, forwards and backwards, by plain attention."""

    @staticmethod
    def _flash_attention_forward(
        query: Tensor, key: Tensor, value: Tensor, cum_q: Tensor, cum_k: Tensor, max_q: int, max_k: int,
        *_: Any, scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        index = torch.arange(len(key))
        bounds = SequenceBounds(cum_q, max_q, packed_attention.KeyBounds(index, cum_k, max_k))
        nothing = torch.zeros(())
        return standin(query, key, value, bounds, scale), nothing, nothing, nothing, nothing

    @staticmethod
    def _flash_attention_backward(
        slope: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, cum_q: Tensor,
        cum_k: Tensor, max_q: int, max_k: int, *_: Any, scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        bounds = (cum_q, cum_k, max_q, max_k)
        states = [one.detach().requires_grad_() for one in (query, key, value)]
        with torch.enable_grad():
            output = FlashOps._flash_attention_forward(*states, *bounds, scale=scale)[0]
        return torch.autograd.grad(output, states, slope)


@pytest.mark.parametrize("kernel", [flash, flash_expanded])
@pytest.mark.parametrize("forest", [False, True])
def test_what_goes_into_torchs_operators(
    monkeypatch: pytest.MonkeyPatch, kernel: packed_attention.Kernel, forest: bool
) -> None:
    """Gathered keys, the bounds of both, and gradients that come back to where they belong."""
    monkeypatch.setattr(packed_attention.torch.ops, "aten", FlashOps)
    assert first_correct((kernel,), CPU, torch.float32, 4, 2, 16, forest=forest) is kernel


def test_a_cpu_shares_prefixes_and_a_gpu_where_the_probe_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert can_share_prefixes(make("gemma2"))
    monkeypatch.setattr(forest_attention, "device_of", lambda _: torch.device("cuda"))
    asked: list[Any] = []
    answers: list[Any] = [standin, None]

    def probed(*shape: Any) -> Any:
        asked.append(shape)
        return answers[len(asked) - 1]

    monkeypatch.setattr(forest_attention, "probed_kernel", probed)
    model = make("qwen3").to(torch.bfloat16)
    assert can_share_prefixes(model)
    assert not can_share_prefixes(model)
    assert asked == [(torch.device("cuda"), torch.bfloat16, 4, 2, 8, True)] * 2
    for family in ("gemma2", "gemma3", "mistral", "qwen2-window"):
        assert not can_share_prefixes(make(family).to(torch.bfloat16))
    assert not can_share_prefixes(make("qwen3")), "float32 has no flash kernel"
    assert len(asked) == 2
    monkeypatch.setattr(forest_attention, "device_of", lambda _: torch.device("mps"))
    assert not can_share_prefixes(model)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(14, 2, 64), (12, 2, 128), (9, 3, 64), (4, 4, 96)]
)
def test_the_gpu_has_a_sound_kernel_for_forests(heads: int, kv_heads: int, size: int) -> None:
    device, shape = torch.device("cuda"), (heads, kv_heads, size)
    assert first_correct((flash,), device, torch.bfloat16, *shape, forest=True) is flash
    assert first_correct((flash_expanded,), device, torch.bfloat16, *shape, forest=True) is not None


@pytest.mark.gpu
def test_flash_and_groups_agree_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, parents = [1024, 100, 257, 64, 31, 700], [-1, 0, 0, 1, 1, -1]
    states = [
        torch.randn(1, heads, sum(lengths), 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (8, 2, 2)
    ]
    slope = torch.randn(1, sum(lengths), 8, 64, device="cuda", dtype=torch.bfloat16)

    def results() -> list[Tensor]:
        context = ForestContext(lengths, parents, "cuda")
        output = context.attend(0, states[0], states[1], states[2], AttentionParams(0.125))
        return [output, *torch.autograd.grad(output, states, slope)]

    flashed = results()
    monkeypatch.setattr(forest_attention, "kernel_for", lambda *_: None)
    for one, other in zip(flashed, results(), strict=True):
        distance = float((one - other).float().abs().max())
        assert distance < 0.03 * float(other.float().abs().max())
