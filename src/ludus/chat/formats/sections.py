"""Calls in a section of special tokens: DeepSeek-V3 to V3.1, Kimi-K2."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from ludus.chat.formats.base import write_json
from ludus.chat.formats.blocks import BlockFormat, after_space
from ludus.core.messages import ToolCall


class DeepSeekV31Format(BlockFormat):
    """DeepSeek-V3.1: the name, a separator, and the arguments as JSON."""

    name: ClassVar[str] = "deepseek_v31"
    opens = ("<｜tool▁calls▁begin｜>",)
    closes = "<｜tool▁calls▁end｜>"
    call_begin: ClassVar[str] = "<｜tool▁call▁begin｜>"
    separator: ClassVar[str] = "<｜tool▁sep｜>"
    call_end: ClassVar[str] = "<｜tool▁call▁end｜>"
    marks = (*opens, closes, call_begin, separator, call_end)
    example = f'{opens[0]}{call_begin}tool{separator}{{"key": "value"}}{call_end}{closes}'
    gap = ""
    between: ClassVar[str] = ""

    def read_block(self, body: str, start: int) -> tuple[Iterable[ToolCall], int]:
        position = start + len(self.opens[0])
        calls: list[ToolCall] = []
        while (begin := after_space(body, position, self.call_begin)) is not None:
            end = body.find(self.call_end, begin)
            if end < 0:
                return [*calls, self.wrong(f"{self.call_end} is missing")], len(body)
            before, separator, after = body[begin:end].partition(self.separator)
            calls.append(
                self.read_call(before, after)
                if separator
                else self.wrong(f"{self.separator} is missing")
            )
            position = end + len(self.call_end)
        if not calls:
            calls.append(self.wrong(f"{self.call_begin} is missing"))
        # the end of the section may be left out: the turn ends there
        return calls, after_space(body, position, self.closes) or position

    def read_call(self, before: str, after: str) -> ToolCall:
        """The call of what stands before the separator and after it."""
        return self.json_call(before, after)

    def write_calls(self, calls: Sequence[ToolCall]) -> str:
        written = self.between.join(
            f"{self.call_begin}{self.written(call, number)}{self.call_end}"
            for number, call in enumerate(calls)
        )
        return f"{self.opens[0]}{written}{self.closes}"

    def written(self, call: ToolCall, number: int) -> str:
        """A call within its tokens."""
        return f"{call.name}{self.separator}{write_json(call.arguments)}"


class DeepSeekV3Format(DeepSeekV31Format):
    """DeepSeek-V3 and R1: the kind of the call, then its name and a fenced block of JSON."""

    name: ClassVar[str] = "deepseek_v3"
    example = DeepSeekV31Format.example.replace(
        '<｜tool▁sep｜>{"key": "value"}', '\n```json\n{"key": "value"}\n```'
    ).replace("begin｜>tool\n", "begin｜>function<｜tool▁sep｜>tool\n")
    between = "\n"

    def read_call(self, before: str, after: str) -> ToolCall:
        name, fence, block = after.partition("\n```json\n")
        if not fence or not block.rstrip().endswith("```"):
            return self.wrong("the arguments must stand in a block of ```json", name.strip())
        return self.json_call(name, block.rstrip().removesuffix("```"))

    def written(self, call: ToolCall, number: int) -> str:
        return f"function{self.separator}{call.name}\n```json\n{write_json(call.arguments)}\n```"


class KimiFormat(DeepSeekV31Format):
    """Kimi-K2: the name with a number, `functions.search:0`."""

    name: ClassVar[str] = "kimi"
    opens = ("<|tool_calls_section_begin|>",)
    closes = "<|tool_calls_section_end|>"
    call_begin = "<|tool_call_begin|>"
    separator = "<|tool_call_argument_begin|>"
    call_end = "<|tool_call_end|>"
    marks = (*opens, closes, call_begin, separator, call_end)
    example = f'{opens[0]}{call_begin}functions.tool:0{separator}{{"key": "value"}}{call_end}{closes}'

    def read_call(self, before: str, after: str) -> ToolCall:
        name, colon, number = before.strip().removeprefix("functions.").rpartition(":")
        return self.json_call(name if colon and number.isdigit() else f"{name}{colon}{number}", after)

    def written(self, call: ToolCall, number: int) -> str:
        return f"functions.{call.name}:{number}{self.separator}{write_json(call.arguments)}"
