"""Paths of calls through tools: what fits where, planned paths, their instructions, and the paths played.

`signature_graph` says which result feeds which parameter (`schema_fit`), `call_paths` plans, `path_episodes`
plays.
"""
