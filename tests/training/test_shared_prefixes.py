"""Shared prefixes are computed once, and the step is that of rows computed one by one.

The reference runs every row alone by the stock Hugging Face forward. Objectives with formulas of their own have
tests that compare them with independent computations; these are run again here with prefixes shared to the last
token, so that the short prompts in them are folded as well.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_critic
import test_distillation
import test_preference
import test_rl_update
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_episodes import (
    VOCABULARY,
    gradient_of,
    played,
    row_logprobs,
    scored,
    tiny_learner,
    tiny_model,
    with_long_prompts,
)
from torch import Tensor, nn
from training_helpers import TINY, Chatty, add, even, tasks

import ludus
from ludus.core import Message, Segment, SegmentKind, StopReason, Task, TokenSequence, Trajectory
from ludus.model import set_activation_checkpointing
from ludus.training import (
    Batch,
    Learner,
    LoraConfig,
    MicroBatch,
    ModelConfig,
    OptimizerConfig,
    action_logprobs,
    add_adapter,
    logprobs_of,
    micro_batches,
)
from ludus.training.config.rl import RLConfig
from ludus.training.data import micro_batches as prefixes
from ludus.training.data.micro_batches import Fold
from ludus.training.models.loading import load_model
from ludus.training.optim import learner as learner_module
from ludus.training.reward_models.model import AboutHeads, RewardModel
from played_steps import policy_update, sft_step


def drawn(source: random.Random, count: int) -> list[int]:
    return [source.randrange(VOCABULARY) for _ in range(count)]


@st.composite
def forests(draw: st.DrawFn) -> Batch:
    """Rows of up to 127 tokens: some begin like others, end inside them, repeat them, or are alone."""
    source = random.Random(draw(st.integers(0, 1000)))
    made: list[list[int]] = []
    for _ in range(draw(st.integers(1, 7))):
        kind = draw(st.sampled_from(["new", "branch", "branch", "prefix", "again"])) if made else "new"
        other = draw(st.sampled_from(made)) if made else []
        if kind == "new":
            made.append(drawn(source, draw(st.integers(2, 90))))
        elif kind == "branch":
            own = drawn(source, draw(st.integers(1, 40)))
            made.append((other[: draw(st.integers(1, len(other)))] + own)[:127])
        else:
            made.append(other[: draw(st.integers(2, len(other)))] if kind == "prefix" else list(other))
    share = draw(st.sampled_from([0.2, 0.9]))
    masks = [[i > 0 and source.random() < share for i in range(len(tokens))] for tokens in made]
    masks[0][-1] = True  # something is trained
    return Batch.of_tokens(made, masks, logprob=-1.0)


def weighted(
    logprobs_A: Tensor, entropy_A: Tensor, pack: MicroBatch
) -> tuple[Tensor, dict[str, Tensor]]:
    return logprobs_A, {}


def stepped(learner: Learner, batch: Batch, weights_T: Tensor, budget: int, share: bool) -> None:
    batch = replace(batch, advantages_T=weights_T, weights_T=weights_T)
    learner.step(micro_batches(batch, budget, share=share), weighted)


@pytest.mark.parametrize("checkpointed", [0, 2])
@settings(max_examples=25)
@given(rows=forests(), budget=st.sampled_from([1, 90, 1000]))
def test_any_forest_is_its_rows_one_by_one(checkpointed: int, rows: Batch, budget: int) -> None:
    model = tiny_model()
    tokens, said_T = [row.tolist() for row in rows.split(rows.tokens_T)], rows.action_T
    given_T = logprobs_of(model, rows, 1.0, budget)
    alone_T = torch.cat([row_logprobs(model, row).detach() for row in tokens])
    torch.testing.assert_close(given_T, torch.where(said_T, alone_T, 0.0), atol=1e-5, rtol=1e-5)

    set_activation_checkpointing(model, checkpointed)
    generator = torch.Generator().manual_seed(0)
    weights_T = torch.randn(len(said_T), generator=generator) / 1000 * said_T
    stepped(tiny_learner(model), rows, weights_T, budget, share=True)
    slopes = [piece.tolist() for piece in rows.split(weights_T)]
    expected = gradient_of(model, tokens, slopes)
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        found = torch.zeros_like(wanted) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.fixture
def to_the_last_token(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Any common prefix is shared, however short; and something was."""
    monkeypatch.setattr(prefixes, "BLOCK", 1)
    monkeypatch.setattr(prefixes, "_SHORTEST", 1)
    folded: list[int] = []
    make = Fold.of

    def counted(keys: Any) -> Fold | None:
        made = make(keys)
        if made is not None:
            folded.append(sum(map(len, keys)) - made.computed)
        return made

    monkeypatch.setattr(Fold, "of", counted)
    yield
    assert sum(folded) > 0, "nothing was shared"


INDEPENDENT: dict[str, Callable[[], None]] = {
    **{
        name: lambda name=name: test_rl_update.test_the_first_update_is_the_formulas(name)  # type: ignore[misc]
        for name in ("grpo", "gspo", "ppo", "reinforce_pp", "rloo")
    },
    "observations": test_rl_update.test_without_the_loss_mask_observations_are_trained,
    "ppo over observations": test_rl_update.test_without_both_masks_everything_is_credited_and_trained,
    "correction": lambda: test_rl_update.test_a_correction_weighs_by_what_the_engine_reported(
        {"correction": {"name": "truncated", "high": 2.0}}
    ),
    "kl in the loss": lambda: test_rl_update.test_the_divergence_as_a_term_of_the_loss("k3"),
    "kl in the reward": test_rl_update.test_the_divergence_as_a_reward,
    "metrics": lambda: test_rl_update.test_metrics_cover_all_action_tokens(0.1, "token", 2),
    "notes on actions": lambda: test_rl_update.test_actions_carry_what_they_were_trained_with(1000),
    "values of a model": lambda: test_critic.test_values_are_read_before_each_token("model"),
    "values of a head": lambda: test_critic.test_values_are_read_before_each_token("head"),
    "value loss": lambda: test_critic.test_the_value_loss_is_the_formulas("model", skip=False),
    "dpo": lambda: test_preference.test_the_gradient_is_the_textbooks(1000),
    "kto": lambda: test_preference.test_the_gradients_of_the_other_losses_are_their_papers("kto", 1000),
    "distillation": lambda: test_distillation.test_the_gradient_is_the_formulas(1000),
}


@pytest.mark.parametrize("name", INDEPENDENT)
@pytest.mark.usefixtures("to_the_last_token")
def test_what_has_a_formula_still_is_its_formula(name: str) -> None:
    INDEPENDENT[name]()


def attempts(seed: int = 0, prompt: int = 50, count: int = 4, reward: float = 1.0) -> list[Trajectory]:
    source = random.Random(seed)
    asked = drawn(source, prompt)
    made: list[Trajectory] = []
    for number in range(count):
        said = drawn(source, source.randint(5, 40))
        segments = [
            Segment(SegmentKind.PROMPT, asked),
            Segment(SegmentKind.ACTION, said, logprobs=[-3.0] * len(said)),
        ]
        made.append(
            Trajectory(
                Task.of("x"),
                [TokenSequence(segments)],
                stop=StopReason.ANSWERED,
                attempt=number,
                reward=reward * number,
            )
        )
    return made


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def settings_of(**others: Any) -> OptimizerConfig:
    return OptimizerConfig(**{"learning_rate": 1e-3, "max_gradient_norm": 1e9} | others)


@pytest.mark.parametrize("checkpointed", [0, 2])
def test_an_adapter_learns_the_same(checkpointed: int) -> None:
    found: dict[bool, list[Tensor]] = {}
    for share in (True, False):
        model = add_adapter(tiny_model(), LoraConfig(rank=4, alpha=8), "base", 0)
        torch.manual_seed(0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter += 0.3 * torch.randn(parameter.shape)
        set_activation_checkpointing(model, checkpointed)
        learner = Learner(model, settings_of(share_prefixes=share), 10)
        metrics = sft_step(learner, attempts())
        assert metrics["prefix_sharing"] == (pytest.approx(144 / _tokens(attempts())) if share else 0)
        found[share] = gradients(model)
    for one, other in zip(found[True], found[False], strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def _tokens(trajectories: Sequence[Trajectory]) -> int:
    return sum(len(one.tokens) for one in trajectories)


def test_rows_that_share_nothing_take_the_very_same_way() -> None:
    """Bit for bit."""
    apart = [one for seed in range(6) for one in attempts(seed, prompt=12, count=2)]
    found = []
    for share in (True, False):
        model = tiny_model()
        learner = Learner(model, settings_of(share_prefixes=share, micro_batch_tokens=150), 10)
        metrics = [sft_step(learner, apart) for _ in range(3)]
        assert all(one["prefix_sharing"] == 0 for one in metrics)
        found.append((metrics, [p.detach().clone() for p in model.parameters()]))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(one, other) for one, other in zip(found[0][1], found[1][1], strict=True))


def test_the_same_step_twice_is_the_same_step() -> None:
    """Bit for bit, so that what is resumed or replayed goes on alike."""
    ends = []
    for _ in range(2):
        model = tiny_model()
        learner = Learner(model, settings_of(micro_batch_tokens=200), 10)
        shown = [one for seed in range(4) for one in attempts(seed)]
        ends.append(([sft_step(learner, shown) for _ in range(3)], list(model.parameters())))
        assert ends[-1][0][0]["prefix_sharing"] > 0.3
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(one, other) for one, other in zip(ends[0][1], ends[1][1], strict=True))


@pytest.mark.parametrize("limit", [300, 150, 95])
def test_a_step_in_pieces_is_the_same_step(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Halves are folded anew, and may be as large as a prefix that both have makes them."""
    shown = [one for seed in range(3) for one in attempts(seed)]
    whole, pieces = tiny_model(), tiny_model()
    expected = sft_step(Learner(whole, settings_of(), 10), shown)
    sizes: list[int] = []

    def short_of_memory(model: nn.Module, pack: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        sizes.append(pack.computed)
        if pack.computed > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return action_logprobs(model, pack, temperature)

    monkeypatch.setattr(learner_module, "action_logprobs", short_of_memory)
    metrics = sft_step(Learner(pieces, settings_of(), 10), shown)
    assert max(sizes) > limit
    assert expected["prefix_sharing"] > metrics.pop("prefix_sharing") >= 0
    assert metrics == pytest.approx(
        {k: v for k, v in expected.items() if k != "prefix_sharing"}, rel=1e-4
    )
    for one, other in zip(gradients(whole), gradients(pieces), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_budgets_count_what_is_computed() -> None:
    """Four attempts with a prompt of 50 fit where their rows would not."""
    batch = Batch.of(attempts())
    computed = len(batch.tokens_T) - 3 * 48
    assert len(list(micro_batches(batch, computed, share=True))) == 1
    assert len(list(micro_batches(batch, computed))) > 1


def test_a_reward_model_scores_each_conversation_as_if_alone() -> None:
    model, tokenizer = load_model(
        ModelConfig.parse({"scratch": {"layers": 2, "width": 32, "heads": 2, "vocabulary": 300}}),
        0,
        ["the same question, and again the same question"] * 4,
    )
    made = RewardModel(model, tokenizer, AboutHeads(kind="step", heads=("step",), means=(0.0,))).eval()
    nn.init.normal_(made.heads.weight)
    asked = Message(
        "user", "the same question for everybody, and a long one, so that it is worth it " * 3
    )
    said = [
        [
            asked,
            Message("assistant", "yes"),
            Message("user", "why"),
            Message("assistant", f"because {i}"),
        ]
        for i in range(5)
    ]
    together = made.score(said)
    for one, scores_AH in zip(said, together, strict=True):
        torch.testing.assert_close(scores_AH, made.score([one])[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("share", [True, False])
def test_a_step_says_how_much_its_groups_share(share: bool) -> None:
    model = tiny_model()
    given_batch = with_long_prompts(played(model, seed=3))
    learner = Learner(model, settings_of(share_prefixes=share), 10)
    metrics = policy_update(
        learner, given_batch, RLConfig(algorithm="grpo"), reference=None, critic=None
    )
    assert len(scored(given_batch)) > 4
    assert (metrics["prefix_sharing"] > 0.3) == share


def test_a_run_shares_its_groups_prompts_unless_told_not_to(tmp_path: Path) -> None:
    """The switch is the recipe's, the metric is logged, and the first update is the same."""

    def run(folder: str, **rl: Any) -> list[dict[str, float]]:
        given_rl = {**TINY["rl"], **rl}
        result = ludus.train(
            **{**TINY, "rl": given_rl, "run": {**TINY["run"], "folder": str(tmp_path / folder)}},
            tasks=tasks(6),
            tools=[add],
            rewards=[even],
            agent=Chatty(),
        )
        return [row for row in result.metrics if "prefix_sharing" in row]

    optimizer = {"learning_rate": 1e-3, "share_prefixes": False}
    on, off = run("on"), run("off", optimizer=optimizer)
    assert all(row["prefix_sharing"] > 0.3 for row in on)
    assert all(row["prefix_sharing"] == 0 for row in off)
    assert on[0]["loss"] == pytest.approx(off[0]["loss"], rel=1e-3, abs=1e-6)
    assert on[0]["gradient_norm"] == pytest.approx(off[0]["gradient_norm"], rel=1e-3)
