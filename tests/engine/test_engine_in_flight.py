"""Steps that are under way while the next one is planned: nothing but the order of work may change.

The static steps run here on CPU tensors, with one step under way or none, against the plain runner.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from engine_models import VOCABULARY, make, plain_logprobs, prompts, stock_greedy
from transformers import PreTrainedModel

from ludus.core import Completion, EngineError, FinishReason, Sampling
from ludus.engine import EngineCore, Request, StopChecker
from ludus.model import use_ludus_attention

AHEAD = {"is_static": True, "lookahead": 1}
SESSIONS, TURNS = 6, 3


def _worker(model: PreTrainedModel, blocks: int = 200, **settings: Any) -> EngineCore:
    use_ludus_attention(model)
    defaults = {"block_size": 4, "max_running": 4, "tokens_per_step": 16, **AHEAD}
    return EngineCore(model, blocks=blocks, **{**defaults, **settings})


def _ask(worker: EngineCore, context: list[int], sampling: Sampling, **fields: Any) -> list[Any]:
    """Submit a request; the list that its outcome will be put into."""
    outcome: list[Any] = []
    request = Request(
        tokens=list(context),
        prompt=len(context),
        limit=len(context) + sampling.max_tokens,
        sampling=sampling,
        stop_tokens=frozenset(sampling.stop_tokens),
        reply=outcome.append,
        **fields,
    )
    worker.submit(request)
    return outcome


def _finish(worker: EngineCore) -> None:
    while worker.has_work:
        worker.step()
        worker.scheduler.block_manager.pool.check()


def _letters(tokens: Any) -> str:
    return "".join("abcdefg"[token % 7] for token in tokens)


@dataclass
class Load:
    """Sessions that play several turns each, as their own random numbers say."""

    worker: EngineCore
    seed: int
    answers: dict[tuple[int, int], Completion | None] = field(default_factory=dict)
    scores: dict[int, list[float]] = field(default_factory=dict)
    aborted: set[tuple[int, int]] = field(default_factory=set)

    def start(self) -> None:
        for session in range(SESSIONS):
            self._turn(session, 0, [5, 6, 7, 8, 9, 10, 11, 12][: 4 + session % 3])

    def _turn(self, session: int, turn: int, context: list[int]) -> None:
        own = random.Random(f"{self.seed} {session} {turn}")
        context = context + [own.randrange(1, VOCABULARY) for _ in range(own.randint(1, 9))]
        if own.random() < 0.2:
            self._score(session, turn, context)
        sampling = Sampling(
            max_tokens=own.randint(1, 14),
            temperature=own.choice([0.0, 0.7, 1.0, 1.0]),
            top_k=own.choice([0] * 7 + [5]),
            repetition_penalty=own.choice([1.0] * 7 + [1.3]),
            stop_tokens=tuple(own.randrange(VOCABULARY) for _ in range(own.choice([0, 8]))),
            seed=own.randrange(2**62),
        )

        def answered(outcome: Any) -> None:
            assert isinstance(outcome, Completion)
            self.answers[session, turn] = outcome
            if turn < TURNS - 1 and (session, turn) not in self.aborted:
                self._turn(session, turn + 1, context + outcome.tokens)

        seen = None
        if sampling.repetition_penalty != 1:
            seen = torch.zeros(VOCABULARY, dtype=torch.bool).numpy()
            seen[context] = True
        stops = [own.choice("abcdefg") * 2] if own.random() < 0.4 else []
        self.worker.submit(
            Request(
                tokens=list(context),
                prompt=len(context),
                limit=len(context) + sampling.max_tokens,
                sampling=sampling,
                session=f"s{session}",
                stop_tokens=frozenset(sampling.stop_tokens),
                stop_checker=StopChecker(stops, _letters) if stops else None,
                seen=seen,
                reply=answered,
            )
        )

    def _score(self, session: int, turn: int, context: list[int]) -> None:
        def scored(outcome: Any) -> None:
            self.scores[10 * session + turn] = outcome

        self.worker.submit(
            Request(
                tokens=list(context),
                prompt=len(context),
                limit=len(context),
                sampling=Sampling(),
                is_score=True,
                reply=scored,
            )
        )

    def play(self, disturbed: bool) -> None:
        """All turns to their end; disturbed by aborts, forks, new versions and forgetting."""
        own = random.Random(self.seed)
        self.start()
        while self.worker.has_work:
            self.worker.step()
            self.worker.scheduler.block_manager.pool.check()
            assert all(r.in_flight <= 1 for r in self.worker.scheduler.running)
            if not disturbed:
                continue
            roll, session = own.random(), own.randrange(SESSIONS)
            if roll < 0.02 and (turn := self._busy_turn(session)) is not None:
                self.aborted.add((session, turn))
                self.worker.abort(f"s{session}")
            elif roll < 0.06:
                self.worker.scheduler.fork(f"s{session}", f"fork{own.randrange(3)}")
            elif roll < 0.08:
                self.worker.update_weights()
            elif roll < 0.09:
                self.worker.forget()
            elif roll < 0.1:
                self.worker.release_memory()

    def _busy_turn(self, session: int) -> int | None:
        if f"s{session}" not in self.worker.scheduler.active:
            return None
        return sum((session, turn) in self.answers for turn in range(TURNS))

    def end(self) -> None:
        for name in [*(f"s{i}" for i in range(SESSIONS)), *(f"fork{i}" for i in range(3))]:
            self.worker.scheduler.release(name)
        pool = self.worker.scheduler.block_manager.pool
        pool.check()
        assert pool.available == pool.blocks
        assert not self.worker.scheduler.active


@cache
def _undisturbed(seed: int) -> Load:
    """What the plain runner answers, one step at a time, with room for everybody."""
    load = Load(_worker(make("llama"), is_static=False, lookahead=0), seed)
    load.play(disturbed=False)
    return load


def _same(given: Completion, expected: Completion) -> None:
    assert given.tokens == expected.tokens
    assert (given.finish, given.stop) == (expected.finish, expected.stop)
    assert given.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


@pytest.mark.parametrize("blocks", [22, 120], ids=["tight", "roomy"])
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("seed", range(2))
def test_a_load_has_the_same_answers_with_steps_under_way(
    seed: int, lookahead: int, blocks: int
) -> None:
    model = make("llama")
    plain = _undisturbed(seed)
    ahead = Load(_worker(model, blocks, lookahead=lookahead), seed)
    ahead.play(disturbed=False)
    assert ahead.answers.keys() == plain.answers.keys()
    for key, expected in plain.answers.items():
        assert expected is not None
        given = ahead.answers[key]
        assert given is not None
        _same(given, expected)
        # A stop that is seen late leaves one token more behind than one that is seen at once.
        if blocks > 100:
            assert given.cached_tokens - expected.cached_tokens in (0, 1)
    assert ahead.scores.keys() == plain.scores.keys()
    for number, values in plain.scores.items():
        assert ahead.scores[number] == pytest.approx(values, abs=1e-4)
    assert ahead.worker.stats.generated_tokens == plain.worker.stats.generated_tokens
    if lookahead == 0:
        assert ahead.worker.stats.wasted_tokens == 0
    if blocks < 100 and seed == 0:
        assert ahead.worker.stats.preemptions > 0
    ahead.end()


@pytest.mark.parametrize("blocks", [22, 120], ids=["tight", "roomy"])
@pytest.mark.parametrize("seed", range(2))
def test_aborts_forks_and_new_versions_disturb_nobody_else(seed: int, blocks: int) -> None:
    model = make("llama")
    plain = _undisturbed(seed)
    ahead = Load(_worker(model, blocks), seed)
    ahead.play(disturbed=True)
    for key, given in ahead.answers.items():
        expected = plain.answers[key]
        assert given is not None
        assert expected is not None
        if given.finish is FinishReason.ABORTED:
            assert given.tokens == expected.tokens[: len(given.tokens)]
            assert given.logprobs == pytest.approx(expected.logprobs[: len(given.tokens)], abs=1e-4)
        else:
            _same(given, expected)
        starts = [span.start for span in given.versions]
        versions = [span.version for span in given.versions]
        assert starts[0] == 0
        assert starts == sorted(set(starts))
        assert versions == sorted(set(versions))
    played = {session for session, _ in ahead.answers}
    assert played == set(range(SESSIONS))
    ahead.end()


def test_a_stop_that_is_seen_late_wastes_one_token_and_keeps_what_is_known() -> None:
    model = make()
    context = prompts([8])[0]
    expected = stock_greedy(model, context, 12)
    stop = next(i for i in range(3, 12) if expected[i] not in expected[:i])
    worker = _worker(model)
    sampling = Sampling(max_tokens=30, temperature=0, stop_tokens=(expected[stop],))
    outcome = _ask(worker, context, sampling, session="s")
    _finish(worker)
    assert outcome[0].tokens == expected[: stop + 1]
    assert worker.stats.wasted_tokens == 1
    idle = worker.scheduler.sessions["s"]
    assert idle.block_table.length == len(context) + stop + 1 == len(idle.tokens)
    following = context + outcome[0].tokens + [3, 4]
    second = _ask(worker, following, Sampling(max_tokens=5, temperature=0), session="s")
    _finish(worker)
    assert second[0].tokens == stock_greedy(model, following, 5)
    assert second[0].cached_tokens == len(following) - 2


def test_a_request_that_reaches_its_limit_is_not_launched_again() -> None:
    worker = _worker(make())
    _ask(worker, prompts([6])[0], Sampling(max_tokens=9, temperature=0))
    _finish(worker)
    assert worker.stats.wasted_tokens == 0
    assert worker.stats.computed_tokens == 6 + 8


def test_nothing_waits_where_nothing_has_to() -> None:
    """With one step under way, a plan is made before the last one's tokens are known."""
    worker = _worker(make())
    _ask(worker, [1, 2, 3], Sampling(max_tokens=6, temperature=0))
    worker.step()
    worker.step()
    (request,) = worker.scheduler.running
    assert (request.generated, request.in_flight, request.block_table.length) == (1, 1, 4)
    assert len(worker._in_flight) == 1
    _finish(worker)


def test_truncated_draws_are_received_at_once() -> None:
    worker = _worker(make())
    _ask(worker, [1, 2, 3], Sampling(max_tokens=6, top_k=3, seed=5))
    while worker.has_work:
        worker.step()
        assert not worker._in_flight
    assert worker.stats.wasted_tokens == 0


@pytest.mark.parametrize("moment", [1, 3, 6])
def test_a_step_that_raises_fails_its_requests_and_nobody_else(moment: int) -> None:
    model = make()
    worker = _worker(model, max_running=2)
    contexts = prompts([9, 7, 11])
    outcomes = [_ask(worker, c, Sampling(max_tokens=8, temperature=0), session=f"{c}") for c in contexts]
    for _ in range(moment):
        worker.step()

    def broken(*_: Any) -> None:
        raise RuntimeError("lost in space")

    hook = model.model.layers[1].register_forward_pre_hook(broken)
    worker.step()
    hook.remove()
    _finish(worker)
    failed = [outcome[0] for outcome in outcomes if isinstance(outcome[0], EngineError)]
    assert failed
    assert all("lost in space" in str(error) for error in failed)
    for context, outcome in zip(contexts, outcomes, strict=True):
        if isinstance(outcome[0], Completion):
            assert outcome[0].tokens == stock_greedy(model, context, 8)
    assert worker.stats.failed_steps == 1
    again = _ask(worker, contexts[0], Sampling(max_tokens=8, temperature=0))
    _finish(worker)
    assert again[0].tokens == stock_greedy(model, contexts[0], 8)


def test_logits_that_are_not_finite_fail_whoever_has_them() -> None:
    model = make()
    worker = _worker(model)
    context = prompts([9])[0]
    expected = stock_greedy(model, context, 8)
    outcome = _ask(worker, context, Sampling(max_tokens=8, temperature=0))
    for _ in range(3):
        worker.step()
    saved = model.model.layers[0].mlp.down_proj.weight.detach().clone()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.fill_(float("nan"))
    _finish(worker)
    assert "not finite" in str(outcome[0])
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.copy_(saved)
    again = _ask(worker, context, Sampling(max_tokens=8, temperature=0))
    _finish(worker)
    assert again[0].tokens == expected
    pool = worker.scheduler.block_manager.pool
    assert pool.available == pool.blocks


@pytest.mark.parametrize("settings", [AHEAD, {"is_static": False}], ids=["static", "gathered"])
@pytest.mark.parametrize("honest", [{"temperature": 0}, {"temperature": 0, "top_p": 0.9}], ids=str)
def test_a_row_that_cannot_be_sampled_fails_alone(settings: Any, honest: Any) -> None:
    model = make()
    worker = _worker(model, **settings)
    contexts = prompts([9, 7, 11])
    outcomes = [_ask(worker, c, Sampling(max_tokens=8, **honest)) for c in contexts]
    worker.step()
    hostile = Sampling(max_tokens=8, top_k=1)
    object.__setattr__(hostile, "top_k", 2**63)  # as if no check had stood before the engine
    refused = _ask(worker, contexts[0], hostile)
    _finish(worker)
    assert isinstance(refused[0], EngineError)
    assert "sampling a token raised" in str(refused[0])
    for context, outcome in zip(contexts, outcomes, strict=True):
        assert outcome[0].tokens == stock_greedy(model, context, 8)
    assert worker.stats.failed_steps == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("settings", [AHEAD, {"is_static": False}], ids=["static", "gathered"])
def test_a_row_of_logits_that_are_not_finite_fails_alone(settings: Any, value: float) -> None:
    model = make()
    contexts = [[token for token in c if token != 50] for c in prompts([9, 7, 11])]
    expected = [stock_greedy(model, context, 8) for context in contexts]
    assert not any(50 in tokens for tokens in expected)
    with torch.no_grad():
        model.get_input_embeddings().weight[50] = value  # spoils those alone who read this token
    worker = _worker(model, **settings)
    outcomes = [_ask(worker, c, Sampling(max_tokens=8, temperature=0)) for c in contexts]
    worker.step()
    spoiled = [_ask(worker, [*contexts[0], 50], Sampling(max_tokens=8)) for _ in range(2)]
    _finish(worker)
    assert all("not finite" in str(outcome[0]) for outcome in spoiled)
    assert [outcome[0].tokens for outcome in outcomes] == expected


def test_a_cancelled_request_is_not_answered_twice() -> None:
    worker = _worker(make())
    outcome: list[Any] = []
    sampling = Sampling(max_tokens=20, temperature=0)
    request = Request([1, 2, 3], 3, 23, sampling, outcome.append)
    worker.submit(request)
    worker.step()
    worker.cancel(request)
    worker.cancel(request)
    _finish(worker)
    assert len(outcome) == 1
    assert worker.stats.wasted_tokens == 1


def test_new_weights_apply_from_the_next_token_on() -> None:
    model = make()
    worker = _worker(model)
    context = prompts([9])[0]
    outcome = _ask(worker, context, Sampling(max_tokens=12, temperature=0))
    for _ in range(4):
        worker.step()
    worker.drain()
    (request,) = worker.scheduler.running
    known = request.generated
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.5)
    assert worker.update_weights() == 1
    _finish(worker)
    answer = outcome[0]
    assert [(span.start, span.version) for span in answer.versions] == [(0, 0), (known, 1)]
    expected = plain_logprobs(model, context + answer.tokens)[len(context) :]
    assert answer.logprobs[known:] == pytest.approx(expected[known:], abs=1e-4)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_page_is_found_only_once_it_has_been_written(lookahead: int) -> None:
    """A step computes its prompts first: one that begins with what a row is just decoding must not read it."""
    model = make()
    context = prompts([6])[0]
    said = stock_greedy(model, context, 16)
    expected = {size: stock_greedy(model, context + said[:size] + [9], 2) for size in (3, 7, 11)}
    for moment in range(1, 13):
        worker = _worker(model, lookahead=lookahead)
        _ask(worker, context, Sampling(max_tokens=16, temperature=0))
        for _ in range(moment):
            worker.step()
        size = max(n for n in (3, 7, 11) if n <= max(3, moment))
        follower = _ask(worker, context + said[:size] + [9], Sampling(max_tokens=2, temperature=0))
        _finish(worker)
        assert follower[0].tokens == expected[size]
