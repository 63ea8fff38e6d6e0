"""WebArena's task files and evaluators (Zhou et al., "WebArena", 2024), for sites that run elsewhere.

A task file is a list of tasks (`test.raw.json`) or a folder of them (`config_files/0.json`, ...). Addresses
are written as placeholders (`__SHOPPING__`), which `sites` or WebArena's own environment variables
(`SHOPPING`, `REDDIT`, ...) replace. The three evaluators are the original's, rule for rule. Where it asks a
language model (`fuzzy_match`), a judge must be given. Helper functions in a task
(`func:reddit_get_post_url('__last_url__')`) are called by name, never evaluated.
"""

from __future__ import annotations

import ast
import asyncio
import html
import json
import os
import re
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from ludus.core.failures import Boundary, ConfigError, InfraError, not_there
from ludus.core.messages import Message
from ludus.core.task import Task
from ludus.core.user_files import read_user_json
from ludus.worlds.browser.gateway import origin_of
from ludus.worlds.browser.tasks import SYSTEM

TASKS = "LUDUS_WEBARENA_TASKS"
"""The environment variable with the path of a task file or a folder of them."""
SITES = {
    "SHOPPING": "http://onestopmarket.com",
    "SHOPPING_ADMIN": "http://luma.com/admin",
    "REDDIT": "http://reddit.com",
    "GITLAB": "http://gitlab.com",
    "WIKIPEDIA": "http://wikipedia.org",
    "MAP": "http://openstreetmap.org",
    "HOMEPAGE": "http://homepage.com",
}
"""The sites by placeholder, and the addresses under which the original shows them to the agent."""

Judge = Callable[[Literal["fuzzy", "unachievable"], str, str, str], Awaitable[float]]
"""Given the kind of question, the objective, the reference and the answer: 1 or 0 (`Browser.judge`)."""


class MissingJudgeError(ConfigError):
    """A task is to be judged by a language model, and there is none."""

    def __init__(self, task: str) -> None:
        super().__init__(
            f"task {task!r} is judged by a language model (fuzzy_match), and the environment has no judge: "
            "write `judge` in a subclass of Browser, or leave such tasks out (webarena_tasks(judged=False))"
        )


class JudgedPage(Protocol):
    """A browser's state for evaluators, at the end of an episode."""

    async def url(self) -> str: ...
    async def goto(self, url: str) -> None: ...
    async def content(self) -> str: ...
    async def evaluate(self, expression: str) -> Any: ...


# Task files -----------------------------------------------------------------------------------------


def webarena_tasks(
    path: str | Path | None = None,
    *,
    sites: Mapping[str, str] | None = None,
    judged: bool = True,
    system: str = SYSTEM,
) -> list[Task]:
    """The tasks of a file or folder; those of sites without an address are left out, and with `judged=False`
    those that need a judge."""
    if path is None and not (path := os.environ.get(TASKS)):
        raise ConfigError(
            f"set {TASKS} to WebArena's task file (config_files/test.raw.json) or a folder of such files"
        )
    addresses = {name: os.environ[name] for name in SITES if os.environ.get(name)} | dict(sites or {})
    addresses = {name.strip("_").upper(): url.rstrip("/") for name, url in addresses.items()}
    found: list[Task] = []
    missing: dict[str, int] = defaultdict(int)
    for raw in _read(Path(path)):
        needed = set(re.findall(r"__([A-Z_]+?)__", json.dumps(raw))) & SITES.keys()
        if lacking := needed - addresses.keys():
            missing[", ".join(sorted(lacking))] += 1
            continue
        task = task_of(raw, addresses, Path(path), system)
        if judged or not needs_judge(task.envs["browser"]["evaluation"]):
            found.append(task)
    if not found and missing:
        raise ConfigError(
            f"{path}: no task can be played, because these sites have no address: {'; '.join(missing)}. "
            "Set the environment variables of these names, or give webarena_tasks(sites={...})"
        )
    return found


def task_of(raw: Mapping[str, Any], sites: Mapping[str, str], path: Path, system: str) -> Task:
    """A task from WebArena's form."""
    text = json.dumps(raw)
    for name, url in sites.items():
        text = text.replace(f"__{name}__", url)
    given = json.loads(text)
    for field in ("task_id", "intent", "start_url", "eval"):
        if field not in given:
            raise ConfigError(
                f"{path}: a task of WebArena has the field {field!r}, which this one lacks: {text[:200]}"
            )
    evaluation = dict(given["eval"])
    unknown = set(evaluation.get("eval_types", ())) - {"string_match", "url_match", "program_html"}
    if unknown:
        raise ConfigError(
            f"{path}: task {given['task_id']} has the unknown evaluator {sorted(unknown)[0]!r}"
        )
    starts = [one.strip() for one in str(given["start_url"]).split("|AND|")]
    state = given.get("storage_state")
    arguments: dict[str, Any] = {
        "url": starts,
        "objective": given["intent"],
        # its sites link to each other, and an agent may have to go from one to the next
        "allowed": sorted({origin_of(url) for url in (*sites.values(), *starts)}),
        "evaluation": evaluation,
        "names": {url: SITES[name] for name, url in sites.items() if name in SITES},
    }
    if state:
        arguments["storage_state"] = str(path.parent / state) if not Path(state).is_absolute() else state
    if given.get("geolocation"):
        arguments["geolocation"] = given["geolocation"]
    used = "+".join(given.get("sites") or ["web"])
    return Task(
        f"webarena-{given['task_id']}",
        (Message("system", system),),
        envs={"browser": arguments},
        metadata={"subtask": used, "template": given.get("intent_template_id")},
    )


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        raise ConfigError(not_there(path))
    files = (
        sorted(path.glob("*.json"), key=lambda one: (len(one.stem), one.stem))
        if path.is_dir()
        else [path]
    )
    found: list[dict[str, Any]] = []
    for one in files:
        content = read_user_json(one)
        found += content if isinstance(content, list) else [content]
    return found


def needs_judge(evaluation: Mapping[str, Any]) -> bool:
    """Whether a language model has to be asked."""
    references = evaluation.get("reference_answers") or {}
    return "string_match" in evaluation.get("eval_types", ()) and "fuzzy_match" in references


# Evaluators -----------------------------------------------------------------------------------------


async def evaluate(
    evaluation: Mapping[str, Any],
    answer: str,
    page: JudgedPage,
    *,
    task: str = "",
    objective: str = "",
    judge: Judge | None = None,
    sites: Mapping[str, str] | None = None,
) -> float:
    """1 where every evaluator of the task is satisfied, else 0."""
    score = 1.0
    for kind in evaluation.get("eval_types", ()):
        if kind == "string_match":
            score *= await string_match(evaluation, answer, task=task, objective=objective, judge=judge)
        elif kind == "url_match":
            score *= url_match(evaluation, await page.url())
        elif kind == "program_html":
            score *= await program_html(evaluation["program_html"], page, sites or {}, task=task)
        else:
            raise ConfigError(f"task {task!r}: WebArena has no evaluator {kind!r}")
    return score


async def string_match(
    evaluation: Mapping[str, Any],
    answer: str,
    *,
    task: str = "",
    objective: str = "",
    judge: Judge | None = None,
) -> float:
    """How the answer of `stop [answer]` compares with the reference answers."""
    score, answer = 1.0, _clean(answer)  # each comparison cleans it again, as in the original
    for approach, value in (evaluation.get("reference_answers") or {}).items():
        if approach == "exact_match":
            score *= _is_exactly(value, answer)
        elif approach == "must_include":
            wanted_texts = _texts(value, task)
            for wanted in wanted_texts:
                score *= _includes(wanted, answer, by_word=len(wanted_texts) == 1)
        elif approach == "fuzzy_match":
            is_unachievable = value == "N/A"
            if is_unachievable and score * _is_exactly(value, answer) == 1.0:
                continue
            if judge is None:
                raise MissingJudgeError(task)
            if is_unachievable:
                score = await judge(
                    "unachievable", objective, str(evaluation.get("string_note", "")), answer
                )
                continue
            for wanted in _texts(value, task):
                score *= await judge("fuzzy", objective, wanted, answer)
        else:
            raise ConfigError(f"task {task!r}: WebArena has no comparison {approach!r} of answers")
    return float(score)


def _texts(value: Any, task: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ConfigError(
            f"task {task!r}: must_include and fuzzy_match take a list of texts, not {value!r}"
        )
    return value


def _clean(answer: str) -> str:
    text = answer.strip()
    for quote in ("'", '"'):
        if text.startswith(quote) and text.endswith(quote):
            return text[1:-1].lower()
    return text.lower()


def _is_exactly(wanted: str, answer: str) -> float:
    return float(_clean(answer) == _clean(wanted))


def _includes(wanted: str, answer: str, *, by_word: bool = False) -> float:
    """A single character must be a word of its own where it is all that is asked for: "0" is not in "10"."""
    wanted, answer = _clean(wanted), _clean(answer)
    if by_word and len(wanted) == 1:
        return float(wanted in _words(answer))
    return float(wanted in answer)


_PUNCTUATION = re.compile(
    r"""\.\.+ | -- | '' | [][(){}<>;@\#$%&?!*"“”‘’«»] | [:,](?!\d)  # words of their own, wherever they are
    | \.(?=[])}>"'»”’\s]*$)  # the full stop of the last sentence""",
    re.VERBOSE,
)
_APOSTROPHE = re.compile(
    r"(?<=\w)n't(?=\s|$)|(?<!\w)'(?=(?![smdtn])\w\b)|(?<=[^\s'])'(?:s|m|d|ll|re|ve|)(?=\s|$)"
)


def _words(text: str) -> list[str]:
    """The words of a lower-case text as Treebank's rules have them (`word_tokenize` of NLTK): "5-star", "5/10",
    "-5", "5:30" and "1.5" are one word each, "$5", "5%" and "(5)" are not."""
    return _APOSTROPHE.sub(r" \g<0> ", _PUNCTUATION.sub(r" \g<0> ", text)).split()


def url_match(evaluation: Mapping[str, Any], url: str) -> float:
    """Whether the last address contains one of the reference addresses, its query's values included."""
    rule = evaluation.get("url_note") or "GOLD in PRED"
    if rule != "GOLD in PRED":
        raise ConfigError(f"WebArena has no rule {rule!r} to match addresses")

    def parsed(one: str) -> tuple[str, dict[str, list[str]]]:
        parts = urllib.parse.urlparse(one.rstrip("/"))
        return parts.netloc + parts.path, urllib.parse.parse_qs(parts.query)

    base, query = parsed(url)
    wanted = [parsed(one) for one in str(evaluation["reference_url"]).split(" |OR| ")]
    values: dict[str, set[str]] = defaultdict(set)
    for _, queries in wanted:
        for name, given in queries.items():
            values[name].update(given)
    is_there = any(reference in base for reference, _ in wanted)
    return float(is_there and all(values[name] & set(query.get(name, ())) for name in values))


async def program_html(
    targets: Sequence[Mapping[str, Any]],
    page: JudgedPage,
    sites: Mapping[str, str],
    *,
    task: str = "",
) -> float:
    """Whether pages of the site show what they should."""
    score = 1.0
    for target in targets:
        url = str(target["url"])
        if url.startswith("func"):
            url = await _helper(
                url.split("func:", 1)[1].replace("__last_url__", await page.url()), page, sites
            )
        if url != "last":
            try:
                await page.goto(url)
            except PageProblem as error:
                if not str(target["url"]).startswith("func"):  # the task's own, so the site is at fault
                    message = f"the evaluator could not open {url}: {error}; is the site up?"
                    raise InfraError(Boundary.REWARD, message) from error
                return 0.0  # made from the page that the episode ended on, which was the wrong one
        seen = html.unescape(await _located(target, page, sites))
        wanted = target["required_contents"]
        if "exact_match" in wanted:
            score *= _is_exactly(wanted["exact_match"], seen)
        elif "must_include" in wanted:
            for content in _texts(wanted["must_include"], task):
                score *= float(any(_includes(one, seen) for one in content.split(" |OR| ")))
        else:
            raise ConfigError(f"WebArena has no comparison {sorted(wanted)!r} of contents")
    return score


async def _located(target: Mapping[str, Any], page: JudgedPage, sites: Mapping[str, str]) -> str:
    locator = str(target["locator"])
    if not locator.strip():
        return await page.content()
    if locator.startswith(("document.", "[...document.")):
        try:
            for before in target.get("prep_actions", ()):
                await page.evaluate(f"() => {before}")
        except PageProblem:
            pass  # as the original: what cannot be prepared is looked at as it is
        try:
            return str(await page.evaluate(f"() => {locator}"))  # null is "None", as in the original
        except PageProblem:
            return ""  # it is the wrong page
    if locator.startswith("func:"):
        return await _helper(locator.split("func:", 1)[1], page, sites)
    raise ConfigError(f"WebArena has no locator {locator[:100]!r}")


class PageProblem(Exception):
    """A page could not run what it was asked to, or does not respond."""


# Helper functions of task files ---------------------------------------------------------------------


async def _helper(call: str, page: JudgedPage, sites: Mapping[str, str]) -> str:
    """Call one of the original's helper functions, by name and with literal arguments."""
    try:
        parsed = ast.parse(call.strip(), mode="eval").body
        if not isinstance(parsed, ast.Call) or not isinstance(parsed.func, ast.Name):
            raise ValueError("it is no call")
        name = parsed.func.id
        arguments = [
            ast.literal_eval(one)
            for one in parsed.args
            if not (isinstance(one, ast.Name) and one.id == "__page__")
        ]
    except (SyntaxError, ValueError) as error:
        raise ConfigError(
            f"the helper function of a WebArena task cannot be read: {call[:200]!r} ({error})"
        ) from error
    if name == "reddit_get_post_url":
        return reddit_post_url(*arguments)
    if name == "gitlab_get_project_memeber_role":  # spelled like this in the task files
        return await _gitlab_role(page, *arguments)
    if name in _SHOP_HELPERS:
        if "SHOPPING" not in sites:
            raise ConfigError(f"the helper function {name} needs the address of the site SHOPPING")
        return await asyncio.to_thread(partial(_SHOP_HELPERS[name], sites["SHOPPING"], *arguments))
    raise ConfigError(f"there is no helper function {name!r} for WebArena's tasks")


def reddit_post_url(url: str) -> str:
    """The address of a post without what follows its number; other addresses as they are."""
    parts = urllib.parse.urlparse(url)
    steps = parts.path.split("/")
    if len(steps) < 4 or steps[1] != "f":
        return url
    return f"{parts.scheme}://{parts.netloc}/f/{steps[2]}/{steps[3]}/"


async def _gitlab_role(page: JudgedPage, account: str) -> str:
    names = "document.querySelectorAll(\"td[data-label='Account'] span.gl-avatar-labeled-sublabel\")"
    find = f"() => [...{names}].findIndex(one => one.outerText === {json.dumps('@' + account)})"
    try:
        index = int(await page.evaluate(find))
        return str(
            await page.evaluate(
                f"() => document.querySelectorAll('td.col-max-role span')[{index}].outerText"
            )
        )
    except (PageProblem, ValueError, TypeError):
        return ""


def _shop_api(shop: str, path: str, token: str | None, body: Any = None) -> Any:
    headers = {"content-type": "application/json"} | (
        {"Authorization": f"Bearer {token}"} if token else {}
    )
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{shop}/rest/{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)
    except (OSError, ValueError) as error:  # no connection, no JSON, or an error status
        message = f"the evaluator could not ask the shop's REST interface ({shop}/rest/{path}): {error}"
        raise InfraError(Boundary.REWARD, message) from error


def _shop_token(shop: str) -> str:
    """The account is the one that WebArena's images are made with."""
    account = {"username": "admin", "password": "admin1234"}
    return str(_shop_api(shop, "default/V1/integration/admin/token", None, account))


def _latest_order_url(shop: str) -> str:
    query = urllib.parse.urlencode(
        {
            "searchCriteria[sortOrders][0][field]": "created_at",
            "searchCriteria[sortOrders][0][direction]": "DESC",
            "searchCriteria[pageSize]": "1",
        }
    )
    order = _shop_api(shop, f"V1/orders?{query}", _shop_token(shop))["items"][0]
    return f"{shop}/sales/order/view/order_id/{int(order['increment_id'])}/"


def _latest_review(shop: str, sku: str) -> dict[str, Any]:
    reviews = _shop_api(shop, f"V1/products/{urllib.parse.quote(sku)}/reviews", _shop_token(shop))
    return dict(reviews[-1]) if reviews else {}


def _review_author(shop: str, sku: str) -> str:
    return str(_latest_review(shop, sku).get("nickname", ""))


def _review_rating(shop: str, sku: str) -> str:
    ratings = _latest_review(shop, sku).get("ratings") or [{}]
    return str(ratings[0].get("percent", ""))


_SHOP_HELPERS: dict[str, Callable[..., str]] = {
    "shopping_get_latest_order_url": _latest_order_url,
    "shopping_get_sku_latest_review_author": _review_author,
    "shopping_get_sku_latest_review_rating": _review_rating,
}
