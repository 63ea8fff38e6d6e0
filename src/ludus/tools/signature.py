"""A tool's signature: from type hints and docstring to a JSON Schema and a validator."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Annotated, Any, NotRequired, get_args, get_origin, get_type_hints

import docstring_parser
from pydantic import ConfigDict, TypeAdapter
from pydantic import Field as SchemaField
from pydantic.errors import PydanticUserError
from pydantic_core import PydanticSerializationError, to_jsonable_python
from typing_extensions import TypedDict

from ludus.core.failures import ConfigError
from ludus.core.messages import Json, ToolContext, ToolResult

_CONFIG = ConfigDict(extra="forbid")
_INFERRED = (str, int, float, bool)
_MISSING = inspect.Parameter.empty
_MAPS = ("properties", "$defs", "patternProperties")
_SINGLES = ("items", "additionalProperties", "propertyNames", "contains", "not")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_FIRST = ("type", "description", "enum", "properties", "required")
_REFERENCE = "#/$defs/"


@dataclass(frozen=True, slots=True)
class Signature:
    """Parameters of a function: those from the model (`schema`, `validator`), and those from the episode."""

    description: str
    schema: Json
    validator: TypeAdapter[dict[str, Any]]
    positional_only: tuple[str, ...] = ()
    env: str | None = None
    """The parameter that gets the episode's environment, if there is one."""
    env_type: type | None = None
    context: str | None = None
    """The parameter that gets the `ToolContext`, if there is one."""
    returns: Json | None = None
    """The JSON Schema of the return type, where the hint is one that JSON has words for."""

    @property
    def defaults(self) -> frozenset[str]:
        """The parameters that may be left out."""
        return frozenset(self.schema["properties"]) - frozenset(self.schema.get("required", ()))

    def bind(self, values: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Values by name as the positional and keyword arguments that Python wants."""
        args = [values[name] for name in self.positional_only if name in values]
        return args, {key: value for key, value in values.items() if key not in self.positional_only}


def signature_of(
    function: Callable[..., Any],
    label: str,
    *,
    is_method: bool = False,
    documentation: str | None = None,
) -> Signature:
    """Read hints and docstring; `ConfigError` names the parameter that cannot be offered."""
    documented = parse_docstring(function.__doc__)
    described = parse_docstring(documentation) if documentation else documented
    parameters = list(inspect.signature(function).parameters.values())[1 if is_method else 0 :]
    hints = _Hints(function, label)
    fields: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    hidden: dict[str, Any] = {}
    for parameter in parameters:
        name = parameter.name
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            stars = "*" if parameter.kind is parameter.VAR_POSITIONAL else "**"
            raise ConfigError(
                f"tool {label!r}: a model cannot be offered '{stars}{name}'; write each parameter out, "
                "or take a list or a dict"
            )
        if name == "env":
            hidden["env"], hidden["env_type"] = name, hints.env_type(parameter)
        elif hints.is_context(parameter):
            hidden["context"] = name
        else:
            text = documented.parameters.get(name) or described.parameters.get(name, "")
            fields[name] = _field(hints.resolve(parameter), text, parameter.default is _MISSING)
            if parameter.default is not _MISSING:
                defaults[name] = parameter.default
    validator, schema = _compiled(fields, label)
    for name, default in defaults.items():
        _note_default(schema["properties"][name], default)
    positional = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_ONLY)
    hidden["returns"] = hints.return_schema(inspect.signature(function).return_annotation)
    return Signature(described.description, schema, validator, positional, **hidden)


class _Hints:
    """Resolves the hints of one function, those written as text included."""

    def __init__(self, function: Callable[..., Any], label: str) -> None:
        self._label = label
        self._globals = getattr(inspect.unwrap(function), "__globals__", {})
        self._locals = _locals_of_user_code()

    def resolve(self, parameter: inspect.Parameter) -> Any:
        if parameter.annotation is _MISSING:
            if type(parameter.default) in _INFERRED:
                return type(parameter.default)
            raise ConfigError(
                f"tool {self._label!r}: the parameter {parameter.name!r} has no type hint; "
                f"write for example '{parameter.name}: str'"
            )
        try:
            return self._evaluated(parameter.annotation)
        except Exception as error:
            raise ConfigError(
                f"tool {self._label!r}: the type hint {parameter.annotation!r} of {parameter.name!r} "
                f"cannot be resolved ({error}); import or define what it names at the top of the module"
            ) from error

    def is_context(self, parameter: inspect.Parameter) -> bool:
        if parameter.annotation is _MISSING:
            return parameter.name == "context"
        hint = self._try(parameter.annotation)
        return hint is ToolContext or ToolContext in get_args(hint)

    def env_type(self, parameter: inspect.Parameter) -> type | None:
        hint = self._try(parameter.annotation)
        if hint in (*_INFERRED, list, dict):
            raise ConfigError(
                f"tool {self._label!r}: a parameter called 'env' gets the episode's environment, so the "
                "model cannot fill it; give the parameter another name"
            )
        is_checkable = isinstance(hint, type) and not getattr(hint, "_is_protocol", False)
        return hint if is_checkable and hint is not _MISSING else None

    def return_schema(self, annotation: Any) -> Json | None:
        """JSON Schema of the return type; None where it has none, such as `ToolResult`."""
        hint = None if annotation in (_MISSING, None) else self._try(annotation)
        if hint in (None, type(None), Any, ToolResult):
            return None
        try:
            schema = tidy(TypeAdapter(hint).json_schema(mode="serialization"))
        except (PydanticUserError, TypeError, RecursionError, NameError):
            return None  # it is text for the model, whatever its type
        return None if is_loose(schema) and not schema.get("properties") else schema

    def _try(self, annotation: Any) -> Any:
        """The hint, or None: where no schema is needed, names that only type checkers know are fine."""
        try:
            return self._evaluated(annotation)
        except Exception:  # noqa: BLE001 - evaluating a hint runs user code
            return None

    def _evaluated(self, annotation: Any) -> Any:
        holder = SimpleNamespace(__annotations__={"hint": annotation})
        hints = get_type_hints(holder, self._globals, self._locals, include_extras=True)
        return hints["hint"]


def _locals_of_user_code() -> dict[str, Any]:
    """The local names where the tool is being defined, so that hints may refer to local classes."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("ludus.tools"):
        frame = frame.f_back
    return dict(frame.f_locals)


def _field(hint: Any, description: str, required: bool) -> Any:
    if get_origin(hint) is Annotated:
        notes = [note for note in get_args(hint)[1:] if isinstance(note, str)]
        noted = any(getattr(note, "description", None) for note in get_args(hint)[1:])
        description = notes[-1] if notes else "" if noted else description
    if description:
        hint = Annotated[hint, SchemaField(description=description)]
    return hint if required else NotRequired[hint]


def _compiled(fields: Mapping[str, Any], label: str) -> tuple[TypeAdapter[dict[str, Any]], Json]:
    try:
        validator = _adapter(fields)
        return validator, tidy(validator.json_schema())
    except (PydanticUserError, TypeError, RecursionError, NameError) as error:
        for name, hint in fields.items():
            _check_alone(name, hint, label)
        raise ConfigError(f"tool {label!r}: no schema can be made of its parameters: {error}") from error


def _adapter(fields: Mapping[str, Any]) -> TypeAdapter[dict[str, Any]]:
    # A TypedDict rather than a model: any parameter name will do, and Python fills in the defaults.
    make: Any = TypedDict
    arguments = make("Arguments", dict(fields))
    arguments.__pydantic_config__ = _CONFIG
    return TypeAdapter(arguments)


def _check_alone(name: str, hint: Any, label: str) -> None:
    try:
        _adapter({name: hint}).json_schema()
    except (PydanticUserError, TypeError, RecursionError, NameError) as error:
        shown = get_args(hint)[0] if get_origin(hint) in (NotRequired, Annotated) else hint
        raise ConfigError(
            f"tool {label!r}: a model cannot fill the parameter {name!r} of type {shown}; use str, int, "
            "float, bool, Literal, an Enum, list, dict, tuple, set, Optional, a dataclass, a TypedDict "
            "or a pydantic model"
        ) from error


def _note_default(schema: Json, default: Any) -> None:
    try:
        schema["default"] = to_jsonable_python(default)
    except (PydanticSerializationError, ValueError):
        schema.pop("default", None)  # a default the model cannot write; leaving it out still works


@dataclass(frozen=True, slots=True)
class Documentation:
    """The prose of a docstring (Google, NumPy or reST style), and what it says of each parameter."""

    description: str = ""
    parameters: dict[str, str] = field(default_factory=dict)


def parse_docstring(text: str | None) -> Documentation:
    """The documentation in `text`; a docstring that no style explains is all description."""
    if not text or not text.strip():
        return Documentation()
    try:
        parsed = docstring_parser.parse(text)
    except docstring_parser.ParseError:
        return Documentation(inspect.cleandoc(text))
    parts = [part.strip() for part in (parsed.short_description, parsed.long_description) if part]
    parameters: dict[str, str] = {}
    for parameter in parsed.params:
        for name in parameter.arg_name.split(","):
            if parameter.description:
                parameters[name.strip().lstrip("*")] = " ".join(parameter.description.split())
    return Documentation("\n\n".join(parts), parameters)


# JSON Schemas as models like to read them: no titles, no indirection, closed objects


def tidy(schema: Json) -> Json:
    """A schema without titles, with references inlined unless they are recursive."""
    definitions: dict[str, Json] = schema.get("$defs", {})
    recursive = {name for name in definitions if name in _reachable(name, definitions)}
    inline = {name: body for name, body in definitions.items() if name not in recursive}
    body = {key: value for key, value in schema.items() if key != "$defs"}
    result = _tidied(body, inline)
    if recursive:
        result["$defs"] = {name: _tidied(definitions[name], inline) for name in sorted(recursive)}
    return result


def children(schema: Json) -> Iterator[Json]:
    """The schemas directly inside `schema`."""
    for key in _MAPS:
        yield from (value for value in schema.get(key, {}).values() if isinstance(value, dict))
    for key in _SINGLES:
        if isinstance(schema.get(key), dict):
            yield schema[key]
    for key in _LISTS:
        yield from (value for value in schema.get(key, ()) if isinstance(value, dict))


def is_loose(schema: Json) -> bool:
    """Whether a schema leaves open what some value is: any value, or a list or an object of any."""
    if not schema.keys() & {"type", "enum", "const", "$ref", *_LISTS}:
        return True
    kind = schema.get("type")
    if kind == "array" and not schema.keys() & {"items", "prefixItems"}:
        return True
    extra = schema.get("additionalProperties", not schema.get("properties"))
    if kind == "object" and extra is True:
        return True
    return any(map(is_loose, children(schema)))


def _reachable(name: str, definitions: Mapping[str, Json]) -> set[str]:
    found: set[str] = set()
    pending = [definitions[name]]
    while pending:
        schema = pending.pop()
        target = str(schema.get("$ref", "")).removeprefix(_REFERENCE)
        if target in definitions and target not in found:
            found.add(target)
            pending.append(definitions[target])
        pending.extend(children(schema))
    return found


def _tidied(schema: Json, inline: Mapping[str, Json]) -> Json:
    target = str(schema.get("$ref", "")).removeprefix(_REFERENCE)
    if target in inline:
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        schema = {**inline[target], **rest}
        return _tidied(schema, inline)
    result: Json = {}
    for key, value in sorted(schema.items(), key=_reading_order):
        if key in ("title", "discriminator"):
            continue
        if key in _MAPS:
            result[key] = {name: _tidied(inner, inline) for name, inner in value.items()}
        elif key in _SINGLES and isinstance(value, dict):
            result[key] = _tidied(value, inline)
        elif key in _LISTS:
            result[key] = [_tidied(inner, inline) for inner in value]
        else:
            result[key] = value
    if "properties" in result:
        result.setdefault("additionalProperties", False)
    return result


def _reading_order(item: tuple[str, Any]) -> int:
    return _FIRST.index(item[0]) if item[0] in _FIRST else len(_FIRST)


def at_path(schema: Json, path: Sequence[str | int]) -> Json:
    """The part of a tidied schema that speaks of the value at `path`; {} where it says nothing."""
    definitions = schema.get("$defs", {})
    for step in path:
        found = (_step(option, step) for option in _options(schema, definitions))
        schema = next((inner for inner in found if inner is not None), {})
    return schema


def _options(schema: Json, definitions: Mapping[str, Json]) -> Iterator[Json]:
    target = str(schema.get("$ref", "")).removeprefix(_REFERENCE)
    schema = definitions.get(target, schema)
    yield schema
    for key in ("anyOf", "oneOf"):
        for option in schema.get(key, ()):
            yield from _options(option, definitions)


def _step(schema: Json, step: str | int) -> Json | None:
    inner: Any = None
    if isinstance(step, int):
        prefix = schema.get("prefixItems", ())
        inner = prefix[step] if 0 <= step < len(prefix) else schema.get("items")
    else:
        inner = schema.get("properties", {}).get(step, schema.get("additionalProperties"))
    return inner if isinstance(inner, dict) else None


def describe(schema: Json) -> str:
    """A schema in a few words: "integer", "list of string", "one of 'a', 'b'"."""
    if "enum" in schema or "const" in schema:
        options = schema.get("enum", [schema.get("const")])
        shown = ", ".join(json.dumps(option, ensure_ascii=False) for option in options)
        return shown if len(options) == 1 else f"one of {shown}"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(describe(option) for option in schema[key]))
    kind = schema.get("type")
    if kind == "array":
        if "prefixItems" in schema:
            return f"list of [{', '.join(describe(item) for item in schema['prefixItems'])}]"
        return f"list of {describe(schema['items'])}" if schema.get("items") else "list"
    if kind == "object" and schema.get("properties"):
        return f"object with {', '.join(schema['properties'])}"
    if isinstance(kind, list):
        return " or ".join(kind)
    if kind is None:
        return "object" if "$ref" in schema else "any value"
    return str(kind)
