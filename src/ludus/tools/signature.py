"""A tool's signature, from type hints and docstring, and the arguments of a call, checked by it.

What already fits is taken as it is. Where something does not, gentle repairs are tried at that place only: a
list or an object that was written as a JSON string is read, a lone value becomes a list of one, a number and
its text stand for each other in a choice, and null means "left out" where there is a default. What still does
not fit is explained to the model, parameter by parameter.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import SimpleNamespace
from typing import Annotated, Any, NotRequired, get_args, get_origin, get_type_hints

import docstring_parser
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic import Field as SchemaField
from pydantic.errors import PydanticUserError
from pydantic_core import PydanticSerializationError, to_jsonable_python
from typing_extensions import TypedDict

from ludus.core.failures import ConfigError, Fault, ToolFault
from ludus.core.messages import Json, ToolContext, ToolResult
from ludus.tools.calling import clean
from ludus.tools.json_schema import at_path, describe, is_loose, show, tidy

_CONFIG = ConfigDict(extra="forbid")
_INFERRED = (str, int, float, bool)
_MISSING = inspect.Parameter.empty


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


# Arguments as a model writes them
Path = tuple[str | int, ...]
Problem = Mapping[str, Any]

_ROUNDS = 4
_MOST_LINES = 12
_MOST_JSON = 1_000_000
_LIST_KINDS = {"list_type", "tuple_type", "set_type", "frozen_set_type", "iterable_type"}
_OBJECT_KINDS = {"dict_type", "mapping_type", "dataclass_type", "model_type", "model_attributes_type"}
_CHOICES = {"literal_error", "enum"}
_UNKNOWN = {"extra_forbidden", "unexpected_keyword_argument"}
_MISSING_KINDS = {
    "missing",
    "missing_argument",
    "missing_keyword_only_argument",
    "missing_positional_only_argument",
}
_DEEPEST = 200


def validate_arguments(signature: Signature, arguments: Any, tool: str) -> dict[str, Any]:
    """Values by parameter name; a `ToolFault` (BAD_ARGUMENTS) tells the model what was wrong."""
    raw = _as_object(arguments, tool)
    try:
        return _validated(signature, raw, tool)
    except (RecursionError, OverflowError, MemoryError, ValueError, TypeError) as error:
        if isinstance(error, ValidationError):
            raise
        raise _bad(tool, ["they are nested too deeply or too large to be read"]) from error


def _validated(signature: Signature, raw: dict[str, Any], tool: str) -> dict[str, Any]:
    problems: Sequence[Problem] = ()
    for _ in range(_ROUNDS):
        values, problems = _attempt(signature, raw)
        if values is not None:
            return values
        repaired = _repaired(raw, problems, lambda p, value: _reread(p, value, signature))
        if repaired is None:
            break
        raw = repaired
    wrapped = _repaired(raw, problems, _wrapped)
    if wrapped is not None:
        values, _ = _attempt(signature, wrapped)
        if values is not None:
            return values
    raise _bad(tool, _explained(signature, raw, problems))


def _attempt(
    signature: Signature, raw: dict[str, Any]
) -> tuple[dict[str, Any] | None, Sequence[Problem]]:
    try:
        return signature.validator.validate_python(raw), ()
    except ValidationError as error:
        return None, [dict(problem) for problem in error.errors(include_url=False)]


def _as_object(arguments: Any, tool: str) -> dict[str, Any]:
    if isinstance(arguments, str):
        arguments = _parsed(arguments, dict)
    if not isinstance(arguments, Mapping):
        raise _bad(tool, ["the arguments must be one JSON object with a value for each parameter"])
    return {str(key): value for key, value in arguments.items()}


class _Remove:
    """Stands for "leave this argument out"."""


class _Keep:
    """Stands for "nothing to repair here"."""


def _repaired(
    raw: dict[str, Any], problems: Sequence[Problem], repair: Callable[[Problem, Any], Any]
) -> dict[str, Any] | None:
    """`raw` with the repairs that apply, each place once, or None when there are none."""
    done: set[Path] = set()
    for problem in problems:
        path = _path(raw, problem["loc"])
        if not path or any(path[:length] in done for length in range(len(path) + 1)):
            continue
        found = _look_up(raw, path)
        replacement = repair(problem, found)
        if replacement is not _Keep:
            raw = _replaced(raw, path, replacement)
            done.add(path)
    return raw if done else None


def _reread(problem: Problem, value: Any, signature: Signature) -> Any:
    kind = problem["type"]
    if value is None and len(problem["loc"]) == 1 and problem["loc"][0] in signature.defaults:
        return _Remove
    if isinstance(value, str) and kind in _LIST_KINDS | _OBJECT_KINDS:
        parsed = _parsed(value, list if kind in _LIST_KINDS else dict)
        return _Keep if parsed is None else parsed
    if kind in _CHOICES and isinstance(value, str):
        parsed = _parsed(value, (int, float, bool))
        return _Keep if parsed is None else parsed
    if kind in _CHOICES | {"string_type"} and isinstance(value, (int, float)):
        return json.dumps(value)
    return _Keep


def _wrapped(problem: Problem, value: Any) -> Any:
    return [value] if problem["type"] in _LIST_KINDS and value is not None else _Keep


def _parsed(text: str, kinds: Any) -> Any:
    if len(text) > _MOST_JSON:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, kinds) else None


def _path(raw: Any, location: Sequence[str | int]) -> Path:
    """Where in the arguments a problem is: its location without the names of union members."""
    path: list[str | int] = []
    for step in location[:_DEEPEST]:
        in_object = isinstance(raw, dict) and step in raw
        in_list = isinstance(raw, list) and isinstance(step, int) and 0 <= step < len(raw)
        if in_object or in_list:
            raw = raw[step]
            path.append(step)
    return tuple(path)


def _look_up(raw: Any, path: Path) -> Any:
    for step in path:
        raw = raw[step]
    return raw


def _replaced(raw: Any, path: Path, value: Any) -> Any:
    """A copy of `raw` that differs at `path` only."""
    step, rest = path[0], path[1:]
    copy: Any = dict(raw) if isinstance(raw, dict) else list(raw)
    if rest:
        copy[step] = _replaced(raw[step], rest, value)
    elif value is _Remove:
        del copy[step]
    else:
        copy[step] = value
    return copy


# Explanations


def _bad(tool: str, lines: Sequence[str]) -> ToolFault:
    shown = "\n".join(f"- {line}" for line in lines[:_MOST_LINES])
    more = f"\n- and {len(lines) - _MOST_LINES} more" if len(lines) > _MOST_LINES else ""
    return ToolFault(clean(f"The arguments of {tool} do not fit:\n{shown}{more}"), Fault.BAD_ARGUMENTS)


def _explained(signature: Signature, raw: dict[str, Any], problems: Sequence[Problem]) -> list[str]:
    lines: dict[str, str] = {}
    for problem in problems:
        place, line = _line(signature, raw, problem)
        lines.setdefault(place, f"{place}: {line}")
    return list(lines.values())


def _line(signature: Signature, raw: dict[str, Any], problem: Problem) -> tuple[str, str]:
    kind, location = problem["type"], problem["loc"]
    path = _path(raw, location)
    if kind in _MISSING_KINDS:
        path = (*path, location[-1])
        return _place(path), f"missing; expected {_expected(signature, path)}"
    if kind in _UNKNOWN:
        parent = at_path(signature.schema, path[:-1])
        known = list(parent.get("properties", ()))
        near = get_close_matches(str(path[-1])[:100], known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known) or 'none'}"
        return _place(path), f"unknown argument; {hint}"
    given = show(_look_up(raw, path))
    own_words = kind in ("value_error", "assertion_error") or ("ctx" in problem and kind not in _CHOICES)
    if own_words:
        words = str(problem["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
        return _place(path), f"{words.replace('Input should', 'it should')[:300]}; got {given}"
    return _place(path), f"expected {_expected(signature, path)}; got {given}"


def _expected(signature: Signature, path: Path) -> str:
    return describe(at_path(signature.schema, path))[:300]


def _place(path: Path) -> str:
    text = ""
    for step in path[:20]:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
    return text[:200] or "(all)"
