"""Serving one model to clients with the token: no episodes, nothing is recorded, sampling is the client's."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeVar

from aiohttp import web

from ludus.chat.api_fields import ApiError, bad
from ludus.chat.renderer import NextContext, Renderer
from ludus.chat.streaming import ReplyView, TokenFeed, read_completion
from ludus.core.generation import Completion, Engine, OnTokens, Sampling
from ludus.core.images import MOST_PIXELS
from ludus.core.messages import Json
from ludus.remote.limits import run_all
from ludus.serve.admission import Admission, Ticket, WorkBudget
from ludus.serve.app import check_exposure, check_token
from ludus.serve.model.requests import (
    LONG,
    Incoming,
    ModelReply,
    ModelRequest,
    check_images,
    refuse_images,
)
from ludus.serve.model.streams import LiveReplies
from ludus.serve.service import ServerConfig
from ludus.serve.telemetry import ModelMetrics

MOST_REPLIES = 16
_PENALTIES = ("presence_penalty", "frequency_penalty", "logit_bias")
_FIELDS = {
    "max_tokens": ("max_completion_tokens", "max_output_tokens", "max_tokens"),
    "stop": ("stop", "stop_sequences"),
}
"""What the APIs call a setting of the sampling, where that is not its name."""
_LANE = "model"
T = TypeVar("T")


class CheckpointService:
    """A `ModelService` over an engine and a renderer, which stay their owner's, and its only caller."""

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        name: str,
        config: ServerConfig | None = None,
        *,
        token: str | None = None,
        sampling: Sampling | None = None,
        max_context: int | None = None,
    ) -> None:
        """`sampling` has the defaults: what a request leaves out, and the longest reply.

        `max_context` is the model's limit in tokens: what is longer in any case is refused unread.
        """
        config = config or ServerConfig()
        check_exposure(config.host, token)
        self.metrics = ModelMetrics()
        self._engine, self._renderer, self._name = engine, renderer, name
        self._sampling = sampling or Sampling(max_tokens=1024)
        self._max_context = max_context
        self._token = token
        self._admission = Admission(config.concurrency, config.queue, {})
        self._most_replies = min(MOST_REPLIES, config.concurrency + config.queue)
        self._pixels, self._texts = WorkBudget(MOST_PIXELS), WorkBudget(config.max_body_bytes)
        self.metrics.watch("waiting", "Replies in the queue.", lambda: self._admission.waiting)

    async def authorize(self, request: web.Request, key: str) -> CheckpointService:
        self.check_reader(request, key)
        return self

    def check_reader(self, request: web.Request, key: str) -> None:
        check_token(request, key, self._token)

    @property
    def models(self) -> list[str]:
        return [self._name]

    async def complete(
        self, request: ModelRequest, incoming: Incoming, live: LiveReplies | None = None
    ) -> Sequence[ModelReply]:
        """Any model name will do: clients have names of their own for what they talk to."""
        renderer = await self._beside(request, self._renderer.bound, request.tools)
        sampling = self._sampling_of(request, renderer)
        with ExitStack() as places:
            tickets = []  # one for each reply: `n` of them are the work of as many requests
            for _ in range(request.count):
                tickets.append(self._admission.enter(_LANE))
                places.callback(tickets[-1].leave)
            await tickets[0].granted()
            await check_images(request, renderer.images, self._pixels)
            opening = await self._rendered(renderer, request)
            context = opening.tokens
            first = request.asked.get("seed", secrets.randbits(62))
            seeds = [(first + number) % 2**62 for number in range(request.count)]
            ids = [secrets.token_hex(8) for _ in seeds]
            parses = bool(request.tools) and request.calls_allowed
            reporting: list[OnTokens | None] = [None for _ in seeds]
            if live is not None:
                feeds = [TokenFeed() for _ in seeds]
                for feed, id in zip(feeds, ids, strict=True):
                    feed.open(id, len(context), lambda: ReplyView(renderer, request.stop, parses))
                reporting = [feed.push for feed in feeds]
                live.follow(feeds)

            async def reply(ticket: Ticket, seed: int, on_tokens: OnTokens | None) -> Completion:
                await ticket.granted()
                try:
                    return await self._engine.generate(
                        context, replace(sampling, seed=seed), media=opening.media, on_tokens=on_tokens
                    )
                finally:
                    ticket.leave()

            completions = await run_all(list(map(reply, tickets, seeds, reporting)))
        return [
            ModelReply.of(
                read_completion(renderer, completion, id, request.stop, parses),
                completion,
                len(context),
                request,
            )
            for id, completion in zip(ids, completions, strict=True)
        ]

    def _sampling_of(self, request: ModelRequest, renderer: Renderer) -> Sampling:
        asked = request.asked
        if used := next((name for name in _PENALTIES if asked.get(name)), None):
            raise bad(f"'{used}' is not supported", used)
        if request.count > self._most_replies:
            raise bad(f"'n' may be {self._most_replies} at most", "n")
        fields = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        chosen: dict[str, Any] = {name: asked[name] for name in fields if name in asked}
        if chosen.get("top_k") == -1:
            chosen["top_k"] = 0  # all of them, for vLLM's clients
        try:
            return replace(
                self._sampling,
                max_tokens=request.max_tokens or self._sampling.max_tokens,
                stop=tuple(dict.fromkeys((*renderer.format.stops, *request.stop))),
                stop_tokens=renderer.stop_tokens,
                **chosen,
            )
        except ValueError as error:
            problem = str(error).removeprefix("sampling.")
            name = problem.partition(" ")[0]
            said = (one for one in _FIELDS.get(name, (name,)) if one in request.raw)
            raise bad(problem, next(said, None)) from None

    async def _rendered(self, renderer: Renderer, request: ModelRequest) -> NextContext:
        """The tokens of a conversation and its tools."""
        fewest = renderer.fewest_tokens(request.messages, request.tools)
        if self._max_context is not None and fewest > self._max_context:
            raise bad(
                f"the conversation has at least {fewest} tokens, and the model's limit is {self._max_context}",
                request.messages_field,
            )
        return await self._beside(request, renderer.opening, request.messages, request.tools)

    async def _beside(self, request: ModelRequest, function: Callable[..., T], *args: Any) -> T:
        """Run a function of a request's text, in a thread where it is long: others need not wait."""
        if request.size < LONG:
            return function(*args)
        return await self._texts.run(request.size, function, *args)

    async def count_tokens(self, request: ModelRequest) -> int:
        renderer = await self._beside(request, self._renderer.bound, request.tools)
        refuse_images(request, renderer.images)
        return len((await self._rendered(renderer, request)).tokens)

    def report(self, body: Json) -> None:
        raise ApiError(400, "this server serves a model and trains none: rewards are for episodes")

    async def close(self) -> None:
        """Nothing is kept here."""
