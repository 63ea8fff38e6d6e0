"""The game TextCraft, as AgentGym plays it, and a planner that solves it."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

VERSION = "1.19"
_WOODS = ("oak", "spruce", "birch", "jungle", "acacia", "dark oak", "mangrove")
_STEMS = ("crimson", "warped")
_COLORS = (
    "white", "orange", "magenta", "light blue", "yellow", "lime", "pink", "gray",
    "light gray", "cyan", "purple", "blue", "brown", "green", "red", "black",
)  # fmt: skip


def _generics() -> dict[str, tuple[str, ...]]:
    one_wood = {
        f"{wood} logs": (f"{wood} log", f"{wood} wood", f"stripped {wood} log", f"stripped {wood} wood")
        for wood in _WOODS
    } | {
        f"{stem} stems": (
            f"{stem} stem", f"{stem} hyphae", f"stripped {stem} stem", f"stripped {stem} hyphae",
        )
        for stem in _STEMS
    }  # fmt: skip
    return {
        "logs": tuple(kind for kinds in one_wood.values() for kind in kinds),
        "planks": tuple(f"{wood} planks" for wood in (*_WOODS, *_STEMS)),
        "wooden slabs": tuple(f"{wood} slab" for wood in (*_WOODS, *_STEMS)),
        "wool": tuple(f"{color} wool" for color in _COLORS),
        **one_wood,
        "stone tool materials": ("cobblestone", "blackstone", "cobbled deepslate"),
        "coals": ("coal", "charcoal"),
        "soul fire base blocks": ("soul sand", "soul soil"),
    }


GENERIC = _generics()
"""Generic ingredients and their special kinds, named as Minecraft's item tags are."""


@dataclass(frozen=True, order=True)
class CraftingRecipe:
    """One crafting command: `count` of `item` from the ingredients, which are sorted by name."""

    item: str
    count: int
    ingredients: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        using = ", ".join(f"{count} {name}" for name, count in self.ingredients)
        return f"craft {self.count} {self.item} using {using}"

    def takes(self, given: Mapping[str, int]) -> bool:
        """Whether these ingredients are the recipe's; a generic one stands for any one of its kinds."""
        if sum(given.values()) != sum(count for _, count in self.ingredients):
            return False
        left = dict(given)
        # exact names first, so that a special kind is not used up by a generic ingredient
        for name, count in sorted(self.ingredients, key=lambda part: part[0] in GENERIC):
            kinds = GENERIC.get(name, (name,))
            kind = next((kind for kind in kinds if left.get(kind) == count), None)
            if kind is None:
                return False
            del left[kind]
        return not left


@dataclass(frozen=True, eq=False)
class Book:
    """All recipes; what has none is found rather than crafted."""

    recipes: Mapping[str, tuple[CraftingRecipe, ...]]
    found: frozenset[str]
    """Items that `get` brings."""
    depth: Mapping[str, int]
    """How many crafts lie on the longest way from found items to an item, by its shallowest recipe."""
    users: Mapping[str, tuple[CraftingRecipe, ...]] = field(default_factory=dict)
    """The recipes that take an ingredient, by its name."""

    def depth_of(self, name: str) -> int:
        """The depth of an item, or that of the shallowest kind of a generic ingredient."""
        return min(self.depth[kind] for kind in GENERIC.get(name, (name,)))

    def depth_by(self, recipe: CraftingRecipe) -> int:
        return 1 + max(self.depth_of(name) for name, _ in recipe.ingredients)


@cache
def load_book() -> Book:
    """The recipes of Minecraft 1.19. Needs the extra `textcraft`."""
    import minecraft_data

    data = minecraft_data(VERSION)
    names = {item["id"]: item["name"].replace("_", " ") for item in data.items_list}
    by_item = {
        names[int(item)]: [_recipe(raw, names) for raw in variants]
        for item, variants in data.recipes.items()
    }
    return make_book(by_item, names.values())


def _recipe(raw: Mapping[str, Any], names: Mapping[int, str]) -> CraftingRecipe:
    cells = [*raw.get("ingredients", ()), *(cell for row in raw.get("inShape", ()) for cell in row)]
    counts = Counter(names[cell] for cell in cells if cell is not None)
    result = raw["result"]
    return CraftingRecipe(names[result["id"]], result["count"], tuple(sorted(counts.items())))


def make_book(variants: Mapping[str, Iterable[CraftingRecipe]], items: Iterable[str]) -> Book:
    """Fold variants, and let items that can only be made out of each other be found instead.

    Iron ingots come from iron blocks and iron nuggets, and these from ingots: nothing but a way back.
    """
    folded = {item: _fold(recipes) for item, recipes in variants.items()}
    found = frozenset(items) - folded.keys()
    looping = _on_cycles(folded, _depths(folded, found))
    recipes = {item: own for item, own in folded.items() if item not in looping}
    found |= looping
    depth = _depths(recipes, found)
    # a recipe with an ingredient that cannot be had leads nowhere
    recipes = {
        item: tuple(r for r in own if all(_depth(depth, name) is not None for name, _ in r.ingredients))
        for item, own in recipes.items()
        if item in depth
    }
    users: dict[str, list[CraftingRecipe]] = defaultdict(list)
    for own in recipes.values():
        for recipe in own:
            for name, _ in recipe.ingredients:
                users[name].append(recipe)
    return Book(recipes, found, depth, {name: tuple(sorted(own)) for name, own in users.items()})


def _fold(recipes: Iterable[CraftingRecipe]) -> tuple[CraftingRecipe, ...]:
    """Recipes of one item, with generic ingredients where all kinds of one will do."""
    left = set(recipes)
    for generic, kinds in GENERIC.items():
        alike: dict[CraftingRecipe, dict[str, CraftingRecipe]] = defaultdict(dict)
        for recipe in sorted(left):
            for name, count in recipe.ingredients:
                if name in kinds:
                    rest = [part for part in recipe.ingredients if part[0] != name]
                    one = CraftingRecipe(
                        recipe.item, recipe.count, tuple(sorted([(generic, count), *rest]))
                    )
                    alike[one][name] = recipe
        for one, own in alike.items():
            if own.keys() == set(kinds) and left.issuperset(own.values()):
                left = left.difference(own.values()) | {one}
    return tuple(sorted(left))


def _depth(depth: Mapping[str, int], name: str) -> int | None:
    return min((depth[kind] for kind in GENERIC.get(name, (name,)) if kind in depth), default=None)


def _depths(recipes: Mapping[str, Iterable[CraftingRecipe]], found: Iterable[str]) -> dict[str, int]:
    """Depths, by rounds: each round makes what the rounds before allow, so cycles cost nothing."""
    depth = dict.fromkeys(found, 0)
    level = 0
    while True:
        level += 1
        new = {
            item
            for item, own in recipes.items()
            if item not in depth
            and any(all(_depth(depth, name) is not None for name, _ in r.ingredients) for r in own)
        }
        if not new:
            return depth
        depth.update(dict.fromkeys(new, level))


def _on_cycles(
    recipes: Mapping[str, Iterable[CraftingRecipe]], depth: Mapping[str, int]
) -> frozenset[str]:
    """Items without a depth that are, directly or not, ingredients of themselves."""
    needs = {
        item: {
            kind
            for recipe in own
            for name, _ in recipe.ingredients
            for kind in GENERIC.get(name, (name,))
            if kind not in depth
        }
        for item, own in recipes.items()
        if item not in depth
    }

    def reachable(item: str) -> set[str]:
        seen: set[str] = set()
        ahead = list(needs.get(item, ()))
        while ahead:
            name = ahead.pop()
            if name not in seen:
                seen.add(name)
                ahead.extend(needs.get(name, ()))
        return seen

    return frozenset(item for item in needs if item in reachable(item))


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
