"""WebShop's reward: how well a bought product fits what was wanted, from 0 to 1.

    r = r_type * (attributes that match + options that match + [price is low enough])
               / (attributes wanted + options wanted + 1)

r_type is 1 where the products are of one type: the same query, two equal categories, or enough common nouns in
their titles; else 0.5, and 0.1 or 0 where the titles have few common nouns or none. The original finds nouns by
a spaCy model. Here a title's nouns are its words without numbers, function words and common adjectives: titles
of products hold little else."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ludus.core.failures import MissingExtraError
from ludus.worlds.webshop.catalog import Goal, Product

_CLOSE = 85
"""A fuzzy match is above this, of 100."""
_COLORS = (
    "alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy "
    "camel camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral "
    "cranberry cream crystal dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass "
    "gray green grey heather indigo ivory ivy khaki lavender lemon leopard light lilac lime magenta maroon "
    "mauve merlot midnight mint mocha multicolor mushroom mustard natural navy nude olive orange peach pewter "
    "pink plum purple rainbow red rose royal rust sand sapphire seashell silver skull slate steel stone "
    "stonewash sunflower tan taupe teal tiger turquoise violet walnut wheat white wine yellow"
)
"""Groups of words that count as one color: the first of these that occurs in an option stands for it."""
_NO_NOUNS = (
    "a about above after all also an and any are as at be been before below between both but by can do does "
    "each for from had has have how if in into is it its just many more most much no non nor not of off on "
    "once one only or other our out over own per same so some such than that the their them then there these "
    "they this those through to too two under until up very via was we were what when where which while who "
    "will with without you your adjustable adult best big bright casual classic clear compatible cool cute "
    "deep double dual easy elegant extra fast flexible free fresh full genuine good great hard heavy high hot "
    "ideal includes large light lightweight long loose low made mini modern multiple natural new old original "
    "perfect personalized portable premium pure quick real replacement rich round safe set short simple single "
    "slim small smart smooth soft solid special standard strong super thick thin tiny top ultra universal "
    "upgraded vintage warm wide wireless"
)
_ADJECTIVE = re.compile(r".{2,}(?:able|ible|ful|less|ous|proof|resistant|[^e]ed)")
_WORD = re.compile(r"[^\W\d_]{2,}(?:[-'’][^\W\d_]+)*")


@dataclass(frozen=True, slots=True)
class Score:
    """A reward and what it came from; a share is None where nothing of the kind was wanted."""

    reward: float
    type: float
    attributes: float | None
    options: float | None
    price: bool


def score(product: Product, chosen: Mapping[str, str], goal: Goal, wanted: Product) -> Score:
    """The reward for buying `product` with the `chosen` options; `wanted` is the product of the goal."""
    attributes = sum(_has_attribute(product, attribute) for attribute in goal.attributes)
    options = matching_options(chosen.values(), goal.options)
    cheap = product.price <= goal.price_upper
    kind = type_score(product, wanted)
    asked = len(goal.attributes) + len(goal.options) + 1
    return Score(
        reward=kind * (attributes + options + cheap) / asked,
        type=kind,
        attributes=attributes / len(goal.attributes) if goal.attributes else None,
        options=options / len(goal.options) if goal.options else None,
        price=cheap,
    )


def type_score(product: Product, wanted: Product) -> float:
    """Whether both are of one type: 1, 0.5, 0.1 or 0."""
    titles = title_score(product.title, wanted.title)
    common = _categories(product.category) & _categories(wanted.category)
    if titles == 0.0:
        return 0.0
    if titles < 0.1:
        return 0.1
    return 1.0 if product.query == wanted.query or len(common) >= 2 or titles > 0.2 else 0.5


def title_score(title: str, wanted: str) -> float:
    """The share of the wanted title's nouns that the other one has."""
    nouns = nouns_of(wanted)
    return len(set(nouns) & set(nouns_of(title))) / len(nouns) if nouns else 0.2


@lru_cache(maxsize=4096)
def nouns_of(title: str) -> tuple[str, ...]:
    """The words of a title that are neither function words nor adjectives."""
    words = (word.lower() for word in _WORD.findall(title))
    others = _excluded()
    return tuple(word for word in words if word not in others and not _ADJECTIVE.fullmatch(word))


@lru_cache(maxsize=1)
def _excluded() -> frozenset[str]:
    return frozenset(_NO_NOUNS.split())


def _categories(path: str) -> set[str]:
    return {part.strip() for part in path.split("›")}


def _has_attribute(product: Product, attribute: str) -> bool:
    if any(similarity(own, attribute) > _CLOSE for own in product.attributes):
        return True
    texts = (product.title, " ".join(product.bullets), product.description)
    return any(attribute in text.lower() for text in texts)


def matching_options(chosen: Iterable[str], wanted: Sequence[str]) -> int:
    """How many wanted options have a chosen one like them; colors are compared by their basic color."""
    mine = [_base_color(one) for one in chosen]
    return sum(any(similarity(one, _base_color(other)) > _CLOSE for one in mine) for other in wanted)


@lru_cache(maxsize=4096)
def _base_color(option: str) -> str:
    return next((color for color in _COLORS.split() if color in option), option)


def similarity(one: str, other: str) -> int:
    """thefuzz's `token_set_ratio`: from 0 to 100, and 100 where the words of one are among the other's."""
    try:
        from rapidfuzz import fuzz, utils
    except ImportError:
        raise MissingExtraError("rapidfuzz", "webshop", "the environment 'webshop'") from None
    left, right = utils.default_process(one), utils.default_process(other)
    return round(fuzz.token_set_ratio(left, right)) if left and right else 0
