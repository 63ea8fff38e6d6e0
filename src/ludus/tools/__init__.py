"""Tools: plain Python functions that a model can call.

`tool` makes one of a function, `Tool` is the base class, a tool set is what an episode opens and calls.
Packages below: `library` (tools that come with Ludus), `recording` (record and replay), `hosting` (worker
processes behind the tool server), `mcp` (the tools of MCP servers); `remote` has the tools of a tool server.
"""

from ludus.tools.calling import OutputLimits
from ludus.tools.json_schema import example_of
from ludus.tools.tool import FunctionTool, LocalTools, Tool, tool, unknown_tool
from ludus.tools.toolset import CombinedTools, as_toolset, changed_tools, shut, tools_changed

__all__ = [
    "CombinedTools",
    "FunctionTool",
    "LocalTools",
    "OutputLimits",
    "Tool",
    "as_toolset",
    "changed_tools",
    "example_of",
    "shut",
    "tool",
    "tools_changed",
    "unknown_tool",
]
