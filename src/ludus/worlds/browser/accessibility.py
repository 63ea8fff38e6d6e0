"""A page's accessibility tree as text, as WebArena shows it: `[12] link 'Home'`, children indented by a tab.

Which nodes and properties are left out follows the original. What differs: elements are numbered from 1 in
the order in which an episode first sees them (Chromium's own numbers differ from one process to the next),
addresses of links are not shown, and a text is left out where it is in the name of the element that holds it
(the original leaves out what occurs anywhere in the three lines before, their ids included, which hides
digits).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

IGNORED_PROPERTIES = frozenset(
    ("focusable", "editable", "readonly", "level", "settable", "multiline", "invalid", "url")
)
EMPTY_ROLES = frozenset(
    (
        "generic", "img", "image", "list", "strong", "paragraph", "banner", "navigation", "Section",
        "LabelText", "Legend", "listitem", "MenuListPopup", "none", "SvgRoot",
    )
)  # fmt: skip
"""Roles that say nothing without a name."""
CLICKABLE_ROLES = frozenset(
    (
        "link", "button", "checkbox", "radio", "option", "tab", "menuitem", "menuitemcheckbox", "menuitemradio",
        "switch", "treeitem", "combobox", "listbox", "slider", "spinbutton", "gridcell",
    )
)  # fmt: skip
TYPED_ROLES = frozenset(("textbox", "searchbox", "combobox", "spinbutton"))
_NO_TARGETS = frozenset(("HTML", "BODY", "FORM", "LABEL", "#document"))
"""Elements that hear of clicks on what is in them."""
_HOLDS = frozenset((*TYPED_ROLES, "listbox"))
MOST_NAME = 2_000
"""Characters of a name."""


@dataclass(frozen=True, slots=True)
class Element:
    """A line of the tree."""

    number: int
    backend: int
    """Chromium's number of the node, for as long as the page lives."""
    role: str
    name: str
    is_clickable: bool = False
    """Whether a page listens for clicks on it, where that is known."""


@dataclass(slots=True)
class Numbers:
    """Gives elements their numbers, the same for as long as a page keeps them."""

    _of: dict[tuple[str, int], int] = field(default_factory=dict)

    def of(self, page: str, backend: int) -> int:
        return self._of.setdefault((page, backend), len(self._of) + 1)


@dataclass(frozen=True, slots=True)
class PageTree:
    """The shown text of a page, and its elements."""

    text: str
    elements: Mapping[int, Element]


@dataclass(frozen=True, slots=True)
class Layout:
    """A snapshot of the layout: data of nodes, by Chromium's numbers."""

    boxes: Mapping[int, tuple[float, float, float, float]]
    """Left, top, width and height in the document."""
    hints: Mapping[int, str]
    """A name for elements that a page listens for clicks on: of attributes, where there is one."""
    view: tuple[float, float, float, float]
    """The part of the document that is seen."""

    def sees(self, backend: int) -> bool:
        """Whether a part of the node is in view; what has no box is not."""
        box = self.boxes.get(backend)
        if box is None or box[2] <= 0 or box[3] <= 0:
            return False
        left, top, width, height = self.view
        return (
            box[0] < left + width
            and left < box[0] + box[2]
            and box[1] < top + height
            and top < box[1] + box[3]
        )


def layout_of(snapshot: Mapping[str, Any], view: tuple[float, float]) -> Layout:
    """The main document of `DOMSnapshot.captureSnapshot`; `view` is the window's width and height."""
    strings, document = snapshot["strings"], snapshot["documents"][0]
    nodes, layout = document["nodes"], document["layout"]
    backends = nodes["backendNodeId"]
    boxes: dict[int, tuple[float, float, float, float]] = {}
    for index, bounds in zip(layout["nodeIndex"], layout["bounds"], strict=True):
        boxes.setdefault(backends[index], tuple(bounds))
    hints = {}
    for index in nodes.get("isClickable", {}).get("index", ()):
        if strings[nodes["nodeName"][index]] in _NO_TARGETS:
            continue
        pairs = nodes["attributes"][index]
        given = {strings[pairs[n]]: strings[pairs[n + 1]] for n in range(0, len(pairs) - 1, 2)}
        named = (given[name] for name in ("aria-label", "title", "alt", "id") if given.get(name))
        hints[backends[index]] = next(named, " ".join(given.get("class", "").split()[:2]))
    left, top = document.get("scrollOffsetX", 0.0), document.get("scrollOffsetY", 0.0)
    return Layout(boxes, hints, (left, top, *view))


def page_tree(
    nodes: Sequence[Mapping[str, Any]],
    numbers: Numbers,
    page: str,
    *,
    layout: Layout | None = None,
    frames: Mapping[int, Sequence[Mapping[str, Any]]] | None = None,
    in_view: bool = True,
    unnamed_clickables: bool = False,
) -> PageTree:
    """The tree of a page from the nodes of `Accessibility.getFullAXTree`.

    `page` tells documents apart, because Chromium's numbers are those of a process. `frames` has the nodes
    of frames by the number of the element that holds them. Without `in_view` the whole document is shown.
    `unnamed_clickables` also shows elements without role or name that the page listens for clicks on, which
    the original leaves out.
    """
    writer = _Writer(
        numbers, page, layout, frames or {}, in_view and layout is not None, unnamed_clickables
    )
    writer.write(nodes)
    return PageTree("\n".join(writer.lines), writer.elements)


@dataclass(slots=True)
class _Writer:
    numbers: Numbers
    page: str
    layout: Layout | None
    frames: Mapping[int, Sequence[Mapping[str, Any]]]
    in_view: bool
    unnamed_clickables: bool
    lines: list[str] = field(default_factory=list)
    elements: dict[int, Element] = field(default_factory=dict)

    def write(
        self, nodes: Sequence[Mapping[str, Any]], depth: int = 0, *, in_frame: bool = False
    ) -> None:
        by_id = {node["nodeId"]: node for node in nodes}
        waiting = [(nodes[0], depth, in_frame, "")] if nodes else []
        while waiting:  # no recursion: a hostile page nests as deep as it likes
            node, depth, is_seen, above = waiting.pop()
            line = self._line(node, is_seen, above)
            if line is not None:
                self.lines.append("\t" * min(depth, 50) + line)
                depth += 1
                above = _name(node) if _role(node) != "RootWebArea" else ""
            # options of a closed list and the text in a field have no box: they are as visible as their holder
            shows_children = (
                in_frame or (line is not None and _role(node) in _HOLDS) or (is_seen and line is None)
            )
            inner = self.frames.get(node.get("backendDOMNodeId", -1))
            if inner and line is not None and not in_frame:
                self.write(inner, depth, in_frame=True)
            children = [by_id[child] for child in node.get("childIds", ()) if child in by_id]
            waiting.extend((child, depth, shows_children, above) for child in reversed(children))

    def _line(self, node: Mapping[str, Any], is_seen: bool, above: str) -> str | None:
        backend, role = node.get("backendDOMNodeId"), _role(node)
        if backend is None or role == "InlineTextBox":
            return None
        if self.in_view and not is_seen and role != "RootWebArea":
            assert self.layout is not None
            if not self.layout.sees(backend):
                return None
        hint = self.layout.hints.get(backend) if self.layout is not None else None
        name = _name(node)
        shown = "" if node.get("ignored") else _properties(node)
        is_silent = (
            not role or node.get("ignored") or (not name.strip() and role in EMPTY_ROLES and not shown)
        )
        is_silent = is_silent or (not name.strip() and role == "listitem")
        is_silent = is_silent or (
            role == "StaticText" and name in above
        )  # it is in the name of what holds it
        if is_silent:
            if not self.unnamed_clickables or hint is None or role in ("RootWebArea", "StaticText"):
                return None
            role, name = "clickable", hint[:MOST_NAME]
        number = self.numbers.of(self.page, backend)
        self.elements[number] = Element(number, backend, role, name, hint is not None)
        return f"[{number}] {role} {name!r}" + (f" {shown}" if shown and not is_silent else "")


def _role(node: Mapping[str, Any]) -> str:
    return str(node.get("role", {}).get("value", ""))


def _name(node: Mapping[str, Any]) -> str:
    return str(node.get("name", {}).get("value", ""))[:MOST_NAME]


def _properties(node: Mapping[str, Any]) -> str:
    found = (
        f"{one['name']}: {one['value']['value']}"
        for one in node.get("properties", ())
        if one["name"] not in IGNORED_PROPERTIES and "value" in one.get("value", {})
    )
    return " ".join(found)[:MOST_NAME]


def offered_actions(elements: Iterable[Element], texts: Sequence[str], most: int) -> list[str]:
    """Actions on what is shown: clicks, and typing of `texts`; without those that lead away from the page."""
    found = []
    for one in elements:
        if one.role in TYPED_ROLES:
            found += [f"type [{one.number}] [{text}] [0]" for text in texts]
        if one.is_clickable or one.role in CLICKABLE_ROLES:
            found.append(f"click [{one.number}]")
    return found[:most]
