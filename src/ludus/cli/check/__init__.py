"""`ludus check`: recipes, environments, tools, rewards, data and the sandbox."""
