"""Environments by name: prebuilt worlds, adapters for environments of other libraries, and references.

Worlds and adapters are found by entry points (`ludus.worlds`, `ludus.env_adapters`), those that come with
Ludus and those of other packages alike:

    [project.entry-points."ludus.worlds"]
    depot = "my_package.depot:WORLD"    # a `World`, or just a class of environments

What has to be installed for one (`missing`) is known without importing it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import parse_qsl

from ludus.core.failures import ConfigError, MissingExtraError, install_command
from ludus.core.messages import Json, ToolCall, ToolSet
from ludus.core.registry import Registry, import_object
from ludus.core.task import Task
from ludus.envs.env import Env
from ludus.tools.library import build_toolset

Split = Literal["train", "held_out"]
ExpertMoves = Generator[ToolCall | str | None, str, None]
Expert = Callable[[Task], ExpertMoves]
"""A demonstrator's script: yields tool calls and is sent their results; a text is the final answer. A first
`yield None` is sent what the agent sees before it acts."""


def next_move(expert: ExpertMoves, observed: str) -> ToolCall | str | None:
    """The expert's next move after an observation; None when it has ended."""
    begins = inspect.getgeneratorstate(expert) == inspect.GEN_CREATED
    try:
        move = next(expert) if begins else expert.send(observed)
        return expert.send(observed) if move is None else move  # None: it wants to see before it acts
    except StopIteration:
        return None


def path_problem(variables: str, what: str) -> str:
    """Why an environment variable (the first of `A|B` that is set) names no data; empty where it does."""
    names = variables.split("|")
    given = next((name for name in names if os.environ.get(name)), None)
    if given is None:
        return f"set {' or '.join(names)} to {what}"
    path = Path(os.environ[given])
    if not path.is_absolute():
        near = path.expanduser().absolute()
        return f"{given} = {str(path)!r} is no absolute path: set it to {what}" + (
            f", such as {near}" if near.exists() else ""
        )
    return "" if path.exists() else f"{given} = {str(path)!r} does not exist: set it to {what}"


@dataclass(frozen=True)
class EnvListing:
    """A line of `ludus envs`: what an environment is, and what has to be installed for it."""

    name: str
    summary: str
    extra: str | None = field(default=None, kw_only=True)
    """The extra of the package `ludus-rl` that installs what is needed."""
    packages: tuple[str, ...] = field(default=(), kw_only=True)
    """Modules that must be importable."""
    programs: tuple[str, ...] = field(default=(), kw_only=True)
    """Programs that must be on the path; the first of alternatives written `a|b` is enough. One of them may be
    the name of an environment variable with a path."""
    data: str | None = field(default=None, kw_only=True)
    """An environment variable with the path of data that cannot be distributed; or alternatives, `A|B`."""

    def missing(self) -> list[str]:
        """Missing requirements, each with the way to install it."""
        found = []
        absent = [name for name in self.packages if importlib.util.find_spec(name) is None]
        if absent:
            found.append(f"{', '.join(absent)} ({install_command(self.extra or '')})")
        for program in self.programs:
            if not any(shutil.which(os.environ.get(name, name)) for name in program.split("|")):
                found.append(f"the program {program.replace('|', ' or ')}")
        where = f"its folder (docs/envs/{self.name}.md)"
        if self.data is not None and (problem := path_problem(self.data, where)):
            found.append(f"data: {problem}")
        return found


@dataclass(frozen=True)
class World(EnvListing):
    """A prebuilt environment with its tasks, rewards and demonstrator.

    Where tools of the library are all that an agent needs, there is no environment, and `tools` names them.
    """

    env: Callable[[], Env] | None = field(default=None, kw_only=True)
    """Its class; None for tasks with tools alone."""
    rewards: Sequence[Any] = field(default=(), kw_only=True)
    """With none, the environment pays."""
    training_tasks: Callable[[], list[Task]] = field(default=list, kw_only=True)
    held_out_tasks: Callable[[], list[Task]] = field(default=list, kw_only=True)
    """Tasks; `metadata["subtask"]` names the subset of the papers."""
    expert: Expert | None = field(default=None, kw_only=True)
    """A demonstrator that solves the tasks through the agent's own tools."""
    max_turns: int = field(default=20, kw_only=True)
    """Turns of an episode in the papers."""
    tools: tuple[str | Mapping[str, Any], ...] = field(default=(), kw_only=True)
    """Tools beside those of the environment, as a recipe names them (`agent.tools`)."""

    @property
    def factory(self) -> Callable[[], Env]:
        """Makes an environment; `ConfigError` says what is not installed, or that there is no class."""
        if self.env is None:
            named = [one if isinstance(one, str) else str(one.get("tool")) for one in self.tools]
            raise ConfigError(
                f"{self.name!r} has no environment of its own, only tasks with tools: in a recipe, leave it "
                f"out of agent.envs and set agent.tools = {named} (ludus init --from {self.name} writes one); "
                f"as a service, ludus serve tools {' '.join(named)}"
            )
        self._check_installed()
        return self.env

    def toolset(self) -> ToolSet:
        """A tool set of its tools; none where the environment has all of them."""
        return build_toolset(list(self.tools))

    def tasks(self, split: Split) -> list[Task]:
        """Its tasks for training or for evaluation."""
        self._check_installed()
        return self.training_tasks() if split == "train" else self.held_out_tasks()

    def _check_installed(self) -> None:
        if missing := self.missing():
            raise ConfigError(f"the environment {self.name!r} needs {'; '.join(missing)}")


@dataclass(frozen=True)
class EnvAdapter(EnvListing):
    """Environments or tasks of another library, by what follows the adapter's name in a reference.

    `gymnasium:FrozenLake-v1` makes `env("FrozenLake-v1")`, and as a task set `tasks("FrozenLake-v1")`. `name`
    is how a reference is written, for people.
    """

    env: type[Env] | None = field(default=None, kw_only=True)
    tasks: Callable[[str], list[Task]] | None = field(default=None, kw_only=True)
    probe: Callable[..., Awaitable[None]] | None = field(default=None, kw_only=True)
    """Checks that the server of an environment answers."""

    def factory(self, what: str) -> Callable[[], Env]:
        """Makes the environment that a reference names after the colon."""
        if self.env is None:
            raise ConfigError(f"{self.name} names tasks, and no environment")
        make: Callable[[str], Env] = self.env  # each adapter's class takes what its references name
        made = partial(make, what)
        vars(made)["__name__"] = env_name(self.env)
        if self.probe is not None:
            vars(made)["probe"] = partial(self.probe, what)
        return made


class _Worlds(Mapping[str, World]):
    """The registered worlds by name; each is imported when it is asked for."""

    registry = Registry("environment", group="ludus.worlds")

    def __getitem__(self, name: str) -> World:
        found = import_object(self.registry[name])
        if isinstance(found, World):
            return found if found.name == name else replace(found, name=name)
        summary = (inspect.getdoc(found) or "").partition("\n")[0]
        return World(name, summary, env=found)

    def __contains__(self, name: object) -> bool:
        return name in self.registry

    def __iter__(self) -> Iterator[str]:
        return iter(self.registry)

    def __len__(self) -> int:
        return len(self.registry)


WORLDS: Mapping[str, World] = _Worlds()
"""The prebuilt environments, by name."""
ADAPTERS = Registry("adapter of environments", group="ludus.env_adapters")
"""Environments and tasks of other libraries, by what stands before the colon of a reference."""
ON_SERVER = EnvListing(
    "http://host:port/NAME",
    "One on a server (ludus serve env).",
    extra="serve",
    packages=("aiohttp",),
)


def env_name(factory: Callable[[], Any]) -> str:
    """Name of an environment given by its class: a prebuilt one's name, else in snake case."""
    own = getattr(factory, "__name__", type(factory).__name__)
    module = getattr(factory, "__module__", "")
    for name, reference in _Worlds.registry.items():
        if f"{module}.".startswith(f"{reference.partition(':')[0]}.") and WORLDS[name].env is factory:
            return name
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", own).lower()


def listed_envs() -> list[EnvListing]:
    """All that a recipe may name, for people: prebuilt environments, then those on servers and of adapters."""
    adapters: list[EnvAdapter] = [ADAPTERS.load(name) for name in sorted(ADAPTERS)]
    return [*(WORLDS[name] for name in sorted(WORLDS)), ON_SERVER, *adapters]


def _unknown(reference: str) -> ConfigError:
    near = get_close_matches(reference, WORLDS, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    known = sorted(name for name, world in WORLDS.items() if world.env is not None)
    tools = sorted(name for name, world in WORLDS.items() if world.env is None)
    return ConfigError(
        f"there is no environment called {reference!r}.{hint} Known: {', '.join(known)}; as tasks with tools "
        f"alone, which need no environment: {', '.join(tools)}. Or give 'module:Class', 'file.py:Class', an "
        f"address (http://host:port/NAME) or an adapter ({', '.join(f'{name}:...' for name in ADAPTERS)})"
    )


def load_env(reference: str) -> Callable[[], Env]:
    """What makes the environment that a recipe names.

    A prebuilt one by its name, a user's as `module:Class` or `file.py:Class`, one on a server by its address
    (`http://host:port/NAME`), one of another library by an adapter, such as `gymnasium:FrozenLake-v1`.
    """
    if reference in WORLDS:
        return WORLDS[reference].factory
    if reference.startswith(("http://", "https://")):
        from ludus.envs.remote import RemoteEnvs

        made: Any = RemoteEnvs(reference)  # a coroutine function, as factories may be
        return cast(Callable[[], Env], made)
    scheme, _, what = reference.partition(":")
    if what.startswith("//"):
        raise ConfigError(
            f"{reference!r} is not a valid environment address: unsupported scheme {scheme}://; write "
            "http://host:port/NAME or https://... (ludus serve env), agentgym:http://... or openenv:http://..."
        )
    if scheme in ADAPTERS:
        adapter: EnvAdapter = ADAPTERS.load(scheme)
        return adapter.factory(what)
    if not what:
        raise _unknown(reference)
    factory: Callable[[], Env] = import_object(reference)
    return factory


def adapted_tasks(reference: str) -> list[Task] | None:
    """The tasks of another library that a reference names by an adapter; None where it names something else."""
    scheme, _, what = reference.partition(":")
    if scheme not in ADAPTERS:
        return None
    adapter: EnvAdapter = ADAPTERS.load(scheme)
    if adapter.tasks is None:
        raise ConfigError(
            f"{adapter.name} has no sets of tasks; name a file or a function (tasks.train)"
        )
    return adapter.tasks(what)


# References of adapters

SIZES = {"train": 2000, "held_out": 200}
"""How many tasks a split has when the reference does not say it."""


def parse_reference(reference: str) -> tuple[str, str, Json]:
    """`name@split?size=100&word=text`: name, split and options; numbers and JSON are read as such."""
    named, _, query = reference.partition("?")
    name, _, split = named.partition("@")
    if not name or split not in ("", *SIZES):
        raise ConfigError(
            f"{reference!r} is written NAME@SPLIT?option=value, where SPLIT is {' or '.join(SIZES)}"
        )
    return name, split or "train", parse_options(query)


def parse_options(query: str) -> Json:
    """The options of a reference, each JSON or else text."""

    def value(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return text

    return {key: value(text) for key, text in parse_qsl(query)}


def imported(module: str, extra: str, purpose: str) -> Any:
    """A module of a package that an extra brings."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.partition(".")[0] == package:
            raise MissingExtraError(package, extra, purpose) from error
        raise
