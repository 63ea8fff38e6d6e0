"""Training attention over a prefix forest: each shared prefix is computed once for all that follows it.

Sequences that begin alike are folded into nodes, runs of tokens that the same sequences share. A node's tokens
lie end to end; they see those of the node's ancestors and, causally, each other. So everything but attention
(projections, norms, MLPs, the head) meets every token once, and attention reads the keys and values of a prefix
from where they are.

On a GPU it is the same flash kernel as for packed sequences, with a node's own tokens as queries, and its
ancestors' and its own as keys. Elsewhere nodes of similar shape are padded together. Nodes without ancestors
are causal attention, as packed sequences are; the others are masked by position. Their queries go through in
chunks, and a chunk leaves out the keys behind it, all of which causality would hide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ludus.model.attention import AttentionParams, attend, positional_mask, split_by_length
from ludus.model.hf_model import decoder_of, device_of, head_shape, rows_alone
from ludus.model.image_layout import both_ways
from ludus.model.packed_attention import (
    HALF,
    Ints,
    Kernel,
    PackedContext,
    SequenceBounds,
    bounds_of,
    kernel_for,
    padded_groups,
    paths_of,
    probed_kernel,
)
from ludus.model.state_layers import StateCall

# Queries of a padded group that are computed at once, and the most scores of that.
_CHUNK = 256
_SCORES = 1 << 24
# At most this fraction of a group's queries, and of its keys, is padding.
_PADDING = 0.15


@dataclass(frozen=True, slots=True)
class _Group:
    """Nodes of similar shape side by side, padded at the end."""

    rows: int
    width: int
    """Queries of each."""
    length: int
    """Keys of each."""
    positions: Tensor | None
    """[rows or 1, width] Where the queries stand among the keys; None where both are the same tokens."""
    deepest: int = 0
    """The most keys before a node's first query."""
    masks: dict[tuple[int, object], Tensor] = field(default_factory=dict)

    def mask(self, start: int, stop: int, params: AttentionParams) -> Tensor:
        """Mask of the keys that the queries from `start` to `stop` may attend to."""
        assert self.positions is not None
        if (start, params.reach) not in self.masks:
            seen = min(self.length, self.deepest + stop)
            mask = positional_mask(self.positions[:, start:stop], seen, params)
            self.masks[start, params.reach] = mask
        return self.masks[start, params.reach]


class ForestContext(PackedContext):
    """Attention of each node's tokens to those of its ancestors and, causally, to its own."""

    shares_tokens = True

    def __init__(
        self, lengths: Sequence[int], parents: Sequence[int], device: torch.device | str = "cpu"
    ) -> None:
        """`parents` has for each node the number of an earlier one, or -1."""
        super().__init__(lengths, device)
        self._paths = paths_of(self.lengths, parents)
        self.longest = max(len(path) for path in self._paths)
        self.are_even = False

    @property
    def position_ids(self) -> Tensor:
        """[1, T]: positions counted from the root."""
        pairs = zip(self._paths, self.lengths, strict=True)
        return self._there(np.concatenate([np.arange(len(p) - n, len(p)) for p, n in pairs]))[None]

    def run_state_layer(self, call: StateCall) -> Tensor:
        """Each path from a root to a leaf on its own: a state layer computes a shared prefix for every leaf."""
        self.state_calls += 1
        groups, back = self._leaf_paths
        return torch.cat([call.run(*group) for group in groups]).index_select(0, back)[None]

    @cached_property
    def _leaf_paths(self) -> tuple[list[tuple[Tensor, int, int]], Tensor]:
        """(places, rows, width) of padded groups of paths, and where each token lies in one of them."""
        parents = {int(path[-length - 1]) for path, length in self._nodes if len(path) > length}
        leaves = [path for path, _ in self._nodes if int(path[-1]) not in parents]
        flat = np.concatenate(leaves)
        groups: list[tuple[Tensor, int, int]] = []
        back = np.empty(self.tokens, dtype=np.int64)
        base = 0
        lengths = np.asarray([len(path) for path in leaves], dtype=np.int64)
        for rows, width, index, valid in padded_groups(lengths):
            groups.append((self._there(flat[index]), rows, width))
            back[flat[index[valid]]] = base + np.flatnonzero(valid)
            base += rows * width
        return groups, self._there(back)

    @property
    def _nodes(self) -> Iterator[tuple[Ints, int]]:
        return zip(self._paths, self.lengths, strict=True)

    def _kernel(self, flat: Sequence[Tensor], params: AttentionParams) -> Kernel | None:
        return kernel_for(flat[0], flat[1], params, self.longest, True)

    @cached_property
    def _bounds(self) -> SequenceBounds:
        return bounds_of(self.lengths, self._paths, self.device)

    def _attend_in_groups(self, flat: Sequence[Tensor], params: AttentionParams) -> Tensor:
        groups, query_index, key_index, back = self._forest_groups
        queries = torch.split(
            flat[0].index_select(0, query_index), [one.rows * one.width for one in groups]
        )
        keys, values = (
            torch.split(states.index_select(0, key_index), [one.rows * one.length for one in groups])
            for states in flat[1:]
        )
        outputs = [
            self._attend_group(group, query, key, value, params)
            for group, query, key, value in zip(groups, queries, keys, values, strict=True)
        ]
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined.index_select(0, back)[None]

    def _attend_group(
        self, group: _Group, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams
    ) -> Tensor:
        """[rows * width, heads, size] from the group's states, flat as well."""
        query = query.view(group.rows, group.width, *query.shape[1:]).transpose(1, 2)
        key, value = (
            states.view(group.rows, group.length, *states.shape[1:]).transpose(1, 2)
            for states in (key, value)
        )
        if group.positions is None:
            output = attend(query, key, value, params, self._mask(group.width, params))
            return output.transpose(1, 2).reshape(-1, *output.shape[1::2])
        pieces: list[Tensor] = []
        for start in range(0, group.width, _CHUNK):
            stop = min(start + _CHUNK, group.width)
            mask = group.mask(start, stop, params)
            seen = mask.shape[-1]
            pieces.append(
                attend(query[:, :, start:stop], key[:, :, :seen], value[:, :, :seen], params, mask)
            )
        output = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)
        return output.transpose(1, 2).reshape(-1, *output.shape[1::2])

    @cached_property
    def _forest_groups(self) -> tuple[list[_Group], Tensor, Tensor, Tensor]:
        """The groups, the tokens of their queries and of their keys, and where each token lies in the first."""
        counts = np.asarray([len(path) for path in self._paths], dtype=np.int64)
        lengths = np.asarray(self.lengths, dtype=np.int64)
        starts = np.cumsum(lengths) - lengths
        groups: list[_Group] = []
        queries: list[Ints] = []
        keys: list[Ints] = []
        valid: list[npt.NDArray[np.bool_]] = []
        roots = np.flatnonzero(counts == lengths)
        flat = np.concatenate([self._paths[root] for root in roots])
        for rows, width, index, is_valid in padded_groups(lengths[roots]):
            groups.append(_Group(rows, width, width, None))
            queries.append(flat[index])
            keys.append(flat[index])
            valid.append(is_valid)
        for chosen in _similar_nodes(lengths, counts, np.flatnonzero(counts > lengths)):
            width, length = int(lengths[chosen].max()), int(counts[chosen].max())
            offsets, last = np.arange(width)[None, :], lengths[chosen][:, None] - 1
            before = (counts - lengths)[chosen][:, None]
            queries.append((starts[chosen][:, None] + np.minimum(offsets, last)).reshape(-1))
            keys += [
                np.pad(self._paths[node], (0, length - counts[node]), mode="edge") for node in chosen
            ]
            valid.append((offsets <= last).reshape(-1))
            if bool((before == before[0]).all()):
                before = before[:1]  # one mask for all
            there = self._there(before + offsets)
            groups.append(_Group(len(chosen), width, length, there, int(before.max())))
        index, is_valid = np.concatenate(queries), np.concatenate(valid)
        back = np.empty(self.tokens, dtype=np.int64)
        back[index[is_valid]] = np.flatnonzero(is_valid)
        return groups, self._there(index), self._there(np.concatenate(keys)), self._there(back)


def _similar_nodes(lengths: Ints, counts: Ints, nodes: Ints) -> Iterator[Ints]:
    """Nodes with ancestors in groups: first by their keys, then by their queries."""
    if not len(nodes):
        return
    nodes = nodes[np.argsort(-counts[nodes], kind="stable")]
    for first, stop in split_by_length(counts[nodes], _PADDING, 1 << 62):
        alike = nodes[first:stop]
        alike = alike[np.argsort(-lengths[alike], kind="stable")]
        longest = int(counts[alike].max())
        for start, end in split_by_length(lengths[alike], _PADDING, 1 << 62):
            most = max(1, _SCORES // (min(int(lengths[alike[start]]), _CHUNK) * longest))
            for some in range(start, end, most):
                yield alike[some : min(some + most, end)]


def can_share_prefixes(model: nn.Module) -> bool:
    """Whether the trainer may fold common prefixes of this model's rows: on a CPU, and by a flash kernel that
    was tried on a forest. Masked attention in padded groups would be right on a GPU as well, and slow. Not
    where an image's tokens see each other: a prefix that rows share may end inside an image.
    """
    if both_ways(model) is not None:
        return False
    device = device_of(model)
    if rows_alone(model) is not None:
        return False
    if device.type != "cuda":
        return device.type == "cpu"
    decoder = decoder_of(model)
    config = decoder.config.get_text_config()
    layers = getattr(config, "layer_types", None)
    if layers is None and getattr(config, "sliding_window", None):
        return False
    if any(kind != "full_attention" for kind in layers or ()):
        return False
    if any(getattr(config, name, None) for name in ("attn_logit_softcapping", "attention_dropout")):
        return False
    if not isinstance(getattr(config, "num_attention_heads", None), int):
        return False
    dtype = decoder.get_input_embeddings().weight.dtype
    return dtype in HALF and probed_kernel(device, dtype, *head_shape(config), True) is not None
