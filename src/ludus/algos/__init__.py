"""Algorithms as pure functions over packed tensors.

An algorithm is an advantage estimator, a policy loss and an aggregation. The trainer does not know which
ones it runs. `registry` has the tables of names.
"""

from __future__ import annotations

from typing import Never

from ludus.algos.advantage_inputs import (
    AdvantageInputs,
    Advantages,
    Attempt,
    Estimator,
    Need,
    TurnTokens,
    action_span,
    inputs_from,
    needs,
    needs_of,
    token_rewards,
    turn_returns,
)
from ludus.algos.advantages import (
    dr_grpo,
    gigpo,
    grpo,
    reinforce,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
    turn_grpo,
)
from ludus.algos.gae import gae, value_loss
from ludus.algos.importance import (
    Correction,
    corrected,
    effective_sample_size,
    masked_importance,
    truncated_importance,
)
from ludus.algos.kl import Divergence, adapted_kl_coefficient, k1, k2, k3, kl_reward
from ludus.algos.losses import (
    Aggregation,
    LossInputs,
    Metrics,
    PolicyLoss,
    by_length,
    by_sequence,
    by_sequence_sum,
    by_token,
    cispo,
    clipped_surrogate,
    dual_clip,
    gspo,
    policy_gradient,
    with_regularization,
)
from ludus.algos.registry import (
    AGGREGATIONS,
    ALGORITHMS,
    CORRECTIONS,
    DIVERGENCES,
    ESTIMATORS,
    LOSSES,
    Algorithm,
    AlgorithmSpec,
    load_aggregation,
    load_algorithm,
    load_correction,
    load_divergence,
    load_estimator,
    load_loss,
    options_of,
)
from ludus.algos.shaping import overlong_penalty, resample_on_correct, roc_penalty
from ludus.algos.trees import TreeNodes, tree_grpo, tree_nodes, tree_value, treepo

__all__ = [
    "AGGREGATIONS",
    "ALGORITHMS",
    "CORRECTIONS",
    "DIVERGENCES",
    "ESTIMATORS",
    "LOSSES",
    "AdvantageInputs",
    "Advantages",
    "Aggregation",
    "Algorithm",
    "AlgorithmSpec",
    "Attempt",
    "Correction",
    "Divergence",
    "Estimator",
    "LossInputs",
    "Metrics",
    "Need",
    "PolicyLoss",
    "TreeNodes",
    "TurnTokens",
    "action_span",
    "adapted_kl_coefficient",
    "by_length",
    "by_sequence",
    "by_sequence_sum",
    "by_token",
    "cispo",
    "clipped_surrogate",
    "corrected",
    "dr_grpo",
    "dual_clip",
    "effective_sample_size",
    "gae",
    "gigpo",
    "grpo",
    "gspo",
    "inputs_from",
    "k1",
    "k2",
    "k3",
    "kl_reward",
    "load_aggregation",
    "load_algorithm",
    "load_correction",
    "load_divergence",
    "load_estimator",
    "load_loss",
    "masked_importance",
    "needs",
    "needs_of",
    "options_of",
    "overlong_penalty",
    "policy_gradient",
    "reinforce",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "resample_on_correct",
    "rloo",
    "roc_penalty",
    "token_rewards",
    "tree_grpo",
    "tree_nodes",
    "tree_value",
    "treepo",
    "truncated_importance",
    "turn_grpo",
    "turn_returns",
    "value_loss",
    "with_regularization",
]

_RENAMED = {
    "Credit": "AdvantageInputs",
    "Estimate": "Advantages",
    "Sampled": "LossInputs",
    "Turn": "TurnTokens",
    "credit_from": "inputs_from",
}


def __getattr__(name: str) -> Never:
    if name in _RENAMED:
        raise ImportError(f"ludus.algos.{name} is now ludus.algos.{_RENAMED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
