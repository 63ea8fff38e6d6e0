"""Tools: plain Python functions that a model can call, by `@tool` or a subclass of `Tool`; and sets of them."""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from difflib import get_close_matches
from functools import partial
from typing import Any, Generic, Literal, ParamSpec, TypeVar, overload

from ludus.core.failures import ConfigError, Fault, ToolFault
from ludus.core.messages import ToolCall, ToolContext, ToolResult, ToolSpec
from ludus.core.user_code import register_user_code
from ludus.remote.limits import queueing
from ludus.tools.calling import Encode, OutputLimits, invoke
from ludus.tools.signature import Signature, signature_of, validate_arguments

P = ParamSpec("P")
R = TypeVar("R")

_MOST_CHARS = 2_000
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Tool:
    """Something an agent can call. Subclass it with a `run` method, sync or async, with type hints.

    A parameter called `env` gets the episode's environment and one hinted `ToolContext` the context; neither is
    in the schema that the model reads.
    """

    name: str = ""
    """The name in the schema; the class's name in snake case when empty."""
    description: str = ""
    """The description in the schema; the docstring when empty."""
    timeout: float | None = 30.0
    """Seconds a call may take; then it is stopped where it can be, and the model reads that."""
    max_concurrency: int | None = None
    """The most calls that run at once, over all episodes."""
    max_chars: int = 20_000
    """Characters of a result; the middle of a longer one is left out."""
    max_tokens: int | None = None
    """Tokens of a result, where the tool set knows the tokenizer. Each observation has a budget besides."""
    process: bool = False
    """Run in a worker process that is killed at the deadline; the function must be importable."""
    retries: int = 2
    """How often a call is retried after an infrastructure failure: a lost connection or worker."""
    on_timeout: Literal["fault", "failure"] = "fault"
    """Whether a timeout is the model's fault, which it reads, or our failure, which is retried."""
    on_error: Literal["auto", "fault", "failure"] = "auto"
    """Whether an exception is the model's fault, an infrastructure failure, or judged by its kind ("auto")."""
    env: type | None = None
    """The class of the environment that the parameter `env` gets; a run with this tool needs no other entry."""
    stateful: bool | None = None
    """Whether a call may leave state in its episode; None: where it takes the context or an environment."""

    run: Callable[..., Any]
    _signature: Signature | None = None

    def __init__(self) -> None:
        if self._signature is None:
            raise ConfigError(f"the tool {type(self).__name__} has no method `run`; define one")
        self._setup()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "run" in cls.__dict__:
            label = cls.name or _snake_case(cls.__name__)
            documentation = cls.__doc__ if "__doc__" in cls.__dict__ else None
            cls._signature = _read(cls.run, label, documentation)

    def _setup(self) -> None:
        self.name = self.name or _snake_case(type(self).__name__)
        self.description = self.description or self.signature.description
        _check_options(self)
        if self.env is not None and self.signature.env is None:
            raise ConfigError(
                f"tool {self.name!r} names the environment {self.env.__name__}, but its function has no "
                "parameter 'env' to get it: add one, or drop env="
            )
        if self.process and (self.signature.env or self.signature.context):
            raise ConfigError(
                f"tool {self.name!r}: an environment or a context cannot follow a call into another "
                "process; drop process=True, or drop the parameter"
            )
        self._limiter = Limiter(self.max_concurrency)

    @property
    def signature(self) -> Signature:
        """The signature of the function."""
        assert self._signature is not None
        return self._signature

    @property
    def spec(self) -> ToolSpec:
        """Name, description and JSON Schema, as the model reads them."""
        signature = self.signature
        return ToolSpec(self.name, self.description, signature.schema, signature.returns)

    @property
    def owner(self) -> Any:
        """The object whose method it is; calls of one environment run one after another."""
        return None

    def check(self, context: ToolContext) -> None:
        """`ConfigError` when the tool wants an environment that the episode does not have."""
        if self.signature.env is not None:
            self._find_env(context)

    async def call(
        self, arguments: Any, context: ToolContext, *, encode: Encode | None = None
    ) -> ToolResult:
        """Validate, run, render. The model's faults are results; infrastructure failures raise `InfraError`."""
        try:
            values = validate_arguments(self.signature, arguments, self.name)
        except ToolFault as fault:
            return ToolResult(str(fault), fault=Fault.BAD_ARGUMENTS)
        env = self.owner
        if self.signature.env is not None:
            values[self.signature.env] = env = self._find_env(context)
        if self.signature.context is not None:
            values[self.signature.context] = context
        args, kwargs = self.signature.bind(values)
        limits = OutputLimits(self.max_chars, self.max_tokens, encode)
        async with self._limiter.slot(), context.exclusive(env):
            return await invoke(self, partial(self._target(), *args, **kwargs), limits)

    def _target(self) -> Callable[..., Any]:
        """The function to call; it is picklable where calls go to other processes."""
        return self.run

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_limiter"}

    def _find_env(self, context: ToolContext) -> Any:
        wanted = self.env or self.signature.env_type
        envs = list(context.envs.values())
        fitting = [env for env in envs if wanted is None or isinstance(env, wanted)]
        if len(fitting) == 1:
            return fitting[0]
        if len(envs) == 1:
            return envs[0]  # the only one there is: a stand-in in a test need not be of the class
        kind = "an environment" if wanted is None else f"an environment of type {wanted.__name__}"
        held = ", ".join(f"{name} ({type(env).__name__})" for name, env in context.envs.items())
        fix = (
            "name the environment's class: @tool(env=...), or in the type hint of 'env'"
            if len(fitting) > 1
            else "give the run or the task such an environment"
        )
        raise ConfigError(f"tool {self.name!r} needs {kind}; the episode has {held or 'none'}, so {fix}")

    def __repr__(self) -> str:
        return f"<tool {self.name}>"


class FunctionTool(Tool, Generic[P, R]):
    """A decorated function. Calling it directly calls the plain function."""

    def __init__(self, function: Callable[P, R], options: dict[str, Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.run = function
        vars(self).update(options)
        self.name = self.name or getattr(function, "__name__", "")
        self._signature = _read(function, self.name)
        self.is_unbound = _is_method(function)
        """Whether it is a method that still lacks its object."""
        self._setup()
        if self.process and self.is_unbound:
            raise ConfigError(
                f"tool {self.name!r}: a method in another process would work on a copy of its object; "
                "drop process=True, or make it a function"
            )
        if self.process and "<" in getattr(function, "__qualname__", "<"):
            raise ConfigError(
                f"tool {self.name!r}: a worker process cannot import a function that is defined inside "
                "another; move it to the top of a module, or drop process=True"
            )

    @property
    def owner(self) -> Any:
        return getattr(self.function, "__self__", None)

    def check(self, context: ToolContext) -> None:
        if self.is_unbound:
            raise ConfigError(
                f"tool {self.name!r} is a method that lacks its object; give the one of an instance "
                f"(instance.{self.name})"
            )
        super().check(context)

    def _target(self) -> Callable[..., Any]:
        return self if self.process else self.function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    @overload
    def __get__(self, instance: None, owner: type) -> FunctionTool[P, R]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> FunctionTool[..., R]: ...

    def __get__(self, instance: object | None, owner: type) -> FunctionTool[..., R]:
        if instance is None:
            return self
        twin: FunctionTool[..., R] = FunctionTool.__new__(FunctionTool)
        vars(twin).update(vars(self))
        twin.function = twin.run = self.function.__get__(instance, owner)
        twin.is_unbound = False
        return twin

    def __reduce__(self) -> str:
        # Pickled by name, as functions are: a worker process imports the module it is defined in.
        return str(getattr(self, "__qualname__", self.name))


@overload
def tool(function: Callable[P, R], /) -> FunctionTool[P, R]: ...


@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    timeout: float | None = 30.0,
    max_concurrency: int | None = None,
    max_chars: int = 20_000,
    max_tokens: int | None = None,
    process: bool = False,
    retries: int = 2,
    on_timeout: Literal["fault", "failure"] = "fault",
    on_error: Literal["auto", "fault", "failure"] = "auto",
    env: type | None = None,
) -> Callable[[Callable[P, R]], FunctionTool[P, R]]: ...


def tool(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Make a function a tool: `@tool`, or `@tool(timeout=5)`. The options are those of `Tool`."""
    unknown = set(options) - _OPTIONS
    if unknown:
        raise ConfigError(
            f"a tool has no option {sorted(unknown)[0]!r}; there are {', '.join(sorted(_OPTIONS))}"
        )
    given = {key: value for key, value in options.items() if value is not None or key == "timeout"}
    if function is None:
        return lambda inner: FunctionTool(inner, given)
    return FunctionTool(function, given)


_OPTIONS = frozenset(name for name in Tool.__annotations__ if name != "run" and name[0] != "_")


def _read(function: Any, label: str, documentation: str | None = None) -> Signature:
    if not callable(function) or isinstance(function, (type, Tool)):
        raise ConfigError(f"a tool is made of a function, not of {function!r}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"tool {label!r} is a generator; return one value instead of yielding several")
    register_user_code(function)
    return signature_of(function, label, is_method=_is_method(function), documentation=documentation)


def _is_method(function: Callable[..., Any]) -> bool:
    first = next(iter(inspect.signature(function).parameters), None)
    return first == "self" and not inspect.ismethod(function)


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _check_options(tool: Tool) -> None:
    if not _NAME.fullmatch(tool.name):
        raise ConfigError(
            f"{tool.name!r} is no name for a tool: it takes 1 to 64 letters, digits, '_' and '-'; "
            "give one with name="
        )
    checks = {
        "timeout": tool.timeout is None or tool.timeout > 0,
        "max_concurrency": tool.max_concurrency is None or tool.max_concurrency >= 1,
        "max_chars": tool.max_chars >= 1,
        "max_tokens": tool.max_tokens is None or tool.max_tokens >= 1,
        "retries": tool.retries >= 0,
        "on_timeout": tool.on_timeout in ("fault", "failure"),
        "on_error": tool.on_error in ("auto", "fault", "failure"),
        "env": tool.env is None or isinstance(tool.env, type),
    }
    for option, good in checks.items():
        if not good:
            raise ConfigError(f"tool {tool.name!r}: {option} cannot be {getattr(tool, option)!r}")


# Tools as a set


class LocalTools:
    """Tools of this process. It keeps no state per episode, so one set serves all of them at once."""

    def __init__(
        self, tools: Iterable[Tool | Callable[..., Any]], *, encode: Encode | None = None
    ) -> None:
        """`encode` is the tokenizer's, for tools with a limit of their own in tokens (`max_tokens`)."""
        self._tools: dict[str, Tool] = {}
        self._encode = encode
        for one in tools:
            made = one if isinstance(one, Tool) else tool(one)
            if made.name in self._tools:
                raise duplicate_name(made.name)
            self._tools[made.name] = made

    @property
    def tools(self) -> Sequence[Tool]:
        """The tools themselves."""
        return [*self._tools.values()]

    async def open(self, context: ToolContext) -> None:
        for one in self._tools.values():
            one.check(context)

    async def list(self, context: ToolContext) -> Sequence[ToolSpec]:
        return [one.spec for one in self._tools.values()]

    async def call(self, call: ToolCall, context: ToolContext) -> ToolResult:
        if call.fault is not None:
            return malformed(call)
        found = self._tools.get(call.name)
        if found is None:
            return unknown_tool(call.name, self._tools)
        return await found.call(call.arguments, context, encode=self._encode)

    async def close(self, context: ToolContext) -> None:
        """Nothing to release: environments belong to their pool."""

    deterministic = True
    """Branches of trees may make recorded calls again: their results are compared."""

    async def snapshot(self, context: ToolContext) -> Any:
        """No state per episode, so nothing to keep."""
        return None

    async def restore(self, state: Any, context: ToolContext) -> None:
        """Nothing to bring back."""


def malformed(call: ToolCall) -> ToolResult:
    """The answer to a call that could not be parsed."""
    problem = call.problem or "The tool call could not be read."
    return ToolResult(OutputLimits(_MOST_CHARS).apply(problem), fault=call.fault)


def unknown_tool(name: str, known: Iterable[str]) -> ToolResult:
    """The answer to a call of a tool that does not exist."""
    names = sorted(known)
    shown = name if len(name) <= 64 else name[:64] + "..."
    near = get_close_matches(name[:100], names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    text = f"There is no tool called {shown!r}.{hint} Available tools: {', '.join(names) or 'none'}."
    return ToolResult(OutputLimits(_MOST_CHARS).apply(text), fault=Fault.UNKNOWN_TOOL)


def duplicate_name(name: str) -> ConfigError:
    return ConfigError(
        f"two tools are called {name!r}: name it once, or give one of them another name, with "
        f'@tool(name=...), or a tool of the library in a table such as {{ tool = "{name}", name = "..." }}, or '
        'those of an MCP server with { mcp = "...", prefix = "..." }'
    )


class Limiter:
    """At most `limit` holders at a time (None: any), first in, first out, over all event loops and threads."""

    def __init__(self, limit: int | None) -> None:
        self._lock = threading.Lock()
        self._free = limit
        self._waiting: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a slot and hold it."""
        if self._free is None:
            yield
            return
        await self._take()
        try:
            yield
        finally:
            self._pass_on()

    async def _take(self) -> None:
        assert self._free is not None
        with self._lock:
            if self._free > 0:
                self._free -= 1
                return
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
        try:
            with queueing():
                await turn
        except asyncio.CancelledError:
            with self._lock:
                granted = turn not in self._waiting
                if not granted:
                    self._waiting.remove(turn)
            if granted:
                self._pass_on()  # the slot was given to us while we were being cancelled
            raise

    def _pass_on(self) -> None:
        assert self._free is not None
        with self._lock:
            while self._waiting:
                turn = self._waiting.popleft()
                try:
                    turn.get_loop().call_soon_threadsafe(_grant, turn)
                except RuntimeError:
                    continue  # its event loop is closed: that waiter is gone
                return
            self._free += 1


def _grant(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
