"""Tools and environments as one tool set for a server: each session holds environments of its own.

Who waits for whom. A session waits for its environments (from limited pools), each reset for its task. Calls of
one session on one environment run one after another, within the pool's `step_timeout`. An environment that
missed it, or whose call was cancelled, is not used again: further calls raise `EpisodeLost`, and the instance
is replaced when the session is closed. Calls of tools that have no part in an environment cost none.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from ludus.core.failures import Boundary, ConfigError, Fault, InfraError, LudusError
from ludus.core.messages import Json, ToolCall, ToolContext, ToolResult, ToolSet, ToolSpec
from ludus.core.task import Task
from ludus.core.user_code import error_with_location
from ludus.envs.env import (
    Observation,
    call_env,
    observation_to_json,
    public_state,
    reset_env,
    setting_of,
    takes_text,
)
from ludus.envs.instances import PoolConfig
from ludus.envs.isolated import EnvRaised
from ludus.envs.pool import EnvPool, Lease
from ludus.envs.tools import EnvAccess, EnvTools, rename_clashes, tools_of
from ludus.envs.world import env_name, load_env
from ludus.remote.lost_episodes import EpisodeLost, EpisodeState
from ludus.tools import CombinedTools
from ludus.tools.hosting import ToolFacts, ToolReference, load_tools
from ludus.tools.hosting.host import facts_of, needs_env
from ludus.tools.library import tools_named
from ludus.tools.toolset import shut
from ludus.tools.wire import spec_from_json, spec_to_json, task_from_json

LOADER = "ludus.envs.served:load_served"
"""Reference of the function that builds a server's tools and environments, in any process."""


@dataclass(slots=True, eq=False)
class _Session:
    """An episode's state on the server."""

    context: ToolContext
    leases: dict[str, Lease]
    tools: CombinedTools
    seen: dict[str, Observation]
    """The last observation of each environment."""
    owners: dict[str, str] = field(default_factory=dict)
    """The environment that each tool belongs to."""
    state: EpisodeState = field(default_factory=EpisodeState)
    """Lost, where its environments are not used any more."""


class ServedTools:
    """Tools and pools of environments. A session's task says which of the environments it holds; or all."""

    def __init__(self, tools: ToolSet, pools: Mapping[str, EnvPool]) -> None:
        self._tools, self._pools = tools, dict(pools)
        self._takes_env = needs_env(tools)
        self._sessions: dict[str, _Session] = {}
        self._described: dict[str, Json] = {}

    async def facts(self) -> list[ToolFacts]:
        """The tools as a host announces them; those of an environment have state and are never repeated."""
        own = await facts_of(self._tools, has_envs=bool(self._pools))
        found = {one.spec.name: one for one in own}
        for name in self._pools:
            self._described[name] = await self._describe(name)
            for raw in self._described[name]["tools"]:
                found.setdefault(raw["name"], ToolFacts(spec_from_json(raw)))
        return list(found.values())

    async def open(self, context: ToolContext) -> None:
        """Get the environments, reset for the task."""
        async with AsyncExitStack() as cleanup:
            leases: dict[str, Lease] = {}
            for name in sorted(context.task.envs or self._pools):
                pool = self._pool(name)
                leases[name] = await pool.acquire(context.episode, context.task)
                cleanup.push_async_callback(pool.release, context.episode, is_broken=True)
            session = await self._session(context, leases)
            await session.tools.open(session.context)
            cleanup.pop_all()
        self._sessions[context.episode] = session

    async def list(self, context: ToolContext) -> Sequence[ToolSpec]:
        session = self._held(context)
        return await session.tools.list(session.context)

    async def call(self, call: ToolCall, context: ToolContext) -> ToolResult:
        session = self._held(context)
        touches_env = call.name in session.owners or call.name in self._takes_env
        async with self._used(session, touches_env=touches_env):
            result = await session.tools.call(call, session.context)
        if touches_env and result.fault is Fault.TOOL_TIMEOUT:
            session.state.lose(f"a call of {call.name!r} did not end in time")
        if call.name in session.owners:
            session.seen[session.owners[call.name]] = Observation(result.content, result.media)
        return result

    async def close(self, context: ToolContext) -> None:
        """Give the environments back; those that are not known to be well are replaced."""
        session = self._sessions.pop(context.episode, None)
        if session is None:
            return
        try:
            await session.tools.close(session.context)
        finally:
            for name in session.leases:
                await self._pools[name].release(context.episode, is_broken=bool(session.state.lost))

    async def aclose(self) -> None:
        """Close every instance."""
        for pool in self._pools.values():
            await pool.close()
        await shut(self._tools)

    async def ask(self, what: str, context: ToolContext | None, body: Json) -> Json:
        """What a server is asked beside calls: of a session `reset`, `observation`, `actions`, `state`; of all
        together `envs`, `stats`."""
        if context is None:
            if what == "stats":
                return {name: asdict(pool.stats) for name, pool in self._pools.items()}
            return {"envs": list(self._described.values())}
        session = self._held(context)
        if what == "opened":
            return {name: observation_to_json(seen) for name, seen in session.seen.items()}
        if what == "reset":
            await self._reset(session, task_from_json(body["task"]))
        name, env = self._chosen(session, body.get("env"))
        if what == "actions":
            async with self._used(session), session.context.exclusive(env):
                offered = await call_env(env.available_actions)
            return {"actions": None if offered is None else [str(one) for one in offered]}
        if what == "state":
            async with self._used(session), session.context.exclusive(env):
                return {"state": await public_state(env)}
        return observation_to_json(session.seen[name])

    # Sessions

    async def _session(self, context: ToolContext, leases: dict[str, Lease]) -> _Session:
        access = EnvAccess()
        envs = {name: lease.env for name, lease in leases.items()}
        own = ToolContext(
            context.episode, context.task, envs, exclusive=access, one_call=context.one_call
        )
        sets: dict[str, EnvTools] = {}
        for name, lease in leases.items():
            access.add(name, lease.env, self._pools[name].step_timeout)
            async with access(lease.env):
                tools = await tools_of(lease.env, name)
            sets[name] = EnvTools(lease.env, tools)
        rename_clashes(sets)
        owners = {spec.name: name for name, one in sets.items() for spec in await one.list(own)}
        seen = {name: lease.observation for name, lease in leases.items()}
        return _Session(own, leases, CombinedTools([self._tools, *sets.values()]), seen, owners)

    async def _reset(self, session: _Session, task: Task) -> None:
        """Begin another episode in the same instances."""
        if sorted(task.envs or self._pools) != sorted(session.leases):
            held = ", ".join(session.leases)
            raise ConfigError(f"the session holds {held}; open another one for other environments")
        async with self._used(session):
            for name, lease in session.leases.items():
                pool = self._pools[name]
                try:
                    session.seen[name] = await reset_env(
                        lease.env, task, name, timeout=pool.reset_timeout
                    )
                except (ConfigError, InfraError):
                    raise
                except Exception as error:
                    message = (
                        f"the environment {name!r} could not be reset: {error_with_location(error)}"
                    )
                    raise InfraError(Boundary.ENV, message, retriable=False, replay=True) from error
        session.context = ToolContext(
            session.context.episode, task, session.context.envs, exclusive=session.context.exclusive
        )

    @asynccontextmanager
    async def _used(self, session: _Session, *, touches_env: bool = True) -> AsyncIterator[None]:
        """Use the session; an error or cancellation inside leaves its environments in an unknown state."""
        session.state.check()
        try:
            yield
        except ConfigError:
            raise
        except BaseException as error:
            if touches_env:
                session.state.lose(str(error) or type(error).__name__)
            raise

    def _held(self, context: ToolContext) -> _Session:
        session = self._sessions.get(context.episode)
        if session is None:
            raise EpisodeLost(f"the episode {context.episode!r} is not open here")
        return session

    def _chosen(self, session: _Session, name: str | None) -> tuple[str, Any]:
        held = session.leases
        if name is None and len(held) == 1:
            name = next(iter(held))
        if name not in held:
            raise ConfigError(
                f"the session holds the environments {', '.join(held) or 'none'}: name one of them (?env=NAME)"
            )
        return name, held[name].env

    # Environments

    def _pool(self, name: str) -> EnvPool:
        if name not in self._pools:
            raise ConfigError(
                f"the task asks for the environment {name!r}; here are: {', '.join(self._pools) or 'none'}"
            )
        return self._pools[name]

    async def _describe(self, name: str) -> Json:
        """Description of an environment for clients, before they open a session."""
        pool = self._pools[name]
        try:
            async with pool.new_instance() as env:
                tools = EnvTools(env, await tools_of(env, name)).tools
                specs = [spec_to_json(one.spec) for one in tools]
                settings = {
                    "step_rewards": setting_of(env, "step_rewards"),
                    "show_actions": pool.show_actions_of(env),
                    "takes_text": takes_text(env),
                }
        except LudusError:
            raise
        except Exception as error:
            why = str(error) if isinstance(error, EnvRaised) else error_with_location(error)
            raise ConfigError(
                f"the environment {name!r} ({pool.made_by}) cannot be served, because no instance could be "
                f"made: {why}"
            ) from error
        return {"name": name, "size": pool.size, "tools": specs, **settings}


def load_served(references: Sequence[ToolReference]) -> ToolSet:
    """The tools and environments that a server serves.

    Of environments a table says `{"env": "textcraft", "name": "craft", "pool": {...}}`; those that tools name
    (`@tool(env=...)`) come with their tools.
    """
    given = [one for one in references if isinstance(one, dict) and "env" in one]
    others = [one for one in references if one not in given]
    pools: dict[str, EnvPool] = {}
    for one in given:
        factory = load_env(one["env"])
        name = one.get("name") or served_name(one["env"], factory)
        if name in pools:
            raise ConfigError(
                f"two environments are called {name!r}: give one of them another name (NAME={name})"
            )
        settings = PoolConfig.parse(one.get("pool") or {}, f"the environment {name!r}").model_dump()
        pools[name] = EnvPool(factory, name=name, **{**settings, "size": settings["size"] or 64})
    for tool in tools_named([one for one in others if not (isinstance(one, dict) and "sandbox" in one)]):
        if tool.env is not None and env_name(tool.env) not in pools:
            name = env_name(tool.env)
            pools[name] = EnvPool(tool.env, name=name, size=64)
    tools = load_tools(others)
    return ServedTools(tools, pools) if pools else tools


def served_name(reference: str, factory: Callable[[], Any]) -> str:
    """Name of an environment that is given by a reference."""
    if reference.isidentifier():
        return reference
    return env_name(factory)
