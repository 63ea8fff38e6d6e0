"""A web browser: Chromium by Playwright, seen and used as in WebArena (extra: browser; needs Chromium).

Zhou et al., "WebArena" (2024): the page as an accessibility tree with numbered elements, actions in text,
tabs, a calculator and a scratchpad on a homepage, and evaluators of the answer, the last address and the
contents of pages. One text action, not a tool for each: that is what the paper's prompts, AgentGym's
trajectories and published policies write, and it fits every action format.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from ludus.core.failures import Boundary, ConfigError, InfraError
from ludus.core.messages import Media
from ludus.core.task import Task
from ludus.envs.env import OVER, Env, Observation, Step
from ludus.envs.world import World
from ludus.rewards import reward
from ludus.worlds.browser.accessibility import Element, offered_actions
from ludus.worlds.browser.chromium import CHROMIUM, BrowserHost, acquire_host, release_host
from ludus.worlds.browser.gateway import GATEWAY_ERRORS, NetworkPolicy, origin_of
from ludus.worlds.browser.session import BrowserSession, BrowserView
from ludus.worlds.browser.tab import ActionProblem, BrowserAction, Notice, parse_action
from ludus.worlds.browser.tasks import HOMEPAGE, SYSTEM, SeenPage, expert, held_out_tasks, training_tasks
from ludus.worlds.browser.webarena import (
    SITES,
    MissingJudgeError,
    PageProblem,
    evaluate,
    needs_judge,
    webarena_tasks,
)

__all__ = [
    "SYSTEM",
    "Browser",
    "MissingJudgeError",
    "SeenPage",
    "expert",
    "held_out_tasks",
    "success",
    "training_tasks",
    "webarena_tasks",
]

T = TypeVar("T")
_HOMEPAGE_FOLDER = ("homepage.com", str(Path(__file__).parent / "homepage"))
_MOST_ACTIONS = 100


class Browser(Env):
    """One episode's browser context. A task gives `envs = {"browser": {"url": "http://localhost:8000"}}`.

    Subclass it to give it a judge.
    """

    viewport: ClassVar[tuple[int, int]] = (1280, 720)
    unnamed_clickables: ClassVar[bool] = False
    """Whether elements without role or name are listed where the page listens for clicks on them."""
    folders: ClassVar[tuple[tuple[str, str], ...]] = (_HOMEPAGE_FOLDER,)
    """Hosts that are folders on this machine."""

    def __init__(
        self,
        executable: str | None = None,
        screenshots: bool = False,
        in_view: bool = True,
        most_characters: int = 12_000,
    ) -> None:
        """In a recipe, `[agent.pools.browser] options`.

        `executable` is Chromium's path; when left out, that of LUDUS_CHROMIUM, or the first on the path. With
        `screenshots` an observation has a picture of the window, too. `in_view` lists only what is in the
        window, as WebArena does, else the whole page. `most_characters` bounds the tree in an observation.
        """
        self.executable, self.screenshots = executable, screenshots
        self.in_view, self.most_characters = in_view, most_characters
        self.answer: str | None = None
        """The argument of `stop`."""
        self.objective = ""
        self.url = ""
        """The address of the current tab."""
        self.is_over = False
        self._task = ""
        self._score: float | None = None
        self._evaluation: Mapping[str, Any] | None = None
        self._names: dict[str, str] = {}
        self._elements: Mapping[int, Element] = {}
        self._host: BrowserHost | None = None
        self._session: BrowserSession | None = None
        self._with_screenshot = False

    async def reset(
        self,
        task: Task,
        url: str | Sequence[str] = HOMEPAGE,
        objective: str = "",
        allowed: Sequence[str] = (),
        evaluation: Mapping[str, Any] | None = None,
        screenshot: bool | None = None,
        names: Mapping[str, str] | None = None,
        storage_state: str | None = None,
        geolocation: Mapping[str, float] | None = None,
    ) -> Observation:
        """`url` is opened, several in tabs. Pages reach its origins and those `allowed` ("*": all public ones).

        `evaluation` is WebArena's `eval`. `names` has addresses under other names. `storage_state` is a file of
        cookies and local storage, as Playwright writes it.
        """
        if evaluation is not None and needs_judge(evaluation) and type(self).judge is Browser.judge:
            raise MissingJudgeError(task.id)
        starts = [url] if isinstance(url, str) else list(url)
        origins = dict.fromkeys([*map(origin_of, starts), *allowed])
        own = {f"http://{host}" for host, _ in self.folders}
        policy = NetworkPolicy(tuple(one for one in origins if one not in own), self.folders)
        options = self._context_options()
        if storage_state is not None:
            options["storage_state"] = _state_file(storage_state, task.id)
        if geolocation is not None:
            options |= {"geolocation": dict(geolocation), "permissions": ["geolocation"]}
        self._begin(task, objective, evaluation, screenshot)
        self._names = dict(names or {})
        await self._on_host(self._start(policy, options, starts))
        seen = await self._observed("None")
        if self._open_session().is_stuck:
            raise self._site_failure(self.url, "it does not respond, or has crashed")
        return seen

    async def step(self, action: str) -> Step:
        """Use the browser.

        Args:
            action: One of: click [id]; type [id] [content] [0 or 1] (1: press Enter after); hover [id]; press
                [key_comb]; scroll [down]; scroll [up]; new_tab; tab_focus [tab_index]; close_tab; goto [url];
                go_back; go_forward; stop [answer]. Ids are those in brackets in the last observation.
        """
        if self.is_over:
            return Step(OVER, terminated=True)
        problem = ""
        try:
            parsed = parse_action(action)
            if parsed.name == "stop":
                return await self._stop(parsed.text)
            await self._on_host(self._open_session().act(self._with_real_address(parsed)))
        except (ActionProblem, Notice) as error:
            problem = str(error)
        return await self._after(action, problem)

    def available_actions(self) -> list[str]:
        """Actions on what is shown; texts to type are those in quotes in the objective, or its words."""
        if self.is_over:
            return []
        texts = (
            re.findall(r'["“]([^"”]+)["”]', self.objective) or re.findall(r"\w+", self.objective)[-5:]
        )
        moves = [f"goto [{HOMEPAGE}]", "scroll [down]", "scroll [up]", "go_back", "stop []"]
        return offered_actions(self._elements.values(), texts[:5], _MOST_ACTIONS - len(moves)) + moves

    async def score(self) -> float | None:
        """What WebArena's evaluators give, 0 or 1; None where the task has none. An episode that was not
        stopped is judged as if it had been, without an answer."""
        if self._score is None and self._evaluation is not None:
            self._score = await self._on_host(self._judged(self._evaluation))
        return self._score

    async def judge(
        self, kind: Literal["fuzzy", "unachievable"], objective: str, reference: str, answer: str
    ) -> float:
        """For `fuzzy_match` of WebArena's tasks: 1 or 0. Write it in a subclass; it asks a language model.

        "fuzzy": whether the answer means what the reference says. "unachievable": whether it gives the reason
        in the reference why the objective cannot be reached.
        """
        raise MissingJudgeError(self._task)

    async def render(self) -> bytes | str:
        """A picture of the window (PNG)."""
        return await self._on_host(self._open_session().screenshot()) or "The page does not respond."

    def is_healthy(self) -> bool:
        return self._session is None or self._session.is_alive

    def close(self) -> None:
        host, session, self._host, self._session = self._host, self._session, None, None
        if host is None:
            return
        try:
            if session is not None:
                host.wait_for(session.close())
        finally:
            release_host(host)

    # For subclasses -----------------------------------------------------------------------------------

    def _begin(
        self, task: Task, objective: str, evaluation: Mapping[str, Any] | None, screenshot: bool | None
    ) -> None:
        own = [one.content for one in task.messages if one.role == "user"]
        self.objective = objective or (own[-1] if own else "")
        self.answer, self.is_over = None, False
        self._task, self._score, self._evaluation = task.id, None, evaluation
        self._with_screenshot = self.screenshots if screenshot is None else screenshot
        if self._host is None:
            self._host = acquire_host()

    def _context_options(self) -> dict[str, Any]:
        """Settings of a context that would otherwise be the machine's."""
        width, height = self.viewport
        return {"viewport": {"width": width, "height": height}, "locale": "en-US", "timezone_id": "UTC"}

    async def _on_host(self, work: Coroutine[Any, Any, T]) -> T:
        assert self._host is not None, "reset comes first"
        return await self._host.run(work)

    async def _start(
        self, policy: NetworkPolicy, options: dict[str, Any], starts: Sequence[str]
    ) -> None:
        """A context with nothing of the last episode in it, and its start pages."""
        await self._leave()
        assert self._host is not None
        self._session = session = BrowserSession(self._host, policy)
        await session.start(self.executable, options)
        for index, url in enumerate(starts):
            if index:
                await session.act(BrowserAction("new_tab"))
            try:
                status = await session.open(url)
                await session.settle()
            except ActionProblem as error:
                raise ConfigError(f"task {self._task!r}: {error}") from error
            except Notice as error:
                raise self._site_failure(url, str(error)) from error
            if status == 0 or status in GATEWAY_ERRORS:
                raise self._site_failure(
                    url, f"status {status}" if status else "; ".join(session.notices)
                )
        if len(starts) > 1:
            await session.act(BrowserAction("tab_focus", element=0))

    def _site_failure(self, url: str, how: str) -> InfraError:
        message = f"the start page {url} of task {self._task!r} did not load: {how}"
        return InfraError(Boundary.ENV, message, kind="SiteDown")

    async def _leave(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _after(self, action: str, problem: str = "") -> Step:
        return Step(await self._observed(action, problem))

    async def _stop(self, answer: str) -> Step:
        self.answer, self.is_over = answer, True
        await self.score()
        return Step(OVER, terminated=True)

    async def _observed(self, action: str, problem: str = "") -> Observation:
        view, picture = await self._on_host(self._look())
        self._elements, self.url = view.elements, view.url
        notice = f"NOTICE: {problem}\n" if problem else ""
        text = (
            f"OBSERVATION:\n{notice}{view.tabs}\n\n{view.text}\nURL: {self._shown_address(view.url)}\n"
            f"OBJECTIVE: {self.objective}\nPREVIOUS ACTION: {action[:200]}"
        )
        if picture is None:
            return Observation(text)
        return Observation(text, (Media("image", hashlib.sha256(picture).hexdigest(), picture),))

    async def _look(self) -> tuple[BrowserView, bytes | None]:
        session = self._open_session()
        view = await session.view(
            in_view=self.in_view,
            unnamed_clickables=self.unnamed_clickables,
            most_characters=self.most_characters,
        )
        return view, await session.screenshot() if self._with_screenshot else None

    def _open_session(self) -> BrowserSession:
        assert self._session is not None, "reset comes first"
        return self._session

    # Addresses ----------------------------------------------------------------------------------------

    def _with_real_address(self, action: BrowserAction) -> BrowserAction:
        if action.name != "goto":
            return action
        url = action.text.strip().strip("'\"")
        if not re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*:", url) or re.match(r"[\w.-]+:\d", url):
            url = f"http://{url}"
        for real, shown in self._names.items():
            if url.startswith((shown, shown.replace("http://", "https://"))):
                url = real + url.split("://", 1)[1].removeprefix(shown.split("://", 1)[1])
                break
        return BrowserAction("goto", text=url)

    def _shown_address(self, url: str) -> str:
        for real, shown in self._names.items():
            if url.startswith(real):
                return shown + url.removeprefix(real)
        return url

    # Judging ------------------------------------------------------------------------------------------

    async def _judged(self, evaluation: Mapping[str, Any]) -> float:
        page = _JudgedPage(self._open_session())
        by_name = {shown: real for real, shown in self._names.items()}
        sites = {name: by_name[shown] for name, shown in SITES.items() if shown in by_name}
        try:
            return await evaluate(
                evaluation,
                self.answer or "",
                page,
                task=self._task,
                objective=self.objective,
                judge=self.judge,
                sites=sites,
            )
        finally:
            await page.close()


def _state_file(path: str, task: str) -> str:
    if not Path(path).is_file():
        raise ConfigError(f"task {task!r}: there is no file {path} (storage_state)")
    return path


class _JudgedPage:
    """The page that an episode ended on, until the evaluator goes elsewhere: in a tab of its own."""

    def __init__(self, session: BrowserSession) -> None:
        self._session = session
        self._own: Any = None

    async def url(self) -> str:
        return str((self._own or self._session.tab.page).url)

    async def goto(self, url: str) -> None:
        if self._own is None:
            self._own = await self._session.hidden_page()
        try:
            answer = await self._session.guarded(self._own.goto(url, wait_until="load", timeout=10_000))
        except (Notice, ActionProblem) as error:
            await self._check_sites(url)
            raise PageProblem(str(error)) from error
        if answer is not None and answer.status in GATEWAY_ERRORS:
            await self._check_sites(url)
            raise PageProblem(f"status {answer.status}")
        await asyncio.sleep(0.2)  # scripts that fill the page; the original sleeps for 3 seconds

    async def _check_sites(self, url: str) -> None:
        try:
            await self._session.check_sites()
        except InfraError as error:
            message = f"the evaluator could not open {url}: {error}"
            raise InfraError(Boundary.REWARD, message, kind=error.kind) from error

    async def content(self) -> str:
        try:
            return str(await self._session.guarded((self._own or self._session.tab.page).content()))
        except (Notice, ActionProblem):
            return ""

    async def evaluate(self, expression: str) -> Any:
        try:
            return await self._session.guarded(
                (self._own or self._session.tab.page).evaluate(expression)
            )
        except (Notice, ActionProblem) as error:
            raise PageProblem(str(error)) from error

    async def close(self) -> None:
        if self._own is not None:
            with contextlib.suppress(Notice, ActionProblem):
                await self._session.guarded(self._own.close())


@reward(name="success")
async def success(env: Browser) -> float:
    """WebArena's score: 1 when all evaluators of the task are satisfied."""
    return await env.score() or 0.0


WORLD = World(
    "browser",
    "Use a web browser as in WebArena: pages as accessibility trees, tabs, any start URL.",
    env=Browser,
    rewards=(success,),
    training_tasks=training_tasks,
    held_out_tasks=held_out_tasks,
    expert=expert,
    extra="browser",
    packages=("playwright",),
    programs=(CHROMIUM,),
    max_turns=15,
)
