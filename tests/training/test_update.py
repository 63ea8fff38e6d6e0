"""Updates: what the engine sampled is what the trainer trains, however it is packed."""

from __future__ import annotations

import copy
import string
from dataclasses import replace

import pytest
import torch

from ludus.core import Boundary, Failure, Group, Sampling, StopReason, Trajectory
from ludus.training import (
    Batch,
    Learner,
    MicroBatch,
    OptimizerConfig,
    Parts,
    Recipe,
    RLConfig,
    RolloutBatch,
    RunContext,
    action_logprobs,
    build_run_context,
    micro_batches,
)
from played_steps import policy_update, sft_step


async def played(context: RunContext, temperature: float = 1.0) -> list[Group]:
    # a random model hardly ever ends its turn, so any letter ends it
    sampling = Sampling(temperature=temperature, stop=tuple(string.ascii_letters))
    rollout = replace(context.rollout, sampling=sampling, attempts=context.recipe.rl.attempts)
    return [group async for group in rollout.groups(context.parts.tasks[:3], seed=1)]


def reinforced(learner: Learner, groups: list[Group], config: RLConfig) -> dict[str, float]:
    step = RolloutBatch(groups, frozenset(), [0] * len(groups), {})
    return policy_update(learner, step, config, reference=None, critic=None)


def packed_whole(trajectories: list[Trajectory]) -> MicroBatch:
    """All of them in one micro-batch."""
    batch = Batch.of(trajectories)
    (packed,) = micro_batches(batch, len(batch.tokens_T))
    return packed


def gradients(context: RunContext, groups: list[Group], **settings: float) -> list[torch.Tensor]:
    """The gradient of one RL step, before clipping, without changing the model."""
    model = copy.deepcopy(context.policy)
    tokens = int(settings.pop("micro_batch_tokens", 16384))
    optimizer = OptimizerConfig(micro_batch_tokens=tokens, max_gradient_norm=1e9)
    learner = Learner(model, optimizer, total_steps=1)
    reinforced(learner, groups, RLConfig(**settings))  # type: ignore[arg-type]
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_engine_and_trainer_agree(recipe: Recipe, parts: Parts, temperature: float) -> None:
    """Over several turns with reused prefixes, within 1e-4 in float32, at any temperature."""
    async with await build_run_context(recipe, parts) as context:
        groups = await played(context, temperature)
        trajectories = [t for group in groups for t in group.trajectories]
        assert max(t.turns for t in trajectories) > 1, "the test needs a reused prefix"
        packed = packed_whole(trajectories)
        with torch.no_grad():
            logprobs, entropy = action_logprobs(context.policy, packed, temperature)
        torch.testing.assert_close(logprobs, packed.old_logprobs_A, atol=1e-4, rtol=0)
        assert (entropy >= 0).all()


async def test_micro_batches_do_not_change_the_gradient(recipe: Recipe, parts: Parts) -> None:
    async with await build_run_context(recipe, parts) as context:
        groups = await played(context)
        whole = gradients(context, groups)
        split = gradients(context, groups, micro_batch_tokens=1)
        assert max(float(g.abs().max()) for g in whole) > 0
        for one, other in zip(whole, split, strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


async def test_a_failed_episode_is_in_neither_loss_nor_baseline(recipe: Recipe, parts: Parts) -> None:
    async with await build_run_context(recipe, parts) as context:
        groups = await played(context)
        without = gradients(context, groups)
        failed = copy.deepcopy(groups[0].trajectories[0])
        failed.reward, failed.stop = None, StopReason.FAILED
        failed.failure = Failure(Boundary.TOOL, "ConnectionError", "the server is gone")
        groups[0].trajectories.append(failed)
        for one, other in zip(without, gradients(context, groups), strict=True):
            torch.testing.assert_close(one, other)


async def test_groups_without_signal_change_nothing(recipe: Recipe, parts: Parts) -> None:
    async with await build_run_context(recipe, parts) as context:
        groups = await played(context)
        for group in groups:
            for trajectory in group.trajectories:
                trajectory.reward = 1.0
        before = copy.deepcopy(context.policy.state_dict())
        learner = Learner(context.policy, OptimizerConfig(learning_rate=0.1), total_steps=1)
        metrics = reinforced(learner, groups, RLConfig())
        assert (metrics["no_signal"], metrics["updates"], learner.steps_done) == (1, 0, 0)
        assert not {"loss", "gradient_norm"} & metrics.keys()
        assert metrics["entropy"] > 0, "what the policy is like is measured all the same"
        for name, value in context.policy.state_dict().items():
            assert torch.equal(value, before[name])


async def test_imitation_learns_actions_and_nothing_else(recipe: Recipe, parts: Parts) -> None:
    """The loss is the mean over action tokens of a plain forward pass, observations left out."""
    async with await build_run_context(recipe, parts) as context:
        trajectories = [t for group in await played(context) for t in group.trajectories][:4]
        model = copy.deepcopy(context.policy)
        model.set_attn_implementation("sdpa")  # type: ignore[operator]
        total, count = 0.0, 0
        for trajectory in trajectories:
            tokens = torch.tensor([trajectory.tokens])
            with torch.no_grad():
                logits = model(input_ids=tokens).logits[0].log_softmax(-1)
            for place, said in enumerate(trajectory.action_mask):
                if said:
                    total -= float(logits[place - 1, tokens[0, place]])
                    count += 1
        learner = Learner(context.policy, OptimizerConfig(), total_steps=1)
        assert sft_step(learner, trajectories)["loss"] == pytest.approx(total / count, rel=1e-4)


async def test_reinforcement_raises_the_reward(recipe: Recipe, parts: Parts) -> None:
    """Pushing up what was better makes it likelier under the new weights."""
    async with await build_run_context(recipe, parts) as context:
        groups = await played(context)
        learner = Learner(context.policy, OptimizerConfig(learning_rate=1e-3), total_steps=1)
        best = max(groups[0].trainable, key=lambda t: t.reward or 0.0)
        worst = min(groups[0].trainable, key=lambda t: t.reward or 0.0)
        assert best.reward != worst.reward
        reinforced(learner, groups[:1], RLConfig())
        moved = []
        for trajectory in (best, worst):
            packed = packed_whole([trajectory])
            with torch.no_grad():
                now, _ = action_logprobs(context.policy, packed, 1.0)
            moved.append(float((now - packed.old_logprobs_A).mean()))
        assert moved[0] > moved[1]
