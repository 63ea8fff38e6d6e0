"""Today's vision-language families with tiny weights, sampled and trained, against their own forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor
from vision_families import SAVERS, PixtralStandIn
from vision_models import noise

from ludus.chat import Renderer, load_format
from ludus.core.failures import ConfigError
from ludus.core.generation import Completion, Sampling
from ludus.core.messages import Media, MediaSpan, Message
from ludus.core.task import Task
from ludus.core.trajectory import Segment, SegmentKind, StopReason, TokenSequence, Trajectory
from ludus.engine import EmbeddedEngine, EngineConfig, EngineCore
from ludus.engine.embedded.cuda.runner import usable_kv_shape
from ludus.engine.embedded.request import Request
from ludus.model import image_layout, use_ludus_attention
from ludus.model.image_files import decode_image
from ludus.model.images import context_layout, vision_parameters, with_virtual_ids
from ludus.model.probes import check_images
from ludus.training import Batch, load_model, logprobs_of, micro_batches
from ludus.training.config.run import ModelConfig
from ludus.training.data import micro_batches as prefixes
from ludus.training.optim.logprobs import action_logprobs, shares_prefixes

GREEDY = Sampling(max_tokens=5, temperature=0.0)
SMALL, WIDE, TALL = (20, 20), (24, 40), (40, 16)
FAST = ("qwen2_5_vl", "qwen3_vl", "gemma3", "gemma4")
SPATIAL = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v")
"""Families with positions in three dimensions."""


class Family:
    """A model, its renderer, and the stock model beside it."""

    def __init__(self, name: str, folder: Path, **more: Any) -> None:
        self.name, self.folder = name, folder
        config = ModelConfig.parse({"name": str(folder), "device": "cpu", "vision": "frozen", **more})
        self.model: Any
        with pytest.MonkeyPatch.context() as patched:
            if name == "mistral3":
                loads = lambda folder, **_: PixtralStandIn.load(folder)  # noqa: E731
                patched.setattr(AutoProcessor, "from_pretrained", loads)
            self.model, self.tokenizer = load_model(config, 0)
        use_ludus_attention(self.model)
        self.renderer = Renderer(self.tokenizer, load_format("hermes"))
        self.images: Any = self.tokenizer.images
        stock = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        self.stock: Any = stock.eval()

    def context(self, *images: Media) -> tuple[list[int], tuple[MediaSpan, ...]]:
        text = "what is " + " and ".join("\ufffc" for _ in images) + " this"
        opening = self.renderer.opening([Message("user", text, media=images)])
        return opening.tokens, opening.media

    def stock_logprobs(
        self, tokens: Sequence[int], images: Sequence[MediaSpan], model: Any = None
    ) -> torch.Tensor:
        """[T, V]: of the stock model's own forward on its processor's pixels, or of another model's."""
        ids = torch.tensor([list(tokens)])
        inputs: dict[str, Any] = {}
        if images:
            text = " and ".join(self.images.text for _ in images)
            shown = [decode_image(image.data or b"") for image in images]
            made = dict(self.images.inner(text=text, images=shown, return_tensors="pt"))
            kinds = torch.zeros_like(ids)
            for span in images:
                own = ids[0, span.start : span.stop] == self.images.placeholder
                kinds[0, span.start : span.stop] = own.long()
            for name in ("token_type_ids", "mm_token_type_ids"):
                if name in made:
                    made[name] = kinds
            inputs = {n: v for n, v in made.items() if n not in ("input_ids", "attention_mask")}
        logits = (model or self.stock)(input_ids=ids, **inputs, use_cache=False).logits[0]
        return logits.float().log_softmax(-1)

    @torch.no_grad()
    def check(self, tokens: list[int], images: Sequence[MediaSpan], found: Completion) -> None:
        """That every greedy token is the stock model's, with its log-probability."""
        special = {self.images.placeholder, self.images.token}
        known = list(takewhile(lambda one: one not in special, found.tokens))
        expected = self.stock_logprobs(tokens + known, images)
        assert found.tokens
        for place, (token, logprob) in enumerate(
            zip(found.tokens[: len(known) + 1], found.logprobs, strict=False)
        ):
            row = expected[len(tokens) - 1 + place]
            assert token == int(row.argmax())
            assert logprob == pytest.approx(float(row[token]), abs=1e-4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = SAVERS[name](tmp_path_factory.mktemp(name))
        return made[name]

    return folder


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in SAVERS],
)
def family(request: pytest.FixtureRequest, folders: Callable[[str], Path]) -> Family:
    return Family(request.param, folders(request.param))


async def test_generated_tokens_are_the_stock_models(family: Family) -> None:
    """However prefill is cut; an image that another request has shown is found again."""
    for step in (5, 1000):
        config = EngineConfig(cache_tokens=1024, block_size=4, max_running=2, tokens_per_step=step)
        engine = EmbeddedEngine(family.model, family.tokenizer, config)
        shown = (noise(1, SMALL), noise(2, WIDE), noise(3, TALL))
        tokens, media = family.context(*shown)
        family.check(tokens, media, await engine.generate(tokens, GREEDY, media=media))
        other, spans = family.context(shown[0], noise(4, TALL))
        found = await engine.generate(other, GREEDY, media=spans)
        if family.name != "qwen3_5":  # states are kept at the ends of prompts alone
            assert found.cached_tokens >= media[0].start
        family.check(other, spans, found)
        await engine.close()


async def test_images_of_tools_sessions_and_forks(family: Family) -> None:
    config = EngineConfig(cache_tokens=2048, block_size=4, tokens_per_step=24, max_running=4)
    engine = EmbeddedEngine(family.model, family.tokenizer, config)
    tokens, media = family.context(noise(1, WIDE))
    first = await engine.generate(tokens, GREEDY, session="a", media=media)
    await engine.fork("a", "b")
    for session, image in (("a", noise(2, TALL)), ("b", noise(3, SMALL))):
        more = family.renderer.opening([Message("tool", "look", media=(image,))])
        said = [7 if t in (family.images.placeholder, family.images.token) else t for t in first.tokens]
        spans = [*media, *(span.moved(len(tokens) + len(said)) for span in more.media)]
        context = tokens + said + more.tokens
        found = await engine.generate(context, GREEDY, session=session, media=spans)
        assert found.cached_tokens >= len(tokens)
        family.check(context, spans, found)
        end = context + found.tokens + family.renderer.opening([Message("user", "and")]).tokens
        again = await engine.generate(end, GREEDY, session=session, media=spans)
        assert again.cached_tokens >= len(context)
        if not {family.images.placeholder, family.images.token} & set(found.tokens):
            family.check(end, spans, again)
    await engine.close()


def run_core(family: Family, core: EngineCore) -> list[Any]:
    """Three requests with an image each, greedy."""
    replies: dict[int, Any] = {}
    for seed in range(3):
        tokens, media = family.context(noise(seed, WIDE))
        core.submit(
            Request(
                tokens=with_virtual_ids(tokens, media, family.images),
                prompt=len(tokens),
                limit=len(tokens) + 12,
                sampling=Sampling(max_tokens=12, temperature=0.0),
                reply=lambda outcome, seed=seed: replies.__setitem__(seed, outcome),
                images=media,
                layout=context_layout(family.model, len(tokens), media, family.images),
            )
        )
    with torch.no_grad():
        while core.has_work:
            core.step()
    core.close()
    for seed, found in replies.items():
        tokens, media = family.context(noise(seed, WIDE))
        assert isinstance(found, Completion), found
        family.check(tokens, media, found)
    return [replies[seed] for seed in range(3)]


@pytest.mark.parametrize("is_static", [False, True])
def test_preempted_requests_and_static_buffers_give_the_same(family: Family, is_static: bool) -> None:
    """The runner of GPUs where it can run the model, and a cache too small for two requests."""
    tokens, (span,) = family.context(noise(0, WIDE))
    core = EngineCore(
        family.model,
        blocks=2 * -(-len(tokens) // 4) - span.start // 4 + 3,
        block_size=4,
        max_running=4,
        tokens_per_step=16,
        is_static=is_static,
        lookahead=1 if is_static else 0,
    )
    run_core(family, core)
    assert core.stats.preemptions > 0


def test_what_the_gpus_kernels_do_not_know_is_said(family: Family) -> None:
    found = usable_kv_shape(family.model, 4)
    if family.name in ("gemma3", "gemma4"):
        assert isinstance(found, str) and "both directions" in found
        assert not shares_prefixes(family.model)
        blind, _ = load_model(ModelConfig(name=str(family.folder), device="cpu", vision="off"), 0)
        assert shares_prefixes(blind)
    else:
        assert not isinstance(found, str) or "kernels" not in found, found
        assert shares_prefixes(family.model)


@torch.no_grad()
def test_the_models_own_forward_stays_what_it_was(family: Family) -> None:
    """Its attention is Ludus', which makes the masks that the model asks for."""
    tokens, media = family.context(noise(1, WIDE), noise(2, TALL))
    own = family.stock_logprobs(tokens, media, family.model)
    torch.testing.assert_close(own, family.stock_logprobs(tokens, media), atol=1e-4, rtol=0)


def episodes(family: Family) -> list[Trajectory]:
    """Three rows, two of which begin alike: images in prompts and observations, of several sizes."""
    shown = [[noise(1, WIDE), noise(2, TALL)], [noise(3, SMALL)], [noise(1, WIDE), noise(4, SMALL)], []]
    found = []
    for number, images in enumerate(shown):
        segments: list[Segment] = []
        for turn in range(2):
            own = images[turn : turn + 1]
            role, text = ("tool", "look") if turn else ("user", "what is \ufffc here" if own else "what")
            made = family.renderer.opening([Message(role, text, media=tuple(own))])
            kind = SegmentKind.OBSERVATION if turn else SegmentKind.PROMPT
            segments.append(Segment(kind, made.tokens, media=made.media))
            said = [30 + 7 * number + turn, 50 + number, 61]
            segments.append(Segment(SegmentKind.ACTION, said, [-1.0] * 3))
        found.append(
            Trajectory(Task("t"), [TokenSequence(segments)], stop=StopReason.ANSWERED, reward=1.0)
        )
    return found


def gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def assert_same_gradients(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], relative: float
) -> None:
    scale = max(float(grad.abs().max()) for grad in expected.values())
    for name, grad in found.items():
        distance = float((grad - expected.get(name, torch.zeros_like(grad))).abs().max())
        assert distance <= relative * scale, (name, distance, scale)


@pytest.mark.parametrize("vision", ["frozen", "trained"])
def test_gradients_are_those_of_each_row_alone_and_of_the_stock_model(
    family: Family, vision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefixes, "BLOCK", 1)
    monkeypatch.setattr(prefixes, "_SHORTEST", 1)
    model, batch = family.model, Batch.of(episodes(family))
    seeing = vision_parameters(model)
    for parameter in seeing:
        parameter.requires_grad_(vision == "trained")
    share = shares_prefixes(model)
    (pack,) = micro_batches(batch, 10_000, share=share)
    assert (pack.fold is not None) == share
    logprobs, _ = action_logprobs(model, pack, 1.0)
    (-logprobs.sum()).backward()
    packed = gradients(model)
    for one in micro_batches(batch, 1):
        (-action_logprobs(model, one, 1.0)[0].sum()).backward()
    alone = gradients(model)
    rows = zip(batch.split(batch.tokens_T), batch.split(batch.action_T), strict=True)
    for row, (tokens_T, action_T) in enumerate(rows):
        start = int(batch.first_R[row])
        spans = batch.images_of(start, len(tokens_T))
        given = family.stock_logprobs(tokens_T.tolist(), spans)[:-1]
        chosen = given.gather(1, tokens_T[1:, None])[:, 0]
        (-chosen[action_T[1:]].sum()).backward()
    stock = gradients(family.stock)
    for parameter in seeing:
        parameter.requires_grad_(False)
    assert vision == "frozen" or any("vis" in name for name in packed)
    assert_same_gradients(packed, alone, 1e-5)
    assert_same_gradients(packed, stock, 1e-4)


async def test_the_trainer_agrees_with_the_engine(family: Family) -> None:
    batch = Batch.of(episodes(family))
    expected = logprobs_of(family.model, batch, 1.0, 10_000)
    config = EngineConfig(cache_tokens=1024, block_size=4, tokens_per_step=32, max_running=4)
    engine = EmbeddedEngine(family.model, family.tokenizer, config)
    ends = [0, *batch.lengths_R.cumsum(0).tolist()]
    for row, tokens_T in enumerate(batch.split(batch.tokens_T)):
        start, stop = ends[row], ends[row + 1]
        scored = await engine.score(tokens_T.tolist(), media=batch.images_of(start, stop - start))
        action_T = batch.action_T[start:stop]
        torch.testing.assert_close(
            torch.tensor(scored)[action_T], expected[start:stop][action_T], atol=1e-4, rtol=0
        )
    await engine.close()


async def test_an_adapter_with_images(family: Family) -> None:
    """New adapters change nothing; random ones do, and engine and trainer agree."""
    pytest.importorskip("peft")
    adapted = Family(family.name, family.folder, lora={"rank": 2})
    batch = Batch.of(episodes(adapted))
    plain = logprobs_of(family.model, batch, 1.0, 10_000)
    torch.testing.assert_close(logprobs_of(adapted.model, batch, 1.0, 10_000), plain, atol=1e-4, rtol=0)
    with torch.no_grad():
        for name, parameter in adapted.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(len(name))).mul_(0.1)
    found = logprobs_of(adapted.model, batch, 1.0, 10_000)
    assert float((found - plain).abs().max()) > 1e-3
    engine = EmbeddedEngine(adapted.model, adapted.tokenizer, EngineConfig(cache_tokens=1024))
    tokens_T, action_T = batch.split(batch.tokens_T)[0], batch.split(batch.action_T)[0]
    scored = await engine.score(tokens_T.tolist(), media=batch.images_of(0, len(tokens_T)))
    first = batch.split(found)[0]
    torch.testing.assert_close(torch.tensor(scored)[action_T], first[action_T], atol=1e-4, rtol=0)
    await engine.close()
    (pack,) = micro_batches(batch, 10_000)
    action_logprobs(adapted.model, pack, 1.0)[0].sum().backward()
    assert all(p.grad is not None for n, p in adapted.model.named_parameters() if "lora_" in n)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "gemma4"])
def test_the_probe_sees_what_is_left_out(
    name: str, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions counted as text, and attention that is causal, are found out."""
    model, _ = load_model(ModelConfig(name=str(folders(name)), device="cpu", vision="frozen"), 0)
    check_images(model)
    left_out = "_positioned" if name in SPATIAL else "both_ways"
    monkeypatch.setattr(image_layout, left_out, lambda model: None)
    with pytest.raises(ConfigError, match="does something else with images"):
        check_images(model)
