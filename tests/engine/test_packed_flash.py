"""The choice of a flash kernel for packed sequences, with stand-ins where there is no GPU."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest
import torch
from engine_models import make, prompts
from torch import Tensor

from ludus.model import (
    AttentionParams,
    PackedContext,
    hidden_states,
    packed_attention,
    use_ludus_attention,
)
from ludus.model.packed_attention import SequenceBounds, first_correct, flash_expanded, kernel_for

CPU = torch.device("cpu")
CUDA = pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)


def standin(query: Tensor, key: Tensor, value: Tensor, bounds: SequenceBounds, scaling: float) -> Tensor:
    """What the kernel computes, written out with one mask over all tokens."""
    assert bounds.cu_seqlens.dtype == torch.int32
    starts = bounds.cu_seqlens.tolist()
    assert max(b - a for a, b in pairwise(starts)) == bounds.max_seqlen
    group = query.shape[1] // key.shape[1]
    scores = (
        torch.einsum("qhd,khd->hqk", query.float(), key.repeat_interleave(group, 1).float()) * scaling
    )
    row = torch.bucketize(torch.arange(len(query)), bounds.cu_seqlens[1:].long(), right=True)
    seen = (row[:, None] == row[None, :]).tril()
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    mixed = torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(group, 1).float())
    return mixed.to(query.dtype)


def needs_equal_heads(
    query: Tensor, key: Tensor, value: Tensor, bounds: SequenceBounds, scaling: float
) -> Tensor:
    if query.shape[1] != key.shape[1]:
        raise RuntimeError("Expect query and key/value to have the same number of heads")
    return standin(query, key, value, bounds, scaling)


def leaks(query: Tensor, key: Tensor, value: Tensor, bounds: SequenceBounds, scaling: float) -> Tensor:
    """A kernel that lets one sequence see another."""
    whole = SequenceBounds(torch.tensor([0, len(query)], dtype=torch.int32), len(query))
    return standin(query, key, value, whole, scaling)


def no_gradient(
    query: Tensor, key: Tensor, value: Tensor, bounds: SequenceBounds, scaling: float
) -> Tensor:
    return standin(query, key.detach(), value, bounds, scaling)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sound_kernel_is_taken(dtype: torch.dtype) -> None:
    assert first_correct((standin,), CPU, dtype, 4, 2, 16) is standin


def test_heads_are_expanded_where_the_kernel_knows_no_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_attention, "flash", needs_equal_heads)
    assert (
        first_correct((needs_equal_heads, flash_expanded), CPU, torch.float32, 6, 2, 8) is flash_expanded
    )
    assert (
        first_correct((needs_equal_heads, flash_expanded), CPU, torch.float32, 6, 6, 8)
        is needs_equal_heads
    )


@pytest.mark.parametrize("wrong", [leaks, no_gradient])
def test_a_kernel_that_is_wrong_is_refused_in_one_line(
    wrong: packed_attention.Kernel, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert first_correct((wrong, wrong), CPU, torch.float32, 4, 2, 16) is None
    (record,) = caplog.records
    assert "padded groups" in record.getMessage()


def test_torchs_own_kernel_is_refused_where_it_does_not_run(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert (
            first_correct((packed_attention.flash, flash_expanded), CPU, torch.bfloat16, 4, 2, 16)
            is None
        )


def test_want_of_memory_says_nothing_about_a_kernel() -> None:
    def starved(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError):
        first_correct((starved,), CPU, torch.float32, 4, 2, 16)


def test_inference_mode_does_not_disturb_the_probe() -> None:
    with torch.inference_mode():
        assert first_correct((standin,), CPU, torch.float32, 4, 2, 16) is standin


@pytest.mark.parametrize(
    ("dtype", "params"),
    [
        (torch.float32, AttentionParams(1.0)),
        (torch.bfloat16, AttentionParams(1.0)),
        (torch.bfloat16, AttentionParams(1.0, softcap=2.0)),
    ],
)
def test_a_cpu_never_asks_for_the_kernel(dtype: torch.dtype, params: AttentionParams) -> None:
    states = torch.zeros(4, 2, 8, dtype=dtype)
    assert kernel_for(states, states, params, 4) is None


class FakeCuda:
    """States that say that they are on a GPU."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.device, self.dtype, self.shape = torch.device("cuda"), dtype, torch.Size([9, 4, 8])


@pytest.mark.parametrize(
    ("dtype", "params", "taken"),
    [
        (torch.bfloat16, AttentionParams(1.0), True),
        (torch.float16, AttentionParams(1.0), True),
        (torch.float32, AttentionParams(1.0), False),
        (torch.bfloat16, AttentionParams(1.0, window=5), False),
        (torch.bfloat16, AttentionParams(1.0, window=9), True),
        (torch.bfloat16, AttentionParams(1.0, softcap=3.0), False),
        (torch.bfloat16, AttentionParams(1.0, dropout=0.1), False),
    ],
)
def test_what_the_kernel_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, params: AttentionParams, taken: bool
) -> None:
    monkeypatch.setattr(packed_attention, "probed_kernel", lambda *_: standin)
    states = FakeCuda(dtype)
    assert (kernel_for(states, states, params, 9) is standin) == taken  # type: ignore[arg-type]


@pytest.mark.parametrize("lengths", [[3, 17, 1, 29, 8], [6, 6, 6], [33]])
def test_a_packed_context_uses_the_kernel(monkeypatch: pytest.MonkeyPatch, lengths: list[int]) -> None:
    model = make("qwen2")
    use_ludus_attention(model)
    tokens = torch.tensor([token for sequence in prompts(lengths) for token in sequence])
    in_blocks = PackedContext(lengths)
    expected = hidden_states(model, tokens, in_blocks.position_ids, in_blocks)
    calls: list[int] = []

    def choose(
        query: Tensor, key: Tensor, params: AttentionParams, longest: int
    ) -> packed_attention.Kernel:
        calls.append(longest)
        return standin

    monkeypatch.setattr(packed_attention, "kernel_for", choose)
    context = PackedContext(lengths)
    given = hidden_states(model, tokens, context.position_ids, context)
    assert calls == [max(lengths)] * 2
    torch.testing.assert_close(given, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(14, 2, 64), (12, 2, 128), (9, 3, 64), (4, 4, 96)]
)
def test_the_gpu_has_a_sound_kernel(heads: int, kv_heads: int, size: int) -> None:
    device = torch.device("cuda")
    assert (
        first_correct((packed_attention.flash,), device, torch.bfloat16, heads, kv_heads, size)
        is packed_attention.flash
    )
    assert first_correct((flash_expanded,), device, torch.bfloat16, heads, kv_heads, size) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[700, 3, 1, 1500, 64, 65], [512, 512], [2048]])
def test_flash_and_blocks_agree_on_the_gpu(monkeypatch: pytest.MonkeyPatch, lengths: list[int]) -> None:
    def states(heads: int) -> Tensor:
        drawn = torch.randn(1, heads, sum(lengths), 64, device="cuda", dtype=torch.bfloat16)
        return drawn.requires_grad_()

    query, key, value = states(8), states(2), states(2)
    params, slope = (
        AttentionParams(0.125),
        torch.randn(1, sum(lengths), 8, 64, device="cuda", dtype=torch.bfloat16),
    )

    def results() -> list[Tensor]:
        output = PackedContext(lengths, "cuda").attend(0, query, key, value, params)
        return [output, *torch.autograd.grad(output, (query, key, value), slope)]

    flashed = results()
    monkeypatch.setattr(packed_attention, "kernel_for", lambda *_: None)
    for one, other in zip(flashed, results(), strict=True):
        distance = float((one - other).float().abs().max())
        assert distance < 0.03 * float(other.float().abs().max())
