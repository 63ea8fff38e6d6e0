"""`RemoteEngine`: an engine over an OpenAI-compatible server. It evaluates a model; it cannot train one.

What comes back is text, which is encoded again: it need not be the tokens that were sampled, and their
log-probabilities under the weights that would be trained are not known. So these are NaN in every completion,
and `pause` and `update_weights`, which a trainer needs, are refused.

Who waits for whom: each `generate` awaits its own HTTP request, with all its attempts within one deadline. At
most `connections` requests are in flight at once, the rest wait for one of them, within their deadline; the
number of callers is bounded by the rollout's `max_in_flight`. Nothing runs in the background.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit, urlunsplit

from ludus.core.failures import ConfigError, EngineError, MissingExtraError
from ludus.core.generation import Completion, FinishReason, Sampling
from ludus.core.messages import Json, Media
from ludus.core.tokenizer import Tokenizer
from ludus.engine.remote.openai_api import (
    MOST_STOPS,
    Answer,
    BadResponse,
    TranscriptTokenizer,
    WriteCalls,
    cut,
    model_names,
    read_answer,
    sampling_fields,
    write_hermes,
)

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger(__name__)

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
                "environment as LUDUS_API_KEY instead"
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


_CONNECT_SECONDS = 10.0
_MOST_BYTES = 32 * 1024 * 1024
_LONGEST_RETRY_AFTER = 60.0


class ConnectionFailed(Exception):
    """No usable response: no connection, a broken one, or a body that is not JSON."""


@dataclass(frozen=True, slots=True)
class ServerReply:
    """An HTTP status and its JSON object, if any."""

    status: int
    body: Json
    retry_after: float = 0.0
    """Seconds that the server asked to wait."""

    @property
    def problem(self) -> str:
        """What the server says is wrong, cut to what fits in a message."""
        error = self.body.get("error", self.body.get("detail", self.body.get("message", "")))
        if isinstance(error, dict):
            error = error.get("message", "")
        said = " ".join(str(error).split())
        return f"status {self.status}{': ' if said else ''}{said:.300}"


class HttpClient:
    """One pool of connections. It is made in the event loop that uses it first, and closed by `close`."""

    def __init__(self, key: str, connections: int) -> None:
        self._headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None

    async def send(self, method: str, url: str, body: Json | None = None) -> ServerReply:
        """One attempt. The caller has a deadline over all attempts."""
        http = load_aiohttp()
        session = self._opened()
        try:
            # a redirect would carry the key somewhere else
            async with session.request(method, url, json=body, allow_redirects=False) as response:
                return await _read_response(response)
        except TimeoutError as error:  # the connection's own; a deadline outside is a cancellation here
            raise ConnectionFailed(f"no connection within {_CONNECT_SECONDS:g} seconds") from error
        except (http.ClientError, ConnectionError, ValueError) as error:
            raise ConnectionFailed(f"{type(error).__name__}: {error!s:.300}") from error

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            http = load_aiohttp()
            self._session = http.ClientSession(
                connector=http.TCPConnector(limit=self._connections),
                timeout=http.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
                headers=self._headers,
                cookie_jar=http.DummyCookieJar(),
                auto_decompress=False,  # a small body that unpacks to gigabytes
            )
        return self._session


async def _read_response(response: aiohttp.ClientResponse) -> ServerReply:
    data = bytearray()
    async for piece in response.content.iter_any():
        data += piece
        if len(data) > _MOST_BYTES:
            raise ConnectionFailed(f"an answer of more than {_MOST_BYTES:,} bytes")
    wait = _retry_after(response.headers.get("Retry-After", ""))
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        if response.status == 200:
            raise ConnectionFailed(f"an answer that is not JSON: {error!s:.200}") from error
        body = {"error": bytes(data[:300]).decode("utf-8", errors="replace")}
    if not isinstance(body, dict):
        if response.status == 200:
            raise ConnectionFailed(f"an answer that is no JSON object but {type(body).__name__}")
        body = {}
    return ServerReply(response.status, body, wait)


def _retry_after(text: str) -> float:
    """In seconds; a date, which servers may also send, is ignored."""
    with contextlib.suppress(ValueError):
        return min(max(0.0, float(text)), _LONGEST_RETRY_AFTER)
    return 0.0


def load_aiohttp() -> Any:
    """The package, or an error that says how to get it."""
    with contextlib.suppress(ImportError):
        import aiohttp

        return aiohttp
    raise MissingExtraError("aiohttp", "serve", "a model behind an address")


KEY = "LUDUS_API_KEY"
"""The environment variable with the server's key."""
NOT_KNOWN = math.nan
"""The log-probability of a token that was not sampled here; it makes a loss NaN."""

_RETRIED_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_LONGEST_PAUSE = 30.0
_CHECK_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """How to talk to a server."""

    prompt: Literal["tokens", "text"] = "tokens"
    """How a prompt is sent with the model's own tokenizer: as ids, which is exact, or as text."""
    seconds: float = 600.0
    """One request with all its attempts."""
    retries: int = 6
    """How often a request is sent again after an overload (429), an error of the server's, or none at all."""
    first_pause: float = 0.5
    """Seconds before the second attempt; the pause doubles, and a random share of it is taken."""
    connections: int = 256
    """Most requests on their way at once."""
    tools: Literal["text", "native"] = "text"
    """Over chat: tools as text in the system message, or in the request's `tools` (agent.format = "hermes")."""
    request: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of every request; None leaves a field out that would be sent."""


class RemoteEngine:
    """An `Engine` over `/completions`, or over `/chat/completions` when given a `TranscriptTokenizer`."""

    def __init__(
        self,
        address: Address | str,
        tokenizer: Tokenizer,
        *,
        key: str | None = None,
        options: RemoteOptions | None = None,
        write_calls: WriteCalls = write_hermes,
    ) -> None:
        """The key is `LUDUS_API_KEY` from the environment when left out.

        A server may answer with native `tool_calls`; `write_calls` writes them as the run's format does.
        """
        load_aiohttp()
        self.address = Address.parse(address) if isinstance(address, str) else address
        self.options = options or RemoteOptions()
        self._tokenizer = tokenizer
        self._write_calls = write_calls
        self._transport = HttpClient(
            (key if key is not None else os.environ.get(KEY, "")).strip(), self.options.connections
        )
        self._running: dict[str | None, set[asyncio.Task[Answer]]] = {}
        self._tells_stops = True
        self._has_warned = False
        self._is_closed = False

    @property
    def policy_version(self) -> int:
        return 0

    async def check(self) -> None:
        """Find the server and the model, before many episodes fail for the same reason."""
        url = f"{self.address.url}/models"
        try:
            async with asyncio.timeout(_CHECK_SECONDS):
                reply = await self._transport.send("GET", url)
        except (ConnectionFailed, TimeoutError) as error:
            problem = str(error) or f"no answer within {_CHECK_SECONDS:g} seconds"
            raise ConfigError(f"there is no model server at {self.address.url}: {problem}") from error
        if reply.status in (401, 403):
            raise ConfigError(self._refusal(reply))
        try:
            names = model_names(reply.body) if reply.status == 200 else []
        except BadResponse:
            names = []
        if self.address.model is None:
            if len(names) != 1:
                listed = ", ".join(sorted(names)[:20]) or f"it does not say ({reply.problem})"
                raise ConfigError(
                    f"which model of {self.address.url}? Put its name after a #, as in "
                    f"{self.address.url}#NAME. It has: {listed}"
                )
            self.address = Address(self.address.url, names[0])
        elif names and self.address.model not in names:
            # some servers serve more than they list: the first request will tell
            log.warning("%s does not list the model %s", self.address.url, self.address.model)

    async def generate(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        media: Sequence[Media] = (),
    ) -> Completion:
        if self._is_closed:
            raise EngineError("the engine is closed", retriable=False)
        if media:
            raise EngineError("this engine sends text only, not media", retriable=False)
        task = asyncio.ensure_future(self._answer(list(tokens), sampling))
        self._running.setdefault(session, set()).add(task)
        try:
            await asyncio.wait([task])
        finally:
            self._forget(session, task)
            if not task.done():  # the caller was cancelled
                task.cancel()
                await asyncio.wait([task])
        if task.cancelled():
            if self._is_closed:
                raise EngineError("the engine is closed", retriable=False)
            return Completion([], [], FinishReason.ABORTED)
        answer = task.result()
        ids = self._encode(answer.text)
        return Completion(ids, [NOT_KNOWN] * len(ids), answer.finish, stop=answer.stop)

    def _forget(self, session: str | None, task: asyncio.Task[Answer]) -> None:
        running = self._running[session]
        running.discard(task)
        if not running:
            del self._running[session]

    @property
    def _is_chat(self) -> bool:
        return isinstance(self._tokenizer, TranscriptTokenizer)

    def _encode(self, text: str) -> list[int]:
        """In a transcript, marks are ours alone; the model's own tokenizer knows its special tokens."""
        return self._tokenizer.encode_text(text) if self._is_chat else self._tokenizer.encode(text)

    async def _answer(self, tokens: list[int], sampling: Sampling) -> Answer:
        sends_stops = self._tells_stops and 0 < len(set(sampling.stop)) <= MOST_STOPS
        answer = await self._ask(tokens, sampling, stops=sends_stops)
        if sends_stops and answer.finish is FinishReason.STOP_TOKEN and not answer.tells_stop:
            # The server leaves the stop string out of the text and does not name it, so whether a tool call was
            # closed is unknown. From now on stop strings are not sent, and the text is cut here.
            log.info("%s does not say which stop string it met", self.address.url)
            self._tells_stops = False
            answer = await self._ask(tokens, sampling, stops=False)
        ends = [self._tokenizer.decode([token]) for token in sampling.stop_tokens]
        return cut(answer, sampling.stop, ends)

    async def _ask(self, tokens: list[int], sampling: Sampling, *, stops: bool) -> Answer:
        body = sampling_fields(sampling, stops=stops)
        if isinstance(self._tokenizer, TranscriptTokenizer):
            path = "chat/completions"
            if self.options.tools == "native":
                body["messages"], tools = self._tokenizer.native(tokens)
                body["tools"] = tools or None
            else:
                body["messages"] = self._tokenizer.messages(tokens)
        else:
            as_text = self.options.prompt == "text"
            path = "completions"
            body["prompt"] = self._tokenizer.decode(tokens) if as_text else tokens
        body["model"] = self.address.model
        body |= self.options.request
        body = {name: value for name, value in body.items() if value is not None}
        answer = await self._send_with_retries(path, body, sampling)
        self._compare(len(tokens), answer.prompt_tokens)
        return answer

    async def _send_with_retries(self, path: str, body: Json, sampling: Sampling) -> Answer:
        """The answer to a request, with retries while that may help and there is time."""
        url, options = f"{self.address.url}/{path}", self.options
        problem = "no answer"
        try:
            async with asyncio.timeout(options.seconds) as deadline:
                for attempt in range(options.retries + 1):
                    reply: ServerReply | None = None
                    try:
                        reply = await self._transport.send("POST", url, body)
                        if reply.status == 200:
                            return read_answer(
                                reply.body,
                                chat="messages" in body,
                                sampling=sampling,
                                write=self._write_calls,
                            )
                        problem = reply.problem
                    except (ConnectionFailed, BadResponse) as error:
                        problem = str(error)
                    if reply is not None and reply.status not in (200, *_RETRIED_STATUS):
                        raise EngineError(self._refusal(reply), retriable=False)
                    if attempt < options.retries:
                        await asyncio.sleep(self._pause(attempt, reply))
        except TimeoutError as error:
            if not deadline.expired():
                raise
            message = f"{url} gave no answer within {options.seconds:g} seconds (last: {problem})"
            raise EngineError(message, retriable=False) from error
        # not worth a new episode: it was tried often enough
        message = f"{url} gave no usable answer in {options.retries + 1} attempts: {problem}"
        raise EngineError(message, retriable=False)

    def _pause(self, attempt: int, reply: ServerReply | None) -> float:
        longest = min(_LONGEST_PAUSE, self.options.first_pause * 2**attempt)
        return (reply.retry_after if reply else 0.0) + random.uniform(longest / 2, longest)

    def _refusal(self, reply: ServerReply) -> str:
        where = f"{self.address.url} refuses ({reply.problem})"
        if reply.status in (401, 403):
            return f"{where}: put the server's key into the environment as {KEY}"
        if reply.status == 404:
            return (
                f"{where}: is the address right (most end in /v1), and the model {self.address.model!r}?"
            )
        if reply.status in (400, 422) and not self._is_chat and self.options.prompt == "tokens":
            return f"{where}: a server that takes no token ids wants prompts as text (prompt='text')"
        return where

    def _compare(self, ours: int, theirs: int | None) -> None:
        """Say once that the server reads another prompt than the one that was rendered."""
        if self._is_chat or theirs in (None, ours) or self._has_warned:
            return
        self._has_warned = True
        log.warning(
            "%s counts %s tokens in a prompt of %s: another tokenizer, or a second beginning-of-text token",
            self.address.url,
            theirs,
            ours,
        )

    async def score(self, tokens: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        raise EngineError("a model behind an address gives no log-probabilities", retriable=False)

    async def fork(self, session: str, into: str) -> None:
        """Nothing is kept here: the server has a prefix cache, or has none."""

    async def release(self, session: str) -> None:
        """Nothing is kept here."""

    async def abort(self, session: str) -> None:
        for task in self._running.get(session, ()):
            task.cancel()

    async def pause(self) -> None:
        raise self._untrainable()

    async def resume(self) -> None:
        """It cannot have been paused."""

    async def update_weights(self) -> int:
        raise self._untrainable()

    def _untrainable(self) -> EngineError:
        return EngineError(
            f"{self.address} can be evaluated and not trained: its weights are elsewhere, and what it said "
            "has no log-probabilities. Name a model's folder or hub name as model.name",
            retriable=False,
        )

    async def close(self) -> None:
        self._is_closed = True
        for task in [task for running in self._running.values() for task in running]:
            task.cancel()
        await self._transport.close()
