"""A Ray cluster of two raylets on this machine, for tests: small stores, no dashboard."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

STORE = 100 * 1024 * 1024


@contextmanager
def two_raylets(head_cpus: int = 1, other_cpus: int = 4) -> Iterator[Any]:
    """The cluster (`address`, `add_node`, `remove_node`). The process that joins it lives on the head."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    head = {"num_cpus": head_cpus, "include_dashboard": False, "object_store_memory": STORE}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(num_cpus=other_cpus, object_store_memory=STORE)
        yield cluster
    finally:
        cluster.shutdown()
