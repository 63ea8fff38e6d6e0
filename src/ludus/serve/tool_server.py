"""The tool server: HTTP in front of a `ToolService`. Checks requests, calls the service, writes responses.

Short results are sent whole. A long one is cut into pieces as it is written, and the next piece is made when
the client has taken enough of those before it. So its text exists once, however slow the client is.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from ludus import __version__
from ludus.core.failures import ConfigError
from ludus.core.messages import Json, ToolResult
from ludus.core.strict_json import explained
from ludus.serve.admission import ByteShare, RequestError
from ludus.serve.app import (
    AppServer,
    HttpApi,
    bearer_token,
    beside_the_loop,
    check_exposure,
    check_token,
    held_share,
    json_response,
    taken,
    too_large,
)
from ludus.serve.openapi import ENDPOINTS, MOST_MILLISECONDS, docs_page, openapi_document
from ludus.serve.service import ServerConfig, ToolService
from ludus.serve.sessions import ServerSession
from ludus.serve.telemetry import CONTENT_TYPE, CallOutcome, log_request, request_id
from ludus.tools.hosting import ToolHost
from ludus.tools.hosting.host import UNKNOWN
from ludus.tools.wire import (
    DEADLINE_HEADER,
    INSTANCE_HEADER,
    JSON_TYPE,
    STREAM_TYPE,
    BatchBody,
    BatchCallBody,
    CallBody,
    ErrorKind,
    OpenBody,
    ResetBody,
    StepBody,
    dump,
    result_to_json,
    spec_to_json,
    task_to_json,
)

B = TypeVar("B", bound=BaseModel)

_KEY = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_PIECE_CHARS = 16_384
_OPEN_PATHS = frozenset(endpoint.path for endpoint in ENDPOINTS if endpoint.is_open)
_CALLS = frozenset({"call_in_session", "call_alone", "call_batch", "step"})


def _error_response(error: RequestError) -> web.Response:
    return json_response({"error": error.body()}, error.kind.status, retry_after=error.retry_after)


async def _result_lines(result: ToolResult) -> AsyncIterator[bytes]:
    """A header with everything but the content, the content in pieces, and its length at the end."""
    yield dump({"result": result_to_json(result, content=False)}) + b"\n"
    content = result.content
    for start in range(0, len(content), _PIECE_CHARS):
        yield dump({"text": content[start : start + _PIECE_CHARS]}) + b"\n"
    yield dump({"end": len(content)}) + b"\n"


def _accepted(request: web.Request) -> tuple[bool, bool]:
    """Whether the client reads JSON, and whether it reads a stream. No `Accept` means JSON."""
    accept = request.headers.get("Accept", "")
    reads_stream = STREAM_TYPE in accept
    return JSON_TYPE in accept or not reads_stream, reads_stream


class ToolApi(HttpApi):
    """The handlers of all endpoints, named as in `openapi.ENDPOINTS`."""

    def __init__(self, service: ToolService, config: ServerConfig, token: str | None) -> None:
        super().__init__(config)
        self._service, self._token = service, token
        self._started = time.monotonic()
        document = openapi_document(__version__)
        self._document, self._page = dump(document), docs_page(document)
        self._requests = 0

    def routes(self) -> Iterable[web.RouteDef]:
        return [
            web.route(endpoint.method, endpoint.path, getattr(self, endpoint.name), name=endpoint.name)
            for endpoint in ENDPOINTS
        ]

    def application(self) -> web.Application:
        app = super().application()

        async def sign(request: web.Request, response: web.StreamResponse) -> None:
            response.headers[INSTANCE_HEADER] = self._service.instance

        app.on_response_prepare.append(sign)
        return app

    def admit(self, request: web.Request) -> None:
        self._requests += 1
        request_id.set(f"{self._service.instance[:6]}-{self._requests}")
        if self._token is None or request.path not in _OPEN_PATHS:
            check_token(request, bearer_token(request.headers), self._token)

    def problem(self, request: web.Request, error: Exception) -> web.Response | None:
        if isinstance(error, RequestError):
            self._service.metrics.refused.labels(error.kind.value).inc()
            return _error_response(error)
        match error:  # of aiohttp itself
            case web.HTTPRequestEntityTooLarge():
                return _error_response(too_large(self._config.max_body_bytes))
            case web.HTTPNotFound():
                message = "there is no such path; see /docs"
                return _error_response(RequestError(ErrorKind.NOT_FOUND, message))
            case web.HTTPMethodNotAllowed():
                message = "no such method here; see /docs"
                answer = _error_response(RequestError(ErrorKind.METHOD_NOT_ALLOWED, message))
                answer.headers["Allow"] = error.headers.get("Allow", "")
                return answer
            case web.HTTPException():
                message = error.reason or "bad request"
                return _error_response(RequestError(ErrorKind.BAD_REQUEST, message))
        return None

    def answered(self, request: web.Request, answer: web.StreamResponse, seconds: float) -> None:
        name = request.match_info.route.name
        if name not in _CALLS or answer.status in (400, 401, 403, 404, 408, 413, 415):
            log_request(request.method, request.path, answer.status, seconds)

    async def open_session(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request, OpenBody)
        self._service.refuse_when_draining()
        session, is_new = await self._service.sessions.open(body, _deadline(request))
        return json_response(await self._described(session), 201 if is_new else 200)

    async def get_session(self, request: web.Request) -> web.StreamResponse:
        session = await self._service.sessions.get(_key(request, "session"))
        return json_response(await self._described(session))

    async def close_session(self, request: web.Request) -> web.StreamResponse:
        ended = await self._service.sessions.close(_key(request, "session"), "asked")
        return json_response({"ended": ended})

    async def call_in_session(self, request: web.Request) -> web.StreamResponse:
        id = _key(request, "session")
        call = await self._body(request, CallBody)
        session = await self._service.sessions.get(id)
        outcome = await self._service.call(session, call, _deadline(request), held_share())
        return await self._outcome(request, outcome)

    async def step(self, request: web.Request) -> web.StreamResponse:
        id = _key(request, "session")
        body = await self._body(request, StepBody)
        call = CallBody(
            key=body.key or secrets.token_hex(12), name="step", arguments={"action": body.action}
        )
        session = await self._service.sessions.get(id)
        outcome = await self._service.call(session, call, _deadline(request), held_share())
        return await self._outcome(request, outcome)

    async def reset(self, request: web.Request) -> web.StreamResponse:
        id = _key(request, "session")
        body = await self._body(request, ResetBody)
        self._service.refuse_when_draining()
        session = await self._service.sessions.get(id)
        task = {"task": task_to_json(body.task)}
        await self._service.ask("reset", session, task, _deadline(request))
        return json_response(await self._described(session))

    async def observation(self, request: web.Request) -> web.StreamResponse:
        return await self._asked(request, "observation")

    async def actions(self, request: web.Request) -> web.StreamResponse:
        return await self._asked(request, "actions")

    async def state(self, request: web.Request) -> web.StreamResponse:
        return await self._asked(request, "state")

    async def envs(self, request: web.Request) -> web.StreamResponse:
        return json_response(await self._service.ask("envs", None, {}, _deadline(request)))

    async def _asked(self, request: web.Request, what: str) -> web.StreamResponse:
        session = await self._service.sessions.get(_key(request, "session"))
        body = {"env": request.query["env"]} if "env" in request.query else {}
        return json_response(await self._service.ask(what, session, body, _deadline(request)))

    async def cancel_call(self, request: web.Request) -> web.StreamResponse:
        ended = self._service.cancel(_key(request, "session"), _key(request, "key"))
        return json_response({"ended": ended})

    async def call_alone(self, request: web.Request) -> web.StreamResponse:
        call = await self._body(request, CallBody)
        outcome = await self._service.call(None, call, _deadline(request), held_share())
        return await self._outcome(request, outcome)

    async def call_batch(self, request: web.Request) -> web.StreamResponse:
        batch = await self._body(request, BatchBody)
        deadline = _deadline(request)
        share = held_share()
        tasks = [asyncio.create_task(self._one(call, deadline, share)) for call in batch.calls]
        try:
            if not _accepted(request)[0]:

                async def lines() -> AsyncIterator[bytes]:
                    for next_done in asyncio.as_completed(tasks):
                        yield dump(await next_done) + b"\n"

                return await self._send_lines(request, lines())
            return json_response({"outcomes": await asyncio.gather(*tasks)})
        finally:
            for task in tasks:
                task.cancel()  # matters only if the client disconnected: the service decides what to cancel

    async def healthz(self, request: web.Request) -> web.StreamResponse:
        return json_response(self._health())

    async def readyz(self, request: web.Request) -> web.StreamResponse:
        health = self._health()
        ready = health["status"] == "ok" and health["alive"] > 0
        return json_response(health, 200 if ready else 503)

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        self._service.metrics.set_pools(await self._service.host.ask("stats", None, {}))
        return web.Response(body=self._service.metrics.page(), headers={"Content-Type": CONTENT_TYPE})

    async def openapi(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._document, content_type=JSON_TYPE)

    async def docs(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text=self._page, content_type="text/html")

    async def _one(self, call: BatchCallBody, deadline: float | None, share: ByteShare) -> Json:
        try:
            found = None if call.session is None else await self._service.sessions.get(call.session)
        except RequestError as error:
            return {"key": call.key, "result": None, "error": error.body()}
        outcome = await self._service.call(found, call, deadline, share)
        if isinstance(outcome, ToolResult):
            return {"key": call.key, "result": result_to_json(outcome), "error": None}
        return {"key": call.key, "result": None, "error": outcome.body()}

    async def _send_lines(self, request: web.Request, lines: AsyncIterator[bytes]) -> web.StreamResponse:
        """Send lines as they come; a client that takes nothing for `client_seconds` is disconnected."""
        answer = web.StreamResponse(headers={"Content-Type": STREAM_TYPE})
        seconds = self._config.client_seconds
        await answer.prepare(request)
        with suppress(ConnectionAbortedError):
            async for line in lines:
                await taken(request, seconds, answer.write(line))
            await taken(request, seconds, answer.write_eof())
        return answer

    async def _outcome(self, request: web.Request, outcome: CallOutcome) -> web.StreamResponse:
        """A result, whole or streamed, depending on `Accept` and its length."""
        if isinstance(outcome, RequestError):
            return _error_response(outcome)
        reads_json, reads_stream = _accepted(request)
        if reads_stream and (not reads_json or len(outcome.content) > self._config.stream_chars):
            return await self._send_lines(request, _result_lines(outcome))
        return json_response(result_to_json(outcome))

    async def _described(self, session: ServerSession) -> Json:
        tools: list[Json] = []
        for spec in await self._service.sessions.tools(session):
            facts = self._service.facts.get(spec.name, UNKNOWN)
            about = {"repeatable": facts.repeatable, "stateful": facts.stateful}
            tools.append({**spec_to_json(spec), **about})
        named: Json = {"session": session.id, "episode": session.episode}
        envs = await self._service.sessions.observations(session)
        return {**named, "instance": self._service.instance, "tools": tools, "envs": envs}

    def _health(self) -> Json:
        service, health = self._service, self._service.host.health()
        return {
            "status": "draining" if service.draining else "ok",
            "instance": service.instance,
            "version": __version__,
            "uptime": round(time.monotonic() - self._started, 3),
            "sessions": len(service.sessions),
            "running": service.admission.running,
            "waiting": service.admission.waiting,
            "workers": health.workers,
            "alive": health.alive,
            "restarted": health.restarted,
        }

    async def _body(self, request: web.Request, model: type[B]) -> B:
        """The validated body; `RequestError` if it is too large, too slow, too deep or not JSON."""
        data = await self.bodies.read(request)
        try:
            return await beside_the_loop(len(data), model.model_validate_json, data)
        except ValidationError as error:
            raise RequestError(ErrorKind.BAD_REQUEST, explained(error)) from None


class ToolServer(AppServer):
    """A tool server in this event loop: `start`, then `drain_and_stop`; or `async with`."""

    def __init__(
        self, host: ToolHost, config: ServerConfig | None = None, *, token: str | None = None
    ) -> None:
        super().__init__(config)
        check_exposure(self._config.host, token)
        self._host, self._token = host, token
        self._sweeper: asyncio.Task[None] | None = None
        self.service: ToolService | None = None

    async def start(self) -> str:
        """Build the tools, listen, and return the address."""
        config = self._config
        try:
            facts = {one.spec.name: one for one in await self._host.start()}
            for name, limit in config.tool_concurrency.items():
                if name not in facts:
                    known = ", ".join(sorted(facts))
                    raise ConfigError(
                        f"a limit is set for {name!r}, which is no tool here; there are {known}"
                    )
                if limit < 1:
                    raise ConfigError(f"the limit of {name!r} must be at least 1, not {limit}")
            self.service = ToolService(self._host, facts, config)
            address = await self._listen(ToolApi(self.service, config, self._token))
        except BaseException:
            await self._stop()
            raise
        self._sweeper = asyncio.create_task(self.service.sessions.sweep())
        return address

    async def drain_and_stop(self) -> None:
        """Let running calls finish within `drain_seconds`; close sessions, connections and the host."""
        if self.service is not None:
            await self.service.drain()
        await self._stop()

    async def _stop(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait((self._sweeper,))
        await self._hang_up()
        await self._host.stop()


def _key(request: web.Request, name: str) -> str:
    value = request.match_info[name]
    if not _KEY.fullmatch(value):
        message = f"a {name} is 1 to 128 letters, digits, '_', '.', ':' and '-'"
        raise RequestError(ErrorKind.BAD_REQUEST, message)
    return value


def _deadline(request: web.Request) -> float | None:
    """The deadline header as event loop time."""
    text = request.headers.get(DEADLINE_HEADER)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,10}", text) or int(text) > MOST_MILLISECONDS:
        message = f"{DEADLINE_HEADER} is a whole number of milliseconds, {MOST_MILLISECONDS:,} at most"
        raise RequestError(ErrorKind.BAD_REQUEST, message)
    return asyncio.get_running_loop().time() + int(text) / 1000
