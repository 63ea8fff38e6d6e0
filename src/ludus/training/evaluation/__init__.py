"""Evaluation: `evaluate` plays, `summary` has statistics, `study` compares models, `report` shows them."""
