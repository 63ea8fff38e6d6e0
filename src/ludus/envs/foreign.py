"""Environments on servers that others wrote: AgentGym's HTTP protocol, and OpenEnv's WebSocket.

A recipe names them as `agentgym:http://host:port` and `openenv:http://host:port`. What such a server gets wrong
(it is gone, slow, answers with errors or with something else) is an infrastructure failure, and the episode is
played again; a step is never sent twice, because neither protocol can tell a repeated one from a new one. A
server that has no room for another session is `ServerFull`, and the pool waits for one.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from ludus.core.failures import Boundary, ConfigError, Fault, InfraError, ToolFault
from ludus.core.messages import Json, ToolContext, ToolResult, ToolSpec
from ludus.core.task import Task
from ludus.envs.env import Env, ServerFull, Step
from ludus.envs.tools import ForwardedTool
from ludus.envs.world import EnvAdapter
from ludus.llm.http import load_aiohttp
from ludus.remote.per_loop import PerLoop
from ludus.tools import Tool
from ludus.tools.remote_http import normalized

if TYPE_CHECKING:
    import aiohttp

_MOST_BYTES = 64 * 1024 * 1024
_CONNECT_SECONDS = 5.0
_CLOSE_SECONDS = 5.0
_PROBE_PAUSE = 0.2
_OVER = "The episode is over."
_FULL_STATUS = (429, 503)
_FULL_CLOSE = 1013
"""WebSocket's "try again later"."""


class ForeignServer:
    """Requests to a server of others, each sent once, and failures with types."""

    def __init__(self, address: str, timeout: float) -> None:
        self.address, self._timeout = normalized(address), timeout
        self._sessions = PerLoop(self._make)

    async def json(self, method: str, path: str, body: Json | None = None, **query: Any) -> Any:
        """What the server answers, decoded."""
        async with self.failures(path):
            session = await self._sessions.get()
            url = f"{self.address}{path}"
            async with session.request(
                method, url, json=body, params=query, allow_redirects=False
            ) as response:
                data = bytearray()
                async for piece in response.content.iter_any():
                    data += piece
                    if len(data) > _MOST_BYTES:
                        raise self.failure(path, f"an answer of more than {_MOST_BYTES:,} bytes")
                if response.status != 200:
                    shown = data[:300].decode("utf-8", "replace")
                    if path == "/create" and response.status in _FULL_STATUS:
                        raise self.full(path, f"status {response.status}: {shown}")
                    raise self.failure(path, f"status {response.status}: {shown}", response.status)
        return self.decoded(path, data)

    async def probe(self, path: str, seconds: float) -> Any:
        """Refuse an address where nothing answers within `seconds`; a server that is starting is waited for."""
        aiohttp = load_aiohttp(purpose="an environment on a server")
        loop = asyncio.get_running_loop()
        end, is_starting = loop.time() + seconds, True
        while is_starting:
            try:
                async with asyncio.timeout_at(end):
                    return await self.json("GET", path)
            except TimeoutError:
                problem, is_starting = f"{path}: no answer within {seconds:g} seconds", False
            except InfraError as error:
                problem, why = str(error).removeprefix(self.address), error.__cause__
                is_refused = isinstance(why, aiohttp.ClientConnectorError)
                is_unknown = isinstance(why, aiohttp.ClientConnectorDNSError)
                is_starting = is_refused and not is_unknown and loop.time() + _PROBE_PAUSE < end
            await asyncio.sleep(_PROBE_PAUSE if is_starting else 0)
        raise ConfigError(
            f"no environment server at {self.address}: {problem}; is the address right, and was it started?"
        )

    async def websocket(self, path: str) -> aiohttp.ClientWebSocketResponse:
        """A connection for messages of text."""
        async with self.failures(path):
            session = await self._sessions.get()
            try:
                return await session.ws_connect(f"{self.address}{path}", max_msg_size=_MOST_BYTES)
            except load_aiohttp().WSServerHandshakeError as error:
                if error.status in _FULL_STATUS:
                    raise self.full(path, f"status {error.status}: {error.message}") from error
                raise

    @asynccontextmanager
    async def failures(self, what: str) -> AsyncIterator[None]:
        """Deadline and failures of what is done in here."""
        aiohttp = load_aiohttp(purpose="an environment on a server")
        try:
            async with asyncio.timeout(self._timeout):
                yield
        except TimeoutError as error:
            raise self.failure(what, f"no answer within {self._timeout:g} seconds") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise self.failure(what, f"{type(error).__name__}: {error}") from error

    def failure(self, what: str, message: str, status: int = 0) -> InfraError:
        """A failure of the server; the episode can be played again, unless the server does not know us."""
        replay = status not in (401, 403, 404, 405)
        text = f"{self.address}{what}: {message}"
        return InfraError(Boundary.SERVER, text, retriable=False, replay=replay, kind="ForeignServer")

    def full(self, what: str, message: str) -> ServerFull:
        """That the server has no room for another session."""
        return ServerFull(f"{self.address}{what}: {message}")

    def decoded(self, what: str, data: bytes | bytearray | str) -> Any:
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            shown = data[:200] if isinstance(data, str) else data[:200].decode("utf-8", "replace")
            raise self.failure(what, f"an answer that is no JSON ({error}): {shown}") from error

    def _make(self) -> aiohttp.ClientSession:
        http = load_aiohttp(purpose="an environment on a server")
        session: aiohttp.ClientSession = http.ClientSession(
            connector=http.TCPConnector(limit=0, keepalive_timeout=3.0),  # uvicorn's is 5 seconds
            timeout=http.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            cookie_jar=http.DummyCookieJar(),
        )
        return session


_servers: dict[tuple[str, float], ForeignServer] = {}


def _server(address: str, timeout: float) -> ForeignServer:
    """One for all instances, which share its connections."""
    if (address, timeout) not in _servers:
        _servers[address, timeout] = ForeignServer(address, timeout)
    return _servers[address, timeout]


def as_reward(value: Any, server: ForeignServer, what: str) -> float | None:
    if value is None or isinstance(value, int | float):
        return None if value is None else float(value)
    raise server.failure(what, f"a reward that is no number: {value!r:.100}")


def as_text(seen: Any, field: str | None = None) -> str:
    """An observation in words: its only text, the field asked for, or all of it as JSON."""
    if isinstance(seen, dict):
        parts = {name: one for name, one in seen.items() if one not in (None, "", [], {})}
        if field is not None:
            return as_text(seen.get(field))
        parts.pop("metadata", None)
        if len(parts) == 1 and isinstance(only := next(iter(parts.values())), str):
            return only
        seen = parts or ""
    return seen if isinstance(seen, str) else json.dumps(seen, ensure_ascii=False)


# AgentGym -------------------------------------------------------------------------------------------

_INDEX = ("data_idx", "game", "session_id", "item_id", "idx", "id", "seed")
"""What the servers call the number of a task, in a request to reset."""
_DEFAULTS = {"world_type": "Text", "seed": 0}
_GONE = re.compile(r"is not valid|has been deleted|not exist|^'?\d+'?$")
"""What the servers say of an instance that they do not have (any more)."""
_FULL = re.compile(
    r"too many|capacity|\b(?:max|limit)\w*\b.*\b(?:session|env|instance)|no (?:free|room)", re.I
)
"""What a server may say that makes no further instance: there is no rule."""
_LISTED = re.compile(r"Available actions: (\[.*\])\s*$", re.DOTALL)


class AgentGymEnv(Env):
    """One instance on an AgentGym server (`agentgym:http://host:port`).

    The servers differ in what they call an instance and a task; their OpenAPI document says it. A task gives
    its number as `envs = {"textcraft": {"data_idx": 3}}`, with any of the servers' names for it, or as the
    digits at the end of its id (`textcraft_3`), as AgentGym's own files do. Actions are what the servers take;
    the form in which AgentGym's prompts wrap them (`Action: ...`) is not theirs.
    """

    step_rewards = "last"  # as AgentGym does: where there is a score, it is the score so far

    def __init__(self, address: str, timeout: float = 300.0) -> None:
        """`timeout` are the seconds for one request; a pool's deadlines may be shorter."""
        self._server = _server(address, timeout)
        self._fields: dict[str, list[str]] = {}
        self._id: Any = None
        self._done = False
        self._actions: Any = None

    @staticmethod
    async def probe(address: str, seconds: float, timeout: float = 300.0) -> None:
        """Refuse an address at which no such server answers within `seconds`."""
        await _server(address, timeout).probe("/openapi.json", seconds)

    async def reset(self, task: Task, **arguments: Any) -> str:
        if self._id is None:
            await self._create()
        self._done, self._actions = False, None
        body = {self._id_name: self._id, **self._task_fields(task, arguments)}
        answer = self._checked("/reset", await self._server.json("POST", "/reset", body))
        if isinstance(answer, list):
            answer = answer[0] if answer else ""
        if not isinstance(answer, dict):
            return as_text(answer)
        texts = [answer.get("task_description"), answer.get("observation", answer.get("state"))]
        seen = "\n".join(str(text) for text in texts if text)
        self._note_actions(answer, seen)
        return seen

    async def step(self, action: str) -> Step:
        """Act in the environment.

        Args:
            action: What to do, in the environment's own words.
        """
        if self._done:
            return Step(_OVER, terminated=True)
        body = {self._id_name: self._id, "action": action}
        answer = self._checked("/step", await self._server.json("POST", "/step", body))
        if not isinstance(answer, dict) or not {"observation", "state"} & answer.keys():
            raise self._server.failure("/step", f"an answer without an observation: {answer!r:.200}")
        self._done = bool(answer.get("done", answer.get("terminated", False)))
        seen = as_text(answer.get("observation", answer.get("state")))
        self._note_actions(answer, seen)
        reward = as_reward(answer.get("score", answer.get("reward")), self._server, "/step")
        return Step(seen, reward, terminated=self._done)

    async def available_actions(self) -> list[str] | None:
        found = self._actions
        if found is None and "/available_actions" in self._fields and not self._done:
            found = await self._server.json("GET", "/available_actions", **{self._id_name: self._id})
        if isinstance(found, dict) and "clickables" in found:  # WebShop's
            clicks = [f"click[{one}]" for one in found["clickables"]]
            return ["search[<keywords>]", *clicks] if found.get("has_search_bar") else clicks
        return [str(one) for one in found] if isinstance(found, list) else None

    def _note_actions(self, answer: Json, seen: str) -> None:
        """Some servers list the possible actions in a field, others at the end of what they show."""
        self._actions = answer.get("available_actions")
        listed = _LISTED.search(seen)
        if self._actions is None and listed is not None:
            with suppress(ValueError):
                self._actions = json.loads(listed[1])

    async def close(self) -> None:
        number, self._id = self._id, None
        if number is not None and "/close" in self._fields:
            with suppress(InfraError):
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await self._server.json("POST", "/close", {self._id_name: number})

    async def _create(self) -> None:
        document = await self._server.json("GET", "/openapi.json")
        try:
            self._fields = {path: _body_fields(document, path) for path in document["paths"]}
        except (KeyError, TypeError, AttributeError) as error:
            raise self._server.failure("/openapi.json", f"no OpenAPI document ({error!r})") from error
        if missing := {"/create", "/reset", "/step"} - self._fields.keys():
            raise ConfigError(
                f"{self._server.address} is no AgentGym server: it has no {', '.join(sorted(missing))}"
            )
        answer = self._checked("/create", await self._server.json("POST", "/create", {"id": 0}))
        self._id = answer.get("id") if isinstance(answer, dict) else answer
        if not isinstance(self._id, int | str):
            raise self._server.failure("/create", f"an answer without an id: {answer!r:.200}")

    @property
    def _id_name(self) -> str:
        return "env_idx" if "env_idx" in self._fields["/step"] else "id"

    def _task_fields(self, task: Task, arguments: Json) -> Json:
        """What a request to reset says of the task, in the server's own words."""
        fields = [name for name in self._fields["/reset"] if name != self._id_name]
        named = {name: value for name, value in arguments.items() if name in fields}
        numbers = [value for name, value in arguments.items() if name in _INDEX]
        digits = re.search(r"\d+$", task.id)
        number = numbers[0] if numbers else int(digits[0]) if digits else None
        wanted = next((name for name in _INDEX if name in fields), None)
        if wanted is not None and number is None:
            raise ConfigError(
                f"task {task.id!r} says no number for {self._server.address}: give it as the environment's "
                f"{wanted!r} (envs = {{ NAME = {{ {wanted} = 3 }} }}), or at the end of the task's id"
            )
        defaults = {name: value for name, value in _DEFAULTS.items() if name in fields}
        return {**defaults, **({} if wanted is None else {wanted: number}), **named}

    def _checked(self, path: str, answer: Any) -> Any:
        """AgentGym's servers report errors with status 200."""
        if not isinstance(answer, dict) or "error" not in answer:
            return answer
        message = str(answer["error"])
        if path == "/create" and _FULL.search(message):
            raise self._server.full(path, message)
        if path != "/step" or _GONE.search(message):
            raise self._server.failure(path, message)
        raise ToolFault(f"Error: {message}")  # what the action led to


def _body_fields(document: Json, path: str) -> list[str]:
    """The fields that a path's request takes."""
    for operation in document["paths"][path].values():
        if not isinstance(operation, dict) or "requestBody" not in operation:
            continue
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        while "$ref" in schema:
            schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return list(schema.get("properties", {}))
    return []


# OpenEnv --------------------------------------------------------------------------------------------


class OpenEnv(Env):
    """One session on an OpenEnv server (`openenv:http://host:port`), over its WebSocket.

    The tool `step` has the schema of the server's actions; of a server with MCP tools, the agent gets these.
    What a task gives (`envs = {"wordle": {"seed": 3}}`) goes to the server's reset.
    """

    def __init__(self, address: str, text: str | None = None, timeout: float = 300.0) -> None:
        """`text` is the field of an observation that the agent sees; its only text, or all of it as JSON, when
        left out. `timeout` are the seconds for one message; a pool's deadlines may be shorter."""
        self._server, self._text = _server(address, timeout), text
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._tools: list[ToolSpec] | None = None
        self._is_mcp = self._done = False

    takes_text = False  # `step` takes what the server's actions are made of

    @staticmethod
    async def probe(
        address: str, seconds: float, text: str | None = None, timeout: float = 300.0
    ) -> None:
        """Refuse an address at which no such server answers within `seconds`."""
        await _server(address, timeout).probe("/schema", seconds)

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
            return ToolResult(_OVER, terminated=True)
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
                async with asyncio.timeout(_CLOSE_SECONDS):
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
        """One message and its answer. What goes wrong ends the session: nobody knows the server's state."""
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
                async with asyncio.timeout(_CLOSE_SECONDS):
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


AGENTGYM = EnvAdapter(
    "agentgym:http://...",
    "One on an AgentGym server.",
    env=AgentGymEnv,
    probe=AgentGymEnv.probe,
    extra="serve",
    packages=("aiohttp",),
)
OPENENV = EnvAdapter(
    "openenv:http://...",
    "One on an OpenEnv server.",
    env=OpenEnv,
    probe=OpenEnv.probe,
    extra="serve",
    packages=("aiohttp",),
)
