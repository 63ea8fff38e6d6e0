"""Paths of calls through tools: what fits where (`signatures`), planned paths, and the methods on them."""
