"""Log-probability and entropy of rows of logits, and the gradient of both."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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
