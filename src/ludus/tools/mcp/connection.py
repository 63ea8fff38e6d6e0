"""One connection to an MCP server, from its start to its end: a process, or a session behind an address.

Who waits for whom. The SDK wants a client entered and left by one task, so a connection has a task that does
nothing else. Requests come from any task, many at once, each within its own deadline. When the server's output
ends, or the task does, all requests in flight fail with `ServerGone`. After a deadline the server is asked
something easy: one that answers is alive, and the call was slow (the model's choice); one that does not is
hanging.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import mcp_types as types
from mcp.client import Client
from mcp.client.session import ClientSession
from mcp.shared.exceptions import MCPError
from mcp_types import CONNECTION_CLOSED, METHOD_NOT_FOUND
from pydantic import ValidationError

from ludus.core.failures import Boundary, ConfigError, InfraError
from ludus.core.messages import Json, ToolSpec
from ludus.tools.calling import clean, cut
from ludus.tools.mcp import MCPServerConfig
from ludus.tools.mcp.servers import LARGER, NO_JSON_RPC, HttpServer, ServerProcess, with_short_results

_log = logging.getLogger(__name__)

T = TypeVar("T")

_PROBE_SECONDS = 3.0
_CLOSE_SECONDS = 10.0
_MOST_PAGES = 200
_HTTP_ENDED = ("Session terminated", "Server returned an error response")
"""Messages of the SDK's transport when HTTP itself refused."""
_HTTP_UNREADABLE = ("Failed to parse", "Unexpected content type")
"""How that begins when the answer is no JSON-RPC."""
_MOST_SHOWN = 300


NONSENSE = "MCPServerNonsense"
"""The kind of failure of a server that answers what is no MCP."""


class ServerGone(InfraError):
    """The server died, hangs, or cannot be reached; what was asked may have been done or not."""

    def __init__(self, message: str, kind: Literal["Died", "Hangs", "NotStarted", "Nonsense"]) -> None:
        super().__init__(Boundary.SERVER, message, retriable=False, replay=True, kind=f"MCPServer{kind}")


class SlowCall(Exception):
    """A request passed its deadline, and the server is alive."""


class ServerRefusal(Exception):
    """The server answered a request with an error."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class MCPConnection:
    """A running server, as we talk to it."""

    def __init__(self, config: MCPServerConfig) -> None:
        self.config = config
        self._server = _server_of(config)
        self._ready = asyncio.Event()
        self._closing = asyncio.Event()
        self._owner: asyncio.Task[None] | None = None
        self._session: ClientSession | None = None
        self._error: BaseException | None = None
        self._catalog: ToolCatalog | None = None
        self._is_stale = False
        self._listing = asyncio.Lock()

    @property
    def is_alive(self) -> bool:
        is_over = self._server.ended.is_set() or self._closing.is_set()
        return self._session is not None and not is_over

    @property
    def catalog(self) -> ToolCatalog | None:
        """The tools that the server listed last."""
        return self._catalog

    @property
    def is_stale(self) -> bool:
        """Whether the server has said since that its list has changed."""
        return self._is_stale

    async def start(self) -> None:
        """Start the server or connect to it, and read its list; `ServerGone` or `ConfigError` if that fails."""
        limit = self.config.start_timeout
        try:
            async with asyncio.timeout(limit):
                for mode in ("legacy", "auto"):
                    # with the handshake first: sessions and notices of changed lists are part of that
                    # protocol; servers of 2026-07-28 alone have no handshake, and are asked by discovery
                    await self._begin(mode)
                    error = _single(self._error)
                    wants_discovery = isinstance(error, MCPError) and error.code in (
                        METHOD_NOT_FOUND,
                        types.UNSUPPORTED_PROTOCOL_VERSION,
                    )
                    if self._session is not None or not wants_discovery:
                        break
                    await self.close()
                    self._closing.clear()
                if self._session is None:
                    raise self._not_started("")
                await self.list()
        except TimeoutError:
            await self.close()
            raise self._not_started(
                f"it was not ready within {limit:g} seconds (start_timeout)"
            ) from None
        except BaseException:
            await self.close()
            raise

    async def _begin(self, mode: str) -> None:
        """Start the client's task; return when it is ready, or has failed."""
        self._error, self._server = None, _server_of(self.config)
        self._ready.clear()
        self._owner = asyncio.create_task(self._own(mode), name=f"mcp {self.config.label}")
        self._owner.add_done_callback(lambda _: self._ready.set())
        await self._ready.wait()

    async def _own(self, mode: str) -> None:
        """Enter the client, and stay in it until `close` or until the server ends."""
        client = Client(
            with_short_results(self._server.streams()),
            mode=mode,
            cache=None,
            message_handler=self._note,
            client_info=types.Implementation(name="ludus", version="1"),
        )
        try:
            async with client:
                self._session = client.session
                self._ready.set()
                waiting = [
                    asyncio.create_task(one.wait()) for one in (self._closing, self._server.ended)
                ]
                try:
                    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for one in waiting:
                        one.cancel()
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - groups of the SDK's task groups; the next request raises it
            self._error = error
        finally:
            self._session = None

    async def _note(self, message: Any) -> None:
        if isinstance(message, types.ToolListChangedNotification | types.PromptListChangedNotification):
            self._is_stale = True

    async def request(
        self, what: str, ask: Callable[[ClientSession], Awaitable[T]], timeout: float | None = None
    ) -> T:
        """The answer to one request; `ServerRefusal`, `SlowCall`, or `ServerGone`."""
        seconds = self.config.timeout if timeout is None else timeout
        session = self._session
        if session is None or not self.is_alive:
            raise self._ended(what)
        try:
            async with asyncio.timeout(seconds):
                return await ask(session)
        except TimeoutError:
            if await self._answers(session):
                raise SlowCall(f"it took longer than {seconds:g} seconds") from None
            await self.close()
            raise self._gone(
                f"hangs: it answered neither {what} within {seconds:g} seconds nor a question after it. "
                f"{self._last_words()}",
                "Hangs",
            ) from None
        except MCPError as error:
            said = error.message
            # the transport could not read the answer; that one is too large is for the model to know
            is_large = LARGER in said or "byte limit" in said
            is_unreadable = self.config.is_http and said.startswith(_HTTP_UNREADABLE) and not is_large
            if error.code == NO_JSON_RPC or is_unreadable:
                raise self._protocol_error(what, " ".join(said.split())[:_MOST_SHOWN]) from error
            if error.code == CONNECTION_CLOSED and "exceeded the" not in said:
                if not self.config.is_http:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_PROBE_SECONDS):
                            await self._server.ended.wait()  # for its exit status
                await self.close()
                raise self._ended(what) from error
            if self.config.is_http and said in _HTTP_ENDED:
                await self.close()
                raise self._ended(what) from error
            raise ServerRefusal(error.code, said) from error
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(str(step) for step in problem["loc"])
            raise self._protocol_error(what, f"{place}: {problem['msg']}") from error

    async def _answers(self, session: ClientSession) -> bool:
        """Whether the server answers at all."""
        asked = types.PingRequest(params=types.RequestParams())
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                await session.send_request(asked, types.EmptyResult)
        except MCPError as error:
            return error.code != CONNECTION_CLOSED
        except (TimeoutError, RuntimeError):
            return False
        except (ValueError, ValidationError):
            return True
        return True

    def _gone(self, problem: str, kind: Literal["Died", "Hangs", "Nonsense"]) -> ServerGone:
        return ServerGone(f"the MCP server {self.config.label!r} {problem}".strip(), kind)

    def _protocol_error(self, what: str, shown: str) -> ServerGone:
        return self._gone(f"answered {what} with what is no MCP: {shown}", "Nonsense")

    def _ended(self, what: str) -> ServerGone:
        return self._gone(f"ended before it answered {what}. {self._last_words()}", "Died")

    def _not_started(self, why: str) -> InfraError | ConfigError:
        words = "; ".join(one for one in (why, self._last_words()) if one)
        text = f"the MCP server {self.config.label!r} did not start: {words or 'for no known reason'}"
        if self._server.could_not_run:
            return ConfigError(f"{text}. Install it, or name the command in full")
        return ServerGone(text, "NotStarted")

    def _last_words(self) -> str:
        told, error = self._server.last_words(), _single(self._error)
        if error is None or (isinstance(error, MCPError) and error.code == CONNECTION_CLOSED and told):
            return told
        named = f"{type(error).__name__}: {error}"[:500]
        return f"{told}; {named}" if told else named

    # Lists

    async def list(self) -> ToolCatalog:
        """The server's current tools; it is asked again only after it has announced a change."""
        async with self._listing:
            if self._catalog is None or self._is_stale:
                self._is_stale = False
                try:
                    self._catalog = await self._listed()
                except BaseException:
                    self._is_stale = True
                    raise
            return self._catalog

    async def _listed(self) -> ToolCatalog:
        tools: list[types.Tool] = []
        params = types.PaginatedRequestParams()
        try:
            for _ in range(_MOST_PAGES):
                page = await self.request("tools/list", partial(ClientSession.list_tools, params=params))
                tools += page.tools
                params = types.PaginatedRequestParams(cursor=page.next_cursor)
                if not page.next_cursor or len(tools) > 100_000:
                    return make_catalog(tools, self.config)
        except SlowCall:
            await self.close()
            raise self._gone("does not list its tools in time", "Hangs") from None
        except ServerRefusal as refusal:
            if refusal.code == METHOD_NOT_FOUND:  # it has resources or prompts alone
                return make_catalog(tools, self.config)
            raise self._gone(f"does not list its tools: {refusal}", "Nonsense") from None
        raise self._gone("lists its tools without end", "Nonsense")

    async def close(self) -> None:
        """End the session and the process. May be called twice, and by several at once."""
        self._closing.set()
        owner = self._owner
        if owner is None or owner.done() or owner is asyncio.current_task():
            return
        if self._session is None:
            owner.cancel()  # it is still starting
        done, _ = await asyncio.wait((owner,), timeout=_CLOSE_SECONDS)
        if not done:
            owner.cancel()
            await asyncio.wait((owner,), timeout=_CLOSE_SECONDS)
        if owner.done() and not owner.cancelled() and owner.exception() is not None:
            _log.debug("closing %s: %r", self.config.label, owner.exception())


def _server_of(config: MCPServerConfig) -> ServerProcess | HttpServer:
    return HttpServer(config) if config.is_http else ServerProcess(config)


def _single(error: BaseException | None) -> BaseException | None:
    """The first error within groups of the SDK's task groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


# Its list, as a model is offered it

_MOST_DESCRIPTION = 2_000
_MOST_SCHEMA = 50_000
_NAME = re.compile(r"[^A-Za-z0-9_-]")
_MOST_NAME = 64


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool of a server, as it is offered to the model."""

    spec: ToolSpec
    name: str
    """The server's name of the tool."""
    is_read_only: bool = False
    """Whether the server declares that it changes nothing."""
    repeatable: bool = False
    """Whether a call may be sent again when its first outcome is unknown: read-only or idempotent, it says."""


@dataclass(frozen=True, slots=True)
class ToolCatalog:
    """The tools on offer, by the names that the model uses; and the names of those that are not permitted."""

    tools: Mapping[str, OfferedTool]
    denied: frozenset[str] = frozenset()
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Tools that cannot be offered, and why."""

    @property
    def read_only(self) -> frozenset[str]:
        return frozenset(name for name, one in self.tools.items() if one.is_read_only)

    @property
    def specs(self) -> list[ToolSpec]:
        return [one.spec for one in self.tools.values()]


def make_catalog(listed: Iterable[Any], config: MCPServerConfig) -> ToolCatalog:
    """The catalog of a server's list (`mcp_types.Tool`); `ConfigError` where nothing is left, or too much."""
    tools: dict[str, OfferedTool] = {}
    denied: set[str] = set()
    left_out: dict[str, str] = {}
    seen: set[str] = set()
    for one in listed:
        if one.name in seen:
            left_out[one.name] = "the server lists two tools of this name; the first is taken"
            continue
        seen.add(one.name)
        name = _free_name(config.prefix + one.name, tools)
        hints = one.annotations
        is_read_only = bool(hints is not None and hints.read_only_hint)
        if not config.permits(one.name) or (config.read_only and not is_read_only):
            denied.add(name)
        elif problem := schema_problem(one.input_schema):
            left_out[one.name] = problem
        else:
            is_idempotent = bool(hints is not None and hints.idempotent_hint)
            description = clean(cut(one.description or one.title or "", _MOST_DESCRIPTION))
            schema = plain_schema(one.input_schema)
            returns = one.output_schema if not schema_problem(one.output_schema or {}) else None
            spec = ToolSpec(name, description, schema, returns)
            tools[name] = OfferedTool(spec, one.name, is_read_only, is_read_only or is_idempotent)
    _check(tools, denied, left_out, config)
    return ToolCatalog(tools, frozenset(denied), left_out)


def _check(
    tools: Mapping[str, Any], denied: set[str], left_out: Mapping[str, str], config: MCPServerConfig
) -> None:
    if len(tools) > config.max_tools:
        some = ", ".join(list(tools)[:5])
        raise ConfigError(
            f"the MCP server {config.label!r} offers {len(tools):,} tools ({some}, ...), more than max_tools = "
            f"{config.max_tools}: pick those that the agent needs with allow = [...], or raise max_tools"
        )
    if not tools and denied and not (config.resources or config.prompts):
        raise ConfigError(
            f"the MCP server {config.label!r} has tools, and none is permitted (allow, deny, read_only): "
            f"{', '.join(sorted(denied)[:20])}"
        )
    if not tools and left_out and not (config.resources or config.prompts):
        name, why = next(iter(left_out.items()))
        raise ConfigError(
            f"the MCP server {config.label!r} has no tool that can be offered; {name}: {why}"
        )
    for name, why in left_out.items():
        _log.warning("the MCP server %r: the tool %.80r is left out: %s", config.label, name, why)


def _free_name(name: str, taken: Mapping[str, Any]) -> str:
    """A name that every format can write, and that no other tool has."""
    plain = (_NAME.sub("_", name) or "tool")[:_MOST_NAME]
    made, number = plain, 2
    while made in taken:
        made = f"{plain[: _MOST_NAME - 5]}_{number}"
        number += 1
    return made


def schema_problem(schema: Any) -> str:
    """The problem of a schema, as far as models and checks depend on it; empty if there is none."""
    try:
        size = len(json.dumps(schema))
    except (ValueError, TypeError, RecursionError):
        return "its schema is no JSON"
    if size > _MOST_SCHEMA:
        return f"its schema has {size:,} characters, and may have {_MOST_SCHEMA:,}"
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        return f"its schema is not of an object: {str(schema)[:100]}"
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not all(
        isinstance(one, dict | bool) for one in properties.values()
    ):
        return "the properties of its schema are no schemas"
    if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
        return "'required' of its schema is no list of names"
    return ""


def plain_schema(schema: Mapping[str, Any]) -> Json:
    """The schema in the form that local tools have: an object with properties, none a bare true or false."""
    properties = {
        str(name): one if isinstance(one, dict) else {}
        for name, one in schema.get("properties", {}).items()
    }
    made = {key: value for key, value in schema.items() if key != "$schema"}
    return {**made, "type": "object", "properties": properties}
