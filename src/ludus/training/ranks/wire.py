"""How the ranks of a run meet, how each knows that another one is of the run, and steps as they travel.

The ranks of a run share a key, which they get through their environment (`LUDUS_RANKS_KEY`). They meet at a
key-value store. On one machine that is a file in a folder of the user's own, so that no other user can read or
write it. On several machines it is a `TCPStore` at the address that the machines call rank 0 by, and under
torchrun it is torchrun's own; these have no password, so nothing in a store counts without the key's signature.
Calls are signed as well, because they travel over gloo, which does not authenticate: after the ranks have
connected, each proves to each that it has the key (`prove_membership`).

What the key cannot do: tensors between ranks are neither signed nor encrypted.
"""

from __future__ import annotations

import hmac
import importlib
import os
import secrets
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, fields, is_dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from ludus.core.config import Config
from ludus.core.failures import ConfigError, LudusError
from ludus.remote.channel import pack_frame, unpack_frame
from ludus.remote.processes import ScratchFolder
from ludus.training.data.batch import Batch

HELLO, READY, STEP, ERROR = "ludus/hello", "ludus/ready", "ludus/step", "ludus/error"
"""Names of values in the store; a step, and an error in it, have its number behind."""
STOP = b"stop"
WATCHED = "LUDUS_RANK_WATCHES_STDIN"
"""Environment variable: the rank ends when its standard input does."""
KEY, STORE = "LUDUS_RANKS_KEY", "LUDUS_RANKS_STORE"
"""Environment variables: the key, in hexadecimal digits, and the file at which ranks of one machine meet."""
LOOPBACK = "lo"
"""The network interface of ranks on one machine, on Linux."""
_INTERFACE = "GLOO_SOCKET_IFNAME"
_IS_LINUX = sys.platform == "linux"
_KEY_FILE = "ludus/key_file"
_PREFIX = "ludus-ranks-"
_SIGNATURE = 32
_PROOF_SECONDS = 60.0


class StrangerError(LudusError):
    """A process that does not have the run's key has written to its store, or connected as a rank."""


class SignedStore:
    """A store with signed values: reading a value that was written without the key is an error."""

    def __init__(self, inner: Store, key: bytes, folder: ScratchFolder | None = None) -> None:
        """`folder` is removed in the end."""
        self.inner, self._key, self._folder = inner, key, folder

    def sign(self, name: str, message: bytes) -> bytes:
        """The message with a signature in front, which holds under this name alone."""
        return self._signature(name, message) + message

    def read(self, name: str, signed: bytes) -> bytes:
        """The message, where the signature is the key's."""
        message = signed[_SIGNATURE:]
        if not hmac.compare_digest(signed[:_SIGNATURE], self._signature(name, message)):
            raise StrangerError(
                f"{name}, which the trainer ranks exchange, does not have the signature of this run's key: a "
                "process that is no rank of this run sends to them. Nothing of it was used"
            )
        return message

    def _signature(self, name: str, message: bytes) -> bytes:
        made = hmac.new(self._key, f"{len(name)}:{name}:".encode(), "sha256")
        made.update(message)
        return made.digest()

    def set(self, name: str, value: bytes) -> None:
        self.inner.set(name, self.sign(name, value))  # type: ignore[arg-type]

    def get(self, name: str) -> bytes:
        return self.read(name, bytes(self.inner.get(name)))

    def check(self, name: str) -> bool:
        """Whether the key has been written."""
        return self.inner.check([name])

    def delete(self, name: str) -> None:
        self.inner.delete_key(name)

    def prove_membership(self, rank: int, groups: Sequence[Any]) -> None:
        """Ask every process that this one is connected to for a proof that it has the key, and give one.

        Each draws a number, and signs those of the others: `groups` have connections of their own.
        """
        for number, group in enumerate(groups):
            peers = [one for one in dist.get_process_group_ranks(group) if one != rank]
            drawn = secrets.token_bytes(_SIGNATURE)
            asked = _exchange(group, dict.fromkeys(peers, drawn))
            given = _exchange(group, {
                peer: self._signature(f"{number}: {rank} to {peer}", asked[peer]) for peer in peers
            })  # fmt: skip
            for peer in peers:
                if not hmac.compare_digest(
                    given[peer], self._signature(f"{number}: {peer} to {rank}", drawn)
                ):
                    raise StrangerError(
                        f"the process connected as trainer rank {peer} does not have this run's key: a process "
                        "that is no rank of this run has taken its place"
                    )

    def close(self) -> None:
        if self._folder is not None:
            self._folder.remove()


def _exchange(group: Any, sent: dict[int, bytes]) -> dict[int, bytes]:
    """Send a message to each of these ranks, and get theirs."""
    heard: dict[int, Tensor] = {peer: torch.zeros(_SIGNATURE, dtype=torch.uint8) for peer in sent}
    told = {peer: torch.frombuffer(bytearray(data), dtype=torch.uint8) for peer, data in sent.items()}
    works: list[Any] = []
    for peer in sent:
        works += [dist.isend(told[peer], peer, group=group), dist.irecv(heard[peer], peer, group=group)]
    for work in works:
        work.wait(timedelta(seconds=_PROOF_SECONDS))
    return {peer: tensor.numpy().tobytes() for peer, tensor in heard.items()}


# Rank 0's side: a new store, and what other ranks need to find it.


def open_private_store() -> tuple[SignedStore, dict[str, str]]:
    """A store for the ranks of this machine, and the environment variables by which they find it."""
    folder = ScratchFolder(_PREFIX)  # for this user alone
    key = secrets.token_bytes(_SIGNATURE)
    path = folder.path / "store"
    store = SignedStore(FileStore(str(path), -1), key, folder)
    found = {KEY: key.hex(), STORE: str(path)}
    return store, found | ({_INTERFACE: LOOPBACK} if _IS_LINUX else {})


def open_network_store(address: str) -> tuple[SignedStore, dict[str, str]]:
    """A TCP store for ranks on other machines; it listens on this address only."""
    key = secrets.token_bytes(_SIGNATURE)
    family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    try:
        listener = socket.create_server((address, 0), family=family)
    except OSError as error:
        raise ConfigError(
            f"trainer ranks on other machines call this one by {address}, at which it cannot listen ({error})"
        ) from error
    port = listener.getsockname()[1]
    store = TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    found = {KEY: key.hex(), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    return SignedStore(store, key), found


def join_store() -> tuple[SignedStore, int, int]:
    """The store that the environment tells of, this process's rank, and how many there are."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    told = os.environ.pop(KEY, None)  # what this process starts has no use for it
    path = os.environ.pop(STORE, None)
    if path is not None and told is not None:
        return SignedStore(FileStore(path, -1), _parsed(told)), rank, size
    store, _, _ = next(iter(rendezvous("env://")))
    if told is not None:
        return SignedStore(store, _parsed(told)), rank, size
    if rank:
        return SignedStore(store, _found_key(store)), rank, size
    return _with_key_file(store), rank, size


def _parsed(told: str) -> bytes:
    try:
        key = bytes.fromhex(told)
    except ValueError:
        key = b""
    if len(key) < 16:
        raise ConfigError(f"{KEY} is no key: set it to 64 hexadecimal digits (openssl rand -hex 32)")
    return key


# Under torchrun without a key in the environment: rank 0 makes one, and writes it where this user alone reads.
# The others get the place through the store. A stranger can give them another one, but cannot make
# a file there that belongs to this user.


def _with_key_file(store: Store) -> SignedStore:
    folder = ScratchFolder(_PREFIX)
    key = secrets.token_bytes(_SIGNATURE)
    path = folder.path / "key"
    path.touch(mode=0o600)
    path.write_bytes(key)
    store.set(_KEY_FILE, str(path))
    return SignedStore(store, key, folder)


def _found_key(store: Store) -> bytes:
    path = Path(store.get(_KEY_FILE).decode())
    with suppress(OSError):
        facts, folder = path.lstat(), path.parent.lstat()
        is_own = {facts.st_uid, folder.st_uid} == {os.getuid()} and not (
            facts.st_mode | folder.st_mode
        ) & 0o077
        if is_own and path.parent.name.startswith(_PREFIX) and facts.st_size == _SIGNATURE:
            return path.read_bytes()
    raise ConfigError(
        f"this trainer rank cannot read the key of the run in {path}, as on another machine than rank 0: set "
        f"{KEY} to the same 64 hexadecimal digits (openssl rand -hex 32) for all ranks"
    )


# The network interface that gloo listens on.


def chosen_interface(found: str | None) -> str | None:
    """The one that the user has named (GLOO_SOCKET_IFNAME), or else the one that was found."""
    return os.environ.get(_INTERFACE, found)


def torchrun_interface() -> str | None:
    """Loopback where torchrun has all ranks on this machine."""
    alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return chosen_interface(LOOPBACK if alone else None)


@contextmanager
def gloo_through(interface: str | None) -> Iterator[None]:
    """Let gloo listen on this network interface alone; None leaves it to gloo.

    It looks up the host's name then to find its own address, which fails on many machines.
    """
    if interface is None or not _IS_LINUX:
        yield
        return
    before = os.environ.get(_INTERFACE)
    os.environ[_INTERFACE] = interface
    try:
        yield
    finally:
        if before is None:
            del os.environ[_INTERFACE]
        else:
            os.environ[_INTERFACE] = before


# A step as it travels from rank 0 to the others: a frame of `remote/channel.py` with a head in
# JSON, and behind it tensors and images as they are. Rows are dataclasses of tensors, whose fields are the
# schema; those in `LOCAL` stay on rank 0. Settings are written as in a recipe. Nothing is unpickled, nothing is
# called: reading fills the fields of dataclasses and settings of Ludus' own modules. That a step is rank 0's
# is known before it is read, by its signature.

ROOM = "ludus"
"""The package whose classes travel."""
LOCAL: Mapping[type, frozenset[str]] = {Batch: frozenset({"turns"})}
"""Fields with episodes, which rank 0 alone has; on other ranks they have their defaults."""
_PLAIN = frozenset({type(None), bool, int, float, str})


def pack_step(step: str, arguments: tuple[Any, ...]) -> bytes:
    """A step as bytes."""
    writer = _Writer()
    head = {"step": step, "arguments": [writer.value(one) for one in arguments]}
    return pack_frame(head, b"".join(writer.body))


def unpack_step(message: bytes) -> tuple[str, tuple[Any, ...]]:
    """The step that `pack_step` has packed. Sequences are tuples here."""
    head, body = unpack_frame(message)
    return head["step"], _value(head["arguments"], body)


class _Writer:
    def __init__(self) -> None:
        self.body: list[bytes] = []
        self._length = 0
        self._places: dict[int, list[int]] = {}
        """The place of each object of bytes: an image that several spans show is sent once."""

    def value(self, given: Any) -> Any:
        """JSON: plain values and sequences as they are, all else as an object with the name of its kind."""
        kind = type(given)
        if kind in _PLAIN:
            return given
        if isinstance(given, list | tuple):
            return [self.value(one) for one in given]
        if kind is bytes:
            if id(given) not in self._places:
                self._places[id(given)] = self._append(given)
            return {"bytes": self._places[id(given)]}
        if isinstance(given, Tensor):
            flat = given.detach().cpu().reshape(-1)
            # an empty tensor may have a stride of 0, and then has no view as bytes
            data = flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""
            return {"tensor": [str(given.dtype), list(given.shape), self._append(data)]}
        if isinstance(given, Path):
            return {"path": str(given)}
        if kind.__module__.split(".")[0] == ROOM and "<" not in kind.__qualname__:
            reference = f"{kind.__module__}:{kind.__qualname__}"
            if isinstance(given, Config):
                return {"settings": [reference, given.model_dump(mode="json", exclude_unset=True)]}
            if _travels(kind):
                local = LOCAL.get(kind, ())
                names = [one.name for one in fields(given) if one.name not in local]
                return {"rows": [reference, {name: self.value(getattr(given, name)) for name in names}]}
        raise TypeError(
            f"a {kind.__module__}.{kind.__qualname__} cannot be sent to other trainer ranks: dataclasses, "
            "settings, tensors and plain values can"
        )

    def _append(self, data: bytes) -> list[int]:
        self.body.append(data)
        start, self._length = self._length, self._length + len(data)
        return [start, self._length]


def _travels(kind: type) -> bool:
    """Whether it is a dataclass; one derived from a dataclass may hold more than its fields."""
    return is_dataclass(kind) and "__dataclass_fields__" in vars(kind)


def _value(given: Any, body: memoryview) -> Any:
    if isinstance(given, list):
        return tuple(_value(one, body) for one in given)
    if not isinstance(given, dict):
        return given
    ((kind, what),) = given.items()
    if kind == "bytes":
        return bytes(body[what[0] : what[1]])
    if kind == "tensor":
        name, shape, (start, stop) = what
        flat = torch.empty(stop - start, dtype=torch.uint8)
        flat.numpy()[:] = np.frombuffer(body[start:stop], np.uint8)
        return flat.view(getattr(torch, name.removeprefix("torch."))).reshape(shape)
    if kind == "path":
        return Path(what)
    if kind == "settings":
        settings: Any = _class(what[0])
        if issubclass(settings, Config):
            return settings.model_validate(what[1])
    if kind == "rows":
        found = _class(what[0])
        if _travels(found):
            return _filled(found, {name: _value(one, body) for name, one in what[1].items()})
    raise TypeError(f"unknown or unexpected type in a step message: {kind!r:.100}")


def _class(reference: str) -> type:
    module, _, name = reference.partition(":")
    if module.split(".")[0] != ROOM:
        raise TypeError(f"a step names {reference}, which is no class of Ludus")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not isinstance(found, type):
        raise TypeError(f"a step names {reference}, which is no class")
    return found


def _filled(kind: Any, values: Mapping[str, Any]) -> Any:
    made = kind.__new__(kind)
    for one in fields(kind):
        value = values.get(one.name, one.default)
        assert value is not MISSING, f"{kind.__qualname__}.{one.name} has no default"
        object.__setattr__(made, one.name, value)
    return made
