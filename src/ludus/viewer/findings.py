"""Findings in a run's metrics and episodes that need a person, the worst first, each with a link.

A finding is a suspicion with its evidence, in numbers, and a link to the episodes that show it. The functions
on metrics are pure; those on episodes are queries of the index, and count what their links open: training and
evaluation alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ludus.core.failures import NOTABLE_SHARE
from ludus.core.messages import Json
from ludus.observe import explain_silence
from ludus.viewer.episode_index import EpisodeIndex

Severity = Literal["error", "warning", "note"]
Rows = Sequence[Mapping[str, Any]]

_RECENT = 10
"""Steps that count as now."""
_FEWEST_STEPS = 6
"""A trend needs so many steps."""
_FEWEST_EPISODES = 16
_FEWEST_CALLS = 8


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a person should look at. `query` are filters of the episodes page."""

    kind: str
    severity: Severity
    title: str
    detail: str
    query: Mapping[str, str] = field(default_factory=dict)
    metric: str = ""
    """The metric that shows it, if one does."""

    def as_json(self, run: str) -> Json:
        found = asdict(self)
        found["query"] = {"run": run, **self.query} if self.query else None
        return found


def run_findings(
    run: str, rows: Rows, index: EpisodeIndex, *, is_live: bool, planned: int
) -> list[Json]:
    """All that was found, the worst first."""
    found = [*metric_findings(rows), *episode_findings(run, index)]
    if all(one.severity != "error" for one in found if one.kind == "no_signal"):
        found += _never_succeeds(run, index, is_live=is_live)
    if not is_live and (text := _stopped_early(rows, planned)):
        found.append(Finding("stopped", "note", "The run stopped before its end", text))
    order = {"error": 0, "warning": 1, "note": 2}
    return [one.as_json(run) for one in sorted(found, key=lambda one: order[one.severity])]


def _stopped_early(rows: Rows, planned: int) -> str:
    done = max((int(row["step"]) for row in rows), default=0)
    if not planned or done >= planned:
        return ""
    return (
        f"{done} of {planned} steps are done and no process writes it. Go on with: ludus train --resume"
    )


# From metrics.


def metric_findings(rows: Rows) -> Iterator[Finding]:
    for check in (_no_signal, _diverged, _engine_apart, _hacking, _lengths, _collapse, _truncated):
        yield from check(rows)


def _column(rows: Rows, name: str) -> list[float]:
    return [float(row[name]) for row in rows if name in row and math.isfinite(row[name])]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _recent(rows: Rows, name: str) -> float:
    """The mean over the last steps that have it; not a number where none has."""
    return _mean(_column(rows, name)[-_RECENT:])


def _succeeds(rows: Rows) -> bool:
    """Whether episodes nearly always succeed by now: what else they do is then the way to do it."""
    return _recent(rows, "success") >= 0.9


def _thirds(values: Sequence[float]) -> tuple[float, float]:
    """The means of the first and the last third."""
    size = max(1, len(values) // 3)
    return _mean(values[:size]), _mean(values[-size:])


def _no_signal(rows: Rows) -> Iterator[Finding]:
    """Most steps, or most of what is trained on, taught nothing; where all is solved, that is good news."""
    recent = [row for row in rows if "no_signal" in row][-_RECENT:]
    silent = [row for row in recent if row["no_signal"]]
    idle = _column(recent, "without_advantage")
    never_succeeds = (
        len(silent) == len(recent) and _recent(recent, "success") == 0
    )  # plain from the first step on
    is_silent = (len(recent) >= 3 and len(silent) >= 0.5 * len(recent)) or never_succeeds
    if not is_silent and not (len(idle) >= 3 and _mean(idle) >= 0.9):
        return
    usual = {n: _recent(silent if is_silent else recent, n) for n in ("success", "reward", "reward_std")}
    why = explain_silence({name: value for name, value in usual.items() if not math.isnan(value)})
    told = f"Every advantage was 0 (mean reward {usual['reward']:.3g}). Most likely {why.likely}: {why.advice}."
    if why.is_solved:
        title = f"Solved: nothing was left to learn in {len(silent)} of the last {len(recent)} steps"
        yield Finding("solved", "note", title, told, {"sort": "step"}, "success")
    elif is_silent:
        title = f"Nothing to learn from in {len(silent)} of the last {len(recent)} steps"
        title += f": {usual['success']:.1%} succeed" if usual["success"] <= 0.05 else ""
        severity: Severity = "note" if _succeeds(rows) else "error"
        yield Finding("no_signal", severity, title, told, {"sort": "step"}, "no_signal")
    else:
        title = f"{_mean(idle):.1%} of what is trained on has nothing to teach"
        told = f"Its advantage is 0. Most likely {why.likely}: {why.advice}."
        yield Finding("no_signal", "warning", title, told, {"sort": "step"}, "without_advantage")


def _diverged(rows: Rows) -> Iterator[Finding]:
    for name in dict.fromkeys(name for row in rows for name in row):
        if name.rpartition("/")[2] not in ("loss", "gradient_norm", "kl", "entropy"):
            continue
        broken = [row["step"] for row in rows if name in row and not math.isfinite(row[name])]
        if broken:
            yield Finding(
                "diverged",
                "error",
                f"{name} is not a number from step {broken[0]} on",
                "Training has diverged: lower the learning rate, or look for rewards that are not finite.",
                metric=name,
            )
            return


def _engine_apart(rows: Rows) -> Iterator[Finding]:
    recent = _column(rows, "logprob_difference_mean")[-_RECENT:]
    if recent and _mean(recent) > 0.02:
        yield Finding(
            "engine_apart",
            "error",
            f"Engine and trainer disagree by {_mean(recent):.2g} nats per token",
            "The log-probabilities of sampling and training differ: the gradient is that of another policy. "
            "Look at dtype, at the attention kernels, and at what was sampled with (docs/engine.md).",
            metric="logprob_difference_mean",
        )


def _hacking(rows: Rows) -> Iterator[Finding]:
    both = [row for row in rows if "reward" in row and "success" in row]
    is_told = any("reward/success" in row for row in both)
    if len(both) < _FEWEST_STEPS or not (is_told or any(_column(both, "success"))):
        return  # a total that never comes to 1 is no failure, where no reward says what success is
    (reward_first, reward_last), (success_first, success_last) = (
        _thirds(_column(both, name)) for name in ("reward", "success")
    )
    spread = max(_column(both, "reward")) - min(_column(both, "reward"))
    rise, gain = reward_last - reward_first, success_last - success_first
    is_stuck = gain < 0.25 * rise and gain < 0.05 and not _succeeds(both)
    if spread > 0 and rise > 0.3 * spread and rise > 0.05 and is_stuck:
        yield Finding(
            "reward_hacking",
            "error",
            f"Reward rises ({reward_first:.2f} → {reward_last:.2f}) while success does not "
            f"({success_first:.1%} → {success_last:.1%})",
            f"{_risen_part(both)}The policy may have found a way to be paid without doing the task: look at "
            "what episodes with a high reward that did not succeed have in common.",
            {"success": "no", "sort": "reward"},
            "reward",
        )


def _risen_part(rows: Rows) -> str:
    names = {name for row in rows for name in row if name.startswith("reward/")} - {"reward/success"}
    rises = {name: _thirds(_column(rows, name)) for name in names}
    if not rises:
        return ""
    name, (first, last) = max(rises.items(), key=lambda one: one[1][1] - one[1][0])
    return f"The part “{name.removeprefix('reward/')}” rose most ({first:.2f} → {last:.2f}). "


def _lengths(rows: Rows) -> Iterator[Finding]:
    lengths = _column(rows, "tokens/action")
    if len(lengths) < _FEWEST_STEPS:
        return
    first, last = _thirds(lengths)
    before, now = _thirds(_column(rows, "success"))
    is_better = now > before + 0.05
    if first > 0 and last < 0.3 * first and not _succeeds(rows):
        yield Finding(
            "short",
            "note" if is_better else "warning",
            f"Answers have shrunk from {first:.0f} to {last:.0f} tokens",
            f"Success has risen with it, from {before:.1%} to {now:.1%}."
            if is_better
            else "A policy that says less and less may have given up, or found a short way to be paid.",
            {"sort": "tokens", "order": "asc"},
            "tokens/action",
        )
    if last > 3 * first and last > 64:
        yield Finding(
            "long",
            "warning",
            f"Answers have grown from {first:.0f} to {last:.0f} tokens",
            "Length may be what is rewarded; look at rl.overlong and at the longest episodes.",
            {"sort": "tokens"},
            "tokens/action",
        )


def _collapse(rows: Rows) -> Iterator[Finding]:
    entropy = _column(rows, "entropy")
    if len(entropy) >= _FEWEST_STEPS:
        first, last = _thirds(entropy)
        if last < 0.02 and last < 0.1 * first and not _succeeds(rows):
            yield Finding(
                "collapse",
                "warning",
                f"Entropy has collapsed from {first:.2g} to {last:.2g} nats",
                "The policy is almost deterministic: attempts of a group are alike and teach nothing.",
                metric="entropy",
            )


def _truncated(rows: Rows) -> Iterator[Finding]:
    recent = _column(rows, "truncated")[-_RECENT:]
    if len(recent) >= 3 and _mean(recent) > 0.5 and not _succeeds(rows):
        yield Finding(
            "truncated",
            "warning",
            f"{_mean(recent):.1%} of the episodes run out of turns or tokens",
            "Raise budgets.max_turns or budgets.max_tokens, or let budgets.remind tell the model.",
            {"stop": "max_turns"},
            "truncated",
        )


# From episodes.


def episode_findings(run: str, index: EpisodeIndex) -> Iterator[Finding]:
    """Findings in the recorded episodes, training and evaluation alike."""
    checks: Sequence[Callable[[str, EpisodeIndex], Iterator[Finding]]] = (
        _lost,
        _tools,
        _malformed,
        _paid_for_nothing,
        _one_answer,
    )
    for check in checks:
        yield from check(run, index)


def _never_succeeds(run: str, index: EpisodeIndex, *, is_live: bool) -> Iterator[Finding]:
    """Not one episode has succeeded, where a reward says what success is, or none has been paid.

    What an untrained model was measured at is no news while its run goes on.
    """
    [row] = index.rows(
        "SELECT count(*) AS n, count(*) FILTER (success) AS good, max(reward) AS most, "
        'bool_or(contains(parts, \'"n":"success"\')) AS is_told FROM episodes '
        "WHERE run = ? AND success IS NOT NULL AND (step > 0 OR NOT ?)",
        [run, is_live],
    )
    if row["n"] < _FEWEST_EPISODES or row["good"] or not (row["is_told"] or row["most"] <= 0):
        return
    yield Finding(
        "never_succeeds",
        "error",
        f"No episode has succeeded: 0 of {row['n']}",
        "Read what the model does and what it was paid for. Most often the tasks are too hard for it "
        "(a warm start, easier tasks), or its answers lack the form that the reward looks for.",
        {"success": "no", "sort": "reward"},
        "success",
    )


def _lost(run: str, index: EpisodeIndex) -> Iterator[Finding]:
    [total] = index.rows(
        "SELECT count(*) AS n, count(failure) AS lost, count(DISTINCT failure) AS boundaries "
        "FROM episodes WHERE run = ?",
        [run],
    )
    if not total["lost"] or total["lost"] < NOTABLE_SHARE * total["n"]:
        return
    rows = index.rows(
        "SELECT failure, failure_message AS message, count(*) AS n, min(step) AS first FROM episodes "
        "WHERE run = ? AND failure IS NOT NULL GROUP BY ALL ORDER BY n DESC LIMIT 1",
        [run],
    )
    worst = rows[0]
    yield Finding(
        "lost",
        "error",
        f"{total['lost']} of {total['n']} episodes were lost",
        f"Most often ({worst['n']} times, from step {worst['first']} on), at the boundary "
        f"“{worst['failure']}”: {worst['message']}. They are in no loss and no baseline.",
        {"failure": worst["failure"] if total["boundaries"] == 1 else "any"},
        "failure_share",
    )


def _tools(run: str, index: EpisodeIndex) -> Iterator[Finding]:
    """A tool whose calls fail, nearly always."""
    rows = index.rows(
        "WITH named AS (SELECT unnest(list_filter(tools, lambda t: t <> '')) AS tool, faults, faulted, step "
        "FROM episodes WHERE run = ?) "
        "SELECT tool, count(*) AS episodes, sum(list_contains(faulted, tool)::INTEGER) AS hit, "
        "min(step) FILTER (list_contains(faulted, tool)) AS first, "
        "sum(len(list_filter(list_zip(faulted, faults), lambda p: p[1] = tool AND p[2] = 'tool_timeout'))) "
        "AS slow, "
        "sum(len(list_filter(faulted, lambda f: f = tool))) AS errors, "
        "sum(len(list_filter(list_zip(faulted, faults), lambda p: p[1] = tool AND p[2] = 'unknown_tool'))) "
        "AS unknown, "
        "avg(list_contains(faulted, tool)::INTEGER) FILTER (step >= (SELECT max(step) - 5 FROM named)) AS late "
        "FROM named GROUP BY tool ORDER BY hit DESC LIMIT 50",
        [run],
    )
    for row in rows:
        hit, episodes = row["hit"] or 0, row["episodes"]
        late = row["late"]  # none where it has not been called lately
        if episodes < _FEWEST_CALLS or hit < 0.6 * episodes or (late is not None and late < 0.3):
            continue
        name = row["tool"]
        if (row["unknown"] or 0) > 0.5 * (row["errors"] or 1):
            yield Finding(
                "unknown_tool",
                "warning",
                f"The model calls “{name}”, which does not exist, in {hit} episodes",
                "Tell it which tools there are, or give it this one.",
                {"tool": name, "faulted": name},
            )
            continue
        slow = (row["slow"] or 0) > 0.5 * (row["errors"] or 1)
        what = "times out" if slow else "fails"
        yield Finding(
            "tool",
            "error",
            f"The tool “{name}” {what} in {hit} of the {episodes} episodes that call it",
            f"{row['errors']} of its calls were answered by an error, first at step {row['first']}. "
            + (
                "It takes longer than its timeout: look at what it waits for."
                if slow
                else "Look at what it is given and what it answers."
            ),
            {"tool": name, "faulted": name},
            f"tool/{name}/errors",
        )


def _malformed(run: str, index: EpisodeIndex) -> Iterator[Finding]:
    rows = index.rows(
        "SELECT count(*) AS n, sum(list_contains(faults, 'malformed_call')::INTEGER) AS hit, "
        "min(step) FILTER (list_contains(faults, 'malformed_call')) AS first, "
        "avg(list_contains(faults, 'malformed_call')::INTEGER) FILTER (step >= (SELECT max(step) - 5 "
        "FROM episodes WHERE run = $1)) AS late FROM episodes WHERE run = $1",
        [run],
    )
    hit, count, late = rows[0]["hit"] or 0, rows[0]["n"], rows[0]["late"] or 0
    if hit < _FEWEST_CALLS or late < 0.05 or (hit < 0.1 * count and late < 0.2):
        return  # few, or it has learned better
    where = index.rows(
        "SELECT regexp_replace(task, '[-_/ ]?[0-9]+.*$', '') AS kind, count(*) AS n, "
        "avg(list_contains(faults, 'malformed_call')::INTEGER) AS share FROM episodes WHERE run = ? "
        "GROUP BY kind HAVING n >= 4 ORDER BY share DESC",
        [run],
    )
    worst = where[0] if len(where) > 1 and where[0]["share"] > 0.5 > where[-1]["share"] else None
    places = (
        f" Nearly all are of the tasks “{worst['kind']}…” ({worst['share']:.1%} of them)."
        if worst
        else ""
    )
    yield Finding(
        "malformed",
        "error" if worst or hit >= 0.3 * count else "warning",
        f"{hit} of {count} episodes write tool calls that cannot be read",
        f"From step {rows[0]['first']} on.{places} The model writes calls in another form than agent.format "
        "reads: compare what the prompt shows it (Prompt, in the replay) with what it writes.",
        {"fault": "malformed_call"},
        "fault_share/malformed_call",
    )


def _paid_for_nothing(run: str, index: EpisodeIndex) -> Iterator[Finding]:
    """Episodes that did not succeed and are paid as much as those that did."""
    rows = index.rows(
        "WITH own AS (SELECT * FROM episodes WHERE run = $1 AND reward IS NOT NULL AND success IS NOT NULL), "
        "good AS (SELECT median(reward) AS usual FROM own WHERE success) "
        "SELECT (SELECT usual FROM good) AS usual, count(*) AS n, count(*) FILTER (NOT success) AS failed, "
        "count(*) FILTER (NOT success AND reward >= (SELECT usual FROM good)) AS paid, "
        "min(step) FILTER (NOT success AND reward >= (SELECT usual FROM good)) AS first FROM own",
        [run],
    )
    row = rows[0]
    if row["usual"] is None or row["paid"] < max(5, 0.05 * row["n"]):
        return
    part = _paying_part(run, index, row["usual"])
    yield Finding(
        "paid_for_nothing",
        "error",
        f"{row['paid']} episodes were paid like a success and did not succeed",
        f"A success usually has a reward of {row['usual']:.3g}; {row['paid']} of {row['failed']} failures have "
        f"that or more, from step {row['first']} on.{part} This is what reward hacking looks like.",
        {"success": "no", "least_reward": repr(row["usual"]), "sort": "reward"},
        "reward",
    )


def _paying_part(run: str, index: EpisodeIndex, usual: float) -> str:
    rows = index.rows(
        'WITH own AS (SELECT unnest(from_json(parts, \'[{"n":"VARCHAR","v":"DOUBLE"}]\')) AS part '
        "FROM episodes WHERE run = ? AND NOT success AND reward >= ?) "
        "SELECT part.n AS name, avg(part.v) AS mean FROM own GROUP BY 1 ORDER BY 2 DESC LIMIT 1",
        [run, usual],
    )
    if not rows or rows[0]["mean"] is None:
        return ""
    return f" Most of it comes from the part “{rows[0]['name']}” ({rows[0]['mean']:.2g} on average)."


def _one_answer(run: str, index: EpisodeIndex) -> Iterator[Finding]:
    """A finding where many different questions get one answer."""
    rows = index.rows(
        "WITH own AS (SELECT * FROM episodes WHERE run = $1 AND answer IS NOT NULL AND trim(answer) <> '' AND "
        "target IS NOT NULL AND target <> 'null' AND step >= (SELECT max(step) - 10 FROM episodes "
        "WHERE run = $1)) SELECT answer, (SELECT max(step) - 10 FROM episodes WHERE run = $1) AS since, "
        "count(*) AS n, count(DISTINCT target) AS targets, (SELECT count(*) FROM own) AS total, "
        "avg(success::INTEGER) AS success FROM own GROUP BY answer ORDER BY n DESC LIMIT 1",
        [run],
    )
    if not rows:
        return
    row = rows[0]
    is_wrong = (row["success"] or 0) < 0.5  # an agent that ends with "done" may have done it
    is_usual = row["n"] > 0.7 * row["total"] and row["targets"] >= 4
    if row["total"] >= _FEWEST_EPISODES and is_usual and is_wrong:
        yield Finding(
            "one_answer",
            "warning",
            f"One answer to everything: {row['n']} of {row['total']} recent episodes say "
            f"“{row['answer'][:60]}”",
            f"{row['targets']} different targets get the same answer; {row['success'] or 0:.1%} succeed.",
            {"answer": row["answer"], "first_step": str(max(0, row["since"]))},
        )
