"""A look at a cluster: its nodes, and the actors of all runs on them (`ludus cluster`)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ludus.core.messages import Json
from ludus.dist.cluster import NAMESPACE, Node, alive_nodes, join_ray, load_ray

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
