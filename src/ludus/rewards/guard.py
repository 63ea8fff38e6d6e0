"""A reward that breaks is our failure, not a score: it is retried, then raised as an `InfraError`.

Retried: what the reward's own `retries` allows, and a lost connection twice in any case. Not wrapped:
what is wrong with the recipe rather than with the episode (`ConfigError`, `MissingExtraError`), a
shutdown (`Aborted`), and an `InfraError` that names its own boundary already.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from ludus.core.failures import Aborted, Boundary, ConfigError, InfraError, MissingExtraError
from ludus.core.user_code import defined_at, located, show_once
from ludus.rewards.values import ScoreError

T = TypeVar("T")

_log = logging.getLogger(__name__)

DEFAULT_TIMEOUT = 60.0
_CONNECTION_RETRIES = 2
_FIRST_PAUSE = 0.05


class SelfGuarded:
    """Marks rewards whose `score` already raises nothing but what `guarded` raises."""


async def guarded(
    name: str,
    call: Callable[[], Awaitable[T]],
    *,
    retries: int = 0,
    function: Callable[..., Any] | None = None,
) -> T:
    """What `call` gives; a persistent error becomes an `InfraError` at the boundary REWARD.

    `function` is what the user wrote: of a value that is no score, no traceback says where it comes from.
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


async def in_time(awaitable: Awaitable[T], timeout: float | None) -> T:
    """The result, or `TimeoutError` that says how long was allowed."""
    try:
        async with asyncio.timeout(timeout) as deadline:
            return await awaitable
    except TimeoutError as error:
        if deadline.expired():
            raise TimeoutError(f"no result within {timeout:g} seconds") from error
        raise


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
        what = located(error)
        show_once(_log, f"the reward {name!r}", error)
    passing = isinstance(error, ConnectionError | TimeoutError)
    return InfraError(
        Boundary.REWARD, f"the reward {name!r} failed: {what}", attempts=attempts, retriable=passing
    )
