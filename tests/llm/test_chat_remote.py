"""A model behind a real HTTP server: what is sent, what comes back, and what servers do wrong."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from ludus.core import ConfigError, Media, Message, ToolCall
from ludus.core.generation import ChatModel, ChatOptions
from ludus.llm import ChatError, RemoteChatModel, RetryPolicy, load_chat_model
from openai_server import OpenAIServer, Raw, chat, cut_off, error, garbage, hang, serving

FAST = RetryPolicy(seconds=20, retries=3, first_pause=0.001)
HELLO = [Message("system", "Be brief."), Message("user", "hello")]


@asynccontextmanager
async def model_at(
    server: OpenAIServer, policy: RetryPolicy = FAST, **more: Any
) -> AsyncIterator[RemoteChatModel]:
    model = RemoteChatModel(f"{server.url}#tiny", policy=policy, **more)
    try:
        yield model
    finally:
        await model.close()


async def test_what_is_sent_and_what_comes_back() -> None:
    reply = chat("yes") | {"usage": {"prompt_tokens": 11, "completion_tokens": 2}}
    with serving(lambda body: reply, key="secret") as server:
        async with model_at(server, key="secret", request={"top_p": 0.5, "max_tokens": None}) as model:
            assert isinstance(model, ChatModel)
            found = await model.chat(HELLO, ChatOptions(temperature=0.5, seed=2**40 + 7))
    assert (found.text, found.prompt_tokens, found.completion_tokens, found.is_cut) == (
        "yes",
        11,
        2,
        False,
    )
    assert server.bodies == [
        {
            "model": "tiny",
            "messages": [{"role": m.role, "content": m.content} for m in HELLO],
            "temperature": 0.5,
            "seed": 7,
            "top_p": 0.5,
        }
    ]
    assert server.asked[0].path == "/v1/chat/completions"


async def test_images_are_parts_and_arguments_are_texts() -> None:
    image = b"\x89PNG\r\n\x1a\nrest"
    media = Media("image", hashlib.sha256(image).hexdigest(), image)
    said = Message("assistant", "", (ToolCall("look", {"at": 1}, id="a"),))
    with serving() as server:
        async with model_at(server) as model:
            await model.chat([said, Message("user", "what is it?", media=(media,))])
            for broken in (Media("image", "00"), Media("image", "00", b"text")):
                with pytest.raises(ChatError, match=r"bytes|no PNG"):
                    await model.chat([Message("user", "", media=(broken,))])
    call, asked = server.bodies[0]["messages"]
    assert call["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": 1}'}
    assert asked["content"] == [
        {"type": "text", "text": "what is it?"},
        {
            "type": "image_url",
            "image_url": {"url": "data:image/png;base64," + base64.b64encode(image).decode()},
        },
    ]


@pytest.mark.parametrize(
    "fault",
    [
        error(429, Retry_After="0"),
        error(500),
        error(503, "restarting"),
        garbage(),
        garbage(b"[]"),
        cut_off(),
        Raw(pieces=[b'{"choices": []}']),
        Raw(pieces=[b'{"choices": [{"message": {"content": 3}}]}']),
        Raw(pieces=[b'{"choices": [{"finish_reason": "abort", "message": {"content": "a"}}]}']),
        Raw(pieces=[b'{"choices": [{"message": {"content": "' + b"a" * 200_000 + b'"}}]}']),
    ],
    ids=lambda fault: f"{fault.status} {fault.pieces[0][:30]!r}",
)
async def test_faults_are_retried_and_then_typed(fault: Raw) -> None:
    with serving() as server:
        async with model_at(server) as model:
            server.faults = [fault] * 3
            assert (await model.chat(HELLO)).text == "yes"
            assert len(server.asked) == 4
            server.faults = [fault] * 4
            with pytest.raises(ChatError, match="in 4 attempts") as caught:
                await model.chat(HELLO)
    assert caught.value.attempts == 4
    assert not caught.value.retriable


async def test_a_server_that_hangs_meets_the_deadline() -> None:
    release = threading.Event()
    with serving() as server:
        server.faults = [hang(release)]
        async with model_at(server, RetryPolicy(seconds=0.2)) as model:
            try:
                with pytest.raises(ChatError, match=r"no answer within 0\.2 seconds"):
                    await model.chat(HELLO)
            finally:
                release.set()


async def test_a_refusal_is_not_sent_again_and_names_the_fix() -> None:
    with serving(key="secret") as server:
        async with model_at(server, key="wrong") as model:
            with pytest.raises(ChatError, match="LUDUS_API_KEY"):
                await model.chat(HELLO)
        async with model_at(server, key="secret") as model:
            server.faults = [error(404)]
            with pytest.raises(ChatError, match="'tiny'"):
                await model.chat(HELLO)
    assert len(server.asked) == 1


async def test_a_server_without_json_mode_is_asked_without() -> None:
    def reply(body: dict[str, Any]) -> Any:
        return error(400, "response_format?") if "response_format" in body else chat("{}")

    with serving(reply) as server:
        async with model_at(server) as model:
            for _ in range(2):
                assert (await model.chat(HELLO, ChatOptions(wants_json=True))).text == "{}"
    assert ["response_format" in body for body in server.bodies] == [True, False, False]


async def test_a_cut_answer_is_marked_and_tokens_are_estimated() -> None:
    with serving(lambda body: chat("abc" * 10, "length")) as server:
        async with model_at(server) as model:
            found = await model.chat(HELLO)
    assert found.is_cut
    assert found.completion_tokens == 11
    assert found.prompt_tokens > 1


async def test_the_only_model_needs_no_name() -> None:
    with serving(models=["one"]) as server:
        model = load_chat_model(server.url)
        await model.chat(HELLO)
        assert model.name == f"{server.url}#one"
        await model.close()
    assert server.bodies[0]["model"] == "one"
    with serving(models=["one", "two"]) as server:
        model = load_chat_model({"address": server.url})
        with pytest.raises(ConfigError, match="one, two"):
            await model.chat(HELLO)
        await model.close()


def test_one_model_serves_one_event_loop_after_another() -> None:
    with serving() as server:
        model = load_chat_model({"address": f"{server.url}#tiny", "concurrency": 1})

        async def ask() -> list[str]:
            replies = await asyncio.gather(*(model.chat(HELLO) for _ in range(3)))
            return [reply.text for reply in replies]

        for _ in range(2):
            assert asyncio.run(ask()) == ["yes"] * 3


def test_a_table_is_checked() -> None:
    with pytest.raises(ConfigError, match="concurency"):
        load_chat_model({"address": "http://127.0.0.1:1/v1#a", "concurency": 3})
    with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
        load_chat_model({"address": "http://127.0.0.1:1/v1#a", "key_variable": "NO_SUCH_KEY"})
    with pytest.raises(ConfigError, match="password"):
        load_chat_model("http://ada:secret@127.0.0.1:1/v1#a")


async def test_what_waits_in_a_servers_queue_is_not_lost() -> None:
    """A model on a CPU answers one request after the other: twelve of 0.3 seconds each, with 2 for each."""
    turn = threading.Lock()

    def one_at_a_time(body: dict[str, Any]) -> dict[str, Any]:
        with turn:
            time.sleep(0.3)
            return chat("yes")

    with serving(one_at_a_time) as server:
        async with model_at(server, RetryPolicy(seconds=2, retries=0)) as model:
            found = await asyncio.gather(*(model.chat(HELLO) for _ in range(12)))
    assert [reply.text for reply in found] == ["yes"] * 12


async def test_a_request_that_hangs_ends_though_others_are_answered() -> None:
    over = threading.Event()
    hanging = [Message("user", "hang")]
    with serving(
        lambda body: hang(over) if body["messages"][0]["content"] == "hang" else chat("yes")
    ) as server:
        async with model_at(server, RetryPolicy(seconds=2, retries=0)) as model:
            waiting = asyncio.create_task(model.chat(hanging))
            while not waiting.done():
                assert (await model.chat(HELLO)).text == "yes"
            over.set()
            with pytest.raises(ChatError, match="no answer within"):
                await waiting


def test_a_table_can_be_written_on_a_command_line() -> None:
    model = load_chat_model('{ address = "http://127.0.0.1:1/v1#tiny", seconds = 1800, name = "slow" }')
    assert model.name == "slow"
    with pytest.raises(ConfigError, match="no table of TOML"):
        load_chat_model("{ address: http://127.0.0.1:1/v1 }")
    with pytest.raises(ConfigError, match="second"):
        load_chat_model('{ address = "http://127.0.0.1:1/v1", second = 3 }')
