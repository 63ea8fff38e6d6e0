"""Servers that speak AgentGym's and OpenEnv's protocols, as read from their code, in this event loop.

As a program, `foreign_servers.py KIND MOST`, one of them that has room for so many sessions.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


def model(**fields: str) -> dict[str, Any]:
    return {"properties": {name: {"type": kind} for name, kind in fields.items()}, "type": "object"}


def openapi(bodies: dict[str, dict[str, Any] | None]) -> dict[str, Any]:
    """As FastAPI writes it."""
    paths: dict[str, Any] = {}
    for number, (path, body) in enumerate(bodies.items()):
        operation: dict[str, Any] = {"responses": {}}
        if body is not None:
            schema = {"$ref": f"#/components/schemas/Body{number}"}
            operation["requestBody"] = {"content": {"application/json": {"schema": schema}}}
        paths[path] = {"get" if body is None else "post": operation}
    schemas = {f"Body{n}": body for n, body in enumerate(bodies.values()) if body is not None}
    return {"openapi": "3.1.0", "paths": paths, "components": {"schemas": schemas}}


class AgentGym:
    """Count up to the task's number by saying "on". `dialect` is that of TextCraft or that of WebShop."""

    def __init__(self, dialect: str, most: int = 1000) -> None:
        self.most, self.refused = most, 0
        self.is_textcraft = dialect == "textcraft"
        self.counts: dict[int, tuple[int, int]] = {}
        self.closed: list[int] = []
        self.made = 0
        self.odd: Any = None
        """Answered to the next step instead."""

    def document(self) -> dict[str, Any]:
        if self.is_textcraft:
            return openapi({
                "/": None, "/create": model(commands="string", goal="string"),
                "/step": model(id="integer", action="string"), "/close": model(id="integer"),
                "/reset": model(id="integer", data_idx="integer"), "/observation": None,
            })  # fmt: skip
        return openapi({
            "/create": None, "/available_actions": None,
            "/step": model(env_idx="integer", action="string"),
            "/reset": model(env_idx="integer", session_id="integer"),
        })  # fmt: skip

    def app(self) -> web.Application:
        app = web.Application()

        async def document(request: web.Request) -> web.Response:
            return web.json_response(self.document())

        async def create(request: web.Request) -> web.Response:
            if self.made - len(self.closed) >= self.most:
                self.refused += 1
                return web.json_response({"error": f"Too many environments: {self.most}"})
            number, self.made = self.made, self.made + 1
            self.counts[number] = (0, 3)
            return web.json_response({"id": number, "observation": "?"} if self.is_textcraft else number)

        async def reset(request: web.Request) -> web.Response:
            body = await request.json()
            number = body["id"] if self.is_textcraft else body["env_idx"]
            goal = body["data_idx"] if self.is_textcraft else body["session_id"]
            if number not in self.counts:
                return web.json_response({"error": f"The id {number} is not valid."})
            self.counts[number] = (0, goal)
            seen = f"Goal: {goal}."
            return web.json_response({"observation": seen} if self.is_textcraft else [seen, None])

        async def step(request: web.Request) -> web.Response:
            body = await request.json()
            if self.odd is not None:
                odd, self.odd = self.odd, None
                if odd == "hang":
                    await asyncio.sleep(60)
                if isinstance(odd, int):
                    return web.Response(status=odd, text="oops")
                return web.Response(text=odd) if isinstance(odd, str) else web.json_response(odd)
            number = body["id"] if self.is_textcraft else body["env_idx"]
            if number not in self.counts:
                return web.json_response({"error": f"The id {number} is not valid."})
            count, goal = self.counts[number]
            if body["action"] == "raise":
                return web.json_response({"error": "list index out of range"})
            count += body["action"] == "on"
            self.counts[number] = (count, goal)
            done, reward = count >= goal, float(count >= goal)
            if self.is_textcraft:
                return web.json_response({"observation": str(count), "reward": reward, "done": done})
            answer = {"state": str(count), "reward": count / goal, "done": done, "info": None}
            return web.json_response(answer)

        async def actions(request: web.Request) -> web.Response:
            assert int(request.query["env_idx"]) in self.counts
            return web.json_response({"has_search_bar": True, "clickables": ["back"]})

        async def close(request: web.Request) -> web.Response:
            self.closed.append((await request.json())["id"])
            return web.json_response(True)

        app.router.add_get("/openapi.json", document)
        app.router.add_get("/available_actions", actions)
        for path, handler in (("create", create), ("reset", reset), ("step", step), ("close", close)):
            app.router.add_post(f"/{path}", handler)
        return app


class OpenEnvServer:
    """Guess a number; with `mcp`, write notes by a tool."""

    def __init__(self, mcp: bool = False, most: int = 1000) -> None:
        self.is_mcp, self.most, self.refused = mcp, most, 0
        self.open = 0
        self.odd: str | None = None

    def app(self) -> web.Application:
        app = web.Application()
        own = {"tool_name": {"type": "string"}} if self.is_mcp else {"number": {"type": "integer"}}

        async def schema(request: web.Request) -> web.Response:
            properties = {"metadata": {"type": "object"}, **own}
            action = {"type": "object", "description": "Guess.", "title": "A", "properties": properties}
            return web.json_response({"action": {**action, "required": list(own)}, "observation": {}})

        async def ws(request: web.Request) -> web.WebSocketResponse:
            socket = web.WebSocketResponse()
            await socket.prepare(request)
            if self.open >= self.most:
                self.refused += 1
                problem = {"message": f"{self.open}/{self.most} sessions", "code": "CAPACITY_REACHED"}
                problem |= {"active_sessions": self.open, "max_sessions": self.most}
                await socket.send_json({"type": "error", "data": problem})
                await socket.close()
                return socket
            self.open += 1
            secret = 0
            try:
                async for message in socket:
                    body = message.json()
                    if self.odd is not None:
                        odd, self.odd = self.odd, None
                        if odd == "close":
                            break
                        await socket.send_str(odd)
                        continue
                    kind, data = body["type"], body.get("data")
                    if kind == "close":
                        break
                    if kind == "reset":
                        secret = data.get("seed", 0)
                        answer = observed({"message": f"Guess ({data['episode_id']})."})
                    elif kind == "state":
                        answer = {"type": "state", "data": {"step_count": 1}}
                    elif kind == "mcp":
                        schema = {"type": "object", "properties": {"text": {"type": "string"}}}
                        tool = {"name": "note", "description": "Write.", "inputSchema": schema}
                        answer = {"type": "mcp", "data": {"result": {"tools": [tool]}, "id": 1}}
                    elif self.is_mcp:
                        assert data["type"] == "call_tool"
                        given = data["arguments"]
                        bad = {"error_type": "invalid_args", "message": "text: required"}
                        result = {"content": [{"type": "text", "text": f"noted {given.get('text')}"}]}
                        error = None if "text" in given else bad
                        answer = observed({"tool_name": "note", "result": result, "error": error})
                    elif not isinstance(data.get("number"), int):
                        errors = [{"loc": ["number"], "msg": "Field required"}]
                        problem = {"message": "Invalid message", "code": "VALIDATION_ERROR"}
                        answer = {"type": "error", "data": {**problem, "errors": errors}}
                    elif data["number"] == 13:
                        problem = {"message": "unlucky", "code": "EXECUTION_ERROR"}
                        answer = {"type": "error", "data": problem}
                    else:
                        hit = data["number"] == secret
                        answer = observed(
                            {"message": "yes" if hit else "no", "near": 1}, float(hit), hit
                        )
                    await socket.send_json(answer)
            finally:
                self.open -= 1
            return socket

        app.router.add_get("/schema", schema)
        app.router.add_get("/ws", ws)
        return app


def observed(seen: dict[str, Any], reward: float | None = None, done: bool = False) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": seen, "reward": reward, "done": done}}


@asynccontextmanager
async def running(server: AgentGym | OpenEnvServer) -> AsyncIterator[str]:
    runner = web.AppRunner(server.app(), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def main(kind: str, most: int) -> None:
    server = OpenEnvServer(most=most) if kind == "openenv" else AgentGym(kind, most)
    async with running(server) as address:
        print(address, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
