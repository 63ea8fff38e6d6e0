"""Tools: plain Python functions that a model can call.

`tool` makes one of a function, `Tool` is the base class, a tool set is what an episode opens and calls.
"""

from ludus.tools.tool import FunctionTool, Tool, tool
from ludus.tools.toolset import CombinedTools, LocalTools, as_toolset, shut

__all__ = ["CombinedTools", "FunctionTool", "LocalTools", "Tool", "as_toolset", "shut", "tool"]
