"""Well-known algorithms as data: what each is made of. A recipe is checked by it, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
