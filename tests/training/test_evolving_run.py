"""A run whose rubric evolves: versions in its episodes and checkpoints, and the same after a resume."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from training_helpers import TINY, Chatty, add, tasks

import ludus
from ludus.observe import RunFolder
from openai_server import chat, serving


def reply(body: dict[str, Any]) -> Any:
    system, user = (message["content"] for message in body["messages"][:2])
    code = re.search(r'"code": "(\w+)"', user)
    assert code is not None
    if "improve the rubric" in system:
        new = [{"id": f"seen_{len(user) % 1000}", "text": f"Says {code[1]} of {len(user)}."}]
        return chat(json.dumps({"code": code[1], "criteria": new}))
    names = re.findall(r'"(\w+)": <0 to 10>', user)
    scores = {name: (len(user) + place) % 11 for place, name in enumerate(names)}
    return chat(json.dumps({"code": code[1], "scores": scores}))


def test_a_rubric_evolves_and_resumes(tmp_path: Path) -> None:
    with serving(reply) as server:
        judge = {
            "reward": "judge",
            "model": {"address": f"{server.url}#tiny", "name": "judge"},
            "evolve": {"every": 1, "stricter_above": 0.5, "looser_below": 0.4, "min_spread": 0.01},
        }

        def settings(name: str, steps: int) -> dict[str, Any]:
            run = {**TINY["run"], "folder": str(tmp_path / name)}
            return {**TINY, "rl": {**TINY["rl"], "steps": steps}, "run": run}

        code = {
            "tasks": tasks(4),
            "tools": [add],
            "rewards": [judge],
            "agent": Chatty(),
            "progress": False,
        }
        ludus.train(**settings("whole", 3), **code)
        ludus.train(**settings("parts", 2), **code)
        ludus.train(resume=tmp_path / "parts", rl={"steps": 3}, **code)
    whole, parts = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "parts")
    versions = [
        {t.rewards["judge_version"] for t in whole.trajectories(step, "train")} for step in (1, 2, 3)
    ]
    assert versions == [{1.0}, {2.0}, {3.0}]
    states = [
        json.loads((run.checkpoints()[-1].path / "rewards.json").read_text()) for run in (whole, parts)
    ]
    evolved = [next(iter(state.values()))["judge"]["evolution"] for state in states]
    assert evolved[0] == evolved[1]
    assert evolved[0]["rubric"]["version"] == 4
    assert [row["judge/calls"] for row in whole.metrics()] == [1.0, 1.0, 1.0]
