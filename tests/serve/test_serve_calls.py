"""Against a real server process: sessions, calls, batches, streams, and what the endpoints say."""

from __future__ import annotations

import asyncio
import gzip
import json
import secrets
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from server_process import ServerProcess, context, lines_of, raw_exchange, serving

from ludus.core import Boundary, Fault, InfraError, ToolCall, ToolContext, ToolSet
from ludus.tools import CombinedTools, LocalTools, Tool, tool
from ludus.tools.hosting import LocalHost
from ludus.tools.remote import RemoteTools
from ludus.tools.wire import BatchAnswer, ErrorAnswer, HealthBody, SessionBody, result_from_json


async def post(http: aiohttp.ClientSession, url: str, body: Any, **headers: str) -> tuple[int, Any]:
    async with http.post(url, json=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def opened(http: aiohttp.ClientSession, server: ServerProcess, **more: Any) -> str:
    session = secrets.token_hex(8)
    body = {"session": session, "episode": session, **more}
    status, _ = await post(http, f"{server.address}/v1/sessions", body)
    assert status == 201
    return session


async def test_a_remote_set_is_a_tool_set(server: ServerProcess) -> None:
    episode = context()
    async with RemoteTools(server.address) as tools:
        assert isinstance(tools, ToolSet)
        await tools.open(episode)
        specs = {spec.name: spec for spec in await tools.list(episode)}
        assert specs["add"].description == "Add two numbers."
        assert specs["add"].parameters["required"] == ["a", "b"]
        result = await tools.call(ToolCall("add", {"a": 1, "b": "2"}), episode)
        assert (result.content, result.fault) == ("3", None)
        await tools.close(episode)


async def test_results_arrive_as_they_were(server: ServerProcess) -> None:
    async with RemoteTools(server.address) as tools:
        episode = context()
        await tools.open(episode)
        end = await tools.call(ToolCall("finish"), episode)
        assert (end.content, end.reward, end.terminated) == ("the end", 0.5, True)
        odd = 'quotes " and \\ and \n and é and \U0001f600 and \x00 and </script>'
        assert (await tools.call(ToolCall("echo", {"text": odd}), episode)).content == odd
        told = json.loads((await tools.call(ToolCall("about"), episode)).content)
        assert told["task"] == "t1" and told["prompt"] == "what?" and told["target"] == "that"
        assert told["metadata"] == {"level": [1, 2]} and told["episode"] == episode.episode
        await tools.close(episode)


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        (ToolCall("ad", {}), Fault.UNKNOWN_TOOL),
        (ToolCall("x" * 5000, {}), Fault.UNKNOWN_TOOL),
        (ToolCall("add", {"a": 1}), Fault.BAD_ARGUMENTS),
        (ToolCall("add", {"a": 1, "b": float("nan")}), Fault.BAD_ARGUMENTS),
        (ToolCall("echo", {"text": "x" * 300_000}), Fault.BAD_ARGUMENTS),
        (ToolCall("raises", {"message": "bad idea"}), Fault.TOOL_RAISED),
        (ToolCall("too_slow"), Fault.TOOL_TIMEOUT),
        (ToolCall("echo", fault=Fault.MALFORMED_CALL, problem="no JSON"), Fault.MALFORMED_CALL),
    ],
    ids=lambda value: value.name[:10] if isinstance(value, ToolCall) else str(value),
)
async def test_the_models_faults_come_back_as_results(
    server: ServerProcess, call: ToolCall, fault: Fault
) -> None:
    async with RemoteTools(server.address) as tools:
        episode = context()
        result = await tools.call(call, episode)
        assert result.fault is fault and result.content
        await tools.close(episode)


async def test_deep_and_odd_arguments_are_the_models_fault_and_not_ours(server: ServerProcess) -> None:
    nested: Any = []
    for _ in range(5000):
        nested = [nested]
    async with RemoteTools(server.address) as tools:
        episode = context()
        assert (
            await tools.call(ToolCall("echo", {"text": nested}), episode)
        ).fault is Fault.BAD_ARGUMENTS
        result = await tools.call(ToolCall("echo", {"text": "\ud800"}), episode)
        assert (result.content, result.fault) == ("?", None)
        await tools.close(episode)


async def test_our_failures_raise_with_their_boundary_and_attempts(server: ServerProcess) -> None:
    async with RemoteTools(server.address) as tools:
        episode = context()
        with pytest.raises(InfraError, match="no sandbox left") as caught:
            await tools.call(ToolCall("broken"), episode)
        assert caught.value.boundary is Boundary.SANDBOX
        assert caught.value.attempts == 2 and not caught.value.retriable
        await tools.close(episode)


async def test_state_belongs_to_the_session_even_when_episodes_are_called_alike(
    server: ServerProcess,
) -> None:
    same = context()
    async with RemoteTools(server.address) as first, RemoteTools(server.address) as second:
        await first.call(ToolCall("remember", {"value": "a"}), same)
        mine = await second.call(ToolCall("remember", {"value": "b"}), same)
        again = await first.call(ToolCall("remember", {"value": "c"}), same)
        assert (mine.content, again.content) == ("b", "a,c")
        await first.close(same)
        await second.close(same)


async def test_only_the_wanted_tools(server: ServerProcess) -> None:
    async with RemoteTools(server.address, tools=["add", "echo"]) as tools:
        episode = context()
        await tools.open(episode)
        assert sorted(spec.name for spec in await tools.list(episode)) == ["add", "echo"]
        assert (await tools.call(ToolCall("who"), episode)).fault is Fault.UNKNOWN_TOOL
        await tools.close(episode)


async def test_local_and_remote_tools_side_by_side(server: ServerProcess) -> None:
    def here() -> str:
        """A local tool."""
        return "here"

    async with RemoteTools(server.address, tools=["echo"]) as remote:
        both = CombinedTools([LocalTools([here]), remote])
        episode = context()
        await both.open(episode)
        assert (await both.call(ToolCall("here"), episode)).content == "here"
        assert (await both.call(ToolCall("echo", {"text": "there"}), episode)).content == "there"
        await both.close(episode)


async def test_a_long_result_is_streamed_and_whole(server: ServerProcess) -> None:
    chars = 10_000_000
    async with RemoteTools(server.address) as tools:
        episode = context()
        result = await tools.call(ToolCall("big", {"chars": chars}), episode)
        assert result.content == ("0123456789abcdé\n" * (chars // 16 + 1))[:chars]
        await tools.close(episode)


async def test_a_stream_is_lines_of_json_with_a_head_and_an_end(
    server: ServerProcess, http: aiohttp.ClientSession
) -> None:
    body = {"key": "k1", "name": "big", "arguments": {"chars": 40_000}}
    url = f"{server.address}/v1/sessions/{await opened(http, server)}/calls"
    async with http.post(url, json=body, headers={"Accept": "application/x-ndjson"}) as answer:
        assert answer.content_type == "application/x-ndjson"
        lines = [json.loads(line) for line in (await answer.read()).splitlines()]
    assert lines[0]["result"]["fault"] is None and lines[-1] == {"end": 40_000}
    assert len(lines) > 3 and len("".join(line["text"] for line in lines[1:-1])) == 40_000


async def test_a_batch_has_an_outcome_for_each_call(
    server: ServerProcess, http: aiohttp.ClientSession
) -> None:
    session = await opened(http, server)
    calls = [
        {"key": "b1", "name": "add", "arguments": {"a": 1, "b": 2}},
        {"key": "b2", "name": "remember", "arguments": {"value": "x"}, "session": session},
        {"key": "b3", "name": "broken"},
        {"key": "b4", "name": "add", "session": "nowhere"},
        {"key": "b5", "name": "nothing"},
    ]
    status, raw = await post(http, f"{server.address}/v1/batch", {"calls": calls})
    outcomes = BatchAnswer.model_validate(raw).outcomes
    assert status == 200 and [one.key for one in outcomes] == ["b1", "b2", "b3", "b4", "b5"]
    contents = [one.result.content if one.result else None for one in outcomes]
    assert contents[:4] == ["3", "x", None, None] and outcomes[4].result is not None
    assert outcomes[2].error and outcomes[2].error.kind == "failed" and outcomes[2].error.started
    assert outcomes[3].error and outcomes[3].error.kind == "session_unknown"
    stream = {"Accept": "application/x-ndjson"}
    naps = [{"key": f"n{i}", "name": "nap", "arguments": {"seconds": i / 4}} for i in (2, 0, 1)]
    async with http.post(f"{server.address}/v1/batch", json={"calls": naps}, headers=stream) as answer:
        order = [json.loads(line)["key"] for line in (await answer.read()).splitlines()]
    assert order == ["n0", "n1", "n2"]


async def test_the_same_key_runs_once(
    server: ServerProcess, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    file = tmp_path / "paid"
    url = f"{server.address}/v1/sessions/{await opened(http, server)}/calls"
    call = {"key": "once", "name": "pay", "arguments": {"file": str(file), "seconds": 0.2}}
    answers = await asyncio.gather(*(post(http, url, call) for _ in range(5)))
    answers.append(await post(http, url, call))
    assert all(answer == answers[0] for answer in answers) and answers[0][0] == 200
    assert len(lines_of(file)) == 1
    status, raw = await post(http, url, {**call, "name": "look"})
    assert (status, raw["error"]["kind"]) == (409, "key_reused")


async def test_a_retry_that_another_process_may_have_run_is_refused_unless_it_may_be_repeated(
    server: ServerProcess, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    url = f"{server.address}/v1/sessions/{await opened(http, server)}/calls"
    arguments = {"file": str(tmp_path / "runs")}
    elsewhere = {"retry": {"instance": "another", "age_ms": 10}}
    status, raw = await post(
        http, url, {"key": "r1", "name": "pay", "arguments": arguments, **elsewhere}
    )
    assert (status, raw["error"]["kind"]) == (409, "unknown_outcome")
    assert lines_of(tmp_path / "runs") == []
    status, _ = await post(http, url, {"key": "r2", "name": "look", "arguments": arguments, **elsewhere})
    assert status == 200
    async with http.get(f"{server.address}/healthz") as answer:
        here = {"retry": {"instance": (await answer.json())["instance"], "age_ms": 10}}
    status, _ = await post(http, url, {"key": "r3", "name": "pay", "arguments": arguments, **here})
    assert status == 200 and len(lines_of(tmp_path / "runs")) == 2


async def test_sessions_live_and_end(server: ServerProcess, http: aiohttp.ClientSession) -> None:
    session = await opened(http, server, tools=["add"])
    url = f"{server.address}/v1/sessions"
    body = {"session": session, "episode": session}
    status, raw = await post(http, url, body)
    assert status == 200 and SessionBody.model_validate(raw).session == session
    status, raw = await post(http, url, {**body, "episode": "another"})
    assert (status, raw["error"]["kind"]) == (409, "key_reused")
    async with http.get(f"{url}/{session}") as answer:
        assert [tool["name"] for tool in (await answer.json())["tools"]] == ["add"]
    for ended in (True, False):
        async with http.delete(f"{url}/{session}") as answer:
            assert await answer.json() == {"ended": ended}
    async with http.get(f"{url}/{session}") as answer:
        assert (answer.status, (await answer.json())["error"]["kind"]) == (404, "session_unknown")


async def test_pages_for_machines_and_people(server: ServerProcess, http: aiohttp.ClientSession) -> None:
    await post(http, f"{server.address}/v1/calls", {"key": "m1", "name": "add"})
    async with http.get(f"{server.address}/metrics") as answer:
        text = await answer.text()
    assert 'ludus_tools_calls_total{outcome="bad_arguments",tool="add"}' in text
    assert "ludus_tools_waiting 0.0" in text and "ludus_tools_queue_seconds_bucket" in text
    for path in ("/healthz", "/readyz"):
        async with http.get(server.address + path) as answer:
            assert HealthBody.model_validate(await answer.json()).status == "ok"
    async with http.get(f"{server.address}/docs") as answer:
        page = await answer.text()
    assert "/v1/sessions/{session}/calls" in page and "<script" not in page and "http://" not in page
    async with http.get(f"{server.address}/nowhere") as answer:
        assert ErrorAnswer.model_validate(await answer.json()).error.kind == "not_found"
    async with http.put(f"{server.address}/v1/calls") as answer:
        assert answer.status == 405 and answer.headers["Allow"] == "POST"


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "bad_request"),
        (b"{", "bad_request"),
        (b"[]", "bad_request"),
        (b"\xff\xfe", "bad_request"),
        (b'{"key":"k","name":"add","surprise":1}', "bad_request"),
        (b'{"key":"k/../","name":"add"}', "bad_request"),
        (
            b'{"key":"k","name":"add","arguments":' + b'{"a":' * 3000 + b"1" + b"}" * 3000 + b"}",
            "bad_request",
        ),
        (b'{"key":"k","name":"add","arguments":{"a":' + b"9" * 9000 + b',"b":1}}', ""),
        (b'{"key":"k2","name":"' + b"x" * 250_000 + b'"}', "too_large"),
        *(
            (b'{"key":"k3","name":"add","arguments":{"a":' + value + b',"b":1}}', "bad_request")
            for value in (b"NaN", b"-Infinity", b"1e999", b'"\\ud800"', b'{"c": [NaN]}')
        ),
        ('{"key":"k4","name":"add"}'.encode("utf-16"), "bad_request"),
    ],
    ids=[
        "empty",
        "half",
        "list",
        "bytes",
        "extra",
        "key",
        "deep",
        "digits",
        "huge",
        "NaN",
        "Infinity",
        "1e999",
        "surrogate",
        "NaN below",
        "utf-16",
    ],
)
async def test_bodies_that_are_wrong(
    server: ServerProcess, http: aiohttp.ClientSession, data: bytes, kind: str
) -> None:
    json_type = {"Content-Type": "application/json"}
    async with http.post(f"{server.address}/v1/calls", data=data, headers=json_type) as answer:
        raw = await answer.json()
        if kind:
            assert ErrorAnswer.model_validate(raw).error.kind == kind and not raw["error"]["started"]
        else:
            assert answer.status in (200, 400)
    async with http.get(f"{server.address}/readyz") as answer:
        assert answer.status == 200


@pytest.mark.parametrize("charset", ["punycode", "utf-16", "latin-1", "no-such-thing"])
async def test_bodies_are_utf_8(
    server: ServerProcess, http: aiohttp.ClientSession, charset: str
) -> None:
    url, data = f"{server.address}/v1/calls", b'{"key":"k","name":"add","arguments":{"a":1,"b":1}}'
    headers = {"Content-Type": f"application/json; charset={charset}"}
    async with http.post(url, data=data, headers=headers) as answer:
        error = ErrorAnswer.model_validate(await answer.json()).error
        assert (answer.status, error.kind) == (415, "unsupported_type") and "UTF-8" in error.message
    headers = {"Content-Type": "application/json; charset=UTF-8"}
    async with http.post(url, data=data, headers=headers) as answer:
        assert answer.status == 200


@pytest.mark.parametrize(
    ("task", "place"),
    [
        ({"messages": [{"role": "judge", "content": "x"}]}, "task.messages.0.role: "),
        ({"messages": [{"role": "user", "content": "x", "surprise": 1}]}, "task.messages.0.surprise: "),
        ({"id": 3}, "task.id: "),
        ({"envs": {"safe": 3}}, "task.envs.safe: "),
        ({"target": 5}, ""),
    ],
)
async def test_a_task_that_is_wrong_is_named_by_its_field(
    server: ServerProcess, http: aiohttp.ClientSession, task: Any, place: str
) -> None:
    body = {"session": secrets.token_hex(8), "episode": "e", "task": task}
    status, raw = await post(http, f"{server.address}/v1/sessions", body)
    assert status == (400 if place else 201)
    assert not place or raw["error"]["message"].startswith(place)


@pytest.mark.parametrize("path", ["/v1/calls", "/v1/nowhere"])
@pytest.mark.parametrize("packing", ["gzip", "deflate", "br", "zstd", "none"])
async def test_packed_bodies_are_refused_unread(
    server: ServerProcess, http: aiohttp.ClientSession, packing: str, path: str
) -> None:
    """Neither a small body that unpacks into a huge one, nor one that cannot be unpacked, is work for us."""
    bomb = gzip.compress(b'{"key":"bomb","name":"' + b"x" * 5_000_000 + b'"}')
    headers = {"Content-Type": "application/json", "Content-Encoding": packing}
    for body in (bomb, b"not packed at all"):
        async with http.post(f"{server.address}{path}", data=body, headers=headers) as answer:
            kind = (await answer.json())["error"]["kind"]
        if path == "/v1/calls":
            assert (answer.status, kind) == (415, "unsupported_type")
        else:
            assert (answer.status, kind) == (404, "not_found")


async def test_what_a_web_page_could_send_is_refused(
    server: ServerProcess, http: aiohttp.ClientSession
) -> None:
    call = json.dumps({"key": "csrf", "name": "add"})
    headers = {"Content-Type": "text/plain"}
    async with http.post(f"{server.address}/v1/calls", data=call, headers=headers) as answer:
        assert answer.status == 415
    headers = {"Content-Type": "application/json", "Host": "evil.example"}
    async with http.post(f"{server.address}/v1/calls", data=call, headers=headers) as answer:
        assert answer.status == 403


async def test_slow_clients_are_cut_off(server: ServerProcess) -> None:
    half = b"POST /v1/calls HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    body, headers = await asyncio.gather(
        asyncio.to_thread(raw_exchange, server.port, half + b"Content-Length: 100\r\n\r\n{"),
        asyncio.to_thread(raw_exchange, server.port, half),
    )
    assert b"408" in body.split(b"\r\n")[0] and b"slow_client" in body
    assert headers == b""  # closed without an answer, as it never finished asking


async def test_answers_fit_their_models(server: ServerProcess, http: aiohttp.ClientSession) -> None:
    call = {"key": "model", "name": "finish"}
    status, raw = await post(http, f"{server.address}/v1/calls", call)
    assert status == 200 and result_from_json(raw).reward == 0.5
    async with http.get(f"{server.address}/openapi.json") as answer:
        promised = (await answer.json())["components"]["schemas"]["ToolResult"]
    assert set(promised.get("required", ())) <= set(raw) <= set(promised["properties"])
    status, raw = await post(
        http, f"{server.address}/v1/calls", {**call, "key": "b"}, **{"Ludus-Deadline-Ms": "x"}
    )
    assert status == 400 and ErrorAnswer.model_validate(raw)


async def test_bodies_that_cannot_be_unpacked_are_not_in_the_log(http: aiohttp.ClientSession) -> None:
    with serving("add", options=("--verbose",)) as server:
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        for path in ("/v1/calls", "/v1/nowhere", "/healthz"):
            async with http.post(server.address + path, data=b"not packed", headers=headers) as answer:
                assert answer.status in (404, 405, 415)
        assert {line["level"] for line in server.logs()} == {"debug"}


async def test_a_tool_says_whether_it_has_state() -> None:
    """Left out, one that takes the context or an environment has."""

    def keep(value: str, context: ToolContext) -> str:
        """Keep it."""
        return value

    class Looked(Tool):
        """Look."""

        stateful = False

        def run(self, context: ToolContext) -> str:
            return context.episode

    def say(value: str) -> str:
        """Say it."""
        return value

    found = []
    for one in (tool(keep), tool(stateful=False)(keep), Looked(), tool(say), tool(stateful=True)(say)):
        host = LocalHost(partial(LocalTools, [one]))
        found.append((await host.start())[0].stateful)
        await host.stop()
    assert found == [True, False, False, False, True]
