"""The model server: HTTP in front of a `ModelService`, which knows whose request it is and how to reply.

Who waits for whom. A request waits for its reply for as long as that takes: while the weights are updated the
engine is paused and connections are held, because clients give up after a few refusals. A client that
disconnects cancels its handler at once; what the service does then is the service's to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Protocol

from aiohttp import web

from ludus import __version__
from ludus.chat.api_fields import ApiError, bad
from ludus.core.failures import Aborted, ConfigError, InfraError
from ludus.core.images import ImageError
from ludus.core.messages import Json
from ludus.core.strict_json import BadJson, read_object
from ludus.rollouts.recorder import BudgetUsedUp
from ludus.serve.admission import RequestError, Running
from ludus.serve.app import AppServer, HttpApi, bearer_token, beside_the_loop, json_response
from ludus.serve.model.anthropic import ANTHROPIC
from ludus.serve.model.chat import CHAT
from ludus.serve.model.requests import (
    Dialect,
    Forwarded,
    Incoming,
    ModelReply,
    ModelRequest,
    reward_number,
    unknown_model,
)
from ludus.serve.model.responses import RESPONSES
from ludus.serve.model.streams import EventResponse, EventStream, LiveReplies
from ludus.serve.service import ServerConfig
from ludus.serve.telemetry import CONTENT_TYPE, ModelMetrics
from ludus.tools.wire import ErrorKind

REWARD_HEADER = "X-Ludus-Reward"
LEFT_OUT_HEADER = "X-Ludus-Left-Out"
"""In a response: the tools of its request that were left out of the prompt."""
_COMPLETIONS = {"/v1/chat/completions": CHAT, "/v1/responses": RESPONSES, "/v1/messages": ANTHROPIC}
_HEALTH = ("/healthz", "/readyz")
_TOLD = (ApiError, RequestError, BudgetUsedUp, InfraError, ConfigError, Aborted, ImageError)
"""Errors that are sent to clients, in the API's own form."""


class ModelCaller(Protocol):
    """What a key gives access to: a served checkpoint, or one episode."""

    @property
    def models(self) -> Sequence[str]:
        """The names of the models that may be asked for."""

    async def complete(
        self, request: ModelRequest, incoming: Incoming, live: LiveReplies | None = None
    ) -> Sequence[ModelReply] | Forwarded:
        """The replies to a request. `live` gets the feeds of their tokens while they are sampled."""

    async def count_tokens(self, request: ModelRequest) -> int:
        """How many tokens the model would read."""

    def report(self, body: Json) -> None:
        """Note a reward or an answer."""


class ModelService(Protocol):
    """The callers of a model server, by their keys."""

    @property
    def metrics(self) -> ModelMetrics: ...

    async def authorize(self, request: web.Request, key: str) -> ModelCaller:
        """The caller with this key; `ApiError` or `RequestError` for an unknown key."""

    def check_reader(self, request: web.Request, key: str) -> None:
        """Refuse those who may not read the metrics."""

    async def close(self) -> None:
        """End what still runs."""


class ModelServer(AppServer):
    """A model server in this event loop: `start`, then `drain_and_stop`; or `async with`."""

    def __init__(self, service: ModelService, config: ServerConfig | None = None) -> None:
        super().__init__(config)
        self._service, self._api = service, ModelApi(service, self._config)

    async def start(self) -> str:
        return await self._listen(self._api)

    async def drain_and_stop(self) -> None:
        """Let requests finish within `drain_seconds`; close connections and the service."""
        self._api.is_draining = True
        await self._api.running.ended(self._config.drain_seconds)
        await self._service.close()
        await self._hang_up()


class ModelApi(HttpApi):
    """The handlers; `is_draining` refuses what is new."""

    def __init__(self, service: ModelService, config: ServerConfig) -> None:
        super().__init__(config)
        self._service, self.running = service, Running()
        self._started = time.monotonic()
        self.is_draining = False
        service.metrics.watch("running", "Requests that wait for a reply.", lambda: self.running.count)

    def routes(self) -> Iterable[web.RouteDef]:
        return [
            *(web.post(path, self._complete) for path in _COMPLETIONS),
            web.post("/v1/messages/count_tokens", self._count),
            web.post("/v1/reward", self._reward),
            web.get("/v1/models", self._models),
            web.get("/v1/models/{name:.+}", self._model),
            *(web.get(path, self._healthz) for path in _HEALTH),
            web.get("/metrics", self._metrics),
            web.route("*", "/{path:.*}", self._unknown),
        ]

    def problem(self, request: web.Request, error: Exception) -> web.Response | None:
        if isinstance(error, web.HTTPException):
            error = ApiError(error.status, error.reason)
        if not isinstance(error, _TOLD):
            return None
        told = _as_api_error(error)
        body = _dialect(request).error(told)
        return json_response(body, told.status, retry_after=told.retry_after)

    def answered(self, request: web.Request, answer: web.StreamResponse, seconds: float) -> None:
        if request.path not in _HEALTH:
            status = answer.outcome if isinstance(answer, EventResponse) else answer.status
            self._service.metrics.count(_dialect(request).name, status)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        dialect, started = _dialect(request), time.perf_counter()
        caller = await self._authorize(request)
        data, asked = await self._asked(request, dialect)
        retries = request.headers.get("x-stainless-retry-count", "0")
        incoming = Incoming(
            request.path,
            blake2b(request.path.encode() + b"\n" + data, digest_size=16).digest(),
            retries.isdecimal() and int(retries) > 0,
            None
            if (text := request.headers.get(REWARD_HEADER)) is None
            else reward_number(text, REWARD_HEADER, is_text=True),
        )
        with self.running:
            if asked.stream:
                return await self._stream(request, dialect, caller, asked, incoming)
            replies = await caller.complete(asked, incoming)
        if isinstance(replies, Forwarded):
            return replies.response()
        self._note(dialect, replies, started)
        response = json_response(dialect.body(asked, replies))
        response.headers.update(_left_out(asked))
        return response

    async def _asked(self, request: web.Request, dialect: Dialect) -> tuple[bytearray, ModelRequest]:
        """The body, and what it asks for."""
        data = await self.bodies.read(request)
        parsed = await beside_the_loop(len(data), lambda: dialect.parse(_json(data)))
        return data, replace(parsed, size=len(data))

    async def _stream(
        self,
        request: web.Request,
        dialect: Dialect,
        caller: ModelCaller,
        asked: ModelRequest,
        incoming: Incoming,
    ) -> web.StreamResponse:
        """The reply as it is sampled. What fails before its first event is raised."""
        started = time.perf_counter()
        live = LiveReplies(asked, dialect)
        stream = EventStream(request, self._config.client_seconds, _left_out(asked))
        task = asyncio.create_task(caller.complete(asked, incoming, live))
        try:
            await stream.follow(live, task)
            replies = await task
            if isinstance(replies, Forwarded):
                if not stream.has_begun:
                    return replies.response()
                await stream.send(replies.body)
                return stream.response
            self._note(dialect, replies, started)
            await stream.send(live.rest(replies))
        except ConnectionError:
            pass  # the client is gone
        except _TOLD as error:
            if not stream.has_begun:
                raise
            problem = _as_api_error(error)
            stream.response.outcome = problem.status
            with contextlib.suppress(ConnectionError):
                await stream.send(live.failure(problem))
        finally:
            live.close()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return stream.response

    def _note(self, dialect: Dialect, replies: Sequence[ModelReply], started: float) -> None:
        self._service.metrics.note(
            dialect.name,
            time.perf_counter() - started,
            read=replies[0].prompt_tokens,
            cached=replies[0].cached_tokens,
            written=sum(reply.completion_tokens for reply in replies),
        )

    async def _count(self, request: web.Request) -> web.Response:
        caller = await self._authorize(request)
        _, asked = await self._asked(request, ANTHROPIC)
        return json_response({"input_tokens": await caller.count_tokens(asked)})

    async def _reward(self, request: web.Request) -> web.Response:
        caller = await self._authorize(request)
        caller.report(_json(await self.bodies.read(request)))
        return json_response({"ok": True})

    async def _models(self, request: web.Request) -> web.Response:
        names = (await self._authorize(request)).models
        listed = [_model(name) for name in names]
        ends = {"first_id": names[0], "last_id": names[-1]} if names else {}
        return json_response({"object": "list", "data": listed, "has_more": False, **ends})

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        known = (await self._authorize(request)).models
        if name not in known:
            raise unknown_model(name, known)
        return json_response(_model(name))

    async def _healthz(self, request: web.Request) -> web.Response:
        body = {
            "status": "draining" if self.is_draining else "ok",
            "version": __version__,
            "uptime": round(time.monotonic() - self._started, 3),
            "running": self.running.count,
        }
        is_ready = request.path == "/healthz" or not self.is_draining
        return json_response(body, 200 if is_ready else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        self._service.check_reader(request, self._key(request))
        return web.Response(body=self._service.metrics.page(), headers={"Content-Type": CONTENT_TYPE})

    async def _unknown(self, request: web.Request) -> web.Response:
        served = "POST /v1/chat/completions, /v1/responses, /v1/messages; GET /v1/models"
        raise ApiError(404, f"there is no {request.method} {request.path[:200]}; there are {served}")

    def _key(self, request: web.Request) -> str:
        if self.is_draining:
            raise ApiError(503, "this server is being stopped", retry_after=1.0)
        return bearer_token(request.headers) or request.headers.get("x-api-key", "")

    async def _authorize(self, request: web.Request) -> ModelCaller:
        return await self._service.authorize(request, self._key(request))


def _dialect(request: web.Request) -> Dialect:
    """The API that a path belongs to; OpenAI's first one where several share it."""
    if request.path == "/v1/messages/count_tokens":
        return ANTHROPIC
    return _COMPLETIONS.get(request.path, CHAT)


def _model(name: str) -> Json:
    about = {"object": "model", "created": 0, "owned_by": "ludus"}
    return {
        "id": name,
        **about,
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
    }


def _as_api_error(error: Exception) -> ApiError:
    """An error as what the API says of it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        status = 429 if error.kind is ErrorKind.OVERLOADED else error.kind.status
        return ApiError(status, str(error), code=error.kind.value, retry_after=error.retry_after)
    if isinstance(error, BudgetUsedUp):
        is_long = error.stop.value == "max_tokens"
        return ApiError(400, str(error), code="context_length_exceeded" if is_long else "max_turns")
    if isinstance(error, ConfigError | ImageError):
        return bad(str(error))
    if isinstance(error, InfraError) and not error.retriable:
        return bad(str(error))
    return ApiError(500, str(error))


def _left_out(asked: ModelRequest) -> dict[str, str]:
    """A header that names the tools of a request that were left out of the prompt."""
    named = re.sub(r"[^A-Za-z0-9_.:, -]", "_", ", ".join(asked.left_out))[:1000]
    return {LEFT_OUT_HEADER: named} if named else {}


def _json(data: bytearray) -> Json:
    try:
        return read_object(data)
    except BadJson as error:
        raise bad(f"the body cannot be read: {error}") from None
