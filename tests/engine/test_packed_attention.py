"""Packed training attention against each sequence alone, forwards and backwards."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_models import FAMILIES, make, prompts
from hypothesis import given
from hypothesis import strategies as st

from ludus.core import ConfigError
from ludus.model import AttentionParams, PackedContext, head_logits, hidden_states, use_ludus_attention
from ludus.model.attention import split_by_length

LENGTHS = [3, 17, 1, 29, 17, 8, 40, 5]


def _loss(states: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(-1, 1, states.shape[-1])
    return (states * weights).tanh().sum(-1).mean()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_each_sequence_alone(family: str, checkpointing: bool) -> None:
    model = make(family).train()
    sequences = prompts(LENGTHS)
    model.set_attn_implementation("eager")
    alone = torch.cat(
        [model.model(torch.tensor([s]), use_cache=False).last_hidden_state[0] for s in sequences]
    )
    _loss(head_logits(model, alone)).backward()
    expected = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()

    use_ludus_attention(model)
    assert model.training
    if checkpointing:
        model.gradient_checkpointing_enable()
    context = PackedContext(LENGTHS)
    flat = torch.tensor([token for sequence in sequences for token in sequence])
    packed = hidden_states(model, flat, context.position_ids, context)
    torch.testing.assert_close(packed, alone, atol=1e-4, rtol=1e-4)
    calls = context.calls
    _loss(head_logits(model, packed)).backward()
    assert (context.calls > calls) == checkpointing
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, expected[name], atol=1e-4, rtol=1e-3, msg=name)


def test_one_sequence_needs_no_blocks() -> None:
    model = make("mistral")
    use_ludus_attention(model)
    tokens = torch.tensor(prompts([33])[0])
    context = PackedContext([33])
    with torch.no_grad():
        packed = hidden_states(model, tokens, context.position_ids, context)
        plain = model.model(tokens[None], use_cache=False).last_hidden_state[0]
    torch.testing.assert_close(packed, plain, atol=1e-4, rtol=1e-4)


def test_a_context_of_another_size_is_refused() -> None:
    model = make()
    use_ludus_attention(model)
    context = PackedContext([4, 4])
    with pytest.raises(ValueError, match=r"\[1, 8\] tokens"):
        hidden_states(model, torch.arange(9), torch.arange(9), context)
    with pytest.raises(ValueError, match="at least 1"):
        PackedContext([3, 0])


def test_packed_positions_without_a_context_are_refused() -> None:
    model = make()
    use_ludus_attention(model)
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    with pytest.raises(ConfigError, match="PackedContext"):
        model(input_ids=torch.arange(5)[None], position_ids=positions, use_cache=False)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=80))
def test_padded_groups_cover_all_sequences_with_little_padding(lengths: list[int]) -> None:
    ordered = np.array(sorted(lengths, reverse=True))
    ranges = split_by_length(ordered, padding=0.15, group_tokens=2000)
    assert [i for first, stop in ranges for i in range(first, stop)] == list(range(len(lengths)))
    for first, stop in ranges:
        area = (stop - first) * int(ordered[first])
        assert stop - first == 1 or area <= 2000
        assert area - int(ordered[first:stop].sum()) <= 0.15 * area


@pytest.mark.parametrize("lengths", [[8, 8, 8], [3, 9, 12]])
def test_only_views_lie_between_a_layer_and_its_attention(lengths: list[int]) -> None:
    """Selecting with an index instead would fill and copy a tensor for each of them in the backward pass."""
    context = PackedContext(lengths)
    states = [torch.randn(1, heads, sum(lengths), 4, requires_grad=True) for heads in (4, 2, 2)]
    output = context.attend(0, states[0], states[1], states[2], AttentionParams(0.5))
    names: set[str] = set()
    waiting = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None:
            names.add(node.name())
            waiting += [following for following, _ in node.next_functions]
    assert "TransposeBackward0" in names
    assert not {name for name in names if name.startswith(("Select", "Slice"))}
