"""The viewer by HTTP: runs, filters, pages, one episode, labels, hostile contents, and who may look."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from viewer_runs import LOST, RunningViewer, episode, ordinary_groups, running_viewer, write_run

from ludus.core import ConfigError, Fault, Group, Message, Task, Trajectory
from ludus.observe import RunFolder, RunWriter
from ludus.observe.findings import metric_findings
from ludus.remote.processes import ScratchFolder
from ludus.synth.result import ItemResult, Rejected, SynthFolder
from ludus.training.data.conversations import read_conversations, read_labelled, read_pairs
from ludus.training.evaluation.study import ResultsFolder
from ludus.viewer.run_view import stages_of
from ludus.viewer.workspace import MetricsTail, thinned

STEPS = (1, 2, 3)
EACH = 7
"""Episodes of a step."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "first", {step: ordinary_groups(step) for step in STEPS})
    write_run(
        folder / "second",
        {1: ordinary_groups(1)},
        {"name": "second", "rl": {"steps": 4, "algorithm": "dapo", "kl": 0.1}},
    )
    return folder


@pytest.fixture(scope="module")
def viewer(root: Path) -> Iterator[RunningViewer]:
    with running_viewer(root) as made:
        made.settled()
        yield made


def count(viewer: RunningViewer, **query: object) -> int:
    found = viewer.get("/api/episodes", **query)
    assert found.status == 200, found.body
    return int(found.json["summary"]["episodes"])


def test_runs_are_listed_with_what_needs_a_person(viewer: RunningViewer) -> None:
    runs = {run["name"]: run for run in viewer.get("/api/runs").json["runs"]}
    assert set(runs) == {"first", "second"}
    assert runs["first"]["steps"] == 3 and runs["first"]["planned"] == 4 and not runs["first"]["live"]
    [lost] = [one for one in runs["first"]["findings"] if one["kind"] == "lost"]
    assert (
        "3 of 21 episodes were lost" in lost["title"] and "tool server does not answer" in lost["detail"]
    )
    assert lost["query"] == {"run": "first", "failure": "server"}, "it leads to the episodes"
    assert count(viewer, **lost["query"]) == 3


FILTERS = [
    ({}, 28), ({"run": "first"}, 21), ({"run": ["first", "second"]}, 28), ({"first_step": 2}, 14),
    ({"first_step": 2, "last_step": 2}, 7), ({"task": "sum-1"}, 16), ({"task": "prod*"}, 12),
    ({"task": "duct"}, 12), ({"least_reward": 1.5}, 4), ({"most_reward": 0, "run": "second"}, 3),
    ({"success": "yes"}, 12),
    ({"success": "no"}, 12), ({"stop": "answered"}, 24), ({"failure": "any"}, 4), ({"failure": "pool"}, 0),
    ({"tool": "multiply"}, 12), ({"fault": "tool_timeout"}, 1), ({"fault": "any"}, 1),
    ({"faulted": "multiply"}, 1), ({"text": "SEEN at Step 3"}, 1), ({"text": "nowhere"}, 0),
    ({"text": "<b>3</b>"}, 28),
    ({"split": "train"}, 28), ({"answer": "answer 2"}, 4),
    ({"tool": "multiply", "success": "yes", "run": "first"}, 3),
]  # fmt: skip


@pytest.mark.parametrize(("query", "expected"), FILTERS, ids=lambda value: str(value))
def test_filters(viewer: RunningViewer, query: dict[str, object], expected: int) -> None:
    assert count(viewer, **query) == expected


@pytest.mark.parametrize("sort", ["step", "reward", "turns", "tokens", "seconds", "task", "advantage"])
def test_pages_follow_each_other_in_every_order(viewer: RunningViewer, sort: str) -> None:
    seen: list[tuple[str, str, int]] = []
    for offset in range(0, 28, 5):
        page = viewer.get("/api/episodes", sort=sort, limit=5, offset=offset).json["episodes"]
        seen += [(row["run"], row["file"], row["row"]) for row in page]
    assert len(seen) == len(set(seen)) == 28
    rewards = [
        row["reward"] for row in viewer.get("/api/episodes", sort="reward", order="asc").json["episodes"]
    ]
    scored = [value for value in rewards if value is not None]
    assert scored == sorted(scored) and rewards[len(scored) :] == [None] * 4, "what was lost comes last"
    assert viewer.get("/api/episodes", offset=1000).json["summary"]["episodes"] == 28


def test_wrong_filters_are_refused(viewer: RunningViewer) -> None:
    for query in (
        {"sort": "reward; DROP TABLE episodes"},
        {"first_step": "x"},
        {"least_reward": "many"},
    ):
        found = viewer.get("/api/episodes", **query)
        assert found.status == 400 and found.json["error"]
    assert count(viewer, task="'; DROP TABLE episodes; --") == 0 and count(viewer) == 28


def test_an_episode_has_all_that_was_recorded(viewer: RunningViewer) -> None:
    [row] = viewer.get("/api/episodes", run="first", fault="tool_timeout").json["episodes"]
    found = viewer.get(f"/api/episode/first/{row['file']}/{row['row']}").json
    assert found["task"]["id"] == "product-2" and found["rewards"] == [["success", 0.0], ["style", 0.0]]
    assert [message["role"] for message in found["messages"]][:3] == ["system", "user", "assistant"]
    assert found["messages"][2]["calls"][0]["arguments"] == [["a", "2"], ["b", "<b>3</b>"]]
    first = found["turns"][0]
    assert first["faults"] == [{"fault": "tool_timeout", "tool": "multiply"}]
    assert first["advantage"] == 0.5 and first["entropy"] == 0.5 and first["versions"] == [[0, 3]]
    assert [span["kind"] for span in found["spans"]] == ["generate", "tool"]
    assert len(found["attempts"]) == 3, "its group"
    tokens = viewer.get(f"/api/tokens/first/{row['file']}/{row['row']}").json
    assert [part["kind"] for part in tokens["segments"]] == ["prompt", "action", "observation", "action"]
    assert tokens["segments"][1]["ids"] == [5, 6] and tokens["segments"][1]["advantages"] == [0.5, 0.5]
    assert (
        tokens["segments"][1]["logprobs"] == [-0.5, -0.25]
        and tokens["segments"][3]["advantages"] is None
    )
    assert not tokens["decoded"], "there is no checkpoint with a tokenizer"
    text = viewer.get(f"/api/transcript/first/{row['file']}/{row['row']}").body.decode()
    assert "=== task product-2, attempt 0 ===" in text, "as ludus show prints it"


def test_curves_have_definitions_and_runs_can_be_laid_over_each_other(viewer: RunningViewer) -> None:
    found = viewer.get(
        "/api/series", run=["first", "second"], name=["success", "entropy", "tool/add/calls"]
    ).json
    first, second = found["lines"]
    assert [first["runs"], second["runs"]] == [["first"], ["second"]]
    assert first["series"]["entropy"] == {
        "steps": [1, 2, 3], "values": [1 / 2, 1 / 3, 1 / 4], "points": 3, "broken": []
    }  # fmt: skip
    assert second["series"]["success"]["steps"] == [1]
    assert found["definitions"]["entropy"]["unit"] == "nats"
    cut = viewer.get("/api/series", run="first", name="entropy", first=2, last=2).json["lines"]
    assert cut[0]["series"]["entropy"]["steps"] == [2]
    detail = viewer.get("/api/run/first").json
    named = [name for section in detail["sections"] for name in section["names"]]
    assert len(named) == len(set(named)) and set(named) == set(detail["metrics"])
    assert detail["metrics"]["tool/add/errors"]["unit"] == "per episode"


def test_seeds_of_one_recipe_are_a_mean_and_a_band(tmp_path: Path) -> None:
    recipe = {"rl": {"steps": 2}}
    for seed, success in enumerate([0.0, 0.5, 1.0]):
        own = recipe | {"name": f"s{seed}", "seed": seed, "run": {"folder": f"runs/s{seed}"}}
        with RunWriter.create(tmp_path / f"s{seed}", own) as run:
            run.log(1, {"success": success})
            if seed:
                run.log(2, {"success": success})
    with RunWriter.create(tmp_path / "other", {"rl": {"steps": 3}, "seed": 0}) as run:
        run.log(1, {"success": 0.25})
    names = ["other", "s0", "s1", "s2"]
    with running_viewer(tmp_path) as viewer:
        other, seeds = viewer.get("/api/series", run=names, name="success").json["lines"]
        assert other["runs"] == ["other"] and "low" not in other["series"]["success"]
        assert seeds["runs"] == ["s0", "s1", "s2"]
        found = seeds["series"]["success"]
        assert found["steps"] == [1, 2] and found["values"] == [0.5, 0.75]
        assert (found["low"], found["high"], found["runs"]) == ([0, 0.5], [1, 1], [3, 2])
        apart = viewer.get("/api/series", run=names, name="success", apart=1).json["lines"]
        assert [line["runs"] for line in apart] == [["other"], ["s0"], ["s1"], ["s2"]]


def test_stages_are_those_that_the_rows_were_logged_in() -> None:
    rows: list[dict[str, Any]] = [{"step": 0, "eval/reward": 0.0}]
    rows += [{"step": n, "sft/loss": 1.0} for n in range(1, 31)] + [{"step": 30, "eval/reward": 0.5}]
    rows += [{"step": n, "reward": 1.0, "loss": 0.0} for n in range(31, 34)]
    assert stages_of(rows) == [
        {"name": "sft", "start": 0, "end": 30},
        {"name": "rl", "start": 30, "end": 33},
    ]
    assert stages_of([]) == stages_of(rows[:1]) == []


def test_an_episode_has_its_neighbours_in_a_list(viewer: RunningViewer) -> None:
    query = {"run": "first", "sort": "reward", "success": "yes"}
    found = viewer.settled(**query)["episodes"]
    listed = [{name: row[name] for name in ("run", "file", "row")} for row in found]
    for place, one in enumerate(listed):
        path = f"/api/neighbours/{one['run']}/{one['file']}/{one['row']}"
        assert viewer.get(path, **query).json == {
            "place": place + 1,
            "episodes": len(listed),
            "previous": listed[place - 1] if place else None,
            "next": listed[place + 1] if place + 1 < len(listed) else None,
        }
    assert len(listed) > 2
    assert viewer.get(path, run="first", success="no").json == {}, "it is not in that list"


def test_recipes_are_compared_setting_by_setting(viewer: RunningViewer) -> None:
    settings = viewer.get("/api/diff", run=["first", "second"]).json["settings"]
    assert {one["name"]: one["values"] for one in settings} == {
        "name": {"first": "first", "second": "second"},
        "rl.algorithm": {"first": "grpo", "second": "dapo"},
        "rl.kl": {"first": "(not set)", "second": 0.1},
    }


def test_two_sides_are_compared_by_task(viewer: RunningViewer) -> None:
    found = viewer.get("/api/paired", a_run="first", b_run="second").json
    assert found["tasks"] == 2 and found["statistics"]["success"]["difference"] == 0
    assert found["statistics"]["success"]["ties"] == 2 and found["statistics"]["success"]["p_flip"] == 1
    one = viewer.get("/api/paired", a_run="first", a_step=1, b_run="first", b_step=3).json
    assert one["tasks"] == 2 and {row["task"] for row in one["by_task"]} == {"sum-1", "product-2"}
    history = viewer.get("/api/history/first", task="sum-1").json["episodes"]
    assert [row["step"] for row in history] == [1] * 4 + [2] * 4 + [3] * 4


def test_a_difference_is_the_second_minus_the_first(tmp_path: Path) -> None:
    for name, success in (("bad", 0.0), ("good", 1.0)):
        played = [episode(f"sum-{n}", success=success) for n in range(3)]
        write_run(tmp_path / name, {1: [Group(one.task, [one]) for one in played]})
    with running_viewer(tmp_path) as viewer:
        viewer.settled()
        found = viewer.get("/api/paired", a_run="bad", b_run="good").json["statistics"]["success"]
    assert (found["first"], found["second"], found["difference"]) == (0, 1, 1)
    assert (found["wins"], found["losses"]) == (3, 0)


def test_findings_count_the_episodes_that_they_open(tmp_path: Path) -> None:
    def groups() -> list[Group]:
        found = [
            *(episode(f"sum-{n}", fault=Fault.MALFORMED_CALL, success=0.0) for n in range(4)),
            episode("other-1", fault=Fault.MALFORMED_CALL),
            *(episode(f"other-{n}", tool="slow", fault=Fault.TOOL_TIMEOUT) for n in range(2, 5)),
            episode("other-5", tool="slow", fault=Fault.TOOL_RAISED, failure=LOST),
            episode("other-6", success=0.0, style=1.0 / 3 + 1),
        ]
        return [Group(one.task, [one]) for one in found]

    with RunWriter.create(tmp_path / "run", {"name": "run"}) as run:
        for step in range(5):
            run.write_groups(groups(), step, "eval" if step == 0 else "train")
            run.log(step, {"reward": 0.0})
    with running_viewer(tmp_path) as viewer:
        viewer.settled()
        findings = {
            (one["kind"], one["query"].get("tool")): (one["title"], one["query"])
            for one in viewer.get("/api/run/run").json["findings"]
            if one["query"]
        }
        numbers = {
            ("malformed", None): 25, ("tool", "slow"): 20, ("tool", "add"): 25, ("lost", None): 5,
            ("paid_for_nothing", None): 5,
        }  # fmt: skip
        assert numbers.keys() <= findings.keys()
        for kind, expected in numbers.items():
            title, query = findings[kind]
            assert f"{expected} " in title and count(viewer, **query) == expected, (kind, title)


def test_a_wrong_address_is_a_page_and_a_wrong_request_an_error(viewer: RunningViewer) -> None:
    page = viewer.get("/no/such/page")
    assert page.status == 404 and page.headers["content-type"].startswith("text/html")
    assert "content-security-policy" in page.headers
    assert viewer.get("/api/nothing").status == 404 and viewer.get("/api/nothing").json["error"]
    wrong = viewer.get("/api/episodes", success="maybe")
    assert wrong.status == 400 and "success is yes or no, not 'maybe'" in wrong.json["error"]
    found = viewer.get("/api/episodes", text="i ADD.", limit=1).json["episodes"]
    assert "I add." in found[0]["found"], "an excerpt keeps its case"


def test_exports_are_whole_and_safe(viewer: RunningViewer) -> None:
    page = viewer.get(
        "/export/episode.html", episode=["first/step-000001.parquet/0", "first/step-000001.parquet/1"]
    )
    text = page.body.decode()
    assert page.headers["content-disposition"].startswith("attachment")
    assert text.count("<article>") == 2 and "&lt;b&gt;3&lt;/b&gt;" in text and "<b>3</b>" not in text
    assert "<script" not in text and "http://" not in text and "https://" not in text
    data = viewer.get("/export/episode.json", episode="first/step-000001.parquet/0").json
    assert data["episodes"][0]["tokens"][0]["ids"] == [1, 2, 3]
    assert viewer.get("/export/episode.html", episode="first").status == 400


def test_labels_are_data_that_training_reads(root: Path, viewer: RunningViewer) -> None:
    before = {path: path.read_bytes() for path in (root / "first").rglob("*") if path.is_file()}
    places = [{"run": "first", "file": "step-000001.parquet", "row": row} for row in (0, 1, 2)]
    assert (
        viewer.post("/api/label", {"episode": places[0], "label": False, "note": "wrong"}).status == 200
    )
    assert viewer.post("/api/label", {"episode": places[1], "label": False}).status == 200
    assert viewer.post("/api/label", {"episode": places[1], "label": True}).json == {
        "labels": 2,
        "good": 1,
    }
    assert viewer.post("/api/prefer", {"chosen": places[1], "rejected": places[0]}).json == {
        "preferences": 1
    }
    assert viewer.post("/api/prefer", {"chosen": places[0], "rejected": places[1]}).json == {
        "preferences": 1
    }
    [(chosen, rejected)] = read_pairs(root / "labels" / "preferences.jsonl")
    assert chosen[-1].content == "answer 0" and rejected[-1].content == "answer 1", (
        "what was said last counts"
    )
    [conversation] = read_conversations(root / "labels" / "good.jsonl")
    assert [message.role for message in conversation] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert conversation[2].tool_calls[0].name == "add"
    labelled = read_labelled(root / "labels" / "labels.jsonl")
    assert [(one[-1].content, good) for one, good in labelled] == [
        ("answer 0", False),
        ("answer 1", True),
    ]
    assert len(viewer.get("/api/labels").json["labels"]) == 2
    assert viewer.post("/api/label", {"episode": places[1], "label": None}).json == {
        "labels": 1,
        "good": 0,
    }
    assert viewer.post("/api/label", {"episode": places[0], "label": "very"}).status == 400
    other = {"run": "first", "file": "step-000001.parquet", "row": 4}
    assert (
        "different prompts"
        not in viewer.post("/api/prefer", {"chosen": places[0], "rejected": other}).json
    )
    assert (
        viewer.post(
            "/api/label", {"episode": {"run": "../x", "file": "y", "row": 0}, "label": True}
        ).status
        == 404
    )
    after = {path: path.read_bytes() for path in (root / "first").rglob("*") if path.is_file()}
    assert before == after, "a run is never changed"


# Who may look.


def test_the_policy_lets_nothing_in_from_elsewhere(viewer: RunningViewer) -> None:
    for path in (
        "/",
        "/episodes?text=x",
        "/episode/first/step-000001.parquet/0",
        "/static/app.js",
        "/api/runs",
    ):
        answer = viewer.get(path)
        assert answer.status == 200
        assert "default-src 'none'; script-src 'self'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
    static = Path(__import__("ludus.viewer").viewer.__file__).parent / "static"
    for file in static.iterdir():
        text = file.read_text()
        assert "innerHTML" not in text and "eval(" not in text, file.name
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", ""), (
            file.name
        )


def test_names_that_point_here_from_elsewhere_are_refused(viewer: RunningViewer) -> None:
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", ""):
        assert viewer.get("/api/runs", headers={"Host": host}).status in (400, 403), host
    assert viewer.get("/api/runs", headers={"Host": "localhost"}).status == 200


def test_pages_of_other_origins_cannot_write(viewer: RunningViewer) -> None:
    body = {"episode": {"run": "first", "file": "step-000001.parquet", "row": 0}, "label": True}
    own = {"Content-Type": "application/json", "X-Ludus": "1"}
    for headers in (
        {},
        {"Content-Type": "text/plain", "X-Ludus": "1"},
        {"Content-Type": "application/json"},
        own | {"Origin": "http://evil.example"},
        own | {"Origin": "null"},
    ):
        assert viewer.post("/api/label", body, headers).status == 403, headers
    assert viewer.post("/api/label", body, own | {"Origin": f"http://{viewer.netloc}"}).status == 200
    viewer.post("/api/label", body | {"label": None})


def test_a_token_is_asked_for_where_there_is_one(root: Path) -> None:
    with running_viewer(root, token="a-token-of-some-length") as viewer:
        assert (
            viewer.get("/").status
            == viewer.get("/api/runs").status
            == viewer.get("/static/app.js").status
            == 401
        )
        assert viewer.get("/", token="another-token-of-that-length").status == 401
        answer = viewer.get("/episodes", token="a-token-of-some-length", text="x")
        assert answer.status == 303 and answer.headers["location"] == "/episodes?text=x"
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        assert viewer.get("/api/runs", headers={"Cookie": cookie.partition(";")[0]}).status == 200
        assert (
            viewer.get("/api/runs", headers={"Authorization": "Bearer a-token-of-some-length"}).status
            == 200
        )
    from ludus.viewer import ViewerConfig, ViewerServer

    assert ViewerServer(ViewerConfig(root, "0.0.0.0")).token, "one is made up where others can reach it"
    with pytest.raises(ConfigError, match="at least 16"):
        ViewerServer(ViewerConfig(root, "0.0.0.0", token="short"))


def test_no_path_outside_can_be_read(root: Path, viewer: RunningViewer, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    write_run(secret, {1: ordinary_groups(1)})
    (root / "linked").symlink_to(secret)
    (root / "second" / "trajectories" / "step-000009.parquet").symlink_to("/etc/passwd")
    try:
        for path in (
            "/static/../server.py", "/static/%2e%2e/server.py", "/static/..%2fserver.py",
            "/api/run/..%2fsecret",
            "/api/run/linked", "/api/episode/first/..%2f..%2fsecret%2fstep-000001.parquet/0",
            "/api/episode/second/step-000009.parquet/0", "/api/episode/linked/step-000001.parquet/0",
            f"/api/media/first/{'0' * 64}", "/api/media/first/..%2frecipe.json", "/api/tokens/first/%00/0",
            "/export/episode.html?episode=../../etc/passwd/0",
        ):  # fmt: skip
            answer = viewer.get(path)
            assert answer.status in (400, 404), (path, answer.status)
            assert b"root:" not in answer.body and b"def " not in answer.body
        assert "linked" not in viewer.get("/api/runs").body.decode()
    finally:
        (root / "linked").unlink()
        (root / "second" / "trajectories" / "step-000009.parquet").unlink()


@pytest.mark.parametrize(
    "name", ["reward=99", "step=7", "li*", "first?", "[a-z]*", "**", "a[1]", "b\\c"]
)
def test_the_name_of_a_folder_says_nothing_about_episodes(tmp_path: Path, name: str) -> None:
    """DuckDB would take `column=value` in a path for a column, and a pattern for other runs' files."""
    root = tmp_path / "runs"
    write_run(tmp_path / "secret", {1: [Group(one.task, [one]) for one in [episode("secret")]]})
    write_run(root / name, {1: ordinary_groups(1)})
    write_run(root / "first1", {1: ordinary_groups(1)})
    (root / "linked").symlink_to(tmp_path / "secret")
    with running_viewer(root) as viewer:
        found = viewer.settled()
        assert not found["index"]["problems"] and found["summary"]["episodes"] == 2 * EACH
        assert count(viewer, run=name) == EACH and count(viewer, task="secret") == 0
        assert count(viewer, least_reward=2) == 0 and count(viewer, first_step=2) == 0
        row = next(one for one in found["episodes"] if one["run"] == name)
        path = f"/api/episode/{quote(name, safe='')}/{row['file']}/{row['row']}"
        assert viewer.get(path).json["reward"] == row["reward"]


def test_pipes_in_a_runs_folder_stop_nothing(tmp_path: Path) -> None:
    """Opening one waits for a writer, for good: the server could not even be ended."""
    root, data = tmp_path / "runs", "0" * 64
    write_run(root / "run", {1: ordinary_groups(1)})
    run, measured = root / "run", root / "measured" / "model"
    (measured / "turns-1" / "parts").mkdir(parents=True)
    for folder in (run / "media", run / "checkpoints" / "step-000001", root / "labels"):
        folder.mkdir(parents=True)
    (root / "measured" / "settings.json").write_text("{}")
    shutil.copy(run / "trajectories" / "step-000001.parquet", measured / "turns-1" / "episodes.parquet")
    (run / "metrics.jsonl").unlink()
    (run / ".lock").unlink(missing_ok=True)
    (measured / "model.json").write_text("{}")
    pipes = [run / "metrics.jsonl", run / ".lock", run / "trajectories" / "step-000002.parquet",
             run / "checkpoints" / "step-000001" / "manifest.json", run / "media" / data,
             measured / "turns-1" / "parts" / "1.parquet", root / "labels" / "good.jsonl",
             root / "labels" / "labels.jsonl"]  # fmt: skip
    for pipe in pipes:
        os.mkfifo(pipe)
    try:
        with running_viewer(root) as viewer:
            assert viewer.settled()["summary"]["episodes"] == 2 * EACH
            for path in ("/api/runs", "/api/run/run", "/api/series?run=run&name=reward", "/api/labels",
                         "/api/tokens/run/step-000001.parquet/0", f"/api/media/run/{data}",
                         "/api/run/measured:model:turns-1", "/api/diff?run=run"):  # fmt: skip
                assert viewer.get(path).status in (200, 404), path
            [row] = [one for one in viewer.get("/api/runs").json["runs"] if one["name"] == "run"]
            assert row["problem"] == "metrics.jsonl cannot be read: this is no regular file"
    finally:
        for pipe in pipes:  # who waits at one goes on
            with contextlib.suppress(OSError):
                os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))


def test_links_to_files_outside_are_not_read(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    for name in ("run", "other"):
        write_run(root / name, {1: ordinary_groups(1)})
    (tmp_path / "secret.json").write_text('{"step": 1, "password": 12345}\n')
    measured = root / "measured" / "model"
    (measured / "turns-1").mkdir(parents=True)
    shutil.copy(
        root / "run" / "trajectories" / "step-000001.parquet", measured / "turns-1" / "episodes.parquet"
    )
    for file in (root / "run" / "recipe.json", root / "other" / "metrics.jsonl", measured / "model.json",
                 root / "measured" / "settings.json"):  # fmt: skip
        file.unlink(missing_ok=True)
        file.symlink_to(tmp_path / "secret.json")
    with running_viewer(root) as viewer:
        viewer.settled()
        for path in (
            "/api/runs",
            "/api/run/run",
            "/api/run/other",
            "/api/series?run=other&name=password",
            "/api/run/measured:model:turns-1",
        ):
            assert b"12345" not in viewer.get(path).body


def test_playing_asks_for_a_token_on_loopback_too(tmp_path: Path) -> None:
    """Who may open the page may call the recipe's tools: not every user and program of this machine."""
    from ludus.training import load_parts, load_recipe
    from ludus.viewer import ViewerConfig, ViewerServer

    recipe = load_recipe("safe", ["evaluation.tasks=2"])
    with running_viewer(tmp_path, play=(recipe, load_parts(recipe))) as viewer:
        assert viewer.get("/api/play").status == viewer.post("/api/play/start", {}).status == 401
        assert viewer.token is not None and len(viewer.token) >= 32
        headers = {"Authorization": f"Bearer {viewer.token}"}
        assert viewer.get("/api/play", headers).status == 200
    assert ViewerServer(ViewerConfig(tmp_path)).token is None


# What nobody would write on purpose.

NASTY = "<script>alert(1)</script>\x00\x1b[31m\u202eabc\ud800\ufeff" + "é漢"


def test_what_the_assistant_says_in_a_task_is_no_turn(tmp_path: Path) -> None:
    one = episode("long")
    given = (Message("user", "Hello."), Message("assistant", "Hello. What can I add?"))
    one.task = replace(one.task, messages=(*given, *one.task.messages))
    one.messages = [*given, *one.messages]
    write_run(tmp_path / "run", {1: [Group(one.task, [one])]})
    with running_viewer(tmp_path) as viewer:
        viewer.settled()
        found = viewer.get("/api/episode/run/step-000001.parquet/0").json
        page = viewer.get("/export/episode.html", episode="run/step-000001.parquet/0").body.decode()
    assert [message["turn"] for message in found["messages"]] == [None, None, None, None, 0, None, 1]
    assert len(found["turns"]) == 2
    asked, answered = page.index("What can I add?"), page.index("I add.")
    assert "<span>logprob" not in page[:asked] and "<span>logprob" in page[asked:answered]


def test_hostile_contents_are_carried_and_shown(tmp_path: Path) -> None:
    huge = episode("huge", result="x" * 10_000_000, answer="ok")
    line = episode("line", answer="y" * 300_000)
    odd = episode(NASTY, answer=NASTY, tool=NASTY, result=NASTY, prompt=NASTY)
    write_run(tmp_path / "odd", {1: [Group(one.task, [one]) for one in (huge, line, odd)]})
    with running_viewer(tmp_path) as viewer:
        rows = {row["tokens"]: row for row in viewer.settled()["episodes"]}
        assert rows and viewer.get("/api/facets").status == 200 and viewer.get("/api/runs").status == 200
        answer = viewer.get("/api/episode/odd/step-000001.parquet/0")
        assert len(answer.body) < 100_000, "a long text is not sent at once"
        message = answer.json["messages"][3]
        assert message["chars"] == 10_000_000 and len(message["content"]) == 12_000
        piece = viewer.get("/api/text/odd/step-000001.parquet/0", message=3, offset=9_900_000).json
        assert len(piece["text"]) == 100_000
        found = viewer.get("/api/episode/odd/step-000001.parquet/2").json
        assert "\x00\x1b[31m\u202eabc\\ud800" in found["messages"][1]["content"], (
            "as it is; the page shows it as text"
        )
        page = viewer.get("/export/episode.html", episode="odd/step-000001.parquet/2").body.decode()
        assert (
            "<script" not in page and "\x1b" not in page and "\u202e" not in page and "\x00" not in page
        )
        label = {"episode": {"run": "odd", "file": "step-000001.parquet", "row": 2}, "label": True}
        assert viewer.post("/api/label", label).status == 200
        assert count(viewer, text="<SCRIPT>alert") == 1


def test_broken_files_are_told_of_and_the_rest_is_shown(tmp_path: Path) -> None:
    write_run(tmp_path / "run", {step: ordinary_groups(step) for step in (1, 2, 3)})
    episodes = tmp_path / "run" / "trajectories"
    whole = (episodes / "step-000002.parquet").read_bytes()
    (episodes / "step-000002.parquet").write_bytes(whole[: len(whole) // 2])
    (episodes / "step-000004.parquet").write_bytes(b"")
    (episodes / "step-000005.parquet").write_bytes(b"PAR1" + os.urandom(2000) + b"PAR1")
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"other": [1, 2]}), episodes / "step-000006.parquet")
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "reward": 0.5}\nnot json\n{"step": "x"}\n\xff\xfe\n{"step": 5, "rew')
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "recipe.json").write_text("{")
    with running_viewer(tmp_path) as viewer:
        found = viewer.settled()
        assert found["summary"]["episodes"] == 2 * EACH
        assert {one["file"] for one in found["index"]["problems"]} == {
            f"step-00000{step}.parquet" for step in (2, 4, 5, 6)
        }
        runs = {run["name"]: run for run in viewer.get("/api/runs").json["runs"]}
        assert (
            set(runs) == {"run", "torn"}
            and runs["run"]["steps"] == 4
            and runs["run"]["problem"] == "3 torn lines"
        )
        assert viewer.get("/api/run/torn").json["recipe"]["(damaged)"]
        assert viewer.get("/api/episode/run/step-000002.parquet/0").status == 404
        assert viewer.get("/api/episode/run/step-000001.parquet/99").status == 404
        (episodes / "step-000002.parquet").write_bytes(whole)  # its writer has got to the end
        while count(viewer) != 3 * EACH:
            pass
        shutil.rmtree(tmp_path / "run")  # deleted while it is looked at
        while count(viewer):
            pass
        for path in ("/api/run/run", "/api/episode/run/step-000001.parquet/0", "/api/diff?run=run"):
            assert viewer.get(path).status == 404
        assert viewer.get("/api/series?run=run&name=reward").json["lines"] == []
        assert [run["name"] for run in viewer.get("/api/runs").json["runs"]] == ["torn"]


def test_new_steps_appear_while_a_run_is_written(tmp_path: Path) -> None:
    from ludus.observe import RunWriter, rollout_metrics

    with (
        running_viewer(tmp_path) as viewer,
        RunWriter.create(tmp_path / "live", {"name": "live"}) as run,
    ):
        assert viewer.get("/api/runs").json["runs"][0]["live"], "its lock is held"
        for step in (1, 2):
            groups = ordinary_groups(step)
            run.write_groups(groups, step)
            run.log(step, rollout_metrics(groups))
            while count(viewer) != step * EACH:
                pass
            assert viewer.get("/api/runs").json["runs"][0]["steps"] == step
        run.close()
        assert not viewer.get("/api/runs").json["runs"][0]["live"]


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    from ludus.viewer import ViewerConfig, ViewerServer

    with pytest.raises(ConfigError, match="there is no folder"):
        ViewerServer(ViewerConfig(tmp_path / "none"))


# Pure parts.


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000), st.integers(10, 200))
def test_thinning_keeps_the_extremes(values: list[float], most: int) -> None:
    points = list(enumerate(values))
    shown = thinned(points, most)
    assert len(shown) <= max(most, 2) + 2 and set(shown) <= set(points) and shown == sorted(shown)
    assert max(v for _, v in shown) == max(values) and min(v for _, v in shown) == min(values)


@given(st.lists(st.integers(1, 40), max_size=20), st.data())
def test_a_growing_file_of_metrics_is_read_line_by_line(cuts: list[int], data: st.DataObject) -> None:
    import tempfile

    rows = [{"step": n, "reward": n / 2} for n in range(20)]
    text = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        tail, place = MetricsTail(path), 0
        for cut in cuts:
            with path.open("ab") as file:
                file.write(text[place : place + cut])
            place += cut
            whole = text[:place].count(b"\n")
            assert tail.refresh() == [
                {"step": float(r["step"]), "reward": r["reward"]} for r in rows[:whole]
            ]
        path.write_bytes(text[: len(json.dumps(rows[0])) + 1])  # cut, as by a resumed run
        assert [row["step"] for row in tail.refresh()] == [0]


def kinds(rows: list[dict[str, float]]) -> set[str]:
    return {finding.kind for finding in metric_findings(rows)}


def test_findings_are_made_where_there_is_cause_and_nowhere_else() -> None:
    def run(**columns: object) -> list[dict[str, float]]:
        return [
            {"step": n} | {name.replace("__", "/"): f(n) for name, f in columns.items()}  # type: ignore[operator]
            for n in range(30)
        ]

    good = {"reward": lambda n: n / 30, "success": lambda n: n / 30, "no_signal": lambda n: 0.0}
    assert kinds(run(**good)) == set()
    assert kinds(run(reward=lambda n: n / 30, success=lambda n: 0.25)) == {"reward_hacking"}
    assert kinds(run(reward=lambda n: n / 30, success=lambda n: 0.25 + n / 60)) == set(), "both rise"
    assert kinds(run(**good | {"no_signal": lambda n: float(n > 20)})) == {"no_signal"}
    assert kinds(run(**good, logprob_difference_mean=lambda n: 0.3)) == {"engine_apart"}
    assert kinds(run(**good, logprob_difference_mean=lambda n: 1e-4)) == set()
    assert kinds(run(**good, tokens__action=lambda n: 100 / (n + 1))) == {"short"}
    assert kinds(run(**good, entropy=lambda n: 0.001 if n > 15 else 2.0)) == {"collapse"}
    assert kinds(run(**good, loss=lambda n: float("nan") if n == 7 else 1.0)) == {"diverged"}
    assert kinds(run(**good, truncated=lambda n: 0.9)) == {"truncated"}
    assert kinds([]) == set()


def test_recorded_annotations_come_back_from_files(tmp_path: Path) -> None:
    import hashlib

    from ludus.core import EnvRender, Media

    png = b"\x89PNG\r\n\x1a\n" + b"0" * 20
    one = episode()
    picture = Media("image", hashlib.sha256(png).hexdigest(), png)
    one.renders = [EnvRender(0, "grid", picture=picture), EnvRender(1, "grid", "#.@")]
    lying = Media("image", "0" * 64, png)
    one.messages[3] = Message("tool", "5", name="add", media=(lying,))
    write_run(tmp_path / "run", {1: [Group(one.task, [one])]})
    [back] = RunFolder(tmp_path / "run").trajectories(1)
    assert [s.advantages for s in back.actions] == [[0.5, 0.5], None]
    assert [s.entropies for s in back.actions] == [[0.25, 0.75], None]
    assert back.spans == one.spans and back.renders == one.renders
    assert [file.name for file in (tmp_path / "run" / "media").iterdir()] == [picture.sha256], (
        "by its true hash"
    )
    with running_viewer(tmp_path) as viewer:
        answer = viewer.get(f"/api/media/run/{picture.sha256}")
        assert answer.body == png and answer.headers["content-type"] == "image/png"
        assert "sandbox" in answer.headers["content-security-policy"]


def test_pictures_are_kept_once_and_up_to_a_limit(tmp_path: Path) -> None:
    import hashlib

    from ludus.core import EnvRender, Media
    from ludus.observe.episodes import MediaStore

    def shown(*pictures: bytes) -> Group:
        one = episode()
        media = [Media("image", hashlib.sha256(data).hexdigest(), data) for data in pictures]
        one.renders = [EnvRender(0, "grid", picture=picture) for picture in media]
        return Group(one.task, [one])

    store = MediaStore(tmp_path / "media", most_bytes=25)
    store.keep([shown(b"1" * 10, b"1" * 10), shown(b"1" * 10, b"2" * 10)])
    assert len(list((tmp_path / "media").iterdir())) == 2
    again = MediaStore(tmp_path / "media", most_bytes=25)  # as a resumed run has it
    again.keep([shown(b"2" * 10, b"3" * 10)])
    assert len(list((tmp_path / "media").iterdir())) == 2, "there is no room for a third"
    assert again.path("../" + "0" * 64) is None and again.path("0" * 64) is None


def test_files_from_before_still_open(tmp_path: Path) -> None:
    """Files whose writer did not know advantages, timings and branches."""
    import pyarrow.parquet as pq

    write_run(tmp_path / "old", {1: ordinary_groups(1)})
    path = tmp_path / "old" / "trajectories" / "step-000001.parquet"
    table = pq.read_table(path)
    newer = ["advantages", "entropies", "spans", "renders", "branch_attempt", "branch_segments", "branch_state",
             "shared_segments", "shared_messages", "counts"]  # fmt: skip
    pq.write_table(table.drop_columns(newer), path)
    [first, *_] = RunFolder(tmp_path / "old").trajectories(1)
    assert isinstance(first, Trajectory) and first.spans == [] and first.actions[0].advantages is None
    with running_viewer(tmp_path) as viewer:
        found = viewer.settled()
        assert found["summary"]["episodes"] == EACH and not found["index"]["problems"]
        assert viewer.get("/api/episode/old/step-000001.parquet/0").json["turns"][0]["advantage"] is None


def test_the_task_of_an_empty_episode_is_shown(tmp_path: Path) -> None:
    nothing = Trajectory(Task.of("never asked", id="t"))
    write_run(tmp_path / "run", {1: [Group(nothing.task, [nothing])]})
    with running_viewer(tmp_path) as viewer:
        viewer.settled()
        assert (
            viewer.get("/api/episode/run/step-000001.parquet/0").json["messages"][0]["content"]
            == "never asked"
        )
        label = {"episode": {"run": "run", "file": "step-000001.parquet", "row": 0}, "label": True}
        assert "said nothing" in viewer.post("/api/label", label).json["error"]


def test_evaluations_are_listed_beside_runs(tmp_path: Path) -> None:
    """What `ludus eval` wrote: each model under each budget, with its episodes and what they say."""
    write_run(tmp_path / "runs" / "first", {1: ordinary_groups(1)})
    with ResultsFolder(tmp_path / "evaluations" / "odd-001", {"attempts": 4, "seed": 0}) as results:
        done = results.cell("small", {"model": "a"}, 8)
        for number, group in enumerate(ordinary_groups(1)):
            done.write(group, number)
        done.close(ordinary_groups(1))
        results.cell("small", {"model": "a"}, 16, "sums").write(ordinary_groups(1)[0], 0)
    (tmp_path / "evaluations" / "notes").mkdir()
    with running_viewer(tmp_path / "runs") as made:
        made.settled()
        runs = {run["name"]: run for run in made.get("/api/runs").json["runs"]}
        whole, part = sorted(name for name in runs if name != "first")[::-1]
        assert whole.startswith("odd-001:small-") and whole.endswith(":turns-8")
        assert part.endswith(":turns-16:sums")
        assert runs[whole]["model"] == "small" and runs[whole]["headline"] == "eval/success"
        assert runs[whole]["last"] == pytest.approx(3 / 6), "lost episodes are in no mean"
        assert count(made, run=whole) == 7 and count(made, run=part) == 4
        detail = made.get(f"/api/run/{whole}").json
        assert detail["recipe"]["evaluation"] == {"attempts": 4, "seed": 0} and detail["episodes"] == 7
        found = made.get("/api/episodes", run=whole).json["episodes"][0]
        shown = made.get(f"/api/episode/{whole}/{found['file']}/{found['row']}")
        assert shown.status == 200 and shown.json
        assert made.get("/api/run/odd-001").status == 404
    with running_viewer(tmp_path / "evaluations" / "odd-001") as made:
        made.settled()
        assert len(made.get("/api/runs").json["runs"]) == 2, "the folder itself"


def test_syntheses_and_runs_within_folders_are_listed(tmp_path: Path) -> None:
    """What `ludus synth` keeps and leaves out; the run of `ludus mcp-rl`, and those of a sweep."""
    first, second = (group.trajectories for group in ordinary_groups(1))
    with SynthFolder(tmp_path / "synth" / "sums-001", {"method": "rejection"}) as made:
        made.write_piece("play", 0, "key", ItemResult(first))
    with running_viewer(tmp_path / "synth" / "sums-001") as viewer:
        viewer.settled()
        [run] = viewer.get("/api/runs").json["runs"]
        assert run["name"] == "sums-001:parts:play" and count(viewer) == 4, "while it goes on"
    with SynthFolder(tmp_path / "synth" / "sums-001", {"method": "rejection"}) as made:
        made.write_examples(first, [Rejected(second[1], "wrong")])
    for name in ("mcp-rl-001/run", "sweep-001/rate-1/seed-0", "plain"):
        write_run(tmp_path / "runs" / name, {1: ordinary_groups(1)})
    with running_viewer(tmp_path / "runs") as viewer:
        viewer.settled()
        runs = {one["name"]: one for one in viewer.get("/api/runs").json["runs"]}
        assert set(runs) == {"sums-001", "mcp-rl-001:run", "sweep-001:rate-1:seed-0", "plain"}
        assert runs["sums-001"]["headline"] == "kept" and runs["sums-001"]["last"] == pytest.approx(
            4 / 5
        )
        assert runs["sums-001"]["kind"] == "synthesis" and runs["plain"]["kind"] == "run"
        assert count(viewer, run="sums-001", split="rejected") == 1
        [row] = viewer.get("/api/episodes", run="mcp-rl-001:run", limit=1).json["episodes"]
        assert viewer.get(f"/api/episode/mcp-rl-001:run/{row['file']}/{row['row']}").status == 200


def test_tables_of_viewers_that_were_killed_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "temporary"
    killed, foreign = folder / "ludus-view-killed", folder / "ludus-view-foreign"
    killed.mkdir(parents=True)
    foreign.symlink_to(tmp_path, target_is_directory=True)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    alive = ScratchFolder("ludus-view-")
    for one in (killed, alive.path):
        os.utime(one, (0, 0))
    with running_viewer(tmp_path):
        assert not killed.exists() and alive.path.exists() and foreign.exists()
    assert sorted(folder.iterdir()) == sorted([alive.path, foreign])
    alive.remove()


DIGITS = "1" + "0" * 400
DEEP = '{"a":' * 900 + "1" + "}" * 900
PLACE = '{"run": "first", "file": "step-000001.parquet", "row": 0}'


@pytest.mark.parametrize(
    "body",
    [
        f'{{"episode": {PLACE}, "label": true, "note": "\\ud800"}}',
        *(
            f'{{"episode": {PLACE}, "label": true, "score": {score}}}'
            for score in ("NaN", "-Infinity", "1e999", DIGITS, "true")
        ),
        f'{{"episode": {PLACE}, "label": true, "more": {DEEP}}}',
        f'{{"episode": {PLACE.replace(": 0", ": " + DIGITS)}, "label": true}}',
        f'{{"episode": {PLACE.replace(": 0", ": -1")}, "label": true}}',
        "[" * 100_000,
        "[]",
    ],
)
def test_bodies_that_are_wrong_are_a_400_with_a_sentence(viewer: RunningViewer, body: str) -> None:
    found = viewer.post("/api/label", body.encode())
    assert found.status == 400 and " " in found.json["error"]
    assert not viewer.get("/api/labels").json["labels"]


@pytest.mark.parametrize("charset", ["punycode", "utf-16", "latin-1", "no-such-thing"])
def test_bodies_are_utf_8(viewer: RunningViewer, charset: str) -> None:
    headers = {"Content-Type": f"application/json; charset={charset}", "X-Ludus": "1"}
    found = viewer.post("/api/label", f'{{"episode": {PLACE}, "label": null}}'.encode(), headers)
    assert found.status == 415 and "UTF-8" in found.json["error"]
    headers["Content-Type"] = "application/json; charset=utf-8"
    assert (
        viewer.post("/api/label", f'{{"episode": {PLACE}, "label": null}}'.encode(), headers).status
        == 200
    )


@pytest.mark.parametrize("text", ["%ED%A0%80", "%FF", "%00", "9" * 400])
def test_addresses_with_odd_bytes_are_answered(viewer: RunningViewer, text: str) -> None:
    for path in (
        f"/api/episodes?text={text}",
        f"/api/episodes?task={text}&run={text}",
        f"/api/episodes?least_reward={text}",
        f"/api/episodes?first_step={text}",
        f"/api/run/{text}",
        f"/api/history/first?task={text}",
        f"/api/episode/first/{text}/0",
        f"/export/episode.json?episode=first/{text}/0",
    ):
        assert viewer.get(path).status in (200, 400, 404), path
