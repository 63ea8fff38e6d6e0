"""Plain text for games: what the model says is what it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from ludus.chat.formats.base import (
    ActionFormat,
    ParsedAction,
    before_any,
    malformed,
    split_thinking,
    unfinished,
)
from ludus.core.failures import ConfigError
from ludus.core.messages import Role, ToolCall, ToolSpec

Take = Literal["text", "last_line", "label"]


class PlainFormat(ActionFormat):
    """The action is the whole text, its last line, or what follows a label; it goes to one tool.

    There is no answer in this format: the environment ends the episode.
    """

    name: ClassVar[str] = "plain"
    result_role: Role = "user"
    result_frame = ("", "")

    def __init__(
        self,
        *,
        take: Take = "text",
        tool: str = "step",
        argument: str = "action",
        label: str = "Action:",
    ) -> None:
        if take not in ("text", "last_line", "label"):
            raise ConfigError(f"take must be 'text', 'last_line' or 'label', not {take!r}")
        if not label.strip():
            raise ConfigError("label cannot be empty; it is such as 'Action:'")
        self.take, self.tool, self.argument, self.label = take, tool, argument, label

    def parse(self, text: str) -> ParsedAction:
        thought, body, closed = split_thinking(text)
        if not closed:
            return unfinished(thought)
        outside, action = self._divide(body)
        if not action:
            return ParsedAction(body, (malformed(self._how(), self.tool),), None, thought)
        return ParsedAction(outside, (ToolCall(self.tool, {self.argument: action}),), None, thought)

    def certain(self, body: str) -> int:
        """All of the text, or its last line, is the action."""
        if self.take == "label":
            return before_any(body, (self.label,))
        return max(0, body.rstrip().rfind("\n")) if self.take == "last_line" else 0

    def describe(self, tools: Sequence[ToolSpec]) -> str:
        return self._how()

    def render_action(self, text: str, calls: Sequence[ToolCall] = ()) -> str:
        """Text cannot stand beside an action where the whole text is the action; it is left out."""
        if not calls:
            return text
        if len(calls) > 1:
            raise ValueError(f"a plain-text action is one call, not {len(calls)}")
        action = str(calls[0].arguments.get(self.argument, ""))
        if self.take == "text":
            return action
        line = f"{self.label} {action}" if self.take == "label" else action
        return f"{text}\n{line}" if text else line

    def _divide(self, body: str) -> tuple[str, str]:
        """The text outside the action, and the action."""
        if self.take == "text":
            return "", body
        if self.take == "last_line":
            outside, _, action = body.rpartition("\n")
            return outside.strip(), action.strip()
        outside, label, after = body.rpartition(self.label)
        return (outside.strip(), after.strip()) if label else (body, "")

    def _how(self) -> str:
        ways = {
            "text": "Reply with your next action and nothing else.",
            "last_line": "Write your next action alone on the last line.",
            "label": f"End with a line of the form '{self.label} your next action'.",
        }
        return ways[self.take]
