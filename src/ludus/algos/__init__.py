"""Algorithms as pure functions over packed tensors.

An algorithm is an advantage estimator, a policy loss and an aggregation. The trainer does not know which
ones it runs. `specs` and `registry` have the tables of names. Names are imported when they are first used:
recipes read `specs` without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ludus.core.registry import lazy_exports

if TYPE_CHECKING:
    from ludus.algos.advantage_inputs import (
        AdvantageInputs,
        Advantages,
        Estimator,
        Need,
        action_span,
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
    from ludus.algos.critic_advantages import gae, value_loss
    from ludus.algos.losses import (
        Aggregation,
        Correction,
        Divergence,
        LossInputs,
        Metrics,
        PolicyLoss,
        adapted_kl_coefficient,
        by_length,
        by_sequence,
        by_sequence_sum,
        by_token,
        cispo,
        clipped_surrogate,
        corrected,
        dual_clip,
        effective_sample_size,
        gspo,
        k1,
        k2,
        k3,
        kl_reward,
        masked_importance,
        policy_gradient,
        truncated_importance,
        with_regularization,
    )
    from ludus.algos.plain_lists import Attempt, TurnTokens, inputs_from
    from ludus.algos.registry import (
        AGGREGATIONS,
        CORRECTIONS,
        DIVERGENCES,
        ESTIMATORS,
        LOSSES,
        Algorithm,
        load_aggregation,
        load_algorithm,
        load_correction,
        load_divergence,
        load_estimator,
        load_loss,
        options_of,
    )
    from ludus.algos.shaping import overlong_penalty, resample_on_correct, roc_penalty
    from ludus.algos.specs import ALGORITHMS, AlgorithmSpec
    from ludus.algos.trees import TreeNodes, tree_grpo, tree_nodes, tree_value, treepo

__getattr__, __dir__ = lazy_exports(__name__)

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
