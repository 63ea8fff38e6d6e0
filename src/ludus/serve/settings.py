"""The settings of a tool server."""

from __future__ import annotations

from pydantic import Field

from ludus.core.config import Config


class ServerConfig(Config):
    """What bounds a tool server. Every queue, buffer and wait in it has its limit here."""

    host: str = "127.0.0.1"
    """The address to listen on; one that others can reach needs a token."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 takes a free one, which is printed."""
    concurrency: int = Field(default=256, ge=1)
    """Calls that run at once."""
    queue: int = Field(default=4096, ge=0)
    """Calls that wait; one more is refused at once."""
    tool_concurrency: dict[str, int] = Field(default_factory=dict)
    """Calls that run at once, by tool; the tool's own `max_concurrency` where it is not named here."""
    tool_queue: int | None = Field(default=None, ge=0)
    """Calls that wait for any one tool; as many as wait at all when left out."""
    max_sessions: int = Field(default=16_384, ge=1)
    """Sessions that are open at once."""
    idle_seconds: float = Field(default=1800.0, gt=0)
    """A session that nobody has used for so long is closed."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """How long running calls may take to finish once the server is told to stop."""
    orphan_seconds: float = Field(default=5.0, ge=0)
    """How long a call goes on after its caller's connection broke, in case the caller asks again."""
    max_body_bytes: int = Field(default=8_000_000, ge=1024)
    """The largest request."""
    held_bytes: int = Field(default=32_000_000, ge=1024)
    """Bytes of large requests that are held at once, as they arrive; one request may go beyond."""
    client_seconds: float = Field(default=30.0, gt=0)
    """How long a client may take to send a request, or to take a piece of an answer."""
    keepalive_seconds: float = Field(default=75.0, gt=0)
    """How long a connection may say nothing."""
    stream_chars: int = Field(default=262_144, ge=1)
    """Results longer than this are streamed to clients that can read a stream."""
    keep_seconds: float = Field(default=600.0, gt=0)
    """How long finished calls are remembered, so that a repeated request gets the same answer."""
    keep_calls: int = Field(default=20_000, ge=0)
    """How many of them."""
    keep_bytes: int = Field(default=64_000_000, ge=0)
    """How much memory their results may take."""
