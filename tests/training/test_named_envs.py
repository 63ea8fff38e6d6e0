"""Environments that tools and rewards name (`env=`): a recipe need not list them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ludus.chat import load_format
from ludus.core import ByteTokenizer, ConfigError, Task, ToolCall
from ludus.engine import FakeEngine
from ludus.envs import Env
from ludus.rewards import Gate, reward
from ludus.tools import Tool, tool
from ludus.training import Parts, Recipe, build_rollout, load_parts, task_set_specs
from ludus.training.preflight import check_parts
from ludus.training.task_sets import build_task_sets, close_task_sets
from ludus.worlds.safe import Safe

RECIPE = {"model": {"name": "none"}, "budgets": {"max_turns": 3}}


class CoffeeShop(Env):
    def reset(self, task: Task) -> None:
        self.bought: list[str] = []


class TeaShop(CoffeeShop):
    pass


@tool(env=CoffeeShop)
def buy(env: Env, what: str) -> str:
    """Buy something."""
    assert isinstance(env, CoffeeShop)
    env.bought.append(what)
    return f"{len(env.bought)} bought"


@tool(env=CoffeeShop)
def bill(env: Env) -> str:
    """What has been bought."""
    assert isinstance(env, CoffeeShop)
    return ", ".join(env.bought)


@reward(env=CoffeeShop)
def success(env: CoffeeShop) -> float:
    return float(env.bought == ["tea"])


def looking(number: int, kind: type[Env] = CoffeeShop) -> Tool:
    @tool(name=f"look{number}", env=kind)
    def look(env: CoffeeShop) -> str:
        """Look."""
        return "beans"

    return look


async def test_a_tool_and_a_reward_bring_their_environment() -> None:
    said = load_format("hermes").render_action("", [ToolCall("buy", {"what": "tea"})])
    engine = FakeEngine([f"{said}<|im_end|>", "done<|im_end|>"], ByteTokenizer())
    parts = Parts(tools=[buy, bill], rewards=[success])
    playing = build_rollout(Recipe.parse(RECIPE), parts, engine, ByteTokenizer())
    assert {name: pool.size for name, pool in playing.pools.items()} == {"coffee_shop": 256}
    played = await playing.play(Task.of("Buy tea.", id="t"), attempt=0, seed=0)
    assert played.failure is None and played.rewards == {"success": 1.0}
    await playing.pools["coffee_shop"].close()


def test_what_is_listed_keeps_its_name_and_the_recipe_its_size() -> None:
    parts = Parts(tools=[buy], envs={"corner": CoffeeShop})
    assert parts.all_envs == {"corner": CoffeeShop}
    parts = Parts(tools=[buy], envs={"corner": TeaShop})
    assert parts.all_envs == {"corner": TeaShop}, "a subclass will do"
    recipe = Recipe.parse(RECIPE | {"agent": {"pools": {"coffee_shop": {"size": 3}}}})
    playing = build_rollout(recipe, Parts(tools=[buy]), FakeEngine([]), ByteTokenizer())
    assert playing.pools["coffee_shop"].size == 3
    assert Parts(tools=[looking(1, Safe)]).all_envs == {"safe": Safe}, "a prebuilt one has its own name"


def test_inner_rewards_and_tool_classes_are_asked_too() -> None:
    class Taste(Tool):
        """Taste."""

        env = CoffeeShop

        def run(self, env: CoffeeShop) -> str:
            return "good"

    gated = Gate(success, success.using(name="again"))
    assert Parts(rewards=[gated]).all_envs == {"coffee_shop": CoffeeShop}
    assert Parts(tools=[Taste()]).all_envs == {"coffee_shop": CoffeeShop}


def test_two_that_disagree_are_both_named() -> None:
    other = type("CoffeeShop", (Env,), {})
    with pytest.raises(ConfigError, match=r"'coffee_shop': the tool 'look4' .* the tool 'look6'"):
        _ = Parts(tools=[looking(4), looking(6, other)]).all_envs
    with pytest.raises(ConfigError, match=r"'coffee_shop': .* is listed \(agent\.envs\)"):
        _ = Parts(tools=[looking(4)], envs={"coffee_shop": other}).all_envs


def test_a_tool_that_could_not_get_its_environment_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no parameter 'env'"):

        @tool(env=CoffeeShop)
        def look() -> str:
            """Look."""
            return ""

    with pytest.raises(ConfigError, match="take `env`"):
        reward(env=CoffeeShop)(lambda answer: 1.0, name="r")


MODULE = """
import ludus

class Shop(ludus.Env):
    pass

class Lab(ludus.Env):
    pass

@ludus.tool(env=Shop)
def buy(env: Shop) -> str:
    "Buy."
    return ""

@ludus.tool(env=Lab)
def heat(env: Lab) -> str:
    "Heat."
    return ""

@ludus.reward(env=Shop)
def success(env) -> float:
    return 1.0

def tasks():
    return [ludus.Task.of("go")]
"""


async def test_each_task_set_has_the_environments_of_its_own_tools(tmp_path: Path) -> None:
    (tmp_path / "shops.py").write_text(MODULE)
    path = f"{tmp_path}/shops.py"
    sets = [
        {"name": "plain", "train": f"{path}:tasks"},
        {"name": "lab", "train": f"{path}:tasks", "tools": [f"{path}:heat"], "rewards": []},
    ]
    raw = RECIPE | {
        "agent": {"tools": [f"{path}:buy"], "pools": {"shop": {"size": 2}, "lab": {"size": 3}}}
    }
    recipe = Recipe.parse(raw | {"rewards": [f"{path}:success"], "task_sets": sets})
    parts = load_parts(recipe)
    check_parts(recipe, parts)
    assert [set(one.parts.all_envs) for one in task_set_specs(recipe, parts)] == [{"shop"}, {"lab"}]
    built = build_task_sets(recipe, parts, FakeEngine([]), ByteTokenizer())
    assert [{n: p.size for n, p in one.rollout.pools.items()} for one in built] == [
        {"shop": 2},
        {"lab": 3},
    ]
    await close_task_sets(built)
