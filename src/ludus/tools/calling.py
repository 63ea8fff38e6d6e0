"""One call from its arguments to its result: where the function runs, its deadline, and fault attribution.

Async functions run on the event loop, sync ones in shared daemon threads, those marked `process=True` in
shared worker processes. A deadline counts from when the function starts. A function that is past it, or whose
caller is cancelled, is stopped where it can be: a coroutine is cancelled, a process is killed, a thread is
abandoned. An exception of a tool is the model's fault, except lost connections and workers, `InfraError`, and
a name or module that the tool's own code lacks; `on_error` decides otherwise.

A result is cut by characters before anything else looks at it, so that the cost of a huge result does not
depend on its size; only what is left is cleaned and, where a tool has a limit in tokens, tokenized.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from pydantic import BaseModel
from pydantic_core import to_json

from ludus.core.failures import Boundary, Fault, InfraError, ToolFault
from ludus.core.messages import Media, ToolResult
from ludus.core.user_code import UserError, log_once, reset_error_counts
from ludus.remote.client import backoff
from ludus.remote.processes import NotPicklable, shared_processes
from ludus.remote.threads import (
    DeadlineExceeded,
    FunctionExited,
    WorkerError,
    run_sync,
    threads_for,
)

if TYPE_CHECKING:
    from ludus.tools.tool import Tool

_log = logging.getLogger(__name__)

_MOST_ERROR_CHARS = 2_000
_GRACE_SECONDS = 1.0

_FIRST_CALLS = 10
_CHARS_PER_TOKEN = 64
_MOST_EXPANSION = 12
"""How many bytes Unicode's normal forms make of one at most (of U+FDFA 11); ASCII they leave as it is."""
_DEEPEST = 50
_SURROGATE = re.compile("[\ud800-\udfff]")


async def invoke(tool: Tool, call: partial[Any], limits: OutputLimits) -> ToolResult:
    """The call's result, the model's faults included. Infrastructure failures are retried, then raised."""
    attempt = 0
    started = time.monotonic()
    while True:
        attempt += 1
        try:
            result = await _outcome(tool, call, limits)
        except (InfraError, ConnectionError, WorkerError) as error:
            own = error if isinstance(error, InfraError) else InfraError(Boundary.TOOL, _message(error))
            if not own.retriable or attempt > tool.retries:
                raise InfraError(
                    own.boundary,
                    f"tool {tool.name!r} failed: {own}",
                    attempts=attempt,
                    retriable=False,
                    replay=own.replay and not own.retriable,
                ) from error
            await asyncio.sleep(backoff(attempt - 1))
            continue
        return replace(result, seconds=time.monotonic() - started)


async def _outcome(tool: Tool, call: partial[Any], limits: OutputLimits) -> ToolResult:
    error: UserError | None = None
    try:
        if tool.process:
            result, error = await _in_process(call, limits, tool.timeout)
        elif inspect.iscoroutinefunction(call.func):
            result = await _on_loop(call, limits, tool.timeout)
        else:
            result = await _in_thread(call, limits, tool.timeout)
    except DeadlineExceeded:
        text = f"{tool.name} was stopped: it took longer than {tool.timeout:g} seconds."
        if tool.on_timeout == "failure":
            raise InfraError(Boundary.TOOL, text, kind="TimeoutError") from None
        return ToolResult(text, fault=Fault.TOOL_TIMEOUT)
    except (InfraError, ConnectionError, WorkerError, NotPicklable):
        raise
    except Exception as raised:  # noqa: BLE001 - the model reads what user code raises, unless it is a bug
        result, error = _told(raised, limits)
    if error is not None:
        with _lock:
            if len(_raised_at) >= _MOST_PLACES:
                _raised_at.clear()
            _raised_at[tool.name, result.content] = error.place
        _attribute(tool, error)
    elif result.fault is None:
        _count_call(tool.name, None)
    if result.reward is not None and not _is_finite(result.reward):
        owner = "" if tool.owner is None else f" of {tool.owner.__class__.__name__}"
        message = (
            f"tool {tool.name!r}{owner} gave the reward {result.reward!r:.80}, which is no finite number"
        )
        raise InfraError(Boundary.TOOL, message, retriable=False)
    return result


def _is_finite(reward: Any) -> bool:
    try:
        return math.isfinite(reward)
    except (TypeError, ValueError, OverflowError):  # text, for instance
        return False


def _told(raised: BaseException, limits: OutputLimits) -> tuple[ToolResult, UserError | None]:
    """The result for an exception, and the error as data where it may be a mistake in the tool."""
    if isinstance(raised, ToolFault):
        return ToolResult(limits.apply(str(raised)), fault=raised.fault), None
    cause = raised.__cause__
    if isinstance(raised, RuntimeError) and isinstance(cause, StopIteration | StopAsyncIteration):
        raised = cause  # Python makes a RuntimeError of one that leaves a coroutine
    return ToolResult(limits.apply(_message(raised)), fault=Fault.TOOL_RAISED), UserError.of(raised)


def _attribute(tool: Tool, error: UserError) -> None:
    """Raise `InfraError` where an exception of the tool is our fault; log one that may be a mistake in it."""
    if tool.on_error == "failure" or (tool.on_error == "auto" and error.is_bug):
        log_once(_log, f"the tool {tool.name!r}", error)
        raise InfraError(Boundary.TOOL, str(error), retriable=not error.is_bug, kind=error.kind)
    if tool.on_error == "auto" and error.is_suspect:
        log_once(_log, f"the tool {tool.name!r}", error)
        _count_call(tool.name, error)


_lock = threading.Lock()
_fruitless: dict[str, list[str]] = {}
"""Suspect errors of each tool in its first calls; none once it has returned."""
_returned: set[str] = set()
_raised_at: dict[tuple[str, str], str | None] = {}
"""Where the errors were raised that calls were answered by, by the tool and the answer."""
_MOST_PLACES = 1_000


def _count_call(tool: str, error: UserError | None) -> None:
    """Count a tool's calls; warn of a tool that raises a suspect error in each of its first calls."""
    with _lock:
        if error is None:
            _returned.add(tool)
            _fruitless.pop(tool, None)
        if error is None or tool in _returned or not error.is_suspect:
            return
        raised = _fruitless.setdefault(tool, [])
        if len(raised) < 2 * _FIRST_CALLS:
            raised.append(str(error))
    if len(raised) == _FIRST_CALLS:
        _log.warning(
            "the tool %r has raised in each of its first %d calls, and the model is charged with that: %s. "
            "If it is a mistake in the tool, mend it; with @tool(on_error='failure') its errors are never the "
            "model's",
            tool,
            _FIRST_CALLS,
            error,
        )


def first_call_errors(tool: str) -> list[str]:
    """Suspect errors of a tool in its first calls, if it has never returned."""
    with _lock:
        return list(_fruitless.get(tool, ()))


def raised_by(tool: str, answer: str) -> str | None:
    """The error that this answer of a tool is, with its place; None where the tool did not raise it here."""
    with _lock:
        if (tool, answer) not in _raised_at:
            return None
        place = _raised_at[tool, answer]
    return f"{answer} ({place})" if place else answer


def forget_errors() -> None:
    """Show all errors of user code anew, as a new run does."""
    reset_error_counts()
    with _lock:
        _fruitless.clear()
        _returned.clear()
        _raised_at.clear()


async def _in_process(
    call: partial[Any], limits: OutputLimits, timeout: float | None
) -> tuple[ToolResult, UserError | None]:
    # The limit in tokens needs the caller's tokenizer, so a worker cuts by characters only.
    inside = replace(limits, encode=None)
    result, error = await shared_processes().run(run_in_worker, call, inside, timeout=timeout)
    return replace(result, content=limits.apply(result.content)), error


def run_in_worker(
    function: Callable[[], Any], limits: OutputLimits
) -> tuple[ToolResult, UserError | None]:
    """In the worker process: call and render, so that neither a huge result nor an odd one travels."""
    try:
        value = function()
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        return rendered(value, limits), None
    except (InfraError, ConnectionError):
        raise
    except BaseException as raised:  # noqa: BLE001 - the caller decides whose fault it is
        return _told(raised, limits)


async def _in_thread(call: partial[Any], limits: OutputLimits, timeout: float | None) -> ToolResult:
    def perform() -> Any:
        value = call()
        return value if inspect.isawaitable(value) else rendered(value, limits)

    threads = threads_for(call.func, *call.args, *call.keywords.values())
    value = await threads.run(perform, timeout=timeout)
    if isinstance(value, ToolResult):
        return value

    async def finish() -> Any:
        return await value

    return await _on_loop(finish, limits, timeout)


async def _on_loop(
    function: Callable[[], Coroutine[Any, Any, Any]], limits: OutputLimits, timeout: float | None
) -> ToolResult:
    async def guarded() -> tuple[Any, BaseException | None]:
        """Keeps `SystemExit` and the like inside: raised out of a task, they would end the event loop."""
        try:
            return await function(), None
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - handed to the caller as a value
            return None, error

    task = asyncio.create_task(guarded())
    try:
        done, _ = await asyncio.wait((task,), timeout=timeout)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,), timeout=_GRACE_SECONDS)
            if not task.done():
                _log.warning("an async tool ignores its cancellation and still runs: %r", function)
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


Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class OutputLimits:
    """How long a result may be. Tokens count only where an `encode` function is known."""

    max_chars: int = 20_000
    max_tokens: int | None = None
    encode: Encode | None = None

    def apply(self, text: str) -> str:
        """`text`, cut in the middle where it is too long, and always encodable as UTF-8."""
        limit = self.max_chars
        if self.encode is not None and self.max_tokens is not None:
            limit = min(limit, self.max_tokens * _CHARS_PER_TOKEN)
        short = clean(cut(text, limit))
        if self.encode is None or self.max_tokens is None or _is_surely_short(short, self.max_tokens):
            return short
        return _cut_by_tokens(text, short, self.encode, self.max_tokens)


def rendered(value: Any, limits: OutputLimits) -> ToolResult:
    """A tool's return value as a result within its limits."""
    result = result_of(value)
    return replace(result, content=limits.apply(result.content))


def result_of(value: Any) -> ToolResult:
    """Whatever a tool returned as a result; its content is not bounded yet."""
    if isinstance(value, ToolResult):
        return (
            value if isinstance(value.content, str) else replace(value, content=text_of(value.content))
        )
    if isinstance(value, Media):
        return ToolResult(f"[{value.kind}]", media=(value,))
    if isinstance(value, (list, tuple)) and any(isinstance(item, Media) for item in value):
        parts = [result_of(item) for item in value]
        media = tuple(item for part in parts for item in part.media)
        return ToolResult("\n".join(part.content for part in parts), media=media)
    return ToolResult(text_of(value))


def text_of(value: Any) -> str:
    """A value as text: strings as they are, everything else as JSON, and never an exception."""
    if value is None:
        return "done"
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, str):
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).decode("utf-8", errors="backslashreplace")
    try:
        return to_json(value, inf_nan_mode="strings", fallback=_foreign).decode()
    except Exception:  # noqa: BLE001 - user classes, bad text, cycles: the careful way copes with each
        return json.dumps(_plain(value, ()), ensure_ascii=False)


@runtime_checkable
class _Array(Protocol):
    """An array of numpy, torch and the like."""

    def tolist(self) -> Any: ...


def _foreign(value: Any) -> Any:
    """Something JSON has no word for: an array as a list, otherwise its own text."""
    if isinstance(value, _Array):
        return value.tolist()
    kind: Any = type(value)
    has_own_text = kind.__str__ is not object.__str__ or kind.__repr__ is not object.__repr__
    return str(value) if has_own_text else f"<{kind.__name__}>"


def _plain(value: Any, above: tuple[int, ...]) -> Any:
    if id(value) in above or len(above) > _DEEPEST:
        return "..."
    inside = (*above, id(value))
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and value.bit_length() > 10_000:
        return "a very large number"
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, BaseModel):
        value = dict(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {clean(_safe_text(key)): _plain(item, inside) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item, inside) for item in value]
    return text_of(value) if isinstance(value, (bytes, Enum)) else _safe_text(value)


def _safe_text(value: Any) -> str:
    try:
        return str(_foreign(value)) if not isinstance(value, str) else value
    except Exception:  # noqa: BLE001 - its own __str__ is broken
        return f"<{type(value).__name__}>"


def clean(text: str) -> str:
    """`text` with what UTF-8 cannot carry (lone surrogates) replaced, character by character."""
    return _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text)


def cut(text: str, max_chars: int) -> str:
    """Head and tail of `text` with a note of how much was left out, at most `max_chars` in all."""
    if len(text) <= max_chars:
        return text
    room = max_chars - len(_note(len(text)))
    if room <= 0:
        return text[:max_chars]
    tail = room // 2
    head = room - tail
    return text[:head] + _note(len(text) - room) + (text[-tail:] if tail else "")


def _note(left_out: int) -> str:
    return f"\n... [{left_out:,} characters left out] ...\n"


def _is_surely_short(text: str, max_tokens: int) -> bool:
    """Most results have fewer bytes than they may have tokens, which is quick to see.

    A token stands for a byte at least, but of the text as a tokenizer has normalised it, which can be longer.
    """
    size = len(text) if text.isascii() else _MOST_EXPANSION * len(text.encode())
    return size <= max_tokens


def _cut_by_tokens(text: str, short: str, encode: Encode, max_tokens: int) -> str:
    """Shrink by the share that the tokens suggest until it fits, then grow back by bisection."""
    fits, too_long = len(short), len(short) + 1
    while short and (tokens := len(encode(short))) > max_tokens:
        fits, too_long = min(fits - 1, fits * max_tokens // tokens), fits
        short = clean(cut(text, fits))
    while too_long - fits > 1 + fits // 16:
        middle = (fits + too_long) // 2
        longer = clean(cut(text, middle))
        if len(encode(longer)) <= max_tokens:
            fits, short = middle, longer
        else:
            too_long = middle
    return short
