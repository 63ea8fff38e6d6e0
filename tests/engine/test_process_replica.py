"""A replica in a process of its own: the same tokens, many requests at once, real deaths."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from engine_models import make, plain_logprobs, prompts
from local_replica import TrainedModel

from ludus.core import EngineError
from ludus.core.generation import FinishReason, Sampling
from ludus.engine import Canary, EmbeddedEngine, EngineConfig
from ludus.engine.replicas import (
    ProcessReplica,
    ReplicaLimits,
    ReplicaSettings,
    ReplicatedEngine,
    weights,
)
from ludus.engine.replicas.process import visible_device
from ludus.remote.processes import ScratchFolder
from ludus.training.models.scratch import fit_tokenizer

SETTINGS = ReplicaSettings(engine=EngineConfig(cache_tokens=4096), threads=1)
GREEDY = Sampling(max_tokens=200, temperature=0.0)


def written(model: TrainedModel, folder: Path) -> Path:
    folder.mkdir()
    model.write(folder)
    fit_tokenizer([], 0).save_pretrained(folder)
    return folder


async def test_a_process_is_the_engine_that_it_runs(tmp_path: Path) -> None:
    """Everything that an engine does, through the process's connection."""
    source = TrainedModel(make("smollm2", vocab_size=300))
    replica = ProcessReplica(0, SETTINGS)
    with pytest.raises(EngineError, match="not running"):
        await replica.generate([1], GREEDY)
    await replica.start(written(source, tmp_path / "3"), 3)
    embedded = EmbeddedEngine(source.model, None, SETTINGS.engine, version=3)
    try:
        requests = [(p, Sampling(max_tokens=20, seed=i)) for i, p in enumerate(prompts([4, 30, 9, 50]))]
        found = await asyncio.gather(*(replica.generate(*request) for request in requests))
        same = await asyncio.gather(*(embedded.generate(*request) for request in requests))
        assert [one.tokens for one in found] == [one.tokens for one in same]
        assert [one.versions for one in found] == [one.versions for one in same]
        for one, other in zip(found, same, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)

        # sessions, forks, stop strings, errors
        turn = Sampling(max_tokens=8, stop_tokens=(299,), stop=("\x00\x01impossible",), seed=1)
        first = await replica.generate([7] * 20, turn, session="a")
        await replica.fork("a", "b")
        second = await replica.generate([7] * 20 + first.tokens, turn, session="b")
        assert (first.cached_tokens, second.cached_tokens) == (0, 27)
        await replica.release("a")
        with pytest.raises(EngineError, match="not in the model's vocabulary of 300") as caught:
            await replica.generate([300], turn)
        assert not caught.value.retriable
        with pytest.raises(EngineError, match="vocabulary"):
            await replica.generate([2**40], turn)
        with pytest.raises(EngineError, match="non-empty"):
            await replica.score([])

        # abort and cancel
        running = asyncio.create_task(replica.generate([1, 2], GREEDY, session="c"))
        await replica.score([1, 2, 3])
        await replica.abort("c")
        assert (await running).finish in (FinishReason.ABORTED, FinishReason.LENGTH)
        gone = asyncio.create_task(replica.generate([1, 2], GREEDY, session="c"))
        await replica.score([1, 2, 3])
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        await replica.generate([1, 2], Sampling(max_tokens=2), session="c")

        # new weights in flight, and while it is paused
        long = Sampling(max_tokens=220, seed=5)
        running = asyncio.create_task(replica.generate([5, 6], long))
        await replica.generate([1], Sampling(max_tokens=10))
        source.learn(1)
        await replica.load_weights(written(source, tmp_path / "4"), 4)
        assert replica.policy_version == 4
        assert [span.version for span in (await running).versions] == [3, 4]
        tokens = prompts([40])[0]
        expected = plain_logprobs(source.model, tokens)
        assert await replica.score(tokens) == pytest.approx(expected, abs=1e-4)
        await replica.pause()
        waiting = asyncio.create_task(replica.generate([5, 6], Sampling(max_tokens=3, seed=5)))
        source.learn(2)
        await replica.load_weights(written(source, tmp_path / "9"), 9)
        assert not waiting.done()
        await replica.resume()
        assert [span.version for span in (await waiting).versions if span.start == 0][-1] == 9
        await replica.forget()

        # weights of another shape change nothing
        other = TrainedModel(make("smollm2", vocab_size=301))
        with pytest.raises(EngineError, match="nothing was changed"):
            await replica.load_weights(written(other, tmp_path / "10"), 10)
        expected = plain_logprobs(source.model, tokens)
        assert await replica.score(tokens) == pytest.approx(expected, abs=1e-4)

        # a real death
        running = asyncio.create_task(replica.generate([1, 2], GREEDY))
        await replica.score([1, 2, 3])
        assert replica.pid is not None
        os.kill(replica.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="was killed by SIGKILL") as caught:
            await running
        assert caught.value.retriable and "SIGKILL" in await replica.ended()
        with pytest.raises(EngineError, match="SIGKILL"):
            await replica.score([1])
    finally:
        await embedded.close()
        await replica.close()
    assert replica.pid is None


@pytest.mark.slow
async def test_a_process_that_ends_or_hangs_comes_back(tmp_path: Path) -> None:
    source = TrainedModel(make())
    replica = ProcessReplica(0, SETTINGS, hang_seconds=4.0)
    limits = ReplicaLimits(seconds=40.0, backoff=0.0)
    canary = Canary.of(97, 256, "float32")
    engine = ReplicatedEngine([replica], source, canary, limits=limits, folder=tmp_path)
    await engine.open()
    try:
        running = asyncio.create_task(engine.generate([1, 2], GREEDY, session="a"))
        await engine.score([1, 2, 3])
        assert replica.pid is not None
        os.kill(replica.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="was killed by SIGKILL") as caught:
            await running
        assert caught.value.retriable
        source.learn(1)
        await engine.update_weights()
        again = await engine.generate([1, 2], GREEDY, session="a")
        assert again.versions[0].version == 1
        assert again.logprobs == pytest.approx(
            plain_logprobs(source.model, [1, 2, *again.tokens])[2:], abs=1e-4
        )
        assert engine.metrics()["engine/restarts"] == 1
        os.kill(replica.pid, signal.SIGSTOP)  # it lives, and gives no sign of it
        with pytest.raises(EngineError, match="did not answer for 4 s"):
            await engine.generate([1, 2], GREEDY, session="a")
        assert (await engine.generate([1, 2], GREEDY, session="a")).tokens == again.tokens
        assert engine.metrics()["engine/restarts"] == 2
    finally:
        await engine.close()


@pytest.mark.parametrize(
    ("device", "visible", "expected"),
    [
        ("cpu", "0,1", ("cpu", {})),
        ("cuda", None, ("cuda", {})),
        ("cuda:1", None, ("cuda", {"CUDA_VISIBLE_DEVICES": "1"})),
        ("cuda:1", "4, 6,7", ("cuda", {"CUDA_VISIBLE_DEVICES": "6"})),
        ("cuda:0", "GPU-8932f937", ("cuda", {"CUDA_VISIBLE_DEVICES": "GPU-8932f937"})),
    ],
)
def test_a_process_sees_its_own_gpu_alone(device: str, visible: str | None, expected: object) -> None:
    assert visible_device(device, visible) == expected


def test_weights_that_a_killed_trainer_left_are_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the next process, also by one that has no engines of its own; what a living one holds stays."""
    monkeypatch.setattr(weights, "_SHARED_MEMORY", tmp_path)
    held = ScratchFolder(weights.PREFIX, tmp_path)
    left = tmp_path / f"{weights.PREFIX}left"
    left.mkdir()
    for folder in (left, held.path):
        os.utime(folder, (1, 1))
    weights.remove_left_weights()
    assert held.path.exists() and not left.exists()
    held.remove()
