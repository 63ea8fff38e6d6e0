"""Findings of a run for the viewer: those of its metrics, and of its episodes, counted by queries of the index.

What is a finding, `ludus.observe.findings` decides; here are the counts, and links to the episodes that were
counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from ludus.core.messages import Json
from ludus.observe.findings import (
    FEWEST_EPISODES,
    LATE_STEPS,
    Counted,
    Finding,
    Rows,
    ToolErrors,
    by_severity,
    lost_finding,
    malformed_finding,
    never_succeeds_finding,
    run_findings,
    tool_finding,
    uncalled_finding,
)
from ludus.observe.report import share_text
from ludus.viewer.episode_index import EpisodeIndex


def findings_json(
    run: str, rows: Rows, index: EpisodeIndex, *, is_live: bool, planned: int, has_tools: bool
) -> list[Json]:
    """All that was found, the worst first."""
    found = run_findings(rows, episode_findings(run, index, is_live=is_live, has_tools=has_tools))
    if not is_live and (text := _stopped_early(rows, planned)):
        found.append(Finding("stopped", "note", "The run stopped before its end", text))
    return [_as_json(one, run) for one in by_severity(found)]


def _as_json(finding: Finding, run: str) -> Json:
    return {**asdict(finding), "query": {"run": run, **finding.query} if finding.query else None}


def _stopped_early(rows: Rows, planned: int) -> str:
    done = max((int(row["step"]) for row in rows), default=0)
    if not planned or done >= planned:
        return ""
    return (
        f"{done} of {planned} steps are done and no process writes it. Go on with: ludus train --resume"
    )


def episode_findings(
    run: str, index: EpisodeIndex, *, is_live: bool, has_tools: bool
) -> Iterator[Finding]:
    """Findings in the recorded episodes, training and evaluation alike."""
    judged = [
        _lost(run, index),
        *_tools(run, index),
        _malformed(run, index),
        _uncalled(run, index) if has_tools else None,
        _never_succeeds(run, index, is_live=is_live),
    ]
    yield from (one for one in judged if one is not None)
    yield from _paid_for_nothing(run, index)
    yield from _one_answer(run, index)


def _never_succeeds(run: str, index: EpisodeIndex, *, is_live: bool) -> Finding | None:
    """What an untrained model was measured at is no news while its run goes on."""
    [row] = index.rows(
        "SELECT count(*) AS n, count(*) FILTER (success) AS good, max(reward) AS most, "
        'bool_or(contains(parts, \'"n":"success"\')) AS is_told FROM episodes '
        "WHERE run = ? AND success IS NOT NULL AND (step > 0 OR NOT ?)",
        [run, is_live],
    )
    return never_succeeds_finding(
        row["n"], row["good"], is_told=bool(row["is_told"]), most=row["most"] or 0.0
    )


def _uncalled(run: str, index: EpisodeIndex) -> Finding | None:
    [row] = index.rows(
        "WITH own AS (SELECT len(tools) + len(faults) > 0 AS calls, success, step FROM episodes "
        "WHERE run = ? AND success IS NOT NULL AND step > 0) "
        "SELECT count(*) AS n, count(*) FILTER (calls) AS hit, count(*) FILTER (success) AS good, "
        "avg(calls::INTEGER) FILTER (step >= (SELECT max(step) - ? FROM own)) AS late FROM own",
        [run, LATE_STEPS],
    )
    return uncalled_finding(Counted(row["n"], row["hit"], late=row["late"]), row["good"])


def _lost(run: str, index: EpisodeIndex) -> Finding | None:
    [total] = index.rows(
        "SELECT count(*) AS n, count(failure) AS lost, count(DISTINCT failure) AS boundaries "
        "FROM episodes WHERE run = ?",
        [run],
    )
    rows = index.rows(
        "SELECT failure, failure_message AS message, count(*) AS n, min(step) AS first FROM episodes "
        "WHERE run = ? AND failure IS NOT NULL GROUP BY ALL ORDER BY n DESC LIMIT 1",
        [run],
    )
    worst = [(row["failure"], row["message"], row["n"], row["first"]) for row in rows]
    return lost_finding(total["n"], total["lost"], total["boundaries"], worst[0] if worst else None)


def _tools(run: str, index: EpisodeIndex) -> list[Finding | None]:
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
        "sum(len(list_filter(list_zip(faulted, faults), lambda p: p[1] = tool AND p[2] = 'tool_raised'))) "
        "AS raised, "
        "avg(list_contains(faulted, tool)::INTEGER) FILTER (step >= (SELECT max(step) - ? FROM named)) AS late "
        "FROM named GROUP BY tool ORDER BY hit DESC LIMIT 50",
        [run, LATE_STEPS],
    )
    return [
        tool_finding(
            ToolErrors(
                row["tool"],
                Counted(row["episodes"], row["hit"] or 0, row["first"], row["late"]),
                *(row[name] or 0 for name in ("errors", "slow", "unknown", "raised")),
            )
        )
        for row in rows
    ]


def _malformed(run: str, index: EpisodeIndex) -> Finding | None:
    rows = index.rows(
        "SELECT count(*) AS n, sum(list_contains(faults, 'malformed_call')::INTEGER) AS hit, "
        "min(step) FILTER (list_contains(faults, 'malformed_call')) AS first, "
        "avg(list_contains(faults, 'malformed_call')::INTEGER) FILTER (step >= (SELECT max(step) - $2 "
        "FROM episodes WHERE run = $1)) AS late FROM episodes WHERE run = $1",
        [run, LATE_STEPS],
    )
    counted = Counted(rows[0]["n"], rows[0]["hit"] or 0, rows[0]["first"], rows[0]["late"])
    if not counted.hit:
        return None
    where = index.rows(
        "SELECT regexp_replace(task, '[-_/ ]?[0-9]+.*$', '') AS kind, count(*) AS n, "
        "avg(list_contains(faults, 'malformed_call')::INTEGER) AS share FROM episodes WHERE run = ? "
        "GROUP BY kind HAVING n >= 4 ORDER BY share DESC",
        [run],
    )
    worst = where[0] if len(where) > 1 and where[0]["share"] > 0.5 > where[-1]["share"] else None
    return malformed_finding(counted, (worst["kind"], worst["share"]) if worst else None)


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
    if row["total"] >= FEWEST_EPISODES and is_usual and is_wrong:
        yield Finding(
            "one_answer",
            "warning",
            f"One answer to everything: {row['n']} of {row['total']} recent episodes say "
            f"“{row['answer'][:60]}”",
            f"{row['targets']} different targets get the same answer; "
            f"{share_text(row['success'] or 0)} succeed.",
            {"answer": row["answer"], "first_step": str(max(0, row["since"]))},
        )
