"""HTTP to tool servers: pooled connections, whole or streamed answers, retries, and what answers mean."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import math
import os
import resource
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pydantic import TypeAdapter

from ludus.core.failures import Boundary, ConfigError, InfraError
from ludus.core.messages import Json, ToolResult
from ludus.core.strict_json import decode
from ludus.remote.client import ConnectionFailed, HttpClient, ResponseLost, backoff
from ludus.tools.wire import (
    DEADLINE_HEADER,
    INSTANCE_HEADER,
    JSON_TYPE,
    STREAM_TYPE,
    ErrorBody,
    ErrorKind,
    failure_from,
    result_from_json,
)

if TYPE_CHECKING:
    import aiohttp

_log = logging.getLogger(__name__)

_ERROR = TypeAdapter(ErrorBody)
_CONNECT_SECONDS = 5.0
_MOST_BYTES = 256 * 1024 * 1024
_DEEPEST = 100
_OUR_MISTAKE = frozenset(
    {ErrorKind.UNAUTHORIZED, ErrorKind.FORBIDDEN, ErrorKind.NOT_FOUND, ErrorKind.BAD_TASK}
)
_FAILURES = frozenset({ErrorKind.FAILED, ErrorKind.UNKNOWN_OUTCOME, ErrorKind.SESSION_LOST})
_FIRST_CONTACT_SECONDS = 10.0
_SAY_AFTER_SECONDS = 5.0
_SAY_AGAIN_SECONDS = 60.0
_NEVER_REACHED = "; is the address right, and was it started (ludus serve tools, ludus serve env)?"


def own_token() -> tuple[str, Path]:
    """The token by which servers and clients of one user on one machine know each other, and its file.

    Other users of the machine reach our loopback too. The file is made at first need, for its owner alone;
    `OSError` where that cannot be done.
    """
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    path = Path(state, "ludus", "token")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        made = path.with_name(f"token.{secrets.token_hex(8)}")
        made.touch(mode=0o600, exist_ok=False)
        try:
            made.write_text(secrets.token_urlsafe(32))
            with contextlib.suppress(FileExistsError):  # another process was first
                path.hardlink_to(made)  # whole, or not at all
        finally:
            made.unlink()
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(f"{path} is not a file that its owner alone can read")
    return path.read_text(encoding="ascii").strip(), path


@dataclass(frozen=True, slots=True)
class ServerResponse:
    """An answer. `content` is the text of a result that came as a stream."""

    status: int
    body: Json
    instance: str
    content: str | None = None


class ToolHttpClient(HttpClient):
    """Sends requests, each once: whether to send one again depends on what it was (`RetryBudget`)."""

    def __init__(self, token: str | None, connections: int, where: str) -> None:
        """`connections` are the most at a time; requests beyond wait for one of them. `where` names the servers
        for people."""
        self.has_answered = False
        """Whether any server has ever answered."""
        self._where = where
        self._silent_since: float | None = None
        self._say_at, self._was_told = 0.0, False
        headers = {"Accept": f"{JSON_TYPE}, {STREAM_TYPE}", "Content-Type": JSON_TYPE}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # half of them at most
        super().__init__(
            headers,
            purpose="calling tools on a server",
            connect_seconds=_CONNECT_SECONDS,
            most_bytes=_MOST_BYTES,
            limit=connections if most == resource.RLIM_INFINITY else min(connections, max(1, most // 2)),
            keepalive_timeout=30.0,
        )

    async def attempt(
        self, method: str, url: str, data: bytes | None, seconds: float | None
    ) -> ServerResponse:
        """One attempt; `TimeoutError` when the answer takes longer than `seconds`, or `ConnectionFailed`."""
        headers = {} if seconds is None else {DEADLINE_HEADER: str(max(0, int(seconds * 1000)))}
        try:
            async with (
                asyncio.timeout(seconds),
                self.open(method, url, data=data, headers=headers) as response,
            ):
                answer = await self._answer(response)
        except ConnectionFailed as error:
            raise type(error)(f"{url}: {error}") from error
        self.has_answered = True
        return answer

    def note_answer(self) -> None:
        """A server answered: the end of an outage, if there was one."""
        if self._was_told:
            _log.warning("the server at %s answers again", self._where)
        self._silent_since, self._was_told = None, False

    def note_silence(self, problem: str, patience: float) -> None:
        """No server could be reached: say so once it has lasted, and again while it lasts."""
        now = time.monotonic()
        if self._silent_since is None:
            self._silent_since, self._say_at = now, now + _SAY_AFTER_SECONDS
        if now >= self._say_at:
            self._say_at, self._was_told = now + _SAY_AGAIN_SECONDS, True
            _log.warning(
                "the server at %s has not answered for %.0f seconds (%s). What needs it waits for %g seconds; "
                "then its episode is played once more. Start the server again, and all goes on",
                *(self._where, now - self._silent_since, problem, patience),
            )

    async def _answer(self, response: aiohttp.ClientResponse) -> ServerResponse:
        instance = response.headers.get(INSTANCE_HEADER, "")
        if response.content_type == STREAM_TYPE:
            body, content = await self._stream(response)
            return ServerResponse(response.status, body, instance, content)
        data = await self.read(response)
        try:
            body = json.loads(data)
        except (ValueError, RecursionError) as error:
            if response.status in (404, 405):  # something else, which trying again does not change
                raise InfraError(
                    Boundary.SERVER,
                    f"{response.url} answered {response.status}, and not in JSON: no tool or environment "
                    "server of Ludus; is the address right?",
                    retriable=False,
                ) from error
            raise ResponseLost(
                f"status {response.status} with a body that is not JSON: {error}"
            ) from error
        if not isinstance(body, dict):
            raise ResponseLost(f"status {response.status} with a body that is no object")
        if response.status >= 500 and not isinstance(body.get("error"), dict):
            raise ResponseLost(
                f"status {response.status} from something that is no tool server: a proxy, perhaps"
            )
        return ServerResponse(response.status, body, instance)

    async def _stream(self, response: aiohttp.ClientResponse) -> tuple[Json, str]:
        """A result in lines: a head, pieces of text, and an end that says how much there was."""
        head: Json | None = None
        pieces: list[str] = []
        rest, size = b"", 0
        try:
            async for data in response.content.iter_any():
                size += len(data)
                self.check_size(size)
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    message = json.loads(line)
                    if "result" in message:
                        head = message["result"]
                    elif "text" in message:
                        pieces.append(message["text"])
                    elif message.get("end") == sum(map(len, pieces)) and head is not None:
                        return head, "".join(pieces)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ResponseLost(f"a stream that could not be read: {error}") from error
        raise ResponseLost("a stream that ended too early")


class RetryBudget:
    """One operation's attempts: doubling pauses with jitter (`backoff`), within one deadline."""

    def __init__(self, http: ToolHttpClient, seconds: float, unreachable_seconds: float) -> None:
        self._http = http
        if not http.has_answered:  # more likely a wrong address than a server that restarts
            unreachable_seconds = min(unreachable_seconds, _FIRST_CONTACT_SECONDS)
        self._seconds, self._unreachable_seconds = seconds, unreachable_seconds
        self._deadline = time.monotonic() + seconds
        self._unreachable_since: float | None = None
        self._problem = ""
        self.attempts = 0

    @property
    def seconds_left(self) -> float:
        """Always a little, so that the last attempt is answered by the server and not by the clock."""
        return max(0.001, self._deadline - time.monotonic())

    @property
    def is_spent(self) -> bool:
        """Whether there is no time for another attempt."""
        now, since = time.monotonic(), self._unreachable_since
        return now >= self._deadline or (since is not None and now - since > self._unreachable_seconds)

    def reached(self) -> None:
        """A server answered, whatever it said."""
        self._unreachable_since = None
        self._http.note_answer()

    def unreachable(self) -> None:
        """No server could be reached."""
        if self._unreachable_since is None:
            self._unreachable_since = time.monotonic()

    async def pause(self, problem: str, at_least: float = 0.0) -> None:
        """Wait before the next attempt, for as long as a server asked and some more; or give up."""
        self._problem = problem
        if self._unreachable_since is not None:
            self._http.note_silence(problem, self._unreachable_seconds)
        if self.is_spent:
            message = f"no result from the tool server after {self.attempts} attempts: {problem}"
            if self._http.has_answered:
                raise InfraError(Boundary.SERVER, message, attempts=self.attempts)
            raise self.never_reached(message)
        delay = backoff(max(0, self.attempts - 1), at_least=at_least)
        await asyncio.sleep(min(delay, self.seconds_left))

    def too_late(self) -> InfraError:
        """The failure of an attempt that was not answered in time."""
        message = f"no answer from the tool server within {self._seconds:g} seconds"
        if self._problem:
            message += f"; what it said before: {self._problem}"
        if not self._http.has_answered:
            message += _NEVER_REACHED
        return InfraError(Boundary.SERVER, message, attempts=self.attempts)

    def never_reached(self, message: str) -> InfraError:
        """The failure where no server has ever answered, which another attempt would not change."""
        text = message + _NEVER_REACHED
        return InfraError(Boundary.SERVER, text, attempts=self.attempts, retriable=False)


def normalized(address: str) -> str:
    """`http://host:port`, also of `host:port`; anything else is refused."""
    full = address if "://" in address else f"http://{address}"
    try:
        parts = urlsplit(full)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment or parts.username:
        raise ConfigError(f"{address!r} is not a valid tool server address; write http://host:port")
    return full.rstrip("/")


def is_loopback(host: str) -> bool:
    """Whether a host is this machine and nothing else, as its name says."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def in_order(addresses: Sequence[str], episode: str) -> list[str]:
    """The addresses, the episode's own first. Adding or losing one moves only the episodes it had."""

    def weight(address: str) -> bytes:
        text = f"{address}\n{episode}".encode("utf-8", "replace")
        return hashlib.blake2b(text, digest_size=8).digest()

    return sorted(addresses, key=weight)


def unsendable(arguments: Any) -> str:
    """What is wrong with arguments that no JSON can carry or that are nested too deeply; or nothing."""
    level, depth = [arguments], 0
    while level:
        depth += 1
        if depth > _DEEPEST:
            return f"the arguments are nested more than {_DEEPEST} levels deep"
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                if not all(isinstance(key, str) for key in value):
                    return "the names of arguments must be text"
                inner.extend(value.values())
            elif isinstance(value, (list, tuple)):
                inner.extend(value)
        if any(isinstance(value, float) and not math.isfinite(value) for value in inner):
            return "a number in the arguments is not finite"
        level = [value for value in inner if isinstance(value, (dict, list, tuple))]
    return "" if isinstance(arguments, dict) else "the arguments must be an object"


def result_of(reply: ServerResponse) -> ToolResult:
    """The result in an answer."""
    try:
        return result_from_json(reply.body, reply.content)
    except (TypeError, ValueError) as error:
        raise protocol_error(error) from error


def error_of(reply: ServerResponse) -> ErrorBody:
    """Why an answer has no result."""
    said = reply.body.get("error")
    try:
        if not isinstance(said, dict):
            raise ValueError("without an error")
        # a newer server may say more
        return decode(_ERROR, {name: said[name] for name in ErrorBody.model_fields if name in said})
    except ValueError as problem:
        raise protocol_error(f"status {reply.status}, {problem}") from problem


def failure_of(error: ErrorBody, attempts: int, address: str) -> Exception:
    """What an error of the server at `address` means to an episode."""
    kind, message = error.kind, error.message
    if kind is ErrorKind.UNAUTHORIZED:
        return ConfigError(
            f"{address} rejected the token (401): none was sent, or not the server's. Set LUDUS_TOKEN to the "
            "server's, or name a file that holds it: for an environment, [agent.pools.NAME] options = "
            '{ token_file = "FILE" }; for tools, { tool = "ADDRESS", token = "..." }. The server has the '
            "LUDUS_TOKEN or the --token-file that it was started with; or the line that it printed names a "
            "token_file"
        )
    if kind in _OUR_MISTAKE:
        return ConfigError(f"the tool server rejected the request: {message}")
    if kind in _FAILURES:
        tried = error.attempts if kind is ErrorKind.FAILED else attempts
        boundary = error.boundary or Boundary.SERVER
        return failure_from(kind, message, boundary, tried, error.retriable, error.replay)
    again = kind in (ErrorKind.EXPIRED, ErrorKind.CANCELLED, ErrorKind.SLOW_CLIENT)
    message = f"the tool server answered {kind.value}: {message}"
    return InfraError(Boundary.SERVER, message, attempts=attempts, retriable=again)


def protocol_error(what: object) -> InfraError:
    """Something answers at the address, but not as a tool server of this version does."""
    message = f"unexpected reply from the tool server (is it of another version?): {what}"
    return InfraError(Boundary.SERVER, message, retriable=False)
