"""Tools by reference, as a command line or a worker process is given them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

from ludus.core.config import Config
from ludus.core.messages import ToolSet
from ludus.sandbox import SandboxConfig

ToolReference = str | dict[str, Any]
"""'module:function', 'file.py:function', a short name of the library, or a table with options.

A table `{"sandbox": {...}}` is no tool: it says where those run that run the model's code.
"""


class ToolsFile(Config):
    """What a file of tools says."""

    tools: tuple[str | dict[str, Any], ...] = ()
    """Tools, as in a recipe."""
    sandbox: SandboxConfig = SandboxConfig()
    """Where tools that run the model's code run it."""

    @property
    def references(self) -> list[ToolReference]:
        return [*self.tools, {"sandbox": self.sandbox.model_dump(mode="json")}]


def load_tools(references: Sequence[ToolReference]) -> ToolSet:
    """One tool set of all of them."""
    from ludus.tools.library import build_toolset

    places = [one["sandbox"] for one in references if _is_place(one)]
    sandbox = SandboxConfig.parse(places[-1], "sandbox") if places else None
    return build_toolset([one for one in references if not _is_place(one)], sandbox=sandbox)


def _is_place(reference: ToolReference) -> TypeGuard[dict[str, Any]]:
    return isinstance(reference, dict) and set(reference) == {"sandbox"}
