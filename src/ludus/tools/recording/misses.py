"""Why a call was not found: what was asked for, and what came nearest."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

from ludus.tools.recording.keys import NO_HISTORY, Label

_SHOWN = 300
_COMPARED = 400


def explain_miss(wanted: Label, recorded: Sequence[Label]) -> str:
    """One message with tool, arguments and the nearest recorded call."""
    asked = f"no recorded result for {wanted.tool}({_shown(wanted.arguments)})"
    return f"{asked}; {_nearest(wanted, recorded)}. Record it, or use the mode replay_or_call"


def _nearest(wanted: Label, recorded: Sequence[Label]) -> str:
    if not recorded:
        return "nothing is recorded for this tool"
    same_arguments = [one for one in recorded if one.arguments_digest == wanted.arguments_digest]
    if any(one.history == wanted.history for one in same_arguments):
        return "this very call is recorded for another version of the tool: it was changed since"
    if any(one.history == NO_HISTORY for one in same_arguments):
        return "these arguments are recorded, but when the tool was declared stateless"
    if same_arguments and wanted.history == NO_HISTORY:
        return "these arguments are recorded, but when the tool was not declared stateless"
    if same_arguments:
        return "these arguments are recorded, but for another task or after other calls"
    here = [one for one in recorded if one.history == wanted.history]
    near = max(here or recorded, key=lambda one: _likeness(wanted.arguments, one.arguments))
    where = "" if wanted.history == NO_HISTORY else " at this point" if here else " elsewhere"
    return f"the nearest recorded call{where} is {near.tool}({_shown(near.arguments)})"


def _likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, one[:_COMPARED], other[:_COMPARED], autojunk=False).quick_ratio()


def _shown(arguments: str) -> str:
    return arguments if len(arguments) <= _SHOWN else arguments[:_SHOWN] + "..."
