"""The model server over HTTP: the three APIs, errors in their own form, keys, retries, disconnects."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from model_parts import ADD, CALL, Served, chat, serving, serving_checkpoint, user
from server_process import ServerProcess

from ludus.core.failures import ConfigError, EngineError
from ludus.core.messages import Message
from ludus.core.tokenizer import ByteTokenizer
from ludus.core.trajectory import StopReason
from ludus.serve.model.anthropic import ANTHROPIC
from ludus.serve.model.chat import CHAT
from ludus.serve.model.requests import Dialect
from ludus.training import fit_tokenizer
from ludus.training.config.run import ScratchConfig
from ludus.training.models.scratch import scratch_model


def events_of(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def stream(served: Any, path: str, body: Any) -> list[Any]:
    headers = {"Authorization": f"Bearer {served.session.key}"}
    url = f"{served.address}/v1/{path}"
    async with served.http.post(url, json={**body, "stream": True}, headers=headers) as answer:
        assert answer.status == 200 and answer.content_type == "text/event-stream"
        return events_of(await answer.text())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - of a server that knows nothing of tests
        await asyncio.sleep(0.005)


async def leave_alone(served: Served, body: Any) -> None:
    """Send a request, and go away while the engine, which is paused, has it."""
    await served.engine.pause()
    gone = asyncio.create_task(served.post(body))
    await until(lambda: served.engine.in_flight == 1)
    gone.cancel()
    (sampling,) = served.session._sampling.values()
    await until(lambda: sampling.waiters == 0)


# The APIs


async def test_chat_completions() -> None:
    async with serving(["I add." + CALL, "It is 5."]) as served:
        status, first = await served.post(chat(user("2+3?"), tools=[ADD]))
        assert status == 200
        message = first["choices"][0]["message"]
        assert first["object"] == "chat.completion" and message["content"] == "I add."
        assert first["choices"][0]["finish_reason"] == "tool_calls"
        (call,) = message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"a": 2, "b": 3}
        result = {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "5"}]}
        status, last = await served.post(chat(user("2+3?"), message, result, tools=[ADD]))
        assert (status, last["choices"][0]["message"]["content"]) == (200, "It is 5.")
        assert last["choices"][0]["finish_reason"] == "stop"
        assert last["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"]
        assert len(served.trajectory.sequences) == 1
        first_call, second_call = served.engine.calls
        before = [*first_call.consumed, *first_call.completion.tokens]
        assert list(second_call.consumed[: len(before)]) == before


async def test_chat_streams() -> None:
    async with serving(["I add." + CALL]) as served:
        body = chat(user("2+3?"), tools=[ADD], stream_options={"include_usage": True})
        *chunks, usage, done = await stream(served, "chat/completions", body)
        assert done == "[DONE]" and usage["usage"]["completion_tokens"] > 0
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("content") or "" for delta in deltas) == "I add."
        pieces = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert pieces[0]["function"]["name"] == "add"
        assert json.loads("".join(piece["function"]["arguments"] for piece in pieces)) == {
            "a": 2,
            "b": 3,
        }
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_responses() -> None:
    tool = {"type": "function", **ADD["function"]}
    async with serving(["<think>hm</think>I add." + CALL, "It is 5."]) as served:
        body = {"model": "policy", "instructions": "Be brief.", "input": "2+3?", "tools": [tool]}
        status, first = await served.post(body, "responses")
        assert (status, first["status"]) == (200, "completed")
        reasoning, message, call = first["output"]
        assert (reasoning["type"], message["content"][0]["text"]) == ("reasoning", "I add.")
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "5"}
        given = [user("2+3?"), reasoning, message, call, output]
        status, last = await served.post({**body, "input": given}, "responses")
        assert (status, last["output"][0]["content"][0]["text"]) == (200, "It is 5.")
        assert len(served.trajectory.sequences) == 1


async def test_responses_stream() -> None:
    tool = {"type": "function", **ADD["function"]}
    async with serving(["I add." + CALL]) as served:
        events = await stream(served, "responses", {"model": "m", "input": "2+3?", "tools": [tool]})
        kinds = [event["type"] for event in events]
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        text = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
        assert "".join(text) == "I add."
        assert len(events[-1]["response"]["output"]) == 2


async def test_anthropic_messages() -> None:
    tool = {"name": "add", "input_schema": ADD["function"]["parameters"]}
    async with serving(["I add." + CALL, "It is 5."]) as served:
        body = {"model": "policy", "max_tokens": 99, "system": "Be brief.", "tools": [tool]}
        status, first = await served.post({**body, "messages": [user("2+3?")]}, "messages")
        assert (status, first["stop_reason"]) == (200, "tool_use")
        text, use = first["content"]
        assert (text["text"], use["input"]) == ("I add.", {"a": 2, "b": 3})
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "5"}
        messages = [
            user("2+3?"),
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": [result]},
        ]
        status, last = await served.post({**body, "messages": messages}, "messages")
        assert (status, last["content"][0]["text"]) == (200, "It is 5.")
        assert last["stop_reason"] == "end_turn"
        assert len(served.trajectory.sequences) == 1
        status, counted = await served.post({**body, "messages": messages}, "messages/count_tokens")
        assert counted["input_tokens"] == len(served.engine.calls[1].consumed)


async def test_anthropic_streams() -> None:
    tool = {"name": "add", "input_schema": ADD["function"]["parameters"]}
    async with serving(["I add." + CALL]) as served:
        body = {"model": "m", "max_tokens": 99, "messages": [user("2+3?")], "tools": [tool]}
        events = await stream(served, "messages", body)
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        assert "".join(delta.get("text", "") for delta in deltas) == "I add."
        assert json.loads("".join(delta.get("partial_json", "") for delta in deltas)) == {"a": 2, "b": 3}
        assert [event["type"] for event in events][-2:] == ["message_delta", "message_stop"]


async def test_the_same_conversation_by_all_three_apis_is_one_sequence() -> None:
    async with serving(["one", "two", "three"]) as served:
        await served.post(chat(user("a")))
        said = [user("a"), {"role": "assistant", "content": "one"}, user("b")]
        await served.post({"model": "m", "input": said}, "responses")
        said += [{"role": "assistant", "content": [{"type": "text", "text": "two"}]}, user("c")]
        status, last = await served.post({"model": "m", "max_tokens": 9, "messages": said}, "messages")
        assert (status, last["content"][0]["text"]) == (200, "three")
        assert len(served.trajectory.sequences) == 1


async def test_messages_that_come_again_are_the_same_objects_and_only_those() -> None:
    def call(value: Any) -> dict[str, Any]:
        function = {"name": "add", "arguments": json.dumps({"a": value})}
        return {
            "role": "assistant",
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        }

    def use(value: Any) -> dict[str, Any]:
        return {
            "role": "assistant",
            "content": [{"type": "tool_use", "name": "add", "input": {"a": value}}],
        }

    def read(dialect: Dialect, *messages: Any) -> tuple[Message, ...]:
        return dialect.parse({"model": "m", "max_tokens": 9, "messages": list(messages)}).messages

    for dialect, made in ((CHAT, call), (ANTHROPIC, use)):
        first, again = read(dialect, user("a"), made(1)), read(dialect, user("a"), made(1), user("b"))
        assert all(one is other for one, other in zip(first, again, strict=False))
        for other in (True, 1.0, "1"):
            (message,) = read(dialect, made(other))
            value = message.tool_calls[0].arguments["a"]
            assert (type(value), value) == (type(other), other)
    assert read(CHAT, user("a"))[0].role == "user" and read(CHAT, {"role": "system", "content": "a"})


async def test_the_same_words_mean_the_newest_reply() -> None:
    """Two samples of one conversation say the same: it goes on from the second."""
    async with serving(["same", "x", "same", "y"]) as served:
        said = [user("a"), {"role": "assistant", "content": "same"}, user("b")]
        await served.post(chat(user("a")))
        await served.post(chat(*said))
        await served.post(chat(user("a")))
        status, _ = await served.post(chat(*said, {"role": "assistant", "content": "x"}, user("c")))
        assert status == 200 and served.session.tree.counts["restarts"] == 0
        first, _, second, last = served.engine.calls
        assert first.completion.tokens == second.completion.tokens
        assert len(served.trajectory.actions) == 4
        shown = list(second.consumed) + second.completion.tokens
        assert list(last.consumed[: len(shown)]) == shown


async def test_models_and_unknown_paths() -> None:
    async with serving([], models={"policy": "trained", "critic": "frozen"}) as served:
        headers = {"Authorization": f"Bearer {served.session.key}"}
        async with served.http.get(f"{served.address}/v1/models", headers=headers) as answer:
            assert [one["id"] for one in (await answer.json())["data"]] == ["policy", "critic"]
        async with served.http.get(f"{served.address}/v1/models/nobody", headers=headers) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (404, "model_not_found")
        status, body = await served.post({}, "embeddings")
        assert status == 404 and "/v1/chat/completions" in body["error"]["message"]
        async with served.http.get(f"{served.address}/healthz") as answer:
            assert (await answer.json())["status"] == "ok"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n": 2}, "'n' must be 1"),
        ({"top_p": 0.9}, "another distribution"),
        ({"top_k": 5}, "another distribution"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"presence_penalty": 0.5}, "another distribution"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": []}, "at least one"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
        ({"messages": "hello"}, "list of objects"),
        ({"model": None}, "'model'"),
        ({"tools": [{"type": "function"}]}, "no 'function'"),
        ({"temperature": "hot"}, "must be a number"),
        ({"max_tokens": 0}, "above 0"),
        ({"stop": [1]}, "'stop'"),
    ],
)
async def test_what_cannot_be_served_is_refused_with_the_reason(change: Any, said: str) -> None:
    async with serving(["fine"]) as served:
        status, body = await served.post({**chat(user("hello")), **change})
        assert status == 400 and said in body["error"]["message"], body
        assert body["error"]["type"] == "invalid_request_error"
        assert not served.engine.calls
        # top_p = 1 and the like change nothing, and are no reason to refuse
        status, _ = await served.post(chat(user("hello"), top_p=1, n=1, logit_bias={}, temperature=0.3))
        assert status == 200 and served.session.counts["temperature_overridden"] == 1


async def test_images_are_refused_in_each_api() -> None:
    async with serving([]) as served:
        url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        status, body = await served.post(chat({"role": "user", "content": [url]}))
        assert status == 400 and body["error"]["code"] == "no_images"
        item = {
            "role": "user",
            "content": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}],
        }
        status, body = await served.post({"model": "m", "input": [item]}, "responses")
        assert status == 400 and "text only" in body["error"]["message"]
        block = {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"},
        }
        sent = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": [block]}]}
        status, body = await served.post(sent, "messages")
        assert status == 400 and body["type"] == "error"
        assert body["error"]["type"] == "invalid_request_error"


async def test_bodies_that_are_not_json() -> None:
    async with serving([]) as served:
        headers = {"Authorization": f"Bearer {served.session.key}", "Content-Type": "application/json"}
        url = f"{served.address}/v1/chat/completions"
        for data in (b"{", b"[]", b"[" * 100_000, b"\xff"):
            async with served.http.post(url, data=data, headers=headers) as answer:
                assert answer.status == 400 and "error" in await answer.json()
        async with served.http.post(
            url, data=b"{}", headers={**headers, "Content-Type": "text/plain"}
        ) as a:
            assert a.status == 415


# Keys


async def test_a_key_is_an_episode_and_dies_with_it() -> None:
    async with serving(["one"]) as served:
        status, body = await served.post(chat(user("a")), key="sk-wrong")
        assert (status, body["error"]["type"]) == (401, "authentication_error")
        sent = {"x-api-key": served.session.key}
        url = f"{served.address}/v1/messages"
        message = {"model": "m", "max_tokens": 9, "messages": [user("a")]}
        async with served.http.post(url, json=message, headers=sent) as answer:
            assert answer.status == 200
        await served.service.end(served.session)
        status, body = await served.post(chat(user("b")))
        assert (status, body["error"]["code"]) == (409, "episode_ended")


async def test_requests_in_flight_get_a_409_when_their_episode_ends() -> None:
    async with serving(["one"], seconds=60) as served:
        waiting = asyncio.create_task(served.post(chat(user("a"))))
        await until(lambda: served.engine.in_flight == 1)
        await served.service.end(served.session)
        status, body = await waiting
        assert (status, body["error"]["code"]) == (409, "episode_ended")
        assert not served.trajectory.actions
        assert served.trajectory.counts["model_server/unrecorded"] == 1


async def test_a_used_up_budget_is_said_and_remembered() -> None:
    async with serving(["one", "two"], turns=1) as served:
        await served.post(chat(user("a")))
        status, body = await served.post(chat(user("b")))
        assert (status, body["error"]["code"]) == (400, "max_turns")
        assert served.session.stop is StopReason.MAX_TURNS


# Retries and disconnects


async def test_a_marked_retry_gets_the_same_reply() -> None:
    async with serving(["one", "two", "three"]) as served:
        first = await served.post(chat(user("a")))
        again = await served.post(chat(user("a")), x_stainless_retry_count="1")
        assert first == again and len(served.engine.calls) == 1
        other = await served.post(chat(user("a")))  # unmarked: another sample
        assert other[1]["choices"][0]["message"]["content"] == "two"
        assert served.session.tree.counts["branches"] == 1
        assert served.session.counts["retries"] == 1


async def test_a_retry_joins_the_request_in_flight() -> None:
    async with serving(["one", "two"]) as served:
        await served.engine.pause()
        first = asyncio.create_task(served.post(chat(user("a"))))
        await until(lambda: served.engine.in_flight == 1)
        retry = asyncio.create_task(served.post(chat(user("a")), x_stainless_retry_count="2"))
        await until(lambda: served.session.counts["retries"] == 1)
        await served.engine.resume()
        assert await retry == await first and len(served.engine.calls) == 1
        assert len(served.trajectory.actions) == 1


async def test_a_client_that_gave_up_and_asks_again_joins_too() -> None:
    async with serving(["one", "two"]) as served:
        await leave_alone(served, chat(user("a")))
        again = asyncio.create_task(served.post(chat(user("a"))))
        await until(lambda: served.session.counts["retries"] == 1)
        await served.engine.resume()
        _, body = await again
        assert body["choices"][0]["message"]["content"] == "one"
        assert len(served.engine.calls) == 1 and len(served.trajectory.actions) == 1


async def test_a_reply_that_nobody_took_is_not_recorded() -> None:
    async with serving(["one", "two"]) as served:
        await leave_alone(served, chat(user("a")))
        await served.engine.resume()
        await until(lambda: len(served.engine.calls) == 1)
        await served.post(chat(user("b")))
        await served.service.end(served.session)
        assert len(served.trajectory.actions) == 1
        assert served.trajectory.counts["model_server/unrecorded"] == 1


async def test_parallel_requests_each_get_a_reply_of_their_own() -> None:
    async with serving([f"reply {n}" for n in range(8)]) as served:
        await served.engine.pause()
        same = [served.post(chat(user("a"))) for _ in range(4)]
        other = [served.post(chat(user(f"question {n}"))) for n in range(4)]
        waiting = asyncio.gather(*same, *other)
        await until(lambda: served.engine.in_flight == 8)
        await served.engine.resume()
        found = await waiting
        assert len({body["choices"][0]["message"]["content"] for _, body in found}) == 8
        assert len(served.trajectory.actions) == 8
        assert served.session.tree.counts == {
            "requests": 8,
            "conversations": 5,
            "branches": 3,
            "restarts": 0,
        }


async def test_a_paused_engine_holds_connections() -> None:
    async with serving(["one"]) as served:
        await served.engine.pause()
        waiting = asyncio.create_task(served.post(chat(user("a"))))
        await until(lambda: served.engine.in_flight == 1)
        assert not waiting.done()
        await served.engine.update_weights()
        await served.engine.resume()
        status, _ = await waiting
        assert status == 200


async def test_what_the_engine_fails_at_is_a_500_and_a_retry_samples_again() -> None:
    async with serving(["one"]) as served:
        served.engine._failures[0] = EngineError("gone")
        status, body = await served.post(chat(user("a")))
        assert (status, body["error"]["type"]) == (500, "server_error")
        assert isinstance(served.session.failure, EngineError)
        status, _ = await served.post(chat(user("a")), x_stainless_retry_count="1")
        assert status == 200 and served.session.failure is None


# Rewards


async def test_rewards_by_call_and_by_header() -> None:
    async with serving(["one", "two", "three"]) as served:
        _, first = await served.post(chat(user("a")))
        said = [user("a"), first["choices"][0]["message"], user("b")]
        await served.post(chat(*said), x_ludus_reward="0.25")
        await served.post({"reward": 9.0}, "reward")
        await served.post({"reward": 1.0, "answer": "two"}, "reward")  # replaces
        status, _ = await served.post({"reward": 0.5, "completion": first["id"]}, "reward")
        assert status == 200
        assert (await served.post({"reward": 1, "completion": "chatcmpl-no"}, "reward"))[0] == 404
        for wrong in ({"reward": float("inf")}, {"reward": "1"}, {}):
            assert (await served.post(wrong, "reward"))[0] == 400
        assert (await served.post(chat(user("new")), x_ludus_reward="1"))[0] == 400
        assert served.session.answer == "two"
        await served.service.end(served.session)
        assert [action.reward for action in served.trajectory.actions] == [0.5, 1.0]


@pytest.mark.parametrize("value", [1e300, -1e300, 1e7, 10**400, float("nan"), True, "many", [1]])
async def test_a_reward_is_a_number_that_can_be_trained_on(value: Any) -> None:
    async with serving(["one", "two"]) as served:
        _, first = await served.post(chat(user("a")))
        for more in ({}, {"completion": first["id"]}):
            status, said = await served.post({"reward": value, **more}, "reward")
            why = "NaN is not" if value != value else "between -1,000,000 and 1,000,000"
            assert status == 400 and why in said["error"]["message"]
        said = [user("a"), first["choices"][0]["message"], user("b")]
        assert (await served.post(chat(*said), x_ludus_reward=str(value)[:50]))[0] == 400
        await served.service.end(served.session)
        assert [action.reward for action in served.trajectory.actions] == [None]


async def test_an_episode_may_take_no_rewards_of_its_client() -> None:
    async with serving(["one", "two"]) as served:
        served.session.takes_rewards = False
        _, first = await served.post(chat(user("a")))
        said = [user("a"), first["choices"][0]["message"], user("b")]
        assert (await served.post(chat(*said), x_ludus_reward="0.25"))[0] == 403
        assert (await served.post({"reward": 1}, "reward"))[0] == 403
        assert (await served.post({"answer": "one"}, "reward"))[0] == 200
        await served.service.end(served.session)
        assert [action.reward for action in served.trajectory.actions] == [None]
        assert served.session.answer == "one"


async def test_no_reward_is_none() -> None:
    async with serving(["one"]) as served:
        await served.post(chat(user("a")))
        await served.service.end(served.session)
        assert [action.reward for action in served.trajectory.actions] == [None]


# Several models


async def test_only_trained_models_are_recorded() -> None:
    async with (
        serving_checkpoint(["from afar"]) as (opponent, _),
        serving(
            ["mine", "frozen"],
            models={"policy": "trained", "critic": "frozen", "opponent": f"{opponent}/v1#tiny"},
        ) as served,
    ):
        said = []
        for model in ("policy", "critic", "opponent"):
            status, body = await served.post({**chat(user("a")), "model": model})
            assert status == 200
            said.append(body["choices"][0]["message"]["content"])
        assert said == ["mine", "frozen", "from afar"]
        status, body = await served.post({**chat(user("a")), "model": "nobody"})
        assert (status, body["error"]["code"]) == (404, "model_not_found")
        await served.service.end(served.session)
        assert len(served.trajectory.actions) == 1
        assert served.trajectory.counts["model_server/forwarded"] == 1
        assert not served.engine.sessions


# Serving a checkpoint


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_model_is_served_by_the_command(tmp_path: Path) -> None:
    """A real process and a real model: the same seed samples the same reply, by either OpenAI API."""
    fitted = fit_tokenizer(["hello there"] * 3, vocabulary=300)
    model = scratch_model(ScratchConfig(layers=1, width=32, vocabulary=300), fitted, seed=0)
    model.save_pretrained(tmp_path)
    fitted.save_pretrained(tmp_path)
    options = ("--name", "tiny", "--max-tokens", "8", "--device", "cpu", "--tokens-per-step", "16")
    token = "a-long-enough-token"
    process = ServerProcess(str(tmp_path), what="model", options=options, env={"LUDUS_TOKEN": token})
    try:
        body = chat(user("hello"), seed=3)
        status, first = asyncio.run(post(process.address, body, token=token))
        assert (status, first["usage"]["completion_tokens"]) == (200, 8)
        assert first["choices"][0]["finish_reason"] == "length"
        _, again = asyncio.run(post(process.address, body, token=token))
        assert again["choices"] == first["choices"]
        asked = {"model": "tiny", "input": "hello", "seed": 3}
        _, response = asyncio.run(post(process.address, asked, "responses", token=token))
        assert response["status"] == "incomplete"
        assert response["output"][0]["content"][0]["text"] == first["choices"][0]["message"]["content"]
        assert asyncio.run(post(process.address, body))[0] == 401
    finally:
        process.close()


async def post(
    address: str, body: Any, path: str = "chat/completions", token: str = ""
) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{address}/v1/{path}", json=body, headers=headers) as answer,
    ):
        return answer.status, await answer.json()


async def test_a_served_checkpoint_samples_as_the_client_asks() -> None:
    async with serving_checkpoint(["one two STOP three", "x", "y"]) as (address, engine):
        body = chat(user("a"), temperature=0.5, top_p=0.9, seed=7, max_tokens=99, stop=["STOP"])
        status, found = await post(address, body)
        assert (status, found["choices"][0]["message"]["content"]) == (200, "one two ")
        sampling = engine.calls[0].sampling
        assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.max_tokens) == (
            0.5,
            0.9,
            7,
            99,
        )
        _, found = await post(address, chat(user("a"), n=2))
        assert [choice["message"]["content"] for choice in found["choices"]] == ["x", "y"]
        assert (await post(address, {"reward": 1}, "reward"))[0] == 400


@pytest.mark.parametrize(
    ("path", "asked", "field"),
    [
        ("chat/completions", {"top_p": 2}, "top_p"),
        ("chat/completions", {"temperature": -1}, "temperature"),
        ("chat/completions", {"max_completion_tokens": 10**12}, "max_completion_tokens"),
        ("chat/completions", {"max_tokens": 10**12}, "max_tokens"),
        ("chat/completions", {"stop": ["x" * 100_000]}, "stop"),
        ("responses", {"max_output_tokens": 10**12}, "max_output_tokens"),
    ],
)
async def test_errors_about_sampling_name_their_field(path: str, asked: Any, field: str) -> None:
    async with serving_checkpoint([]) as (address, _):
        given = {"input": "a"} if path == "responses" else {"messages": [user("a")]}
        status, body = await post(address, {"model": "m", **given, **asked}, path)
        assert (status, body["error"]["param"]) == (400, field)


async def test_each_of_several_replies_takes_a_place() -> None:
    """Five replies at two places: others are not kept out longer than by five requests."""
    async with serving_checkpoint(lambda *_: "x", concurrency=2, queue=4) as (address, engine):
        await engine.pause()
        several = asyncio.create_task(post(address, chat(user("a"), n=5)))
        await until(lambda: engine.in_flight == 2)
        assert (await post(address, chat(user("c"), n=2)))[0] == 429
        one = asyncio.create_task(post(address, chat(user("b"))))
        status, body = await post(address, chat(user("c"), n=7))
        assert status == 400 and "'n' may be 6 at most" in body["error"]["message"]
        await engine.resume()
        status, found = await several
        assert status == 200 and len(found["choices"]) == 5 and (await one)[0] == 200
        assert engine.most_in_flight == 2 and len(engine.calls) == 6


class CountingBytes(ByteTokenizer):
    """Notes how much text it has encoded, and on which threads."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[str] = set()
        self.characters = 0

    def encode(self, text: str) -> list[int]:
        if len(text) > 1000:
            self.threads.add(threading.current_thread().name)
            self.characters += len(text)
        return super().encode(text)


async def test_what_cannot_fit_is_refused_before_it_is_encoded() -> None:
    tokenizer = CountingBytes()
    async with serving_checkpoint(["x"], tokenizer=tokenizer, max_context=500_000) as (address, _):
        for path in ("chat/completions", "messages/count_tokens"):
            status, body = await post(address, chat(user("ab " * 1_000_000), max_tokens=9), path)
            said = "the conversation has at least 3000000 tokens, and the model's limit is 500000"
            assert status == 400 and body["error"]["message"] == said, path
        assert tokenizer.characters == 0


async def test_a_long_conversation_is_encoded_beside_the_event_loop() -> None:
    tokenizer = CountingBytes()
    async with serving_checkpoint(["x"], tokenizer=tokenizer, max_context=500_000) as (address, _):
        assert (await post(address, chat(user("ab " * 20_000))))[0] == 200
        assert tokenizer.characters >= 60_000
        assert threading.current_thread().name not in tokenizer.threads


async def test_a_programs_request_that_cannot_fit_is_refused_before_it_is_encoded() -> None:
    tokenizer = CountingBytes()
    async with serving(["x"], tokenizer=tokenizer, tokens=4000) as served:
        status, body = await served.post(chat(user("ab " * 1_000_000)))
        assert status == 400 and "at least 3000000 tokens" in body["error"]["message"]
        assert "4000" in body["error"]["message"] and tokenizer.characters == 0


async def test_fields_that_would_be_ignored_are_refused() -> None:
    async with serving_checkpoint(["x"]) as (address, _):
        status, body = await post(address, chat(user("a"), logprobs=True))
        assert status == 400 and "'logprobs' is not supported" in body["error"]["message"]
        status, body = await post(address, chat(user("a"), stream="yes"))
        assert status == 400 and "'stream' must be true or false" in body["error"]["message"]
        assert (await post(address, chat(user("a"), logprobs=False, stream=None)))[0] == 200


@pytest.mark.parametrize(
    ("options", "stream", "said", "param"),
    [
        ({"include_usage": True}, False, "is for streams", "stream_options"),
        ({}, None, "is for streams", "stream_options"),
        ({"include_usage": "yes"}, True, "must be true or false", "stream_options.include_usage"),
        ({"include_usage": 1}, True, "must be true or false", "stream_options.include_usage"),
        ([], True, "must be an object", "stream_options"),
    ],
)
async def test_stream_options_are_checked(options: Any, stream: Any, said: str, param: str) -> None:
    async with serving_checkpoint(["x"]) as (address, _):
        status, body = await post(address, chat(user("a"), stream=stream, stream_options=options))
        assert status == 400 and said in body["error"]["message"]
        assert body["error"]["param"] == param
        assert (await post(address, chat(user("a"), stream_options=None)))[0] == 200


async def test_errors_about_a_conversation_name_its_field() -> None:
    async with serving_checkpoint(["x"], max_context=4000) as (address, _):
        for path, body, field in [
            ("chat/completions", chat(user("a" * 30_000)), "messages"),
            ("responses", {"model": "m", "input": "a" * 30_000}, "input"),
        ]:
            async with (
                aiohttp.ClientSession() as http,
                http.post(f"{address}/v1/{path}", json=body) as answer,
            ):
                assert answer.status == 400 and (await answer.json())["error"]["param"] == field


async def test_a_served_checkpoint_has_a_token_and_limits() -> None:
    token = "a-long-enough-token"
    async with serving_checkpoint(
        ["one", "two"], token=token, concurrency=1, queue=0, max_body_bytes=2000
    ) as (address, engine):
        assert (await post(address, chat(user("a"))))[0] == 401
        status, body = await post(address, chat(user("a" * 3000)), token=token)
        assert status == 413 and "2,000 bytes" in body["error"]["message"]
        await engine.pause()
        first = asyncio.create_task(post(address, chat(user("a")), token=token))
        await until(lambda: engine.in_flight == 1)
        status, body = await post(address, chat(user("b")), token=token)
        assert (status, body["error"]["type"]) == (429, "rate_limit_error")
        await engine.resume()
        assert (await first)[0] == 200
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as http:
            page = await (await http.get(f"{address}/metrics")).text()
        assert 'ludus_model_requests_total{api="chat",status="429"} 1.0' in page
    with pytest.raises(ConfigError, match="token"):
        async with serving_checkpoint([], host="0.0.0.0"):
            pass
