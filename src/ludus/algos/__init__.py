"""Algorithms as pure functions over packed tensors, one short file each.

An algorithm is an advantage estimator, a policy loss and an aggregation. The trainer does not know which
ones it runs. `naming` has the tables of names.
"""

from __future__ import annotations

from ludus.algos.aggregate import Aggregation, by_length, by_sequence, by_sequence_sum, by_token
from ludus.algos.credit import Credit, Estimate, Estimator, Need, needs, needs_of
from ludus.algos.dr_grpo import dr_grpo
from ludus.algos.gae import gae
from ludus.algos.gigpo import gigpo
from ludus.algos.grpo import grpo
from ludus.algos.importance import (
    Correction,
    corrected,
    effective_sample_share,
    masked_importance,
    truncated_importance,
)
from ludus.algos.kl import Divergence, adapted_coefficient, k1, k2, k3, kl_reward
from ludus.algos.landing import speech_span, token_rewards, turn_returns
from ludus.algos.losses import (
    Metrics,
    PolicyLoss,
    Sampled,
    cispo,
    clipped_surrogate,
    dual_clip,
    gspo,
    policy_gradient,
)
from ludus.algos.naming import (
    AGGREGATIONS,
    ALGORITHMS,
    CORRECTIONS,
    DIVERGENCES,
    ESTIMATORS,
    LOSSES,
    Algorithm,
    Plan,
    load_aggregation,
    load_algorithm,
    load_correction,
    load_divergence,
    load_estimator,
    load_loss,
    options_of,
)
from ludus.algos.overlong import overlong_price
from ludus.algos.plain import Attempt, Turn, credit_from
from ludus.algos.regularisers import regularised
from ludus.algos.reinforce import reinforce
from ludus.algos.reinforce_pp import reinforce_pp
from ludus.algos.reinforce_pp_baseline import reinforce_pp_baseline
from ludus.algos.resampling import resample_on_correct, untidiness
from ludus.algos.rloo import rloo
from ludus.algos.turn_grpo import turn_grpo
from ludus.algos.values import value_loss

__all__ = [
    "AGGREGATIONS",
    "ALGORITHMS",
    "CORRECTIONS",
    "DIVERGENCES",
    "ESTIMATORS",
    "LOSSES",
    "Aggregation",
    "Algorithm",
    "Attempt",
    "Correction",
    "Credit",
    "Divergence",
    "Estimate",
    "Estimator",
    "Metrics",
    "Need",
    "Plan",
    "PolicyLoss",
    "Sampled",
    "Turn",
    "adapted_coefficient",
    "by_length",
    "by_sequence",
    "by_sequence_sum",
    "by_token",
    "cispo",
    "clipped_surrogate",
    "corrected",
    "credit_from",
    "dr_grpo",
    "dual_clip",
    "effective_sample_share",
    "gae",
    "gigpo",
    "grpo",
    "gspo",
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
    "overlong_price",
    "policy_gradient",
    "regularised",
    "reinforce",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "resample_on_correct",
    "rloo",
    "speech_span",
    "token_rewards",
    "truncated_importance",
    "turn_grpo",
    "turn_returns",
    "untidiness",
    "value_loss",
]
