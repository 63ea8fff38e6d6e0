"""The viewer's pages in real Chromium: filters, replay, tokens, comparisons, play, labels, export, live."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from viewer_runs import RunningViewer, episode, running_viewer, write_run

from ludus.core import Group, Segment, SegmentKind, TokenSequence
from ludus.core.trajectory import Branch
from ludus.observe import RunFolder, RunWriter
from ludus.training.data.conversations import read_conversations, read_pairs
from ludus.training.evaluation.study import ResultsFolder

ROOT = Path(__file__).parent.parent.parent
CHROMIUM = os.environ.get("LUDUS_CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [
    pytest.mark.worlds,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        CHROMIUM is None or find_spec("playwright") is None, reason="needs Chromium and playwright"
    ),
]
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run",
]  # fmt: skip


OWN = ("http://127.0.0.1:", "data:", "file:", "blob:", "about:")


def until(page: Any, expression: str, argument: Any = None) -> None:
    """Wait for what a function in the page says; the page's own policy forbids evaluating text there."""
    while not page.evaluate(expression, argument):
        page.wait_for_timeout(50)


def open_download(page: Any, got: Any, folder: Path) -> None:
    got.value.save_as(folder / "download.html")
    page.goto(f"file://{folder / 'download.html'}")


def helpdesk(folder: Path) -> Path:
    """The run with planted failures that docs/viewer.md walks through."""
    found = importlib.util.spec_from_file_location("helpdesk_run", ROOT / "examples" / "helpdesk_run.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    made: Path = asyncio.run(module.play(folder))
    return made


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    helpdesk(folder)
    return folder


@pytest.fixture(scope="module")
def viewer(root: Path) -> Iterator[RunningViewer]:
    with running_viewer(root) as made:
        made.settled()
        yield made


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Any) -> Iterator[Any]:
    """A page that must not log an error, ask a question, or load anything from elsewhere."""
    context = chromium.new_context(viewport={"width": 1360, "height": 860}, accept_downloads=True)
    made, wrong = context.new_page(), []
    made.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    made.on("pageerror", lambda error: wrong.append(str(error)))
    made.on("dialog", lambda dialog: wrong.append(f"dialog: {dialog.message}"))
    made.on("request", lambda one: None if one.url.startswith(OWN) else wrong.append(one.url))
    made.set_default_timeout(15_000)
    yield made
    context.close()
    assert not wrong


def test_the_three_planted_failures_are_found_from_the_first_page(
    viewer: RunningViewer, page: Any
) -> None:
    page.goto(viewer.address)
    findings = page.locator(".finding")
    findings.first.wait_for()
    titles = [title.split(" · ")[-1] for title in page.locator(".finding h3").all_inner_texts()]
    assert any("Reward rises" in title and "while success does not" in title for title in titles)
    assert any("“stock” times out" in title for title in titles)
    assert any("tool calls that cannot be read" in title for title in titles)
    assert "“polite” rose most" in page.locator(".finding", has_text="Reward rises").inner_text()

    evidence = {
        "Reward rises": "Thank you! Thank you!",
        "times out": "took longer than 0.05 seconds",
        "cannot be read": "<tool_call>returns(item=",
    }
    for title, seen in evidence.items():
        page.goto(viewer.address)
        counted = re.search(
            r"(?:in )?(\d+) of ", page.locator(".finding h3", has_text=title).inner_text()
        )
        page.locator(".finding", has_text=title).get_by_text("Show episodes").click()
        page.locator("tr.item").first.wait_for()
        if counted:
            assert page.locator("#count").inner_text() == f"{counted[1]} episodes", title
        page.locator("tr.item").first.click()
        page.locator(".message").first.wait_for()
        assert seen in page.locator(".messages").inner_text(), title
    page.get_by_role("tab", name="Prompt").click()
    page.locator(".segment.prompt").wait_for()
    assert (
        "Call a tool like this:\n<tool_call>returns(item='lamp')"
        in page.locator(".segment.prompt").inner_text()
    )


def test_filters_are_in_the_address_and_come_back(viewer: RunningViewer, page: Any) -> None:
    page.goto(f"{viewer.address}/episodes")
    page.locator("tr.item").first.wait_for()
    page.keyboard.press("/")
    page.keyboard.type("arrives on friday")
    page.wait_for_url("**text=arrives+on+friday**")
    page.locator("mark").first.wait_for()
    total = page.locator("#count").inner_text()
    page.get_by_label("Success").select_option("yes")
    page.wait_for_url("**success=yes**")
    page.get_by_role("button", name="Reward").click()
    page.wait_for_url("**sort=reward**")
    until(page, "() => document.querySelector('[aria-sort]')?.innerText.startsWith('Reward')")
    shared, rows = page.url, page.locator("tr.item").all_inner_texts()
    page.goto("about:blank")
    page.goto(shared)
    page.locator("tr.item").first.wait_for()
    assert page.locator("tr.item").all_inner_texts() == rows and page.locator("#search").input_value()
    page.go_back()
    page.goto(f"{viewer.address}/episodes?text=arrives+on+friday")
    page.locator("mark").first.wait_for()
    assert page.locator("#count").inner_text() == total
    page.keyboard.press("j")
    page.keyboard.press("j")
    assert page.locator("tr.item").nth(2).get_attribute("aria-selected") == "true"
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    page.locator(".message").first.wait_for()
    page.keyboard.press("u")
    page.locator("mark").first.wait_for()
    assert "text=arrives" in page.url, "back to the same list"


def test_filters_keep_the_focus_while_they_are_filled_in(viewer: RunningViewer, page: Any) -> None:
    page.goto(f"{viewer.address}/episodes")
    page.locator("tr.item").first.wait_for()
    page.get_by_label("First step").click()
    page.keyboard.type("3")
    page.keyboard.press("Tab")
    page.keyboard.type("12")
    page.keyboard.press("Enter")
    page.wait_for_url("**/episodes?first_step=3&last_step=12")
    assert page.get_by_label("Last step").input_value() == "12", "what was typed has arrived"
    page.get_by_label("Least reward").click()
    page.keyboard.type("1")
    page.get_by_label("Most reward").click()
    page.keyboard.type("2")
    page.keyboard.press("Enter")
    page.wait_for_url("**least_reward=1&most_reward=2")
    fault = page.get_by_label("Fault")
    fault.focus()
    fault.select_option("malformed_call")
    page.wait_for_url("**fault=malformed_call**")
    page.wait_for_load_state("networkidle")
    assert page.evaluate("document.activeElement.name") == "fault"
    page.get_by_role("button", name="Clear all").click()
    page.wait_for_url("**/episodes")
    assert page.get_by_label("Last step").input_value() == "" and fault.input_value() == ""


def test_a_search_keeps_the_case_and_is_taken_away_like_a_filter(
    viewer: RunningViewer, page: Any
) -> None:
    page.goto(f"{viewer.address}/episodes?text=arrives+on+friday")
    page.locator("mark").first.wait_for()
    assert page.locator("mark").first.inner_text() == "arrives on Friday"
    page.get_by_role("button", name="text: arrives on friday").wait_for()
    page.get_by_role("button", name="Clear all").click()
    page.wait_for_url("**/episodes")
    assert page.locator("#search").input_value() == ""


@pytest.mark.parametrize("query", ["", "?split=train&offset=50"])
def test_a_list_comes_back_where_it_was_left(viewer: RunningViewer, page: Any, query: str) -> None:
    page.goto(f"{viewer.address}/episodes{query}")
    page.locator("tr.item").first.wait_for()
    for _ in range(15):
        page.keyboard.press("j")
    row = page.locator("tr.item").nth(15)
    assert row.get_attribute("aria-selected") == "true"
    until(page, "() => scrollY > 100")
    page.wait_for_timeout(100)  # the page hears of its own scrolling with the next frame
    text, place = row.inner_text(), page.evaluate("scrollY")
    for way in ("u", "back"):
        page.keyboard.press("Enter")
        page.locator(".message").first.wait_for()
        if way == "u":
            page.keyboard.press("u")
        else:
            page.go_back()
        selected = page.locator("tr.item[aria-selected='true']")
        selected.wait_for()
        assert selected.inner_text() == text and page.url.endswith(f"/episodes{query}"), way
        until(page, "(place) => Math.abs(scrollY - place) < 2", place)
    page.get_by_role("link", name="Runs", exact=True).click()
    page.get_by_role("link", name="Episodes", exact=True).click()
    page.locator("tr.item").first.wait_for()
    assert page.locator("tr.item").first.get_attribute("aria-selected") == "true", "a fresh list"


EPISODE = "/episode/helpdesk-001/step-000016.parquet/4"


def test_a_replay_by_keys(viewer: RunningViewer, page: Any) -> None:
    page.goto(viewer.address + EPISODE)
    player = page.locator(".player output")
    player.wait_for()
    assert player.inner_text() == "1 of 2"
    page.keyboard.press("ArrowRight")
    page.locator(".message.now", has_text="arrives on").wait_for()
    assert player.inner_text() == "2 of 2" and "turn=1" in page.url
    page.keyboard.press("ArrowLeft")
    assert player.inner_text() == "1 of 2" and page.locator(".message.later").count() == 1
    page.keyboard.press("Space")
    page.get_by_role("button", name="Pause").wait_for()
    until(page, "() => document.querySelector('.player output').innerText === '2 of 2'")
    assert page.locator(".waterfall .line").count() >= 4
    attempt = page.locator(".attempts a[aria-current]").inner_text()
    page.keyboard.press("]")
    page.wait_for_url("**/5*")
    page.locator(".attempts a[aria-current]", has_text="attempt 1").wait_for()
    assert page.locator(".attempts a[aria-current]").inner_text() != attempt


def test_the_list_is_gone_through_by_keys(viewer: RunningViewer, page: Any) -> None:
    page.goto(f"{viewer.address}/episodes?tool=order&sort=tokens")
    rows = page.locator("tr.item a.task")
    rows.first.wait_for()
    places = [link.split("?")[0] for link in rows.evaluate_all("all => all.map((one) => one.href)")]
    assert len(set(places)) == len(places) == 50
    rows.first.click()
    near = page.locator(".neighbours")
    for place in (1, 2, 3):
        near.get_by_text(re.compile(f"^{place} of ")).wait_for()
        assert page.url.startswith(places[place - 1])
        page.keyboard.press("n")
    near.get_by_text(re.compile("^4 of ")).wait_for()
    page.keyboard.press("t")
    page.locator(".segment.action .tok").first.wait_for()
    page.keyboard.press("p")
    near.get_by_text(re.compile("^3 of ")).wait_for()
    assert page.url.startswith(places[2]) and "view=tokens" in page.url


def test_stages_have_room_and_seeds_are_one_line(tmp_path: Path, page: Any) -> None:
    for seed in range(3):
        with RunWriter.create(tmp_path / f"s{seed}", {"rl": {"steps": 20}, "seed": seed}) as run:
            for step in range(1, 301):
                run.log(step, {"sft/loss": 3 / step + seed / 10})
            for step in range(301, 321):
                run.log(step, {"reward": (step - 300 + seed) / 22, "loss": 0.1})
    with RunWriter.create(tmp_path / "warm", {"warm_start": {"steps": 20}}) as run:
        for step in range(1, 21):
            run.log(step, {"sft/loss": 1 / step})
    with running_viewer(tmp_path) as viewer:
        page.goto(viewer.address)
        fallen = page.locator(".run-card", has_text="warm").locator(".number .reward")
        fallen.wait_for()
        assert fallen.get_attribute("class").endswith("good"), "a loss that falls"
        page.locator(".run-card", has_text="s0").get_by_text("3 seeds").click()
        reward = page.locator("figure.chart", has_text="Reward").first
        reward.locator("path.band").wait_for()
        assert reward.locator("path.series").count() == reward.locator("path.band").count() == 1
        page.get_by_role("button", name="Seeds apart").click()
        page.locator("figure.chart path.band").first.wait_for(state="detached")
        assert reward.locator("path.series").count() == 3
        legend = [one.split() for one in reward.locator(".legend > span").all_inner_texts()]
        assert legend == [["s0", "0.909"], ["s1", "0.955"], ["s2", "1"]]
        page.goto(f"{viewer.address}/run/s0")
        both = page.locator("figure.chart", has_text="Loss").first
        both.locator("line.stage").wait_for(state="attached")  # it has no width
        svg, line = both.locator("svg").first.bounding_box(), both.locator("line.stage").bounding_box()
        assert 0.4 < (line["x"] - svg["x"]) / svg["width"] < 0.6, "RL's 20 steps have half of the room"
        page.mouse.move(svg["x"] + 0.75 * svg["width"], svg["y"] + 60)
        step = int(re.search(r"step (\d+)", both.locator(".tip").inner_text())[1])
        assert 305 < step < 315
        page.goto("about:blank")  # a page that polls a closed server logs errors


def test_the_token_view_tells_what_was_trained_on(viewer: RunningViewer, page: Any) -> None:
    page.goto(viewer.address + EPISODE)
    page.locator(".message").first.wait_for()
    page.keyboard.press("t")
    page.locator(".segment.action .tok").first.wait_for()
    labels = page.locator(".segment > .label").all_inner_texts()
    assert labels[0].startswith("prompt") and "never trained on" in labels[0]
    assert labels[1].startswith("action · turn 1") and "trained on · mean advantage" in labels[1]
    for mode in ("Log-probability", "Advantage", "Policy version", "Origin"):
        page.get_by_role("button", name=mode).click()
        assert page.get_by_role("button", name=mode).get_attribute("aria-pressed") == "true"
    assert "colour=kind" in page.url
    page.locator(".segment.action .tok").nth(1).hover()
    tip = page.locator(".tokens .tip").inner_text()
    assert "log-probability" in tip and "advantage" in tip and "policy version" in tip
    text = "".join(page.locator(".segment.action").first.locator(".tok").all_inner_texts())
    assert '"name": "order"' in text


def test_attempts_side_by_side_and_a_preference(
    root: Path, viewer: RunningViewer, page: Any, tmp_path: Path
) -> None:
    page.goto(viewer.address + EPISODE)
    page.get_by_role("link", name="Compare attempts").click()
    page.locator(".pair").first.wait_for()
    assert page.locator(".column-head").count() == 4
    assert "differ" in page.locator(".divider").inner_text()
    for width in (1360, 1000, 390):
        page.set_viewport_size({"width": width, "height": 860})
        page.locator(".side-by-side").evaluate("(one) => one.scrollTo(one.scrollWidth, 0)")
        head = page.locator(".column-head").last.bounding_box()
        turn = page.locator(".aligned .pair").first.locator("> *").last.bounding_box()
        assert head["x"] == turn["x"] and head["width"] == turn["width"], "they scroll together"
        assert head["x"] + head["width"] <= width, "the last column is reached"
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
    page.goto(
        f"{viewer.address}/compare?episode=helpdesk-001/step-000016.parquet/4&episode=helpdesk-001/step-000016.parquet/5"
    )
    page.get_by_role("button", name="Prefer this one").nth(1).click()
    page.locator(".toast", has_text="Preferred").wait_for()
    [(chosen, rejected)] = read_pairs(root / "labels" / "preferences.jsonl")
    assert chosen[:2] == rejected[:2] and chosen != rejected
    with page.expect_download() as got:
        page.get_by_role("link", name="HTML").click()
    open_download(page, got, tmp_path)
    assert page.locator("article").count() == 2 and page.locator("script").count() == 0


def test_one_task_over_time_and_two_checkpoints(viewer: RunningViewer, page: Any) -> None:
    page.goto(viewer.address + EPISODE)
    page.get_by_role("link", name="Over time").click()
    page.get_by_role("button", name="Compare the chosen").click()
    page.locator(".pair").first.wait_for()
    page.goto(
        f"{viewer.address}/compare?a_run=helpdesk-001&a_split=eval&a_step=0&b_run=helpdesk-001&b_split=eval&b_step=16"
    )
    page.get_by_text("the second is better: chance alone is unlikely").wait_for()
    assert "The second is better on 12 tasks" in page.locator("main").inner_text()
    assert page.locator(".big.good").inner_text().startswith("+")


def test_labels_by_keys(root: Path, viewer: RunningViewer, page: Any) -> None:
    page.goto(viewer.address + EPISODE)
    page.locator(".message").first.wait_for()
    page.keyboard.press("g")
    page.locator(".toast", has_text="good").wait_for()
    [conversation] = read_conversations(root / "labels" / "good.jsonl")
    assert conversation[-1].role == "assistant"
    page.goto(f"{viewer.address}/labels")
    page.get_by_text("orders-1").first.wait_for()
    page.goto(viewer.address + EPISODE)
    assert page.get_by_role("button", name="Good").get_attribute("aria-pressed") == "true"


def test_an_episode_is_exported_whole(viewer: RunningViewer, page: Any, tmp_path: Path) -> None:
    page.goto(viewer.address + EPISODE)
    with page.expect_download() as got:
        page.get_by_role("link", name="JSON").click()
    assert json.loads(Path(got.value.path()).read_text())["episodes"][0]["task"]["id"] == "orders-1"
    with page.expect_download() as got:
        page.get_by_role("link", name="HTML").click()
    open_download(page, got, tmp_path)
    assert "When does my order" in page.locator("body").inner_text()


def test_curves_zoom_definitions_and_recipe(viewer: RunningViewer, page: Any) -> None:
    page.goto(f"{viewer.address}/run/helpdesk-001")
    charts = page.locator("figure.chart")
    charts.first.wait_for()
    names = page.locator("figure.chart h3").all_inner_texts()
    assert any(name.startswith("tool stock") for name in names) and any(
        name.startswith("fault_share") for name in names
    )
    page.locator("figure.chart .what").first.focus()
    assert "Share of episodes that succeeded" in charts.first.inner_text()
    box = charts.first.locator("svg").bounding_box()
    page.mouse.move(box["x"] + 200, box["y"] + 60)
    assert "step " in charts.first.locator(".tip").inner_text()
    page.mouse.down()
    page.mouse.move(box["x"] + 420, box["y"] + 60)
    page.mouse.up()
    page.wait_for_url("**first=*last=*")
    page.get_by_placeholder("Find a metric").fill("polite")
    page.keyboard.press("Tab")
    page.wait_for_url("**metric=polite**")
    page.get_by_role("tab", name="Recipe").click()
    page.get_by_text('"algorithm": "grpo"').wait_for()


NAMELESS = """() => [...document.querySelectorAll('button, a[href], input, select, textarea')]
    .filter((one) => one.offsetParent && ![one.innerText.trim(), one.getAttribute('aria-label'), one.title,
        one.closest('label')?.innerText.trim(), one.querySelector('img[alt]')?.alt,
        one.placeholder].some(Boolean))
    .map((one) => one.outerHTML)"""
"""What a screen reader has no word for."""


def test_pages_are_whole_on_a_phone_and_in_both_themes(viewer: RunningViewer, page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    for path in (
        "/",
        "/run/helpdesk-001",
        "/episodes",
        EPISODE,
        f"{EPISODE}?view=tokens",
        "/compare",
        "/labels",
    ):
        page.goto(viewer.address + path)
        page.locator("h1").wait_for()
        page.wait_for_load_state("networkidle")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path
        nameless = page.evaluate(NAMELESS)
        assert nameless == [], path
        assert page.locator("main").count() == page.locator("nav[aria-label='Pages']").count() == 1
    page.keyboard.press("?")
    page.locator("dialog").wait_for()
    page.keyboard.press("?")
    page.locator("dialog").wait_for(state="detached")
    labels, end = (
        page.locator(one).bounding_box() for one in (".bar nav a[href='/labels']", ".bar .end")
    )
    assert labels["x"] + labels["width"] <= end["x"], "all pages are in the bar"
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_label("Change between dark and light").click()
    changed = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert changed != back
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == changed, (
        "it is remembered"
    )


def test_hostile_contents_are_text(tmp_path: Path, page: Any) -> None:
    nasty = "<img src=x onerror=alert(1)><script>alert(2)</script>\x1b[31m\u202eevil" + "z" * 20_000
    one = episode(nasty[:200], answer=nasty, tool="<b>t</b>", result=nasty, prompt=nasty)
    write_run(tmp_path / "odd<b>", {1: [Group(one.task, [one])]})
    with running_viewer(tmp_path) as viewer:
        viewer.settled()
        for path in ("/", "/episodes", "/episodes?text=onerror"):
            page.goto(viewer.address + path)
            page.locator("h1").wait_for()
            page.wait_for_load_state("networkidle")
        page.locator("tr.item").first.click()
        page.locator(".message").first.wait_for()
        text = page.locator(".messages").inner_text()
        assert "<script>alert(2)</script>" in text and "U+001B" in text and "U+202E" in text
        assert page.locator(".messages img, .messages script, .messages b b").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth + 1"), (
            "a giant line wraps"
        )
        more = page.get_by_role("button", name="more characters")
        left = more.count()
        more.first.click()
        until(page, "(left) => document.querySelectorAll('.message > .button').length < left", left)
        page.get_by_role("tab", name="Details").click()
        page.goto(f"{viewer.address}/run/odd%3Cb%3E")
        page.locator("figure.chart").first.wait_for()


TRAIN = """
import ludus

@ludus.tool
async def press(key: str) -> ludus.ToolResult:
    '''Press a key.'''
    return ludus.ToolResult("pressed", terminated=True)

@ludus.reward(name="success")
async def right(trajectory, target: str) -> float:
    return float(any(call.arguments.get("key") == target for call in trajectory.calls))

def expert(task):
    yield ludus.ToolCall("press", {"key": task.target})

tasks = [{"prompt": f"Press {key}.", "target": key, "id": f"press-{key}"} for key in "abcd"]
ludus.train(model="scratch", tools=[press], rewards=[right], demonstrations=expert, tasks=tasks,
    budgets={"max_turns": 1, "max_turn_tokens": 24}, warm_start={"steps": 30}, progress=False,
    rl={"steps": 400, "tasks": 2, "attempts": 4}, run={"folder": "runs/live-001"})
"""


def test_a_run_is_watched_while_a_process_trains_it(tmp_path: Path, page: Any) -> None:
    (tmp_path / "runs").mkdir()
    training = subprocess.Popen([sys.executable, "-c", TRAIN], cwd=tmp_path, stderr=subprocess.PIPE)
    try:
        with running_viewer(tmp_path / "runs") as viewer:
            page.goto(viewer.address)
            page.get_by_text("No runs here yet").wait_for()
            page.set_default_timeout(120_000)
            page.locator(".run-card", has_text="training").wait_for()
            page.goto(f"{viewer.address}/run/live-001")
            page.get_by_text("training now").wait_for()
            until(page, "() => parseInt(document.querySelector('.button.primary').innerText) > 0")
            before = page.locator(".button.primary").inner_text()
            until(
                page,
                "(before) => document.querySelector('.button.primary').innerText !== before",
                before,
            )
            page.goto(f"{viewer.address}/episodes?run=live-001")
            page.locator("tr.item").first.wait_for()
            counted = page.locator("#count").inner_text()
            until(page, "(counted) => document.querySelector('#count').innerText !== counted", counted)
            training.kill()
            training.wait()
            page.goto(f"{viewer.address}/run/live-001")
            page.get_by_text("The run stopped before its end").wait_for()
            page.locator("figure.chart").first.wait_for()
            run = RunFolder(tmp_path / "runs" / "live-001")
            files = [file for file in run.trajectory_files() if file.split == "train"]
            episodes = [one for file in files for one in run.trajectories(file.step)]
            advantages = [action.advantages for one in episodes for action in one.actions]
            assert any(advantages), "training has recorded what it trained with"
            shutil.rmtree(tmp_path / "runs" / "live-001")
            page.goto(f"{viewer.address}/episodes")
            page.get_by_text("No episode fits").wait_for()
    finally:
        training.kill()
        training.communicate()


def test_an_environment_is_played_by_hand_and_the_model_takes_over(tmp_path: Path, page: Any) -> None:
    from ludus.training import load_parts, load_recipe

    recipe = load_recipe("safe", ["evaluation.tasks=2"])
    with running_viewer(tmp_path, play=(recipe, load_parts(recipe))) as viewer:
        page.goto(f"{viewer.address}/play?token={viewer.token}")
        page.get_by_role("button", name="Start").click()
        page.locator("form[aria-label='call turn']").wait_for()
        assert "door  closed" in page.locator(".render").inner_text(), "the environment is drawn"
        form = page.locator("form[aria-label='call turn']")
        form.get_by_label("dial").select_option(label="green")
        form.get_by_label("to", exact=True).fill("5")
        form.get_by_role("button").click()
        page.locator(".message.tool").wait_for()
        assert "13 turns left" in page.locator(".rail").inner_text()
        page.locator("#model-turn").click()
        page.locator(".message.assistant").nth(1).wait_for()
        if page.locator("form[aria-label='call open']").count():
            page.locator("form[aria-label='call open']").get_by_role("button").click()
        page.get_by_text("The episode is over").wait_for()
        page.locator("#save-good").click()
        page.locator(".toast", has_text="Kept").wait_for()
    [conversation] = read_conversations(tmp_path / "labels" / "good.jsonl")
    assert conversation[1 if conversation[0].role == "user" else 2].tool_calls[0].arguments == {
        "dial": "green",
        "to": 5,
    }


def branched(parent: Any, attempt: int, success: float) -> Any:
    """An attempt that took another second action."""
    own = episode("sum-1", attempt, answer=f"answer {attempt}", success=success)
    own.sequences[0].segments[:3] = parent.sequences[0].segments[:3]
    own.messages[:4] = parent.messages[:4]
    return replace(own, branch=Branch(parent.attempt, 3, "fork"))


def test_a_group_as_a_tree(tmp_path: Path, page: Any) -> None:
    first = episode("sum-1", 0, success=0.0)
    second = branched(first, 1, 1.0)
    group = [first, second, branched(second, 2, 0.0), episode("sum-1", 3)]
    write_run(tmp_path / "runs" / "branching", {1: [Group(first.task, group)]})
    with running_viewer(tmp_path / "runs") as viewer:
        viewer.settled()
        page.goto(f"{viewer.address}/episode/branching/step-000001.parquet/1")
        page.locator(".chip", has_text="branch of attempt 0 (fork)").wait_for()
        page.get_by_text("Tree", exact=True).click()
        tree = page.locator(".tree svg")
        tree.wait_for()
        told = tree.text_content()
        assert told.index("attempt 0") < told.index("attempt 1") < told.index("attempt 2")
        assert "branched off attempt 0" in told and "branched off attempt 1" in told
        assert tree.locator("path").count() == 2 and tree.locator("circle").count() == 4
        tree.locator("a", has_text="attempt 2").click()
        page.locator(".chip", has_text="branch of attempt 1 (fork)").wait_for()
        assert "view=tree" in page.url, "the next attempt is shown as a tree, too"
        page.goto("about:blank")  # a page that polls a closed server logs errors


def test_threads_of_an_episode(tmp_path: Path, page: Any) -> None:
    one = episode("sum-1", 0)
    other = Segment(SegmentKind.ACTION, [9, 9], [-0.1, -0.2])
    prompt = one.sequences[0].segments[0]
    one.sequences.append(TokenSequence([prompt, other], parent=(0, 0)))
    write_run(tmp_path / "runs" / "threads", {1: [Group(one.task, [one, episode("sum-1", 1)])]})
    with running_viewer(tmp_path / "runs") as viewer:
        viewer.settled()
        page.goto(f"{viewer.address}/episode/threads/step-000001.parquet/0?view=details")
        page.locator(".chip", has_text="2 threads").wait_for()
        page.get_by_text("goes on from segment 0 of thread 1").wait_for()
        page.get_by_role("link", name="Thread 2").click()
        pressed = page.locator("button[aria-pressed=true]", has_text="2 ↳ 1")
        pressed.wait_for()
        page.get_by_role("button", name="1 · 2 turns", exact=True).click()
        page.locator("button[aria-pressed=true]", has_text="1 · 2 turns").wait_for()
        assert "sequence=0" in page.url
        page.goto("about:blank")  # a page that polls a closed server logs errors


def test_an_evaluation_is_opened_from_the_list(tmp_path: Path, page: Any) -> None:
    (tmp_path / "runs").mkdir()
    group = Group(episode().task, [episode(attempt=n, success=float(n % 2)) for n in range(4)])
    with ResultsFolder(tmp_path / "evaluations" / "odd-001", {"attempts": 4}) as results:
        cell = results.cell("small model", {"model": "a"}, 8)
        cell.write(group, 0)
        cell.close([group])
    with running_viewer(tmp_path / "runs") as viewer:
        viewer.settled()
        page.goto(viewer.address)
        page.get_by_role("link", name=re.compile("odd-001:small-model-.*:turns-8")).first.click()
        page.get_by_text("Success", exact=True).first.wait_for()
        page.get_by_text("4 episodes").click()
        page.get_by_text("sum-1").first.wait_for()
        page.goto("about:blank")  # a page that polls a closed server logs errors
