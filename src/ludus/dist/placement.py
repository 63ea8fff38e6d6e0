"""Where the processes of one run live in a Ray cluster: what `ludus train` asks this room for.

Trainer ranks are packed, for their links; engines are spread; tools live on nodes without GPUs where there are
some. Rank 0 is the process of `ludus train`: an actor holds its place on its node, and speaks for it.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ludus.core.failures import ConfigError
from ludus.core.generation import Engine
from ludus.core.messages import ToolSet
from ludus.dist.actors import HostedEnvs, HostSessions, RayHost, RewardHost, RunActor, hosted
from ludus.dist.cluster import Claim, RayCluster, cause_of, in_group, interface_of, load_ray, on_node
from ludus.dist.engines import RayReplica, WeightObjects
from ludus.engine import EngineConfig
from ludus.engine.replicas import ReplicaSettings
from ludus.envs.served import LOADER as ENV_LOADER
from ludus.tools.hosting import ToolReference
from ludus.tools.hosting.host import LOADER as TOOL_LOADER
from ludus.training.ranks.worker import spawn_rank

_SEAT_SECONDS = 60.0


class RayPlacement:
    """The places of a run."""

    def __init__(
        self,
        run: str,
        *,
        address: str | None,
        nodes: int | None,
        ranks: int,
        engines: int,
        tools: int,
        hosts: int,
        gpus: bool,
    ) -> None:
        """Join the cluster and reserve everything.

        Args:
            run: What `ludus cluster` calls it.
            address: "auto", "host:port", or "local" for a cluster of our own.
            nodes: How many nodes there must be.
            ranks: Processes that train, rank 0 among them.
            engines: Engines that sample; with none, rank 0 samples.
            tools: Actors of each host of tools, environments or rewards.
            hosts: How many such hosts there are.
            gpus: Whether ranks and engines have a GPU each.
        """
        each = 1.0 if gpus else 0.0
        self._rank = Claim("trainer rank", ranks, each)
        self._engine = Claim("engine", engines, each)
        self._tool = Claim("tool actor", tools)
        claims = [self._rank, self._engine, Claim(self._tool.role, tools * hosts)]
        self._hosts: list[RayHost | RewardHost] = []
        self.cluster = RayCluster(run, address, nodes, claims, has_weights=engines > 0)
        self.address = self.cluster.own_address
        self.interface = interface_of(self.address)
        try:
            self._seat = self._take_seat()
            others = Claim(self._rank.role, ranks - 1, each)
            self._ranks = self.cluster.reserve(others, "PACK") if others.count else None
            self._engines = self.cluster.reserve(self._engine, "SPREAD") if engines else None
        except BaseException:
            self.cluster.close()
            raise

    def _take_seat(self) -> Any:
        """Hold rank 0's place, with the GPU that is its own."""
        ray, claim = load_ray(), self._rank
        own = ray.get_runtime_context().get_node_id()
        seat = self.cluster.start(RunActor, "trainer", 0, claim, on_node(own))
        try:
            status = ray.get(seat.status.remote(), timeout=_SEAT_SECONDS)
        except ray.exceptions.GetTimeoutError:
            raise ConfigError(
                f"waited {_SEAT_SECONDS:g} seconds for a place for rank 0 on this node "
                f"({self.cluster.own_address}), which others hold: {claim}"
            ) from None
        ray.get(seat.tell.remote({"pid": os.getpid()}))
        if claim.gpus:
            # CUDA has looked at the environment already, so that the GPU is chosen by its number
            importlib.import_module("torch").cuda.set_device(int(status["gpu_ids"][0]))
            os.environ["LOCAL_RANK"] = str(status["gpu_ids"][0])
        return seat

    def launch(self, variables: Mapping[str, str]) -> RayRank:
        """Start a trainer rank on the node that was reserved for it."""
        rank = int(variables["RANK"])
        where = in_group(self._ranks, rank - 1)
        actor = self.cluster.start(RankActor, "trainer", rank, self._rank, where)
        return RayRank(self.cluster, actor, variables)

    def replicas(
        self, dtype: str, engine: EngineConfig, threads: int | None, hang_seconds: float
    ) -> list[Engine]:
        """The engines, not started yet: on a GPU each, or on the host."""
        device = "cuda:0" if self._engine.gpus else "cpu"  # Ray shows an actor its own GPU only
        settings = ReplicaSettings(device, dtype, engine, threads)
        weights = WeightObjects()
        return [
            RayReplica(
                number,
                settings,
                self.cluster,
                self._engine,
                self._engines,
                weights,
                hang_seconds=hang_seconds,
            )
            for number in range(self._engine.count)
        ]

    async def host_tools(self, references: Sequence[ToolReference]) -> ToolSet:
        """Tools, in actors."""
        return HostSessions(await self._host(references, TOOL_LOADER))

    async def host_envs(self, envs: Mapping[str, ToolReference]) -> dict[str, Any]:
        """Environments, in actors: what makes them, by name."""
        host = await self._host(list(envs.values()), ENV_LOADER)
        described = (await host.ask("envs", None, {}))["envs"]
        return {one["name"]: HostedEnvs(host, one) for one in described}

    async def _host(self, references: Sequence[ToolReference], loader: str) -> RayHost:
        host = RayHost(references, self._tool.count, loader=loader, cluster=self.cluster)
        self._hosts.append(host)
        await host.start()
        return host

    async def host_rewards(self, specs: Sequence[Any], rewards: Sequence[Any]) -> list[Any]:
        """Rewards, in actors that build them from their specs."""
        host = RewardHost(self.cluster, self._tool, specs)
        self._hosts.append(host)
        await host.start()
        return hosted(host, rewards)

    def report(self, phase: str, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Report the run's progress to `ludus cluster`; called after every step."""
        self._seat.tell.remote({"phase": phase, "step": step, "steps": total})

    async def close(self) -> None:
        """End everything that lives in the cluster."""
        try:
            for host in self._hosts:
                await host.stop()
        finally:
            self.cluster.close()


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
