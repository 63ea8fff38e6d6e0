"""Why episodes did not succeed: one failure mode for each, with examples and what would help against it.

The advice of ToolRL ("begin with completion alone, watch how the agent fails, add one penalty for each failure
mode") needs an observer. Each scored episode without success has the first of these that fits:

    format        its last call could not be parsed, or half of its calls could not
    tool_choice   the same with tools that do not exist; or it called no tool, and most successes did, or there
                  are tools and hardly an episode calls one
    arguments     the same with arguments that did not fit, or that the tool could not work with
    efficiency    it ran out of turns or tokens, or was cut off within its last turn
    knowledge     it ended by itself, called its tools without a fault, and was wrong

Episodes lost to infrastructure failures have no mode: they are counted elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ludus.core.failures import NOTABLE_SHARE, Fault
from ludus.core.generation import FinishReason
from ludus.core.trajectory import Trajectory, is_success
from ludus.observe.report import Cell, ReportTable, Share, markdown_text


class FailureMode(StrEnum):
    """The reason why an episode did not succeed."""

    FORMAT = "format"
    TOOL_CHOICE = "tool_choice"
    ARGUMENTS = "arguments"
    EFFICIENCY = "efficiency"
    KNOWLEDGE = "knowledge"


_MODE_OF = {
    Fault.MALFORMED_CALL: FailureMode.FORMAT,
    Fault.UNKNOWN_TOOL: FailureMode.TOOL_CHOICE,
    Fault.BAD_ARGUMENTS: FailureMode.ARGUMENTS,
    Fault.TOOL_RAISED: FailureMode.ARGUMENTS,
    Fault.TOOL_TIMEOUT: FailureMode.ARGUMENTS,
    Fault.LIMIT: FailureMode.ARGUMENTS,
}

ADVICE = {
    FailureMode.FORMAT: "choose the agent.format that the model was trained with; show it the form by a warm "
    "start (a few demonstrations, or ludus synth rejection on its own successes); then a penalty, "
    "rl.broken.tool_error = -0.1",
    FailureMode.TOOL_CHOICE: "show it calls in the form that agent.format reads (a warm start); say in each "
    "tool's description when to use it; pay for use while it is rare (the group reward curiosity, the reward "
    "tool_bonus); data: ludus synth hardgen on the tools that are confused",
    FailureMode.ARGUMENTS: "give parameters types, descriptions and an example in the tool's docstring, and "
    "let its errors say what was expected; data: ludus synth magnet; a penalty, rl.broken.tool_error = -0.1",
    FailureMode.EFFICIENCY: "where turns are cut, raise budgets.max_turn_tokens; else let the horizon grow "
    "(rl.curriculum on budgets.max_turns) before raising the budget for good; then a price: "
    "rl.broken.no_answer = -0.1, rl.overlong, or a penalty on turns",
    FailureMode.KNOWLEDGE: "nothing is wrong with the form: easier tasks first (rl.curriculum on "
    "tasks.difficulty), more attempts, a reward with partial credit, a tool that looks things up, more data",
}
_EXAMPLES = 3
_SHOWN = 200
_CALLED_BY_MOST = 0.5


@dataclass(frozen=True, slots=True)
class FailureExample:
    """An episode that shows a mode."""

    task: str
    attempt: int
    excerpt: str
    """The end of what the model wrote, or of what it was answered where that was a fault."""


@dataclass(frozen=True, slots=True)
class ModeFinding:
    """How often a mode was found, and where to look."""

    mode: FailureMode
    count: int
    examples: tuple[FailureExample, ...]

    @property
    def advice(self) -> str:
        return ADVICE[self.mode]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The failure modes of some episodes, the most frequent one first."""

    scored: int
    findings: tuple[ModeFinding, ...]

    @property
    def failed(self) -> int:
        return sum(finding.count for finding in self.findings)

    @property
    def metrics(self) -> dict[str, float]:
        """The share of the scored episodes that each mode kept from succeeding."""
        counts = {finding.mode: finding.count for finding in self.findings}
        return {
            f"failure_mode/{mode.value}": counts.get(mode, 0) / self.scored
            for mode in FailureMode
            if self.scored
        }

    @property
    def markdown(self) -> str:
        """A table, and for each mode its examples and the advice; empty where nothing failed."""
        if not self.findings:
            return ""
        rows: list[list[Cell]] = [
            [one.mode.value, one.count, Share(one.count / self.scored), one.advice]
            for one in self.findings
        ]
        columns = ("failure mode", "episodes", "of all", "what would help")
        title = f"{self.failed} of {self.scored} scored episodes did not succeed.\n"
        parts = [title, ReportTable(columns, rows).markdown()]
        for finding in self.findings:
            shown = [
                f"- task `{_inline(example.task)}`, attempt {example.attempt}: {markdown_text(example.excerpt)}"
                for example in finding.examples
            ]
            parts.append(f"**{finding.mode.value}**, for instance:\n\n" + "\n".join(shown) + "\n")
        return "\n".join(parts)


def diagnose(episodes: Sequence[Trajectory], *, has_tools: bool = False) -> Diagnosis:
    """The failure modes of an evaluation, or of any episodes that belong together.

    `has_tools`: whether the model was given tools.
    """
    scored = [one for one in episodes if one.is_trainable]
    successes = [one for one in scored if is_success(one)]
    callers = sum(bool(one.calls) for one in successes)
    needs_tools = bool(successes) and callers > _CALLED_BY_MOST * len(successes)
    tries = sum(bool(one.calls or one.faults) for one in scored)
    needs_tools |= has_tools and not successes and tries < NOTABLE_SHARE * len(scored)
    found: dict[FailureMode, list[Trajectory]] = {}
    for episode in scored:
        if not is_success(episode):
            found.setdefault(failure_mode(episode, needs_tools=needs_tools), []).append(episode)
    ordered = sorted(found.items(), key=lambda item: (-len(item[1]), list(FailureMode).index(item[0])))
    findings = [ModeFinding(mode, len(those), _examples(those)) for mode, those in ordered]
    return Diagnosis(len(scored), tuple(findings))


def failure_mode(episode: Trajectory, *, needs_tools: bool = False) -> FailureMode:
    """The failure mode of a scored episode. `needs_tools`: most episodes that succeed call a tool."""
    faults = Counter(_MODE_OF[fault] for fault in episode.faults)
    calls = sum(max(len(action.calls), len(action.faults)) for action in episode.actions)
    last = next((one for one in reversed(episode.actions) if one.calls or one.faults), None)
    if last is not None and last.faults:
        return _MODE_OF[last.faults[-1]]
    if calls and faults.total() >= calls / 2:
        return faults.most_common(1)[0][0]
    if needs_tools and not calls:
        return FailureMode.TOOL_CHOICE
    is_cut = bool(episode.actions) and episode.actions[-1].finish is FinishReason.LENGTH
    if episode.stop.is_truncated or is_cut:
        return FailureMode.EFFICIENCY
    return FailureMode.KNOWLEDGE


def _examples(episodes: Sequence[Trajectory]) -> tuple[FailureExample, ...]:
    """Examples of a mode, from different tasks where there are enough."""
    first_of = {one.task.id: one for one in reversed(episodes)}
    unique = {id(one): one for one in (*reversed(first_of.values()), *episodes)}
    chosen = list(unique.values())[:_EXAMPLES]
    last = [one.messages[-1].content if one.messages else one.answer or "" for one in chosen]
    return tuple(
        FailureExample(one.task.id, one.attempt, " ".join(text.split())[-_SHOWN:])
        for one, text in zip(chosen, last, strict=True)
    )


def _inline(text: str) -> str:
    return " ".join(text.split()).replace("`", "'")[:_SHOWN]


# Why the rewards of a step taught nothing

SOLVED = 0.98
"""From this success on, attempts that are all alike are good news."""


@dataclass(frozen=True, slots=True)
class Silence:
    """The likely reason, and the advice."""

    likely: str
    advice: str
    is_solved: bool = False


def explain_silence(row: Mapping[str, float]) -> Silence:
    """From a step's success, reward and spread of rewards, or their means over several."""
    success, reward, spread = row.get("success"), row.get("reward"), row.get("reward_std")
    if success is not None and success >= SOLVED:
        return Silence(
            "the tasks are solved, or were too easy from the start",
            "go on with harder tasks, or let the run end here (evaluation.patience)",
            is_solved=True,
        )
    if spread == 0 and success == 0 and not reward:
        return Silence(
            "the tasks are too hard, or no answer has the form that the reward looks for",
            "try a warm start, easier tasks or a curriculum, a reward with partial credit, more rl.attempts, "
            "or rl.refill",
        )
    if spread == 0:
        return Silence(
            "the reward pays every episode the same",
            "look at what it pays for (ludus check reward), and give partial credit",
        )
    return Silence(
        "the attempts at each task do the same (the policy is almost deterministic, look at entropy), or the "
        "rewards do not tell them apart",
        "try more rl.attempts, rl.refill, a higher sampling.temperature, or a reward with partial credit",
    )
