"""Calls as `<invoke name="...">` with `<parameter name="...">`: MiniMax-M2, DeepSeek-V3.2 and V4."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import ClassVar

from ludus.chat.formats.blocks import BlockFormat, after_space, as_text
from ludus.core.messages import ToolCall
from ludus.core.strict_json import BadJson, whole_json


class MiniMaxFormat(BlockFormat):
    """MiniMax-M2: `<minimax:tool_call>` around the calls. `bind` types values by the tool's schema."""

    name: ClassVar[str] = "minimax"
    opens = ("<minimax:tool_call>",)
    closes = "</minimax:tool_call>"
    marks: tuple[str, ...] = (*opens, closes)
    prefix: ClassVar[str] = ""
    """What stands before the names of the inner tags."""
    marks_text: ClassVar[bool] = False
    """Whether an attribute says that a value is text (`string="true"`) or JSON (`string="false"`)."""
    example = (
        '<minimax:tool_call>\n<invoke name="tool">\n<parameter name="key">value</parameter>\n</invoke>\n'
        "</minimax:tool_call>"
    )
    inline_stops: tuple[str, ...] = (closes,)

    def read_block(self, body: str, start: int) -> tuple[Iterable[ToolCall], int]:
        position = start + len(self.opens[0])
        calls: list[ToolCall] = []
        while (begin := after_space(body, position, f"<{self.prefix}invoke")) is not None:
            call, position = self._invoke(body, begin)
            calls.append(call)
        stop = after_space(body, position, self.closes)
        if not calls:
            return [self.wrong(f"<{self.prefix}invoke ...> is missing")], self.cut(
                body, position, self.closes
            )
        # the end of the block may be left out: the turn ends there
        return calls, stop or position

    def _invoke(self, body: str, start: int) -> tuple[ToolCall, int]:
        p = re.escape(self.prefix)
        head = re.compile(r'\s+name="([^"]*)"\s*>').match(body, start)
        bad = self.cut(body, start, f"</{self.prefix}invoke>", self.closes)
        if head is None:
            return self.wrong(f'<{self.prefix}invoke needs name="..."'), bad
        argument = re.compile(rf'\s*<{p}parameter\s+name="([^"]*)"(?:\s+string="(true|false)")?\s*>')
        closing = re.compile(rf"</{p}parameter>(?=\s*(?:<{p}parameter\s|</{p}invoke>))")
        name, position = head[1], head.end()
        written: list[tuple[str, str]] = []
        values = {}
        while (opened := argument.match(body, position)) is not None:
            end = closing.search(body, opened.end())
            if end is None:
                return self.wrong(f"</{self.prefix}parameter> is missing", name), bad
            text = body[opened.end() : end.start()]
            written.append((opened[1], text))
            if opened[2] is not None:
                try:
                    values[opened[1]] = text if opened[2] == "true" else whole_json(text)
                except BadJson as problem:
                    return self.wrong(f"the argument {opened[1]!r:.80}: {problem}", name), bad
            position = end.end()
        stop = after_space(body, position, f"</{self.prefix}invoke>")
        if stop is None:
            return self.wrong(f"</{self.prefix}invoke> is missing", name), bad
        call = self.call(name, written)
        return (call if call.fault else ToolCall(call.name, {**call.arguments, **values})), stop

    def write_calls(self, calls: Sequence[ToolCall]) -> str:
        p = self.prefix
        lines = [self.opens[0]]
        for call in calls:
            lines.append(f'<{p}invoke name="{call.name}">')
            for key, value in call.arguments.items():
                said = f' string="{str(isinstance(value, str)).lower()}"' if self.marks_text else ""
                lines.append(f'<{p}parameter name="{key}"{said}>{as_text(value)}</{p}parameter>')
            lines.append(f"</{p}invoke>")
        return "\n".join([*lines, self.closes])


_DSML = "｜DSML｜"


class DeepSeekV4Format(MiniMaxFormat):
    """DeepSeek-V4: tags behind `｜DSML｜`, and each value says whether it is text."""

    name: ClassVar[str] = "deepseek_v4"
    opens = (f"<{_DSML}tool_calls>",)
    closes = f"</{_DSML}tool_calls>"
    marks = (_DSML,)
    prefix = _DSML
    marks_text = True
    gap = "\n\n"
    example = (
        f'<{_DSML}tool_calls>\n<{_DSML}invoke name="tool">\n'
        f'<{_DSML}parameter name="key" string="true">value</{_DSML}parameter>\n</{_DSML}invoke>\n'
        f"</{_DSML}tool_calls>"
    )
    inline_stops: tuple[str, ...] = (closes,)


class DeepSeekV32Format(DeepSeekV4Format):
    """DeepSeek-V3.2: the block is called `function_calls`."""

    name: ClassVar[str] = "deepseek_v32"
    opens = (f"<{_DSML}function_calls>",)
    closes = f"</{_DSML}function_calls>"
    example = DeepSeekV4Format.example.replace("tool_calls>", "function_calls>")
    inline_stops: tuple[str, ...] = (closes,)
