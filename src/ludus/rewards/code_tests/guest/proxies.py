"""The solution as the tests see it: proxies that send requests to its process, and plain data that comes back.

What a proxy does not do is as important as what it does. It never lets the solution decide a comparison
with a value of the tests: `==` with plain data is False, two proxies cannot be compared for equality at
all, and arithmetic and ordering work between proxies only. Otherwise an object that claims to be equal to
everything, or whose difference from the expected value is always 0, would pass.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from ludus.rewards.code_tests.guest.plain_data import ERRORS, Decoder, Encoder, TooLarge, read, write
from ludus.rewards.code_tests.guest.test_discovery import TESTS_FILE, free_names, imported

Ask = Callable[[str], str]
T = TypeVar("T")

_CHUNKS = (8, 64, 512, 4096)
_MOST_ITEMS = 100_000
_ENDS_LOOPS = ("StopIteration", "StopAsyncIteration")
"""Exceptions that `map`, `zip` and `all` silently take for the end of their input."""


class Stopped(BaseException):
    """The solution cannot go on with this test: it exited, hit a limit, or answered nonsense.

    Not an `Exception`, so that no test can take it for an error that it expected.
    """


class SolutionClient:
    """Sends requests to the solution's process. `generation` counts the processes it has been loaded in."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self.generation = 0
        self.stopped: str | None = None
        """Why the solution could not go on, if that has happened since the test began."""
        self.root = Proxy(self, 0, 0, ())
        self._errors: dict[str, type[Exception]] = {}

    def use(self, proxy: Proxy, what: str, *args: Any) -> Any:
        """Use the object and return the result; the solution's exceptions are raised here."""
        answer = self._answer(
            {"do": what, "on": self.number(proxy), "args": [self._encoded(one) for one in args]}
        )
        path = proxy.__dict__["_path"]
        below = (*path, args[0]) if what == "get" and path is not None else None
        return self._decoded(answer.get("value"), below)

    def call(self, proxy: Proxy, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call the object. What it changed in lists, dicts and sets that it was given is changed here too."""
        answer = self._answer(
            {
                "do": "call",
                "on": self.number(proxy),
                "args": [self._encoded(one) for one in args],
                "named": [[key, self._encoded(one)] for key, one in named.items()],
            }
        )
        given = [*args, *named.values()]
        changed = answer.get("changed", [])
        if not isinstance(changed, list):
            raise self.stop("its answer is not understood")
        for pair in changed:
            if not isinstance(pair, list) or len(pair) != 2 or pair[0] not in range(len(given)):
                raise self.stop("its answer is not understood")
            restore(given[pair[0]], self._decoded(pair[1], None))
        return self._decoded(answer.get("value"), None)

    def number(self, proxy: Proxy) -> int:
        """The handle of a proxy. One that is reached by name is looked up again in a new process."""
        fields = proxy.__dict__
        if fields["_generation"] != self.generation:
            path = fields["_path"]
            if path is None:
                raise self.stop("the object was lost with the process that held it")
            found = self.root
            found.__dict__["_generation"] = self.generation
            for name in path:
                found = self.use(found, "get", name)
            if not isinstance(found, Proxy):
                raise self.stop("the object is no longer what it was")
            fields["_generation"], fields["_number"] = self.generation, found.__dict__["_number"]
        number: int = fields["_number"]
        return number

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = read(self._ask(write(request)))
        except ValueError:
            raise self.stop("its answer is not understood") from None
        if not isinstance(answer, dict):
            raise self.stop("its answer is not understood")
        if "stopped" in answer:
            raise self.stop(str(answer["stopped"]))
        if "raised" in answer:
            raise self._raised(answer["raised"])
        return answer

    def stop(self, why: str) -> Stopped:
        """The exception to raise; the test has failed even if it catches that."""
        self.stopped = why
        return Stopped(why)

    def _raised(self, raised: Any) -> BaseException:
        if not isinstance(raised, dict) or raised.get("nearest") not in ERRORS:
            return self.stop("it raised something that ends a program")
        if raised["nearest"] in _ENDS_LOOPS and not _is_named_by_tests(raised["nearest"]):
            return self.stop(f"it raised {raised['nearest']}")
        kind = self._error(str(raised.get("name")), raised["nearest"])
        try:
            return kind(str(raised.get("text", "")))
        except TypeError:  # an exception that wants more than a text, such as UnicodeDecodeError
            return ValueError(str(raised.get("text", "")))

    def _error(self, name: str, nearest: str) -> type[Exception]:
        if name == nearest:
            return ERRORS[nearest]
        return self._errors.setdefault(name, types.new_class(name, (ERRORS[nearest],)))

    def _encoded(self, value: Any) -> Any:
        return Encoder(self._refer).encode(value)

    def _refer(self, value: Any) -> Any:
        if isinstance(value, Proxy):
            return {"h": self.number(value)}
        raise TypeError(
            f"only plain data can be given to the solution, not {type(value).__name__}; "
            "functions and objects of the test stay on this side"
        )

    def _decoded(self, data: Any, path: tuple[str, ...] | None) -> Any:
        def resolve(tag: str, inner: Any) -> Any:
            if tag == "h" and type(inner) is int:
                return Proxy(self, inner, self.generation, path)
            if tag == "w" and type(inner) is int:
                return _awaited(self, Proxy(self, inner, self.generation, None))
            if tag == "e" and isinstance(inner, list) and len(inner) == 2 and inner[1] in ERRORS:
                return self._error(str(inner[0]), inner[1])
            raise ValueError("this is not plain data")

        try:
            return Decoder(resolve).decode(data)
        except TooLarge:
            raise self.stop("its result is too large") from None
        except ValueError:
            raise self.stop("its answer is not understood") from None


def _is_named_by_tests(name: str) -> bool:
    """Whether a function of the tests that is running now uses a name, and so may expect the exception."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename == TESTS_FILE and name in frame.f_code.co_names:
            return True
    return False


async def _awaited(client: SolutionClient, proxy: Proxy) -> Any:
    """A coroutine of the solution's: it runs there when it is awaited here, one after another."""
    return client.use(proxy, "await")


def restore(old: Any, new: Any) -> None:
    """Make `old` equal to `new` in place, where both are lists, dicts, sets or bytearrays."""
    if type(old) is not type(new):
        return
    if isinstance(old, list):
        old[:] = [_merged(old[i] if i < len(old) else None, item) for i, item in enumerate(new)]
    elif isinstance(old, dict):
        items = {key: _merged(old.get(key), item) for key, item in new.items()}
        old.clear()
        old.update(items)
    elif isinstance(old, set):
        old.clear()
        old.update(new)
    elif isinstance(old, bytearray):
        old[:] = new


def _merged(old: Any, new: Any) -> Any:
    if type(old) is type(new) and isinstance(old, (list, dict, set, bytearray)):
        restore(old, new)
        return old
    return new


def _forwarded(what: str) -> Any:
    def method(self: Proxy, *args: Any) -> Any:
        return self.__dict__["_client"].use(self, what, *args)

    return method


def _between_proxies(what: str) -> Any:
    def method(self: Proxy, other: Any) -> Any:
        if not isinstance(other, Proxy):
            return NotImplemented
        return self.__dict__["_client"].use(self, what, other)

    return method


class Proxy:
    """An object of the solution's."""

    def __init__(
        self, client: SolutionClient, number: int, generation: int, path: tuple[str, ...] | None
    ) -> None:
        self.__dict__.update(_client=client, _number=number, _generation=generation, _path=path)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__array"):
            # numpy asks the object itself for these, and reads memory wherever the answer says that it is
            raise AttributeError(name)
        return self.__dict__["_client"].use(self, "get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__["_client"].use(self, "set", name, value)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.__dict__["_client"].call(self, args, named)

    def __len__(self) -> int:
        return _of(int, self.__dict__["_client"].use(self, "len"))

    def __bool__(self) -> bool:
        return _of(bool, self.__dict__["_client"].use(self, "bool"))

    def __iter__(self) -> Iterator[Any]:
        iterator = self.__dict__["_client"].use(self, "iter")
        if not isinstance(iterator, Proxy):
            raise TypeError("iter() gave no iterator")
        total, chunk, done = 0, 0, False
        while not done:
            items, done = _several(iterator, _CHUNKS[min(chunk, len(_CHUNKS) - 1)])
            yield from items
            total, chunk = total + len(items), chunk + 1
            if total > _MOST_ITEMS:
                raise self.__dict__["_client"].stop("it never stops giving items")

    def __next__(self) -> Any:
        items, _ = _several(self, 1)
        if not items:
            raise StopIteration
        return items[0]

    def __str__(self) -> str:
        return _of(str, self.__dict__["_client"].use(self, "str"))

    def __repr__(self) -> str:
        return _of(str, self.__dict__["_client"].use(self, "repr"))

    def __exit__(self, *error: Any) -> None:
        self.__dict__["_client"].use(self, "exit")

    def __instancecheck__(self, value: Any) -> bool:
        return (
            isinstance(value, Proxy) and self.__dict__["_client"].use(self, "isinstance", value) is True
        )

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Proxy) and other is not self:
            raise TypeError("two objects of the solution cannot be compared here; compare their data")
        return other is self

    __hash__ = object.__hash__

    __getitem__, __setitem__, __delitem__ = (
        _forwarded("item"),
        _forwarded("setitem"),
        _forwarded("delitem"),
    )
    __enter__, __neg__, __abs__ = _forwarded("enter"), _forwarded("neg"), _forwarded("abs")
    __add__, __sub__ = _between_proxies("add"), _between_proxies("sub")
    __mul__, __truediv__ = _between_proxies("mul"), _between_proxies("truediv")
    __floordiv__, __mod__ = _between_proxies("floordiv"), _between_proxies("mod")
    __pow__, __matmul__ = _between_proxies("pow"), _between_proxies("matmul")
    __and__, __or__, __xor__ = _between_proxies("and_"), _between_proxies("or_"), _between_proxies("xor")
    __lshift__, __rshift__ = _between_proxies("lshift"), _between_proxies("rshift")
    __lt__, __le__ = _between_proxies("lt"), _between_proxies("le")
    __gt__, __ge__ = _between_proxies("gt"), _between_proxies("ge")


def _several(iterator: Proxy, count: int) -> tuple[list[Any], bool]:
    answer = iterator.__dict__["_client"].use(iterator, "next", count)
    if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[0], list):
        raise iterator.__dict__["_client"].stop("its answer is not understood")
    return answer[0][:count], bool(answer[1]) or not answer[0]


def _of(kind: type[T], value: Any) -> T:
    if type(value) is not kind:
        raise TypeError(f"{kind.__name__} expected, not {type(value).__name__}")
    return value


# Comparisons of arrays that an empty array cannot pass. To numpy and torch an empty array is close to any
# number: it is broadcast to nothing, of which all is true. A solution that returns `[]` would pass
# `np.allclose(f(x), 3.0)`. Here these functions take an empty operand beside one that is not for unequal.
_TESTING = (
    *("assert_allclose", "assert_almost_equal", "assert_approx_equal", "assert_array_almost_equal"),
    *("assert_array_equal", "assert_array_less", "assert_equal"),
)
_COMPARISONS: dict[str, Sequence[str]] = {
    "numpy": ("allclose", "isclose", "array_equiv"),
    "numpy.testing": _TESTING,
    "torch": ("allclose", "isclose"),
}
_ALIASES = {"numpy": ("np", "numpy"), "torch": ("torch",)}


def guard_arrays(sources: Iterable[str]) -> None:
    """Make the comparisons of those modules that the tests use take empty and not empty for unequal."""
    used: set[str] = set()
    for source in sources:
        used |= imported(source) | free_names(source)
    for name, functions in _COMPARISONS.items():
        root = name.partition(".")[0]
        if not used & {root, *_ALIASES[root]}:
            continue
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue  # the tests will say so
        for one in functions:
            setattr(module, one, _guarded(getattr(module, one), root))


def _guarded(compare: Callable[..., Any], root: str) -> Callable[..., Any]:
    @functools.wraps(compare)
    def guarded(*args: Any, **named: Any) -> Any:
        given = [_array(one, root) for one in args[:2]]
        named = {key: _array(one, root) for key, one in named.items()}
        operands = [*given, *named.values()][:2]
        if len({_is_empty(one) for one in operands}) > 1:
            if compare.__name__.startswith("assert"):
                raise AssertionError("one of the arrays is empty, and the other is not")
            library = importlib.import_module(root)
            return library.asarray(False) if compare.__name__ == "isclose" else False
        return compare(*given, *args[2:], **named)

    return guarded


def _array(value: Any, root: str) -> Any:
    """Convert to an array once: an object of the solution's may have another value when it is read again."""
    if root == "torch" or not isinstance(value, (list, tuple, Proxy)):
        return value
    try:
        return importlib.import_module("numpy").asanyarray(value)
    except ValueError:  # rows of several lengths
        return value


def _is_empty(value: Any) -> bool:
    count = getattr(value, "numel", None)
    return bool(count() == 0 if callable(count) else getattr(value, "size", 1) == 0)
