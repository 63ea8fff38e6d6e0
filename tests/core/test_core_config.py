"""Settings: overrides reach into lists, and mistakes are told in the words of the file, with a fix."""

from __future__ import annotations

import tomllib
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, FiniteFloat

from ludus.core import Config, ConfigError
from ludus.core.config import apply_overrides, swept, toml_text


class Weights(Config):
    first: float = 1.0
    second: float = 1.0


class Walk(Config):
    kind: Literal["walk"] = "walk"
    steps: int = Field(default=1, ge=1)
    weights: Weights | None = None


class Rest(Config):
    kind: Literal["rest"] = "rest"
    seconds: float
    broken: Literal["keep", "mask"] | FiniteFloat = "keep"


class Day(Config):
    name: str = "day"
    plan: tuple[Annotated[Walk | Rest, Field(discriminator="kind")], ...] = ()
    spare: tuple[Walk, ...] = ()
    by_name: dict[str, Walk] = Field(default_factory=dict)
    places: tuple[str | dict[str, Any], ...] = ()
    pairs: tuple[tuple[int, float], ...] = ()
    is_fine: bool = True


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        ({"nme": "x"}, "nme: unknown key; did you mean 'name'?"),
        ({"plan": [{"kind": "walk", "stepz": 1}]}, "plan.0.stepz: unknown key; did you mean 'steps'?"),
        (
            {"plan": [{"kind": "walk"}, {"kind": "rest", "seconds": 1, "zzz": 1}]},
            "plan.1.zzz: unknown key; known keys: broken, kind, seconds",
        ),
        (
            {"plan": [{"kind": "walk", "weights": {"frist": 1}}]},
            "plan.0.weights.frist: unknown key; did you mean 'first'?",
        ),
        ({"spare": [{"stepz": 1}]}, "spare.0.stepz: unknown key; did you mean 'steps'?"),
        ({"by_name": {"a": {"stepz": 1}}}, "by_name.a.stepz: unknown key; did you mean 'steps'?"),
        ({"plan": [{"steps": 1}]}, "plan.0.kind: must be given: one of 'walk', 'rest'"),
        (
            {"plan": [{"kind": "wlk"}]},
            "plan.0.kind: must be one of 'walk', 'rest'; did you mean 'walk'? (given: 'wlk')",
        ),
        ({"plan": [3]}, "plan.0: must be a table (given: 3)"),
        ({"plan": {"kind": "walk"}}, "plan: must be a list (given: {'kind': 'walk'})"),
        ({"plan": [{"kind": "rest"}]}, "plan.0.seconds: must be given"),
        (
            {"plan": [{"kind": "rest", "seconds": 1, "broken": "skip"}]},
            "plan.0.broken: must be 'keep' or 'mask', or a number (given: 'skip')",
        ),
        ({"plan": [{"kind": "walk", "steps": 0}]}, "plan.0.steps: must be greater than or equal to 1"),
        ({"plan": [{"kind": "walk", "steps": 1.5}]}, "plan.0.steps: must be a whole number"),
        (
            {"plan": [{"kind": "walk", "steps": "3"}]},
            "plan.0.steps: must be a whole number (given: '3')",
        ),
        (
            {"plan": [{"kind": "walk", "steps": True}]},
            "plan.0.steps: must be a whole number (given: True)",
        ),
        (
            {"plan": [{"kind": "rest", "seconds": "1.5"}]},
            "plan.0.seconds: must be a number (given: '1.5')",
        ),
        ({"is_fine": "yes"}, "is_fine: must be true or false (given: 'yes')"),
        ({"is_fine": 1}, "is_fine: must be true or false (given: 1)"),
        ({"plan": [{"kind": "walk", "weights": 1}]}, "plan.0.weights: must be a table"),
        ({"places": [3]}, "places.0: must be text, or a table (given: 3)"),
        ({"pairs": [[0, "x"]]}, "pairs.0.1: must be a number (given: 'x')"),
        ({"name": 3}, "name: must be text (given: 3)"),
    ],
)
def test_mistakes_are_named_by_the_key_as_it_is_written(raw: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        Day.parse(raw)
    (said,) = str(error.value).splitlines()[1:]
    assert said.startswith(f"  {line}")
    for jargon in ("tag", "Input", "discriminator", "literal", "valid "):
        assert jargon not in said


def test_an_override_is_one_value() -> None:
    assert apply_overrides({}, ["a=1\nb=2"]) == {"a": "1\nb=2"}
    assert apply_overrides({}, ["a=[1,\n2]"]) == {"a": [1, 2]}


def test_overrides_reach_into_lists() -> None:
    raw = {"plan": [{"kind": "walk"}, {"kind": "rest", "seconds": 1}], "name": "x"}
    found = apply_overrides(raw, ["plan.0.steps=5", "plan.0.weights.first=2", "plan.1.seconds = 0.5"])
    day = Day.parse(found)
    assert day.plan == (Walk(steps=5, weights=Weights(first=2)), Rest(seconds=0.5))
    assert raw["plan"][0] == {"kind": "walk"}, "what was given stays as it is"
    whole = apply_overrides(raw, ['plan.1={ kind = "walk" }'])
    assert Day.parse(whole).plan == (Walk(), Walk())
    assert apply_overrides({"table": None}, ["table.key=1"]) == {"table": {"key": 1}}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("plan.2.steps=5", r"'2' is not the number of an entry; there are 2, numbered from 0"),
        ("plan.-1.steps=5", r"'-1' is not the number"),
        ("plan.first.steps=5", r"'first' is not the number"),
        ("plan.0.kind.x=5", r"'kind' is a value, not a table"),
        ("spare.0.steps=5", r"'0' is not the number of an entry; there are none"),
        ("name.x=5", r"'name' is a value, not a table"),
        ("plan.0.=5", r"an override is written"),
    ],
)
def test_overrides_that_lead_nowhere_are_refused(override: str, message: str) -> None:
    raw = {"plan": [{"kind": "walk"}, {"kind": "rest"}], "spare": [], "name": "x"}
    with pytest.raises(ConfigError, match=message):
        apply_overrides(raw, [override])


def test_the_words_of_others_lead_to_keys_that_there_are() -> None:
    from ludus.core.config_errors import OTHER_FRAMEWORKS_KEYS, has_key
    from ludus.training import Recipe

    assert [word for word, ours in OTHER_FRAMEWORKS_KEYS.items() if not has_key([Recipe], ours)] == []


def test_a_word_of_theirs_is_no_hint_where_it_leads_nowhere() -> None:
    class Options(Config):
        number: int = 0

    with pytest.raises(ConfigError, match="unknown key; known keys: number"):
        Options.parse({"lr": 1})


class Lunch(Config):
    """Settings for which the word "none" means that there is none, or is a word like others."""

    soup: Rest | None = None
    courses: int | None = 3
    drink: Literal["none", "tea"] | None = "tea"
    guest: str | None = "Ada"
    main: Rest = Rest(kind="rest", seconds=1.0)


def test_none_leaves_an_optional_setting_out() -> None:
    raw = {"soup": {"kind": "rest", "seconds": 2}, "courses": 2}
    left = Lunch.parse(
        apply_overrides(raw, ["soup=none", "courses=none", "drink=none", "guest=none"]), "here"
    )
    assert (left.soup, left.courses, left.drink, left.guest) == (None, None, "none", None)
    quoted = [apply_overrides(raw, ['guest="none"']), {**raw, "guest": "none"}]  # or in a file
    assert [Lunch.parse(one, "here").guest for one in quoted] == ["none", "none"]
    assert Lunch.parse(apply_overrides({}, ["soup=none"]), "here").soup is None
    with pytest.raises(ConfigError, match=r"main: must be a table \(given: 'none'\)"):
        Lunch.parse(apply_overrides(raw, ["main=none"]), "here")
    with pytest.raises(ConfigError, match="'soup' is a value, not a table"):
        apply_overrides(raw, ["soup=none", "soup.seconds=3"])


_TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
_VALUES = st.recursive(
    _TEXTS | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(_TEXTS, _VALUES), _VALUES)
def test_what_is_written_as_toml_is_read_as_it_was(table: dict[str, Any], value: Any) -> None:
    """Whatever a text says, in a key too, it cannot become another key or value."""
    raw = {"list": [value], "table": table}
    assert tomllib.loads(toml_text(raw, "made by a test")) == raw


def test_a_recipe_as_toml_has_a_section_for_each_table() -> None:
    text = toml_text({"rl": {"steps": 3, "optimizer": {"rate": 1e-5}}, "name": "a\n[b]"}, "x")
    assert text == '# x\nname = "a\\n[b]"\n\n[rl]\nsteps = 3\noptimizer = { rate = 1e-05 }\n'


def test_sweeps_make_a_grid_and_keys_of_one_go_side_by_side() -> None:
    assert swept([]) == [{}]
    assert swept(["a=1,2 b=3,4", "c=5"]) == [
        {"a": "1", "b": "3", "c": "5"},
        {"a": "2", "b": "4", "c": "5"},
    ]
    assert [tuple(row.values()) for row in swept(["a=1,2", "b=x,y"])] == [
        *(("1", "x"), ("1", "y"), ("2", "x"), ("2", "y"))
    ]
    assert swept(["""t=["a", 'b,c'],{ d = [1,2] }"""]) == [
        {"t": """["a", 'b,c']"""},
        {"t": "{ d = [1,2] }"},
    ]


@pytest.mark.parametrize(
    ("sweeps", "told"),
    [
        (["a"], "is written key=value"),
        ([""], "is written key=value"),
        (["a="], "is written key=value"),
        (["a=1,"], "is written key=value"),
        (["=1"], "is written key=value"),
        (["a=1 a=2"], "is written key=value"),
        (["a=1,2 b=3"], "equally many values"),
        (["a=1", "a=2"], "a is swept twice"),
    ],
)
def test_sweeps_that_mean_nothing_are_refused(sweeps: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        swept(sweeps)
