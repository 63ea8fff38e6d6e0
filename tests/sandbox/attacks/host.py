"""What is watched from outside: canaries that nobody may touch, and everything that could be left behind."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ludus.sandbox.processes import isolation

NAME = "LUDUS_CANARY_SECRET"
_PR_SET_CHILD_SUBREAPER = 36


class Canaries:
    """Secrets where model-written code would look for them, and doors that only an escape can reach."""

    def __init__(self) -> None:
        self.value = f"canary-value-{secrets.token_hex(16)}"
        os.environ[NAME] = self.value
        places = {
            "@HOME@": Path.home(),
            "@TMP@": Path(tempfile.gettempdir()),
            "@PREFIX@": Path(sys.prefix).parent,
        }
        self._folders: list[Path] = []
        self.files: dict[str, Path] = {}
        for name, place in places.items():
            self.files[name] = self._plant(place)
        self._before = {path: _state(path) for path in self._watched()}
        pid = os.getpid()
        self._doors = [
            socket.create_server(("127.0.0.1", 0)),
            _abstract(f"ludus-canary-stream-{pid}", stream=True),
        ]
        self._letters = _abstract(f"ludus-canary-{pid}", stream=False)
        self._port = self._doors[0].getsockname()[1]
        for door in (*self._doors, self._letters):
            door.setblocking(False)

    def fill_in(self, code: str) -> str:
        """The program with the places of the canaries in it."""
        for name, path in self.files.items():
            code = code.replace(name, str(path))
        return code.replace("@PORT@", str(self._port)).replace("@HOST@", str(os.getpid()))

    def problems(self) -> list[str]:
        """What has happened to them."""
        found = [f"{path} was changed" for path, state in self._before.items() if _state(path) != state]
        found += [f"{path} appeared" for path in self._watched() if path not in self._before]
        for door in self._doors:
            with contextlib.suppress(BlockingIOError):
                door.accept()
                found.append(f"somebody connected to {door.getsockname()}")
        with contextlib.suppress(BlockingIOError):
            found.append(f"somebody sent us {self._letters.recv(100)!r}")
        return found

    def close(self) -> None:
        del os.environ[NAME]
        for door in (*self._doors, self._letters):
            door.close()
        for folder in self._folders:
            shutil.rmtree(folder)

    def _plant(self, place: Path) -> Path:
        if not os.access(place, os.W_OK):
            place = Path(tempfile.gettempdir())
        folder = Path(tempfile.mkdtemp(prefix="ludus-canary-", dir=place))
        file = folder / "ludus-canary"
        file.write_text(self.value)
        for path in (folder, file):
            path.chmod(0o777)  # what protects them must be the sandbox, not their rights
        self._folders.append(folder)
        return file

    def _watched(self) -> list[Path]:
        return [path for folder in self._folders for path in (folder, *folder.iterdir())]


def _state(path: Path) -> object:
    try:
        status = path.stat()
    except OSError:
        return None
    content = path.read_bytes() if path.is_file() else b""
    return status.st_mode, status.st_uid, status.st_mtime_ns, status.st_nlink, content


def _abstract(name: str, *, stream: bool) -> socket.socket:
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM if stream else socket.SOCK_DGRAM)
    door.bind(f"\0{name}")
    if stream:
        door.listen()
    return door


@dataclass(frozen=True)
class Belongings:
    """Everything of ours that could be left behind, at one moment."""

    processes: frozenset[str]
    mounts: frozenset[str]
    files: frozenset[str]
    descriptors: int
    threads: int
    tasks: int

    def beyond(self, before: Belongings) -> list[str]:
        """What is here now and was not there before, in words."""
        found = [f"process {one}" for one in self.processes - before.processes]
        found += [f"mount {one}" for one in self.mounts - before.mounts]
        found += [f"file {one}" for one in self.files - before.files]
        for name in ("descriptors", "threads", "tasks"):
            more = getattr(self, name) - getattr(before, name)
            if more > 0:
                found.append(f"{more} {name}")
        return found


def belongings() -> Belongings:
    """Now. Call `adopt_orphans` first, or processes that changed their parent are not seen."""
    return Belongings(
        processes=frozenset(descendants(os.getpid())),
        mounts=frozenset(Path("/proc/self/mountinfo").read_text().splitlines()),
        files=frozenset(_own_files()),
        descriptors=len(list(Path("/proc/self/fd").iterdir())),
        threads=len(list(Path("/proc/self/task").iterdir())),
        tasks=_tasks(),
    )


def descendants(pid: int) -> list[str]:
    """Every process below `pid`, zombies included, by pid and name."""
    parents: dict[int, list[tuple[int, str]]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                name, _, rest = (folder / "stat").read_text().rpartition(")")
                state, parent = rest.split()[:2]
                dead = " (zombie)" if state == "Z" else ""
                one = (int(folder.name), f"{name.replace('(', '')}{dead}")
                parents.setdefault(int(parent), []).append(one)
    found, todo = [], [pid]
    while todo:
        for child, text in parents.get(todo.pop(), []):
            found.append(text)
            todo.append(child)
    return found


def adopt_orphans() -> None:
    """From now on what is orphaned below us becomes our child, however it detached itself."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _own_files() -> Iterator[str]:
    yield from (str(path) for path in Path(tempfile.gettempdir()).iterdir())
    for folder, inside, _ in os.walk("/sys/fs/cgroup"):  # passes over what others remove meanwhile
        own = (name for name in inside if name.startswith(f"ludus-sandbox-{os.getpid()}"))
        yield from (str(Path(folder, name)) for name in own)


def _tasks() -> int:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0


def others_can_enter() -> bool:
    """Whether the folders of this Python are open to other users, as sessions without namespaces are."""
    paths = (Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve())
    return all(folder.stat().st_mode & 0o001 for path in paths for folder in path.parents)


def arrange(*, bare: bool) -> None:
    """Make sandboxes of this process do without namespaces, as if the machine refused them."""
    if not bare:
        return
    arrangements = isolation.arrangements

    def without_namespaces(*arguments: object) -> Iterator[object]:
        return (order for order in arrangements(*arguments) if not order["namespaces"])

    isolation.arrangements = without_namespaces
