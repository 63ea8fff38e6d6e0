"""Run with TRL's own interpreter: numbers in by standard input, losses and gradients of its trainers out.

TRL keeps its loss inside of the trainer, so its method is called on a stand-in that has the settings, and
whose "model" is the matrix of log-probabilities itself.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from trl import GRPOTrainer, RLOOTrainer


def main(given: dict[str, Any]) -> dict[str, Any]:
    def matrix(name: str) -> torch.Tensor:
        return torch.tensor(given[name], dtype=torch.float64)

    mask = matrix("mask")
    ids = torch.zeros_like(mask, dtype=torch.long)

    def loss(
        kind: str, low: float, high: float, level: str = "token", beta: float = 0.0, policy: str = "new"
    ) -> list[Any]:
        new = matrix(policy).requires_grad_()
        stand_in = SimpleNamespace(
            loss_type=kind, epsilon_low=low, epsilon_high=high, importance_sampling_level=level, beta=beta,
            top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False, aux_loss_enabled=False,
            _entropy_bonus_enabled=False, max_completion_length=given["length"],
            current_gradient_accumulation_steps=1, model=SimpleNamespace(training=True),
            args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
            accelerator=SimpleNamespace(
                num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
            ),
            _metrics=defaultdict(lambda: defaultdict(list)),
            _get_per_token_logps_and_entropies=lambda *_, **__: (new, torch.zeros_like(new), None),
        )  # fmt: skip
        trainer = RLOOTrainer if kind == "rloo" else GRPOTrainer
        value = trainer._compute_loss(
            stand_in,
            None,
            {
                "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids,
                "completion_mask": mask,
                "advantages": matrix("advantages")[:, 0] if kind == "rloo" else matrix("advantages"),
                "old_logps": (matrix("old") * mask).sum(1),
                "old_per_token_logps": matrix("old"), "ref_per_token_logps": matrix("reference"),
                "num_items_in_batch": mask.sum(),
            },
        )  # fmt: skip
        value.backward()
        return [value.item(), new.grad.tolist()]

    return {
        "clipped by sequence": loss("grpo", 0.2, 0.28),
        "clipped by token": loss("dapo", 0.2, 0.28),
        "rloo, on policy": loss("rloo", 0.2, 0.2, policy="old"),
        "clipped by length": loss("dr_grpo", 0.2, 0.28),
        "gspo": loss("grpo", 0.1, 0.2, level="sequence"),
        "cispo": loss("cispo", 1.0, 1.5),
        "clipped with k3": loss("dapo", 0.2, 0.28, beta=0.3),
    }


if __name__ == "__main__":
    answer = json.dumps(main(json.load(sys.stdin)))
    print("\n" + answer)
