"""Run with verl's own interpreter: numbers in by standard input, verl's advantages and losses out.

Matrices are sequences by response tokens; the mask is 1 on what the model said.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo import core_algos as verl
from verl.workers.config import ActorConfig


def main(given: dict[str, Any]) -> dict[str, Any]:
    def matrix(name: str) -> torch.Tensor:
        return torch.tensor(given[name], dtype=torch.float64)

    mask, rewards, values = matrix("mask"), matrix("rewards"), matrix("values")
    groups = np.array(given["groups"])
    discount, lam = given["discount"], given["lam"]
    gae, returns = verl.compute_gae_advantage_return(rewards, values, mask, discount, lam)
    outcome = {"token_level_rewards": rewards, "response_mask": mask, "index": groups}
    found: dict[str, Any] = {
        "gae": gae * mask,
        "returns": returns * mask,
        "grpo": verl.compute_grpo_outcome_advantage(**outcome)[0],
        "dr_grpo": verl.compute_grpo_outcome_advantage(**outcome, norm_adv_by_std_in_grpo=False)[0],
        "rloo": verl.compute_rloo_outcome_advantage(**outcome)[0],
        "reinforce_pp": verl.compute_reinforce_plus_plus_outcome_advantage(
            rewards, mask, config=SimpleNamespace(gamma=discount)
        )[0],
        "reinforce_pp_baseline": verl.compute_reinforce_plus_plus_baseline_outcome_advantage(**outcome)[
            0
        ],
    }

    def policy(name: str, mode: str, low: float, high: float) -> list[Any]:
        config = ActorConfig(
            strategy="fsdp", rollout_n=1, use_dynamic_bsz=True,
            clip_ratio=low, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=given["bound"],
        )  # fmt: skip
        if mode == "seq-mean-token-sum-norm":
            config.global_batch_info["loss_scale_factor"] = given["length"]
        new = matrix("new").requires_grad_()
        loss, _ = verl.get_policy_loss_fn(name)(
            old_log_prob=matrix("old"), log_prob=new, advantages=matrix("advantages"),
            response_mask=mask, loss_agg_mode=mode, config=config,
        )  # fmt: skip
        loss.backward()
        return [loss.item(), new.grad.tolist()]

    found["dual_clip"] = policy("vanilla", "token-mean", 0.2, 0.28)
    found["dual_clip by length"] = policy("vanilla", "seq-mean-token-sum-norm", 0.2, 0.28)
    found["gspo"] = policy("gspo", "seq-mean-token-mean", 0.1, 0.2)
    found["cispo"] = policy("cispo", "token-mean", 0.4, 0.5)
    new_values = matrix("new").requires_grad_()
    loss, _ = verl.compute_value_loss(new_values, matrix("advantages"), values, mask, 0.3)
    loss.backward()
    found["value_loss"] = [loss.item(), new_values.grad.tolist()]
    for name in ("k1", "k2", "k3"):
        found[name] = verl.kl_penalty_forward(matrix("new"), matrix("old"), name) * mask
    return {key: v.tolist() if isinstance(v, torch.Tensor) else v for key, v in found.items()}


if __name__ == "__main__":
    answer = json.dumps(main(json.load(sys.stdin)))
    print("\n" + answer)
