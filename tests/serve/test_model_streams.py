"""Streams of the model server: live, the same as the reply that is not streamed, and bounded."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from model_parts import ADD, CALL, Served, serving, serving_checkpoint, user

from ludus.chat import Renderer, load_format
from ludus.core.failures import EngineError
from ludus.core.generation import Completion, FinishReason, OnTokens, Sampling
from ludus.core.messages import MediaSpan
from ludus.core.task import Task
from ludus.core.tokenizer import ByteTokenizer
from ludus.core.trajectory import Trajectory
from ludus.engine import EmbeddedEngine, EngineConfig
from ludus.rollouts.message_tree import MessageTree
from ludus.rollouts.recorder import Budgets, Recorder
from ludus.serve.model import EpisodeService, EpisodeSession, ModelServer, streams
from ludus.serve.service import ServerConfig
from ludus.training import fit_tokenizer
from ludus.training.config.run import ScratchConfig
from ludus.training.models.scratch import scratch_model

APIS = ("chat", "responses", "messages")
PATHS = {"chat": "chat/completions", "responses": "responses", "messages": "messages"}


def asked(api: str, text: str = "2+3?", **more: Any) -> dict[str, Any]:
    """The same request by each API, with a tool."""
    function = ADD["function"]
    bodies: dict[str, dict[str, Any]] = {
        "chat": {"messages": [user(text)], "tools": [ADD]},
        "responses": {"input": text, "tools": [{"type": "function", **function}]},
        "messages": {
            "max_tokens": 2000,
            "messages": [user(text)],
            "tools": [{"name": "add", "input_schema": function["parameters"]}],
        },
    }
    return {"model": "policy", **bodies[api], **more}


@asynccontextmanager
async def opened(served: Any, api: str, body: Any, **headers: str) -> AsyncIterator[Any]:
    sent = {"Authorization": f"Bearer {served.session.key}"}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    url = f"{served.address}/v1/{PATHS[api]}"
    async with served.http.post(url, json={**body, "stream": True}, headers=sent) as answer:
        yield answer


async def events(answer: Any) -> AsyncIterator[Any]:
    assert answer.status == 200 and answer.content_type == "text/event-stream", await answer.text()
    async for line in answer.content:
        text = line.decode().rstrip("\n")
        if text.startswith("data: "):
            yield text if text == "data: [DONE]" else json.loads(text.removeprefix("data: "))


async def whole(served: Any, api: str, body: Any, **headers: str) -> list[Any]:
    async with opened(served, api, body, **headers) as answer:
        return [event async for event in events(answer)]


def text_of(api: str, event: Any) -> str:
    """The piece of text in an event."""
    if api == "chat":
        choices = event["choices"] if isinstance(event, dict) and "choices" in event else []
        return "".join(choice["delta"].get("content") or "" for choice in choices)
    if api == "responses":
        return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""
    return str(event["delta"].get("text", "")) if event["type"] == "content_block_delta" else ""


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - of a server that knows nothing of tests
        await asyncio.sleep(0.005)


# What is streamed is what is replied


def put_together(api: str, found: list[Any]) -> Any:
    """The body that the events of a stream amount to, as each API documents them."""
    return {"chat": _chat, "responses": _response, "messages": _message}[api](found)


def _chat(found: list[Any]) -> Any:
    *chunks, usage, done = found
    assert done == "data: [DONE]" and usage["choices"] == []
    message: dict[str, Any] = {"refusal": None, "content": ""}
    calls: dict[int, Any] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        for name, value in choice["delta"].items():
            if name == "tool_calls":
                for call in value:
                    known = calls.setdefault(call.pop("index"), {"function": {"arguments": ""}})
                    arguments = known["function"]["arguments"] + call["function"]["arguments"]
                    known |= call | {"function": known["function"] | call["function"]}
                    known["function"]["arguments"] = arguments
            elif name == "role":
                message["role"] = value
            else:
                message[name] = message.get(name, "") + value
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
    if calls:
        message |= {
            "tool_calls": [calls[n] for n in sorted(calls)],
            "content": message["content"] or None,
        }
    finish = chunks[-1]["choices"][0]["finish_reason"]
    head = {name: chunks[0][name] for name in ("id", "model")}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
    return {**head, "object": "chat.completion", "choices": [choice], "usage": usage["usage"]}


def _response(found: list[Any]) -> Any:
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    kinds = [event["type"].removeprefix("response.") for event in found]
    assert kinds[:2] == ["created", "in_progress"] and kinds.count("output_item.added") == kinds.count(
        "output_item.done"
    )
    last, items, texts = found[-1]["response"], [], {}
    for event in found:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.done":
            assert event["output_index"] == len(items)
            items.append(event["item"])
        if kind.endswith(".delta"):
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
        if kind.endswith((".text.done", "_text.done", "arguments.done")):
            whole = event["text"] if "text" in event else event["arguments"]
            assert texts.get(event["item_id"], "") == whole
    assert last["output"] == items and found[-1]["type"] == f"response.{last['status']}"
    assert last["created_at"] == found[0]["response"]["created_at"]
    return last


def _message(found: list[Any]) -> Any:
    body = {**found[0]["message"]}
    blocks: list[Any] = []
    is_open = False
    for event in found[1:]:
        kind = event["type"]
        if kind == "content_block_start":
            assert not is_open and event["index"] == len(blocks)
            blocks.append({**event["content_block"]})
            is_open, inputs = True, ""
        elif kind == "content_block_delta":
            assert is_open and event["index"] == len(blocks) - 1
            for name, value in event["delta"].items():
                if name == "partial_json":
                    inputs += value
                    blocks[-1]["input"] = json.loads(inputs)
                elif name != "type":
                    blocks[-1][name] += value
        elif kind == "content_block_stop":
            is_open = False
        elif kind == "message_delta":
            body |= {**event["delta"], "usage": body["usage"] | event["usage"]}
    assert [event["type"] for event in found[-2:]] == ["message_delta", "message_stop"] and not is_open
    return {**body, "content": blocks}


def timeless(body: Any) -> Any:
    return {name: value for name, value in body.items() if name not in ("created", "created_at")}


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    "reply",
    [
        "It is 5.",
        "  I add.\n" + CALL + CALL + " Then more.",
        "<think>2 and 3</think>\n\nI add." + CALL,
        "<think>never closed",
        CALL,
        "I add. <tool_call>{not JSON}</tool_call> é日😀",
        "",
        "one STOP two",
        "x" * 3000,
        bytes([0xE6, 0x97, 0x61, 0xF0, 0x9F]),
    ],
)
async def test_a_stream_amounts_to_the_reply(api: str, reply: Any) -> None:
    script = list(reply) if isinstance(reply, bytes) else reply
    stops = {"chat": {"stop": ["STOP"]}, "messages": {"stop_sequences": ["STOP"]}}.get(api, {})
    body = asked(api, **stops)
    more = {"stream_options": {"include_usage": True}} if api == "chat" else {}
    async with serving([script]) as served:
        status, expected = await served.post(body, PATHS[api])
        assert status == 200
    async with serving([script]) as served:
        found = await whole(served, api, {**body, **more})
        assert timeless(put_together(api, found)) == timeless(expected)
        (call,) = served.engine.calls
        (action,) = served.trajectory.actions
        assert action.tokens == call.completion.tokens
    text = "".join(text_of(api, event) for event in found)
    assert "\N{REPLACEMENT CHARACTER}" not in text or isinstance(reply, bytes)


# Live


@pytest.mark.parametrize("api", APIS)
async def test_text_arrives_while_the_reply_is_sampled(api: str) -> None:
    """The engine pauses for new weights in mid-reply: what it has said by then is with the client."""
    async with serving(["I add." + CALL], seconds=1.0) as served:
        async with opened(served, api, asked(api)) as answer:
            said = ""
            async for event in events(answer):
                said += text_of(api, event)
                if said and not served.engine.calls and served.engine.policy_version == 0:
                    await served.engine.pause()
                    assert served.engine.in_flight == 1 and not served.trajectory.actions
                    assert await served.engine.update_weights() == 1
                    await served.engine.resume()
        assert said == "I add." and served.engine.policy_version == 1
        assert len(served.trajectory.actions) == 1


async def test_two_replies_at_once() -> None:
    async with (
        serving_checkpoint(["one", "two"], seconds=0.1) as (address, engine),
        aiohttp.ClientSession() as http,
    ):
        body = {**asked("chat"), "n": 2, "stream": True}
        async with http.post(f"{address}/v1/chat/completions", json=body) as answer:
            found = [event async for event in events(answer)]
        said = {0: "", 1: ""}
        for event in found[:-1]:
            for choice in event["choices"]:
                said[choice["index"]] += choice["delta"].get("content") or ""
        assert said == {0: "one", 1: "two"} and len(engine.calls) == 2
        order = [choice["index"] for event in found[:-1] for choice in event["choices"]]
        assert order != sorted(order)  # neither waited for the other


async def test_weights_change_in_the_middle_of_a_stream() -> None:
    """A real model: the stream goes on, and each token is recorded with the version that sampled it."""
    fitted = fit_tokenizer(["hello there"] * 3, vocabulary=300)
    model = scratch_model(ScratchConfig(layers=1, width=32, vocabulary=300), fitted, seed=0)
    tokenizer = ByteTokenizer()
    async with embedded(model, tokenizer, max_tokens=150) as (served, engine):
        said, paused = "", False
        async with opened(served, "chat", {"model": "m", "messages": [user("hello")]}) as answer:
            async for event in events(answer):
                said += text_of("chat", event)
                if said and not paused:
                    paused = True
                    await engine.pause()
                    await engine.update_weights()
                    await engine.resume()
        (action,) = served.session.tree.trajectory.actions
        assert [span.version for span in action.versions] == [0, 1]
        assert tokenizer.decode(action.tokens).strip() == said
        assert not engine._thread.outbox.streams


@asynccontextmanager
async def embedded(model: Any, tokenizer: Any, max_tokens: int) -> AsyncIterator[Any]:
    engine = EmbeddedEngine(model, tokenizer, EngineConfig(cache_tokens=4096))
    recorder = Recorder(
        Trajectory(Task("t"), seed=1),
        engine=engine,
        budgets=Budgets(max_turns=4, max_turn_tokens=max_tokens, max_tokens=2_000),
        sampling=Sampling(),
        session="e",
    )
    tree = MessageTree(recorder, Renderer(tokenizer, load_format("hermes")))
    service = EpisodeService()
    async with ModelServer(service) as server, aiohttp.ClientSession() as http:
        session = EpisodeSession(tree, metrics=service.metrics)
        service.open(session)
        yield Served(server.address, session, service, engine, http), engine  # type: ignore[arg-type]
    await engine.close()


# Retries and disconnects


async def leave_in_mid_stream(served: Any, api: str) -> None:
    async with opened(served, api, asked(api)) as answer:
        async for event in events(answer):
            if text_of(api, event):
                break
        answer.close()
    (sampling,) = served.session._sampling.values()
    await until(lambda: sampling.waiters == 0)


@pytest.mark.parametrize("api", APIS)
async def test_a_stream_that_breaks_off_is_joined_from_its_beginning(api: str) -> None:
    async with serving(["It is 5.", "other"], seconds=0.5) as served:
        await leave_in_mid_stream(served, api)
        assert not served.engine.calls
        found = await whole(served, api, asked(api))
        assert "".join(text_of(api, event) for event in found) == "It is 5."
        assert len(served.engine.calls) == 1 and len(served.trajectory.actions) == 1
        assert served.session.counts["retries"] == 1
        again = await whole(served, api, asked(api), x_stainless_retry_count="1")
        assert "".join(text_of(api, event) for event in again) == "It is 5."
        assert len(served.engine.calls) == 1


async def test_a_stream_that_nobody_reads_to_its_end_is_not_recorded() -> None:
    async with serving(["It is 5."], seconds=0.3) as served:
        await leave_in_mid_stream(served, "chat")
        await until(lambda: len(served.engine.calls) == 1)
        await served.service.end(served.session)
        assert not served.trajectory.actions
        assert served.trajectory.counts["model_server/unrecorded"] == 1


async def test_two_clients_read_one_reply() -> None:
    async with serving(["It is 5.", "other"], seconds=0.3) as served:
        first = asyncio.create_task(whole(served, "chat", asked("chat")))
        await until(lambda: served.engine.in_flight == 1)
        again = await whole(served, "chat", asked("chat"), x_stainless_retry_count="1")
        texts = ["".join(text_of("chat", e) for e in found) for found in (await first, again)]
        assert texts == ["It is 5."] * 2
        assert len(served.engine.calls) == 1 and len(served.trajectory.actions) == 1


async def test_without_an_episode_a_stream_that_breaks_off_ends_the_generation() -> None:
    async with (
        serving_checkpoint(["a long reply"], seconds=60.0) as (address, engine),
        aiohttp.ClientSession() as http,
    ):
        body = {**asked("chat"), "stream": True}
        sending = asyncio.create_task(http.post(f"{address}/v1/chat/completions", json=body))
        await until(lambda: engine.in_flight == 1)
        sending.cancel()
        await until(lambda: engine.in_flight == 0)
        assert not engine.calls


class Flood:
    """An engine that says more than any buffer takes, as fast as it can."""

    policy_version = 0

    def __init__(self) -> None:
        self.said = 0

    async def generate(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        media: Sequence[MediaSpan] = (),
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        every: list[int] = []
        for _ in range(120):
            every += b"x" * 100_000
            if on_tokens is not None:
                on_tokens(b"x" * 100_000)
            await asyncio.sleep(0)
        self.said += 1
        return Completion(every, [0.0] * len(every), FinishReason.LENGTH)

    async def fork(self, session: str, into: str) -> None: ...

    async def release(self, session: str) -> None: ...


async def test_a_client_that_does_not_read_holds_up_nobody_and_is_disconnected() -> None:
    engine: Any = Flood()
    recorder = Recorder(
        Trajectory(Task("t")),
        engine=engine,
        budgets=Budgets(max_turns=4, max_turn_tokens=20_000_000, max_tokens=40_000_000),
        sampling=Sampling(),
        session="e",
    )
    tree = MessageTree(recorder, Renderer(ByteTokenizer(), load_format("hermes")))
    service = EpisodeService()
    async with ModelServer(service, ServerConfig(client_seconds=0.5)) as server:
        session = EpisodeSession(tree, metrics=service.metrics)
        service.open(session)
        host, _, port = server.address.removeprefix("http://").partition(":")
        with socket.socket() as lazy:
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            lazy.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(lazy, (host, int(port)))
            body = json.dumps({**asked("chat"), "stream": True}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.key}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            await loop.sock_sendall(lazy, head.encode() + body)
            await until(lambda: engine.said == 1)  # it went on to its end
            (sampling,) = session._sampling.values()
            await until(lambda: server._api.running.count == 0)  # disconnected: the handler has ended
            assert sampling.waiters == 0 and all(not one.readers for one in [sampling.feed] if one)


# While nothing is said, and when it fails


@pytest.mark.parametrize("api", APIS)
async def test_comments_keep_a_waiting_stream_open(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PING_SECONDS", 0.05)
    async with serving(["It is 5."]) as served:
        await served.engine.pause()
        async with opened(served, api, asked(api)) as answer:
            assert await answer.content.readline() == b": waiting\n"
            assert await answer.content.readline() == b"\n"
            assert await answer.content.readline() == b": waiting\n"
            await served.engine.resume()
            found = [event async for event in events(answer)]
        assert "".join(text_of(api, event) for event in found) == "It is 5."


async def test_what_fails_before_the_first_token_is_an_http_error() -> None:
    async with serving(["one"], turns=1) as served:
        await whole(served, "chat", asked("chat"))
        async with opened(served, "chat", asked("chat", "again")) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (400, "max_turns")


@pytest.mark.parametrize("api", APIS)
async def test_what_fails_later_is_an_event(api: str) -> None:
    async with serving(["a long reply", "x"], seconds=1.0) as served:
        async with opened(served, api, asked(api)) as answer:
            found = []
            async for event in events(answer):
                found.append(event)
                if text_of(api, event) and not served.engine._is_closed:
                    await served.engine.close()
        assert found[-1]["error"]["message"] == "the engine is closed"
        if api != "chat":
            assert found[-1]["type"] == "error"
        assert not served.trajectory.actions and isinstance(served.session.failure, EngineError)
        page = served.service.metrics.page().decode()
        name = "anthropic" if api == "messages" else api
        assert f'requests_total{{api="{name}",status="400"}} 1.0' in page


async def test_an_episode_that_ends_ends_its_streams() -> None:
    async with serving(["a long reply"], seconds=4.0) as served:
        async with opened(served, "chat", asked("chat")) as answer:
            await until(lambda: bool(served.engine.in_flight))
            await asyncio.sleep(0)
            ending = asyncio.create_task(served.service.end(served.session))
            body = await answer.text()
            await ending
        assert "episode_ended" in body
