"""Images in engines with weights of their own: the embedded engine's tokens, and no half updates."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vision_models import noise, save_idefics3, save_llava

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from local_replica import LocalReplica

from ludus.chat import Renderer, load_format
from ludus.core.failures import EngineError
from ludus.core.generation import Completion, Sampling
from ludus.core.messages import Json, Media, MediaSpan, Message
from ludus.engine import Canary, CanaryError, EmbeddedEngine, EngineConfig
from ludus.engine.replicas import (
    ProcessReplica,
    ReplicaLimits,
    ReplicaSettings,
    ReplicatedEngine,
)
from ludus.engine.replicas.process import (
    RequestedReplica,
    ServedEngine,
    pack_images,
    pack_tokens,
    unpack_images,
    unpack_tokens,
)
from ludus.model import context_limit, images_of, use_ludus_attention, vocabulary_size
from ludus.training import load_model
from ludus.training.config.run import ModelConfig
from ludus.training.placement import PolicyWeights
from ludus.training.ranks.steps import Ranks

ENGINE = EngineConfig(cache_tokens=2048, block_size=4)
LIMITS = ReplicaLimits(seconds=60.0, backoff=0.0)
Context = tuple[list[int], tuple[MediaSpan, ...]]


class Trained:
    """A model that sees, as a trainer has it."""

    def __init__(self, folder: Path) -> None:
        config = ModelConfig(name=str(folder), device="cpu", vision="trained")
        self.model, self.tokenizer = load_model(config, 0)
        use_ludus_attention(self.model)
        self.renderer = Renderer(self.tokenizer, load_format("hermes"))
        self.weights = PolicyWeights(Ranks.alone(self.model), self.tokenizer)

    def context(self, *images: Media) -> Context:
        text = "what colour is " + " and ".join("\ufffc" for _ in images) + " this"
        opening = self.renderer.opening([Message("user", text, media=images)])
        return opening.tokens, opening.media

    def canary(self, *, sees: bool = True) -> Canary:
        images = images_of(self.model) if sees else None
        return Canary.of(vocabulary_size(self.model), context_limit(self.model), "float32", images)

    @torch.no_grad()
    def move(self, part: str, by: float = 0.05) -> None:
        """Change the weights of a part alone."""
        moved = [p for name, p in self.model.named_parameters() if part in name]
        assert moved
        for parameter in moved:
            parameter.add_(by * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    return Trained(save_llava(tmp_path / "model"))


def sampled(number: int) -> Sampling:
    return Sampling(max_tokens=8, seed=number)


async def by_embedded(trained: Trained, contexts: Sequence[Context]) -> list[Completion]:
    engine = EmbeddedEngine(trained.model, trained.tokenizer, ENGINE)
    try:
        return [
            await engine.generate(tokens, sampled(number), media=media)
            for number, (tokens, media) in enumerate(contexts)
        ]
    finally:
        await engine.close()


def assert_same(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("save", [save_llava, pytest.param(save_idefics3, marks=pytest.mark.slow)])
async def test_two_processes_give_the_embedded_engines_tokens(save: Any, tmp_path: Path) -> None:
    """Before and after an update of the projector alone; in sessions, forks, and scored."""
    trained = Trained(save(tmp_path / "model"))
    replica = ReplicaSettings(engine=ENGINE, threads=1)
    engine = ReplicatedEngine(
        [ProcessReplica(number, replica) for number in range(2)],
        trained.weights,
        trained.canary(),
        limits=LIMITS,
        folder=tmp_path,
    )
    shown = [(noise(1),), (), (noise(2, (40, 30)), noise(1)), (noise(1), noise(1)), (noise(3),)]
    contexts = [trained.context(*images) for images in shown]
    await engine.open()
    try:
        for version in range(2):
            requests = [
                engine.generate(tokens, sampled(number), session=f"{version}-{number}", media=media)
                for number, (tokens, media) in enumerate(contexts)
            ]
            found = await asyncio.gather(*requests)
            expected = await by_embedded(trained, contexts)
            assert_same(found, expected)
            assert all(span.version == version for one in found for span in one.versions)
            tokens, media = contexts[2]
            scored = await engine.score(tokens, media=media)
            assert scored == pytest.approx(trained.weights.score(tokens, media), abs=1e-4)
            assert engine.metrics()["engine/canary_difference"] < 1e-5
            if version == 0:
                before = expected
                trained.move("multi_modal_projector" if save is save_llava else "connector", by=0.3)
                await engine.update_weights()
        assert [one.logprobs for one in before] != [one.logprobs for one in expected]
        # a fork goes on where it branched off, with other images
        tokens, media = contexts[0]
        await engine.fork("1-0", "fork")
        for session, image in (("1-0", noise(5)), ("fork", noise(6))):
            more = trained.renderer.opening([Message("tool", "look", media=(image,))])
            place = len(tokens) + len(found[0].tokens)
            spans = (*media, *(span.moved(place) for span in more.media))
            context = [*tokens, *found[0].tokens, *more.tokens]
            again = await engine.generate(context, sampled(0), session=session, media=spans)
            assert again.cached_tokens >= len(tokens)
            assert_same([again], await by_embedded(trained, [(context, spans)]))
        # what is wrong with an image is told as it is by the embedded engine
        lost = MediaSpan("0" * 64, media[0].start, media[0].stop, None)
        forged = MediaSpan("1" * 64, media[0].start, media[0].stop, media[0].data)
        for wrong, reason in (
            (media[0].moved(1), "do not stand for"),
            (lost, "not at hand"),
            (forged, "does not have the hash"),
        ):
            with pytest.raises(EngineError, match=reason) as caught:
                await engine.generate(tokens, sampled(0), media=[wrong])
            assert not caught.value.retriable
    finally:
        await engine.close()


@pytest.mark.parametrize("part", ["vision_tower", "multi_modal_projector.linear_1.weight"])
async def test_a_half_update_of_what_sees_is_refused(
    trained: Trained, tmp_path: Path, part: str
) -> None:
    """A text alone would not have shown it."""
    (left_out, *_) = [n for n in trained.model.state_dict() if part in n and n.endswith("weight")]
    for sees in (True, False):
        replica = LocalReplica(0)
        limits = ReplicaLimits(seconds=20.0, backoff=0.0, refusals=1)
        canary = trained.canary(sees=sees)
        engine = ReplicatedEngine([replica], trained.weights, canary, limits=limits, folder=tmp_path)
        await engine.open()
        try:
            replica.left_out = left_out
            trained.move(part, by=0.02)
            if sees:
                with pytest.raises(EngineError, match="does not have the weights of version 1"):
                    await engine.update_weights()
                    await engine.generate([1, 2], sampled(0))
            else:
                await engine.update_weights()
                await engine.generate([1, 2], sampled(0))
        finally:
            await engine.close()


async def test_a_replica_that_sees_another_way_does_not_start(trained: Trained, tmp_path: Path) -> None:
    write = trained.weights.write

    def with_another_projector(folder: Path) -> None:
        trained.move("multi_modal_projector", by=0.05)
        write(folder)
        trained.move("multi_modal_projector", by=-0.05)

    trained.weights.write = with_another_projector  # type: ignore[method-assign]
    engine = ReplicatedEngine(
        [LocalReplica(0)], trained.weights, trained.canary(), limits=LIMITS, folder=tmp_path
    )
    with pytest.raises(CanaryError, match="does not have the weights of version 0"):
        await engine.open()


def test_a_canary_without_room_for_a_image_has_none(trained: Trained) -> None:
    images = images_of(trained.model)
    assert images is not None
    size = len(images.tokens(noise(0)))
    for context in (size - 1, size, size + 1, size + 100, None):
        canary = Canary.of(100, context, "float32", images)
        assert bool(canary.media) == (context is None or context > size)
        assert context is None or len(canary.tokens) <= context
        assert canary.tokens == Canary.of(100, context, "float32", images).tokens


class Connected(RequestedReplica):
    """The two ends of a replica's connection, in one process; counts what would be sent."""

    def __init__(self) -> None:
        self.served = ServedEngine()
        self.sent: list[int] = []

    async def _ask(
        self, operation: str, head: Json | None = None, body: bytes = b""
    ) -> tuple[Json, bytes]:
        self.sent.append(len(body))
        given = json.loads(json.dumps({**(head or {}), "operation": operation}))
        reply, found = await self.served.answer(given, body)
        if (error := reply.get("error")) is not None:
            raise EngineError(error["message"], retriable=error["retriable"])
        return reply, found


async def test_a_image_is_sent_once(trained: Trained, tmp_path: Path) -> None:
    trained.weights.write(tmp_path)
    replica = Connected()
    setup = {"folder": str(tmp_path), "version": 0, "device": "cpu", "dtype": "float32", "threads": None}
    await replica._ask("start", {**setup, "engine": ENGINE.model_dump(mode="json")})
    first, second = noise(1), noise(2)
    size = len(first.data or b"") + len(second.data or b"")
    tokens, media = trained.context(first, second)
    for _ in range(3):
        await replica.generate(tokens, sampled(0), media=media)
    sizes = [len(pack_tokens(tokens))] * 4
    sizes[1] += size
    assert replica.sent[1:] == sizes
    bare = [MediaSpan(span.sha256, span.start, span.stop) for span in media]  # which are known by now
    await replica.score(tokens, media=bare)
    assert len(replica.sent) == 6
    await replica.served.engine.close()


@settings(max_examples=50)
@given(
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40),
    st.dictionaries(
        st.text("0123456789abcdef", min_size=64, max_size=64), st.binary(max_size=99), max_size=5
    ),
)
def test_images_come_back_as_they_were_sent(tokens: list[int], images: dict[str, bytes]) -> None:
    head, body = pack_images(pack_tokens(tokens), images)
    packed, found = unpack_images(json.loads(json.dumps(head)), body)
    assert unpack_tokens(packed) == tokens and found == images
