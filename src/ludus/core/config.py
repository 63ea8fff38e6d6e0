"""Typed configuration: TOML plus `a.b=value` overrides, and errors that name the key and the fix."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from ludus.core.failures import ConfigError
from ludus.core.messages import Json


class Config(BaseModel):
    """A table of settings. Unknown keys and wrong types are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True
    )

    @classmethod
    def parse(cls, raw: Mapping[str, Any], source: str = "the recipe") -> Self:
        """A validated config, or a `ConfigError` that lists everything that is wrong with `raw`."""
        try:
            return cls.model_validate(dict(raw), strict=False)
        except ValidationError as error:
            lines = [_explain(cls, dict(problem)) for problem in error.errors()]
            raise ConfigError("\n".join([f"{source} has {len(lines)} problem(s):", *lines])) from None

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = ()) -> Self:
        """A config from a TOML file, with `a.b=value` overrides applied on top."""
        return cls.parse(apply_overrides(read_toml(path), overrides), str(path))


def read_toml(path: str | Path) -> Json:
    """The tables of a TOML file."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, IsADirectoryError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from None


def apply_overrides(raw: Mapping[str, Any], overrides: Iterable[str]) -> Json:
    """`raw` with each `a.b=value` set; a value is TOML, and what is not TOML is taken as text."""
    result = _copied(raw)
    for override in overrides:
        dotted, equals, text = override.partition("=")
        keys = dotted.strip().split(".")
        if not equals or not all(keys):
            raise ConfigError(f"an override is written key=value or table.key=value, not {override!r}")
        table = result
        for key in keys[:-1]:
            table = table.setdefault(key, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{override!r}: {key!r} is a value, not a table")
        table[keys[-1]] = _value(text)
    return result


def _copied(raw: Mapping[str, Any]) -> Json:
    return {k: _copied(v) if isinstance(v, Mapping) else v for k, v in raw.items()}


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def _explain(model: type[BaseModel], problem: Json) -> str:
    """One line for one problem: where, what, and what to do."""
    location = [str(part) for part in problem["loc"]]
    where = ".".join(location) or "(the whole)"
    if problem["type"] == "extra_forbidden":
        known = _keys_at(model, location[:-1])
        near = get_close_matches(location[-1], known, n=1)
        fix = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
        return f"  {where}: unknown key; {fix}"
    message = str(problem["msg"]).removeprefix("Value error, ")
    given = (
        "" if problem["type"] in ("missing", "value_error") else f" (given: {problem['input']!r:.80})"
    )
    return f"  {where}: {message[:1].lower()}{message[1:]}{given}"


def _keys_at(model: type[BaseModel], location: list[str]) -> list[str]:
    for part in location:
        field = model.model_fields.get(part)
        inner = [field.annotation, *get_args(field.annotation)] if field else []
        tables = [t for t in inner if isinstance(t, type) and issubclass(t, BaseModel)]
        if not tables:
            break
        model = tables[0]
    return list(model.model_fields)
