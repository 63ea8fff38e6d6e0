"""Names for things that are imported only when asked for."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from ludus.core.failures import ConfigError, LudusError, install_command
from ludus.core.user_code import error_with_location
from ludus.core.user_files import file_problem


class Registry(Mapping[str, str]):
    """Short names for `module:attribute` references; nothing is imported until `load`.

    `group` is an entry point group: installed packages, Ludus itself among them, register names there
    (`[project.entry-points."ludus.synth"]` in a pyproject.toml). It is read when a name is first looked up.
    """

    def __init__(
        self, kind: str, entries: Mapping[str, str] = MappingProxyType({}), *, group: str | None = None
    ) -> None:
        self.kind, self.group = kind, group
        self._own = dict(entries)

    @property
    def _entries(self) -> dict[str, str]:
        if self.group is None:
            return self._own
        found = dict(self._own)
        for name, reference in _registered(self.group, tuple(sys.path)):
            if found.setdefault(name, reference) != reference:
                raise ConfigError(
                    f"two packages register the {self.kind} {name!r} ({self.group}): {found[name]} and "
                    f"{reference}; uninstall one"
                )
        return found

    def __getitem__(self, name: str) -> str:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def load(self, name: str) -> Any:
        """The object behind a short name or a reference (`module:attribute`, `file.py:attribute`)."""
        entries = self._entries
        if name in entries:
            return import_object(entries[name])
        if ":" in name:
            return import_object(name)
        near = get_close_matches(name, entries, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        known = f"Known: {', '.join(sorted(entries))}"
        if not entries:
            known = (
                f"No installed package registers any ({self.group}): {install_command()}, or in a clone "
                "pip install -e ."
            )
        raise ConfigError(
            f"there is no {self.kind} called {name!r}.{hint} {known}; "
            "or give 'module:attribute' or 'file.py:attribute'"
        )


@cache
def _registered(group: str, path: tuple[str, ...]) -> list[tuple[str, str]]:
    """(name, reference) of each entry point of a group; `path` is where packages are looked for."""
    return [(point.name, point.value) for point in entry_points(group=group)]


def import_object(reference: str) -> Any:
    """The object that `module:attribute` or `path/to/file.py:attribute` names."""
    where, _, attribute = reference.rpartition(":")
    if not where or not attribute:
        raise ConfigError(
            f"{reference!r} is not a reference; write 'module:attribute' or 'file.py:attribute'"
        )
    found: Any = _load_file(Path(where)) if where.endswith(".py") else _load_module(where, reference)
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise ConfigError(f"{where} has no {part!r} (asked for by {reference!r})") from None
    return found


def load_function(where: str, reference: str) -> Callable[..., Any]:
    """The plain function that a setting names by reference."""
    try:
        found = import_object(reference)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if not callable(found) or isinstance(found, type) or inspect.iscoroutinefunction(found):
        raise ConfigError(f"{where}: {reference} is no plain function (def ...)")
    made: Callable[..., Any] = found
    return made


def lazy_exports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package that imports its names when they are first used
    (Scientific Python SPEC 1, lazy loading).

    The names are those that the package's `if TYPE_CHECKING:` block imports, so there is one list for type
    checkers and for Python. A name must not be that of a submodule, which would hide it once imported.
    """
    module = sys.modules[package]
    blocks = [node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.If)]
    homes = {
        alias.name: imported.module
        for block in blocks
        if isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for imported in block.body
        if isinstance(imported, ast.ImportFrom) and imported.module is not None
        for alias in imported.names
    }

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(homes[name]), name)
        setattr(module, name, found)
        return found

    return load, lambda: sorted({*vars(module), *homes})


def _load_module(name: str, reference: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise ConfigError(
                f"there is no module {error.name!r} (asked for by {reference!r})"
            ) from None
        raise _broken(name, error) from error
    except LudusError:
        raise
    except (Exception, SystemExit) as error:
        raise _broken(name, error) from error


def _load_file(path: Path) -> ModuleType:
    if (problem := file_problem(path)) is not None:
        raise ConfigError(problem)
    path = path.resolve()
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    name = f"ludus_user_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, Exception | SystemExit) and not isinstance(error, LudusError):
            raise _broken(str(path), error) from error
        raise
    return module


def _broken(where: str, error: Exception | SystemExit) -> ConfigError:
    if isinstance(error, SyntaxError):
        line = "" if error.lineno is None else f"{error.filename}, line {error.lineno}: "
        return ConfigError(f"{where} cannot be imported: {line}{type(error).__name__}: {error.msg}")
    if isinstance(error, SystemExit):
        return ConfigError(
            f"{where} cannot be imported: it ends the program ({error_with_location(error)}); what it does "
            'as a program goes below if __name__ == "__main__":'
        )
    return ConfigError(f"{where} cannot be imported: {error_with_location(error)}")
