"""What to send, to whom, and what answers mean, without sending anything."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from ludus.core.failures import Boundary, ConfigError, InfraError
from ludus.core.messages import Json, ToolResult
from ludus.tools.hosting.encoding import result_from_json
from ludus.tools.hosting.host import OutcomeUnknown
from ludus.tools.remote.transport import Reply
from ludus.tools.remote.wire import ErrorKind

_DEEPEST = 100
_LONGEST_PAUSE = 60.0
_OUR_MISTAKE = frozenset({ErrorKind.UNAUTHORIZED, ErrorKind.FORBIDDEN, ErrorKind.NOT_FOUND})


def normalized(address: str) -> str:
    """`http://host:port`, also of `host:port`; anything else is refused."""
    full = address if "://" in address else f"http://{address}"
    try:
        parts = urlsplit(full)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment or parts.username:
        raise ConfigError(f"{address!r} is no address of a tool server; write http://host:port")
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
        level = [value for value in inner if isinstance(value, (dict, list, tuple))]
    return "" if isinstance(arguments, dict) else "the arguments must be an object"


def result_of(reply: Reply) -> ToolResult:
    """The result in an answer."""
    try:
        return result_from_json(reply.body, reply.content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise nonsense(error) from error


def error_of(reply: Reply) -> tuple[ErrorKind, str, Json]:
    """The kind and message of an answer that is no result, and all else it says."""
    error = reply.body.get("error")
    try:
        assert isinstance(error, dict)
        return ErrorKind(error["kind"]), str(error["message"]), error
    except (AssertionError, KeyError, ValueError) as problem:
        raise nonsense(f"status {reply.status}") from problem


def retry_after(error: Json) -> float:
    """How long the server asks us to wait, within reason."""
    seconds = error.get("retry_after")
    return min(max(float(seconds), 0.0), _LONGEST_PAUSE) if isinstance(seconds, (int, float)) else 0.0


def failure_of(kind: ErrorKind, message: str, error: Json, attempts: int) -> Exception:
    """What an error means to an episode."""
    if kind in _OUR_MISTAKE:
        return ConfigError(f"the tool server refused us: {message}")
    if kind is ErrorKind.UNKNOWN_OUTCOME:
        return OutcomeUnknown(message, attempts=attempts)
    if kind is ErrorKind.FAILED:
        tried = error.get("attempts")
        attempts = tried if isinstance(tried, int) else attempts
        again, replay = error.get("retriable") is True, error.get("replay") is True
        return InfraError(_boundary(error), message, attempts=attempts, retriable=again, replay=replay)
    again = kind in (ErrorKind.EXPIRED, ErrorKind.CANCELLED, ErrorKind.SLOW_CLIENT)
    message = f"the tool server answered {kind.value}: {message}"
    return InfraError(Boundary.SERVER, message, attempts=attempts, retriable=again)


def nonsense(what: object) -> InfraError:
    """Something answers at the address, but not a tool server that we understand."""
    message = f"an answer that a tool server of this version does not give: {what}"
    return InfraError(Boundary.SERVER, message, retriable=False)


def _boundary(error: Json) -> Boundary:
    try:
        return Boundary(str(error.get("boundary")))
    except ValueError:
        return Boundary.SERVER
