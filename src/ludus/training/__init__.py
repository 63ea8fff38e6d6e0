"""Training: recipes, packing, updates, the loop, evaluation, reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ludus.core.registry import lazy_exports

if TYPE_CHECKING:
    from ludus.training.api import Result, evaluate, rollout, train, train_async
    from ludus.training.evaluation.evaluate import Evaluation
    from ludus.training.learner import Learner
    from ludus.training.loop import Trainer
    from ludus.training.parts import Parts, load_parts
    from ludus.training.recipe import Recipe, load_recipe
    from ludus.training.run_context import RunContext, build_run_context

__all__ = [
    "Evaluation",
    "Learner",
    "Parts",
    "Recipe",
    "Result",
    "RunContext",
    "Trainer",
    "build_run_context",
    "evaluate",
    "load_parts",
    "load_recipe",
    "rollout",
    "train",
    "train_async",
]

__getattr__, __dir__ = lazy_exports(__name__)
