"""Tags: `<python>...</python>`, `<search>...</search>`, `<answer>...</answer>`: a tag for each tool."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

from ludus.chat.formats.base import (
    MAX_CALLS,
    ActionFormat,
    ParsedAction,
    Target,
    before_any,
    limited,
    malformed,
    targets,
    unfinished,
    without_fence,
    without_frame,
)
from ludus.core.failures import ConfigError
from ludus.core.messages import Role, ToolCall, ToolSpec

COMMON = {"python": "python.code", "search": "search.query", "sql": "sql.query"}
_NAME = re.compile(r"[\w.-]+")


class TagsFormat(ActionFormat):
    """A tag's text is the tool's main argument, or a JSON object where a tool has no such one.

    The first tag decides: what follows an answer is not read, and an answer that follows a call is not
    taken, because it was written before the call's result was seen.
    """

    name: ClassVar[str] = "tags"
    result_role: Role = "user"

    def __init__(
        self,
        tags: Mapping[str, str] | None = None,
        *,
        answer: str = "answer",
        result: str = "result",
    ) -> None:
        """`tags` is such as `{"python": "python.code"}`; without, `bind` makes a tag for each tool."""
        self._given = tags is not None
        self._answer, self._result = answer, result
        self._set(targets(COMMON if tags is None else tags))

    def _set(self, tags: dict[str, Target]) -> None:
        names = [*tags, self._answer, self._result]
        wrong = next((name for name in names if not _NAME.fullmatch(name)), None)
        if wrong is not None or self._answer in tags:
            raise ConfigError(
                f"the tag {wrong or self._answer!r} cannot be used: tags are words, and the answer's is "
                "no tool's"
            )
        self.tags = tags
        self.stops = tuple(f"</{name}>" for name in (*tags, self._answer))
        self.inline_stops = self.stops
        self.marks = tuple(f"<{slash}{n}>" for n in (*tags, self._answer) for slash in ("", "/"))
        self.result_frame = (f"<{self._result}>\n", f"\n</{self._result}>")
        self._opening = re.compile(
            "<(" + "|".join(re.escape(name) for name in (*tags, self._answer)) + ")>"
        )

    def bind(self, tools: Sequence[ToolSpec]) -> Self:
        if self._given:
            return self
        usable = [tool for tool in tools if _NAME.fullmatch(tool.name) and tool.name != self._answer]
        made = type(self)(answer=self._answer, result=self._result)
        made._set({tool.name: Target.of(tool) for tool in usable})
        made.inline = self.inline
        return made

    def unreachable(self, tools: Sequence[ToolSpec]) -> list[str]:
        reached = {target.tool for target in self.tags.values()}
        return [tool.name for tool in tools if self._given and tool.name not in reached]

    def parse(self, text: str) -> ParsedAction:
        thought, body, closed = self.split_thought(text)
        if not closed:
            return unfinished(thought)
        outside: list[str] = []
        calls: list[ToolCall] = []
        position = 0
        while len(calls) <= MAX_CALLS and (match := self._opening.search(body, position)):
            tag = match[1]
            outside.append(body[position : match.start()])
            stop = body.find(f"</{tag}>", match.end())
            block = body[match.end() : stop if stop >= 0 else len(body)]
            position = stop + len(tag) + 3 if stop >= 0 else len(body)
            if stop < 0:
                calls.append(malformed(f"</{tag}> is missing; write {self._example(tag)}"))
            elif tag == self._answer:
                if not calls:
                    return ParsedAction("".join(outside).strip(), (), block.strip(), thought)
            else:
                target, inside = self.tags[tag], without_frame(block)
                inside = without_fence(inside) if target.argument == "code" else inside
                calls.append(target.call(inside, self._example(tag)))
        text_outside = "".join([*outside, body[position:]]).strip()
        return ParsedAction(text_outside, limited(calls or [self._neither()]), None, thought)

    def certain(self, body: str) -> int:
        first = self._opening.search(body)
        if first is not None and first[1] == self._answer:
            return len(body)  # calls after an answer are not read
        return before_any(body, [f"<{tag}>" for tag in (*self.tags, self._answer)])

    def describe(self, tools: Sequence[ToolSpec]) -> str:
        known = {tool.name: tool for tool in tools}
        lines = [
            f"- {self._example(tag)}: {' '.join(known[target.tool].description.split())}"
            for tag, target in self.tags.items()
            if target.tool in known
        ]
        opening, closing = (tag.strip() for tag in self.result_frame)
        calling = [
            "You can use tools. Write one of these and wait; its result comes back in "
            f"{opening}{closing}:",
            *lines,
        ]
        final = f"Write the final answer as <{self._answer}>...</{self._answer}>."
        return "\n".join([*(calling if lines else ()), final])

    def render_action(self, text: str, calls: Sequence[ToolCall] = ()) -> str:
        if not calls:
            return f"<{self._answer}>{text}</{self._answer}>"
        written = [self._write(call) for call in calls]
        return "\n".join([text, *written] if text else written)

    def _write(self, call: ToolCall) -> str:
        named = {target.tool: (tag, target) for tag, target in self.tags.items()}
        tag, target = named.get(call.name, (call.name, Target(call.name, None)))
        return f"<{tag}>\n{target.block(call)}\n</{tag}>"

    def _example(self, tag: str) -> str:
        target = self.tags.get(tag)
        inside = "..." if target is None else target.argument or '{"key": "value"}'
        return f"<{tag}>{inside}</{tag}>"

    def _neither(self) -> ToolCall:
        ways = " or ".join(self._example(tag) for tag in (*self.tags, self._answer))
        return malformed(f"there is neither a call nor an answer; write {ways}")
