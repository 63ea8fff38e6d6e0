"""GLM's calls: `<tool_call>name`, then `<arg_key>` and `<arg_value>` for each argument."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import ClassVar

from ludus.chat.formats.blocks import BlockFormat, after_space, as_text
from ludus.core.messages import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_KEY, _KEY_END, _VALUE = "<arg_key>", "</arg_key>", "<arg_value>"
_VALUE_END = re.compile(rf"</arg_value>(?=\s*(?:{_KEY}|{CLOSE}))")


class GlmFormat(BlockFormat):
    """GLM-4.7 and GLM-5, with nothing between the tags. `bind` types values by the tool's schema."""

    name: ClassVar[str] = "glm"
    opens = (OPEN,)
    closes = CLOSE
    marks = (OPEN, CLOSE, _KEY, _KEY_END, _VALUE, "</arg_value>")
    turn_ends = ("<|observation|>", "<|user|>")
    example = f"{OPEN}tool{_KEY}key{_KEY_END}{_VALUE}value</arg_value>{CLOSE}"
    gap: ClassVar[str] = ""
    between: ClassVar[str] = ""
    """What stands between the tags of a call."""
    inline_stops = (CLOSE,)

    def read_block(self, body: str, start: int) -> tuple[Iterable[ToolCall], int]:
        start += len(OPEN)
        bad = self.cut(body, start, CLOSE)
        first = body.find(_KEY, start, bad)
        position = first if first >= 0 else bad - len(CLOSE)
        if first < 0 and not body.startswith(CLOSE, position):
            return [self.wrong(f"{CLOSE} is missing")], bad
        name = body[start:position].strip()
        written: list[tuple[str, str]] = []
        while (key := after_space(body, position, _KEY)) is not None:
            key_end = body.find(_KEY_END, key)
            value = None if key_end < 0 else after_space(body, key_end + len(_KEY_END), _VALUE)
            end = None if value is None else _VALUE_END.search(body, value)
            if value is None or end is None:
                problem = f"an {_KEY} needs its {_KEY_END}, and an {_VALUE} its </arg_value> and {CLOSE}"
                return [self.wrong(problem, name)], bad
            written.append((body[key:key_end].strip(), body[value : end.start()]))
            position = end.end()
        stop = after_space(body, position, CLOSE)
        if stop is None:
            return [self.wrong(f"{CLOSE} is missing", name)], self.cut(body, position, CLOSE)
        return [self.call(name, written)], stop

    def write_calls(self, calls: Sequence[ToolCall]) -> str:
        return self.between.join(self._written(call) for call in calls)

    def _written(self, call: ToolCall) -> str:
        parts = [f"{OPEN}{call.name}"]
        for key, value in call.arguments.items():
            parts += [f"{_KEY}{key}{_KEY_END}", f"{_VALUE}{as_text(value)}</arg_value>"]
        return self.between.join([*parts, CLOSE])


class Glm45Format(GlmFormat):
    """GLM-4.5 and GLM-4.6: the same tags, each on a line of its own."""

    name: ClassVar[str] = "glm45"
    gap = between = "\n"
    example = f"{OPEN}tool\n{_KEY}key{_KEY_END}\n{_VALUE}value</arg_value>\n{CLOSE}"
