"""A run's place in a Ray cluster: joining it, what is claimed of its nodes, and the actors that live there.

Ray decides on which node an actor lives, within a placement group that is reserved before anything is started.
What a run asks for is compared with what the cluster has first: what can never be placed is an error at once,
and what could be is waited for, with a deadline. Actors belong to the process that started them and end with
it.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ludus.core.failures import ConfigError, MissingExtraError
from ludus.core.messages import Json

log = logging.getLogger(__name__)

NAMESPACE = "ludus"
"""Where the actors of all runs are named, which is how `ludus cluster` finds them."""
_SMALL_STORE = 100 * 1024 * 1024
"""The object store of a cluster of our own that has no weights to carry."""
_NODE_SECONDS = 30.0
_PLACE_SECONDS = 60.0
_CONNECT_SECONDS = 5.0
_START_HINT = (
    "start one with `ray start --head` here and `ray start --address=HOST:6379` on the other nodes, or run on "
    'this machine alone with cluster.address = "local"'
)


def load_ray(purpose: str = "a cluster") -> Any:
    """The package, where it is installed."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise MissingExtraError("ray", "ray", purpose) from error


def join_ray(address: str | None, cpus: int | None = None, store_bytes: int | None = None) -> bool:
    """Join the cluster at `address` ("auto", "host:port"; RAY_ADDRESS when None), or start one here ("local").

    `cpus` and the size of the object store are those of a cluster that is started. False where this process had
    joined one before: then it stays connected.
    """
    ray = load_ray()
    if ray.is_initialized():
        return False
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if address == "local":
        options["include_dashboard"] = False
        options |= {"num_cpus": cpus} if cpus is not None else {}
        options |= {"object_store_memory": store_bytes} if store_bytes is not None else {}
    elif address != "auto":
        _check_reachable(address)
    try:
        with _kept_handlers():
            ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise ConfigError(
            f"cluster.address = {address!r}: no Ray cluster could be joined from this machine, which must be "
            f"one of its nodes ({_first_line(error)}): {_START_HINT}"
        ) from error
    return True


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster (or one of several raylets on a machine)."""

    id: str
    address: str
    cpus: float
    gpus: float
    free_cpus: float
    free_gpus: float

    def __str__(self) -> str:
        gpus = f", {self.gpus:g} GPUs ({self.free_gpus:g} free)" if self.gpus else ""
        return (
            f"{self.address} ({self.id[:6]}): {self.cpus:g} CPUs ({max(0, self.free_cpus):g} free){gpus}"
        )


@dataclass(frozen=True, slots=True)
class Claim:
    """So many actors of one role, each with so much of its node."""

    role: str
    count: int
    gpus: float = 0.0
    cpus: float = 1.0

    def __str__(self) -> str:
        each = f"{self.cpus:g} CPU" + (f" and {self.gpus:g} GPU" if self.gpus else "")
        return f"{self.count} x {self.role} ({each} each)"

    @property
    def resources(self) -> dict[str, float]:
        """Of one actor, in Ray's words."""
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})


def alive_nodes() -> list[Node]:
    """The nodes that are alive now, this process's own first."""
    ray = load_ray()
    own = ray.get_runtime_context().get_node_id()
    per_node = importlib.import_module("ray._private.state").available_resources_per_node
    free: Mapping[str, Mapping[str, float]] = per_node()
    nodes = []
    for one in ray.nodes():
        if one["Alive"]:
            has, left = one["Resources"], free.get(one["NodeID"], {})
            counts = [kind.get(name, 0.0) for kind in (has, left) for name in ("CPU", "GPU")]
            nodes.append(Node(one["NodeID"], one["NodeManagerAddress"], *counts))
    return sorted(nodes, key=lambda node: (node.id != own, node.address, node.id))


def check_room(claims: Sequence[Claim], nodes: Sequence[Node]) -> None:
    """Refuse what these nodes could not hold even if they did nothing else.

    The first node holds the first claim of all, which is rank 0's: it is the process that asks.
    """
    rest = [[node.cpus, node.gpus] for node in nodes]
    for place, claim in enumerate(one for one in claims for _ in range(one.count)):
        rooms = rest[:1] if place == 0 else sorted(rest, key=lambda room: room[1])  # spare the GPUs
        for room in rooms:
            if room[0] >= claim.cpus and room[1] >= claim.gpus:
                room[0] -= claim.cpus
                room[1] -= claim.gpus
                break
        else:
            raise ConfigError(
                f"the cluster has no room for one more {claim.role}. {asked_and_there(claims, nodes)}"
            )


def asked_and_there(claims: Sequence[Claim], nodes: Sequence[Node]) -> str:
    """The requested and the available resources, for error messages."""
    asked = ", ".join(str(claim) for claim in claims if claim.count)
    there = "; ".join(map(str, nodes)) or "no node"
    return f"Asked for: {asked}. The cluster has: {there}"


class RayCluster:
    """One run in a cluster. Closing it ends every actor that it has started."""

    def __init__(
        self,
        run: str,
        address: str | None,
        nodes: int | None,
        claims: Sequence[Claim],
        *,
        has_weights: bool = False,
    ) -> None:
        """Join, wait for so many nodes, and refuse what they cannot hold. With weights to carry, the object
        store of a cluster of our own is as large as Ray likes."""
        self.run, self._claims = run, [claim for claim in claims if claim.count]
        self._token = secrets.token_hex(3)
        self._names = 0
        self._actors: list[Any] = []
        self._groups: list[Any] = []
        self._is_ours = join_ray(
            address,
            math.ceil(sum(one.count * one.cpus for one in claims)),
            None if has_weights else _SMALL_STORE,
        )
        self._ray = load_ray()
        try:
            check_room(self._claims, self._wait_for_nodes(nodes or 1))
        except BaseException:
            self.close()
            raise

    @property
    def own_address(self) -> str:
        """The address of this machine for the other nodes."""
        address: str = self._ray.util.get_node_ip_address()
        return address

    def _wait_for_nodes(self, wanted: int) -> list[Node]:
        deadline = time.monotonic() + _NODE_SECONDS
        while len(nodes := alive_nodes()) < wanted:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"cluster.nodes = {wanted}, and after {_NODE_SECONDS:g} seconds the cluster has "
                    f"{len(nodes)}: {'; '.join(map(str, nodes))}. {_START_HINT.capitalize()}"
                )
            time.sleep(0.2)
        return nodes

    def reserve(self, claim: Claim, strategy: str) -> Any:
        """A placement group: PACK for what talks to each other, SPREAD for what does not."""
        make = importlib.import_module("ray.util.placement_group").placement_group
        group = make([claim.resources] * claim.count, strategy=strategy)
        self._groups.append(group)
        if not group.wait(_PLACE_SECONDS):
            raise ConfigError(
                f"waited {_PLACE_SECONDS:g} seconds for a place for {claim}, which others hold. "
                f"{asked_and_there(self._claims, alive_nodes())}"
            )
        return group

    def start(
        self, kind: type[Any], role: str, number: int, claim: Claim, where: Any = "DEFAULT"
    ) -> Any:
        """Start an actor; `where` is one of Ray's scheduling strategies. It may still be on its way."""
        self._names += 1
        name = f"{self.run}/{self._token}/{role}-{number}/{self._names}"
        actor = self._ray.remote(kind).options(
            name=name,
            namespace=NAMESPACE,
            num_cpus=claim.cpus,
            num_gpus=claim.gpus,
            max_restarts=0,
            max_concurrency=10_000,
            scheduling_strategy=where,
        )
        made = actor.remote(import_path(), str(Path.cwd()), self.run, role, number)
        self._actors.append(made)
        return made

    def kill(self, actor: Any) -> None:
        """End an actor and what it has started, at once."""
        if actor in self._actors:
            self._actors.remove(actor)
        if self._ray.is_initialized():
            with suppress(self._ray.exceptions.RayError, ValueError):
                self._ray.kill(actor)

    def close(self) -> None:
        """End all actors, give their places back, and leave a cluster that was joined here."""
        for actor in list(self._actors):
            self.kill(actor)
        remove = importlib.import_module("ray.util.placement_group").remove_placement_group
        for group in self._groups:
            if self._ray.is_initialized():
                remove(group)
        self._groups.clear()
        if self._is_ours:
            self._is_ours = False
            self._ray.shutdown()


def in_group(group: Any, bundle: int) -> Any:
    """The scheduling strategy of an actor that takes a place in a placement group."""
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    return strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)


def on_node(node: str, *, soft: bool = False) -> Any:
    """The scheduling strategy of an actor that belongs on a node; softly, another one where that is full."""
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    return strategies.NodeAffinitySchedulingStrategy(node, soft=soft, _spill_on_unavailable=soft)


def node_for(claim: Claim, number: int) -> Any:
    """Nodes without GPUs where there are some, in turn; another one where that is full or gone meanwhile."""
    nodes = alive_nodes()
    plain = [node for node in nodes if not node.gpus] or nodes
    free = [node for node in plain if node.free_cpus >= claim.cpus] or plain
    free.sort(key=lambda node: -node.free_cpus)
    return on_node(free[number % len(free)].id, soft=True)


def import_path() -> list[str]:
    """Where actors look for a user's modules: where this process does."""
    return [str(Path(entry).resolve()) for entry in sys.path if isinstance(entry, str)]


def interface_of(address: str) -> str | None:
    """The network interface that has an address; None where that cannot be told."""
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = name.encode()[:15].ljust(256, b"\0")
            with suppress(OSError):
                found = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


def cause_of(error: Exception) -> str:
    """Why Ray says that an actor is dead: the sentence of its report that is about this one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    about = [line for line in lines if line.startswith("The actor is dead") or "node" in line.lower()]
    text = (about or lines or [type(error).__name__])[0]
    return text.split(" Some common causes", 1)[0][:300]


def _check_reachable(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f'cluster.address = {address!r}: write "auto", "local" or "host:port"')
    try:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cluster.address = {address!r}: nothing answers there ({error}): {_START_HINT}"
        ) from error


@contextmanager
def _kept_handlers() -> Iterator[None]:
    """Ray sets a handler of its own for SIGTERM, which exits; a run saves first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, kept)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


_ANSWER_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ActorStatus:
    """One actor of a run."""

    run: str
    role: str
    number: int
    state: str
    """ "alive", or "no answer": it is still on its way to a node, or hangs."""
    node: str | None = None
    pid: int | None = None
    memory_bytes: int | None = None
    gpu_ids: tuple[str, ...] = ()
    seconds_since_heard: float | None = None
    """Since its last request or work: the heartbeat of a run."""
    facts: Json | None = None
    """Further facts: the run's step, an engine's version."""


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """Nodes of the cluster, and the actors of Ludus."""

    nodes: tuple[Node, ...]
    actors: tuple[ActorStatus, ...]

    def to_json(self) -> Json:
        return asdict(self)


def look(address: str | None = None) -> ClusterStatus:
    """Join a cluster for a moment and query all Ludus actors, with a short timeout each."""
    ray = load_ray("looking at a cluster")
    joined = join_ray(address)
    try:
        names = [
            one["name"]
            for one in ray.util.list_named_actors(all_namespaces=True)
            if one["namespace"] == NAMESPACE
        ]
        asked = {name: _asked(ray, name) for name in names}
        waiting = [answer for answer in asked.values() if answer is not None]
        if waiting:
            ray.wait(waiting, num_returns=len(waiting), timeout=_ANSWER_SECONDS)
        actors = [_status(ray, name, answer) for name, answer in asked.items()]
        found = sorted(actors, key=lambda one: (one.run, one.role != "trainer", one.role, one.number))
        return ClusterStatus(tuple(alive_nodes()), tuple(found))
    finally:
        if joined:
            ray.shutdown()


def _asked(ray: Any, name: str) -> Any:
    try:
        return ray.get_actor(name, namespace=NAMESPACE).status.remote()
    except ValueError:  # it ended meanwhile
        return None


def _status(ray: Any, name: str, answer: Any) -> ActorStatus:
    run, _, place, _ = name.rsplit("/", 3)
    role, _, number = place.rpartition("-")
    try:
        told = dict(ray.get(answer, timeout=0)) if answer is not None else {}
    except ray.exceptions.RayError:
        told = {}
    if not told:
        return ActorStatus(run, role, int(number), "no answer")
    known = {one: told.pop(one) for one in ("node", "pid", "memory_bytes", "seconds_since_heard")}
    gpus = tuple(map(str, told.pop("gpu_ids")))
    facts = {key: value for key, value in told.items() if key not in ("run", "role", "number")}
    return ActorStatus(run, role, int(number), "alive", gpu_ids=gpus, facts=facts, **known)
