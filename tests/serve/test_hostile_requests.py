"""What hostile clients send to the model server: it is refused, and costs others nothing."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from model_parts import ADD, chat, serving, serving_checkpoint, user

from ludus.chat import HFTokenizer, Renderer, load_format
from ludus.chat.api_fields import MOST_MESSAGES, MOST_TOOL_BYTES, MOST_TOOLS
from ludus.core.generation import Sampling
from ludus.core.tokenizer import ByteTokenizer
from ludus.engine import EmbeddedEngine, EngineConfig
from ludus.serve.model import CheckpointService, ModelServer
from ludus.training import fit_tokenizer
from ludus.training.config.run import ScratchConfig
from ludus.training.models.scratch import scratch_model

DIGITS = "1" + "0" * 400
HALF = '"\\ud800"'
JSON = {"Content-Type": "application/json"}


def deep(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


def raw(**fields: str) -> str:
    """A chat request whose fields are JSON texts."""
    given = {"model": '"m"', "messages": json.dumps([user("hello")]), **fields}
    return "{" + ",".join(f'"{name}":{text}' for name, text in given.items()) + "}"


def called(arguments: str) -> str:
    """A conversation whose second message calls a tool with these arguments."""
    function = {"name": "add", "arguments": arguments}
    call = {"id": "c", "type": "function", "function": function}
    made = {"role": "assistant", "content": "", "tool_calls": [call]}
    return json.dumps([user("a"), made, {"role": "tool", "tool_call_id": "c", "content": "5"}])


def tool(**fields: Any) -> str:
    return json.dumps([{"type": "function", "function": {**ADD["function"], **fields}}])  # type: ignore[dict-item]


BODIES = {
    **{
        f"{name} {value[:9]}": raw(**{name: value})
        for name in ("top_k", "seed")
        for value in ("NaN", "Infinity", "-Infinity", "1e999", DIGITS, "1.5", HALF)
    },
    **{
        f"{name} {value[:9]}": raw(**{name: value})
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "max_tokens")
        for value in ("NaN", "1e999", HALF)
    },
    "deep schema": raw(
        tools=tool().replace('{"type": "object"', '{"x":' + deep(900) + ',"type": "object"')
    ),
    "deep arguments": raw(messages=called(deep(900))),
    "NaN in arguments": raw(messages=called('{"a": NaN}')),
    "half a pair in arguments": raw(messages=called('{"a": "\\ud800"}')),
    "half a pair in a message": raw(messages='[{"role":"user","content":' + HALF + "}]"),
    "half a pair in a tool": raw(tools=tool(description="?").replace('"?"', HALF)),
    "half a pair in a name": raw(model=HALF),
    "deep somewhere": raw(metadata=deep(900)),
    "very deep": raw(metadata=deep(100_000)),
    "many digits": raw(metadata="9" * 5000),
    "a tool of types": raw(tools='[{"type": ["function"]}]'),
    "a part of types": raw(messages='[{"role": "user", "content": [{"type": {}}]}]'),
}


async def refused(http: aiohttp.ClientSession, address: str, body: str | bytes, **headers: str) -> Any:
    data = body if isinstance(body, bytes) else body.encode()
    sent = {**JSON, **{name.replace("_", "-"): value for name, value in headers.items()}}
    async with http.post(f"{address}/v1/chat/completions", data=data, headers=sent) as answer:
        return answer.status, await answer.json()


@pytest.mark.parametrize("body", BODIES.values(), ids=list(BODIES))
async def test_values_that_cannot_be_are_a_400_with_a_sentence(body: str) -> None:
    async with aiohttp.ClientSession() as http:
        async with serving_checkpoint(["fine"]) as (address, engine):
            status, answer = await refused(http, address, body)
            assert (status, len(engine.calls)) == (400, 0), answer
            assert answer["error"]["type"] == "invalid_request_error"
            assert " " in answer["error"]["message"]
        async with serving(["fine"]) as served:
            status, answer = await refused(
                http, served.address, body, Authorization=f"Bearer {served.session.key}"
            )
            assert (status, len(served.engine.calls)) == (400, 0), answer


@pytest.mark.parametrize("reward", ["NaN", "1e999", DIGITS, f"-{DIGITS}", HALF, deep(900), "true"])
async def test_rewards_that_are_no_numbers_are_refused(reward: str) -> None:
    async with serving(["fine"]) as served:
        headers = {**JSON, "Authorization": f"Bearer {served.session.key}"}
        data = f'{{"reward": {reward}}}'.encode()
        async with served.http.post(f"{served.address}/v1/reward", data=data, headers=headers) as answer:
            assert answer.status == 400
            assert " " in (await answer.json())["error"]["message"]


@pytest.mark.parametrize("charset", ["punycode", "utf-16", "latin-1", "idna", "no-such-thing"])
async def test_bodies_are_utf_8(charset: str) -> None:
    async with aiohttp.ClientSession() as http, serving_checkpoint(["fine"] * 3) as (address, engine):
        kind = f"application/json; charset={charset}"
        status, answer = await refused(http, address, raw(), Content_Type=kind)
        assert (status, len(engine.calls)) == (415, 0)
        assert "UTF-8" in answer["error"]["message"]
        assert (await refused(http, address, raw().encode("utf-16")))[0] == 400
        for good in ("application/json; charset=UTF-8", 'application/json; charset="utf8"'):
            assert (await refused(http, address, raw(), Content_Type=good))[0] == 200


# Requests that are too large, or long


class CountingBytes(ByteTokenizer):
    """Notes how much text it has encoded, and on which threads."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[str] = set()
        self.characters = 0

    def encode(self, text: str) -> list[int]:
        if len(text) > 500:
            self.threads.add(threading.current_thread().name)
            self.characters += len(text)
        return super().encode(text)


def functions(count: int, description: str = "") -> list[Any]:
    return [
        {"type": "function", "function": {"name": f"f{n}", "description": description, "parameters": {}}}
        for n in range(count)
    ]


def sayings(count: int) -> list[Any]:
    return [{"role": "user", "content": ""}] * count


LARGE: dict[str, tuple[Any, str]] = {
    "messages": (chat(*sayings(MOST_MESSAGES + 1)), f"may have {MOST_MESSAGES:,}"),
    "many messages": (chat(*sayings(100_000)), "more than 200,000 keys and values"),
    "tools": (chat(user("a"), tools=functions(MOST_TOOLS + 1)), f"may have {MOST_TOOLS:,}"),
    "many tools": (chat(user("a"), tools=functions(60_000)), "more than 200,000 keys and values"),
    "a description": (
        chat(user("a"), tools=functions(1, "word " * 1_400_000)),
        f"may have {MOST_TOOL_BYTES:,}",
    ),
    "parts": (
        chat({"role": "user", "content": [{"type": "text", "text": ""}] * (MOST_MESSAGES + 1)}),
        f"may have {MOST_MESSAGES:,}",
    ),
    "many parts": (
        chat({"role": "user", "content": [{"type": "text", "text": ""}] * 200_000}),
        "more than 200,000 keys and values",
    ),
}


@pytest.mark.parametrize(("body", "said"), LARGE.values(), ids=list(LARGE))
async def test_what_is_too_large_is_refused_before_it_is_rendered(body: Any, said: str) -> None:
    tokenizer, data = CountingBytes(), json.dumps(body)
    async with aiohttp.ClientSession() as http:
        async with serving_checkpoint(["fine"], tokenizer=tokenizer) as (address, engine):
            status, answer = await refused(http, address, data)
            assert status in (400, 413) and said in answer["error"]["message"]
            assert not engine.calls
        async with serving(["fine"], tokenizer=tokenizer) as served:
            status, answer = await refused(
                http, served.address, data, Authorization=f"Bearer {served.session.key}"
            )
            assert status in (400, 413) and said in answer["error"]["message"]
    assert tokenizer.characters == 0


async def test_tools_count_before_anything_is_encoded() -> None:
    tokenizer, body = CountingBytes(), json.dumps(chat(user("a"), tools=functions(3, "word " * 9000)))
    async with aiohttp.ClientSession() as http:
        async with serving_checkpoint(["x"], tokenizer=tokenizer, max_context=50_000) as (address, _):
            status, answer = await refused(http, address, body)
            assert status == 400 and "at least 108001 tokens" in answer["error"]["message"]
        async with serving(["x"], tokenizer=tokenizer, tokens=50_000) as served:
            key = f"Bearer {served.session.key}"
            status, answer = await refused(http, served.address, body, Authorization=key)
            assert status == 400 and "at least 108001 tokens" in answer["error"]["message"]
    assert tokenizer.characters == 0


@pytest.mark.parametrize(
    "body",
    [chat(user("a"), tools=functions(1, "word " * 9000)), chat(user("a"), tools=functions(400, "word"))],
    ids=["one description", "many tools"],
)
async def test_long_tools_are_rendered_beside_the_event_loop(body: Any) -> None:
    tokenizer, own = CountingBytes(), threading.current_thread().name
    async with aiohttp.ClientSession() as http:
        async with serving_checkpoint(["x"], tokenizer=tokenizer) as (address, _):
            assert (await refused(http, address, json.dumps(body)))[0] == 200
        assert tokenizer.threads and own not in tokenizer.threads
        tokenizer.threads.clear()
        async with serving(["x", "y"], tokenizer=tokenizer) as served:
            key = f"Bearer {served.session.key}"
            assert (await refused(http, served.address, json.dumps(body), Authorization=key))[0] == 200
            counted = {
                **body,
                "tools": [{**one["function"], "input_schema": {}} for one in body["tools"]],
            }
            status, _ = await served.post(counted, "messages/count_tokens")
            assert status == 200
        assert tokenizer.threads and own not in tokenizer.threads


# Honest clients beside hostile ones


@asynccontextmanager
async def real_server() -> AsyncIterator[tuple[str, EmbeddedEngine]]:
    """A tiny random model behind the API."""
    fitted = fit_tokenizer(["hello there"] * 3, vocabulary=300)
    model = scratch_model(ScratchConfig(layers=1, width=32, vocabulary=300), fitted, seed=0)
    tokenizer = HFTokenizer(fitted)
    engine = EmbeddedEngine(model, tokenizer, EngineConfig(cache_tokens=16_384, max_running=16))
    renderer = Renderer(tokenizer, load_format("hermes"))
    sampling = Sampling(max_tokens=24)
    async with ModelServer(CheckpointService(engine, renderer, "m", sampling=sampling)) as server:
        yield server.address, engine
    await engine.close()


HOSTILE = [
    *({"top_k": value} for value in (2**63, 2**31, 10**400, -5)),
    *({"temperature": value} for value in (10**400, 1e300, 1e-320, 5e-324)),
    *({"repetition_penalty": value} for value in (10**400, 1e300, 1e-320)),
    *({"max_tokens": value} for value in (10**400, 2**63)),
    *({"seed": value} for value in (10**400, 2**64)),
]


async def test_one_clients_numbers_cost_other_clients_nothing() -> None:
    async with real_server() as (address, engine), aiohttp.ClientSession() as http:

        async def ask(**more: Any) -> tuple[int, Any]:
            body = json.dumps(chat(user("hello " * 30), max_tokens=24) | more)
            return await refused(http, address, body)

        honest = [{"temperature": 0}, {"seed": 5}, {"top_p": 0.9, "seed": 6}, {"top_k": 3, "seed": 7}]
        alone = [await ask(**one) for one in honest]
        assert [status for status, _ in alone] == [200] * 4
        given = [*honest, *HOSTILE] * 4
        answers = await asyncio.gather(*(ask(**one) for one in given))
        for asked, (status, answer) in zip(given, answers, strict=True):
            if asked in honest:
                assert status == 200, answer
                expected = alone[honest.index(asked)][1]["choices"][0]["message"]
                assert answer["choices"][0]["message"] == expected
            else:
                assert status == 400 and next(iter(asked)) in answer["error"]["message"], answer
        assert engine.stats.failed_steps == 0


async def test_a_tiny_temperature_keeps_what_others_have_cached() -> None:
    async with real_server() as (address, engine), aiohttp.ClientSession() as http:
        body = chat(user("hello " * 60), max_tokens=2)
        assert (await refused(http, address, json.dumps(body)))[0] == 200
        for tiny in (1e-320, 1e-300, 1e-40):
            assert (await refused(http, address, json.dumps({**body, "temperature": tiny})))[0] == 400
        for cold in (1e-30, 1e-6):
            assert (await refused(http, address, json.dumps({**body, "temperature": cold})))[0] == 200
        _, again = await refused(http, address, json.dumps(body))
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 300
        assert engine.stats.failed_steps == 0
