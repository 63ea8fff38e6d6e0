"""One episode's browser: a context with its tabs, what can be done in it and what is seen of it.

All of this runs in the thread of `BrowserHost`. Pages are not trusted: every call has a deadline, and a page
that hangs, crashes or floods is answered with a notice. Only a browser that is dead or stuck, or a site of
the task that is down, is an infrastructure failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from ludus.core.failures import Boundary, InfraError
from ludus.worlds.browser.accessibility import Element, Numbers
from ludus.worlds.browser.chromium import BrowserHost, Chromium
from ludus.worlds.browser.gateway import GATEWAY_ERRORS, NetworkPolicy, is_up, origin_of
from ludus.worlds.browser.tab import ActionProblem, BrowserAction, Notice, Tab

if TYPE_CHECKING:
    from playwright.async_api import Dialog, Page, Request, Response

T = TypeVar("T")

LOAD_SECONDS = 10.0
"""For a page to load, after an action or a goto."""
ACTION_SECONDS = 15.0
OBSERVE_SECONDS = 8.0
TITLE_SECONDS = 2.0
WINDOW_SECONDS = 3.0
"""For the tab of a window that a page has opened."""
MOST_TABS = 10
MOST_DIALOGS = 20
"""Of one action; a page that opens more is closed."""
_HUNG = "The page does not respond. Go to another address, or close the tab."
_CRASHED = "The page has crashed. Go to another address, or close the tab."


@dataclass(frozen=True, slots=True)
class BrowserView:
    """View of a browser at one moment."""

    text: str
    url: str
    tabs: str
    elements: Mapping[int, Element]


class BrowserSession:
    """The tabs of one episode. `start` opens the first, `close` ends them all."""

    def __init__(self, host: BrowserHost, policy: NetworkPolicy) -> None:
        self.host, self.policy = host, policy
        self.notices: list[str] = []
        """Events since the last view: dialogs, popups, failed loads."""
        self._chromium: Chromium | None = None
        self._context: Any = None
        self._tabs: list[Tab] = []
        self._current: Tab | None = None
        self._numbers, self._count = Numbers(), count()
        self._clipboard = ""
        self._dialogs = 0
        self._status = 0
        self._unanswered: list[tuple[str, str]] = []
        """Navigations to sites of the task that did not get a page, and why."""
        self._checked = time.monotonic()
        """When `check_sites` last looked at them."""
        self._finds = asyncio.Event()
        self._found = 0
        """Pages that were opened, by us or by pages."""
        self._is_hiding = False
        """Whether the page that is being opened is none of the agent's."""
        self._background: set[asyncio.Task[None]] = set()

    # Life -------------------------------------------------------------------------------------------

    async def start(self, executable: str | None, options: dict[str, Any]) -> None:
        self._chromium, self._context = await self.host.new_context(self.policy, executable, options)
        self._context.on("page", self._found_page)
        self._context.on("response", self._note_response)
        self._context.on("requestfailed", self._note_failed_request)
        await self.guarded(self._open_tab())

    async def close(self) -> None:
        chromium, context, self._chromium, self._context = self._chromium, self._context, None, None
        self._tabs, self._current = [], None
        if chromium is not None and context is not None:
            await self.host.close_context(self.policy, chromium, context)

    @property
    def is_alive(self) -> bool:
        return self._chromium is not None and self._chromium.is_alive

    @property
    def tab(self) -> Tab:
        """The current one."""
        if self._current is None:
            raise Notice("There is no tab.")
        return self._current

    @property
    def is_stuck(self) -> bool:
        """Whether the current page hangs or has crashed."""
        return self._current is not None and (self._current.hangs or self._current.has_crashed)

    async def forget(self) -> None:
        """Back to one tab and numbers from 1, for another episode in the same context."""
        for tab in self._tabs[1:]:
            await self.guarded(tab.page.close())
        await self._need_tab()
        self._current, self._numbers, self._count = self._tabs[0], Numbers(), count()
        self._current.number, self._clipboard = next(self._count), ""
        self.notices = []

    # Acting -----------------------------------------------------------------------------------------

    async def act(self, action: BrowserAction) -> None:
        """Do it and wait for the page; `ActionProblem` or `Notice` where it cannot be done."""
        try:
            await self._act(action)
        except (ActionProblem, Notice):
            await self.check_sites()
            raise
        await self.check_sites()

    async def _act(self, action: BrowserAction) -> None:
        self._dialogs = 0
        await self._need_tab()
        before, tab = set(self._tabs), self.tab
        windows, found = tab.windows, self._found
        await self.guarded(self._do(action))
        await self.settle()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WINDOW_SECONDS):
                while self._found - found < tab.windows - windows:
                    self._finds.clear()
                    await self._finds.wait()
        opened = [tab for tab in self._tabs if tab not in before]
        if opened and action.name in ("click", "press", "type"):
            self._current = opened[-1]  # as a browser shows what a click has opened
            await self.settle()

    async def open(self, url: str) -> int:
        """Open a start page; the status that its site answered with, 0 where it did not."""
        await self.guarded(self._goto(url))
        self._unanswered, self._checked = [], time.monotonic()  # the caller's to tell
        return self._status

    async def check_sites(self) -> None:
        """Raise an `InfraError` where a navigation failed because a site of the task is down.

        A site that could not be connected to is down. One that answered with a gateway error, or broke off, may
        do so for that page alone: it is down if its root does not answer either.
        """
        unanswered, since = self._unanswered, self._checked
        self._unanswered, self._checked = [], time.monotonic()
        assert self._chromium is not None, "the session is closed"
        gateway = self.host.gateway_of(self.policy)
        for url, how in unanswered:
            if gateway.was_unreached(url, since) or not await is_up(url):
                message = f"the site {origin_of(url)} is down: {url[:200]}: {how}"
                raise InfraError(Boundary.ENV, message, retriable=False, replay=True, kind="SiteDown")

    async def _do(self, action: BrowserAction) -> None:
        tab = self.tab
        match action.name:
            case "click":
                await tab.click(action.element)
            case "hover":
                await tab.hover(action.element)
            case "type":
                await tab.type(action.element, action.text, presses_enter=action.presses_enter)
            case "press":
                self._clipboard = await tab.press(action.text, self._clipboard)
            case "scroll":
                await tab.scroll(1 if action.text == "down" else -1)
            case "goto":
                await self._goto(action.text)
            case "new_tab":
                await self._open_tab()
            case "tab_focus":
                if action.element >= len(self._tabs):
                    raise ActionProblem(
                        f"There is no tab {action.element}; the last one is {len(self._tabs) - 1}."
                    )
                self._current = self._tabs[action.element]
                await self._current.page.bring_to_front()
            case "close_tab":
                await tab.page.close()
                await self._need_tab()
            case "go_back":
                await self._travel(tab.page.go_back)
            case "go_forward":
                await self._travel(tab.page.go_forward)
            case "stop":
                pass

    async def _goto(self, url: str) -> None:
        from playwright.async_api import Error

        self._status = 0
        if not self.policy.allows(url):
            raise ActionProblem(
                f"{url[:200]} was not opened: it is not allowed here. Allowed are: {self.policy.described()}"
            )
        if self.tab.has_crashed or self.tab.hangs:
            await self._replace_tab()
        try:
            response = await self.tab.page.goto(url, wait_until="load", timeout=1000 * LOAD_SECONDS)
            self._status = response.status if response is not None else 200
        except Error as error:
            self.notices.append(f"{url[:200]}: {_first_line(error)}")
            if self.policy.names_site(url):
                self._unanswered.append((url, _first_line(error)))

    async def _travel(self, way: Callable[..., Awaitable[Any]]) -> None:
        from playwright.async_api import Error

        try:
            await way(timeout=1000 * LOAD_SECONDS, wait_until="load")
        except Error as error:
            self.notices.append(_first_line(error))

    async def _open_tab(self) -> None:
        if len(self._tabs) >= MOST_TABS:
            raise ActionProblem(f"There are {MOST_TABS} tabs already; close one first.")
        self._current = self._adopt(await self._context.new_page())

    async def _need_tab(self) -> None:
        """Pages may close themselves; a browser has a tab."""
        if self._current is None:
            await self.guarded(self._open_tab())

    async def _replace_tab(self) -> None:
        """A page that crashed or hangs goes nowhere any more: another one takes its place."""
        lost = self.tab
        new = self._adopt(await self._context.new_page(), keep=True)
        self._tabs.remove(new)
        self._tabs[self._tabs.index(lost)] = new
        self._current = new
        self._later(lost.page.close())

    # Seeing -----------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Wait until the page has loaded and stopped changing, within limits."""
        end = time.monotonic() + LOAD_SECONDS
        while time.monotonic() < end and self._current is not None:
            tab = self._current
            if tab.has_crashed:
                return
            try:
                await self.guarded(tab.wait_until_quiet(), OBSERVE_SECONDS)
            except Notice:
                return  # it hangs: looking at it will say so
            except ActionProblem:
                await asyncio.sleep(0.02)  # it is going to another page
                continue
            if not tab.requests:
                return
            await asyncio.sleep(0.02)
        for request in list(self._current.requests) if self._current is not None else ():
            self._note_unanswered(request, f"no answer within {LOAD_SECONDS:g} seconds")

    async def view(
        self, *, in_view: bool, unnamed_clickables: bool, most_characters: int
    ) -> BrowserView:
        """The current page as text, and the elements that it numbers."""
        await self._need_tab()
        tab = self.tab
        tab.elements = {}
        if tab.has_crashed or tab.hangs:
            text = _CRASHED if tab.has_crashed else _HUNG
        else:
            looked = tab.tree(
                self._numbers,
                in_view=in_view,
                unnamed_clickables=unnamed_clickables,
                most_characters=most_characters,
            )
            try:
                text = await self.guarded(looked, OBSERVE_SECONDS)
            except (Notice, ActionProblem) as error:
                text = str(error)
        tabs = await self._tab_line()
        notices, self.notices = "".join(f"NOTICE: {one}\n" for one in self.notices[:10]), []
        return BrowserView(notices + text, tab.page.url[:2000], tabs, tab.elements)

    async def _tab_line(self) -> str:
        """`Tab 0: Shop | Tab 1 (current): Cart`."""
        tabs = list(self._tabs)
        titles = await asyncio.gather(*(self._title(tab) for tab in tabs))
        return " | ".join(
            f"Tab {index}{' (current)' if tab is self._current else ''}: {title}"
            for index, (tab, title) in enumerate(zip(tabs, titles, strict=True))
        )

    async def _title(self, tab: Tab) -> str:
        if not (tab.has_crashed or tab.hangs):
            with contextlib.suppress(Notice, ActionProblem):
                return await self.guarded(tab.title(), TITLE_SECONDS, tab)
        return "(not responding)"

    async def screenshot(self) -> bytes | None:
        """The window as PNG; None where the page does not answer."""
        with contextlib.suppress(Notice, ActionProblem):
            picture: bytes = await self.guarded(self.tab.page.screenshot(timeout=1000 * OBSERVE_SECONDS))
            return picture
        return None

    async def evaluate(self, expression: str, *arguments: Any) -> Any:
        """Run JavaScript in the page's own world, as its author: for pages that are trusted."""
        return await self.guarded(self.tab.page.evaluate(expression, *arguments))

    async def hidden_page(self) -> Page:
        """Another page of the same context, which the agent does not see."""
        self._is_hiding = True
        try:
            page: Page = await self.guarded(self._context.new_page())
        finally:
            self._is_hiding = False
        return page

    # What pages do of their own accord ----------------------------------------------------------------

    def _found_page(self, page: Page) -> None:
        self._found += 1
        self._finds.set()
        if not self._is_hiding:
            self._adopt(page)

    def _note_response(self, response: Response) -> None:
        if response.status in GATEWAY_ERRORS:
            self._note_unanswered(response.request, f"status {response.status}")

    def _note_failed_request(self, request: Request) -> None:
        if request.failure != "net::ERR_ABORTED":  # as when the page, or the agent, went elsewhere
            self._note_unanswered(request, str(request.failure))

    def _note_unanswered(self, request: Request, how: str) -> None:
        """Note it if it was to be the page of a tab, from a site of the task."""
        from playwright.async_api import Error

        if request.is_navigation_request() and self.policy.names_site(request.url):
            with contextlib.suppress(Error):  # a frame that is gone, or not there yet: of a new tab
                if request.frame.parent_frame is not None:
                    return
            self._unanswered.append((request.url, how))

    def _adopt(self, page: Page, *, keep: bool = False) -> Tab:
        """A tab that we or a page opened; one too many is closed, unless we opened it."""
        for tab in self._tabs:
            if tab.page is page:
                return tab
        tab = Tab(self._context, page, next(self._count), dict(self.policy.folders))
        page.on("dialog", lambda dialog: self._answer_dialog(tab, dialog))
        page.on("close", lambda _: self._drop(tab))
        if len(self._tabs) >= MOST_TABS and not keep:
            self.notices.append(f"A popup was closed: there are {MOST_TABS} tabs already.")
            self._later(page.close())
        else:
            self._tabs.append(tab)
        return tab

    def _drop(self, tab: Tab) -> None:
        if tab in self._tabs:
            self._tabs.remove(tab)
        if self._current is tab:
            self._current = self._tabs[-1] if self._tabs else None

    def _answer_dialog(self, tab: Tab, dialog: Dialog) -> None:
        """Allow leaving a page; dismiss all other dialogs, with a notice for the model."""
        self._dialogs += 1
        if self._dialogs > MOST_DIALOGS:
            if self._dialogs == MOST_DIALOGS + 1:
                self.notices.append("The page went on opening dialogs and was closed.")
                self._later(tab.page.close())
            return
        if dialog.type == "beforeunload":
            self._later(dialog.accept())
            return
        if self._dialogs <= 3:
            told = " ".join(dialog.message[:300].split())
            self.notices.append(
                f"The page showed a dialog ({dialog.type}), which was dismissed: {told!r}"
            )
        self._later(dialog.dismiss())

    def _later(self, work: Awaitable[Any]) -> None:
        async def done() -> None:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(OBSERVE_SECONDS):
                    await work

        task = asyncio.get_running_loop().create_task(done())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # Calls --------------------------------------------------------------------------------------------

    async def guarded(
        self, work: Awaitable[T], seconds: float = ACTION_SECONDS, tab: Tab | None = None
    ) -> T:
        """Await a call within its deadline; tell what is the page's doing from a browser that is lost."""
        from playwright.async_api import Error

        chromium, tab = self._chromium, tab or self._current
        assert chromium is not None, "the session is closed"
        try:
            async with asyncio.timeout(seconds):
                found = await work
        except TimeoutError as error:
            if not await chromium.answers():
                raise await self.host.lost(chromium, error) from error
            if tab is not None:
                tab.hangs = True
            raise Notice(_HUNG) from error
        except (Error, ActionProblem) as error:
            # a browser, or its driver, that has just died is known by its silence; errors have many texts
            if not chromium.is_alive or not await chromium.answers():
                raise await self.host.lost(chromium, error) from error
            if isinstance(error, ActionProblem):
                raise
            if tab is not None and tab.has_crashed:
                raise Notice(_CRASHED) from error
            raise ActionProblem(f"That could not be done: {_first_line(error)}") from error
        if tab is not None:
            tab.hangs = False
        if not chromium.is_alive:
            raise await self.host.lost(chromium, RuntimeError("it is not there any more"))
        return found


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:300]
