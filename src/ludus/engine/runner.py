"""One step of the model: new tokens of many requests in, sampled tokens and log-probabilities out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ludus.engine.backbone import hidden_states, unwrapped
from ludus.engine.head import head_logits
from ludus.engine.paged import PagedBatch, PagedContext
from ludus.engine.sampling import log_softmax_at, sample
from ludus.engine.scheduler import Chunk
from ludus.engine.store import KvStore

# Rows of hidden states that go through the head at once when a prompt is scored.
_HEAD_ROWS = 1024


class Sampled(NamedTuple):
    """The next token of one chunk's request; `is_sound` is false when the model gave NaN."""

    chunk: Chunk
    token: int
    logprob: float
    is_sound: bool


class Runner:
    """Runs chunks through the model with its KV in `store`."""

    def __init__(self, model: nn.Module, store: KvStore) -> None:
        self._model = model
        self._store = store

    def step(
        self, chunks: Sequence[Chunk], tables: npt.NDArray[np.int64], pages: int
    ) -> tuple[list[Sampled], list[tuple[Chunk, list[float]]]]:
        """Sampled tokens of the chunks that end their request's tokens, and scores of those that score.

        `tables` are all rows' pages; `pages` is how many pages are in use.
        """
        self._store.ensure(pages)
        device = unwrapped(self._model).get_input_embeddings().weight.device
        ids, positions, batch = flat_batch(chunks, tables, self._store.page_size)
        context = PagedContext(batch, self._store, device)
        hidden_TH = hidden_states(
            self._model,
            torch.from_numpy(ids).to(device),
            torch.from_numpy(positions).to(device),
            context,
        )
        ends = np.cumsum(batch.counts)
        sampled = self._sample(chunks, hidden_TH, ends)
        scores = [
            (chunk, self._score(chunk, hidden_TH[end - (chunk.stop - chunk.start) : end]))
            for chunk, end in zip(chunks, ends.tolist(), strict=True)
            if chunk.request.is_score
        ]
        return sampled, scores

    def _sample(
        self, chunks: Sequence[Chunk], hidden_TH: Tensor, ends: npt.NDArray[np.int64]
    ) -> list[Sampled]:
        chosen = [
            (chunk, end - 1)
            for chunk, end in zip(chunks, ends.tolist(), strict=True)
            if chunk.stop == len(chunk.request.tokens) and not chunk.request.is_score
        ]
        if not chosen:
            return []
        last = torch.tensor([end for _, end in chosen], device=hidden_TH.device)
        logits_RV = head_logits(self._model, hidden_TH.index_select(0, last))
        requests = [chunk.request for chunk, _ in chosen]
        tokens, logprobs, sound = sample(
            logits_RV,
            [request.sampling for request in requests],
            [request.generated for request in requests],
            [request.seen for request in requests],
        )
        return [
            Sampled(chunk, token, logprob, is_sound)
            for (chunk, _), token, logprob, is_sound in zip(chosen, tokens, logprobs, sound, strict=True)
        ]

    def _score(self, chunk: Chunk, hidden_CH: Tensor) -> list[float]:
        """The log-probability of each token that follows one of the chunk's."""
        following = chunk.request.tokens[chunk.start + 1 : chunk.stop + 1]
        temperature = chunk.request.sampling.temperature or 1.0
        values: list[float] = []
        for first in range(0, len(following), _HEAD_ROWS):
            targets = torch.tensor(following[first : first + _HEAD_ROWS], device=hidden_CH.device)
            logits = head_logits(self._model, hidden_CH[first : first + len(targets)]).float()
            logprobs = log_softmax_at(logits, [temperature] * len(targets))
            values += logprobs.gather(1, targets[:, None])[:, 0].tolist()
        return values


def flat_batch(
    chunks: Sequence[Chunk], tables: npt.NDArray[np.int64], page_size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], PagedBatch]:
    """Token ids, positions and places of all chunks, end to end."""
    ids: list[int] = []
    positions: list[int] = []
    for chunk in chunks:
        if chunk.stop - chunk.start == 1:
            ids.append(chunk.request.tokens[chunk.start])
            positions.append(chunk.start)
        else:
            ids += chunk.request.tokens[chunk.start : chunk.stop]
            positions += range(chunk.start, chunk.stop)
    rows_R = np.array([chunk.request.row for chunk in chunks])
    lengths_R = np.array([chunk.stop for chunk in chunks])
    counts_R = lengths_R - np.array([chunk.start for chunk in chunks])
    positions_T = np.array(positions)
    pages_T = tables[np.repeat(rows_R, counts_R), positions_T // page_size]
    slots_T = pages_T * page_size + positions_T % page_size
    width = -(-int(lengths_R.max()) // page_size)
    batch = PagedBatch(slots_T, counts_R, lengths_R, tables[rows_R, :width])
    return np.array(ids), positions_T, batch
