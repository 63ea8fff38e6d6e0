"""Every algorithm's first update equals an independent computation, over ragged multi-turn episodes.

Advantages, losses and averages come from the plain-Python formulas of the algorithms' own tests; the model is
run row by row, without packing. The engine's log-probabilities are off by some noise, so ratios differ
from 1 and some are clipped.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from ragged_episodes import (
    assert_same_gradient,
    attempts_of,
    gradient_of,
    plain,
    played,
    references,
    row_logprobs,
    scored,
    slope,
    tiny_learner,
    tiny_model,
)
from torch import nn

from ludus.algos import ALGORITHMS
from ludus.core import ConfigError
from ludus.training import Critic, CriticConfig, RLConfig, RolloutBatch, frozen
from played_steps import policy_update

advantages = references("reference_advantages")
losses = references("reference_losses")

Tokens = list[list[float]]
LENGTH = 20


def clipped(low: float, high: float) -> Callable[..., float]:
    return lambda new, held, old, mean, advantage: losses.clipped(new, old, advantage, low, high)


def cispo(new: float, held: float, old: float, mean: float, advantage: float) -> float:
    return float(losses.cispo(new, held, old, advantage, 1.0, 4.0))


def gspo(new: float, held: float, old: float, mean: float, advantage: float) -> float:
    return float(losses.gspo_token(new, held, math.exp(mean), advantage, 3e-4, 4e-4))


def ppo(attempts: list[Any], **options: Any) -> Tokens:
    found, _ = advantages.gae(attempts, discount=1.0, lam=0.95, **options)
    whitened: Tokens = advantages.whitened(attempts, found)
    return whitened


USUAL = clipped(0.2, 0.2)
PLANS: dict[str, tuple[Callable[[list[Any]], Tokens], Callable[..., float], str]] = {
    "grpo": (advantages.grpo, USUAL, "token"),
    "dr_grpo": (advantages.dr_grpo, USUAL, "length"),
    "dapo": (advantages.grpo, clipped(0.2, 0.28), "token"),
    "gspo": (advantages.grpo, gspo, "sequence"),
    "cispo": (advantages.grpo, cispo, "token"),
    "rloo": (advantages.rloo, USUAL, "sequence_sum"),
    "reinforce": (advantages.reinforce, USUAL, "token"),
    "reinforce_pp": (lambda a: advantages.reinforce_pp(a, 1.0), USUAL, "token"),
    "reinforce_pp_baseline": (advantages.reinforce_pp_baseline, USUAL, "token"),
    "ppo": (ppo, USUAL, "token"),
    "turn_grpo": (lambda a: advantages.turn_grpo(a, 1.0, True), USUAL, "token"),
    "gigpo": (lambda a: advantages.gigpo(a, 0.95, 1.0, True), USUAL, "token"),
    # without branches; with them, tests/algos/test_trees.py
    "tree_grpo": (advantages.grpo, USUAL, "token"),
    "treepo": (advantages.reinforce_pp_baseline, USUAL, "token"),
    "tree_value": (advantages.dr_grpo, USUAL, "token"),
}


def settings(algorithm: str | dict[str, Any], **others: Any) -> RLConfig:
    length = {"aggregation": {"length": LENGTH}} if algorithm == "dr_grpo" else {}
    return RLConfig.parse({"algorithm": algorithm, **length, **others})


def still_critic(model: nn.Module) -> Critic:
    """One that says different things at different places, and hardly learns."""
    critic = Critic(model, CriticConfig.parse({"optimizer": {"learning_rate": 1e-30}}), 10)
    torch.manual_seed(5)
    nn.init.normal_(critic.model.head.weight, std=0.3)
    return critic


def values_row_by_row(critic: Critic, model: nn.Module, tokens: list[int]) -> list[float]:
    """The value before each token, from the policy's own hidden states.

    The critic's trunk is a copy of it that has not learnt yet.
    """
    runner: Any = plain(model)
    with torch.no_grad():
        hidden = runner.model(input_ids=torch.tensor([tokens])).last_hidden_state[0]
        after = critic.model.head(hidden).squeeze(1).tolist()
    return [0.0, *after[:-1]]


def ppo_attempts(critic: Critic, model: nn.Module, given: RolloutBatch) -> list[Any]:
    result = []
    for attempt, trajectory in zip(attempts_of(given), scored(given), strict=True):
        values = values_row_by_row(critic, model, trajectory.tokens)
        result.append(replace(attempt, values=values))
    return result


def expected_slopes(
    model: nn.Module,
    given: RolloutBatch,
    found: Tokens,
    loss: Callable[..., float],
    aggregation: str,
    trained: list[list[bool]],
    old: Tokens | None = None,
) -> Tokens:
    """d(objective)/d(logprob) of every token of every episode."""
    trajectories = scored(given)
    pack_rows = iter(losses.weights(trained, aggregation, LENGTH))
    weights = [[next(pack_rows) for _ in mask] for mask in trained]
    result: Tokens = []
    for i, trajectory in enumerate(trajectories):
        new = row_logprobs(model, trajectory.tokens).tolist()
        before = trajectory.logprobs if old is None else old[i]
        places = [place for place, is_trained in enumerate(trained[i]) if is_trained]
        mean = statistics.fmean(new[p] - before[p] for p in places) if places else 0.0
        slopes = [0.0] * len(new)
        for p in places:
            slopes[p] = weights[i][p] * slope(
                lambda x, i=i, p=p, new=new, before=before, mean=mean: loss(  # type: ignore[misc]
                    x, new[p], before[p], mean, found[i][p]
                ),
                new[p],
            )
        result.append(slopes)
    return result


def said(given: RolloutBatch) -> list[list[bool]]:
    return [trajectory.action_mask for trajectory in scored(given)]


def check(
    model: nn.Module, given: RolloutBatch, config: RLConfig, slopes: Tokens, **others: Any
) -> dict[str, float]:
    others = {"reference": None, "critic": None} | others
    for budget in (1, 40, 1000):
        learner = tiny_learner(model, budget)
        metrics = policy_update(learner, given, config, **others)
        expected = gradient_of(model, [t.tokens for t in scored(given)], slopes)
        assert_same_gradient(model, expected)
    assert all(math.isfinite(value) for value in metrics.values())
    return metrics


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_the_first_update_is_the_formulas(algorithm: str) -> None:
    """And it is the same in micro-batches of one row, of some, and of all."""
    model = tiny_model()
    given = played(model, seed=3)
    attempts = attempts_of(given)
    critic = None
    if algorithm == "ppo":
        critic = still_critic(model)
        attempts = ppo_attempts(critic, model, given)
    advantage, loss, aggregation = PLANS[algorithm]
    slopes = expected_slopes(model, given, advantage(attempts), loss, aggregation, said(given))
    metrics = check(model, given, settings(algorithm), slopes, critic=critic)
    assert metrics["logprob_difference_max"] == pytest.approx(0.15, abs=0.03)
    assert metrics["ratio_max"] > 1
    assert ("value_loss" in metrics) == (algorithm == "ppo")


@pytest.mark.parametrize("algorithm", ["grpo", "reinforce_pp", "gigpo"])
def test_a_masked_episode_is_in_the_baseline_and_not_in_the_loss(algorithm: str) -> None:
    model = tiny_model()
    given = played(model, seed=4)
    masked = replace(given, masked=frozenset({(0, 0), (2, 1)}))
    spared = {id(given.groups[0].trajectories[0]), id(given.groups[2].trajectories[1])}
    trained = [[m and id(t) not in spared for m in t.action_mask] for t in scored(given)]
    advantage, loss, aggregation = PLANS[algorithm]
    slopes = expected_slopes(model, given, advantage(attempts_of(given)), loss, aggregation, trained)
    check(model, masked, settings(algorithm), slopes)


@pytest.mark.parametrize("budget", [1, 40, 1000])
def test_actions_carry_what_they_were_trained_with(budget: int) -> None:
    """Advantages by the formula, entropies row by row; nothing on an episode that was masked."""
    model = tiny_model()
    given = replace(played(model, seed=4), masked=frozenset({(0, 0)}))
    spared = given.groups[0].trajectories[0]
    entropies = {}
    for one in scored(given):
        with torch.no_grad():
            logprobs = plain(model)(input_ids=torch.tensor([one.tokens])).logits[0].log_softmax(-1)
        entropies[id(one)] = [0.0, *(-(logprobs.exp() * logprobs).sum(-1)).tolist()[:-1]]
    policy_update(tiny_learner(model, budget), given, settings("grpo"), reference=None, critic=None)
    for one, expected in zip(scored(given), advantages.grpo(attempts_of(given)), strict=True):
        place = 0
        for segment in one.sequences[0].segments:
            own = slice(place, place + len(segment.tokens))
            place = own.stop
            if segment.logprobs is None or one is spared:
                assert segment.advantages is None and segment.entropies is None
                continue
            assert segment.advantages == pytest.approx(expected[own], abs=1e-5)
            assert segment.entropies == pytest.approx(entropies[id(one)][own], abs=1e-4)


def test_a_step_of_masked_episodes_changes_nothing() -> None:
    model = tiny_model()
    given = played(model, groups=1)
    everything = frozenset((0, i) for i in range(len(given.groups[0].trajectories)))
    learner = tiny_learner(model)
    none = policy_update(
        learner, replace(given, masked=everything), settings("grpo"), reference=None, critic=None
    )
    assert none == {}
    assert learner.steps_done == 0


def heard_and_said(given: RolloutBatch) -> list[list[bool]]:
    """Everything but the prompt."""
    prompts = [len(t.sequences[0].segments[0].tokens) for t in scored(given)]
    return [[p >= n for p in range(len(t.tokens))] for t, n in zip(scored(given), prompts, strict=True)]


def old_with_heard(model: nn.Module, given: RolloutBatch) -> Tokens:
    """The engine's logprobs where the model spoke, the trainer's where it listened."""
    return [
        [
            engine if spoke else trainer
            for engine, spoke, trainer in zip(
                t.logprobs, t.action_mask, row_logprobs(model, t.tokens).tolist(), strict=True
            )
        ]
        for t in scored(given)
    ]


def test_without_the_loss_mask_observations_are_trained() -> None:
    model = tiny_model()
    given = played(model, seed=5)
    trained = heard_and_said(given)
    found = advantages.grpo(attempts_of(given))
    spread = [[max(row, key=abs) * m for m in mask] for row, mask in zip(found, trained, strict=True)]
    slopes = expected_slopes(model, given, spread, USUAL, "token", trained, old_with_heard(model, given))
    check(model, given, settings("grpo", loss_mask=False), slopes)


def test_without_the_advantage_mask_credit_runs_through_observations() -> None:
    model = tiny_model()
    given = played(model, seed=6)
    critic = still_critic(model)
    attempts = ppo_attempts(critic, model, given)
    through = ppo(attempts, skip_observations=False)
    assert through != ppo(attempts)
    slopes = expected_slopes(model, given, through, USUAL, "token", said(given))
    check(model, given, settings("ppo", advantage_mask=False), slopes, critic=critic)


def test_ppo_by_the_turn_and_beyond_the_cut() -> None:
    """The options that read turns and endings."""
    model = tiny_model()
    given = played(model, seed=12)
    critic = still_critic(model)
    attempts = ppo_attempts(critic, model, given)
    assert {attempt.truncated for attempt in attempts} == {True, False}
    options: dict[str, Any] = {"discount": 0.8, "lam": 0.9, "discount_per": "turn", "bootstrap": True}
    found, _ = advantages.gae(attempts, **options)
    slopes = expected_slopes(
        model, given, advantages.whitened(attempts, found), USUAL, "token", said(given)
    )
    check(model, given, settings({"name": "ppo", **options}), slopes, critic=critic)


def test_without_both_masks_everything_is_credited_and_trained() -> None:
    model = tiny_model()
    given = played(model, seed=7)
    critic = still_critic(model)
    attempts, trained = ppo_attempts(critic, model, given), heard_and_said(given)
    found, _ = advantages.gae(attempts, discount=1.0, lam=0.95, skip_observations=False)
    whitened: Tokens = []
    for attempt, row, mask in zip(attempts, found, trained, strict=True):
        pool = [
            value
            for other, values, chosen in zip(attempts, found, trained, strict=True)
            if other.set == attempt.set
            for value, is_chosen in zip(values, chosen, strict=True)
            if is_chosen
        ]
        scale = statistics.stdev(pool) + 1e-8
        whitened.append(
            [(v - statistics.fmean(pool)) / scale if m else 0.0 for v, m in zip(row, mask, strict=True)]
        )
    slopes = expected_slopes(
        model, given, whitened, USUAL, "token", trained, old_with_heard(model, given)
    )
    config = settings("ppo", loss_mask=False, advantage_mask=False)
    check(model, given, config, slopes, critic=critic)


def test_the_advantage_mask_is_ppos() -> None:
    model = tiny_model()
    with pytest.raises(ConfigError, match="advantage_mask"):
        policy_update(
            tiny_learner(model),
            played(model),
            settings("grpo", advantage_mask=False),
            reference=None,
            critic=None,
        )


@pytest.mark.parametrize(
    "table",
    [
        pytest.param({"correction": {"name": "truncated", "high": 2.0}}, id="computed"),
        pytest.param({"staleness": 1}, id="training-pass"),
        pytest.param({"staleness": 1, "kl": {"weight": 1e-9, "place": "reward"}}, id="stale-computed"),
    ],
)
def test_a_correction_weighs_by_what_the_engine_reported(table: dict[str, Any]) -> None:
    """Ratios start from the trainer's own logprobs, so they are 1 in the first update.

    These come from a pass of their own, or from the training pass: with stale samples and one update.
    """
    model = tiny_model()
    given = played(model, seed=8, noise=1.5)
    new = [row_logprobs(model, t.tokens).tolist() for t in scored(given)]
    slopes = expected_slopes(
        model, given, advantages.grpo(attempts_of(given)), USUAL, "token", said(given), new
    )
    capped = counted = 0
    for row, mine, trajectory in zip(slopes, new, scored(given), strict=True):
        for place in range(len(row)):
            ratio = math.exp(mine[place] - trajectory.logprobs[place])
            capped += trajectory.action_mask[place] and ratio > 2
            counted += trajectory.action_mask[place]
            row[place] *= min(ratio, 2.0)
    assert capped
    reference = frozen(tiny_model()) if "kl" in table else None
    metrics = check(model, given, settings("grpo", **table), slopes, reference=reference)
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["importance_cut"] == pytest.approx(capped / counted)
    assert metrics["logprob_difference_max"] > 1


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_divergence_as_a_term_of_the_loss(estimator: str) -> None:
    model, reference = tiny_model(), frozen(tiny_model(seed=1))
    given = played(model, seed=9)
    slopes = expected_slopes(
        model, given, advantages.grpo(attempts_of(given)), USUAL, "token", said(given)
    )
    count = sum(sum(mask) for mask in said(given))
    total, kl = 0.0, getattr(losses, estimator)
    for row, trajectory in zip(slopes, scored(given), strict=True):
        new = row_logprobs(model, trajectory.tokens).tolist()
        far = row_logprobs(reference, trajectory.tokens).tolist()
        for place, spoke in enumerate(trajectory.action_mask):
            if spoke:
                row[place] += 0.3 / count * slope(partial(kl, reference=far[place]), new[place])
                total += kl(new[place], far[place])
    config = settings("grpo", kl={"weight": 0.3, "estimator": estimator})
    metrics = check(model, given, config, slopes, reference=reference)
    assert metrics["kl"] == pytest.approx(total / count, rel=1e-3)


def test_the_divergence_as_a_reward() -> None:
    model, reference = tiny_model(), frozen(tiny_model(seed=1))
    given = played(model, seed=10)
    penalised = []
    for attempt, trajectory in zip(attempts_of(given), scored(given), strict=True):
        far = row_logprobs(reference, trajectory.tokens).tolist()
        pairs = zip(trajectory.logprobs, far, trajectory.action_mask, strict=True)
        penalised.append(replace(attempt, penalties=[-0.1 * (p - q) * spoke for p, q, spoke in pairs]))
    found = advantages.reinforce_pp(penalised, 1.0)
    slopes = expected_slopes(model, given, found, USUAL, "token", said(given))
    config = settings("reinforce_pp", kl={"weight": 0.1, "estimator": "k1", "place": "reward"})
    metrics = check(model, given, config, slopes, reference=reference)
    mean = -sum(sum(a.penalties) for a in penalised) / 0.1 / sum(sum(mask) for mask in said(given))
    assert metrics["kl"] == pytest.approx(mean, rel=1e-3)


def test_episodes_without_logprobs_are_not_reinforced() -> None:
    """As an engine behind an address records them: text that was encoded again."""
    model = tiny_model()
    given = played(model, seed=3)
    spoken = scored(given)[0].sequences[0]
    spoken.segments = [
        replace(one, logprobs=tuple(math.nan for _ in one.logprobs)) if one.logprobs else one
        for one in spoken.segments
    ]
    learner = tiny_learner(model)
    with pytest.raises(
        ConfigError, match=r"no log-probability for \d+ of \d+ sampled tokens.*not reinforced"
    ):
        policy_update(learner, given, settings("grpo"), reference=None, critic=None)
    assert learner.steps_done == 0


def test_several_updates_share_one_estimate() -> None:
    """Baselines are over the step, weights over the update's part: the last gradient is the last part's."""
    model = tiny_model()
    given = played(model, seed=11)
    last = {id(t) for group in given.groups[2:] for t in group.trajectories}
    trained = [[m and id(t) in last for m in t.action_mask] for t in scored(given)]
    found = advantages.reinforce_pp(attempts_of(given), 1.0)
    slopes = expected_slopes(model, given, found, USUAL, "token", trained)
    learner = tiny_learner(model)
    config = settings("reinforce_pp", updates=2)
    policy_update(learner, given, config, reference=None, critic=None)
    assert learner.steps_done == 2
    assert_same_gradient(model, gradient_of(model, [t.tokens for t in scored(given)], slopes))


def test_engine_and_trainer_are_compared_in_the_first_update() -> None:
    """Later ones run other weights, and their distance would say nothing about the engine."""
    model = tiny_model()
    given = played(model, seed=11, noise=0.0)
    learner = tiny_learner(model, learning_rate=0.05)
    config = settings("grpo", updates=4)
    metrics = policy_update(learner, given, config, reference=None, critic=None)
    assert metrics["logprob_difference_max"] < 1e-4
    assert metrics["ratio_max"] > 1.01


def true_metrics(model: nn.Module, given: RolloutBatch) -> dict[str, float]:
    """What the metrics are defined as, by plain loops over every action token of the step."""
    entropies, ratios, differences, k1s, k3s, weights, lows, highs = ([] for _ in range(8))
    sequences = []
    signs = advantages.grpo(attempts_of(given))
    for trajectory, credited in zip(scored(given), signs, strict=True):
        logits = plain(model)(input_ids=torch.tensor([trajectory.tokens])).logits[0].detach()
        logprobs = logits.log_softmax(-1)
        total = 0.0
        for place, spoke in enumerate(trajectory.action_mask):
            if not spoke:
                continue
            row = logprobs[place - 1].tolist()
            new, old = row[trajectory.tokens[place]], trajectory.logprobs[place]
            ratio, sign = math.exp(new - old), credited[place]
            entropies.append(-sum(math.exp(p) * p for p in row))
            ratios.append(ratio)
            differences.append(abs(new - old))
            k1s.append(old - new)
            k3s.append(ratio - 1 - (new - old))
            lows.append(float(sign < 0 and ratio < 0.8))
            highs.append(float(sign > 0 and ratio > 1.2))
            weights.append(ratio)
            total += new - old
        sequences.append(math.exp(total))

    def share(values: list[float]) -> float:
        return sum(values) ** 2 / len(values) / sum(value**2 for value in values)

    mean = statistics.fmean
    return {
        "entropy": mean(entropies), "ratio_mean": mean(ratios), "ratio_max": max(ratios),
        "logprob_difference_mean": mean(differences), "logprob_difference_max": max(differences),
        "kl_old_k1": mean(k1s), "kl_old_k3": mean(k3s), "clip_fraction": mean(lows) + mean(highs),
        "clip_fraction_low": mean(lows), "clip_fraction_high": mean(highs),
        "ess": share(weights), "ess_sequence": share(sequences), "action_tokens": len(ratios),
    }  # fmt: skip


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize("kl", [0.0, 0.1])
@pytest.mark.parametrize("updates", [1, 2])
def test_metrics_cover_all_action_tokens(kl: float, aggregation: str, updates: int) -> None:
    """Whether or not rows without advantage are left out of the backward pass, and whatever tokens weigh."""
    model, reference = tiny_model(), frozen(tiny_model(seed=1))
    given = played(model, seed=3, noise=0.5)
    for group in given.groups[1:3]:
        for trajectory in group.trajectories:
            trajectory.reward = 1.0
    config = settings("grpo", kl=kl, aggregation=aggregation, updates=updates)
    expected = true_metrics(model, given)
    if updates > 1:  # only the first update compares engine and trainer
        expected = {k: v for k, v in expected.items() if not k.startswith(("logprob", "ess"))}
    assert expected["clip_fraction_low"] > 0
    assert expected["clip_fraction_high"] > 0
    for budget in (1, 1000):
        learner = tiny_learner(model, budget)
        metrics = policy_update(learner, given, config, reference=reference if kl else None, critic=None)
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-3)
        assert metrics["updates"] == updates


def test_rows_without_advantage_have_no_backward_pass() -> None:
    """They are measured without gradient: the update is the same as without them, bit for bit."""
    found = []
    for backward in (False, True):
        model = tiny_model()
        given = played(model, seed=3)
        for trajectory in given.groups[1].trajectories:
            trajectory.reward = 1.0
        learner, passes = tiny_learner(model, 1000, learning_rate=0.01), []

        def counted(module: Any, given: Any, output: Any, passes: list[int] = passes) -> None:
            passes.append(given[0].shape[0] if torch.is_grad_enabled() else 0)

        hook = model.model.norm.register_forward_hook(counted)  # type: ignore[union-attr, operator]
        entropy = 1e-30 if backward else 0.0
        policy_update(learner, given, settings("grpo", entropy=entropy), reference=None, critic=None)
        hook.remove()
        found.append((passes, copy.deepcopy(model.state_dict())))
    assert 0 in found[0][0] and 0 not in found[1][0]
    for name, value in found[0][1].items():
        torch.testing.assert_close(value, found[1][1][name], atol=1e-6, rtol=1e-5)


def test_a_later_epoch_starts_from_the_same_old_policy() -> None:
    """The second epoch's gradient is the formulas' at the first one's weights, by the same old logprobs."""
    model = tiny_model()
    given = played(model, seed=3)
    config = settings("grpo", epochs=2)
    learner = tiny_learner(model, learning_rate=0.01)
    metrics = policy_update(learner, given, config, reference=None, critic=None)
    assert (learner.steps_done, metrics["updates"]) == (2, 2)
    once = tiny_model()
    policy_update(
        tiny_learner(once, learning_rate=0.01), given, settings("grpo"), reference=None, critic=None
    )
    advantage, loss, aggregation = PLANS["grpo"]
    slopes = expected_slopes(once, given, advantage(attempts_of(given)), loss, aggregation, said(given))
    assert_same_gradient(model, gradient_of(once, [t.tokens for t in scored(given)], slopes))


@pytest.mark.parametrize(("noise", "taken"), [(0.0, 2), (0.9, 1)])
def test_a_policy_that_has_moved_too_far_is_left_there(noise: float, taken: int) -> None:
    """The update before which KL(old || policy) is above the target is not taken, nor is any after it.

    The first one always is, however far the engine's log-probabilities are from the trainer's.
    """
    models = []
    for settled in (False, True):
        model = tiny_model()
        given = played(model, seed=3, noise=noise)
        learner = tiny_learner(model, learning_rate=0.003)
        first = policy_update(
            tiny_learner(tiny_model()), given, settings("grpo"), reference=None, critic=None
        )
        limits = {"epochs": taken} if settled else {"epochs": 9, "target_kl": 0.07}
        metrics = policy_update(learner, given, settings("grpo", **limits), reference=None, critic=None)
        assert (learner.steps_done, metrics["updates"]) == (taken, taken)
        assert (first["kl_old_k3"] > 0.07) == (noise > 0)
        models.append(model.state_dict())
    for name, value in models[0].items():
        assert torch.equal(value, models[1][name])


def test_the_refused_update_and_further_epochs_leave_the_means_alone() -> None:
    """`action_tokens` is the batch's; what `target_kl` refused shows in `kl_old_*` alone."""
    found = []
    for limits in ({"epochs": 2}, {"epochs": 9, "target_kl": 0.07}):
        model = tiny_model()
        given = played(model, seed=3, noise=0.0)
        learner = tiny_learner(model, learning_rate=0.003)
        found.append(
            policy_update(learner, given, settings("grpo", **limits), reference=None, critic=None)
        )
    taken, refused = found
    assert taken["action_tokens"] == sum(sum(trajectory.action_mask) for trajectory in scored(given))
    assert taken["updates"] == refused["updates"] == 2
    assert taken["kl_old_k3"] < refused["kl_old_k3"]
    for name in taken.keys() - {"kl_old_k1", "kl_old_k3"}:
        assert taken[name] == refused[name], name


def test_what_is_needed_is_asked_for() -> None:
    model = tiny_model()
    learner, given = tiny_learner(model), played(model)
    with pytest.raises(ValueError, match="critic"):
        policy_update(learner, given, settings("ppo"), reference=None, critic=None)
    with pytest.raises(ValueError, match="reference"):
        policy_update(learner, given, settings("grpo", kl=0.1), reference=None, critic=None)
    assert (
        policy_update(
            learner, RolloutBatch([], frozenset(), [], {}), settings("grpo"), reference=None, critic=None
        )
        == {}
    )
