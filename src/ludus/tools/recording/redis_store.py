"""Recordings in Redis, shared by machines.

The client is the blocking one, in at most `_most_threads` threads of the store's own with a connection each;
callers queue for a thread. Every answer has a deadline: a server that hangs is a typed failure after `timeout`
seconds, or a few times that where the client retries.

Beside the records there is one short list for each tool, of the labels recorded last: it is only read to
explain a miss, and may lag behind or hold what has expired.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from ludus.core.failures import ConfigError, MissingExtraError
from ludus.remote.threads import WorkerError
from ludus.tools.recording.keys import Label
from ludus.tools.recording.store import RecordingStoreError, ThreadedStore

if TYPE_CHECKING:
    import redis

T = TypeVar("T")

_LABELS_KEPT = 200


class RedisStore(ThreadedStore["redis.Redis"]):
    """Records by the address of a server: `redis://[user:password@]host:port/db`."""

    _most_threads = 16

    def __init__(
        self,
        address: str,
        *,
        expire_seconds: int | None = None,
        timeout: float = 5.0,
        prefix: str = "ludus:recording:1",
    ) -> None:
        """`expire_seconds` lets the server forget records after that time."""
        super().__init__()
        if expire_seconds is not None and expire_seconds < 1:
            raise ConfigError(f"expire_seconds must be at least 1, not {expire_seconds}")
        self.where = _shown(address)
        """The address as it may be shown: without the password."""
        self.expire_seconds = expire_seconds
        self.timeout = timeout
        self.prefix = prefix
        self._address = address

    async def get(self, key: str) -> bytes | None:
        data: bytes | None = await self._run(lambda client: client.get(self._name("call", key)))
        return data

    async def put(self, key: str, data: bytes, *, label: Label | None, replace: bool) -> None:
        def write(client: redis.Redis) -> None:
            with client.pipeline(transaction=False) as pipeline:
                name = self._name("call", key)
                pipeline.set(name, data, ex=self.expire_seconds, nx=not replace)
                if label is not None:
                    labels = self._name("tool", label.tool)
                    pipeline.lpush(labels, json.dumps(astuple(label)))
                    pipeline.ltrim(labels, 0, _LABELS_KEPT - 1)
                    if self.expire_seconds is not None:
                        pipeline.expire(labels, self.expire_seconds)
                pipeline.execute()

        await self._run(write)

    async def similar(self, label: Label, most: int) -> Sequence[Label]:
        rows: list[bytes] = await self._run(
            lambda client: client.lrange(self._name("tool", label.tool), 0, _LABELS_KEPT - 1)
        )
        labels = [one for one in map(_label, dict.fromkeys(rows)) if one is not None]

        def difference(one: Label) -> tuple[bool, bool]:
            return one.arguments_digest != label.arguments_digest, one.history != label.history

        return sorted(labels, key=difference)[:most]

    def _name(self, kind: str, what: str) -> bytes:
        return f"{self.prefix}:{kind}:{what}".encode("utf-8", "backslashreplace")

    def _connect(self) -> redis.Redis:
        import redis

        try:
            pool = redis.BlockingConnectionPool.from_url(
                self._address,
                max_connections=self._most_threads,
                timeout=self.timeout,
                socket_timeout=self.timeout,
                socket_connect_timeout=self.timeout,
            )
        except ValueError as error:
            raise ConfigError(f"{self.where} is no address of a Redis server: {error}") from None
        return redis.Redis.from_pool(pool)

    def _disconnect(self, client: redis.Redis) -> None:
        client.close()
        client.connection_pool.disconnect()

    async def _run(self, action: Callable[[redis.Redis], Any]) -> Any:
        try:
            from redis import exceptions
        except ImportError:
            raise MissingExtraError("redis", "redis", "a recording in Redis") from None
        try:
            return await self._in_thread(action)
        except (exceptions.AuthenticationError, exceptions.NoPermissionError) as error:
            raise ConfigError(
                f"the Redis server at {self.where} refuses us ({error}); put user and password into the "
                "address: redis://user:password@host:port/db"
            ) from None
        except (exceptions.ConnectionError, exceptions.TimeoutError, OSError, WorkerError) as error:
            raise RecordingStoreError(
                f"the Redis server at {self.where} gives no answer ({type(error).__name__}: {error}); is "
                "it running, and can it be reached from here?"
            ) from error
        except exceptions.RedisError as error:
            raise RecordingStoreError(
                f"the Redis server at {self.where} refused a command: {error}", retriable=False
            ) from error


def _shown(address: str) -> str:
    """Host, port and database; `ConfigError` when the address is none."""
    try:
        parts = urlsplit(address)
        host, port, database = parts.hostname or "localhost", parts.port or 6379, parts.path.strip("/")
    except ValueError as error:
        raise ConfigError(f"the address of the Redis server is not an address: {error}") from None
    if database and not database.isdecimal():
        raise ConfigError(f"the address of a Redis server ends in a database's number, not {database!r}")
    return f"{parts.scheme}://{host}:{port}/{database or 0}"


def _label(row: bytes) -> Label | None:
    """The label that `put` wrote; None for a row of another program."""
    try:
        tool, version, history, arguments_digest, arguments = json.loads(row)
    except (ValueError, TypeError):
        return None
    return Label(str(tool), str(version), str(history), str(arguments_digest), str(arguments))
