"""The HTTP layer: reads and checks requests, calls the service, writes responses.

Short results are sent whole. A long one is cut into pieces as it is written, and the next piece is made when
the client has taken enough of those before it. So its text exists once, however slow the client is.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import math
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from importlib.metadata import version
from typing import Any, TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from ludus.core.messages import Json, ToolResult
from ludus.core.strict_json import explained
from ludus.remote.threads import run_sync
from ludus.serve.admission import SMALL, ByteBudget, ByteShare, RequestError
from ludus.serve.openapi import ENDPOINTS, MOST_MILLISECONDS, docs_page, openapi_document
from ludus.serve.service import ServerConfig, ToolService
from ludus.serve.sessions import ServerSession
from ludus.serve.telemetry import CONTENT_TYPE, CallOutcome, log_request, request_id
from ludus.tools.hosting.host import UNKNOWN
from ludus.tools.remote_http import is_loopback
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

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")

_KEY = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_PIECE_CHARS = 16_384
_share: ContextVar[ByteShare | None] = ContextVar("share", default=None)
"""The request's share of the byte budget, once its body is read."""
_OPEN_PATHS = frozenset(endpoint.path for endpoint in ENDPOINTS if endpoint.is_open)
_CALLS = frozenset({"call_in_session", "call_alone", "call_batch", "step"})


def _json_response(body: Json, status: int = 200) -> web.Response:
    return web.Response(body=dump(body), status=status, content_type=JSON_TYPE)


def _error_response(error: RequestError) -> web.Response:
    answer = _json_response({"error": error.body()}, error.kind.status)
    if error.retry_after is not None:
        answer.headers["Retry-After"] = str(math.ceil(error.retry_after))
    return answer


async def _stream_response(
    request: web.Request, lines: AsyncIterator[bytes], seconds: float
) -> web.StreamResponse:
    """NDJSON, line by line; a client that reads nothing for `seconds` is disconnected."""
    answer = web.StreamResponse(headers={"Content-Type": STREAM_TYPE})
    await answer.prepare(request)
    try:
        async for line in lines:
            async with asyncio.timeout(seconds):
                await answer.write(line)
        async with asyncio.timeout(seconds):
            await answer.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
    return answer


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


class ToolApi:
    """The handlers of all endpoints, named as in `openapi.ENDPOINTS`."""

    def __init__(self, service: ToolService, config: ServerConfig, token: str | None) -> None:
        self._service, self._config = service, config
        self._token = None if token is None else token.encode()
        self._started = time.monotonic()
        self._version = version("ludus")
        document = openapi_document(self._version)
        self._document, self._page = dump(document), docs_page(document)
        self._requests = 0
        self._bytes = ByteBudget(config.held_bytes)

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._guarded], client_max_size=self._config.max_body_bytes)
        for endpoint in ENDPOINTS:
            handler: Handler = getattr(self, endpoint.name)
            app.router.add_route(endpoint.method, endpoint.path, handler, name=endpoint.name)
        app.on_response_prepare.append(self._sign)
        return app

    async def open_session(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request, OpenBody)
        self._service.refuse_when_draining()
        session, is_new = await self._service.sessions.open(body, _deadline(request))
        return _json_response(await self._described(session), 201 if is_new else 200)

    async def get_session(self, request: web.Request) -> web.StreamResponse:
        session = await self._service.sessions.get(_key(request, "session"))
        return _json_response(await self._described(session))

    async def close_session(self, request: web.Request) -> web.StreamResponse:
        ended = await self._service.sessions.close(_key(request, "session"), "asked")
        return _json_response({"ended": ended})

    async def call_in_session(self, request: web.Request) -> web.StreamResponse:
        id = _key(request, "session")
        call = await self._body(request, CallBody)
        session = await self._service.sessions.get(id)
        outcome = await self._service.call(session, call, _deadline(request), _held())
        return await self._outcome(request, outcome)

    async def step(self, request: web.Request) -> web.StreamResponse:
        id = _key(request, "session")
        body = await self._body(request, StepBody)
        call = CallBody(
            key=body.key or secrets.token_hex(12), name="step", arguments={"action": body.action}
        )
        session = await self._service.sessions.get(id)
        outcome = await self._service.call(session, call, _deadline(request), _held())
        return await self._outcome(request, outcome)

    async def reset(self, request: web.Request) -> web.StreamResponse:
        id = _key(request, "session")
        body = await self._body(request, ResetBody)
        self._service.refuse_when_draining()
        session = await self._service.sessions.get(id)
        task = {"task": task_to_json(body.task)}
        await self._service.ask("reset", session, task, _deadline(request))
        return _json_response(await self._described(session))

    async def observation(self, request: web.Request) -> web.StreamResponse:
        return await self._asked(request, "observation")

    async def actions(self, request: web.Request) -> web.StreamResponse:
        return await self._asked(request, "actions")

    async def state(self, request: web.Request) -> web.StreamResponse:
        return await self._asked(request, "state")

    async def envs(self, request: web.Request) -> web.StreamResponse:
        return _json_response(await self._service.ask("envs", None, {}, _deadline(request)))

    async def _asked(self, request: web.Request, what: str) -> web.StreamResponse:
        session = await self._service.sessions.get(_key(request, "session"))
        body = {"env": request.query["env"]} if "env" in request.query else {}
        return _json_response(await self._service.ask(what, session, body, _deadline(request)))

    async def cancel_call(self, request: web.Request) -> web.StreamResponse:
        ended = self._service.cancel(_key(request, "session"), _key(request, "key"))
        return _json_response({"ended": ended})

    async def call_alone(self, request: web.Request) -> web.StreamResponse:
        call = await self._body(request, CallBody)
        outcome = await self._service.call(None, call, _deadline(request), _held())
        return await self._outcome(request, outcome)

    async def call_batch(self, request: web.Request) -> web.StreamResponse:
        batch = await self._body(request, BatchBody)
        deadline = _deadline(request)
        share = _held()
        tasks = [asyncio.create_task(self._one(call, deadline, share)) for call in batch.calls]
        try:
            if not _accepted(request)[0]:

                async def lines() -> AsyncIterator[bytes]:
                    for next_done in asyncio.as_completed(tasks):
                        yield dump(await next_done) + b"\n"

                return await _stream_response(request, lines(), self._config.client_seconds)
            return _json_response({"outcomes": await asyncio.gather(*tasks)})
        finally:
            for task in tasks:
                task.cancel()  # matters only if the client disconnected: the service decides what to cancel

    async def healthz(self, request: web.Request) -> web.StreamResponse:
        return _json_response(self._health())

    async def readyz(self, request: web.Request) -> web.StreamResponse:
        health = self._health()
        ready = health["status"] == "ok" and health["alive"] > 0
        return _json_response(health, 200 if ready else 503)

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

    async def _outcome(self, request: web.Request, outcome: CallOutcome) -> web.StreamResponse:
        """A result, whole or streamed, depending on `Accept` and its length."""
        if isinstance(outcome, RequestError):
            return _error_response(outcome)
        reads_json, reads_stream = _accepted(request)
        if reads_stream and (not reads_json or len(outcome.content) > self._config.stream_chars):
            return await _stream_response(request, _result_lines(outcome), self._config.client_seconds)
        return _json_response(result_to_json(outcome))

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
            "version": self._version,
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
        data = await request_bytes(request, self._bytes, self._config)
        try:
            return await beside_the_loop(len(data), model.model_validate_json, data)
        except ValidationError as error:
            raise RequestError(ErrorKind.BAD_REQUEST, explained(error)) from None

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Around every request: authentication, errors as responses, a line in the log."""
        started = time.monotonic()
        self._requests += 1
        _share.set(None)
        request_id.set(f"{self._service.instance[:6]}-{self._requests}")
        try:
            self._check_caller(request)
            answer = await handler(request)
        except RequestError as error:
            self._service.metrics.refused.labels(error.kind.value).inc()
            answer = _error_response(error)
        except web.HTTPException as error:
            answer = _translated(error, self._config.max_body_bytes)
        finally:
            release_bytes()
        name = request.match_info.route.name
        if name not in _CALLS or answer.status in (400, 401, 403, 404, 408, 413, 415):
            seconds = time.monotonic() - started
            log_request(request.method, request.path, answer.status, seconds)
        return answer

    def _check_caller(self, request: web.Request) -> None:
        if self._token is not None and request.path in _OPEN_PATHS:
            return
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        check_token(request, given if scheme.lower() == "bearer" else "", self._token)

    async def _sign(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers[INSTANCE_HEADER] = self._service.instance


def check_token(request: web.Request, given: str, token: bytes | None) -> None:
    """`RequestError` unless the token is right; without one, unless the request came by a loopback name."""
    if token is None:
        if not _is_loopback_name(request.host):
            # DNS rebinding: a web page whose name points here would otherwise pass for a local client.
            message = "without a token this server answers to loopback names only"
            raise RequestError(ErrorKind.FORBIDDEN, message)
    elif not hmac.compare_digest(given.strip().encode("utf-8", "replace"), token):
        message = "send the header 'Authorization: Bearer TOKEN' with this server's token"
        raise RequestError(ErrorKind.UNAUTHORIZED, message)


def _held() -> ByteShare:
    share = _share.get()
    assert share is not None, "the body is read first"
    return share


async def request_bytes(request: web.Request, budget: ByteBudget, config: ServerConfig) -> bytearray:
    """The body of a JSON request; `RequestError` if it is too large, too slow, or something else.

    Its bytes count until `release_bytes`.
    """
    if request.content_type != JSON_TYPE:
        # Also keeps web pages out: a browser sends a CORS preflight before JSON across origins.
        message = f"send {JSON_TYPE}, not {request.content_type}"
        raise RequestError(ErrorKind.UNSUPPORTED_TYPE, message)
    if (request.charset or "utf-8").lower() not in ("utf-8", "utf8"):
        message = f"send UTF-8, not charset={request.charset!s:.40}"
        raise RequestError(ErrorKind.UNSUPPORTED_TYPE, message)
    packing = request.headers.get("Content-Encoding", "identity")
    if packing.lower() != "identity":
        message = f"send the body as it is, without Content-Encoding: {packing[:40]}"
        raise RequestError(ErrorKind.UNSUPPORTED_TYPE, message)
    size = request.content_length
    if size is not None and size > config.max_body_bytes:
        raise _too_large(config.max_body_bytes)
    share = budget.share()
    _share.set(share)
    try:
        return await _read(request, share, config.max_body_bytes, config.client_seconds)
    except TimeoutError:
        request.protocol.keep_alive(False)
        raise RequestError(ErrorKind.SLOW_CLIENT, "the request took too long to arrive") from None
    except (web.RequestPayloadError, ConnectionError) as error:
        raise RequestError(ErrorKind.BAD_REQUEST, f"the body could not be read: {error}") from None


async def beside_the_loop(size: int, function: Callable[..., T], *args: Any) -> T:
    """Run a function of a request's data, in a thread where there is much of it: others need not wait."""
    return function(*args) if size <= SMALL else await run_sync(function, *args)


def release_bytes() -> None:
    """The request that is being answered needs its body no more."""
    if (share := _share.get()) is not None:
        share.release()
        _share.set(None)


async def _read(request: web.Request, share: ByteShare, most: int, seconds: float) -> bytearray:
    """The body; `TimeoutError` if the client takes longer, not counting the wait for memory.

    Not by `request.read`, which keeps a copy for as long as the request lasts.
    """
    loop = asyncio.get_running_loop()
    data, left = bytearray(), seconds
    if request.content.is_eof():  # it came together with the headers, as small ones do
        data += request.content.read_nowait()
        if len(data) > most:
            raise _too_large(most)
        await share.grow(len(data), seconds)
        return data
    while True:
        started = loop.time()
        async with asyncio.timeout(left):
            chunk = await request.content.readany()
        left -= loop.time() - started
        if not chunk:
            return data
        data += chunk
        if len(data) > most:
            raise _too_large(most)
        await share.grow(len(data), seconds)


def _too_large(most: int) -> RequestError:
    return RequestError(ErrorKind.TOO_LARGE, f"a request may have {most:,} bytes at most")


def _translated(error: web.HTTPException, max_body_bytes: int) -> web.Response:
    """What aiohttp itself refuses, as a `RequestError` response."""
    if error.status == 413:
        return _error_response(_too_large(max_body_bytes))
    kind, message = ErrorKind.BAD_REQUEST, error.reason or "bad request"
    if error.status == 404:
        kind, message = ErrorKind.NOT_FOUND, "there is no such path; see /docs"
    elif error.status == 405:
        kind, message = ErrorKind.METHOD_NOT_ALLOWED, "no such method here; see /docs"
    answer = _error_response(RequestError(kind, message))
    if error.status == 405:
        answer.headers["Allow"] = error.headers.get("Allow", "")
    return answer


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


@functools.lru_cache(maxsize=64)
def _is_loopback_name(host: str) -> bool:
    name = host.rpartition(":")[0] if re.search(r":[0-9]+$", host) else host
    return is_loopback(name.strip("[]").lower())
