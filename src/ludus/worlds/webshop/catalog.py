"""The products of WebShop (Yao et al., 2022), its search engine and its goals, from the files people have.

A folder, LUDUS_WEBSHOP_DATA, holds products (`items_shuffle*.json`, or the documents that the original makes of
them for its search engine: `*docs*.json`, `documents.jsonl`; all may be gzipped), their attributes
(`items_ins_v2*.json`) and, for human goals, `items_human_ins.json`.

Two numbers that the original draws anew whenever its server starts are fixed here by the product: a price
within a range of prices, and how far a goal's highest price lies above the product's.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ludus.core.failures import ConfigError
from ludus.core.random import key, shuffled, uniform
from ludus.envs.world import imported
from ludus.worlds import data_path, read_file, read_rows

DATA = "LUDUS_WEBSHOP_DATA"
MOST_RESULTS = 50
_GOAL_ORDER_SEED = 233
"""The original's, so that goals have the original's order."""
_NO_PRICE = 100.0
_NO_LIMIT = 1_000_000.0
_SEED = 20261116


@dataclass(frozen=True, slots=True)
class Product:
    """One thing for sale."""

    asin: str
    title: str
    description: str
    bullets: tuple[str, ...]
    category: str
    """A path of categories, separated by ›."""
    query: str
    """The query by which it was found on Amazon: a kind of product."""
    price_tag: str
    price: float
    options: Mapping[str, tuple[str, ...]]
    attributes: tuple[str, ...]
    rating: str = "N.A."
    reviews: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Goal:
    """The wish of a customer."""

    asin: str
    """A product that fulfils it."""
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[str, ...] = ()
    price_upper: float = _NO_LIMIT
    is_human: bool = False


@dataclass(frozen=True)
class Catalog:
    """All products, a search engine over them, and the goals in the original's order."""

    products: Mapping[str, Product]
    goals: tuple[Goal, ...] = ()
    _engine: Any = field(default=None, repr=False)

    def search(self, keywords: str) -> list[Product]:
        """At most 50 products that share a word with the keywords, the best first (BM25)."""
        asins, index, tokenize = self._engine
        known = [word for word in dict.fromkeys(tokenize(keywords)) if word in index.vocab_dict]
        if not known:
            return []
        scores = np.asarray(index.get_scores(known))
        order = np.lexsort((np.arange(len(scores)), -scores))[:MOST_RESULTS]
        return [self.products[asins[i]] for i in order if scores[i] > 0]


def load_catalog(folder: Path | None = None) -> Catalog:
    """The catalog of a folder; loaded once, and shared by all episodes."""
    what = "the folder with WebShop's product files (docs/envs/webshop.md)"
    return _loaded(folder or data_path(DATA, what))


@lru_cache(maxsize=2)
def _loaded(folder: Path) -> Catalog:
    if not folder.is_dir():
        raise ConfigError(f"{folder} ({DATA}) is no folder")
    (attributes,) = map(read_file, _found(folder, r"items_ins_v2.*\.json(\.gz)?"))
    products: dict[str, Product] = {}
    for row in _product_rows(folder):
        asin = str(row.get("asin", ""))
        if asin and asin != "nan" and len(asin) <= 10 and asin not in products:
            products[asin] = as_product(row, attributes.get(asin, {}))
    if not products:
        raise ConfigError(f"the product files in {folder} hold no products")
    human = _found(folder, r"items_human_ins\.json(\.gz)?", needed=False)
    goals = (
        human_goals(products, read_file(human[0])) if human else synthetic_goals(products, attributes)
    )
    random.Random(_GOAL_ORDER_SEED).shuffle(goals)
    return Catalog(products, tuple(goals), _search_engine(products))


def _found(folder: Path, pattern: str, *, needed: bool = True) -> list[Path]:
    """The first file of that name, if there is one."""
    files = sorted(file for file in folder.iterdir() if re.fullmatch(pattern, file.name))
    if not files and needed:
        raise ConfigError(f"{folder} ({DATA}) holds no file named {pattern}")
    return files[:1]


def _product_rows(folder: Path) -> Iterator[Mapping[str, Any]]:
    for file in _found(folder, r"(items_shuffle|.*docs|.*documents).*\.jsonl?(\.gz)?"):
        for row in read_rows(file):
            yield row.get("product", row)


def as_product(row: Mapping[str, Any], known: Mapping[str, Any]) -> Product:
    """A product as the original reads it, from its raw form or from a document of its search engine."""
    asin = str(row["asin"])
    bullets = row.get("small_description") or []
    tag, prices = _prices(row.get("pricing"))
    low, high = prices[0], prices[-1]
    price = low if len(prices) == 1 else low + uniform(key(_SEED, "price", asin), 0) * (high - low)
    return Product(
        asin=asin,
        title=str(row.get("name") or ""),
        description=str(row.get("full_description") or ""),
        bullets=tuple(map(str, bullets)) if isinstance(bullets, list) else (str(bullets),),
        category=str(row.get("product_category") or ""),
        query=str(row.get("query") or "").lower().strip(),
        price_tag=tag,
        price=price,
        options=_options(row),
        attributes=tuple(known.get("attributes") or row.get("Attributes") or ("DUMMY_ATTR",)),
        reviews=tuple(row.get("Reviews") or ()),
    )


def _prices(pricing: Any) -> tuple[str, list[float]]:
    """The price tag and the prices: one, or the ends of a range."""
    if isinstance(pricing, str):
        pricing = [float(re.sub(r"[^\d.]", "", part)) for part in pricing.split("$")[1:]]
    prices = [float(one) for one in pricing or [_NO_PRICE]][:2]
    return " to ".join(f"${one}" for one in prices), prices


def _options(row: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    if isinstance(row.get("options"), Mapping):
        return {str(name).lower(): tuple(values) for name, values in row["options"].items()}
    given = row.get("customization_options") or {}
    return {
        name.lower(): tuple(one["value"].strip().replace("/", " | ").lower() for one in values)
        for name, values in given.items()
        if values is not None
    }


def _search_engine(products: Mapping[str, Product]) -> Any:
    """BM25 with Lucene's formula and Pyserini's parameters, over title, text, first bullet and options."""
    bm25s = imported("bm25s", "webshop", "the environment 'webshop'")

    def tokenize(texts: Any) -> Any:
        return bm25s.tokenize(texts, return_ids=False, show_progress=False)

    index = bm25s.BM25(k1=0.9, b=0.4)
    index.index(tokenize([_document(product) for product in products.values()]), show_progress=False)
    return list(products), index, lambda text: tokenize([text])[0]


def _document(product: Product) -> str:
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in product.options.items())
    first = product.bullets[0] if product.bullets else ""
    return " ".join((product.title, product.description, first, options)).lower()


# Goals

_PRICES = [10.0 * i for i in range(1, 100)]


def price_limit(product: Product, name: str) -> tuple[float, str]:
    """A goal's highest price, the larger of two of the next four multiples of 10, and how it is said."""
    above = [one for one in _PRICES if one > product.price][:4]
    if len(above) < 2:
        return _NO_LIMIT, ""
    chosen = max(shuffled(len(above), key(_SEED, "limit", name))[:2])
    return above[chosen], f", and price lower than {above[chosen]:.2f} dollars"


def human_goals(products: Mapping[str, Product], written: Mapping[str, Any]) -> list[Goal]:
    """The goals that people wrote (`items_human_ins.json`)."""
    goals = []
    for asin, product in products.items():
        for number, row in enumerate(written.get(asin, ())):
            if row["instruction_attributes"]:
                limit, said = price_limit(product, f"{asin}/{number}")
                options = row.get("instruction_options") or ()
                values = options.values() if isinstance(options, Mapping) else options
                goals.append(
                    Goal(
                        asin,
                        row["instruction"].strip(".") + said,
                        tuple(row["instruction_attributes"]),
                        tuple(map(str, values)),
                        limit,
                        is_human=True,
                    )
                )
    return goals


def synthetic_goals(products: Mapping[str, Product], attributes: Mapping[str, Any]) -> list[Goal]:
    """The goals that a program wrote: one for each choice of options of a product that has an instruction."""
    goals = []
    for asin, product in products.items():
        known = attributes.get(asin, {})
        if not known.get("instruction"):
            continue
        limit, said = price_limit(product, asin)
        names = sorted(product.options)
        for values in itertools.product(*(product.options[name] for name in names)):
            chosen = ", and ".join(f"{name}: {value}" for name, value in zip(names, values, strict=True))
            goals.append(
                Goal(
                    asin,
                    known["instruction"] + (f" with {chosen}" if chosen else "") + said,
                    tuple(known["instruction_attributes"]),
                    values,
                    limit,
                )
            )
    return goals
