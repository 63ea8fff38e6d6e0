"""Paths of calls through tools: what fits where, planned paths, their instructions, and the paths played.

`signature_graph` says which result feeds which parameter (`schema_fit`), `call_paths` plans, `instructions` has
the user's words, `path_episodes` plays, and `api_graph` says which steps and parameters a model fails at.
"""
