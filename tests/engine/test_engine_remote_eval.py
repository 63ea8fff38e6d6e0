"""`ludus eval` on a model behind an address: scripted servers stand in for strong and weak models."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ludus.cli.main import app, run_command
from ludus.core import FinishReason, Sampling
from ludus.engine import EmbeddedEngine, EngineConfig
from ludus.observe import read_trajectories
from ludus.training import ModelConfig, ScratchConfig, fit_tokenizer, load_model
from openai_server import OpenAIServer, chat, error, serving, text

MODULE = '''
import ludus

@ludus.tool
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

@ludus.reward
async def success(answer, task) -> float:
    return float(answer == task.target)

def held_out():
    return [
        ludus.Task.of(f"{n} plus {n}?", target=str(2 * n), id=f"t{n}", size="big" if n > 9 else "small")
        for n in range(4, 16)
    ]
'''
RECIPE = """
name = "adding"
rewards = ["task.py:success"]
model = { name = "none/needed" }

[tasks]
evaluation = "task.py:held_out"

[agent]
tools = ["task.py:add"]

[budgets]
max_turns = 4
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "task.py").write_text(MODULE)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


def ludus(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def model(body: dict[str, Any]) -> dict[str, Any]:
    """Adds with the tool, which takes two turns. The model "weak" guesses for numbers of two digits."""
    *_, last = body["messages"]
    if "<tool_response>" in last["content"]:
        return chat(last["content"].split("\n")[1])
    number = int(body["messages"][1]["content"].split()[0])
    if body["model"] == "weak" and number > 9:
        return chat("12")
    call = {"name": "add", "arguments": {"a": number, "b": number}}
    return chat(f"<tool_call>\n{json.dumps(call)}\n</tool_call>")


def native(body: dict[str, Any]) -> dict[str, Any]:
    """The same as the interface has it: tools in the request, calls and results as messages of their kinds."""
    last = body["messages"][-1]
    if last["role"] == "tool":
        return chat(last["content"])
    assert [tool["function"]["name"] for tool in body["tools"]] == ["add"]
    number = int(last["content"].split()[0])
    function = {"name": "add", "arguments": json.dumps({"a": number, "b": number})}
    answer = chat(None, "tool_calls")
    answer["choices"][0]["message"]["tool_calls"] = [
        {"id": "1", "type": "function", "function": function}
    ]
    return answer


def test_native_tools_on_the_command_line(project: Path) -> None:
    with serving(native) as server:
        ludus("eval", "recipe.toml", "-m", server.url, "--tools", "native", "--results", "r")
    assert report(project / "r")["measured"][0]["success"]["value"] == 1
    options = ("eval", "recipe.toml", "-m", "http://127.0.0.1:9/v1#x")
    for wrong in (("--tools", "other"), ("--tools", "native", "agent.format=react")):
        done = CliRunner().invoke(app, [*options, *wrong])
        assert done.exit_code != 0 and "tools" in str(done.exception)


def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


def test_two_models_on_a_server(project: Path) -> None:
    with serving(model, models=["strong", "weak"]) as server:
        said = ludus(
            *("eval", "recipe.toml", "-m", f"{server.url}#strong", "--against", f"{server.url}#weak"),
            *(
                "--turns",
                "1,2",
                "--attempts",
                "3",
                "--by",
                "size",
                "--results",
                "r",
                "-o",
                "all.parquet",
            ),
        )
    assert "A = " in said and "p flip" in said
    found = report(project / "r")
    success = {
        (row["model"].partition("#")[2], row["max_turns"], row["subtask"]): row["success"]["value"]
        for row in found["measured"]
    }
    assert success["strong", 2, "all"] == 1.0 and success["strong", 1, "all"] == 0.0
    assert success["weak", 2, "small"] == 1.0 and success["weak", 2, "big"] == 0.0
    compared = {(row["max_turns"], row["subtask"]): row for row in found["comparisons"]}
    whole = compared[2, "all"]
    assert (whole["wins"], whole["losses"], whole["ties"]) == (6, 0, 6)
    assert whole["p_sign"] == whole["p_flip"] == pytest.approx(2 / 2**6) and whole["p_flip_is_exact"]
    assert compared[2, "small"]["p_flip"] == 1.0
    assert len(read_trajectories("all.parquet")) == 12 * 3 * 2 * 2


def test_only_what_is_missing_is_played(project: Path) -> None:
    """A server that breaks for some tasks: these are left out, and played again by the next run."""
    broken = True

    def reply(body: dict[str, Any]) -> Any:
        if broken and body["messages"][1]["content"].startswith(("4 ", "5 ")):
            return error(400, "not today")
        return model(body)

    with serving(reply) as server:
        command = ["eval", "recipe.toml", "-m", server.url, "--attempts", "2", "--results", "r"]
        said = ludus(*command)
        (row,) = report(project / "r")["measured"]
        assert (row["failed"], row["scored"], row["success"]["value"]) == (4, 20, 1.0)
        assert row["model"].endswith("#tiny") and "lost episodes" in said
        broken = False
        server.asked.clear()
        assert "10 tasks had been played before" in ludus(*command)
        (row,) = report(project / "r")["measured"]
        assert (row["failed"], row["scored"], row["success"]["value"]) == (0, 24, 1.0)
        assert len(server.asked) == 2 * 2 * 2, "two tasks, two attempts, two turns"
        server.asked.clear()
        ludus(*command)
        assert server.asked == []


def test_prompts_of_the_models_own_tokenizer(project: Path) -> None:
    """With --tokenizer, the prompt is rendered here and continued there."""
    fit_tokenizer(["plus"], 400).save_pretrained("tokenizer")

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        prompt = body["prompt"]
        assert prompt.startswith("<|im_start|>") and prompt.endswith("assistant\n")
        number = int(prompt.rpartition(" plus ")[2].partition("?")[0])
        return {"choices": [{"text": str(2 * number), "finish_reason": "stop"}]}

    with serving(reply) as server:
        ludus(
            *("eval", "recipe.toml", "-m", server.url, "--tokenizer", "tokenizer", "--prompt", "text"),
            *("--request", '{"top_p": null}', "--results", "r", "--temperature", "0"),
        )
    (row,) = report(project / "r")["measured"]
    assert row["success"]["value"] == 1.0
    assert {asked.path for asked in server.asked} == {"/v1/completions"}
    assert all("top_p" not in body and body["temperature"] == 0 for body in server.bodies)


def test_a_model_is_the_same_here_and_there(project: Path) -> None:
    """The same weights, greedy: in this process, and behind a server that continues token ids."""
    small = [
        "budgets.max_turns=1",
        "budgets.max_turn_tokens=12",
        "engine.cache_tokens=4096",
        "engine.max_running=16",
    ]
    config = ModelConfig(scratch=ScratchConfig(layers=1, width=32, heads=2, kv_heads=1))
    weights, tokenizer = load_model(config, seed=0)
    weights.save_pretrained("model")
    tokenizer.inner.save_pretrained("model")
    engine = EmbeddedEngine(weights, tokenizer, EngineConfig(cache_tokens=4096, max_running=16))

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        sampling = Sampling(
            max_tokens=body["max_tokens"], temperature=0, stop_tokens=tokenizer.stop_tokens
        )
        done = asyncio.run(engine.generate(body["prompt"], sampling))
        is_cut = done.finish is FinishReason.LENGTH
        return text(tokenizer.decode(done.tokens), "length" if is_cut else "stop")

    command = ["eval", "recipe.toml", *small, "--temperature", "0"]
    with serving(reply) as server:
        ludus(*command, "-m", "model", "-o", "here.parquet")
        ludus(*command, "-m", server.url, "--tokenizer", "model", "-o", "there.parquet")
    asyncio.run(engine.close())
    here, there = (read_trajectories(f"{name}.parquet") for name in ("here", "there"))
    assert len(here) == 12 and all(t.failure is None for t in here + there)
    end = tokenizer.decode(tokenizer.stop_tokens[:1])
    said = [[t.messages[-1].content.removesuffix(end) for t in found] for found in (here, there)]
    assert said[0] == said[1] and any(said[0])
    assert all(math.isnan(p) for t in there for a in t.actions for p in a.logprobs or ())


def failing(server: OpenAIServer | None, *arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    words = [word.replace("URL", server.url if server else "") for word in arguments]
    code = run_command(lambda **options: app(["eval", "recipe.toml", *words], **options))
    assert code == 2
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-m", "URL", "--turns", "2,x"), "--turns takes positive numbers"),
        (("-m", "URL", "--pass-at", "4"), "pass@4 needs --attempts 4"),
        (("-m", "URL", "--prompt", "smoke"), "tokens or text"),
        (("-m", "URL", "--request", "[1]"), "JSON object"),
        (("-m", "URL", "--by", "level"), "it has: size"),
        (("-m", "URL", "--against", "URL"), "named 2 times"),
        (("-m", "URL#tiny", "tasks.evaluation=none.jsonl"), "none.jsonl"),
        (("-m", "http://127.0.0.1:9/v1#x"), "there is no model server"),
        (("-m", "http://me:secret@127.0.0.1/v1"), "LUDUS_API_KEY"),
        (("-m", "URL", "--results", "recipe.toml"), "is a file"),
    ],
)
def test_mistakes_are_explained(
    project: Path, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(model) as server:
        assert message in failing(server, *arguments, capsys=capsys)
    assert not list(project.glob("evaluations/*")), "nothing was measured, so nothing is left"


def test_a_server_that_always_fails_is_an_error_and_no_table(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(lambda body: error(400, "wrong model")) as server:
        said = failing(server, "-m", "URL", "--results", "r", capsys=capsys)
    assert "12 of 12 were lost" in said and "wrong model" in said


def test_rollout_says_what_an_address_is_for(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run_command(lambda **options: app(["rollout", "recipe.toml", "-m", "http://x/v1"], **options))
    assert code == 2 and "evaluated only" in " ".join(capsys.readouterr().err.split())
