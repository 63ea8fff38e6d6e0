"""WebShop: product files, pages in the original's words, the reward, goals and splits, the demonstrators."""

from __future__ import annotations

import gzip
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from world_play import play_expert

pytest.importorskip("bm25s", reason="needs ludus-rl[webshop]")
pytest.importorskip("rapidfuzz", reason="needs ludus-rl[webshop]")

from ludus.core import ConfigError, Task, ToolCall, ToolContext
from ludus.envs import WORLDS
from ludus.rollouts import check_env
from ludus.tools import LocalTools
from ludus.worlds.webshop import (
    WebShop,
    WebShopBrowser,
    browser_expert,
    development_tasks,
    expert,
    held_out_tasks,
    parsed,
    split_goals,
    training_tasks,
)
from ludus.worlds.webshop.catalog import Goal, Product, load_catalog
from ludus.worlds.webshop.shop import nouns_of, score, similarity, title_score

DATA = os.environ.get("LUDUS_WEBSHOP_DATA")
KINDS = ["teapot", "lantern", "backpack", "hammock", "notebook", "kettle"]
MAKERS = ["Torwick", "Belren", "Calbury", "Gildan", "Fenhill"]


def product(number: int) -> dict[str, Any]:
    """An invented product in the original's raw form."""
    kind, maker = KINDS[number % 6], MAKERS[number // 6 % 5]
    colors = [{"value": value, "image": None} for value in ("Dark Red", "Blue/White", "Moss")]
    sizes = [{"value": value} for value in ("Small", "Large")]
    return {
        "asin": f"B{number:09d}",
        "name": f"{maker} {kind.capitalize()} Model {chr(65 + number)}x",
        "full_description": f"A {kind} for every day." if number % 2 else "",
        "small_description": [f"Easy clean {kind}", "Long lasting"],
        "product_category": f"Home › Things › {kind}s",
        "query": f" {kind}s ",
        "pricing": "$20.00" if number % 3 else "$10.50$19.50",
        "customization_options": {"Color": colors, "Size": sizes} if number % 4 else "",
        "images": ["x"],
        "category": "garden",
    }


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty products, with the instructions that a program wrote."""
    made = tmp_path_factory.mktemp("webshop")
    products = [product(number) for number in range(30)]
    (made / "items_shuffle_30.json").write_text(json.dumps(products))
    attributes = {
        one["asin"]: {
            "attributes": ["easy clean", "long lasting"],
            "instruction": f"Find me easy clean {one['query'].strip()}",
            "instruction_attributes": ["easy clean"],
        }
        for one in products
    }
    (made / "items_ins_v2_30.json").write_text(json.dumps(attributes))
    return made


@pytest.fixture(autouse=True)
def data(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LUDUS_WEBSHOP_DATA", str(folder))


def shop(**changes: Any) -> WebShop:
    env = WebShop()
    goal = {
        "asin": "B000000001",
        "instruction": "Find me a lantern",
        "attributes": ["easy clean"],
        **changes,
    }
    env.reset(Task.of("x"), **goal)
    return env


def test_products_are_read_as_the_original_reads_them(folder: Path) -> None:
    catalog = load_catalog(folder)
    assert len(catalog.products) == 30
    ranged, fixed = catalog.products["B000000000"], catalog.products["B000000001"]
    assert ranged.price_tag == "$10.5 to $19.5" and 10.5 <= ranged.price <= 19.5 and not ranged.options
    assert (fixed.price_tag, fixed.price, fixed.query) == ("$20.0", 20.0, "lanterns")
    assert fixed.options == {"color": ("dark red", "blue | white", "moss"), "size": ("small", "large")}


def test_documents_of_the_originals_search_engine_are_the_same_products(
    folder: Path, tmp_path: Path
) -> None:
    rows = []
    for one in load_catalog(folder).products.values():
        raw = product(int(one.asin[1:]))
        pricing = [10.5, 19.5] if "10.50" in raw["pricing"] else [20.0]
        document = {
            **raw,
            "pricing": pricing,
            "options": one.options,
            "Attributes": list(one.attributes),
        }
        rows.append({"id": one.asin, "contents": "", "product": document})
    (tmp_path / "items_ins_v2.json").write_bytes((folder / "items_ins_v2_30.json").read_bytes())
    (tmp_path / "products_docs.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
    assert load_catalog(tmp_path).products == load_catalog(folder).products
    (tmp_path / "products_docs.json.gz").rename(tmp_path / "old")
    (tmp_path / "jsonl").mkdir()
    (tmp_path / "items_ins_v2.json").rename(tmp_path / "jsonl" / "items_ins_v2.json")
    (tmp_path / "jsonl" / "documents.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert load_catalog(tmp_path / "jsonl").products == load_catalog(folder).products


def test_missing_data_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="items_ins_v2"):
        load_catalog(tmp_path)
    monkeypatch.delenv("LUDUS_WEBSHOP_DATA")
    with pytest.raises(ConfigError, match="set LUDUS_WEBSHOP_DATA"):
        training_tasks()
    assert any("LUDUS_WEBSHOP_DATA" in one for one in WORLDS["webshop"].missing())


def test_pages_in_the_originals_words() -> None:
    env = shop()
    start = "WebShop [SEP] Instruction: [SEP] Find me a lantern [SEP] Search"
    assert str(env.step("dance").observation) == start
    head = "Instruction: [SEP] Find me a lantern [SEP] Back to Search [SEP] "
    results = str(env.step("search[Torwick lantern]").observation)
    assert results.startswith(
        f"{head}Page 1 (Total results: 10) [SEP] Next > [SEP] B000000001 [SEP] Torwick Lantern Model Bx "
        "[SEP] $20.0 [SEP] B0000000"
    )
    second = str(env.step("click[next >]").observation)
    assert second == f"{head}Page 2 (Total results: 10) [SEP] < Prev [SEP] Next >"
    assert str(env.step("click[< Prev]").observation) == results
    item = str(env.step("click[b000000001]").observation)
    assert item == (
        f"{head}< Prev [SEP] color [SEP] dark red [SEP] blue | white [SEP] moss [SEP] size [SEP] small [SEP] "
        "large [SEP] Torwick Lantern Model Bx [SEP] Price: $20.0 [SEP] Rating: N.A. [SEP] Description [SEP] "
        "Features [SEP] Reviews [SEP] Buy Now"
    )
    assert (
        str(env.step("click[Description]").observation) == f"{head}< Prev [SEP] A lantern for every day."
    )
    assert str(env.step("click[< Prev]").observation) == item
    assert str(env.step("click[features]").observation) == (
        f"{head}< Prev [SEP] Easy clean lantern [SEP] Long lasting"
    )
    env.step("click[< prev]")
    assert str(env.step("click[reviews]").observation) == f"{head}< Prev"
    env.step("click[< prev]")
    env.step("click[moss]")
    rich = env.render()
    assert rich.startswith(
        "You have clicked moss.\nInstruction:\nFind me a lantern\n[button] Back to Search"
    )
    assert (
        "  [button] dark red [button_]\n" in rich and "  [clicked button] moss [clicked button_]" in rich
    )
    env.step("click[< prev]")
    assert "\n[clicked button] B000000001 [clicked button_]\n" in env.render()
    assert env.shop is not None and env.shop.options == {}, "leaving the product drops its options"
    assert str(env.step("click[Back to Search]").observation) == start


def test_what_can_be_done_is_what_the_page_shows() -> None:
    env = shop()
    assert env.available_actions() == ["search[Find me a lantern]"]
    env.step("search[torwick lantern]")
    assert env.available_actions()[:3] == ["click[back to search]", "click[next >]", "click[b000000001]"]
    env.step("click[B000000001]")
    assert env.available_actions() == [
        f"click[{value}]"
        for value in ("back to search", "< prev", "dark red", "blue | white", "moss", "small", "large",
                      "description", "features", "reviews", "buy now")
    ]  # fmt: skip


def test_buying_pays_and_ends() -> None:
    env = shop(options=["moss", "large"], price_upper=30.0)
    for action in ("search[torwick lantern]", "click[B000000001]", "click[dark red]", "click[large]"):
        step = env.step(action)
        assert step.reward == 0.0 and not step.terminated
    bought = env.step("click[Buy Now]")
    assert (
        bought.terminated and bought.reward == 0.75 == env.score
    )  # one of two options, attribute, price
    assert '[SEP] options [SEP] {"color": "dark red", "size": "large"} [SEP]' in str(bought.observation)
    assert str(bought.observation).endswith(
        "Your score (min 0.0, max 1.0) [SEP] 0.75 [SEP] Reward Details [SEP] None"
    )
    after = env.step("search[more]")
    assert after.terminated and after.reward is None and "over" in str(after.observation)
    assert env.available_actions() == []


@pytest.mark.parametrize(
    "action",
    ["", "search", "search[", "search[]", "search[ ]", "click[]", "click[Buy Now]", "click[search]", "buy[now]",
     "click[B000000001]", "検索[x]", "\x00\ud800", "[" * 1_000_000, "]" * 1_000_000, "search" * 200_000],
)  # fmt: skip
def test_nonsense_changes_nothing(action: str) -> None:
    env = shop()
    before = str(env.step("dance").observation)
    step = env.step(action)
    assert str(step.observation) == before and step.reward == 0.0 and not step.terminated


def test_huge_and_unknown_keywords_find_nothing_or_something() -> None:
    env = shop()
    assert "Total results: 0" in str(env.step("search[zzz]").observation)
    assert "Total results" in str(env.step(f"search[{'lantern ' * 100_000}]").observation)


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("search[red shoes]", ("search", "red shoes")),
        (" Click[Buy Now] ", ("click", "Buy Now")),
        ("click[pack [2]]", ("click", "pack [2]")),
        ("I would search[red]", ("", "")),
        ("click]x[", ("", "")),
    ],
)
def test_actions_are_parsed(action: str, expected: tuple[str, str]) -> None:
    assert parsed(action) == expected


# The reward

LAMP = Product(
    "A", "Brass Desk Lamp", "", ("Dimmable",), "Home › Lights › Lamps", "lamps", "$20.0", 20.0, {},
    ("energy saving",),
)  # fmt: skip


SAVING = Goal("A", "", ("energy saving",))


def like(**changes: Any) -> Product:
    from dataclasses import replace

    return replace(LAMP, **changes)


@pytest.mark.parametrize(
    ("bought", "options", "goal", "expected"),
    [
        (LAMP, {}, Goal("A", "", ("energy saving",), (), 30.0), 1.0),
        (LAMP, {}, Goal("A", "", ("energy saving", "dimmable"), (), 30.0), 1.0),  # in the bullets
        (LAMP, {}, Goal("A", "", ("energy saving", "wireless"), (), 30.0), 2 / 3),
        (LAMP, {}, Goal("A", "", ("energy saving",), (), 10.0), 1 / 2),  # too dear
        (LAMP, {"c": "navy blue"}, Goal("A", "", ("energy saving",), ("blue",), 30.0), 1.0),
        (LAMP, {"c": "red"}, Goal("A", "", ("energy saving",), ("blue",), 30.0), 2 / 3),
        (LAMP, {"s": "large"}, Goal("A", "", ("energy saving",), ("x-large",), 30.0), 1.0),  # as thefuzz has it
        (like(title="Oak Table", query="tables", category="Home › Tables"), {}, SAVING, 0.0),
        (like(title="Lamp Cover Brass Pipe Unit Kit", query="x", category="y"), {}, SAVING, 1.0),
    ],
)  # fmt: skip
def test_the_papers_reward(
    bought: Product, options: dict[str, str], goal: Goal, expected: float
) -> None:
    assert score(bought, options, goal, LAMP).reward == pytest.approx(expected)


def test_types_that_differ_are_worth_less() -> None:
    long = like(
        title=" ".join(f"Part{chr(97 + n)} " for n in range(11)) + "Lamp"
    )  # twelve nouns, one in common
    other = like(title="Lamp", query="x", category="y")
    assert score(other, {}, SAVING, long).type == 0.1
    five = like(title="Brass Desk Reading Table Lamp")
    assert score(other, {}, SAVING, five).type == 0.5, "a fifth of the nouns is not enough"
    assert score(like(title="Lamp", category="y"), {}, SAVING, five).type == 1.0, "the same query is"
    assert score(like(title="Lamp", query="x"), {}, SAVING, five).type == 1.0, "two categories are"


@pytest.mark.parametrize(
    ("title", "wanted", "by_spacy"),
    [
        ("PEAK High Top Mens Basketball Shoes Lou Williams Streetball Master Breathable Non Slip Sneakers",
         "Mens D.O.N. Issue 2 Gca Basketball Sneakers Shoes Casual - Off White", 0.333),
        ("BRST AC Power Cord Outlet Socket Cable Plug Lead for Panasonic SC-HT830V DVD/VCR Combo Home System",
         "Saireed UL Listed 2 Prong Power Cord for JBL Bar 3.1 Bar 2.1 Channel 4K Ultra HD Soundbar", 0.15),
        ("Minkissy 2pcs Stainless Steel Eyebrow Tweezers Blackhead Acne Remover Portable Makeup Tweezers",
         "Rusticware 921ORB Kitchen and Bath Cabinet Knob", 0.0),
    ],
)  # fmt: skip
def test_our_nouns_decide_as_spacys_do(title: str, wanted: str, by_spacy: float) -> None:
    """The numbers are those of the original's own tests; what counts is the side of 0.1 and 0.2."""
    ours = title_score(title, wanted)
    assert (ours > 0.2, ours < 0.1) == (by_spacy > 0.2, by_spacy < 0.1)
    assert nouns_of("Non-Slip Waterproof Bed Seed 4K of the Listed USB-C") == (
        "non-slip",
        "bed",
        "seed",
        "usb-c",
    )


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [("powder snow", "cool powder snow", 100), ("a", "", 0), ("Pack-of 12", "12 pack of", 100),
     ("blue", "red", 29)],
)  # fmt: skip
def test_fuzzy_matches_are_thefuzzs(one: str, other: str, expected: int) -> None:
    assert similarity(one, other) == expected


# Goals


def test_goals_are_every_choice_of_options_in_the_originals_order(folder: Path) -> None:
    import random

    goals = load_catalog(folder).goals
    assert len(goals) == 8 + 22 * 6, "eight products have no options"
    wanted = [goal for goal in goals if goal.asin == "B000000001"]
    assert {goal.options for goal in wanted} == set(
        itertools.product(("dark red", "blue | white", "moss"), ("small", "large"))
    )
    one = next(goal for goal in wanted if goal.options == ("moss", "large"))
    assert one.instruction.startswith(
        "Find me easy clean lanterns with color: moss, and size: large, and price lower than "
    )
    assert one.price_upper in (40.0, 50.0, 60.0), "the larger of two of 30, 40, 50, 60"
    asins = [number for number in range(30) for _ in range(6 if number % 4 else 1)]
    random.seed(233)
    random.shuffle(asins)
    assert [goal.asin for goal in goals] == [f"B{number:09d}" for number in asins]


def test_splits_share_no_product_and_are_stable() -> None:
    train, dev, test = training_tasks(), development_tasks(), held_out_tasks()
    named = [{task.envs["webshop"]["asin"] for task in tasks} for tasks in (train, dev, test)]
    assert all(named) and not (named[0] & named[1] or named[0] & named[2] or named[1] & named[2])
    assert test[3].id == "webshop-test-3" and test == held_out_tasks()
    first = [task.envs["webshop"]["asin"] for task in test[: len(named[2])]]
    assert len(set(first)) == len(first), "each product comes once before any comes twice"


def test_human_goals_are_split_as_in_the_original(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    written = {
        f"B{number:09d}": [
            {"instruction": f"i need lantern {n}.", "instruction_attributes": ["easy clean"],
             "instruction_options": ["moss"]}
            for n in range(80)
        ]
        for number in range(30)
    }  # fmt: skip
    written["B000000000"].append({"instruction": "x", "instruction_attributes": []})
    (tmp_path / "items_human_ins.json").write_text(json.dumps(written))
    goals = load_catalog(tmp_path).goals
    assert len(goals) == 2400 and all(goal.is_human and goal.options == ("moss",) for goal in goals)
    assert (
        goals[0].instruction.startswith("i need lantern ")
        and ", and price lower than" in goals[0].instruction
    )
    split = split_goals(goals)
    assert (split["test"], split["dev"], split["train"]) == (
        list(goals[:500]), list(goals[500:1500]), list(goals[1500:])
    )  # fmt: skip


# The demonstrators and the tool


async def test_the_expert_buys_what_is_wanted() -> None:
    played = await play_expert("webshop", held_out_tasks()[:12])
    assert [(t.failure, t.reward, t.rewards["success"]) for t in played] == [(None, 1.0, 1.0)] * len(
        played
    )


async def test_agentflys_tool() -> None:
    task = held_out_tasks()[0]
    env = WebShopBrowser()
    env.reset(task, **task.envs["webshop"])
    tools, context = LocalTools(env.tools()), ToolContext("e", task, {"webshop": env})
    (spec,) = await tools.list(context)
    assert spec.name == "webshop_browser" and spec.parameters["required"] == ["action", "value"]
    script = browser_expert(task)
    call = next(script)
    wrong = await tools.call(
        ToolCall("webshop_browser", {"action": "click", "value": "Buy Now"}), context
    )
    assert wrong.fault is not None and "no 'Buy Now' on this page" in wrong.content
    for arguments in ({"action": "dance", "value": "x"}, {"action": "search", "value": " "}):
        assert (await tools.call(ToolCall("webshop_browser", arguments), context)).fault is not None
    result = await tools.call(call, context)
    while not result.terminated:
        result = await tools.call(script.send(result.content), context)
    assert result.reward == 1.0 and env.score == 1.0
    assert (await tools.call(call, context)).terminated


async def test_the_contract_holds() -> None:
    task = held_out_tasks()[0]
    moves = [
        f"search[{task.metadata['title']}]",
        f"click[{task.envs['webshop']['asin']}]",
        "click[buy now]",
        "again",
    ]
    assert not await check_env(WebShop, task, moves, name="webshop")


@pytest.mark.worlds
@pytest.mark.skipif(DATA is None, reason="needs LUDUS_WEBSHOP_DATA")
async def test_the_expert_buys_what_is_wanted_in_the_published_shop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert DATA is not None
    monkeypatch.setenv("LUDUS_WEBSHOP_DATA", DATA)
    tasks = held_out_tasks()
    played = await play_expert("webshop", tasks)
    assert len(tasks) == 500
    assert sum(t.reward == 1.0 for t in played) >= 0.95 * len(tasks)
    assert next(iter(expert(tasks[0]))).name == "step"
