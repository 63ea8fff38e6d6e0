"""Triton kernels of `logprobs`: log-probability and entropy of rows of logits, their gradient, and sampling."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ludus.kernels.device import next_power_of_2

_BLOCK = 4096


@triton.jit
def _summaries(
    LOGITS,
    STRIDE,
    TOP,
    SUM,
    MOMENT,
    KEPT,
    size,
    blocks,
    inverse,
    KEEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(LOGITS + row * STRIDE + at, mask=at < size, other=float("-inf")).to(tl.float32) * inverse
    top = tl.max(x, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp(x - base)
    spot = row * blocks + block
    tl.store(TOP + spot, top)
    tl.store(SUM + spot, tl.sum(weight, 0))
    # where there is no weight, minus infinity must not meet it
    tl.store(MOMENT + spot, tl.sum(weight * tl.where(weight > 0, x - base, 0.0), 0))
    if KEEPS:
        tl.store(KEPT + row * size + at, weight.to(KEPT.dtype.element_ty), mask=at < size)


@triton.jit
def _gradient(
    LOGITS, STRIDE, TOKENS, LSE, ENTROPY, DLOGPROB, DENTROPY, OUT, size, inverse, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    x = tl.load(LOGITS + row * STRIDE + at, mask=inside, other=float("-inf")).to(tl.float32) * inverse
    logp = x - tl.load(LSE + row)
    p = tl.exp(logp)
    dlogprob, dentropy = tl.load(DLOGPROB + row), tl.load(DENTROPY + row)
    hit = (at == tl.load(TOKENS + row)).to(tl.float32)
    spread = p * tl.where(p > 0, logp + tl.load(ENTROPY + row), 0.0)
    grad = (dlogprob * (hit - p) - dentropy * spread) * inverse
    tl.store(OUT + row * size + at, grad.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _kept_gradient(KEPT, SHIFT, TOKENS, DLOGPROB, size, blocks, inverse, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    weight = tl.load(KEPT + row * size + at, mask=inside, other=0.0).to(tl.float32)
    p = weight * tl.exp(tl.load(SHIFT + row * blocks + block))
    hit = (at == tl.load(TOKENS + row)).to(tl.float32)
    grad = tl.load(DLOGPROB + row) * (hit - p) * inverse
    tl.store(KEPT + row * size + at, grad.to(KEPT.dtype.element_ty), mask=inside)


def summarise(
    logits: Tensor, temperature: float, kept: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(log of the sum of exponentials, entropy) of logits / temperature, in float32, and the blocks' shifts.

    `kept` gets the exponentials of each block of logits below its highest; times the exponential of the block's
    shift, they are probabilities. Logits are so read once for both.
    """
    rows, size = logits.shape
    blocks = triton.cdiv(size, _BLOCK)
    top, total, moment = (
        torch.empty(rows, blocks, dtype=torch.float32, device=logits.device) for _ in range(3)
    )
    _summaries[(rows, blocks)](
        logits, logits.stride(0), top, total, moment, logits if kept is None else kept,
        size, blocks, 1 / temperature, KEEPS=kept is not None, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    highest = top.amax(1, keepdim=True)
    # each block's sums, as if they had been taken against the row's maximum
    lower = torch.where(total > 0, top - highest, torch.zeros_like(top))
    mass = total * lower.exp()
    mean = (moment * lower.exp() + mass * lower).sum(1)
    mass = mass.sum(1)
    log_mass = mass.log()
    return highest[:, 0] + log_mass, log_mass - mean / mass, lower - log_mass[:, None]


def gradient(
    logits: Tensor,
    tokens: Tensor,
    temperature: float,
    lse: Tensor,
    entropy: Tensor,
    dlogprob: Tensor,
    dentropy: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of the logits."""
    rows, size = logits.shape
    out = torch.empty(rows, size, dtype=dtype, device=logits.device)
    _gradient[(rows, triton.cdiv(size, _BLOCK))](
        logits, logits.stride(0), tokens, lse, entropy, dlogprob, dentropy, out, size, 1 / temperature,
        BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    return out


def kept_gradient(
    kept: Tensor, shifts: Tensor, tokens: Tensor, temperature: float, dlogprob: Tensor
) -> Tensor:
    """The gradient of the logits of which `summarise` kept this, in its place."""
    rows, size = kept.shape
    blocks = triton.cdiv(size, _BLOCK)
    _kept_gradient[(rows, blocks)](
        kept, shifts, tokens, dlogprob, size, blocks, 1 / temperature, BLOCK=_BLOCK, num_warps=8
    )
    return kept


# Sampling in one pass over the vocabulary. The first kernel reads every logit once and leaves three numbers for
# each block of the vocabulary: its maximum, the sum of its exponentials, and where the maximum is. The second
# combines them, finds the block in which the cumulative weights pass the row's uniform number, and reads that
# block alone again.


@triton.jit
def _sampling_summaries(
    LOGITS, STRIDE, TEMPERATURES, TOP, SUM, WHERE, size, blocks, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(LOGITS + row * STRIDE + at, mask=at < size, other=float("-inf")).to(tl.float32)
    temperature = tl.load(TEMPERATURES + row)
    divisor = tl.where(temperature > 0, temperature, 1.0)
    top = tl.max(logit, 0)
    # The difference first: it cannot overflow at a tiny temperature.
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp((logit - base) / divisor), 0)
    spot = row * blocks + block
    tl.store(TOP + spot, top)
    tl.store(SUM + spot, total)
    tl.store(WHERE + spot, block * BLOCK + tl.argmax(logit, 0))


@triton.jit
def _draw(
    LOGITS, STRIDE, TEMPERATURES, SHARES, TOP, SUM, WHERE, TOKENS, LOGPROBS, SOUND, size, blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, BLOCKS)
    real = number < blocks
    tops = tl.load(TOP + row * blocks + number, mask=real, other=float("-inf"))
    sums = tl.load(SUM + row * blocks + number, mask=real, other=0.0)
    temperature = tl.load(TEMPERATURES + row)
    divisor = tl.where(temperature > 0, temperature, 1.0)
    highest = tl.max(tops, 0)
    top = tl.where(highest > float("-inf"), highest, 0.0)
    has_mass = real & (sums > 0)
    masses = tl.where(has_mass, sums * tl.exp(tl.where(has_mass, tops - top, 0.0) / divisor), 0.0)
    masses = masses.to(tl.float64)
    reached = tl.cumsum(masses, 0)
    total = tl.sum(masses, 0)
    mark = tl.load(SHARES + row).to(tl.float64) * total
    # The first block whose cumulated mass passes the mark; the last one with any mass when rounding hides it.
    last = tl.max(tl.where(masses > 0, number, 0), 0)
    block = tl.minimum(tl.sum((real & (reached <= mark)).to(tl.int32), 0), last)
    before = tl.sum(tl.where(number < block, masses, 0.0), 0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(LOGITS + row * STRIDE + at, mask=at < size, other=float("-inf")).to(tl.float32)
    weight = tl.exp((logit - top) / divisor).to(tl.float64)
    passed = (tl.cumsum(weight, 0) <= mark - before) & (at < size)
    furthest = tl.max(tl.where(weight > 0, at, 0), 0)
    drawn = tl.minimum(block * BLOCK + tl.sum(passed.to(tl.int32), 0), furthest)
    best = tl.argmax(tl.where(real, tops, float("-inf")), 0)
    greedy = tl.load(WHERE + row * blocks + best)
    token = tl.where(temperature > 0, drawn, greedy)
    token = tl.minimum(tl.maximum(token, 0), size - 1)
    chosen = tl.load(LOGITS + row * STRIDE + token).to(tl.float32)
    # A NaN leaves no mass and no maximum, but its block's sum is one.
    spoiled = tl.sum((real & (sums != sums)).to(tl.int32), 0)
    is_sound = (spoiled == 0) & (total > 0) & (highest > float("-inf")) & (total < float("inf"))
    logprob = tl.where(is_sound, chosen - top, 0.0) / divisor - tl.log(
        tl.where(is_sound, total, 1.0).to(tl.float32)
    )
    tl.store(TOKENS + row, token.to(tl.int64))
    tl.store(LOGPROBS + row, logprob)
    tl.store(SOUND + row, is_sound)


def sample_at_temperature(
    logits: Tensor, temperatures: Tensor, shares: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, logprobs, sound) of R rows; a row with NaN is not sound, and its token means nothing."""
    rows, size = logits.shape
    device = logits.device
    blocks = triton.cdiv(size, _BLOCK)
    top, total = (torch.empty(rows, blocks, dtype=torch.float32, device=device) for _ in range(2))
    where = torch.empty(rows, blocks, dtype=torch.int32, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=device)
    sound = torch.empty(rows, dtype=torch.bool, device=device)
    _sampling_summaries[(rows, blocks)](
        logits, logits.stride(0), temperatures, top, total, where, size, blocks,
        BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    _draw[(rows,)](
        logits, logits.stride(0), temperatures, shares, top, total, where, tokens, logprobs, sound,
        size, blocks, BLOCK=_BLOCK, BLOCKS=next_power_of_2(blocks), num_warps=8,
    )  # fmt: skip
    return tokens, logprobs, sound
