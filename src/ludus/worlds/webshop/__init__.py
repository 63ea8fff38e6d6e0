"""WebShop: find and buy the product that an instruction asks for (Yao et al., 2022), with no server.

`WebShop` takes the original's text actions, search[keywords] and click[value]; `WebShopBrowser` has AgentFly's
tool `webshop_browser(action, value)` instead. Both pay the paper's reward when something is bought.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict
from typing import Literal

from ludus.core.failures import ToolFault
from ludus.core.messages import ToolCall, ToolResult
from ludus.core.random import key, uniform
from ludus.core.task import Task
from ludus.envs.env import Env, Step
from ludus.envs.world import World
from ludus.rewards import reward
from ludus.tools import tool
from ludus.worlds.webshop.catalog import Goal, load_catalog
from ludus.worlds.webshop.shop import BUY, NEXT, Mode, Shop

TEST_GOALS, DEVELOPMENT_GOALS = 500, 1000
"""The original's split: 500 goals for tests, the next 1,000 for development, the others for training."""
HELD_OUT_SHARE = 0.3
"""Of products, where goals are synthetic: those of one product are too much alike to be in two splits."""
PROMPT = (
    "You shop on a website. Find a product that fits the instruction, choose its options, and buy it. An "
    "action is search[keywords], or click[value] with the name of a button, a product or an option on the "
    "page. An action that is not possible changes nothing."
)
_ACTION = re.compile(r"\s*(search|click)\[", re.IGNORECASE)
_OVER = "The shopping is over."


class WebShop(Env):
    """A customer with a goal. The task gives it: product, instruction, attributes, options, highest price."""

    deterministic = True

    def __init__(self) -> None:
        self.shop: Shop | None = None
        self.mode: Mode = "text"

    def reset(
        self,
        task: Task,
        asin: str,
        instruction: str,
        attributes: Sequence[str],
        options: Sequence[str] = (),
        price_upper: float = 1_000_000.0,
        mode: Mode = "text",
    ) -> str:
        goal = Goal(asin, instruction, tuple(attributes), tuple(options), price_upper)
        self.shop, self.mode = Shop(load_catalog(), goal), mode
        return self.shop.shown(mode)

    def step(self, action: str) -> Step:
        """Search for products, or click on what the page shows.

        Args:
            action: search[keywords], or click[value] with the name of a button, a product or an option.
        """
        shop = self._open()
        if shop.bought is not None:
            return Step(_OVER, terminated=True)
        name, value = parsed(action)
        if name == "search":
            shop.search(value)
        elif name == "click":
            shop.click(value)
        return Step(shop.shown(self.mode), self._paid(), terminated=shop.bought is not None)

    def available_actions(self) -> list[str]:
        """The clickable elements; of all searches, the one for the instruction's own words."""
        shop = self._open()
        if shop.bought is not None:
            return []
        searching = [f"search[{shop.goal.instruction}]"] if shop.page == "search" else []
        return [*searching, *(f"click[{value}]" for value in shop.clickable())]

    def render(self) -> str:
        return self._open().shown("text_rich")

    @property
    def score(self) -> float:
        """The reward, from 0 to 1."""
        return self._paid()

    def _paid(self) -> float:
        bought = self._open().bought
        return 0.0 if bought is None else bought.reward

    def _open(self) -> Shop:
        if self.shop is None:
            raise RuntimeError("reset it first")
        return self.shop


class WebShopBrowser(WebShop):
    """The shop behind AgentFly's tool."""

    step = Env.step

    @tool
    def webshop_browser(self, action: Literal["search", "click"], value: str) -> ToolResult:
        """Use the website of the shop: search for products, or click on what the page shows.

        Args:
            action: "search" or "click".
            value: The keywords to search for; or the button, product or option to click on.
        """
        shop = self._open()
        if shop.bought is not None:
            return ToolResult(_OVER, terminated=True)
        if not (shop.search(value) if action == "search" else shop.click(value)):
            names = ", ".join(shop.clickable()) or "nothing"
            what = (
                "empty keywords" if action == "search" else f"there is no {value[:200]!r} on this page"
            )
            raise ToolFault(f"{what}. What can be clicked: {names}")
        return ToolResult(shop.shown(self.mode), reward=self._paid(), terminated=shop.bought is not None)


def parsed(action: str) -> tuple[str, str]:
    """The name and the argument of a text action; ("", "") where it is none."""
    found = _ACTION.match(action)
    end = action.rfind("]")
    if found is None or end < found.end():
        return "", ""
    return found[1].lower(), action[found.end() : end].strip()


# Tasks


def training_tasks() -> list[Task]:
    """The goals that are not for evaluation."""
    return _tasks("train")


def development_tasks() -> list[Task]:
    """At most 1,000 goals for choosing among models and settings."""
    return _tasks("dev")


def held_out_tasks() -> list[Task]:
    """At most 500 goals for the final evaluation: the test split."""
    return _tasks("test")


Part = Literal["train", "dev", "test"]


def _tasks(part: Part) -> list[Task]:
    return [
        _task(goal, part, number) for number, goal in enumerate(split_goals(load_catalog().goals)[part])
    ]


def split_goals(goals: Sequence[Goal]) -> Mapping[Part, list[Goal]]:
    """Human goals as the original splits them; synthetic ones by product, so that no two splits share one."""
    if all(goal.is_human for goal in goals) and len(goals) > TEST_GOALS + DEVELOPMENT_GOALS:
        last = TEST_GOALS + DEVELOPMENT_GOALS
        test, dev, train = goals[:TEST_GOALS], goals[TEST_GOALS:last], goals[last:]
        return {"test": list(test), "dev": list(dev), "train": list(train)}
    drawn = {goal.asin: uniform(key("webshop split", goal.asin), 0) for goal in goals}
    split: dict[Part, list[Goal]] = {"train": [], "dev": [], "test": []}
    for goal in goals:
        draw = drawn[goal.asin]
        part: Part = (
            "train" if draw >= HELD_OUT_SHARE else "test" if draw < HELD_OUT_SHARE / 2 else "dev"
        )
        split[part].append(goal)
    for part, most in (("dev", DEVELOPMENT_GOALS), ("test", TEST_GOALS)):
        split[part] = _spread(split[part])[:most]
    return split


def _spread(goals: Sequence[Goal]) -> list[Goal]:
    """First one goal of each product, then a second one of each, and so on: some have hundreds."""
    seen: Counter[str] = Counter()
    ranks = []
    for goal in goals:
        ranks.append(seen[goal.asin])
        seen[goal.asin] += 1
    return [goal for _, goal in sorted(zip(ranks, goals, strict=True), key=lambda pair: pair[0])]


def _task(goal: Goal, part: Part, number: int) -> Task:
    product = load_catalog().products[goal.asin]
    wanted = {name: value for name, value in asdict(goal).items() if name != "is_human"}
    return Task.of(
        PROMPT,
        id=f"webshop-{part}-{number}",
        envs={"webshop": {**wanted, "attributes": list(goal.attributes), "options": list(goal.options)}},
        subtask="human" if goal.is_human else "synthetic",
        title=product.title,
    )


@reward(name="success", weight=0.0)
async def success(env: WebShop) -> float:
    """1 when what was bought is all that was wanted; logged, as the environment pays."""
    return float(env.score >= 1.0)


# The demonstrator


def expert(task: Task) -> Generator[ToolCall, str, None]:
    """The demonstrator of `WebShop`, by text actions."""
    return _shopping(task, lambda action, value: ToolCall("step", {"action": f"{action}[{value}]"}))


def browser_expert(task: Task) -> Generator[ToolCall, str, None]:
    """The demonstrator of `WebShopBrowser`, by its tool."""
    return _shopping(
        task, lambda action, value: ToolCall("webshop_browser", {"action": action, "value": value})
    )


def _shopping(task: Task, call: Callable[[str, str], ToolCall]) -> Generator[ToolCall, str, None]:
    """Searches for the title of the goal's product, turns pages until it is there, chooses options, and buys.

    It knows which product fulfils the goal (the task's metadata); an agent has to find that out.
    """
    goal = task.envs["webshop"]
    words = re.findall(r"\w+", str(task.metadata["title"]))
    page = yield call("search", " ".join(words[:40]))
    for _ in range(4):
        if goal["asin"] in page:
            break
        page = yield call("click", NEXT)
    for value in (goal["asin"], *goal["options"], BUY):
        yield call("click", value)


WORLD = World(
    "webshop",
    "Find and buy the product that an instruction asks for, on a shop's website in text.",
    env=WebShop,
    rewards=(success,),
    training_tasks=training_tasks,
    held_out_tasks=held_out_tasks,
    expert=expert,
    extra="webshop",
    packages=("bm25s", "rapidfuzz"),
    data="LUDUS_WEBSHOP_DATA",
    max_turns=15,
)
