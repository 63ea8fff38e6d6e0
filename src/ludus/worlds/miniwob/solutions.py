"""Scripts that solve pages of MiniWoB from what the agent sees, one for each kind of page.

A script is given an observation, yields actions and is sent the next observations; it ends with the episode.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextlib import suppress

from ludus.core.messages import ToolCall
from ludus.worlds.browser.tasks import SeenPage, act

Script = Generator[ToolCall, SeenPage, None]
Solution = Callable[[str], Generator[ToolCall, str, None]]
SOLUTIONS: dict[str, Solution] = {}
"""By page."""


def _for(*pages: str) -> Callable[[Callable[[SeenPage], Script]], Callable[[SeenPage], Script]]:
    """Registers a script for pages; it is sent each observation read (`SeenPage`), not its text."""

    def added(script: Callable[[SeenPage], Script]) -> Callable[[SeenPage], Script]:
        def solution(text: str) -> Generator[ToolCall, str, None]:
            moves = script(SeenPage(text))
            with suppress(StopIteration):
                move = next(moves)
                while True:
                    move = moves.send(SeenPage((yield move)))

        SOLUTIONS.update(dict.fromkeys(pages, solution))
        return script

    return added


def _click(number: int) -> ToolCall:
    return act(f"click [{number}]")


def _type(number: int, text: str) -> ToolCall:
    return act(f"type [{number}] [{text}] [0]")


def _position(words: list[str]) -> int:
    """The first of "1st", "2nd", ..., from 0."""
    return int(next(re.findall(r"\d+", word)[0] for word in words)) - 1


# Clicks ---------------------------------------------------------------------------------------------


@_for(
    "click-test",
    "click-test-2",
    "click-test-transfer",
    "click-button",
    "unicode-test",
    "click-button-sequence",
)
def buttons(seen: SeenPage) -> Script:
    wanted = seen.quoted or seen.words(r"button (\w+)") or [seen.all("button")[0].name]
    for name in wanted:
        seen = yield _click(seen.id("button", name))


@_for("click-dialog", "click-dialog-2")
def dialog(seen: SeenPage) -> Script:
    name = seen.quoted[0]
    yield _click(seen.id("button", "Close" if name == "x" else name))


@_for("click-link")
def link(seen: SeenPage) -> Script:
    yield _click(_inner(seen, seen.quoted[0]))


def _inner(seen: SeenPage, name: str) -> int:
    """A text in an element that can be clicked."""
    for before, one in zip(seen.lines, seen.lines[1:], strict=False):
        if before.role == "clickable" and one.role == "StaticText" and one.name.strip() == name:
            return one.number
    raise LookupError(f"there is no link {name!r}")


@_for("click-tab")
def tab(seen: SeenPage) -> Script:
    yield _click(seen.id("tab", seen.words(r"Tab #\d+")[0]))


@_for(
    "click-tab-2",
    "click-tab-2-easy",
    "click-tab-2-medium",
    "click-tab-2-hard",
    "click-collapsible-2",
    "click-collapsible-2-nodelay",
)
def link_behind_tabs(seen: SeenPage) -> Script:
    opened: set[int] = {one.number for one in seen.all("tab") if "selected: True" in one.state}
    while True:
        try:
            found = _inner(seen, seen.quoted[0])
        except LookupError:
            one = next(one for one in seen.all("tab") if one.number not in opened)
            opened.add(one.number)
            seen = yield _click(one.number)
        else:
            yield _click(found)
            return


@_for("click-collapsible", "click-collapsible-nodelay")
def section(seen: SeenPage) -> Script:
    seen = yield _click(seen.all("tab")[0].number)
    yield _click(seen.id("button", "Submit"))


@_for(
    "click-checkboxes",
    "click-checkboxes-large",
    "click-checkboxes-transfer",
    "click-option",
    "choose-list",
    "click-scroll-list",
)
def choices(seen: SeenPage) -> Script:
    told = seen.words(r"Select (.*?)(?: from the (?:scroll )?list)? and click")[0]
    for name in told.split(", "):
        if name == "nothing":
            continue
        one = next(one for one in seen.all("checkbox", "radio", "option") if one.name == name)
        if "selected: True" not in one.state:
            seen = yield _click(one.number)
    yield _click(seen.id("button", "Submit"))


@_for("odd-or-even")
def odd_or_even(seen: SeenPage) -> Script:
    after = seen
    for index, one in enumerate(seen.all("StaticText")):
        name = "Odd" if int(one.name) % 2 else "Even"
        choice = [button for button in seen.all("button") if button.name == name][index]
        after = yield _click(choice.number)
    yield _click(after.id("button", "Submit"))


@_for("buy-ticket")
def ticket(seen: SeenPage) -> Script:
    prices = [int(re.findall(r"\d+", one.name)[0]) for one in seen.all("button")]
    times = [
        re.findall(r"\d+", one.name)
        for one in seen.all("StaticText")
        if re.fullmatch(r"\d+h \d+m", one.name)
    ]
    values = (
        prices if seen.words("cost") else [60 * int(hours) + int(minutes) for hours, minutes in times]
    )
    best = max(values) if seen.words("longest|expensive") else min(values)
    yield _click(seen.all("button")[values.index(best)].number)


@_for("generate-number")
def generate(seen: SeenPage) -> Script:
    ((way, bound),) = re.findall(r"(less|greater) than (\d+)", seen.objective) or [
        ("even" if seen.words("even") else "odd", "0")
    ]
    while True:
        shown = seen.all("StaticText")[0].name
        if shown.isdigit():
            value = int(shown)
            fits = {
                "less": value < int(bound),
                "greater": value > int(bound),
                "even": value % 2 == 0,
                "odd": value % 2 == 1,
            }
            if fits[way]:
                break
        seen = yield _click(seen.id("button", "Generate"))
    yield _click(seen.id("button", "Submit"))


@_for("phone-book")
def phone_book(seen: SeenPage) -> Script:
    name = seen.words(r"Find (.+) in the contact")[0]
    while not seen.has("heading", name):
        seen = yield _click(seen.id("link", ">"))
    place = ("phone", "email", "address").index(seen.words(r"on their (\w+)")[0])
    yield _click(seen.all("link")[place].number)


@_for("navigate-tree")
def tree(seen: SeenPage) -> Script:
    opened: set[str] = set()
    while not seen.has("StaticText", seen.quoted[0]):
        folders = [
            inner
            for outer, inner in zip(seen.lines, seen.lines[1:], strict=False)
            if outer.name == "folder" and inner.role == "StaticText" and inner.name not in opened
        ]
        opened.add(folders[0].name)
        seen = yield _click(folders[0].number)
    yield _click(seen.id("StaticText", seen.quoted[0]))


@_for(
    "email-inbox-delete",
    "email-inbox-important",
    "email-inbox-reply",
    "email-inbox-star-reply",
    "email-inbox-forward",
    "email-inbox-noscroll",
)
def email(seen: SeenPage) -> Script:
    sender = seen.words(r"email by (\S+)")[0]
    if icon := seen.words(r"the (trash|star) icon"):
        start = seen.lines.index(next(one for one in seen.all("StaticText") if one.name == sender))
        yield _click(next(one.number for one in seen.lines[start:] if one.name == icon[0]))
        return
    seen = yield _click(seen.id("StaticText", sender))
    receiver = seen.words(r"forward that email to (\w+)")
    wanted = "email-forward" if receiver else "email-reply"
    seen = yield _click(next(one.number for one in seen.lines if one.name == wanted))
    told = receiver[0] if receiver else seen.quoted[0]
    seen = yield _type(seen.all("textbox")[0].number, told)
    yield _click(next(one.number for one in seen.lines if one.name.startswith("send-")))


# Fields ---------------------------------------------------------------------------------------------


def _submitted(seen: SeenPage, fields: list[tuple[int, str]], name: str = "Submit") -> Script:
    """Fill fields in, in this order, and press a button."""
    for number, text in fields:
        seen = yield _type(number, text)
    yield _click(seen.id("button", name))


@_for("enter-text", "enter-text-2", "enter-text-dynamic", "enter-password")
def texts(seen: SeenPage) -> Script:
    wanted = seen.quoted[0]
    if case := seen.words(r"all (lower|upper) case"):
        wanted = wanted.lower() if case[0] == "lower" else wanted.upper()
    yield from _submitted(seen, [(one.number, wanted) for one in seen.all("textbox")])


@_for("login-user")
def login(seen: SeenPage) -> Script:
    fields = [one.number for one in seen.all("textbox")]
    yield from _submitted(seen, list(zip(fields, seen.quoted, strict=True)), "Login")


@_for("focus-text", "focus-text-2")
def focus(seen: SeenPage) -> Script:
    place = _position(seen.words(r"\d(?:st|nd|rd|th)") or ["1"])
    yield _click(seen.all("textbox")[place].number)


@_for("find-word")
def nth_word(seen: SeenPage) -> Script:
    words = " ".join(one.name for one in seen.all("StaticText")).split()
    word = words[_position(seen.words(r"\d+(?:st|nd|rd|th)"))]
    yield from _submitted(seen, [(seen.id("textbox"), word.rstrip(",."))])


@_for("scroll-text")
def last_word(seen: SeenPage) -> Script:
    word = seen.all("StaticText")[-1].name.split()[-1]
    yield from _submitted(seen, [(seen.all("textbox")[1].number, word.rstrip(",."))])


@_for("copy-paste", "copy-paste-2")
def copy(seen: SeenPage) -> Script:
    filled = [
        one for one, inner in zip(seen.lines, seen.lines[1:], strict=False) if inner.depth > one.depth
    ]
    sources = [one for one in seen.all("textbox") if one in filled]
    target = next(one for one in seen.all("textbox") if one not in filled)
    places = seen.words(r"\d(?:st|nd|rd|th)")
    yield _click(sources[_position(places) if places else 0].number)
    yield act("press [Ctrl+a]")
    yield act("press [Ctrl+c]")
    yield _click(target.number)
    seen = yield act("press [Ctrl+v]")
    yield _click(seen.id("button", "Submit"))


@_for("read-table", "read-table-2")
def table(seen: SeenPage) -> Script:
    cells = [one.name for one in seen.all("cell")]
    values = dict(zip(cells[::2], cells[1::2], strict=True))
    labels = seen.words(r"value of (.+) into") or [
        one.name.rstrip(": ") for one in seen.all("StaticText") if one.name.endswith(":")
    ]
    fields = [one.number for one in seen.all("textbox")]
    yield from _submitted(
        seen, [(field, values[label]) for field, label in zip(fields, labels, strict=True)]
    )


@_for("simple-arithmetic")
def arithmetic(seen: SeenPage) -> Script:
    ((first, sign, second),) = re.findall(
        r"(-?\d+)\s*([-+x*])\s*(-?\d+)", " ".join(one.name for one in seen.all("StaticText"))
    )
    one, other = int(first), int(second)
    value = {"+": one + other, "-": one - other}.get(sign, one * other)
    yield from _submitted(seen, [(seen.id("textbox"), str(value))])


@_for("simple-algebra")
def algebra(seen: SeenPage) -> Script:
    told = " ".join(one.name for one in seen.all("StaticText"))
    ((first, sign, second, total),) = re.findall(r"(-?\d+|x)\s*([-+])\s*(-?\d+|x)\s*=\s*(-?\d+)", told)
    known = int(second if first == "x" else first)
    value = int(total) - known if sign == "+" else int(total) + known
    if sign == "-" and first != "x":
        value = known - int(total)
    yield from _submitted(seen, [(seen.id("textbox"), str(value))])


@_for("search-engine")
def search(seen: SeenPage) -> Script:
    seen = yield _type(seen.id("textbox"), seen.quoted[0])
    seen = yield _click(seen.id("button", "Search"))
    place = _position(seen.words(r"\d+(?:st|nd|rd|th)"))
    per_page = 3
    for _ in range(place // per_page):
        seen = yield _click(seen.id("link", ">"))
    results = [one for one in seen.all("link") if not re.fullmatch(r"\d+|[<>]", one.name)]
    yield _click(results[place % per_page].number)


@_for("use-autocomplete-nodelay")
def autocomplete(seen: SeenPage) -> Script:
    start, *end = seen.quoted
    seen = yield _type(seen.id("textbox"), start)
    items = [one for one in seen.all("StaticText") if one.name.startswith(start) and one.name != start]
    item = next(one for one in items if one.name.endswith(end[0] if end else ""))
    seen = yield _click(item.number)
    yield _click(seen.id("button", "Submit"))


@_for("use-spinner")
def spinner(seen: SeenPage) -> Script:
    wanted = int(seen.words(r"Select (-?\d+)")[0])
    yield _click(seen.id("spinbutton"))
    for _ in range(abs(wanted)):
        yield act(f"press [{'ArrowUp' if wanted > 0 else 'ArrowDown'}]")
    yield _click(seen.id("button", "Submit"))


@_for("guess-number")
def guess(seen: SeenPage) -> Script:
    low, high = 0, 9
    while True:
        middle = (low + high) // 2
        yield _click(seen.id("spinbutton"))
        yield act("press [Ctrl+a]")
        yield act(f"press [{middle}]")
        seen = yield _click(seen.id("button", "Submit"))
        told = " ".join(one.name for one in seen.all("StaticText"))
        low, high = (low, middle - 1) if "lower than" in told else (middle + 1, high)


@_for("enter-date")
def date(seen: SeenPage) -> Script:
    yield _click(seen.id("Date"))  # into the day or the year
    for key in ("ArrowLeft", "ArrowLeft", *seen.words(r"\d+/\d+/\d+")[0].replace("/", "")):
        yield act(f"press [{key}]")
    yield _click(seen.id("button", "Submit"))


@_for("enter-time")
def time(seen: SeenPage) -> Script:
    ((hours, minutes, half),) = re.findall(r"(\d+):(\d+) ([AP]M)", seen.objective)
    yield from _submitted(seen, [(seen.id("InputTime"), f"{int(hours):02}{minutes}{half}")])


@_for("form-sequence-2")
def form(seen: SeenPage) -> Script:
    first, second = (int(one) - 1 for one in seen.words(r"(\d)(?:st|nd|rd|th)"))
    seen = yield _click(seen.all("radio")[first].number)
    yield from _submitted(seen, [(seen.all("textbox")[second].number, seen.quoted[0])])


@_for("multi-layouts", "multi-orderings")
def movies(seen: SeenPage) -> Script:
    ((genre, director, year),) = re.findall(
        r"for (.+) movies directed by (.+) from year (\d+)", seen.objective
    )
    wanted = {"genre": genre, "director": director, "year": year, "date": year}
    fields = [place for place, one in enumerate(seen.lines) if one.role == "textbox"]
    # labels are above their fields, or below where the page begins with a field
    side = 1 if seen.lines[1].role == "textbox" else -1
    after = seen
    for place in fields:
        near = seen.lines[place:] if side > 0 else seen.lines[place::-1]
        label = next(one.name.lower() for one in near if one.name.strip())
        after = yield _type(
            seen.lines[place].number, next(value for key, value in wanted.items() if key in label)
        )
    finals = [one for one in after.lines if one.role in ("button", "clickable")]
    yield _click(finals[-1].number)
