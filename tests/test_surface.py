"""The public surface changes on purpose only: exported names, recipe keys, command-line options.

After a deliberate change: python tests/test_surface.py > tests/surface.txt
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from ludus.cli.main import app
from ludus.core import ConfigError
from ludus.core.config import ChoiceConfig
from ludus.core.config_errors import OTHER_FRAMEWORKS_KEYS
from ludus.envs import WORLDS

FROZEN = Path(__file__).with_name("surface.txt")


def names() -> Iterator[str]:
    import ludus

    yield from (f"name {name}" for name in sorted(ludus.__all__))


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        tables = [
            t
            for t in (field.annotation, *get_args(field.annotation))
            if isinstance(t, type) and issubclass(t, BaseModel) and not issubclass(t, ChoiceConfig)
        ]
        if tables:
            yield from keys(tables[0], f"{prefix}{name}.")
        else:
            yield f"key {prefix}{name}"


def options(command: Any, path: str = "ludus") -> Iterator[str]:
    for parameter in command.params:
        yield f"option {path} {'/'.join(parameter.opts)}"
    for name, inner in sorted(getattr(command, "commands", {}).items()):
        yield from options(inner, f"{path} {name}")


def surface() -> str:
    import typer

    from ludus.training import Recipe

    return "\n".join([*names(), *keys(Recipe), *options(typer.main.get_command(app))]) + "\n"


def test_the_surface_is_frozen() -> None:
    assert surface() == FROZEN.read_text(), f"see the top of {Path(__file__).name}"


def test_the_package_runs_as_the_command() -> None:
    said = subprocess.run([sys.executable, "-m", "ludus", "--version"], capture_output=True, text=True)
    assert said.returncode == 0 and said.stdout.startswith("ludus 0."), said.stderr
    said = subprocess.run([sys.executable, "-m", "ludus", "fly"], capture_output=True, text=True)
    assert said.returncode == 2 and "Traceback" not in said.stderr


def test_every_public_name_can_be_imported() -> None:
    import ludus

    for name in ludus.__all__:
        assert getattr(ludus, name) is not None


def test_every_recipe_key_is_explained() -> None:
    from ludus.cli.settings import tables

    bare = [
        f"{table.model.__module__}: {table.model.__name__}.{one.key}"
        for table in tables()
        for one in table.settings
        if not one.meaning
    ]
    assert not bare, "write a docstring under each of these fields (a line of text in triple quotes)"
    nameless = [t.model.__name__ for t in tables() if not t.model.__doc__]
    assert not nameless, "write a docstring for each of these tables"


def test_the_settings_page_is_current() -> None:
    from ludus.cli.settings import markdown

    page = Path(__file__).parent.parent / "docs" / "settings.md"
    assert page.read_text() == markdown(), "run: ludus settings --markdown > docs/settings.md"


def test_every_key_of_the_surface_is_on_the_settings_page() -> None:
    """Two walks over the recipe, written apart: what one finds, the other has."""
    from ludus.cli.settings import tables
    from ludus.training import Recipe

    found = {f"{place}.{key}".lstrip(".") for table in tables() for place in table.places
             for key in table.model.model_fields}  # fmt: skip
    shown = {key.replace("[]", "") for key in found}
    assert {key.removeprefix("key ") for key in keys(Recipe)} <= shown


RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("*.toml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_schema_takes_recipes_and_refuses_mistakes(recipe: Path) -> None:
    import jsonschema_rs

    from ludus.cli.settings import schema

    made = jsonschema_rs.validator_for(json.loads(schema()))
    raw = tomllib.loads(recipe.read_text())
    made.validate(raw)
    mistakes: list[dict[str, Any]] = [
        {"rl": {"stepps": 3}}, {"rl": {"steps": "three"}}, {"rl": {"steps": -1}}, {"sed": 1},
        {"model": {"scratch": {"width": 8}}}, {"stage": [{"kind": "ppo"}]}, {"threads": None},
    ]  # fmt: skip
    for wrong in mistakes:
        assert not made.is_valid(raw | wrong), wrong


@pytest.mark.parametrize("key", ["beta", "trainer.stage.dpo.beta", *sorted(OTHER_FRAMEWORKS_KEYS)])
def test_every_hint_of_the_settings_is_a_setting(key: str) -> None:
    """TRL's and verl's words too: what a hint names is shown when it is asked for."""
    from ludus.cli.settings import find_settings

    found, meant = find_settings(key)  # some of their words are tables here, or keys of the same name
    assert found
    for one in meant:
        assert find_settings(one.partition(" = ")[0])[1] == [], one


def test_words_of_other_frameworks_are_answered_with_the_key() -> None:
    said = ludus("settings", "num_generations")
    assert said.startswith("num_generations is called here: rl.attempts\n") and "rl.attempts = 8" in said
    assert "rl.loss = { clip_high = 0.28 }" in ludus("settings", "epsilon_high")
    done = CliRunner().invoke(app, ["settings", "rl.attempt"])
    assert "there is no setting 'rl.attempt'; did you mean rl.attempts" in str(done.exception)


def ludus(*words: str) -> str:
    done = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_init_writes_a_recipe_that_passes_its_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    said = ludus("init", "my-agent")
    assert "ludus train my-agent.toml" in said
    assert {path.name for path in tmp_path.iterdir()} == {
        "my-agent.toml",
        "my_agent.py",
        "ludus.schema.json",
    }
    text = (tmp_path / "my-agent.toml").read_text()
    assert text.startswith("#:schema ludus.schema.json\n") and text.count("#") > 10, "it is commented"
    said = ludus("check", "recipe", "my-agent.toml")
    assert "my-agent.toml: ok" in said
    assert "warning" not in said and "the others are imitated too, for RL to do better" in said
    said = ludus("check", "recipe", "my-agent.toml", "rl.steps=0")
    assert "warning: the expert" in said and "its mistakes are imitated too" in said, "imitation alone"


@pytest.mark.parametrize("name", [path.stem for path in RECIPES])
def test_packaged_recipes_are_found_by_name_and_can_be_begun_with(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ludus.cli.settings import write_recipe
    from ludus.training import load_parts, load_recipe

    monkeypatch.chdir(tmp_path)
    problem = {"question": "What is 6 times 7?", "answer": "6*7=<<6*7=42>>42\n#### 42"}
    for split in ("train", "test"):  # of GSM8K, whose files are the user's
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(problem) + "\n")
    monkeypatch.setenv("LUDUS_GSM8K", str(tmp_path))
    packaged = load_recipe(name, ["seed=7"])
    if name in WORLDS and (missing := WORLDS[name].missing()):
        pytest.skip(f"needs {'; '.join(missing)}")
    assert packaged.seed == 7 and load_parts(packaged).tasks
    *_, own = write_recipe("mine", name)
    assert load_recipe(own).rl == load_recipe(name).rl
    assert load_parts(load_recipe(own)).tasks
    with pytest.raises(ConfigError, match=r"already there: mine\.toml|already there: mine\.py"):
        write_recipe("mine", name)


def test_the_wheel_has_the_recipes_and_the_code_that_they_name() -> None:
    root = Path(__file__).parent.parent
    wheel = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"][
        "wheel"
    ]
    included = wheel["force-include"]
    for path in RECIPES:
        for code in re.findall(r"\.\./(\w+)/(\w+\.py)", path.read_text()):
            assert included[code[0]] == f"ludus/{code[0]}" and (root / code[0] / code[1]).is_file()
    assert included["recipes"] == "ludus/recipes"


HEAVY = ("torch", "transformers", "tokenizers", "pyarrow", "pandas", "matplotlib", "datasets")


BROKEN = "[model]\nname = 'x'\n[rl]\nstepps = 1\n"
MISSING = "rewards = ['exact_match']\n[model]\nname = 'x'\n[tasks]\ntrain = 'missing.jsonl'\n"
COMMANDS = {
    "--help": "Train language-model agents",
    "train nope.toml": "nope.toml ('nope.toml' in the working directory)",
    "check recipe nope.toml": "nope.toml ('nope.toml' in the working directory)",
    "eval nope.toml": "nope.toml ('nope.toml' in the working directory)",
    "train broken.toml": "unknown key; did you mean 'steps'?",
    "check recipe broken.toml": "unknown key; did you mean 'steps'?",
    "train missing.toml": "missing.jsonl ('missing.jsonl' in the working directory; a path",
    "check recipe missing.toml rl.kl=0.1": "missing.jsonl ('missing.jsonl' in the working directory; a path",
    "check env ludus.worlds.safe:Safe": "give tasks of its own: --tasks",
    "check env safe": "safe: ok",
    "envs": "Open a safe",
    "settings rl.kl": "rl.kl.weight = 0.0    (number, ≥ 0)\n    Its weight",
    "settings stage.0.pairs": "stage.pairs",
    "settings warm_start.optimizer.learning_rate": "When left out, the usual one of the stage",
    "settings budgets": "budgets.max_turns = 8",
    "settings": "synth.rejection.attempts = ",
    "settings rl.algorithm": "    algorithms: grpo, dr_grpo, ",
    "settings agent.format": "    action formats: auto, deepseek_v3, ",
    "settings rewards": "numeric, process_judge",
    "settings cluster.engine": "    engines: embedded, process, vllm",
    "settings rl.optimiser": "did you mean rl.optimizer",
    "settings scale_rewards": "is called here: rl.algorithm = dr_grpo\n",
    "settings rl.learning_rate": "is called here: rl.optimizer.learning_rate, rl.critic.",
    "settings stage.dpo.beta": "is called here: stage.0.loss.beta\n",
}
LIGHT = f"""
import sys, ludus
loaded = lambda: print("LOADED", *set({HEAVY!r}) & set(sys.modules))
ludus.tool, ludus.reward, ludus.Env, ludus.Agent, ludus.Recipe, ludus.Task, dir(ludus)
loaded()
from ludus.cli.main import run_command
from ludus.cli.main import app
for command in sys.argv[1:]:
    run_command(lambda **options: app(command.split(), **options))
    loaded()
"""


def test_neither_writing_code_nor_mistakes_nor_settings_load_torch(tmp_path: Path) -> None:
    """One process, one command after another: what each says, and which heavy packages are imported by then."""
    (tmp_path / "broken.toml").write_text(BROKEN)
    (tmp_path / "missing.toml").write_text(MISSING)
    done = subprocess.run(
        [sys.executable, "-u", "-c", LIGHT, *COMMANDS],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    imported, *parts = done.stdout.split("LOADED")
    assert imported == "", "importing ludus says nothing"
    lines = [part.partition("\n") for part in parts]
    loaded, said = [line.split() for line, _, _ in lines], [text for _, _, text in lines]
    assert [name for name, heavy in zip(["import", *COMMANDS], loaded, strict=True) if heavy] == []
    for (command, expected), text in zip(COMMANDS.items(), said[:-1], strict=True):
        assert expected in text, command


def test_what_recipes_know_of_algorithms_without_torch_is_true() -> None:
    from ludus.algos import ALGORITHMS, Need, load_algorithm

    for name, spec in ALGORITHMS.items():
        options = {"length": 10} if spec.needs_options else {}
        if spec.needs_options:
            with pytest.raises(ConfigError, match="length"):
                load_algorithm(name)
        needs = load_algorithm(name, aggregation_options=options).needs
        assert spec.has_critic == (Need.CRITIC in needs)


if __name__ == "__main__":
    print(surface(), end="")
