"""Training on two ranks, or four (slow): as on one, whatever fails on one of them, and no process is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ragged_episodes import branched, played, scored, tiny_model, with_long_prompts
from small_steps import imitation, rows_of_lengths, small_model, weighed
from torch import nn

from called_ranks import ALONE, CalledRanks, called_ranks
from ludus.core import LudusError, Trajectory
from ludus.model import checkpointed_layers, decoder_of, set_activation_checkpointing
from ludus.training import (
    Batch,
    Critic,
    CriticConfig,
    Learner,
    OptimizerConfig,
    PreferenceConfig,
    RLConfig,
    RolloutBatch,
    micro_batches,
)
from ludus.training.config.run import LoraConfig
from ludus.training.data.micro_batches import micro_batches_of
from ludus.training.models.lora import add_adapter
from ludus.training.models.references import AdapterReference, sync_reference
from ludus.training.optim.critic import ValueModel
from ludus.training.optim.learner import frozen
from ludus.training.optim.logprobs import logprobs_of
from ludus.training.optim.sharding import ShardedModel, current_group
from ludus.training.ranks.processes import RankError
from ludus.training.stages.preference import pairs_of
from played_steps import loss_on, policy_update, prefer, sft_step

pytestmark = pytest.mark.timeout(300)  # on a busy machine a process takes long to start
OPTIMIZER = {"learning_rate": 1e-2, "micro_batch_tokens": 40, "max_gradient_norm": 0.5}
SLOW = pytest.mark.slow


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=SLOW)], ids=["two", "four"])
def pair(request: pytest.FixtureRequest) -> Iterator[CalledRanks]:
    """This process and another one, or three. The last test kills one of them."""
    ranks = called_ranks(trainer_ranks=request.param)
    yield ranks
    ranks.close()


def learner_on(ranks: CalledRanks, model: nn.Module, **settings: Any) -> tuple[nn.Module, Learner]:
    policy = ranks.shard(model)
    config = OptimizerConfig.parse(OPTIMIZER | settings)
    return policy, ranks.make(Learner, policy, config, 20)


def assert_close(one: Sequence[dict[str, float]], two: Sequence[dict[str, float]]) -> None:
    """Five digits; of what is a difference of large numbers, as many places.

    How much rows share depends on the micro-batch that they are dealt to, and so on the number of ranks.
    """
    assert len(one) == len(two)
    for left, right in zip(one, two, strict=True):
        assert left.keys() == right.keys()
        for name, value in left.items():
            if name.endswith("prefix_sharing"):
                continue
            assert right[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name


def assert_same_weights(one: nn.Module, two: nn.Module, places: float = 1e-5) -> None:
    for (name, left), right in zip(one.named_parameters(), two.parameters(), strict=True):
        assert float((left - right).detach().abs().max()) <= places, name


def on_both(
    work: Callable[[CalledRanks], tuple[list[dict[str, float]], nn.Module]], pair: CalledRanks
) -> None:
    """The same work on one rank and on two; and that it was work."""
    one, model = work(ALONE)
    two, other = work(pair)
    assert_close(one, two)
    assert_same_weights(model, other)
    assert any(row.get("gradient_norm", 0.0) > 0 for row in one)


def imitate(learner: Learner, batch: Batch, budget: int) -> dict[str, float]:
    packs = micro_batches(weighed(batch), budget, ranks=learner.group.size)
    return learner.step(packs, imitation)


def adapted_model() -> nn.Module:
    return add_adapter(tiny_model(), LoraConfig(rank=4), "a tiny model", 0)


def reference_of(ranks: CalledRanks, policy: nn.Module, adapted: bool) -> nn.Module:
    """The weights that it begins with: of an adapted model, those without the adapter."""
    if not adapted:
        return ranks.shard(frozen(tiny_model()))
    made: nn.Module = ranks.make(AdapterReference, policy, None)
    return made


LENGTHS = [[5, 9, 30, 7, 12, 3, 22, 17], [40], [2, 3], [8, 8, 8, 8, 8, 8, 8], [31, 4, 4, 4, 4]]


def imitating(
    ranks: CalledRanks, model: nn.Module, layers: int = 0, **settings: Any
) -> list[dict[str, float]]:
    """Ragged batches, among them one row alone: the other rank then has nothing."""
    policy, learner = learner_on(ranks, model, **settings)
    if layers:
        ranks.run(set_activation_checkpointing, policy, layers)
    metrics = [
        ranks.run(imitate, learner, rows_of_lengths(lengths, seed=i), 40)
        for i, lengths in enumerate(LENGTHS)
    ]
    ranks.publish(policy, model)
    return metrics


@pytest.mark.parametrize(
    ("tied", "layers"),
    [(True, 0), pytest.param(True, 2, marks=SLOW), pytest.param(False, 0, marks=SLOW), (False, 2)],
)
def test_two_ranks_equal_one(pair: CalledRanks, tied: bool, layers: int) -> None:
    """Also where activations are computed again."""

    def work(ranks: CalledRanks) -> tuple[list[dict[str, float]], nn.Module]:
        model = small_model(tie_word_embeddings=tied)
        return imitating(ranks, model, layers), model

    on_both(work, pair)


def test_activation_memory_on_two_ranks(pair: CalledRanks) -> None:
    """What a token takes is measured on the sharded model too; with little memory all layers are recomputed."""

    def work(ranks: CalledRanks) -> tuple[list[dict[str, float]], nn.Module]:
        model = small_model()
        policy, learner = learner_on(ranks, model, activation_memory=5e-5)
        rows = rows_of_lengths([30, 20, 12, 9, 5])
        budget = ranks.run(budget_of, learner, rows)
        layers = ranks.run(checkpointed_layers, policy)
        assert budget < 40
        assert layers > 0
        metrics = ranks.run(imitate, learner, rows, budget)
        ranks.publish(policy, model)
        return [metrics | {"budget": budget, "layers": layers}], model

    on_both(work, pair)


def budget_of(learner: Learner, batch: Batch) -> int:
    return learner.micro_batch_tokens(batch.lengths)


def attends_by_ludus(policy: nn.Module) -> bool:
    """On the rank that is not 0, which has no engine; whatever is wrong there is raised here."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    decoder = decoder_of(policy)
    assert all(layer.self_attn.config._attn_implementation == "ludus" for layer in decoder.layers)
    assert "ludus" in ALL_ATTENTION_FUNCTIONS.valid_keys()
    return True


def test_ranks_without_an_engine_attend_as_it_does(pair: CalledRanks) -> None:
    assert pair.run(attends_by_ludus, pair.shard(small_model()))


def test_half_precision_has_its_masters_in_parts(pair: CalledRanks) -> None:
    """Gradients in bfloat16 are rounded before they are summed, so the two agree to its precision alone."""
    one, two = (small_model(torch.bfloat16) for _ in range(2))
    before = small_model(torch.bfloat16)
    first, second = (imitating(r, m, learning_rate=1e-4) for r, m in ((ALONE, one), (pair, two)))
    for left, right in zip(first, second, strict=True):
        assert right["loss"] == pytest.approx(left["loss"], rel=1e-3)
        assert right["gradient_norm"] == pytest.approx(left["gradient_norm"], rel=1e-2)
    moved = max(
        float((a - b).detach().abs().max())
        for a, b in zip(one.parameters(), before.parameters(), strict=True)
    )
    assert_same_weights(one, two, places=moved)


def test_the_same_run_again_is_the_same_bit_for_bit(pair: CalledRanks) -> None:
    one, two = small_model(), small_model()
    assert imitating(pair, one) == imitating(pair, two)
    assert_same_weights(one, two, places=0.0)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"algorithm": "ppo", "kl": 0.1, "updates": 2, "epochs": 2, "target_kl": 0.5}, "model"),
        ({"algorithm": "ppo", "kl": {"weight": 0.1, "place": "reward"}}, "head"),
        pytest.param(
            {"algorithm": "grpo", "correction": "truncated", "entropy": 0.01}, None, marks=SLOW
        ),
    ],
)
def test_rl_on_two_ranks(pair: CalledRanks, settings: dict[str, Any], kind: Any) -> None:
    """With a critic of either kind, a reference that follows, corrections, several updates a step."""
    config = RLConfig.parse(settings)
    batches = [played(tiny_model(), seed=seed, groups=3) for seed in range(3)]

    def work(ranks: CalledRanks) -> tuple[list[dict[str, float]], nn.Module]:
        model = tiny_model()
        policy, learner = learner_on(ranks, model)
        reference = ranks.shard(frozen(tiny_model())) if config.kl.weight else None
        critic: Critic | None = None
        if kind is not None:
            values = ranks.shard(ValueModel(model, own_trunk=kind == "model"))
            chosen = CriticConfig.parse({"kind": kind, "optimizer": OPTIMIZER})
            critic = ranks.make(Critic, policy, chosen, 20, 0, values)
        rows = []
        for batch in batches:
            rows.append(
                ranks.run(policy_update, learner, batch, config, reference=reference, critic=critic)
            )
            if reference is not None:
                ranks.run(sync_reference, reference, policy, 0.5)
        ranks.publish(policy, model)
        return rows, model

    on_both(work, pair)


@pytest.mark.parametrize("adapted", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize("algorithm", ["grpo", "tree_grpo"])
def test_trees_on_two_ranks(pair: CalledRanks, algorithm: str, adapted: bool) -> None:
    """Shared turns are trained once on every rank, also where the attempt that sampled them is masked."""
    config = RLConfig.parse({"algorithm": algorithm, "kl": 0.1, "broken": {"no_answer": "mask"}})
    batches = [branched(tiny_model(), seed=seed) for seed in range(3)]
    batches[1] = replace(batches[1], masked=frozenset({(0, 0), (1, 0), (2, 3)}))

    def work(ranks: CalledRanks) -> tuple[list[dict[str, float]], nn.Module]:
        model = adapted_model() if adapted else tiny_model()
        policy, learner = learner_on(ranks, model, max_gradient_norm=1e9)
        reference = reference_of(ranks, policy, adapted)
        rows = [
            ranks.run(policy_update, learner, batch, config, reference=reference, critic=None)
            for batch in batches
        ]
        ranks.publish(policy, model)
        return rows, model

    on_both(work, pair)


def test_a_step_without_signal_on_two_ranks(pair: CalledRanks) -> None:
    """All advantages are 0: a forward pass for the metrics, and no update."""
    batch = played(tiny_model(), groups=2)
    for group in batch.groups:
        for trajectory in group.trajectories:
            trajectory.reward = 1.0
    rows = []
    for ranks in (ALONE, pair):
        _, learner = learner_on(ranks, tiny_model())
        rows.append(ranks.run(policy_update, learner, batch, RLConfig(), reference=None, critic=None))
    assert_close(rows[:1], rows[1:])
    assert "gradient_norm" not in rows[0]
    empty = RolloutBatch([], frozenset(), [], {})
    assert pair.run(policy_update, learner, empty, RLConfig(), reference=None, critic=None) == {}


def test_sft_and_held_out_loss_on_two_ranks(pair: CalledRanks) -> None:
    shown = scored(played(tiny_model(), seed=1))

    def work(ranks: CalledRanks) -> tuple[list[dict[str, float]], nn.Module]:
        model = tiny_model()
        policy, learner = learner_on(ranks, model)
        rows = []
        for step in range(4):
            rows.append(ranks.run(sft_step, learner, shown[step:]))
            rows[-1]["held_out"] = ranks.run(loss_on, learner, shown)
        ranks.publish(policy, model)
        return rows, model

    on_both(work, pair)


def sharing_steps(
    ranks: CalledRanks, limit: int | None = None
) -> tuple[list[dict[str, float]], nn.Module]:
    """Groups with a long prompt each, of which some share a micro-batch and others are dealt to both ranks."""
    model = tiny_model()
    batches = [with_long_prompts(played(model, seed=seed)) for seed in (1, 2)]
    policy, learner = learner_on(ranks, model, micro_batch_tokens=300)
    if limit is not None:
        ranks.run(run_out_of_memory, policy, 1, "forward", limit)
    config = RLConfig.parse({"algorithm": "grpo", "correction": "truncated"})
    metrics = [
        ranks.run(policy_update, learner, given, config, reference=None, critic=None)
        for given in batches
    ]
    metrics += [ranks.run(sft_step, learner, scored(batches[0])[:count]) for count in (1, 2, 9)]
    ranks.publish(policy, model)
    assert any(row["prefix_sharing"] > 0.2 for row in metrics)
    return [{k: v for k, v in row.items() if k != "prefix_sharing"} for row in metrics], model


def test_shared_prefixes_on_two_ranks(pair: CalledRanks) -> None:
    """How much is shared depends on how rows are dealt out; the steps do not."""
    on_both(sharing_steps, pair)


def test_shared_prefixes_without_memory_on_two_ranks(pair: CalledRanks) -> None:
    on_both(lambda ranks: sharing_steps(ranks, 120 if ranks is pair else None), pair)


@pytest.mark.parametrize("adapted", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize("loss", ["dpo", pytest.param("kto", marks=SLOW)])
def test_preferences_on_two_ranks(pair: CalledRanks, loss: Any, adapted: bool) -> None:
    pairs = pairs_of(played(tiny_model(), seed=3).groups)
    config = PreferenceConfig(loss=loss)

    def work(ranks: CalledRanks) -> tuple[list[dict[str, float]], nn.Module]:
        model = adapted_model() if adapted else tiny_model()
        policy, learner = learner_on(ranks, model)
        reference = reference_of(ranks, policy, adapted)
        rows = [ranks.run(prefer, learner, pairs, reference, config) for _ in range(3)]
        ranks.publish(policy, model)
        return rows, model

    on_both(work, pair)


@pytest.mark.parametrize("follows", [pytest.param(False, marks=SLOW), True])
def test_lora_on_two_ranks(pair: CalledRanks, follows: bool) -> None:
    """Its reference is the policy without the adapter, or with the adapter that it had two steps ago."""
    config = RLConfig.parse({"kl": 0.2, "updates": 2})
    batches = [played(tiny_model(), seed=seed, groups=3) for seed in range(4)]

    def work(ranks: CalledRanks) -> tuple[list[dict[str, float]], nn.Module]:
        model: Any = adapted_model()
        policy, learner = learner_on(ranks, model)
        reference: nn.Module = ranks.make(AdapterReference, policy, None)
        rows = []
        for number, batch in enumerate(batches):
            if follows and number == 2:
                ranks.run(sync_reference, reference, policy, 1.0)
            rows.append(
                ranks.run(policy_update, learner, batch, config, reference=reference, critic=None)
            )
        ranks.publish(policy, model)
        return rows, model

    on_both(work, pair)


@SLOW
@pytest.mark.parametrize("kind", ["model", "head"])
def test_a_critic_of_an_adapted_model_on_two_ranks(pair: CalledRanks, kind: Any) -> None:
    """Its trunk has the adapter's layers."""
    config = RLConfig.parse({"algorithm": "ppo"})
    batches = [played(tiny_model(), seed=seed, groups=3) for seed in range(2)]

    def work(ranks: CalledRanks) -> tuple[list[dict[str, float]], nn.Module]:
        model = adapted_model()
        policy, learner = learner_on(ranks, model)
        values = ranks.shard(ValueModel(model, own_trunk=kind == "model"))
        chosen = CriticConfig.parse({"kind": kind, "optimizer": OPTIMIZER})
        critic = ranks.make(Critic, policy, chosen, 20, 0, values)
        rows = [
            ranks.run(policy_update, learner, batch, config, reference=None, critic=critic)
            for batch in batches
        ]
        ranks.publish(policy, model)
        return rows, model

    on_both(work, pair)


# What fails on one rank.


def run_out_of_memory(policy: ShardedModel, rank: int, where: str, most: int) -> None:
    """On one rank a pass over more than `most` tokens runs out of memory in the second layer."""
    if current_group().rank != rank:
        return
    layer = decoder_of(policy).layers[1]

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory, as if")

    def forward(module: nn.Module, args: Any) -> None:
        if args[0].shape[1] > most:
            fail()

    def backward(module: nn.Module, args: Any, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        if states.requires_grad and states.shape[1] > most:
            states.register_hook(fail)

    if where == "forward":
        layer.register_forward_pre_hook(forward)
    else:
        layer.register_forward_hook(backward)


@pytest.mark.parametrize(
    ("where", "rank"),
    [
        ("forward", 1),
        ("backward", 0),
        pytest.param("forward", 0, marks=SLOW),
        pytest.param("backward", 1, marks=SLOW),
    ],
)
def test_out_of_memory_on_one_rank_is_split_on_all(pair: CalledRanks, where: str, rank: int) -> None:
    """The result is that of a run which had enough."""
    shown = scored(played(tiny_model(), seed=1))
    results = []
    for ranks, fails in ((ALONE, False), (pair, True)):
        model = tiny_model()
        policy, learner = learner_on(ranks, model, micro_batch_tokens=120)
        if fails:
            pair.run(run_out_of_memory, policy, rank, where, 45)
        metrics = [ranks.run(sft_step, learner, shown) for _ in range(2)]
        metrics[0]["held_out"] = ranks.run(loss_on, learner, shown)
        ranks.publish(policy, model)
        results.append((metrics, model))
    assert_close(results[0][0], results[1][0])
    assert_same_weights(results[0][1], results[1][1])


def test_a_row_that_does_not_fit_on_one_rank_ends_the_step_on_all(pair: CalledRanks) -> None:
    """First with activation checkpointing; the ranks can go on with something smaller afterwards."""
    shown = scored(played(tiny_model(), seed=1))
    policy, learner = learner_on(pair, tiny_model())
    pair.run(run_out_of_memory, policy, 1, "forward", 12)
    with pytest.raises(LudusError, match=r"a single row of .* tokens does not fit into memory"):
        pair.run(sft_step, learner, shown)
    fitting = [one for one in shown if len(one.tokens) <= 12]
    assert pair.run(sft_step, learner, fitting[:2])["gradient_norm"] > 0


def fail_on(rank: int, policy: nn.Module, learner: Learner, shown: Sequence[Trajectory]) -> Any:
    if current_group().rank == rank:
        raise ValueError("there is no such thing")
    return sft_step(learner, shown)


def test_an_error_on_one_rank_ends_the_call_on_all(pair: CalledRanks) -> None:
    """The others are in the midst of their passes then."""
    shown = scored(played(tiny_model(), seed=1))
    policy, learner = learner_on(pair, tiny_model())
    with pytest.raises(RankError, match="trainer rank 1 failed: ValueError: there is no such thing"):
        pair.run(fail_on, 1, policy, learner, shown)
    with pytest.raises(ValueError, match="there is no such thing"):
        pair.run(fail_on, 0, policy, learner, shown)
    assert pair.run(sft_step, learner, shown)["gradient_norm"] > 0


def imitate_another(learner: Learner, batch: Batch, what: str) -> dict[str, float]:
    """On one rank something else is trained than on the other."""
    tokens_T, trained_T = batch.tokens_T.clone(), batch.action_T.clone()
    advantages_T, rows = torch.zeros(len(tokens_T)), list(range(len(batch)))
    if current_group().rank == 1:
        if what == "token":
            tokens_T[0] += 1
        elif what == "mask":
            trained_T[batch.lengths[0] - 1] = False
        elif what == "row":
            del rows[0]
        elif what == "advantage":
            advantages_T[-1] = 1e-2
        else:
            advantages_T += 1e-7  # rounding
    weights_T = torch.full_like(advantages_T, 1e-2)
    batch = replace(
        batch,
        tokens_T=tokens_T,
        trained_T=trained_T,
        advantages_T=advantages_T + 1,
        weights_T=weights_T,
    )
    return learner.step(micro_batches(batch, 40, rows, ranks=2), imitation)


def test_ranks_that_have_other_rows_do_not_train(pair: CalledRanks) -> None:
    """All of them say so, before anything is computed, and can go on; rounding is no difference."""
    rows = rows_of_lengths([12, 9, 5, 20])
    policy, learner = learner_on(pair, small_model())
    for what in ("token", "mask", "row", "advantage"):
        with pytest.raises(LudusError, match="do not have the same rows"):
            pair.run(imitate_another, learner, rows, what)
    assert pair.run(imitate_another, learner, rows, "rounding")["gradient_norm"] > 0
    with pytest.raises(LudusError, match="do not have the same rows"):
        pair.run(score_another, policy, rows)
    assert pair.run(imitate, learner, rows, 40)["gradient_norm"] > 0


def score_another(policy: nn.Module, batch: Batch) -> Any:
    chosen_T = batch.row_mask(range(current_group().rank, len(batch)))
    return logprobs_of(policy, replace(batch, trained_T=batch.action_T & chosen_T), 1.0, 40)


# Checkpoints.


def save_state_of(learner: Learner, path: Path) -> None:
    learner.save(path)


def load_state_of(learner: Learner, path: Path) -> None:
    learner.load(path)


def test_state_goes_from_two_ranks_to_one_and_back(pair: CalledRanks, tmp_path: Path) -> None:
    """2 -> 1 -> 2 and 1 -> 2 -> 1: steps go on as if nothing had happened."""
    shown = scored(played(tiny_model(), seed=1))
    ends: list[tuple[list[dict[str, float]], nn.Module]] = []
    for number, order in enumerate([[ALONE] * 3, [pair, ALONE, pair], [ALONE, pair, ALONE]]):
        model, metrics = tiny_model(), []
        for turn, ranks in enumerate(order):
            policy, learner = learner_on(ranks, model, schedule="linear", warmup_steps=2)
            if turn:
                ranks.run(load_state_of, learner, tmp_path / f"{number}-{turn - 1}")
            metrics += [ranks.run(sft_step, learner, shown[turn + i :]) for i in range(2)]
            ranks.publish(policy, model)
            ranks.run(save_state_of, learner, tmp_path / f"{number}-{turn}")
        ends.append((metrics, model))
    for metrics, model in ends[1:]:
        assert_close(ends[0][0], metrics)
        assert_same_weights(ends[0][1], model)


@pytest.mark.parametrize("kind", ["model", pytest.param("head", marks=SLOW)])
def test_a_critic_goes_from_two_ranks_to_one_and_back(
    pair: CalledRanks, tmp_path: Path, kind: Any
) -> None:
    batch, config = played(tiny_model(), seed=2), RLConfig(algorithm="ppo")
    ends = []
    for number, order in enumerate([[ALONE] * 3, [pair, ALONE, pair]]):
        metrics = []
        for turn, ranks in enumerate(order):
            model = tiny_model()
            policy, learner = learner_on(ranks, model)
            values = ranks.shard(ValueModel(model, own_trunk=kind == "model"))
            chosen = CriticConfig.parse({"kind": kind, "optimizer": OPTIMIZER})
            critic = ranks.make(Critic, policy, chosen, 20, 0, values)
            if turn:
                ranks.run(Critic.load, critic, tmp_path / f"{number}-{turn - 1}")
            metrics.append(
                ranks.run(
                    policy_update,
                    learner,
                    batch,
                    config,
                    reference=None,
                    critic=critic,
                    critic_only=True,
                )
            )
            folder = tmp_path / f"{number}-{turn}"
            folder.mkdir()
            ranks.run(Critic.save, critic, folder)
        ends.append(metrics)
    assert_close(*ends)
    assert ends[0][0]["value_loss"] != pytest.approx(ends[0][-1]["value_loss"], rel=1e-3)


def test_micro_batches_of_several_ranks_are_even() -> None:
    """As many as ranks or a multiple of that, every row once, no more tokens than the budget."""
    rows = [5, 9, 30, 7, 12, 3, 22, 17, 40, 1, 2]
    for ranks, budget in [(2, 40), (3, 64), (4, 1000), (5, 10)]:
        batches = micro_batches_of(rows, budget, ranks)
        assert sorted(i for batch in batches for i in batch) == list(range(len(rows)))
        sizes = [sum(rows[i] for i in batch) for batch in batches]
        assert all(size <= budget or len(batch) == 1 for size, batch in zip(sizes, batches, strict=True))
        assert sizes == sorted(sizes, reverse=True)
    assert len(micro_batches_of(rows, 1000, 4)) == 4


# The end: these leave the other rank dead.


def pids() -> int:
    return os.getpid()


def die(rank: int, learner: Learner, shown: Sequence[Trajectory]) -> Any:
    """In the midst of a pass, where the others wait."""
    if current_group().rank == rank:
        decoder_of(learner.model).layers[1].register_forward_pre_hook(
            lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        )
    return sft_step(learner, shown)


def test_a_killed_rank_ends_the_run_with_its_name(pair: CalledRanks) -> None:
    shown = scored(played(tiny_model(), seed=1))
    _, learner = learner_on(pair, tiny_model())
    assert len(Batch.of(shown))
    started = time.monotonic()
    with pytest.raises(RankError, match="trainer rank 1 was killed by SIGKILL"):
        pair.run(die, 1, learner, shown)
    assert time.monotonic() - started < 30  # the deadline of collectives is twice that
    with pytest.raises(RankError, match="trainer rank 1 was killed by SIGKILL"):
        pair.run(pids)
