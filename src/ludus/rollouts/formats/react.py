"""ReAct: lines of `Thought:`, `Action:` and `Action Input:`, or `Final Answer:`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

from ludus.core.messages import Role, ToolCall, ToolSpec
from ludus.rollouts.formats.base import (
    ActionFormat,
    ParsedAction,
    Target,
    main_argument,
    malformed,
    split_thinking,
    summaries,
    unfinished,
    write_json,
)

EXAMPLE = (
    'Thought: what to do next\nAction: tool\nAction Input: {"key": "value"}\n\n'
    "or, at the end,\n\nThought: why this is the answer\nFinal Answer: the answer"
)
_LABELS = ("Thought", "Action Input", "Action", "Observation", "Final Answer")
_LABEL = re.compile(rf"^({'|'.join(_LABELS)})[ \t]*:", re.MULTILINE)


class ReActFormat(ActionFormat):
    """One call in a turn. What the model writes after it, as if it had seen the result, is not read."""

    name: ClassVar[str] = "react"
    stops = ("\nObservation:",)
    result_role: Role = "user"
    result_frame = ("Observation: ", "")

    def __init__(self, main_arguments: Mapping[str, str] | None = None) -> None:
        """`main_arguments` says what an input that is no JSON means: `{"search": "query"}`."""
        self._given = main_arguments is not None
        self._main = dict(main_arguments or {})

    def bind(self, tools: Sequence[ToolSpec]) -> Self:
        if self._given:
            return self
        found = {tool.name: main_argument(tool) for tool in tools}
        return type(self)({name: argument for name, argument in found.items() if argument is not None})

    def parse(self, text: str) -> ParsedAction:
        thought, content, closed = split_thinking(text)
        if not closed:
            return unfinished(thought)
        parts = _labelled(content)
        outside = "\n".join(body for label, body in parts if label in ("", "Thought")).strip()
        for index, (label, body) in enumerate(parts):
            if label == "Final Answer":
                return ParsedAction(outside, (), _until_observation(parts[index:]), thought)
            if label in ("Action", "Action Input"):
                given = parts[index + 1] if index + 1 < len(parts) else ("", "")
                return ParsedAction(outside, (self._call(label, body, given),), None, thought)
        problem = f"there is neither an Action nor a Final Answer; write\n{EXAMPLE}"
        return ParsedAction(outside, (malformed(problem),), None, thought)

    def certain(self, body: str) -> int:
        if (label := _LABEL.search(body)) is not None:
            return label.start()
        line = body.rfind("\n") + 1
        return line if _might_be_label(body[line:]) else len(body)

    def describe(self, tools: Sequence[ToolSpec]) -> str:
        listed = f"You can use these tools:\n{summaries(tools)}\n\n" if tools else ""
        return (
            f"{listed}Always write in this form, and stop after the input of an action; its result "
            f"comes back as an Observation:\n\n{EXAMPLE}"
        )

    def render_action(self, text: str, calls: Sequence[ToolCall] = ()) -> str:
        if not calls:
            return f"Final Answer: {text}"
        if len(calls) > 1:
            raise ValueError(f"ReAct writes one call in a turn, not {len(calls)}")
        written = f"Action: {calls[0].name}\nAction Input: {write_json(calls[0].arguments)}"
        return f"Thought: {text}\n{written}" if text else written

    def _call(self, label: str, name: str, given: tuple[str, str]) -> ToolCall:
        if label == "Action Input":
            return malformed(f"Action is missing before Action Input; write\n{EXAMPLE}")
        if not name or "\n" in name:
            return malformed(f"Action must be followed by the name of one tool; write\n{EXAMPLE}")
        if given[0] != "Action Input":
            return malformed(f"Action Input is missing after Action; write\n{EXAMPLE}", name)
        is_json = given[1].startswith("{") or name not in self._main
        return Target(name, None if is_json else self._main[name]).call(
            given[1], 'Action Input: {"key": "value"}'
        )


def _might_be_label(line: str) -> bool:
    """Whether a line that goes on could become one that begins with a label."""
    return any(label.startswith(line) or line.rstrip(" \t") == label for label in _LABELS)


def _labelled(text: str) -> list[tuple[str, str]]:
    """`text` as (label, what follows it); what precedes the first label has the label ""."""
    found = list(_LABEL.finditer(text))
    edges = [*(match.start() for match in found), len(text)]
    bodies = [text[match.end() : stop] for match, stop in zip(found, edges[1:], strict=True)]
    labels = [match[1] for match in found]
    return [("", text[: edges[0]].strip()), *zip(labels, (b.strip() for b in bodies), strict=True)]


def _until_observation(parts: Sequence[tuple[str, str]]) -> str:
    """An answer, which may hold lines that look like labels, up to an invented observation."""
    kept: list[str] = []
    for index, (label, body) in enumerate(parts):
        if label == "Observation":
            break
        kept.append(body if index == 0 else f"{label}: {body}")
    return "\n".join(kept).strip()
