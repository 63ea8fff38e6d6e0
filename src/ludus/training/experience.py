"""What was played in a step, in tensors: everything that an estimate of advantages is made from.

It is taken once, under the weights that played, before the first update of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ludus.algos import AdvantageInputs, kl_reward, load_divergence
from ludus.training.critic import Critic
from ludus.training.learner import Learner
from ludus.training.logprobs import logprobs_of
from ludus.training.packing import advantage_inputs
from ludus.training.playing import Played
from ludus.training.rows import Row, engine_logprobs, rows_of
from ludus.training.settings import RLConfig


@dataclass(frozen=True, slots=True)
class Experience:
    """The scored episodes of a step."""

    rows: list[Row]
    inputs: AdvantageInputs
    trained_T: Tensor
    """Where the loss applies: not at masked episodes, which are in the inputs nevertheless."""
    behaviour_T: Tensor
    old_T: Tensor
    parts: list[list[int]]
    """The rows of each update."""


def experience_of(learner: Learner, played: Played, config: RLConfig) -> Experience:
    """The step's scored episodes, masked or not; failed ones are not among them."""
    scored = [
        (number, place, trajectory)
        for number, group in enumerate(played.groups)
        for place, trajectory in enumerate(group.trajectories)
        if trajectory.is_trainable
    ]
    trajectories = [trajectory for _, _, trajectory in scored]
    groups = [number for number, _, _ in scored]
    rows = rows_of(trajectories)
    inputs = advantage_inputs(
        rows,
        trajectories,
        groups,
        [played.sets[number] for number in groups],
        trains_heard=not config.loss_mask,
    )
    masked_N = torch.tensor([scored_at[:2] in played.masked for scored_at in scored], dtype=torch.bool)
    behaviour_T, old_T = _starting_point(learner, rows, inputs, config)
    parts: list[list[int]] = [[] for _ in range(config.updates)]
    for i, row in enumerate(rows):
        # as even as can be, so that there are as many updates as the recipe says
        parts[groups[row.trajectory] * config.updates // len(played.groups)].append(i)
    return Experience(
        rows=rows,
        inputs=inputs,
        trained_T=inputs.loss_mask & ~masked_N[inputs.trajectory_T],
        behaviour_T=behaviour_T,
        old_T=old_T,
        parts=[part for part in parts if part],
    )


def _starting_point(
    learner: Learner, rows: Sequence[Row], inputs: AdvantageInputs, config: RLConfig
) -> tuple[Tensor, Tensor]:
    """(behaviour_T, old_T): as the engine sampled, and as the trainer sees it before the first update.

    They are the same unless an importance correction compares them. What was heard nobody sampled, so there
    both are the trainer's.
    """
    sampled_T = engine_logprobs(rows)
    compares = config.correction is not None
    asked_T = inputs.loss_mask if compares else inputs.loss_mask & ~inputs.action_T
    if not bool(asked_T.any()):
        return sampled_T, sampled_T
    budget = learner.config.micro_batch_tokens
    found_T = logprobs_of(learner.model, rows, asked_T, learner.temperature, budget)
    behaviour_T = torch.where(inputs.action_T, sampled_T, found_T)
    return behaviour_T, found_T if compares else behaviour_T


def with_penalty(
    step: Experience, learner: Learner, config: RLConfig, reference: nn.Module
) -> tuple[Experience, float]:
    """The divergence from the reference as a reward of each action token; also its mean."""
    said_T, budget = step.inputs.action_T, learner.config.micro_batch_tokens
    reference_T = logprobs_of(reference, step.rows, said_T, learner.temperature, budget)
    divergence = load_divergence(config.kl_estimator)
    old_A, reference_A = step.old_T[said_T], reference_T[said_T]
    penalty_T = kl_reward(old_A, reference_A, said_T, beta=config.kl, divergence=divergence)
    kl = float(divergence(old_A, reference_A).mean())
    return replace(step, inputs=replace(step.inputs, penalty_T=penalty_T)), kl


def with_values(step: Experience, critic: Critic) -> Experience:
    """The same with what the critic says."""
    return replace(step, inputs=replace(step.inputs, values_T=critic.values(step.rows)))
