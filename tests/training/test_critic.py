"""The critic: what it reads, what it learns, and that nothing of it is lost."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from ragged_episodes import attempts_of, played, references, scored, tiny_learner, tiny_model
from torch import nn

import ludus
from ludus.core import ConfigError, LudusError, StopReason, Task, TokenSequence, Trajectory
from ludus.training import Batch, Critic, CriticConfig, RLConfig
from ludus.training.optim.critic import explained_variance
from played_steps import policy_update

Kind = Literal["model", "head"]
BOTH: list[Kind] = ["model", "head"]


def critic_of(model: nn.Module, kind: Kind = "model", **others: Any) -> Critic:
    optimizer = {"learning_rate": 0.02, "micro_batch_tokens": 30} | others.pop("optimizer", {})
    return Critic(
        model, CriticConfig.parse({"kind": kind, "passes": 1, "optimizer": optimizer, **others}), 50
    )


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one: Any, other: Any) -> bool:
    """Bit for bit, through nested tables."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


@pytest.mark.parametrize("kind", BOTH)
def test_values_are_read_before_each_token(kind: Kind) -> None:
    """In any packing they are those of each row alone, and an untaught critic says 0."""
    model = tiny_model()
    trajectories = scored(played(model, seed=2))
    silent = Trajectory(Task.of("x"), stop=StopReason.ANSWERED, reward=0.0)
    trajectories.insert(1, silent)
    batch = Batch.of(trajectories)
    critic = critic_of(model, kind)
    assert not critic.values(batch).any()
    nn.init.normal_(critic.model.head.weight)
    nn.init.constant_(critic.model.head.bias, 0.5)
    pieces = iter(batch.split(critic.values(batch)))
    plain: Any = copy.deepcopy(model)
    plain.set_attn_implementation("sdpa")
    for trajectory in trajectories:
        if trajectory is silent:
            continue
        with torch.no_grad():
            hidden = plain.model(input_ids=torch.tensor([trajectory.tokens])).last_hidden_state[0]
            after = critic.model.head(hidden).squeeze(1)
        expected = torch.cat([torch.zeros(1), after[:-1]])
        torch.testing.assert_close(next(pieces), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", BOTH)
def test_ppo_teaches_its_critic(kind: Kind) -> None:
    """On a fixed batch the value loss falls and more is explained; in a warm-up the policy stays as it is."""
    model = tiny_model()
    given, learner = played(model, seed=2), tiny_learner(model, learning_rate=0.1)
    critic = critic_of(model, kind, warmup_steps=30, clip=None)
    before = weights(model)
    config = RLConfig.parse({"algorithm": {"name": "ppo", "lam": 1.0}})
    history = [
        policy_update(learner, given, config, reference=None, critic=critic, critic_only=True)
        for step in range(30)
        if critic.is_warming_up(step)
    ]
    assert len(history) == 30
    assert not critic.is_warming_up(30)
    assert history[-1]["value_loss"] < 0.7 * history[0]["value_loss"]
    gained = history[-1]["explained_variance"] - history[0]["explained_variance"]
    assert gained > {"model": 0.2, "head": 0.01}[kind], "a line through random features explains little"
    assert same(weights(model), before)
    assert learner.steps_done == 0
    assert all(parameter.grad is None for parameter in critic.model.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("skip", [True, False])
def test_the_value_loss_is_the_formulas(kind: Kind, skip: bool) -> None:
    """The mean over what was said; without the advantage mask, over what was heard in between as well."""
    advantages, losses = references("reference_advantages"), references("reference_losses")
    model = tiny_model()
    given = played(model, seed=3)
    critic = critic_of(model, kind)
    nn.init.normal_(critic.model.head.weight, std=0.3)
    pieces = torch.split(critic.values(Batch.of(scored(given))), [len(t.tokens) for t in scored(given)])
    attempts = [replace(a, values=v.tolist()) for a, v in zip(attempts_of(given), pieces, strict=True)]
    _, targets = advantages.gae(attempts, discount=1.0, lam=0.95, skip_observations=skip)
    wanted = []
    for attempt, row in zip(attempts, targets, strict=True):
        said = advantages.said(attempt)
        for place in said if skip else range(said[0], said[-1] + 1):
            value = attempt.values[place]
            wanted.append(losses.value_loss(value, value, row[place], 0.5))
    config = RLConfig.parse({"algorithm": "ppo", "advantage_mask": skip})
    metrics = policy_update(
        tiny_learner(model), given, config, reference=None, critic=critic, critic_only=True
    )
    assert metrics["value_loss"] == pytest.approx(sum(wanted) / len(wanted), rel=1e-3)


def test_a_model_in_bfloat16_has_a_critic_that_counts_in_float32() -> None:
    model = tiny_model().to(torch.bfloat16)
    critic, learner = critic_of(model), tiny_learner(model, learning_rate=1e-3)
    given = played(tiny_model(), seed=2)
    metrics = [
        policy_update(
            learner, given, RLConfig.parse({"algorithm": "ppo"}), reference=None, critic=critic
        )
        for _ in range(2)
    ]
    assert critic.model.head.weight.dtype == torch.float32
    assert {p.dtype for p in critic.model.get_decoder().parameters()} == {torch.bfloat16}
    assert all(math.isfinite(value) for table in metrics for value in table.values())
    assert critic.model.head.weight.any()


def test_there_is_nothing_to_explain_where_all_are_paid_the_same() -> None:
    """Returns then differ by the critic's own values alone, and it would be told to explain itself."""
    model = tiny_model()
    given, learner, critic = played(model, seed=2), tiny_learner(model), critic_of(model)
    config = RLConfig.parse({"algorithm": "ppo"})
    metrics = [policy_update(learner, given, config, reference=None, critic=critic)]
    for trajectory in (t for group in given.groups for t in group.trajectories):
        trajectory.reward = 1.0
        for action in trajectory.actions:
            action.reward = None
    metrics += [policy_update(learner, given, config, reference=None, critic=critic) for _ in range(2)]
    assert ["explained_variance" in one for one in metrics] == [True, False, False]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_critic_of_usual_settings_explains_returns_on_tickets(tmp_path: Path) -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "tickets.toml"
    settings = {"algorithm": "ppo", "steps": 20, "tasks": 16, "attempts": 8, "updates": 2}
    rl = {**settings, "optimizer": {"learning_rate": 1e-3}}
    metrics = ludus.train(recipe, rl=rl, run={"folder": str(tmp_path / "run")}).metrics
    rows = [row for row in metrics if "value_loss" in row]
    explained = [row.get("explained_variance", 0.0) for row in rows]
    assert max(explained[:2]) < 0.1 and sum(explained[4:8]) / 4 > 0.15, explained
    assert rows[-1]["value_loss"] < 0.1 * rows[0]["value_loss"]


def test_policy_and_critic_learn_together() -> None:
    model = tiny_model()
    given, learner = played(model, seed=2), tiny_learner(model, learning_rate=1e-3)
    critic = critic_of(model)
    before, copied = weights(model), weights(critic.model)
    config = RLConfig.parse({"algorithm": "ppo", "updates": 2, "critic": {"passes": 3}})
    critic.config = critic.config.model_copy(update={"passes": 3})
    metrics = policy_update(learner, given, config, reference=None, critic=critic)
    assert not same(weights(model), before)
    assert not same(weights(critic.model), copied)
    assert (learner.steps_done, critic.updater.steps_done) == (2, 6)
    wanted = {"loss", "value_loss", "value_clip_fraction", "value_gradient_norm", "value_learning_rate"}
    assert wanted | {"explained_variance", "ratio_mean", "ratio_max"} <= metrics.keys()
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["value_learning_rate"] == pytest.approx(0.02)
    assert metrics["learning_rate"] == pytest.approx(1e-3)


@pytest.mark.parametrize("cut", ["all", "half"])
def test_cut_episodes_that_are_paid_do_not_blow_up_their_values(cut: str) -> None:
    """Every episode is paid 1, so no state is worth more, whether a budget cuts it or not."""
    model = tiny_model()
    given, critic = (
        played(model, seed=2),
        critic_of(model, clip=None, optimizer={"micro_batch_tokens": 999}),
    )
    for number, trajectory in enumerate(scored(given)):
        is_cut = cut == "all" or number % 2 == 0
        trajectory.stop = StopReason.MAX_TURNS if is_cut else StopReason.ANSWERED
        trajectory.reward = 1.0
        for segment in trajectory.sequences[0].segments:
            segment.reward = None
    config = RLConfig.parse({"algorithm": {"name": "ppo", "bootstrap": True}})
    for _ in range(20):
        policy_update(
            tiny_learner(model), given, config, reference=None, critic=critic, critic_only=True
        )
    batch = Batch.of(scored(given))
    values_A = critic.values(batch)[batch.action_T]
    assert float(values_A.max()) < 1.3


def test_a_price_for_being_cut_contradicts_bootstrapping() -> None:
    tables: dict[str, Any] = {"algorithm": {"name": "ppo", "bootstrap": True}}
    RLConfig.parse({**tables, "broken": {"no_answer": "mask", "tool_error": -0.5}})
    for priced in ({"broken": {"no_answer": -0.5}}, {"overlong": {"longest": 8, "buffer": 4}}):
        with pytest.raises(
            ConfigError, match=r"bootstrap .* (broken\.no_answer|overlong) would be lost"
        ):
            RLConfig.parse({**tables, **priced})


def test_a_masked_episode_teaches_the_critic() -> None:
    """A critic is a baseline, and masked episodes are in it."""
    model = tiny_model()
    given = played(model, seed=2, groups=1)
    places = range(len(given.groups[0].trajectories))
    masked = type(given)(given.groups, frozenset((0, i) for i in places), given.sets, {})
    critic, learner = critic_of(model), tiny_learner(model)
    config = RLConfig.parse({"algorithm": "ppo"})
    metrics = policy_update(learner, masked, config, reference=None, critic=critic)
    assert metrics["value_loss"] > 0
    assert (learner.steps_done, critic.updater.steps_done) == (0, 1)


@pytest.mark.parametrize("advantage_mask", [True, False])
@pytest.mark.parametrize("kind", BOTH)
def test_micro_batches_do_not_change_what_a_critic_learns(kind: Kind, advantage_mask: bool) -> None:
    """Nor do they where an episode has two rows, and no row is read from its neighbour."""
    found = []
    for budget in (1, 1000):
        model = tiny_model()
        critic = critic_of(model, kind, passes=2, optimizer={"micro_batch_tokens": budget})
        torch.manual_seed(1)
        nn.init.normal_(critic.model.head.weight, std=0.5)
        config = RLConfig.parse({"algorithm": "ppo", "advantage_mask": advantage_mask})
        given = played(model, seed=2)
        for trajectory in scored(given)[::2]:
            prompt, action, *_ = copy.deepcopy(trajectory.sequences[0].segments)
            trajectory.sequences.append(TokenSequence([prompt, action]))
        metrics = policy_update(
            tiny_learner(model), given, config, reference=None, critic=critic, critic_only=True
        )
        found.append(metrics)
        assert metrics["value_gradient_norm"] > 0
    assert found[0] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.parametrize("kind", BOTH)
def test_a_critic_goes_on_where_it_was(kind: Kind, tmp_path: Path) -> None:
    """Bit for bit: what it says, and what it learns next."""
    model = tiny_model()
    given, config = played(model, seed=2), RLConfig.parse({"algorithm": "ppo"})
    optimizer = {"schedule": "cosine", "warmup_steps": 2}
    first = critic_of(model, kind, optimizer=optimizer)

    def learn(critic: Critic) -> dict[str, float]:
        learner = tiny_learner(model)
        return policy_update(learner, given, config, reference=None, critic=critic, critic_only=True)

    for _ in range(3):
        learn(first)
    first.save(tmp_path)
    torch.manual_seed(7)
    second = critic_of(model, kind, optimizer=optimizer)
    second.load(tmp_path)
    assert same(first.tensors(), second.tensors())
    assert learn(first) == learn(second)
    assert same(first.tensors(), second.tensors())
    batch = Batch.of(scored(given))
    assert same(first.values(batch), second.values(batch))


def test_a_head_is_saved_without_the_policy() -> None:
    names = {n for n in critic_of(tiny_model(), "head").tensors() if n.startswith("model.")}
    assert names == {"model.head.weight", "model.head.bias"}


def test_a_checkpoint_of_another_kind_is_refused(tmp_path: Path) -> None:
    model = tiny_model()
    with pytest.raises(LudusError, match="without a critic"):
        critic_of(model).load(tmp_path)
    critic_of(model, "head").save(tmp_path)
    with pytest.raises(LudusError, match=r"rl\.critic\.kind"):
        critic_of(model, "model").load(tmp_path)


def test_a_copy_leaves_the_gradients_behind() -> None:
    model = tiny_model()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert all(parameter.grad is None for parameter in critic_of(model).model.parameters())


def test_explained_variance() -> None:
    returns = torch.tensor([0.0, 1.0, 2.0])
    assert explained_variance(returns, returns) == 1
    assert explained_variance(torch.full((3,), 9.0), returns) == pytest.approx(0.0)
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert explained_variance(returns, torch.ones(3)) is None
