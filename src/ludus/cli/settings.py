"""`ludus settings` shows every key of a recipe: as a page, in a terminal, or as a JSON Schema for editors.

All of it is read from the recipe's own models, so it cannot say anything else than what a run does.
`ludus init` writes a first recipe, with such a schema beside it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ludus.core.config import ChoiceConfig, ShortConfig, to_toml
from ludus.core.config_errors import OTHER_FRAMEWORKS_KEYS
from ludus.core.failures import ConfigError
from ludus.synth.method import METHODS, load_method
from ludus.training.config.recipe import Recipe, find_recipe

_WORDS = {int: "whole number", float: "number", bool: "true or false", str: "text", Any: "anything"}
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "min_length": "at least", "max_length": "at most"}
_HEAD = """# Settings

Every key of a recipe: what it takes, what it is when left out, and what it means. This page is generated from
the recipe's own models by `ludus settings --markdown`; a test fails when it is not current.

`ludus settings rl.kl` shows one key, or all keys of a table, in a terminal. Any key can be set on the command
line: `ludus train recipe.toml rl.kl=0.01`. Stages and other tables of a list count from 0: `stage.0.steps=50`
is about the first `[[stage]]`. The words of TRL and verl (`ludus settings num_generations`) lead to the keys.

`ludus settings --schema > ludus.schema.json` writes a JSON Schema: with `#:schema ludus.schema.json` as the
first line of a recipe, editors that know TOML schemas (Even Better TOML, taplo) complete and check keys while
you type.
"""


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of a table."""

    key: str
    takes: str
    """Its type in words."""
    default: Any
    meaning: str
    tables: tuple[type[BaseModel], ...]
    """The tables that can stand there."""
    is_required: bool


@dataclass(frozen=True, slots=True)
class SettingsTable:
    """One kind of table, and where in a recipe it can stand."""

    model: type[BaseModel]
    places: tuple[str, ...] = ()
    usual: BaseModel | None = None
    """The table's value when it is left out, if that differs from the defaults of its keys."""

    @property
    def settings(self) -> Iterator[Setting]:
        for name, field in self.model.model_fields.items():
            found = tuple(_tables(field.annotation))
            meaning = field.description or _about(found)
            takes = _words(field.annotation) + _bounded(field.metadata)
            value = None if field.is_required() else field.get_default(call_default_factory=True)
            value = getattr(self.usual, name, value)
            yield Setting(name, takes, value, meaning, found, field.is_required())


def tables(model: type[BaseModel] = Recipe) -> list[SettingsTable]:
    """The tables of a recipe in their order, each once with all places where it can stand."""
    places: dict[type[BaseModel], list[str]] = {}

    def visit(table: type[BaseModel], place: str) -> None:
        if place not in places.setdefault(table, []):
            places[table].append(place)
        for name, field in table.model_fields.items():
            for inner in _tables(field.annotation):
                brackets = "[]" if get_origin(field.annotation) in (tuple, list) else ""
                kind = f" of {_kind(inner)}" if brackets and _kind(inner) else ""
                visit(inner, f"{place}.{name}{brackets}{kind}".lstrip("."))

    visit(model, "")
    return [SettingsTable(table, tuple(where)) for table, where in places.items()]


def synth_tables() -> list[SettingsTable]:
    """The tables of the methods of synthesis, which the command `ludus synth` reads."""
    return [SettingsTable(load_method(name).settings_type, (f"synth.{name}",)) for name in METHODS]


def markdown() -> str:
    """The page docs/settings.md."""
    found = [*tables(), *synth_tables()]
    titles = {table.model: _title(table) for table in found}
    lines = [_HEAD]
    for table in found:
        where = ", ".join(f"`{place}`" for place in table.places[1:])
        also = f" Stands at {where} too, with the same keys." if where else ""
        lines.append(f"## {titles[table.model]}\n\n{_about([table.model])}{also}\n")
        lines.append("| key | takes | default | meaning |\n|---|---|---|---|")
        for one in table.settings:
            links = ", ".join(f"[{titles[t]}](#{_anchor(titles[t])})" for t in one.tables)
            takes = f"{one.takes}: {links}" if links else one.takes
            text = default_text(one)
            default = f"`{text}`" if text else "*must be given*" if one.is_required else ""
            cells = (f"`{one.key}`", takes, default, one.meaning)
            shown = (" ".join(cell.split()).replace("|", "&#124;") for cell in cells)
            lines.append(f"| {' | '.join(shown)} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def described(key: str) -> list[tuple[str, Setting]]:
    """One key (`rl.kl`), or all keys of a table (`rl`, `stage.0`), by the names that a recipe has for them."""
    found: dict[str, Setting] = {}
    wanted = [part for part in key.split(".") if part and not part.isdecimal()]

    def visit(table: SettingsTable, path: str, rest: list[str]) -> None:
        for one in table.settings:
            if rest and one.key != rest[0]:
                continue
            place = f"{path}.{one.key}".lstrip(".")
            if not one.tables or rest == [one.key]:
                found.setdefault(place, one)
            usual = one.default if isinstance(one.default, BaseModel) else None
            for inner in one.tables:
                visit(SettingsTable(inner, usual=usual), place, rest[1:])

    visit(SettingsTable(Recipe), "", wanted)
    if wanted[:1] in ([], ["synth"]):
        for table in synth_tables():
            [place] = table.places
            if wanted[1:2] in ([], [place.partition(".")[2]]):
                found.pop("synth", None)
                visit(table, place, wanted[2:])
    return list(found.items())


def find_settings(key: str) -> tuple[list[tuple[str, Setting]], list[str]]:
    """The settings of a key or a table; and which keys are meant, where it is TRL's or verl's word for them."""
    if found := described(key):
        return found, []
    meant, near = _alike(key)
    if not meant:
        hint = f"; did you mean {' or '.join(near)}?" if near else "; `ludus settings` lists all of them"
        raise ConfigError(f"there is no setting {key!r}{hint}")
    return [one for name in meant for one in described(name.partition(" = ")[0])], meant


def _alike(key: str) -> tuple[list[str], list[str]]:
    """Keys of the same name or of that meaning in TRL and verl; and, where there are none, of like spelling."""
    wanted = [part for part in key.split(".") if part and not part.isdecimal()]
    places = [
        (re.sub(r'\[\](?: of kind = "\w+")?', ".0", place), t) for t in tables() for place in t.places
    ]
    every = [f"{place}.{name}".lstrip(".") for place, t in places for name in t.model.model_fields]
    *within, last = wanted or [key]
    same = [one for one in every if one.split(".")[-1] == last]
    ours = [OTHER_FRAMEWORKS_KEYS[last.lower()]] if last.lower() in OTHER_FRAMEWORKS_KEYS else []
    # in a table that there is, its own key of that name comes before what others call so
    own = sorted([one for one in same if within and one.startswith(f"{within[0]}.")], key=len)
    meant = list(dict.fromkeys(own or [*ours, *same]))[:3]
    return meant, [] if meant else get_close_matches(key, every, n=3)


def schema() -> str:
    """A JSON Schema of recipes, for editors."""
    made = Recipe.model_json_schema()
    made = {"$schema": "http://json-schema.org/draft-07/schema#", **_without_null(made)}
    made["title"] = "Ludus recipe"
    return json.dumps(made, indent=1, ensure_ascii=False)


SCHEMA = "ludus.schema.json"
FIRST = "tickets"
"""The recipe that `ludus init` begins with."""
_CODE = re.compile(r"\.\./examples/(\w+)\.py")


def write_recipe(name: str | None, source: str | None) -> list[Path]:
    """A packaged recipe, the code that it names and a schema, as files in the working directory."""
    template = find_recipe(source or FIRST)
    name = name if name is not None else (template.stem if source else "agent")
    if not re.fullmatch(r"[\w-]+", name):
        raise ConfigError(f"a recipe is named by letters, digits, - and _, not {name!r}")
    text = template.read_text(encoding="utf-8")
    files = {Path(SCHEMA): schema() + "\n"}
    for code in sorted(set(_CODE.findall(text))):
        own = f"{name.replace('-', '_')}.py"
        files[Path(own)] = (template.parent.parent / "examples" / f"{code}.py").read_text(
            encoding="utf-8"
        )
        text = text.replace(f"../examples/{code}.py", own)
    text = re.sub(rf'^name = "{template.stem}"', f'name = "{name}"', text, count=1, flags=re.M)
    text = re.sub(r"^(# .*?)ludus train \S+", rf"\1ludus train {name}.toml", text, count=1, flags=re.M)
    files[Path(f"{name}.toml")] = f"#:schema {SCHEMA}\n{text}"
    taken = [str(path) for path in files if path.exists() and path != Path(SCHEMA)]
    if taken:
        raise ConfigError(f"already there: {', '.join(taken)}. Give another name, or move it away")
    for path, content in files.items():
        path.write_text(content, encoding="utf-8")
    return list(files)


def _words(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _words(arguments[0]) + _bounded(arguments[1:])
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_words(one) for one in arguments if one is not NoneType))
    if origin is Literal:
        return " or ".join(f'"{one}"' if isinstance(one, str) else str(one) for one in arguments)
    if origin in (tuple, list):
        inner = [one for one in arguments if one is not ...]
        count = f"list of {len(inner)}" if ... not in arguments and origin is tuple else "list"
        return f"{count} ({', '.join(map(_words, inner))})"
    if origin is dict and arguments[1] is not Any:
        return f"table ({_words(arguments[1])} by name)"
    if isinstance(hint, type) and issubclass(hint, ShortConfig):
        return f"{_words(hint.model_fields[hint.short].annotation)} or table"
    if origin is dict or (isinstance(hint, type) and issubclass(hint, BaseModel)):
        return "table"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return " or ".join(f'"{one.value}"' for one in hint)
    return _WORDS.get(hint, str(hint))


def _bounded(metadata: Any) -> str:
    bounds: list[str] = []
    for one in metadata:
        parts = one.metadata if isinstance(one, FieldInfo) else [one]
        for part in parts:
            bounds += [
                f"{sign} {getattr(part, name)}"
                for name, sign in _BOUNDS.items()
                if getattr(part, name, None) is not None
            ]
    return f", {' and '.join(bounds)}" if bounds else ""


def default_text(setting: Setting) -> str:
    """The default as it would stand in a recipe; of a table, what differs from that table's own defaults."""
    value = setting.default
    if isinstance(value, ChoiceConfig):
        value = value.model_dump() or None
    elif isinstance(value, BaseModel):
        value = {
            one.key: getattr(value, one.key)
            for one in SettingsTable(type(value)).settings
            if getattr(value, one.key) != one.default
        } or None
    return "" if value is None else to_toml(value)


def _tables(hint: Any) -> Iterator[type[BaseModel]]:
    """The tables that an annotation names, inside lists and unions too; a choice is a value."""
    if isinstance(hint, type) and issubclass(hint, BaseModel) and not issubclass(hint, ChoiceConfig):
        yield hint
    for one in get_args(hint):
        yield from _tables(one)


def _kind(model: type[BaseModel]) -> str:
    field = model.model_fields.get("kind")
    return f'kind = "{field.default}"' if field is not None and get_origin(field.annotation) else ""


def _about(models: Any) -> str:
    first = next(iter(models), None)
    return " ".join((first.__doc__ or "").split()) if first is not None else ""


def _title(table: SettingsTable) -> str:
    return table.places[0].replace("[]", "") or "The top of the file"


def _anchor(title: str) -> str:
    """The fragment under which a heading can be linked to."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def _without_null(value: Any) -> Any:
    """TOML has no null: a key that may be left out is left out."""
    if isinstance(value, list):
        return [_without_null(one) for one in value]
    if not isinstance(value, dict):
        return value
    made = {
        key: _without_null(one) for key, one in value.items() if not (key == "default" and one is None)
    }
    if "anyOf" in made:
        rest = [one for one in made["anyOf"] if one != {"type": "null"}]
        if len(rest) == 1:
            made.pop("anyOf")
            made = {**rest[0], **made}
        else:
            made["anyOf"] = rest
    return made
