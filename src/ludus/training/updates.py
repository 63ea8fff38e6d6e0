"""From trajectories to weight updates: imitation, and reinforcement."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ludus.algos import AGGREGATIONS, ESTIMATORS, PolicyLoss, clipped_surrogate, k3, policy_gradient
from ludus.core.trajectory import Group, Trajectory
from ludus.training.learner import Learner
from ludus.training.logprobs import action_logprobs
from ludus.training.packing import Pack, Row, batches_of, credit_of, pack, rows_of
from ludus.training.recipe import RLConfig


def imitate(learner: Learner, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """One step of supervised learning on what was said in these episodes, and on nothing else."""
    rows = rows_of(trajectories)
    credit = credit_of(rows, [0.0] * len(trajectories), [0] * len(trajectories))
    weights_T = AGGREGATIONS["token"](credit.trajectory_T, credit.action_T)
    packs = _packs(rows, torch.zeros_like(weights_T), weights_T, learner.config.micro_batch_tokens)

    def objective(logprobs_A: Tensor, entropy_A: Tensor, pack: Pack) -> tuple[Tensor, dict[str, Tensor]]:
        return -logprobs_A, {}

    return learner.step(packs, objective)


def reinforce_groups(
    learner: Learner, groups: Sequence[Group], config: RLConfig, reference: nn.Module | None
) -> dict[str, float]:
    """The updates of one step. Failed episodes are neither in the loss nor in any baseline."""
    metrics: list[dict[str, float]] = []
    size = math.ceil(len(groups) / config.updates)
    for start in range(0, len(groups), size):
        part = [group for group in groups[start : start + size] if group.trainable]
        done = _reinforce_once(learner, part, config, reference) if part else {}
        if done:
            metrics.append(done)
    if not metrics:
        return {}
    # only the first update sees the weights that played, so only there can the two sides be compared
    averaged = {name: sum(m[name] for m in metrics) / len(metrics) for name in metrics[0]}
    return averaged | {
        name: value for name, value in metrics[0].items() if name.startswith("logprob_difference")
    }


def _reinforce_once(
    learner: Learner, groups: Sequence[Group], config: RLConfig, reference: nn.Module | None
) -> dict[str, float]:
    trajectories = [trajectory for group in groups for trajectory in group.trainable]
    numbers = [number for number, group in enumerate(groups) for _ in group.trainable]
    rows = rows_of(trajectories)
    credit = credit_of(rows, [t.reward or 0.0 for t in trajectories], numbers)
    advantages_T = ESTIMATORS[config.algorithm](credit)
    weights_T = AGGREGATIONS[config.aggregation](credit.trajectory_T, credit.action_T)
    policy_loss = _policy_loss(config)
    worst = 0.0

    def objective(logprobs_A: Tensor, entropy_A: Tensor, pack: Pack) -> tuple[Tensor, dict[str, Tensor]]:
        nonlocal worst
        loss_A, metrics = policy_loss(logprobs_A, pack.old_logprobs_A, pack.advantages_A)
        difference_A = (logprobs_A.detach() - pack.old_logprobs_A).abs()
        worst = max(worst, float(difference_A.max()))
        metrics["logprob_difference_mean"] = difference_A
        if reference is not None:
            with torch.no_grad():
                reference_A, _ = action_logprobs(reference, pack, learner.temperature)
            metrics["kl"] = k3(logprobs_A, reference_A)
            loss_A = loss_A + config.kl * metrics["kl"]
        return loss_A - config.entropy * entropy_A, metrics

    teaching = _teaching(rows, advantages_T, always=reference is not None or config.entropy > 0)
    if not teaching:
        return {}
    packs = _packs(rows, advantages_T, weights_T, learner.config.micro_batch_tokens, teaching)
    metrics = learner.step(packs, objective)
    return metrics | {"logprob_difference_max": worst}


def _teaching(rows: Sequence[Row], advantages_T: Tensor, always: bool) -> list[int]:
    """The rows that have a gradient: without other terms, those with an advantage that is not 0.

    The others keep their weight in the average, so leaving them out saves time and changes nothing.
    """
    pieces = torch.split(advantages_T, [len(row.tokens) for row in rows])
    return [i for i, piece in enumerate(pieces) if always or bool(piece.any())]


def _policy_loss(config: RLConfig) -> PolicyLoss:
    if config.loss == "policy_gradient":
        return policy_gradient
    return clipped_surrogate(config.clip_low, config.clip_high)


def _packs(
    rows: Sequence[Row],
    advantages_T: Tensor,
    weights_T: Tensor,
    budget: int,
    teaching: Sequence[int] | None = None,
) -> Iterator[Pack]:
    numbers = range(len(rows)) if teaching is None else teaching
    for chosen in batches_of([rows[i] for i in numbers], budget):
        yield pack(rows, [numbers[i] for i in chosen], advantages_T, weights_T)
