"""`ludus serve`: tools, environments, models and MCP servers."""
