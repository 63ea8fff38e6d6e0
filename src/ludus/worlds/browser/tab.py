"""WebArena's actions as text, and a tab: one page, how its elements are used and how it is read.

Scripts of Ludus run in an isolated world, where a page cannot have replaced what they use. Nothing here has a
deadline: `BrowserSession.guarded` gives each call its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from ludus.worlds.browser.accessibility import Element, Numbers, layout_of, page_tree

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext, CDPSession, Frame, Page, Request


ActionName = Literal[
    "click", "type", "hover", "press", "scroll", "new_tab", "tab_focus", "close_tab", "goto", "go_back",
    "go_forward", "stop",
]  # fmt: skip
FORMS: dict[ActionName, str] = {
    "click": "click [id]",
    "type": "type [id] [content] [0 or 1]",
    "hover": "hover [id]",
    "press": "press [key_comb]",
    "scroll": "scroll [down] or scroll [up]",
    "new_tab": "new_tab",
    "tab_focus": "tab_focus [tab_index]",
    "close_tab": "close_tab",
    "goto": "goto [url]",
    "go_back": "go_back",
    "go_forward": "go_forward",
    "stop": "stop [answer]",
}
"""How each action is written."""
MOST_TEXT = 20_000
"""Characters of an action."""

_PATTERNS: dict[ActionName, re.Pattern[str]] = {
    "click": re.compile(r"click ?\[(\d{1,9})\]"),
    "hover": re.compile(r"hover ?\[(\d{1,9})\]"),
    "type": re.compile(r"type ?\[(\d{1,9})\] ?\[(.+)\] ?\[([01])\]", re.DOTALL),
    "press": re.compile(r"press ?\[(.+)\]"),
    "scroll": re.compile(r"scroll ?\[?(up|down)\]?"),
    "tab_focus": re.compile(r"tab_focus ?\[(\d{1,9})\]"),
    "goto": re.compile(r"goto ?\[(.+)\]"),
    "stop": re.compile(r"stop ?\[(.+)\]", re.DOTALL),
}
_FENCE = re.compile(r"```(.+?)```", re.DOTALL)
_KEYS = {
    "ctrl": "Control", "control": "Control", "meta": "Control", "cmd": "Control", "command": "Control",
    "alt": "Alt", "option": "Alt", "shift": "Shift", "enter": "Enter", "return": "Enter", "esc": "Escape",
    "escape": "Escape", "tab": "Tab", "space": "Space", "backspace": "Backspace", "delete": "Delete",
    "del": "Delete", "insert": "Insert", "home": "Home", "end": "End", "pageup": "PageUp",
    "pagedown": "PageDown", "up": "ArrowUp", "down": "ArrowDown", "left": "ArrowLeft", "right": "ArrowRight",
    "arrowup": "ArrowUp", "arrowdown": "ArrowDown", "arrowleft": "ArrowLeft", "arrowright": "ArrowRight",
}  # fmt: skip
"""Names of keys as people write them; Meta is Control, as in the original where there is no Mac."""


class ActionProblem(ValueError):
    """The text is no action; the message is for the model."""


@dataclass(frozen=True, slots=True)
class BrowserAction:
    """An action. `text` is the content, the keys, the address, the direction or the answer."""

    name: ActionName
    element: int = -1
    """The element of click, hover and type; the tab of tab_focus."""
    text: str = ""
    presses_enter: bool = False


def parse_action(written: str) -> BrowserAction:
    """The action that a text holds; in a fence of three backticks, as the original's prompts ask, or bare."""
    if len(written) > MOST_TEXT:
        raise ActionProblem(f"An action has {MOST_TEXT} characters at most.")
    fenced = _FENCE.search(written)
    text = (fenced.group(1) if fenced else written).strip()
    given = (text.split("[")[0] if "[" in text else (text.split() or [""])[0]).strip()
    name = next((one for one in FORMS if one == given), None)
    if name is None:
        raise ActionProblem(
            f"Invalid action {text[:100]!r}. The actions are: {'; '.join(FORMS.values())}."
        )
    if name == "type" and not text.endswith(("[0]", "[1]")):
        text += " [1]"
    if name not in _PATTERNS:
        return BrowserAction(name)
    match = _PATTERNS[name].search(text)
    if match is None:
        if name == "stop":  # some tasks ask for no answer
            return BrowserAction("stop")
        raise ActionProblem(f"Invalid {name} action {text[:100]!r}. It is written {FORMS[name]}.")
    if name in ("click", "hover", "tab_focus"):
        return BrowserAction(name, element=int(match.group(1)))
    if name == "type":
        return BrowserAction(name, int(match.group(1)), match.group(2), match.group(3) == "1")
    return BrowserAction(name, text=match.group(1).strip())


def key_combination(written: str) -> str:
    """Keys in Playwright's names: `Ctrl+v` is `Control+v`."""
    plus = written.endswith("++") or written == "+"
    parts = [
        part.strip() for part in written.removesuffix("+" if plus else "").split("+") if part.strip()
    ]
    parts += ["+"] if plus else []
    if not parts or any(len(part) > 20 for part in parts):
        raise ActionProblem(f"Invalid keys {written[:100]!r}. Write them as in Ctrl+v or Enter.")
    return "+".join(_KEYS.get(part.lower(), part) for part in parts)


QUIET_MS = 50
"""A page in which nothing has changed for so long is looked at."""
RESTLESS_MS = 1000
"""A page that goes on changing is looked at after so long."""
MOST_ELEMENTS = 30_000
MOST_CHARACTERS = 3_000_000
"""Of a page whose tree is listed."""
TYPED_BY_KEYS = 500
"""Characters; a longer text is inserted at once."""
_WAITED_FOR = frozenset(("document", "xhr", "fetch", "script", "stylesheet"))
_COPY = ("Control+c", "Control+C", "Control+Insert")
_CUT = ("Control+x", "Control+X")
_PASTE = ("Control+v", "Control+V", "Shift+Insert")

_SETTLE = """
(quiet, most) => new Promise(done => {
  const start = performance.now(); let last = start;
  const watch = new MutationObserver(() => { last = performance.now(); });
  watch.observe(document, {subtree: true, childList: true, attributes: true, characterData: true});
  const check = () => {
    const now = performance.now();
    const moving = document.getAnimations().some(one => one.playState === 'running' &&
      isFinite(one.effect?.getComputedTiming().endTime ?? Infinity));
    if (now - start > most || (!moving && now - last >= quiet && document.readyState !== 'loading')) {
      watch.disconnect(); done(true);
    } else setTimeout(check, 10);
  };
  setTimeout(check, 10);
})
"""
_FACTS = """
() => ({
  title: document.title.slice(0, 200),
  elements: document.getElementsByTagName('*').length,
  characters: (document.documentElement?.textContent ?? '').length,
  width: innerWidth, height: innerHeight,
})
"""
_TITLE = "() => document.title.slice(0, 200)"
_SCROLL = """
way => { const one = document.scrollingElement || document.body; one.scrollTop += way * innerHeight; }
"""
_SELECTION = """
() => {
  const one = document.activeElement;
  const isField = one && one.selectionStart != null;
  const text = isField ? one.value.slice(one.selectionStart, one.selectionEnd) : String(getSelection());
  return text.slice(0, 20000);
}
"""
_BEGINNING = "most => (document.body?.textContent ?? '').slice(0, most).replace(/\\s+/g, ' ')"
_UNCOVERED = """
function () {
  const one = this.nodeType === 3 ? this.parentElement : this;
  const range = document.createRange();
  range.selectNode(this);
  const box = (this.nodeType === 3 ? range : one).getClientRects()[0];
  const places = [[.5, .5], [.5, .2], [.5, .8], [.2, .5], [.8, .5], [.1, .1], [.9, .1], [.1, .9], [.9, .9]];
  for (const [x, y] of places) {
    const hit = document.elementFromPoint(box.left + x * box.width, box.top + y * box.height);
    if (hit && one.contains(hit)) return [x, y];
  }
  return [.5, .5];
}
"""
_CHOOSE = """
function () {
  const list = this.closest && this.closest('select');
  if (!list || this.disabled || list.disabled) return false;
  if (list.multiple) this.selected = !this.selected; else this.selected = true;
  list.dispatchEvent(new Event('input', {bubbles: true}));
  list.dispatchEvent(new Event('change', {bubbles: true}));
  return true;
}
"""


class Notice(Exception):
    """An action that failed; the message is for the model."""


class Tab:
    """A page of an episode. `number` tells the episode's tabs apart."""

    def __init__(
        self, context: BrowserContext, page: Page, number: int, own_hosts: Collection[str] = ()
    ) -> None:
        """Pages of `own_hosts` are waited for with their pictures: without these, icons have no place yet."""
        self.page, self.number = page, number
        self._own_hosts = own_hosts
        self.requests: set[Request] = set()
        """Those that the page waits for."""
        self.elements: Mapping[int, Element] = {}
        """Elements by the numbers of the last view."""
        self.windows = 0
        """That it has opened; their tabs come a little later."""
        self.has_crashed = False
        self.hangs = False
        self._context = context
        self._session: CDPSession | None = None
        self._world: int | None = None
        """Our isolated world in the present document."""
        page.on("framenavigated", self._note_navigation)
        page.on("crash", lambda _: self._note_crash())
        page.on("request", self._note_request)
        page.on("requestfinished", lambda request: self.requests.discard(request))
        page.on("requestfailed", lambda request: self.requests.discard(request))

    def _note_window(self) -> None:
        self.windows += 1

    def _note_crash(self) -> None:
        self.has_crashed = True

    def _note_navigation(self, frame: Frame) -> None:
        if frame == self.page.main_frame:
            self._world = None

    def _note_request(self, request: Request) -> None:
        kind = request.resource_type
        is_own = kind == "image" and urlsplit(request.url).hostname in self._own_hosts
        if (kind in _WAITED_FOR or is_own) and len(self.requests) < 1000:
            self.requests.add(request)

    # Using it -----------------------------------------------------------------------------------------

    async def click(self, element: int) -> None:
        known = self._element(element)
        if known.role == "option" and await self._on_element(known, _CHOOSE):
            return  # of a list that the system would show in a window of its own
        await self.page.mouse.click(*await self.place_of(element))

    async def hover(self, element: int) -> None:
        await self.page.mouse.move(*await self.place_of(element))

    async def type(self, element: int, text: str, *, presses_enter: bool) -> None:
        await self.click(element)
        if len(text) <= TYPED_BY_KEYS:
            await self.page.keyboard.type(text)
        else:
            await self.page.keyboard.insert_text(text)
        if presses_enter:
            await self.page.keyboard.press("Enter")

    async def press(self, written: str, clipboard: str) -> str:
        """Press keys; what is in the clipboard afterwards.

        Chromium has one clipboard for all contexts, so that an episode would paste what another has copied:
        each episode has its own instead.
        """
        from playwright.async_api import Error

        keys, keyboard = key_combination(written), self.page.keyboard
        if keys in _PASTE:
            await keyboard.insert_text(clipboard)
            return clipboard
        if keys in (*_COPY, *_CUT):
            selected = str(await self.script(_SELECTION) or "")
            if selected and keys in _CUT:
                await keyboard.press("Backspace")
            return selected or clipboard
        try:
            await keyboard.press(keys)
        except Error as error:
            if "Unknown key" not in str(error):
                raise
            raise ActionProblem(
                f"Invalid keys {written[:100]!r}. Write them as in Ctrl+v or Enter."
            ) from error
        return clipboard

    async def scroll(self, pages: int) -> None:
        await self.script(_SCROLL, pages)

    async def place_of(self, element: int) -> tuple[float, float]:
        """Where in the window an element can be clicked on; it is scrolled into view."""
        from playwright.async_api import Error

        known = self._element(element)
        with contextlib.suppress(Error):
            await self.cdp("DOM.scrollIntoViewIfNeeded", {"backendNodeId": known.backend})
        try:
            found = await self.cdp("DOM.getContentQuads", {"backendNodeId": known.backend})
        except Error as error:
            raise ActionProblem(
                f"No matching element found: [{element}] is not on the page any more."
            ) from error
        for quad in found["quads"]:
            xs, ys = quad[0::2], quad[1::2]
            left, top, width, height = min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)
            if width > 0 and height > 0:
                across, down = await self._on_element(known, _UNCOVERED) or (0.5, 0.5)
                return left + across * width, top + down * height
        raise ActionProblem(f"The element [{element}] is not visible; nothing was done.")

    def _element(self, number: int) -> Element:
        try:
            return self.elements[number]
        except KeyError:
            raise ActionProblem(
                f"No matching element found: [{number}] is not in the last observation."
            ) from None

    async def _on_element(self, known: Element, function: str) -> Any:
        """Call a function on an element, from the isolated world; None where it is in a frame, or gone."""
        from playwright.async_api import Error

        try:
            node = {"backendNodeId": known.backend, "executionContextId": await self._isolated_world()}
            found = await self.cdp("DOM.resolveNode", node)
            call = {"objectId": found["object"]["objectId"], "functionDeclaration": function}
            result = await self.cdp("Runtime.callFunctionOn", {**call, "returnByValue": True})
        except Error:
            return None
        return None if "exceptionDetails" in result else result["result"].get("value")

    # Looking at it ------------------------------------------------------------------------------------

    async def wait_until_quiet(self) -> None:
        await self.script(_SETTLE, QUIET_MS, RESTLESS_MS)

    async def title(self) -> str:
        return " ".join(str(await self.script(_TITLE)).split())

    async def tree(
        self, numbers: Numbers, *, in_view: bool, unnamed_clickables: bool, most_characters: int
    ) -> str:
        """The page as text; its elements can be used afterwards."""
        facts = await self.script(_FACTS)
        if facts["elements"] > MOST_ELEMENTS or facts["characters"] > MOST_CHARACTERS:
            beginning = await self.script(_BEGINNING, most_characters)
            raise Notice(
                f"The page is too large to be listed ({facts['elements']} elements, {facts['characters']} "
                f"characters). It begins: {beginning}"
            )
        snapshot, nodes, (document, frames) = await asyncio.gather(
            self.cdp("DOMSnapshot.captureSnapshot", {"computedStyles": []}),
            self.cdp("Accessibility.getFullAXTree"),
            self._frames(),
        )
        tree = page_tree(
            nodes["nodes"],
            numbers,
            f"{self.number} {document}",
            layout=layout_of(snapshot, (facts["width"], facts["height"])),
            frames=frames,
            in_view=in_view,
            unnamed_clickables=unnamed_clickables,
        )
        self.elements = tree.elements
        return cut(tree.text, most_characters)

    async def _frames(self) -> tuple[str, dict[int, Any]]:
        """Chromium's name of the document; the nodes of frames in its process, by the element of each."""
        from playwright.async_api import Error

        tree = await self._frame_tree()
        found: dict[int, Any] = {}
        for child in tree.get("childFrames", ())[:10]:
            frame = {"frameId": child["frame"]["id"]}
            with contextlib.suppress(Error):  # another site's, or gone meanwhile
                owner = await self.cdp("DOM.getFrameOwner", frame)
                nodes = await self.cdp("Accessibility.getFullAXTree", frame)
                found[owner["backendNodeId"]] = nodes["nodes"]
        return str(tree["frame"]["loaderId"]), found

    # Calls --------------------------------------------------------------------------------------------

    async def cdp(self, method: str, parameters: dict[str, Any] | None = None) -> Any:
        """A command of Chromium's DevTools protocol."""
        if self._session is None:
            self._session = await self._context.new_cdp_session(self.page)
            self._session.on("Page.windowOpen", lambda _: self._note_window())
            await self._session.send("Page.enable")
        return await self._session.send(method, parameters or {})

    async def script(self, function: str, *arguments: Any) -> Any:
        """Call a function in an isolated world of the main frame."""
        from playwright.async_api import Error

        call = {
            "functionDeclaration": function,
            "arguments": [{"value": one} for one in arguments],
            "awaitPromise": True,
            "returnByValue": True,
        }
        is_known = self._world is not None
        call["executionContextId"] = await self._isolated_world()
        try:
            found = await self.cdp("Runtime.callFunctionOn", call)
        except Error as error:
            self._world = None
            if not is_known or "context" not in str(error).lower():
                raise
            call["executionContextId"] = await self._isolated_world()  # the page has gone elsewhere
            found = await self.cdp("Runtime.callFunctionOn", call)
        if "exceptionDetails" in found:
            raise ActionProblem("The page could not be looked at.")
        return found["result"].get("value")

    async def _isolated_world(self) -> int:
        if self._world is None:
            frame = {"frameId": (await self._frame_tree())["frame"]["id"], "worldName": "ludus"}
            self._world = int((await self.cdp("Page.createIsolatedWorld", frame))["executionContextId"])
        return self._world

    async def _frame_tree(self) -> Any:
        return (await self.cdp("Page.getFrameTree"))["frameTree"]


def cut(text: str, most: int) -> str:
    """A text of at most so many characters, at the end of a line, with a notice of what is missing."""
    if len(text) <= most:
        return text
    kept = text[:most].rpartition("\n")[0] or text[:most]
    return f"{kept}\n[{len(text) - len(kept)} more characters of the page are not shown]"
