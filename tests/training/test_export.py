"""Exported models: what other programs load is what was trained, and prompts as it was prompted."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from export_parts import desk_of, recipe, right, tasks

import ludus
from ludus.cli.main import app, run_command
from ludus.core import ConfigError
from ludus.observe import RunFolder
from ludus.training.config.parts import load_parts
from ludus.training.export.model import Compared, export_model, exported_facts, named_base

PROMPT = [5, 6, 7, 8, 9, 10]


def trained(folder: Path, steps: int, **changes: Any) -> RunFolder:
    made = recipe(folder, steps, **changes)
    asyncio.run(ludus.training.train_async(made, load_parts(made)))
    return RunFolder(folder)


def last(run: RunFolder) -> Path:
    found = run.latest_checkpoint()
    assert found is not None
    return found.path


def command(*words: object) -> int:
    return run_command(lambda **options: app([str(word) for word in words], **options))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return trained(tmp_path_factory.mktemp("runs") / "desks-001", 2, evaluation={"tasks": 2})


@pytest.fixture(scope="module")
def adapted(run: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run that has trained an adapter beside the other run's model."""
    model = {"scratch": None, "name": str(last(run)), "lora": {"rank": 4}}
    folder = tmp_path_factory.mktemp("adapted") / "lora-001"
    return trained(folder, 2, model=model, evaluation={"tasks": 2})


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(torch.tensor([PROMPT])).logits
    return found


def test_the_folder_is_a_model_of_transformers(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    out = tmp_path / "out"
    assert command("export", run.path, "--out", out) == 0
    said = capsys.readouterr().out
    assert f"model:    {out}" in said and "4 of 4 first prompts, token for token" in said
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(logits(loaded), logits(AutoModelForCausalLM.from_pretrained(last(run))))
    tokenizer = AutoTokenizer.from_pretrained(out)
    episode = run.trajectories(2, "eval")[0]
    asked = [message.as_chat() for message in episode.asked]
    shown = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    assert shown == episode.sequences[0].segments[0].tokens
    without = tokenizer.apply_chat_template(asked[1:], add_generation_prompt=True, return_dict=False)
    assert asked[0]["role"] == "system" and without == shown, "the system prompt is the recipe's"
    settings = GenerationConfig.from_pretrained(out)
    assert (settings.temperature, settings.top_p, settings.top_k, settings.max_new_tokens) == (
        1,
        1,
        0,
        48,
    )
    assert settings.eos_token_id == [tokenizer.eos_token_id]
    facts = exported_facts(out)
    assert facts is not None and (facts.name, facts.format) == ("desks-step-2", "hermes")
    assert command("export", run.path, "--out", out) == 2
    assert "already there" in capsys.readouterr().err


def test_the_card_says_what_it_is_and_no_folder_of_this_machine(run: RunFolder, tmp_path: Path) -> None:
    export_model(run, last(run), tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    for text in (
        "curve.png",
        "after the warm start",
        "| desk_of | Find the desk of a team. |",
        "scratch",
    ):
        assert text in card
    assert (tmp_path / "out" / "curve.png").read_bytes().startswith(b"\x89PNG")
    for file in (tmp_path / "out").glob("*.*"):
        if file.suffix in (".json", ".md", ".jinja"):
            assert str(Path(__file__).parent) not in file.read_text(), file
            assert str(run.path.parent) not in file.read_text(), file


def test_an_adapter_is_merged_or_stands_alone(
    run: RunFolder, adapted: RunFolder, tmp_path: Path
) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    merged = export_model(adapted, last(adapted), tmp_path / "merged")
    alone = export_model(adapted, last(adapted), tmp_path / "alone", adapter=True)
    expected = logits(AutoPeftModelForCausalLM.from_pretrained(last(adapted)))
    assert not torch.allclose(expected, logits(AutoModelForCausalLM.from_pretrained(last(run))))
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(merged.folder)), expected)
    assert torch.equal(logits(AutoPeftModelForCausalLM.from_pretrained(alone.folder)), expected)
    assert not (merged.folder / "adapter_config.json").exists() and not merged.facts.is_adapter
    assert not (alone.folder / "model.safetensors").exists() and alone.facts.is_adapter
    with pytest.raises(ConfigError, match="a whole model and no adapter"):
        export_model(run, last(run), tmp_path / "none", adapter=True)


def test_the_base_has_the_name_that_others_know(
    adapted: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert named_base("smollm2") == named_base("SmolLM2-135M-Instruct") == hub
    assert named_base("owner/model") == "owner/model"
    assert named_base(None) is None
    assert named_base(str(last(adapted))) is None, "an adapter beside a model from scratch"
    told = json.loads((adapted.path / "recipe.json").read_text())
    further = RunFolder(tmp_path / "further")
    shutil.copytree(adapted.path, further.path)
    told["model"] = {"name": "smollm2"}
    (further.path / "recipe.json").write_text(json.dumps(told))
    (last(further) / "adapter_config.json").unlink()
    assert named_base(str(last(further))) == hub


def test_a_checkpoint_is_exported_by_its_path(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command("export", last(run)) == 0
    assert (tmp_path / "desks-001-step-000002" / "model.safetensors").is_file()
    for words, why in (
        ([last(run), "--checkpoint", "best"], "is a checkpoint already"),
        ([run.path, "--checkpoint", "7"], "those of the steps"),
        ([tmp_path / "desks-001-step-000002"], "neither a run's folder nor a checkpoint"),
        ([tmp_path / "missing"], "missing"),
        ([run.path, "--adapter", "--gguf"], "leave out --adapter"),
        ([run.path, "--public"], "--push"),
    ):
        assert command("export", *words) == 2
        assert why in capsys.readouterr().err.replace("\n", " ")


def trained_with_objects(folder: Path, **changes: Any) -> RunFolder:
    """A run whose recipe does not name its tools."""
    table = {
        "model": {"scratch": {"layers": 1, "width": 32, "heads": 2}},
        "tasks": tasks()[:4],
        "rl": {"steps": 1, "tasks": 2, "attempts": 2},
        "budgets": {"max_turns": 1, "max_turn_tokens": 8},
        "engine": {"cache_tokens": 4096},
    }
    ludus.train(tools=[desk_of], rewards=[right], run={"folder": str(folder)}, **(table | changes))
    return RunFolder(folder)


def test_tools_that_the_recipe_does_not_name_are_read_from_recorded_prompts(tmp_path: Path) -> None:
    run = trained_with_objects(tmp_path / "run")
    made = export_model(run, last(run), tmp_path / "out")
    assert (made.compared.first, made.compared.first_same) == (4, 4)
    assert any("those that its recorded prompts list" in note for note in made.notes)
    assert "| desk_of | Find the desk of a team. |" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("case", ["in words", "in the question"])
def test_tools_that_no_prompt_proves_are_told_as_unknown(case: str, tmp_path: Path) -> None:
    """Described in words; or another tool's JSON in every question, with which the prompts do not come out."""
    other = json.dumps({"type": "function", "function": {"name": "other"}})
    asked = [{**one, "prompt": f"{one['prompt']} {other}"} for one in tasks()[:4]]
    changes = {"in words": {"agent": {"format": "tags"}}, "in the question": {"tasks": asked}}[case]
    run = trained_with_objects(tmp_path / "run", **changes)
    made = export_model(run, last(run), tmp_path / "out")
    assert made.compared.first_same == 0
    assert any("give `tools` with every request" in note for note in made.notes)


def test_what_a_chat_template_cannot_say_is_told(run: RunFolder, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(run.path, other)
    told = json.loads((other / "recipe.json").read_text())
    told["agent"] |= {"format": {"name": "tags"}, "turns": "inline"}
    told["budgets"]["remind"] = True
    (other / "recipe.json").write_text(json.dumps(told))
    notes = " ".join(export_model(RunFolder(other), last(RunFolder(other)), tmp_path / "out").notes)
    for text in (
        "'</desk_of>'",
        "inside its own turn",
        "[2 turns left]",
        "no first prompt came out the same",
    ):
        assert text in notes


def test_a_run_without_episodes_says_that_nothing_was_compared() -> None:
    assert str(Compared()) == "no recorded episode was there to compare with"


# Servers of others.


def test_vllm_that_is_missing_is_named_with_the_command(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command("serve", "vllm", run.path, "--port", 8123) == 2
    out, err = capsys.readouterr()
    place = tmp_path / "desks-001-step-000002-vllm"
    assert f"--model {place} --served-model-name desks-step-2" in out
    assert f"--chat-template {place}/chat_template.jinja" in out
    assert "--enable-auto-tool-choice --tool-call-parser hermes" in out and "--max-model-len 4096" in out
    assert "not installed here" in err and "pip install vllm" in err
    assert command("serve", "vllm", place, "--name", "desks") == 2
    assert "--served-model-name desks" in capsys.readouterr().out
    assert command("serve", "vllm", run.path, "--python", sys.executable) == 2
    assert "has no vLLM" in capsys.readouterr().err
    assert command("serve", "vllm", run.path, "--python", "./none") == 2
    assert "no such program" in capsys.readouterr().err
    assert command("serve", "vllm", place, "--checkpoint", "best") == 2
    assert "is an exported model" in capsys.readouterr().err


def test_gguf_needs_the_converter_and_passes_on_what_it_says(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    assert command("export", run.path, "--out", tmp_path / "none", "--gguf") == 2
    assert "needs llama.cpp's convert_hf_to_gguf.py" in capsys.readouterr().err
    assert not (tmp_path / "none").exists(), "before minutes of work"
    converter = tmp_path / "convert_hf_to_gguf.py"
    converter.write_text("import sys; sys.exit('the pre-tokenizer is not known: ' + sys.argv[1])")
    converter.chmod(converter.stat().st_mode | stat.S_IXUSR)
    assert command("export", run.path, "--out", tmp_path / "out", "--gguf") == 2
    assert "pre-tokenizer is not known" in capsys.readouterr().err
    assert (tmp_path / "out" / "model.safetensors").is_file()


class _Hub(BaseHTTPRequestHandler):
    """As much of the hub's API as an upload asks."""

    server: Any
    asked: list[tuple[str, Any]]
    files: dict[str, bytes]

    def do_GET(self) -> None:
        if self.headers.get("Authorization") != "Bearer hf_right":
            self._answer({"error": "Invalid credentials"}, 401)
        else:
            self._answer({"name": "me", "type": "user", "orgs": [], "auth": {}})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._answer(
                {
                    "commitUrl": f"{self.server.address}/me/desks/commit/1",
                    "commitOid": "1",
                    "success": True,
                }
            )
            return
        told = json.loads(body)
        self.asked.append((self.path, told))
        if self.path.endswith("/preupload/main"):
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                for f in told["files"]
            ]
            self._answer({"files": files})
        else:
            self._answer({"url": f"{self.server.address}/me/desks", "name": "me/desks", "id": "1"})

    def _answer(self, body: Any, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[tuple[str, type[_Hub]]]:
    handler = type("OneHub", (_Hub,), {"asked": [], "files": {}})
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.address, handler
    server.shutdown()
    server.server_close()


@pytest.mark.timeout(120)
def test_push_uploads_all_of_the_folder(
    run: RunFolder, tmp_path: Path, hub: tuple[str, type[_Hub]]
) -> None:
    address, seen = hub
    words = [sys.executable, "-m", "ludus", "export", str(run.path), "--push", "me/desks"]

    def pushed(out: str, token: str, to: str = address) -> subprocess.CompletedProcess[str]:
        own = {"HF_ENDPOINT": to, "HF_TOKEN": token, "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "*"}
        return subprocess.run(
            [*words, "--out", str(tmp_path / out)],
            env={**os.environ, **own, "HF_HUB_DISABLE_XET": "1"},
            capture_output=True,
            text=True,
            check=False,
        )

    done = pushed("out", "hf_right")
    assert done.returncode == 0, done.stderr
    assert f"{address}/me/desks (private)" in done.stdout
    path, told = seen.asked[0]
    assert path == "/api/repos/create" and (told["organization"], told["name"]) == ("me", "desks")
    assert told.get("visibility") == "private" or told.get("private") is True  # by the client's version
    written = {one.name: one.read_bytes() for one in (tmp_path / "out").iterdir()}
    assert {name: data for name, data in seen.files.items() if name in written} == written
    refused = pushed("refused", "hf_wrong")
    assert refused.returncode == 2 and "refuses whoami" in refused.stderr
    assert not (tmp_path / "refused").exists(), "before minutes of work"
