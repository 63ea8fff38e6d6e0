"""MiniWoB: tasks and scripts without Chromium; with it, episodes, the demonstrator, and parity."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from importlib.util import find_spec
from typing import Any

import pytest
from world_play import play_expert

from ludus.core import ConfigError, Task
from ludus.rollouts import check_env
from ludus.worlds.browser import SeenPage
from ludus.worlds.browser.chromium import find_chromium
from ludus.worlds.browser.tab import parse_action
from ludus.worlds.miniwob import MiniWob, held_out_tasks, pages, training_tasks
from ludus.worlds.miniwob.solutions import SOLUTIONS

HAS_CHROMIUM = all(map(find_spec, ("playwright", "miniwob"))) and (
    "LUDUS_CHROMIUM" in os.environ
    or any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
)


def chromium(test: Any) -> Any:
    for mark in (
        pytest.mark.worlds,
        pytest.mark.timeout(900),
        pytest.mark.skipif(not HAS_CHROMIUM, reason="needs ludus-rl[browser] and Chromium"),
    ):
        test = mark(test)
    return test


# Tasks and scripts ------------------------------------------------------------------------------------


def test_tasks_are_seeds_of_pages_that_are_solved() -> None:
    train, held_out = training_tasks(), held_out_tasks()
    assert len(SOLUTIONS) >= 20
    assert (len(train), len(held_out)) == (100 * len(SOLUTIONS), 10 * len(SOLUTIONS))
    assert set(Counter(task.metadata["subtask"] for task in held_out).values()) == {10}

    def seeds(tasks: list[Task]) -> set[Any]:
        return {task.envs["miniwob"]["seed"] for task in tasks}

    assert not seeds(train) & seeds(held_out)


def test_a_script_reads_what_the_agent_sees() -> None:
    text = (
        "Some prompt\nOBSERVATION:\nTab 0 (current): T\n\n[1] RootWebArea 'T' focused: True\n"
        "\t[2] checkbox \"it's\" checked: false\n\t\t[3] StaticText 'a\\nb'\n\t[4] button 'Submit'\nURL: http://x\n"
        "OBJECTIVE: Select it's and click Submit.\nPREVIOUS ACTION: None"
    )
    seen = SeenPage(text)
    assert seen.objective == "Select it's and click Submit."
    assert [(one.depth, one.number, one.role, one.name) for one in seen.lines] == [
        (0, 1, "RootWebArea", "T"),
        (1, 2, "checkbox", "it's"),
        (2, 3, "StaticText", "a\nb"),
        (1, 4, "button", "Submit"),
    ]
    script = SOLUTIONS["click-checkboxes"](text)
    assert next(script).arguments == {"action": "click [2]"}
    assert script.send(text).arguments == {"action": "click [4]"}


# With Chromium ----------------------------------------------------------------------------------------


@chromium
async def test_the_page_pays() -> None:
    env = MiniWob()
    task = Task("t")
    try:
        first = (await env.reset(task, "click-test-2", 1)).text
        assert "button 'ONE'" in first and "OBJECTIVE: Click button ONE." in first
        assert "Time left" not in first and "START" not in first
        assert "button 'ONE'" in env.available_actions()[0] or "click [2]" in env.available_actions()
        right = await env.step("click [2]")
        assert (right.reward, right.terminated, env.reward) == (1.0, True, 1.0)
        again = await env.step("click [2]")
        assert (again.observation, again.terminated, again.reward) == (
            "The episode is over.",
            True,
            None,
        )

        assert (await env.reset(task, "click-test-2", 1)).text == first
        wrong = await env.step("click [3]")
        assert (wrong.reward, wrong.terminated) == (-1.0, True)

        await env.reset(task, "click-test-2", 1)
        assert (await env.step("click [99]")).reward == 0.0
        stopped = await env.step("stop []")
        assert (stopped.reward, stopped.terminated) == (0.0, True)
        assert len({(await env.reset(task, "click-checkboxes", seed)).text for seed in range(5)}) == 5
        with pytest.raises(ConfigError, match="no page 'nothing'; it has: ascending-numbers"):
            await env.reset(task, "nothing", 1)
    finally:
        env.close()


@chromium
async def test_every_page_of_the_package_starts() -> None:
    env = MiniWob()
    try:
        assert len(pages()) > 120 and set(SOLUTIONS) <= set(pages())
        for page in pages():
            seen = await env.reset(Task("t"), page, 1)
            assert "RootWebArea" in seen.text and env.objective, page
    finally:
        env.close()


@chromium
async def test_the_contract_holds() -> None:
    task = next(task for task in held_out_tasks() if task.metadata["subtask"] == "click-tab-2")
    assert not await check_env(
        MiniWob, task, ["click [5]", "click [3]", "scroll [down]"], name="miniwob"
    )


@chromium
async def test_the_expert_solves_one_problem_of_each_page() -> None:
    tasks = held_out_tasks()[: len(SOLUTIONS)]
    played = await play_expert("miniwob", tasks)
    bad = [(one.task.id, one.failure, one.reward) for one in played if one.rewards.get("success") != 1.0]
    assert not bad


@chromium
@pytest.mark.slow
async def test_the_expert_solves_all_held_out_tasks() -> None:
    played = await play_expert("miniwob", held_out_tasks())
    bad = [(one.task.id, one.failure, one.reward) for one in played if one.rewards.get("success") != 1.0]
    assert len(bad) <= 0.05 * len(played), bad


# Parity with the package --------------------------------------------------------------------------------

PARITY_PAGES = (
    "click-test-2", "click-button", "click-button-sequence", "click-link", "click-tab", "click-tab-2-medium",
    "click-checkboxes", "click-checkboxes-transfer", "click-option", "click-dialog", "click-dialog-2",
    "click-collapsible-nodelay", "click-collapsible-2-nodelay", "odd-or-even", "buy-ticket", "phone-book",
    "navigate-tree", "enter-text", "enter-text-2", "enter-password", "login-user", "focus-text-2", "find-word",
    "read-table", "simple-arithmetic",
)  # fmt: skip
"""Pages that are used by clicks and keys alone; 2 seeds of each make 50 episodes."""


class Package:
    """The package's own environment (Selenium), told where to click and what to type."""

    def __init__(self, page: str) -> None:
        from miniwob.environment import MiniWoBEnvironment
        from miniwob.reward import get_raw_reward

        self.env = MiniWoBEnvironment(page, reward_processor=get_raw_reward, wait_ms=100)
        self.env.set_record_screenshots(False)

    def reset(self, seed: int) -> str:
        self.env.instance.driver.execute_script("core.EPISODE_MAX_TIME = 10000000;")
        seen, _ = self.env.reset(seed=seed)
        return str(seen["utterance"])

    def click(self, place: tuple[float, float]) -> tuple[float, bool]:
        return self._do("CLICK_COORDS", coords=place)

    def type(self, text: str) -> tuple[float, bool]:
        return self._do("TYPE_TEXT", text=text)

    def _do(self, kind: str, **arguments: Any) -> tuple[float, bool]:
        from miniwob.action import ActionTypes

        action = self.env.create_action(ActionTypes[kind], **arguments)
        _, reward, done, _, _ = self.env.step(action)
        return float(reward), bool(done)


@chromium
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["gold", "random"])
async def test_rewards_and_ends_are_those_of_the_package(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("selenium", reason="the package's own environment needs Selenium")
    if shutil.which("chromedriver") is None:
        pytest.skip("needs the program chromedriver (Debian: apt install chromium-driver)")
    monkeypatch.setenv("MINIWOB_CHROME_BINARY", find_chromium())
    monkeypatch.setenv("MINIWOB_CHROMEDRIVER", str(shutil.which("chromedriver")))
    ours, ends = MiniWob(), Counter[float]()
    try:
        for page in PARITY_PAGES:
            package = Package(page)
            try:
                for seed in (3, 4) if policy == "gold" else (5, 6):
                    ends[await play_both(ours, package, page, seed, policy)] += 1
            finally:
                package.env.close()
    finally:
        ours.close()
    assert ends.total() == 50
    assert policy == "random" or ends[1.0] == 50
    assert policy == "gold" or len(ends) > 1


async def play_both(ours: MiniWob, package: Package, page: str, seed: int, policy: str) -> float:
    """Play an episode in both; its last reward, 0 where it did not end."""
    seen = (await ours.reset(Task("t"), page, seed)).text
    assert package.reset(seed) == ours.objective
    script, draw = SOLUTIONS[page](seen), random.Random(f"{page} {seed}")
    action = next(script).arguments["action"] if policy == "gold" else ""
    for _ in range(12):
        if policy == "random":
            action = draw.choice(ours.available_actions())
        parsed = parse_action(action)
        place = await ours._on_host(ours._open_session().tab.place_of(parsed.element))
        step = await ours.step(action)
        theirs = package.click(place)
        if parsed.name == "type" and not theirs[1]:
            theirs = package.type(parsed.text)
        assert (step.reward, step.terminated) == theirs, (page, seed, action)
        if step.terminated:
            assert step.reward is not None
            return step.reward
        if policy == "gold":
            seen = step.observation if isinstance(step.observation, str) else step.observation.text
            action = script.send(seen).arguments["action"]
    return 0.0
