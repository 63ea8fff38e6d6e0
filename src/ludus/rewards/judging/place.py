"""Where a reward runs code, for how long, and what to do when we lose the sandbox."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from ludus.core.failures import Boundary, InfraError
from ludus.rewards.guard import guarded
from ludus.sandbox import Sandbox, SandboxConfig, SessionLost, shared_sandbox

T = TypeVar("T")


async def judged(name: str, call: Callable[[], Awaitable[T]]) -> T:
    """What judging gives. A sandbox that failed is tried once more; a task that is broken is not."""

    async def checked() -> T:
        try:
            return await call()
        except ValueError as error:
            raise InfraError(
                Boundary.REWARD, f"the reward {name!r} failed: {error}", retriable=False
            ) from error

    return await guarded(name, checked, retries=1)


class Clock:
    """How long judging one answer may still take."""

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds

    @property
    def expired(self) -> bool:
        return time.monotonic() > self._deadline


class Place:
    """A sandbox by its settings. Judging keeps no state, so a session that we lost is worth another try."""

    def __init__(self, config: SandboxConfig | Mapping[str, Any] | None, name: str) -> None:
        if isinstance(config, Mapping):
            config = SandboxConfig.parse(config, f"the sandbox of {name!r}")
        self.config = config or SandboxConfig()

    def reading(self, paths: tuple[str, ...]) -> SandboxConfig:
        """The settings of a sandbox that can also read these files."""
        readable = tuple(dict.fromkeys([*self.config.readable, *paths]))
        return self.config.model_copy(update={"readable": readable})

    async def use(
        self, work: Callable[[Sandbox], Awaitable[T]], config: SandboxConfig | None = None
    ) -> T:
        """What `work` gives with the sandbox; a failure of the sandbox is an `InfraError`, to be retried."""
        try:
            return await work(shared_sandbox(config or self.config))
        except SessionLost as error:
            raise InfraError(Boundary.SANDBOX, str(error)) from error
