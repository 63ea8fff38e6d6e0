"""The tasks of TextCraft, made from the recipes, and the planner as a demonstrator."""

from __future__ import annotations

from collections.abc import Generator
from functools import cache

from ludus.core.messages import ToolCall
from ludus.core.random import key, shuffled
from ludus.core.task import Task
from ludus.worlds.textcraft.book import GENERIC, Book, CraftingRecipe, load_book
from ludus.worlds.textcraft.game import parse_command, plan

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
