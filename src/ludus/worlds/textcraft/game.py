"""The game TextCraft, as AgentGym plays it, and a planner that solves it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ludus.worlds.textcraft.book import GENERIC, Book, CraftingRecipe

_MOST_CHARS = 1_000
"""No command is longer; what is longer is not even read."""
_MOST_DIGITS = 6
_OTHER = re.compile(r"[^a-z0-9, ]+")
_GET = 0.2
"""The planner's cost of finding an ingredient, in crafts: it is done once for many."""
_COUNTED = re.compile(r"([0-9]+) (.+)")


class _Failed(Exception):
    """The action cannot be done; the text is the observation."""


@dataclass(frozen=True, slots=True)
class Played:
    """Result of an action."""

    text: str
    won: bool = False


class CraftingGame:
    """An inventory, a goal and the crafting commands that may be used."""

    def __init__(self, book: Book, goal: str, commands: Iterable[CraftingRecipe]) -> None:
        self.book = book
        self.goal = goal
        self.commands = tuple(commands)
        self.inventory: Counter[str] = Counter()

    @property
    def won(self) -> bool:
        return self.inventory[self.goal] > 0

    def act(self, action: str) -> Played:
        """Do `get N X`, `inventory`, or `craft N X using N1 Y1, N2 Y2`; any other text says so."""
        if len(action) > _MOST_CHARS:
            return Played(f"Could not execute {action[:40]}...")
        # punctuation around a command is dropped, as AgentGym's client does
        text = " ".join(_OTHER.sub("", action.lower().replace("_", " ")).split())
        verb, _, rest = text.partition(" ")
        try:
            if verb == "inventory":
                return Played(self.shown())
            if verb == "get":
                return Played(self._get(*_counted(rest)), self.won)
            if verb == "craft" and " using " in rest:
                return Played(self._craft(*rest.split(" using ", 1)), self.won)
            raise _Failed(f"Could not execute {text}" if text else "Could not execute an empty action")
        except _Failed as error:
            return Played(str(error))

    def shown(self) -> str:
        """The inventory as text."""
        held = "".join(f"[{name}] ({count}) " for name, count in self.inventory.items())
        return f"Inventory: {held or 'You are not carrying anything.'}".rstrip()

    def available(self) -> list[str]:
        """Crafts that the inventory allows, the inventory, and one piece of each ingredient that is found."""
        crafts = [text for recipe in self.commands for text in self._ready(recipe)]
        names = dict.fromkeys(name for recipe in self.commands for name, _ in recipe.ingredients)
        kinds = dict.fromkeys(kind for name in names for kind in GENERIC.get(name, (name,)))
        found = [kind for kind in kinds if kind in self.book.found]
        return [*crafts, "inventory", *(f"get 1 {kind}" for kind in found)]

    def _ready(self, recipe: CraftingRecipe) -> list[str]:
        """The recipe's command with the kinds that are there, if all of them are."""
        kinds = [
            next((k for k in GENERIC.get(name, (name,)) if self.inventory[k] >= amount), None)
            for name, amount in recipe.ingredients
        ]
        if not all(kinds):
            return []
        parts = zip(kinds, recipe.ingredients, strict=True)
        using = ", ".join(f"{amount} {kind}" for kind, (_, amount) in parts)
        return [f"craft {recipe.count} {recipe.item} using {using}"]

    def _get(self, name: str, count: int) -> str:
        if name not in self.book.found or count < 1:
            raise _Failed(f"Could not find {name}")
        self.inventory[name] += count
        return f"Got {count} {name}"

    def _craft(self, target: str, using: str) -> str:
        counted = _COUNTED.fullmatch(target)
        item = counted[2] if counted else target
        given: Counter[str] = Counter()
        for part in using.split(","):
            name, count = _counted(part.strip())
            given[name] += count
        if any(self.inventory[name] < count for name, count in given.items()):
            raise _Failed(f"Could not find enough items to craft {_id(item)}")
        recipe = next((r for r in self.commands if r.item == item and r.takes(given)), None)
        if recipe is None:
            raise _Failed(f"Could not find a valid recipe for {_id(item)}")
        self.inventory -= given  # drops what is used up
        self.inventory[item] += recipe.count
        return f"Crafted {recipe.count} {_id(item)}"


def _counted(text: str) -> tuple[str, int]:
    match = _COUNTED.fullmatch(text)
    if match is None or len(match[1]) > _MOST_DIGITS:
        raise _Failed(f"Wrong item format: {text}")
    return match[2], int(match[1])


def _id(item: str) -> str:
    return f"minecraft:{item.replace(' ', '_')}"


def parse_command(text: str) -> CraftingRecipe:
    """A recipe from its crafting command; `ValueError` when it is none."""
    target, using, ingredients = text.removeprefix("craft ").partition(" using ")
    parts = [_COUNTED.fullmatch(part) for part in (target, *ingredients.split(", "))]
    if not using or not text.startswith("craft ") or not all(parts):
        raise ValueError(f"{text!r} is no crafting command, such as 'craft 4 stick using 2 planks'")
    (item, count), *rest = ((part[2], int(part[1])) for part in parts if part)
    return CraftingRecipe(item, count, tuple(sorted(rest)))


def plan(book: Book, goal: str, commands: Sequence[CraftingRecipe]) -> list[str] | None:
    """Actions that lead to the goal with these commands: all `get`s first, then the crafts. None if impossible.

    Each item has one way to be made, chosen once by cost (actions), so the work grows with the commands and
    not with the number of ways through them.
    """
    ways = _cheapest(book, commands)
    if goal not in ways:
        return None
    stock: Counter[str] = Counter()
    gets: Counter[str] = Counter()
    crafts: list[str] = []

    def provide(item: str, count: int) -> None:
        """Have `count` of the item in stock."""
        recipe = ways.get(item)
        if recipe is None:
            missing = max(0, count - stock[item])
            gets[item] += missing
            stock[item] += missing
        while recipe is not None and stock[item] < count:
            kinds = [(_kind(book, ways, name), amount) for name, amount in recipe.ingredients]
            while any(stock[kind] < amount for kind, amount in kinds):
                for kind, amount in kinds:  # providing one may use up another, as sticks do planks
                    provide(kind, amount)
            for kind, amount in kinds:
                stock[kind] -= amount
            using = ", ".join(f"{amount} {kind}" for kind, amount in kinds)
            crafts.append(f"craft {recipe.count} {item} using {using}")
            stock[item] += recipe.count

    provide(goal, 1)
    return [*(f"get {count} {item}" for item, count in gets.items()), *crafts]


def _cheapest(book: Book, commands: Sequence[CraftingRecipe]) -> dict[str, CraftingRecipe]:
    """The recipe to use for each item that the commands can make, the cheapest item first.

    A recipe is considered once all its ingredients can be had, so no item is made out of itself.
    """
    cost: dict[str, float] = {}
    ways: dict[str, CraftingRecipe] = {}

    def price(recipe: CraftingRecipe) -> float | None:
        """Crafts for each piece; a found ingredient costs one `get` however many are needed."""
        total = 1.0
        for name, amount in recipe.ingredients:
            kinds = GENERIC.get(name, (name,))
            known = [cost[kind] for kind in kinds if kind in cost]
            if any(kind in book.found for kind in kinds):
                total += _GET
            elif known:
                total += min(known) * amount
            else:
                return None
        return total / recipe.count

    while True:
        offers = [(price(r), r) for r in commands if r.item not in ways]
        possible = [(one, r) for one, r in offers if one is not None]
        if not possible:
            return ways
        best, recipe = min(possible)
        cost[recipe.item], ways[recipe.item] = best, recipe


def _kind(book: Book, ways: Mapping[str, CraftingRecipe], name: str) -> str:
    """The kind of a generic ingredient to use: the first that is found, or else that was made cheapest."""
    kinds = GENERIC.get(name, (name,))
    return next((k for k in kinds if k in book.found), None) or next(k for k in ways if k in kinds)
