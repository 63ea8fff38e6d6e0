"""The browser: actions, trees, task files and evaluators without Chromium; with it, pages of a real site."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import pytest
from browser_site import Site, running_site
from world_play import play_expert

from ludus.chat import Renderer, load_format
from ludus.core import Boundary, ByteTokenizer, ConfigError, Failure, InfraError, Task
from ludus.engine import FakeEngine
from ludus.envs import EnvPool, reset_env
from ludus.rewards import Scorer
from ludus.rollouts import Budgets, Demonstrator, Rollout, check_env
from ludus.tools import as_toolset
from ludus.worlds.browser import (
    Browser,
    MissingJudgeError,
    expert,
    held_out_tasks,
    success,
    training_tasks,
    webarena_tasks,
)
from ludus.worlds.browser.accessibility import Numbers, layout_of, page_tree
from ludus.worlds.browser.chromium import find_chromium
from ludus.worlds.browser.gateway import Gateway, NetworkPolicy
from ludus.worlds.browser.tab import ActionProblem, BrowserAction, cut, key_combination, parse_action
from ludus.worlds.browser.webarena import (
    PageProblem,
    evaluate,
    needs_judge,
    reddit_post_url,
    string_match,
    url_match,
)

HAS_CHROMIUM = find_spec("playwright") is not None and (
    "LUDUS_CHROMIUM" in os.environ
    or any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
)


def chromium(test: Any) -> Any:
    for mark in (
        pytest.mark.worlds,
        pytest.mark.timeout(300),
        pytest.mark.skipif(not HAS_CHROMIUM, reason="needs ludus-rl[browser] and Chromium"),
    ):
        test = mark(test)
    return test


@pytest.fixture
def site() -> Iterator[Site]:
    with running_site() as one:
        yield one


# Actions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "action"),
    [
        ("click [12]", BrowserAction("click", 12)),
        ("  click[12] ", BrowserAction("click", 12)),
        ("hover [3]", BrowserAction("hover", 3)),
        ("type [3] [red lamp] [1]", BrowserAction("type", 3, "red lamp", True)),
        ("type [3] [red lamp] [0]", BrowserAction("type", 3, "red lamp")),
        ("type [3] [red lamp]", BrowserAction("type", 3, "red lamp", True)),
        ("type [3] [a [b] c] [0]", BrowserAction("type", 3, "a [b] c")),
        ("type [3] [two\nlines] [0]", BrowserAction("type", 3, "two\nlines")),
        ("press [Ctrl+v]", BrowserAction("press", text="Ctrl+v")),
        ("scroll [down]", BrowserAction("scroll", text="down")),
        ("scroll up", BrowserAction("scroll", text="up")),
        ("new_tab", BrowserAction("new_tab")),
        ("new_tab []", BrowserAction("new_tab")),
        ("tab_focus [1]", BrowserAction("tab_focus", 1)),
        ("close_tab", BrowserAction("close_tab")),
        ("goto [http://a.b/c?d=[1]]", BrowserAction("goto", text="http://a.b/c?d=[1]")),
        ("go_back", BrowserAction("go_back")),
        ("go_forward", BrowserAction("go_forward")),
        ("stop [N/A]", BrowserAction("stop", text="N/A")),
        ("stop", BrowserAction("stop")),
        ("stop []", BrowserAction("stop")),
        ("Let's think. In summary, ```click [7]```", BrowserAction("click", 7)),
    ],
)  # fmt: skip
def test_actions_are_written_as_in_webarena(written: str, action: BrowserAction) -> None:
    assert parse_action(written) == action


@pytest.mark.parametrize(
    "written",
    ["", "   ", "fly", "click", "click [x]", "click [-1]", "type [1]", "type [1] []", "press", "scroll",
     "goto []", "tab_focus [a]", "click 12", "\x00", "öffne", "[", "x" * 1_000_000],
)  # fmt: skip
def test_other_texts_are_told_what_is_wrong(written: str) -> None:
    with pytest.raises(ActionProblem, match=r"Invalid|at most"):
        parse_action(written)


def test_keys_have_the_names_that_people_write() -> None:
    names = {"Ctrl+v": "Control+v", "enter": "Enter", "Meta+A": "Control+A", "Shift + tab": "Shift+Tab",
             "+": "+", "ctrl++": "Control++", "a": "a", "esc": "Escape", "ArrowDown": "ArrowDown",
             "down": "ArrowDown"}  # fmt: skip
    assert {written: key_combination(written) for written in names} == names
    for written in ("", "  ", "x" * 100):
        with pytest.raises(ActionProblem):
            key_combination(written)


# Trees ----------------------------------------------------------------------------------------------


def node(
    id: int, role: str, name: str = "", children: tuple[int, ...] = (), **properties: Any
) -> dict[str, Any]:
    return {
        "nodeId": str(id),
        "backendDOMNodeId": id,
        "role": {"value": role},
        "name": {"value": name},
        "childIds": [str(one) for one in children],
        "properties": [{"name": key, "value": {"value": value}} for key, value in properties.items()],
    }


def test_a_tree_is_shown_as_webarena_does() -> None:
    nodes = [
        node(1, "RootWebArea", "Shop", (2, 4), focused=True, url="http://a"),
        node(2, "link", "Home 5", (3,), focusable=True, url="http://a/b"),
        node(3, "StaticText", "Home 5"),
        node(4, "generic", "", (5, 6, 7, 9)),
        node(5, "StaticText", "5"),
        node(6, "img", ""),
        node(7, "textbox", "it's", (8,), required=False, editable="plaintext", multiline=True),
        node(8, "StaticText", "typed"),
        node(9, "listitem", "", (), level=1),
    ]
    tree = page_tree(nodes, Numbers(), "")
    assert tree.text.split("\n") == [
        "[1] RootWebArea 'Shop' focused: True",
        "\t[2] link 'Home 5'",
        "\t[3] StaticText '5'",
        '\t[4] textbox "it\'s" required: False',
        "\t\t[5] StaticText 'typed'",
    ]
    assert tree.elements[4].backend == 7


def test_numbers_stay_and_what_is_out_of_view_is_left_out() -> None:
    numbers = Numbers()
    nodes = [
        node(1, "RootWebArea", "", (20, 21, 22)),
        node(20, "button", "A"),
        node(21, "button", "B"),
        node(22, "generic"),
    ]
    strings = ["HTML", "BUTTON", "class", "icon star big", "BODY"]
    snapshot = {
        "strings": strings,
        "documents": [
            {
                "nodes": {
                    "backendNodeId": [1, 20, 21, 22],
                    "nodeName": [0, 1, 1, 1],
                    "attributes": [[], [], [], [2, 3]],
                    "isClickable": {"index": [0, 3]},
                },
                "layout": {
                    "nodeIndex": [1, 2, 3],
                    "bounds": [[0, 2000, 10, 10], [0, 10, 10, 10], [0, 20, 5, 5]],
                },
                "scrollOffsetY": 0,
            }
        ],
    }
    layout = layout_of(snapshot, (100, 100))
    assert page_tree(nodes, numbers, "a", layout=layout).text == "[1] RootWebArea ''\n\t[2] button 'B'"
    shown = page_tree(nodes, numbers, "a", layout=layout, unnamed_clickables=True)
    assert shown.text.endswith("[3] clickable 'icon star'") and shown.elements[3].is_clickable
    below = layout_of(
        {**snapshot, "documents": [{**snapshot["documents"][0], "scrollOffsetY": 1990}]}, (100, 100)
    )
    assert page_tree(nodes, numbers, "a", layout=below).text == "[1] RootWebArea ''\n\t[4] button 'A'"
    assert page_tree(nodes, numbers, "b", layout=layout).text == "[5] RootWebArea ''\n\t[6] button 'B'"
    assert (
        "[4] button 'A'\n\t[2] button 'B'"
        in page_tree(nodes, numbers, "a", layout=layout, in_view=False).text
    )


def test_a_deep_tree_and_a_long_text_are_cut() -> None:
    deep = [node(n, "generic", f"n{n}", (n + 1,)) for n in range(1, 5000)]
    assert page_tree(deep, Numbers(), "").text.count("\n") == 4998
    assert cut("ab\ncd\nef", 100) == "ab\ncd\nef"
    assert cut("ab\ncd\nef", 6) == "ab\ncd\n[3 more characters of the page are not shown]"


# What pages may reach -------------------------------------------------------------------------------


def test_a_policy_knows_origins() -> None:
    policy = NetworkPolicy(
        ("http://localhost:7770", "https://*.example.org"), (("homepage.com", "/nowhere"),)
    )
    allowed = [
        "http://localhost:7770/a?b",
        "https://www.example.org/",
        "http://homepage.com/x",
        "http://LOCALHOST:7770",
    ]
    refused = ["http://localhost/", "http://localhost:7771/", "https://localhost:7770/", "http://www.example.org/",
               "https://example.org.evil.com/", "file:///etc/passwd", "javascript:alert(1)", "chrome://settings",
               "about:blank", "data:text/html,x", "https://homepage.com/", "http://homepage.com:81/", "http://[",
               ""]  # fmt: skip
    assert [policy.allows(url) for url in allowed] == [True] * len(allowed)
    assert [policy.allows(url) for url in refused] == [False] * len(refused)
    assert NetworkPolicy(("*",)).allows("https://anything.net:8443/x")
    assert not NetworkPolicy(("*",)).allows("file:///etc/passwd")


@pytest.mark.parametrize(
    ("origin", "is_reached"),
    [
        ("http://127.0.0.1:{port}", True),
        ("*", False),
        ("http://*:{port}", False),
        ("http://127.*:{port}", False),
        ("http://127.0.0.1*:{port}", False),
    ],
)
@pytest.mark.parametrize("tunnel", [True, False])
async def test_wildcards_do_not_reach_our_own_network(
    origin: str, is_reached: bool, tunnel: bool
) -> None:
    """A name below a wildcard may be anybody's, and point to this machine or a cloud's metadata."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nsecret")
        writer.close()

    inside = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = inside.sockets[0].getsockname()[1]
    gateway = Gateway(NetworkPolicy((origin.format(port=port),)))
    await gateway.open()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        get = f"GET http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: x\r\n\r\n".encode()
        if tunnel:
            writer.write(f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\n".encode())
            said = await reader.readuntil(b"\r\n\r\n")
            assert said.startswith(b"HTTP/1.1 200" if is_reached else b"HTTP/1.1 403")
            get = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
        writer.write(get)
        assert (b"secret" in await reader.read()) is is_reached
        writer.close()
    finally:
        await gateway.close()
        inside.close()


# WebArena's files and evaluators --------------------------------------------------------------------

RAW = {
    "sites": ["shopping"],
    "task_id": 7,
    "require_login": True,
    "storage_state": None,
    "start_url": "__SHOPPING__/",
    "geolocation": None,
    "intent_template": "What does {{it}} cost?",
    "intent": "What does the lamp cost?",
    "require_reset": False,
    "eval": {
        "eval_types": ["string_match"],
        "reference_answers": {"must_include": ["12.50"]},
        "reference_url": "",
        "program_html": [],
        "string_note": "",
    },
    "intent_template_id": 3,
}


def test_task_files_load_where_their_sites_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SHOPPING", "REDDIT", "LUDUS_WEBARENA_TASKS"):
        monkeypatch.delenv(name, raising=False)
    fuzzy = {
        **RAW,
        "task_id": 8,
        "eval": {**RAW["eval"], "reference_answers": {"fuzzy_match": ["cheap"]}},
    }
    reddit = {**RAW, "task_id": 9, "start_url": "__REDDIT__/f/books"}
    path = tmp_path / "test.raw.json"
    path.write_text(json.dumps([RAW, fuzzy, reddit]))
    with pytest.raises(ConfigError, match="no address: SHOPPING; REDDIT"):
        webarena_tasks(path)
    monkeypatch.setenv("SHOPPING", "http://localhost:7770/")
    monkeypatch.setenv("LUDUS_WEBARENA_TASKS", str(path))
    assert [task.id for task in webarena_tasks()] == ["webarena-7", "webarena-8"]
    (task,) = webarena_tasks(path, judged=False)
    given = task.envs["browser"]
    assert (
        given["url"] == ["http://localhost:7770/"] and given["objective"] == "What does the lamp cost?"
    )
    assert given["allowed"] == ["http://localhost:7770"] and task.metadata["subtask"] == "shopping"
    assert given["names"] == {"http://localhost:7770": "http://onestopmarket.com"}
    both = webarena_tasks(path, sites={"__REDDIT__": "http://localhost:9999"})
    assert [one.id for one in both] == ["webarena-7", "webarena-8", "webarena-9"]

    folder = tmp_path / "config_files"
    folder.mkdir()
    for number in (10, 2):
        (folder / f"{number}.json").write_text(json.dumps({**RAW, "task_id": number}))
    assert [one.id for one in webarena_tasks(folder)] == ["webarena-2", "webarena-10"]
    (folder / "2.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        webarena_tasks(folder)
    (folder / "2.json").write_text(json.dumps({"task_id": 1}))
    with pytest.raises(ConfigError, match="'intent'"):
        webarena_tasks(folder)
    with pytest.raises(ConfigError, match="there is no file"):
        webarena_tasks(tmp_path / "nothing.json")
    monkeypatch.delenv("LUDUS_WEBARENA_TASKS")
    with pytest.raises(ConfigError, match="LUDUS_WEBARENA_TASKS"):
        webarena_tasks()


@pytest.mark.parametrize(
    ("references", "answer", "score"),
    [
        ({"exact_match": "Quest Band"}, " 'quest band' ", 1.0),
        ({"exact_match": "Quest Band"}, "quest bands", 0.0),
        ({"must_include": ["12.50", "lamp"]}, "The Lamp costs $12.50.", 1.0),
        ({"must_include": ["12.50", "lamp"]}, "It costs $12.50.", 0.0),
        ({"must_include": ["0"]}, "10", 0.0),
        ({"must_include": ["0"]}, "There are 0, I think", 1.0),
        ({"must_include": ["0", "1"]}, "10", 1.0),
        ({"fuzzy_match": "N/A"}, "N/A", 1.0),
        ({"exact_match": "x", "must_include": ["y"]}, "x", 0.0),
        # the answer is cleaned twice (before the comparison and in it), the reference once
        ({"exact_match": "a"}, "' a '", 1.0),
        ({"exact_match": "a"}, "\"'A'\"", 1.0),
        ({"exact_match": "' a '"}, "a", 0.0),
        ({"exact_match": "'a\""}, "'a\"", 1.0),
        ({"exact_match": ""}, "'", 1.0),
        ({"must_include": ["'Red Lamp'"]}, "a red lamp", 1.0),
        ({"must_include": [" 5 "]}, "15", 0.0),
        ({"must_include": ["lamp"]}, "lampshade", 1.0),
        ({"must_include": []}, "anything", 1.0),
        ({}, "anything", 1.0),
        # a single character is a word of Treebank's rules
        *(
            ({"must_include": ["5"]}, answer, 1.0)
            for answer in (
                "5",
                "5.",
                "It is 5!",
                "(5)",
                "[5]",
                "$5",
                "5%",
                "#5",
                "5, or so",
                "5: five",
                "'5' it is",
                'it is "5"',
                "5*",
                "5; 6",
                "5--6",
                "5...",
                "5’s",
                "a 5's",
                "a\n5\nb",
            )
        ),
        *(
            ({"must_include": ["5"]}, answer, 0.0)
            for answer in (
                "15",
                "1.5",
                "5.0",
                "5,000",
                "5,6",
                "5:30",
                "5-star",
                "5/10",
                "-5",
                "+5",
                "=5",
                "5th",
                "v5",
                "~5",
                "There are 5. They are red.",
                "five",
                "",
                "_5",
            )
        ),
        ({"must_include": ["i"]}, "I can't say it", 1.0),
        ({"must_include": ["i"]}, "it is his", 0.0),
        ({"must_include": ["5", "6"]}, "156", 1.0),
        ({"must_include": ["55"]}, "1555", 1.0),
        # N/A and what stands beside it
        ({"fuzzy_match": "N/A"}, " 'n/a' ", 1.0),
    ],
)
async def test_string_match(references: dict[str, Any], answer: str, score: float) -> None:
    assert await string_match({"reference_answers": references}, answer) == score


async def test_a_judge_is_asked_and_missed() -> None:
    evaluation = {
        "eval_types": ["string_match"],
        "reference_answers": {"fuzzy_match": ["cheap", "small"]},
    }
    assert needs_judge(evaluation)
    with pytest.raises(MissingJudgeError, match="task 't' is judged by a language model"):
        await string_match(evaluation, "it is little", task="t")
    asked = []

    async def judge(kind: str, objective: str, reference: str, answer: str) -> float:
        asked.append((kind, objective, reference, answer))
        return float(reference == "cheap")

    assert await string_match(evaluation, "little", objective="How?", judge=judge) == 0.0
    assert asked == [("fuzzy", "How?", "cheap", "little"), ("fuzzy", "How?", "small", "little")]
    impossible = {"reference_answers": {"fuzzy_match": "N/A"}, "string_note": "no such shop"}
    await string_match(impossible, "There is no shop", objective="How?", judge=judge)
    assert asked[-1] == ("unachievable", "How?", "no such shop", "there is no shop"), "cleaned"
    # what a judge says of an impossible task replaces what was found before it, and is asked for after a miss
    both = {"reference_answers": {"exact_match": "x", "fuzzy_match": "N/A"}, "string_note": "cheap"}
    assert await string_match(both, "N/A", objective="How?", judge=judge) == 1.0
    assert asked[-1] == ("unachievable", "How?", "cheap", "n/a")
    references = {"must_include": ["lit"], "fuzzy_match": ["cheap"]}
    assert await string_match({"reference_answers": references}, "little", judge=judge) == 1.0
    assert await string_match({"reference_answers": references}, "big", judge=judge) == 0.0


@pytest.mark.parametrize(
    "references", [{"must_include": "text"}, {"fuzzy_match": "text"}, {"starts": "x"}]
)
async def test_references_of_another_form_are_refused(references: dict[str, Any]) -> None:
    async def judge(kind: str, objective: str, reference: str, answer: str) -> float:
        raise AssertionError("it is not asked")

    with pytest.raises(ConfigError, match="task 't'"):
        await string_match({"reference_answers": references}, "text", task="t", judge=judge)


@pytest.mark.parametrize(
    ("reference", "url", "score"),
    [
        ("http://a.b/shop/", "http://a.b/shop", 1.0),
        ("http://a.b/shop", "http://a.b/shop/lamps", 1.0),
        ("http://a.b/shop/lamps", "http://a.b/shop", 0.0),
        ("http://a.b/x |OR| http://a.b/y", "http://a.b/y", 1.0),
        ("http://a.b/s?q=lamp", "http://a.b/s?page=2&q=lamp", 1.0),
        ("http://a.b/s?q=lamp", "http://a.b/s?q=chair", 0.0),
        ("http://a.b/s?q=lamp", "http://a.b/s", 0.0),
        ("http://a.b/s?q=lamp |OR| http://a.b/s?q=chair", "http://a.b/s?q=chair", 1.0),
        # the base and the query of different alternatives may be matched
        ("http://a.b/x?q=1 |OR| http://a.b/y?q=2", "http://a.b/x?q=2", 1.0),
        ("http://a.b/x?q=1 |OR| http://a.b/y", "http://a.b/y", 0.0),
        ("http://a.b/x |OR| http://a.b/y", "http://a.b/z", 0.0),
        ("http://a.b/x|OR|http://a.b/y", "http://a.b/y", 0.0),
        # the base is searched for anywhere, without the scheme; what follows # is not compared
        ("https://a.b/x", "http://www.a.b/x/y", 1.0),
        ("http://a.b/x#top", "http://a.b/x#end", 1.0),
        ("http://a.b/X", "http://a.b/x", 0.0),
        ("http://a.b/x", "http://a.b/y?next=a.b/x", 0.0),
        # values are decoded; empty ones count for nothing; one of several is enough
        ("http://a.b/s?q=usb+wifi", "http://a.b/s?q=usb%20wifi", 1.0),
        ("http://a.b/s?l%5B%5D=help%20wanted", "http://a.b/s?l[]=help+wanted&state=open", 1.0),
        ("http://a.b/s?q=", "http://a.b/s", 1.0),
        ("http://a.b/s?q=1&q=2", "http://a.b/s?q=2", 1.0),
        ("http://a.b/s?q=1&r=2", "http://a.b/s?q=1", 0.0),
        ("http://a.b/s/?q=1", "http://a.b/s/?q=1/", 1.0),
        ("http://a.b/s/?q=1", "http://a.b/s?q=1", 0.0),
    ],
)
def test_url_match(reference: str, url: str, score: float) -> None:
    assert url_match({"reference_url": reference, "url_note": "GOLD in PRED"}, url) == score


class PaperPage:
    """A page of known contents."""

    def __init__(self, url: str) -> None:
        self.at, self.visited, self.ran = url, [url], list[str]()

    async def url(self) -> str:
        return self.at

    async def goto(self, url: str) -> None:
        self.at = url
        self.visited.append(url)

    async def content(self) -> str:
        return f"<p>Caf&eacute; at {self.at}</p>"

    async def evaluate(self, expression: str) -> Any:
        self.ran.append(expression)
        if "broken" in expression:
            raise PageProblem("no such element")
        return self.values.get(expression.removeprefix("() => "), "Tom &amp; Jerry")

    values: ClassVar[dict[str, Any]] = {
        "document.nothing": None,
        "document.zero": 0,
        "document.price": 12.5,
        "document.checked": True,
        "[...document.list]": ["a", "b"],
        "document.empty": "",
    }


class DownPage(PaperPage):
    """A page from which no other can be opened."""

    async def goto(self, url: str) -> None:
        raise PageProblem("status 502")


async def test_a_site_that_is_down_while_judging_is_no_verdict() -> None:
    async def judged(url: str) -> float:
        target = {"url": url, "locator": "", "required_contents": {"must_include": ["x"]}}
        evaluation = {"eval_types": ["program_html"], "program_html": [target]}
        return await evaluate(evaluation, "", DownPage("http://a.b/1"), sites={"REDDIT": "http://a.b"})

    with pytest.raises(
        InfraError, match=r"could not open http://a\.b/2: status 502; is the site up"
    ) as failure:
        await judged("http://a.b/2")
    assert failure.value.boundary is Boundary.REWARD
    assert await judged("func:reddit_get_post_url('__last_url__')") == 0.0, (
        "made from the page it ended on"
    )


async def test_program_html(site: Site) -> None:
    async def score(*targets: dict[str, Any]) -> float:
        page = PaperPage("http://a.b/f/books/12/a-post/comments")
        evaluation = {"eval_types": ["program_html"], "program_html": list(targets)}
        return await evaluate(evaluation, "", page, sites={"SHOPPING": site.url, "REDDIT": "http://a.b"})

    def target(url: str, locator: str, **wanted: Any) -> dict[str, Any]:
        return {"url": url, "locator": locator, "required_contents": wanted}

    title = "document.querySelector('title').innerText"
    assert await score(target("last", "", must_include=["café", "nothing |OR| a.b/f"])) == 1.0
    assert await score(target("last", "", must_include=["café", "tea"])) == 0.0
    assert await score(target("http://a.b/x", title, exact_match="Tom & Jerry")) == 1.0
    assert await score(target("http://a.b/x", "document.broken", must_include=["x"])) == 0.0
    assert await score(target("http://a.b/x", "document.broken", exact_match="")) == 1.0
    # a value becomes text as Python writes it
    for locator, text in (
        ("document.nothing", "None"),
        ("document.zero", "0"),
        ("document.price", "12.5"),
        ("document.checked", "true"),
        ("[...document.list]", "['a', 'b']"),
        ("document.empty", ""),
    ):
        assert await score(target("last", locator, exact_match=text)) == 1.0, locator
        assert await score(target("last", locator, exact_match="something")) == 0.0, locator
    # both comparisons: only the first counts; single characters are not words here; " |OR| " only with spaces
    both = {"exact_match": "Tom & Jerry", "must_include": ["nothing"]}
    assert await score(target("last", title, **both)) == 1.0
    assert await score(target("last", "document.price", must_include=["2"])) == 1.0
    assert await score(target("last", title, must_include=["Tom|OR|Bo"])) == 0.0
    assert await score(target("last", title, must_include=["tom", "JERRY |OR| Bo"])) == 1.0
    assert await score(target("last", "  ", must_include=["café"])) == 1.0
    with pytest.raises(ConfigError, match="list of texts"):
        await score(target("last", title, must_include="Tom"))
    with pytest.raises(ConfigError, match="no comparison"):
        await score(target("last", title, fuzzy_match=["Tom"]))
    # what prepares the page runs before; when one of it fails, the rest does not run, and the page is looked at
    page = PaperPage("http://a.b/")
    prepared = {
        **target("last", title, exact_match="Tom & Jerry"),
        "prep_actions": ["one()", "broken()", "two()"],
    }
    assert await evaluate({"eval_types": ["program_html"], "program_html": [prepared]}, "", page) == 1.0
    assert page.ran == ["() => one()", "() => broken()", f"() => {title}"]
    assert (
        await score(
            target("http://c.d/", "", must_include=["c.d"]), target("last", "", must_include=["c.d"])
        )
        == 1.0
    )
    post = "func:reddit_get_post_url('__last_url__')"
    assert await score(target(post, "", must_include=["http://a.b/f/books/12/<"])) == 1.0
    order = target(
        "func:shopping_get_latest_order_url()", "", must_include=["/sales/order/view/order_id/190/"]
    )
    assert await score(order) == 1.0
    author = "func:shopping_get_sku_latest_review_author('B00')"
    assert await score(target("last", author, exact_match="Bo")) == 1.0
    rating = "func:shopping_get_sku_latest_review_rating('B00')"
    assert await score(target("last", rating, must_include=["80"])) == 1.0
    for bad in (
        "func:open('/etc/passwd').read()",
        "func:__import__('os')",
        "func:nothing()",
        "func:1 +",
        "weird",
    ):
        with pytest.raises(ConfigError, match=r"helper|locator"):
            await score(target("last", bad, must_include=["x"]))


@pytest.mark.parametrize(
    ("url", "post"),
    [
        ("http://a.b/f/books/12/a-post/-/comment/3", "http://a.b/f/books/12/"),
        ("http://a.b/f/books/12", "http://a.b/f/books/12/"),
        ("http://a.b:99/f/books/12/a?x=1#y", "http://a.b:99/f/books/12/"),
        ("http://a.b/f/books", "http://a.b/f/books"),
        ("http://a.b/user/ann/12", "http://a.b/user/ann/12"),
        ("http://a.b/", "http://a.b/"),
    ],
)
def test_the_address_of_a_post(url: str, post: str) -> None:
    assert reddit_post_url(url) == post


async def test_a_shop_that_does_not_answer_is_no_verdict() -> None:
    locator = "func:shopping_get_sku_latest_review_author('B00')"
    target = {"url": "last", "locator": locator, "required_contents": {"exact_match": "Bo"}}
    evaluation = {"eval_types": ["program_html"], "program_html": [target]}
    with running_site() as site:
        pass
    with pytest.raises(InfraError, match="could not ask the shop's REST interface") as failure:
        await evaluate(evaluation, "", PaperPage("http://a.b/"), sites={"SHOPPING": site.url})
    assert failure.value.boundary is Boundary.REWARD


# Tasks and the program, without a browser -------------------------------------------------------------


def test_tasks_on_the_homepage() -> None:
    train, held_out = training_tasks(), held_out_tasks()
    assert (len(train), len(held_out)) == (300, 60)
    told = [task.envs["browser"]["objective"] for task in train + held_out]
    assert len(set(told)) == len(told)
    assert {task.metadata["subtask"] for task in held_out} == {"calculate", "note", "calculate-and-note"}


def test_a_missing_browser_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LUDUS_CHROMIUM", "/nowhere/chromium")
    with pytest.raises(ConfigError, match="there is no Chromium at /nowhere/chromium"):
        find_chromium()
    monkeypatch.delenv("LUDUS_CHROMIUM")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"apt install chromium.*LUDUS_CHROMIUM"):
        find_chromium()
    with pytest.raises(ConfigError, match="/given"):
        find_chromium("/given")


async def test_a_task_that_needs_a_judge_is_refused_at_its_start() -> None:
    evaluation = {"eval_types": ["string_match"], "reference_answers": {"fuzzy_match": ["x"]}}
    task = Task("t", envs={"browser": {"url": "http://a.b", "evaluation": evaluation}})
    with pytest.raises(MissingJudgeError, match="'t'"):
        await reset_env(Browser(), task, "browser")


# With Chromium ----------------------------------------------------------------------------------------


class Visit:
    """An environment at a page, and what it shows."""

    def __init__(self, env: Browser) -> None:
        self.env, self.text = env, ""

    async def start(self, url: str | list[str], **arguments: Any) -> str:
        seen = await self.env.reset(Task.of("Look around.", id="t"), url, **arguments)
        self.text = seen.text
        return self.text

    async def do(self, action: str) -> str:
        step = await self.env.step(action)
        self.text = step.observation if isinstance(step.observation, str) else step.observation.text
        return self.text

    def id(self, line: str) -> int:
        return int(next(one for one in self.text.split("\n") if line in one).split("]")[0].strip("\t["))


@pytest.fixture
def visit() -> Iterator[Visit]:
    env = Browser()
    try:
        yield Visit(env)
    finally:
        env.close()
        env.close()


@chromium
async def test_a_page_is_seen_and_used(site: Site, visit: Visit) -> None:
    seen = await visit.start(site.url)
    assert seen.startswith(
        "OBSERVATION:\nTab 0 (current): Shop\n\n[1] RootWebArea 'Shop' focused: True\n"
    )
    assert seen.endswith(f"URL: {site.url}/\nOBJECTIVE: Look around.\nPREVIOUS ACTION: None")
    assert "button 'Inner'" in seen and "Far down" not in seen
    await visit.do(f"click [{visit.id('button ' + repr('Inner'))}]")
    assert "button 'pressed'" in visit.text
    await visit.do(f"click [{visit.id('option ' + repr('green'))}]")
    assert "StaticText 'chose green'" in visit.text
    await visit.do(f"type [{visit.id('textbox')}] [desk lamp] [0]")
    assert "StaticText 'desk lamp'" in visit.text
    await visit.do("press [Ctrl+a]")
    await visit.do("press [Ctrl+x]")
    assert "StaticText 'desk lamp'" not in visit.text
    await visit.do("press [Ctrl+v]")
    await visit.do("press [Enter]")
    assert "Results for desk lamp" in visit.text and "PREVIOUS ACTION: press [Enter]" in visit.text
    assert "RootWebArea 'Shop'" in await visit.do("go_back")
    assert "RootWebArea 'Results'" in await visit.do("go_forward")
    await visit.do("go_back")
    for _ in range(5):
        await visit.do("scroll [down]")
    assert "Far down" in visit.text and "heading 'Shop'" not in visit.text
    await visit.do(f"hover [{visit.id('Far down')}]")
    assert "No matching element found" in await visit.do("click [9999]")
    assert "Invalid action 'fly'" in await visit.do("fly")
    step = await visit.env.step("stop [12.50]")
    assert step.terminated and visit.env.answer == "12.50" and await visit.env.score() is None
    again = await visit.env.step("click [1]")
    assert (again.observation, again.terminated, again.reward) == ("The episode is over.", True, None)


@chromium
async def test_tabs(site: Site, visit: Visit) -> None:
    await visit.start([site.url, f"{site.url}/item"])
    assert "Tab 0 (current): Shop | Tab 1: Lamp" in visit.text
    await visit.do("tab_focus [1]")
    assert "Tab 0: Shop | Tab 1 (current): Lamp" in visit.text and "12.50" in visit.text
    assert "no tab 2" in await visit.do("tab_focus [2]")
    await visit.do("close_tab")
    assert "Tab 0 (current): Shop\n" in visit.text
    await visit.do(f"click [{visit.id('A lamp in a new tab')}]")
    assert "Tab 0: Shop | Tab 1 (current): Lamp" in visit.text
    await visit.do("new_tab")
    assert "Tab 2 (current)" in visit.text and "URL: about:blank" in visit.text
    await visit.do("goto [http://homepage.com]")
    assert "link 'Calculator'" in visit.text
    for _ in range(3):
        await visit.do("close_tab")
    assert "Tab 0 (current): \n" in visit.text and "URL: about:blank" in visit.text


@chromium
async def test_an_episode_leaves_nothing_to_the_next(site: Site, visit: Visit) -> None:
    other = Visit(Browser())
    try:
        for _ in range(2):
            assert "visit 1 n=1" in await visit.start(f"{site.url}/visits")
            assert "visit 1 n=1" in await other.start(f"{site.url}/visits")
            assert "visit 2 n=2" in await visit.do(f"goto [{site.url}/visits]")
        await visit.start(site.url)
        await other.start(site.url)
        for one, word in ((visit, "mine"), (other, "theirs")):
            await one.do(f"type [{one.id('textbox')}] [{word}] [0]")
            await one.do("press [Ctrl+a]")
            await one.do("press [Ctrl+c]")
        await visit.do("press [Ctrl+v]")
        assert "StaticText 'minemine'" in await visit.do("press [Ctrl+v]")
    finally:
        other.env.close()


@chromium
async def test_a_screenshot_by_choice(site: Site, visit: Visit) -> None:
    seen = await visit.env.reset(Task("t"), f"{site.url}/item", screenshot=True)
    (picture,) = seen.media
    assert picture.data is not None and picture.data.startswith(b"\x89PNG") and picture.kind == "image"
    step = await visit.env.step("scroll [down]")
    assert not isinstance(step.observation, str) and len(step.observation.media) == 1
    rendered = await visit.env.render()
    assert isinstance(rendered, bytes) and rendered.startswith(b"\x89PNG")


@chromium
async def test_pages_reach_only_what_the_task_names(site: Site, visit: Visit) -> None:
    with running_site() as other:
        site.other = f"{other.url}/item"
        seen = await visit.start(f"{site.url}/outside")
        for _ in range(50):
            if "waiting" not in seen:
                break
            seen = await visit.do("scroll [up]")
        # a refused address answers 403, which a page that does not look at it takes for an answer
        assert other.asked == []
        assert "failed" in seen.split("StaticText")[1]
        assert "is not allowed here" in await visit.do(f"goto [{other.url}]")
        assert "Not allowed" in await visit.do(f"goto [{site.url}/to-other]")
        assert other.asked == []
        await visit.start(f"{site.url}/item", allowed=["*"])
        assert "Not allowed" in await visit.do(f"goto [{other.url}/item]"), "our own network"
        assert other.asked == []
        await visit.start(f"{site.url}/item", allowed=[other.url])
        assert "RootWebArea 'Lamp'" in await visit.do(f"goto [{other.url}/item]")
        assert other.asked[0] == "/item"


@chromium
async def test_files_of_the_machine_are_not_read(site: Site, visit: Visit) -> None:
    await visit.start(f"{site.url}/file")
    assert "root:" not in visit.text and "refused" in visit.text
    await visit.do(f"click [{visit.id('button')}]")
    assert "root:" not in visit.text
    for url in (
        "file:///etc/passwd",
        "chrome://version",
        "view-source:file:///etc/passwd",
        "javascript:alert(1)",
    ):
        assert "is not allowed here" in await visit.do(f"goto [{url}]")
        assert "root:" not in visit.text
    await visit.start(f"{site.url}/download")
    await visit.do(f"click [{visit.id('link')}]")
    assert "link 'Data'" in visit.text
    await visit.start(f"{site.url}/upload")
    await visit.do(f"click [{visit.id('File')}]")
    assert "button 'File'" in visit.text


@chromium
async def test_hostile_pages_end_in_an_observation(site: Site, visit: Visit) -> None:
    await visit.start(f"{site.url}/alert")
    await visit.do(f"click [{visit.id('button')}]")
    assert "dialog (confirm), which was dismissed: 'Sure?'" in visit.text and "'Boo false'" in visit.text
    await visit.start(f"{site.url}/alerts")
    await visit.do(f"click [{visit.id('button')}]")
    assert "went on opening dialogs and was closed" in visit.text
    assert "RootWebArea 'Lamp'" in await visit.do(f"goto [{site.url}/item]")
    await visit.start(f"{site.url}/unload")
    await visit.do(f"type [{visit.id('textbox')}] [x] [0]")
    assert "RootWebArea 'Lamp'" in await visit.do(f"goto [{site.url}/item]")
    await visit.start(f"{site.url}/popups")
    await visit.do(f"click [{visit.id('button')}]")
    assert "A popup was closed" in visit.text and "Tab 9" in visit.text and "Tab 10" not in visit.text
    await visit.start(f"{site.url}/item")
    await visit.do(f"goto [{site.url}/closes]")
    await visit.do(f"click [{visit.id('button')}]")  # the first tab is no script's to close
    assert "button 'Press'" in visit.text or "about:blank" in visit.text
    assert "Small" in await visit.start(f"{site.url}/title")
    assert len(visit.text) < 2000
    assert "too large to be listed (600" in await visit.start(f"{site.url}/many")
    assert "It begins: First" in visit.text
    assert "StaticText 'Visible'" in await visit.start(f"{site.url}/tampered")
    assert "RootWebArea 'Grows'" in await visit.start(f"{site.url}/grows")

    whole = Visit(Browser(in_view=False))
    try:
        await whole.start(f"{site.url}/long")
        assert "more characters of the page are not shown" in whole.text and len(whole.text) < 13_000
    finally:
        whole.env.close()


@chromium
async def test_a_page_that_hangs_or_crashes_can_be_left(site: Site, visit: Visit) -> None:
    await visit.start([f"{site.url}/hang", f"{site.url}/item"])
    await visit.do(f"click [{visit.id('button')}]")
    assert "does not respond" in visit.text and "(not responding) | Tab 1: Lamp" in visit.text
    assert "12.50" in await visit.do("tab_focus [1]")
    await visit.do("tab_focus [0]")
    assert "RootWebArea 'Lamp'" in await visit.do(f"goto [{site.url}/item]")

    await visit.env._on_host(crash(visit.env))
    assert "has crashed" in await visit.do("scroll [down]")
    assert "RootWebArea 'Lamp'" in await visit.do(f"goto [{site.url}/item]")
    assert (
        "RootWebArea 'Loop'" in await visit.do(f"goto [{site.url}/loop]") or "OBSERVATION" in visit.text
    )


async def crash(env: Browser) -> None:
    session = env._open_session()
    with pytest.raises(Exception, match="crash"):
        await session.tab.page.goto("chrome://crash")


# Browsers that die ------------------------------------------------------------------------------------


def browser_pid(env: Browser) -> int:
    chromium_of = env._open_session()._chromium
    assert chromium_of is not None
    return chromium_of.pid


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@chromium
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_browser_is_an_infrastructure_failure(site: Site, sign: signal.Signals) -> None:
    pool = EnvPool(Browser, name="browser", size=1)
    task = Task.of("go", envs={"browser": {"url": f"{site.url}/item"}})
    try:
        held = await pool.acquire("first", task)
        pid = browser_pid(held.env)
        os.kill(pid, sign)
        with pytest.raises(InfraError, match="Chromium") as caught:
            await held.env.step("scroll [down]")
        assert caught.value.boundary is Boundary.ENV and caught.value.replay
        await pool.release("first")
        again = await pool.acquire("second", task)
        assert "RootWebArea 'Lamp'" in again.observation.text and browser_pid(again.env) != pid
    finally:
        await pool.close()
    assert not lives(pid)


class Fragile(Browser):
    """Its browser is killed in the middle of the first episode."""

    is_killed = False

    async def step(self, action: str) -> Any:
        """Use the browser.

        Args:
            action: What to do.
        """
        if action.startswith("type") and not Fragile.is_killed:
            Fragile.is_killed = True
            os.kill(browser_pid(self), signal.SIGKILL)
        return await super().step(action)


@chromium
async def test_an_episode_whose_browser_dies_is_played_again() -> None:
    Fragile.is_killed = False
    pool = EnvPool(Fragile, name="browser", size=2)
    playing = Rollout(
        engine=FakeEngine([]),
        renderer=Renderer(ByteTokenizer(), load_format("hermes")),
        scorer=Scorer([success]),
        tools=as_toolset([]),
        pools={"browser": pool},
        agent=Demonstrator(expert),
        budgets=Budgets(max_turns=15, max_tokens=1_000_000, max_observation_tokens=20_000),
    )
    try:
        played = [group.trajectories[0] async for group in playing.groups(held_out_tasks()[:4], seed=1)]
    finally:
        await pool.close()
    assert Fragile.is_killed
    assert [(one.failure, one.rewards["success"]) for one in played] == [(None, 1.0)] * 4


@chromium
async def test_playwrights_driver_may_die_too(site: Site, visit: Visit) -> None:
    await visit.start(f"{site.url}/item")
    pid = browser_pid(visit.env)
    os.kill(parent_of(pid), signal.SIGKILL)
    with pytest.raises(InfraError):
        await visit.do("scroll [down]")
    assert "RootWebArea 'Lamp'" in await visit.start(f"{site.url}/item")
    assert browser_pid(visit.env) != pid


@chromium
async def test_a_start_page_that_does_not_load_is_not_the_models_fault(visit: Visit) -> None:
    with pytest.raises(InfraError, match="did not load"):
        await visit.start("http://127.0.0.1:9876/")


def site_down(caught: pytest.ExceptionInfo[InfraError]) -> bool:
    failure = Failure.of(caught.value, Boundary.AGENT)
    is_replayed = caught.value.replay and not caught.value.retriable
    return is_replayed and (failure.boundary, failure.kind) == (Boundary.ENV, "SiteDown")


@chromium
@pytest.mark.parametrize("way", ["click", "goto", "form", "tab"])
async def test_a_site_that_goes_down_within_an_episode_is_no_page_to_read(
    visit: Visit, way: str
) -> None:
    with running_site() as site:
        await visit.start(f"{site.url}/links")
        actions = {
            "click": f"click [{visit.id('Item')}]",
            "goto": f"goto [{site.url}/item]",
            "form": f"type [{visit.id('textbox')}] [lamp] [1]",
            "tab": f"click [{visit.id('New tab')}]",
        }
        action = actions[way]
    with pytest.raises(InfraError, match=rf"the site {site.url} is down: {site.url}") as caught:
        await visit.do(action)
    assert site_down(caught)


@chromium
async def test_a_site_whose_every_page_is_a_gateway_error_is_down(site: Site, visit: Visit) -> None:
    await visit.start(f"{site.url}/links")
    site.status = 503
    with pytest.raises(InfraError, match="status 503") as caught:
        await visit.do(f"click [{visit.id('Item')}]")
    assert site_down(caught)
    site.status = None
    assert "RootWebArea 'Links'" in await visit.start(f"{site.url}/links")


@chromium
async def test_a_page_that_answers_with_an_error_is_a_page(site: Site, visit: Visit) -> None:
    await visit.start(f"{site.url}/links", allowed=["http://*.invalid"])
    await visit.do(f"click [{visit.id('Broken')}]")
    assert "Error code: 502" in visit.text
    for status in (403, 404, 500, 503, 504):
        assert f"Error code: {status}" in await visit.do(f"goto [{site.url}/status/{status}]")
    assert "RootWebArea 'Links'" in await visit.do(f"goto [{site.url}/links]")
    await visit.do(f"click [{visit.id('Cut')}]")
    assert "OBSERVATION" in visit.text, "it broke off, and its site is up"
    # a host that only the agent named: any in the pattern may be meant, so that none is missed
    assert "cannot be reached" in await visit.do("goto [http://nowhere.invalid/]")


@chromium
async def test_a_site_that_is_down_while_judging_is_a_failure_of_the_reward(visit: Visit) -> None:
    with running_site() as site:
        for url in (f"{site.url}/item", "func:reddit_get_post_url('__last_url__')"):
            target = {"url": url, "locator": "", "required_contents": {"must_include": ["x"]}}
            evaluation = {"eval_types": ["program_html"], "program_html": [target]}
            await visit.start(f"{site.url}/links", evaluation=evaluation)
            assert await visit.env.score() == 0.0
        await visit.start(f"{site.url}/links", evaluation=evaluation)
    with pytest.raises(InfraError, match=f"could not open {site.url}/links") as caught:
        await visit.env.score()
    assert caught.value.boundary is Boundary.REWARD


@chromium
async def test_many_instances_share_a_browser_and_end_it(site: Site) -> None:
    envs = [Browser() for _ in range(5)]
    try:
        await asyncio.gather(*(env.reset(Task("t"), f"{site.url}/item") for env in envs))
        pids = {browser_pid(env) for env in envs}
        assert len(pids) == 1
    finally:
        for env in envs:
            env.close()
    (pid,) = pids
    assert not lives(pid)


@chromium
def test_it_ends_with_the_process_that_started_it() -> None:
    script = (
        "import asyncio, time\nfrom ludus.core import Task\nfrom ludus.worlds.browser import Browser\n"
        "env = Browser()\nasyncio.run(env.reset(Task('t')))\n"
        "print(env._open_session()._chromium.pid, flush=True)\ntime.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert lives(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 60
    while lives(child) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not lives(child)


# Whole episodes -----------------------------------------------------------------------------------------


@chromium
async def test_webarena_tasks_are_played_and_judged(site: Site, visit: Visit, tmp_path: Path) -> None:
    def raw(number: int, **evaluation: Any) -> dict[str, Any]:
        return {**RAW, "task_id": number, "eval": {**RAW["eval"], **evaluation}}

    price = {"url": "__SHOPPING__/item", "locator": "document.querySelector('#price').innerText"}
    (tmp_path / "tasks.json").write_text(
        json.dumps(
            [
                raw(0),
                raw(1, eval_types=["url_match"], reference_url="__SHOPPING__/item"),
                raw(
                    2,
                    eval_types=["program_html"],
                    program_html=[{**price, "required_contents": {"exact_match": "12.50"}}],
                ),
                raw(
                    3,
                    eval_types=["program_html"],
                    program_html=[{**price, "required_contents": {"exact_match": "13"}}],
                ),
                raw(4, eval_types=["string_match", "url_match"], reference_url="__SHOPPING__/item"),
            ]
        )
    )
    tasks = webarena_tasks(tmp_path / "tasks.json", sites={"SHOPPING": site.url})

    async def scored(number: int, *actions: str) -> float | None:
        seen = await reset_env(visit.env, tasks[number], "browser")
        assert "URL: http://onestopmarket.com/\nOBJECTIVE: What does the lamp cost?" in seen.text
        for action in actions:
            await visit.do(action)
        return await visit.env.score()

    there = "goto [http://onestopmarket.com/item]"
    assert await scored(0, "stop [It is $12.50]") == 1.0
    assert await scored(0, "stop [It is cheap]") == 0.0
    assert await scored(0) == 0.0
    assert await scored(1, there, "stop []") == 1.0
    assert await scored(1, there) == 1.0
    assert await scored(1, "stop []") == 0.0
    assert await scored(2, "stop []") == 1.0
    assert await scored(3, "stop []") == 0.0
    assert await scored(4, there, "stop [12.50]") == 1.0
    assert await scored(4, "stop [12.50]") == 0.0


@chromium
async def test_the_contract_holds() -> None:
    task = held_out_tasks()[2]
    findings = await check_env(Browser, task, ["click [4]", "scroll [down]", "stop [1]"], name="browser")
    assert not findings


@chromium
async def test_the_expert_reaches_the_full_score() -> None:
    tasks = held_out_tasks()[:9]
    played = await play_expert("browser", tasks, size=3)
    assert [(one.failure, one.rewards["success"]) for one in played] == [(None, 1.0)] * len(tasks)
    assert expert(tasks[0]).send(None) is None
