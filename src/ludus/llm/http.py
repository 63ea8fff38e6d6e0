"""Shared by clients of OpenAI-compatible servers: the server's key, its models, and how answers are read."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit, urlunsplit

from ludus.core.failures import ConfigError
from ludus.core.messages import Json
from ludus.remote.client import (
    BadResponse,
    ConnectionFailed,
    HttpClient,
    RetryPolicy,
    ServerReply,
    load_aiohttp,
)

T = TypeVar("T")

_CHECK_SECONDS = 30.0
_BROKEN_OFF = ("abort", "error")


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
    if len(text) > max_tokens * _CHARS_PER_TOKEN + _SPARE_CHARS:
        raise BadResponse(f"{len(text)} characters came for {max_tokens} tokens")
    return text.encode("utf-8", errors="replace").decode("utf-8")


_CHARS_PER_TOKEN = 64
_SPARE_CHARS = 4096


def token_count(body: Json, which: str) -> int | None:
    """`prompt_tokens` or `completion_tokens` as the server counts them, where it does."""
    usage = body.get("usage")
    count = usage.get(which) if isinstance(usage, dict) else None
    return count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else None


API_KEY = "LUDUS_API_KEY"
"""The environment variable with the server's key."""
_SCHEMES = ("http://", "https://")


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
