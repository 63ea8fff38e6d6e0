"""Training attention: many sequences in one flat row of tokens, none of which sees another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ludus.engine.dense import Rule, attend, causal_mask

Ints = npt.NDArray[np.int64]

# Sequences share a padded block as long as no more than this share of it is padding.
_PADDING = 0.15
# ... and as long as the block has no more than this many tokens, to bound memory.
_BLOCK_TOKENS = 1 << 16


@dataclass(frozen=True, slots=True)
class _Block:
    """Sequences of similar length, side by side, padded at the end."""

    rows: int
    width: int
    index: Tensor
    """[rows * width] positions in the flat order; padding repeats a sequence's last token."""


class PackedContext:
    """Attention within each of the sequences that lie end to end in a batch of one row.

    Sequences of similar length are padded together into a few blocks, so that hundreds of short ones
    cost a handful of kernel launches. Padding follows a sequence's tokens, where causality hides it.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        if not lengths or min(lengths) < 1:
            raise ValueError("packed sequences need lengths of at least 1")
        self.lengths = list(lengths)
        self.calls = 0
        groups = _blocks(np.asarray(self.lengths, dtype=np.int64))
        self._blocks = [
            _Block(rows, width, torch.as_tensor(index, device=device))
            for rows, width, index, _ in groups
        ]
        # Where each flat token lies in the blocks' concatenation.
        back = np.empty(sum(self.lengths), dtype=np.int64)
        base = 0
        for rows, width, index, valid in groups:
            back[index[valid]] = base + np.flatnonzero(valid)
            base += rows * width
        self._back = torch.as_tensor(back, device=device)
        self.is_one_sequence = len(self.lengths) == 1
        self._masks: dict[tuple[int, int], Tensor] = {}

    @property
    def position_ids(self) -> Tensor:
        """[1, T]: positions counted within each sequence."""
        positions = np.concatenate([np.arange(length) for length in self.lengths])
        return torch.as_tensor(positions, device=self._back.device)[None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        self.calls += 1
        if query.shape[0] != 1 or query.shape[2] != len(self._back):
            raise ValueError(
                f"the packed context is for [1, {len(self._back)}] tokens, "
                f"not [{query.shape[0]}, {query.shape[2]}]"
            )
        if self.is_one_sequence:
            return attend(query, key, value, rule, self._mask(query.shape[2], rule)).transpose(1, 2)
        flat = [states[0].transpose(0, 1) for states in (query, key, value)]
        outputs: list[Tensor] = []
        for block in self._blocks:
            padded = [
                states.index_select(0, block.index)
                .view(block.rows, block.width, states.shape[1], states.shape[2])
                .transpose(1, 2)
                for states in flat
            ]
            output = attend(padded[0], padded[1], padded[2], rule, self._mask(block.width, rule))
            outputs.append(output.transpose(1, 2).reshape(-1, *output.shape[1::2]))
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined.index_select(0, self._back)[None]

    def _mask(self, width: int, rule: Rule) -> Tensor | None:
        if rule.window is None or rule.window >= width:
            return None
        if (width, rule.window) not in self._masks:
            mask = causal_mask(width, width, rule.window, self._back.device)
            self._masks[width, rule.window] = mask
        return self._masks[width, rule.window]


def _blocks(lengths: Ints) -> list[tuple[int, int, Ints, npt.NDArray[np.bool_]]]:
    """(rows, width, flat index, validity) of each block, longest sequences first."""
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    order = np.argsort(-lengths, kind="stable")
    result = []
    for first, stop in split_by_length(lengths[order]):
        chosen = order[first:stop]
        width = int(lengths[chosen[0]])
        offsets = np.arange(width)[None, :]
        last = lengths[chosen][:, None] - 1
        index = starts[chosen][:, None] + np.minimum(offsets, last)
        result.append((len(chosen), width, index.reshape(-1), (offsets <= last).reshape(-1)))
    return result


def split_by_length(
    lengths: Ints, padding: float = _PADDING, block_tokens: int = _BLOCK_TOKENS
) -> list[tuple[int, int]]:
    """Ranges of descending `lengths` that may share a padded block."""
    ranges: list[tuple[int, int]] = []
    first, used = 0, 0
    for i, length in enumerate(lengths.tolist()):
        width = int(lengths[first])
        area = (i + 1 - first) * width
        if i > first and (area > block_tokens or area - used - length > padding * area):
            ranges.append((first, i))
            first, used = i, 0
        used += length
    ranges.append((first, len(lengths)))
    return ranges
