"""Evaluation of models: `evaluate` opens a model and plays tasks, `summary` has the statistics, `study`
compares models and keeps what was played in a folder, `report` shows it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ludus.core.registry import lazy_exports

if TYPE_CHECKING:
    from ludus.training.evaluation.evaluate import EvalModel, Evaluation, find_model
    from ludus.training.evaluation.report import (
        comparison_table,
        full_table,
        short_table,
        single_table,
        study_json,
        study_markdown,
        write_report,
    )
    from ludus.training.evaluation.study import (
        EvalTasks,
        ModelResult,
        ResultsFolder,
        Study,
        StudyPlan,
        eval_tasks_of,
        run_study,
        settings_of,
    )
    from ludus.training.evaluation.summary import Summary, SummaryOptions, compare, summarise

__all__ = [
    "EvalModel",
    "EvalTasks",
    "Evaluation",
    "ModelResult",
    "ResultsFolder",
    "Study",
    "StudyPlan",
    "Summary",
    "SummaryOptions",
    "compare",
    "comparison_table",
    "eval_tasks_of",
    "find_model",
    "full_table",
    "run_study",
    "settings_of",
    "short_table",
    "single_table",
    "study_json",
    "study_markdown",
    "summarise",
    "write_report",
]

__getattr__, __dir__ = lazy_exports(__name__)
