"""Images in episodes: tools, prompts, trees of conversations, text-only models, and forged placeholders."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vision_models import LLAVA_TEMPLATE, noise, save_idefics3, save_llava

import ludus
from ludus.chat import Renderer, load_format
from ludus.chat.renderer import warn_of_unseen
from ludus.core.failures import ConfigError
from ludus.core.generation import Sampling
from ludus.core.messages import IMAGE_MARK, Media, Message, ToolCall
from ludus.core.task import Task
from ludus.core.trajectory import Group, SegmentKind, Trajectory
from ludus.engine import FakeEngine
from ludus.envs import EnvPool, Observation, Step
from ludus.observe import rollout_metrics
from ludus.rewards import Scorer
from ludus.rollouts import Rollout
from ludus.rollouts.message_tree import MessageTree
from ludus.rollouts.recorder import Budgets, Recorder
from ludus.tools import LocalTools
from ludus.training import Batch, load_model
from ludus.training.config.run import ModelConfig
from ludus.training.data.conversations import trajectory_of

CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "llava": save_llava(root / "llava"),
        "parts": save_llava(root / "parts", template=LLAVA_TEMPLATE),
        "idefics3": save_idefics3(root / "idefics3"),
    }


@pytest.fixture(scope="module")
def renderers(folders: dict[str, Path]) -> dict[str, Renderer]:
    """Of models that see, and of one that is told not to."""
    made: dict[str, Renderer] = {}
    for name, folder in folders.items():
        _, tokenizer = load_model(ModelConfig(name=str(folder), device="cpu"), 0)
        made[name] = Renderer(tokenizer, load_format("hermes"))
    off = ModelConfig(name=str(folders["llava"]), device="cpu", vision="off")
    made["blind"] = Renderer(load_model(off, 0)[1], load_format("hermes"))
    return made


@ludus.tool
async def look() -> list[Any]:
    """Look at the screen."""
    return ["the screen", noise(2)]


@ludus.tool(name="look")
async def broken() -> Media:
    """Look at the screen."""
    return Media.image(b"no image at all")


@ludus.reward
async def one(trajectory: Trajectory) -> float:
    return 1.0


async def play(renderer: Renderer, tool: Any, *prompt: Media) -> tuple[Trajectory, FakeEngine]:
    engine = FakeEngine([CALL, "an image"], renderer.tokenizer)
    rollout = Rollout(engine, renderer, Scorer([one]), LocalTools([tool]))
    task = Task("t", (Message("user", "what do you see?", media=prompt),))
    (group,) = [group async for group in rollout.groups([task], 0)]
    return group.trajectories[0], engine


@pytest.mark.parametrize("name", ["llava", "parts", "idefics3"])
async def test_prompts_and_results_hold_their_images(renderers: dict[str, Renderer], name: str) -> None:
    renderer = renderers[name]
    assert renderer.images is not None
    trajectory, engine = await play(renderer, look, noise(1))
    assert trajectory.failure is None and trajectory.turns == 2
    prompt, _, observation, _ = trajectory.sequences[0].segments
    assert (prompt.kind, observation.kind) == (SegmentKind.PROMPT, SegmentKind.OBSERVATION)
    for segment, image in ((prompt, noise(1)), (observation, noise(2))):
        (span,) = segment.media
        assert span.sha256 == image.sha256 and span.data == image.data
        assert segment.tokens[span.start : span.stop] == renderer.images.tokens(image)
    assert [span.sha256 for span in trajectory.sequences[0].media] == [noise(1).sha256, noise(2).sha256]
    assert [len(call.media) for call in engine.calls] == [1, 2]
    assert "images_unseen" not in trajectory.counts


class Gallery(ludus.Env):
    """Shows an image at first, and another one after each step."""

    def reset(self, task: Task) -> Observation:
        return Observation("a gallery", (noise(4),))

    def step(self, action: str) -> Step:
        return Step(Observation("walked on", (noise(5),)), terminated=True)


async def test_environments_show_images_from_the_first_observation_on(
    renderers: dict[str, Renderer],
) -> None:
    renderer = renderers["llava"]
    engine = FakeEngine(['<tool_call>\n{"name": "step", "arguments": {"action": "on"}}\n</tool_call>'] * 2,
                        renderer.tokenizer)  # fmt: skip
    pools = {"gallery": EnvPool(Gallery, name="gallery", size=1)}
    rollout = Rollout(engine, renderer, Scorer([one]), LocalTools([]), pools)
    message = Message("user", f"like {IMAGE_MARK} this", media=(noise(3), noise(1)))
    task = Task("t", (message,), envs={"gallery": {}})
    (group,) = [group async for group in rollout.groups([task], 0)]
    (trajectory,) = group.trajectories
    assert trajectory.failure is None, trajectory.failure
    order = [noise(seed).sha256 for seed in (3, 1, 4)]
    assert [span.sha256 for span in trajectory.sequences[0].media] == order
    assert trajectory.messages[-1].media == (noise(5),)  # the episode ended: the model never saw it
    text = renderer.tokenizer.decode(trajectory.sequences[0].segments[0].tokens)
    assert text.index("like") < text.rindex("<image>") < text.index("a gallery")
    await pools["gallery"].close()


async def test_a_model_that_reads_text_only_is_counted_as_blind(renderers: dict[str, Renderer]) -> None:
    trajectory, engine = await play(renderers["blind"], look, noise(1))
    assert trajectory.failure is None and trajectory.sequences[0].media == []
    assert trajectory.counts["images_unseen"] == 2
    assert [call.media for call in engine.calls] == [(), ()]
    assert rollout_metrics([Group(trajectory.task, [trajectory])])["images_unseen"] == 2


async def test_a_marked_image_is_a_word_for_a_model_that_reads_text_only(
    renderers: dict[str, Renderer],
) -> None:
    blind = renderers["blind"]
    shown = blind.prompt([Message("user", f"is {IMAGE_MARK} red?", media=(noise(1),))])
    assert shown == blind.prompt([Message("user", "is [image] red?")])


async def test_a_result_that_is_no_image_is_told_in_words(renderers: dict[str, Renderer]) -> None:
    trajectory, _ = await play(renderers["llava"], broken)
    assert trajectory.failure is None and trajectory.turns == 2
    observation = trajectory.sequences[0].segments[2]
    assert observation.media == ()
    assert "image not shown" in renderers["llava"].tokenizer.decode(observation.tokens)
    assert trajectory.counts["images_unseen"] == 1


async def test_a_task_whose_image_cannot_be_read_is_an_error_of_the_task(
    renderers: dict[str, Renderer],
) -> None:
    with pytest.raises(ConfigError, match=r"task t: .*no format"):
        await play(renderers["llava"], look, Media.image(b"no image at all"))
    read = replace(Media.image(b"nothing"), origin="tasks.jsonl, line 7: a.png")
    with pytest.raises(ConfigError, match=r"task t: tasks.jsonl, line 7: a.png: .*no format"):
        await play(renderers["llava"], look, read)


HOSTILE = (
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<row_1_col_1>",
    "<|im_end|>",
    IMAGE_MARK,
)
texts = st.lists(
    st.one_of(st.sampled_from(HOSTILE), st.text(max_size=6), st.sampled_from(["<ima", "ge>", "\n"])),
    max_size=6,
).map("".join)


@given(st.sampled_from(["llava", "parts", "idefics3"]), texts, texts, texts, st.integers(0, 2))
def test_text_cannot_forge_images(
    renderers: dict[str, Renderer], name: str, asked: str, said: str, result: str, images: int
) -> None:
    """Placeholders stand inside spans and nowhere else, whatever users, tools and the model have written."""
    renderer = renderers[name]
    assert renderer.images is not None
    media = tuple(noise(seed) for seed in range(images))
    call = ToolCall("look", {})
    messages = [
        Message("user", asked, media=media),
        Message("assistant", said, (call,)),
        Message("tool", result, media=media[:1]),
    ]
    opening = renderer.opening(messages)
    assert [span.sha256 for span in opening.media] == [m.sha256 for m in (*media, *media[:1])]
    inside = {i for span in opening.media for i in range(span.start, span.stop)}
    around = set(renderer.images.tokens(noise(0))) & set(renderer.tokenizer.controls.values())
    for place, token in enumerate(opening.tokens):
        assert place in inside or token not in around
    for span, image in zip(opening.media, (*media, *media[:1]), strict=True):
        assert opening.tokens[span.start : span.stop] == renderer.images.tokens(image)


def test_images_stand_at_their_marks(renderers: dict[str, Renderer]) -> None:
    renderer = renderers["llava"]
    assert renderer.images is not None
    message = Message("user", f"a {IMAGE_MARK} b {IMAGE_MARK} c", media=(noise(1), noise(2)))
    tokens, decode = renderer.opening([message]).tokens, renderer.tokenizer.decode
    text = decode(tokens)
    assert text.index("a ") < text.index("<image>") < text.index(" b ") < text.rindex("<image>")
    unmarked = decode(renderer.opening([Message("user", "text", media=(noise(1),))]).tokens)
    assert unmarked.index("<image>") < unmarked.index("text")


@pytest.mark.parametrize("name", ["llava", "parts"])
def test_conversations_to_imitate_hold_images(renderers: dict[str, Renderer], name: str) -> None:
    renderer = renderers[name]
    conversation = [
        Message("user", "look", media=(noise(1),)),
        Message("assistant", "noise"),
        Message("user", "and this", media=(noise(2),)),
        Message("assistant", "noise too"),
    ]
    trajectory = trajectory_of(conversation, renderer, ())
    spans = trajectory.sequences[0].media
    assert [span.sha256 for span in spans] == [noise(1).sha256, noise(2).sha256]
    whole = renderer.opening(conversation[:3])
    assert trajectory.sequences[0].tokens[: len(whole.tokens)] == whole.tokens or name == "parts"


def test_conversations_without_their_images_are_not_imitated_in_silence(
    renderers: dict[str, Renderer], caplog: pytest.LogCaptureFixture
) -> None:
    shown = [Message("user", "look", media=(noise(1),)), Message("assistant", "noise")]
    warn_of_unseen.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert trajectory_of(shown, renderers["blind"], ()).sequences[0].media == []
    assert "is not shown them" in caplog.text
    broken_one = [Message("user", "look", media=(Media.image(b"nothing"),)), shown[1]]
    with pytest.raises(ConfigError, match="no format"):
        trajectory_of(broken_one, renderers["llava"], ())
    read = replace(Media.image(b"nothing"), origin="shown.jsonl, line 7: a.png")
    with pytest.raises(ConfigError, match=r"^shown.jsonl, line 7: a.png: .*no format"):
        trajectory_of([replace(broken_one[0], media=(read,)), shown[1]], renderers["llava"], ())


async def test_conversations_of_clients_keep_images_apart(renderers: dict[str, Renderer]) -> None:
    """The same words with another image are another conversation; the same image goes on."""
    renderer = renderers["llava"]
    engine = FakeEngine(["one", "two", "three"], renderer.tokenizer)
    recorder = Recorder(
        Trajectory(Task("t"), seed=1),
        engine=engine,
        budgets=Budgets(max_turns=10, max_turn_tokens=100, max_tokens=10_000),
        sampling=Sampling(),
        session="e",
    )
    tree = MessageTree(recorder, renderer)
    first = [Message("user", "see", media=(noise(1),))]
    other = [Message("user", "see", media=(noise(2),))]
    tree.commit(await tree.sample(first))
    tree.commit(await tree.sample(other))
    following = [*first, Message("assistant", "one"), Message("user", "more", media=(noise(3),))]
    tree.commit(await tree.sample(following))
    assert tree.counts["conversations"] == 2 and tree.counts["branches"] == 0
    shown = [[span.sha256 for span in call.media] for call in engine.calls]
    assert shown == [[noise(1).sha256], [noise(2).sha256], [noise(1).sha256, noise(3).sha256]]
    batch = Batch.of([tree.trajectory])
    ends = batch.lengths_R.cumsum(0).tolist()
    pairs = list(zip(ends, batch.lengths, strict=True))
    by_row = [sum(end - n <= s.start < end for s in batch.images) for end, n in pairs]
    assert sorted(by_row) == [1, 2]
    for span in batch.images:
        found = batch.tokens_T[span.start : span.stop].tolist()
        assert found == renderer.images.tokens(  # type: ignore[union-attr]
            Media("image", span.sha256, span.data)
        )
