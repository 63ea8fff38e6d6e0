"""Frames and the requests over them, with sides that go away and bytes that are no frames."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from ludus.remote.channel import (
    AnswerFailed,
    ChannelClosed,
    FrameError,
    RequestChannel,
    pack_frame,
    read_frame,
    serve_requests,
    unpack_frame,
)


def reader_of(data: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return reader


@pytest.mark.parametrize("body", [b"", b"\x00\xff" * 70_000])
async def test_a_frame_comes_back(body: bytes) -> None:
    head = {"operation": "score", "text": "ä\n", "numbers": [1, 2.5, None]}
    frame = pack_frame(head, body)
    assert unpack_frame(frame) == (head, body)
    reader = reader_of(frame + frame)
    assert await read_frame(reader) == (head, body) == await read_frame(reader)
    with pytest.raises(ChannelClosed):
        await read_frame(reader)


async def test_what_is_no_frame_is_refused() -> None:
    frame = pack_frame({"a": 1}, b"1234")
    for cut in (0, 7, 16, 20, len(frame) - 1):
        with pytest.raises(FrameError):
            unpack_frame(frame[:cut])
        with pytest.raises(ChannelClosed):
            await read_frame(reader_of(frame[:cut]))
    with pytest.raises(FrameError):
        unpack_frame(frame + b"more")
    for head in (b"[1]", b"\xff{}", b"{"):
        with pytest.raises(FrameError):
            await read_frame(reader_of(struct.pack("!QQ", len(head), 0) + head))
    with pytest.raises(FrameError, match="longer than 100"):
        await read_frame(reader_of(struct.pack("!QQ", 60, 60)), limit=100)
    with pytest.raises(FrameError, match="longer than"):
        await read_frame(reader_of(b"Traceback (most recent call last)"))


class Served:
    """What is asked: it echoes, waits, and knows what was cancelled."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []

    async def answer(self, head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        try:
            await asyncio.sleep(head.get("seconds", 0.0))
        except asyncio.CancelledError:
            self.cancelled.append(head["name"])
            raise
        if head.get("name") == "odd":
            return {"name": object()}, b""
        return {"name": head.get("name")}, body[::-1]


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[RequestChannel, Served, asyncio.StreamWriter]]:
    ours, theirs = socket.socketpair()
    served = Served()
    channel = RequestChannel(*await asyncio.open_connection(sock=ours))
    reader, writer = await asyncio.open_connection(sock=theirs)
    serving = asyncio.create_task(serve_requests(reader, writer, served.answer))
    try:
        yield channel, served, writer
    finally:
        await channel.close()
        async with asyncio.timeout(5.0):
            await serving
        writer.close()


async def test_requests_run_side_by_side() -> None:
    async with connected() as (channel, _, _):
        slow = asyncio.create_task(channel.request({"name": "slow", "seconds": 0.2}, b"ab"))
        for number in range(50):
            reply = await channel.request({"name": f"quick {number}"}, bytes([number, 255]))
            assert reply == ({"name": f"quick {number}"}, bytes([255, number]))
        assert not slow.done()
        assert await slow == ({"name": "slow"}, b"ba")


async def test_a_reply_that_cannot_travel_is_an_error() -> None:
    async with connected() as (channel, _, _):
        with pytest.raises(AnswerFailed, match=r"TypeError: .* not JSON serializable"):
            await channel.request({"name": "odd"})
        assert await channel.request({"name": "quick"}) == ({"name": "quick"}, b"")


async def test_a_cancelled_request_is_cancelled_over_there() -> None:
    async with connected() as (channel, served, _):
        waiting = asyncio.create_task(channel.request({"name": "long", "seconds": 60.0}))
        await channel.request({"name": "quick"})
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await channel.request({"name": "quick"})
        assert served.cancelled == ["long"]


async def test_requests_fail_when_the_other_side_goes_away() -> None:
    async with connected() as (channel, _, writer):
        waiting = asyncio.create_task(channel.request({"name": "long", "seconds": 60.0}))
        await channel.request({"name": "quick"})
        writer.close()
        async with asyncio.timeout(5.0):
            await channel.closed()
        channel.fail("it died of a signal")
        with pytest.raises(ChannelClosed, match="of a signal"):
            await waiting
        with pytest.raises(ChannelClosed, match="of a signal"):
            await channel.request({"name": "late"})


async def test_a_ping_is_heard() -> None:
    async with connected() as (channel, _, _):
        before = channel.last_heard
        channel.ping()
        async with asyncio.timeout(5.0):
            while channel.last_heard == before:  # noqa: ASYNC110 - the other side answers
                await asyncio.sleep(0.01)
