"""Well-known algorithms as data: what each is made of, and the names of the parts. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ludus.core.registry import Registry

Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AlgorithmSpec:
    """Parts of a well-known algorithm: names and options that differ from the defaults."""

    estimator: str
    loss: str = "clipped"
    loss_options: Options = field(default_factory=dict)
    aggregation: str = "token"
    reads_turns: bool = False
    """Credit goes along a whole episode, turn by turn, so it cannot train branches that share turns."""
    has_critic: bool = False

    @property
    def needs_options(self) -> bool:
        """Whether it cannot run as it is: aggregation by length needs the length."""
        return self.aggregation == "length"


ALGORITHMS: dict[str, AlgorithmSpec] = {
    "grpo": AlgorithmSpec("grpo"),
    "dr_grpo": AlgorithmSpec("dr_grpo", aggregation="length"),
    "dapo": AlgorithmSpec("grpo", loss_options={"clip_low": 0.2, "clip_high": 0.28}),
    "gspo": AlgorithmSpec("grpo", loss="gspo", aggregation="sequence"),
    "cispo": AlgorithmSpec("grpo", loss="cispo"),
    "rloo": AlgorithmSpec("rloo", aggregation="sequence_sum"),
    "reinforce": AlgorithmSpec("reinforce"),
    "reinforce_pp": AlgorithmSpec("reinforce_pp", reads_turns=True),
    "reinforce_pp_baseline": AlgorithmSpec("reinforce_pp_baseline"),
    "ppo": AlgorithmSpec("gae", reads_turns=True, has_critic=True),
    "turn_grpo": AlgorithmSpec("turn_grpo", reads_turns=True),
    "gigpo": AlgorithmSpec("gigpo", reads_turns=True),
    "tree_grpo": AlgorithmSpec("tree_grpo"),
    "treepo": AlgorithmSpec("treepo"),
    "tree_value": AlgorithmSpec("tree_value"),
}
"""A recipe's `algorithm`: one of these, or a reference to an estimator of one's own."""

ESTIMATORS = Registry(
    "estimator",
    {
        "grpo": "ludus.algos.advantages:grpo",
        "dr_grpo": "ludus.algos.advantages:dr_grpo",
        "rloo": "ludus.algos.advantages:rloo",
        "reinforce": "ludus.algos.advantages:reinforce",
        "reinforce_pp": "ludus.algos.advantages:reinforce_pp",
        "reinforce_pp_baseline": "ludus.algos.advantages:reinforce_pp_baseline",
        "gae": "ludus.algos.advantages:gae",
        "turn_grpo": "ludus.algos.advantages:turn_grpo",
        "gigpo": "ludus.algos.advantages:gigpo",
        "tree_grpo": "ludus.algos.trees:tree_grpo",
        "treepo": "ludus.algos.trees:treepo",
        "tree_value": "ludus.algos.trees:tree_value",
    },
)
LOSSES = Registry(
    "loss",
    {
        "policy_gradient": "ludus.algos.losses:policy_gradient",
        "clipped": "ludus.algos.losses:clipped_surrogate",
        "dual_clip": "ludus.algos.losses:dual_clip",
        "gspo": "ludus.algos.losses:gspo",
        "cispo": "ludus.algos.losses:cispo",
    },
)
AGGREGATIONS = Registry(
    "aggregation",
    {
        "token": "ludus.algos.losses:by_token",
        "sequence": "ludus.algos.losses:by_sequence",
        "sequence_sum": "ludus.algos.losses:by_sequence_sum",
        "length": "ludus.algos.losses:by_length",
    },
)
CORRECTIONS = Registry(
    "correction",
    {
        "truncated": "ludus.algos.losses:truncated_importance",
        "masked": "ludus.algos.losses:masked_importance",
    },
)
DIVERGENCES = Registry("divergence", {k: f"ludus.algos.losses:{k}" for k in ("k1", "k2", "k3")})
