"""Several replicas as one engine: where requests go, new weights, the canary, deaths."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from engine_models import make, plain_logprobs, prompts, until
from local_replica import LocalReplica, TrainedModel

from ludus.core import EngineError
from ludus.core.generation import Completion, Engine, FinishReason, Sampling
from ludus.engine import Canary, CanaryError, EmbeddedEngine, EngineConfig
from ludus.engine.replicas import ReplicaLimits, ReplicatedEngine
from ludus.model import vocabulary_size

QUICK = ReplicaLimits(seconds=20.0, backoff=0.0)


@asynccontextmanager
async def replicated(
    count: int, folder: Path, family: str = "llama", limits: ReplicaLimits = QUICK
) -> AsyncIterator[tuple[ReplicatedEngine, list[LocalReplica], TrainedModel]]:
    source = TrainedModel(make(family))
    canary = Canary.of(vocabulary_size(source.model), 256, "float32")
    replicas = [LocalReplica(number) for number in range(count)]
    engine = ReplicatedEngine(replicas, source, canary, limits=limits, folder=folder)
    await engine.open()
    try:
        yield engine, replicas, source
    finally:
        await engine.close()
        assert not list(folder.iterdir()), "weights were left behind"  # noqa: ASYNC240


async def embedded(source: TrainedModel, requests: list[tuple[list[int], Sampling]]) -> list[Completion]:
    engine = EmbeddedEngine(source.model, config=EngineConfig(cache_tokens=4096))
    try:
        return await asyncio.gather(*(engine.generate(*request) for request in requests))
    finally:
        await engine.close()


async def test_tokens_are_those_of_the_embedded_engine(tmp_path: Path) -> None:
    requests = [
        (tokens, Sampling(max_tokens=12, seed=number)) for number, tokens in enumerate(prompts([5] * 8))
    ]
    async with replicated(2, tmp_path) as (engine, replicas, source):
        assert isinstance(engine, Engine)
        found = await asyncio.gather(*(engine.generate(*request) for request in requests))
        assert [one.tokens for one in found] == [o.tokens for o in await embedded(source, requests)]
        assert all(len(replica.requests) == 4 for replica in replicas)  # shared out evenly
        source.learn(1)
        assert await engine.update_weights() == 1
        found = await asyncio.gather(*(engine.generate(*request) for request in requests))
        assert [one.tokens for one in found] == [o.tokens for o in await embedded(source, requests)]
        assert {span.version for one in found for span in one.versions} == {1}
        scored = await engine.score(requests[0][0])
        assert scored == pytest.approx(plain_logprobs(source.model, requests[0][0]), abs=1e-4)


async def test_a_session_stays_where_its_kv_is(tmp_path: Path) -> None:
    async with replicated(3, tmp_path) as (engine, replicas, _):
        contexts = {f"s{number}": tokens for number, tokens in enumerate(prompts([40] * 6))}
        for _ in range(3):
            for session, tokens in contexts.items():
                completion = await engine.generate(
                    tokens, Sampling(max_tokens=3, seed=7), session=session
                )
                tokens += completion.tokens
        for replica in replicas:
            assert len(replica.requests) == 6 and len(set(replica.requests)) == 2
        assert completion.cached_tokens >= 32
        await engine.fork("s0", "branch")
        branch = await engine.generate(contexts["s0"], Sampling(max_tokens=3, seed=8), session="branch")
        assert branch.cached_tokens >= 32  # on the replica that had it
        for session in [*contexts, "branch", "unknown"]:
            await engine.release(session)
        assert all(not replica.alive._core.scheduler.sessions for replica in replicas)


async def test_versions_are_exact_through_an_update_in_flight(tmp_path: Path) -> None:
    async with replicated(2, tmp_path) as (engine, replicas, source):
        old = make("llama")
        contexts = prompts([6, 9, 4, 7])
        running = [
            asyncio.create_task(engine.generate(tokens, Sampling(max_tokens=150, seed=number)))
            for number, tokens in enumerate(contexts)
        ]
        await until(lambda: all(one.alive.stats.generated_tokens > 8 for one in replicas))
        source.learn(2)
        await engine.update_weights()
        for tokens, completion in zip(contexts, await asyncio.gather(*running), strict=True):
            assert [span.version for span in completion.versions] == [0, 1]
            switch = len(tokens) + completion.versions[1].start
            whole = tokens + completion.tokens
            before = plain_logprobs(old, whole)[len(tokens) : switch]
            after = plain_logprobs(source.model, whole)[switch:]
            assert completion.logprobs == pytest.approx(before + after, abs=1e-4)


@pytest.mark.parametrize(
    ("family", "left_out"),
    [
        ("llama", "model.layers.1.mlp.down_proj.weight"),
        ("llama", "lm_head.weight"),
        ("llama", "model.norm.weight"),
        ("smollm2", "model.embed_tokens.weight"),  # which is the head, too
    ],
)
async def test_half_an_update_is_refused(tmp_path: Path, family: str, left_out: str) -> None:
    """One of two replicas leaves a tensor as it was: it serves no token before it has started again."""
    async with replicated(2, tmp_path, family) as (engine, replicas, source):
        replicas[1].left_out = left_out
        source.learn(3, 0.002)
        await engine.update_weights()
        replicas[1].left_out = None
        assert replicas[1].loads == [1]
        found = [engine.generate(p, Sampling(max_tokens=4, seed=1)) for p in prompts([5] * 6)]
        for completion, tokens in zip(await asyncio.gather(*found), prompts([5] * 6), strict=True):
            whole = tokens + completion.tokens
            expected = plain_logprobs(source.model, whole)[len(tokens) :]
            assert completion.logprobs == pytest.approx(expected, abs=1e-4)
        await until(lambda: engine.metrics()["engine/replicas"] == 2)
        assert replicas[1].starts == [0, 1]  # with the newest weights
        source.learn(4, 0.002)
        await engine.update_weights()
        assert engine.metrics()["engine/replicas"] == 2
        assert 0 < engine.metrics()["engine/canary_difference"] < 1e-4


async def test_an_engine_that_always_updates_by_half_is_given_up(tmp_path: Path) -> None:
    async with replicated(1, tmp_path) as (engine, (replica,), source):
        replica.left_out = "lm_head.weight"
        source.learn(1)
        await engine.update_weights()
        await until(lambda: engine.metrics()["engine/replicas"] == 1)
        source.learn(2)
        with pytest.raises(EngineError, match="no engine is left") as caught:
            await engine.update_weights()
            await engine.generate([1, 2, 3], Sampling(max_tokens=2))
        assert "log-probabilities of a fixed text" in str(caught.value) and not caught.value.retriable


async def test_an_engine_that_computes_something_else_does_not_start(tmp_path: Path) -> None:
    source = TrainedModel(make())
    wrong = TrainedModel(make())
    wrong.learn(5)
    source.write = wrong.write  # type: ignore[method-assign]
    canary = Canary.of(97, 256, "float32")
    replica = LocalReplica(0)
    engine = ReplicatedEngine([replica], source, canary, limits=QUICK, folder=tmp_path)
    with pytest.raises(CanaryError, match="engine 0 does not have the weights of version 0"):
        await engine.open()
    assert replica.engine is None


async def test_tokens_on_trial_are_held_back(tmp_path: Path) -> None:
    """A request that ends between a bad update and its discovery does not deliver."""
    async with replicated(1, tmp_path) as (engine, (replica,), source):
        running = asyncio.create_task(engine.generate([1, 2], Sampling(max_tokens=200, seed=1)))
        await until(lambda: replica.alive.stats.generated_tokens > 3)
        replica.left_out, replica.hangs_at = "lm_head.weight", "score"
        source.learn(1)
        update = asyncio.create_task(engine.update_weights())
        await until(lambda: replica.alive.stats.generated_tokens >= 200)
        await asyncio.sleep(0)
        assert not running.done()
        await replica.die()
        with pytest.raises(EngineError, match="was lost: was killed") as caught:
            await running
        assert caught.value.retriable
        replica.hangs_at = replica.left_out = None
        await update


async def test_a_death_fails_its_requests_and_the_others_go_on(tmp_path: Path) -> None:
    async with replicated(2, tmp_path) as (engine, replicas, source):
        source.learn(1)
        await engine.update_weights()
        running = [
            asyncio.create_task(
                engine.generate(
                    [1, 2, number], Sampling(max_tokens=60, seed=number), session=str(number)
                )
            )
            for number in range(4)
        ]
        await until(lambda: all(one.alive.stats.generated_tokens > 2 for one in replicas))
        await replicas[0].die("was killed by SIGKILL")
        outcomes = await asyncio.gather(*running, return_exceptions=True)
        lost = [isinstance(one, EngineError) and one.retriable for one in outcomes]
        assert lost == [True, False, True, False]
        again = await engine.generate([1, 2, 0], Sampling(max_tokens=4, seed=0), session="0")
        home = next(one for one in replicas if one.requests[-1] == "0")
        assert again.finish is FinishReason.LENGTH and again.versions[0].version == 1
        await until(lambda: engine.metrics()["engine/replicas"] == 2)
        assert replicas[0].starts == [0, 1] and engine.metrics()["engine/restarts"] == 1
        await engine.generate([1, 2, 0, *again.tokens], Sampling(max_tokens=2), session="0")
        assert home.requests[-2:] == ["0", "0"]  # where its KV is now


async def test_requests_wait_for_the_only_engine_to_come_back(tmp_path: Path) -> None:
    limits = ReplicaLimits(seconds=20.0, backoff=0.0, restarts=10**9)
    async with replicated(1, tmp_path, limits=limits) as (engine, (replica,), source):
        replica.cannot_start = "no memory"
        await replica.die()
        await until(lambda: len(replica.starts) > 1100)  # however often it fails
        waiting = asyncio.create_task(engine.generate([1, 2], Sampling(max_tokens=3), session="a"))
        aborted = asyncio.create_task(engine.generate([1, 2], Sampling(max_tokens=3), session="b"))
        source.learn(1)
        await engine.update_weights()  # nobody is there to take them
        await engine.abort("b")
        assert (await aborted).finish is FinishReason.ABORTED
        replica.cannot_start = None
        assert (await waiting).versions[0].version == 1


async def test_all_dead_is_an_error_that_says_so(tmp_path: Path) -> None:
    limits = ReplicaLimits(seconds=20.0, backoff=0.0, restarts=2)
    async with replicated(2, tmp_path, limits=limits) as (engine, replicas, _):
        for replica in replicas:
            replica.cannot_start = f"{replica.name} has no memory"
            await replica.die()
        await until(lambda: engine.metrics()["engine/replicas"] == 0)
        with pytest.raises(EngineError, match="no engine is left") as caught:
            await engine.generate([1, 2], Sampling(max_tokens=3))
        assert "engine 0 has no memory" in str(caught.value)
        assert "engine 1 has no memory" in str(caught.value)
        assert not caught.value.retriable


@pytest.mark.parametrize("call", ["load_weights", "score", "pause"])
async def test_a_silent_engine_is_taken_out(tmp_path: Path, call: str) -> None:
    limits = ReplicaLimits(seconds=0.3, backoff=0.0)
    async with replicated(2, tmp_path, limits=limits) as (engine, replicas, source):
        replicas[0].hangs_at = call
        source.learn(1)
        if call == "pause":
            await engine.pause()
        else:
            await engine.update_weights()
        assert engine.metrics()["engine/replicas"] == 1
        replicas[0].hangs_at = None
        await engine.resume()
        await until(lambda: engine.metrics()["engine/replicas"] == 2)
        found = await engine.generate([3, 4], Sampling(max_tokens=2), session="x")
        assert found.versions[0].version == engine.policy_version


async def test_a_pause_holds_all_and_new_ones_too(tmp_path: Path) -> None:
    async with replicated(2, tmp_path) as (engine, replicas, source):
        await engine.pause()
        waiting = [
            asyncio.create_task(engine.generate([1, number], Sampling(max_tokens=3)))
            for number in range(4)
        ]
        await replicas[0].die()
        await until(lambda: len(replicas[0].starts) == 2 and engine.metrics()["engine/replicas"] == 2)
        late = asyncio.create_task(engine.generate([1, 9], Sampling(max_tokens=3), session="late"))
        source.learn(1)
        await engine.update_weights()
        assert not any(task.done() for task in [*waiting[1::2], late])
        await engine.resume()
        done = await asyncio.gather(*waiting, late, return_exceptions=True)
        kept = [one for one in done if isinstance(one, Completion)]
        assert len(kept) == 3
        assert {span.version for one in kept for span in one.versions if one.tokens} == {1}


async def test_what_a_killed_process_has_left_is_removed(tmp_path: Path) -> None:
    """Also what was too young to be told from the folder of a process that is just starting."""
    async with replicated(1, tmp_path) as (engine, _, source):
        left = tmp_path / "ludus-weights-left"
        left.mkdir()
        source.learn(1)
        await engine.update_weights()
        assert left.is_dir()
        os.utime(left, (0, 0))
        source.learn(2)
        await engine.update_weights()
        assert not left.exists() and len(list(tmp_path.iterdir())) == 1  # noqa: ASYNC240


async def test_a_cancelled_request_leaves_nothing_behind(tmp_path: Path) -> None:
    async with replicated(1, tmp_path) as (engine, (replica,), _):
        running = asyncio.create_task(engine.generate([1, 2], Sampling(max_tokens=200), session="a"))
        await until(lambda: replica.alive.stats.generated_tokens > 3)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await engine.release("a")
        await until(lambda: not replica.alive._core.has_work)


@pytest.mark.parametrize("change", [lambda x: x + 0.002, lambda x: float("nan"), lambda x: 0.0])
def test_the_canary_refuses_what_rounding_does_not_explain(change: Callable[[float], float]) -> None:
    canary = Canary.of(50_000, None, "float32")
    assert len(canary.tokens) == 64 and max(canary.tokens) < 50_000
    expected = [0.0, *(-float(x) for x in torch.rand(63) * 9)]
    assert canary.check(expected, [x + 1e-6 for x in expected], "engine", 1) < 1e-5
    with pytest.raises(CanaryError, match="does not have the weights of version 1"):
        canary.check(expected, [change(x) for x in expected], "engine", 1)
    with pytest.raises(CanaryError, match="63 of the canary's 64"):
        canary.check(expected, expected[1:], "engine", 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
async def test_random_lives(tmp_path: Path, seed: int) -> None:
    """Sessions of several turns, branches, aborts, updates, half updates, pauses and deaths, all at once.

    Whatever was delivered was sampled by the versions that it names; nothing hangs, and nothing is left behind.
    """
    draw = random.Random(seed)
    limits = ReplicaLimits(seconds=20.0, backoff=0.0, restarts=10**9, refusals=10**9)
    async with replicated(3, tmp_path, limits=limits) as (engine, replicas, source):
        policies = {0: copy.deepcopy(source.model)}
        delivered: list[tuple[list[int], Completion]] = []
        aborts: list[asyncio.Future[None]] = []
        lost = 0

        def abort(session: str) -> None:
            aborts.append(asyncio.ensure_future(engine.abort(session)))

        async def play(number: int) -> None:
            nonlocal lost
            session, tokens = f"s{number}", prompts([draw.randint(3, 30)], seed=number)[0]
            for turn in range(draw.randint(1, 4)):
                sampling = Sampling(max_tokens=draw.randint(1, 25), seed=number * 10 + turn)
                if draw.random() < 0.1:
                    asyncio.get_running_loop().call_later(0.01, abort, session)
                try:
                    completion = await engine.generate(tokens, sampling, session=session)
                except EngineError as error:
                    assert error.retriable
                    lost += 1
                    continue
                delivered.append((list(tokens), completion))
                tokens += completion.tokens
                if draw.random() < 0.3:
                    with contextlib.suppress(EngineError):
                        await engine.fork(session, f"{session}-branch")
                    await engine.release(session)
                    session = f"{session}-branch"
                await asyncio.sleep(draw.random() * 0.01)
            await engine.release(session)

        async def disturb() -> None:
            for _ in range(12):
                await asyncio.sleep(draw.random() * 0.04)
                replica = draw.choice(replicas)
                event = draw.choice(["die", "update", "half", "pause", "forget"])
                if event == "die" and replica.engine is not None:
                    with contextlib.suppress(asyncio.InvalidStateError):
                        await replica.die()
                elif event in ("update", "half"):
                    replica.left_out = "lm_head.weight" if event == "half" else None
                    source.learn(len(policies), 0.01)
                    policies[engine.policy_version + 1] = copy.deepcopy(source.model)
                    await engine.update_weights()
                    replica.left_out = None
                elif event == "pause":
                    await engine.pause()
                    await asyncio.sleep(0.01)
                    await engine.resume()
                elif event == "forget":
                    await engine.forget()

        await asyncio.gather(disturb(), *(play(number) for number in range(40)))
        assert len(delivered) > 2 * lost
        for tokens, completion in delivered:
            whole, starts = tokens + completion.tokens, [span.start for span in completion.versions]
            for span, stop in zip(
                completion.versions, [*starts[1:], len(completion.tokens)], strict=True
            ):
                if stop <= span.start:
                    continue
                known = plain_logprobs(policies[span.version], whole[: len(tokens) + stop])
                expected = known[len(tokens) + span.start :]
                assert completion.logprobs[span.start : stop] == pytest.approx(expected, abs=1e-3)
        assert not engine._replicas._keys
        assert all(not member.load for member in engine._replicas.members)
        await until(lambda: engine.metrics()["engine/replicas"] == 3)
        assert all(not replica.alive._core.scheduler.sessions for replica in replicas)
