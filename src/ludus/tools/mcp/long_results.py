"""Results with very many blocks, cut before the SDK reads them: it checks each block on the event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import mcp_types as types
from anyio.abc import ObjectReceiveStream
from mcp.shared.message import SessionMessage

MOST_BLOCKS = 1_000
_LISTS = ("content", "contents", "messages")


@asynccontextmanager
async def with_short_results(transport: AbstractAsyncContextManager[Any]) -> AsyncIterator[Any]:
    """The streams of a transport; what is read has at most `MOST_BLOCKS` blocks in a result."""
    async with transport as (read, write):
        yield _ShortResults(read), write


class _ShortResults(ObjectReceiveStream[Any]):
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @property
    def last_context(self) -> Any:
        """Of the message that was read last; the SDK asks for it."""
        return getattr(self._inner, "last_context", None)

    async def receive(self) -> Any:
        message = await self._inner.receive()
        if isinstance(message, SessionMessage) and isinstance(message.message, types.JSONRPCResponse):
            _shorten(message.message.result)
        return message

    async def aclose(self) -> None:
        await self._inner.aclose()


def _shorten(result: dict[str, Any]) -> None:
    for name in _LISTS:
        blocks = result.get(name)
        if isinstance(blocks, list) and len(blocks) > MOST_BLOCKS:
            left_out = len(blocks) - MOST_BLOCKS + 1
            del blocks[MOST_BLOCKS - 1 if name == "content" else MOST_BLOCKS :]
            if name == "content":
                note = f"... [{left_out:,} more blocks left out] ..."
                blocks.append({"type": "text", "text": note})
