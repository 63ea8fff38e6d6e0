"""Images in the embedded engine, against the Hugging Face model's own forward on its processor's inputs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor
from vision_models import noise, save_idefics3, save_llava

from ludus.chat import Renderer, load_format
from ludus.core.failures import EngineError
from ludus.core.generation import Completion, Sampling
from ludus.core.messages import Media, MediaSpan, Message
from ludus.engine import EmbeddedEngine, EngineConfig, EngineCore
from ludus.engine.embedded.request import Request
from ludus.model import use_ludus_attention
from ludus.model.image_files import decode_image
from ludus.model.images import virtual_ids, with_virtual_ids
from ludus.training import load_model
from ludus.training.config.run import ModelConfig

GREEDY = Sampling(max_tokens=6, temperature=0.0)
SAVERS = {"llava": save_llava, "idefics3": save_idefics3}


@pytest.fixture(scope="module", params=SAVERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SAVERS[request.param](tmp_path_factory.mktemp(request.param))


class Seeing:
    """A model, its renderer, and the stock model beside it."""

    def __init__(self, folder: Path) -> None:
        config = ModelConfig(name=str(folder), device="cpu", vision="frozen")
        self.model, self.tokenizer = load_model(config, 0)
        use_ludus_attention(self.model)
        self.renderer = Renderer(self.tokenizer, load_format("hermes"))
        self.stock = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self.processor = AutoProcessor.from_pretrained(folder)

    def context(self, *images: Media) -> tuple[list[int], tuple[MediaSpan, ...]]:
        text = "what colour is " + " and ".join("\ufffc" for _ in images) + " this"
        opening = self.renderer.opening([Message("user", text, media=images)])
        return opening.tokens, opening.media

    @torch.no_grad()
    def reference(self, tokens: Sequence[int], images: Sequence[Media]) -> torch.Tensor:
        """[T, V]: the stock model's log-probabilities."""
        images = [decode_image(image.data or b"") for image in images]
        text = self.processor.image_token * len(images)
        inputs: Any = dict(self.processor(text=text, images=images, return_tensors="pt"))
        for name in ("input_ids", "attention_mask"):
            inputs.pop(name)
        logits = self.stock(input_ids=torch.tensor([list(tokens)]), **inputs).logits[0]
        return logits.float().log_softmax(-1)

    def check(self, tokens: list[int], images: Sequence[Media], found: Completion) -> None:
        """That every greedy token is the stock model's, with its log-probability."""
        token = self.tokenizer.images.token
        known = list(takewhile(lambda one: one != token, found.tokens))  # the stock model breaks there
        expected = self.reference(tokens + known, images)
        compared = found.tokens[: len(known) + 1]
        for place, (token, logprob) in enumerate(zip(compared, found.logprobs, strict=False)):
            row = expected[len(tokens) - 1 + place]
            assert token == int(row.argmax())
            assert logprob == pytest.approx(float(row[token]), abs=1e-4)


@pytest.fixture(scope="module")
def seeing(folder: Path) -> Seeing:
    return Seeing(folder)


@pytest.mark.parametrize("step", [3, 7, 1000])
async def test_generate_equals_the_stock_model_however_prefill_is_cut(seeing: Seeing, step: int) -> None:
    images = noise(1), noise(2, (40, 30))
    tokens, media = seeing.context(*images)
    config = EngineConfig(cache_tokens=512, block_size=4, max_running=2, tokens_per_step=step)
    engine = EmbeddedEngine(seeing.model, seeing.tokenizer, config)
    found = await engine.generate(tokens, GREEDY, media=media)
    seeing.check(tokens, images, found)
    await engine.close()


async def test_the_same_image_is_reused_and_another_is_not(seeing: Seeing) -> None:
    config = EngineConfig(cache_tokens=2048, block_size=4)
    engine = EmbeddedEngine(seeing.model, seeing.tokenizer, config)
    one, other = noise(1), noise(2)
    tokens, media = seeing.context(one)
    tokens_of_other, media_of_other = seeing.context(other)
    assert tokens == tokens_of_other and media != media_of_other
    first = await engine.generate(tokens, GREEDY, media=media)
    again = await engine.generate(tokens, GREEDY, media=media)
    found = await engine.generate(tokens, GREEDY, media=media_of_other)
    assert first.cached_tokens == 0
    assert again.cached_tokens > media[0].stop and again.logprobs == pytest.approx(
        first.logprobs, abs=1e-5
    )
    assert found.cached_tokens <= media[0].start + int(
        seeing.tokenizer.images.token != tokens[media[0].start]
    )
    assert found.logprobs != pytest.approx(first.logprobs, abs=1e-3)
    seeing.check(tokens, [one], first)
    seeing.check(tokens, [other], found)
    await engine.close()


async def test_sessions_go_on_and_fork_with_images(seeing: Seeing) -> None:
    engine = EmbeddedEngine(
        seeing.model, seeing.tokenizer, EngineConfig(cache_tokens=2048, block_size=4)
    )
    one, two, three = noise(1), noise(2), noise(3)
    tokens, media = seeing.context(one)
    first = await engine.generate(tokens, GREEDY, session="a", media=media)
    await engine.fork("a", "b")
    for session, image in (("a", two), ("b", three)):
        more = seeing.renderer.opening([Message("tool", "look", media=(image,))])
        spans = [*media, *(span.moved(len(tokens) + len(first.tokens)) for span in more.media)]
        context = tokens + first.tokens + more.tokens
        found = await engine.generate(context, GREEDY, session=session, media=spans)
        assert found.cached_tokens >= len(tokens)
        seeing.check(context, [one, image], found)
    await engine.close()


def run_core(core: EngineCore, requests: Sequence[Request]) -> None:
    for request in requests:
        core.submit(request)
    while core.has_work:
        core.step()


@pytest.mark.parametrize("is_static", [False, True])
def test_preempted_requests_and_static_buffers_give_the_same(seeing: Seeing, is_static: bool) -> None:
    """The runner of GPUs, and a cache so small that requests are recomputed, images and all."""
    prompt = len(seeing.context(noise(0))[0])
    core = EngineCore(
        seeing.model,
        blocks=3 * -(-prompt // 4),
        block_size=4,
        max_running=4,
        tokens_per_step=16,
        is_static=is_static,
        lookahead=1 if is_static else 0,
    )
    replies: dict[int, Any] = {}
    processor = seeing.tokenizer.images
    requests = []
    for seed in range(3):
        tokens, media = seeing.context(noise(seed))
        keyed = with_virtual_ids(tokens, media, processor)
        requests.append(
            Request(
                tokens=keyed,
                prompt=len(tokens),
                limit=len(tokens) + 12,
                sampling=Sampling(max_tokens=12, temperature=0.0),
                reply=lambda outcome, seed=seed: replies.__setitem__(seed, outcome),
                images=media,
            )
        )
    with torch.no_grad():
        run_core(core, requests)
    for seed in range(3):
        assert isinstance(replies[seed], Completion), replies[seed]
        seeing.check(seeing.context(noise(seed))[0], [noise(seed)], replies[seed])
    assert core.stats.preemptions > 0
    core.close()


async def test_score_equals_the_stock_model(seeing: Seeing) -> None:
    engine = EmbeddedEngine(
        seeing.model, config=EngineConfig(cache_tokens=512, max_running=2, tokens_per_step=9)
    )
    image = noise(5)
    tokens, media = seeing.context(image)
    scored = await engine.score(tokens, media=media)
    expected = seeing.reference(tokens, [image])
    wanted = [0.0, *(float(expected[i, t]) for i, t in enumerate(tokens[1:]))]
    assert scored == pytest.approx(wanted, abs=1e-4)
    await engine.close()


async def test_new_weights_change_what_is_seen(seeing: Seeing) -> None:
    engine = EmbeddedEngine(seeing.model, seeing.tokenizer, EngineConfig(cache_tokens=512))
    tokens, media = seeing.context(noise(1))
    before = await engine.score(tokens, media=media)
    weight = next(p for n, p in seeing.model.named_parameters() if "patch_embedding.weight" in n)
    kept = weight.detach().clone()
    await engine.pause()
    with torch.no_grad():
        weight.mul_(0.1)
    await engine.update_weights()
    await engine.resume()
    after = await engine.score(tokens, media=media)
    with torch.no_grad():
        weight.copy_(kept)
    await engine.update_weights()
    assert before != pytest.approx(after, abs=1e-3)
    assert await engine.score(tokens, media=media) == pytest.approx(before, abs=1e-6)
    await engine.close()


async def test_a_sampled_placeholder_is_a_token_like_any_other(seeing: Seeing) -> None:
    """With the same neighbours it has the same effect, wherever images stand; and nothing breaks."""
    engine = EmbeddedEngine(seeing.model, seeing.tokenizer, EngineConfig(cache_tokens=512))
    tokens, media = seeing.context(noise(1))
    token = seeing.tokenizer.images.token
    context = [*tokens, token, token]
    found = await engine.generate(context, GREEDY, media=media)
    assert len(found.tokens) == 6
    alone = await engine.generate([*seeing.context()[0], token], GREEDY)
    assert len(alone.tokens) == 6
    await engine.close()


async def test_wrong_spans_and_images_are_refused(seeing: Seeing) -> None:
    engine = EmbeddedEngine(seeing.model, seeing.tokenizer, EngineConfig(cache_tokens=512))
    tokens, (span,) = seeing.context(noise(1))
    lost = MediaSpan("0" * 64, span.start, span.stop, None)
    forged = MediaSpan("1" * 64, span.start, span.stop, span.data)
    for wrong, reason in (
        (span.moved(1), "do not stand for"),
        (span.moved(10_000), "do not stand for"),
        (MediaSpan(span.sha256, span.start, span.stop - 1, span.data), "tokens of this model"),
        (lost, "not at hand"),
        (forged, "does not have the hash"),
    ):
        with pytest.raises(EngineError, match=reason):
            await engine.generate(tokens, GREEDY, media=[wrong])
    await engine.close()


def test_virtual_ids_tell_images_and_places_apart() -> None:
    ids = [virtual_ids(noise(seed).sha256, 500) for seed in range(20)]
    assert len({int(one) for part in ids for one in part}) == 20 * 500
    assert min(int(part.min()) for part in ids) >= 1 << 62
