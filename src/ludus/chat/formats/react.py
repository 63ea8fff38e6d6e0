"""ReAct: lines of `Thought:`, `Action:` and `Action Input:`, or `Final Answer:`.

AgentFly's words are read as well: `Input:` and `Answer:`, on lines of their own or all on one, `Action: Finish`
with the answer as its input, and a tool that needs no argument without an input. What the first form says is
never read as the second.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Self

from ludus.chat.formats.base import (
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
from ludus.core.messages import Role, ToolCall, ToolSpec
from ludus.core.strict_json import BadJson, whole_json

EXAMPLE = (
    'Thought: what to do next\nAction: tool\nAction Input: {"key": "value"}\n\n'
    "or, at the end,\n\nThought: why this is the answer\nFinal Answer: the answer"
)
_LABELS = ("Thought", "Action Input", "Action", "Observation", "Final Answer")
_LABEL = re.compile(rf"^({'|'.join(_LABELS)})[ \t]*:", re.MULTILINE)
_ALL_LABELS = (*_LABELS, "Input", "Answer")
_ANY_LABEL = re.compile(rf"^({'|'.join(_ALL_LABELS)})[ \t]*:", re.MULTILINE)
_STEP = re.compile(r"^(Action|Answer|Final Answer)[ \t]*:", re.MULTILINE)
_STEP_IN_LINE = re.compile(r"(?<=\s)(Action):(?=\s*+\S++\s++Input:)")
_NEXT_STEP = re.compile(r"^(?:Thought|Action|Observation|Final Answer)[ \t]*:", re.MULTILINE)
_INPUT = re.compile(r"(?:^|[ \t])(?:Action )?Input[ \t]*:", re.MULTILINE)
_OBSERVATION = re.compile(r"^Observation[ \t]*:", re.MULTILINE)
_FINISH = re.compile(r"finish(?:\[(?P<answer>.*)\])?", re.IGNORECASE | re.DOTALL)


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
        self._tools: Mapping[str, ToolSpec] | None = None
        """By name, once they are known."""

    def bind(self, tools: Sequence[ToolSpec]) -> Self:
        found = {tool.name: main_argument(tool) for tool in tools}
        main = {name: argument for name, argument in found.items() if argument is not None}
        bound = type(self)(self._main if self._given else main)
        bound._given = self._given
        bound._tools = {tool.name: tool for tool in tools}
        return bound

    def parse(self, text: str) -> ParsedAction:
        thought, content, closed = split_thinking(text)
        if not closed:
            return unfinished(thought)
        found = self._read(content)
        if any(
            call.fault is not None or (self._tools is not None and self._is_finish(call.name))
            for call in found.calls
        ):
            found = self._read_agentfly(content) or found
        return replace(found, thought=thought)

    def _read(self, content: str) -> ParsedAction:
        parts = _labelled(content)
        outside = _outside(parts)
        for index, (label, body) in enumerate(parts):
            if label == "Final Answer":
                return ParsedAction(outside, (), _until_observation(parts[index:]))
            if label in ("Action", "Action Input"):
                given = parts[index + 1] if index + 1 < len(parts) else ("", "")
                return ParsedAction(outside, (self._call(label, body, given),))
        problem = f"there is neither an Action nor a Final Answer; write\n{EXAMPLE}"
        return ParsedAction(outside, (malformed(problem),))

    def _read_agentfly(self, content: str) -> ParsedAction | None:
        """The action or answer in AgentFly's words; None where there is none."""
        step, thought = _STEP.search(content), _LABEL.search(content)
        if step is None and thought is not None:
            step = _STEP_IN_LINE.search(content, thought.end())
        if step is None:
            return None
        outside, rest = _outside(_labelled(content[: step.start()])), content[step.end() :]
        if step[1] != "Action":
            return ParsedAction(outside, (), _before(_OBSERVATION, rest))
        action = _before(_NEXT_STEP, rest)
        given = _INPUT.search(action)
        name = action[: given.start() if given is not None else None].strip()
        written = action[given.end() :].strip() if given is not None else None
        if self._is_finish(_before(_ANY_LABEL, name)):
            answer = _STEP.search(rest)
            says_more = answer is not None and answer[1] != "Action"
            said = _before(_OBSERVATION, rest[answer.end() :]) if answer and says_more else written
            return ParsedAction(outside, (), _finished(name) if said is None else _answer(said))
        if written is None and self._is_bare(name):
            return ParsedAction(outside, (ToolCall(name),))
        if written is None or not name or "\n" in name:
            return None
        return ParsedAction(outside, (self._call("Action", name, ("Action Input", written)),))

    def _is_finish(self, name: str) -> bool:
        """Whether an action ends the episode: no tool is called so, as far as they are known."""
        return _FINISH.fullmatch(name) is not None and name not in (self._tools or ())

    def _is_bare(self, name: str) -> bool:
        """Whether a tool needs no argument."""
        tool = (self._tools or {}).get(name)
        return tool is not None and not tool.parameters.get("required")

    def certain(self, body: str) -> int:
        if (label := _ANY_LABEL.search(body)) is not None:
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
    return any(label.startswith(line) or line.rstrip(" \t") == label for label in _ALL_LABELS)


def _labelled(text: str) -> list[tuple[str, str]]:
    """`text` as (label, what follows it); what precedes the first label has the label ""."""
    found = list(_LABEL.finditer(text))
    edges = [*(match.start() for match in found), len(text)]
    bodies = [text[match.end() : stop] for match, stop in zip(found, edges[1:], strict=True)]
    labels = [match[1] for match in found]
    return [("", text[: edges[0]].strip()), *zip(labels, (b.strip() for b in bodies), strict=True)]


def _outside(parts: Sequence[tuple[str, str]]) -> str:
    """The text that is neither an action nor an answer."""
    return "\n".join(body for label, body in parts if label in ("", "Thought")).strip()


def _before(label: re.Pattern[str], text: str) -> str:
    """`text` up to a label."""
    found = label.search(text)
    return text[: found.start() if found is not None else None].strip()


def _finished(name: str) -> str:
    """The answer in `Finish[answer]`."""
    found = _FINISH.fullmatch(name)
    return ((found and found["answer"]) or "").strip()


def _answer(written: str) -> str:
    """The answer that is the input of `Finish`: a text, or the only value of a JSON object."""
    try:
        value = whole_json(written)
    except BadJson:
        return written
    if not isinstance(value, dict) or len(value) > 1:
        return written
    said = next(iter(value.values()), "")
    return said if isinstance(said, str) else write_json(said)


def _until_observation(parts: Sequence[tuple[str, str]]) -> str:
    """An answer, which may hold lines that look like labels, up to an invented observation."""
    kept: list[str] = []
    for index, (label, body) in enumerate(parts):
        if label == "Observation":
            break
        kept.append(body if index == 0 else f"{label}: {body}")
    return "\n".join(kept).strip()
