"""The code of a run: what a recipe names by reference, or what Python passes in directly."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

from ludus.core.failures import ConfigError
from ludus.core.messages import Message
from ludus.core.registry import Registry, import_object
from ludus.core.task import Task
from ludus.core.trajectory import Audit
from ludus.envs import Env, env_name, load_env
from ludus.rewards import build_group_reward, build_reward
from ludus.rewards.scorer import rewards_by_name
from ludus.rewards.scores import RewardTraits
from ludus.rollouts.agent import Agent, Expert
from ludus.rollouts.task_files import map_tasks
from ludus.rollouts.tasksets import FILES, Columns, is_rows, load_tasks, parse_tasks
from ludus.rollouts.workflows import with_workflows
from ludus.tools.library import build_toolset, tools_named
from ludus.tools.mcp import is_mcp
from ludus.training.config.recipe import COMMAND, Recipe
from ludus.training.config.run import TaskSetConfig
from ludus.training.config.stages import SFTConfig
from ludus.training.data.conversations import Conversation, parse_conversations, read_conversations


@dataclass(slots=True)
class Parts:
    """The code and data objects of a run: tasks, tools, environments, rewards, the agent, demonstrations."""

    tasks: Sequence[Task] = ()
    held_out: Sequence[Task] = ()
    tools: Sequence[Any] = ()
    """Functions, tools, tool sets, or what a recipe calls them."""
    envs: dict[str, Callable[[], Env]] = field(default_factory=dict)
    rewards: Sequence[Any] = ()
    group_rewards: Sequence[Any] = ()
    agent: Agent = field(default_factory=Agent)
    demonstrations: Expert | Sequence[Conversation] | None = None
    audit: Audit | None = None
    """Called with a record of every tool call; a run writes them to its folder (run.audit)."""

    @property
    def uses_mcp(self) -> bool:
        """Whether tools of MCP servers are among the tools."""
        return any(is_mcp(one) for one in self.tools)

    @property
    def all_envs(self) -> dict[str, Callable[[], Env]]:
        """The environments by name: those that are listed, and those that tools and rewards name (`env=`)."""
        return {**self.envs, **{name: one.env for name, one in self._named_envs().items()}}

    def _named_envs(self) -> dict[str, NamedEnv]:
        found: dict[str, NamedEnv] = {}
        for one in named_envs(self.tools, self.rewards):
            listed = [name for name, factory in self.envs.items() if _makes(factory, one.env)]
            names = listed or [env_name(one.env)]
            if not listed and _is_function(self.envs.get(names[0])):
                listed = names  # a function of that name may make anything: the recipe decides
            if not listed and names[0] in self.envs:
                raise ConfigError(
                    f"two environments are called {names[0]!r}: {_shown(self.envs[names[0]])} is listed "
                    f"(agent.envs), and {one.by} names {_shown(one.env)}; list both, under different names"
                )
            for name in () if listed else names:
                found[name] = one.joined_with(found.get(name), name)
        return found


@dataclass(frozen=True, slots=True)
class NamedEnv:
    """An environment that a tool or a reward names by `env=`."""

    env: type
    by: str

    def joined_with(self, other: NamedEnv | None, name: str) -> NamedEnv:
        """The one environment that both name; what they disagree on is refused."""
        if other is None:
            return self
        if other.env is not self.env and not issubclass(self.env, other.env):
            if issubclass(other.env, self.env):
                return other.joined_with(replace(self, env=other.env), name)
            raise ConfigError(
                f"two environments are called {name!r}: {other.by} names {_shown(other.env)}, and {self.by} "
                f"names {_shown(self.env)}; list both in agent.envs, under different names"
            )
        return self


def named_envs(tools: Sequence[Any], rewards: Sequence[Any]) -> Iterator[NamedEnv]:
    """Environments that tools and rewards name."""
    for one in tools_named(list(tools)):
        if one.env is not None:
            yield NamedEnv(one.env, f"the tool {one.name or one!r}")
    found: dict[str, Any] = rewards_by_name(build_reward(spec) for spec in rewards)
    for name, reward in found.items():
        if (env := RewardTraits.of(reward).env) is not None:
            yield NamedEnv(env, f"the reward {name!r}")


def _makes(factory: Any, kind: type) -> bool:
    return isinstance(factory, type) and issubclass(factory, kind)


def _is_function(factory: Any) -> bool:
    return factory is not None and not isinstance(factory, type)


def _shown(factory: Any) -> str:
    return f"{factory.__module__}:{getattr(factory, '__qualname__', type(factory).__name__)}"


AGENTS = Registry("agent", group="ludus.agents")
"""Agents registered by entry point: `program` plays a command or function through the model server."""


def load_parts(recipe: Recipe) -> Parts:
    """Everything that the recipe names, imported. What is missing or broken is a `ConfigError`."""
    imitating = (where for where, stage in recipe.named_stages if isinstance(stage, SFTConfig))
    first = next(imitating, "warm_start")
    named = {
        "tasks": ("tasks.train", recipe.tasks.train),
        "held_out": ("tasks.evaluation", recipe.tasks.evaluation),
        "tools": ("agent.tools", recipe.agent.tools),
        "envs": ("agent.envs", recipe.agent.envs),
        "rewards": ("rewards", recipe.rewards),
        "group_rewards": ("group_rewards", recipe.group_rewards),
        "agent": ("agent.loop", recipe.agent.loop),
        "demonstrations": (f"{first}.demonstrations", recipe.first_sft.demonstrations),
    }
    return Parts(
        **{
            name: resolve_named(where, name, value, recipe)
            for name, (where, value) in named.items()
            if value
        }
    )


@contextmanager
def errors_at(where: str) -> Iterator[None]:
    """Put the place in the recipe before what is wrong there."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def resolve_named(where: str, name: str, value: Any, recipe: Recipe) -> Any:
    """A part that a recipe names at `where`."""
    with errors_at(where):
        return resolve_part(name, value, recipe)


def resolve_part(name: str, value: Any, recipe: Recipe) -> Any:
    """A part as code, from the names a recipe uses or from objects, which stay as they are."""
    if name in ("tools", "rewards", "group_rewards") and not isinstance(value, list | tuple):
        value = [value]
    if name == "envs" and not isinstance(value, Mapping):
        raise ConfigError('envs is a table of names and environments, such as {"safe": Safe}')
    if name in ("tasks", "held_out"):
        is_named = isinstance(value, str)
        found = load_tasks(value, recipe.tasks.columns) if is_named else parse_tasks(value, name)
        return _with_memory(with_system(found, recipe), recipe, is_held_out=name == "held_out")
    if name == "tools":
        build_toolset(value, sandbox=recipe.agent.sandbox)  # what is wrong with it is found out here
        return list(value)
    if name == "envs":
        return {key: _environment(key, env) for key, env in value.items()}
    if name in ("rewards", "group_rewards"):
        build = build_reward if name == "rewards" else build_group_reward
        built = [build(spec) for spec in value]  # what is wrong with one is found out here
        named = [isinstance(spec, str | Mapping) for spec in value]
        return [new if is_name else old for new, old, is_name in zip(built, value, named, strict=True)]
    if name == "agent":
        return _agent(value, recipe)
    if callable(value):
        return value
    if isinstance(value, str | PathLike):
        return read_demonstrations(str(value), recipe.first_sft.columns)
    if not isinstance(value, Iterable):
        raise ConfigError(f"demonstrations are conversations, a file or a function, not {value!r:.80}")
    return parse_conversations(value)


def demonstrations_of(config: SFTConfig, recipe: Recipe, parts: Parts) -> Any:
    """The demonstrations of a stage; the run's where the stage names none or the same."""
    first, source = recipe.first_sft, config.demonstrations
    if source is None or (source, config.columns) == (first.demonstrations, first.columns):
        return parts.demonstrations
    return read_demonstrations(source, config.columns)


def with_system(tasks: Sequence[Task], recipe: Recipe) -> Sequence[Task]:
    """The tasks, each with the recipe's system message unless it has one of its own."""
    if recipe.agent.system is None:
        return tasks
    system = Message("system", recipe.agent.system)

    def told(task: Task) -> Task:
        if task.messages and task.messages[0].role == "system":
            return task
        return replace(task, messages=(system, *task.messages))

    return map_tasks(told, tasks)


def _with_memory(tasks: Sequence[Task], recipe: Recipe, *, is_held_out: bool) -> Sequence[Task]:
    """The tasks with workflows of earlier runs; held-out ones only where the recipe says so."""
    memory = recipe.agent.workflows
    if memory is None or (is_held_out and not memory.held_out):
        return tasks
    return with_workflows(tasks, memory)


def _environment(name: str, given: Any) -> Callable[[], Env]:
    made: Callable[[], Env] = load_env(given) if isinstance(given, str) else given
    if not callable(made):
        raise ConfigError(
            f"the environment {name!r} is {made!r:.80}: give a class, or a function that makes one"
        )
    return made


def _agent(given: Any, recipe: Recipe) -> Agent:
    """An `Agent`, or a program that talks to a chat API."""
    if isinstance(given, str) and given.startswith(COMMAND):
        return _program(given.removeprefix(COMMAND).strip(), recipe)
    found = import_object(given) if isinstance(given, str) else given
    if inspect.isroutine(found) and _takes_three(found):
        return _program(found, recipe)
    agent = found() if isinstance(found, type) else found
    if not inspect.iscoroutinefunction(getattr(agent, "run", None)):
        raise ConfigError(
            f"the agent {found!r} has no coroutine 'async def run(self, episode)', and is neither a function "
            f"of (task, base_url, key) nor a '{COMMAND} ...'"
        )
    made: Agent = agent
    return made


def _takes_three(function: Callable[..., Any]) -> bool:
    """Whether it can be called as a program is: (task, base_url, key)."""
    try:
        inspect.signature(function).bind(None, None, None)
    except (TypeError, ValueError):
        return False
    return True


def _program(program: str | Callable[..., Any], recipe: Recipe) -> Agent:
    """Through its name: programs are played by the model server, which stands beside training."""
    if recipe.agent.tools:
        raise ConfigError(
            "a program has tools of its own, which it offers with each request: leave out agent.tools"
        )
    made: Agent = AGENTS.load("program")(program, recipe.agent.program, recipe.agent.sandbox)
    return made


def read_demonstrations(source: str, columns: Columns) -> Expert | Sequence[Conversation]:
    """The conversations of a file or dataset, or the expert that a reference names."""
    if is_rows(source):
        return read_conversations(source, columns)
    if Path(source).is_file():
        raise ConfigError(f"demonstrations are in a file {', '.join(FILES)}, not in {source!r}")
    expert: Expert = import_object(source)
    if not callable(expert):
        raise ConfigError(f"warm_start.demonstrations = {source!r} is not a function of a task")
    return expert


def objects_of(given: Mapping[str, Any]) -> dict[str, str]:
    """The parts that are Python objects, which no recipe names, with a description of each."""
    found = {name: [one for one in _each(value) if not isinstance(one, str | PathLike)]
             for name, value in given.items() if value is not None}  # fmt: skip
    return {name: _described(name, objects) for name, objects in found.items() if objects}


def _each(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else [value]


def _described(name: str, objects: Sequence[Any]) -> str:
    if name in ("tasks", "held_out"):
        return f"{len(objects)} tasks"
    names = [str(getattr(one, "__name__", None) or getattr(one, "name", None) or type(one).__name__)
             for one in objects]  # fmt: skip
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


KEYS = {
    "tasks": "tasks.train",
    "held_out": "tasks.evaluation",
    "tools": "agent.tools",
    "envs": "agent.envs",
    "agent": "agent.loop",
}
"""Where a recipe names a part that goes by another name in Python."""


def check_rebuilt(run: str, objects: Mapping[str, str], given: Iterable[str]) -> None:
    """Refuse to go on with a run whose objects are not there again.

    `given` are the parts that were passed anew (or do not matter), or the recipe's keys that were set.
    """
    there = set(given)
    missing = {name: what for name, what in objects.items() if not {name, KEYS.get(name, name)} & there}
    if missing:
        told = "; ".join(f"{name} = {what}" for name, what in missing.items())
        raise ConfigError(
            f"{run} was made in Python, from objects that the command line cannot rebuild: {told}. Go on in "
            f"Python with the same objects, such as ludus.train(resume={run!r}, {next(iter(missing))}=...), or "
            f"name them by reference ({', '.join(KEYS.get(name, name) for name in missing)}); ludus show "
            f"{run} needs none of them"
        )


ONLY = "tasks"
"""Name of the task set of a recipe without task sets."""


@dataclass(frozen=True, slots=True)
class TaskSetSpec:
    """A task set before anything is built for it."""

    name: str
    recipe: Recipe
    """The recipe as it would be if this set were the only one."""
    parts: Parts
    """The code of such a recipe."""
    config: TaskSetConfig | None = None
    """The set's table in the recipe; None for a recipe without such tables."""

    @property
    def limits(self) -> dict[str, float]:
        """The budgets that the set's own table gives."""
        own = self.config.budgets if self.config is not None else None
        return {} if own is None else {name: getattr(own, name) for name in own.model_fields_set}


def task_set_specs(recipe: Recipe, parts: Parts) -> list[TaskSetSpec]:
    """The task sets of a recipe, loaded."""
    refuse_stray_tasks(recipe, parts)
    return [
        _plan(recipe, one, parts) if isinstance(one, TaskSetConfig) else TaskSetSpec(ONLY, recipe, parts)
        for one in recipe.sets
    ]


def has_own_sets(recipe: Recipe) -> bool:
    """Whether its task sets bring their own tasks and, it may be, tools: [[task_sets]]."""
    return any(isinstance(one, TaskSetConfig) for one in recipe.sets)


def refuse_stray_tasks(recipe: Recipe, parts: Parts) -> None:
    """Refuse tasks that were passed beside task sets: no set would play them."""
    if has_own_sets(recipe) and (parts.tasks or parts.held_out):
        raise ConfigError(
            "the recipe has [[task_sets]], which bring their own tasks: leave out tasks= and held_out="
        )


def recipe_of(recipe: Recipe, config: TaskSetConfig) -> Recipe:
    """The recipe as it would be if this set were the only one."""
    agent = {name: getattr(config, name) for name in ("tools", "envs", "system", "step_rewards")}
    record = recipe.agent.record
    if record is not None and config.tools is not None:
        # in one store, the tools of one set must not be taken for another's
        agent["record"] = record.model_copy(update={"name": f"{record.name}/{config.name}"})
    own: dict[str, Any] = {name: getattr(config, name) for name in ("rewards", "group_rewards")}
    own["agent"] = recipe.agent.model_copy(update=_given(agent))
    own["tasks"] = recipe.tasks.model_copy(
        update={name: getattr(config, name) for name in ("train", "evaluation", "columns")}
    )
    if config.budgets is not None:
        limits = {name: getattr(config.budgets, name) for name in config.budgets.model_fields_set}
        own["budgets"] = recipe.budgets.model_copy(update=limits)
    return recipe.model_copy(update={**_given(own), "task_sets": ()})


def _plan(recipe: Recipe, config: TaskSetConfig, parts: Parts) -> TaskSetSpec:
    own_recipe = recipe_of(recipe, config)
    named = {name: getattr(config, name) for name in ("tools", "envs", "rewards", "group_rewards")}
    named |= {"tasks": config.train, "held_out": config.evaluation}
    changes = {
        name: resolve_named(f"the task set {config.name!r}", name, value, own_recipe)
        for name, value in _given(named).items()
    }
    own = replace(parts, **{"held_out": [], **changes})
    return TaskSetSpec(config.name, own_recipe, own, config)


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
