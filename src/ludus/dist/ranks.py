"""Trainer ranks on the nodes of a cluster: each is a process of its own, held by an actor.

The actor starts the process as `ludus train` starts one on its own machine and waits for its end. The process
ends with the actor (its pipe closes), and the actor with the process that asked for it (Ray ends it), so no
rank outlives its run, whichever of the three is killed.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ludus.core.failures import ConfigError
from ludus.dist.actors import RunActor
from ludus.dist.cluster import RayCluster, cause_of, interface_of, load_ray
from ludus.training.ranks.processes import spawn_rank


class RankActor(RunActor):
    """One rank."""

    async def serve(self, variables: Mapping[str, str]) -> int:
        """Run the rank; its exit code."""
        if Path.cwd() != Path(self._folder):
            raise ConfigError(
                f"this node has no folder {self._folder}: every trainer rank writes its part of a checkpoint "
                "into the run's folder, which must be on storage that all nodes share"
            )
        address = load_ray().util.get_node_ip_address()
        interface = interface_of(address)
        if interface is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
        # Ray shows an actor its own GPU only, so that this is the first one
        process = spawn_rank({**variables, "LOCAL_RANK": "0"})
        await self.tell({"pid": process.pid})
        code: int = await asyncio.to_thread(process.wait)
        return code


class RayRank:
    """A rank as `ludus.training.ranks` knows processes."""

    def __init__(self, cluster: RayCluster, actor: Any, variables: Mapping[str, str]) -> None:
        self._cluster, self._actor = cluster, actor
        self._code = actor.serve.remote(dict(variables))
        self._how = ""

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        ray = load_ray()
        done, _ = ray.wait([self._code], timeout=timeout)
        if not done:
            raise subprocess.TimeoutExpired("a trainer rank", timeout or 0)
        try:
            code: int = ray.get(self._code)
        except ray.exceptions.RayTaskError as error:
            self._how = f"could not be started ({error.cause})"
            return 1
        except ray.exceptions.RayError as error:
            self._how = f"was lost with its Ray actor ({cause_of(error)})"
            return 1
        return code

    def kill(self) -> None:
        self._cluster.kill(self._actor)

    @property
    def how(self) -> str:
        """How it was lost, where that is more than an exit code."""
        return self._how
