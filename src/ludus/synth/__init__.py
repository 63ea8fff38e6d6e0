"""Synthesis: making examples to learn from, and telling good ones from bad ones.

A method (`method.METHODS`) plays episodes, asks language models, and gives examples with how they were made;
each candidate that is left out has a reason. `quality` has the checks, which any file of episodes can be put
through.
"""

from ludus.synth.episodes import EpisodeStep, action_set, quality_of, steps_of
from ludus.synth.method import (
    METHODS,
    MeteredModel,
    SourcedTask,
    SynthConfig,
    SynthContext,
    SynthMethod,
    TaskSource,
    load_method,
)
from ludus.synth.result import (
    Cost,
    ItemResult,
    Rejected,
    SynthFolder,
    SynthResult,
    page_html,
    provenance_of,
    with_provenance,
    write_result,
)

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
