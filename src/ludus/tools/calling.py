"""One call from its arguments to its result: where the function runs, its deadline, and fault attribution.

Async functions run on the event loop, sync ones in shared daemon threads, those marked `process=True` in
shared worker processes. A deadline counts from when the function starts; a full queue is not the model's
fault. A function that is past its deadline, or whose caller is cancelled, is stopped where it can be: a
coroutine is cancelled, a process is killed, a thread is abandoned.

An exception of a tool is the model's fault, and the model reads it, except lost connections and workers,
`InfraError`, and a name or module that the tool's own code lacks; `on_error` decides otherwise. An error that
may be a mistake in the tool is logged once with its traceback.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ludus.core.failures import Boundary, Fault, InfraError, ToolFault
from ludus.core.messages import ToolResult
from ludus.core.user_code import UserError, count_tool_call, log_once
from ludus.remote.processes import NotPicklable, shared_processes
from ludus.remote.threads import (
    DeadlineExceeded,
    FunctionExited,
    ThreadExecutor,
    WorkerError,
    run_sync,
    threads_for,
)
from ludus.tools.results import OutputLimits, clean, cut, rendered

if TYPE_CHECKING:
    from ludus.tools.tool import Tool

_log = logging.getLogger(__name__)

_MOST_ERROR_CHARS = 2_000
_GRACE_SECONDS = 1.0
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 2.0


@dataclass(frozen=True, slots=True)
class Invocation:
    """A tool's function with the arguments of one call."""

    tool: Tool
    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    limits: OutputLimits


async def invoke(invocation: Invocation) -> ToolResult:
    """The call's result, the model's faults included. Infrastructure failures are retried, then raised."""
    attempt = 0
    started = time.monotonic()
    while True:
        attempt += 1
        try:
            result = await _outcome(invocation)
        except (InfraError, ConnectionError, WorkerError) as error:
            retriable = error.retriable if isinstance(error, InfraError) else True
            if not retriable or attempt > invocation.tool.retries:
                raise _failure(invocation.tool.name, error, attempt) from error
            await asyncio.sleep(min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (attempt - 1)))
            continue
        return replace(result, seconds=time.monotonic() - started)


def _failure(tool: str, error: Exception, attempts: int) -> InfraError:
    boundary = error.boundary if isinstance(error, InfraError) else Boundary.TOOL
    what = str(error) if isinstance(error, InfraError) else _message(error)
    message = f"tool {tool!r} failed: {what}"
    lost_state = isinstance(error, InfraError) and not error.retriable and error.replay
    return InfraError(boundary, message, attempts=attempts, retriable=False, replay=lost_state)


async def _outcome(invocation: Invocation) -> ToolResult:
    tool = invocation.tool
    error: UserError | None = None
    try:
        if tool.process:
            result, error = await _in_process(invocation)
        else:
            result = await _performed(invocation)
    except DeadlineExceeded:
        text = f"{tool.name} was stopped: it took longer than {tool.timeout:g} seconds."
        if tool.on_timeout == "failure":
            raise InfraError(Boundary.TOOL, text, kind="TimeoutError") from None
        return ToolResult(text, fault=Fault.TOOL_TIMEOUT)
    except (InfraError, ConnectionError, WorkerError, NotPicklable):
        raise
    except Exception as raised:  # noqa: BLE001 - the model reads what user code raises, unless it is a bug
        result, error = _told(raised, invocation.limits)
    if error is not None:
        _attribute(tool, error)
    elif result.fault is None:
        count_tool_call(_log, tool.name, None)
    if result.reward is not None and not math.isfinite(result.reward):
        message = f"tool {tool.name!r} gave the reward {result.reward}, which is no finite number"
        raise InfraError(Boundary.TOOL, message, retriable=False)
    return result


def _told(raised: BaseException, limits: OutputLimits) -> tuple[ToolResult, UserError | None]:
    """The result for an exception, and the error as data where it may be a mistake in the tool."""
    if isinstance(raised, ToolFault):
        return ToolResult(limits.apply(str(raised)), fault=raised.fault), None
    own = _unwrapped(raised)
    return ToolResult(limits.apply(_message(own)), fault=Fault.TOOL_RAISED), UserError.of(own)


def _attribute(tool: Tool, error: UserError) -> None:
    """Raise `InfraError` where an exception of the tool is our fault; log one that may be a mistake in it."""
    if tool.on_error == "failure" or (tool.on_error == "auto" and error.is_bug):
        log_once(_log, f"the tool {tool.name!r}", error)
        raise InfraError(Boundary.TOOL, str(error), retriable=not error.is_bug, kind=error.kind)
    if tool.on_error == "auto" and error.is_suspect:
        log_once(_log, f"the tool {tool.name!r}", error)
        count_tool_call(_log, tool.name, error)


def _performed(invocation: Invocation) -> Coroutine[Any, Any, ToolResult]:
    function = partial(invocation.function, *invocation.args, **invocation.kwargs)
    if inspect.iscoroutinefunction(invocation.function):
        return _on_loop(function, invocation.limits, invocation.tool.timeout)
    given = (*invocation.args, *invocation.kwargs.values())
    threads = threads_for(invocation.function, *given)
    return _in_thread(function, invocation.limits, invocation.tool.timeout, threads)


async def _in_process(invocation: Invocation) -> tuple[ToolResult, UserError | None]:
    function = partial(invocation.function, *invocation.args, **invocation.kwargs)
    # The limit in tokens needs the caller's tokenizer, so a worker cuts by characters only.
    limits = replace(invocation.limits, encode=None)
    outcome = await shared_processes().run(
        run_in_worker, function, limits, timeout=invocation.tool.timeout
    )
    if isinstance(outcome, WorkerFailure):
        raise InfraError(Boundary(outcome.boundary), outcome.message, retriable=outcome.retriable)
    result, error = outcome
    return replace(result, content=invocation.limits.apply(result.content)), error


class WorkerFailure(NamedTuple):
    """An infrastructure failure as data, which crosses from a worker process."""

    boundary: str
    message: str
    retriable: bool


def run_in_worker(
    function: Callable[[], Any], limits: OutputLimits
) -> tuple[ToolResult, UserError | None] | WorkerFailure:
    """In the worker process: call and render, so that neither a huge result nor an odd one travels."""
    try:
        value = function()
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        return rendered(value, limits), None
    except InfraError as error:
        return WorkerFailure(error.boundary.value, str(error), error.retriable)
    except ConnectionError as error:
        return WorkerFailure(Boundary.TOOL.value, _message(error), True)
    except BaseException as raised:  # noqa: BLE001 - the caller decides whose fault it is
        return _told(raised, limits)


async def _in_thread(
    function: Callable[[], Any], limits: OutputLimits, timeout: float | None, threads: ThreadExecutor
) -> ToolResult:
    def call() -> Any:
        value = function()
        return value if inspect.isawaitable(value) else rendered(value, limits)

    value = await threads.run(call, timeout=timeout)
    if isinstance(value, ToolResult):
        return value

    async def finish() -> Any:
        return await value

    return await _on_loop(finish, limits, timeout)


async def _on_loop(
    function: Callable[[], Coroutine[Any, Any, Any]], limits: OutputLimits, timeout: float | None
) -> ToolResult:
    task = asyncio.create_task(_guarded(function))
    try:
        done, _ = await asyncio.wait((task,), timeout=timeout)
    finally:
        if not task.done():
            await _stop(task)
    if not done:
        raise DeadlineExceeded(f"no result within {timeout:g} seconds")
    if task.cancelled():
        raise RuntimeError("the tool cancelled itself")
    value, error = task.result()
    if error is not None:
        raise error if isinstance(error, Exception) else FunctionExited(error)
    if value is None or isinstance(value, (str, int, float, ToolResult)):
        return rendered(value, limits)
    return await run_sync(rendered, value, limits)


async def _guarded(
    function: Callable[[], Coroutine[Any, Any, Any]],
) -> tuple[Any, BaseException | None]:
    """Keeps `SystemExit` and the like inside: raised out of a task, they would end the event loop."""
    try:
        return await function(), None
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 - handed to the caller as a value
        return None, error


async def _stop(task: asyncio.Task[Any]) -> None:
    """Cancel `task`; one that refuses to end is left behind, and said so."""
    task.cancel()
    done, _ = await asyncio.wait((task,), timeout=_GRACE_SECONDS)
    if not done:
        _log.warning("an async tool ignores its cancellation and still runs: %r", task.get_coro())


def _unwrapped(error: BaseException) -> BaseException:
    """`StopIteration` as the tool raised it: Python makes a RuntimeError of one that leaves a coroutine."""
    cause = error.__cause__
    is_made = isinstance(error, RuntimeError) and isinstance(cause, StopIteration | StopAsyncIteration)
    return cause if is_made and cause is not None else error


def _message(error: BaseException) -> str:
    if isinstance(error, FunctionExited):
        text = str(error)
    elif isinstance(error, StopIteration | StopAsyncIteration) and not str(error):
        text = f"{type(error).__name__}: there is no such item (next() found none)"
    else:
        try:
            text = str(error)
        except Exception:  # noqa: BLE001 - its own __str__ is broken
            text = ""
        name = type(error).__name__
        text = f"{name}: {text}" if text else name
    return clean(cut(text, _MOST_ERROR_CHARS))
