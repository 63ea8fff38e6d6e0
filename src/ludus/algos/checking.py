"""Functions of a user's own, held to what they promise: a mistake is named where it was made.

What comes with Ludus is tested instead, and is called as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ludus.algos.aggregate import Aggregation
from ludus.algos.blaming import called
from ludus.algos.credit import Credit, Estimate, Estimator, Need
from ludus.algos.importance import Correction
from ludus.algos.losses import Metrics, PolicyLoss, Sampled
from ludus.core.failures import ConfigError


def checked_estimator(name: str, estimate: Estimator, needs: frozenset[Need]) -> Estimator:
    """The estimator; what it returns must be an `Estimate` of this batch."""

    def checked(credit: Credit) -> Estimate:
        who = f"the estimator {name!r}"
        found: Any = called(who, estimate, credit)
        if not isinstance(found, Estimate):
            raise ConfigError(
                f"{who} returned {_described(found)}; an Estimate is wanted: credit.spread(advantages_N), "
                "credit.spread_turns(advantages_U) or Estimate(advantages_T)"
            )
        tokens = len(credit.trajectory_T)
        _check(found.advantages_T, tokens, f"{who} returned advantages_T", "one for each token")
        if found.returns_T is not None:
            _check(found.returns_T, tokens, f"{who} returned returns_T", "one for each token")
        elif Need.CRITIC in needs:
            raise ConfigError(
                f"{who} needs a critic and returned no returns_T, from which the critic would learn: "
                "Estimate(advantages_T, returns_T)"
            )
        return found

    return checked


def checked_loss(name: str, loss: PolicyLoss) -> PolicyLoss:
    """The loss; a loss and metrics for each token are wanted. Whether they are finite, the gradient says."""

    def checked(sampled: Sampled) -> tuple[Tensor, Metrics]:
        who, size = f"the loss {name!r}", len(sampled.logprobs_A)
        found: Any = called(who, loss, sampled)
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)):
            raise ConfigError(f"{who} returned {_described(found)}; (loss_A, metrics_A) is wanted")
        loss_A, metrics = found
        wanted = "one for each trained token, not their mean"
        _check(loss_A, size, f"{who} returned a loss", wanted, is_finite=False)
        for metric, value_A in metrics.items():
            _check(value_A, size, f"{who} returned the metric {metric!r}", wanted, is_finite=False)
        return loss_A, metrics

    return checked


def checked_aggregation(name: str, weigh: Aggregation) -> Aggregation:
    """The aggregation; a weight for each token is wanted."""

    def checked(trajectory_T: Tensor, trained_T: Tensor) -> Tensor:
        who = f"the aggregation {name!r}"
        found: Any = called(who, weigh, trajectory_T, trained_T)
        _check(found, len(trained_T), f"{who} returned weights", "one for each token")
        weight_T: Tensor = found
        return weight_T

    return checked


def checked_correction(name: str, correction: Correction) -> Correction:
    """The correction; a weight for each token is wanted."""

    def checked(sampled: Sampled) -> Tensor:
        who, size = f"the correction {name!r}", len(sampled.logprobs_A)
        found: Any = called(who, correction, sampled)
        _check(found, size, f"{who} returned weights", "one for each trained token")
        weight_A: Tensor = found
        return weight_A

    return checked


def _check(found: Any, size: int, who: str, wanted: str, *, is_finite: bool = True) -> None:
    fits = isinstance(found, Tensor) and found.is_floating_point() and found.shape == (size,)
    if not fits:
        raise ConfigError(f"{who} as {_described(found)}; {wanted} is wanted: floats of shape ({size},)")
    if is_finite and not bool(torch.isfinite(found).all()):
        bad = int((~torch.isfinite(found)).sum())
        raise ConfigError(
            f"{who} of which {bad} of {size} are not finite: look for a division by 0, as by the deviation "
            "of rewards that are all equal"
        )


def _described(found: Any) -> str:
    if isinstance(found, Tensor):
        return f"a tensor of {str(found.dtype).removeprefix('torch.')} and shape {tuple(found.shape)}"
    return f"{type(found).__name__} {found!r:.60}"
