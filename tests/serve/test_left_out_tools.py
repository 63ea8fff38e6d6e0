"""Tools that a policy cannot call (hosted ones, and those without a schema) are left out, and that is said."""

from __future__ import annotations

import logging
from typing import Any

import aiohttp
import pytest
from model_parts import ADD, CALL, chat, serving, serving_checkpoint, user

from ludus.chat import api_fields

CODEX = [
    {
        "type": "function",
        "name": "add",
        "description": "Add.",
        "parameters": ADD["function"]["parameters"],
    },  # type: ignore[index]
    {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}},
    {"type": "namespace", "name": "mcp__x", "tools": [{"type": "function", "name": "y"}]},
    {"type": "web_search", "external_web_access": False},
    {"type": "local_shell"},
]
CLAUDE = [
    {"name": "add", "description": "Add.", "input_schema": ADD["function"]["parameters"]},  # type: ignore[index]
    {"type": "web_search_20250305", "name": "web_search"},
    {"type": "bash_20250124", "name": "bash\r\nEvil: yes"},
]
MESSAGES = {"messages": [user("2+3?")], "model": "m", "max_tokens": 99}
APIS: dict[str, tuple[str, Any, str]] = {
    "chat": (
        "chat/completions",
        chat(user("2+3?"), tools=[ADD, {"type": "custom", "custom": {"name": "grep"}}]),
        "custom",
    ),
    "responses": (
        "responses",
        {"model": "m", "input": "2+3?", "tools": CODEX},
        "custom:apply_patch, namespace:mcp__x, web_search, local_shell",
    ),
    "messages": (
        "messages",
        {**MESSAGES, "tools": CLAUDE},
        "web_search_20250305:web_search, bash_20250124:bash__Evil: yes",
    ),
}


async def post(address: str, path: str, body: Any) -> tuple[aiohttp.ClientResponse, str]:
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{address}/v1/{path}", json=body) as answer,
    ):
        return answer, await answer.text()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "named"), APIS.values(), ids=list(APIS))
async def test_what_cannot_be_called_is_left_out_and_named(
    path: str, body: Any, named: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    api_fields._noted.clear()
    async with serving_checkpoint([CALL, CALL]) as (address, engine):
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                answer, text = await post(address, path, {**body, "stream": stream})
                assert answer.status == 200 and "add" in text
                assert answer.headers["X-Ludus-Left-Out"] == named
        prompt = bytes(token for token in engine.calls[0].consumed if token < 256).decode()
        assert "add" in prompt
        for word in ("apply_patch", "mcp__x", "web_search", "local_shell", "bash", "grep"):
            assert word not in prompt
    warned = [one.getMessage() for one in caplog.records if "left out" in one.getMessage()]
    assert len(warned) == len(named.split(", "))  # once for each kind


async def test_a_request_with_functions_alone_has_no_such_header() -> None:
    async with serving_checkpoint(["fine"]) as (address, _):
        answer, _ = await post(address, "chat/completions", chat(user("a"), tools=[ADD]))
        assert answer.status == 200 and "X-Ludus-Left-Out" not in answer.headers


@pytest.mark.parametrize(
    ("path", "choice"),
    [
        ("chat/completions", {"type": "custom", "custom": {"name": "grep"}}),
        ("chat/completions", {"type": "function", "function": {"name": "grep"}}),
        ("responses", {"type": "web_search"}),
        ("responses", {"type": "custom", "name": "apply_patch"}),
        ("messages", {"type": "tool", "name": "web_search"}),
    ],
)
async def test_a_choice_that_forces_what_is_left_out_is_refused(path: str, choice: Any) -> None:
    body = next(one for where, one, _ in APIS.values() if where == path)
    async with serving_checkpoint(["fine"]) as (address, engine):
        answer, text = await post(address, path, {**body, "tool_choice": choice})
        assert answer.status == 400 and "tool_choice" in text and not engine.calls
        answer, _ = await post(address, path, {**body, "tool_choice": "auto"})
        assert answer.status == 200


async def test_a_call_cannot_be_required_where_nothing_can_be_called() -> None:
    async with serving_checkpoint(["fine"]) as (address, _):
        body = {"model": "m", "input": "a", "tools": [{"type": "web_search"}]}
        answer, text = await post(address, "responses", {**body, "tool_choice": "required"})
        assert answer.status == 400 and "tool_choice" in text
        assert (await post(address, "responses", body))[0].status == 200


async def test_episodes_leave_them_out_as_well() -> None:
    async with serving(["fine"]) as served:
        headers = {"Authorization": f"Bearer {served.session.key}"}
        body = {"model": "m", "input": "a", "tools": CODEX}
        url = f"{served.address}/v1/responses"
        async with served.http.post(url, json=body, headers=headers) as answer:
            assert answer.status == 200 and "web_search" in answer.headers["X-Ludus-Left-Out"]
            assert [one["name"] for one in (await answer.json())["tools"]] == ["add"]
