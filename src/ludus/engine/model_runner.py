"""The language-model head on hidden states, with whatever the architecture does to its logits.

Log-probabilities are computed in chunks of rows, never for a whole batch at once, so the head is applied
apart from the decoder. `probe_head` makes sure that this gives what the model itself would give.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ludus.engine.attention import CONTEXT, AttentionContext
from ludus.engine.fused_model import Blueprint, blueprint_of, fused_hidden_states, unrecognised
from ludus.engine.hf_model import decoder_of, embedding_device, recomputed_layers, text_config, unwrapped
from ludus.engine.paged_attention import KvStore, PagedBatch, PagedContext
from ludus.engine.sampler import log_softmax_at, sample
from ludus.engine.scheduler import Chunk
from ludus.kernels import linear_float32, unavailable

# What an architecture may do to its logits after the product.
_SCALES = ("logit_scale", "lm_head_multiplier", "logits_scaling")
_CAP = "final_logit_softcapping"


def plain_head(model: nn.Module) -> nn.Linear | None:
    """The head, where it is one product and nothing else."""
    head, config = unwrapped(model).get_output_embeddings(), text_config(model)
    shapes = getattr(config, _CAP, None) is not None or any(
        _number(config, name) != 1 for name in _SCALES
    )
    # a subclass, or an adapter's wrapper, may do more than a product
    is_product = type(head) is nn.Linear and getattr(head, "bias", None) is None
    return head if is_product and not shapes else None


def head_logits(model: nn.Module, hidden: Tensor) -> Tensor:
    """Logits [..., V] of hidden states [..., H], scaled and capped as the model's own forward does."""
    inner, config = unwrapped(model), text_config(model)
    head = inner.get_output_embeddings()
    logits: Tensor = linear_float32(hidden, head.weight) if _is_exact(head, hidden) else head(hidden)
    raised, multiplied, lowered = (_number(config, name) for name in _SCALES)
    scale = raised * multiplied / lowered
    if scale != 1:
        logits = logits * scale
    cap = getattr(config, _CAP, None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def _is_exact(head: Any, hidden: Tensor) -> bool:
    """Whether the logits can be had in float32 at no cost: a plain head in half precision, for sampling."""
    return (
        isinstance(head, nn.Linear)
        and getattr(head, "bias", None) is None
        and hidden.ndim == 2
        and hidden.device.type == "cuda"
        and hidden.dtype != torch.float32
        and not torch.is_grad_enabled()
    )


def _number(config: object, name: str) -> float:
    value = getattr(config, name, None)
    return 1.0 if value is None else float(value)


# --- forward ---
# Running a decoder on flat tokens: by the fused forward where it fits, by the module's own elsewhere.

log = logging.getLogger(__name__)


def hidden_states(
    model: nn.Module, input_ids: Tensor, position_ids: Tensor, context: AttentionContext
) -> Tensor:
    """[T, hidden]: the decoder's last hidden states of flat tokens [T] in an attention context."""
    blueprint = _fused(model)
    if blueprint is not None:
        recomputed = recomputed_layers(model)
        return fused_hidden_states(blueprint, input_ids, position_ids, context, recomputed)
    return stock_hidden_states(model, input_ids, position_ids, context)


def stock_hidden_states(
    model: nn.Module, input_ids: Tensor, position_ids: Tensor, context: AttentionContext
) -> Tensor:
    """[T, hidden]: the same by the module's own forward."""
    output = decoder_of(model)(
        input_ids=input_ids[None],
        position_ids=position_ids.reshape(1, -1),
        use_cache=False,
        **{CONTEXT: context},
    )
    states: Tensor = output.last_hidden_state.squeeze(0)
    return states


def why_not_fused(model: nn.Module) -> str | None:
    """Why the module's own forward is used; None when the fused one is."""
    return unavailable(embedding_device(model)) or unrecognised(decoder_of(model))


def _fused(model: nn.Module) -> Blueprint | None:
    if unavailable(embedding_device(model)) is not None:
        return None
    return blueprint_of(decoder_of(model))


# --- runner ---
# One step of the model: new tokens of many requests in, sampled tokens and log-probabilities out.
#
# `Runner` computes a step at once, with plain torch operations over gathered pages: it works everywhere and is
# written for CPUs. On a GPU, `cuda.runner` launches steps and has their results later. Both are a `StepRunner`.

# Rows of hidden states that go through the head at once when a prompt is scored.
_HEAD_ROWS = 1024


@dataclass(slots=True)
class Results:
    """What a step gave: a token for each chunk that samples, and values for each that scores."""

    sampled: list[Chunk] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sound: list[bool] = field(default_factory=list)
    """False where the model gave NaN."""
    scores: list[tuple[Chunk, list[float]]] = field(default_factory=list)


class Pending(Protocol):
    """A step that has been launched."""

    chunks: Sequence[Chunk]
    is_urgent: bool
    """Whether the next step cannot be planned without its results."""

    def result(self) -> Results:
        """Wait for the step; once."""


class StepRunner(Protocol):
    """Runs chunks through the model."""

    lookahead: int
    """How many steps may be under way while the next one is planned."""

    def launch(self, chunks: Sequence[Chunk], tables: npt.NDArray[np.int64], pages: int) -> Pending:
        """Begin a step. `tables` are all rows' pages; `pages` is how many pages are in use."""

    def refresh(self) -> None:
        """The weights or the memory may have changed: whatever depends on where they lie is checked."""

    def close(self) -> None:
        """Let go of the device's memory."""


@dataclass(slots=True)
class Computed:
    """A step whose results are there already."""

    chunks: Sequence[Chunk]
    results: Results
    is_urgent: bool = True

    def result(self) -> Results:
        return self.results


class Runner:
    """Runs chunks through the model with its KV in `store`, one step at a time."""

    lookahead = 0

    def __init__(self, model: nn.Module, store: KvStore) -> None:
        self._model = model
        self._store = store

    def launch(self, chunks: Sequence[Chunk], tables: npt.NDArray[np.int64], pages: int) -> Computed:
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
        results = self._sample(chunks, hidden_TH, ends)
        results.scores = [
            (
                chunk,
                score(self._model, chunk, hidden_TH[end - (chunk.stop - chunk.start) : end]).tolist(),
            )
            for chunk, end in zip(chunks, ends.tolist(), strict=True)
            if chunk.request.is_score
        ]
        return Computed(chunks, results)

    def refresh(self) -> None:
        """Nothing here depends on addresses."""

    def close(self) -> None:
        """Nothing here is kept."""

    def _sample(
        self, chunks: Sequence[Chunk], hidden_TH: Tensor, ends: npt.NDArray[np.int64]
    ) -> Results:
        chosen = [
            (chunk, end - 1) for chunk, end in zip(chunks, ends.tolist(), strict=True) if chunk.samples
        ]
        if not chosen:
            return Results()
        last = torch.tensor([end for _, end in chosen], device=hidden_TH.device)
        logits_RV = head_logits(self._model, hidden_TH.index_select(0, last))
        sampled = [chunk for chunk, _ in chosen]
        return Results(sampled, *sample_chunks(logits_RV, sampled))


def sample_chunks(
    logits_RV: Tensor, chunks: Sequence[Chunk]
) -> tuple[list[int], list[float], list[bool]]:
    """Tokens, log-probabilities and soundness by whatever parameters each chunk's request has."""
    requests = [chunk.request for chunk in chunks]
    return sample(
        logits_RV,
        [request.sampling for request in requests],
        [chunk.stop - chunk.request.prompt for chunk in chunks],
        [request.seen for request in requests],
    )


def score(model: nn.Module, chunk: Chunk, hidden_CH: Tensor) -> Tensor:
    """The log-probability of each token that follows one of the chunk's."""
    following = chunk.request.tokens[chunk.start + 1 : chunk.stop + 1]
    temperature = chunk.request.sampling.temperature or 1.0
    values: list[Tensor] = []
    for first in range(0, len(following), _HEAD_ROWS):
        targets = torch.tensor(following[first : first + _HEAD_ROWS], device=hidden_CH.device)
        logits = head_logits(model, hidden_CH[first : first + len(targets)]).float()
        logprobs = log_softmax_at(logits, [temperature] * len(targets))
        values.append(logprobs.gather(1, targets[:, None])[:, 0])
    return torch.cat(values) if values else hidden_CH.new_empty(0, dtype=torch.float32)


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
