"""How the instances of one environment are kept: settings, and what is checked of them before a run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Field

from ludus.core.config import Config
from ludus.core.failures import ConfigError
from ludus.envs.env import Isolation, ShowActions


class PoolConfig(Config):
    """How the instances of one environment are kept."""

    size: int | None = Field(default=None, ge=1)
    """Most instances alive at once; agent.env_pool when left out."""
    max_wait: float = Field(default=300.0, gt=0)
    """Seconds that an episode waits for a free instance before it fails."""
    reset_timeout: float = Field(default=60.0, gt=0)
    """Seconds that making or resetting an instance may take."""
    reset_retries: int = Field(default=2, ge=0)
    """How often another instance is tried when one cannot be made or reset."""
    step_timeout: float | None = Field(default=None, gt=0)
    """Seconds that a call may take before its instance is replaced; as the class says (60) when left out."""
    close_timeout: float = Field(default=10.0, gt=0)
    """Seconds that closing an instance, or asking whether it is healthy, may take."""
    time_to_live: float | None = Field(default=None, gt=0)
    """Seconds after which an instance is replaced, between episodes; for ever when left out."""
    max_idle: float | None = Field(default=None, gt=0)
    """Seconds after which an instance that no episode uses is closed; spares stay."""
    max_uses: int | None = Field(default=None, ge=1)
    """Episodes after which an instance is replaced; any number when left out."""
    spares: int = Field(default=0, ge=0)
    """Instances kept ready beside those in use, as far as the size allows."""
    isolation: Isolation | None = None
    """Where an instance lives: none, thread or process; as its class says when left out (docs/envs.md)."""
    memory_mb: int | None = Field(default=None, ge=1)
    """MiB above which an instance's process is replaced, between episodes (isolation = "process")."""
    show_actions: ShowActions | None = None
    """How the agent learns of the possible actions: no, tool, observation; as the class says when left out."""
    deterministic: bool | None = None
    """Whether the same calls have the same results, so that branches of trees (`rl.tree`) may make them again;
    as the class says when left out."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments that instances are made with, by name: those of the environment's class."""


def checked_options(
    factory: Callable[..., Any], name: str, options: Mapping[str, Any]
) -> Callable[..., Any]:
    """`factory`, if it takes these arguments."""
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        takes = ", ".join(inspect.signature(factory).parameters) or "none"
        raise ConfigError(
            f"agent.pools.{name}.options: {error}; the arguments that {name!r} takes: {takes}"
        ) from None
    return factory


PROBE_SECONDS = 6.0
"""How long a server may take to answer before a run begins; one that is just being started needs a few."""


async def probe_env(factory: Callable[..., Any], name: str, options: Mapping[str, Any]) -> None:
    """Refuse an environment on a server that is not there (`ConfigError`); others need no probe."""
    probe = getattr(factory, "probe", None)
    if probe is not None and not isinstance(factory, type):
        checked_options(factory, name, options)
        await probe(PROBE_SECONDS, **options)
