"""From a Python signature to what a model is told and what its arguments are checked against."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any, NotRequired, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter
from pydantic import Field as SchemaField
from pydantic.errors import PydanticUserError
from pydantic_core import PydanticSerializationError, to_jsonable_python
from typing_extensions import TypedDict

from ludus.core.failures import ConfigError
from ludus.core.messages import Json, ToolContext
from ludus.tools.docstrings import parse_docstring
from ludus.tools.schema import tidy

_CONFIG = ConfigDict(extra="forbid")
_INFERRED = (str, int, float, bool)
_MISSING = inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class Signature:
    """What a function takes: from the model (`schema`, `validator`), and from the episode."""

    description: str
    schema: Json
    validator: TypeAdapter[dict[str, Any]]
    positional_only: tuple[str, ...] = ()
    env: str | None = None
    """The parameter that gets the episode's environment, if there is one."""
    env_type: type | None = None
    context: str | None = None
    """The parameter that gets the `ToolContext`, if there is one."""

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
