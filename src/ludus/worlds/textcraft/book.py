"""Minecraft's crafting recipes from the package `minecraft-data`, the way TextCraft writes them.

The data spells out every variant (a chest from oak planks, from birch planks, ...). Variants that differ in one
ingredient, and cover all kinds of it, are folded into one recipe with a generic ingredient ("planks").
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
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
