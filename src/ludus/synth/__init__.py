"""Synthesis: making examples to learn from, and telling good ones from bad ones.

A method (`method.METHODS`) plays episodes, asks language models, and gives examples with how they were made;
each candidate that is left out has a reason. `quality` has the checks, which any file of episodes can be put
through.
"""

from ludus.synth.asking import MeteredModel
from ludus.synth.method import (
    METHODS,
    SourcedTask,
    SynthConfig,
    SynthContext,
    SynthMethod,
    TaskSource,
    load_method,
)
from ludus.synth.report import page_html, write_result
from ludus.synth.result import (
    Cost,
    ItemResult,
    Rejected,
    SynthFolder,
    SynthResult,
    provenance_of,
    with_provenance,
)
from ludus.synth.steps import EpisodeStep, action_set, quality_of, steps_of

__all__ = [
    "METHODS",
    "Cost",
    "EpisodeStep",
    "ItemResult",
    "MeteredModel",
    "Rejected",
    "SourcedTask",
    "SynthConfig",
    "SynthContext",
    "SynthFolder",
    "SynthMethod",
    "SynthResult",
    "TaskSource",
    "action_set",
    "load_method",
    "page_html",
    "provenance_of",
    "quality_of",
    "steps_of",
    "with_provenance",
    "write_result",
]
