"""A failed episode is in neither the loss nor the baseline: the update is as if it had not been played."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from rollout_parts import attempt_of, called, play, rollout, tokenizer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from ludus.core import Boundary, EngineError, Failure, Group, Sampling, StopReason, Task, Trajectory
from ludus.model import use_ludus_attention
from ludus.rewards import reward
from ludus.tools import tool
from ludus.training import Learner, OptimizerConfig, RLConfig, RolloutBatch
from played_steps import policy_update

LOST = 1
"""The attempt that fails."""


@reward
def later_is_better(trajectory: Trajectory) -> float:
    """Attempts differ, so that there is something to learn."""
    return float(trajectory.attempt)


@tool
def look() -> str:
    """Look."""
    return "a fox"


async def played(failing: bool) -> list[Group]:
    """Two tasks of four attempts with a tool call each; in the first task, one attempt may fail half-way."""

    def script(tokens: list[int], sampling: Sampling, session: str | None) -> str:
        has_looked = "a fox" in tokenizer("bytes").decode(tokens)
        if has_looked and failing and "/a/" in (session or "") and attempt_of(session) == LOST:
            raise EngineError("the engine is gone", retriable=False)
        return f"I am {attempt_of(session)}" if has_looked else called("look")

    playing = rollout(script, tools=[look], rewards=[later_is_better], attempts=4)
    return await play(playing, Task.of("x", id="a"), Task.of("y", id="b"))


def tiny_model() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer("bytes").vocabulary_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    use_ludus_attention(model)
    return model


def updated(groups: Sequence[Group], algorithm: str) -> list[torch.Tensor]:
    """The weights after one update on these groups."""
    model = tiny_model()
    learner = Learner(model, OptimizerConfig(learning_rate=1e-2, schedule="constant", warmup_steps=0), 1)
    config = RLConfig.parse({"algorithm": algorithm, "loss": "policy_gradient"})
    step = RolloutBatch(list(groups), frozenset(), [0] * len(groups), {})
    policy_update(learner, step, config, reference=None, critic=None)
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ones, others, strict=True))


@pytest.mark.parametrize("algorithm", ["grpo", "reinforce"])
async def test_the_update_is_as_if_it_had_not_been_played(algorithm: str) -> None:
    groups = await played(failing=True)
    failed = groups[0].trajectories[LOST]
    assert failed.failure is not None and failed.failure.boundary is Boundary.ENGINE
    assert failed.turns == 1, "it had said something before it failed"
    without = [Group(g.task, [t for t in g.trajectories if t is not failed]) for g in groups]
    with_it = updated(groups, algorithm)
    assert same(with_it, updated(without, algorithm))

    as_zero = copy.deepcopy(groups)
    as_zero[0].trajectories[LOST] = replace(failed, failure=None, stop=StopReason.ANSWERED, reward=0.0)
    assert not same(with_it, updated(as_zero, algorithm)), "a reward of zero would have been noticed"
    assert not same(with_it, updated(await played(failing=False), algorithm))


async def test_a_group_that_failed_entirely_changes_nothing() -> None:
    groups = await played(failing=False)
    lost = [
        replace(t, failure=Failure(Boundary.POOL, "x", "x"), stop=StopReason.FAILED, reward=None)
        for t in groups[0].trajectories
    ]
    broken = Group(groups[0].task, lost)
    assert same(updated([broken, groups[1]], "grpo"), updated([groups[1]], "grpo"))
    assert same(updated([broken], "grpo"), list(tiny_model().parameters()))
