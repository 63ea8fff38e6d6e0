"""A template that drops earlier thinking, with `history = "split"`: what is trained is what the model read."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from ragged_episodes import gradient_of, tiny_learner
from transformers import LlamaConfig, LlamaForCausalLM

import ludus
from ludus.chat import HFTokenizer, Renderer, load_format
from ludus.core import SegmentKind, Task, Trajectory
from ludus.engine import FakeEngine
from ludus.model import use_ludus_attention
from ludus.rewards import Scorer
from ludus.rollouts import Budgets, Rollout
from ludus.tools import as_toolset
from ludus.training import Batch, fit_tokenizer, micro_batches
from ludus.training.data import micro_batches as prefixes

FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1] | trim if m.role == 'assistant' and not loop.last else m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SAID = ["<think>\nthree dials\n</think>\n\nleft", "<think>\nit moved\n</think>\n\nright", "open"]


class Asking(ludus.Agent):
    """Hears from its user after each turn."""

    async def run(self, episode: ludus.Episode) -> None:
        for _ in SAID:
            await episode.generate()
            episode.observe("and then?")


def tokenizer() -> HFTokenizer:
    return HFTokenizer(fit_tokenizer(["left right open dials"] * 4, 300), chat_template=FORGETFUL)


def played(by: Renderer, seed: int) -> Trajectory:
    turn = iter(SAID)

    def say(tokens: Sequence[int], sampling: Any, session: str) -> str:
        return next(turn)

    rollout = Rollout(
        engine=FakeEngine(say, by.tokenizer),
        renderer=by,
        scorer=Scorer((), default_total=1.0),
        tools=as_toolset(()),
        agent=Asking(),
        budgets=Budgets(max_turns=len(SAID)),
    )
    return asyncio.run(rollout.play(Task.of(f"Safe {seed}: which way?"), attempt=0, seed=seed))


@pytest.mark.parametrize("history", ["split", "keep"])
def test_sequences_hold_what_the_template_shows_and_what_was_sampled(history: Any) -> None:
    by = Renderer(tokenizer(), load_format("plain"), history)
    trajectory = played(by, 0)
    assert trajectory.turns == len(SAID)
    assert len(trajectory.sequences) == (3 if history == "split" else 1)
    for number, sequence in enumerate(trajectory.sequences):
        kinds = [segment.kind for segment in sequence.segments[:2]]
        assert kinds == [SegmentKind.PROMPT, SegmentKind.ACTION]
        if history == "split":
            shown = by.tokenizer.decode(sequence.segments[0].tokens)
            said = [m for m in trajectory.messages if m.role == "assistant"][:number]
            assert all(one.content.rpartition("</think>")[2].strip() in shown for one in said)
            assert "<think>" not in shown
    texts = [by.tokenizer.decode(action.tokens) for action in trajectory.actions]
    assert texts == [f"{one}<|im_end|>" for one in SAID], "as they were sampled"


def test_the_gradient_of_several_sequences_is_that_of_as_many_forward_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefixes, "BLOCK", 1)
    monkeypatch.setattr(prefixes, "_SHORTEST", 1)
    by = Renderer(tokenizer(), load_format("plain"), "split")
    trajectories = [played(by, seed) for seed in range(2)]
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=by.tokenizer.vocabulary_size,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            initializer_range=0.25,
        )
    )
    use_ludus_attention(model)
    rows = Batch.of(trajectories)
    assert len(rows.lengths_R) == 6 and int(rows.action_T.sum()) == sum(
        len(action.tokens) for one in trajectories for action in one.actions
    ), "every action is trained once, in the context that it was sampled in"
    source = random.Random(0)
    weights_T = torch.tensor([source.uniform(-1, 1) / 100 for _ in rows.tokens_T]) * rows.action_T
    rows = replace(rows, advantages_T=weights_T, weights_T=weights_T)
    learner = tiny_learner(model, 10_000)
    metrics = learner.step(
        micro_batches(rows, 10_000, share=True), lambda logprobs_A, entropy_A, pack: (logprobs_A, {})
    )
    assert metrics["prefix_sharing"] > 0.2, "what the sequences share is computed once"
    expected = gradient_of(
        model,
        [row.tolist() for row in rows.split(rows.tokens_T)],
        [row.tolist() for row in rows.split(weights_T)],
    )
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, wanted, atol=1e-5, rtol=1e-5)
