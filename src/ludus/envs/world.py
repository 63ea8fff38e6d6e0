"""A world: an environment or tools, with tasks, rewards and demonstrator, and what has to be installed for it.

Nothing of a world is imported until it is used, so that listing them is quick and needs no extra.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import shutil
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from ludus.core.failures import ConfigError
from ludus.core.messages import ToolCall, ToolSet
from ludus.core.registry import Registry, load_reference
from ludus.core.task import Task
from ludus.envs.env import Env
from ludus.tools.library import build_toolset

Split = Literal["train", "held_out"]
ExpertMoves = Generator[ToolCall | str | None, str, None]
Expert = Callable[[Task], ExpertMoves]
"""A demonstrator's script: yields tool calls and is sent their results; a text is the final answer. A first
`yield None` is sent what the agent sees before it acts."""


def next_move(expert: ExpertMoves, observed: str) -> ToolCall | str | None:
    """What an expert does after it has observed that; None when it has ended."""
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
class World:
    """One prebuilt environment. The module has `training_tasks`, `held_out_tasks` and `expert`.

    Where tools of the library are all that an agent needs, there is no class, and `tools` names them.
    """

    name: str
    summary: str
    module: str
    env: str | None = None
    """The name of the environment's class in `module`; None for tasks with tools alone."""
    rewards: tuple[str, ...] = ()
    """Names of rewards in `module`; with none, the environment pays."""
    extra: str | None = None
    """The extra of the package `ludus` that installs what is needed."""
    packages: tuple[str, ...] = ()
    """Modules that must be importable."""
    programs: tuple[str, ...] = ()
    """Programs that must be on the path; the first of alternatives written `a|b` is enough. One of them may be
    the name of an environment variable with a path."""
    data: str | None = None
    """An environment variable with the path of data that cannot be distributed; or alternatives, `A|B`."""
    max_turns: int = 20
    """Turns of an episode in the papers."""
    tools: tuple[str | Mapping[str, Any], ...] = ()
    """Tools beside those of the environment, as a recipe names them (`agent.tools`)."""

    def missing(self) -> list[str]:
        """What is not installed, each with how to get it."""
        found = []
        absent = [name for name in self.packages if importlib.util.find_spec(name) is None]
        if absent:
            found.append(f"{', '.join(absent)} (pip install 'ludus[{self.extra}]')")
        for program in self.programs:
            if not any(shutil.which(os.environ.get(name, name)) for name in program.split("|")):
                found.append(f"the program {program.replace('|', ' or ')}")
        where = f"its folder (docs/envs/{self.name}.md)"
        if self.data is not None and (problem := path_problem(self.data, where)):
            found.append(f"data: {problem}")
        return found

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
        factory: Callable[[], Env] = self._load(self.env)
        return factory

    def toolset(self) -> ToolSet:
        """A tool set of its tools; none where the environment has all of them."""
        return build_toolset(list(self.tools))

    def tasks(self, split: Split) -> list[Task]:
        """Its tasks; `metadata["subtask"]` names the subset of the papers."""
        load: Callable[[], list[Task]] = self._load(
            "training_tasks" if split == "train" else "held_out_tasks"
        )
        return load()

    @property
    def expert(self) -> Expert:
        """A demonstrator that solves the tasks through the agent's own tools."""
        expert: Expert = self._load("expert")
        return expert

    def scored_by(self) -> list[Any]:
        """Its rewards."""
        return [self._load(name) for name in self.rewards]

    def _load(self, attribute: str) -> Any:
        if missing := self.missing():
            raise ConfigError(f"the environment {self.name!r} needs {'; '.join(missing)}")
        return load_reference(f"{self.module}:{attribute}")


_CHROMIUM = "chromium|chromium-browser|google-chrome-stable|google-chrome|LUDUS_CHROMIUM"

_ALL = (
    World(
        "alfworld",
        "Do a household task in text: find, clean, heat, cool, place or look at things.",
        "ludus.worlds.alfworld",
        "AlfWorld",
        ("success",),
        data="LUDUS_ALFWORLD_DATA|ALFWORLD_DATA",
    ),
    World(
        "babyai",
        "Missions in a maze of rooms, in words: go to, pick up, open, put next to.",
        "ludus.worlds.babyai",
        "BabyAI",
        ("success",),
        extra="babyai",
        packages=("minigrid",),
    ),
    World(
        "browser",
        "Use a web browser as in WebArena: pages as accessibility trees, tabs, any start URL.",
        "ludus.worlds.browser",
        "Browser",
        ("success",),
        extra="browser",
        packages=("playwright",),
        programs=(_CHROMIUM,),
        max_turns=15,
    ),
    World(
        "code",
        "Write a function from its docstring; hidden tests decide. HumanEval by path.",
        "ludus.worlds.code",
        rewards=("success",),
        tools=("python",),
        max_turns=5,
    ),
    World(
        "maths",
        "Arithmetic and word problems with Python; GSM8K and MATH by path.",
        "ludus.worlds.maths",
        rewards=("success",),
        tools=("python",),
        max_turns=4,
    ),
    World(
        "miniwob",
        "Small web tasks on pages of their own: buttons, forms, tables, e-mail, search.",
        "ludus.worlds.miniwob",
        "MiniWob",
        ("success",),
        extra="browser",
        packages=("playwright", "miniwob"),
        programs=(_CHROMIUM,),
    ),
    World(
        "safe",
        "Open a safe by turning three dials.",
        "ludus.worlds.safe",
        "Safe",
        ("opened",),
        max_turns=14,
    ),
    World(
        "scienceworld",
        "Do an experiment of elementary school in a text world: 30 tasks with 7,207 variations.",
        "ludus.worlds.scienceworld",
        "ScienceWorld",
        ("success",),
        extra="scienceworld",
        packages=("scienceworld", "py4j"),
        programs=("java",),
    ),
    World(
        "search",
        "Answer questions of one or two hops by searching a corpus.",
        "ludus.worlds.search",
        "Search",
        ("success",),
        extra="search",
        packages=("bm25s",),
        max_turns=8,
    ),
    World(
        "sql",
        "Answer questions about a database with a query; Spider and dbbench by path.",
        "ludus.worlds.sql",
        "Sql",
        ("success",),
        max_turns=5,
    ),
    World(
        "swe",
        "Mend a bug in a small repository, from the text of an issue; hidden tests decide.",
        "ludus.worlds.swe",
        "SWE",
        ("success",),
        programs=("bash", "tar"),
        max_turns=30,
    ),
    World(
        "textcraft",
        "Craft an item of Minecraft from crafting commands, at depth 1 to 4.",
        "ludus.worlds.textcraft",
        "TextCraft",
        ("success",),
        extra="textcraft",
        packages=("minecraft_data",),
    ),
    World(
        "webshop",
        "Find and buy the product that an instruction asks for, on a shop's website in text.",
        "ludus.worlds.webshop",
        "WebShop",
        ("success",),
        extra="webshop",
        packages=("bm25s", "rapidfuzz"),
        data="LUDUS_WEBSHOP_DATA",
        max_turns=15,
    ),
)
WORLDS = {world.name: world for world in _ALL}
"""The prebuilt environments, by name."""
ENVS = Registry(
    "environment", {world.name: f"{world.module}:{world.env}" for world in _ALL if world.env}
)


def env_name(factory: Callable[[], Any]) -> str:
    """What an environment is called that only its class says: a prebuilt one's name, else in snake case."""
    own = getattr(factory, "__name__", type(factory).__name__)
    module = getattr(factory, "__module__", "")
    for world in _ALL:
        if world.env == own and f"{module}.".startswith(f"{world.module}."):
            return world.name
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", own).lower()


ADAPTERS = {
    "agentgym": "ludus.envs.foreign:AgentGymEnv",
    "gymnasium": "ludus.envs.gym:GymnasiumEnv",
    "openenv": "ludus.envs.foreign:OpenEnv",
    "verifiers": "ludus.envs.verifiers:VerifiersEnv",
}
"""Environments of others: their classes, by what stands before the colon of a reference."""
_SERVER: dict[str, Any] = {"extra": "serve", "packages": ("aiohttp",)}
OTHERS = (
    World("http://host:port/NAME", "One on a server (ludus serve env).", "", "", (), **_SERVER),
    World("agentgym:http://...", "One on an AgentGym server.", "", "", (), **_SERVER),
    World("openenv:http://...", "One on an OpenEnv server.", "", "", (), **_SERVER),
    World(
        "gymnasium:ID",
        "Any with discrete or textual actions.",
        "",
        "",
        extra="gymnasium",
        packages=("gymnasium",),
    ),
    World(
        "reasoning_gym:NAME",
        "Tasks; with the reward of that name.",
        "",
        "",
        extra="reasoning-gym",
        packages=("reasoning_gym",),
    ),
    World(
        "verifiers:NAME",
        "Tasks, their tools or user, and the reward.",
        "",
        "",
        extra="verifiers",
        packages=("verifiers",),
    ),
)
"""What else a recipe may name, for people (docs/services.md)."""


def _unknown(reference: str) -> ConfigError:
    near = get_close_matches(reference, WORLDS, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    tools = ", ".join(world.name for world in _ALL if world.env is None)
    return ConfigError(
        f"there is no environment called {reference!r}.{hint} Known: {', '.join(sorted(ENVS))}; as tasks with "
        f"tools alone, which need no environment: {tools}. Or give 'module:Class', 'file.py:Class', an address "
        f"(http://host:port/NAME) or an adapter ({', '.join(f'{name}:...' for name in ADAPTERS)})"
    )


def load_env(reference: str) -> Callable[[], Env]:
    """What makes the environment that a recipe names.

    A prebuilt one by its name, a user's as `module:Class` or `file.py:Class`, one on a server by its address
    (`http://host:port/NAME`), one of others by an adapter (`ADAPTERS`), such as `gymnasium:FrozenLake-v1`.
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
            f"{reference!r} is no address of an environment: {scheme}:// is not spoken; write "
            "http://host:port/NAME or https://... (ludus serve env), agentgym:http://... or openenv:http://..."
        )
    if scheme not in ADAPTERS:
        if not what:
            raise _unknown(reference)
        factory: Callable[[], Env] = ENVS.load(reference)
        return factory
    adapter = load_reference(ADAPTERS[scheme])
    found: Callable[[], Env] = partial(adapter, what)
    # what a pool reads of a class
    own = {name: getattr(adapter, name) for name in ("isolation", "step_timeout")}
    vars(found).update(own, __name__=env_name(adapter))
    if hasattr(adapter, "probe"):  # it is on a server, which may not be there
        vars(found)["probe"] = partial(adapter.probe, what)
    return found
