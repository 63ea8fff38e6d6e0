"""Evaluation of models: what was measured with how much certainty, played once and kept in a folder.

`summary` is the statistics of episodes, `study` plays models under several budgets, `results` keeps what was
played, `report` and `plot` show it, `players` opens a model wherever it is.
"""
