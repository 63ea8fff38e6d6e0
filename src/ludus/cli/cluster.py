"""`ludus cluster`: the nodes of a Ray cluster, and what Ludus runs on them."""

from __future__ import annotations

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from ludus.dist.cluster import ActorStatus, ClusterStatus, Node


def cluster_table(status: ClusterStatus) -> Group:
    """Two plain tables."""
    nodes = Table("node", "address", "CPUs free", "GPUs free", box=None, pad_edge=False)
    for node in status.nodes:
        nodes.add_row(node.id[:6], node.address, *_free(node))
    if not status.actors:
        return Group(nodes, Text("\nno actors of Ludus here"))
    columns = ("run", "what", "node", "pid", "state", "memory", "heard", "")
    actors = Table(*columns, box=None, pad_edge=False)
    for one in status.actors:
        actors.add_row(*_row(one))
    return Group(nodes, Text(""), actors)


def print_cluster(status: ClusterStatus) -> None:
    Console(soft_wrap=True).print(cluster_table(status))


def _free(node: Node) -> tuple[str, str]:
    return (
        f"{max(0, node.free_cpus):g} of {node.cpus:g}",
        f"{node.free_gpus:g} of {node.gpus:g}" if node.gpus else "-",
    )


def _row(one: ActorStatus) -> tuple[str, ...]:
    memory = "" if one.memory_bytes is None else f"{one.memory_bytes / 2**20:,.0f} MiB"
    heard = "" if one.seconds_since_heard is None else f"{one.seconds_since_heard:.0f} s ago"
    facts = [f"{key} {value}" for key, value in (one.facts or {}).items()]
    gpus = [f"GPU {', '.join(one.gpu_ids)}"] if one.gpu_ids else []
    what, pid = f"{one.role} {one.number}", "" if one.pid is None else str(one.pid)
    where = "" if one.node is None else one.node[:6]
    return one.run, what, where, pid, one.state, memory, heard, ", ".join([*gpus, *facts])
