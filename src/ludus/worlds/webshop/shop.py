"""One customer in the shop: pages, what can be clicked on them, and what was bought.

Pages are the text that the original's observation modes make of its web pages. `text` has all visible texts in
a row, separated by [SEP]; `text_rich` has one a line, buttons marked as such, and says what has been clicked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from ludus.envs.world import imported
from ludus.worlds.webshop.catalog import Catalog, Goal, Product

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
    """The reward for buying `product` with the `chosen` options; `wanted` is the product of the goal.

    r = r_type * (attributes that match + options that match + [price is low enough])
               / (attributes wanted + options wanted + 1)
    """
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
    """Whether both are of one type: 1 for the same query, two equal categories or enough common nouns in their
    titles; else 0.5, and 0.1 or 0 where the titles have few common nouns or none."""
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
    """The words of a title that are neither function words nor adjectives; the original asks a spaCy model."""
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
    fuzz = imported("rapidfuzz.fuzz", "webshop", "the environment 'webshop'")
    utils = imported("rapidfuzz.utils", "webshop", "the environment 'webshop'")
    left, right = utils.default_process(one), utils.default_process(other)
    return round(fuzz.token_set_ratio(left, right)) if left and right else 0


Mode = Literal["text", "text_rich"]
PAGE_SIZE = 10
BACK, PREVIOUS, NEXT, BUY = "Back to Search", "< Prev", "Next >", "Buy Now"
SUB_PAGES = ("Description", "Features", "Reviews")
_UNSAID = (
    "asin", "options", "attrs", "price upper", "instuction text", "category", "product category", "query"
)  # fmt: skip


class Text(NamedTuple):
    """A visible text of a page."""

    text: str
    kind: Literal["plain", "button", "product", "option"] = "plain"


class Shop:
    """The session of one customer with one goal."""

    def __init__(self, catalog: Catalog, goal: Goal) -> None:
        self.catalog, self.goal = catalog, goal
        self.bought: Score | None = None
        self._start()

    def _start(self) -> None:
        self.page = "search"
        """search, results, item, one of the sub-pages, or done."""
        self.results: list[Product] = []
        self.number = 1
        self.product: Product | None = None
        self.options: dict[str, str] = {}
        self.visited: set[str] = set()

    # Actions

    def search(self, keywords: str) -> bool:
        """Search for keywords, from any page; whether that was possible."""
        if self.page == "done" or not keywords.strip():
            return False
        self.results = self.catalog.search(keywords.lower())
        self._show_results(1)
        return True

    def click(self, value: str) -> bool:
        """Click on what is called so; whether there is such a thing."""
        wanted = value.strip().lower()
        if wanted not in self.clickable():
            return False
        if self.page == "results":
            self._click_result(wanted)
        elif wanted == BACK.lower():
            self._start()
        elif wanted == PREVIOUS.lower():
            if self.page == "item":
                self._show_results(self.number)
            else:
                self.page = "item"
        elif wanted == BUY.lower():
            assert self.product is not None
            self.page = "done"
            target = self.catalog.products[self.goal.asin]
            self.bought = score(self.product, self.options, self.goal, target)
        elif wanted in (name.lower() for name in SUB_PAGES):
            self.page = wanted.capitalize()
        else:
            assert self.product is not None
            # of two options with the same value the last one counts, as on the original's page
            name = next(
                name for name, values in reversed([*self.product.options.items()]) if wanted in values
            )
            self.options[name] = wanted
        return True

    def _click_result(self, wanted: str) -> None:
        if wanted == BACK.lower():
            self._start()
        elif wanted in (NEXT.lower(), PREVIOUS.lower()):
            self._show_results(self.number + (1 if wanted == NEXT.lower() else -1))
        else:
            self.product = self.catalog.products[wanted.upper()]
            self.visited.add(self.product.asin)
            self.page, self.options = "item", {}

    def _show_results(self, number: int) -> None:
        self.page, self.number, self.product, self.options = "results", number, None, {}

    def clickable(self) -> list[str]:
        """The clickable elements, in lower case, in the order of the page."""
        texts = [one.text for one in self.texts() if one.kind != "plain"]
        return list(dict.fromkeys(text.lower() for text in texts if text != "Search"))

    # Pages

    def texts(self) -> Iterator[Text]:
        """The visible texts of the page."""
        if self.page == "search":
            yield from (Text("WebShop"), Text("Instruction: "), Text(self.goal.instruction))
            yield Text("Search", "button")
        elif self.page == "done":
            yield from self._done()
        else:
            yield from (Text("Instruction:"), Text(self.goal.instruction), Text(BACK, "button"))
            if self.page == "results":
                yield from self._results()
            else:
                yield Text(PREVIOUS, "button")
                assert self.product is not None
                yield from (
                    self._item(self.product) if self.page == "item" else self._sub_page(self.product)
                )

    def _results(self) -> Iterator[Text]:
        yield Text(f"Page {self.number} (Total results: {len(self.results)})")
        if self.number > 1:
            yield Text(PREVIOUS, "button")
        yield Text(NEXT, "button")
        for product in self.results[(self.number - 1) * PAGE_SIZE : self.number * PAGE_SIZE]:
            yield from (Text(product.asin, "product"), Text(product.title), Text(product.price_tag))

    def _item(self, product: Product) -> Iterator[Text]:
        for name, values in product.options.items():
            yield Text(name)
            yield from (Text(value, "option") for value in values)
        yield from (
            Text(product.title),
            Text(f"Price: {product.price_tag}"),
            Text(f"Rating: {product.rating}"),
        )
        yield from (Text(name, "button") for name in (*SUB_PAGES, BUY))

    def _sub_page(self, product: Product) -> Iterator[Text]:
        if self.page == "Description":
            yield Text(product.description)
        elif self.page == "Features":
            yield from (Text(f" {bullet}") for bullet in product.bullets)
        for review in product.reviews if self.page == "Reviews" else ():
            yield from (Text(f'"{review.get("title", "")}"'), Text(str(review.get("score", ""))))
            yield Text(str(review.get("body", "")))

    def _done(self) -> Iterator[Text]:
        """The text of the original's last page, its empty fields included."""
        assert self.product is not None and self.bought is not None
        plain = ["Thank you for shopping with us!", "Your code: ", "None"]
        plain += [" (Paste it in your MTurk interface.)", "Purchased", "asin", self.product.asin]
        plain += ["options", json.dumps(self.options, sort_keys=True)]
        for name in ("attrs", "category", "query", "product category"):
            plain += [name, "None"]
        plain += ["Target", *_UNSAID, "Goal ", "None", "Reward"]
        plain += ["Your score (min 0.0, max 1.0)", str(self.bought.reward), "Reward Details ", "None"]
        yield from map(Text, plain)

    def shown(self, mode: Mode = "text") -> str:
        """The page as the agent sees it."""
        texts = [one for one in self.texts() if one.text.strip()]
        if mode == "text":
            return " [SEP] ".join(one.text.strip() for one in texts)
        shown = ""
        for text, kind in texts:
            clicked = text in (self.visited if kind == "product" else self.options.values())
            mark = "clicked button" if clicked and kind in ("product", "option") else "button"
            before = {"button": "", "option": "  ", "product": "\n"}.get(kind, "")
            if mark == "clicked button" and kind == "option":
                shown = f"You have clicked {text}.\n{shown}"
            shown += (text if kind == "plain" else f"{before}[{mark}] {text} [{mark}_]") + "\n"
        return shown
