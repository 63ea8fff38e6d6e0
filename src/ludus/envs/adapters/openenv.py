"""Environments on OpenEnv servers, by their WebSocket protocol: `openenv:http://host:port`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from ludus.core.failures import Fault, ToolFault
from ludus.core.messages import Json, ToolContext, ToolResult, ToolSpec
from ludus.core.task import Task
from ludus.envs.adapters import CLOSE_SECONDS, as_reward, as_text, server_at
from ludus.envs.env import OVER, Env
from ludus.envs.tools import ForwardedTool
from ludus.envs.world import EnvAdapter
from ludus.tools import Tool

if TYPE_CHECKING:
    import aiohttp

_FULL_CLOSE = 1013
"""WebSocket's "try again later"."""


class OpenEnv(Env):
    """One session on an OpenEnv server (`openenv:http://host:port`), over its WebSocket.

    The tool `step` has the schema of the server's actions; of a server with MCP tools, the agent gets these.
    What a task gives (`envs = {"wordle": {"seed": 3}}`) goes to the server's reset.
    """

    def __init__(self, address: str, text: str | None = None, timeout: float = 300.0) -> None:
        """`text` is the field of an observation that the agent sees; its only text, or all of it as JSON, when
        left out. `timeout` are the seconds for one message; a pool's deadlines may be shorter."""
        self._server, self._text = server_at(address, timeout), text
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._tools: list[ToolSpec] | None = None
        self._is_mcp = self._done = False

    takes_text = False  # `step` takes what the server's actions are made of

    @staticmethod
    async def probe(
        address: str, seconds: float, text: str | None = None, timeout: float = 300.0
    ) -> None:
        """Refuse an address at which no such server answers within `seconds`."""
        await server_at(address, timeout).probe("/schema", seconds)

    async def reset(self, task: Task, **arguments: Any) -> str:
        self._done = False
        answer = await self._ask("reset", {"episode_id": task.id[:255], **arguments})
        return as_text(answer.get("observation"), self._text)

    async def tools(self) -> list[Tool]:
        if self._tools is None:
            self._tools = await self._find_tools()
        return [ForwardedTool(self, spec, partial(self._call, spec.name)) for spec in self._tools]

    async def _call(self, tool: str, arguments: Json, context: ToolContext) -> ToolResult:
        try:
            return await self.act(tool, arguments)
        except ToolFault as fault:
            return ToolResult(str(fault), fault=fault.fault)

    async def act(self, tool: str, arguments: Json) -> ToolResult:
        """One step: an action with these fields, or a call of one of the server's tools."""
        if self._done:
            return ToolResult(OVER, terminated=True)
        action = arguments
        if self._is_mcp:
            action = {"type": "call_tool", "tool_name": tool, "arguments": arguments}
        answer = await self._ask("step", action)
        self._done = bool(answer.get("done"))
        seen = answer.get("observation")
        if self._is_mcp and isinstance(seen, dict):
            seen = _mcp_result(tool, seen)
        reward = as_reward(answer.get("reward"), self._server, "/ws")
        return ToolResult(as_text(seen, self._text), reward=reward, terminated=self._done)

    async def state(self) -> Json:
        """The server's state of the session."""
        return await self._ask("state", None)

    async def close(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            with suppress(Exception):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await socket.send_str('{"type": "close"}')
                    await socket.close()

    async def _find_tools(self) -> list[ToolSpec]:
        schema = await self._server.json("GET", "/schema")
        action = schema.get("action") if isinstance(schema, dict) else None
        if not isinstance(action, dict):
            raise self._server.failure("/schema", f"no schema of actions: {schema!r:.200}")
        properties = {
            name: one for name, one in action.get("properties", {}).items() if name != "metadata"
        }
        listed = await self._mcp_tools() if not properties or "tool_name" in properties else []
        if listed:
            self._is_mcp = True
            return listed
        parameters = {**action, "properties": properties, "additionalProperties": False}
        for name in ("title", "description"):
            parameters.pop(name, None)
        described = str(action.get("description") or "Act in the environment.")
        return [ToolSpec("step", described, parameters)]

    async def _mcp_tools(self) -> list[ToolSpec]:
        request = {"jsonrpc": "2.0", "method": "tools/list", "params": {}, "id": 1}
        answer = await self._ask("mcp", request)
        listed = (answer.get("result") or {}).get("tools") or []
        try:
            return [
                ToolSpec(
                    one["name"],
                    one.get("description") or "",
                    one.get("inputSchema") or {},
                    one.get("outputSchema"),
                )
                for one in listed
            ]
        except (KeyError, TypeError) as error:
            raise self._server.failure("/ws", f"tools that cannot be read: {error!r}") from error

    async def _ask(self, kind: str, data: Json | None) -> Json:
        """One message and its answer. An error ends the session: the server's state is unknown."""
        server = self._server
        if self._socket is None:
            if kind in ("step", "state"):
                raise server.failure("/ws", "the session has ended")
            self._socket = await server.websocket("/ws")
        message = {"type": kind} if data is None else {"type": kind, "data": data}
        try:
            async with server.failures("/ws"):
                with suppress(
                    ConnectionError
                ):  # a server that refuses says so first, and may be gone already
                    await self._socket.send_str(json.dumps(message))
                received = await self._socket.receive()
        except BaseException:
            await self._drop()
            raise
        if not isinstance(received.data, str):
            await self._drop()
            if received.data == _FULL_CLOSE and kind in ("reset", "mcp"):
                raise server.full("/ws", f"it closes with {_FULL_CLOSE}: {received.extra!s:.200}")
            raise server.failure("/ws", f"the connection was closed ({received.data!r:.100})")
        answer = server.decoded("/ws", received.data)
        content = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(content, dict):
            await self._drop()
            raise server.failure("/ws", f"an answer of another form: {received.data[:200]}")
        if answer.get("type") == "error":
            await self._refused(kind, content)
        return content

    async def _refused(self, kind: str, content: Json) -> None:
        code, problem = content.get("code"), str(content.get("message"))
        if kind == "step" and code == "VALIDATION_ERROR":
            raise ToolFault(f"{problem}: {_explained(content.get('errors'))}", Fault.BAD_ARGUMENTS)
        if kind == "step" and code == "EXECUTION_ERROR":
            raise ToolFault(f"Error: {problem}")  # what the action led to
        await self._drop()
        if code == "CAPACITY_REACHED":
            most = content.get("max_sessions")
            raise self._server.full("/ws", f"{problem} (max_sessions: {most})")
        raise self._server.failure("/ws", f"{kind}: {code}: {problem}")

    async def _drop(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            with suppress(Exception):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await socket.close()


def _explained(errors: Any) -> str:
    if not isinstance(errors, Iterable):
        return ""
    found = [one for one in errors if isinstance(one, dict)]
    return "; ".join(f"{'.'.join(map(str, one.get('loc', ())))}: {one.get('msg')}" for one in found)


def _mcp_result(tool: str, seen: Json) -> Any:
    """What a call of an MCP tool shows; the model's mistakes are raised."""
    if (error := seen.get("error")) is not None:
        kind = error.get("error_type") if isinstance(error, dict) else None
        fault = Fault.BAD_ARGUMENTS if kind == "invalid_args" else Fault.TOOL_RAISED
        raise ToolFault(f"{tool}: {error['message'] if kind else as_text(error)}", fault)
    result = seen.get("result", seen)
    if isinstance(result, dict):
        if result.get("data") is not None:
            return result["data"]
        content = result.get("content")
        if isinstance(content, list):
            return "\n".join(str(one.get("text", "")) for one in content if isinstance(one, dict))
    return result


ADAPTER = EnvAdapter(
    "openenv:http://...",
    "One on an OpenEnv server.",
    env=OpenEnv,
    probe=OpenEnv.probe,
    extra="serve",
    packages=("aiohttp",),
)
