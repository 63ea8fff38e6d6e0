"""Evaluation of models: `evaluate` opens a model and plays tasks, `summary` has the statistics, `study`
compares models and keeps what was played in a folder, `report` shows it.
"""
