"""Images through the model server: the three APIs, on a model that sees; and what is refused."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from PIL import Image
from vision_models import noise, save_llava

from ludus.chat import Renderer, load_format
from ludus.core.generation import Sampling
from ludus.core.images import MOST_PIXELS
from ludus.core.messages import IMAGE_MARK, Media, Message
from ludus.core.task import Task
from ludus.core.trajectory import Trajectory
from ludus.engine import EmbeddedEngine, EngineConfig
from ludus.model.image_files import decode_image
from ludus.rollouts.message_tree import MessageTree
from ludus.rollouts.recorder import Budgets, Recorder
from ludus.serve.model import CheckpointService, EpisodeService, EpisodeSession, ModelServer
from ludus.training import Batch, load_model
from ludus.training.config.run import ModelConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llava(tmp_path_factory.mktemp("llava"))


def encoded(media: Media) -> str:
    return base64.b64encode(media.data or b"").decode()


def url(media: Media) -> str:
    return f"data:image/png;base64,{encoded(media)}"


def requests(media: Media) -> dict[str, Any]:
    """The same question in the three APIs: a text, then an image; greedy."""
    text, more = "what colour is ", {"model": "m", "temperature": 0}
    parts = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url(media)}}]
    items = [{"type": "input_text", "text": text}, {"type": "input_image", "image_url": url(media)}]
    source = {"type": "base64", "media_type": "image/png", "data": encoded(media)}
    blocks = [{"type": "text", "text": text}, {"type": "image", "source": source}]
    return {
        "chat/completions": {**more, "max_tokens": 8, "messages": [{"role": "user", "content": parts}]},
        "responses": {**more, "max_output_tokens": 8, "input": [{"role": "user", "content": items}]},
        "messages": {**more, "max_tokens": 8, "messages": [{"role": "user", "content": blocks}]},
    }


def said(path: str, body: Any) -> tuple[str, int]:
    """(text, tokens of the prompt)."""
    if path == "chat/completions":
        return body["choices"][0]["message"]["content"], body["usage"]["prompt_tokens"]
    if path == "responses":
        return body["output"][0]["content"][0]["text"], body["usage"]["input_tokens"]
    usage = body["usage"]
    text = "".join(block["text"] for block in body["content"])
    return text, usage["input_tokens"] + usage["cache_read_input_tokens"]


@asynccontextmanager
async def served(folder: Path, vision: str = "frozen") -> AsyncIterator[tuple[Any, Any, Renderer]]:
    config = ModelConfig.parse({"name": str(folder), "device": "cpu", "vision": vision})
    model, tokenizer = load_model(config, 0)
    engine = EmbeddedEngine(model, tokenizer, EngineConfig(cache_tokens=4096))
    renderer = Renderer(tokenizer, load_format("hermes"))
    service = CheckpointService(engine, renderer, "m")
    async with ModelServer(service) as server, aiohttp.ClientSession() as http:

        async def post(path: str, body: Any) -> tuple[int, Any]:
            async with http.post(f"{server.address}/v1/{path}", json=body) as answer:
                if answer.content_type != "text/event-stream":
                    return answer.status, await answer.json()
                lines = (await answer.text()).splitlines()
                data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
                return answer.status, [json.loads(one) for one in data if one != "[DONE]"]

        yield post, engine, renderer
    await engine.close()


async def test_the_three_apis_show_the_same_image(folder: Path) -> None:
    async with served(folder) as (post, engine, renderer):
        for image in (noise(1), noise(2)):
            opening = renderer.opening([Message("user", f"what colour is {IMAGE_MARK}", media=(image,))])
            sampling = Sampling(
                max_tokens=8, temperature=0, stop_tokens=tuple(renderer.tokenizer.stop_tokens)
            )
            direct = await engine.generate(opening.tokens, sampling, media=opening.media)
            expected = renderer.text_of(direct).strip()
            for path, body in requests(image).items():
                status, answer = await post(path, body)
                assert status == 200, answer
                assert said(path, answer) == (expected, len(opening.tokens)), path
            counted = {k: v for k, v in requests(image)["messages"].items() if k != "temperature"}
            status, answer = await post("messages/count_tokens", counted)
            assert (status, answer["input_tokens"]) == (200, len(opening.tokens))


def wide(number: int) -> Media:
    """An image of ten million pixels in a few kilobytes."""
    file = BytesIO()
    image = Image.new("1", (4000, 2500))
    image.putpixel((number, 0), 1)
    image.save(file, format="PNG", compress_level=1)
    return Media.image(file.getvalue())


@dataclass
class Decoding:
    """Watches images being decoded; what the model is given is smaller, which the budget does not see."""

    pixels: int = 0
    most: int = 0
    begun: int = 0
    lock: Any = field(default_factory=threading.Lock)

    def decode(self, data: bytes) -> Any:
        pixels = 10_000_000
        with self.lock:
            self.pixels, self.begun = self.pixels + pixels, self.begun + 1
            self.most = max(self.most, self.pixels)
        try:
            time.sleep(0.1)  # long enough for all that may to be in here together
            return decode_image(data).resize((40, 25))
        finally:
            with self.lock:
                self.pixels -= pixels


async def test_images_in_flight_have_a_budget_of_pixels(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Decoding()
    async with served(folder) as (post, _, _):
        monkeypatch.setattr("ludus.model.images.decode_image", watched.decode)
        bodies = [requests(wide(number))["chat/completions"] for number in range(12)]
        answers = await asyncio.gather(*(post("chat/completions", body) for body in bodies))
        assert [status for status, _ in answers] == [200] * 12
    assert watched.begun == 12
    assert watched.most <= MOST_PIXELS


async def test_images_of_clients_that_have_left_are_not_decoded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Decoding()
    async with served(folder) as (post, _, _):
        monkeypatch.setattr("ludus.model.images.decode_image", watched.decode)
        bodies = [requests(wide(number))["chat/completions"] for number in range(12)]
        gone = [asyncio.create_task(post("chat/completions", body)) for body in bodies]
        while not watched.begun:  # noqa: ASYNC110 - of threads that know nothing of tests
            await asyncio.sleep(0.005)
        for task in gone:
            task.cancel()
        status, _ = await post("chat/completions", requests(noise(1))["chat/completions"])
        assert status == 200
    assert watched.begun <= 4 + 1  # what fits into the budget together, and the one that was asked for


def pieces(path: str, event: Any) -> str:
    """The text in an event of a stream."""
    if path == "chat/completions":
        return "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    if path == "responses":
        return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""
    return str(event["delta"].get("text", "")) if event["type"] == "content_block_delta" else ""


def streamed(path: str, events: list[Any]) -> tuple[str, int]:
    """(text, tokens of the prompt) that the events of a stream amount to."""
    text = "".join(pieces(path, event) for event in events)
    if path == "chat/completions":
        return text, events[-1]["usage"]["prompt_tokens"]
    if path == "responses":
        assert said(path, events[-1]["response"])[0] == text
        return text, events[-1]["response"]["usage"]["input_tokens"]
    usage = events[-2]["usage"]
    return text, usage["input_tokens"] + usage["cache_read_input_tokens"]


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_streams_with_images_add_up_to_the_reply(folder: Path, path: str) -> None:
    replies = set()
    async with served(folder) as (post, _, _):
        for image in (noise(1), noise(2), noise(3)):
            body = requests(image)[path]
            status, plain = await post(path, body)
            assert status == 200, plain
            options = {"stream_options": {"include_usage": True}} if path == "chat/completions" else {}
            status, events = await post(path, {**body, "stream": True, **options})
            assert status == 200
            assert streamed(path, events) == said(path, plain)
            replies.add(said(path, plain)[0])
    assert len(replies) > 1, "the images matter"


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_errors_about_images_name_the_message_of_the_client(folder: Path, path: str) -> None:
    broken = Media.image(b"no image")
    body = requests(broken)[path]
    if path == "responses":
        body |= {"instructions": "Look.", "input": [{"role": "user", "content": "hm"}, *body["input"]]}
        place = "input[1]"
    elif path == "messages":
        body |= {"system": "Look.", "messages": [{"role": "user", "content": "hm"}, *body["messages"]]}
        place = "messages.1"
    else:
        body["messages"] = [{"role": "system", "content": "Look."}, *body["messages"]]
        place = "messages[1]"
    for vision, said_ in (("frozen", "no format"), ("off", "text only")):
        async with served(folder, vision=vision) as (post, _, _):
            for stream in (False, True):
                status, answer = await post(path, {**body, "stream": stream})
                assert status == 400 and said_ in answer["error"]["message"]
                assert place in answer["error"]["message"], answer
                assert path == "messages" or answer["error"]["param"] == place


async def test_results_of_tools_may_be_images(folder: Path) -> None:
    async with served(folder) as (post, _, _):
        call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        part = {"type": "image_url", "image_url": {"url": url(noise(1))}}
        messages = [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": [part]},
        ]
        status, answer = await post(
            "chat/completions", {"model": "m", "messages": messages, "max_tokens": 2}
        )
        assert status == 200, answer
        result = {"type": "tool_result", "tool_use_id": "call_1"}
        source = {"type": "base64", "media_type": "image/png", "data": encoded(noise(1))}
        blocks = [{**result, "content": [{"type": "image", "source": source}]}]
        use = {"type": "tool_use", "id": "call_1", "name": "look", "input": {}}
        theirs = [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": blocks},
        ]
        status, other = await post("messages", {"model": "m", "messages": theirs, "max_tokens": 2})
        assert status == 200, other
        assert said("messages", other)[1] == said("chat/completions", answer)[1]


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("https://example.org/cat.png", "not fetched"),
        ("file:///etc/passwd", "not fetched"),
        ("data:image/png;base64,@@@@", "not base64"),
        ("data:image/png;base64,AAAA", "no format"),
        ("data:text/plain,hello", "is written data:"),
    ],
)
async def test_images_that_cannot_be_read_are_the_clients_mistake(
    folder: Path, address: str, reason: str
) -> None:
    async with served(folder) as (post, _, _):
        part = {"type": "image_url", "image_url": {"url": address}}
        body = {"model": "m", "messages": [{"role": "user", "content": [part]}]}
        status, answer = await post("chat/completions", body)
        assert status == 400 and reason in answer["error"]["message"], answer
        assert answer["error"]["code"] == "invalid_image"
        status, answer = await post("chat/completions", requests(noise(1))["chat/completions"])
        assert status == 200


async def test_a_model_that_reads_text_only_says_so(folder: Path) -> None:
    async with served(folder, vision="off") as (post, _, _):
        for path, body in requests(noise(1)).items():
            status, answer = await post(path, body)
            assert status == 400 and "text only" in answer["error"]["message"]
        status, answer = await post("messages/count_tokens", requests(noise(1))["messages"])
        assert status == 400


async def test_images_of_systems_and_assistants_are_refused(folder: Path) -> None:
    async with served(folder) as (post, _, _):
        part = {"type": "image_url", "image_url": {"url": url(noise(1))}}
        for role in ("system", "assistant"):
            messages = [{"role": role, "content": [part]}, {"role": "user", "content": "?"}]
            status, answer = await post("chat/completions", {"model": "m", "messages": messages})
            assert status == 400 and "for messages of users" in answer["error"]["message"]


async def test_episodes_of_programs_record_their_images(folder: Path) -> None:
    model, tokenizer = load_model(ModelConfig(name=str(folder), device="cpu"), 0)
    engine = EmbeddedEngine(model, tokenizer, EngineConfig(cache_tokens=4096))
    recorder = Recorder(
        Trajectory(Task("t"), seed=1),
        engine=engine,
        budgets=Budgets(max_turns=8, max_turn_tokens=4, max_tokens=10_000),
        sampling=Sampling(),
        session="e",
    )
    tree = MessageTree(recorder, Renderer(tokenizer, load_format("hermes")))
    service = EpisodeService()
    async with ModelServer(service) as server, aiohttp.ClientSession() as http:
        session = EpisodeSession(tree, metrics=service.metrics, http=http)
        service.open(session)
        headers = {"Authorization": f"Bearer {session.key}"}
        body = requests(noise(1))["chat/completions"]
        target = f"{server.address}/v1/chat/completions"
        async with http.post(target, json=body, headers=headers) as answer:
            assert answer.status == 200
        broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        body["messages"] = [{"role": "user", "content": [broken]}]
        async with http.post(target, json=body, headers=headers) as answer:
            assert answer.status == 400
    await engine.close()
    batch = Batch.of([tree.trajectory])
    assert len(batch) == 1
    assert [span.sha256 for span in batch.images] == [noise(1).sha256]
    assert batch.images[0].data == noise(1).data
