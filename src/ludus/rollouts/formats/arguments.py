"""Formats in which a block of text is a call: which tool a block goes to, and as which argument."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ludus.core.failures import ConfigError
from ludus.core.messages import ToolCall, ToolSpec
from ludus.rollouts.formats.base import malformed
from ludus.rollouts.formats.json_calls import BadJson, whole_json, write_json

_FENCED = re.compile(r"```\w*\n(.*?)\n?```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Target:
    """A tool, and the argument that a block's text becomes; None when the block is a JSON object."""

    tool: str
    argument: str | None

    @classmethod
    def parse(cls, text: str) -> Target:
        """`tool.argument`, or `tool` alone when the block is to be a JSON object of all arguments."""
        tool, dot, argument = text.partition(".")
        if not tool or (dot and not argument):
            raise ConfigError(f"a target is written 'tool.argument' or 'tool', not {text!r}")
        return cls(tool, argument or None)

    @classmethod
    def of(cls, spec: ToolSpec) -> Target:
        """The tool's main argument: the only one, or the only one that must be given."""
        return cls(spec.name, main_argument(spec))

    def call(self, block: str, example: str) -> ToolCall:
        """The call that a block of text means."""
        if self.argument is not None:
            return ToolCall(self.tool, {self.argument: block})
        try:
            arguments = whole_json(block) if block.strip() else {}
        except BadJson as problem:
            return malformed(f"the arguments cannot be read: {problem}; write {example}", self.tool)
        if not isinstance(arguments, dict):
            return malformed(f"the arguments must be a JSON object; write {example}", self.tool)
        return ToolCall(self.tool, arguments)

    def block(self, call: ToolCall) -> str:
        """The text of a block that means `call`."""
        if self.argument is None:
            return write_json(call.arguments)
        value = call.arguments.get(self.argument, "")
        return value if isinstance(value, str) else write_json(value)


def targets(written: Mapping[str, str]) -> dict[str, Target]:
    """Targets by block name, as options give them: `{"python": "python.code"}`."""
    return {name: Target.parse(text) for name, text in written.items()}


def main_argument(spec: ToolSpec) -> str | None:
    """The one argument that a tool takes or insists on; None when there is no such one."""
    properties = list(spec.parameters.get("properties") or {})
    required = [name for name in spec.parameters.get("required") or [] if name in properties]
    if len(properties) == 1:
        return str(properties[0])
    return str(required[0]) if len(required) == 1 else None


def summaries(tools: Sequence[ToolSpec]) -> str:
    """One line for each tool: what it does and what it takes."""
    return "\n".join(
        f"- {tool.name}: {' '.join(tool.description.split())} "
        f"Arguments: {write_json(tool.parameters.get('properties') or {})}"
        for tool in tools
    )


def without_fence(code: str) -> str:
    """Code without the Markdown fence around all of it, which ReTool's models write inside their tag."""
    found = _FENCED.fullmatch(code.strip())
    return code if found is None else found[1]


def without_frame(block: str) -> str:
    """`block` without the one line break after its opening and the one before its end."""
    return block.removeprefix("\n").removesuffix("\n")
