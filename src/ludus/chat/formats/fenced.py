"""Fenced code: a Markdown block such as ```python ... ``` runs; text without one is the answer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ludus.chat.formats.base import (
    MAX_CALLS,
    ActionFormat,
    ParsedAction,
    Target,
    limited,
    malformed,
    targets,
    unfinished,
)
from ludus.core.messages import Role, ToolCall, ToolSpec

LANGUAGES = {
    "python": "python.code",
    "py": "python.code",
    "sql": "sql.query",
    "bash": "bash.command",
    "sh": "bash.command",
}
_FENCE = re.compile(r"^(`{3,})([^`\n]*)$", re.MULTILINE)


class FencedFormat(ActionFormat):
    """Each block in a known language is a call; blocks in other languages are part of the text."""

    name: ClassVar[str] = "fenced"
    stops = ("\n```\n",)
    inline_stops = stops
    result_role: Role = "user"
    result_frame = ("<output>\n", "\n</output>")

    def __init__(
        self, languages: Mapping[str, str] = LANGUAGES, *, answer: str | None = "answer"
    ) -> None:
        """`languages` says which tool runs what, such as `{"python": "python.code"}`. `answer` is the tag that
        an answer may stand in, as in the format hermes."""
        self.answer_tag = answer
        self.languages = targets({name.lower(): target for name, target in languages.items()})

    def unreachable(self, tools: Sequence[ToolSpec]) -> list[str]:
        reached = {target.tool for target in self.languages.values()}
        return [tool.name for tool in tools if tool.name not in reached]

    def parse(self, text: str) -> ParsedAction:
        thought, body, closed = self.split_thought(text)
        if not closed:
            return unfinished(thought)
        outside: list[str] = []
        calls: list[ToolCall] = []
        position = 0
        for block in _blocks(body):
            target = self.languages.get(block.language)
            if target is None:
                continue
            if block.code is None:
                calls.append(malformed("the block is not closed; end it with a line of ``` alone"))
            else:
                calls.append(target.call(block.code, _example(block.language)))
            outside.append(body[position : block.start])
            position = block.stop
            if len(calls) > MAX_CALLS:
                break
        text_outside = "".join([*outside, body[position:]]).strip()
        if not calls:
            return self.without_calls(text_outside, thought)
        return ParsedAction(text_outside, limited(calls), None, thought)

    def certain(self, body: str) -> int:
        """Up to the first fence that opens a block in a known language, or might once its line is whole."""
        last = body.rfind("\n") + 1
        whole, begun = body[:last], body[last:]
        for block in _blocks(whole):
            if block.language in self.languages:
                return block.start
            if block.code is None:
                return len(body)  # inside a block in another language
        return last if begun.startswith("```") or "```".startswith(begun) else len(body)

    def describe(self, tools: Sequence[ToolSpec]) -> str:
        known = {tool.name: tool for tool in tools}
        shown: dict[str, str] = {}
        for language, target in self.languages.items():
            if target.tool in known and target.tool not in shown:
                about = " ".join(known[target.tool].description.split())
                shown[target.tool] = f"{about}\n{_example(language)}"
        if not shown:
            return ""
        opening, closing = (tag.strip() for tag in self.result_frame)
        return (
            "You can run code. Write it in a fenced block and wait; its output comes back in "
            f"{opening}{closing}.\n\n" + "\n\n".join(shown.values()) + "\n\n"
            "When you need to run nothing more, write the final answer without such a block."
        )

    def render_action(self, text: str, calls: Sequence[ToolCall] = ()) -> str:
        written = [self._write(call) for call in calls]
        return "\n".join([text, *written] if text else written)

    def _write(self, call: ToolCall) -> str:
        named = {target.tool: (lang, target) for lang, target in reversed(self.languages.items())}
        language, target = named.get(call.name, (call.name, Target(call.name, None)))
        block = target.block(call)
        inside = [len(run) for run in re.findall(r"`{3,}", block)]
        fence = "`" * (max(inside, default=2) + 1)
        return f"{fence}{language}\n{block}\n{fence}"


@dataclass(frozen=True, slots=True)
class _Block:
    """A fenced block; its code is None when it is never closed."""

    language: str
    code: str | None
    start: int
    stop: int


def _blocks(text: str) -> Iterator[_Block]:
    """The blocks of a Markdown text. A fence is closed by one that is as long, and has no label."""
    opening: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opening is None:
            opening = fence
        elif not fence[2].strip() and len(fence[1]) >= len(opening[1]):
            first = opening.end() + 1
            code = text[first : max(first, fence.start() - 1)]
            yield _Block(_language(opening), code, opening.start(), fence.end())
            opening = None
    if opening is not None:
        yield _Block(_language(opening), None, opening.start(), len(text))


def _language(fence: re.Match[str]) -> str:
    return next(iter(fence[2].lower().split()), "")


def _example(language: str) -> str:
    return f"```{language}\n...\n```"
