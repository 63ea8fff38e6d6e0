"""A digest of micro-batches, by which ranks find out whether they have the same ones.

Tokens, lengths and places must be the same to the last bit. Numbers that were computed (advantages, weights,
log-probabilities) may differ by rounding where processors differ, so of each column there is a sum with factors
that depend on the place, and its scale.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Digest:
    """Digest of a rank's micro-batches."""

    exact: int
    """Digest of the integer columns: 62 bits."""
    sums: list[float]
    """Checksums of the computed columns: one number for each column of each micro-batch."""
    scales: list[float]
    """Sum of absolute values of each column: the scale of its rounding."""


def digest_of(batches: Iterable[Any]) -> Digest:
    """The digest of micro-batches, each of which is a dataclass of tensors and plain values."""
    counted = hashlib.sha256()
    sums: list[float] = []
    scales: list[float] = []

    def add(value: Any) -> None:
        if isinstance(value, Tensor) and value.is_floating_point():
            column = value.detach().cpu().double().nan_to_num()
            counted.update(b"%d" % len(column))
            sums.append(float((column * torch.arange(len(column)).cos()).sum()))
            scales.append(float(column.abs().sum()))
        elif isinstance(value, Tensor):
            counted.update(value.detach().cpu().contiguous().numpy().tobytes())
        elif hasattr(value, "__dataclass_fields__"):
            for one in fields(value):
                add(getattr(value, one.name))
        elif isinstance(value, list | tuple):
            counted.update(b"%d[" % len(value))
            for one in value:
                add(one)
        else:
            counted.update(value if isinstance(value, bytes) else repr(value).encode())

    for batch in batches:
        add(batch)
    return Digest(int.from_bytes(counted.digest()[:8], "big") >> 2, sums, scales)
