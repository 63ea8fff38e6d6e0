"""Environments: state with a life cycle, held by one episode at a time and handed out by a pool."""

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
    takes_text,
)
from ludus.envs.instances import PoolConfig
from ludus.envs.pool import EnvPool, Lease, PoolStats
from ludus.envs.remote import RemoteEnv, RemoteEnvs
from ludus.envs.tools import EnvAccess, EnvTools, rename_clashes, tools_of
from ludus.envs.world import WORLDS, World, env_name, load_env

__all__ = [
    "WORLDS",
    "Env",
    "EnvAccess",
    "EnvPool",
    "EnvTools",
    "Lease",
    "Observation",
    "PoolConfig",
    "PoolStats",
    "RemoteEnv",
    "RemoteEnvs",
    "Step",
    "World",
    "as_observation",
    "as_step",
    "call_env",
    "env_name",
    "load_env",
    "own_tools",
    "rename_clashes",
    "reset_env",
    "step_env",
    "takes_text",
    "tools_of",
]
