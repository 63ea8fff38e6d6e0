"""Rows that begin alike, folded into a prefix forest, so that each shared prefix is computed once.

    row 0    p p p p a a           node 0   p p p p       parent -1     rows 0, 1, 2
    row 1    p p p p b b c    =>   node 1   a a           parent 0      row 0
    row 2    p p p p b b d         node 2   b b           parent 0      rows 1, 2
                                   nodes 3, 4   c, d      parent 2      row 1, row 2

Prefixes are shared in whole blocks of tokens, as in an engine's prefix cache: a few tokens are not worth a
node, and the tokens of a bundle of rows are the sum of what each row adds to the one before it in sorted order.

Losses and log-probabilities refer to the tokens of rows. A fold maps each of these to a computed token, whose
hidden state is the same, because it depends on the tokens before it alone. A child's first token is predicted
at its parent's last one, which is the token before it in its row.

Tokens are compared, not where they come from: attempts at one task share their prompt, branches of a tree their
turns, the two sides of a preference pair what was asked. Images have the same placeholder tokens, so an
image's first token is compared by its hash. A block may end inside an image.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ludus.core.messages import MediaSpan

Ints = npt.NDArray[np.int64]

BLOCK = 16
"""Prefixes are shared in so many tokens, or in a multiple of that."""
_SHORTEST = 48
"""A prefix of fewer tokens is not shared: on a CPU, masked attention costs more than they save."""


@dataclass(frozen=True, slots=True)
class Fold:
    """Rows as a forest: T tokens of all rows, U of them computed."""

    index_T: Ints
    """Where each token of the rows is among the computed ones."""
    source_U: Ints
    """Source index of each unique token: its first occurrence in the rows."""
    lengths: list[int]
    """The tokens of each node."""
    parents: list[int]
    """The node before each, or -1."""
    own_R: Ints
    """Number of tokens of each row that no earlier row has."""

    @classmethod
    def of(cls, keys: Sequence[Ints]) -> Fold | None:
        """Fold rows, given a number for each token, equal where tokens are; None where no two begin alike."""
        # Sorted, rows with a common prefix are neighbours, and common[i] is what row order[i] shares with the
        # one before it. So a run of neighbours is a subtree: rows first..stop whose common values exceed
        # `depth` share at least the smallest of these values, and that prefix (from depth on) is one node.
        # Below the node the run is cut again where a common value is not larger than the node's end.
        order, common = sorted_by_prefix(keys)
        if not any(common):
            return None
        starts = np.cumsum([0, *(len(key) for key in keys)])
        index_T = np.empty(starts[-1], dtype=np.int64)
        lengths: list[int] = []
        parents: list[int] = []
        computed = 0
        waiting = [
            (0, len(keys), 0, -1)
        ]  # (first row, last + 1, tokens above, node above), in sorted order
        while waiting:
            first, stop, depth, parent = waiting.pop()
            for begin, end in _runs(common, first, stop, depth):
                upto = min(common[begin + 1 : end]) if end - begin > 1 else len(keys[order[begin]])
                if upto == depth:
                    continue  # the row ends with the node before
                for row in order[
                    begin:end
                ]:  # the node's tokens are these rows' tokens from depth to upto
                    place = starts[row]
                    index_T[place + depth : place + upto] = np.arange(computed, computed + upto - depth)
                if end - begin > 1:
                    waiting.append((begin, end, upto, len(lengths)))
                lengths.append(upto - depth)
                parents.append(parent)
                computed += upto - depth
        # source index of each unique token: unique() returns first occurrences
        source_U = np.unique(index_T, return_index=True)[1]
        own_R = np.bincount(np.searchsorted(starts, source_U, side="right") - 1, minlength=len(keys))
        return cls(index_T, source_U, lengths, parents, own_R)

    @property
    def computed(self) -> int:
        """The tokens that are computed."""
        return len(self.source_U)

    def part(self, first: int, lengths: Sequence[int]) -> Fold | None:
        """The fold of some rows, of these lengths, the first of which begins at the token `first`."""
        index_T = self.index_T[first : first + sum(lengths)]
        return Fold.of(np.split(index_T, np.cumsum(lengths)[:-1]))


def sorted_by_prefix(keys: Sequence[Ints]) -> tuple[list[int], list[int]]:
    """Rows in an order in which those that begin alike are neighbours, and what each shares with the last.

    The tokens' bytes are compared, which is an order as good as any, and fast.
    """
    words = [key.tobytes() for key in keys]
    order = sorted(range(len(keys)), key=words.__getitem__)
    shared = [_shared(keys[one], keys[other]) for one, other in pairwise(order)]
    return order, [0, *shared][: len(order)]


def _shared(one: Ints, other: Ints) -> int:
    """How many leading tokens two rows share."""
    size = min(len(one), len(other))
    differs = one[:size] != other[:size]
    common = int(differs.argmax()) if differs.any() else size
    return common // BLOCK * BLOCK if common >= _SHORTEST else 0


def _runs(common: Sequence[int], first: int, stop: int, depth: int) -> Iterator[tuple[int, int]]:
    """Neighbours from `first` to `stop` that have more than `depth` tokens in common."""
    begin = first
    for place in range(first + 1, stop + 1):
        if place == stop or common[place] <= depth:
            yield begin, place
            begin = place


def row_keys(
    tokens: Sequence[Sequence[int] | Ints], images: Sequence[Sequence[MediaSpan]]
) -> list[Ints]:
    """The tokens of each row; a number below 0 for an image, at its first token."""
    known: dict[str, int] = {}
    keys = [np.array(row, dtype=np.int64) for row in tokens]
    for key, spans in zip(keys, images, strict=True):
        for span in spans:
            key[span.start] = -1 - known.setdefault(span.sha256, len(known))
    return keys


def computed_tokens(keys: Sequence[Ints]) -> int:
    """Number of tokens computed for these rows: shared prefixes count once."""
    return sum(map(len, keys)) - sum(sorted_by_prefix(keys)[1])


@dataclass(slots=True)
class Bundle:
    """Rows that travel together because they begin alike, and the tokens that are computed for them."""

    rows: list[int]
    size: int


def bundles_of(keys: Sequence[Ints], limit: int) -> list[Bundle]:
    """Rows that begin alike together, with at most `limit` computed tokens; what is more is cut between rows.

    A row that begins like no other is a bundle of its own, and so is one that is longer than that.
    """
    order, common = sorted_by_prefix(keys)
    bundles: list[Bundle] = []
    for row, shared in zip(order, common, strict=True):
        added = len(keys[row]) - shared
        if shared and bundles[-1].size + added <= limit:
            bundles[-1].rows.append(row)
            bundles[-1].size += added
        else:
            bundles.append(Bundle([row], len(keys[row])))
    return sorted(bundles, key=lambda bundle: min(bundle.rows))
