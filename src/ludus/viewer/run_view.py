"""Runs as JSON: the list, one run, the series of its metrics; and runs side by side, with paired statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from typing import Any

from ludus.core.messages import Json
from ludus.observe import LOSSES, SPLITS, ResultFolder, definition_of, paired_test
from ludus.training.evaluation.runs import recipe_key
from ludus.viewer.episode_index import EpisodeIndex, FilterError
from ludus.viewer.findings import findings_json
from ludus.viewer.workspace import NotFound, Workspace, plain, series_of, thinned

HEADLINES = ("kept", "eval/success", "success", "reward", "eval/reward", "sft/loss", "dpo/loss", "loss")
"""Headline metric of a run: the first of these that it has."""
_SPARK_POINTS = 60
SECTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Outcome", ("success", "reward", "reward/", "pass@", "average@", "held_out_loss", "sets/")),
    ("Logged by your code", ("custom/",)),
    ("Failures", ("failure_share", "failures", "failure/", "failure_mode/", "aborted", "unscored", "stop/",
                  "truncated", "turn_cut")),
    ("Tools", ("tool_calls", "invalid_call_share", "tool/", "fault_share/", "fault/", "invalid_calls")),
    ("Policy", ("entropy", "kl", "clip_fraction", "ratio_", "gradient_norm", "loss", "learning_rate",
                "updates", "ess")),
    ("Lengths", ("tokens/", "action_tokens", "turns", "prefix_sharing", "model_server/", "tree/")),
    ("Signal", ("no_signal", "without_advantage", "groups_without_signal", "reward_std", "refilled",
                "masked", "broken/")),
    ("Engine and trainer", ("logprob_difference_", "lag_", "versions_per_episode", "policy_version",
                            "importance_")),
    ("Speed", ("tokens_per_second", "episodes_per_second", "step_seconds", "time_share/", "seconds/", "gpu",
               "wait_")),
)  # fmt: skip
"""The charts of a run, in order; a name that ends in / _ or @ stands for all that begin so."""


class RunReader:
    """Data for the pages of runs."""

    def __init__(self, workspace: Workspace, index: EpisodeIndex) -> None:
        self._workspace, self._index = workspace, index
        self._found: dict[str, tuple[tuple[int, int, bool], list[Json]]] = {}
        """The findings of each run, and what they were made from."""

    def overview(self) -> Json:
        """All runs, the newest first, and what needs a person in each."""
        runs = []
        for name in reversed(list(self._workspace.runs())):
            try:
                runs.append(self._row(name))
            except NotFound:
                continue  # deleted meanwhile
        return {"root": str(self._workspace.root), "is_single": self._workspace.is_single, "runs": runs}

    def _metrics(self, name: str) -> list[Json]:
        """The logged rows of a run; those of an evaluation or a synthesis are computed from its episodes."""
        rows, run = self._workspace.metrics(name), self._workspace.run(name)
        if rows or not isinstance(run, ResultFolder):
            return rows
        (found,) = self._index.rows(
            "SELECT avg(success::INTEGER) AS success, avg(reward) AS reward, "
            "avg((split = 'kept')::INTEGER) AS kept FROM episodes WHERE run = ? AND failure IS NULL",
            [name],
        )
        kept = found.pop("kept")
        measured = {f"eval/{key}": value for key, value in found.items() if value is not None}
        if run.kind == "synthesis":
            measured = measured if kept is None else {"kept": kept, **measured}
        return [{"step": 0, **measured}] if measured else []

    def _row(self, name: str) -> Json:
        rows, recipe = self._metrics(name), self._workspace.recipe(name)
        status = self._workspace.status(name)
        headline = next((one for one in HEADLINES if any(one in row for row in rows)), None)
        found = series_of([rows], headline) if headline else {"steps": [], "values": []}
        points = thinned(list(zip(found["steps"], found["values"], strict=True)), _SPARK_POINTS)
        findings = self._findings(name, rows, recipe)
        values = found["values"]
        return {
            "name": name,
            "live": status.is_live,
            "updated": status.updated,
            "steps": max((row["step"] for row in rows), default=0),
            "planned": planned_steps(recipe),
            "stages": stages_of(rows),
            "recipe_key": recipe_key(recipe),
            "headline": headline,
            "first": values[0] if values else None,
            "last": values[-1] if values else None,
            "best": max(values, default=None),
            "spark": points,
            "model": plain(_model_name(recipe), 200),
            "algorithm": plain(_algorithm(recipe), 80),
            "findings": findings,
            "problem": self._workspace.metrics_problem(name),
            "kind": self._workspace.run(name).kind,
        }

    def detail(self, name: str) -> Json:
        """One run: its recipe, its metrics by section, and what needs a person."""
        rows, recipe = self._metrics(name), self._workspace.recipe(name)
        names = sorted({key for row in rows for key in row} - {"step", "time"})
        return {
            **self._row(name),
            "recipe": plain(recipe),
            "sections": sections_of(names),
            "metrics": {one: _definition(one) for one in names},
            "episodes": self._index.rows("SELECT count(*) AS n FROM episodes WHERE run = ?", [name])[0][
                "n"
            ],
        }

    def series(
        self,
        runs: Sequence[str],
        names: Sequence[str],
        first: int | None,
        last: int | None,
        *,
        apart: bool = False,
    ) -> Json:
        """Metrics of several runs as lines; seeds of one recipe are one, unless they are wanted apart.

        A run that is gone has none.
        """
        rows: dict[str, list[Json]] = {}
        lines: dict[str, list[str]] = {}
        for run in dict.fromkeys(runs):
            try:
                rows[run], recipe = self._metrics(run), self._workspace.recipe(run)
            except NotFound:
                continue
            lines.setdefault(run if apart else recipe_key(recipe) or run, []).append(run)
        return {
            "lines": [
                {
                    "name": members[0] + (f" + {len(members) - 1} more seeds" if members[1:] else ""),
                    "runs": members,
                    "series": {
                        name: series_of([rows[run] for run in members], name, first=first, last=last)
                        for name in names
                    },
                }
                for members in lines.values()
            ],
            "definitions": {name: _definition(name) for name in names},
        }

    def _findings(self, name: str, rows: Sequence[Json], recipe: Json) -> list[Json]:
        live = self._workspace.status(name).is_live
        source = self._index.state.version, len(rows), live
        if self._found.get(name, (None,))[0] != source:
            found = findings_json(
                name,
                rows,
                self._index,
                is_live=live,
                planned=planned_steps(recipe),
                has_tools=_has_tools(recipe),
            )
            self._found[name] = source, found
        return self._found[name][1]


def _has_tools(recipe: Json) -> bool:
    agent = recipe.get("agent")
    return isinstance(agent, dict) and bool(agent.get("tools") or agent.get("envs"))


def sections_of(names: Sequence[str]) -> list[Json]:
    """The names by section, each once; what no section knows is at the end."""
    left = list(names)
    found: list[Json] = []
    for title, wanted in SECTIONS:
        own = []
        for pattern in wanted:
            for name in list(left):
                split, _, rest = name.partition("/")
                bare = rest if split in SPLITS else name
                if bare == pattern or (pattern[-1] in "/_@" and bare.startswith(pattern)) or (
                    pattern in ("kl", "clip_fraction", "gpu", "loss", "ess") and bare.startswith(pattern)
                ):  # fmt: skip
                    own.append(name)
                    left.remove(name)
        if own:
            found.append({"title": title, "names": own})
    if left:
        found.append({"title": "Others", "names": left})
    return found


def _definition(name: str) -> Json | None:
    metric = definition_of(name)
    return None if metric is None else {"definition": metric.definition, "unit": metric.unit}


def stages_of(rows: Sequence[Mapping[str, Any]]) -> list[Json]:
    """The stages in which rows were logged, each with the step that it began after and its last one."""
    found: list[Json] = []
    for row in rows:
        losses = [name for name in LOSSES if name in row]
        if not losses and "reward" not in row:
            continue  # an evaluation belongs to no stage
        name = losses[0].partition("/")[0] if losses else "rl"
        if not found or found[-1]["name"] != name:
            start = found[-1]["end"] if found else min(one["step"] for one in rows)
            found.append({"name": name, "start": start})
        found[-1]["end"] = row["step"]
    return found


def planned_steps(recipe: Mapping[str, Any]) -> int:
    """How many steps the recipe's stages have in all; 0 where it does not say."""
    stages = recipe.get("stage") or [recipe.get("warm_start"), recipe.get("rl")]
    total = 0
    for stage in stages if isinstance(stages, list) else ():
        if not isinstance(stage, Mapping):
            continue
        if stage.get("epochs") is not None and stage.get("kind") != "rl":
            return 0  # how many steps these are, the data say
        steps, rounds = stage.get("steps"), stage.get("rounds", 1)
        total += steps * rounds if isinstance(steps, int) and isinstance(rounds, int) else 0
    return total


def _model_name(recipe: Mapping[str, Any]) -> str:
    model = recipe.get("model")
    if not isinstance(model, Mapping):
        return ""
    return str(model.get("name") or "from scratch")


def _algorithm(recipe: Mapping[str, Any]) -> str:
    rl = recipe.get("rl")
    if isinstance(rl, Mapping) and rl.get("steps", 1):
        algorithm = rl.get("algorithm", "grpo")
        return str(algorithm.get("name") if isinstance(algorithm, Mapping) else algorithm)
    stages = recipe.get("stage")
    kinds = [str(one.get("kind", "")) for one in stages or () if isinstance(one, Mapping)]
    return " + ".join(dict.fromkeys(kinds)) or ("sft" if recipe.get("warm_start") else "")


_MOST_TASKS = 5000


def paired_runs(index: EpisodeIndex, first: Mapping[str, Any], second: Mapping[str, Any]) -> Json:
    """Two sides, each a run, a split and a step, on the tasks that both have: `second` minus `first`.

    The numbers of a task are means over its scored attempts, as in `ludus eval`; lost episodes are left out.
    """
    one, other = _by_task(index, first), _by_task(index, second)
    shared = sorted(one.keys() & other.keys())
    result: Json = {
        "tasks": len(shared),
        "only_first": len(one.keys() - other.keys()),
        "only_second": len(other.keys() - one.keys()),
    }
    if not shared:
        return result | {"statistics": None, "by_task": []}
    wins = [
        {
            "task": task,
            "first": float(one[task]["success"]),
            "second": float(other[task]["success"]),
            "first_reward": one[task]["reward"],
            "second_reward": other[task]["reward"],
            "first_episode": one[task]["episode"],
            "second_episode": other[task]["episode"],
        }
        for task in shared
    ]
    measured = {
        "success": paired_test(
            [other[task]["success"] for task in shared], [one[task]["success"] for task in shared]
        ),
        "reward": paired_test(
            [other[task]["reward"] for task in shared], [one[task]["reward"] for task in shared]
        ),
    }
    means = {
        name: [sum(float(side[task][name]) for task in shared) / len(shared) for side in (one, other)]
        for name in measured
    }
    wins.sort(key=lambda row: (-abs(float(row["first"]) - float(row["second"])), str(row["task"])))
    return result | {
        "statistics": {
            name: asdict(test)
            | {"first": means[name][0], "second": means[name][1], "difference": test.difference.value}
            | {"low": test.difference.low, "high": test.difference.high}
            for name, test in measured.items()
        },
        "by_task": wins[:500],
    }


def _by_task(index: EpisodeIndex, side: Mapping[str, Any]) -> dict[str, Json]:
    if not side.get("run"):
        raise FilterError("a side of a comparison names a run")
    tests, values = ["run = ?", "reward IS NOT NULL", "success IS NOT NULL"], [side["run"]]
    if side.get("split"):
        tests.append("split = ?")
        values.append(side["split"])
    if side.get("step") is not None:
        tests.append("step = ?")
        values.append(side["step"])
    rows = index.rows(
        "SELECT task, count(*) AS n, sum(success::INTEGER) AS won, avg(reward) AS reward, "
        "first({'file': file, 'row': row} ORDER BY step DESC, attempt) AS episode "
        f"FROM episodes WHERE {' AND '.join(tests)} GROUP BY task ORDER BY task LIMIT {_MOST_TASKS}",
        values,
    )
    return {
        row["task"]: {
            "success": Fraction(int(row["won"]), int(row["n"])),
            "reward": float(row["reward"]),
            "episode": row["episode"],
        }
        for row in rows
    }


def evaluated_steps(index: EpisodeIndex, run: str) -> list[Json]:
    """Steps at which a run has episodes, by split, for comparison."""
    return index.rows(
        "SELECT split, step, count(*) AS episodes, count(DISTINCT task) AS tasks FROM episodes WHERE run = ? "
        "GROUP BY ALL ORDER BY split, step LIMIT 5000",
        [run],
    )


def task_history(index: EpisodeIndex, run: str, task: str) -> list[Json]:
    """All attempts at a task in a run, in the order of the steps: the same task at several checkpoints."""
    return index.rows(
        "SELECT * EXCLUDE (spoken, text) FROM episodes WHERE run = ? AND task = ? "
        "ORDER BY step, attempt LIMIT 500",
        [run, task],
    )
