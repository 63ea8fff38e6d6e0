"""Calling rewards: deadlines, retries, and what a reward that breaks is reported as.

A reward that breaks is an infrastructure failure and no score: it is retried, then raised as an `InfraError`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from ludus.core.concurrency import threads_for
from ludus.core.failures import Aborted, Boundary, ConfigError, InfraError, MissingExtraError
from ludus.core.user_code import defined_at, error_with_location, log_once
from ludus.rewards.scores import ScoreError

_log = logging.getLogger(__name__)
T = TypeVar("T")

DEFAULT_TIMEOUT = 60.0
_CONNECTION_RETRIES = 2
_FIRST_PAUSE = 0.05


class CheckedReward:
    """Marks rewards whose `score` returns checked parts and raises what `with_retries` raises."""


async def with_retries(
    name: str,
    call: Callable[[], Awaitable[T]],
    *,
    retries: int = 0,
    function: Callable[..., Any] | None = None,
) -> T:
    """What `call` gives; a persistent error becomes an `InfraError` at the boundary REWARD.

    A lost connection is retried twice in any case. Errors of the recipe (`ConfigError`,
    `MissingExtraError`), a shutdown (`Aborted`) and an `InfraError` pass through. `function` is the user's:
    a value that is no score has no traceback that leads there, so the message names it.
    """
    attempt = 0
    while True:
        attempt += 1
        try:
            return await call()
        except (Aborted, ConfigError, MissingExtraError):
            raise
        except (Exception, SystemExit) as error:
            if attempt > _retries_for(error, retries):
                if isinstance(error, InfraError):
                    error.attempts = max(error.attempts, attempt)
                    raise
                raise _failure(name, error, attempt, function) from error
        await asyncio.sleep(_FIRST_PAUSE * 2 ** min(attempt - 1, 6))


def _retries_for(error: BaseException, retries: int) -> int:
    if isinstance(error, ScoreError):
        return 0
    if isinstance(error, InfraError):
        return retries if error.retriable else 0
    return max(retries, _CONNECTION_RETRIES) if isinstance(error, ConnectionError) else retries


def _failure(
    name: str, error: BaseException, attempts: int, function: Callable[..., Any] | None
) -> InfraError:
    if isinstance(error, ScoreError):
        place = defined_at(function) if function is not None else None
        what = f"{error} ({place})" if place else str(error)
    else:
        what = error_with_location(error)
        log_once(_log, f"the reward {name!r}", error)
    retriable = isinstance(error, ConnectionError | TimeoutError)
    return InfraError(
        Boundary.REWARD, f"the reward {name!r} failed: {what}", attempts=attempts, retriable=retriable
    )


async def with_timeout(awaitable: Awaitable[T], timeout: float | None) -> T:
    """The result, or `TimeoutError` that says how long was allowed."""
    try:
        async with asyncio.timeout(timeout) as deadline:
            return await awaitable
    except TimeoutError as error:
        if deadline.expired():
            raise TimeoutError(f"no result within {timeout:g} seconds") from error
        raise


async def call_any(
    function: Callable[..., Any], timeout: float | None, *args: Any, **kwargs: Any
) -> Any:
    """Call a sync or async function within a timeout.

    A sync one runs in a thread, and its time counts from when a thread takes it up.
    """
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object whose call is a coroutine
    ):
        return await with_timeout(function(*args, **kwargs), timeout)
    envs = kwargs.get("envs")
    given = [*kwargs.values(), *(envs.values() if isinstance(envs, Mapping) else ())]
    threads = threads_for(function, *args, *given)
    result = await threads.run(partial(function, *args, **kwargs), timeout=timeout)
    return await with_timeout(result, timeout) if inspect.isawaitable(result) else result
