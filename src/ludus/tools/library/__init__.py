"""Tools that come with Ludus, and `build_toolset`, which makes a tool set of what a recipe names.

Nothing here is imported before it is asked for: `TOOLS` holds names only.
"""

from ludus.tools.library.building import TOOLS, build_toolset

__all__ = ["TOOLS", "build_toolset"]
