"""The interface between a tool server and what runs the tools, and the host that runs them in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, runtime_checkable

from pydantic import Field, TypeAdapter

from ludus.core.config import Config
from ludus.core.failures import ConfigError
from ludus.core.messages import Json, ToolCall, ToolContext, ToolResult, ToolSet, ToolSpec
from ludus.core.registry import import_object
from ludus.core.task import Task
from ludus.remote.channel import PING, Frame
from ludus.sandbox import SandboxConfig
from ludus.tools.tool import LocalTools, Tool
from ludus.tools.toolset import CombinedTools, shut
from ludus.tools.wire import error_from_json, error_to_json, result_to_json, spec_to_json, task_from_json


@dataclass(frozen=True, slots=True)
class ToolFacts:
    """What a host's caller must know of a tool before it calls it."""

    spec: ToolSpec
    repeatable: bool = False
    """Whether a call may run again when the outcome of its first run is unknown (`Tool.retries > 0`)."""
    stateful: bool = True
    """Whether a call may leave state in the episode that later calls need."""
    concurrency: int | None = None
    """How many calls may run at once."""


FACTS = TypeAdapter(list[ToolFacts])
UNKNOWN = ToolFacts(ToolSpec("", "", {}))
"""Of a tool that was not there at the start nothing is known, so it may do anything."""


@dataclass(frozen=True, slots=True)
class HostHealth:
    """Numbers for health checks and metrics."""

    running: int
    """Calls inside the host now."""
    workers: int = 1
    """How many workers there should be."""
    alive: int = 1
    """How many of them can take calls."""
    restarted: int = 0
    """How many were replaced since the start."""


class ToolHost(Protocol):
    """Hosts one set of tools for many episodes. It has no queue: its caller decides what may enter.

    A caller ends a call early by cancelling it; a host hands the cancellation on to what runs it.
    """

    async def start(self) -> Sequence[ToolFacts]:
        """Build the tools, and say what they are; `ConfigError` where they cannot be hosted."""

    async def open(self, context: ToolContext) -> None:
        """Get ready for an episode."""

    async def list(self, context: ToolContext) -> Sequence[ToolSpec]:
        """The tools that the episode can call now."""

    async def call(self, call: ToolCall, context: ToolContext) -> ToolResult:
        """Run one call. The model's faults come back as results; infrastructure failures raise `InfraError`."""

    async def close(self, context: ToolContext) -> None:
        """Release what the episode held; unknown episodes are ignored."""

    async def stop(self) -> None:
        """Stop everything, at once."""

    async def ask(self, what: str, context: ToolContext | None, body: Json) -> Json:
        """Ask the environments of an episode, or with no episode those of all (see `ServedTools.ask`)."""

    def health(self) -> HostHealth:
        """Numbers for health checks and metrics."""


@runtime_checkable
class ServingTools(Protocol):
    """A tool set that is made to be served: it knows its facts, and answers for its environments."""

    async def facts(self) -> list[ToolFacts]: ...

    async def ask(self, what: str, context: ToolContext | None, body: Json) -> Json:
        """See `ToolHost.ask`."""


async def facts_of(tools: ToolSet, *, has_envs: bool = False) -> list[ToolFacts]:
    """The facts of a set's tools; `ConfigError` where one needs what a server does not have."""
    if isinstance(tools, ServingTools):
        return await tools.facts()
    known = {tool.name: tool for tool in _members(tools)}
    needy = sorted(needs_env(tools))
    if needy and not has_envs:
        raise ConfigError(
            f"the tool {needy[0]!r} needs an environment (its parameter 'env'), and the server has none: "
            "name its class, @tool(env=...), or list it under [envs] in the file of --config"
        )
    if has_envs:  # each episode's own; without one, no tool that needs it can be opened
        return [_facts(tool.spec, tool) for tool in known.values()]
    context = ToolContext("probe", Task("", ()))
    await tools.open(context)
    try:
        specs = await tools.list(context)
    finally:
        await tools.close(context)
    return [_facts(spec, known.get(spec.name)) for spec in specs]


def _facts(spec: ToolSpec, tool: Tool | None) -> ToolFacts:
    if tool is None:  # a set of its own kind: nothing is known, so nothing is assumed
        return ToolFacts(spec)
    has_state = tool.signature.context is not None or tool.signature.env is not None
    stateful = has_state if tool.stateful is None else tool.stateful
    return ToolFacts(spec, tool.retries > 0, stateful, tool.max_concurrency)


def needs_env(tools: ToolSet) -> frozenset[str]:
    """The tools of a set that take the episode's environment (their parameter `env`)."""
    return frozenset(tool.name for tool in _members(tools) if tool.signature.env is not None)


def _members(tools: ToolSet | Any) -> Iterable[Tool]:
    if isinstance(tools, LocalTools):
        yield from tools._tools.values()
    elif isinstance(tools, CombinedTools):
        for one in tools._sets:
            yield from _members(one)


async def ask_tools(tools: ToolSet, what: str, context: ToolContext | None, body: Json) -> Json:
    """Ask a tool set that has environments; one without has nothing to say."""
    if isinstance(tools, ServingTools):
        return await tools.ask(what, context, body)
    if context is None or what == "opened":
        return {"envs": []} if what == "envs" else {}
    raise ConfigError("this server has tools only, and no environments")


class LocalHost:
    """Async tools run on this event loop, sync ones in daemon threads, as in a run without a server."""

    def __init__(self, build: Callable[[], ToolSet]) -> None:
        self._build = build
        self._tools: ToolSet | None = None
        self._running = 0

    async def start(self) -> Sequence[ToolFacts]:
        self._tools = self._build()
        return await facts_of(self._tools)

    async def open(self, context: ToolContext) -> None:
        await self._set.open(context)

    async def list(self, context: ToolContext) -> Sequence[ToolSpec]:
        return await self._set.list(context)

    async def call(self, call: ToolCall, context: ToolContext) -> ToolResult:
        self._running += 1
        try:
            return await self._set.call(call, context)
        finally:
            self._running -= 1

    async def close(self, context: ToolContext) -> None:
        await self._set.close(context)

    async def stop(self) -> None:
        tools, self._tools = self._tools, None
        if tools is not None:
            await shut(tools)

    async def ask(self, what: str, context: ToolContext | None, body: Json) -> Json:
        return await ask_tools(self._set, what, context, body)

    def health(self) -> HostHealth:
        return HostHealth(self._running, alive=int(self._tools is not None))

    @property
    def _set(self) -> ToolSet:
        if self._tools is None:
            raise RuntimeError("the host is not started")
        return self._tools


ToolReference = str | dict[str, Any]
"""'module:function', 'file.py:function', a short name of the library, or a table with options.

A table `{"sandbox": {...}}` is no tool: it says where those run that run the model's code. Nor is a table with
`env`, which names an environment.
"""
LOADER = "ludus.tools.hosting.host:load_tools"
"""What builds a host's tools from references, in whichever process they live."""


class ToolsFile(Config):
    """What a file of tools says."""

    tools: tuple[str | dict[str, Any], ...] = ()
    """Tools, as in a recipe."""
    sandbox: SandboxConfig = SandboxConfig()
    """Where tools that run the model's code run it."""
    envs: dict[str, str] = Field(default_factory=dict)
    """Environments to serve, or for the tools that need one, as in a recipe's agent.envs."""
    pools: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """How their instances are kept, as in a recipe's agent.pools."""

    @property
    def references(self) -> list[ToolReference]:
        envs = [{"env": env, "name": name, "pool": self.pools.get(name, {})}
                for name, env in self.envs.items()]  # fmt: skip
        return [*self.tools, *envs, {"sandbox": self.sandbox.model_dump(mode="json")}]


def load_tools(references: Sequence[ToolReference]) -> ToolSet:
    """One tool set of all of them."""
    from ludus.tools.library import build_toolset

    places = [one["sandbox"] for one in references if _is_place(one)]
    sandbox = SandboxConfig.parse(places[-1], "sandbox") if places else None
    return build_toolset([one for one in references if not _is_place(one)], sandbox=sandbox)


def _is_place(reference: ToolReference) -> TypeGuard[dict[str, Any]]:
    return isinstance(reference, dict) and set(reference) == {"sandbox"}


class HostedTools:
    """The service of a worker (`remote/channel.py`).

    A long result travels as the body of its frame, so that it is neither quoted into JSON nor parsed out of it.
    """

    def __init__(self) -> None:
        self._contexts: dict[str, ToolContext] = {}

    async def answer(self, head: Json, body: bytes = b"") -> Frame:
        """`{"reply": ...}` or `{"error": ...}`; with `"text"`, the body is the content of the reply."""
        operation = head["operation"]
        try:
            if operation == PING:
                return {"reply": {}}, b""
            if operation == "start":
                return {"reply": await self._load(head["references"], head["loader"])}, b""
            reply, text = await self._perform(operation, head["body"])
        except Exception as error:  # noqa: BLE001 - raised again where the host is
            return {"error": error_to_json(error)}, b""
        if text is None:
            return {"reply": reply}, b""
        return {"reply": reply, "text": True}, text.encode("utf-8", "replace")

    async def _load(self, references: list[str | Json], loader: str) -> Json:
        """Build the tools; gives their facts."""
        try:
            self._tools = import_object(loader)(references)
            return {"tools": FACTS.dump_python(await facts_of(self._tools))}
        except ConfigError:
            raise
        except Exception as error:
            message = f"the tools could not be loaded: {type(error).__name__}: {error}"
            raise ConfigError(message) from error

    async def _perform(self, operation: str, body: Json) -> tuple[Json, str | None]:
        if operation == "open":
            context = ToolContext(body["episode"], task_from_json(body["task"]))
            await self._tools.open(context)
            self._contexts[context.episode] = context
            return {}, None
        if operation == "close":
            closing = self._contexts.pop(body["episode"], None)
            if closing is not None:
                await self._tools.close(closing)
            return {}, None
        if operation == "ask" and body["episode"] is None:
            return await ask_tools(self._tools, body["what"], None, body["body"]), None
        context = self._contexts[body["episode"]]
        if operation == "ask":
            return await ask_tools(self._tools, body["what"], context, body["body"]), None
        if operation == "list":
            return {"tools": [spec_to_json(spec) for spec in await self._tools.list(context)]}, None
        call = body["call"]
        result = await self._tools.call(ToolCall(call["name"], call["arguments"], call["id"]), context)
        return result_to_json(result, content=False), result.content


def reply_of(head: Json, body: bytes = b"") -> Json:
    """The reply in the answer of a worker; the error in it is raised again."""
    if "error" in head:
        raise error_from_json(head["error"])
    reply: Json = head["reply"]
    return {**reply, "content": body.decode()} if head.get("text") else reply
