"""Training on images: log-probabilities and gradients against the Hugging Face model's own forward."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor
from vision_models import noise, save_idefics3, save_llava

from ludus.chat import Renderer, load_format
from ludus.core.failures import ConfigError, LudusError
from ludus.core.generation import Sampling
from ludus.core.messages import Media, Message
from ludus.core.task import Task
from ludus.core.trajectory import Segment, SegmentKind, StopReason, TokenSequence, Trajectory
from ludus.engine import EmbeddedEngine, EngineConfig
from ludus.model import images as image_features
from ludus.model import images_of, use_ludus_attention
from ludus.model.image_files import decode_image
from ludus.model.images import vision_parameters
from ludus.observe import keep_images, read_trajectories, with_images, write_trajectories
from ludus.training import (
    Batch,
    Learner,
    OptimizerConfig,
    load_model,
    logprobs_of,
    micro_batches,
)
from ludus.training.config.run import ModelConfig
from ludus.training.data import micro_batches as prefixes
from ludus.training.optim.logprobs import action_logprobs

SAVERS = {"llava": save_llava, "idefics3": save_idefics3}


@pytest.fixture(scope="module", params=SAVERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SAVERS[request.param](tmp_path_factory.mktemp(request.param))


def loaded(folder: Path, **more: Any) -> tuple[Any, Renderer]:
    model, tokenizer = load_model(ModelConfig(name=str(folder), device="cpu", **more), 0)
    use_ludus_attention(model)
    return model, Renderer(tokenizer, load_format("hermes"))


async def played(model: Any, renderer: Renderer, *images: Media, turns: int = 2) -> Trajectory:
    """An episode by the engine: one image in the prompt, another one in each observation."""
    engine = EmbeddedEngine(
        model, renderer.tokenizer, EngineConfig(cache_tokens=2048, block_size=4, max_running=2)
    )
    trajectory = Trajectory(Task("t"), stop=StopReason.ANSWERED, reward=1.0)
    sequence = trajectory.sequences[0]
    for turn, image in enumerate(images[:turns]):
        message = Message("user" if turn == 0 else "tool", "what is \ufffc here", media=(image,))
        if turn == 0:
            context = renderer.opening([message])
        else:
            context = renderer.next_context(sequence, trajectory.messages, [message])
        kind = SegmentKind.OBSERVATION if turn else SegmentKind.PROMPT
        sequence.segments.append(Segment(kind, context.tokens, media=context.media))
        sampling = Sampling(max_tokens=5, seed=turn + len(images))
        made = await engine.generate(sequence.tokens, sampling, session="s", media=sequence.media)
        sequence.segments.append(Segment(SegmentKind.ACTION, made.tokens, made.logprobs))
        trajectory.messages += [message, Message("assistant", "?")]
    await engine.close()
    return trajectory


def stock_logprobs(
    folder: Path, model: Any, tokens: Sequence[int], images: Sequence[Media]
) -> torch.Tensor:
    """[T - 1]: of each token but the first, by the model's own forward, with gradients."""
    processor: Any = AutoProcessor.from_pretrained(folder)
    images = [decode_image(image.data or b"") for image in images]
    text = processor.image_token * len(images)
    inputs = dict(processor(text=text, images=images, return_tensors="pt"))
    pixels = {name: v for name, v in inputs.items() if name not in ("input_ids", "attention_mask")}
    ids = torch.tensor([list(tokens)])
    logprobs = model(input_ids=ids, **pixels).logits[0].float().log_softmax(-1)
    return logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0]


def without_placeholders(trajectory: Trajectory, token: int) -> bool:
    return all(token not in action.tokens for action in trajectory.actions)


async def episodes(model: Any, renderer: Renderer) -> tuple[list[Trajectory], list[list[Media]]]:
    """Three episodes, two with the same prompt; the stock model cannot score a sampled placeholder."""
    shown = [[noise(1), noise(2, (33, 40))], [noise(3)], [noise(1)]]
    found = [await played(model, renderer, *one) for one in shown]
    token = renderer.images.token if renderer.images else -1
    for one in found:
        for action in one.actions:
            action.tokens = [7 if t == token else t for t in action.tokens]
    return found, shown


async def test_recomputed_logprobs_equal_the_engines(folder: Path) -> None:
    model, renderer = loaded(folder)
    shown = [(noise(1), noise(2, (33, 40))), (noise(3), noise(1)), (noise(4), noise(5))]
    found = [await played(model, renderer, *images) for images in shown]
    batch = Batch.of(found)
    ends = batch.lengths_R.cumsum(0)
    rows = [int(torch.searchsorted(ends, span.start, right=True)) for span in batch.images]
    assert rows == [0, 0, 1, 1, 2, 2]
    action_T, sampled = batch.action_T, batch.rollout_logprobs_T[batch.action_T]
    for budget in (10_000, 64, 1):  # in one micro-batch, in some, and row by row
        recomputed = logprobs_of(model, batch, 1.0, budget)[action_T]
        torch.testing.assert_close(recomputed, sampled, atol=1e-4, rtol=0)
    images = [replace(s, sha256=noise(9).sha256, data=noise(9).data) for s in batch.images]
    swapped = replace(batch, images=tuple(images))
    with pytest.raises(AssertionError):  # other images, the same tokens
        again = logprobs_of(model, swapped, 1.0, 10_000)[action_T]
        torch.testing.assert_close(again, sampled, atol=1e-4, rtol=0)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("vision", ["frozen", "trained"])
async def test_gradients_equal_the_stock_models(
    folder: Path, vision: str, share: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `share`, two of the rows have their prompt, image included, computed once for both."""
    monkeypatch.setattr(prefixes, "BLOCK", 1)
    monkeypatch.setattr(prefixes, "_SHORTEST", 1)
    model, renderer = loaded(folder, vision=vision)
    found, shown = await episodes(model, renderer)
    batch = Batch.of(found)
    (pack,) = micro_batches(batch, 10_000, share=share)
    if share:
        behind = found[0].sequences[0].media[0].stop  # of the image that two rows share
        assert pack.fold is not None and sum(pack.lengths) - pack.computed > behind
    logprobs, _ = action_logprobs(model, pack, 1.0)
    (-logprobs.sum()).backward()
    stock: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    rows = zip(batch.split(batch.tokens_T), batch.split(batch.action_T), shown, strict=True)
    for tokens_T, action_T, images in rows:
        given = stock_logprobs(folder, stock, tokens_T.tolist(), images)
        (-given[action_T[1:]].sum()).backward()
    expected = {name: p.grad for name, p in stock.named_parameters()}
    seeing = {id(p) for p in vision_parameters(model)}
    assert seeing
    for name, parameter in model.named_parameters():
        if vision == "frozen" and id(parameter) in seeing:
            assert parameter.grad is None and not parameter.requires_grad
        elif expected[name] is None:
            assert parameter.grad is None or not parameter.grad.any(), name
        else:
            torch.testing.assert_close(parameter.grad, expected[name], atol=2e-4, rtol=1e-3, msg=name)


async def test_a_split_pack_keeps_each_image_with_its_row(folder: Path) -> None:
    model, renderer = loaded(folder)
    found = [await played(model, renderer, noise(i), noise(i + 1)) for i in range(1, 4)]
    (pack,) = micro_batches(Batch.of(found), 10_000)
    whole, _ = action_logprobs(model, pack, 1.0)
    parts = [
        part for half in pack.split() for part in (half.split() if len(half.lengths) > 1 else [half])
    ]
    assert len(parts) == 3
    torch.testing.assert_close(
        torch.cat([action_logprobs(model, part, 1.0)[0] for part in parts]), whole, atol=1e-4, rtol=0
    )


async def test_a_sampled_placeholder_is_trained_like_any_other_token(folder: Path) -> None:
    model, renderer = loaded(folder)
    trajectory = await played(model, renderer, noise(1), turns=1)
    assert renderer.images is not None
    token = renderer.images.token
    sequence = trajectory.sequences[0]
    engine = EmbeddedEngine(model, renderer.tokenizer, EngineConfig(cache_tokens=512))
    sampled = [token, *sequence.segments[1].tokens]
    scored = await engine.score(sequence.segments[0].tokens + sampled, media=sequence.media)
    await engine.close()
    sequence.segments[1] = Segment(SegmentKind.ACTION, sampled, scored[-len(sampled) :])
    batch = Batch.of([trajectory])
    recomputed = logprobs_of(model, batch, 1.0, 10_000)[batch.action_T]
    torch.testing.assert_close(recomputed, torch.tensor(scored[-len(sampled) :]), atol=1e-4, rtol=0)


async def test_images_survive_files_and_are_missed_loudly(folder: Path, tmp_path: Path) -> None:
    model, renderer = loaded(folder)
    found = [await played(model, renderer, noise(1), noise(2))]
    file = tmp_path / "kept.parquet"
    write_trajectories(file, found)
    bare = read_trajectories(file)
    assert [s.data for s in bare[0].sequences[0].media] == [None, None]
    assert bare[0].sequences[0].media == found[0].sequences[0].media
    fresh, _ = loaded(folder)  # which has no memory of these images
    with pytest.raises(LudusError, match=r"not at hand.*media/"):
        logprobs_of(fresh, Batch.of(bare), 1.0, 10_000)
    with pytest.raises(ConfigError, match=noise(1).sha256):
        with_images(read_trajectories(file), file)
    keep_images(tmp_path, found)
    again = with_images(read_trajectories(file), file)
    expected = logprobs_of(model, Batch.of(found), 1.0, 10_000)
    torch.testing.assert_close(logprobs_of(fresh, Batch.of(again), 1.0, 10_000), expected)
    (tmp_path / "media" / noise(1).sha256).write_bytes(b"damaged")
    with pytest.raises(ConfigError, match="damaged"):
        with_images(read_trajectories(file), file)


async def test_observations_with_images_are_trained_without_them(folder: Path) -> None:
    model, renderer = loaded(folder)
    batch = Batch.of([await played(model, renderer, noise(1), noise(2))])
    assert batch.observation_T.any() and batch.images
    for span in batch.images:
        assert not batch.observation_T[span.start : span.stop].any()


def test_a_text_model_refuses_the_images_of_another(folder: Path) -> None:
    model, _ = loaded(folder, vision="off")
    assert images_of(model) is None
    _, renderer = loaded(folder)
    opening = renderer.opening([Message("user", "?", media=(noise(1),))])
    action = Segment(SegmentKind.ACTION, [5], [0.0])
    prompt = Segment(SegmentKind.PROMPT, opening.tokens, media=opening.media)
    batch = Batch.of([Trajectory(Task("t"), [TokenSequence([prompt, action])])])
    with pytest.raises(LudusError, match="reads text only"):
        logprobs_of(model, batch, 1.0, 100)


def counted(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for each image that goes through the vision tower."""
    seen: list[int] = []
    compute = model.get_image_features

    def counting(*args: Any, **more: Any) -> Any:
        seen.append(1)
        return compute(*args, **more)

    # the engine looks at the signature for what it may pass
    counting.__signature__ = inspect.signature(compute)  # type: ignore[attr-defined]
    monkeypatch.setattr(model, "get_image_features", counting)
    return seen


@pytest.mark.parametrize("vision", ["frozen", "trained"])
async def test_a_frozen_tower_sees_a_image_once_an_update(
    folder: Path, vision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Played by an engine, scored, and trained in many micro-batches; the gradients are those of the first."""
    model, renderer = loaded(folder, vision=vision)
    seen = counted(model, monkeypatch)
    engine = EmbeddedEngine(model, renderer.tokenizer, EngineConfig(cache_tokens=2048))
    shown = [[noise(1), noise(2, (33, 40))], [noise(3), noise(1)], [noise(1), noise(3)]]
    found = [await played(model, renderer, *one) for one in shown]
    batch = Batch.of(found)
    batch = replace(batch, weights_T=torch.full((len(batch.tokens_T),), 0.01))
    learner = Learner(model, OptimizerConfig(learning_rate=1e-3, micro_batch_tokens=1), 10)
    seen.clear()
    await engine.update_weights()  # as after an update: what is kept is forgotten

    def passes() -> int:
        """Each row in a micro-batch of its own, first without gradients and then with them."""
        seen.clear()
        logprobs_of(model, batch, 1.0, 1)
        learner.step(micro_batches(batch, 1), imitation)
        return len(seen)

    assert passes() == (3 if vision == "frozen" else 2 * 6)
    assert passes() == (0 if vision == "frozen" else 2 * 6)
    first = batch.split(batch.tokens_T)[0].tolist()
    media = batch.images_of(0, len(first))
    before = await engine.score(first, media=media)
    assert len(seen) == (0 if vision == "frozen" else 2 * 6 + 2)
    with torch.no_grad():
        for parameter in vision_parameters(model):
            parameter.mul_(0.5)
    await engine.update_weights()
    assert await engine.score(first, media=media) != pytest.approx(before, abs=1e-3)
    await engine.close()


def imitation(
    logprobs_A: Any, entropy_A: Any, pack: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return -logprobs_A, {}


async def test_features_are_kept_within_a_bound(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_features, "FEATURE_BYTES", 1)
    model, renderer = loaded(folder)
    batch = Batch.of([await played(model, renderer, noise(1), noise(2))])
    first = logprobs_of(model, batch, 1.0, 100)
    seen = counted(model, monkeypatch)
    assert torch.equal(logprobs_of(model, batch, 1.0, 100), first)
    assert len(seen) == 2


def test_a_trained_vision_part_has_a_gradient_from_every_pass(folder: Path) -> None:
    """Which is 0 without images: ranks sum gradients tensor by tensor, wherever the images are."""
    model, renderer = loaded(folder, vision="trained")
    opening = renderer.opening([Message("user", "no image")])
    segments = [
        Segment(SegmentKind.PROMPT, opening.tokens),
        Segment(SegmentKind.ACTION, [5, 6], [0.0, 0.0]),
    ]
    batch = Batch.of([Trajectory(Task("t"), [TokenSequence(segments)])])
    (pack,) = micro_batches(batch, 1000)
    logprobs_A, _ = action_logprobs(model, pack, 1.0)
    logprobs_A.sum().backward()
    for parameter in vision_parameters(model):
        assert parameter.grad is not None and not bool(parameter.grad.any())
    assert any(bool(p.grad.any()) for p in model.get_decoder().parameters() if p.grad is not None)
