"""Shared by the APIs: a request, a reply, an error, and parsing of clients' input."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from aiohttp import web

from ludus.chat.api_fields import ApiError, bad
from ludus.chat.streaming import Reply
from ludus.core.generation import Completion, FinishReason
from ludus.core.images import ImageError
from ludus.core.messages import Json, Message, ToolCall, ToolSpec
from ludus.core.tokenizer import ImageTokens
from ludus.rewards.scores import MOST_REWARD
from ludus.serve.admission import WorkBudget

MOST_STOPS = 16
LONG = 20_000
"""A request of so many bytes takes milliseconds to encode."""
_WHOLE = frozenset({"top_k", "seed"})


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request for a reply, whatever the API that it came by."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    stream: bool = False
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    count: int = 1
    """How many replies (`n`)."""
    left_out: tuple[str, ...] = ()
    """The tools left out of the model's prompt, because it cannot call them: hosted ones, and the like."""
    calls_allowed: bool = True
    """False for tool_choice = "none": tools stay in the prompt, and what is written is text."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """The sampling that the client asked for: temperature, top_p, seed, ..."""
    usage_in_stream: bool = False
    places: tuple[str, ...] = ()
    """Where in the body each message stands, for errors."""
    messages_field: str = "messages"
    """The body's field that holds the conversation."""
    raw: Json = field(default_factory=dict)
    """The body."""
    size: int = 0
    """How many bytes it has."""

    def place(self, number: int) -> str:
        """Where a message stands in the body."""
        return self.places[number] if number < len(self.places) else f"{self.messages_field}[{number}]"


@dataclass(frozen=True, slots=True)
class Incoming:
    """The HTTP request without its body."""

    path: str
    digest: bytes
    """Digest of its path and body: equal for a retry."""
    is_retry: bool
    reward: float | None = None
    """The reward of the turn that this request goes on from."""


@dataclass(frozen=True, slots=True)
class Forwarded:
    """The answer of another server, handed on as it is."""

    status: int
    content_type: str
    body: bytes

    def response(self) -> web.Response:
        return web.Response(body=self.body, status=self.status, content_type=self.content_type)


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """The part of a reply that is known before it is sampled."""

    id: str
    prompt_tokens: int
    created: int


@dataclass(frozen=True, slots=True)
class ModelReply:
    """A reply, with what APIs tell about it."""

    reply: Reply
    finish: FinishReason
    stop: str | None
    """The client's stop string that ended it."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    created: int

    @classmethod
    def of(
        cls, reply: Reply, completion: Completion, prompt_tokens: int, request: ModelRequest
    ) -> ModelReply:
        """A completion as a reply to this request, sent now."""
        return cls(
            reply,
            completion.finish,
            completion.stop if completion.stop in request.stop else None,
            prompt_tokens,
            len(completion.tokens),
            completion.cached_tokens,
            int(time.time()),
        )

    @property
    def is_cut(self) -> bool:
        return self.finish is FinishReason.LENGTH

    @property
    def head(self) -> ReplyHead:
        return ReplyHead(self.reply.id, self.prompt_tokens, self.created)


Event = tuple[str | None, Json | str]
"""A server-sent event: its name, and its data."""


class StreamWriter(Protocol):
    """The events of one stream. Thoughts come before text; calls, and why a reply ended, come with the end."""

    def start(self) -> Iterator[Event]:
        """Before anything is said."""

    def thought(self, index: int, piece: str) -> Iterator[Event]:
        """The thought of a reply goes on."""

    def text(self, index: int, piece: str) -> Iterator[Event]:
        """The text of a reply goes on."""

    def end(self, replies: Sequence[ModelReply]) -> Iterator[Event]:
        """After the last piece: calls, usage, the end."""

    def error(self, problem: Json) -> Event:
        """Something failed after the stream had begun; `problem` is the API's form of it."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API: how its requests are read and its replies are written."""

    name: str
    parse: Callable[[Json], ModelRequest]
    body: Callable[[ModelRequest, Sequence[ModelReply]], Json]
    writer: Callable[[ModelRequest, Sequence[ReplyHead]], StreamWriter]
    error: Callable[[ApiError], Json]


# Reading fields. What is null is left out.


def text_field(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise bad(f"'{name}' must be a text", name)
    return value


def number_field(body: Mapping[str, Any], *names: str) -> int | None:
    """The first of these fields that is given: a whole number above 0."""
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise bad(f"'{name}' must be a whole number above 0, not {value!r:.40}", name)
        return value
    return None


def flag_field(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if not isinstance(value, bool | None):
        raise bad(f"'{name}' must be true or false, not {value!r:.40}", name)
    return bool(value)


def stream_options(body: Mapping[str, Any], *names: str) -> dict[str, bool]:
    """The flags of these names, which are for streams alone."""
    options = body.get("stream_options")
    if options is None:
        return dict.fromkeys(names, False)
    if not isinstance(options, dict):
        raise bad(f"'stream_options' must be an object, not {options!r:.40}", "stream_options")
    if not flag_field(body, "stream"):
        raise bad("'stream_options' is for streams: set 'stream' to true", "stream_options")
    try:
        return {name: flag_field(options, name) for name in names}
    except ApiError as error:
        raise bad(f"stream_options: {error}", f"stream_options.{error.param}") from None


def stops_field(value: Any, name: str) -> tuple[str, ...]:
    found = [value] if isinstance(value, str) else value or []
    if not isinstance(found, list) or not all(isinstance(one, str) and one for one in found):
        raise bad(f"'{name}' must be a text or a list of texts, none of them empty", name)
    if len(found) > MOST_STOPS:
        raise bad(f"'{name}' may have {MOST_STOPS} texts at most", name)
    return tuple(found)


def asked_of(body: Mapping[str, Any], names: Sequence[str]) -> Json:
    """The fields of these names that are given, numbers where there must be numbers."""
    found = {name: body[name] for name in names if body.get(name) is not None}
    for name, value in found.items():
        if name != "logit_bias" and (not isinstance(value, int | float) or isinstance(value, bool)):
            raise bad(f"'{name}' must be a number, not {value!r:.40}", name)
        if name in _WHOLE:
            if value != value // 1 or not -(2**63) <= value < 2**64:
                raise bad(f"'{name}' must be a whole number of 64 bits, not {value!r:.40}", name)
            found[name] = int(value)
    return found


def refuse_images(request: ModelRequest, images: ImageTokens | None) -> None:
    """Refuse images where the model reads text only."""
    for number, message in enumerate(request.messages):
        if message.media and images is None:
            where = request.place(number)
            raise bad(f"this model reads text only: {where} holds an image", where, "no_images")


async def check_images(request: ModelRequest, images: ImageTokens | None, pixels: WorkBudget) -> None:
    """Render, and decode the images in a thread; an unreadable image is the client's error.

    Images of all requests together have so many pixels as the budget says while they are decoded.
    """
    refuse_images(request, images)
    for number, message in enumerate(request.messages):
        for media in message.media:
            assert images is not None
            try:
                await pixels.run(images.pixels(media), images.tokens, media)
            except ImageError as error:
                where = request.place(number)
                raise bad(f"{where}: {error}", where, "invalid_image") from None


def arguments_text(call: ToolCall) -> str:
    """A call's arguments as clients get them."""
    return json.dumps(call.arguments, ensure_ascii=False)


def unknown_model(name: str, known: Sequence[str]) -> ApiError:
    """A model that is not served."""
    listed = ", ".join(known)
    message = f"the model {name!r:.100} does not exist here; there are: {listed}"
    return ApiError(404, message, code="model_not_found", param="model")


def reward_number(value: Any, name: str, *, is_text: bool = False) -> float:
    """A reward that a client sent, as a number of JSON or in a header's text."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, bool) or isinstance(value, str) != is_text or not abs(number) <= MOST_REWARD:
        bounds = f"between {-MOST_REWARD:,.0f} and {MOST_REWARD:,.0f}"
        is_large = isinstance(value, int) and not isinstance(value, bool)
        shown = "a larger one" if is_large else f"{value!r:.40}"
        raise bad(f"{name} must be a number {bounds}, not {shown}", name)
    return number
