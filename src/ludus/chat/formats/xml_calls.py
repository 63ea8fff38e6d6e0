"""Calls as XML: `<function=name>` with `<parameter=key>` (Qwen3-Coder, Qwen3.5, and agents for code)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from ludus.chat.formats.base import without_frame, write_json
from ludus.chat.formats.blocks import BlockFormat, after_space, as_text
from ludus.core.messages import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _PARAMETER = "<function=", "<parameter="
_END, _VALUE_END = "</function>", "</parameter>"
_VALUE = re.compile(rf"{_VALUE_END}(?=\s*(?:{_PARAMETER}|{_END}))")
_EXAMPLE = f"{_FUNCTION}tool>\n{_PARAMETER}key>\nvalue\n{_VALUE_END}\n{_END}"


class FunctionFormat(BlockFormat):
    """`<function=name><parameter=key>value</parameter></function>`, as agents for code write calls.

    A value is text as it stands, less one line break at each end; `bind` types it by the tool's schema.
    """

    name: ClassVar[str] = "function"
    opens = (_FUNCTION, OPEN)
    closes = _END
    example = _EXAMPLE
    gap = "\n\n"
    inline_stops = (_END,)

    def read_block(self, body: str, start: int) -> tuple[Iterable[ToolCall], int]:
        wrapped = after_space(body, start, OPEN)
        at = start if wrapped is None else wrapped
        begin = after_space(body, at, _FUNCTION)
        if begin is None:
            return [self.wrong(f"{_FUNCTION}...> does not follow {OPEN}")], self.cut(body, at, CLOSE)
        call, stop = self._function(body, begin)
        return [call], after_space(body, stop, CLOSE) or stop

    def _function(self, body: str, start: int) -> tuple[ToolCall, int]:
        """The call whose name begins at `start`, and where it ends."""
        bad = self.cut(body, start, _END)
        close = body.find(">", start, bad)
        if close < 0:
            return self.wrong(f"> is missing after {_FUNCTION}"), bad
        name, position = body[start:close], close + 1
        written: list[tuple[str, str]] = []
        while (begin := after_space(body, position, _PARAMETER)) is not None:
            close = body.find(">", begin)
            end = None if close < 0 else _VALUE.search(body, close + 1)
            if end is None:
                return self.wrong(f"{_VALUE_END} or {_END} is missing", name), bad
            written.append((body[begin:close], without_frame(body[close + 1 : end.start()])))
            position = end.end()
        stop = after_space(body, position, _END)
        if stop is None:
            return self.wrong(f"{_END} is missing", name), self.cut(body, position, _END)
        return self.call(name, written), stop

    def write_calls(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(_written(call) for call in calls)


class Qwen3CoderFormat(FunctionFormat):
    """`<tool_call>` around each `<function=name>`: Qwen3-Coder and Qwen3.5."""

    name: ClassVar[str] = "qwen3_coder"
    opens = (OPEN, _FUNCTION)
    closes = CLOSE
    marks = (OPEN, CLOSE)
    example = f"{OPEN}\n{_EXAMPLE}\n{CLOSE}"
    inline_stops = (CLOSE,)

    def write_calls(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(f"{OPEN}\n{_written(call)}\n{CLOSE}" for call in calls)


def _written(call: ToolCall) -> str:
    arguments = "".join(
        f"{_PARAMETER}{key}>\n{as_text(value, _scalar)}\n{_VALUE_END}\n"
        for key, value in call.arguments.items()
    )
    return f"{_FUNCTION}{call.name}>\n{arguments}{_END}"


def _scalar(value: Any) -> str:
    """As Qwen's template writes it: lists and objects as JSON, numbers and truth values as Python does."""
    return write_json(value) if isinstance(value, (dict, list)) else str(value)
