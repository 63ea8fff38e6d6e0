"""Outcomes as HTTP answers: whole for short ones, in pieces for long ones.

A long result is cut into pieces as it is written, and the next piece is made when the client has taken
enough of those before it. So its text exists once, however slow the client is.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator

from aiohttp import web

from ludus.core.messages import Json, ToolResult
from ludus.serve.journal import Outcome
from ludus.serve.problems import Problem
from ludus.tools.wire import JSON_TYPE, STREAM_TYPE, dump, result_to_json

_PIECE_CHARS = 16_384


def json_answer(body: Json, status: int = 200) -> web.Response:
    return web.Response(body=dump(body), status=status, content_type=JSON_TYPE)


def problem_answer(problem: Problem) -> web.Response:
    answer = json_answer({"error": problem.body()}, problem.kind.status)
    if problem.retry_after is not None:
        answer.headers["Retry-After"] = str(math.ceil(problem.retry_after))
    return answer


async def outcome_answer(
    request: web.Request, outcome: Outcome, stream_chars: int, seconds: float
) -> web.StreamResponse:
    """A result whole or streamed, as the client can read it and its length suggests."""
    if isinstance(outcome, Problem):
        return problem_answer(outcome)
    reads_json, reads_stream = accepted(request)
    if reads_stream and (not reads_json or len(outcome.content) > stream_chars):

        async def lines() -> AsyncIterator[bytes]:
            for line in result_lines(outcome):
                yield line

        return await stream_answer(request, lines(), seconds)
    return json_answer(result_to_json(outcome))


async def stream_answer(
    request: web.Request, lines: AsyncIterator[bytes], seconds: float
) -> web.StreamResponse:
    """NDJSON, line by line; a client that takes nothing for `seconds` is cut off."""
    answer = web.StreamResponse(headers={"Content-Type": STREAM_TYPE})
    await answer.prepare(request)
    try:
        async for line in lines:
            async with asyncio.timeout(seconds):
                await answer.write(line)
        async with asyncio.timeout(seconds):
            await answer.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
    return answer


def result_lines(result: ToolResult) -> Iterator[bytes]:
    """A head with everything but the content, the content in pieces, and an end that proves it is whole."""
    yield dump({"result": result_to_json(result, content=False)}) + b"\n"
    content = result.content
    for start in range(0, len(content), _PIECE_CHARS):
        yield dump({"text": content[start : start + _PIECE_CHARS]}) + b"\n"
    yield dump({"end": len(content)}) + b"\n"


def accepted(request: web.Request) -> tuple[bool, bool]:
    """Whether the client reads JSON, and whether it reads a stream. No `Accept` means JSON."""
    accept = request.headers.get("Accept", "")
    reads_stream = STREAM_TYPE in accept
    return JSON_TYPE in accept or not reads_stream, reads_stream
