"""Environments: state with a life cycle, held by one episode at a time and handed out by a pool."""

from ludus.core.registry import Registry
from ludus.envs.checker import EnvFinding, Severity, check_env
from ludus.envs.env import (
    Env,
    Observation,
    Step,
    as_observation,
    as_step,
    call_env,
    own_tools,
    reset_env,
    step_env,
)
from ludus.envs.pool import EnvPool, Lease, PoolConfig, PoolStats

ENVS = Registry("environment", {"safe": "ludus.envs.safe:Safe"})
"""Short names of the prebuilt environments; each is imported when it is first loaded."""

__all__ = [
    "ENVS",
    "Env",
    "EnvFinding",
    "EnvPool",
    "Lease",
    "Observation",
    "PoolConfig",
    "PoolStats",
    "Severity",
    "Step",
    "as_observation",
    "as_step",
    "call_env",
    "check_env",
    "own_tools",
    "reset_env",
    "step_env",
]
