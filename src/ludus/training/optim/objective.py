"""What a policy's update minimises, and its metrics.

Metrics are means over tokens, and some are made from several of them (`of_update`): the effective sample sizes;
and how far engine and trainer differ, which is over the tokens that the very weights that are trained have
sampled. An asynchronous run has older tokens beside them: a difference there is what has been learned since.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ludus.algos import Algorithm, LossInputs, effective_sample_size, k1, k3, with_regularization
from ludus.algos.advantage_inputs import size_within, sum_within
from ludus.algos.losses import clamped_log_ratio
from ludus.training.config.rl import RLConfig
from ludus.training.data.batch import Batch
from ludus.training.data.micro_batches import MicroBatch
from ludus.training.optim.learner import TOKENS, Metrics
from ludus.training.optim.logprobs import action_logprobs


class TokenNotes:
    """Numbers of trained tokens, as micro-batches compute them, by their places among all tokens."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._found: list[tuple[Tensor, Tensor]] = []

    def add(self, place_A: Tensor, value_A: Tensor) -> None:
        """Keep them on their device; a micro-batch that is computed again replaces what it said before."""
        self._found.append((place_A, value_A.detach()))

    def on_host(self) -> Tensor:
        """All of them on the host; not a number where there is none."""
        values_T = torch.full((self._tokens,), torch.nan)
        if self._found:
            place_A, value_A = (torch.cat(parts) for parts in zip(*self._found, strict=True))
            values_T[place_A.cpu()] = value_A.float().cpu()
        return values_T


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """The loss of a micro-batch: the algorithm's policy loss, a KL penalty, an entropy bonus."""

    algorithm: Algorithm
    config: RLConfig
    reference: nn.Module | None
    """The reference model, where the KL penalty is part of the loss."""
    temperature: float
    entropies: TokenNotes | None = None
    """Where to note the entropies of the trained tokens."""
    compared_T: Tensor | None = None
    """The tokens that the weights that are trained have sampled, before they change: where engine and trainer
    can be compared."""

    @property
    def has_other_terms(self) -> bool:
        """Whether tokens have a gradient even where their advantage is 0."""
        return (self.reference is not None and self.config.kl.weight > 0) or self.config.entropy > 0

    def __call__(
        self, logprobs_A: Tensor, entropy_A: Tensor, batch: MicroBatch
    ) -> tuple[Tensor, Metrics]:
        config = self.config
        if self.entropies is not None:
            self.entropies.add(batch.source_index_A, entropy_A)
        if config.starts_at_training_pass:
            batch = replace(batch, old_logprobs_A=logprobs_A.detach())
        loss_A, metrics = self.algorithm.loss(
            LossInputs(
                logprobs_A=logprobs_A,
                old_logprobs_A=batch.old_logprobs_A,
                advantages_A=batch.advantages_A,
                row_A=batch.row_A,
                rollout_logprobs_A=batch.rollout_logprobs_A,
            )
        )
        metrics |= comparison(logprobs_A.detach(), batch)
        if self.compared_T is not None:
            same_A = self.compared_T[batch.source_index_A]
            metrics |= difference(logprobs_A.detach() - batch.rollout_logprobs_A, same_A)
        if self.reference is not None:
            with torch.no_grad():
                reference_A, _ = action_logprobs(self.reference, batch, self.temperature)
            metrics["kl"] = self.algorithm.divergence(logprobs_A, reference_A)
            loss_A = with_regularization(loss_A, kl_A=metrics["kl"], kl_weight=config.kl.weight)
        loss_A = with_regularization(loss_A, entropy_A=entropy_A, entropy_weight=config.entropy)
        return loss_A, metrics


OLD_KL = "kl_old_k3"
"""The metric that `target_kl` limits."""
DIFFERENCE = "logprob_difference"
_SHARES = {"ess": ("sum", "squares"), "ess_sequence": ("sum", "squares", "count")}
"""Metrics of a whole update, and the per-token numbers whose means they are made from."""


def of_update(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics of an update, from the means over its tokens; nothing from none."""
    found = dict(metrics)
    for name, parts in _SHARES.items() if metrics else ():
        found[name] = effective_sample_size(*(found.pop(f"{name}/{one}") for one in parts))
    share = found.pop(f"{DIFFERENCE}_share", None)
    if share:
        found[f"{DIFFERENCE}_mean"] /= share
    elif share is not None:  # no token was sampled by these weights
        del found[f"{DIFFERENCE}_mean"], found[f"{DIFFERENCE}_max"]
    return found


def sampled_by(batch: Batch, version: int | None) -> Tensor:
    """Which tokens a version of the policy has sampled; one whose version is not known may be."""
    if version is None:
        return batch.action_T
    return batch.action_T & ((batch.version_T == version) | (batch.version_T < 0))


def comparison(logprobs_A: Tensor, batch: MicroBatch) -> dict[str, Tensor]:
    """How far the weights are from those that sampled, and from those that the step began with."""
    ratio_A = clamped_log_ratio(logprobs_A - batch.old_logprobs_A).exp()
    return {
        "ratio_mean": ratio_A,
        "ratio_max": ratio_A,
        # the tokens were drawn from the old policy, so that is the first argument of the divergence
        "kl_old_k1": k1(batch.old_logprobs_A, logprobs_A),
        OLD_KL: k3(batch.old_logprobs_A, logprobs_A),
    } | _weights(logprobs_A - batch.rollout_logprobs_A, batch.row_A)


def difference(difference_A: Tensor, same_A: Tensor) -> dict[str, Tensor]:
    """Sums for the differences between engine and trainer, over tokens of the same weights."""
    size_A = difference_A.abs()
    return {
        f"{DIFFERENCE}_mean": torch.where(same_A, size_A, 0.0),
        f"{DIFFERENCE}_max": torch.where(same_A, size_A, -torch.inf),
        f"{DIFFERENCE}_share": same_A.to(size_A.dtype),
    }


def _weights(difference_A: Tensor, row_A: Tensor) -> dict[str, Tensor]:
    """Sums for the effective sample sizes. A row's weight is divided among its tokens."""
    weight_A = clamped_log_ratio(difference_A).exp()
    sequence_A = clamped_log_ratio(sum_within(difference_A, row_A)[row_A]).exp()
    share_A = 1 / size_within(row_A, weight_A.dtype)
    return {
        "ess/sum": weight_A,
        "ess/squares": weight_A**2,
        "ess_sequence/sum": sequence_A * share_A,
        "ess_sequence/squares": sequence_A**2 * share_A,
        "ess_sequence/count": share_A,
    }


def merged(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """One table for the updates of a step: means over tokens, and the largest of what is a largest."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        having = [update for update in updates if name in update]
        values = [update[name] for update in having]
        counts = [1.0 if name in _OF_A_STEP else update[TOKENS] for update in having]
        mean = sum(v * n for v, n in zip(values, counts, strict=True)) / sum(counts)
        found[name] = max(values) if name.endswith("_max") else mean
    return found


_OF_A_STEP = ("loss", "gradient_norm", "learning_rate")
"""Metrics that an optimizer step has one of, however many tokens it saw."""
