"""Typed configuration: TOML plus `a.b=value` overrides, and errors that name the key and the fix."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    GetJsonSchemaHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from ludus.core.config_errors import problem_lines, refuse_coercion, takes_none
from ludus.core.failures import ConfigError
from ludus.core.messages import Json
from ludus.core.user_files import read_user_text


def _expand_home(place: str) -> str:
    if not place.startswith("~"):
        return place
    try:
        return str(Path(place).expanduser())
    except RuntimeError:
        raise ValueError(
            f"there is no user {Path(place).parts[0]}; write the folder in full (given: {place!r})"
        ) from None


Place = Annotated[str, AfterValidator(_expand_home)]
"""A path, in which a leading `~` is expanded, or a name."""


def cache_folder() -> Path:
    """Where models, indexes and the like are kept: LUDUS_CACHE, or ludus in the user's cache folder."""
    own = os.environ.get("LUDUS_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ludus"


class Config(BaseModel):
    """A table of settings. Unknown keys, wrong types and numbers that are not finite are errors."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,  # nothing is computed with them, and JSON cannot hold them
    )

    renamed: ClassVar[Mapping[str, str]] = {}
    """Keys of the last version that a whole recipe refuses with the new one (`config_errors`)."""
    other_keys: ClassVar[str] = ""
    """Where keys go that a table does not have itself; said beside those that it has."""

    @model_validator(mode="before")
    @classmethod
    def _no_coercion(cls, raw: Any) -> Any:
        if isinstance(raw, Mapping):
            # TOML has no null, and an override cannot drop a table: "none" leaves an optional setting out
            left_out = [
                name
                for name, field in cls.model_fields.items()
                if raw.get(name) == "none"
                and takes_none(field.annotation, is_bare=isinstance(raw[name], BareWord))
            ]
            raw = {**raw, **dict.fromkeys(left_out)}
            refuse_coercion(cls, raw)
        return raw

    @classmethod
    def parse(cls, raw: Mapping[str, Any], source: str = "the recipe") -> Self:
        """A validated config, or a `ConfigError` that lists everything that is wrong with `raw`."""
        try:
            return cls.model_validate(dict(raw))
        except ValidationError as error:
            lines = problem_lines(cls, error.errors())
            raise ConfigError("\n".join([f"{source} has {len(lines)} problem(s):", *lines])) from None

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = ()) -> Self:
        """A config from a TOML file, with `a.b=value` overrides applied on top."""
        return cls.parse(apply_overrides(read_toml(path), overrides), str(path))


class ShortConfig(Config):
    """A table that has a short form: a value that is no table stands for the key `short` alone."""

    short: ClassVar[str]

    @model_validator(mode="before")
    @classmethod
    def _lengthen(cls, raw: Any) -> Any:
        return raw if isinstance(raw, Mapping | cls) else {cls.short: raw}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: GetJsonSchemaHandler) -> Json:
        reference = handler(core)
        found = handler.resolve_ref_schema(reference)
        table = dict(found)
        found.clear()
        found["anyOf"] = [table["properties"][cls.short], table]
        return reference


class ChoiceConfig(ShortConfig):
    """Something by its name, with its options: { name = "NAME", OPTION = ... }; "NAME" where it has none."""

    model_config = ConfigDict(extra="allow")
    short = "name"

    name: str | None = None
    """Which one; the usual one when left out."""

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})

    @model_serializer
    def _shortened(self) -> Any:
        if self.name is not None and not self.options:
            return self.name
        return {**({} if self.name is None else {"name": self.name}), **self.options}


def read_toml(path: str | Path) -> Json:
    """The tables of a TOML file."""
    text = read_user_text(path, beside_recipe=False)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path} is not a TOML file that is read: it is nested too deeply") from None


def toml_table(text: str) -> Json:
    """An inline table, `{ key = value, ... }`, as it is written on a command line."""
    try:
        table = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{text!r:.200} is no table of TOML, {{ key = value, ... }}: {error}"
        ) from None
    return dict(table)


def toml_text(tables: Mapping[str, Any], comment: str) -> str:
    """A recipe's tables as a TOML file: a comment, values, then a section for each table."""
    lines = [f"# {comment}"]
    lines += [f"{key} = {to_toml(one)}" for key, one in tables.items() if not isinstance(one, dict)]
    for name, table in tables.items():
        if isinstance(table, dict):
            lines += ["", f"[{name}]"]
            lines += [f"{_toml_key(key)} = {to_toml(one)}" for key, one in table.items()]
    return "\n".join(lines) + "\n"


def to_toml(value: Any) -> str:
    """A value in TOML's words. Text stays one text, whatever is in it."""
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_toml_key(key)} = {to_toml(one)}" for key, one in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(to_toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value)


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else to_toml(key)


def apply_overrides(raw: Mapping[str, Any], overrides: Iterable[str]) -> Json:
    """`raw` with each `a.b=value` set; a value is TOML, and what is not TOML is taken as text.

    A table of a list is named by its number, from 0: `stage.1.steps=5`. `warm_start=none` leaves an optional
    setting out (`Config`); a text that says none is quoted: `run.name="none"`.
    """
    result: Json = _copied(raw)
    for override in overrides:
        dotted, equals, text = override.partition("=")
        keys = dotted.strip().split(".")
        if not equals or not all(keys):
            raise ConfigError(f"an override is written key=value or table.key=value, not {override!r}")
        _set(result, keys, _value(text), override)
    return result


def swept(sweeps: Iterable[str]) -> list[dict[str, str]]:
    """The rows of a grid of sweeps, `key=value,value,...`; keys within one, `a=1,2 b=3,4`, go side by side."""
    rows: list[dict[str, str]] = [{}]
    for sweep in sweeps:
        pairs = [one.partition("=") for one in _split(sweep, " ") if one]
        columns = {key: _split(values, ",") for key, _, values in pairs}
        if (
            not columns
            or not all(columns)
            or not all(map(all, columns.values()))
            or len(columns) < len(pairs)
        ):
            raise ConfigError(f"a sweep is written key=value,value,... (each key once), not {sweep!r}")
        if len({len(values) for values in columns.values()}) != 1:
            raise ConfigError(f"keys of one sweep go side by side, with equally many values: {sweep!r}")
        if twice := columns.keys() & rows[0].keys():
            raise ConfigError(f"{min(twice)} is swept twice")
        found = [
            dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
        ]
        rows = [{**row, **one} for row in rows for one in found]
    return rows


def _split(text: str, separator: str) -> list[str]:
    """The parts of a text between separators that stand in no bracket and no quotes."""
    closing = {"[": "]", "{": "}", '"': '"', "'": "'"}
    parts, awaited = [""], ""
    for letter in text:
        if awaited and letter == awaited[-1]:
            awaited = awaited[:-1]
        elif letter in closing and awaited[-1:] not in ("'", '"'):
            awaited += closing[letter]
        if letter == separator and not awaited:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _set(table: Any, keys: list[str], value: Any, override: str) -> None:
    """Put the value at the end of the path; tables that are not there are made."""
    first, *rest = keys
    if isinstance(table, list):
        _check_number(table, first, override)
        key: Any = int(first)
    else:
        key = first
    if not rest:
        table[key] = value
        return
    if isinstance(table, dict) and table.get(key) is None:
        table[key] = {}
    if not isinstance(table[key], dict | list):
        raise ConfigError(f"{override!r}: {first!r} is a value, not a table")
    _set(table[key], rest, value, override)


def _check_number(tables: list[Any], key: str, override: str) -> None:
    if not key.isdecimal() or int(key) >= len(tables):
        there = f"there are {len(tables)}, numbered from 0" if tables else "there are none"
        raise ConfigError(f"{override!r}: {key!r} is not the number of an entry; {there}")


def _copied(raw: Any) -> Any:
    if isinstance(raw, Mapping):
        return {key: _copied(value) for key, value in raw.items()}
    return [_copied(value) for value in raw] if isinstance(raw, list | tuple) else raw


class BareWord(str):
    """A text of an override that stands there without quotes."""

    __slots__ = ()


def _value(text: str) -> Any:
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return BareWord(text.strip())
    return table["value"] if len(table) == 1 else text.strip()  # several lines are several keys
