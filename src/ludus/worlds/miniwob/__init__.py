"""MiniWoB++: small web tasks, each a page that makes a problem from a seed and pays by itself (extra:
browser).

Shi et al., "World of Bits" (2017); Liu et al., "Reinforcement Learning on Web Interfaces" (2018). The pages
are those of the package `miniwob`; actions and observations are the browser's.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Generator
from pathlib import Path
from typing import Any, ClassVar

from ludus.core.failures import Boundary, ConfigError, InfraError, MissingExtraError
from ludus.core.messages import Message, ToolCall
from ludus.core.task import Task
from ludus.envs.env import OVER, Observation, Step
from ludus.envs.world import World
from ludus.rewards import reward
from ludus.worlds.browser import Browser
from ludus.worlds.browser.chromium import CHROMIUM
from ludus.worlds.browser.gateway import NetworkPolicy
from ludus.worlds.browser.session import BrowserSession
from ludus.worlds.browser.tab import ActionProblem, Notice
from ludus.worlds.miniwob.solutions import SOLUTIONS

HOST = "miniwob.test"
HELD_OUT = 10
"""Held-out tasks of each page: seeds from 0."""
TRAINING = 100
FIRST_SEED = 1_000
"""Of the training tasks."""
EPISODE_MS = 10_000_000
"""The page's clock; its own 10 seconds measure the machine, not the agent."""

SYSTEM = """You use a web page to reach an objective. You see the page as an accessibility tree: each line \
has the id of an element in brackets, its role and its name. An action is one of these:
- click [id]: click on an element
- type [id] [content] [0 or 1]: type the content into a field; 1 presses Enter afterwards
- press [key_comb]: press keys, for example press [Ctrl+a]
- hover [id], scroll [down], scroll [up]
Use the ids of the last observation. The episode ends when the page has its answer."""

_BEGIN = """
([seed, mode, time]) => {
  core.EPISODE_MAX_TIME = time;
  Math.seedrandom(seed);
  core.setDataMode(mode);
  core.startEpisodeReal();
  core.hideDisplay();
  for (const name of ['query', 'click-canvas'])
    document.getElementById(name)?.setAttribute('aria-hidden', 'true');
  const told = core.getUtterance();
  return told.utterance ?? told;
}
"""
_STATE = "() => ({done: WOB_DONE_GLOBAL, reward: WOB_RAW_REWARD_GLOBAL, ready: WOB_TASK_READY})"


class MiniWob(Browser):
    """One page. A task gives `envs = {"miniwob": {"page": "click-button", "seed": 3}}`.

    Contexts are kept from one episode to the next, and the page is loaded anew: the pages store nothing.
    """

    viewport: ClassVar[tuple[int, int]] = (500, 320)
    unnamed_clickables: ClassVar[bool] = True

    def __init__(self, executable: str | None = None, screenshots: bool = False) -> None:
        """As the browser's."""
        super().__init__(executable, screenshots)
        self.reward = 0.0
        """The page's reward, from -1 to 1, without its discount for time."""

    async def reset(  # type: ignore[override]
        self, task: Task, page: str, seed: int, mode: str = "train", screenshot: bool | None = None
    ) -> Observation:
        """`mode` is the package's `data_mode`."""
        if not (_folder() / "miniwob" / f"{page}.html").is_file():
            raise ConfigError(
                f"task {task.id!r}: MiniWoB has no page {page!r}; it has: {', '.join(pages())}"
            )
        self._begin(task, "", None, screenshot)
        self.reward = 0.0
        self.objective = await self._on_host(self._start_page(page, seed, mode))
        return await self._observed("None")

    async def _start_page(self, page: str, seed: int, mode: str) -> str:
        assert self._host is not None
        session = self._session
        if session is None or not session.is_alive:
            await self._leave()
            self._session = session = BrowserSession(
                self._host, NetworkPolicy((), ((HOST, str(_folder())),))
            )
            await session.start(self.executable, self._context_options())
        else:
            await session.forget()
        try:
            status = await session.open(f"http://{HOST}/miniwob/{page}.html")
            if status != 200:
                raise ActionProblem(f"status {status}; {'; '.join(session.notices)}")
            objective = str(await session.evaluate(_BEGIN, [seed, mode, EPISODE_MS]))
            await session.settle()
        except (ActionProblem, Notice) as error:
            raise InfraError(Boundary.ENV, f"MiniWoB's page {page!r} did not start: {error}") from error
        return objective

    async def _after(self, action: str, problem: str = "") -> Step:
        state = await self._on_host(self._state())
        if state["done"]:
            self.is_over, self.reward = True, float(state["reward"])
            return Step(OVER, self.reward, terminated=True)
        return Step(await self._observed(action, problem), 0.0)

    async def _observed(self, action: str, problem: str = "") -> Observation:
        """These pages do not hang or crash of their own accord, so that one that does is our failure."""
        seen = await super()._observed(action, problem)
        if self._open_session().is_stuck:
            message = f"MiniWoB's page for {self.objective!r} does not respond, or has crashed"
            raise InfraError(Boundary.ENV, message, retriable=False, replay=True, kind="BrowserLost")
        return seen

    async def _state(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = await self._open_session().evaluate(_STATE)
            return found
        except (ActionProblem, Notice):  # another page, by goto or a link
            return {"done": False, "reward": 0.0}

    async def _stop(self, answer: str) -> Step:
        self.answer, self.is_over = answer, True
        return Step(OVER, 0.0, terminated=True)

    def available_actions(self) -> list[str]:
        """Clicks, and typing of what the objective has in quotes or its last words."""
        away = ("goto", "go_back", "stop", "scroll")
        return [one for one in super().available_actions() if not one.startswith(away)] or (
            [] if self.is_over else ["scroll [down]"]
        )


@reward(name="success", weight=0.0)
async def success(env: MiniWob) -> float:
    """1 when the page paid its full reward. Only logged: the environment pays what the page does."""
    return float(env.reward >= 1.0)


def pages() -> list[str]:
    """All pages of the package; tasks may name any of them."""
    return sorted(path.stem for path in (_folder() / "miniwob").glob("*.html"))


def _folder() -> Path:
    found = importlib.util.find_spec("miniwob")  # not imported: it would want Selenium
    if found is None or found.origin is None:
        raise MissingExtraError("miniwob", "browser", "the environment miniwob")
    return Path(found.origin).parent / "html"


def training_tasks() -> list[Task]:
    """Problems of the pages that the demonstrator solves, in turn."""
    return [
        _task("train", page, FIRST_SEED + number) for number in range(TRAINING) for page in SOLUTIONS
    ]


def held_out_tasks() -> list[Task]:
    """Problems of the same pages, of seeds that no training task has."""
    return [_task("held-out", page, number) for number in range(HELD_OUT) for page in SOLUTIONS]


def _task(split: str, page: str, seed: int) -> Task:
    return Task(
        f"miniwob-{split}-{page}-{seed}",
        (Message("system", SYSTEM),),
        envs={"miniwob": {"page": page, "seed": seed}},
        metadata={"subtask": page},
    )


def expert(task: Task) -> Generator[ToolCall | None, str, None]:
    """A demonstrator that reads the objective and the tree, with a script for each page."""
    seen = yield None
    yield from SOLUTIONS[task.envs["miniwob"]["page"]](seen)


WORLD = World(
    "miniwob",
    "Small web tasks on pages of their own: buttons, forms, tables, e-mail, search.",
    env=MiniWob,
    rewards=(success,),
    training_tasks=training_tasks,
    held_out_tasks=held_out_tasks,
    expert=expert,
    extra="browser",
    packages=("playwright", "miniwob"),
    programs=(CHROMIUM,),
)
