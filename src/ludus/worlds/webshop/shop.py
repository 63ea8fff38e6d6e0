"""One customer in the shop: pages, what can be clicked on them, and what was bought.

Pages are the text that the original's observation modes make of its web pages. `text` has all visible texts in
a row, separated by [SEP]; `text_rich` has one a line, buttons marked as such, and says what has been clicked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Literal, NamedTuple

from ludus.worlds.webshop.catalog import Catalog, Goal, Product
from ludus.worlds.webshop.score import Score, score

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
