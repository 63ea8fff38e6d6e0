"""Replies as server-sent events while they are sampled.

Who waits for whom. The engine never waits: it adds tokens to a `TokenFeed`, which holds no more than the
reply will. Each client has its own place in it (`LiveReplies`) and takes what is new whenever it has taken what
was there before; one that takes nothing for `client_seconds` is disconnected. Nothing is sent before the first
token, so that what fails before it is an HTTP error; but if that takes longer than `PING_SECONDS`, comments
keep the connection open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from aiohttp import web

from ludus.chat.api_fields import ApiError
from ludus.chat.streaming import ReplyView, TokenFeed
from ludus.serve.app import taken
from ludus.serve.model.requests import Dialect, Event, ModelReply, ModelRequest, ReplyHead, StreamWriter
from ludus.tools.wire import dump

EVENTS = "text/event-stream"
PING_SECONDS = 10.0
"""How long a stream is silent at most: proxies and clients close connections that say nothing."""
PING = b": waiting\n\n"


class EventResponse(web.StreamResponse):
    """A response of events."""

    outcome = 200
    """The HTTP status that would say how it ended: an error may come after the headers."""


class LiveReplies:
    """A client's view of the replies to its request."""

    def __init__(self, request: ModelRequest, dialect: Dialect) -> None:
        self.changed = asyncio.Event()
        """Set whenever there may be something new."""
        self._request, self._dialect = request, dialect
        self._feeds: list[TokenFeed] = []
        self._views: list[ReplyView] = []
        self._taken: list[int] = []
        self._writer: StreamWriter | None = None

    def follow(self, feeds: Sequence[TokenFeed]) -> None:
        """Read these, from their beginning."""
        self._feeds, self._taken = list(feeds), [0] * len(feeds)
        for feed in feeds:
            feed.readers.add(self.changed)

    def close(self) -> None:
        for feed in self._feeds:
            feed.readers.discard(self.changed)

    def news(self) -> bytes:
        """The text that is certain by now and was not sent yet."""
        events: list[Event] = []
        if self._writer is None:
            if not any(feed.tokens for feed in self._feeds) or not all(one.id for one in self._feeds):
                return b""
            events += self._begin([ReplyHead(f.id, f.prompt_tokens, f.created) for f in self._feeds])
        for index, (feed, view) in enumerate(zip(self._feeds, self._views, strict=True)):
            new = feed.tokens[self._taken[index] :]
            if new:
                self._taken[index] += len(new)
                events += self._delta(index, *view.push(new))
        return event_bytes(events)

    def rest(self, replies: Sequence[ModelReply]) -> bytes:
        """The end of the stream, or all of it."""
        events: list[Event] = []
        if self._writer is None:
            events += self._begin([reply.head for reply in replies])
        for index, one in enumerate(replies):
            thought, text = one.reply.thought, one.reply.text
            if self._views:
                thought, text = self._views[index].finish(thought, text)
            events += self._delta(index, thought, text)
        assert self._writer is not None
        return event_bytes([*events, *self._writer.end(replies)])

    def failure(self, problem: ApiError) -> bytes:
        """An error in the middle of a stream."""
        error = self._dialect.error(problem)
        return event_bytes([(self._writer or self._dialect.writer(self._request, ())).error(error)])

    def _begin(self, heads: Sequence[ReplyHead]) -> Iterable[Event]:
        self._views = [feed.view() for feed in self._feeds if feed.view is not None]
        self._writer = self._dialect.writer(self._request, heads)
        return self._writer.start()

    def _delta(self, index: int, thought: str, text: str) -> Iterable[Event]:
        assert self._writer is not None
        if thought:
            yield from self._writer.thought(index, thought)
        if text:
            yield from self._writer.text(index, text)


class EventStream:
    """The response to one client; its headers go out with the first bytes."""

    def __init__(
        self, request: web.Request, seconds: float, more: Mapping[str, str] | None = None
    ) -> None:
        """A client that takes nothing for so many seconds is disconnected; `more` are headers."""
        self._request, self._seconds = request, seconds
        headers = {"Content-Type": EVENTS, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        headers |= more or {}
        self.response = EventResponse(headers=headers)

    @property
    def has_begun(self) -> bool:
        return self.response.prepared

    async def send(self, data: bytes) -> None:
        """Return when the client has taken enough of it. `ConnectionError` if it does not."""
        await taken(self._request, self._seconds, self._write(data))

    async def _write(self, data: bytes) -> None:
        if not self.response.prepared:
            await self.response.prepare(self._request)
        await self.response.write(data)

    async def follow(self, live: LiveReplies, task: asyncio.Task[object]) -> None:
        """Send what is new until the task has ended."""
        task.add_done_callback(lambda _: live.changed.set())
        while not task.done():
            live.changed.clear()
            if data := live.news():
                await self.send(data)
                continue
            try:
                async with asyncio.timeout(PING_SECONDS):
                    await live.changed.wait()
            except TimeoutError:
                await self.send(PING)


def event_bytes(events: Iterable[Event]) -> bytes:
    """Server-sent events."""
    lines: list[bytes] = []
    for name, data in events:
        if name is not None:
            lines.append(f"event: {name}\n".encode())
        lines.append(b"data: " + (data.encode() if isinstance(data, str) else dump(data)) + b"\n\n")
    return b"".join(lines)
