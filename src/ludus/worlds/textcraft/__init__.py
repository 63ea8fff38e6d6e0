"""TextCraft: craft an item of Minecraft from crafting commands, some needed and some not (extra: textcraft).

Prasad et al., "ADaPT" (2023); the commands and texts are those of AgentGym (Xi et al., 2024).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from functools import cache

from ludus.core.messages import ToolCall
from ludus.core.random import key, shuffled
from ludus.core.task import Task
from ludus.envs.env import Env, Step
from ludus.envs.world import World
from ludus.rewards import reward
from ludus.worlds.textcraft.game import (
    GENERIC,
    Book,
    CraftingGame,
    CraftingRecipe,
    load_book,
    parse_command,
    plan,
)

MAX_TURNS = 20
HELD_OUT = {1: 30, 2: 40, 3: 25, 4: 5}
"""Goal items kept for evaluation, by depth; no training task has one of them as its goal."""
VARIANTS = 4
"""Training tasks for one item, which differ in the kinds of planks, wool, ... and in the distractors."""
DISTRACTORS = 10
"""The most commands that are not needed."""
KINDS = 3
"""The most special kinds of a generic ingredient that a task has commands for."""
WAYS = 2
"""The most commands for one ingredient."""

SYSTEM = """You craft items in Minecraft. Each action is one of these:
- get N ITEM: take N of an item that is not crafted, for example: get 1 lapis lazuli
- craft N ITEM using N1 ITEM1, N2 ITEM2: use one of the crafting commands you are given, for example: \
craft 1 golden carrot using 8 gold nugget, 1 carrot
- inventory: see what you have
Use only the crafting commands you are given, with their quantities. Where a command takes a generic \
ingredient such as planks, write a special kind of it, such as dark oak planks. An item that has a crafting \
command cannot be taken: craft its ingredients first. Repeat a command where one time does not make enough."""


def training_tasks() -> list[Task]:
    """Tasks of all depths, several for each item that is not held out."""
    items = [item for depth in HELD_OUT for item in _items(depth)[HELD_OUT[depth] :]]
    pairs = [(item, variant) for variant in range(VARIANTS) for item in items]
    return [_task(f"textcraft-train-{n}", *pair) for n, pair in enumerate(pairs)]


def held_out_tasks() -> list[Task]:
    """100 tasks whose goals are the goal of no training task."""
    items = [item for depth, count in HELD_OUT.items() for item in _items(depth)[:count]]
    return [_task(f"textcraft-held-out-{n}", item, 0) for n, item in enumerate(items)]


def expert(task: Task) -> Generator[ToolCall, str, None]:
    """A demonstrator that solves every task: gets what is needed, then crafts."""
    for action in _solution(task):
        yield ToolCall("step", {"action": action})


@cache
def _items(depth: int) -> list[str]:
    """Goals of a depth that can be reached in time with every variant's commands, in a fixed random order."""
    book = load_book()
    items = sorted(item for item in book.recipes if book.depth[item] == depth)
    good = [item for item in items if all(_is_in_time(book, item, v) for v in range(VARIANTS))]
    return [good[i] for i in shuffled(len(good), key("textcraft", depth))]


def _is_in_time(book: Book, item: str, variant: int) -> bool:
    found = plan(book, item, commands_for(book, item, variant))
    return found is not None and len(found) <= MAX_TURNS


def _task(name: str, item: str, variant: int) -> Task:
    book = load_book()
    commands = [str(recipe) for recipe in commands_for(book, item, variant)]
    return Task.of(
        "Crafting commands:\n" + "\n".join(commands) + f"\n\nGoal: craft {item}.",
        id=name,
        system=SYSTEM,
        envs={"textcraft": {"goal": item, "commands": commands}},
        metadata={"subtask": f"depth {book.depth[item]}"},
    )


@cache
def commands_for(book: Book, item: str, variant: int) -> tuple[CraftingRecipe, ...]:
    """Recipes needed to craft the item, and distractors that share ingredients with it."""
    draw = key("textcraft", item, variant)
    needed = _needed(book, item, draw)
    names = sorted({name for recipe in needed for name, _ in recipe.ingredients})
    others = sorted({user for name in names for user in book.users[name]} - set(needed))
    chosen = [others[i] for i in shuffled(len(others), key(draw, "others"))[:DISTRACTORS]]
    listed = [*needed, *chosen]
    return tuple(listed[i] for i in shuffled(len(listed), key(draw, "order")))


def _needed(book: Book, goal: str, draw: int) -> list[CraftingRecipe]:
    """The goal's shallowest recipe, and some for each ingredient that is crafted; each item is visited once."""
    best = min(book.recipes[goal], key=lambda recipe: (book.depth_by(recipe), recipe))
    needed, seen, ahead = [best], {goal}, [name for name, _ in best.ingredients]
    while ahead:
        name = ahead.pop()
        kinds = GENERIC.get(name, (name,))
        if name in seen or any(kind in book.found for kind in kinds):
            continue
        seen.add(name)
        if name in GENERIC:
            order = shuffled(len(kinds), key(draw, name))
            ahead += [kinds[i] for i in order if kinds[i] in book.depth][:KINDS]
            continue
        ways = sorted(book.recipes[name], key=lambda recipe: (book.depth_by(recipe), recipe))
        for recipe in ways[:WAYS]:
            needed.append(recipe)
            ahead += [part for part, _ in recipe.ingredients]
    return list(dict.fromkeys(needed))


def _solution(task: Task) -> list[str]:
    given = task.envs["textcraft"]
    found = plan(load_book(), given["goal"], [parse_command(text) for text in given["commands"]])
    return found or []


__all__ = ["TextCraft", "expert", "held_out_tasks", "success", "training_tasks"]


class TextCraft(Env):
    """One game. A task gives it as `envs = {"textcraft": {"goal": ..., "commands": [...]}}`.

    Its methods take microseconds, so they are coroutines: a thread would cost more than it spares.
    """

    deterministic = True

    def __init__(self) -> None:
        self.game: CraftingGame | None = None

    @property
    def won(self) -> bool:
        """Whether the goal has been crafted."""
        return self.game is not None and self.game.won

    async def reset(self, task: Task, goal: str, commands: Sequence[str]) -> None:
        self.game = CraftingGame(load_book(), goal, map(parse_command, commands))

    async def step(self, action: str) -> Step:
        """Act in the game: get an item, craft one with a crafting command, or look at the inventory.

        Args:
            action: For example "get 2 oak log", "craft 4 oak planks using 1 oak log" or "inventory".
        """
        game = self._game()
        if game.won:
            return Step("The game is over: the goal has been crafted.", terminated=True)
        outcome = game.act(action)
        return Step(outcome.text, reward=float(outcome.won), terminated=outcome.won)

    async def available_actions(self) -> list[str]:
        return self._game().available()

    async def render(self) -> str:
        game = self._game()
        return f"Goal: craft {game.goal}. {game.shown()}"

    async def snapshot(self) -> Counter[str]:
        """The inventory: the rest is the task's."""
        return self._game().inventory.copy()

    async def restore(self, state: Counter[str]) -> None:
        self._game().inventory = state.copy()

    def _game(self) -> CraftingGame:
        assert self.game is not None, "reset comes first"
        return self.game


@reward(name="success", weight=0.0)
async def success(env: TextCraft) -> float:
    """1 when the goal has been crafted. Only logged: the environment pays the same."""
    return float(env.won)


WORLD = World(
    "textcraft",
    "Craft an item of Minecraft from crafting commands, at depth 1 to 4.",
    env=TextCraft,
    rewards=(success,),
    training_tasks=training_tasks,
    held_out_tasks=held_out_tasks,
    expert=expert,
    extra="textcraft",
    packages=("minecraft_data",),
)
