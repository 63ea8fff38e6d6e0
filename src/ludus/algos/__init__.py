"""Algorithms as pure functions over packed tensors, one short file each.

An algorithm is an advantage estimator and a policy loss. The trainer does not know which one it runs.
"""

from __future__ import annotations

from ludus.algos.aggregate import Aggregation, by_sequence, by_token
from ludus.algos.credit import Credit, Estimator
from ludus.algos.grpo import grpo
from ludus.algos.kl import k3
from ludus.algos.losses import Metrics, PolicyLoss, clipped_surrogate, policy_gradient
from ludus.algos.reinforce import reinforce

ESTIMATORS: dict[str, Estimator] = {"grpo": grpo, "reinforce": reinforce}
AGGREGATIONS: dict[str, Aggregation] = {"token": by_token, "sequence": by_sequence}

__all__ = [
    "AGGREGATIONS",
    "ESTIMATORS",
    "Aggregation",
    "Credit",
    "Estimator",
    "Metrics",
    "PolicyLoss",
    "by_sequence",
    "by_token",
    "clipped_surrogate",
    "grpo",
    "k3",
    "policy_gradient",
    "reinforce",
]
