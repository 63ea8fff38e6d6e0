"""silu(gate) * up over rows that hold both halves."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _forward(BOTH, OUT, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(BOTH + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(BOTH + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    # Rounded in between, as two separate operations would do.
    opened = (gate * tl.sigmoid(gate)).to(OUT.dtype.element_ty).to(tl.float32)
    tl.store(OUT + row * width + at, (opened * up).to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _backward(GRAD, BOTH, DBOTH, PRODUCT, width, AGAIN: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(BOTH + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(BOTH + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(GRAD + row * width + at, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    dup = grad * gate * share
    dgate = grad * up * share * (1.0 + gate * (1.0 - share))
    tl.store(DBOTH + row * 2 * width + at, dgate.to(DBOTH.dtype.element_ty), mask=inside)
    tl.store(DBOTH + row * 2 * width + width + at, dup.to(DBOTH.dtype.element_ty), mask=inside)
    if AGAIN:
        opened = (gate * share).to(PRODUCT.dtype.element_ty).to(tl.float32)
        tl.store(PRODUCT + row * width + at, (opened * up).to(PRODUCT.dtype.element_ty), mask=inside)


def forward(both: Tensor) -> Tensor:
    """[T, I] from contiguous [T, 2 I]."""
    rows, width = both.shape[0], both.shape[1] // 2
    out = torch.empty(rows, width, dtype=both.dtype, device=both.device)
    if rows:
        _forward[(rows, triton.cdiv(width, _BLOCK))](both, out, width, BLOCK=_BLOCK, num_warps=4)
    return out


def backward(grad: Tensor, both: Tensor, product: Tensor | None = None) -> Tensor:
    """The gradient of both halves; with `product`, what `forward` gave is written into it once more."""
    rows, width = grad.shape
    result = torch.empty_like(both)
    if rows:
        _backward[(rows, triton.cdiv(width, _BLOCK))](
            grad,
            both,
            result,
            product if product is not None else grad,
            width,
            AGAIN=product is not None,
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return result
