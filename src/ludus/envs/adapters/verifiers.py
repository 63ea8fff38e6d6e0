"""Task sets and environments of verifiers (0.4): tasks, a reward, and an environment for more turns.

    tasks = { train = "verifiers:my_taskset?take=900", evaluation = "verifiers:my_taskset?skip=900" }
    rewards = ["verifiers"]
    agent = { envs = { verifiers = "verifiers:my_taskset" } }   # for a set with tools, or an Env of its own

A task says which item of which set it is. Tool servers (`toolsets`) are no processes here: their `@vf.tool`
methods are called in this one, with the rollout's state, which rewards read from the trace. An `Env` of the
set's own, such as a game that answers as the user, runs in this event loop: each of its turns is a step here.

Who waits for whom. `step` hands the model's reply to the Env's `run` and waits for its next turn, or its end;
`run` waits for the reply in `turn`. What ends the episode earlier (a budget) is told to `run` as a terminated
segment when the rewards are computed. One that never ends is cut off by the pool's and the reward's deadlines.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from pydantic_core import to_jsonable_python

from ludus.core.failures import Boundary, ConfigError, InfraError
from ludus.core.messages import Json, Message
from ludus.core.task import Task
from ludus.core.trajectory import Trajectory
from ludus.core.user_code import error_with_location
from ludus.envs.env import OVER, Env, Step
from ludus.envs.world import SIZES, EnvAdapter, imported, parse_options
from ludus.remote.threads import run_sync
from ludus.rewards import reward
from ludus.tools import FunctionTool, Tool

NAME = "verifiers"
"""Name of the environment in a recipe."""


# Tasks ----------------------------------------------------------------------------------------------


def verifiers_tasks(reference: str) -> list[Task]:
    """The tasks of a task set; options are `skip`, `take`, and fields of the set's own config.

    It is a package or module that exports a `Taskset`, such as `gsm8k` or `my_taskset`.
    """
    name, query = reference.partition("?")[::2]
    options = parse_options(query)
    skip, take = options.pop("skip", 0), options.pop("take", SIZES["train"])
    written = json.dumps(options, sort_keys=True)
    envs: dict[str, Any] = {NAME: {}} if _plays_user(name) or _toolsets(_taskset(name, written)) else {}
    tasks = []
    for index, one in enumerate(_items(name, written, skip + take)):
        if index < skip:
            continue
        _check_coverage(name, one)
        data = one.data
        where: Json = {"taskset": name, "options": options, "index": index}
        id = f"{name.rpartition('/')[2]}-{data.id or index}"
        prompt = [] if data.prompt is None else data.prompt
        messages = prompt if isinstance(prompt, str) else _chat(prompt)
        held = envs or ({NAME: {}} if one.toolsets(one.config) else {})
        more = {"verifiers": where}
        tasks.append(Task.of(messages, id=id, system=data.system_prompt, envs=held, metadata=more))
    return tasks


def _check_coverage(name: str, task: Any) -> None:
    """Refuse what a task needs and does not get here."""
    base, plays_user = import_module("verifiers.v1.task").Task, _plays_user(name)
    hooks = {hook: getattr(type(task), hook) for hook in ("setup", "finalize", "stage_verifier")}
    needs = {
        "a container": task.NEEDS_CONTAINER,
        "a simulated user, who opens the conversation (no prompt)": task.data.prompt is None
        and not plays_user,
        "judges": bool(task.config.judges),
        "a runtime (setup, finalize)": any(
            own is not getattr(base, hook) for hook, own in hooks.items()
        ),
        "its own conditions to stop (@vf.stop)": bool(task.hooks("stop")),
        "interceptors (@vf.intercept)": bool(_decorated(task, "intercept")),
    }
    for one in task.toolsets(task.config):
        needs |= _needs_of_tools(one)
    _refuse(name, needs)


def _needs_of_tools(toolset: Any) -> dict[str, bool]:
    runtime, kind = getattr(toolset.config, "runtime", None), type(toolset).__name__
    local = import_module("verifiers.v1.runtimes").SubprocessConfig
    return {
        f"a tool server elsewhere ({kind}.config.url)": bool(getattr(toolset.config, "url", None)),
        f"a runtime for its tools ({kind})": runtime is not None and not isinstance(runtime, local),
    }


def _refuse(name: str, needs: Mapping[str, bool]) -> None:
    missing = [what for what, is_needed in needs.items() if is_needed]
    if missing:
        raise ConfigError(
            f"verifiers:{name} needs {', '.join(missing)}, which is not covered: prompts, rewards that read "
            "the conversation and the state, tools in Python (toolsets) and an Env with one agent are"
        )


def _chat(messages: Any) -> list[Json]:
    return [{"role": one.role, "content": one.content} for one in messages]


def _decorated(obj: Any, kind: str) -> list[Callable[..., Any]]:
    found: list[Callable[..., Any]]
    found = import_module("verifiers.v1.utils.decorators").discover_decorated(obj, kind)
    return found


def _toolsets(taskset: Any) -> list[Any]:
    """New tool servers that all of a set's tasks share."""
    return list(type(taskset).toolsets(taskset.config))


@lru_cache(maxsize=64)
def _taskset(name: str, options: str) -> Any:
    loaders = imported("verifiers.v1.utils.loaders", "verifiers", "a task set of verifiers")
    try:
        config = loaders.taskset_config_type(name)(id=name, **json.loads(options))
        made = loaders.load_taskset(config)
        shared = _toolsets(made)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"verifiers:{name}: {error}") from error
    for one in shared:
        _refuse(name, _needs_of_tools(one))
    return made


@lru_cache(maxsize=64)
def _items(name: str, options: str, size: int) -> list[Any]:
    return list(_taskset(name, options).take(size))


def _item(task: Task) -> Any:
    """The item of its set that a task stands for."""
    where = task.metadata.get("verifiers")
    if where is None:
        raise ConfigError(f"task {task.id!r} is none of verifiers'; the reward is for these only")
    index = where["index"]
    return _items(where["taskset"], json.dumps(where["options"], sort_keys=True), index + 1)[index]


@lru_cache(maxsize=64)
def _plays_user(name: str) -> bool:
    """Whether the set brings an `Env` of its own, which takes turns with the model."""
    loaders = imported("verifiers.v1.utils.loaders", "verifiers", "a task set of verifiers")
    base, single = import_module("verifiers.v1.env").Env, loaders.SingleAgentEnv
    try:
        kind = loaders.environment_class(name)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"verifiers:{name}: {error}") from error
    if kind is single:
        return False
    hooks = ("finalize", "start", "stop")
    roles = import_module("verifiers.v1.configs.agent").agent_config_fields(
        loaders.env_config_type(name)()
    )
    _refuse(
        name,
        {
            f"several agents ({', '.join(roles)})": len(roles) != 1,
            f"hooks of its Env ({', '.join(hooks)})": any(
                getattr(kind, hook) is not getattr(base, hook) for hook in hooks
            ),
        },
    )
    return True


# The environment ------------------------------------------------------------------------------------


class VerifiersEnv(Env):
    """What a task of verifiers has beside its prompt: tools with a state, and who answers as the user.

    Where an `Env` answers, the model's whole reply is the action: use `agent.format = "plain"`.
    """

    def __init__(self, taskset: str) -> None:
        self._name = taskset.partition("?")[0]
        self.takes_text = _plays_user(self._name)  # `step` is a turn of the set's own Env
        self._shared: list[Any] = []
        self._own: list[Any] = []
        self._trace: Any = None
        self._play: asyncio.Task[None] | None = None
        self._said: asyncio.Queue[str | None] = asyncio.Queue()
        self._heard: asyncio.Queue[str] = asyncio.Queue()

    async def reset(self, task: Task) -> str:
        theirs = _item(task)
        where = task.metadata["verifiers"]
        if where["taskset"] != self._name:
            raise ConfigError(
                f"task {task.id!r} is of verifiers:{where['taskset']}, not of {self._name!r}"
            )
        await self._end()
        if not self._shared:
            written = json.dumps(where["options"], sort_keys=True)
            self._shared = await _started(_toolsets(_taskset(self._name, written)))
        self._trace = _trace(theirs, [])
        self._own = await _started(theirs.toolsets(theirs.config), theirs.data)
        for one in (*self._shared, *self._own):
            _check_state(self._name, one, self._trace.state)
        if not self.takes_text:
            return ""
        self._said, self._heard = asyncio.Queue(), asyncio.Queue()
        self._play = asyncio.create_task(self._played(theirs, where["options"]))
        return await self._next_turn() or ""

    def tools(self) -> list[Tool]:
        servers = [*self._shared, *self._own]
        if not servers:  # before the first reset: what a task of the set usually has
            taskset = _taskset(self._name, "{}")
            servers = [*_toolsets(taskset), *taskset.task_type().toolsets(taskset.config.task)]
        return [
            _ServerTool(self, one, function) for one in servers for function in _decorated(one, "tool")
        ]

    async def step(self, action: str) -> Step:
        """Reply.

        Args:
            action: The whole reply.
        """
        if self._play is None or self._play.done():
            return Step(OVER, terminated=True)
        self._said.put_nowait(action)
        seen = await self._next_turn()
        return Step(OVER, terminated=True) if seen is None else Step(seen)

    @property
    def state(self) -> Any:
        """The rollout's state, which tools and rewards share."""
        return None if self._trace is None else self._trace.state

    async def finished(self) -> Any:
        """The trace, once the set's own Env has ended: rewards that it recorded, and the state."""
        if self._play is not None and not self._play.done():
            self._said.put_nowait(None)
            while await self._next_turn() is not None:  # it wants another turn, and there is none
                self._said.put_nowait(None)
        return self._trace

    async def close(self) -> None:
        await self._end()
        await _stopped(self._shared)
        self._shared = []

    async def _end(self) -> None:
        """What the last episode had."""
        play, self._play = self._play, None
        if play is not None:
            play.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await play
        await _stopped(self._own)
        self._own = []

    async def _played(self, theirs: Any, options: Json) -> None:
        loaders = import_module("verifiers.v1.utils.loaders")
        config = loaders.env_config_type(self._name)(taskset={"id": self._name, **options})
        [role] = import_module("verifiers.v1.configs.agent").agent_config_fields(config)
        agents = SimpleNamespace(**{role: _Role(self, theirs)})
        env = loaders.load_environment(config)
        await env.setup(agents)
        await env.run(theirs, agents)

    async def _next_turn(self) -> str | None:
        """The next user message of the set's own Env; None when it has ended."""
        assert self._play is not None
        hearing = asyncio.ensure_future(self._heard.get())
        try:
            await asyncio.wait({hearing, self._play}, return_when=asyncio.FIRST_COMPLETED)
            if hearing.done():
                return hearing.result()
        finally:
            hearing.cancel()
        error = None if self._play.cancelled() else self._play.exception()
        if isinstance(error, ConfigError):
            raise error
        if error is not None:
            message = f"the Env of verifiers:{self._name} failed: {error_with_location(error)}"
            raise InfraError(Boundary.ENV, message, retriable=False, replay=True) from error
        return None

    async def turn(self, message: Any) -> Any:
        """What `Interaction.turn` is to the set's own Env: a message of the user, and the model's reply."""
        types, agent = import_module("verifiers.v1.types"), import_module("verifiers.v1.agent")
        texts = [message] if isinstance(message, str) else [_text(one) for one in message or ()]
        self._heard.put_nowait("\n\n".join(texts))
        reply = await self._said.get()
        if reply is None:
            return agent.Segment(messages=[], terminated=True)
        return agent.Segment(messages=[types.AssistantMessage(content=reply)], root_reply=reply)


class _Role:
    """The model, as the set's own Env sees it."""

    trainable = True

    def __init__(self, env: VerifiersEnv, task: Any) -> None:
        self._env, self._task = env, task

    @asynccontextmanager
    async def interaction(self, task: Any) -> AsyncIterator[Any]:
        if task.data.prompt != self._task.data.prompt:
            raise ConfigError(
                f"the Env of {type(task).__name__} gives the model another prompt than the task's, which is "
                "not covered"
            )

        async def turn(message: Any = None) -> Any:
            return await self._env.turn(message)

        yield SimpleNamespace(turn=turn, trace=self._env._trace)

    async def run(self, task: Any) -> Any:
        raise ConfigError(
            f"the Env of {type(task).__name__} lets an agent run by itself (agents.NAME.run), which is not "
            "covered: one that takes turns (agents.NAME.interaction) is"
        )


class _ServerTool(FunctionTool[..., Any]):
    """A `@vf.tool` method, called with the rollout's state."""

    timeout = None  # the environment's deadline is the one that counts

    def __init__(self, env: VerifiersEnv, toolset: Any, function: Callable[..., Any]) -> None:
        self._env = env
        current = import_module("verifiers.v1.mcp.server")._call_state  # what `Toolset.state` reads

        @functools.wraps(function)
        async def run(*args: Any, **arguments: Any) -> Any:
            token = current.set(env.state)
            try:
                if inspect.iscoroutinefunction(function):
                    result = await function(*args, **arguments)
                else:
                    result = await run_sync(function, *args, **arguments)
            finally:
                current.reset(token)
            return result if isinstance(result, str) else json.dumps(to_jsonable_python(result))

        run.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        own = getattr(function, "tool_name", None) or function.__name__
        name = f"{toolset.server_name}_{own}" if toolset.server_name else own
        super().__init__(run, {"name": name})

    @property
    def owner(self) -> Any:
        return self._env


async def _started(toolsets: list[Any], data: Any = None) -> list[Any]:
    for one in toolsets:
        await one.setup()
        if data is not None:
            await one.setup_task(data)
    return list(toolsets)


async def _stopped(toolsets: list[Any]) -> None:
    for one in toolsets:
        await one._exit_stack.aclose()  # what its setup has opened


def _check_state(name: str, toolset: Any, state: Any) -> None:
    kind = import_module("verifiers.v1.state").state_cls(type(toolset))
    if not isinstance(state, kind):
        raise ConfigError(
            f"verifiers:{name}: the tools {type(toolset).__name__} have the state {kind.__name__}, and the "
            f"task has {type(state).__name__}: give the Task the same"
        )


# The reward -----------------------------------------------------------------------------------------


@reward(name="verifiers")
async def verifiers_score(trajectory: Trajectory, task: Task, envs: Mapping[str, Any]) -> float:
    """The weighted sum of the task set's own rewards, given the conversation and the state."""
    theirs = _item(task)
    env = next((one for one in envs.values() if isinstance(one, VerifiersEnv)), None)
    played = None if env is None else await env.finished()
    trace = _trace(theirs, trajectory.messages, is_chat=env is not None and bool(env.takes_text))
    if played is not None:
        trace.state, trace.info = played.state, played.info
    await theirs.score(trace, None)
    if played is not None:  # what the set's own Env has recorded
        trace.rewards.update(played.rewards)
    return float(trace.reward)


def _trace(task: Any, messages: list[Message], is_chat: bool = False) -> Any:
    """The conversation as verifiers records it; the model's turns are those after the prompt.

    In a chat with the set's own Env, a call of `step` is what the model said, and its result is the user's.
    """
    traces, types = import_module("verifiers.v1.trace"), import_module("verifiers.v1.types")
    graph, agents = import_module("verifiers.v1.graph"), import_module("verifiers.v1.configs.agent")
    nodes = []
    for position, one in enumerate(messages):
        made: Any
        if one.role == "assistant" and is_chat:
            said = [str(call.arguments.get("action", "")) for call in one.tool_calls]
            made = types.AssistantMessage(content="\n".join(said) or one.content)
        elif one.role == "assistant":
            calls = [
                types.ToolCall(id=call.id, name=call.name, arguments=json.dumps(call.arguments))
                for call in one.tool_calls
            ]
            made = types.AssistantMessage(content=one.content, tool_calls=calls or None)
        elif one.role == "tool" and not is_chat:
            made = types.ToolMessage(tool_call_id=one.tool_call_id or "", content=one.content)
        else:
            kind = types.SystemMessage if one.role == "system" else types.UserMessage
            made = kind(content=one.content)
        parent = position - 1 if position else None
        nodes.append(graph.MessageNode(parent=parent, message=made, sampled=one.role == "assistant"))
    recorded = traces.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    agent = traces.AgentInfo(config=agents.AgentConfig())
    state = import_module("verifiers.v1.state").state_cls(type(task))()
    return traces.Trace(task=recorded, agent=agent, nodes=nodes, state=state, is_completed=True, ok=True)


def _text(message: Any) -> str:
    content = message.get("content") if isinstance(message, Mapping) else message.content
    text: str = import_module("verifiers.v1.types").content_text(content)
    return text


ADAPTER = EnvAdapter(
    "verifiers:NAME",
    "Tasks, their tools or user, and the reward.",
    env=VerifiersEnv,
    tasks=verifiers_tasks,
    extra="verifiers",
    packages=("verifiers",),
)
