"""Random histories of requests, aborts, forks, releases and weight changes in a cache that is too small."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from engine_models import VOCABULARY, make, plain_logprobs
from state_models import make_stateful
from transformers import PreTrainedModel

from ludus.core import Completion, Sampling
from ludus.engine import EngineCore, Request
from ludus.engine.embedded.state_cache import StateBlockManager
from ludus.model import use_ludus_attention

SESSIONS = [f"s{i}" for i in range(5)]


def _is_greedy(model: PreTrainedModel, context: list[int], answer: Completion) -> bool:
    """One plain forward pass: every token is the likeliest, or tied with it as far as floats can tell."""
    tokens = context + answer.tokens
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
    chosen = logits[len(context) - 1 : -1].gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
    best = logits[len(context) - 1 : -1].amax(1)
    expected = plain_logprobs(model, tokens)[len(context) :]
    return bool((best - chosen < 1e-5).all()) and answer.logprobs == pytest.approx(expected, abs=1e-4)


class History:
    """A worker, and somebody who asks it for one thing after another."""

    def __init__(self, seed: int, is_static: bool, lookahead: int, stateful: str | None = None) -> None:
        self.random = random.Random(seed)
        self.model = (
            make("mistral" if seed % 2 else "llama") if stateful is None else make_stateful(stateful)
        )
        use_ludus_attention(self.model)
        self.worker = EngineCore(
            self.model,
            blocks=self.random.randint(14, 30),
            block_size=4,
            max_running=4,
            tokens_per_step=9,
            is_static=is_static,
            lookahead=lookahead,
            slots=self.random.randint(4, 8),
        )
        self.contexts: dict[str, list[int]] = {}
        self.busy: dict[str, list[int]] = {}
        self.answered = 0

    def new_tokens(self, most: int) -> list[int]:
        return [self.random.randrange(1, VOCABULARY) for _ in range(self.random.randint(1, most))]

    def ask(self, session: str) -> None:
        context = self.contexts.get(session, [])
        if not context or len(context) > 30 or self.random.random() < 0.2:
            cut = self.random.randint(0, min(len(context), 12))
            context = (context or [1, 2, 3, 4, 5, 6, 7, 8, 9])[:cut]
        context = context + self.new_tokens(8)
        count = self.random.randint(1, 9)
        self.busy[session] = context

        def answered(outcome: Any) -> None:
            del self.busy[session]
            assert isinstance(outcome, Completion)
            self.answered += 1
            if outcome.tokens:
                assert _is_greedy(self.model, context, outcome)
            self.contexts[session] = context + outcome.tokens

        self.worker.submit(
            Request(
                tokens=list(context),
                prompt=len(context),
                limit=len(context) + count,
                sampling=Sampling(max_tokens=count, temperature=0),
                session=session,
                reply=answered,
            )
        )

    def act(self) -> None:
        idle = [session for session in SESSIONS if session not in self.busy]
        session = self.random.choice(SESSIONS)
        roll = self.random.random()
        if roll < 0.35 and idle:
            self.ask(self.random.choice(idle))
        elif roll < 0.38:
            self.worker.abort(session)
        elif roll < 0.42 and session in idle:
            self.worker.scheduler.release(session)
        elif roll < 0.47 and idle and session in self.contexts:
            into = self.random.choice(idle)
            self.worker.scheduler.fork(session, into)
            self.contexts[into] = list(self.contexts[session])
        elif roll < 0.48 and not self.busy:
            self.worker.update_weights()
        elif self.worker.has_work:
            self.worker.step()
        self.check()

    def check(self) -> None:
        scheduler = self.worker.scheduler
        scheduler.block_manager.pool.check()
        if isinstance(scheduler.block_manager, StateBlockManager):
            held = [*scheduler.running, *scheduler.waiting, *scheduler.sessions.values()]
            scheduler.block_manager.check_slots([one.block_table for one in held])

    def end(self) -> None:
        while self.worker.has_work:
            self.worker.step()
        assert not self.busy
        for session in SESSIONS:
            self.worker.scheduler.release(session)
        self.check()
        pool = self.worker.scheduler.block_manager.pool
        assert pool.available == pool.blocks


PLAIN, STATIC, AHEAD = KINDS = (False, 0), (True, 0), (True, 1)


@pytest.mark.parametrize(
    ("seed", "steps"),
    [(0, PLAIN), (1, PLAIN), (4, STATIC), (3, AHEAD)]
    + [pytest.param(seed, steps, marks=pytest.mark.slow) for seed in range(2, 15) for steps in KINDS],
)
def test_every_answer_is_what_the_model_alone_would_say(seed: int, steps: tuple[bool, int]) -> None:
    history = History(seed, *steps)
    for _ in range(260):
        history.act()
    history.end()
    assert history.answered > 20


@pytest.mark.parametrize(
    ("seed", "family"),
    [(0, "qwen3_5"), (1, "lfm2")]
    + [
        pytest.param(seed, family, marks=pytest.mark.slow)
        for seed in range(2, 12)
        for family in ("qwen3_5", "lfm2", "bamba", "mamba2")
    ],
)
def test_states_are_those_of_their_tokens_through_any_history(seed: int, family: str) -> None:
    """With fewer slots than sessions and requests need: snapshots go, sessions go, requests wait."""
    history = History(seed, is_static=False, lookahead=0, stateful=family)
    for _ in range(260):
        history.act()
    history.end()
    assert history.answered > 20
