"""WebArena's actions: `click [12]`, `type [3] [lamp] [1]`, `stop [42]`, ... as text (Zhou et al., 2024).

The forms, and what may be left out, are those of the original's `create_id_based_action`: the space before a
bracket, the last part of `type` (then Enter is pressed), the brackets of `scroll` and the answer of `stop`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

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
