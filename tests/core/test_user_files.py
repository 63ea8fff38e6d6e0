"""Files that users write: one error with file, line and fix, whatever is in them, or whatever they are."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from ludus.cli.main import app
from ludus.core import ConfigError
from ludus.core.config import read_toml
from ludus.core.registry import import_object
from ludus.core.user_files import decode_user_text, file_problem, json_lines, read_user_text
from ludus.rewards.check import read_labels
from ludus.rewards.judges.rubric import load_rubric
from ludus.rollouts import load_tasks
from ludus.tools.library.retrieval import read_corpus
from ludus.training.data.conversations import read_conversations
from ludus.worlds import read_rows

ROW = '{"prompt": "2+2?", "target": "4", "task": "2+2?", "answer": "4", "text": "x", "title": "y"'
READERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "tasks": ("f.jsonl", load_tasks),
    "conversations": ("f.jsonl", read_conversations),
    "labels": ("f.jsonl", read_labels),
    "a corpus": ("f.jsonl", lambda path: list(read_corpus(path))),
    "rows": ("f.jsonl", lambda path: read_rows(Path(path))),
    "tasks as a list": ("f.json", load_tasks),
    "a rubric": ("f.json", load_rubric),
}
CONTENTS: dict[str, tuple[bytes, str]] = {
    "latin-1": (b"\n\n\xe9", "line 3, is not in UTF-8 .*save it as UTF-8"),
    "utf-16": ("{}".encode("utf-16"), "UTF-16.*save it as UTF-8"),
    "a null byte": (b"\n{\0}", "line 2, has a null byte"),
    "deep": (b"[" * 100_000, "nested too deeply"),
    "NaN": (ROW.encode() + b', "x": NaN}', "NaN is not a JSON value"),
    "Infinity": (ROW.encode() + b', "x": -Infinity}', "-Infinity is not a JSON value"),
    "too large": (ROW.encode() + b', "x": 1e999}', "the number 1e999 is too large"),
    "a key twice": (ROW.encode() + b', "x": 1, "x": 2}', 'the key "x" is given twice'),
    "a digit too many": (b'{"x": ' + b"9" * 5000 + b"}", "4300 digits"),
    "cut off": (ROW.encode(), "is not JSON: .* at column"),
}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("reader", READERS)
def test_what_a_file_holds(tmp_path: Path, reader: str, content: str) -> None:
    name, read = READERS[reader]
    data, told = CONTENTS[content]
    file = tmp_path / name
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=told) as caught:
        read(str(file))
    assert name in str(caught.value) and len(str(caught.value)) < 700
    if name.endswith("l") and content in ("NaN", "deep", "a key twice", "cut off"):
        assert f"{name}, line 1, is not JSON" in str(caught.value)


@pytest.mark.parametrize("content", ["latin-1", "utf-16", "a null byte", "deep"])
def test_what_a_recipe_holds(tmp_path: Path, content: str) -> None:
    data, told = CONTENTS[content]
    file = tmp_path / "f.toml"
    file.write_bytes(b"x = " + data if content == "deep" else data)
    with pytest.raises(ConfigError, match=rf"f.toml.*{told}"):
        read_toml(file)
    file.write_bytes(b"\xef\xbb\xbfx = 1\r\ny = 2\r\n")
    assert read_toml(file) == {"x": 1, "y": 2}


@pytest.mark.parametrize("reader", [*READERS, "a recipe"])
def test_what_is_no_file(tmp_path: Path, reader: str) -> None:
    name, read = READERS.get(reader, ("f.toml", read_toml))
    for kind, told in (
        ("gone", "there is no file"),
        ("folder", "is a folder"),
        ("loop", "Too many levels of symbolic links"),
        ("dangling", "is a link to nowhere, which is not there"),
        ("pipe", "is a pipe or a device"),
    ):
        (tmp_path / kind).mkdir()
        file = tmp_path / kind / name
        if kind == "folder":
            file.mkdir()
        elif kind in ("loop", "dangling"):
            file.symlink_to(name if kind == "loop" else "nowhere")
        elif kind == "pipe":
            os.mkfifo(file)
        with pytest.raises(ConfigError, match=told):
            if reader != "rows":
                read(str(file))
            else:
                read_user_text(file)


def test_a_file_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "f.jsonl"
    file.write_text("{}")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read everything
    with pytest.raises(ConfigError, match=r"f.jsonl cannot be read: you have no permission"):
        load_tasks(str(file))
    assert "null" in (file_problem("a\0b") or "")


@given(
    st.lists(st.dictionaries(st.text(), st.text() | st.floats(allow_nan=False, allow_infinity=False)))
)
def test_rows_come_back_whatever_the_line_ends(rows: list[dict[str, Any]]) -> None:
    lines = [json.dumps(row, ensure_ascii=number % 2 == 0) for number, row in enumerate(rows)]
    for end in ("\n", "\r\n", "\n\n"):
        for mark in ("", "\ufeff"):
            text = mark + end.join(lines)
            found = json_lines(decode_user_text(text.encode("utf-8", "replace"), "f"), "f")
            assert [row for _, row in found] == [
                json.loads(line.encode("utf-8", "replace")) for line in lines
            ]


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("def r(:\n", "line 1: SyntaxError: invalid syntax$"),
        ("x = 1\0\n", "SyntaxError: source code string cannot contain null bytes$"),
        ("import sys\nsys.exit(3)\n", r"it ends the program \(SystemExit: 3 .*:2 in <module>\)"),
        ("def f(): return f()\nf()\n", "RecursionError"),
    ],
)
def test_code_that_cannot_be_imported(tmp_path: Path, code: str, told: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(code)
    with pytest.raises(ConfigError, match=told) as caught:
        import_object(f"{file}:r")
    assert "mine.py" in str(caught.value) and "frozen" not in str(caught.value)


def test_the_command_line_says_it_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tasks.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xe9"}\n')
    recipe = '\ufeffrewards = ["exact_match"]\n[model.scratch]\nlayers = 1\n[rl]\nsteps = 1\n'
    Path("recipe.toml").write_text(f'{recipe}[tasks]\ntrain = "tasks.jsonl"\n')
    for words in (
        ["check", "recipe", "recipe.toml"],
        ["train", "recipe.toml"],
        ["eval", "recipe.toml"],
        ["synth", "rejection", "recipe.toml"],
        ["check", "env", "safe", "--tasks", "tasks.jsonl"],
        ["check", "data", "tasks.jsonl"],
        ["check", "reward", "exact_match", "--labels", "tasks.jsonl"],
    ):
        done = CliRunner().invoke(app, words)
        assert isinstance(done.exception, ConfigError), (words, done.output, done.exception)
        assert "tasks.jsonl, line 2, is not in UTF-8" in str(done.exception)


def test_what_lies_beside_a_file_is_found_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rubric of `ludus check reward`; and a folder where a file should be, which is there."""
    home = tmp_path / "home"
    (home / "tasks.jsonl").mkdir(parents=True)
    (home / "rubric.toml").write_text("not a rubric at all\n")
    (home / "judge.toml").write_text(
        'rewards = [{reward = "judge", model = "http://127.0.0.1:1/v1#m", rubric = "rubric.toml"}]\n'
    )
    (home / "labels.jsonl").write_text('{"task": "a", "answer": "b", "label": 1}\n')
    (home / "recipe.toml").write_text('[model.scratch]\nlayers = 1\n[tasks]\ntrain = "tasks.jsonl"\n')
    monkeypatch.chdir(tmp_path)
    labels = ["--labels", "home/labels.jsonl"]
    done = CliRunner().invoke(app, ["check", "reward", "home/judge.toml", *labels])
    assert f"{home / 'rubric.toml'}" in str(done.exception) and "there is no" not in str(done.exception)
    done = CliRunner().invoke(app, ["check", "recipe", "home/recipe.toml"])
    assert f"{home / 'tasks.jsonl'} is a folder" in f"{done.output}{done.exception}".replace("\n", "")
