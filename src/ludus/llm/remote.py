"""OpenAI-compatible servers: addresses, the client, how answers are read; a chat model behind one."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from ludus.core.failures import Boundary, ConfigError, InfraError
from ludus.core.generation import ChatOptions, ChatReply
from ludus.core.messages import Json, Media, Message
from ludus.remote.client import (
    BadResponse,
    ConnectionFailed,
    HttpClient,
    PerLoop,
    RequestFailed,
    RetryPolicy,
    ServerReply,
    load_aiohttp,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

_CHECK_SECONDS = 30.0
_BROKEN_OFF = ("abort", "error")
_MOST_CHARS_PER_TOKEN = 64
_SPARE_CHARS = 4096
API_KEY = "LUDUS_API_KEY"
"""The environment variable with the server's key."""
_SCHEMES = ("http://", "https://")
_IMAGES = {
    b"\x89PNG": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
}
_CHARS_PER_TOKEN = 3
"""Where a server does not count: rather too many tokens than too few."""


class ModelServerClient(HttpClient):
    """Requests to one OpenAI-compatible server, with its key."""

    def __init__(self, key: str | None, connections: int) -> None:
        """The key is `LUDUS_API_KEY` from the environment when it is None."""
        load_aiohttp()
        key = (key if key is not None else os.environ.get(API_KEY, "")).strip()
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        super().__init__(
            headers,
            purpose="a model behind an address",
            unpacks=False,  # a small body that unpacks to gigabytes
            limit=connections,
        )

    async def post(self, url: str, body: Json, policy: RetryPolicy, read: Callable[[Json], T]) -> T:
        """What `read` makes of the answer to a body that is posted, again if need be; see `request`."""
        return await self.request("POST", url, body, policy, read, repeatable=True)

    async def reach(self, address: Address) -> ServerReply:
        """The server's list of models; `ConfigError` where there is none, or it wants another key."""
        try:
            async with asyncio.timeout(_CHECK_SECONDS):
                reply = await self.send("GET", f"{address.url}/models")
        except (ConnectionFailed, TimeoutError) as error:
            problem = str(error) or f"no answer within {_CHECK_SECONDS:g} seconds"
            raise ConfigError(f"there is no model server at {address.url}: {problem}") from error
        if reply.status in (401, 403):
            raise ConfigError(refusal(address, reply))
        return reply

    async def find_model(self, address: Address) -> tuple[Address, list[str]]:
        """The address with its model, the server's only one if none is named; and all that the server lists.

        Raises `ConfigError` where there is no server, it wants another key, or has several models.
        """
        reply = await self.reach(address)
        try:
            names = model_names(reply.body) if reply.status == 200 else []
        except BadResponse:
            names = []
        if address.model is not None:
            return address, names
        if len(names) != 1:
            listed = ", ".join(sorted(names)[:20]) or f"it does not say ({reply.problem})"
            raise ConfigError(
                f"which model of {address.url}? Put its name after a #, as in {address.url}#NAME. "
                f"It has: {listed}"
            )
        return Address(address.url, names[0]), names


def refusal(address: Address, reply: ServerReply) -> str:
    """Error text for a refusal: its meaning and the fix."""
    where = f"{address.url} refuses ({reply.problem})"
    if reply.status in (401, 403):
        return f"{where}: put the server's key into the environment as {API_KEY}"
    if reply.status == 404:
        return f"{where}: is the address right (most end in /v1), and the model {address.model!r}?"
    return where


def model_names(body: Json) -> list[str]:
    """The models that a server says it has."""
    listed = body.get("data")
    if not isinstance(listed, list):
        raise BadResponse("the list of models has no 'data'")
    return [m["id"] for m in listed if isinstance(m, dict) and isinstance(m.get("id"), str)]


def first_choice(body: Json) -> Json:
    """The first choice of a completion."""
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise BadResponse("the answer has no choices")
    choice: Json = choices[0]
    reason = choice.get("finish_reason")
    if reason in _BROKEN_OFF:
        raise BadResponse(f"the server broke off: finish_reason is {reason!r}")
    return choice


def checked_text(text: object, max_tokens: int) -> str:
    """A completion's text, if it is one of at most about `max_tokens` tokens."""
    if not isinstance(text, str):
        raise BadResponse(f"the answer's text is {type(text).__name__}, not text")
    if len(text) > max_tokens * _MOST_CHARS_PER_TOKEN + _SPARE_CHARS:
        raise BadResponse(f"{len(text)} characters came for {max_tokens} tokens")
    return text.encode("utf-8", errors="replace").decode("utf-8")


def token_count(body: Json, which: str) -> int | None:
    """`prompt_tokens` or `completion_tokens` as the server counts them, where it does."""
    usage = body.get("usage")
    count = usage.get(which) if isinstance(usage, dict) else None
    return count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else None


@dataclass(frozen=True, slots=True)
class Address:
    """A server's base URL and one of its models (None: the only one it has): http://127.0.0.1:8000/v1#NAME."""

    url: str
    model: str | None = None

    @classmethod
    def parse(cls, text: str) -> Address:
        """From the base address, which ends in /v1 as a rule, with the model's name after a #."""
        try:
            parts = urlsplit(text)
            host, _ = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"{text!r} is not an address: {error}") from None
        if not is_address(text) or not host:
            raise ConfigError(f"{text!r} is not an address such as http://127.0.0.1:8000/v1#NAME")
        if parts.username or parts.password:
            raise ConfigError(
                "an address with a password in it would end up in reports: put the key into the "
                f"environment as {API_KEY} instead"
            )
        if parts.query:
            raise ConfigError(f"an address has no query: leave out '?{parts.query}'")
        url = urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/"), "", ""))
        return cls(url, parts.fragment or None)

    def __str__(self) -> str:
        return self.url if self.model is None else f"{self.url}#{self.model}"


def is_address(text: str) -> bool:
    """Whether this names a server rather than a folder or a model on the hub."""
    return text.lower().startswith(_SCHEMES)


class ChatError(InfraError):
    """A model that was asked gave no answer, or none that could be used. It has been retried already."""

    def __init__(self, message: str, *, attempts: int = 1) -> None:
        super().__init__(Boundary.CHAT, message, attempts=attempts, retriable=False)


class _Deadlines:
    """The deadlines of an event loop's requests to one server, which are put off while it answers others.

    A server of one model on a CPU answers one request after the other: what waits in its queue is not lost.
    Each may wait for as long again as for every request before it, so that one that hangs ends all the same.
    """

    def __init__(self) -> None:
        self._open: dict[asyncio.Timeout, tuple[float, float]] = {}
        """Of each, its seconds and the latest that it may be put off to."""

    @asynccontextmanager
    async def timeout(self, seconds: float) -> AsyncIterator[asyncio.Timeout]:
        """As `asyncio.timeout`."""
        latest = asyncio.get_running_loop().time() + seconds * (len(self._open) + 1)
        async with asyncio.timeout(seconds) as deadline:
            self._open[deadline] = seconds, latest
            try:
                yield deadline
            finally:
                del self._open[deadline]

    def put_off(self) -> None:
        """The server has answered."""
        now = asyncio.get_running_loop().time()
        for deadline, (seconds, latest) in self._open.items():
            if not deadline.expired():
                deadline.reschedule(min(now + seconds, latest))

    async def close(self) -> None:
        """Nothing to release."""


class RemoteChatModel:
    """A `ChatModel` over HTTP. A request has one deadline over all its attempts (`_Deadlines`)."""

    def __init__(
        self,
        address: Address | str,
        *,
        key: str | None = None,
        policy: RetryPolicy | None = None,
        connections: int = 64,
        request: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        """`request` has further fields of every request; None leaves a field out that would be sent.

        The key is `LUDUS_API_KEY` from the environment when left out. `name` is what reports and caches call
        the model: the address, unless given.
        """
        self.address = Address.parse(address) if isinstance(address, str) else address
        self._name = name
        self._policy = policy or RetryPolicy()
        self._request = dict(request or {})
        self._http = ModelServerClient(key, connections)
        self._deadlines = PerLoop(_Deadlines)
        self._takes_json_mode = True

    @property
    def name(self) -> str:
        return self._name or str(self.address)

    async def chat(self, messages: Sequence[Message], options: ChatOptions = ChatOptions()) -> ChatReply:  # noqa: B008 - frozen
        if self.address.model is None:
            self.address, _ = await self._http.find_model(self.address)
        body = self._body(messages, options)
        try:
            return await self._ask(body, options)
        except RequestFailed as error:
            if (
                error.reply is not None
                and error.reply.status in (400, 422)
                and "response_format" in body
            ):
                log.info("%s takes no response_format: it is left out from now on", self.address.url)
                self._takes_json_mode = False
                return await self.chat(messages, options)
            message = str(error) if error.reply is None else refusal(self.address, error.reply)
            raise ChatError(message, attempts=error.attempts) from error

    async def close(self) -> None:
        await self._http.close()
        await self._deadlines.close()

    async def _ask(self, body: Json, options: ChatOptions) -> ChatReply:
        url = f"{self.address.url}/chat/completions"
        sent = sum(len(str(message["content"])) for message in body["messages"])
        read = partial(_read_reply, max_tokens=options.max_tokens, sent_chars=sent)
        deadlines = await self._deadlines.get()
        reply = await self._http.request(
            "POST", url, body, self._policy, read, repeatable=True, timeout=deadlines.timeout
        )
        deadlines.put_off()
        return reply

    def _body(self, messages: Sequence[Message], options: ChatOptions) -> Json:
        body: Json = {
            "model": self.address.model,
            "messages": [as_openai(message) for message in messages],
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
        }
        if options.seed is not None:
            body["seed"] = options.seed & 0x7FFFFFFF  # some servers take 32 bits only
        if options.wants_json and self._takes_json_mode:
            body["response_format"] = {"type": "json_object"}
        body |= self._request
        return {name: value for name, value in body.items() if value is not None}


def as_openai(message: Message) -> Json:
    """A message as the interface takes it: arguments of calls as JSON texts, media as parts."""
    sent = message.as_chat()
    for call in sent.get("tool_calls", ()):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    if message.media:
        text = [{"type": "text", "text": message.content}] if message.content else []
        sent["content"] = [*text, *(_image_part(item) for item in message.media)]
    return sent


def _image_part(item: Media) -> Json:
    if item.data is None:
        raise ChatError(f"the {item.kind} {item.sha256[:12]} cannot be sent: its bytes are not at hand")
    kind = next((kind for start, kind in _IMAGES.items() if item.data.startswith(start)), None)
    if kind is None:
        raise ChatError(f"the {item.kind} {item.sha256[:12]} is no PNG, JPEG, GIF or WebP image")
    url = f"data:{kind};base64,{base64.b64encode(item.data).decode('ascii')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _read_reply(body: Json, *, max_tokens: int, sent_chars: int) -> ChatReply:
    choice = first_choice(body)
    message = choice.get("message")
    if not isinstance(message, dict):
        raise BadResponse("the answer has no message")
    content = message.get("content")
    text = checked_text("" if content is None else content, max_tokens)  # a model may only have thought
    prompt, completion = (token_count(body, f"{kind}_tokens") for kind in ("prompt", "completion"))
    return ChatReply(
        text,
        prompt_tokens=prompt or 1 + sent_chars // _CHARS_PER_TOKEN,
        completion_tokens=completion or 1 + len(text) // _CHARS_PER_TOKEN,
        is_cut=choice.get("finish_reason") == "length",
    )
